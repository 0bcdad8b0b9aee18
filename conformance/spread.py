"""pytest-xdist over ranked tests: `pytest -n 2 conformance` starts two workers, each with torchrun and its own ranks.

xdist hands out tests one by one; a worker passes each on to its ranks by a line in a file of orders, and reports their
verdict as its own. The ranks of a worker have a rendezvous, a port (the kernel chooses a free one), a folder and, on
CUDA, GPUs that no other worker has. xdist never runs inside torchrun.

What the workers' launchers wrote becomes one JUnit and one JSON in the end, as without xdist.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from conformance.launch import EventLog, Follower, Result, Run, launch
from conformance.plugin import as_reports, command, inner_args, is_ranked, plan_of, run_dir_of
from conformance.report import Reporter, as_json, from_json

WAIT_S = 0.5
END_LIMIT_S = 60.0


def devices_of(worker: int, workers: int, world_size: int) -> dict[str, str]:
    """The environment that gives ranks of one worker GPUs of their own.

    Raises:
        pytest.UsageError: there are not enough for all workers.
    """
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    all_of_them = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if len(all_of_them) < workers * world_size:
        raise pytest.UsageError(
            f"-n {workers} with --world-size {world_size} --device cuda wants {workers * world_size} GPUs, "
            f"there are {len(all_of_them)}"
        )
    mine = all_of_them[worker * world_size : (worker + 1) * world_size]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


class Controller:
    """In the pytest that a person started: tells workers what to launch, and puts together what they wrote."""

    def __init__(self, config: pytest.Config, ranked_args: list[str], *, alone: bool) -> None:
        self.config, self.ranked_args, self.alone = config, ranked_args, alone
        self.run_dir = run_dir_of(config)
        start = Path(config.invocation_params.dir)
        self.junit = self.run_dir / "junit.xml"
        if config.option.xmlpath and alone:
            self.junit = start / config.option.xmlpath
            config.option.xmlpath = None  # pytest's own would know nothing of ranks

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["ranked_args"] = self.ranked_args
        node.workerinput["inner_args"] = inner_args(self.config, self.ranked_args)
        node.workerinput["run_dir"] = str(self.run_dir)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """One report of all workers."""
        whole = Run(self.run_dir, self.config.option.world_size)
        for path in sorted(self.run_dir.glob("*/report.json")):
            part = from_json(json.loads(path.read_text()), path.parent)
            whole.header = whole.header or part.header
            whole.results |= part.results
            whole.rows += part.rows
            whole.cites |= part.cites
            whole.problems += [f"{path.parent.name}: {problem}" for problem in part.problems]
            whole.started = min(whole.started or part.started, part.started)
            whole.ended = max(whole.ended, part.ended)
        again = functools.partial(command, self.config, world_size=whole.world_size)
        Reporter(self.run_dir, self.config.option.subject, again).finish(whole, self.junit)
        if whole.problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


class Worker:
    """In an xdist worker: starts ranks when the first ranked test comes, and runs each such test on them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        given: dict[str, Any] = config.workerinput  # type: ignore[attr-defined]
        name, workers = str(given["workerid"]), int(given["workercount"])
        self.run_dir = Path(given["run_dir"], name)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.ranked_args, self.inner_args = list(given["ranked_args"]), list(given["inner_args"])
        self.env: dict[str, str] = {}
        if config.option.device == "cuda":
            self.env = devices_of(int(name.removeprefix("gw")), workers, config.option.world_size)
        self.verdicts: dict[str, Result] = {}
        self.came = threading.Condition()
        self.thread: threading.Thread | None = None
        self.over = ""
        self.settled: set[str] = set()

    # -- the launch, in a thread

    def _start(self) -> None:
        path = self.run_dir / "orders.jsonl"
        path.touch()
        self.orders = EventLog(path)
        self.thread = threading.Thread(target=self._launch, args=(path,), name="launch", daemon=True)
        self.thread.start()

    def _launch(self, orders: Path) -> None:
        over = "the launch broke"
        try:
            plan = plan_of(self.config, self.ranked_args, self.inner_args, self.run_dir, orders=orders, env=self.env)
            run = launch(plan, self._on_result, self._on_tick)
            (self.run_dir / "report.json").write_text(json.dumps(as_json(run), indent=1) + "\n")
            over = "\n".join(run.problems) or "the ranks ended"
        except Exception as e:
            over = f"the launch broke: {type(e).__name__}: {e}"
        finally:
            with self.came:
                self.over = over
                self.came.notify_all()

    def _on_result(self, result: Result) -> None:
        with self.came:
            self.verdicts[result.nodeid] = result

    def _on_tick(self, run: Run, follower: Follower) -> None:
        """A rank that dies makes a verdict worse, so one counts only when no rank is in its test any more."""
        busy = {r.in_test["nodeid"] for r in follower.ranks.values() if r.in_test}
        with self.came:
            self.settled |= set(self.verdicts) - busy
            self.came.notify_all()

    # -- pytest

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not is_ranked(self.config, item.path):
            return None
        if self.thread is None:
            self._start()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self.orders.write("run", nodeid=item.nodeid)
        with self.came:
            while not (self.over or item.nodeid in self.settled):
                self.came.wait(WAIT_S)
            missing = Result(item.nodeid, "ERROR", "no verdict", f"no verdict of the ranks: {self.over}")
            result = self.verdicts.get(item.nodeid, missing)
        for report in as_reports(item, result):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Have the ranks end their session, and wait for it."""
        if self.thread:
            self.orders.write("end")
            self.thread.join(END_LIMIT_S)
