"""The judge is judged: every planted defect must be caught, by the test that is named for it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from conformance.meta.launching import ROOT, Launched, run_pytest
from conformance.subjects.broken import BROKEN
from conformance.subjects.torch_native import subject as sound_subject

pytestmark = pytest.mark.outer


def launch(run_dir: Path, nodeid: str, subject: str, ranks: int) -> Launched:
    return run_pytest(run_dir, nodeid, "--subject", subject, "--world-size", str(ranks), "--limit-s=40", limit_s=100)


@pytest.mark.proves("JUDGE-1")
@pytest.mark.parametrize("name", BROKEN)
def test_planted_defect_is_caught_by_the_test_named_for_it(name, tmp_path):
    defect = BROKEN[name]
    run = launch(tmp_path / "run", defect.caught_by, f"broken.{name}", defect.ranks)
    kinds = run.kinds()
    assert not run.problems, f"broken.{name}: the run itself broke:\n{run.problems}"
    assert kinds, f"broken.{name}: {defect.caught_by} collected nothing:\n{run.out}{run.err}"
    assert "FAIL" in kinds.values(), f"broken.{name} ({defect.what}) was not caught: {kinds}\n{run.out}"
    assert "ERROR" not in kinds.values(), f"broken.{name}: the suite broke where it should judge: {kinds}\n{run.err}"
    for result in run.results.values():
        assert "hung" not in result["reason"], f"broken.{name} was found by a hang only: {result['reason']}"
        assert " died: " not in result["reason"], f"broken.{name} was found by a death only: {result['reason']}"
    assert run.returncode == 1


@pytest.mark.parametrize("name", BROKEN)
def test_planted_defect_names_a_test_that_exists(name):
    path, _, test = BROKEN[name].caught_by.partition("::")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    assert (ROOT / path).is_file()
    assert callable(getattr(module, test.split("[")[0]))
    assert BROKEN[name].what


@pytest.mark.proves("JUDGE-1")
def test_there_are_defects_of_every_kind():
    """At least 20, over codec, exchange, sum and Works: a judge that catches one kind only would pass otherwise."""
    assert len(BROKEN) >= 20
    suites = {defect.caught_by.split("::")[0].removeprefix("conformance/test_") for defect in BROKEN.values()}
    wanted = {"bit_exactness", "collectives", "determinism", "escape_path", "exchange", "operations", "reject", "sum"}
    assert {f"{name}.py" for name in (*wanted, "slow_rank")} <= suites


@pytest.mark.proves("JUDGE-2")
def test_control_passes_the_tests_that_catch_its_spoilt_copies(tmp_path):
    """Without this a test that always fails would catch every defect. Our own subject passes them in the main run."""
    nodeids = sorted({d.caught_by for d in BROKEN.values() if d.like == sound_subject().name})
    run = run_pytest(tmp_path / "run", *nodeids, "--subject", "torch_native", "--world-size=2", limit_s=100)
    assert set(run.kinds().values()) == {"PASS"}, run.out + run.err
    assert run.returncode == 0
