"""The pytest plugin: one verdict per test over all ranks, and a launcher so that plain `pytest conformance/` works.

Outside torchrun (no RANK in the environment) this process collects nothing of the ranked suites: it starts torchrun
with the same arguments, shows what happens and writes the report (launch.py, report.py). Inside, every rank runs the
same tests in the same order, and:

- A test that asks for `world` runs on all ranks, each time in a fresh process group with keys of its own in the store,
  so that nothing of a failed test can pair with a later one. A test that does not runs on rank 0 alone.
- After each test the ranks exchange outcomes through torchrun's store (never through a collective) and all report the
  same verdict: the traceback of the rank that failed first, and a line for every rank.

    def test_gather(world):
        comm = world.communicator(mode="always")
        ...
        assert world.exchange(digest) == [...]

A test with an argument `mode` runs once for each of the subject's modes, or for what stands `instead`.

What a subject does not claim is never called. A ranked test about an operation (its parameter `operation`, or the
marker of that name) is UNSUPPORTED without it, and so is every test that asks a Communicator for an operation that is
not claimed. Where only some ranks would ask, or others are by then in a call, the test says first what it `requires`.

Markers: `ranks(1, 2, 3)` runs the test in sub-worlds of these sizes; `requires("ordered_sum", dtypes="float32")` makes
it UNSUPPORTED for subjects that do not claim it; `limit_s(120)` replaces --limit-s; `ends(1)` says that rank 1 ends
within the test, as it is meant to: the others are kept alive, and their verdict counts. Options: see `pytest --help`.
Tests with Hypothesis's @given, or with in_step.py, draw on rank 0 and shrink on all ranks in step.

`pytest -n 4 conformance` (pytest-xdist) spreads the tests over workers that each start ranks of their own (spread.py).

Verdicts: PASS; FAIL: the subject is wrong, hung or died; UNSUPPORTED: it says so itself; XFAIL, strict; ERROR: the
suite broke (setup, teardown, memory, the store).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import hashlib
import json
import os
import pickle
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from conformance.launch import GENERATION_MARK, EventLog, Plan, Result, Tail, launch, new_run_dir

if TYPE_CHECKING:
    import torch.distributed as dist

    from conformance.subject import Capabilities, Codec, Communicator, Subject

HERE = Path(__file__).resolve().parent
CLOSE_LIMIT_S = 5.0
VERDICT_GRACE_S = 1.0
HANG_GRACE_S = 2.0
END_LIMIT_S = 15.0
OPEN_LIMIT_S = 30.0
EXIT_LIMIT_S = 5.0
MEETING_LIMIT_S = 120.0
TEXT_LIMIT_CHARS = 30_000
WARM_MODULES = (
    "hypothesis",
    "hypothesis.stateful",
    "hypothesis.extra.numpy",
    "conformance.plugin",
    "conformance.oracle",
)
LEFT = b"left"
ORDER_POLL_S = 0.01
MISSING = "missing: hung or dead"
RANKED = pytest.StashKey["Ranked"]()
RANKED_CODE = pytest.StashKey[pytest.ExitCode]()
VERSIONS_SHOWN_ENV = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")
ENV_PREFIXES_SHOWN = ("NCCL_", "ZIPCCL_", "TORCH_DISTRIBUTED_", "TORCH_SYMM_MEM_")
BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
"""--backend → what torch calls it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    g = parser.getgroup("conformance", "conformance of collectives")
    g.addoption("--subject", default="zipccl", help="who is judged: a name, broken.NAME, or module:attribute")
    g.addoption("--world-size", type=int, default=4, help="ranks to start (default 4)")
    g.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where the tests' tensors live (default cpu)")
    g.addoption(
        "--backend",
        choices=("auto", *BACKENDS),
        default="auto",
        help="of groups, where GPUs take part; auto: nccl if each rank of this host has a GPU of its own, else gloo",
    )
    g.addoption("--limit-s", type=float, default=60.0, help="a rank hangs if a test takes longer (default 60)")
    g.addoption("--group-timeout-s", type=float, default=15.0, help="timeout of each test's group (default 15)")
    g.addoption("--deadline-s", type=float, default=900.0, help="end of the whole run (default 900)")
    g.addoption("--run-dir", default="", help="where logs and reports go (default runs/<time of day>)")
    g.addoption("--example-seed", default="0", help='of drawn examples: a number, or "nightly": the date (default 0)')
    g.addoption("--example-factor", type=float, default=1.0, help="draw so many times the examples (default 1)")
    g.addoption("--example", default="", help="run this one drawn example only; a failed test says which")
    g.addoption("--ranked", action="store_true", help="run all named paths on ranks, not only those of the suite")
    g.addoption("--launched", action="store_true", help=argparse.SUPPRESS)
    g.addoption("--orders", default="", help=argparse.SUPPRESS)
    g.addoption("--warm", action="store_true", help=argparse.SUPPRESS)  # collecting for its imports only
    g.addoption("--first-index", type=int, default=0, help=argparse.SUPPRESS)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "outer: runs in the pytest that a person started, never on ranks",
        "ranks(*sizes): run in sub-worlds of the first n ranks, for each n",
        "requires(*flags, **members): capabilities without which the test is UNSUPPORTED",
        "ends(*ranks): these ranks end within the test, as it means them to; the survivors' verdict counts",
        "limit_s(seconds): how long one rank may take, in place of --limit-s",
        "operation(name): the collective the test is about, for the report; UNSUPPORTED if it is not claimed",
        "instead(**modes): mode=variant, which takes its place in the test if the subject claims it",
        "proves(*ids): the requirements of docs/CONFORMANCE.md that the test shows",
        "gpu: of the selection that is run on GPUs: -m gpu --subject zipccl_gpu, or --device cuda",
    ):
        config.addinivalue_line("markers", line)
    if hasattr(config, "workerinput") and "ranked_args" in config.workerinput:
        from conformance.spread import Worker

        config.pluginmanager.register(Worker(config), "conformance-spread")
    if inside():
        config.option.xmlpath = None  # the launcher writes the one JUnit
        ranked = Ranked(config)
        config.stash[RANKED] = ranked
        config.pluginmanager.register(ranked, "conformance-ranked")


