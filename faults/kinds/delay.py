"""A slow rank: it sleeps, or keeps its CPU busy, at one phase of some calls."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from faults.fault import SCRIPT_PHASES, SEAM_PHASES, Fault, Moment, Planned
from faults.record import Record

_ROUNDED_US = 10.0  # of times in the ledgers
SHAPES = ("constant", "jitter", "ramp", "on_off", "one_off")


def lateness_unseen(
    planned: Planned, record: Record, late_ms: Mapping[int, float], until_s: Mapping[int, float]
) -> list[str]:
    """What the others have not seen of a rank that was late at these sequence numbers; shared with other kinds.

    Late before its call record goes out, it has its lateness among the arrivals. Late inside, no peer's call is over
    before it goes on. Late beyond the deadline, it is named by an error. Nothing is expected of how fast the others
    are: a machine may hold up any of them.

    Args:
        late_ms: how late, by sequence number.
        until_s: when it went on, at the earliest (at_s of the ledgers).
    """
    problems = []
    timeout_ms = 1000.0 * record.scenario.policy["timeout_s"]
    operations = {strike["sequence"]: strike["operation"] for strike in planned.strikes}
    [guilty] = planned.ranks
    name = f"{planned.fault} on rank {guilty}"
    for sequence, ms in late_ms.items():
        victims = [planned.peer] if planned.peer >= 0 else record.others(planned)
        on_s = until_s.get(sequence, float("-inf"))
        for victim in victims:
            done = record.done_at(victim, sequence, operations[sequence])
            if done is None:
                problems.append(f"{name} at #{sequence}: rank {victim} has no such call")
            elif ms > timeout_ms:
                if done["outcome"] != "error" or f"rank {guilty}" not in done["text"]:
                    problems.append(f"{name}, {ms:.0f} ms late at #{sequence}: not named on rank {victim}: {done}")
            elif planned.phase in ("before", "issue") and done["outcome"] == "returned":
                problems += _not_among_arrivals(record, done, victim, guilty, on_s)
            elif planned.phase in ("after", "reduce"):  # late to the next call
                following = [e for e in record.done(victim, "armed") if e["sequence"] == sequence + 1]
                if not following or following[0]["outcome"] != "returned":
                    problems.append(f"rank {victim} has no call after #{sequence}, which could show that {name} was")
                else:
                    problems += _not_among_arrivals(record, following[0], victim, guilty, on_s)
            elif done["at_s"] < on_s:
                problems.append(
                    f"{name}, {ms:.0f} ms at {planned.phase} of #{sequence}: rank {victim}'s call was over "
                    f"{1000 * (on_s - done['at_s']):.0f} ms before it went on"
                )
    return problems


def went_on_s(planned: Planned, record: Record) -> dict[int, float]:
    """When a rank that enters its strikes after them went on, by sequence number."""
    return {entry["sequence"]: entry["at_s"] for _, entry in record.fired(planned.index)}


def _not_among_arrivals(record: Record, done: Mapping[str, Any], victim: int, guilty: int, until_s: float) -> list[str]:
    """Whether a victim's arrivals belie that the guilty rank came after until_s.

    Who was first had come when the victim had called, so that the guilty rank's lateness is at least what lies between.
    """
    called_s = record.called_by(victim, done)
    late_us = dict(map(tuple, done["arrivals"])).get(guilty, 0.0)
    least_us = 0.0 if called_s is None else 1e6 * (until_s - called_s)
    lateness = [us for _, us in done["arrivals"]]
    if late_us >= least_us - _ROUNDED_US and lateness == sorted(lateness):
        return []
    return [
        f"rank {victim} saw rank {guilty} {late_us:.0f} µs after the first at #{done['sequence']}, which it was "
        f"{least_us:.0f} µs or more: {done['arrivals']}"
    ]


class Delay(Fault):
    """Sleeps; or, `busy`, burns its CPU as a rank does that computes too long."""

    name = "delay"
    injects = "a rank sleeps, or keeps its CPU busy, at one phase: constant, jitter, ramp, on/off or once"
    phases = (*SCRIPT_PHASES, *SEAM_PHASES)
    args: ClassVar[dict[str, dict[str, Any]]] = {
        "ms": {"type": "number", "exclusiveMinimum": 0, "maximum": 60000},
        "shape": {"enum": list(SHAPES)},
        "busy": {"type": "boolean"},
    }
    required = ("ms", "shape")

    @classmethod
    def draw(cls, rng: np.random.Generator, args: Mapping[str, Any], which: int, strikes: int, size: int) -> Any:
        ms = float(args["ms"])
        share = {
            "constant": 1.0,
            "jitter": float(rng.uniform(0.5, 1.0)),
            "ramp": (which + 1) / strikes,
            "on_off": 1.0 - which % 2,
            "one_off": 1.0 if which == 0 else 0.0,
        }[args["shape"]]
        return {"ms": round(ms * share, 1)} if share else None

    def strike(self, strike: dict[str, Any], moment: Moment) -> None:
        began = time.monotonic()
        until = began + strike["ms"] / 1000
        if self.planned.args.get("busy"):
            while time.monotonic() < until:
                pass
        else:
            time.sleep(strike["ms"] / 1000)
        self.fired(strike, ms=round((time.monotonic() - began) * 1000, 1))

    @classmethod
    def sound(cls, planned: Planned, entry: Mapping[str, Any]) -> str:
        wanted = next((s["ms"] for s in planned.strikes if s["sequence"] == entry["sequence"]), float("inf"))
        return "" if entry["ms"] >= 0.99 * wanted else f"slept {entry['ms']} ms in place of {wanted}"

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        late = {strike["sequence"]: strike["ms"] for strike in planned.strikes}
        return lateness_unseen(planned, record, late, went_on_s(planned, record))
