"""The plugin judges right whatever ranks do: each way in which a rank can fail is planted, launched, and looked up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from conformance.launch import Follower, Run, Tail, describe_exit, read_run
from conformance.meta.launching import ROOT, Launched, run_file, run_pytest
from conformance.plugin import merge
from conformance.report import closing_line, frames_by_kind, suite_of

pytestmark = pytest.mark.outer

PRELUDE = '''
import os, signal, time, warnings
import pytest
import torch
import torch.distributed as dist

def total(world, mine):
    """An all_reduce whose answer tells which calls paired up."""
    x = torch.tensor([float(mine)])
    dist.all_reduce(x)
    return x.item()
'''

ALONE = (
    PRELUDE
    + """
def test_first_passes(world, record_row):
    record_row("frames", kind="made up", dtype="bfloat16", n_words=800, raw_bytes=1600, frame_bytes=1000, escapes=8)
    assert total(world, world.rank + 1) == 6.0

def test_rank_1_fails_before_its_collective(world):
    if world.rank == 1:
        assert 3 == 4, "planted on rank 1"
    total(world, 100)

def test_right_numbers_after_a_failure(world):
    assert total(world, 1) == 3.0

def test_right_numbers_again(world):
    assert total(world, 7 + world.rank) == 24.0

@pytest.fixture
def breaks_on_rank_2(world):
    if world.rank == 2:
        raise ValueError("planted in setup")

def test_setup_breaks(breaks_on_rank_2, world):
    total(world, 1)

@pytest.fixture
def breaks_afterwards(world):
    yield
    if world.rank == 0:
        raise ValueError("planted in teardown")

def test_teardown_breaks(breaks_afterwards, world):
    total(world, 1)

def test_right_numbers_after_errors(world):
    assert total(world, 2) == 6.0

def test_rank_0_skips_alone(world):
    if world.rank == 0:
        pytest.skip("planted skip")
    world.barrier_store("others")

def test_rank_2_returns_early(world):
    if world.rank != 2:
        total(world, 1)

def test_right_numbers_after_a_missing_call(world):
    assert total(world, 3) == 9.0

def test_all_skip(world):
    world.require("ordered_sum")

@pytest.mark.xfail(reason="known")
def test_known_failure(world):
    assert total(world, 1) == 0.0

@pytest.mark.xfail(reason="known no more")
def test_known_failure_that_passes(world):
    assert total(world, 1) == 3.0

def test_memory_error(world):
    if world.rank == 1:
        raise MemoryError("planted")

def test_without_world_runs_once():
    assert os.environ["RANK"] == "0"

def test_without_world_fails():
    assert 5 == 6, "planted without world"

@pytest.mark.ranks(1, 2, 9)
def test_sub_worlds(world):
    assert total(world, 1) == world.world_size
    assert world.exchange(world.rank) == list(range(world.world_size))

def test_unknown_capability(world):
    world.require("speed_of_light")

def test_drops_a_call_in_flight(world):
    if world.rank == 0:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        raise KeyError("planted with a call in flight")
    total(world, 5)

def test_last_passes(world):
    assert total(world, world.rank) == 3.0
