"""Buffers on a device, reused from call to call: nothing is allocated on the way of a call that has come before."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

CALLS_AT_ONCE = 2
_STEPS_AN_OCTAVE = 8
_LEAST_BYTES = 1 << 16
_MOST_PARTS = 256


@functools.lru_cache(4096)
def size_class_bytes(n_bytes: int) -> int:
    """What a buffer for n_bytes is made to hold: eight sizes an octave, so at most an eighth more than asked for."""
    if n_bytes <= _LEAST_BYTES:
        return _LEAST_BYTES
    step = 1 << max((n_bytes - 1).bit_length() - 1 - (_STEPS_AN_OCTAVE.bit_length() - 1), 0)
    return -(-n_bytes // step) * step


class Buffer:
    """Bytes on a device, and parts of them. A part is made once: that takes as long as starting a kernel.

    Attributes:
        whole: [any] uint8.
        n_bytes: of it.
    """

    __slots__ = ("_parts", "n_bytes", "whole")

    def __init__(self, whole: Tensor) -> None:
        self.whole, self.n_bytes = whole, whole.numel()
        self._parts: dict[tuple[int, int], Tensor] = {}

    def part(self, at: int, n_bytes: int) -> Tensor:
        """[n_bytes] uint8: those from byte `at` on."""
        found = self._parts.get((at, n_bytes))
        if found is None:
            if len(self._parts) >= _MOST_PARTS:
                self._parts.clear()
            found = self._parts[at, n_bytes] = self.whole[at : at + n_bytes]
        return found


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
        self._free: list[Buffer] = []  # the one that was used last is last
        self._held_bytes = 0
        self._largest_call_bytes = 0
        self.made = 0

    def take(self, sizes_bytes: list[int]) -> list[Buffer]:
        """A buffer of at least so many bytes each, for one call; what is in them is not defined."""
        classes = [size_class_bytes(n) for n in sizes_bytes]
        self._largest_call_bytes = max(self._largest_call_bytes, sum(classes))
        return [self._take(n) for n in classes]

    def give_back(self, buffers: list[Buffer]) -> None:
        """The device is done with them."""
        self._free += buffers
        while self._held_bytes > self.bound_bytes and self._free:
            self._held_bytes -= self._free.pop(0).n_bytes

    def close(self) -> None:
        """Let go of everything that is not in use; what is, is when it comes back."""
        self._held_bytes -= sum(buffer.n_bytes for buffer in self._free)
        self._free, self._largest_call_bytes = [], 0

    @property
    def bound_bytes(self) -> int:
        """The most it holds while no call is under way."""
        return CALLS_AT_ONCE * self._largest_call_bytes

    @property
    def held_bytes(self) -> int:
        """What it holds now, in use or not."""
        return self._held_bytes

    def _take(self, n_bytes: int) -> Buffer:
        for i in range(len(self._free) - 1, -1, -1):
            if self._free[i].n_bytes == n_bytes:
                return self._free.pop(i)
        self._held_bytes += n_bytes
        while self._held_bytes > self.bound_bytes and self._free:
            self._held_bytes -= self._free.pop(0).n_bytes
        self.made += 1
        return Buffer(self._empty(n_bytes))
