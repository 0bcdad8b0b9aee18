"""One call of any of the three data collectives, from the patterns of all ranks to checked bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from conformance.oracle import Poisoned, check_output, misaligned, ordered_sum, poisoned, tensor_of
from conformance.plugin import World
from conformance.strategies import patterns

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
OPERATIONS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def inputs_of_all(operation: str, kind: str, n: int, world_size: int, dtype: str, seed: int = 0) -> list[np.ndarray]:
    """The input patterns of every rank: n elements, or n a rank where each gets a part of its own."""
    total = n if operation == "all_gather_into_tensor" else n * world_size
    return [patterns(kind, total, rank, seed, dtype=dtype) for rank in range(world_size)]


def wanted(operation: str, inputs: Sequence[np.ndarray], rank: int, op: str = "sum", factor: float = 1.0) -> np.ndarray:
    """What the call must leave on one rank."""
    if operation == "all_gather_into_tensor":
        return np.concatenate(inputs)
    n = len(inputs[0]) // len(inputs)
    parts = [mine[rank * n : (rank + 1) * n] for mine in inputs]
    return np.concatenate(parts) if operation == "all_to_all_single" else ordered_sum(parts, op, factor)


class Issued:
    """A call under way: wait for it with `finish`, which checks every bit of the output and the guards around it."""

    def __init__(self, work: Any, out: Poisoned, want: np.ndarray, what: str, kept: torch.Tensor) -> None:
        self.work, self.out, self._want, self._what, self.kept = work, out, want, what, kept

    def finish(self) -> None:
        """Wait, and check."""
        if self.work is not None:
            self.work.wait()
        self.check()

    def check(self) -> None:
        """Check without waiting: the caller knows by other means that the call is done."""
        check_output(self.out, self._want, self._what)


def issue(
    world: World,
    communicator: Any,
    operation: str,
    inputs: Sequence[np.ndarray],
    dtype: str,
    *,
    group_rank: int | None = None,
    async_op: bool = False,
    offset: int = 1,
    what: str = "",
) -> Issued:
    """Call the operation with this rank's input, at a misaligned place, into a poisoned output."""
    rank = world.rank if group_rank is None else group_rank
    want = wanted(operation, inputs, rank)
    mine = misaligned(tensor_of(inputs[rank], DTYPES[dtype], world.device), offset)
    out = poisoned(len(want), DTYPES[dtype], world.device, offset)
    call: Callable[..., Any] = getattr(communicator, operation)
    work = call(out.tensor, mine, async_op=async_op)
    title = f"{operation} of {len(inputs[rank])} {dtype} {what} on rank {world.rank}"
    return Issued(work, out, want, title, mine)


def exercise(
    world: World, communicator: Any, operation: str, inputs: Sequence[np.ndarray], dtype: str, **how: Any
) -> None:
    """Issue and finish."""
    issue(world, communicator, operation, inputs, dtype, **how).finish()


def needs(world: World, operation: str) -> None:
    """UNSUPPORTED unless the subject has the operation and, for a reduction, claims the ordered sum."""
    world.require(operations=operation)
    if operation == "reduce_scatter_tensor":
        world.require("ordered_sum")
