"""The seam of one rank: tells the ledger of every phase, and the armed faults of every moment."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from faults.fault import Fault, Moment
from faults.ledger import Ledger


class Injector:
    """What is set as a Communicator's seam (zipccl_core.collectives.seam); one for all Communicators of a beat.

    Args:
        ledger: of this rank.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._armed: list[Fault] = []
        self._numbers: dict[int, int] = {}
        self._number = self._first_message = 0
        self.beat = "clean"

    def begin(self, beat: str, first_message: int) -> None:
        """The next calls are those of a beat; messages between two ranks have numbers from first_message on.

        Call it before a Communicator is made and after all calls of one are done: each counts from 0.
        """
        self.beat, self._first_message, self._numbers = beat, first_message, {}

    def calling(self, number: int) -> None:
        """The calling thread is about to make the call of this number in the beat."""
        self._number = number

    def arm(self, faults: list[Fault]) -> None:
        """From now on they are told."""
        for each in faults:
            each.arm()
        self._armed = faults

    def disarm(self) -> None:
        """They are told no more."""
        armed, self._armed = self._armed, []
        for each in armed:
            each.disarm()

    def reached(self, phase: str, operation: str, sequence: int, peer: int, data: Tensor | None) -> Tensor | None:
        """See Seam."""
        if operation == "point_to_point":
            number = sequence - self._first_message
        elif phase == "issue":  # on the calling thread: whatever number the Communicator gives it is this call's
            number = self._numbers[sequence] = self._number
        else:
            number = self._numbers.get(sequence, -1)
        return self.tell(Moment(phase, operation, number, peer, data))

    def tell(self, moment: Moment) -> Tensor | None:
        """A moment, of the seam or of the script around it."""
        figures: dict[str, Any] = {} if moment.data is None else {"elements": moment.data.numel()}
        self._ledger.write(
            "phase",
            beat=self.beat,
            phase=moment.phase,
            operation=moment.operation,
            sequence=moment.sequence,
            peer=moment.peer,
            **figures,
        )
        changed: Tensor | None = None
        for each in self._armed:
            answer = each.reached(moment)
            if answer is not None:
                changed = answer
                moment = Moment(moment.phase, moment.operation, moment.sequence, moment.peer, answer)
        return changed
