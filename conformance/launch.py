"""Starts the ranks, follows them, and never waits without a bound. Imports neither torch nor pytest.

Processes: the launcher (the pytest a person started) → torchrun → one supervisor a rank → the rank. The supervisor is a
few lines that cannot fail the way a rank can: it writes down how its rank ended, before torchrun ends the others. What
ranks say travels in `rank<r>.jsonl`, line-buffered, so that the last line of a dead one is still there. Where it can,
torchrun and the ranks are forked from a process that has imported torch (nursery.py), which saves most of the start.

If a rank dies or hangs, the test it was in has FAILED, and the launcher starts a new *generation* of ranks with the
test after it: one dead rank costs one verdict.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from conformance.nursery import SOCKET_ENV, Child, NoNursery, die_with_parent, fork, nearest, pytest_main, warm

POLL_S = 0.05
SUPERVISOR_GRACE_S = 0.3
STACKS_GRACE_S = 1.0
KILL_GRACE_S = 10.0
SUSPECT_S = 0.5
OVERDUE_S = 3.0
NOT_FINISHED = 70
MAX_GENERATIONS = 40
GENERATION_MARK = "==== generation"


class EventLog:
    """An append-only file of JSON lines; every line is on disk when `write` returns."""

    def __init__(self, path: Path, **always: Any) -> None:
        self.path = path
        self._always = always
        self._file = path.open("a", buffering=1)
        if self._file.tell() and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the time of day in seconds."""
        self._file.write(json.dumps({"event": event, "t": time.time(), **self._always, **fields}, default=str) + "\n")


