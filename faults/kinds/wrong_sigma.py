"""Escapes by a wrong codebook: all ranks take one for a standard deviation that is 2^k times the true one."""

from __future__ import annotations

from typing import Any, ClassVar

from conformance.strategies import SIGMA
from faults.fault import Fault, Planned
from faults.record import Record


class WrongSigma(Fault):
    """The Communicator of the armed beat is made with a Gaussian codebook of sigma 0.02·2^k."""

    name = "wrong_sigma"
    injects = "a Gaussian codebook whose sigma is 2^k times that of the words, on all ranks alike"
    phases = ("make",)
    args: ClassVar[dict[str, dict[str, Any]]] = {
        "k": {"type": "integer", "minimum": -60, "maximum": 60},
        "escapes_percent": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
    }
    required = ("k", "escapes_percent")

    def policy(self, policy: dict[str, Any]) -> dict[str, Any]:
        sigma = SIGMA * 2.0 ** self.planned.args["k"]
        self.fired(self.planned.strikes[0], sigma=sigma)
        return {**policy, "sigma": sigma}

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        low, high = planned.args["escapes_percent"]
        problems = []
        for rank in range(record.size):
            words = record.total(rank, "coded_words")
            percent = 100 * record.total(rank, "escapes") / words if words else -1.0
            if not low <= percent <= high:
                problems.append(f"rank {rank}: {percent:.2f}% of the words escaped, wanted {low} to {high}%")
        return problems
