"""Hypothesis over ranks: whichever rank fails, all shrink to one minimal example and say how to run it again."""

from __future__ import annotations

import ast
import re
import shlex

import pytest

from conformance.meta.launching import ROOT, Launched, run_file, run_pytest

pytestmark = pytest.mark.outer

SOURCE = """
import os, signal, time
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings, strategies as st
from hypothesis.stateful import rule
from conformance.in_step import Program, in_step, programs_in_step
from conformance.strategies import words

def total(world, mine):
    x = torch.tensor([float(mine)])
    dist.all_reduce(x)
    return x.item()

def test_passes_and_all_ranks_see_the_same(world):
    seen = []
    def check(w):
        seen.append(w.tobytes())
        assert total(world, len(w)) == len(w) * world.world_size
    in_step(world, words(), check, max_examples=30)
    assert len(set(world.exchange(hash(tuple(seen))))) == 1
    assert len(set(seen)) > 10

def test_one_rank_fails_before_its_collective(world):
    if world.rank == 1:
        at_once = world.take_number
        world.take_number = lambda: (time.sleep(0.02), at_once())[1]  # what is only lucky to be first is not
    def check(w):
        if world.rank == 1:
            assert not (w > 1000).any(), f"planted: {w.max()}"
        world.exchange(len(w))
    in_step(world, st.lists(st.integers(0, 0xFFFF)).map(lambda w: np.array(w, np.uint16)), check)

@given(st.lists(st.integers(0, 99)))
@settings(max_examples=200)
def test_given_by_decorator(world, numbers):
    assert total(world, 1) == world.world_size
    assert world.rank == 0 or sum(numbers) < 150, "planted in given"

@pytest.mark.parametrize("double", [1, 2])
@given(a=st.integers(0, 50), b=st.integers(0, 50))
def test_given_passes_with_assume(world, double, a, b):
    assume(a != b)
    assert total(world, double * a) == double * a * world.world_size

class Sums(Program):
    @rule(n=st.integers(0, 9))
    def add(self, n):
        self.program.append(("add", n))
    @rule()
    def clear(self):
        self.program.append(("clear", 0))

def test_program(world):
    def play(program):
        acc = 0
        for what, n in program:
            acc = acc + n if what == "add" else 0
            if world.rank == 1:
                assert acc < 12, f"planted in a program: {acc}"
    programs_in_step(world, Sums, play, max_examples=100)

def test_examples_that_cannot_be_sent(world):
    in_step(world, st.functions(like=lambda: None), lambda f: None)

@pytest.mark.limit_s(20)
def test_a_rank_that_does_not_come_ends_it_at_once(world):
    def check(n):
        if world.rank == 1 and n > 3:
            time.sleep(5)
    in_step(world, st.integers(0, 9), check)

def test_a_rank_is_killed_within_an_example(world):
    def check(n):
        if world.rank == 1 and n > 3:
            os.kill(os.getpid(), signal.SIGKILL)
    in_step(world, st.integers(0, 9), check)

def test_right_numbers_afterwards(world):
    assert total(world, 1 + world.rank) == 3.0
"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return run_file(tmp_path_factory.mktemp("drawn"), SOURCE, 2, "--group-timeout-s=3")


def test_verdicts(drawn):
    assert drawn.kinds() == {
        "test_passes_and_all_ranks_see_the_same": "PASS",
        "test_one_rank_fails_before_its_collective": "FAIL",
        "test_given_by_decorator": "FAIL",
        "test_given_passes_with_assume[1]": "PASS",
        "test_given_passes_with_assume[2]": "PASS",
        "test_program": "FAIL",
        "test_examples_that_cannot_be_sent": "FAIL",
        "test_a_rank_that_does_not_come_ends_it_at_once": "FAIL",
        "test_a_rank_is_killed_within_an_example": "FAIL",
        "test_right_numbers_afterwards": "PASS",
    }, drawn.out + drawn.err


MINIMAL = {
    "test_one_rank_fails_before_its_collective": ("array([1001], dtype=uint16)", "planted: 1001"),
    "test_given_by_decorator": ("{'numbers': [", "planted in given"),
    "test_program": ("[('add', 3), ('add', 9)]", "planted in a program: 12"),
}


@pytest.mark.parametrize("name", MINIMAL)
def test_all_ranks_report_the_same_minimal_example_and_who_failed(drawn, name):
    example, planted = MINIMAL[name]
    result = drawn.results[name]
    assert result["by_rank"]["0"] == result["by_rank"]["1"], "the ranks must end with the same example"
    assert re.search(r"minimal example of \d+ run: ", result["by_rank"]["1"]), result["text"]
    assert example in result["by_rank"]["1"], result["text"]
    assert "rank 1 failed first" in result["text"]
    assert planted in result["text"]
    assert "rank 0: passed" in result["text"] or "ranks [1] had failed before" in result["text"]


def test_numbers_are_shrunk_to_the_edge(drawn):
    numbers = re.search(r"'numbers': \[([\d, ]+)\]", drawn.results["test_given_by_decorator"]["text"])
    assert numbers
    assert sum(map(int, numbers[1].split(","))) == 150


@pytest.mark.parametrize("name", MINIMAL)
def test_the_printed_command_runs_the_minimal_example_again(drawn, name, tmp_path):
    text = drawn.results[name]["text"]
    [line] = re.findall(r"run it again: (.*)", text)
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "pytest"]
    folder = drawn.run_dir.parent
    again = run_pytest(tmp_path / "run", "-p", "conformance.plugin", "--ranked", *words[3:], cwd=folder)
    assert again.kinds() == {name: "FAIL"}, again.out + again.err
    assert "minimal example of 1 run" in again.results[name]["text"]
    assert MINIMAL[name][0] in again.results[name]["by_rank"]["1"]


def test_what_cannot_be_sent_is_said(drawn):
    assert "cannot be sent to other ranks" in drawn.results["test_examples_that_cannot_be_sent"]["text"]


def test_a_rank_that_does_not_come_is_named(drawn):
    reason = drawn.results["test_a_rank_that_does_not_come_ends_it_at_once"]["reason"]
    assert "ranks [1] did not arrive" in reason
    assert drawn.results["test_a_rank_is_killed_within_an_example"]["reason"] == "rank 1 died: signal SIGKILL"


def test_the_seed_decides_what_is_drawn(tmp_path):
    source = """
