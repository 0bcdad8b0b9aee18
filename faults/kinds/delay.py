"""A slow rank: it sleeps, or keeps its CPU busy, at one phase of some calls."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from faults.fault import SCRIPT_PHASES, SEAM_PHASES, Fault, Moment, Planned
from faults.record import Record

SHAPES = ("constant", "jitter", "ramp", "on_off", "one_off")


def lateness_unseen(planned: Planned, record: Record, late_ms: Mapping[int, float]) -> list[str]:
    """What the others have not seen of a rank that was so late at these sequence numbers; shared with other kinds.

    Late before its call record goes out, a rank is the last to arrive, with its lateness. Late inside, it makes its
    peers' call longer. Late beyond the deadline, it is named by an error.
    """
    problems = []
    timeout_ms = 1000.0 * record.scenario.policy["timeout_s"]
    operations = {strike["sequence"]: strike["operation"] for strike in planned.strikes}
    [guilty] = planned.ranks
    name = f"{planned.fault} on rank {guilty}"
    for sequence, ms in late_ms.items():
        victims = [planned.peer] if planned.peer >= 0 else record.others(planned)
        for victim in victims:
            done = record.done_at(victim, sequence, operations[sequence])
            if done is None:
                problems.append(f"{name} at #{sequence}: rank {victim} has no such call")
            elif ms > timeout_ms:
                if done["outcome"] != "error" or f"rank {guilty}" not in done["text"]:
                    problems.append(f"{name}, {ms:.0f} ms late at #{sequence}: not named on rank {victim}: {done}")
            elif planned.phase in ("before", "issue") and done["outcome"] == "returned":
                last, late_us = done["arrivals"][-1]
                if last != guilty or not 0.5 * ms <= late_us / 1000:
                    problems.append(
                        f"{name}, {ms:.0f} ms late at #{sequence}: rank {victim} saw rank {last} last, "
                        f"{late_us / 1000:.0f} ms after the first"
                    )
            elif planned.phase in ("after", "reduce"):
                problems += _late_next(planned, record, victim, sequence, ms)
            elif done["took_s"] * 1000 < 0.8 * ms:
                problems.append(
                    f"{name}, {ms:.0f} ms at {planned.phase} of #{sequence}: rank {victim}'s call took "
                    f"{done['took_s'] * 1000:.0f} ms"
                )
    return problems


def _late_next(planned: Planned, record: Record, victim: int, sequence: int, ms: float) -> list[str]:
    """A rank that is slow at the end of a call is late to the next one."""
    following = [e for e in record.done(victim, "armed") if e["sequence"] == sequence + 1]
    if not following or following[0]["outcome"] != "returned":
        return [f"rank {victim} has no call after #{sequence}, which could show that rank {planned.ranks[0]} was slow"]
    last, late_us = following[0]["arrivals"][-1]
    if last == planned.ranks[0] and late_us / 1000 >= 0.5 * ms:
        return []
    return [f"rank {victim} saw rank {last} last at #{sequence + 1}, {late_us / 1000:.0f} ms after the first"]


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
        return lateness_unseen(planned, record, late)
