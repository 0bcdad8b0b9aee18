"""A call that is made again, or by its caller, is what it was the first time, whatever lies between."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zipccl_core import Policy
from zipccl_core.collectives.call import Done
from zipccl_core.collectives.device import STREAMS
from zipccl_core.errors import CorruptFrame, InvalidArgument, PeerError
from zipccl_core.frame import BLOCK_WORDS
from zipccl_core.tests.test_pipeline import Watching, data, flip, gather, make, nothing, same, small_chunks, summed
from zipccl_core.tests.thread_device import ThreadDevice

__all__ = ["make", "small_chunks"]


@pytest.mark.parametrize("mode", ["default_device", "inference"])
@pytest.mark.parametrize("async_op", [False, True])
def test_modes_of_the_calling_thread_are_no_matter(make: Any, monkeypatch: Any, mode: str, async_op: bool) -> None:
    on_cpu = lambda device, n: torch.full((n,), 0xA5, dtype=torch.uint8, device="cpu")  # noqa: E731
    monkeypatch.setattr(ThreadDevice, "empty", on_cpu)
    ranks = make(2, link="gloo")

    def run(rank: int) -> list[bool]:
        good = []
        for entered in (True, False):
            out, mine = nothing(18000), data(9000, rank)
            with contextlib.ExitStack() as stack:
                if entered:
                    stack.enter_context(torch.device("meta") if mode == "default_device" else torch.inference_mode())
                work = ranks.comms[rank].all_gather_into_tensor(out, mine, async_op=async_op)
                if work is not None:
                    work.wait()
            good.append(same(out, torch.cat([data(9000, r) for r in range(2)])))
        return good

    assert ranks.each(run) == [[True, True]] * 2


@pytest.mark.parametrize(("compress", "link"), [("auto", "threads"), ("never", "straight"), ("always", "threads")])
def test_an_all_to_all_in_place_is_right_each_time(make: Any, compress: Any, link: str) -> None:
    ranks, n = make(2, Policy(compress=compress, min_bytes=1, timeout_s=20.0), link=link), 1 << 14

    def run(rank: int) -> list[bool]:
        good = []
        for call in range(8):  # on patterns that do not shrink, "auto" pauses some of them
            x = data(2 * n, 10 * call + rank, wild=True)
            ranks.comms[rank].all_to_all_single(x, x)
            good.append(same(x, torch.cat([data(2 * n, 10 * call + r, wild=True).split(n)[rank] for r in range(2)])))
        return good

    assert ranks.each(run) == [[True] * 8] * 2


def test_what_overlaps_is_copied_before_it_goes_straight(make: Any) -> None:
    ranks, n = make(2, Policy(compress="never", timeout_s=20.0), link="straight"), 6000

    def run(rank: int) -> list[bool]:
        good = []
        for call in range(3):
            words = data(2 * n, 10 * call + rank)
            memory = torch.cat([words, words[:2]])
            ranks.comms[rank].all_to_all_single(memory[2:], memory[:-2])
            good.append(same(memory[2:], torch.cat([data(2 * n, 10 * call + r).split(n)[rank] for r in range(2)])))
        return good

    assert ranks.each(run) == [[True] * 3] * 2


def test_an_async_op_that_is_none_is_one_error_on_all_ranks_in_a_repeated_call_too(make: Any) -> None:
    ranks = make(2)
    x = [data(9000, r) for r in range(2)]
    assert ranks.each(lambda r: ranks.comms[r].all_reduce(x[r].clone())) == [None, None]
    wrong = (None, False)
    errors = ranks.each(lambda r: ranks.comms[r].all_reduce(x[r].clone(), dist.ReduceOp.SUM, wrong[r]))
    assert [type(error) for error in errors] == [InvalidArgument] * 2
    assert gather(ranks, 9000) == [True] * 2


def test_a_device_that_fails_before_a_call_is_numbered_leaves_everything_as_it_is(make: Any) -> None:
    ranks = make(2)
    assert gather(ranks, 9000) == [True] * 2
    device = ranks.devices[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "now", lambda: (_ for _ in ()).throw(RuntimeError("a sticky error")))
        with pytest.raises(RuntimeError, match="sticky"):
            ranks.comms[0].all_gather_into_tensor(nothing(18000), data(9000, 0))
    assert gather(ranks, 9000) == [True] * 2


@pytest.mark.parametrize("at", ["records", "between stages"])
def test_an_interrupt_is_raised_and_told(make: Any, at: str) -> None:
    ranks = make(3, Policy(compress="always", timeout_s=10.0))  # two would have one stage
    exchange = ranks.comms[0]._exchange
    carry, send = exchange._carry_through, exchange.send_records

    def interrupted(call: Any, interruptible: bool = False) -> None:
        carry(call, interruptible)
        raise KeyboardInterrupt

    if at == "records":
        exchange.send_records = lambda call: (_ for _ in ()).throw(KeyboardInterrupt())
    else:
        exchange._carry_through = interrupted

    def run(rank: int) -> Any:
        began = time.monotonic()
        try:
            ranks.comms[rank].all_reduce(data(9000, rank))
        except BaseException as exc:
            return type(exc), str(exc), time.monotonic() - began
        return None

    results = ranks.each(run)
    exchange._carry_through, exchange.send_records = carry, send
    assert results[0][0] is KeyboardInterrupt
    for told in results[1:]:
        assert told[0] is PeerError
        assert "rank 0 failed" in told[1]
        assert "KeyboardInterrupt" in told[1]
        assert told[2] < 8
    assert exchange.last_call.done.is_set()


def test_a_repeated_call_takes_the_words_as_they_are_when_it_is_issued(make: Any) -> None:
    ranks, n = make(2), 9000

    def run(rank: int, held: Any) -> bool:
        mine, out, comm = data(n, rank).view(90, 100), nothing(2 * n), ranks.comms[rank]
        comm.barrier(async_op=True)
        work = comm.all_gather_into_tensor(out, mine, async_op=True)
        mine.t_()
        mine.data = torch.zeros(n, dtype=torch.bfloat16)
        held.set()
        work.wait()
        return same(out, torch.cat([data(n, r) for r in range(2)]))

    for _ in range(2):
        held = [threading.Event() for _ in range(2)]
        for rank in range(2):
            exchange = ranks.comms[rank]._exchange
            wait = held[rank].wait
            exchange.seam = Watching({("verdict", exchange._sequence): lambda wait=wait: wait(5)})
        assert ranks.each(lambda r, held=held: run(r, held[r])) == [True, True]


def test_a_straight_call_is_the_same_each_time_whatever_shape_and_dtype(make: Any) -> None:
    ranks = make(2, Policy(compress="never", timeout_s=20.0), link="straight")
    inputs = [torch.arange(16).add(3 * rank).remainder(5).bool().view(4, 4) for rank in range(2)]

    def run(rank: int) -> bool:
        out = torch.zeros(16, dtype=torch.bool)
        ranks.comms[rank].all_to_all_single(out, inputs[rank])
        return torch.equal(out, torch.cat([x.view(-1).split(8)[rank] for x in inputs]))

    assert [ranks.each(run) for _ in range(3)] == [[True, True]] * 3


def test_a_call_that_a_peer_refused_is_over_on_the_device_when_it_returns(make: Any, small_chunks: None) -> None:
    ranks, n = make(2, pause_s=0.02), 40 * BLOCK_WORDS
    pipeline, busy = ranks.pipeline(0), []
    drain = pipeline._drain

    def watched(*args: Any) -> None:
        drain(*args)
        busy.append(any(ranks.devices[0].streams[name].busy for name in STREAMS))

    pipeline._drain = watched
    errors = ranks.each(
        lambda r: ranks.comms[r].all_gather_into_tensor(nothing(2 * n) if r == 0 else torch.zeros(2 * n), data(n, r))
    )
    assert [type(error) for error in errors] == [InvalidArgument] * 2
    assert busy == [False]


def test_what_is_remembered_does_not_hold_the_communicator(make: Any) -> None:
    """It would live until the next collection of cycles, with its threads and buffers."""
    ranks = make(2)
    assert gather(ranks, 9000) == [True] * 2
    ranks.each(lambda r: ranks.comms[r].all_reduce(data(9000, r)))
    ranks.each(lambda r: ranks.comms[r].all_to_all_single(nothing(9000), data(9000, r)))
    ranks.each(lambda r: ranks.comms[r].reduce_scatter_tensor(nothing(4500), data(9000, r)))
    comm = ranks.comms[0]
    known = list(comm._memory._known.values())
    assert len(known) == 4
    for each in known:
        for function in (each.alike._make, *each.alike._lay_outs):
            for cell in function.__closure__ or ():
                assert cell.cell_contents is not comm


def test_a_factor_is_not_remembered_and_the_latest_are_kept(make: Any, monkeypatch: Any) -> None:
    ranks = make(2)
    monkeypatch.setattr("zipccl_core.collectives.repeat.MOST", 2)
    op = dist._make_nccl_premul_sum(0.5)
    ranks.each(lambda r: ranks.comms[r].all_reduce(data(9000, r), op))
    memory = ranks.comms[0]._memory
    assert not memory._known
    for n in (9000, 9001, 9002):
        assert gather(ranks, n) == [True] * 2
    assert [key[1][0] for key in memory._known] == [18002, 18004]


@pytest.mark.parametrize(("compress", "input_alone"), [("never", True), ("always", False)])
def test_what_a_graph_would_hear_of_is_not_taken_for_known(make: Any, compress: Any, input_alone: bool) -> None:
    """torch adds a hook to an output that requires grad at each call of the backend's; views of inputs join a graph."""
    ranks = make(2, Policy(compress=compress, reduction="native", timeout_s=20.0), link="straight")
    outs, inputs = [nothing(18000) for _ in range(2)], [data(9000, r) for r in range(2)]
    for _ in range(2):
        ranks.each(lambda rank: ranks.comms[rank].all_gather_into_tensor(outs[rank], inputs[rank]))

    def is_known(out: torch.Tensor, mine: torch.Tensor) -> bool:
        return ranks.comms[0]._memory.find("all_gather_into_tensor", out, mine, None) is not None

    with_grad = torch.ones(1, requires_grad=True).bfloat16()
    assert is_known(outs[0], inputs[0])
    assert not is_known(outs[0] * with_grad, inputs[0])
    assert is_known(outs[0], inputs[0] * with_grad) == input_alone