from hypothesis import strategies as st
from conformance.in_step import in_step
def test_it(world, record_row):
    seen = []
    in_step(world, st.integers(0, 1 << 60), seen.append, max_examples=20)
    record_row("seen", count=len(seen), last=seen[-1], total=sum(seen))
"""
    seeds = ((), (), ("--example-seed=5",), ("--example-seed=nightly", "--example-factor=3"))
    runs = [run_file(tmp_path / str(i), source, 2, *seed) for i, seed in enumerate(seeds)]
    rows = [run.report["rows"][0] for run in runs]
    assert rows[0] == rows[1], "the default seed is fixed"
    assert len({row["total"] for row in rows}) == 3
    assert [row["count"] for row in rows] == [20, 20, 20, 60]
    assert [run.report["header"]["example seed"] for run in runs[:3]] == ["0", "0", "5"]
    assert re.fullmatch(r"20\d{6}", runs[3].report["header"]["example seed"])


PLANTED = """
import dataclasses
from conformance.subjects.zipccl import ZipcclSubject

class Work:
    def __init__(self, comm, number, inner, output):
        self.comm, self.number, self.inner, self.output = comm, number, inner, output
    def wait(self):
        self.inner.wait()
        if self.number < self.comm.latest and self.output.numel():
            self.output.view(dtype=__import__("torch").int16).view(-1)[0] ^= 1
        self.comm.latest = max(self.comm.latest, self.number)
    def is_completed(self):
        return self.inner.is_completed()

class WrongWhenWaitedForInReverse:
    \"\"\"Spoils the data of a call whose Work is waited for after that of a later call.\"\"\"
    def __init__(self, inner):
        self.inner, self.latest, self.number = inner, 0, 0
    def __getattr__(self, name):
        return getattr(self.inner, name)
    def _call(self, name, output, input, async_op):
        work = getattr(self.inner, name)(output, input, async_op=async_op)
        self.number += 1
        return Work(self, self.number, work, output) if async_op else None
    def all_gather_into_tensor(self, output, input, async_op=False):
        return self._call("all_gather_into_tensor", output, input, async_op)
    def all_to_all_single(self, output, input, async_op=False):
        return self._call("all_to_all_single", output, input, async_op)
    def reduce_scatter_tensor(self, output, input, async_op=False):
        return self._call("reduce_scatter_tensor", output, input, async_op)

class Planted(ZipcclSubject):
    name = "planted"
    capabilities = dataclasses.replace(ZipcclSubject.capabilities, modes=("always",))
    def communicator(self, group, *, mode="", timeout_s=20.0):
        return WrongWhenWaitedForInReverse(super().communicator(group, mode=mode, timeout_s=timeout_s))

subject = Planted
"""


def test_a_defect_of_interleaved_calls_is_shrunk_to_the_two_that_matter(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    path = ROOT / "conformance" / "test_stateful.py"
    run = run_pytest(tmp_path / "run", str(path), "--subject=planted:subject", "--world-size=2", cwd=tmp_path)
    [result] = run.results.values()
    assert result["kind"] == "FAIL", run.out + run.err
    assert result["by_rank"]["0"].replace("rank 0", "") == result["by_rank"]["1"].replace("rank 1", "")
    program = re.search(r"minimal example of \d+ run: (.*)", result["text"])
    assert program
    steps = ast.literal_eval(program[1])
    assert len(steps) == 2, steps
    assert all(step[0] in ("issue", "both") for step in steps), "two issues suffice: odd ranks wait in reverse order"
    assert "bit" in result["text"] or "differ" in result["text"]
