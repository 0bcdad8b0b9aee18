"""Processes that end without closing: no abort, no hang, and peers that are told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from zipccl_core import Communicator, Policy
from zipccl_core.errors import InvalidArgument, PeerError

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once: ranks must not come in between
    sys.stdout.flush()


what = sys.argv[1]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
comm = Communicator(policy=Policy(compress="always", timeout_s=60))
mine = torch.randn(1000).bfloat16()
out = torch.empty(1000 * size, dtype=torch.bfloat16)
work = comm.all_gather_into_tensor(out, mine, async_op=True)
if rank == 0 or what != "dropped":
    work.wait()
if what == "receive_pending" and rank == 1:
    comm.irecv(torch.empty(5), src=0)
if what == "leaves_it_under_way":
    if rank == 1:
        comm.irecv(torch.empty(5), src=0)
        sys.exit(0)
    time.sleep(9)
    try:
        comm.barrier()
    except PeerError as exc:
        say("told:", exc)
if what == "exits_early":
    if rank == 1:
        sys.exit(0)
    try:
        comm.barrier()
    except PeerError as exc:
        say("told:", exc)
if what == "dropped":
    future = comm.all_reduce(mine, async_op=True).get_future()
    future.then(lambda done: time.sleep(1) or say("called", rank))
if what == "forks":
    theirs = comm.all_reduce(mine, async_op=True)
    child = os.fork()
    if child == 0:
        for wait in (theirs.wait, theirs.get_future().wait):
            try:
                wait()
            except InvalidArgument as exc:
                say("told of the call:", exc)
        for call in (comm.barrier, lambda: comm.isend(mine, dst=1 - rank), lambda: comm.all_reduce(mine), comm.close):
            try:
                call()
            except InvalidArgument as exc:
                say("told:", exc)
        sys.exit(0)
    theirs.wait()
    say("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    comm.all_reduce(mine)
    comm.send(mine, dst=1 - rank) if rank else comm.recv(mine, src=1 - rank)
    comm.close()
say("ended", rank)
"""


def run(folder: Path, text: str, what: str) -> subprocess.CompletedProcess[str]:
    """A script on two ranks, with one argument."""
    script = folder / "script.py"
    script.write_text(text)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        what,
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=env)


@pytest.mark.parametrize("what", ["dropped", "receive_pending", "exits_early", "leaves_it_under_way"])
def test_a_process_that_does_not_close_ends_cleanly(tmp_path: Path, what: str) -> None:
    done = run(tmp_path, SCRIPT, what)
    assert done.returncode == 0, done.stdout + done.stderr
    leaves = what in ("exits_early", "leaves_it_under_way")
    assert done.stdout.count("ended") == (1 if leaves else 2)
    assert ("told:" in done.stdout) == leaves
    assert done.stdout.count("called") == (2 if what == "dropped" else 0)
    assert ("rank 1 of 2 left while it was under way" in done.stdout) == (what == "leaves_it_under_way")


def test_a_forked_process_is_refused_and_harms_nothing_when_it_ends(tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPT, "forks")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("told: this process was forked from the one that made the Communicator") == 2 * 3
    assert (
        done.stdout.count("told of the call: wait: the call was made in the process that this one was forked") == 2 * 2
    )
    assert done.stdout.count("child 0") == 2
    assert done.stdout.count("ended") == 2