class Tail:
    """The lines of a growing JSON-lines file, each once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """What was appended since the last call; an unfinished last line waits for its end."""
        if not self.path.exists():
            return
        with self.path.open("rb") as f:
            f.seek(self._at)
            data = f.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a rank was killed while it wrote this line
                yield json.loads(line)


@dataclass
class Result:
    """The verdict of one test over all ranks.

    Attributes:
        kind: PASS, FAIL, UNSUPPORTED, XFAIL or ERROR.
        reason: one line.
        text: the whole report: the first failing rank's traceback, and a line a rank.
        by_rank: rank → one line.
        operation: the collective the test is about, "" if none.
        seconds: of the slowest rank.
    """

    nodeid: str
    kind: str
    reason: str = ""
    text: str = ""
    by_rank: dict[str, str] = field(default_factory=dict)
    operation: str = ""
    seconds: float = 0.0


@dataclass
class Run:
    """All that is known of a run; can be rebuilt from its directory alone (`read_run`)."""

    run_dir: Path
    world_size: int = 0
    header: dict[str, str] = field(default_factory=dict)
    nodeids: list[str] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    cites: dict[str, list[str]] = field(default_factory=dict)
    started: float = 0.0
    ended: float = 0.0

    def ok(self) -> bool:
        """Nothing failed, everything collected has a verdict, and at least one test passed."""
        kinds = [r.kind for r in self.results.values()]
        return not self.problems and "FAIL" not in kinds and "ERROR" not in kinds and "PASS" in kinds


@dataclass
class _Rank:
    """What the launcher knows of one rank of the present generation."""

    number: int
    tail: Tail
    generation: int = 0
    pid: int = 0
    in_test: dict[str, Any] | None = None
    busy: bool = False
    last_index: int = -1
    last_nodeid: str = ""
    exit: dict[str, Any] | None = None
    ended: bool = False
    stopped: bool = False

    def meant_to_end(self) -> bool:
        """It ended in a test whose marker `ends` names it."""
        return bool(self.exit and self.in_test and self.number in self.in_test.get("ends", ()))


_WORSE = {"PASS": 0, "UNSUPPORTED": 1, "XFAIL": 1, "FAIL": 2, "ERROR": 3}


class Follower:
    """Turns the events of all ranks into a Run. `on_result` is called for every first or worsened verdict."""

    def __init__(self, run: Run, on_result: Callable[[Result], None] = lambda r: None) -> None:
        self.run = run
        self.on_result = on_result
        self.ranks: dict[int, _Rank] = {}
        self._settled = -1  # the latest generation whose dead rank, if there was one, has had its verdict

    def poll(self) -> bool:
        """Read what is new; True if anything was."""
        for number in range(self.run.world_size):
            self.ranks.setdefault(number, _Rank(number, Tail(self.run.run_dir / f"rank{number}.jsonl")))
        news = [(event["t"], rank, event) for rank in self.ranks.values() for event in rank.tail.read()]
        for _, rank, event in sorted(news, key=lambda n: n[0]):
            self._take(rank, event)
        return bool(news)

    def _take(self, rank: _Rank, e: dict[str, Any]) -> None:
        kind = e["event"]
        if kind == "start":
            if 0 < rank.generation == self._generation:
                self.settle_dead()  # a generation has ended that nobody has judged: this run is read again
            rank.generation += 1
            rank.pid, rank.in_test, rank.exit, rank.ended, rank.last_index = e["pid"], None, None, False, -1
            rank.busy, rank.stopped, rank.last_nodeid = False, False, ""
            self.run.started = self.run.started or e["t"]
        elif kind == "header":
            self.run.header.update(e["header"])
        elif kind == "collected" and not self.run.nodeids:
            self.run.nodeids = e["nodeids"]
        elif kind == "collect_error":
            text = f"collection of {e['nodeid'] or 'the session'} failed:\n{e['text']}"
            if text not in self.run.problems:
                self.run.problems.append(text)
        elif kind == "test_start":
            rank.in_test = e
            self.run.cites.setdefault(e["nodeid"], e.get("proves", []))
            rank.last_index, rank.last_nodeid = e["index"], e["nodeid"]
            rank.busy = True
        elif kind == "outcome":
            rank.busy = False
        elif kind == "verdict":
            rank.in_test = None
            self.settle(Result(**e["result"]))
            self.run.ended = e["t"]
        elif kind == "row":
            self.run.rows.append({"table": e["table"], **e["fields"]})
        elif kind == "problem":
            self.run.problems.append(e["text"])
        elif kind == "end":
            rank.ended = True
        elif kind == "exit":
            rank.exit = e

    def settle(self, result: Result, *, over: bool = False) -> None:
        """Record a verdict; of two for one test the worse one holds, or this one if `over`."""
        old = self.run.results.get(result.nodeid)
        if old is None or over or _WORSE[result.kind] > _WORSE[old.kind]:
            self.run.results[result.nodeid] = result
            self.on_result(result)

    def fatal(self) -> _Rank | None:
        """The rank that ended first without having finished its session, if any."""
        dead = [r for r in self.ranks.values() if r.exit and not r.exit.get("told") and (r.exit["code"] or not r.ended)]
        dead = [r for r in dead if not r.meant_to_end()] or dead
        return min(dead, key=lambda r: r.exit["t"] if r.exit else 0.0) if dead else None

    @property
    def _generation(self) -> int:
        """The present one, counted from 1."""
        return max((r.generation for r in self.ranks.values()), default=0)

    def settle_dead(self) -> int | None:
        """Give the test in which a rank of the present generation died its verdict, once.

        Returns:
            The index of the last test not to be run again; None if nothing can follow, or nobody died.
        """
        generation, fatal = self._generation, self.fatal()
        if fatal is None or generation <= self._settled:
            return None
        self._settled = generation
        exit_event = fatal.exit or {}
        stopped = (r for r in self.ranks.values() if r.stopped and r.generation == generation)
        fatal = next(stopped, fatal)  # those who waited for it may end first
        test = fatal.in_test
        how = describe_exit(exit_event["code"])
        if test is None:
            where = f"after {fatal.last_nodeid}" if fatal.last_nodeid else "before its first test"
            verb = "was stopped" if fatal.stopped else "died"
            text = f"rank {fatal.number} {verb} {where} ({how}); the end of its log:"
            self.run.problems.append(f"{text}\n{self._log_tail(fatal)}")
            return fatal.last_index if fatal.last_nodeid and not fatal.ended else None
        if fatal.meant_to_end() and test["nodeid"] in self.run.results:
            return int(test["index"])  # the survivors have judged it
        hung = exit_event["t"] - test["t"] >= test["limit_s"]
        others: list[int] = []
        if fatal.stopped:
            reason = (
                f"rank {fatal.number} was stopped (SIGSTOP): not finished within the limit of {test['limit_s']:g} s"
            )
        elif hung:
            numbers = [r.number for r in self.ranks.values() if r.busy and r.last_index == test["index"]]
            who = "all ranks" if len(numbers) == self.run.world_size > 1 else " ".join(f"rank {n}" for n in numbers)
            others = [n for n in numbers if n != fatal.number]
            reason = f"{who} hung: not finished within the limit of {test['limit_s']:g} s"
        else:
            reason = f"rank {fatal.number} died: {how}"
        old = self.run.results.get(test["nodeid"])
        by_rank = dict(old.by_rank) if old else {}
        for r in self.ranks.values():
            by_rank.setdefault(str(r.number), "ended by torchrun after that" if r.in_test else "finished")
        by_rank[str(fatal.number)] = "was stopped" if fatal.stopped else "hung" if hung else f"died: {how}"
        text = "\n".join(
            [
                f"{reason}; the end of its log ({self.run.run_dir}/rank{fatal.number}.log):",
                self._log_tail(fatal),
                *(f"rank {n} at that time:\n{self._log_tail(self.ranks[n])}" for n in others),
                *([old.text] if old and old.text else []),
            ]
        )
        seconds = exit_event["t"] - test["t"]
        self.settle(
            Result(test["nodeid"], "FAIL", reason, text, by_rank, test.get("operation", ""), seconds), over=True
        )
        return int(test["index"])

    def _log_tail(self, rank: _Rank) -> str:
        return log_tail(self.run.run_dir, rank.number, rank.generation)

    def overdue(self, grace_s: float) -> list[_Rank]:
        """Ranks whose outcome of the latest test is missing grace_s after its limit."""
        latest = self._generation
        ranks = [r for r in self.ranks.values() if r.generation == latest]  # what is older has ended
        started = [r for r in ranks if r.in_test and not r.exit]
        if not started:
            return []
        index = max(r.last_index for r in started)
        tests = [r.in_test for r in started if r.last_index == index and r.in_test]
        if time.time() - min(t["t"] for t in tests) < tests[0]["limit_s"] + grace_s:
            return []
        return [r for r in ranks if r.pid and not r.exit and (r.last_index < index or r.busy)]


def describe_exit(code: int) -> str:
    """A return code in words: "exit code 3", "signal SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def log_tail(run_dir: Path, rank: int, generation: int, lines: int = 60) -> str:
    """The last lines of what a rank printed in a generation, counted from 1; of a dump of stacks its first."""
    path = run_dir / f"rank{rank}.log"
    text = path.read_text(errors="replace") if path.exists() else ""
    whole = text.rpartition(f"{GENERATION_MARK} {generation}\n")[2].partition(GENERATION_MARK)[0].splitlines()
    dumps = [i for i, line in enumerate(whole) if "Fatal Python error" in line or "Timeout (" in line]
    return "\n".join(whole[max(dumps[-1] - 5, 0) :][:lines] if dumps else whole[-lines:])


