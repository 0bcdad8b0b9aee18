"""What is remembered of calls: one with tensors like those of an earlier call is not looked at again.

Looking at two tensors costs as much of the host's time as starting a collective. What an earlier call has found out
holds for all with the same key: that the arguments are right, that nothing has to be copied, and where the call goes.
What may change from call to call (addresses, a capture, whether the Communicator is open) is asked each time, in as few
steps as there can be: what runs once in a while runs from cold caches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..policy.switch import Decision
from .call import Call
from .device import Device

Key = tuple[Any, ...]
MOST = 4096


@dataclass(frozen=True, slots=True)
class Known:
    """What a call does.

    Attributes:
        device: of the tensors.
        output_bytes, input_bytes: of the tensors.
        in_place_at: where in the output the input may be, in bytes; -1 if nowhere.
        start: (output, input) → the backend's Work, or None, if it goes straight to the backend and is waited for.
        start_async: the same if it is not waited for.
        build: (output, input) → the calls of one that is coded, which lay out their tensors later; else None.
        books: where a call that goes straight is entered, with sent_bytes and decision.
    """

    device: Device
    output_bytes: int
    input_bytes: int
    in_place_at: int = -1
    start: Callable[[Tensor, Tensor], Any] | None = None
    start_async: Callable[[Tensor, Tensor], Any] | None = None
    build: Callable[[Tensor, Tensor], list[Call]] | None = None
    books: Counter[str] | None = None
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
            return None
        if output is not input:
            if not input.is_contiguous() or input.requires_grad:
                return None
            to, source = output.data_ptr(), input.data_ptr()
            apart = source >= to + known.output_bytes or to >= source + known.input_bytes
            if not apart and source != to + known.in_place_at:
                return None
        return None if known.device.is_capturing() else known

    def note(self, operation: str, output: Tensor, input: Tensor, more: Any, known: Known) -> None:
        """Remember a call whose arguments are right, unless others with its key may be different."""
        plain = type(output) is Tensor and type(input) is Tensor and not output.dtype.is_complex
        if not plain or input.numel() <= 1 or not (output.is_contiguous() and input.is_contiguous()):
            return  # one element counts as contiguous, whatever it is a view of
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
