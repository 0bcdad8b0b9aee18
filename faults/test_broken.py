"""The suite is judged: variants of our product, each with one defect planted, must be caught, and by which clause."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.lab import Job, Lab
from faults.scenario import library

CAUGHT = [
    # family, defect, scenario, clause, what the complaint says
    ("slow_rank", "blames_the_first", "late_one_off", "observed", "saw rank"),
    ("slow_rank", "impatient", "late_under_limit", "outcome", "RankTimeout"),
    ("load_imbalance", "decides_per_rank", "bytes_log_normal_auto", "outcome", ""),
    ("load_imbalance", "falls_back_silently", "words_random_on_one_rank", "outcome", "CorruptFrame"),
    ("escapes", "falls_back_silently", "escapes_all", "outcome", "CorruptFrame"),
    ("corrupt_frame", "ignores_digest", "flip_record_sign_mantissa", "outcome", "should have raised"),
    ("corrupt_frame", "ignores_digest", "flip_elements", "outcome", "should have raised"),
    ("corrupt_frame", "accepts_stale", "stale_message", "observed", "without a word"),
    ("corrupt_frame", "accepts_stale", "stale_frame", "observed", "without a word"),
    ("dead_rank", "waits_without_bound", "stopped_for_good", "harness", "hung"),
    ("dead_rank", "keeps_its_own_error", "sigkill_send", "outcome", "different errors"),
    ("dead_rank", "swallows_peer_error", "sigkill_encode", "outcome", "should fail"),
    ("disagreement", "swallows_peer_error", "number_of_elements", "observed", "saw nothing wrong"),
    ("slow_rank", "deaf_to_the_seam", "late_constant", "fired", "should have fired"),
    ("corrupt_frame", "deaf_to_the_seam", "flip_header_magic", "fired", "should have fired"),
    ("escapes", "keeps_its_threads", "escapes_none", "leaks", "threads"),
]


@pytest.mark.parametrize(
    ("family", "defect", "scenario", "clause", "text"),
    CAUGHT,
    ids=[f"{defect}-{name}" for _, defect, name, *_ in CAUGHT],
)
def test_defect_is_caught(
    lab: Lab, tmp_path: Path, family: str, defect: str, scenario: str, clause: str, text: str
) -> None:
    chosen = library()[scenario]
    assert chosen.family == family
    job = Job(chosen.data, tmp_path / scenario, True, chosen.limit_s, f"broken.{defect}")
    verdict = lab.run(job)
    assert not verdict["ok"], f"{defect} passed {scenario}"
    said = verdict["clauses"].get(clause, [])
    assert any(text in complaint for complaint in said), verdict["clauses"]


def test_every_family_has_a_defect_that_is_caught() -> None:
    assert {family for family, *_ in CAUGHT} == {s.family for s in library().values()}
