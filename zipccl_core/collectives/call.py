"""One collective call as the exchange sees it, and what can be wrong with it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from ..errors import InvalidArgument, ZipcclError
from ..policy.switch import Decision, Place
from .device import Device, Event
from .message import Message, dtype_text
from .reduce import ReduceSpec
from .wire import CallRecord, packed_record

_DATA_TAG = 3
_TAGS = 1 << 30


class Done:
    """Set once, and waited for by any number of threads; making one costs next to nothing, unlike a threading.Event.

    Takes no lock but its own, which is made by who waits first: a signal's handler may come in anywhere. Each step on
    `__dict__` is one to other threads.
    """

    _is_set = False

    def set(self) -> None:
        """Let go of all who wait; may be repeated."""
        self._is_set = True
        held = self.__dict__.pop("_held", None)
        if held is not None:
            held.release()

    def is_set(self) -> bool:
        """Whether it is; never waits."""
        return self._is_set

    @property
    def is_waited_for(self) -> bool:
        """Whether a thread waits, or has waited in vain."""
        return "_held" in self.__dict__

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most so many seconds; whether it is."""
        if self._is_set:
            return True
        held = self.__dict__.get("_held")
        if held is None:
            made = threading.Lock()
            made.acquire()
            held = self.__dict__.setdefault("_held", made)
        if self._is_set:  # perhaps before it could see the lock
            return True
        if not held.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            return False
        held.release()
        return True


def nothing() -> None:
    """What is to be done after a call whose result is where the caller wants it."""


@dataclass(eq=False)
class Call:
    """One collective call as the exchange sees it: what goes to and comes from each peer, and what to do then.

    Attributes:
        operation: method name.
        dtype: of all tensors.
        total_words: elements of the whole call where all ranks must have the same number, else 0.
        root: group rank that all must name alike, -1 if the operation has none.
        sends: [rank] → flat contiguous tensor for that rank; the own rank's entry is copied, never encoded.
        receives: [rank] → flat contiguous tensor to fill with that rank's elements.
        same_for_all: all peers get the same message, so it is encoded once.
        spec: the reduction, None if there is none.
        native: runs the backend's own collective instead of a data exchange; returns after it is done.
        finish: puts the result where the caller wants it, after all has been received.
        invalid: why this rank's arguments were refused, None if they were not.
        stage: 0, or more for the later calls of one that takes several; they share a number and are counted once.
        lay_out: fills `sends`, `receives` and `target`, if that is left to whoever carries the call through.
        given: what it does that from.
        alike: whether all ranks' arguments were accepted and are on one type of device: known alike on all ranks.
        told: whether the peers have been sent its records.
        before: the call of the stage before, None for the first; if that failed, on all ranks, this is not made.
        device: type of the device that the tensors are on, empty if there are none; "cpu" unless a Pipeline takes it.
        target: of an ordered reduction on a device, where the sum goes; `receives` then tell sizes only.
        waited_for: on a device, whether the thread that carries it through has nothing else to do until it is over.
        stream: on a device, the one that all of it goes to; empty if it goes to several.
        issued: on a device, what the caller's stream held when the call was issued; None if it goes there itself.
        straight: on a device, starts the backend's own call, of which nobody is told; the Work.
        on, finished: once the call is over for the host: the device that still works on it, and until when.
    """

    operation: str = ""
    device: str = ""
    dtype: torch.dtype | None = None
    total_words: int = 0
    root: int = -1
    sends: list[torch.Tensor] = field(default_factory=list)
    receives: list[torch.Tensor] = field(default_factory=list)
    same_for_all: bool = False
    spec: ReduceSpec | None = None
    native_reason: str = ""
    finish: Callable[[], None] = nothing
    invalid: InvalidArgument | None = None
    stage: int = 0
    # What becomes of it. What is not made anew for each is the class's until it is set: many calls are issued, and only
    # then carried through by another thread.
    native: Callable[[Any, timedelta], None] | None = field(default=None, init=False)
    lay_out: Callable[[Call], None] | None = field(default=None, init=False)
    given: Any = field(default=None, init=False)
    alike: bool = field(default=True, init=False)
    told: bool = field(default=False, init=False)
    before: Call | None = field(default=None, init=False)
    sequence: int = field(default=-1, init=False)
    control_sends: list[tuple[int, Any]] = field(default_factory=list, init=False)
    send_failure: tuple[int, RuntimeError] | None = field(default=None, init=False)
    paused: bool = field(default=False, init=False)
    arrivals_s: dict[int, float] = field(default_factory=dict, init=False)
    messages: dict[int, Message] = field(default_factory=dict, init=False)
    done: Done = field(default_factory=Done, init=False)
    error: ZipcclError | None = field(default=None, init=False)
    decision: Decision | None = field(default=None, init=False)
    target: torch.Tensor | None = field(default=None, init=False)
    waited_for: bool = field(default=False, init=False)
    stream: str = field(default="", init=False)
    issued: Event | None = field(default=None, init=False)
    straight: Callable[[], Any] | None = field(default=None, init=False)
    on: Device | None = field(default=None, init=False)
    finished: Event | None = field(default=None, init=False)

    @property
    def place(self) -> Place:
        """Where this call recurs; the same on all ranks if they call alike."""
        dtype = dtype_text(self.dtype) if self.dtype else ""
        return (self.operation, self.stage, dtype, self.total_words.bit_length())

    @property
    def is_message(self) -> bool:
        """Whether it is between two ranks alone."""
        return self.operation == "point_to_point"

    @property
    def kind(self) -> str:
        """What a call on a device does with its messages: "gather", "all_to_all" or "reduce"."""
        return "reduce" if self.target is not None else "gather" if self.same_for_all else "all_to_all"

    def ensure_laid_out(self) -> None:
        """Have its tensors in place from now on."""
        if self.lay_out is not None:
            self.lay_out(self)
            self.lay_out = self.given = None

    def record_for(self, rank: int, peer: int, policy: int) -> CallRecord:
        """This rank's call record for one peer."""
        return CallRecord(self.sequence, *self._told(rank, self.sends, self.receives, peer, policy))

    def packed_for(self, rank: int, peer: int, policy: int) -> bytes:
        """The same, packed."""
        return packed_record(self.sequence, *self._told(rank, self.sends, self.receives, peer, policy))

    def packed_from(self, peer: int, rank: int, policy: int) -> bytes:
        """The record that a peer has for this rank if both call alike, packed."""
        return packed_record(self.sequence, *self._told(peer, self.receives, self.sends, peer, policy))

    def _told(
        self, src: int, sends: list[torch.Tensor], receives: list[torch.Tensor], peer: int, policy: int
    ) -> tuple[Any, ...]:
        """The fields of src's record but for the sequence, if it sends so and receives so to and from the other side,
        which here is at the place of `peer`."""
        return (
            self.operation,
            src,
            dtype_text(self.dtype) if self.dtype else "",
            self.spec.name if self.spec else "",
            self.spec.factor_bits if self.spec else 0,
            sends[peer].numel() if sends else 0,
            receives[peer].numel() if receives else 0,
            self.total_words,
            self.root,
            policy,
            self.device,
            self.invalid is None,
        )


