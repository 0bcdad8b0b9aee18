"""One call of any of the data operations, from the patterns of all ranks to checked bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from conformance.oracle import Poisoned, check_output, misaligned, ordered_sum, poisoned, tensor_of
from conformance.plugin import World
from conformance.strategies import patterns

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
OPERATIONS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
FURTHER = ("all_gather", "all_reduce", "broadcast", "scatter", "gather", "batch_isend_irecv")
"""The other data operations; batch_isend_irecv is exercised as a ring: to the next rank, from the one before."""

REDUCTIONS = ("reduce_scatter_tensor", "all_reduce")
ROOTED = ("broadcast", "scatter", "gather")
IN_PARTS = ("reduce_scatter_tensor", "all_to_all_single", "scatter")
"""Operations whose input is one part a rank."""


class Part:
    """A subgroup seen as a world of its own, by its members: what `issue` and its like need of a World.

    Args:
        members: global ranks, in the group's order.
        group: of `World.subgroup(members)`.
    """

    def __init__(self, world: World, members: Sequence[int], group: dist.ProcessGroup) -> None:
        self.members, self.group, self.device = list(members), group, world.device
        self.rank, self.world_size = self.members.index(world.rank), len(self.members)


def inputs_of_all(operation: str, kind: str, n: int, world_size: int, dtype: str, seed: int = 0) -> list[np.ndarray]:
    """The input patterns of every rank: n elements, or n a rank where each gets a part of its own."""
    total = n * world_size if operation in IN_PARTS else n
    return [patterns(kind, total, rank, seed, dtype=dtype) for rank in range(world_size)]


def wanted(
    operation: str, inputs: Sequence[np.ndarray], rank: int, op: str = "sum", factor: float = 1.0, root: int = 0
) -> np.ndarray:
    """What the call must leave on one rank, all its outputs one behind the other; root is a rank of the group."""
    if operation in ("all_gather_into_tensor", "all_gather"):
        return np.concatenate(inputs)
    if operation == "gather":
        return np.concatenate(inputs) if rank == root else inputs[rank][:0]
    if operation == "broadcast":
        return inputs[root]
    if operation == "batch_isend_irecv":
        return inputs[rank - 1] if len(inputs) > 1 else inputs[rank][:0]
    if operation == "all_reduce":
        return ordered_sum(inputs, op, factor)
    n = len(inputs[0]) // len(inputs)
    parts = [mine[rank * n : (rank + 1) * n] for mine in inputs]
    if operation == "scatter":
        return parts[root]
    return np.concatenate(parts) if operation == "all_to_all_single" else ordered_sum(parts, op, factor)


class AllOf:
    """Several Works as one."""

    def __init__(self, works: Iterable[Any]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class Issued:
    """A call under way: wait for it with `finish`, which checks every bit of the outputs and the guards around them.

    Attributes:
        work: what the call returned.
        outs: its outputs, in order.
        kept: its inputs; torch keeps them as long as the call needs them.
    """

    def __init__(self, work: Any, outs: list[Poisoned], want: np.ndarray, what: str, kept: Any) -> None:
        self.work, self.outs, self._want, self._what, self.kept = work, outs, want, what, kept

    def finish(self) -> None:
        """Wait, and check."""
        if self.work is not None:
            self.work.wait()
        self.check()

    def check_dropped(self) -> None:
        """Check a call whose Work was dropped, behind a barrier, where the ranks have met and their devices may not."""
        if self.outs:
            synchronize(self.outs[0].tensor.device)
        self.check()

    def check(self) -> None:
        """Check without waiting: the caller knows by other means that the call is done."""
        begin = 0
        for i, out in enumerate(self.outs):
            n = out.tensor.numel()
            name = f"{self._what}, output {i}" if len(self.outs) > 1 else self._what
            check_output(out, self._want[begin : begin + n], name)
            begin += n


def synchronize(device: torch.device) -> None:
    """The host waits for the whole device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def loaded(array: np.ndarray, dtype: torch.dtype, device: torch.device, offset: int = 1) -> Poisoned:
    """A tensor between guards with these bits in it, for calls in place."""
    out = poisoned(len(array), dtype, device, offset)
    if len(array):
        out.tensor.view(torch.uint8).copy_(tensor_of(array, dtype, device).view(torch.uint8))
    return out


