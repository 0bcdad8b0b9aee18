"""The warm server: it has imported torch once, and forks a launch for each set of ranks that is wanted.

It has one thread for ever, so that forking is sound. `Lab` (faults/lab.py) starts one and speaks with it over its
standard input and output, a JSON line a message. When its input ends, or it dies, everything it started ends too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any

from conformance.launch import die_with_parent

SHARED_SIZE = 4


@dataclass
class _Launch:
    pid: int
    requests: Any
    answers: int
    shared: bool
    busy: bool = False
    job: dict[str, Any] = field(default_factory=dict)
    buffer: bytes = b""


class Server:
    """Gives jobs to launches and their answers to whoever asked."""

    def __init__(self) -> None:
        self._launches: list[_Launch] = []
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # nothing but answers may go to standard output
        self._buffer = b""

    def run(self) -> None:
        """Until standard input ends."""
        self._answer({"ready": True, "pid": os.getpid(), "threads": len(os.listdir("/proc/self/task"))})
        while True:
            ready, _, _ = select.select([0, *(launch.answers for launch in self._launches)], [], [])
            for launch in [each for each in self._launches if each.answers in ready]:
                self._hear(launch)
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    break
                self._buffer += data
                *lines, self._buffer = self._buffer.split(b"\n")
                for line in lines:
                    self._give(json.loads(line))
        for launch in list(self._launches):
            if launch.busy:  # nobody waits for it any more; the kernel ends its ranks with it
                os.kill(launch.pid, signal.SIGKILL)
            self._dismiss(launch)

    def _answer(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")

    def _give(self, job: dict[str, Any]) -> None:
        shared = job["shared"]
        launch = next((each for each in self._launches if shared and each.shared and not each.busy), None)
        if launch is None:
            launch = self._fork(SHARED_SIZE if shared else job["scenario"]["world_size"], shared)
        launch.busy, launch.job = True, job
        try:
            launch.requests.write(json.dumps(job) + "\n")
        except BrokenPipeError:  # it has died; _hear will say so
            return

    def _fork(self, size: int, shared: bool) -> _Launch:
        requests_out, requests_in = os.pipe()
        answers_out, answers_in = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)
                for other in self._launches:
                    with contextlib.suppress(OSError):
                        other.requests.close()
                    os.close(other.answers)
                os.close(requests_in)
                os.close(answers_out)
                self._out.close()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                from faults.launch import serve

                serve(size, requests_out, answers_in)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(0)
        os.close(requests_out)
        os.close(answers_in)
        launch = _Launch(pid, os.fdopen(requests_in, "w", buffering=1), answers_out, shared)
        self._launches.append(launch)
        return launch

    def _hear(self, launch: _Launch) -> None:
        data = os.read(launch.answers, 1 << 16)
        if not data:
            if launch.busy:
                self._answer({"id": launch.job["id"], "error": "the process that held the ranks died"})
            self._dismiss(launch)
            return
        launch.buffer += data
        *lines, launch.buffer = launch.buffer.split(b"\n")
        for line in lines:
            answer = json.loads(line)
            launch.busy = False
            spent = answer.pop("spent") or not launch.shared
            self._answer(answer)
            if spent:
                self._dismiss(launch)

    def _dismiss(self, launch: _Launch) -> None:
        """It leaves by itself once its pipe ends: it is bounded."""
        self._launches.remove(launch)
        with contextlib.suppress(OSError):
            launch.requests.close()
        os.close(launch.answers)
        os.waitpid(launch.pid, 0)


def main() -> None:
    """Import what ranks need, then serve."""
    import faults.judge
    import faults.rank  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGTERM)
    Server().run()


if __name__ == "__main__":
    main()
