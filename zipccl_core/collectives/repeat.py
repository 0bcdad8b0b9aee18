"""What is remembered of calls: one with tensors like those of an earlier call is not looked at again.

Looking at two tensors costs as much of the host's time as starting a collective. What an earlier call has found out
holds for all with the same `key`: that the arguments are right, that nothing has to be copied, and where the call goes.
What may change from call to call (addresses, a capture, whether the Communicator is open) is asked each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..policy.switch import Decision
from .call import Call

Key = tuple[Any, ...]
MOST = 4096


@dataclass(frozen=True)
class Known:
    """What a call does.

    Attributes:
        output_bytes, input_bytes: of the tensors.
        in_place_at: where in the output the input may be, in bytes; None if nowhere.
        start: (output, input, async_op) → the backend's Work, for a call that goes straight to it; else None.
        build: (output, input) → the calls of one that is coded, which lay out their tensors later; else None.
        sent_bytes, decision: of a call that goes straight, for the books.
    """

    output_bytes: int
    input_bytes: int
    in_place_at: int | None = None
    start: Callable[[Tensor, Tensor, bool], Any] | None = None
    build: Callable[[Tensor, Tensor], list[Call]] | None = None
    sent_bytes: int = 0
    decision: Decision | None = None

    def fits(self, output: Tensor, input: Tensor) -> bool:
        """Whether the tensors lie so that nothing has to be copied."""
        to, source = output.data_ptr(), input.data_ptr()
        if source >= to + self.output_bytes or to >= source + self.input_bytes:
            return True
        return self.in_place_at is not None and source == to + self.in_place_at


class Memory:
    """key → Known; the latest MOST of them."""

    def __init__(self) -> None:
        self._known: dict[Key, Known] = {}

    def find(self, key: Key | None) -> Known | None:
        """What is known, if anything is."""
        return None if key is None else self._known.get(key)

    def note(self, key: Key | None, known: Known | None) -> None:
        """Remember it; nothing if either is None."""
        if key is not None and known is not None:
            while len(self._known) >= MOST:
                del self._known[next(iter(self._known))]
            self._known[key] = known

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()


def key_of(operation: str, output: Any, input: Any, more: Any = None) -> Key | None:
    """What calls have alike that are alike; None for tensors that must be looked at each time.

    Args:
        more: what else the call depends on; hashable.
    """
    if type(output) is not Tensor or type(input) is not Tensor:
        return None
    if output.requires_grad or input.requires_grad or not (output.is_contiguous() and input.is_contiguous()):
        return None
    if output.is_complex() or input.is_neg():
        return None
    return operation, output.dtype, output.device, output.shape, input.dtype, input.device, input.shape, more
