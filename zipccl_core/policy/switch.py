"""What the caller sets (Policy), and what is chosen for one call and why (Decision). Pure: no torch, no clock."""

from __future__ import annotations

import numbers
import zlib
from dataclasses import dataclass
from typing import Literal

from ..codebook import Codebook
from ..errors import InvalidArgument
from ..frame import DTYPES, align128, max_frame_bytes, static_bytes
from .threshold import NEVER_BYTES

COMPRESS = ("auto", "always", "never")
CODEBOOKS = ("fitted", "gaussian")
REDUCTIONS = ("ordered", "native")
VERIFY = ("auto", "wait", "late")
MOST_TIMEOUT_S = 1e8  # the backends count in nanoseconds


@dataclass(frozen=True)
class Policy:
    """How a Communicator behaves; the same on all ranks, which is checked when one is made.

    Attributes:
        compress: "always" codes every message of a coded dtype, "never" none, "auto" those of min_bytes and more, while
            coding pays where the call recurs (see Switch).
        min_bytes: raw bytes a message to one peer must have for "auto" to code it.
        codebook: "fitted" takes the most frequent exponents of a sample of each message, "gaussian" those of a normal
            distribution of its standard deviation; or one Codebook for all.
        prefix_percent: dynamic bytes sent with the static part, in percent of the words; the rest is phase two.
        reduction: "ordered" sums in rank order with the same bits whether coded or not; "native" lets calls that are
            not coded use the backend's own sum, whose bits differ.
        verify: "wait" knows the verdict on every message before wait() returns; "late" returns as soon as this rank
            has its words, and a later call raises what was wrong, on all ranks: the next on the CPU, the next but one
            on CUDA at the latest, of those that are not left to the backend alone; and barrier and close in any case.
            "auto" is "wait" on the CPU and "late" on CUDA.
        retransmit: with "wait", on the CPU, messages that came damaged are sent once more, uncoded, before it is an
            error.
        timeout_s: seconds a call waits for its peers before RankTimeout, which comes up to 8 s later; at most 1e8,
            three years.

    Raises:
        InvalidArgument: a value is of the wrong type, or out of its range.
    """

    compress: Literal["auto", "always", "never"] = "auto"
    min_bytes: int = 256 * 1024
    codebook: Literal["fitted", "gaussian"] | Codebook = "fitted"
    prefix_percent: float = 3.0
    reduction: Literal["ordered", "native"] = "ordered"
    verify: Literal["auto", "wait", "late"] = "auto"
    retransmit: bool = False
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        # All fields become Python's own types: ranks compare policies by how they are written.
        for field, allowed in (("compress", COMPRESS), ("reduction", REDUCTIONS), ("verify", VERIFY)):
            value = getattr(self, field)
            if not isinstance(value, str) or value not in allowed:
                raise InvalidArgument(f"Policy: {field} must be one of {allowed}, got {value!r}")
            object.__setattr__(self, field, str(value))
        if isinstance(self.codebook, str) and self.codebook in CODEBOOKS:
            object.__setattr__(self, "codebook", str(self.codebook))
        elif not isinstance(self.codebook, Codebook):
            raise InvalidArgument(f"Policy: codebook must be one of {CODEBOOKS} or a Codebook, got {self.codebook!r}")
        if not isinstance(self.retransmit, bool):
            raise InvalidArgument(f"Policy: retransmit must be True or False, got {self.retransmit!r}")
        if not 0 <= self._number("min_bytes") < 2**63 or self.min_bytes != int(self.min_bytes):
            raise InvalidArgument(f"Policy: min_bytes must be a whole number, not negative, got {self.min_bytes}")
        object.__setattr__(self, "min_bytes", int(self.min_bytes))
        if not 0 <= self._number("prefix_percent") <= 100:
            raise InvalidArgument(f"Policy: prefix_percent must be 0 to 100, got {self.prefix_percent}")
        object.__setattr__(self, "prefix_percent", float(self.prefix_percent) + 0.0)  # -0.0 is 0.0
        if not 0 < self._number("timeout_s") <= MOST_TIMEOUT_S:
            raise InvalidArgument(
                f"Policy: timeout_s must be positive, and {MOST_TIMEOUT_S:g} at most, got {self.timeout_s}"
            )
        object.__setattr__(self, "timeout_s", float(self.timeout_s))

    def _number(self, field: str) -> float:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise InvalidArgument(f"Policy: {field} must be a number, got {value!r}")
        try:
            return float(value)
        except OverflowError:
            return float("inf")

    def fingerprint(self) -> int:
        """32 bits that differ, but for one chance in 2³², between policies that differ."""
        return zlib.crc32(repr(self).encode())

    def codes(self, dtype: str, raw_bytes: int) -> bool:
        """Whether a message of raw_bytes to one peer is coded. Both ends know the arguments, so both decide alike."""
        if dtype not in DTYPES or raw_bytes == 0 or self.compress == "never":
            return False
        return self.compress == "always" or raw_bytes >= self.min_bytes


