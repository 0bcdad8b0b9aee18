"""One launch: a process that holds the ranks, hosts their store, and follows them to the end of each scenario.

It forks the ranks before it has threads of its own, so that each starts with torch imported. It knows their process
ids, and signals nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from conformance.launch import describe_exit, die_with_parent
from faults.ledger import Ledger, read_ledger

POLL_S = 0.02
STACKS_GRACE_S = 0.5
LEAVE_LIMIT_S = 5.0


@dataclass
class _Rank:
    number: int
    pid: int
    commands: Any
    replies: Any
    how: str = ""
    stopped: bool = False
    resume_at: float = 0.0


class Launch:
    """Ranks 0 … size − 1, until `close`, or until one of them is lost."""

    def __init__(self, size: int) -> None:
        self.ranks = [self._fork(number) for number in range(size)]
        import torch.distributed as dist

        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        for rank in self.ranks:
            self._tell(rank, {"port": self._store.port})
        self._jobs = 0
        self.spent = False

    def _fork(self, number: int) -> _Rank:
        commands_out, commands_in = os.pipe()
        replies_out, replies_in = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_with_parent(signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)
                for rank in getattr(self, "ranks", []):
                    rank.commands.close()
                    rank.replies.close()
                os.close(commands_in)
                os.close(replies_out)
                from faults.rank import serve

                serve(number, commands_out, replies_in)
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        os.close(commands_out)
        os.close(replies_in)
        return _Rank(number, pid, os.fdopen(commands_in, "w", buffering=1), os.fdopen(replies_out, "rb", buffering=0))

    @staticmethod
    def _tell(rank: _Rank, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            rank.commands.write(json.dumps(message) + "\n")

    def run(self, job: dict[str, Any]) -> None:
        """One scenario, to its end or its limit; its directory then holds the events of all.

        Args:
            job: {"directory", "scenario", "subject", "plan"}.
        """
        from faults.scenario import Scenario

        scenario = Scenario.of(job["scenario"])
        directory = Path(job["directory"])
        ledger = Ledger(directory / "launch.jsonl")
        ranks = self.ranks[: scenario.world_size]
        self._jobs += 1
        ledger.write("launch", pid=os.getpid(), pids=[rank.pid for rank in ranks], limit_s=scenario.limit_s)
        for rank in ranks:
            self._tell(rank, {**job, "key": f"job{self._jobs}"})
        pending = {rank.number for rank in ranks}
        deadline = time.monotonic() + scenario.limit_s
        while pending and time.monotonic() < deadline:
            self._listen(ranks, pending)
            self._reap(ranks, pending, directory, ledger)
            if pending and all(self.ranks[number].stopped and not self.ranks[number].resume_at for number in pending):
                break  # only ranks are left that were stopped for good
        for number in sorted(pending):
            rank = self.ranks[number]
            ledger.write("stopped_for_good" if rank.stopped else "hung", rank=number, limit_s=scenario.limit_s)
        if any(not self.ranks[number].stopped for number in pending):
            for number in pending:
                self._kill(self.ranks[number], signal.SIGUSR1)  # have it dump its stacks
            time.sleep(STACKS_GRACE_S)
        self.spent = bool(pending) or any(rank.how for rank in ranks)
        if self.spent:
            self.close(ledger)
        ledger.write("left", alive=[rank.pid for rank in ranks if self.spent and _exists(rank.pid)])
        ledger.close()

    def _listen(self, ranks: list[_Rank], pending: set[int]) -> None:
        waiting = [rank.replies for rank in ranks if rank.number in pending and not rank.how]
        ready, _, _ = select.select(waiting, [], [], POLL_S)
        for rank in ranks:
            if rank.replies in ready and rank.replies.read(4096):
                pending.discard(rank.number)
        if not waiting:
            time.sleep(POLL_S)
        elif ready and pending:
            time.sleep(0.001)

    def _reap(self, ranks: list[_Rank], pending: set[int], directory: Path, ledger: Ledger) -> None:
        """What the kernel says of the ranks; resume those whose time has come."""
        for rank in ranks:
            if rank.how:
                continue
            if rank.resume_at and time.monotonic() >= rank.resume_at:
                rank.resume_at = 0.0
                self._kill(rank, signal.SIGCONT)
                ledger.write("resumed", rank=rank.number, pid=rank.pid)
            pid, status = os.waitpid(rank.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                continue
            if os.WIFSTOPPED(status):
                rank.stopped = True
                ledger.write("stopped", rank=rank.number, pid=rank.pid)
                after_s = _resume_after_s(directory / f"rank{rank.number}.jsonl")
                rank.resume_at = time.monotonic() + after_s if after_s else 0.0
            elif os.WIFCONTINUED(status):
                rank.stopped = False
            else:
                self._ended(rank, status, ledger)
                pending.discard(rank.number)

    @staticmethod
    def _ended(rank: _Rank, status: int, ledger: Ledger | None) -> None:
        rank.how = describe_exit(os.waitstatus_to_exitcode(status)).removeprefix("signal ")
        if ledger is not None:
            ledger.write("exit", rank=rank.number, pid=rank.pid, how=rank.how)

    @staticmethod
    def _kill(rank: _Rank, number: signal.Signals) -> None:
        if not rank.how:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)

    def close(self, ledger: Ledger | None = None) -> None:
        """Let the ranks leave; end by their ids those that do not within 5 s. All are gone when this returns."""
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.commands.close()
            if rank.stopped:
                self._kill(rank, signal.SIGKILL)
        until = time.monotonic() + (LEAVE_LIMIT_S if not self.spent else STACKS_GRACE_S)
        for rank in self.ranks:
            while not rank.how:
                pid, status = os.waitpid(rank.pid, os.WNOHANG)
                if pid:
                    self._ended(rank, status, None)
                elif time.monotonic() > until:
                    self._kill(rank, signal.SIGKILL)
                    if ledger is not None:
                        ledger.write("ended", rank=rank.number, pid=rank.pid)
                    _, status = os.waitpid(rank.pid, 0)
                    self._ended(rank, status, None)
                else:
                    time.sleep(POLL_S)


def _resume_after_s(path: Path) -> float:
    """How long after stopping itself the rank wants to be resumed; 0: never."""
    wishes = [e["after_s"] for e in read_ledger(path)[0] if e["event"] == "wants_resume"]
    return float(wishes[-1]) if wishes else 0.0


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def serve(size: int, requests_fd: int, answers_fd: int) -> None:
    """Take jobs, one JSON line each; answer each with a line once its directory is finished and judged."""
    launch = Launch(size)
    try:
        with os.fdopen(requests_fd) as requests, os.fdopen(answers_fd, "w", buffering=1) as answers:
            for line in requests:
                job = json.loads(line)
                answer: dict[str, Any] = {"id": job["id"]}
                try:
                    launch.run(job)
                    from faults.judge import finish

                    answer["verdict"] = finish(Path(job["directory"])).as_json()
                except Exception:
                    answer["error"] = traceback.format_exc()
                    launch.spent = True
                answers.write(json.dumps({**answer, "spent": launch.spent}) + "\n")
                if launch.spent:
                    break
    finally:
        launch.close()
