"""Disagreement: one rank makes two calls in the other order."""

from __future__ import annotations

from typing import Any, ClassVar

from faults.fault import Fault, Planned
from faults.kinds.arguments import pairs_unseen
from faults.record import Record
from faults.workload import CallSpec


class Order(Fault):
    """Armed for the sequence numbers of two calls: at each, the rank calls what the others call at the other."""

    name = "order"
    injects = "one rank makes two calls in the other order"
    phases = ("call",)
    args: ClassVar[dict[str, dict[str, Any]]] = {}

    def arm(self) -> None:
        super().arm()
        self.calls: dict[int, CallSpec] = {}

    def call(self, call: CallSpec, sequence: int) -> CallSpec:
        strike = self._left.pop(sequence, None)
        if strike is None:
            return call
        [other] = [s["sequence"] for s in self.planned.strikes if s["sequence"] != sequence]
        instead = self.calls[other]
        self.fired(strike, was=call.operation, now=instead.operation)
        return instead

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        return pairs_unseen(planned, record)
