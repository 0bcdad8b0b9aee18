"""The sum: rank order, float32, one rounding (docs/DESIGN.md, "The sum").

The same bits on every machine and whichever way the words came. Runs on one thread with NumPy, because torch's own
kernels may fuse, flush subnormals to zero, or choose an order; the calling thread must not flush subnormals either
(`torch.set_flush_denormal(False)`; the mode belongs to the thread and is inherited when one is started).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InvalidArgument

CHUNK_WORDS = 1 << 15
NAN_BFLOAT16 = 0x7FC0
NAN_FLOAT32 = 0x7FC00000
ORDERED_OPS = ("sum", "avg", "premul_sum")


@dataclass(frozen=True)
class ReduceSpec:
    """A reduction as ranks compare it.

    Attributes:
        name: "sum", "avg", "premul_sum", or another of torch's in lower case.
        factor: the factor of premul_sum, None otherwise.
        torch_op: what the caller gave, for the backend's own sum.
    """

    name: str
    factor: np.float32 | None = None
    torch_op: Any = None

    @property
    def ordered(self) -> bool:
        """Whether the ordered sum knows it."""
        return self.name in ORDERED_OPS

    @property
    def factor_bits(self) -> int:
        """The factor's float32 pattern for premul_sum, else 0."""
        return 0 if self.factor is None else int(self.factor.view(np.uint32))


def reduce_spec(op: Any) -> ReduceSpec:
    """What a torch ReduceOp asks for; PREMUL_SUM with its factor as float32.

    Raises:
        InvalidArgument: not a ReduceOp, or a factor that is not one number.
    """
    kind, factor = op, None
    if type(op) is dist.ReduceOp:  # an op with a factor; the plain ones are of the enumeration RedOpType
        kind, factor = op.__getstate__()  # type: ignore[misc]
    if type(kind) is not dist.ReduceOp.RedOpType:
        raise InvalidArgument(f"op must be a torch.distributed.ReduceOp, got {op!r}")
    if kind.name != "PREMUL_SUM":
        return ReduceSpec(kind.name.lower(), torch_op=op)
    try:
        return ReduceSpec("premul_sum", np.float32(factor), op)
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(f"PREMUL_SUM needs one number as its factor, got {factor!r}") from exc


def _as_float32(words: NDArray[Any]) -> NDArray[np.float32]:
    if words.dtype == np.uint32:
        return words.view(np.float32)
    return (words.astype(np.uint32) << 16).view(np.float32)


def _round_to_words(acc: NDArray[np.float32], out: NDArray[Any]) -> None:
    bits = acc.view(np.uint32)
    nan = np.isnan(acc)
    if out.dtype == np.uint32:
        np.copyto(out, bits)
        out[nan] = NAN_FLOAT32
        return
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16  # to nearest, ties to even
    np.copyto(out, rounded.astype(np.uint16))
    out[nan] = NAN_BFLOAT16


def ordered_sum(terms: Sequence[NDArray[Any]], spec: ReduceSpec, out: NDArray[Any]) -> None:
    """Sum the words of all ranks in rank order in float32, scale, round once to nearest even, and write.

    acc is the term of rank 0 itself, not 0 + it (−0 stays −0); then acc = fl32(acc + term) for ranks 1, 2, …
    premul_sum: term = fl32(x·factor). avg: fl32(acc ÷ number of ranks). Every NaN is written as 0x7FC0 (0x7FC00000).

    Args:
        terms: one [m] uint16 (bfloat16) or uint32 (float32) array a rank, in rank order.
        spec: an ordered one.
        out: [m], dtype of the terms; may be one of them.
    """
    with np.errstate(all="ignore"):
        for begin in range(0, len(out), CHUNK_WORDS):
            chunk = slice(begin, begin + CHUNK_WORDS)
            values = (_as_float32(term[chunk]) for term in terms)
            if spec.factor is not None:
                values = (value * spec.factor for value in values)
            acc = np.array(next(values))
            for value in values:
                acc += value
            if spec.name == "avg":
                acc /= np.float32(len(terms))
            _round_to_words(acc, out[chunk])


def reduce_scatter_native(group: Any, output: Tensor, input: Tensor, spec: ReduceSpec, timeout: timedelta) -> None:
    """The backend's own reduce-scatter, on a process group's backend object.

    Raises:
        RuntimeError: the backend refuses op or dtype, or a transfer failed.
    """
    options = dist.ReduceScatterOptions()
    options.reduceOp, options.timeout = spec.torch_op, timeout
    # The backend's method was renamed in torch 2.13; a build has one name or both.
    method = getattr(group, "_reduce_scatter_base", None) or group.reduce_scatter_single
    method(output, input, options).wait(timeout)


def all_reduce_native(group: Any, tensor: Tensor, spec: ReduceSpec, timeout: timedelta) -> None:
    """The backend's own all-reduce in place; raises as reduce_scatter_native."""
    options = dist.AllreduceOptions()
    options.reduceOp, options.timeout = spec.torch_op, timeout
    group.allreduce([tensor], options).wait(timeout)