def issue(
    world: World | Part,
    communicator: Any,
    operation: str,
    inputs: Sequence[np.ndarray],
    dtype: str,
    *,
    async_op: bool = False,
    offset: int = 1,
    root: int = 0,
    op: Any = None,
    how: tuple[str, float] = ("sum", 1.0),
    what: str = "",
) -> Issued:
    """Call the operation with this rank's input, at a misaligned place, into poisoned outputs.

    Args:
        world: whose ranks the communicator joins.
        inputs: of all ranks (`inputs_of_all`).
        dtype: torch's name of it.
        offset: elements by which tensors are misaligned; those of a list by as many more as their number.
        root: src or dst, a rank of the group.
        op, how: a reduction as the subject takes it, and (name, factor) as the oracle does.
    """
    rank, size, device, kind = world.rank, world.world_size, world.device, getattr(torch, dtype)
    if operation in ROOTED:
        root %= size
    want = wanted(operation, inputs, rank, *how, root=root)
    array = inputs[rank]
    members = getattr(world, "members", range(size))
    title = f"{operation} of {len(array)} {dtype} {what} on rank {rank}"
    call: Callable[..., Any] = getattr(communicator, operation)
    options: dict[str, Any] = {"async_op": async_op} if op is None else {"async_op": async_op, "op": op}

    def given(part: np.ndarray, k: int = 0) -> torch.Tensor:
        return misaligned(tensor_of(part, kind, device), (offset + k) % 8)

    def outputs(count: int) -> list[Poisoned]:
        return [poisoned(len(want) // count, kind, device, (offset + k) % 8) for k in range(count)]

    work: Any
    if operation in OPERATIONS:
        outs, kept = outputs(1), given(array)
        work = call(outs[0].tensor, kept, **options)
    elif operation == "all_gather":
        outs, kept = outputs(size), given(array)
        work = call([out.tensor for out in outs], kept, **options)
    elif operation == "all_reduce":
        outs, kept = [loaded(array, kind, device, offset)], None
        work = call(outs[0].tensor, **options)
    elif operation == "broadcast":
        outs, kept = [loaded(array, kind, device, offset)] if rank == root else outputs(1), None
        work = call(outs[0].tensor, src=members[root], **options)
    elif operation == "scatter":
        parts = [given(part, k) for k, part in enumerate(np.split(array, size))] if rank == root else None
        outs, kept = outputs(1), parts
        work = call(outs[0].tensor, parts, src=members[root], **options)
    elif operation == "gather":
        outs, kept = outputs(size) if rank == root else [], given(array)
        work = call(kept, [out.tensor for out in outs] or None, dst=members[root], **options)
    else:
        outs, kept = outputs(1) if size > 1 else [], given(array)
        ring = []
        if size > 1:
            ring.append(dist.P2POp(dist.isend, kept, members[(rank + 1) % size], world.group))
            ring.append(dist.P2POp(dist.irecv, outs[0].tensor, members[rank - 1], world.group))
        work = AllOf(call(ring) if ring else [])
        if not async_op:
            work = work.wait()
    return Issued(work, outs, want, title, kept)


def exercise(
    world: World | Part, communicator: Any, operation: str, inputs: Sequence[np.ndarray], dtype: str, **how: Any
) -> None:
    """Issue and finish."""
    issue(world, communicator, operation, inputs, dtype, **how).finish()


def needs(world: World, operation: str) -> None:
    """UNSUPPORTED unless the subject has the operation and, for a reduction, claims the ordered sum."""
    world.require(operations=operation)
    if operation in REDUCTIONS:
        world.require("ordered_sum")


def supported(world: World, operations: Sequence[str]) -> list[str]:
    """Those of the operations that `needs` would let pass; UNSUPPORTED if none."""
    claims = world.subject.capabilities
    found = [o for o in operations if o in claims.operations and (o not in REDUCTIONS or claims.ordered_sum)]
    if not found:
        needs(world, operations[0])
    return found


def claimed(world: World, operations: Sequence[str]) -> list[str]:
    """Those of the operations that the subject claims; UNSUPPORTED if none. For tests that need no order of a sum."""
    found = [o for o in operations if o in world.subject.capabilities.operations]
    if not found:
        world.require(operations=operations[0])
    return found


def meet(world: World, comm: Any) -> None:
    """At a barrier of the Communicator if the subject claims that, else at the judge's own."""
    if "barrier" in world.subject.capabilities.operations:
        comm.barrier()
    else:
        world.barrier_store("a barrier")


def configurations(world: World) -> tuple[str, ...]:
    """The subject's modes and variants."""
    return (*world.subject.capabilities.modes, *world.subject.capabilities.variants)


# ------------------------------------------------------------------------------------------------- what must fail


def errors_of_all(world: World, call: Callable[[], Any]) -> list[tuple[str, bool, str]]:
    """(class name, is a ValueError, text) of what call raised on every rank; ("", False, "") where nothing was."""
    mine = ("", False, "")
    try:
        call()
    except Exception as e:
        mine = (type(e).__name__, isinstance(e, ValueError), str(e))
    return world.exchange(mine)


def refused(world: World, wrong: str, chosen: Callable[[World, Any], Any], comm: Any) -> None:
    """The call is one ValueError on every rank, at once."""
    began = time.monotonic()
    errors = errors_of_all(world, lambda: chosen(world, comm))
    assert all(is_value_error for _, is_value_error, _ in errors), f"{wrong}: wanted a ValueError everywhere: {errors}"
    assert len({name for name, _, _ in errors}) == 1, f"{wrong}: the ranks raised different errors: {errors}"
    assert all(text for _, _, text in errors), f"{wrong}: an error without a text: {errors}"
    took = time.monotonic() - began
    assert took < 5, f"{wrong}: a wrong argument is seen at once, this took {took:.1f} s"


def disagreed(world: World, what: str, call: Callable[[], Any]) -> None:
    """The call is one error of one class on every rank."""
    errors = errors_of_all(world, call)
    assert all(name for name, _, _ in errors), f"{what}: some rank saw no error: {errors}"
    assert len({name for name, _, _ in errors}) == 1, f"{what}: the ranks raised different errors: {errors}"
