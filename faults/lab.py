"""The laboratory as its users see it: scenarios in, verdicts out. Imports no torch: the warm server does."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT_S = 120.0
ANSWER_GRACE_S = 60.0


class LabError(RuntimeError):
    """The laboratory itself broke: what happened, and where its log is."""


@dataclass
class Job:
    """One scenario to run.

    Attributes:
        scenario: plain data, as in its YAML file.
        directory: of the run; made, and must not be there.
        subject: "zipccl", or "broken.NAME" of conformance/subjects/broken/under_faults.py.
        own_ranks: whether it must not share its ranks with other scenarios.
        limit_s: after which the launch ends its ranks by itself.
        plan: to follow in place of drawing one.
    """

    scenario: dict[str, Any]
    directory: Path
    own_ranks: bool
    limit_s: float
    subject: str = "zipccl"
    plan: list[dict[str, Any]] | None = None


class Lab:
    """One warm server and its launches; a context manager.

    Raises:
        LabError: it did not start.
    """

    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        self._numbers = itertools.count()
        self._buffer = b""
        self._lines: list[bytes] = []
        hello = self._read(time.monotonic() + START_LIMIT_S)
        if hello["threads"] != 1:
            raise LabError(f"the server has {hello['threads']} threads, and must have one to fork soundly")
        self.pid = hello["pid"]

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def submit(self, job: Job) -> int:
        """Begin a job; its number."""
        job.directory.mkdir(parents=True)
        (job.directory / "scenario.json").write_text(json.dumps(job.scenario, indent=1))
        request = {"subject": job.subject, "plan_given": job.plan is not None}
        (job.directory / "request.json").write_text(json.dumps(request, indent=1))
        number = next(self._numbers)
        message = {
            "id": number,
            "scenario": job.scenario,
            "directory": str(job.directory.resolve()),
            "subject": job.subject,
            "plan": job.plan,
            "shared": not job.own_ranks and job.subject == "zipccl",
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise LabError(f"the server is gone, exit code {self._process.poll()}") from exc
        return number

    def answer(self, limit_s: float) -> tuple[int, dict[str, Any]]:
        """(number, verdict) of the next job that ends.

        Raises:
            LabError: none has within limit_s, or the laboratory broke.
        """
        message = self._read(time.monotonic() + limit_s)
        if "error" in message:
            raise LabError(f"job {message['id']}: {message['error']}")
        return message["id"], message["verdict"]

    def run(self, job: Job) -> dict[str, Any]:
        """Begin a job and wait for its verdict."""
        number = self.submit(job)
        came, verdict = self.answer(job.limit_s + ANSWER_GRACE_S)
        if came != number:
            raise LabError(f"job {number}: the answer is of job {came}; do not mix run with submit")
        return verdict

    def run_all(self, jobs: Iterable[Job], at_once: int) -> Iterator[tuple[Job, dict[str, Any]]]:
        """Verdicts in the order in which jobs end, `at_once` under way at a time.

        Raises:
            ValueError: at_once is less than 1.
            LabError: as answer().
        """
        if at_once < 1:
            raise ValueError(f"at_once must be 1 or more, got {at_once}")
        waiting = iter(jobs)
        under_way: dict[int, Job] = {}
        while True:
            for job in itertools.islice(waiting, at_once - len(under_way)):
                under_way[self.submit(job)] = job
            if not under_way:
                return
            number, verdict = self.answer(max(job.limit_s for job in under_way.values()) + ANSWER_GRACE_S)
            yield under_way.pop(number), verdict

    def close(self) -> None:
        """End the server and all it started."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its launches, and their ranks, are ended by the kernel with it
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while not self._lines:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(fd, 1 << 16) if ready else b""
            if not data:
                self.close()
                why = f"ended with exit code {self._process.poll()}" if ready else "did not answer in time"
                raise LabError(f"the server of the laboratory {why}")
            self._buffer += data
            *lines, self._buffer = self._buffer.split(b"\n")
            self._lines += lines
        message: dict[str, Any] = json.loads(self._lines.pop(0))
        return message
