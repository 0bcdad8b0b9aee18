"""Escapes: from some call on, the words are of a kind that the codebook does not hold."""

from __future__ import annotations

from typing import Any, ClassVar

from conformance.strategies import GAUSSIAN_EXPONENTS, KINDS as WORD_KINDS
from faults.fault import Fault, Planned
from faults.layout import frame_bytes_of
from faults.record import Record
from faults.workload import CallSpec, altered, seed_of


class Escapes(Fault):
    """Every rank's words are of kind `kind`; the codebook is the Gaussian one of sigma 0.02, given by the policy."""

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
        """Escapes and sent bytes in the books are what FORMAT.md gives for these words, to the byte."""
        problems = []
        scenario = record.scenario
        touched = {strike["sequence"] for strike in planned.strikes}
        for rank in range(record.size):
            escapes = phase_two = 0
            for index, (call, sequence) in enumerate(scenario.numbered_calls):
                if sequence in touched:
                    call = altered(call, kinds=(planned.args["kind"],))
                words = call.inputs(record.size, seed_of(scenario.seed, "armed", index))[rank]
                size, found, _ = frame_bytes_of(words, GAUSSIAN_EXPONENTS)
                copies = record.size - 1
                escapes += found * copies
                static, _, _ = frame_bytes_of(words[:0], GAUSSIAN_EXPONENTS)
                phase_two += copies * (size - found_in_prefix(words, scenario.policy["prefix_percent"]) > 0)
                del static
            for key, wanted in (("escapes", escapes), ("phase_two_messages", phase_two)):
                came = record.total(rank, key)
                if came != wanted:
                    problems.append(f"rank {rank}: {key} should be {wanted}, the books say {came:.0f}")
        return problems


def found_in_prefix(words: Any, prefix_percent: float) -> int:
    """Bytes of a frame that travel in phase one: the static part and the agreed prefix."""
    from faults.layout import BLOCK_WORDS, CODE_PLANES, HEADER_BYTES, align128

    n = len(words)
    static = HEADER_BYTES + align128(8 * -(-n // BLOCK_WORDS))
    spill = 0
    for begin in range(0, n, BLOCK_WORDS):
        m = min(BLOCK_WORDS, n - begin)
        record = m + CODE_PLANES * -(-m // 8)
        static += align128(record)
        spill += max(0, 2 * m - record)
    return static + min(spill, align128(int(n * prefix_percent / 100)))