"""
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return run_file(tmp_path_factory.mktemp("alone"), ALONE, 3, "--group-timeout-s=4", "--junitxml=run/junit.xml")


def test_what_failed_is_named_whole_with_the_command_that_runs_it_again(alone):
    failed = [r["nodeid"] for r in alone.results.values() if r["kind"] in ("FAIL", "ERROR")]
    assert failed
    for nodeid in failed:
        command = f"run it again: python -m pytest {nodeid} --subject torch_native --world-size 3"
        assert re.search(rf"^_* (FAIL|ERROR) {re.escape(nodeid)} _*$", alone.err, re.MULTILINE), alone.err
        assert command in alone.err.splitlines(), alone.err
        assert re.search(rf"^(FAILED|ERROR) {re.escape(nodeid)} - .*\n  {re.escape(command)}$", alone.out, re.MULTILINE)
    assert alone.out.count("run it again:") == len(failed)


def test_every_verdict_is_of_the_right_kind(alone):
    assert alone.kinds() == {
        "test_first_passes": "PASS",
        "test_rank_1_fails_before_its_collective": "FAIL",
        "test_right_numbers_after_a_failure": "PASS",
        "test_right_numbers_again": "PASS",
        "test_setup_breaks": "ERROR",
        "test_teardown_breaks": "ERROR",
        "test_right_numbers_after_errors": "PASS",
        "test_rank_0_skips_alone": "FAIL",
        "test_rank_2_returns_early": "FAIL",
        "test_right_numbers_after_a_missing_call": "PASS",
        "test_all_skip": "UNSUPPORTED",
        "test_known_failure": "XFAIL",
        "test_known_failure_that_passes": "FAIL",
        "test_memory_error": "ERROR",
        "test_without_world_runs_once": "PASS",
        "test_without_world_fails": "FAIL",
        "test_sub_worlds[1ranks]": "PASS",
        "test_sub_worlds[2ranks]": "PASS",
        "test_sub_worlds[9ranks]": "UNSUPPORTED",
        "test_unknown_capability": "ERROR",
        "test_drops_a_call_in_flight": "FAIL",
        "test_last_passes": "PASS",
    }, alone.out + alone.err


def test_real_error_of_the_first_failing_rank_is_shown(alone):
    r = alone.results["test_rank_1_fails_before_its_collective"]
    assert "rank 1 failed" in r["reason"]
    assert "planted on rank 1" in r["reason"]
    assert "rank 1 of 3 was the first to fail" in alone.err
    assert "assert 3 == 4" in alone.err
    assert "timed out" not in r["text"].lower()
    assert alone.results["test_setup_breaks"]["reason"] == "rank 2 broke in setup: ValueError: planted in setup"
    assert "planted in teardown" in alone.results["test_teardown_breaks"]["reason"]
    assert alone.results["test_drops_a_call_in_flight"]["reason"].startswith("rank 0 ")
    assert "planted with a call in flight" in alone.results["test_drops_a_call_in_flight"]["text"]


def test_a_lone_skip_is_named(alone):
    r = alone.results["test_rank_0_skips_alone"]
    assert "0" in r["reason"]
    assert "planted skip" in r["reason"]
    assert r["by_rank"]["0"] == "planted skip"


def test_exit_code_and_closing_line_count_everything(alone):
    assert alone.returncode == 1
    assert (
        alone.out.strip()
        .splitlines()[-1]
        .strip("= ")
        .startswith("9 passed, 6 failed, 2 skipped, 4 errors, 1 xfailed in ")
    )


def test_one_junit_has_every_test(alone):
    junit = alone.junit()
    assert set(junit) == set(alone.results)
    assert junit["test_rank_1_fails_before_its_collective"] == "failure"
    assert junit["test_setup_breaks"] == "error"
    assert junit["test_all_skip"] == junit["test_known_failure"] == "skipped"
    assert junit["test_first_passes"] == ""


def test_rows_become_ratios(alone):
    [row] = alone.report["frames"]
    assert row["bits_per_word"] == 10.0
    assert row["ratio"] == 1.6
    assert row["escape_rate"] == 0.01
    assert "10.000" in alone.out


def test_a_run_can_be_judged_again_from_its_logs(alone):
    again = read_run(alone.run_dir)
    assert {r.nodeid.split("::")[-1]: r.kind for r in again.results.values()} == alone.kinds()
    assert not again.ok()


DYING = (
    PRELUDE
    + """
import ctypes, threading

def do(how):
    if how == "asserts":
        assert 3 == 4, "planted"
    if how == "raises":
        raise KeyError("planted")
    if how == "skips":
        pytest.skip("planted skip")
    if how == "exits":
        os._exit(3)
    if how == "leaves":
        os._exit(0)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crashes":
        ctypes.string_at(0)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hangs":
        time.sleep(1000)

def await_end(pid):
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] in "TtZX":
                return
        except OSError:
            return
        time.sleep(0.01)

def case(world, how, when):
    if world.rank == 1 and when == "before":
        do(how)
    if when == "inside":
        pid = world.exchange(os.getpid())[1]
        if world.rank == 0:
            time.sleep(0.6) if how == "hangs" else await_end(pid)
        elif how == "hangs":
            dist.all_reduce(torch.empty(1), async_op=True)
            do(how)
        else:
            threading.Timer(0.2, do, [how]).start()
    total(world, 1)
    if world.rank == 1 and when == "after":
        do(how)
    if when == "after":
        world.barrier_store()
