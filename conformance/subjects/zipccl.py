"""Our own implementation, as the judge sees it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import zipccl_core
from conformance.subject import OPERATIONS, REDUCE_OPS, Capabilities, PremulSum
from zipccl_core import Codebook, Communicator, Policy
from zipccl_core.collectives import exchange

MODES: dict[str, dict[str, Any]] = {
    "always": {"compress": "always"},
    "always_gaussian": {"compress": "always", "codebook": "gaussian", "prefix_percent": 0.0},
    "never": {"compress": "never"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "fixed_codebook": {"compress": "always", "codebook": Codebook.gaussian(0.02)},
    "whole_prefix": {"compress": "always", "codebook": Codebook.gaussian(0.02), "prefix_percent": 100.0},
    "no_prefix": {"compress": "always", "codebook": Codebook.gaussian(0.02), "prefix_percent": 0.0},
    "auto": {"compress": "auto", "min_bytes": 4096},
    "late": {"compress": "always", "verify": "late"},
}


def policy_of(mode: str, timeout_s: float, verify: str = "auto") -> Policy:
    """The policy of a mode or variant, "always" if it is empty; verify is for those that say nothing of it."""
    fields: dict[str, Any] = {"verify": verify, **(MODES | VARIANTS)[mode or "always"]}
    return Policy(timeout_s=timeout_s, **fields)


class ZipcclCommunicator:
    """A zipccl_core.Communicator that takes the judge's PremulSum and gives totals in stats()."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.all_gather_into_tensor = inner.all_gather_into_tensor
        self.all_to_all_single = inner.all_to_all_single
        self.all_gather = inner.all_gather
        self.broadcast = inner.broadcast
        self.scatter = inner.scatter
        self.gather = inner.gather
        self.send = inner.send
        self.recv = inner.recv
        self.isend = inner.isend
        self.irecv = inner.irecv
        self.batch_isend_irecv = inner.batch_isend_irecv
        self.all_gather_object = inner.all_gather_object
        self.broadcast_object_list = inner.broadcast_object_list
        self.gather_object = inner.gather_object
        self.scatter_object_list = inner.scatter_object_list
        self.barrier = inner.barrier
        self.close = inner.close

    @property
    def last_decision(self) -> Any:
        return self.inner.last_decision

    @property
    def last_arrivals(self) -> list[tuple[int, float]]:
        return self.inner.last_arrivals

    @property
    def arrived_last(self) -> dict[int, int]:
        return self.inner.arrived_last

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False
    ) -> Any:
        return self.inner.reduce_scatter_tensor(output, input, torch_op(op), async_op=async_op)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False) -> Any:
        return self.inner.all_reduce(tensor, torch_op(op), async_op=async_op)

    def stats(self) -> dict[str, Any]:
        operations = {name: books for name, books in self.inner.stats().items() if name != "device_buffers"}
        totals: dict[str, Any] = {
            key: sum(books[key] for books in operations.values())
            for key in ("calls", "raw_bytes", "sent_bytes", "coded_words", "escapes", "phase_two_messages")
        }
        return {**totals, "operations": operations}


def torch_op(op: Any) -> Any:
    """torch's own op for the judge's PremulSum; any other op unchanged."""
    if isinstance(op, PremulSum):
        return dist._make_nccl_premul_sum(op.factor)
    return op


class ZipcclCodec:
    """zipccl_core's encode and decode of CPU tensors."""

    def encode(self, words: torch.Tensor, codebook_exponents: tuple[int, ...]) -> torch.Tensor:
        buffer = zipccl_core.encode(words, Codebook.given(codebook_exponents))
        return buffer[: zipccl_core.read_header(buffer).frame_bytes]

    def decode(self, frame: torch.Tensor) -> torch.Tensor:
        return zipccl_core.decode(frame)


class ZipcclSubject:
    """zipccl_core over gloo."""

    name = "zipccl"
    capabilities = Capabilities(
        operations=OPERATIONS,
        dtypes=frozenset({"bfloat16", "float32", "float16", "float64", "int32", "int64", "uint8"}),
        coded_dtypes=frozenset({"bfloat16", "float32"}),
        reduce_ops=REDUCE_OPS,
        modes=tuple(MODES),
        variants=tuple(VARIANTS),
        codec=True,
        ordered_sum=True,
        checks_arguments=True,
        verifies=True,
        any_layout=True,
        decides=True,
        names_stragglers=True,
        versions={"frame format": str(zipccl_core.FORMAT_VERSION)},
    )

    def communicator(self, group: dist.ProcessGroup, *, mode: str = "", timeout_s: float = 20.0) -> ZipcclCommunicator:
        return ZipcclCommunicator(Communicator(group, policy_of(mode, timeout_s)))

    def codec(self) -> ZipcclCodec:
        return ZipcclCodec()


def communicator_with_seam(
    group: dist.ProcessGroup,
    seam: Any,
    *,
    sigma: float | None = None,
    format_version: int | None = None,
    **policy: Any,
) -> ZipcclCommunicator:
    """A Communicator whose every phase is shown to `seam` (zipccl_core.collectives.seam.Seam); for faults/.

    Args:
        sigma: of a Gaussian codebook for all messages; as the policy says if None.
        format_version: what this rank says its frame version is; the true one if None.
        policy: fields of Policy.
    """
    if sigma is not None:
        policy["codebook"] = Codebook.gaussian(sigma)
    with mock.patch.object(exchange, "FORMAT_VERSION", format_version or exchange.FORMAT_VERSION):
        inner = Communicator(group, Policy(**policy))
    inner._exchange.seam = seam
    return ZipcclCommunicator(inner)


def subject() -> ZipcclSubject:
    """Named by --subject zipccl."""
    return ZipcclSubject()
