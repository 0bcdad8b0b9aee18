"""Load imbalance in what can be saved: the words of one rank are of another kind than those of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from conformance.strategies import KINDS as WORD_KINDS
from faults.fault import Fault, Planned
from faults.record import Record
from faults.workload import CallSpec, altered


class Compressibility(Fault):
    """Every rank calls with the same shapes; what `hot` puts in is of kind `kind`, the rest stays."""

    name = "compressibility"
    injects = "one rank's words are all zeros, random bits, or of another kind, while the others' are Gaussian"
    phases = ("call",)
    args: ClassVar[dict[str, dict[str, Any]]] = {
        "hot": {"type": "integer", "minimum": 0},
        "kind": {"enum": list(WORD_KINDS)},
        "sends": {"enum": ["more", "less", "as_much"]},
    }
    required = ("hot", "kind", "sends")

    def call(self, call: CallSpec, sequence: int) -> CallSpec:
        strike = self._left.pop(sequence, None)
        if strike is None:
            return call
        size = len(self.planned.ranks)
        kinds = [call.kind_of(rank) for rank in range(size)]
        kinds[self.planned.args["hot"] % size] = self.planned.args["kind"]
        self.fired(strike, kinds=kinds)
        return altered(call, kinds=tuple(kinds))

    @classmethod
    def sound(cls, planned: Planned, entry: Mapping[str, Any]) -> str:
        return "" if len(set(entry["kinds"])) > 1 else f"all ranks have words of one kind: {entry['kinds']}"

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        """The hot rank's books show more, or fewer, bytes sent than any other rank's."""
        hot = planned.args["hot"] % record.size
        sent = [record.total(rank, "sent_bytes") for rank in range(record.size)]
        rest = [bytes_ for rank, bytes_ in enumerate(sent) if rank != hot]
        wanted = planned.args["sends"]
        seen = {
            "more": sent[hot] > 1.1 * max(rest),
            "less": sent[hot] < 0.98 * min(rest),
            "as_much": max(sent) <= 1.02 * min(sent),
        }[wanted]
        return [] if seen else [f"rank {hot} should have sent {wanted} than the others; sent bytes by rank: {sent}"]
