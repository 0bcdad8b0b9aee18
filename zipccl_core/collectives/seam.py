"""Where a call can be observed, delayed or changed from outside: the one place at which faults are injected.

Nothing is here but the interface. A Communicator has no seam unless somebody sets `Exchange.seam`; without one a call
costs a comparison with None at each phase.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

PHASES = ("issue", "encode", "send", "send_phase_two", "receive", "receive_phase_two", "decode", "reduce", "verdict")


class Seam(Protocol):
    """What is told of every phase of every call on this rank, before it happens (after, for what is received)."""

    def reached(self, phase: str, operation: str, sequence: int, peer: int, data: Tensor | None) -> Tensor | None:
        """May sleep, raise, end the process, or return other bytes.

        Args:
            phase: of PHASES. "issue" is on the caller's thread; "reduce" comes before the sum; "verdict" before this
                rank says how the call went.
            operation, sequence: of the call.
            peer: group rank of the other side; −1 where there is none.
            data: the elements to encode; the bytes to be sent or just received; else None.

        Returns:
            None to go on with `data`, or what to go on with in its place: for "send" and "send_phase_two" a tensor of
            the same size that is sent instead; for "receive" and "receive_phase_two" bytes that are copied over it.
        """
