"""Disagreement: one rank calls the same operation with other arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from faults.fault import Fault, Planned
from faults.record import Record
from faults.workload import CallSpec

DIFFERENT = ("dtype", "n", "op", "factor", "root", "splits", "operation")


class Arguments(Fault):
    """Numbers are added to; dtype, op and operation are replaced; of splits, one entry of this rank's row grows."""

    name = "arguments"
    injects = f"one rank calls with another {', '.join(DIFFERENT)}"
    phases = ("call",)
    args: ClassVar[dict[str, dict[str, Any]]] = {
        "field": {"enum": list(DIFFERENT)},
        "value": {"type": ["string", "number"]},
    }
    required = ("field", "value")

    def call(self, call: CallSpec, sequence: int) -> CallSpec:
        strike = self._left.pop(sequence, None)
        if strike is None:
            return call
        field, value = self.planned.args["field"], self.planned.args["value"]
        was = getattr(call, field)
        now: Any = value
        if field in ("n", "factor", "root"):
            now = was + value
        elif field == "splits":
            rows = [list(row) for row in call.splits]
            rows[self.rank][(self.rank + 1) % len(rows)] += int(value)
            now = tuple(tuple(row) for row in rows)
        self.fired(strike, field=field, was=was, now=now)
        return replace(call, **{field: now})

    @classmethod
    def sound(cls, planned: Planned, entry: Mapping[str, Any]) -> str:
        return "" if entry["was"] != entry["now"] else "the arguments are the same"

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        return pairs_unseen(planned, record)


def pairs_unseen(planned: Planned, record: Record) -> list[str]:
    """Ranks without an error that names the pair: the rank with the fault, and another."""
    problems = []
    for strike in planned.strikes:
        for rank in range(record.size):
            done = record.done_at(rank, strike["sequence"], strike["operation"])
            if done is None or done["outcome"] != "error":
                problems.append(f"rank {rank} saw nothing wrong in #{strike['sequence']}")
            elif f"rank {planned.ranks[0]}" not in done["text"] or done["text"].count("rank ") < 2:
                problems.append(f"rank {rank}'s error does not name the pair: {done['text']}")
    return problems