def inside() -> bool:
    """True in a process that torchrun started."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


# ---------------------------------------------------------------------------------------------------- outside


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> pytest.ExitCode | None:
    if inside() or hasattr(config, "workerinput") or only_shows(config):
        return None
    ranked_args, plain_args = split_args(config)
    if not ranked_args:
        return None
    if getattr(config.option, "numprocesses", None):
        from conformance.spread import Controller

        _check(config, ranked_args)
        config.pluginmanager.register(Controller(config, ranked_args, alone=not plain_args), "conformance-spread")
        return None
    code = _launch(config, ranked_args)
    if not plain_args:
        return code
    config.args = plain_args
    config.option.xmlpath = None  # holds the ranked suites by now
    config.stash[RANKED_CODE] = code
    return None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Outside: both parts must have passed, and one must have run."""
    code = session.config.stash.get(RANKED_CODE, pytest.ExitCode.NO_TESTS_COLLECTED)
    nothing_bad = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if nothing_bad and code != pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = code


def only_shows(config: pytest.Config) -> bool:
    """True for --help, --collect-only and their like, which need no ranks."""
    names = ("help", "version", "markers", "showfixtures", "show_fixtures_per_test", "collectonly", "setupplan")
    return any(getattr(config.option, n, False) for n in (*names, "cacheshow"))


def split_args(config: pytest.Config) -> tuple[list[str], list[str]]:
    """(paths to run on ranks, paths to run here) of what was named on the command line or in testpaths."""
    ranked: list[str] = []
    plain: list[str] = []
    for arg in config.args:
        path = Path(config.invocation_params.dir, arg.split("::")[0]).resolve()
        if is_ranked(config, path):
            ranked.append(arg)
        else:
            plain.append(arg)
            if HERE.is_relative_to(path):  # a folder above: the suite in it runs on ranks, the rest here
                ranked.append(str(HERE))
    return ranked, plain


def is_ranked(config: pytest.Config, path: Path) -> bool:
    """Whether the tests of a file run on ranks."""
    return bool(config.option.ranked) or (path.is_relative_to(HERE) and not path.is_relative_to(HERE / "meta"))


def _check(config: pytest.Config, ranked_args: list[str]) -> None:
    """What is wrong with the arguments, as far as can be seen cheaply.

    Raises:
        pytest.UsageError: that.
    """
    from conformance.subjects import check

    option = config.option
    with _importing_from(config.invocation_params.dir):
        problem = check(option.subject)
    if not (option.example_seed == "nightly" or option.example_seed.isdecimal()) or option.example_factor <= 0:
        problem = "--example-seed: wanted a number or nightly; --example-factor: wanted more than 0"
    if option.world_size < 1:
        problem = f"--world-size {option.world_size}: wanted 1 or more"
    for name, flag in (("usepdb", "--pdb"), ("lf", "--lf"), ("failedfirst", "--ff"), ("stepwise", "--stepwise")):
        if getattr(option, name, False):
            problem = f"{flag} has no meaning over ranks; name the test instead: pytest FILE::TEST"
    for arg in ranked_args:
        if not Path(config.invocation_params.dir, arg.split("::")[0]).exists():
            problem = f"no such file or folder: {arg}"
    if problem:
        raise pytest.UsageError(problem)


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """As in ranks, which are started by `python -m`: modules of this folder are found too."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def run_dir_of(config: pytest.Config) -> Path:
    """Make the run's folder.

    Raises:
        pytest.UsageError: it holds another run.
    """
    given = config.option.run_dir
    run_dir = Path(config.invocation_params.dir, given) if given else new_run_dir(config.rootpath / "runs")
    run_dir.mkdir(parents=True, exist_ok=True)
    if any(run_dir.rglob("rank*.jsonl")):
        raise pytest.UsageError(f"--run-dir {run_dir} holds another run; name an empty one")
    return run_dir


def plan_of(config: pytest.Config, ranked_args: list[str], inner_args: list[str], run_dir: Path, **more: Any) -> Plan:
    """What to launch for these paths."""
    option, start = config.option, Path(config.invocation_params.dir)
    suite = [a for a in ranked_args if Path(start, a.split("::")[0]).resolve().is_relative_to(HERE)]
    return Plan(
        pytest_args=tuple(inner_args),
        world_size=option.world_size,
        run_dir=run_dir,
        deadline_s=option.deadline_s,
        cwd=start,
        warm_args=tuple([*suite, "--warm"] if suite else ()),
        warm_modules=(*WARM_MODULES, *_module_of(option.subject)),
        **more,
    )


def _launch(config: pytest.Config, ranked_args: list[str]) -> pytest.ExitCode:
    """Check the arguments cheaply, start the ranks, show and write what came out."""
    from conformance.report import Reporter

    option = config.option
    _check(config, ranked_args)
    run_dir = run_dir_of(config)
    plan = plan_of(config, ranked_args, inner_args(config, ranked_args), run_dir, stop_at_first=option.maxfail == 1)
    junit = Path(config.invocation_params.dir, option.xmlpath) if option.xmlpath else run_dir / "junit.xml"
    again = functools.partial(command, config, world_size=option.world_size)
    reporter = Reporter(run_dir, option.subject, again, verbose=option.verbose)
    run = launch(plan, reporter.on_result, reporter.on_tick)
    reporter.finish(run, junit)
    if run.ok():
        return pytest.ExitCode.OK
    if not run.results and not run.problems:
        return pytest.ExitCode.NO_TESTS_COLLECTED
    return pytest.ExitCode.TESTS_FAILED


def _module_of(subject: str) -> list[str]:
    """The module of a subject of this folder: it can be imported before there are ranks; of others nobody knows."""
    if ":" in subject:
        return []
    names = ["broken", "zipccl"] if subject.startswith("broken.") else [subject]
    return [f"conformance.subjects.{name}" for name in names]


def inner_args(config: pytest.Config, ranked_args: list[str]) -> list[str]:
    """What the person typed, with the paths reduced to the ranked ones, and xdist off."""
    args = list(config.invocation_params.args)
    for named in reversed(config.option.file_or_dir or []):
        at = len(args) - 1 - args[::-1].index(named)
        del args[at]
    if config.pluginmanager.hasplugin("xdist"):
        args.append("-n0")
    args.append(f"--example-seed={example_seed(config)}")  # midnight may fall between two ranks
    return ["-p", "no:cacheprovider", "--capture=sys", "--tb=short", *map(str, args), *ranked_args]


# ----------------------------------------------------------------------------------------------------- inside


class CloseFailed(AssertionError):
    """The subject's Communicator could not be closed: the subject's fault, though a fixture found it."""


class StoreGone(RuntimeError):
    """torchrun's store cannot be reached: nothing can be agreed on any more."""


