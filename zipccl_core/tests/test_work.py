"""A Work of ours in the hands of torch: FSDP2, DDP's hooks, futures."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zipccl_core import Policy
from zipccl_core.collectives import straight
from zipccl_core.errors import InvalidArgument, PeerError, RankTimeout
from zipccl_core.frame import BLOCK_WORDS
from zipccl_core.tests.test_exchange import Ranks
from zipccl_core.tests.test_exit import run
from zipccl_core.tests.test_pipeline import data, make, nothing, same, summed

__all__ = ["make"]  # a fixture

N = BLOCK_WORDS + 2


@pytest.fixture(params=["cpu", "threads", "straight", "straight behind others"])
def ranks(request: pytest.FixtureRequest, make: Any) -> Iterator[Ranks]:
    if request.param == "cpu":
        made = Ranks(2, Policy(compress="always", timeout_s=20.0))
        yield made
        made.close()
        return
    is_straight = request.param != "threads"
    policy = Policy(compress="never" if is_straight else "always", timeout_s=20.0)
    made = make(2, policy, link="straight" if is_straight else "threads")
    if request.param == "straight behind others":
        for comm in made.comms:
            comm._exchange.is_queuing = lambda: True
    yield made


def begin(comm: Any, rank: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A gather under way: its Work, its output, and what that is to be."""
    inputs = [data(N, r) for r in range(2)]
    out = nothing(2 * N)
    return comm.all_gather_into_tensor(out, inputs[rank], async_op=True), out, torch.cat(inputs)


def test_it_is_torch_s_by_type_and_has_all_its_methods(ranks: Ranks) -> None:
    def run(rank: int) -> list[Any]:
        work, out, wanted = begin(ranks.comms[rank], rank)
        found = [isinstance(work, dist.Work), work.wait(timedelta(0)), same(out, wanted)]
        work.synchronize()
        work.block_current_stream()
        until = time.monotonic() + 10
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.01)
        return [*found, work.is_success(), work.exception(), work.result()[0] is out, work.get_future_result().wait()]

    assert ranks.each(run) == [[True, True, True, True, None, True, 0]] * 2


def test_its_future_has_the_outputs_and_its_callbacks_may_call(ranks: Ranks) -> None:
    terms = [data(2 * N, 7 + r) for r in range(2)]
    summed_terms = summed(terms)

    def run(rank: int) -> list[bool]:
        comm = ranks.comms[rank]
        work, _, wanted = begin(comm, rank)

        def then(future: Any) -> torch.Tensor:
            (came,) = future.value()
            assert same(came, wanted)
            words = terms[rank].clone()
            comm.all_reduce(words)
            return words

        return [same(work.get_future().then(then).wait(), summed_terms), same(work.get_future().wait()[0], wanted)]

    assert ranks.each(run) == [[True, True]] * 2


def test_the_outputs_of_lists_and_of_messages_are_theirs() -> None:
    ranks = Ranks(2)

    def run(rank: int) -> list[int]:
        comm, came = ranks.comms[rank], [nothing(N), nothing(N)]
        found = [len(comm.all_gather(came, data(N, rank), async_op=True).get_future().wait())]
        found.append(len(comm.gather(data(N, rank), None if rank else came, group_dst=0, async_op=True).result()))
        message = comm.irecv(came[0], group_src=0) if rank else comm.isend(came[0], group_dst=1)
        return [*found, len(message.result()), len(comm.barrier(async_op=True).result())]

    assert ranks.each(run) == [[2, 2, 0, 0], [2, 0, 1, 0]]
    ranks.close()


def test_its_future_raises_what_its_wait_raises() -> None:
    ranks = Ranks(2, Policy(timeout_s=20.0))

    def run(rank: int) -> Any:
        comm = ranks.comms[rank]
        if rank:
            work = comm.all_reduce(data(N, 0), async_op=True)
        else:
            work = comm.broadcast(data(N, 0), group_src=0, async_op=True)
        future = work.get_future()
        with pytest.raises(PeerError, match="call it alike on all ranks"):
            future.wait()
        with pytest.raises(PeerError, match="call it alike on all ranks"):
            work.result()
        return type(work.exception())

    assert ranks.each(run) == [PeerError] * 2
    ranks.close()


def test_a_backend_s_failure_is_in_the_future_too() -> None:
    failed: torch.futures.Future[Any] = torch.futures.Future()
    failed.set_exception(ValueError("broken"))  # type: ignore[arg-type]
    backends = SimpleNamespace(get_future=lambda: failed)
    exchange: Any = SimpleNamespace(broken=None, rank=0)
    with pytest.raises(InvalidArgument, match="all_reduce: the backend refuses it: broken"):
        straight.Begun(exchange, "all_reduce", backends, nothing(1)).get_future().wait()


