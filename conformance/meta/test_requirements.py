"""docs/CONFORMANCE.md and the tests agree: every requirement is proved, and every test proves one that exists."""

from __future__ import annotations

import functools
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from conformance.meta.launching import ROOT

pytestmark = pytest.mark.outer

DOCUMENT = ROOT / "docs" / "CONFORMANCE.md"
HERE = "meta/"

# Requirements on the judge are shown by its own tests, which stand for themselves.
SHOWN_BY = {
    "PLUGIN-1": ("test_plugin.py::test_every_verdict_is_of_the_right_kind",),
    "PLUGIN-2": (
        "test_plugin.py::test_real_error_of_the_first_failing_rank_is_shown",
        "test_plugin.py::test_merge_blames_the_earliest_failure_and_not_the_lowest_rank",
    ),
    "PLUGIN-3": (
        "test_plugin.py::test_a_rank_that_fails_is_named_with_what_it_did_and_the_next_test_is_unharmed",
        "test_plugin.py::test_deaths_cost_no_other_verdict",
    ),
    "PLUGIN-4": ("test_plugin.py::test_a_lone_skip_is_named", "test_plugin.py::test_merge_fails_when_some_skip"),
    "PLUGIN-5": ("test_plugin.py::test_one_junit_has_every_test",),
    "PLUGIN-6": ("test_plugin.py::test_a_run_can_be_judged_again_from_its_logs",),
    "PLUGIN-7": ("test_plugin.py::test_the_deadline_ends_everything_and_names_what_did_not_finish",),
    "PLUGIN-8": (
        "test_plugin.py::test_wrong_arguments_are_refused_before_anything_starts",
        "test_plugin.py::test_ranks_that_collect_different_tests_do_not_run",
    ),
    "PLUGIN-9": ("test_plugin.py::test_under_plain_torchrun_ranks_agree_and_name_the_store_when_it_is_gone",),
    "PLUGIN-10": ("test_kill.py::test_killing_any_rank_at_any_moment_ends_the_run_with_its_name",),
    "PLUGIN-11": (
        "test_in_step.py::test_all_ranks_report_the_same_minimal_example_and_who_failed",
        "test_in_step.py::test_the_printed_command_runs_the_minimal_example_again",
    ),
    "PLUGIN-12": ("test_plugin.py::test_nothing_fails_of_operations_that_a_correct_subject_does_not_claim",),
    "PLUGIN-13": ("test_plugin.py::test_a_subject_that_is_none_is_refused_in_a_line_before_anything_starts",),
    "JUDGE-3": (
        "test_oracle.py::test_ordered_sum_equals_numpys_float32_in_rank_order",
        "test_oracle.py::test_premul_rounds_before_the_sum",
        "test_oracle.py::test_conversions_agree_with_numpy_and_torch",
    ),
    "JUDGE-4": (
        "test_oracle.py::test_comparison_tells_zeros_and_nans_apart_and_says_where",
        "test_oracle.py::test_guards_see_one_byte_on_either_side",
    ),
    "JUDGE-5": ("test_oracle.py::test_patterns_are_the_same_each_time_and_others_on_each_rank",),
    "JUDGE-6": (
        "test_arrows.py::test_only_subjects_and_fixtures_see_the_core",
        "test_arrows.py::test_subject_and_launcher_import_nothing_of_ours",
    ),
}


@functools.cache
def requirements() -> dict[str, str]:
    """id → sentence, from the tables of the document."""
    rows = re.findall(r"^\| ([A-Z0-9]+-\d+) \| (.+) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    ids = [name for name, _ in rows]
    assert len(ids) == len(set(ids)), f"{DOCUMENT.name}: ids given twice: {sorted(i for i in ids if ids.count(i) > 1)}"
    return dict(rows)


def every_test() -> Iterator[tuple[str, Any, Any]]:
    """(path in conformance/ :: name, function, module) of every test of the suites and of the judge."""
    for path in sorted((ROOT / "conformance").rglob("test_*.py")):
        name = path.relative_to(ROOT / "conformance").as_posix()
        module = importlib.import_module("conformance." + name.removesuffix(".py").replace("/", "."))
        for attribute, function in vars(module).items():
            if attribute.startswith("test_") and callable(function) and function.__module__ == module.__name__:
                yield f"{name}::{attribute}", function, module


@functools.cache
def citations() -> dict[str, list[str]]:
    """Test → the ids it cites."""
    cited: dict[str, list[str]] = {}
    for name, function, module in every_test():
        marks = [*getattr(function, "pytestmark", [])]
        of_module = getattr(module, "pytestmark", [])
        marks += of_module if isinstance(of_module, list) else [of_module]
        cited[name] = [i for mark in marks if mark.name == "proves" for i in mark.args]
    for requirement, names in SHOWN_BY.items():
        for name in names:
            assert HERE + name in cited, f"{requirement} is shown by {name}, which is no test of conformance/meta"
            cited[HERE + name].append(requirement)
    return cited


def test_every_requirement_says_must_in_one_sentence():
    assert len(requirements()) > 80
    wrong = [i for i, text in requirements().items() if "MUST" not in text or not text.endswith(".")]
    assert not wrong, f"a requirement is a sentence with MUST: {wrong}"


def test_every_cited_requirement_exists():
    unknown = {name: [i for i in ids if i not in requirements()] for name, ids in citations().items()}
    unknown = {name: ids for name, ids in unknown.items() if ids}
    assert not unknown, f"{DOCUMENT.name} has no such requirements: {unknown}"


def test_every_test_of_the_suites_cites_what_it_proves():
    silent = [name for name, ids in citations().items() if not ids and not name.startswith(HERE)]
    assert not silent, f"mark these with @pytest.mark.proves(id of {DOCUMENT.name}): {silent}"


def test_every_requirement_is_proved():
    proved = defaultdict(list)
    for name, ids in citations().items():
        for i in ids:
            proved[i].append(name)
    nothing = [i for i in requirements() if i not in proved]
    assert not nothing, f"nothing proves {nothing}"


def test_every_test_that_the_document_names_exists():
    named = set(re.findall(r"`((?:meta/)?test_\w+\.py::test_\w+)`", DOCUMENT.read_text(encoding="utf-8")))
    assert len(named) > 25
    assert not named - set(citations()), f"no such tests: {sorted(named - set(citations()))}"