class RanksMissing(RuntimeError):
    """Some ranks did not write what they had to within the deadline."""

    def __init__(self, what: str, missing: list[int], limit_s: float | None = None) -> None:
        why = "had failed before" if limit_s is None else f"did not arrive within {limit_s:g} s"
        super().__init__(f"{what}: ranks {missing} {why}")
        self.missing = missing


class Store:
    """torchrun's store, and nothing else, carries what the judge has to say between ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = rank, world_size
        self.where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self._is_master = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
        self.control = self._client(self._is_master)
        self.groups = self._client(False)
        self.attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.prefix: Callable[[str], dist.Store] = lambda name: dist.PrefixStore(
            f"conformance{self.attempt}/{name}", self.groups
        )

    def _client(self, is_master: bool) -> dist.TCPStore:
        import torch.distributed as dist

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with self._named():
            return dist.TCPStore(host, port, None, is_master, timeout=timedelta(seconds=60), wait_for_workers=False)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        import torch.distributed as dist

        try:
            yield
        except dist.DistNetworkError as e:
            raise StoreGone(f"the store at {self.where} is gone (torchrun ended?): {e}") from e

    def add(self, key: str) -> int:
        """Count up; the order in which ranks came here."""
        with self._named():
            return int(self.control.add(f"{self.attempt}/{key}", 1))

    def put(self, key: str, mine: bytes) -> None:
        """Write this rank's part of a gather without waiting."""
        with self._named():
            self.control.set(f"{self.attempt}/{key}/{self.rank}", mine)

    def gather(self, key: str, mine: bytes, ranks: Sequence[int], limit_s: float) -> dict[int, bytes]:
        """What all of `ranks` wrote under key; those that did not within limit_s are left out."""
        import torch.distributed as dist

        names = {r: f"{self.attempt}/{key}/{r}" for r in ranks}
        self.put(key, mine)
        with self._named():
            try:
                self.control.wait(list(names.values()), timedelta(seconds=max(limit_s, 0.01)))
                there = list(ranks)
            except dist.DistStoreError:
                there = [r for r in ranks if self.control.check([names[r]])]
            return {r: self.control.get(names[r]) for r in there}


class Unclaimed(pytest.skip.Exception):
    """A test has asked for what the subject does not claim; it ends as UNSUPPORTED, on all ranks. Who has come to that
    waits for the others, which may still be making what this rank would close."""

    __module__, __qualname__ = "builtins", "Skipped"  # pytest says so of a reason, and takes it off again


class Claimed:
    """A subject's Communicator as the tests see it if it does not claim every operation: the others are not there."""

    def __init__(self, made: Communicator, capabilities: Capabilities, hidden: frozenset[str]) -> None:
        self._made, self._capabilities, self._hidden = made, capabilities, hidden

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise Unclaimed(f"UNSUPPORTED: {self._capabilities.missing(operations=name)}")
        return getattr(self._made, name)