def data_tag(call: Call) -> int:
    """The tag of a call's payloads."""
    return _DATA_TAG + call.sequence % _TAGS


def title(call: Call) -> str:
    """What an error calls the call."""
    return f"{call.operation} #{call.sequence}" if call.straight is None else call.operation


def phase_range(call: Call, phase: str) -> contextlib.AbstractContextManager[object]:
    """A range that torch.profiler shows; those of the progress thread if it records with profile_all_threads=True."""
    if not torch.autograd.profiler._is_profiler_enabled:  # a range costs 5 µs even when nobody looks
        return _NO_RANGE
    return torch.profiler.record_function(f"zipccl {phase} {call.operation} #{call.sequence}")


_NO_RANGE = contextlib.nullcontext()


@dataclass(slots=True)
class Heard:
    """What the records of a call came to.

    Attributes:
        refused: what does not agree, or this rank's own refused arguments.
        all_valid: no rank's arguments were refused.
        one_device: all ranks call it on the same type of device.
    """

    refused: Refused | None
    all_valid: bool
    one_device: bool


class Refused(Exception):
    """Something that came, or was given, is wrong in a way that the verdict can tell all ranks.

    Attributes:
        error: what to raise.
        fatal: transfers may be left hanging.
        damaged: peers whose message was damaged, if nothing else is wrong.
    """

    def __init__(self, error: ZipcclError, fatal: bool, damaged: tuple[int, ...] = ()) -> None:
        super().__init__(str(error))
        self.error, self.fatal, self.damaged = error, fatal, damaged

    def after(self, first: Refused | None) -> Refused:
        """Both in one: the error of the first."""
        if first is None:
            return self
        damaged = (*first.damaged, *self.damaged) if first.damaged and self.damaged else ()
        return Refused(first.error, first.fatal or self.fatal, damaged)
