"""Processes forked from a nursery: whoever goes away, at whatever moment, is noticed and takes nobody along."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conformance.launch import Tail
from conformance.meta.launching import ROOT
from conformance.nursery import SOCKET_ENV, NoNursery, Nursery, _ask

pytestmark = pytest.mark.outer

LIMIT_S = 30.0
SLEEPER = """
import os, time
from pathlib import Path

def test_it():
    Path("aside").write_text(str(os.getpid()))
    Path("aside").rename("pid")
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def nursery():
    try:
        made = Nursery({**os.environ, "OMP_NUM_THREADS": "1"})
    except NoNursery as e:
        pytest.skip(str(e))
    with made:
        yield made


def come(path: Path) -> str:
    """What a file says, once it is there."""
    until = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < until, f"no {path.name} within {LIMIT_S:g} s"
        time.sleep(0.01)
    return path.read_text()


@pytest.mark.parametrize("order", [("dies", "told"), ("told", "dies")], ids="-then-".join)
def test_a_supervisor_that_hears_of_its_rank_s_death_and_is_told_to_stop_at_once_writes_the_death_down(
    nursery, tmp_path, order
):
    (tmp_path / "test_it.py").write_text(SLEEPER)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1", SOCKET_ENV: nursery.path}
    env["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "conformance.launch", "--run-dir", str(tmp_path), "--", "test_it.py"]
    supervisor = subprocess.Popen(command, cwd=tmp_path, env=env)
    try:
        rank = int(come(tmp_path / "pid"))
        os.kill(supervisor.pid, signal.SIGSTOP)  # it gets both when it goes on
        for what in order:
            os.kill(rank if what == "dies" else supervisor.pid, signal.SIGKILL if what == "dies" else signal.SIGTERM)
            time.sleep(0.2)
        os.kill(supervisor.pid, signal.SIGCONT)
        assert supervisor.wait(LIMIT_S) == 128 + signal.SIGKILL
    finally:
        supervisor.kill()
        supervisor.wait()
    [said] = [e for e in Tail(tmp_path / "rank0.jsonl").read() if e["event"] == "exit"]
    assert said["code"] == -signal.SIGKILL
    assert said["told"]


def test_clients_that_leave_before_their_answer_take_nobody_along(nursery, tmp_path):
    script = tmp_path / "long.py"
    script.write_text("import time\ndef main(args):\n    time.sleep(600)\n")
    how = {"env": {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}, "cwd": tmp_path}
    with open(os.devnull, "w") as nowhere:
        how |= {"stdout": nowhere, "stderr": nowhere}
        staying = nursery.start("long:main", [], **how)
        request = {"do": "fork", "main": "long:main", "args": [], "on_hangup": int(signal.SIGKILL)}
        request |= {"env": how["env"], "cwd": str(tmp_path), "python": sys.executable, "root": str(ROOT)}
        server = nursery._process.pid
        os.kill(server, signal.SIGSTOP)
        with open(os.devnull) as empty:
            for _ in range(4):
                left = _ask(nursery.path, request, [empty.fileno(), nowhere.fileno(), nowhere.fileno()])
                with contextlib.suppress(OSError):
                    left.shutdown(socket.SHUT_RDWR)
                left.close()
        os.kill(server, signal.SIGCONT)
        after = [nursery.start("long:main", [], **how) for _ in range(4)]  # descriptors are used again
        time.sleep(0.2)
        assert nursery._process.poll() is None, "the nursery has ended"
        assert [child.poll() for child in (staying, *after)] == [None] * 5
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        assert sorted(map(int, children)) == sorted(child.pid for child in (staying, *after)), "a child of nobody runs"
        for child in (staying, *after):
            child.kill()
            assert child.wait(LIMIT_S) == -signal.SIGKILL
