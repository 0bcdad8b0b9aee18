"""Whichever rank is killed, at whatever moment: the run ends soon, names the rank, and loses one verdict at most."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conformance.launch import Tail, read_run
from conformance.meta.launching import Launched, ranked_args, start_pytest, without_ranks

pytestmark = pytest.mark.outer

RANKS = 3
LIMIT_S = 60.0
SOURCE = """
import time
import pytest
import torch
import torch.distributed as dist

@pytest.mark.parametrize("i", range(30))
def test_sum(world, i):
    time.sleep(0.1)
    x = torch.tensor([float(i)])
    dist.all_reduce(x)
    time.sleep(0.05)
    assert x.item() == i * world.world_size
"""


def started(run_dir: Path, rank: int) -> int:
    """The rank's pid once it has one."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for event in Tail(run_dir / f"rank{rank}.jsonl").read():
            if event["event"] == "start":
                return int(event["pid"])
        time.sleep(0.01)
    raise TimeoutError(f"rank {rank} did not start within {LIMIT_S:g} s")


def kill_at(folder: Path, victim: int, after_s: float) -> tuple[Launched, float, bool]:
    """(what came of it, seconds from the kill to the end, whether the rank was still there to be killed)."""
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(SOURCE)
    run_dir = folder / "run"
    args = [*ranked_args(RANKS), str(folder / "test_it.py"), "--run-dir", str(run_dir)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = start_pytest(args, without_ranks(), folder, out, err)
        pid = started(run_dir, victim)
        time.sleep(after_s)
        killed = time.monotonic()
        try:
            os.kill(pid, signal.SIGKILL)
            there = True
        except ProcessLookupError:
            there = False
        code = process.wait(LIMIT_S + 60)
        took_s = time.monotonic() - killed
        out.seek(0)
        err.seek(0)
        return Launched(code, out.read(), err.read(), run_dir), took_s, there


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, Launched, float]]:
    """(what was done, victim, what came of it, seconds to the end) of kills at moments drawn from KILL_SEED."""
    seed = int(os.environ.get("KILL_SEED", "7"))
    rng = random.Random(seed)
    moments_s = [0.0, rng.uniform(0, 0.5), *(rng.uniform(0.5, 5.5) for _ in range(4))]
    moments = [(rng.randrange(RANKS), after_s) for after_s in moments_s]
    folder = tmp_path_factory.mktemp("killed")
    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(lambda m: kill_at(folder / f"{m[0]}-{m[1]:.3f}", *m), moments))
    return [
        (f"seed {seed}: rank {victim} killed {after_s:.3f} s after its start", victim, run, took_s)
        for (victim, after_s), (run, took_s, there) in zip(moments, runs, strict=True)
        if there
    ]


def test_killing_any_rank_at_any_moment_ends_the_run_with_its_name(killed):
    assert len(killed) >= 4, "most ranks must have been there to be killed"
    for what, victim, run, took_s in killed:
        assert took_s < LIMIT_S, f"{what}: the run went on for {took_s:.0f} s"
        assert run.returncode == 1, f"{what}:\n{run.out}{run.err}"
        failed = [r for r in run.results.values() if r["kind"] != "PASS"]
        said = " ".join([run.problems, *(r["reason"] for r in failed)])
        assert f"rank {victim} died" in said, f"{what}: {said}\n{run.out}{run.err}"
        assert len(failed) <= 1, f"{what}: {failed}"
        assert f"rank {victim} died" in run.out + run.err
        if "before its first test" not in said:
            assert len(run.results) == 30, f"{what}: tests after the death did not run: {run.problems}"


def test_the_run_directory_is_enough_to_judge_a_killed_run_again(killed):
    for what, victim, run, _ in killed:
        again = read_run(run.run_dir)
        assert not again.ok(), what
        assert {r.nodeid.split("::")[-1]: r.kind for r in again.results.values()} == run.kinds(), what
        said = " ".join([*again.problems, *(r.reason for r in again.results.values())])
        assert f"rank {victim} died" in said, what