class World:
    """The ranks of one test. Made by the `world` fixture; everything made through it is closed at the test's end.

    Attributes:
        rank, world_size: in this test's world, which `ranks(n)` may make smaller than torchrun's.
        group: a fresh default group of it (gloo; with GPUs also NCCL, see --backend).
        device: where tensors under test belong.
        gpu: of this rank, the current one; None if tensors and subject need none.
        subject: who is judged.
        ends: ranks that end within the test (marker `ends`).
    """

    def __init__(self, ranked: Ranked, nodeid: str, key: str, world_size: int, group_timeout_s: float) -> None:
        import torch

        self.rank = ranked.rank
        self.world_size = world_size
        self.subject = ranked.subject
        self.ends: list[int] = []
        option = ranked.config.option
        on_cuda = option.device == "cuda"
        self.gpu, self._backend = None, BACKENDS["gloo"]
        if on_cuda or self.subject.capabilities.gpu:
            gpus, local_ranks = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
            backend = backend_of(option.backend, local_ranks, gpus)
            if backend == "nccl" and local_ranks > gpus:
                stand_as_own_host(ranked.rank)
            self._backend = BACKENDS[backend]
            self.gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
        self.device = self.gpu if on_cuda and self.gpu is not None else torch.device("cpu")
        self.group: dist.ProcessGroup
        self._ranked = ranked
        self._nodeid = nodeid
        self._key = key
        self._meetings = 0
        self._parts = 0
        self._timeout_s = group_timeout_s
        self._communicators: list[Communicator] = []

    def _open(self) -> None:
        import torch
        import torch.distributed as dist

        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)
        # A busy machine may let ranks come far apart: the group's own timeout begins when all are here.
        opening_s = max(self._timeout_s, OPEN_LIMIT_S)
        everyone = range(self.world_size)

        def meet(key: str, where: str) -> None:
            came = self._ranked.store.gather(f"{self._key}/{key}", b"", everyone, opening_s)
            if missing := [r for r in everyone if r not in came]:
                raise RanksMissing(where, missing, opening_s)

        meet("open", "the start of the test")
        # One that failed has left its group counted, and this one would then look for other keys than its peers.
        dist.distributed_c10d._world.group_count = 0
        try:
            dist.init_process_group(
                self._backend,
                store=self._ranked.store.prefix(self._key),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=opening_s),
            )
        except BaseException:
            self._ranked.store.put(f"{self._key}/connected", b"")  # nobody need wait for one that failed
            raise
        group = dist.group.WORLD
        assert group is not None
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self._timeout_s), group)
        self.group = group
        # One that dies at once must not break the connecting of a peer that is not done: its death is the test's.
        meet("connected", "the start of the test, while the group was being connected")

    def _close(self) -> None:
        """Close what was made, each step bounded. What is stuck is left behind, and the next test has other keys.

        A rank without a failure waits for the others first: peers may still read what it has sent. One with a failure
        closes at once: that is what releases its peers.
        """
        import torch.distributed as dist

        if self._ranked.clean:
            limit_s = min(self._timeout_s + VERDICT_GRACE_S, self._ranked.deadline - time.monotonic())
            there = [r for r in range(self.world_size) if r not in self.ends]
            self._ranked.store.gather(f"{self._key}/done", b"", there, limit_s)
        else:
            self._ranked.store.put(f"{self._key}/done", b"")
        failed, stuck = self._close_communicators(self._communicators, together=not self._ranked.clean)
        holder = [self.__dict__.pop("group", None)]
        if dist.is_initialized() and not bounded(dist.destroy_process_group, "destroy group"):
            stuck.append("destroy_process_group()")
        gc.collect()
        stuck += self._ranked.join_dropped()
        self._ranked.dropped = _Bounded(holder.clear, "drop group")  # the connections close with the last reference
        self._ranked.dropped.start()  # gloo takes 30 ms over it, idle; the next test need not wait
        self._ranked.left_behind += stuck
        if failed:
            raise CloseFailed("; ".join(failed))

    def _close_communicators(self, communicators: list[Communicator], *, together: bool) -> tuple[list[str], list[str]]:
        """(what went wrong, what is stuck) while closing these, the last first; the list is empty then.

        Args:
            together: all at once. A close may wait for peers, and after a failure a peer may be in a call of another
                Communicator, whose close it waits for.
        """
        closing = [_Bounded(c.close, "close communicator") for c in reversed(communicators)]
        communicators.clear()
        if together:
            for one in closing:
                one.start()
        failed, stuck = [], []
        limit = time.monotonic() + CLOSE_LIMIT_S
        for one in closing:
            try:
                if not one.ends(max(limit - time.monotonic(), 0.0) if together else CLOSE_LIMIT_S):
                    stuck.append("Communicator.close()")
            except Exception as e:
                failed.append(f"Communicator.close() raised {type(e).__name__}: {e}")
        return failed + [f"{s} did not return within {CLOSE_LIMIT_S:g} s" for s in stuck], stuck

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Communicators made within are closed at the end, and not only with the test.

        Raises:
            CloseFailed: one could not be closed, and nothing else went wrong.
        """
        outer, self._communicators = self._communicators, []
        try:
            yield
        except BaseException:
            self._ranked.left_behind += self._close_communicators(self._communicators, together=True)[1]
            raise
        else:
            failed, stuck = self._close_communicators(self._communicators, together=False)
            self._ranked.left_behind += stuck
            if failed:
                raise CloseFailed("; ".join(failed))
        finally:
            self._communicators = outer

    def communicator(
        self, mode: str = "", group: dist.ProcessGroup | None = None, timeout_s: float | None = None
    ) -> Communicator:
        """The subject's Communicator on `group` (default: the whole world); collective over that group.

        Looking up an operation of it that the subject does not claim ends the test as UNSUPPORTED.
        """
        from conformance.subject import OPERATIONS

        made = self.subject.communicator(
            self.group if group is None else group,
            mode=mode,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
        )
        self._communicators.append(made)
        capabilities = self.subject.capabilities
        hidden = OPERATIONS.difference(capabilities.operations)
        return cast("Communicator", Claimed(made, capabilities, hidden)) if hidden else made

    def subgroup(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A group of some ranks; every rank of the world calls this. None on ranks outside it."""
        import torch.distributed as dist

        group = dist.new_group(list(ranks), timeout=timedelta(seconds=self._timeout_s), backend=self._backend)
        return group if self.rank in ranks else None

    def survivors(self) -> dist.ProcessGroup:
        """A new group of the ranks that do not end in this test; only they call this, when the others are gone."""
        import torch.distributed as dist

        return dist.new_group(
            [r for r in range(self.world_size) if r not in self.ends],
            timeout=timedelta(seconds=self._timeout_s),
            backend=self._backend,
            use_local_synchronization=True,
        )

    def require(self, *flags: str, **members: str | Sequence[str]) -> None:
        """End the test as UNSUPPORTED unless the subject claims all of it; see Capabilities.missing."""
        if missing := self.subject.capabilities.missing(*flags, **members):
            raise Unclaimed(f"UNSUPPORTED: {missing}")

    def require_peers(self) -> None:
        """End the test as UNSUPPORTED if this rank is alone: nothing is sent then, and nobody can disagree."""
        if self.world_size < 2:
            raise Unclaimed(f"UNSUPPORTED: needs 2 ranks of {self.world_size}")

    def exchange(self, mine: Any, limit_s: float | None = None) -> list[Any]:
        """The objects of all ranks, by rank, through the store: independent of what is under test.

        Args:
            mine: small and picklable.
            limit_s: default the group's timeout.

        Raises:
            RanksMissing: naming those who did not come.
        """
        self._meetings += 1
        limit = self._timeout_s if limit_s is None else limit_s
        key, everyone = f"{self._key}/meeting{self._meetings}", range(self.world_size)
        came = self._ranked.store.gather(key, pickle.dumps(mine), everyone, limit)
        if missing := [r for r in everyone if r not in came]:
            raise RanksMissing(f"exchange {self._meetings} of this test", missing, limit)
        if left := [r for r in everyone if came[r] == LEFT]:
            raise RanksMissing(f"exchange {self._meetings} of this test", left)
        return [pickle.loads(came[r]) for r in range(self.world_size)]

    def take_number(self) -> int:
        """Counts up over all ranks: of two ranks, who came first."""
        return self._ranked.store.add(f"{self._ranked._key}/number")  # one count a test, also of what is apart in it

    @property
    def example_factor(self) -> float:
        """So many times the examples."""
        return float(self._ranked.config.option.example_factor)

    @property
    def example(self) -> str:
        """The one example to run, as Hypothesis encodes it; "" for drawn ones."""
        return str(self._ranked.config.option.example)

    @property
    def example_seed(self) -> int:
        """Of this test's examples: from the run's seed and the test's name, so that no other test matters."""
        name = self._nodeid.rpartition("/")[2]
        given = example_seed(self._ranked.config)
        return int.from_bytes(hashlib.sha256(f"{given} {name}".encode()).digest()[:8], "little")

    def command(self, *more: str) -> str:
        """What a person types to run this test again."""
        return command(self._ranked.config, self._nodeid, self._ranked.world_size, *more)

    def leave(self) -> None:
        """Tell ranks that wait for this one in an exchange, now or later, that it failed and does not come."""
        with contextlib.suppress(StoreGone):
            self._ranked.store.put(f"{self._key}/meeting{self._meetings + 1}", LEFT)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What is exchanged within is counted apart: a rank that fails in it meets the others again afterwards."""
        key, meetings = self._key, self._meetings
        self._parts += 1
        self._key, self._meetings = f"{key}/part{self._parts}", 0
        try:
            yield
        except BaseException:
            self.leave()
            raise
        finally:
            self._key, self._meetings = key, meetings

    def barrier_store(self, name: str = "", limit_s: float | None = None) -> None:
        """Wait until all ranks are here, through the store; they must give the same name."""
        names = self.exchange(name, limit_s)
        if len(set(names)) != 1:
            raise AssertionError(f"barrier_store: the ranks stand at different barriers: {names}")


def command(config: pytest.Config, nodeid: str, world_size: int, *more: str) -> str:
    """What a person types, in the root folder, to run one test again."""
    option = config.option
    args = [nodeid, "--subject", option.subject, "--world-size", str(world_size), *more]
    for name, default in (("device", "cpu"), ("backend", "auto")):
        if getattr(option, name) != default:
            args += [f"--{name}", getattr(option, name)]
    return shlex.join(["python", "-m", "pytest", *args])


class NoGpu(RuntimeError):
    """GPUs are needed, and there are none."""


def backend_of(choice: str, local_ranks: int, gpus: int) -> str:
    """The backend of groups whose tensors may be on GPUs: of BACKENDS.

    Args:
        choice: --backend.
        local_ranks: on this host.
        gpus: that they can see.

    Raises:
        NoGpu: there is none.
    """
    if not gpus:
        raise NoGpu(
            "--device cuda and subjects that work on GPUs need one, and torch.cuda finds none: run where there are "
            "GPUs and a CUDA build of torch, or choose --device cpu and a subject for CPUs"
        )
    if choice != "auto":
        return choice
    return "nccl" if local_ranks <= gpus else "gloo"  # of one host NCCL takes no two ranks on a GPU


def stand_as_own_host(rank: int) -> None:
    """Make this rank a host of its own for NCCL, which then lets it share a GPU and reaches it over sockets."""
    os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}, rank {rank}"


def example_seed(config: pytest.Config) -> int:
    """The run's seed of drawn examples; "nightly" is the date of today (UTC) as yyyymmdd."""
    given = str(config.option.example_seed)
    if given == "nightly":
        return int(time.strftime("%Y%m%d", time.gmtime()))
    return int(given)