"""
)

ENDS = {
    "exits": "rank 1 died: exit code 3",
    "leaves": "rank 1 died: exit code 0",
    "killed": "rank 1 died: signal SIGKILL",
    "crashes": "rank 1 died: signal SIGSEGV",
    "stopped": "rank 1 was stopped (SIGSTOP): not finished within the limit of 5 s",
    "hangs": "rank 1 hung: not finished within the limit of 5 s",
    "asserts": "rank 1 failed in call: AssertionError: planted",
    "raises": "rank 1 failed in call: KeyError: 'planted'",
    "skips": "ranks [1] skipped and others did not (planted skip)",
}
LIMIT_S = 5
WHEN = ("before", "inside", "after")
CASES = [(how, when) for how in ("exits", "killed", "stopped", "hangs") for when in WHEN]
CASES += [(how, when) for how in ("asserts", "raises", "skips") for when in ("before", "after")]
CASES += [("leaves", "before"), ("crashes", "inside")]


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """All cases; three runs at once, for ranks that hang leave the processors alone."""
    runs = []
    for hows in (("stopped",), ("hangs",), tuple(how for how in ENDS if how not in ("stopped", "hangs"))):
        source = DYING
        for how, when in (case for case in CASES if case[0] in hows):
            mark = f"@pytest.mark.limit_s({LIMIT_S})\n" if len(hows) == 1 else ""
            source += f"\n{mark}def test_{how}_{when}(world):\n    case(world, {how!r}, {when!r})\n"
            source += f"\ndef test_sound_after_{how}_{when}(world):\n    assert total(world, 1 + world.rank) == 3.0\n"
        runs.append((tmp_path_factory.mktemp(hows[0]), source, 2, "--group-timeout-s=4"))
    with ThreadPoolExecutor() as pool:
        first, *others = pool.map(lambda run: run_file(*run, limit_s=170), runs)
    for other in others:
        first.results |= other.results
        first.problems += other.problems
        first.out += other.out
        first.err += other.err
        first.returncode &= other.returncode
    return first


@pytest.mark.parametrize("how, when", CASES)
def test_a_rank_that_fails_is_named_with_what_it_did_and_the_next_test_is_unharmed(dying, how, when):
    result = dying.results[f"test_{how}_{when}"]
    assert result["kind"] == "FAIL", dying.out + dying.err
    assert result["reason"].startswith(ENDS[how]), result
    assert dying.results[f"test_sound_after_{how}_{when}"]["kind"] == "PASS", dying.out + dying.err


def test_deaths_cost_no_other_verdict(dying):
    assert dying.returncode == 1
    assert not dying.problems
    assert len(dying.results) == 2 * len(CASES)


def test_a_failed_report_has_what_helps_to_find_the_cause(dying):
    assert "in case" in dying.results["test_hangs_after"]["text"], "the stack of the hung rank"
    assert dying.results["test_hangs_after"]["by_rank"]["1"] == "hung"
    assert "in string_at" in dying.results["test_crashes_inside"]["text"], "the stack of the crash"
    assert "assert 3 == 4" in dying.results["test_asserts_before"]["text"]


SURVIVING = (
    PRELUDE
    + """
