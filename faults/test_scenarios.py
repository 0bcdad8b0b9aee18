"""Every scenario of scenarios/, run and judged. `pytest -n 4 faults/` runs them in parallel."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.kinds import KINDS
from faults.lab import Job, Lab
from faults.scenario import Scenario, library

FEWEST_IN_CI = 60


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(s, id=s.id, marks=[pytest.mark.nightly] if s.nightly else []) for s in library().values()],
)
def test_scenario(lab: Lab, scenario: Scenario, tmp_path: Path) -> None:
    directory = tmp_path / scenario.id
    verdict = lab.run(Job(scenario.data, directory, scenario.needs_own_ranks, scenario.limit_s))
    complaints = [f"{clause}: {text}" for clause, texts in verdict["clauses"].items() for text in texts]
    assert verdict["ok"], f"{directory}:\n" + "\n".join(complaints)
    assert all(all(entry[step] for step in ("planned", "fired", "observed", "healed")) for entry in verdict["ledger"])


def test_every_family_and_every_kind_of_fault_has_scenarios_in_ci() -> None:
    in_ci = [s for s in library().values() if not s.nightly]
    assert len(in_ci) >= FEWEST_IN_CI
    assert {s.family for s in in_ci} == {
        "slow_rank",
        "load_imbalance",
        "escapes",
        "corrupt_frame",
        "dead_rank",
        "disagreement",
    }
    assert {each["fault"] for s in in_ci for each in s.faults} == set(KINDS)