def test_where_no_thread_can_be_started_the_future_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2)
    begun = [begin(ranks.comms[rank], rank) for rank in range(2)]
    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    assert [same(work.get_future().value()[0], wanted) for work, _, wanted in begun] == [True] * 2
    monkeypatch.undo()
    ranks.close()


def refuse_to_start(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_where_no_thread_can_be_started_a_message_is_an_error_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2, Policy(timeout_s=20.0))
    own = threading.get_ident()
    start = threading.Thread.start

    def some_start(self: threading.Thread) -> None:
        if self.name.startswith("zipccl-channel") and threading.get_ident() == own:
            raise RuntimeError("can't start new thread")
        start(self)

    theirs = ranks.pool.submit(lambda: ranks.comms[1].irecv(nothing(N), group_src=0).exception())
    assert theirs.result() is None
    monkeypatch.setattr(threading.Thread, "start", some_start)
    with pytest.raises(PeerError, match="rank 0 cannot start a thread for its messages: can't start new thread"):
        ranks.comms[0].isend(data(N, 0), group_dst=1)
    with pytest.raises(PeerError, match="rank 0 cannot start a thread"):
        ranks.comms[1].barrier()
    ranks.close()


def test_a_future_of_a_call_that_failed_is_let_go_of_with_its_output() -> None:
    ranks = Ranks(2, Policy(timeout_s=20.0))
    outputs: list[Any] = []
    refused: list[int] = []

    def run(rank: int) -> None:
        comm, out = ranks.comms[rank], nothing(N * (2 + rank))  # of a wrong size on rank 1
        for _ in range(3):
            try:
                future = comm.all_gather_into_tensor(out, data(N, rank), async_op=True).get_future()
                outputs.append(weakref.ref(out))
                future.wait()
            except InvalidArgument:
                refused.append(rank)

    ranks.each(run)
    gc.collect()
    assert sorted(refused) == [0] * 3 + [1] * 3
    assert len(outputs) == 3
    assert [each for each in outputs if each() is not None] == []
    ranks.close()


def test_a_work_in_a_box_is_over_though_nobody_in_python_holds_it() -> None:
    ranks = Ranks(2)

    def run(rank: int) -> bool:
        work, out, wanted = begin(ranks.comms[rank], rank)
        boxed = work.boxed()
        del work
        return bool(dist.Work.unbox(boxed).wait()) and same(out, wanted)

    assert ranks.each(run) == [True] * 2
    ranks.close()


def test_a_wait_for_anything_but_a_time_is_refused() -> None:
    ranks = Ranks(1)
    work = ranks.comms[0].barrier(async_op=True)
    with pytest.raises(InvalidArgument, match=r"timeout must be a datetime\.timedelta, got 5\.0"):
        work.wait(5.0)
    assert work.wait()
    ranks.close()


def test_a_wait_that_is_too_short_says_so_and_the_call_goes_on() -> None:
    ranks = Ranks(2)
    work, out, wanted = begin(ranks.comms[0], 0)
    with pytest.raises(RankTimeout, match="still under way"):
        work.wait(timedelta(milliseconds=5))
    other, _, _ = begin(ranks.comms[1], 1)
    assert work.wait(timedelta(seconds=10))
    assert other.wait()
    assert same(out, wanted)
    ranks.close()


SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.nn.parallel import DistributedDataParallel
from zipccl_core import Communicator, Policy

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
comm = Communicator(policy=Policy(compress="always", timeout_s=60))


class Gather(AllGather):
    calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.full(size, 777.0, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        Gather.calls += 1
        return comm.all_gather_into_tensor(output_tensor, input_tensor, async_op)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(3)])


torch.manual_seed(1)
x = torch.randn(4, 512)
wanted = model()(x)
mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
sharded = model()
for layer in sharded:
    fully_shard(layer, mesh=mesh)
    layer.set_custom_all_gather(Gather())
fully_shard(sharded, mesh=mesh)
sharded._set_unshard_async_op(True)
fsdp2 = torch.equal(sharded(x).view(torch.int32), wanted.view(torch.int32))


def hook(state, bucket):
    work = comm.all_reduce(bucket.buffer().div_(size), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


replicas = [DistributedDataParallel(model()) for _ in range(2)]
replicas[1].register_comm_hook(None, hook)
for replica in replicas:
    replica(x * (rank + 1)).square().sum().backward()
pairs = list(zip(*(replica.parameters() for replica in replicas)))
ddp = all(torch.equal(a.grad, b.grad) for a, b in pairs)
calls = comm.stats()["all_reduce"]["calls"]
sys.stdout.write(f"fsdp2 {fsdp2} {Gather.calls > 0} ddp {ddp} {calls > 0}\\n")  # at once
comm.close()
dist.destroy_process_group()
"""


def test_torch_s_own_parallel_modules_wait_for_it(tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPT, "")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fsdp2 True True ddp True True") == 2, done.stdout