@pytest.mark.ends(1)
def test_survivors_see_an_error_and_go_on_in_a_new_group(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        total(world, 1)
    time.sleep(1.0)
    x = torch.ones(1)
    dist.all_reduce(x, group=world.survivors())
    assert x.item() == 2.0

def test_all_are_there_again(world):
    assert total(world, 1) == 3.0

@pytest.mark.ends(2)
def test_a_survivor_fails(world):
    if world.rank == 2:
        os._exit(0)
    assert world.rank == 1, "planted on a survivor"

@pytest.mark.ends(0)
def test_rank_0_was_to_end_and_does_not(world):
    pass

def test_last_passes(world):
    assert total(world, 1) == 3.0
"""
)


def test_survivors_of_a_death_that_is_meant_are_kept_alive_and_judged(tmp_path):
    run = run_file(tmp_path, SURVIVING, 3, "--group-timeout-s=8")
    assert run.kinds() == {
        "test_survivors_see_an_error_and_go_on_in_a_new_group": "PASS",
        "test_all_are_there_again": "PASS",
        "test_a_survivor_fails": "FAIL",
        "test_rank_0_was_to_end_and_does_not": "FAIL",
        "test_last_passes": "PASS",
    }, run.out + run.err
    assert not run.problems
    by_rank = run.results["test_survivors_see_an_error_and_go_on_in_a_new_group"]["by_rank"]
    assert by_rank == {"0": "passed", "1": "ended, as it was to", "2": "passed"}
    assert "planted on a survivor" in run.results["test_a_survivor_fails"]["reason"]
    assert "ranks [0] were to end" in run.results["test_rank_0_was_to_end_and_does_not"]["reason"]


CONNECTING = (
    PRELUDE
    + """
connect = dist.init_process_group

def connect_late(*args, **kwargs):
    connect(*args, **kwargs)
    if os.environ["RANK"] == "1":
        time.sleep(0.7)
        assert not os.path.exists("begun"), "rank 0 is in the test, and may end and break what is being connected"

dist.init_process_group = connect_late

def test_begins_when_all_are_connected(world):
    open("begun", "w").close()
    world.barrier_store()
    if world.rank == 0:
        os.remove("begun")

@pytest.mark.ends(0)
def test_one_may_die_at_once(world):
    if world.rank == 0:
        os._exit(0)
"""
)


def test_no_rank_begins_a_test_while_another_is_being_connected(tmp_path):
    """A rank that dies at once would break the connecting of its peers, and the verdict would be theirs."""
    run = run_file(tmp_path, CONNECTING, 2)
    assert run.kinds() == {"test_begins_when_all_are_connected": "PASS", "test_one_may_die_at_once": "PASS"}, run.out


DEADLINE = (
    PRELUDE
    + """
def test_passes(world):
    assert total(world, 1) == 2.0

def test_never_ends(world):
    if world.rank == 0:
        time.sleep(1000)

def test_never_runs(world):
    pass
"""
)


def test_the_deadline_ends_everything_and_names_what_did_not_finish(tmp_path):
    run = run_file(tmp_path, DEADLINE, 2, "--deadline-s=9", "--group-timeout-s=100", limit_s=40)
    assert run.returncode == 1
    assert run.kinds() == {"test_passes": "PASS", "test_never_ends": "FAIL"}
    assert "rank 0: in test_it.py::test_never_ends" in run.problems.replace(str(tmp_path) + "/", "")
    assert "test_never_runs" in run.problems
    assert "in test_never_ends" in (run.run_dir / "rank0.log").read_text(), "stacks must be in the rank's log"
    pids = [e["pid"] for r in (0, 1) for e in Tail(run.run_dir / f"rank{r}.jsonl").read() if e["event"] == "start"]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_that_collect_different_tests_do_not_run(tmp_path):
    source = PRELUDE + "\n@pytest.mark.parametrize('r', [os.environ['RANK']])\ndef test_it(world, r): pass\n"
    run = run_file(tmp_path, source, 2)
    assert run.returncode == 1
    assert run.kinds() == {}
    assert "collected other tests" in run.problems


def test_under_plain_torchrun_ranks_agree_and_name_the_store_when_it_is_gone(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        PRELUDE
        + "\ndef test_good(world): assert total(world, 1) == 2.0"
        + "\ndef test_bad(world): assert world.rank != 1, 'planted'"
        + "\ndef test_torchrun_is_killed(world):"
        + "\n    world.barrier_store()"
        + "\n    if world.rank == 0: os.kill(os.getppid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pytest"]
    command += ["-p", "conformance.plugin", "--subject=torch_native", f"--run-dir={tmp_path}/run", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    again = read_run(tmp_path / "run")
    assert {r.nodeid: r.kind for r in again.results.values()} == {
        "test_it.py::test_good": "PASS",
        "test_it.py::test_bad": "FAIL",
        "test_it.py::test_torchrun_is_killed": "ERROR",
    }, done.stdout + done.stderr
    assert "1 failed, 1 passed, 1 error" in done.stdout
    [gone] = [r for r in again.results.values() if r.kind == "ERROR"]
    assert "the store at " in gone.reason
    assert "is gone" in gone.reason


@pytest.mark.parametrize(
    "args, says",
    [
        (("--subject", "no_such"), "--subject 'no_such'"),
        (("--world-size", "0"), "--world-size 0"),
        (("conformance/no_such.py",), "no such file or folder: conformance/no_such.py"),
        (("--pdb",), "--pdb has no meaning over ranks"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(tmp_path, args, says):
    run = run_pytest(tmp_path / "run", "conformance", *args, limit_s=30)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR, run.out + run.err
    assert says in run.out + run.err
    assert not run.report


@pytest.mark.parametrize(
    "subject, says",
    [
        ("no_such_package.judged:subject", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("judged:nope", "AttributeError: module 'judged' has no attribute 'nope'"),
        ("judged:half", "gave a Half without communicator, codec: wanted the members of conformance.subject.Subject"),
        ("judged:vague", "capabilities: wanted a conformance.subject.Capabilities, got a dict"),
        ("judged:fails", "OSError: no library of that name"),
        ("broken.no_such", "no such planted defect"),
    ],
)
def test_a_subject_that_is_none_is_refused_in_a_line_before_anything_starts(tmp_path, subject, says):
    (tmp_path / "judged.py").write_text(
        "class Half: name, capabilities = 'half', {}\n"
        "def half(): return Half()\n"
        "def vague():\n"
        "    Half.communicator = Half.codec = lambda self: None\n"
        "    return Half()\n"
        "def fails(): raise OSError('no library of that name')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    suite = str(ROOT / "conformance" / "test_sum.py")
    run = run_pytest(tmp_path / "run", suite, "--subject", subject, cwd=tmp_path, limit_s=30)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR, run.out + run.err
    [line] = [line for line in (run.out + run.err).splitlines() if line.strip()]
    assert line.startswith(f"ERROR: --subject '{subject}'")
    assert says in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("paths", [("conformance/meta",), ("-m", "not gpu", "zipccl_core/tests", "conformance/meta")])
def test_only_what_was_named_is_run(tmp_path, paths):
    run = run_pytest(tmp_path / "run", *paths, "-q", "-k", "test_merge_ or test_digest_of_five", limit_s=60)
    assert run.returncode == 0, run.out + run.err
    assert f"{4 if len(paths) == 1 else 5} passed" in run.out
    assert not (tmp_path / "run").exists(), "no ranks were asked for"


@pytest.mark.parametrize(
    "name", ["barrier", "all_gather_into_tensor", "all_to_all_single", "all_reduce", "send_and_recv"]
)
def test_nothing_fails_of_operations_that_a_correct_subject_does_not_claim(tmp_path, name):
    """It has no others: a test that called one would FAIL, and one that some ranks only ask would be a disagreement."""
    args = (
        "--subject",
        f"conformance.meta.few:{name}",
        "--world-size=2",
        "--limit-s=30",
        "-k",
        "not golden and not broken",
    )
    run = run_pytest(tmp_path / "run", "conformance", *args, limit_s=100)
    kinds = set(run.kinds().values())
    assert kinds == {"PASS", "UNSUPPORTED"}, run.out + run.err
    assert run.returncode == 0, run.out + run.err
    judged = [r["nodeid"] for r in run.results.values() if r["kind"] == "PASS" and r["operation"]]
    assert judged, "what is claimed is judged"
    reasons = {r["reason"] for r in run.results.values() if "among its operations" in r["reason"]}
    assert reasons, "what is not claimed is said"


def test_a_rank_that_skips_does_not_close_what_another_is_still_making(tmp_path):
    test = "conformance/test_slow_rank.py::test_one_rank_late_before_every_wait_and_not_before_the_calls"
    args = ("--subject", "conformance.meta.few:lagging", "--world-size=2", "--limit-s=30")
    run = run_pytest(tmp_path / "run", test, *args, limit_s=60)
    assert set(run.kinds().values()) == {"UNSUPPORTED"}, run.out + run.err
    reasons = {r["reason"] for r in run.results.values()}
    assert reasons == {
        "UNSUPPORTED: subject does not claim all_gather_into_tensor among its operations (all_reduce)"
    }, run.out


def test_nothing_fails_of_a_correct_subject_that_is_alone(tmp_path):
    names = "stats_tell or disagree or compressed_size or coding_goes_off or counted_once"
    run = run_pytest(tmp_path / "run", "conformance", "--subject", "zipccl", "--world-size=1", "-k", names, limit_s=100)
    assert set(run.kinds().values()) <= {"PASS", "UNSUPPORTED"}, run.out + run.err
    assert "UNSUPPORTED: needs 2 ranks of 1" in {r["reason"] for r in run.results.values()}


# ---------------------------------------------------------------------------------------------------- pure parts


def outcome(kind: str, rank: int, order: int | None = None, takes_part: bool = True) -> dict:
    fields = {"kind": kind, "line": f"{kind} of {rank}", "text": f"text of {rank}", "order": order, "rank": rank}
    return {**fields, "takes_part": takes_part, "seconds": 1.0}


def test_merge_blames_the_earliest_failure_and_not_the_lowest_rank():
    came = {0: outcome("FAIL", 0, order=2), 1: outcome("FAIL", 1, order=1), 2: outcome("PASS", 2)}
    result = merge("t", "", came, 3)
    assert result.kind == "FAIL"
    assert result.reason.startswith("rank 1 ")
    assert "text of 1" in result.text


def test_merge_fails_for_a_missing_rank():
    result = merge("t", "", {0: outcome("PASS", 0)}, 2)
    assert result.kind == "FAIL"
    assert "[1]" in result.reason


def test_merge_ignores_idle_ranks():
    result = merge("t", "", {0: outcome("UNSUPPORTED", 0), 1: outcome("PASS", 1, takes_part=False)}, 2)
    assert result.kind == "UNSUPPORTED"


def test_merge_fails_when_some_skip():
    assert merge("t", "", {0: outcome("UNSUPPORTED", 0), 1: outcome("PASS", 1)}, 2).kind == "FAIL"


def test_tail_leaves_an_unfinished_line_for_later(tmp_path):
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.read()) == []
    path.write_text('{"a": 1}\n{"b"')
    assert list(tail.read()) == [{"a": 1}]
    with path.open("a") as f:
        f.write(": 2}\n")
    assert list(tail.read()) == [{"b": 2}]


def test_a_rank_that_died_after_its_outcome_is_found_in_the_logs_of_a_run_that_went_on(tmp_path):
    def verdict(name, t):
        return {"event": "verdict", "t": t, "index": 0, "result": {"nodeid": name, "kind": "PASS"}}

    def begun(name, t):
        return {"event": "test_start", "t": t, "index": 0, "nodeid": name, "limit_s": 60.0}

    start = {"event": "start", "pid": 1}
    ends = [{**start, "t": 9.0}, begun("t::b", 9.5), verdict("t::b", 9.6), {"event": "end", "t": 9.7}]
    ends.append({"event": "exit", "t": 9.8, "code": 0, "told": False})
    died = [{**start, "t": 1.0}, begun("t::a", 2.0), {"event": "outcome", "t": 3.0}]
    died.append({"event": "exit", "t": 3.1, "code": -9, "told": False})
    survived = [{**start, "t": 1.0}, begun("t::a", 2.0), {"event": "outcome", "t": 3.0}, verdict("t::a", 3.2)]
    survived.append({"event": "exit", "t": 3.3, "code": -15, "told": True})
    for rank, events in enumerate(([*died, *ends], [*survived, *ends])):
        (tmp_path / f"rank{rank}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (tmp_path / "rank0.log").write_text("==== generation 1\nlast words\n==== generation 2\nof another\n")
    run = read_run(tmp_path)
    assert {r.nodeid: r.kind for r in run.results.values()} == {"t::a": "FAIL", "t::b": "PASS"}
    assert run.results["t::a"].reason == "rank 0 died: signal SIGKILL"
    assert "last words" in run.results["t::a"].text
    assert "of another" not in run.results["t::a"].text


def test_a_rank_of_an_earlier_generation_makes_nobody_overdue(tmp_path):
    begun = [{"event": "start", "t": 1.0, "pid": 11}]
    begun.append({"event": "test_start", "t": 2.0, "index": 4, "nodeid": "t::a", "limit_s": 1.0})
    died = {"event": "exit", "t": 3.0, "code": -9, "told": False}
    again = {"event": "start", "t": 4.0, "pid": 12}
    for rank, events in enumerate(([*begun, died, again], begun)):  # nobody wrote down how rank 1 ended
        (tmp_path / f"rank{rank}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    follower = Follower(Run(tmp_path, 2))
    follower.poll()
    assert follower.overdue(0.0) == []


def test_a_directory_without_a_run_is_not_sound(tmp_path):
    assert not read_run(tmp_path).ok()


def test_words_of_the_report(tmp_path):
    (tmp_path / "rank0.jsonl").write_text(json.dumps({"event": "start", "t": 1.0, "pid": 1}) + "\n")
    run = read_run(tmp_path)
    assert not run.ok(), "a run in which nothing passed is not sound"
    assert "0 passed, 0 failed, 0 skipped in" in closing_line(run)
    assert suite_of("conformance/test_sum.py::test_x[a/b.py::c]") == "test_sum"
    assert describe_exit(-9) == "signal SIGKILL"
    assert describe_exit(4) == "exit code 4"
    assert frames_by_kind([{"table": "frames", "kind": "k", "dtype": "d", "n_words": 0, "raw_bytes": 0,
                            "frame_bytes": 128, "escapes": 0}]) == []  # fmt: skip
