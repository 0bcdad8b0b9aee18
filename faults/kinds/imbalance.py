"""Load imbalance in bytes: an all-to-all whose pairs carry very different amounts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from faults.fault import Fault, Planned
from faults.record import Record
from faults.workload import CallSpec, altered

MATRICES = (
    *("uniform", "one_hot_rank", "silent_sender", "silent_receiver", "zero_row_and_column", "diagonal"),
    *("zipf", "log_normal", "all_zero"),
)


def matrix(name: str, size: int, words: int, rng: np.random.Generator) -> list[list[int]]:
    """[i][j] elements from rank i to rank j; about `words` a pair, or up to size² times as many in one pair.

    Rows of the hot, silent and zero kinds are those of rank size − 1.
    """
    m = np.full((size, size), words, np.int64)
    last = size - 1
    if name == "one_hot_rank":
        m //= 8
        m[:, last] = words * size
    elif name == "silent_sender":
        m[last, :] = 0
    elif name == "silent_receiver":
        m[:, last] = 0
    elif name == "zero_row_and_column":
        m[last, :] = m[:, last] = 0
    elif name == "diagonal":
        m = np.diag(np.full(size, words * size))
    elif name == "zipf":
        shares = 1.0 / np.arange(1, size * size + 1)
        m = rng.permutation((shares / shares.mean() * words).astype(np.int64)).reshape(size, size)
    elif name == "log_normal":
        m = (rng.lognormal(0.0, 1.5, (size, size)) * words).astype(np.int64)
    elif name == "all_zero":
        m[:] = 0
    return [[int(n) for n in row] for row in m]


class Imbalance(Fault):
    """Every rank makes the call with the splits of a drawn matrix. All calls of the scenario must have splits."""

    name = "imbalance"
    injects = f"an all_to_all_single whose N×N matrix of elements is one of {', '.join(MATRICES)}"
    phases = ("call",)
    args: ClassVar[dict[str, dict[str, Any]]] = {
        "matrix": {"enum": list(MATRICES)},
        "words": {"type": "integer", "minimum": 1, "maximum": 1 << 20},
    }
    required = ("matrix", "words")

    @classmethod
    def draw(cls, rng: np.random.Generator, args: Mapping[str, Any], which: int, strikes: int, size: int) -> Any:
        return {"splits": matrix(args["matrix"], size, args["words"], rng)}

    def call(self, call: CallSpec, sequence: int) -> CallSpec:
        strike = self._left.pop(sequence, None)
        if strike is None:
            return call
        splits = strike["splits"]
        self.fired(strike, sends_words=splits[self.rank], receives_words=[row[self.rank] for row in splits])
        return altered(call, splits=tuple(tuple(row) for row in splits))

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        """The books of each rank show the bytes of its rows."""
        problems = []
        drawn = {s["sequence"]: s["splits"] for p in record.plan if p.fault == cls.name for s in p.strikes}
        for rank in range(record.size):
            wanted = 0
            for call, sequence in record.scenario.numbered_calls:
                row = drawn.get(sequence, call.splits)[rank]
                item_bytes = 2 if call.dtype == "bfloat16" else 4
                wanted += item_bytes * sum(n for dst, n in enumerate(row) if dst != rank)
            came = record.total(rank, "raw_bytes")
            if came != wanted:
                problems.append(f"rank {rank} should have sent {wanted} raw bytes, its books say {came:.0f}")
        return problems