@dataclass(frozen=True)
class Plan:
    """What to launch.

    Attributes:
        pytest_args: arguments of the pytest in every rank.
        world_size: ranks.
        run_dir: where everything is written; exists.
        deadline_s: the whole run's.
        cwd: where the ranks start.
        stop_at_first: no new generation after a dead rank (-x).
        orders: if set, ranks run no test until this file says which (`conformance/spread.py`), one JSON line each; the
            index of a test is then that of its order.
        env: environment of the ranks beyond this process's.
        warm_args, warm_modules: what pytest would collect, and modules, to be imported once for all ranks.
    """

    pytest_args: tuple[str, ...]
    world_size: int
    run_dir: Path
    deadline_s: float
    cwd: Path
    stop_at_first: bool = False
    orders: Path | None = None
    env: dict[str, str] = field(default_factory=dict)
    warm_args: tuple[str, ...] = ()
    warm_modules: tuple[str, ...] = ()


def new_run_dir(parent: Path) -> Path:
    """Make parent/<time of day>, with a suffix if two runs begin in one second."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ["", *(f"-{i}" for i in range(2, 1000))]:
        path = parent / (stamp + suffix)
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
    raise FileExistsError(f"new_run_dir: 1000 runs within one second under {parent}")


def launch(plan: Plan, on_result: Callable[[Result], None], on_tick: Callable[[Run, Follower], None]) -> Run:
    """Run the plan to its end or its deadline; every process started has ended when this returns.

    Args:
        on_result: called at once for every verdict.
        on_tick: called about ten times a second, for progress.
    """
    run = Run(plan.run_dir, plan.world_size, started=time.time())
    follower = Follower(run, on_result)
    deadline = time.monotonic() + plan.deadline_s
    first_index = 0
    env = _environment() | plan.env
    log = (plan.run_dir / "nursery.log").open("ab")
    with _sigterm_interrupts(), log, nearest(env, log) as nursery:
        for generation in range(MAX_GENERATIONS):
            process = _start(plan, first_index, generation, env, nursery)
            try:
                _follow(process, follower, deadline, on_tick)
                timed_out = process.poll() is None
                if timed_out:
                    run.problems.append(_deadline_text(plan, follower))
            except KeyboardInterrupt:
                timed_out = True
                run.problems.append(f"interrupted after {time.time() - run.started:.0f} s")
            finally:
                _end(process, follower)
            for _ in range(2):
                follower.poll()
            fatal = follower.fatal()
            if timed_out:
                break
            if fatal is None:
                if process.returncode and not run.problems:
                    run.problems.append(_agent_text(plan, process.returncode))
                break
            index = follower.settle_dead()
            if index is None or plan.stop_at_first or (not plan.orders and index + 1 >= len(run.nodeids)):
                break
            first_index = index + 1
        else:
            run.problems.append(f"gave up after {MAX_GENERATIONS} generations of ranks: too many died")
    if not plan.orders:
        _miss_none(run)
    run.ended = time.time()
    return run


def _miss_none(run: Run) -> None:
    """A run that failed may have been cut short; one that did not must have a verdict for every test."""
    missing = [n for n in run.nodeids if n not in run.results]
    if missing and not run.problems and not any(r.kind in ("FAIL", "ERROR") for r in run.results.values()):
        run.problems.append(f"{len(missing)} tests have no verdict, the first is {missing[0]}")


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends the launcher as Ctrl-C does, so that what it started is ended too. In the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _environment() -> dict[str, str]:
    """Of the ranks: this process's, without what another torchrun left there."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "PYTEST_CURRENT_TEST"))}
    root = str(Path(__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    env.setdefault("OMP_NUM_THREADS", "1")
    # torch's store asks for the name of every peer's address; one lost answer of a name server stalls the rank for the
    # resolver's time-out, 5 s unless it is told otherwise.
    env.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    return env


Process = subprocess.Popen[bytes] | Child


def _start(plan: Plan, first_index: int, generation: int, env: dict[str, str], nursery: str | None) -> Process:
    """Start torchrun in a process group of its own."""
    args = [
        *("--standalone", "--nproc-per-node", str(plan.world_size)),
        *("-m", "conformance.launch", "--run-dir", str(plan.run_dir), "--"),
        *(*plan.pytest_args, f"--run-dir={plan.run_dir}", "--launched", f"--first-index={first_index}"),
        *([f"--orders={plan.orders}"] if plan.orders else []),
    ]
    with (plan.run_dir / "torchrun.log").open("ab") as log:
        log.write(f"generation {generation}: torchrun {args}\n".encode())
        log.flush()
        if nursery:
            with contextlib.suppress(NoNursery):
                process = fork(
                    nursery,
                    "torch.distributed.run:main",
                    args,
                    env={**env, SOCKET_ENV: nursery},
                    cwd=plan.cwd,
                    stdout=log,
                    stderr=log,
                    on_hangup=signal.SIGTERM,
                )
                warm(nursery, plan.warm_args, plan.cwd, plan.warm_modules)
                return process
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *args],
            cwd=plan.cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
        )


