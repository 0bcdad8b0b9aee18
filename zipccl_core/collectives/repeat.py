"""What is remembered of calls: one with tensors like those of an earlier call is not looked at again.

Looking at two tensors costs as much of the host's time as starting a collective. What an earlier call has found out
holds for all with the same key: that the arguments are right, that nothing has to be copied, and where the call goes.
What may change from call to call (addresses, a capture, whether the Communicator is open) is asked each time, in as few
steps as there can be: what runs once in a while runs from cold caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..policy.switch import Decision
from .call import Call
from .device import Device
from .reduce import ReduceSpec

Key = tuple[Any, ...]
MOST = 4096
DIRECT_BYTES = 1 << 20
UNREPEATABLE = object()


@dataclass(frozen=True, slots=True)
class Known:
    """What a call does.

    Attributes:
        device: of the tensors.
        output_bytes, input_bytes: of the tensors.
        in_place_at: where in the output the input may be, in bytes; None if nowhere.
        start: (output, input) → the backend's Work, or None, if it goes straight to the backend and is waited for.
        start_async: the same if it is not waited for.
        build: (output, input) → the calls of one that is coded, which lay out their tensors later; else None.
        sent_bytes, decision: of a call that goes straight, for the books.
    """

    device: Device
    output_bytes: int
    input_bytes: int
    in_place_at: int | None = None
    start: Callable[[Tensor, Tensor], Any] | None = None
    start_async: Callable[[Tensor, Tensor], Any] | None = None
    build: Callable[[Tensor, Tensor], list[Call]] | None = None
    sent_bytes: int = 0
    decision: Decision | None = None


class Memory:
    """Key → Known; the latest MOST of them."""

    def __init__(self) -> None:
        self._known: dict[Key, Known] = {}

    def find(self, operation: str, output: Any, input: Any, more: Any) -> Known | None:
        """What is known of a call, if that holds for it.

        Args:
            output, input: whatever the caller gave; the same tensor if the call is in place.
            more: what else the call depends on; hashable.
        """
        if type(output) is not Tensor or type(input) is not Tensor:
            return None
        known = self._known.get(_key(operation, output, input, more))
        if known is None or not output.is_contiguous() or output.requires_grad:
            return None  # torch would add a hook to it at each call
        if output is not input:
            if not input.is_contiguous():
                return None
            if overlaps(output, known.output_bytes, input, known.input_bytes, known.in_place_at):
                return None
        if known.build is not None and (input.requires_grad or not known.device.is_current()):
            return None  # views of it would be part of a graph; a capture there would not be seen
        return None if known.device.is_capturing() else known

    def note(self, operation: str, output: Tensor, input: Tensor, more: Any, known: Known) -> None:
        """Remember a call whose arguments are right, unless others with its key may be different.

        Args:
            more: as for find; UNREPEATABLE if no other call is like this one.
        """
        plain = type(output) is Tensor and type(input) is Tensor and not output.dtype.is_complex
        if not plain or more is UNREPEATABLE or input.numel() <= 1:
            return  # one element counts as contiguous, whatever it is a view of
        if not (output.is_contiguous() and input.is_contiguous()):
            return
        self._known.pop(_key(operation, output, input, more), None)  # so that the oldest is the first
        while len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        self._known[_key(operation, output, input, more)] = known

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()


def _key(operation: str, output: Tensor, input: Tensor, more: Any) -> Key:
    if output is input:
        return operation, output.shape, output.dtype, output.get_device(), more
    where = output.get_device(), input.get_device()
    return operation, output.shape, input.shape, output.dtype, input.dtype, where, more


def overlaps(output: Tensor, output_bytes: int, input: Tensor, input_bytes: int, in_place_at: int | None) -> bool:
    """Whether contiguous tensors of so many bytes share memory, other than in place."""
    to, source = output.data_ptr(), input.data_ptr()
    if source >= to + output_bytes or to >= source + input_bytes:
        return False
    return in_place_at is None or source != to + in_place_at


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def is_direct(size: int, n_bytes: int, on_device: bool) -> bool:
    """Whether the ranks of an all-reduce send each other everything, and all sum it: two then send no more bytes than
    for a reduce-scatter and an all-gather, once and not twice. On the host, summing all takes longer if it is much."""
    return size <= 2 and (on_device or n_bytes <= DIRECT_BYTES)


def terms_of(flat: Tensor, size: int, direct: bool) -> list[Tensor]:
    """What goes to each rank in an all-reduce: all, or a shard of ⌈n ÷ size⌉ elements, the last shorter or empty."""
    if direct:
        return [flat] * size
    n, width = flat.numel(), -(-flat.numel() // size)
    return [flat[min(r * width, n) : min((r + 1) * width, n)] for r in range(size)]


# Calls like one whose tensors were right; theirs are laid out by whoever carries them through. The tensors must keep
# their shapes until then: those of a call that is not waited for are not the caller's own.


def _kind(tensor: Tensor) -> tuple[str, torch.dtype, int]:
    """Type of the device, dtype, elements."""
    return tensor.device.type, tensor.dtype, tensor.numel()


def gathering(like: Tensor, size: int) -> Callable[[Tensor, Tensor], list[Call]]:
    """(output, input) → an all-gather among so many ranks, of inputs like this one."""
    device, dtype, n = _kind(like)

    def build(output: Tensor, input: Tensor) -> list[Call]:
        def lay_out(call: Call) -> None:
            call.sends = [_flat(input)] * size
            call.receives = list(_flat(output).chunk(size))

        return [Call("all_gather_into_tensor", device, dtype, n, same_for_all=True, lay_out=lay_out)]

    return build


def exchanging(like: Tensor, size: int) -> Callable[[Tensor, Tensor], list[Call]]:
    """(output, input) → an all-to-all of equal parts among so many ranks, of inputs like this one."""
    device, dtype, _ = _kind(like)

    def build(output: Tensor, input: Tensor) -> list[Call]:
        def lay_out(call: Call) -> None:
            call.sends = list(_flat(input).chunk(size))
            call.receives = list(_flat(output).chunk(size))

        return [Call("all_to_all_single", device, dtype, lay_out=lay_out)]

    return build


def reducing(like: Tensor, size: int, spec: ReduceSpec) -> Callable[[Tensor, Tensor], list[Call]]:
    """(output, input) → an ordered reduce-scatter among so many ranks, of inputs like this one."""
    device, dtype, n = _kind(like)

    def build(output: Tensor, input: Tensor) -> list[Call]:
        def lay_out(call: Call) -> None:
            call.target = _flat(output)
            call.sends = list(_flat(input).chunk(size))
            call.receives = [call.target] * size

        return [Call("reduce_scatter_tensor", device, dtype, n, spec=spec, lay_out=lay_out)]

    return build


def reducing_in_place(
    like: Tensor, rank: int, size: int, direct: bool, spec: ReduceSpec
) -> Callable[[Tensor, Tensor], list[Call]]:
    """(tensor, the same) → the ordered reduction of an all-reduce among so many ranks, of tensors like this one, and a
    gathering of the sums unless it is direct."""
    device, dtype, n = _kind(like)

    def build(tensor: Tensor, same: Tensor) -> list[Call]:
        def lay_out(reduction: Call) -> None:
            reduction.sends = terms_of(_flat(tensor), size, direct)
            reduction.target = reduction.sends[rank]
            reduction.receives = [reduction.target] * size
            if not direct:
                of_sums.receives, of_sums.sends = reduction.sends, reduction.receives

        reduction = Call("all_reduce", device, dtype, n, spec=spec, lay_out=lay_out)
        if direct:
            return [reduction]
        of_sums = Call("all_reduce", device, dtype, n, stage=1, same_for_all=True)
        return [reduction, of_sums]

    return build