class _Bounded:
    """An action in a thread of its own."""

    def __init__(self, action: Callable[[], object], name: str) -> None:
        self.name = name
        self._failed: list[BaseException] = []
        self._action = action
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as e:
            self._failed.append(e)

    def start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def ends(self, limit_s: float) -> bool:
        """False, and its stack in the log, if it has not returned within limit_s. Its exception is raised here."""
        self.start()
        self._thread.join(limit_s)
        if self._failed:
            raise self._failed[0]
        if self._thread.is_alive() and (frame := sys._current_frames().get(self._thread.ident or 0)):
            print(f"{self.name} has not returned within {limit_s:.1f} s; it is in:", file=sys.stderr)
            traceback.print_stack(frame)
        return not self._thread.is_alive()


def bounded(action: Callable[[], object], name: str, limit_s: float = CLOSE_LIMIT_S) -> bool:
    """Run action in a thread; False if it has not returned within limit_s. Its exception is raised here."""
    return _Bounded(action, name).ends(limit_s)


class Ranked:
    """What the plugin does in a rank."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.store = Store(self.rank, self.world_size)
        self.run_dir = self._agree_run_dir()
        self.log = EventLog(self.run_dir / f"rank{self.rank}.jsonl", rank=self.rank)
        self.log.write("start", pid=os.getpid(), world_size=self.world_size)
        generation = self.log.path.read_text().count('"event": "start"')
        print(f"{GENERATION_MARK} {generation}", file=sys.stderr, flush=True)
        self.stacks = (self.run_dir / f"rank{self.rank}.log").open("a")
        faulthandler.register(signal.SIGUSR1, self.stacks, all_threads=True)
        self.left_behind: list[str] = []
        self.index_of: dict[str, int] = {}
        self.order: int | None = None
        self._order: int | None = None
        self._key = ""
        self._gone: list[int] = []
        self.dropped: _Bounded | None = None
        self.clean = True
        self.deadline = 0.0
        self._subject: Subject | None = None
        if not config.option.launched and self.rank:
            config.option.verbose = -2

    def join_dropped(self) -> list[str]:
        """Wait for the destructor of the group before; what is stuck."""
        last, self.dropped = self.dropped, None
        return [] if last is None or last.ends(CLOSE_LIMIT_S) else ["the group's destructor"]

    def _agree_run_dir(self) -> Path:
        given = self.config.option.run_dir
        if not given:
            mine = str(new_run_dir(self.config.rootpath / "runs")) if self.rank == 0 else ""
            given = self.store.gather("run_dir", mine.encode(), range(self.world_size), MEETING_LIMIT_S)[0].decode()
        path = Path(given)
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def subject(self) -> Subject:
        if self._subject is None:
            from conformance.subjects import load_subject

            self._subject = load_subject(self.config.option.subject)
        return self._subject

    # -- collection

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        yield
        self._quiet_health_checks(items)
        nodeids = [item.nodeid for item in items]
        self.index_of = {nodeid: i for i, nodeid in enumerate(nodeids)}
        digest = hashlib.sha256("\n".join(nodeids).encode()).hexdigest()
        told = self.store.gather("collected", digest.encode(), range(self.world_size), MEETING_LIMIT_S)
        others = sorted(r for r in range(self.world_size) if told.get(r, b"").decode() != told.get(0, b"").decode())
        if others:
            text = f"rank {self.rank}: ranks {others} collected other tests than rank 0 (or did not arrive)"
            self.log.write("problem", text=text)
            raise pytest.UsageError(text)
        self.log.write("collected", count=len(nodeids), nodeids=nodeids if self.rank == 0 else [])
        if not self.config.option.orders:
            del items[: self.config.option.first_index]
        gc.collect()
        gc.freeze()  # what lives now lives to the end: the collection after each test need not look at it (80 ms)
        if items and self.rank == 0:
            self.log.write("header", header=self._header())

    def _quiet_health_checks(self, items: list[pytest.Item]) -> None:
        """Hypothesis refuses fixtures of one test's lifetime; here a test's examples share the world on purpose."""
        given = [i.obj for i in items if isinstance(i, pytest.Function) and getattr(i.obj, "is_hypothesis_test", False)]
        for function in given:
            from hypothesis import HealthCheck, settings

            own = getattr(function, "_hypothesis_internal_use_settings", None) or settings.default
            function._hypothesis_internal_use_settings = settings(own, suppress_health_check=list(HealthCheck))

    def _header(self) -> dict[str, str]:
        import torch

        env = {
            k: v for k, v in sorted(os.environ.items()) if k in VERSIONS_SHOWN_ENV or k.startswith(ENV_PREFIXES_SHOWN)
        }
        return {
            "subject": self.subject.name,
            "ranks": str(self.world_size),
            "example seed": str(example_seed(self.config)),
            "device": self._device_shown(),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            **dict(self.subject.capabilities.versions),
            **env,
        }

    def _device_shown(self) -> str:
        """Where tensors live, and the GPUs that take part."""
        import torch

        option = self.config.option
        if option.device == "cpu" and not self.subject.capabilities.gpu:
            return "cpu"
        gpus = torch.cuda.device_count()
        if not gpus:
            return "no GPU found"
        backend = backend_of(option.backend, int(os.environ["LOCAL_WORLD_SIZE"]), gpus)
        return f"{option.device}; {gpus} × {torch.cuda.get_device_name()}, backend {backend}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.log.write("collect_error", nodeid=report.nodeid, text=report.longreprtext[-TEXT_LIMIT_CHARS:])

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.log.write("problem", text=f"rank {self.rank} left the session: {excinfo.exconly()}")

    def pytest_internalerror(self, excrepr: object) -> None:
        self.log.write("problem", text=f"rank {self.rank}: pytest itself broke:\n{excrepr}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """With --orders: run what the file says, as it says it."""
        if not self.config.option.orders:
            return None
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        by_nodeid = {item.nodeid: item for item in session.items}
        orders = Tail(Path(self.config.option.orders))
        count = 0
        while True:
            for order in orders.read():
                if order["event"] == "end":
                    return True
                count += 1
                if count > self.config.option.first_index:
                    self.order = count - 1
                    item = by_nodeid[order["nodeid"]]
                    session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            time.sleep(ORDER_POLL_S)

    # -- one test

    def sub_world(self, item: pytest.Item) -> int:
        """How many ranks the test runs on; 1 for a test without a world."""
        if "world" not in getattr(item, "fixturenames", ()):
            return 1
        callspec = getattr(item, "callspec", None)
        return int((callspec.params if callspec else {}).get("_world_ranks") or self.world_size)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        from _pytest.runner import runtestprotocol

        index = self.index_of[item.nodeid] if self.order is None else self.order
        limit = item.get_closest_marker("limit_s")
        limit_s = float(limit.args[0]) if limit else float(self.config.option.limit_s)
        n = self.sub_world(item)
        takes_part = self.rank < n <= self.world_size
        self._key, self._order, self.clean = f"test{index}", None, True
        ends = [r for r in _ends(item) if r < min(n, self.world_size)]
        proves = [name for marker in item.iter_markers("proves") for name in marker.args]
        self.log.write(
            "test_start",
            index=index,
            nodeid=item.nodeid,
            limit_s=limit_s,
            operation=_operation(item),
            ends=ends,
            proves=proves,
        )
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        began = time.monotonic()
        self.deadline = began + limit_s
        faulthandler.dump_traceback_later(limit_s + HANG_GRACE_S, exit=True, file=self.stacks)
        try:
            if takes_part:
                reports = runtestprotocol(item, log=False, nextitem=nextitem)
            else:
                reports = []
                item.session._setupstate.teardown_exact(nextitem)
            mine = _outcome(self.rank, reports, self._order)
            if n > self.world_size and self.rank == 0:
                mine.update(kind="UNSUPPORTED", line=f"UNSUPPORTED: needs {n} ranks of {self.world_size}")
            mine["takes_part"] = takes_part
            mine["seconds"] = time.monotonic() - began
            self.log.write("outcome", index=index, **{k: v for k, v in mine.items() if k != "text"})
            result = self._agree(item, mine, self.deadline + VERDICT_GRACE_S)
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.log.write("verdict", index=index, result=vars(result))
        if MISSING in result.by_rank.values() or self._gone:
            self._await_the_end()
        for report in as_reports(item, result):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _await_the_end(self) -> None:
        """A rank is missing. Tests without it would fail, so wait until torchrun ends this rank, and then end it."""
        print(f"rank {self.rank}: waiting for the end, as a rank is gone", file=sys.stderr, flush=True)
        time.sleep(END_LIMIT_S)
        os._exit(1)

    def _agree(self, item: pytest.Item, mine: dict[str, Any], deadline: float) -> Result:
        """The verdict over all ranks; the same on each of them."""
        ends = _ends(item)
        everyone = [r for r in range(self.world_size) if r not in ends]
        try:
            came = self.store.gather(
                f"{self._key}/outcome", json.dumps(mine).encode(), everyone, deadline - time.monotonic()
            )
        except StoreGone as e:
            text = "\n".join(filter(None, [f"rank {self.rank}: {e}", mine["text"]]))
            return Result(item.nodeid, "ERROR", str(e), text, {str(self.rank): str(e)}, _operation(item))
        result = merge(
            item.nodeid, _operation(item), {r: json.loads(c) for r, c in came.items()}, self.world_size, ends
        )
        meant = [r for r in ends if r < self.sub_world(item)]
        self._gone = [r for r in meant if self._has_ended(r)]
        if alive := [r for r in meant if r not in self._gone]:
            text = f"ranks {alive} were to end within this test and did not"
            return Result(item.nodeid, "FAIL", text, f"{text}\n{result.text}", result.by_rank, _operation(item))
        return result

    def _has_ended(self, rank: int) -> bool:
        """Whether its supervisor has written down that a rank is gone; waits a little for it."""
        path = self.run_dir / f"rank{rank}.jsonl"
        until = time.monotonic() + EXIT_LIMIT_S
        while True:
            latest = [e["event"] for e in Tail(path).read() if e["event"] in ("start", "exit")]
            if latest[-1:] == ["exit"]:
                return True
            if time.monotonic() > until:
                return False
            time.sleep(ORDER_POLL_S)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
        report = yield
        unclaimed = call.excinfo is not None and isinstance(call.excinfo.value, Unclaimed)
        self.clean = self.clean and (report.passed or unclaimed)  # all ranks end so: none waits to be released
        if report.failed and self._order is None:
            from conformance.subject import UnknownCapability

            self._order = -1
            with contextlib.suppress(StoreGone):
                self._order = self.store.add(f"{self._key}/order")
            if world := getattr(item, "funcargs", {}).get("world"):
                world.leave()
            error = call.excinfo.value if call.excinfo else None
            report.broke = is_out_of_memory(error) or (report.when != "call" and not isinstance(error, CloseFailed))
            report.broke = report.broke or isinstance(error, (StoreGone, UnknownCapability))
            del error
            # Frames of the traceback hold the test's groups; peers are released only when those are gone.
            for name in ("last_type", "last_value", "last_traceback", "last_exc"):
                if hasattr(sys, name):
                    delattr(sys, name)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        from conformance.subject import OPERATIONS

        wanted = [(marker.args, marker.kwargs) for marker in item.iter_markers("requires")]
        if "world" in getattr(item, "fixturenames", ()) and _operation(item) in OPERATIONS:
            wanted.append(((), {"operations": _operation(item)}))
        for flags, members in wanted:
            if missing := self.subject.capabilities.missing(*flags, **members):
                pytest.skip(f"UNSUPPORTED: {missing}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """A ranked test with Hypothesis's @given: rank 0 draws for all."""
        if "world" not in pyfuncitem.funcargs or not getattr(pyfuncitem.obj, "is_hypothesis_test", False):
            return None
        from conformance.in_step import given_in_step

        names = pyfuncitem._fixtureinfo.argnames
        given_in_step(pyfuncitem.funcargs["world"], pyfuncitem.obj, {n: pyfuncitem.funcargs[n] for n in names})
        return True

    # -- the end

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.left_behind += self.join_dropped()
        self.log.write("end", exitstatus=int(exitstatus), left_behind=self.left_behind)
        if self.config.option.launched and exitstatus in (0, 1, 5):
            session.exitstatus = 0  # the verdicts are in the log; a failed rank would make torchrun end the others

    def pytest_unconfigure(self) -> None:
        faulthandler.dump_traceback_later(20, exit=True, file=self.stacks)


