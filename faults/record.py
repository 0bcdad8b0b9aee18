"""A finished run as its directory tells it: what faults and the judge read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.fault import Planned
from faults.ledger import read_ledger
from faults.scenario import Scenario

BEATS = ("clean", "armed", "bystanders", "healed")
TRACES = ("scenario.json", "manifest.json", "rank0.jsonl", "launch.jsonl")
"""Files by any of which a directory is known as that of a run, although others may be missing."""


def runs_in(directory: Path) -> list[Path]:
    """The directory itself if a run left something in it, damaged or not; else the runs that lie in it, by name.

    Raises:
        ValueError: there is no run, or no such directory.
    """

    def is_run(path: Path) -> bool:
        return any((path / name).is_file() for name in TRACES)

    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory; wanted that of a run, as runs/faults/TIME/SCENARIO")
    found = [directory] if is_run(directory) else sorted(path for path in directory.iterdir() if is_run(path))
    if not found:
        raise ValueError(f"{directory} holds no run; wanted the directory of one, as runs/faults/TIME/SCENARIO")
    return found


@dataclass
class Record:
    """Scenario, plan and events.

    Attributes:
        directory: where it came from.
        scenario: as it was run.
        plan: its faults, drawn.
        request: how it was run: subject, versions.
        events: global rank → events in order.
        launch: events of the process that held the ranks.
        damage: what is wrong with the directory itself.
    """

    directory: Path
    scenario: Scenario
    plan: list[Planned] = field(default_factory=list)
    request: dict[str, Any] = field(default_factory=dict)
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    launch: list[dict[str, Any]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, directory: Path) -> Record:
        """From a directory; what cannot be read is damage, and only a missing scenario is an error."""
        scenario = Scenario.of(json.loads((directory / "scenario.json").read_text()))
        record = cls(directory, scenario)
        try:
            record.request = json.loads((directory / "request.json").read_text())
            record.plan = [Planned.of(entry) for entry in json.loads((directory / "plan.json").read_text())]
        except (OSError, ValueError, TypeError, KeyError) as exc:
            record.damage.append(f"request or plan cannot be read: {type(exc).__name__}: {exc}")
        names = {rank: f"rank{rank}.jsonl" for rank in range(scenario.world_size)}
        for rank, name in [*names.items(), (-1, "launch.jsonl")]:
            try:
                events, wrong = read_ledger(directory / name)
            except OSError as exc:
                events, wrong = [], f"{name} cannot be read: {exc}"
            if wrong:
                record.damage.append(wrong)
            if rank < 0:
                record.launch = events
            else:
                record.events[rank] = events
        return record

    @property
    def size(self) -> int:
        """Ranks of the group that calls."""
        return len(self.scenario.members)

    def of_rank(self, rank: int, event: str) -> list[dict[str, Any]]:
        """Events of one name of a rank of the group."""
        return [e for e in self.events.get(self.scenario.members[rank], []) if e["event"] == event]

    def done(self, rank: int, beat: str) -> list[dict[str, Any]]:
        """How the calls of a beat went on a rank of the group, in order of calling; without the repeated one."""
        found = [e for e in self.of_rank(rank, "done") if e["beat"] == beat and e["index"] >= 0]
        return sorted(found, key=lambda e: e["index"])

    def done_at(self, rank: int, sequence: int, operation: str, beat: str = "armed") -> dict[str, Any] | None:
        """How the call of a number went, on a rank of the group."""
        peer_to_peer = operation == "point_to_point"
        for event in self.done(rank, beat):
            same_kind = peer_to_peer == (event["operation"] == "batch_isend_irecv")
            if same_kind and event["sequence"] == sequence:
                return event
        return None

    def called_by(self, rank: int, done: Mapping[str, Any]) -> float | None:
        """When, at the latest, a rank of the group had made the call whose arrivals a "done" tells; None if unknown.

        Those are of the latest call that was over: of asynchronous ones, perhaps one that was made after this.
        """
        made: dict[int, float | None] = {}  # number → when it is known to have been made; None: being made
        for event in self.of_rank(rank, "phase"):
            number = event["sequence"]
            its_own = event["beat"] == done["beat"] and event["operation"] != "point_to_point"
            if not its_own or number < done["sequence"] or event["at_s"] > done["at_s"]:
                continue
            if number in made:
                made[number] = made[number] or float(event["at_s"])
            elif event["phase"] == "issue":
                made[number] = None
        return max((at_s for at_s in made.values() if at_s is not None), default=None)

    def fired(self, index: int) -> list[tuple[int, dict[str, Any]]]:
        """(rank of the group, entry) of every strike of one planned fault."""
        return [(rank, e) for rank in range(self.size) for e in self.of_rank(rank, "fired") if e["fault"] == index]

    def others(self, planned: Planned) -> list[int]:
        """Ranks of the group on which a fault is not armed."""
        return [r for r in range(self.size) if r not in planned.ranks]

    def errors(self, rank: int, beat: str = "armed") -> list[dict[str, Any]]:
        """Calls that failed on a rank of the group, that of making a Communicator included."""
        made = [e for e in self.of_rank(rank, "made") if e["beat"] == beat and e["outcome"] == "error"]
        return made + [e for e in self.done(rank, beat) if e["outcome"] == "error"]

    def total(self, rank: int, key: str, beat: str = "armed") -> float:
        """How much a figure of stats() grew on a rank of the group in a beat."""

        def at_end(of: str) -> float:
            done = [e for e in self.done(rank, of) if "stats" in e]
            return float(sum(books[key] for books in done[-1]["stats"].values())) if done else 0.0

        fresh = any(e["beat"] == beat for e in self.of_rank(rank, "made"))
        return at_end(beat) - (0.0 if fresh or beat == "clean" else at_end("clean"))