def _follow(
    process: Process,
    follower: Follower,
    deadline: float,
    on_tick: Callable[[Run, Follower], None],
) -> None:
    """Until torchrun ends or the deadline passes."""
    while process.poll() is None and time.monotonic() < deadline:
        follower.poll()
        for rank in follower.overdue(SUSPECT_S):
            rank.stopped = rank.stopped or _is_stopped(rank.pid)
        for rank in follower.overdue(OVERDUE_S):  # it should have ended itself
            with contextlib.suppress(OSError):
                os.kill(rank.pid, signal.SIGKILL)
        on_tick(follower.run, follower)
        time.sleep(POLL_S)
    follower.poll()
    on_tick(follower.run, follower)


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger (Linux; elsewhere nobody knows)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _end(process: Process, follower: Follower) -> None:
    """Have whatever still runs dump its stacks, then end it: ranks by their ids first, then torchrun's group."""
    if process.poll() is not None:
        return
    follower.poll()
    pids = [r.pid for r in follower.ranks.values() if r.pid and not r.exit]
    for sig, wait_s in ((signal.SIGUSR1, STACKS_GRACE_S), (signal.SIGKILL, 0.0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)
        time.sleep(wait_s)
    process.terminate()
    try:
        process.wait(KILL_GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _deadline_text(plan: Plan, follower: Follower) -> str:
    follower.poll()
    lines = [f"the run did not end within --deadline-s {plan.deadline_s:g} s:"]
    for r in sorted(follower.ranks.values(), key=lambda r: r.number):
        where = f"in {r.in_test['nodeid']}" if r.in_test else "between tests" if r.pid else "never started"
        lines.append(f"  rank {r.number}: {'ended' if r.ended else where} (stacks: {plan.run_dir}/rank{r.number}.log)")
        if r.in_test and r.in_test["nodeid"] not in follower.run.results:
            text = f"not finished when the run's deadline of {plan.deadline_s:g} s passed"
            follower.settle(Result(r.in_test["nodeid"], "FAIL", text, text, {str(r.number): "did not finish"}))
    missing = [n for n in follower.run.nodeids if n not in follower.run.results]
    if missing:
        lines.append(f"  {len(missing)} tests never ran, the first is {missing[0]}")
    return "\n".join(lines)


def _agent_text(plan: Plan, code: int) -> str:
    log = (plan.run_dir / "torchrun.log").read_text(errors="replace").splitlines()
    return "\n".join([f"torchrun ended with {describe_exit(code)} and no rank said why:", *log[-25:]])


def read_run(run_dir: Path) -> Run:
    """Judge a finished run again from its logs alone."""
    numbers = sorted(int(p.stem.removeprefix("rank")) for p in run_dir.glob("rank*.jsonl"))
    run = Run(run_dir, len(numbers))
    follower = Follower(run)
    follower.poll()
    follower.settle_dead()
    for rank in follower.ranks.values():
        if rank.in_test and rank.in_test["nodeid"] not in run.results:
            run.problems.append(f"rank {rank.number} did not finish {rank.in_test['nodeid']}")
    _miss_none(run)
    return run


def supervise(run_dir: Path, pytest_args: list[str]) -> int:
    """One rank's supervisor: start it with its output in rank<r>.log, and write down how it ended."""
    rank = int(os.environ["RANK"])
    told: list[int] = []
    log = (run_dir / f"rank{rank}.log").open("ab")
    child: Process | None = None

    def stop(signum: int, frame: object) -> None:
        told.append(signum)
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)  # and no more: the wait() below may be amid hearing that it ended

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    die_with_parent(signal.SIGTERM)
    child = _start_rank(pytest_args, log)
    if told:
        child.kill()
    code = child.wait()
    path = run_dir / f"rank{rank}.jsonl"
    EventLog(path, rank=rank).write("exit", code=code, told=bool(told))
    if code and not told:
        time.sleep(SUPERVISOR_GRACE_S)
    if not told:
        _outlive(path, int(os.environ["WORLD_SIZE"]), rank)
        if code == 0 and "end" not in [e["event"] for e in list(Tail(path).read())[-2:]]:
            return NOT_FINISHED  # torchrun would take 0 for success, and let the others wait
    return code if code >= 0 else 128 - code


def _outlive(path: Path, world_size: int, rank: int) -> None:
    """If the rank ended as its test meant it to (marker `ends`), stay until the survivors have their verdict.

    torchrun ends all ranks as soon as one of its own processes has ended.
    """
    test: dict[str, Any] = next((e for e in reversed(list(Tail(path).read())) if e["event"] == "test_start"), {})
    if rank not in test.get("ends", ()):
        return
    until = time.time() + test["limit_s"] + OVERDUE_S
    waiting = {r: Tail(path.with_name(f"rank{r}.jsonl")) for r in range(world_size) if r not in test["ends"]}
    while waiting and time.time() < until:
        for number, tail in list(waiting.items()):
            if any(e["event"] == "verdict" and e["index"] == test["index"] and e["t"] > test["t"] for e in tail.read()):
                del waiting[number]
        time.sleep(POLL_S)


def _start_rank(pytest_args: list[str], log: IO[bytes]) -> Process:
    """Fork the rank from the nursery if there is one, else start it from scratch."""
    env = dict(os.environ)
    if nursery := env.pop(SOCKET_ENV, ""):
        with contextlib.suppress(NoNursery):
            return fork(
                nursery, "conformance.launch:be_rank", pytest_args, env=env, cwd=Path.cwd(), stdout=log, stderr=log
            )
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "conformance.launch", "--as-rank", *pytest_args],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def be_rank(pytest_args: list[str]) -> int:
    """The rank itself: pytest, with stacks on SIGUSR1 and its end bound to the supervisor's."""
    die_with_parent()
    stacks = os.dup(2)  # pytest captures 2 itself
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    return pytest_main(pytest_args)


def main(argv: list[str]) -> int:
    """`--run-dir DIR -- ARGS` supervises a rank; `--as-rank ARGS` is one."""
    if argv[0] == "--as-rank":
        code = be_rank(argv[1:])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a group left behind by a failed test must not hold up the interpreter's end
    return supervise(Path(argv[1]), argv[3:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
