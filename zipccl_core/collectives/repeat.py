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
from torch import Tensor, UntypedStorage

from ..policy.switch import Decision
from .call import Call
from .device import Device
from .reduce import ReduceSpec

Key = tuple[Any, ...]
MOST = 4096
DIRECT_BYTES = 1 << 20
UNREPEATABLE = object()

LayOut = Callable[[Call, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Known:
    """What a call does.

    Attributes:
        device: of the tensors.
        output_bytes, input_bytes: of the tensors.
        in_place_at: where the input may lie, in bytes from the output's beginning; None if only elsewhere.
        start: (output, input) → the backend's Work, or None, if it goes straight to the backend and is waited for.
        start_async: the same if it is not waited for.
        alike: what makes the calls of one that is coded; else None.
        sent_bytes, decision: of a call that goes straight, for the books.
    """

    device: Device
    output_bytes: int
    input_bytes: int
    in_place_at: int | None = None
    start: Callable[[Tensor, Tensor], Any] | None = None
    start_async: Callable[[Tensor, Tensor], Any] | None = None
    alike: Alike | None = None
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
        try:
            known = self._known.get(_key(operation, output, input, more))
            if known is None or not output.is_contiguous() or output.is_neg() or output.requires_grad:
                return None  # see is_plain; torch would add a hook to what requires grad at each call
            if output.is_inference():
                return None  # see bare
            if output is not input:
                if not input.is_contiguous() or input.is_neg():
                    return None
                if overlaps(output, known.output_bytes, input, known.input_bytes, known.in_place_at):
                    return None
        except Exception:  # a tensor that lacks some of it: whoever looks at it as if it were new says so
            return None
        if known.alike is not None and (input.requires_grad or not known.device.is_current()):
            return None  # views of it would be part of a graph; a capture there would not be seen
        return None if known.device.is_capturing() else known

    def note(self, operation: str, output: Tensor, input: Tensor, more: Any, known: Known) -> None:
        """Remember a call whose arguments are right, unless others with its key may be different.

        Args:
            more: as for find; UNREPEATABLE if no other call is like this one.
        """
        of_torch = type(output) is Tensor and type(input) is Tensor and not output.dtype.is_complex
        if not of_torch or more is UNREPEATABLE or input.numel() <= 1:
            return  # one element counts as contiguous, whatever it is a view of
        if not (is_plain(output) and is_plain(input)):
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


def is_plain(tensor: Tensor) -> bool:
    """Whether its memory holds its elements as they are, one after another: torch may negate or conjugate later."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


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


Place = tuple[UntypedStorage, int | torch.SymInt]
"""Where the elements of a tensor are: from which one of a storage on."""


class Alike:
    """Calls like one whose tensors were right. One is made ahead, by whoever lays the call before it out.

    Args:
        output, input: tensors like those of all of them, the same one twice if they are in place.
        make: the calls of the operation, one a stage, without tensors.
        lay_outs: of each stage: (call, output, input) → the call has its tensors. They are given flat.
    """

    def __init__(self, output: Tensor, input: Tensor, make: Callable[[], list[Call]], *lay_outs: LayOut) -> None:
        self._make, self._lay_outs, self._ahead = make, lay_outs, list[list[Call]]()
        self._device, self._dtype = output.device, output.dtype
        self._n_out, self._n_in = output.numel(), input.numel()

    def calls(self, output: Tensor, input: Tensor, waited_for: bool) -> list[Call]:
        """The calls on two tensors, the same one twice if in place; whoever carries them through lays them out.

        Args:
            waited_for: the caller leaves the tensors as they are until then. Else their memory is kept, and not they;
                which takes less time than other tensors on it.
        """
        try:
            calls = self._ahead.pop()
        except IndexError:
            calls = self._make()
        given: Any = (output, input)
        if not waited_for:
            to = _place(output)
            given = to, to if input is output else _place(input)
        for call in calls:
            call.lay_out, call.given = self._lay_out, given
        return calls

    def _lay_out(self, call: Call) -> None:
        output, input = call.given
        if type(output) is tuple:
            output, input = self._tensor(output, self._n_out), self._tensor(input, self._n_in)
        self._lay_outs[call.stage](call, _flat(output), _flat(input))
        if not self._ahead:
            self._ahead.append(self._make())

    def _tensor(self, place: Place, n: int) -> Tensor:
        storage, first = place
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(storage, first, (n,), (1,))


def _place(tensor: Tensor) -> Place:
    return tensor.untyped_storage(), tensor.storage_offset()


def gathering(output: Tensor, input: Tensor, size: int) -> Alike:
    """All-gathers among so many ranks."""
    device, dtype, n = output.device.type, output.dtype, input.numel()

    def lay_out(call: Call, output: Tensor, input: Tensor) -> None:
        call.sends = [input] * size
        call.receives = list(output.chunk(size))

    return Alike(output, input, lambda: [Call("all_gather_into_tensor", device, dtype, n, same_for_all=True)], lay_out)


def exchanging(output: Tensor, input: Tensor, size: int) -> Alike:
    """All-to-alls of equal parts among so many ranks."""
    device, dtype = output.device.type, output.dtype

    def lay_out(call: Call, output: Tensor, input: Tensor) -> None:
        call.sends = list(input.chunk(size))
        call.receives = list(output.chunk(size))

    return Alike(output, input, lambda: [Call("all_to_all_single", device, dtype)], lay_out)


def reducing(output: Tensor, input: Tensor, size: int, spec: ReduceSpec) -> Alike:
    """Ordered reduce-scatters among so many ranks."""
    device, dtype, n = output.device.type, output.dtype, input.numel()

    def lay_out(call: Call, output: Tensor, input: Tensor) -> None:
        call.target = output
        call.sends = list(input.chunk(size))
        call.receives = [output] * size

    return Alike(output, input, lambda: [Call("reduce_scatter_tensor", device, dtype, n, spec=spec)], lay_out)


def reducing_in_place(tensor: Tensor, rank: int, size: int, direct: bool, spec: ReduceSpec) -> Alike:
    """All-reduces among so many ranks: an ordered reduction, and a gathering of the sums unless it is direct."""
    device, dtype, n = tensor.device.type, tensor.dtype, tensor.numel()

    def lay_out(reduction: Call, tensor: Tensor, same: Tensor) -> None:
        reduction.sends = terms_of(tensor, size, direct)
        reduction.target = reduction.sends[rank]
        reduction.receives = [reduction.target] * size

    def lay_out_sums(of_sums: Call, tensor: Tensor, same: Tensor) -> None:
        of_sums.receives = terms_of(tensor, size, direct)
        of_sums.sends = [of_sums.receives[rank]] * size

    def make() -> list[Call]:
        reduction = Call("all_reduce", device, dtype, n, spec=spec)
        return [reduction] if direct else [reduction, Call("all_reduce", device, dtype, n, stage=1, same_for_all=True)]

    return Alike(tensor, tensor, make, lay_out, lay_out_sums)