@dataclass(frozen=True, slots=True)
class Decision:
    """What one call did.

    Attributes:
        mode: "compressed" if a message of the call was coded; "native" if all went as they are.
        reason: one sentence, for a person.
        operation: the Communicator's method.
        sequence: the call's number on its Communicator, from 0.
    """

    mode: Literal["compressed", "native"]
    reason: str
    operation: str
    sequence: int


Place = tuple[str, int, str, int]
"""Where a call recurs: operation, stage, dtype, and the size class of what all ranks have alike (0 if uneven)."""


@dataclass
class _Pause:
    """What is known of one place: how many calls to leave uncoded, and how many were left the last time."""

    left: int = 0
    length: int = 0


class Switch:
    """Turns coding off where it does not pay, and on again; for compress="auto".

    A pure function of what all ranks have heard: `codes_now` only looks, and `learn` is told, in the order of the
    calls, what the verdicts of all ranks said. So all ranks decide alike at the same call.

    A call whose coded messages did not shrink by LEAST_RATIO makes the next call at its place go native, then the next
    2, 4 … MOST_PAUSE; after each pause one call is coded to see. One that shrank ends it.
    """

    LEAST_RATIO = 1.05
    MOST_PAUSE = 64

    def __init__(self, policy: Policy) -> None:
        self._adapts = policy.compress == "auto"
        self._places: dict[Place, _Pause] = {}

    def codes_now(self, place: Place) -> bool:
        """Whether the next call at a place may be coded."""
        pause = self._places.get(place)
        return pause is None or pause.left == 0

    def learn(self, place: Place, raw_bytes: int, sent_bytes: int) -> None:
        """What the latest call at a place did, without an error, over all ranks.

        Args:
            raw_bytes, sent_bytes: of the messages that were coded; 0 if none was.
        """
        if not self._adapts:
            return
        pause = self._places.setdefault(place, _Pause())
        if pause.left:
            pause.left -= 1
        elif raw_bytes:
            shrank = raw_bytes >= self.LEAST_RATIO * sent_bytes
            pause.length = 0 if shrank else min(max(1, 2 * pause.length), self.MOST_PAUSE)
            pause.left = pause.length


def explain(
    policy: Policy, dtype: str, coded: int, messages: int, largest_bytes: int, measured_bytes: int | None = None
) -> str:
    """Why `coded` of `messages` messages, the largest of largest_bytes, were coded.

    Args:
        measured_bytes: from which size on coding was measured to pay; None if it was not.
    """
    if dtype not in DTYPES:
        return f"{dtype} is not coded, only {' and '.join(sorted(DTYPES))} are"
    if messages == 0:
        return "nothing to send to another rank"
    if policy.compress != "auto":
        return f'compress="{policy.compress}"'
    few = f"{coded} of {messages} messages have" if 0 < coded < messages else f"a message of {largest_bytes} bytes has"
    if measured_bytes is None:
        least = f"min_bytes = {policy.min_bytes}"
    elif measured_bytes == NEVER_BYTES:
        return "coding was measured not to pay on this link"
    else:
        least = f"the {measured_bytes} from which on coding was measured to pay on this link"
    return f"{few} {'at least' if coded else 'less than'} {least}"


def explain_straight(policy: Policy, dtype: str) -> str:
    """Why a call on a device went straight to the backend."""
    if dtype not in DTYPES:
        return f"{dtype} is not coded, only {' and '.join(sorted(DTYPES))} are"
    if policy.compress != "auto":
        return f'compress="{policy.compress}"'
    return "smaller than the size from which coding was measured to pay on this link"


def prefix_bytes(policy: Policy, n: int, dtype: str) -> int:
    """Dynamic bytes that travel in phase one with a frame of n words; a function of what both ends know."""
    most = max_frame_bytes(n, dtype) - static_bytes(n)
    return min(most, align128(int(n * policy.prefix_percent / 100)))
