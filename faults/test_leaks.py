"""Nothing leaks: the same ranks run a scenario again and again, and hold in the end what they held in the beginning."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.lab import Job, Lab
from faults.record import Record
from faults.scenario import library

ROUNDS, WARM_ROUNDS = 12, 4
GROWTH_LIMIT_BYTES = 4 << 20


@pytest.mark.parametrize(
    "name", ["late_on_off", "flip_record_sign_mantissa", "flip_envelope_sequence", "number_of_elements"]
)
def test_ranks_hold_no_more_after_many_scenarios(lab: Lab, tmp_path: Path, name: str) -> None:
    scenario = library()[name]
    held: list[dict[int, dict[str, int]]] = []
    pids = []
    for number in range(ROUNDS):
        directory = tmp_path / str(number)
        verdict = lab.run(Job(scenario.data, directory, scenario.needs_own_ranks, scenario.limit_s))
        assert verdict["ok"], verdict["clauses"]
        record = Record.read(directory)
        ranks = range(record.size)
        held.append({r: next(e["after"] for e in record.of_rank(r, "resources")) for r in ranks})
        pids.append([record.of_rank(r, "start")[0]["pid"] for r in ranks])
    assert pids == [pids[0]] * ROUNDS, "the rounds must share their ranks, or they prove nothing"
    for rank in held[0]:
        first, last = held[WARM_ROUNDS][rank], held[-1][rank]
        for what in ("python_threads", "threads", "file_descriptors"):
            assert last[what] <= first[what], f"rank {rank}: {what} went from {first[what]} to {last[what]}"
        grown = last["resident_bytes"] - first["resident_bytes"]
        assert grown <= GROWTH_LIMIT_BYTES, (
            f"rank {rank} grew by {grown >> 10} KiB in {ROUNDS - WARM_ROUNDS - 1} rounds"
        )