def is_out_of_memory(error: BaseException | None) -> bool:
    """MemoryError, or what torch raises for it on a CPU or a GPU."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and any(s in text for s in ("out of memory", "can't allocate memory", "not enough memory"))
    )


def _ends(item: pytest.Item) -> list[int]:
    """Ranks that end within the test: its markers `ends`."""
    return sorted({int(r) for marker in item.iter_markers("ends") for r in marker.args})


def _operation(item: pytest.Item) -> str:
    """The collective a test is about: its parameter `operation`, or its marker."""
    callspec = getattr(item, "callspec", None)
    if callspec and isinstance(callspec.params.get("operation"), str):
        return str(callspec.params["operation"])
    marker = item.get_closest_marker("operation")
    return str(marker.args[0]) if marker else ""


def _outcome(rank: int, reports: list[pytest.TestReport], order: int | None) -> dict[str, Any]:
    """One rank's outcome of one test, from pytest's reports of its phases."""
    kind, line, text = "PASS", "passed", ""
    for report in reports:
        if report.failed and kind in ("PASS", "UNSUPPORTED", "XFAIL"):
            broke = getattr(report, "broke", report.when != "call")
            kind = "ERROR" if broke else "FAIL"
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else report.longreprtext.strip()
            line = f"{'broke' if broke else 'failed'} in {report.when}: {_first_line(message)}"
            text = report.longreprtext + "".join(
                f"\n--- {name} ---\n{content}" for name, content in report.sections if "log" not in name
            )
        elif report.skipped and kind == "PASS":
            xfail = getattr(report, "wasxfail", None)
            kind = "UNSUPPORTED" if xfail is None else "XFAIL"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            line = reason.removeprefix("Skipped: ") if xfail is None else f"xfail: {xfail}"
    return {"kind": kind, "line": line, "text": text[-TEXT_LIMIT_CHARS:], "order": order, "rank": rank}


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else ""


def merge(
    nodeid: str, operation: str, came: dict[int, dict[str, Any]], world_size: int, ends: Sequence[int] = ()
) -> Result:
    """One verdict from the outcomes of those ranks that gave one (pure; the same on every rank).

    Args:
        came: rank → kind, line, text, order, takes_part, seconds.
        ends: ranks that give none, as the test means it.
    """
    missing = [r for r in range(world_size) if r not in came and r not in ends]
    by_rank = {str(r): came[r]["line"] if came[r]["takes_part"] else "idle" for r in sorted(came)}
    by_rank.update(dict.fromkeys(map(str, missing), MISSING))
    by_rank.update(dict.fromkeys(map(str, ends), "ended, as it was to"))
    seconds = max((c["seconds"] for c in came.values()), default=0.0)
    failed = [c for c in came.values() if c["kind"] in ("FAIL", "ERROR")]
    judged = {r: c for r, c in came.items() if c["takes_part"] or c["kind"] != "PASS"}
    kinds = {c["kind"] for c in judged.values()}
    table = "\n".join(f"  rank {r}: {by_rank[r]}" for r in sorted(by_rank, key=int))
    if failed:
        # Order 0 and below: the store was not there to give one.
        first = min(failed, key=lambda c: (c["order"] is None or c["order"] < 1, c["order"] or 0, c["rank"]))
        kind, reason = first["kind"], f"rank {first['rank']} {first['line']}"
        if alone := [r for r in sorted(judged) if judged[r]["kind"] == "UNSUPPORTED"]:
            reason = f"ranks {alone} skipped and others did not ({judged[alone[0]]['line']}); {reason}"
        text = f"rank {first['rank']} of {world_size} was the first to fail:\n\n{first['text']}\n\n{table}"
    elif missing:
        kind, reason = "FAIL", f"ranks {missing} are missing: hung or dead"
        text = f"{reason}\n{table}"
    elif len(kinds) > 1:
        kind, reason = "FAIL", "the ranks disagree: " + ", ".join(f"{r}: {by_rank[str(r)]}" for r in sorted(judged))
        text = f"the ranks disagree on the outcome:\n{table}"
    else:
        kind = kinds.pop() if kinds else "PASS"
        reason = next(iter(judged.values()))["line"] if kind != "PASS" and judged else ""
        text = ""
    return Result(nodeid, kind, reason, text, by_rank, operation, seconds)


def as_reports(item: pytest.Item, result: Result) -> list[pytest.TestReport]:
    """The verdict as pytest's three reports, the same on every rank."""

    def report(when: str, outcome: str, longrepr: Any = None, **extra: Any) -> pytest.TestReport:
        keywords = dict.fromkeys(item.keywords, 1)
        return pytest.TestReport(
            item.nodeid, item.location, keywords, outcome, longrepr, when, duration=result.seconds, **extra
        )

    where = (str(item.path), item.location[1] or 0)
    if result.kind == "ERROR":
        return [report("setup", "failed", result.text), report("teardown", "passed")]
    if result.kind == "UNSUPPORTED":
        return [report("setup", "skipped", (*where, f"Skipped: {result.reason}")), report("teardown", "passed")]
    if result.kind == "XFAIL":
        call = report("call", "skipped", result.reason, wasxfail=result.reason)
    else:
        call = report("call", "failed" if result.kind == "FAIL" else "passed", result.text or None)
    return [report("setup", "passed"), call, report("teardown", "passed")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker and "_world_ranks" in metafunc.fixturenames:
        metafunc.parametrize("_world_ranks", marker.args, indirect=True, ids=[f"{n}ranks" for n in marker.args])
    given = [str(m.args[0]) for m in metafunc.definition.iter_markers("parametrize")]
    if "mode" in metafunc.fixturenames and not any("mode" in names.replace(",", " ").split() for names in given):
        warm = metafunc.config.option.warm
        metafunc.parametrize("mode", ("",) if warm else _modes_of(metafunc))


def _modes_of(metafunc: pytest.Metafunc) -> list[str]:
    capabilities = _subject_of(metafunc.config).capabilities
    instead = {mode: v for m in metafunc.definition.iter_markers("instead") for mode, v in m.kwargs.items()}
    variants = [instead.get(mode, mode) for mode in capabilities.modes]
    return [v if v in capabilities.variants else m for m, v in zip(capabilities.modes, variants, strict=True)]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ranked suites are never collected outside; meta only if it is named, and test_gpu.py on a CPU if asked for."""
    meta = HERE / "meta"
    named = [Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args]
    if collection_path == meta:
        return True if inside() or not any(path.is_relative_to(meta) for path in named) else None
    for_gpus = collection_path == HERE / "test_gpu.py" and config.option.device == "cpu"
    if for_gpus and collection_path not in named and "gpu" not in (config.option.markexpr or ""):
        return True
    if config.pluginmanager.hasplugin("conformance-spread"):
        return None
    on_ranks = collection_path.is_relative_to(HERE) and not collection_path.is_relative_to(meta)
    if on_ranks and collection_path.is_file() and not inside() and not only_shows(config):
        if RANKED_CODE not in config.stash and not any(path.is_relative_to(HERE) for path in named):
            raise pytest.UsageError(f"{HERE.name}/ runs on ranks: name it to pytest, or say --ignore={HERE.name}")
        return True
    return None


# --------------------------------------------------------------------------------------------------- fixtures


def _subject_of(config: pytest.Config) -> Subject:
    """The subject, also where there are no ranks (--collect-only)."""
    if ranked := config.stash.get(RANKED, None):
        return ranked.subject
    from conformance.subjects import load_subject

    return load_subject(config.option.subject)


def _ranked(config: pytest.Config) -> Ranked:
    ranked = config.stash.get(RANKED, None)
    if ranked is None:
        raise pytest.UsageError("this test needs ranks: name it to pytest with --ranked, or run it under torchrun")
    return ranked


@pytest.fixture
def _world_ranks(request: pytest.FixtureRequest) -> int | None:
    return getattr(request, "param", None)


@pytest.fixture
def world(request: pytest.FixtureRequest, _world_ranks: int | None) -> Iterator[World]:
    """The ranks of this test in a fresh group; see World."""
    ranked = _ranked(request.config)
    size = _world_ranks or ranked.world_size
    w = World(ranked, request.node.nodeid, ranked._key, size, float(request.config.option.group_timeout_s))
    w.ends = [r for r in _ends(request.node) if r < size]
    try:
        w._open()
        yield w
    finally:
        w._close()


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    """Who is judged."""
    return _ranked(request.config).subject


@pytest.fixture
def codec(subject: Subject) -> Codec:
    """The subject's codec; UNSUPPORTED if it has none."""
    if missing := subject.capabilities.missing("codec"):
        pytest.skip(f"UNSUPPORTED: {missing}")
    made = subject.codec()
    assert made is not None, f"subject {subject.name} claims a codec, and codec() gave None"
    return made


@pytest.fixture
def record_row(request: pytest.FixtureRequest) -> Callable[..., None]:
    """record_row(table, **fields): a row for the report; written by rank 0 only.

    Rows of the table "frames" (kind, dtype, n_words, raw_bytes, frame_bytes, escapes) are summed by kind and dtype and
    shown as bits per word, ratio and escape rate; any other table is shown as it is.
    """
    ranked = _ranked(request.config)

    def record(table: str, **fields: Any) -> None:
        if ranked.rank == 0:
            ranked.log.write("row", table=table, fields=fields)

    return record
