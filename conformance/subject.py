"""What the judge sees of an implementation: a Subject, what it claims, and its two faces. Imports nothing of ours.

An implementation is judged by writing one module with a callable `subject()` that returns a `Subject`, and naming it:
`pytest conformance/ --subject my_package.my_module:subject`. Nothing here is a base class to inherit from; any object
of this shape will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

OPERATIONS = frozenset(
    (
        *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "barrier"),
        *("all_gather", "all_reduce", "broadcast", "scatter", "gather"),
        *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
        *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    )
)
REDUCE_OPS = frozenset({"sum", "avg", "premul_sum"})


class UnknownCapability(LookupError):
    """The suite asked for a capability that no subject can have: the suite is wrong, and not the subject."""


@dataclass(frozen=True)
class PremulSum:
    """The reduction "multiply by factor, then sum": term = fl32(x · factor), factor as a float32.

    Passed as `op=` to reduce_scatter_tensor and all_reduce; a subject's adapter translates it to its own.
    """

    factor: float


@dataclass(frozen=True)
class Capabilities:
    """What a subject claims. Every claim is tested; what is not claimed is UNSUPPORTED, and not judged.

    Attributes:
        operations: method names of its Communicator, of OPERATIONS. A Communicator needs no other methods of these.
        dtypes: names of the dtypes it carries ("bfloat16", "float32", "int32", ...), compressed or not.
        coded_dtypes: those of them it may compress; every other one must be decided "native".
        reduce_ops: of REDUCE_OPS.
        modes: the named configurations that `Subject.communicator(mode=...)` takes; the first is the default.
        variants: further ones it takes, whose results must be the same: other codebooks, another cut of messages. Few
            tests run them, `modes` are run by all.
        codec: `Subject.codec()` returns a Codec.
        ordered_sum: reductions equal the ordered sum of conformance/oracle.py bit for bit, at every world size and in
            every mode.
        checks_arguments: what is wrong in one rank's call (dtype, size, splits, layout), and what two ranks disagree
            on, becomes one error of one class on all ranks of the group within the timeout, without a hang and without
            data.
        verifies: what arrives is checked end to end: a changed word is an error, never a result.
        any_layout: dense tensors that are not contiguous give the right result, or an error before anything is sent.
        decides: `last_decision` and `stats()` exist.
        independent: Communicators on one group do not wait for each other: calls of two of them may be issued in
            another order on each rank.
        stacked_gather: all_gather_into_tensor takes an output of [world size, *input.shape] too.
        completion: once `wait()` has returned, `Work.is_completed()` is True and a second `wait()` returns at once.
        gpu: its Communicators work on a GPU whichever device the judge's tensors are on: each rank is given one, and
            its groups NCCL if no two ranks share one.
        names_stragglers: a rank that does not come in time is an error of the class RankTimeout, on all ranks of the
            group; the last "rank N" or "ranks [N, …]" of its text is who was late. Of one that came, `last_arrivals`
            tells how late it was.
        versions: what the report's header shows: packages, formats, environment.
    """

    operations: frozenset[str]
    dtypes: frozenset[str]
    coded_dtypes: frozenset[str] = frozenset()
    reduce_ops: frozenset[str] = frozenset({"sum"})
    modes: tuple[str, ...] = ("native",)
    variants: tuple[str, ...] = ()
    codec: bool = False
    ordered_sum: bool = False
    checks_arguments: bool = False
    verifies: bool = False
    any_layout: bool = False
    decides: bool = False
    independent: bool = True
    stacked_gather: bool = True
    completion: bool = True
    gpu: bool = False
    names_stragglers: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)

    def missing(self, *flags: str, **members: str | Sequence[str]) -> str:
        """What of the wanted the subject does not claim, in words; "" if it claims everything.

        Args:
            flags: names of boolean capabilities: missing("ordered_sum").
            members: names of set-like capabilities and one wanted member, or several:
                missing(dtypes="bfloat16", operations=("barrier",)).

        Raises:
            UnknownCapability: no capability has that name or is of that kind.
        """
        names = {f.name for f in fields(self)}
        for flag in flags:
            if flag not in names or not isinstance(getattr(self, flag), bool):
                raise UnknownCapability(f"requires: {flag!r} is not a yes-or-no capability; see Capabilities")
            if not getattr(self, flag):
                return f"subject does not claim {flag}"
        for name, wanted in members.items():
            have = getattr(self, name, None) if name in names else None
            if not isinstance(have, (frozenset, tuple)):
                raise UnknownCapability(f"requires: {name!r} is not a capability with members; see Capabilities")
            for member in (wanted,) if isinstance(wanted, str) else wanted:
                if member not in have:
                    return f"subject does not claim {member} among its {name} ({', '.join(sorted(have)) or 'none'})"
        return ""


@runtime_checkable
class Work(Protocol):
    """What an operation with async_op=True returns."""

    def wait(self) -> Any:
        """Block until the output may be read; raises what went wrong."""

    def is_completed(self) -> bool:
        """True once wait() would not block."""


class Decision(Protocol):
    """What was done with the last operation, and why."""

    mode: str
    """"compressed", "raw" (our exchange, uncompressed) or "native" (torch's own collective)."""
    reason: str


class Communicator(Protocol):
    """Collectives on one group, with torch's names, argument order and meaning. Made and closed collectively.

    src and dst are global ranks. Methods that `Capabilities.operations` does not name may be missing.

    Attributes:
        last_decision: on the latest data call; None before the first.
        last_arrivals: (rank of the group, microseconds after the first) in the order in which the ranks came to the
            latest finished collective. Only if names_stragglers is claimed.
        arrived_last: rank of the group → finished collectives to which it came last. Only if names_stragglers.
    """

    last_decision: Decision | None
    last_arrivals: Sequence[tuple[int, float]]
    arrived_last: Mapping[int, int]

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Work | None:
        """output = the inputs of all ranks in rank order."""

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: dist.ReduceOp.RedOpType | PremulSum = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """output = shard `rank` of the sum over ranks of input."""

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Piece j of the input goes to rank j; piece i of the output comes from rank i. Splits count rows (dim 0)."""

    def all_gather(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, async_op: bool = False) -> Work | None:
        """tensor_list[r] = the tensor of rank r."""

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: dist.ReduceOp.RedOpType | PremulSum = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """tensor = the sum over ranks of tensor, in place."""

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool = False) -> Work | None:
        """tensor = the tensor of src."""

    def scatter(
        self, tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None, src: int, async_op: bool = False
    ) -> Work | None:
        """tensor = src's scatter_list[rank]; the list is None on other ranks."""

    def gather(
        self, tensor: torch.Tensor, gather_list: list[torch.Tensor] | None, dst: int, async_op: bool = False
    ) -> Work | None:
        """On dst gather_list[r] = the tensor of rank r; the list is None on other ranks."""

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Returns once the tensor may be changed. One sender's messages of one tag arrive in order."""

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> int:
        """Returns src once the tensor holds its next message of this tag."""

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Work:
        """send that returns at once."""

    def irecv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> Work:
        """recv that returns at once."""

    def batch_isend_irecv(self, p2p_op_list: list[dist.P2POp]) -> list[Work]:
        """All of torch's P2POps (of dist.isend and dist.irecv) together."""

    def all_gather_object(self, object_list: list[Any], obj: Any) -> None:
        """object_list[r] = obj of rank r."""

    def broadcast_object_list(self, object_list: list[Any], src: int) -> None:
        """object_list = that of src."""

    def gather_object(self, obj: Any, object_gather_list: list[Any] | None, dst: int) -> None:
        """On dst object_gather_list[r] = obj of rank r."""

    def scatter_object_list(self, output_list: list[Any], input_list: list[Any] | None, src: int) -> None:
        """output_list[0] = src's input_list[rank]."""

    def barrier(self, async_op: bool = False) -> Work | None:
        """Returns once every rank has called it."""

    def stats(self) -> dict[str, Any]:
        """Counters since it was made. At least "calls", "raw_bytes" and "sent_bytes" (both of this rank's payloads)."""

    def close(self) -> None:
        """Give back what it holds. The group remains the caller's. A second close does nothing."""


class Codec(Protocol):
    """The frame format alone, without ranks. Errors are exceptions whose class name is the kind (FORMAT.md 8)."""

    def encode(self, words: torch.Tensor, codebook_exponents: tuple[int, ...]) -> torch.Tensor:
        """The frame of [n] bfloat16 or float32 words: [frame_bytes] uint8, exactly the frame and nothing beyond it."""

    def decode(self, frame: torch.Tensor) -> torch.Tensor:
        """The words of the frame at the start of [any] uint8: [n] of the frame's dtype."""


@runtime_checkable
class Subject(Protocol):
    """An implementation under judgement."""

    name: str
    capabilities: Capabilities

    def communicator(self, group: dist.ProcessGroup, *, mode: str = "", timeout_s: float = 20.0) -> Communicator:
        """A Communicator on a group of gloo (CPU) or NCCL; collective. mode: of modes or variants, "" the first mode.

        No call of it may block longer than timeout_s beyond what its peers need.
        """

    def codec(self) -> Codec | None:
        """The codec, or None if the subject has no frame format."""
