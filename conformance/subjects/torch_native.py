"""The control: torch.distributed itself, uncompressed. It claims only what it really does."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.subject import OPERATIONS, Capabilities, PremulSum

DTYPES = ("bfloat16", "float32", "float16", "float64", "int32", "int64", "uint8")

# 2.13 renamed these two and warns about the old names; 2.11 and 2.12 have the old names only.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class NativeDecision:
    """Nothing was decided."""

    mode: str = "native"
    reason: str = "torch.distributed without compression"


class NativeCommunicator:
    """torch.distributed's collectives on one group, under the names of conformance.subject.Communicator."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.last_decision: NativeDecision | None = None
        self._calls = 0
        self._bytes = 0

    def _count(self, n_bytes: int) -> None:
        self.last_decision = NativeDecision()
        self._calls += 1
        self._bytes += n_bytes

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Any:
        self._count(input.nbytes)
        return _all_gather(output, input, group=self.group, async_op=async_op)

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False
    ) -> Any:
        self._count(input.nbytes)
        return _reduce_scatter(output, input, op=_torch_op(op), group=self.group, async_op=async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        async_op: bool = False,
    ) -> Any:
        self._count(input.nbytes)
        return dist.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, group=self.group, async_op=async_op
        )

    def all_gather(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, async_op: bool = False) -> Any:
        self._count(tensor.nbytes)
        return dist.all_gather(tensor_list, tensor, group=self.group, async_op=async_op)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False) -> Any:
        self._count(tensor.nbytes)
        return dist.all_reduce(tensor, op=_torch_op(op), group=self.group, async_op=async_op)

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool = False) -> Any:
        self._count(tensor.nbytes)
        return dist.broadcast(tensor, src, group=self.group, async_op=async_op)

    def scatter(
        self, tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None, src: int, async_op: bool = False
    ) -> Any:
        self._count(tensor.nbytes)
        return dist.scatter(tensor, scatter_list, src, group=self.group, async_op=async_op)

    def gather(
        self, tensor: torch.Tensor, gather_list: list[torch.Tensor] | None, dst: int, async_op: bool = False
    ) -> Any:
        self._count(tensor.nbytes)
        return dist.gather(tensor, gather_list, dst, group=self.group, async_op=async_op)

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        self._count(tensor.nbytes)
        dist.send(tensor, dst, group=self.group, tag=tag)

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> int:
        self._count(0)
        return int(dist.recv(tensor, src, group=self.group, tag=tag))

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Any:
        self._count(tensor.nbytes)
        return dist.isend(tensor, dst, group=self.group, tag=tag)

    def irecv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> Any:
        self._count(0)
        return dist.irecv(tensor, src, group=self.group, tag=tag)

    def batch_isend_irecv(self, p2p_op_list: list[dist.P2POp]) -> list[Any]:
        self._count(sum(op.tensor.nbytes for op in p2p_op_list if op.op is dist.isend))
        return list(dist.batch_isend_irecv(p2p_op_list))

    def all_gather_object(self, object_list: list[Any], obj: Any) -> None:
        dist.all_gather_object(object_list, obj, group=self.group)

    def broadcast_object_list(self, object_list: list[Any], src: int) -> None:
        dist.broadcast_object_list(object_list, src, group=self.group)

    def gather_object(self, obj: Any, object_gather_list: list[Any] | None, dst: int) -> None:
        dist.gather_object(obj, object_gather_list, dst, group=self.group)

    def scatter_object_list(self, output_list: list[Any], input_list: list[Any] | None, src: int) -> None:
        dist.scatter_object_list(output_list, input_list, src, group=self.group)

    def barrier(self, async_op: bool = False) -> Any:
        self._count(0)
        return dist.barrier(group=self.group, async_op=async_op)

    def stats(self) -> dict[str, Any]:
        return {"calls": self._calls, "raw_bytes": self._bytes, "sent_bytes": self._bytes}

    def close(self) -> None:
        """Nothing is held."""


def _torch_op(op: Any) -> Any:
    return dist._make_nccl_premul_sum(op.factor) if isinstance(op, PremulSum) else op  # type: ignore[attr-defined]


class TorchNative:
    """torch.distributed on whatever backend the group has."""

    name = "torch_native"

    def __init__(self) -> None:
        ops = {"sum", *(name for name, op in _PROBED.items() if _gloo_has(op))}
        self.capabilities = Capabilities(
            operations=OPERATIONS,
            dtypes=frozenset(DTYPES),
            reduce_ops=frozenset(ops),
            modes=("native",),
            decides=True,
            independent=False,  # all of them call on the one group
            stacked_gather=False,  # gloo of torch 2.13 wants the concatenated shape
            completion=False,  # the Work of gloo's reduce_scatter stays incomplete after wait(), in torch 2.13
        )

    def communicator(self, group: dist.ProcessGroup, *, mode: str = "", timeout_s: float = 20.0) -> NativeCommunicator:
        if mode not in ("", "native"):
            raise ValueError(f"torch_native: mode must be 'native', got {mode!r}")
        return NativeCommunicator(group)

    def codec(self) -> None:
        return None


_PROBED = {"avg": dist.ReduceOp.AVG, "premul_sum": PremulSum(0.5)}


def _gloo_has(op: Any) -> bool:
    """Whether this torch's gloo reduces with op, asked of a group of one rank."""
    store = dist.HashStore()
    group = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))
    options = dist.ReduceScatterOptions()
    try:
        options.reduceOp = _torch_op(op)
        one = torch.ones(1)
        group._reduce_scatter_base(torch.zeros(1), one, options).wait()
    except (RuntimeError, ValueError, AttributeError):
        return False
    return True


def subject() -> TorchNative:
    return TorchNative()