def test_a_late_verdict_on_a_reduction_of_two_is_told_on_both_where_they_meet(make: Any) -> None:
    ranks = make(2, Policy(compress="always", verify="late", timeout_s=20.0))
    ranks.links[0].change = flip(9000)  # in what rank 0 gets
    xs = [data(9000, r) for r in range(2)]
    wanted = summed(xs)
    assert ranks.each(lambda rank: ranks.comms[rank].all_reduce(xs[rank])) == [None] * 2
    errors = ranks.each(lambda rank: ranks.comms[rank].barrier())
    assert [type(error) for error in errors] == [CorruptFrame] * 2
    assert not same(xs[0], wanted)
    assert same(xs[1], wanted)
    assert gather(ranks, 9000) == [True] * 2


def test_all_who_wait_for_a_call_are_let_go_of_once_it_is_done() -> None:
    done, gone = Done(), []
    assert not done.wait(0.01)
    threads = [threading.Thread(target=lambda: gone.append(done.wait(5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert not done.is_set()
    assert not done.wait(0.01)
    done.set()
    done.set()
    for thread in threads:
        thread.join(5)
    assert gone == [True] * 4
    assert done.is_set()
    assert done.wait(0)


@pytest.mark.parametrize("handled", ["another", "itself"])
def test_a_signal_may_come_while_somebody_begins_to_wait(monkeypatch: pytest.MonkeyPatch, handled: str) -> None:
    done, other, found = Done(), Done(), list[bool]()

    def handler(*_: object) -> None:
        if handled == "itself":
            done.set()
            return
        threading.Timer(0.1, other.set).start()
        found.append(other.wait(5))

    lock = threading.Lock

    def with_a_signal() -> Any:
        monkeypatch.setattr(threading, "Lock", lock)
        signal.raise_signal(signal.SIGUSR1)
        return lock()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        monkeypatch.setattr(threading, "Lock", with_a_signal)
        assert done.wait(0.2) == (handled == "itself")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [True] * (handled == "another")


def test_calls_that_are_issued_before_any_is_laid_out_have_tensors_of_their_own(make: Any) -> None:
    """One is made ahead; of those that come before the next is, each is made as it is issued."""
    ranks, n, count = make(3), 9000, 5
    held = [threading.Event() for _ in range(3)]

    def run(rank: int) -> list[bool]:
        comm = ranks.comms[rank]
        tensors = [data(n, 10 * rank + i).view(90, 100) for i in range(count)]
        comm.all_reduce(tensors[0].clone())  # known from here on, two stages
        exchange = comm._exchange
        exchange.seam = Watching({("verdict", exchange._sequence): lambda: held[rank].wait(5)})
        comm.barrier(async_op=True)
        works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
        held[rank].set()
        assert all(work.wait() for work in works)
        return [same(t.view(-1), summed([data(n, 10 * r + i) for r in range(3)])) for i, t in enumerate(tensors)]

    assert ranks.each(run) == [[True] * count] * 3


def test_broadcasts_of_several_ranks_are_each_remembered_with_their_own(make: Any) -> None:
    ranks = make(3, Policy(compress="never", timeout_s=20.0), link="straight")

    def run(rank: int) -> list[bool]:
        comm, good = ranks.comms[rank], []
        for turn in range(3):
            for src in range(3):
                tensor = data(100, 10 * turn + rank)
                work = comm.broadcast(tensor, group_src=src, async_op=turn == 2)
                if work is not None:
                    work.wait()
                good.append(same(tensor, data(100, 10 * turn + src)))
        return good

    assert ranks.each(run) == [[True] * 9] * 3
    assert len(ranks.comms[0]._memory._known) == 3
    assert ranks.comms[0].stats()["broadcast"]["raw_bytes"] == 3 * 2 * 200, "as the source, to two others, three times"
    for root in ([0], "0", 0.5):
        errors = ranks.each(lambda rank, root=root: ranks.comms[rank].broadcast(data(100, 0), group_src=root))
        assert [type(error) for error in errors] == [InvalidArgument] * 3
