"""Buffers on a device, reused from call to call: nothing is allocated on the way of a call that has come before."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

CALLS_AT_ONCE = 2
_STEPS_AN_OCTAVE = 8
_LEAST_BYTES = 1 << 16


def size_class_bytes(n_bytes: int) -> int:
    """What a buffer for n_bytes is made to hold: eight sizes an octave, so at most an eighth more than asked for."""
    if n_bytes <= _LEAST_BYTES:
        return _LEAST_BYTES
    step = 1 << max((n_bytes - 1).bit_length() - 1 - (_STEPS_AN_OCTAVE.bit_length() - 1), 0)
    return -(-n_bytes // step) * step


class Pool:
    """Buffers of one Communicator on one device.

    A call takes what it needs and gives it back when the device is done with it; CALLS_AT_ONCE calls hold some at a
    time, so the pool holds at most CALLS_AT_ONCE times what the largest call has taken, an eighth more for rounding.
    What has not been used since for the longest is let go beyond that.

    Args:
        empty: makes a uint8 tensor of so many bytes on the device.
    """

    def __init__(self, empty: Callable[[int], Tensor]) -> None:
        self._empty = empty
        self._free: list[Tensor] = []  # the one that was used last is last
        self._held_bytes = 0
        self._largest_call_bytes = 0
        self.made = 0

    def take(self, sizes_bytes: list[int]) -> list[Tensor]:
        """A buffer of at least so many bytes each, for one call; what is in them is not defined."""
        classes = [size_class_bytes(n) for n in sizes_bytes]
        self._largest_call_bytes = max(self._largest_call_bytes, sum(classes))
        return [self._take(n) for n in classes]

    def give_back(self, buffers: list[Tensor]) -> None:
        """The device is done with them."""
        self._free += buffers
        while self._held_bytes > self.bound_bytes and self._free:
            self._held_bytes -= self._free.pop(0).numel()

    def close(self) -> None:
        """Let go of everything that is not in use; what is, is when it comes back."""
        self._held_bytes -= sum(buffer.numel() for buffer in self._free)
        self._free, self._largest_call_bytes = [], 0

    @property
    def bound_bytes(self) -> int:
        """The most it holds while no call is under way."""
        return CALLS_AT_ONCE * self._largest_call_bytes

    @property
    def held_bytes(self) -> int:
        """What it holds now, in use or not."""
        return self._held_bytes

    def _take(self, n_bytes: int) -> Tensor:
        for i in range(len(self._free) - 1, -1, -1):
            if self._free[i].numel() == n_bytes:
                return self._free.pop(i)
        self._held_bytes += n_bytes
        while self._held_bytes > self.bound_bytes and self._free:
            self._held_bytes -= self._free.pop(0).numel()
        self.made += 1
        return self._empty(n_bytes)
