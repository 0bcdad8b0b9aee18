"""What a fault is: armed on a rank, it strikes where the plan says, leaves evidence, and is disarmed.

Nothing here knows how a Communicator works. A fault meets it in three places:

- at its seam (`strike`): every phase of every call, on the rank it is armed on;
- when a Communicator is made (`policy`), phase "make";
- when the workload makes a call (`call`), phase "call".

A fault also says how its victims see it (`observed`), from the events of a finished run alone: `faults check` needs no
cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    import torch

    from faults.ledger import Ledger
    from faults.record import Record
    from faults.workload import CallSpec

SEAM_PHASES = (
    *("issue", "encode", "send", "send_phase_two", "receive", "receive_phase_two", "decode", "reduce", "verdict"),
)
SCRIPT_PHASES = ("before", "after")
"""On the thread that calls, around the call: where a training script would die by itself."""
PHASES = ("make", "call", *SCRIPT_PHASES, *SEAM_PHASES)


@dataclass(frozen=True)
class Moment:
    """Where a rank is.

    Attributes:
        phase: of SCRIPT_PHASES or SEAM_PHASES.
        operation: the Communicator's method, "point_to_point" for messages between two ranks.
        sequence: of the call, counted from the first of the armed beat.
        peer: rank of the group on the other side, -1 if none.
        data: as the seam gives it.
    """

    phase: str
    operation: str
    sequence: int
    peer: int = -1
    data: torch.Tensor | None = None


@dataclass(frozen=True)
class Planned:
    """One fault of a plan: everything is drawn, nothing is left to chance.

    Attributes:
        index: place in the scenario's list.
        fault: name of the kind.
        ranks: of the group, on which it is armed.
        phase: where it strikes.
        peer: the only peer it strikes at; -1 for the first that comes.
        nth: moments that fit and are let pass before it strikes.
        args: as the scenario gives them.
        strikes: {"sequence": number from the start of the armed beat, "operation": …, and what the kind has drawn}.
    """

    index: int
    fault: str
    ranks: tuple[int, ...]
    phase: str
    peer: int = -1
    nth: int = 0
    args: dict[str, Any] = field(default_factory=dict)
    strikes: tuple[dict[str, Any], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "ranks": list(self.ranks), "strikes": list(self.strikes)}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Planned:
        """From as_json's data."""
        return cls(**{**data, "ranks": tuple(data["ranks"]), "strikes": tuple(data["strikes"])})


class Shelf:
    """Where faults of different ranks may put things for each other.

    Args:
        store: a torch store, of this run alone.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, data: bytes) -> None:
        """Leave bytes under a key."""
        self._store.set(f"shelf/{key}", data)

    def take(self, key: str, timeout_s: float) -> bytes:
        """The bytes another rank leaves under a key; RuntimeError if it has not within timeout_s."""
        from datetime import timedelta

        self._store.wait([f"shelf/{key}"], timedelta(seconds=timeout_s))
        return bytes(self._store.get(f"shelf/{key}"))


class Fault:
    """Base of the kinds: bookkeeping. A kind overrides `draw`, one of the three places, and `observed`.

    Class attributes:
        name: of the kind, and of its file.
        injects: one sentence: what is injected.
        phases: where it may strike.
        args: JSON Schema of each argument.
        required: arguments that must be given.
        lethal: the rank it strikes may not survive, so that its scenario needs ranks of its own.
    """

    name: ClassVar[str] = ""
    injects: ClassVar[str] = ""
    phases: ClassVar[tuple[str, ...]] = SEAM_PHASES
    args: ClassVar[dict[str, dict[str, Any]]] = {}
    required: ClassVar[tuple[str, ...]] = ()
    lethal: ClassVar[bool] = False

    def __init__(self, planned: Planned, rank: int, ledger: Ledger, shelf: Shelf) -> None:
        self.planned, self.rank, self.ledger, self.shelf = planned, rank, ledger, shelf
        self._left: dict[int, dict[str, Any]] = {}
        self._evidence: list[dict[str, Any]] = []

    # The life of a fault

    def arm(self) -> None:
        """From now on it strikes."""
        self._left = {strike["sequence"]: strike for strike in self.planned.strikes}
        self._passed: Counter[int] = Counter()
        self.ledger.write("armed", fault=self.planned.index, kind=self.name)

    def evidence(self) -> list[dict[str, Any]]:
        """What it has done, with figures: one entry a strike; also in the ledger as "fired"."""
        return list(self._evidence)

    def disarm(self) -> None:
        """It strikes no more."""
        self._left = {}
        self.ledger.write("disarmed", fault=self.planned.index, kind=self.name, strikes=len(self._evidence))

    def fired(self, strike: Mapping[str, Any], **figures: Any) -> None:
        """Enter a strike into the ledger; before it, if nobody can do it afterwards."""
        entry = {"sequence": strike["sequence"], "operation": strike["operation"], **figures}
        self._evidence.append(entry)
        self.ledger.write("fired", fault=self.planned.index, kind=self.name, phase=self.planned.phase, **entry)

    # Where it meets the product

    def reached(self, moment: Moment) -> torch.Tensor | None:
        """A moment of a call: strike if it is the planned one."""
        if moment.phase != self.planned.phase or self.planned.peer not in (-1, moment.peer):
            return None
        strike = self._left.get(moment.sequence)
        if strike is None or strike["operation"] != moment.operation:
            return None
        self._passed[moment.sequence] += 1
        if self._passed[moment.sequence] <= self.planned.nth:
            return None
        del self._left[moment.sequence]
        return self.strike(strike, moment)

    def strike(self, strike: dict[str, Any], moment: Moment) -> torch.Tensor | None:
        """Do it; what the call goes on with in place of moment.data, or None."""
        raise NotImplementedError(f"{self.name} does not strike at the seam")

    def policy(self, policy: dict[str, Any]) -> dict[str, Any]:
        """What this rank makes its Communicator with."""
        return policy

    def call(self, call: CallSpec, sequence: int) -> CallSpec:
        """What this rank calls."""
        return call

    # Planning and judging: pure

    @classmethod
    def draw(cls, rng: np.random.Generator, args: Mapping[str, Any], which: int, strikes: int, size: int) -> Any:
        """What is drawn for strike `which` of `strikes`: a dict of plain data; None to leave this strike out."""
        return {}

    @classmethod
    def sound(cls, planned: Planned, entry: Mapping[str, Any]) -> str:
        """What is wrong with one entry of evidence: "" if it proves the strike."""
        return ""

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        """What of this fault no victim has seen; empty if all was."""
        raise NotImplementedError


def call_faults(faults: Sequence[Fault], call: CallSpec, sequence: int) -> CallSpec:
    """The call after all faults had their say."""
    for each in faults:
        call = each.call(call, sequence)
    return call
