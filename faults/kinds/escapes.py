"""Escapes: from some call on, the words are of a kind that the codebook does not hold."""

from __future__ import annotations

from typing import Any, ClassVar

from conformance.strategies import GAUSSIAN_EXPONENTS
from conformance.strategies import KINDS as WORD_KINDS
from faults.fault import Fault, Planned
from faults.layout import frame_bytes_of, phase_one_bytes
from faults.record import Record
from faults.workload import CallSpec, altered, seed_of


class Escapes(Fault):
    """Every rank's words are of kind `kind`.

    For scenarios of all_gather_into_tensor of bfloat16 whose policy gives the Gaussian codebook of sigma 0.02.
    """

    name = "escapes"
    injects = "words with none, one, many or only escapes, at a block's edge, at the rule for stored blocks or over it"
    phases = ("call",)
    args: ClassVar[dict[str, dict[str, Any]]] = {"kind": {"enum": list(WORD_KINDS)}}
    required = ("kind",)

    def call(self, call: CallSpec, sequence: int) -> CallSpec:
        strike = self._left.pop(sequence, None)
        if strike is None:
            return call
        self.fired(strike, kind_of_words=self.planned.args["kind"])
        return altered(call, kinds=(self.planned.args["kind"],))

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        """Escapes and phase twos in the books are what FORMAT.md gives for these words, to the word."""
        problems, scenario = [], record.scenario
        struck = {s["sequence"]: p.args["kind"] for p in record.plan if p.fault == cls.name for s in p.strikes}
        copies = record.size - 1
        for rank in range(record.size):
            escapes = phase_twos = 0
            for index, (call, sequence) in enumerate(scenario.numbered_calls):
                call = altered(call, kinds=(struck[sequence],)) if sequence in struck else call
                words = call.inputs(record.size, seed_of(scenario.seed, "armed", index))[rank]
                frame_bytes, escaped, _ = frame_bytes_of(words, GAUSSIAN_EXPONENTS)
                escapes += copies * escaped
                phase_twos += copies * (frame_bytes > phase_one_bytes(len(words), scenario.policy["prefix_percent"]))
            for key, wanted in (("escapes", escapes), ("phase_two_messages", phase_twos)):
                came = record.total(rank, key)
                if came != wanted:
                    problems.append(f"rank {rank}: {key} should be {wanted}, the books say {came:.0f}")
        return problems
