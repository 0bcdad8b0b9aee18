"""Disagreement: one rank makes its Communicator with another policy."""

from __future__ import annotations

from typing import Any, ClassVar

from faults.fault import Fault, Planned
from faults.record import Record


def making_unseen(planned: Planned, record: Record, word: str) -> list[str]:
    """Ranks that made a Communicator all the same, or whose error does not name both sides and the word."""
    problems = []
    for rank in range(record.size):
        made = [e for e in record.of_rank(rank, "made") if e["beat"] == "armed"]
        if not made or made[0]["outcome"] != "error" or made[0]["error"] != "PeerError":
            problems.append(f"rank {rank} should have had a PeerError when it made its Communicator, has {made[:1]}")
        elif word not in made[0]["text"] or made[0]["text"].count("rank ") < 2:
            problems.append(f"rank {rank}'s error names not {word!r} and two ranks: {made[0]['text']}")
    return problems


class OtherPolicy(Fault):
    """A field of Policy differs on one rank: threshold, verification, deadline, …"""

    name = "policy"
    injects = "one rank's Policy has another value in one field"
    phases = ("make",)
    args: ClassVar[dict[str, dict[str, Any]]] = {
        "field": {"enum": ["compress", "min_bytes", "prefix_percent", "verify", "retransmit", "timeout_s", "sigma"]},
        "value": {"type": ["string", "number", "boolean"]},
    }
    required = ("field", "value")

    def policy(self, policy: dict[str, Any]) -> dict[str, Any]:
        field, value = self.planned.args["field"], self.planned.args["value"]
        self.fired(self.planned.strikes[0], field=field, was=policy.get(field), value=value)
        return {**policy, field: value}

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        return making_unseen(planned, record, "policy")
