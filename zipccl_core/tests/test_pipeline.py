"""The pipeline of calls on a device, on a device made of threads: orders, phases, late verdicts, buffers, endings."""

from __future__ import annotations

import gc
import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from zipccl_core import Policy
from zipccl_core.collectives import chunks, communicator, straight
from zipccl_core.collectives import probe as probe_module
from zipccl_core.collectives.buffers import CALLS_AT_ONCE, Pool, size_class_bytes
from zipccl_core.collectives.chunks import buffer_bytes, chunks_of
from zipccl_core.collectives.device import CALLERS
from zipccl_core.collectives.link import GlooLink
from zipccl_core.collectives.message import patterns
from zipccl_core.collectives.pipeline import Pipeline
from zipccl_core.collectives.reduce import ReduceSpec, ordered_sum
from zipccl_core.collectives.wire import MOST_CHUNKS, CallRecord, Sizes, Verdict
from zipccl_core.errors import CorruptFrame, InvalidArgument, PeerError, RankTimeout, ZipcclError
from zipccl_core.frame import BLOCK_WORDS, max_frame_bytes, static_bytes
from zipccl_core.policy.threshold import NEVER_BYTES, threshold_bytes
from zipccl_core.tests.test_exchange import Ranks
from zipccl_core.tests.thread_device import Event, ThreadDevice, ThreadLink

ALWAYS = Policy(compress="always", timeout_s=20.0)
SMALL_CHUNK_BYTES = 4 * BLOCK_WORDS  # two blocks of bfloat16
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


class DeviceRanks(Ranks):
    """Ranks whose CPU tensors count as a device's."""

    def __init__(
        self,
        n: int,
        policy: Policy = ALWAYS,
        link: str = "threads",
        pause_s: float = 0.0,
        beside: DeviceRanks | None = None,
    ) -> None:
        super().__init__(n, policy)
        self.devices = [ThreadDevice(pause_s) for _ in range(n)]
        if beside is not None:  # in the same processes: their callers have one stream
            for device, other in zip(self.devices, beside.devices, strict=True):
                device.streams[CALLERS].close()
                device.key, device.streams[CALLERS] = other.key, other.streams[CALLERS]
        self.links: list[Any] = []
        self.each(lambda rank: self._share_memory(self.comms[rank]._exchange))
        for comm, device in zip(self.comms, self.devices, strict=True):
            exchange = comm._exchange

            def poll(query: Callable[[], bool], deadline: float, exchange: Any = exchange) -> None:
                exchange.poll(query, deadline, "copying to the host", [exchange.rank])

            made: Any = ThreadLink(exchange.transport, device, straight=link == "straight")
            if link == "gloo":
                made = GlooLink(exchange.transport, device, poll)
            self.links.append(made)
            exchange.pipelines["cpu"] = Pipeline(exchange, device, made)

    @staticmethod
    def _share_memory(exchange: Any) -> None:
        exchange.transport.share_memory(exchange.board, exchange.rank, 10.0)

    def pipeline(self, rank: int) -> Pipeline:
        found: Pipeline = self.comms[rank]._exchange.pipelines["cpu"]
        return found

    def close(self) -> None:
        super().close()
        for device in self.devices:
            device.close()


@pytest.fixture
def make() -> Iterator[Callable[..., DeviceRanks]]:
    made: list[DeviceRanks] = []

    def factory(*args: Any, **kwargs: Any) -> DeviceRanks:
        made.append(DeviceRanks(*args, **kwargs))
        return made[-1]

    yield factory
    for ranks in made:
        ranks.close()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", SMALL_CHUNK_BYTES)


def data(n: int, seed: int, dtype: torch.dtype = torch.bfloat16, wild: bool = False) -> torch.Tensor:
    """Normal words, or any patterns: then most of what can go wrong with escapes does."""
    generator = torch.Generator().manual_seed(seed)
    if wild:
        low, high = (-(1 << 15), 1 << 15) if dtype == torch.bfloat16 else (-(1 << 31), 1 << 31)
        return torch.randint(low, high, (n,), generator=generator, dtype=torch.int64).to(BITS[dtype]).view(dtype)
    return torch.randn(n, generator=generator).to(dtype)


def nothing(n: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full((n,), -1, dtype=BITS[dtype]).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype]))


def summed(terms: list[torch.Tensor], spec: ReduceSpec | None = None) -> torch.Tensor:
    out = nothing(terms[0].numel(), terms[0].dtype)
    ordered_sum([patterns(term) for term in terms], spec or ReduceSpec("sum"), patterns(out))
    return out


def gather(ranks: DeviceRanks, n: int, **how: Any) -> list[Any]:
    inputs = [data(n, r, **how) for r in range(ranks.n)]

    def run(rank: int) -> bool:
        out = nothing(ranks.n * n, inputs[0].dtype)
        ranks.comms[rank].all_gather_into_tensor(out, inputs[rank])
        return same(out, torch.cat(inputs))

    return ranks.each(run)


SIZES = (0, 1, 9, BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 1, 5 * BLOCK_WORDS + 7)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("link", ["threads", "gloo"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wild", [False, True], ids=["normal", "any_pattern"])
def test_every_operation_is_bit_exact(make: Any, link: str, dtype: torch.dtype, wild: bool) -> None:
    ranks = make(3, link=link, pause_s=0.0005)
    how = {"dtype": dtype, "wild": wild}
    for n in SIZES:
        assert gather(ranks, n, **how) == [True] * 3, n
        inputs = [data(3 * n, 10 + r, **how) for r in range(3)]
        parts = [list(x.split(n)) if n else [x] * 3 for x in inputs]

        def run(rank: int, n: int = n, inputs: Any = inputs, parts: Any = parts) -> list[bool]:
            comm, good = ranks.comms[rank], []
            shard = nothing(n, dtype)
            comm.reduce_scatter_tensor(shard, inputs[rank].clone())
            good.append(same(shard, summed([p[rank] for p in parts])))
            out = nothing(3 * n, dtype)
            comm.all_to_all_single(out, inputs[rank].clone())
            good.append(same(out, torch.cat([p[rank] for p in parts])))
            x = inputs[rank].clone()
            comm.all_reduce(x, dist.ReduceOp.AVG)
            good.append(same(x, summed(inputs, ReduceSpec("avg"))))
            x = inputs[rank].clone()
            comm.broadcast(x, group_src=1)
            good.append(same(x, inputs[1]))
            return good

        assert ranks.each(run) == [[True] * 4] * 3, n


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("link", ["threads", "gloo"])
@pytest.mark.parametrize("compress", ["always", "never"])
@pytest.mark.parametrize("wild", [False, True], ids=["normal", "any_pattern"])
def test_two_ranks_reduce_in_one_exchange_over_their_own_terms(make: Any, link: str, compress: Any, wild: bool) -> None:
    ranks = make(2, Policy(compress=compress, timeout_s=20.0), link=link, pause_s=0.0005)
    stages: list[int] = []
    carry = ranks.comms[0]._exchange._carry_through
    ranks.comms[0]._exchange._carry_through = lambda call, **how: (stages.append(call.stage), carry(call, **how))
    for n, dtype in itertools.product(SIZES, (torch.bfloat16, torch.float32)):
        inputs = [data(n, 10 + r, dtype, wild) for r in range(2)]

        def run(rank: int, inputs: Any = inputs) -> list[torch.Tensor]:
            results = []
            for async_op in (False, True, False):  # the second and the third as calls that are known
                x = inputs[rank].clone()
                work = ranks.comms[rank].all_reduce(x, dist.ReduceOp.AVG, async_op=async_op)
                if work is not None:
                    work.wait()
                results.append(x)
            ranks.comms[rank].barrier()  # the device may still be busy
            return results

        wanted = summed(inputs, ReduceSpec("avg"))
        assert all(same(x, wanted) for results in ranks.each(run) for x in results), (n, dtype)
    ranks.comms[0]._exchange._carry_through = carry
    assert len(stages) == 4 * 2 * len(SIZES)  # three reductions and a barrier
    assert set(stages) == {0}


class Watching:
    """A seam of which a test says what happens where."""

    def __init__(self, at: dict[tuple[str, int], Callable[[], object]]) -> None:
        self._at = at

    def reached(self, phase: str, operation: str, sequence: int, peer: int, words: Any) -> None:
        self._at.get((phase, sequence), lambda: None)()


def test_records_of_queued_calls_are_told_before_the_call_before_them_is_over(make: Callable[..., DeviceRanks]) -> None:
    ranks = make(2, Policy(compress="always", prefix_percent=0))  # so that there is a phase two, behind the sizes
    queued, heard, seen = threading.Event(), threading.Event(), []
    exchanges = [comm._exchange for comm in ranks.comms]
    exchanges[0].seam = Watching(
        {("encode", 0): lambda: queued.wait(10), ("send_phase_two", 0): lambda: seen.append(heard.wait(10))}
    )
    exchanges[1].seam = Watching({("send", 1): heard.set})

    def run(rank: int) -> bool:
        mine = data(9000, rank)
        outs = [nothing(18000), nothing(18000)]
        works = [ranks.comms[rank].all_gather_into_tensor(out, mine, async_op=True) for out in outs]
        if rank == 0:
            queued.set()
        for work in works:
            work.wait()
        return all(same(out, torch.cat([data(9000, r) for r in range(2)])) for out in outs)

    assert ranks.each(run) == [True, True]
    assert seen == [True], "rank 0 had to finish its first call before rank 1 heard of the second"


@pytest.mark.usefixtures("small_chunks")
def test_lists_roots_and_strided_tensors_go_through_the_pipeline_too(make: Any) -> None:
    ranks, n = make(3, pause_s=0.0005), 2 * BLOCK_WORDS + 10
    inputs = [data(n, r) for r in range(3)]

    def run(rank: int) -> list[bool]:
        comm, good = ranks.comms[rank], []
        outs = [nothing(n) for _ in range(3)]
        comm.all_gather(outs, inputs[rank])
        good += [same(out, x) for out, x in zip(outs, inputs, strict=True)]
        out = nothing(n)
        comm.scatter(out, inputs if rank == 2 else None, group_src=2)
        good.append(same(out, inputs[rank]))
        outs = [nothing(n) for _ in range(3)] if rank == 0 else []
        comm.gather(inputs[rank], outs or None, group_dst=0)
        good += [same(out, x) for out, x in zip(outs, inputs, strict=False)]
        wide = nothing(6 * n).view(3 * n, 2)
        comm.all_gather_into_tensor(wide[:, 1], inputs[rank])
        good.append(same(wide[:, 1].contiguous(), torch.cat(inputs)))
        good.append(same(wide[:, 0].contiguous(), nothing(3 * n)))
        return good

    assert all(all(good) for good in ranks.each(run))


@pytest.mark.usefixtures("small_chunks")
def test_uneven_and_empty_parts_arrive(make: Any) -> None:
    ranks = make(3, Policy(compress="auto", min_bytes=4096, timeout_s=20.0), pause_s=0.0005)
    sizes = [[0, 70_000, 5], [3, 0, 0], [50_000, 1, 9]]
    parts = [[data(n, 7 * i + j) for j, n in enumerate(row)] for i, row in enumerate(sizes)]

    def run(rank: int) -> bool:
        out = nothing(sum(row[rank] for row in sizes))
        work = ranks.comms[rank].all_to_all_single(
            out, torch.cat(parts[rank]), [row[rank] for row in sizes], sizes[rank], async_op=True
        )
        work.wait()
        return same(out, torch.cat([row[rank] for row in parts]))

    assert ranks.each(run) == [True] * 3
    assert ranks.comms[0].last_decision.mode == "compressed"
    assert ranks.comms[1].last_decision.mode == "native"


def test_messages_between_two_ranks_go_by_way_of_the_host(make: Any) -> None:
    ranks, n = make(2, pause_s=0.001), 2 * BLOCK_WORDS + 1
    inputs = [data(n, r) for r in range(2)]

    def run(rank: int) -> list[bool]:
        comm, out = ranks.comms[rank], nothing(2 * n).view(n, 2)
        sending = comm.isend(inputs[rank], group_dst=1 - rank)
        receiving = comm.irecv(out[:, 1], group_src=1 - rank)
        assert sending.wait()
        assert receiving.wait()
        return [same(out[:, 1].contiguous(), inputs[1 - rank]), same(out[:, 0].contiguous(), nothing(n))]

    assert ranks.each(run) == [[True] * 2] * 2


def test_a_message_from_a_device_is_sent_once_the_device_has_come_to_it(make: Any) -> None:
    ranks, n = make(2), 5000
    words, gate = data(n, 0), Event()
    ranks.devices[0].queued_ahead = gate
    sending = ranks.comms[0].isend(words, group_dst=1)
    out = nothing(n)
    receiving = ranks.comms[1].irecv(out, group_src=0)
    time.sleep(0.1)
    assert not sending.is_completed()
    gate.done.set()
    assert sending.wait()
    assert receiving.wait()
    assert same(out, words)


def test_a_message_from_a_device_that_does_not_come_to_it_is_an_error_on_both(make: Any) -> None:
    ranks = make(2, Policy(compress="always", timeout_s=0.5))
    gate = Event()
    ranks.devices[0].queued_ahead = gate
    began = time.monotonic()

    def run(rank: int) -> None:
        comm = ranks.comms[rank]
        comm.send(data(500, 0), group_dst=1) if rank == 0 else comm.recv(nothing(500), group_src=0)

    errors = ranks.each(run)
    assert time.monotonic() - began < 5
    gate.done.set()
    assert [type(error) for error in errors] == [RankTimeout] * 2
    assert str(errors[0]) == str(errors[1])
    assert "rank 0 of 2 did not arrive within 0.5 s" in str(errors[0])


def test_a_message_behind_a_busy_stream_holds_up_nothing_else(make: Any) -> None:
    ranks = make(2, Policy(compress="always", timeout_s=5.0))
    gate = Event()
    ranks.devices[0].queued_ahead = gate
    held = ranks.comms[0].isend(data(500, 0), group_dst=1, tag=1)
    ranks.devices[0].queued_ahead = None  # another stream of the caller's
    ranks.comms[0].isend(data(500, 1), group_dst=1, tag=2)
    out = nothing(500)
    assert ranks.comms[1].irecv(out, group_src=0, tag=2).wait(timedelta(seconds=2))
    assert same(out, data(500, 1))
    assert gather(ranks, 9000) == [True] * 2
    gate.done.set()
    assert ranks.comms[1].irecv(out, group_src=0, tag=1).wait()
    assert held.wait()
    assert same(out, data(500, 0))


def test_a_message_into_what_a_busy_stream_has_holds_up_nothing_else(make: Any) -> None:
    ranks = make(2, Policy(compress="always", timeout_s=5.0))
    gate = Event()
    ranks.devices[1].queued_ahead = gate
    held = nothing(500)
    receiving = ranks.comms[1].irecv(held, group_src=0)
    ranks.devices[1].queued_ahead = None  # another stream of the caller's
    assert ranks.comms[0].isend(data(500, 0), group_dst=1).wait(timedelta(seconds=4))

    def run(rank: int) -> bool:
        out = nothing(18000)
        ranks.comms[rank].all_gather_into_tensor(out, data(9000, rank), async_op=True).wait()
        return same(out, torch.cat([data(9000, r) for r in range(2)]))

    assert ranks.each(run) == [True] * 2
    assert same(held, nothing(500)), "what the stream holds ahead may still read it"
    gate.done.set()
    assert receiving.wait()
    assert same(held, data(500, 0))


def test_what_a_message_is_received_into_is_nobody_else_s_before_it_is_filled(make: Any) -> None:
    ranks = make(2)
    device, kept, gate = ranks.devices[1], list[bool](), Event()

    def to_device(target: torch.Tensor, source: torch.Tensor) -> None:  # as CUDA: by address
        memory = weakref.ref(target.untyped_storage())
        device.stream.put(lambda: kept.append(memory() is not None))

    device.to_device, device.queued_ahead = to_device, gate
    target = nothing(500)
    receiving = ranks.comms[1].irecv(target, group_src=0)
    ranks.comms[0].send(data(500, 0), group_dst=1)
    assert receiving._calls[0].done.wait(5)
    del receiving, target
    gc.collect()
    gate.done.set()
    ranks.each(lambda rank: ranks.comms[rank].close())
    assert kept == [True]


def test_a_message_that_waits_for_its_device_ends_with_the_communicator(make: Any) -> None:
    ranks = make(2, Policy(compress="always", timeout_s=20.0))
    gate = Event()
    ranks.devices[0].queued_ahead = gate
    works = [ranks.comms[0].isend(data(500, i), group_dst=1) for i in range(2)]
    ranks.comms[0]._exchange.give_up(PeerError("rank 1 said so"), RuntimeError())
    began = time.monotonic()
    for work in works:
        with pytest.raises(PeerError, match="rank 1 said so"):
            work.wait()
    assert time.monotonic() - began < 2
    gate.done.set()


@pytest.mark.parametrize(("link", "compress"), [("threads", "always"), ("straight", "never")])
def test_elements_that_are_not_stored_as_they_are_travel_as_they_are(make: Any, link: str, compress: Any) -> None:
    """torch conjugates and negates when it reads: the memory of such a tensor holds other bits than its elements."""
    ranks, n = make(2, Policy(compress=compress, timeout_s=5.0), link=link), 600
    plain = [torch.complex(data(n, r, torch.float32), data(n, r + 2, torch.float32)) for r in range(2)]
    wanted = torch.view_as_real(torch.cat(plain))
    words = [data(n, r, torch.float32) for r in range(2)]

    def run(rank: int) -> list[bool]:
        comm, good = ranks.comms[rank], []
        for _ in range(2):
            out = torch.zeros(2 * n, dtype=torch.complex64).conj()
            comm.all_gather_into_tensor(out, torch.conj_physical(plain[rank]).conj())
            comm.barrier()
            good.append(torch.equal(torch.view_as_real(out.resolve_conj()), wanted))
            sent = plain[0].clone() if rank else torch.conj_physical(plain[0]).conj()
            comm.broadcast(sent, group_src=0)
            comm.barrier()
            good.append(torch.equal(torch.view_as_real(sent.resolve_conj()), wanted[:n]))
            for output in (torch.zeros(2 * n), torch._neg_view(torch.zeros(2 * n))):
                for input in (words[rank], torch._neg_view(words[rank].neg())):
                    comm.all_gather_into_tensor(output, input)
                    comm.barrier()
                    good.append(same(output.resolve_neg(), torch.cat(words)))
        return good

    assert ranks.each(run) == [[True] * 12] * 2


def test_one_rank_alone_sums_by_the_law_and_copies(make: Any) -> None:
    ranks, n = make(1), BLOCK_WORDS + 3
    words = data(n, 0, wild=True)
    shard, out = nothing(n), nothing(n)
    ranks.comms[0].reduce_scatter_tensor(shard, words)
    ranks.comms[0].all_gather_into_tensor(out, words)
    assert same(shard, summed([words]))
    assert same(out, words)


@pytest.mark.parametrize("compress", ["always", "never"])
def test_a_reduce_scatter_into_its_own_shard_copies_nothing_and_is_remembered(
    make: Any, monkeypatch: pytest.MonkeyPatch, compress: Any
) -> None:
    ranks, n = make(3, Policy(compress=compress, timeout_s=20.0)), BLOCK_WORDS + 1
    inputs = [data(3 * n, r) for r in range(3)]
    copied: list[int] = []
    flat_input = communicator.flat_input

    def counted(input: torch.Tensor, *outputs: torch.Tensor) -> torch.Tensor:
        flat = flat_input(input, *outputs)
        copied.extend([flat.numel()] * (flat.data_ptr() != input.data_ptr()))
        return flat

    monkeypatch.setattr(communicator, "flat_input", counted)
    built = [0] * 3

    def run(rank: int) -> list[bool]:
        found, comm = [], ranks.comms[rank]
        note = comm._note

        def counted_note(*args: Any) -> None:
            built[rank] += 1
            note(*args)

        comm._note = counted_note
        for _ in range(2):
            words, own = inputs[rank].clone(), slice(rank * n, (rank + 1) * n)
            comm.reduce_scatter_tensor(words[own], words)
            others = [torch.cat([w[: rank * n], w[(rank + 1) * n :]]) for w in (words, inputs[rank])]
            found += [same(words[own], summed([term[own] for term in inputs])), same(*others)]
        return found

    assert ranks.each(run) == [[True] * 4] * 3
    assert copied == []
    assert built == [1] * 3, "the second is known"


def test_premul_sum_has_its_factor_before_the_sum(make: Any) -> None:
    ranks, n = make(3), BLOCK_WORDS
    inputs = [data(3 * n, r, wild=True) for r in range(3)]
    op = dist._make_nccl_premul_sum(0.3)

    def run(rank: int) -> bool:
        shard = nothing(n)
        ranks.comms[rank].reduce_scatter_tensor(shard, inputs[rank], op)
        terms = [x[rank * n : (rank + 1) * n] for x in inputs]
        return same(shard, summed(terms, ReduceSpec("premul_sum", np.float32(0.3))))

    assert ranks.each(run) == [True] * 3


def test_dtypes_that_are_not_coded_travel_as_they_are(make: Any) -> None:
    ranks = make(2)

    def run(rank: int) -> tuple[list[int], str]:
        out = torch.full((6,), -1)
        ranks.comms[rank].all_gather_into_tensor(out, torch.tensor([rank, 5, 7]))
        x = torch.tensor([rank, 9])
        ranks.comms[rank].all_reduce(x, dist.ReduceOp.MAX)
        return out.tolist() + x.tolist(), ranks.comms[rank].last_decision.mode

    assert ranks.each(run) == [([0, 5, 7, 1, 5, 7, 1, 9], "native")] * 2


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("prefix_percent", [0.0, 3.0, 100.0])
def test_phase_two_is_posted_on_overflow_only(make: Any, prefix_percent: float) -> None:
    ranks = make(2, Policy(compress="always", prefix_percent=prefix_percent, timeout_s=20.0))
    n = 5 * BLOCK_WORDS
    assert gather(ranks, n) == [True] * 2
    posts = ranks.links[0].posts
    assert len(posts) == 3 + (prefix_percent == 0.0), "three chunks, and what their prefixes had no room for"
    assert posts[0] == [chunks_of(ranks.policies[0], n, "bfloat16")[0].phase_one_bytes]
    assert ranks.comms[0].stats()["all_gather_into_tensor"]["phase_two_messages"] == (prefix_percent == 0.0)


def test_the_issuing_call_waits_for_nothing_and_wait_orders_the_rest(make: Any) -> None:
    ranks, n = make(2), 1 << 16
    inputs = [data(n, r) for r in range(2)]
    gate = Event()
    for device in ranks.devices:
        device.queued_ahead = gate

    def issue(rank: int) -> tuple[Any, torch.Tensor]:
        out = nothing(2 * n)
        return ranks.comms[rank].all_gather_into_tensor(out, inputs[rank], async_op=True), out

    issued = ranks.each(issue)
    time.sleep(0.2)
    assert not any(work.is_completed() for work, _ in issued), "the work that was queued ahead is not done"
    assert all(same(out, nothing(2 * n)) for _, out in issued), "written before what was queued ahead"
    gate.done.set()
    assert ranks.each(lambda rank: issued[rank][0].wait()) == [True, True]
    assert all(same(out, torch.cat(inputs)) for _, out in issued)


@pytest.mark.usefixtures("small_chunks")
def test_calls_in_flight_take_turns_with_two_sets_of_buffers(make: Any) -> None:
    ranks = make(2, pause_s=0.001)
    n = 3 * BLOCK_WORDS
    inputs = [[data(n, 10 * call + r) for r in range(2)] for call in range(8)]

    def run(rank: int) -> list[bool]:
        outs = [nothing(2 * n) for _ in inputs]
        works = [
            ranks.comms[rank].all_gather_into_tensor(out, x[rank], async_op=True)
            for out, x in zip(outs, inputs, strict=True)
        ]
        for work in reversed(works):
            work.wait()
        return [same(out, torch.cat(x)) for out, x in zip(outs, inputs, strict=True)]

    assert ranks.each(run) == [[True] * 8] * 2
    pool = ranks.pipeline(0).pool
    assert pool.made == 3 * CALLS_AT_ONCE, "one to send, one to receive, one of scratch, for each call at once"
    assert pool.held_bytes <= pool.bound_bytes


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("wild", [False, True], ids=["normal", "any_pattern"])
@pytest.mark.parametrize("where", ["several streams", "one stream", "the caller's stream", "either"])
def test_calls_that_are_waited_for_keep_their_order_wherever_they_go(
    make: Any, monkeypatch: pytest.MonkeyPatch, where: str, wild: bool
) -> None:
    n = 5 * BLOCK_WORDS + 3  # larger than what goes to one stream, if only "either" does
    most = {"several streams": -1, "either": 4 * n}.get(where, 1 << 40)
    monkeypatch.setattr("zipccl_core.collectives.pipeline.MOST_IN_ORDER_BYTES", most)
    ranks = make(3, pause_s=0.002)
    for device in ranks.devices:
        device.has_callers = where in ("the caller's stream", "either")
    inputs = [data(n, rank, wild=wild) for rank in range(3)]
    total = summed(inputs)

    def run(rank: int) -> list[bool]:
        comm, outs = ranks.comms[rank], [nothing(3 * n) for _ in range(4)]
        mine, sums = inputs[rank].clone(), [nothing(n) for _ in range(2)]
        comm.all_gather_into_tensor(outs[0], mine)
        works = [comm.all_gather_into_tensor(outs[1], outs[0][rank * n : (rank + 1) * n], async_op=True)]
        comm.reduce_scatter_tensor(sums[0], outs[0])  # behind a call that nobody has waited for
        works[0].wait()
        comm.all_to_all_single(outs[2], outs[1])
        works.append(comm.reduce_scatter_tensor(sums[1], outs[0], async_op=True))
        comm.all_reduce(mine)
        small = data(BLOCK_WORDS // 2, rank)
        comm.all_reduce(small)
        comm.all_gather_into_tensor(outs[3], sums[0])
        for work in works:
            work.wait()
        ranks.devices[rank].come_to_the_callers()
        gathered = torch.cat(inputs)
        parts = torch.cat([inputs[rank]] * 3)
        scattered = [summed([gathered[r * n : (r + 1) * n]] * 3) for r in range(3)]
        return [
            same(outs[0], gathered),
            same(outs[1], gathered),
            same(outs[2], parts),
            same(sums[0], scattered[rank]),
            same(sums[1], scattered[rank]),
            same(mine, total),
            same(small, summed([data(BLOCK_WORDS // 2, r) for r in range(3)])),
            same(outs[3], torch.cat(scattered)),
        ]

    assert ranks.each(run) == [[True] * 8] * 3


def test_two_communicators_on_one_default_stream_do_not_wait_there_for_each_other(make: Any) -> None:
    """Two threads a rank, which each rank lets run in another order."""
    policy = Policy(compress="always", timeout_s=6.0)
    a = make(2, policy)
    for device in a.devices:
        device.has_callers = True
    assert a.pipeline(0).can_use_callers()
    b = make(2, policy, beside=a)
    for device in b.devices:
        device.has_callers = True
    n, held = 3 * BLOCK_WORDS, {("encode", 0): lambda: time.sleep(0.3)}
    b.comms[0]._exchange.seam = a.comms[1]._exchange.seam = Watching(held)
    inputs = [data(n, rank) for rank in range(2)]

    def run(rank: int) -> list[bool]:
        def gather(ranks: DeviceRanks) -> bool:
            out = nothing(2 * n)
            ranks.comms[rank].all_gather_into_tensor(out, inputs[rank])
            ranks.devices[rank].come_to_the_callers()
            return same(out, torch.cat(inputs))

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(gather, (a, b)))

    assert a.each(run) == [[True, True]] * 2
    b.each(lambda rank: b.comms[rank].close())
    assert a.pipeline(0).can_use_callers()


@pytest.mark.parametrize("how", ["strided and straight", "not coded"])
def test_calls_that_come_one_behind_the_other_are_let_go_of(make: Any, how: str) -> None:
    ranks = make(
        2, Policy(compress="never", timeout_s=20.0), link="straight" if how == "strided and straight" else "gloo"
    )

    def run(rank: int) -> int:
        most = 0
        for _ in range(60):
            out = torch.empty(2000, 2)[:, 0] if how == "strided and straight" else torch.empty(2000)
            work = ranks.comms[rank].all_gather_into_tensor(out, torch.randn(1000), async_op=True)
            work.wait()
            while not work.is_completed():
                time.sleep(0.0005)
            time.sleep(0.004)
            most = max(most, len(ranks.pipeline(rank)._in_flight))
        return most

    assert max(ranks.each(run)) < 20


def test_buffers_are_bounded_over_calls_of_all_sizes(make: Any) -> None:
    ranks = make(2)
    largest = 40 * BLOCK_WORDS
    sizes = [int(n) for n in np.random.default_rng(0).integers(1, largest, 60)] + [largest, 1, 1]
    for n in sizes:
        assert gather(ranks, n) == [True] * 2
    ranks.each(lambda rank: ranks.comms[rank].barrier())
    pool = ranks.pipeline(1).pool
    assert ranks.comms[1].stats()["device_buffers"] == {
        "held_bytes": pool.held_bytes,
        "bound_bytes": pool.bound_bytes,
        "made": pool.made,
    }
    assert pool.held_bytes <= pool.bound_bytes
    assert pool.bound_bytes <= CALLS_AT_ONCE * 1.2 * (2 * max_frame_bytes(largest) + largest)


def flip(at: int, calls: int = 1) -> Callable[[int, torch.Tensor], None]:
    """Flips a bit of the first messages that come."""
    left = [calls]

    def change(peer: int, received: torch.Tensor) -> None:
        if left[0] and received.numel() > at:
            left[0] -= 1
            received[at] ^= 4

    return change


def test_a_damaged_frame_is_one_error_on_all_ranks_at_the_next_call_but_one_at_the_latest(make: Any) -> None:
    ranks, n = make(3), 3 * BLOCK_WORDS
    ranks.links[1].change = flip(9000)
    first = gather(ranks, n)
    assert first[0] is True
    assert first[2] is True
    errors = gather(ranks, n)
    if errors == [True] * 3:
        errors = gather(ranks, n)
    assert [type(error) for error in errors] == [CorruptFrame] * 3
    assert len({str(error) for error in errors}) == 1
    assert "all_gather_into_tensor #0: message from rank " in str(errors[0])
    assert " to rank 1: " in str(errors[0])
    assert gather(ranks, n) == [True] * 3, "the Communicator goes on"


@pytest.mark.parametrize("ending", ["barrier", "close"])
def test_a_damaged_frame_is_known_where_ranks_meet(make: Any, ending: str) -> None:
    ranks = make(2)
    ranks.links[0].change = flip(9000)
    gather(ranks, 3 * BLOCK_WORDS)
    errors = ranks.each(lambda rank: getattr(ranks.comms[rank], ending)())
    assert [type(error) for error in errors] == [CorruptFrame] * 2
    assert str(errors[0]) == str(errors[1])


def test_with_verify_wait_a_damaged_frame_is_an_error_of_its_own_call(make: Any) -> None:
    ranks = make(3, Policy(compress="always", verify="wait", timeout_s=20.0))
    ranks.links[2].change = flip(9000)
    errors = gather(ranks, 3 * BLOCK_WORDS)
    assert [type(error) for error in errors] == [CorruptFrame] * 3
    assert len({str(error) for error in errors}) == 1
    assert gather(ranks, 3 * BLOCK_WORDS) == [True] * 3


def test_a_frame_of_another_call_is_found_out(make: Any) -> None:
    """A sound frame with the right size: nothing but the digest that was told says that it is stale."""
    ranks, n = make(2), 2 * BLOCK_WORDS
    kept: list[torch.Tensor] = []

    def replay(peer: int, received: torch.Tensor) -> None:
        if kept:
            received.copy_(kept[0])
        else:
            kept.append(received.clone())

    ranks.links[0].change = replay
    for seed in range(2):
        ranks.each(lambda r, seed=seed: ranks.comms[r].all_gather_into_tensor(nothing(2 * n), data(n, seed)))
    errors = ranks.each(lambda rank: ranks.comms[rank].barrier())
    assert [type(error) for error in errors] == [CorruptFrame] * 2
    assert "stale or swapped" in str(errors[0])


def test_disagreement_is_one_error_on_all_ranks(make: Any) -> None:
    ranks = make(3)
    n = [BLOCK_WORDS, BLOCK_WORDS, BLOCK_WORDS + 1]

    def run(rank: int) -> None:
        ranks.comms[rank].all_gather_into_tensor(nothing(3 * n[rank]), data(n[rank], rank))

    errors = ranks.each(run)
    assert [type(error) for error in errors] == [PeerError] * 3
    assert len({str(error) for error in errors}) == 1
    assert gather(ranks, BLOCK_WORDS) == [True] * 3


def test_refused_arguments_are_one_error_on_all_ranks(make: Any) -> None:
    ranks = make(3)

    def run(rank: int) -> None:
        ranks.comms[rank].all_gather_into_tensor(nothing(3 * 100 - (rank == 1)), data(100, rank))

    errors = ranks.each(run)
    assert [type(error) for error in errors] == [InvalidArgument] * 3
    assert len({str(error) for error in errors}) == 1
    assert gather(ranks, BLOCK_WORDS) == [True] * 3


def test_ranks_on_different_devices_are_told(make: Any) -> None:
    ranks = make(3)
    pipelines = [ranks.comms[r]._exchange.pipelines for r in range(3)]
    aside = pipelines[2].pop("cpu")
    submit = ranks.comms[2]._exchange.submit

    def relabel(*calls: Any, here: bool = False) -> Any:
        for call in calls:
            call.device = "other"
        return submit(*calls, here=here)

    ranks.comms[2]._exchange.submit = relabel
    errors = gather(ranks, BLOCK_WORDS)
    assert [type(error) for error in errors] == [PeerError] * 3
    assert "with device 'cpu'" in str(errors[0])
    assert "with device 'other'" in str(errors[0])
    ranks.comms[2]._exchange.submit = submit
    pipelines[2]["cpu"] = aside
    assert gather(ranks, BLOCK_WORDS) == [True] * 3


def test_a_rank_that_does_not_come_is_a_timeout_that_names_it(make: Any) -> None:
    ranks = make(3, Policy(compress="always", timeout_s=0.6))

    def run(rank: int) -> None:
        if rank != 1:
            ranks.comms[rank].all_gather_into_tensor(nothing(3 * BLOCK_WORDS), data(BLOCK_WORDS, rank))

    errors = ranks.each(run)
    assert [type(errors[0]), type(errors[2])] == [RankTimeout] * 2
    assert "rank 1 of 3 did not arrive" in str(errors[0])
    assert str(errors[0]) == str(errors[2])


def test_transfers_that_never_end_are_given_up_at_the_deadline(make: Any) -> None:
    ranks = make(2, Policy(compress="always", timeout_s=0.8))
    link = ranks.links[0]

    def stall(peer: int, received: torch.Tensor) -> None:
        while not link.aborted:
            time.sleep(0.01)

    link.change = stall
    began = time.monotonic()
    gather(ranks, BLOCK_WORDS)
    errors = ranks.each(lambda rank: ranks.comms[rank].barrier())
    assert time.monotonic() - began < 6
    assert all(isinstance(error, ZipcclError) for error in errors)
    assert str(errors[0]) == str(errors[1])


def test_sizes_that_cannot_be_are_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make(2)
    pack = Sizes.pack

    def lie(sizes: Sizes) -> bytes:
        if sizes.src == 1:
            sizes = Sizes(sizes.sequence, 1, frames=tuple((size + (1 << 40), d) for size, d in sizes.frames))
        return pack(sizes)

    monkeypatch.setattr(Sizes, "pack", lie)
    assert isinstance(gather(ranks, BLOCK_WORDS)[0], PeerError)
    errors = gather(ranks, BLOCK_WORDS)
    assert [type(error) for error in errors] == [PeerError] * 2
    assert "rank 1 tells of frames of" in str(errors[0])
    assert str(errors[0]) == str(errors[1])


def test_coding_pauses_where_it_does_not_pay_at_the_same_call_on_all_ranks(make: Any) -> None:
    ranks = make(2, Policy(compress="auto", min_bytes=0, timeout_s=20.0))
    modes = []
    for _ in range(5):
        assert gather(ranks, 2 * BLOCK_WORDS, wild=True) == [True] * 2
        modes.append([comm.last_decision.mode for comm in ranks.comms])
    assert modes == [[m, m] for m in ("compressed", "native", "compressed", "native", "native")]


def test_a_call_that_is_captured_is_refused_on_all_ranks(make: Any) -> None:
    ranks = make(2)
    ranks.devices[1].capturing = True
    errors = gather(ranks, BLOCK_WORDS)
    assert [type(error) for error in errors] == [InvalidArgument] * 2
    ranks.devices[1].capturing = False
    assert gather(ranks, BLOCK_WORDS) == [True] * 2


@pytest.mark.parametrize("on_device", [True, False])
def test_phases_are_ranges_that_the_profiler_shows(make: Any, on_device: bool, tmp_path: Any) -> None:
    ranks = make(2)
    if not on_device:
        for comm in ranks.comms:
            comm._exchange.pipelines.clear()
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=everything) as p:
        assert gather(ranks, BLOCK_WORDS) == [True] * 2
        ranks.each(lambda rank: ranks.comms[rank].barrier())
    p.export_chrome_trace(str(tmp_path / "trace.json"))
    found = {e["name"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if "name" in e}
    phases = ("encode", "move", "decode") if on_device else ("encode", "decode", "finish")
    assert {f"zipccl {phase} all_gather_into_tensor #0" for phase in phases} <= found


def test_a_work_that_is_dropped_goes_on(make: Any) -> None:
    ranks = make(2, pause_s=0.002)
    outs = [nothing(2 * BLOCK_WORDS) for _ in range(2)]
    ranks.each(lambda r: ranks.comms[r].all_gather_into_tensor(outs[r], data(BLOCK_WORDS, r), async_op=True) and None)
    ranks.each(lambda r: ranks.comms[r].barrier())
    assert all(same(out, torch.cat([data(BLOCK_WORDS, r) for r in range(2)])) for out in outs)


@pytest.mark.parametrize("link", ["straight", "threads"])
def test_one_element_of_any_stride_goes_as_one_element(make: Any, link: str) -> None:
    ranks = make(2, Policy(compress="never", timeout_s=20.0), link=link)

    def run(rank: int) -> list[float]:
        out, mine = torch.zeros(1, 2), torch.tensor([[rank + 1.0, 9.0]])
        ranks.comms[rank].all_to_all_single(torch.zeros(0, 2)[:, 0], torch.zeros(0, 2)[:, 0])
        ranks.comms[rank].broadcast(mine[:, 0], group_src=1)
        out[:, 1] = mine[:, 0]
        ranks.comms[rank].all_gather([out[:, 0], torch.zeros(1, 3)[:, 1]], out[:, 1])
        return out.flatten().tolist()

    assert ranks.each(run) == [[2.0, 2.0]] * 2


def test_a_work_of_nccls_is_given_the_methods_that_it_lacks(make: Any) -> None:
    class Work:
        def __init__(self, over: bool) -> None:
            self.over = over

        def wait(self, *timeout: Any) -> bool:
            return not timeout

        def is_completed(self) -> bool:
            return self.over

        def is_success(self) -> bool:
            raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    exchange = make(2).comms[0]._exchange
    assert [straight.Begun(exchange, "", Work(over), nothing(1)).is_success() for over in (False, True)] == [
        False,
        True,
    ]
    begun = straight.Begun(exchange, "all_reduce", Work(True), nothing(1))
    assert (begun.wait(), begun.wait(timeout=timedelta(seconds=1)), begun.exception(), begun.is_completed()) == (
        True,
        False,
        None,
        True,
    )
    broken = Work(True)
    broken.wait = lambda *timeout: (_ for _ in ()).throw(ValueError("no such tensor"))  # type: ignore[method-assign]
    begun = straight.Begun(exchange, "all_reduce", broken, nothing(1))
    with pytest.raises(InvalidArgument, match="all_reduce: the backend refuses it: no such tensor"):
        begun.wait()
    assert isinstance(begun.exception(), InvalidArgument)
    assert not begun.is_success()


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_what_is_not_coded_goes_straight_to_the_backend_and_asks_nobody(make: Any, n: int) -> None:
    ranks = make(3, Policy(compress="never", reduction="native", timeout_s=20.0), link="straight")
    inputs = [data(3 * n, r) for r in range(3)]

    def run(rank: int) -> list[bool]:
        comm, mine, good = ranks.comms[rank], inputs[rank], []
        wide = nothing(18 * n).view(9 * n, 2)
        comm.all_gather_into_tensor(wide[:, 1], mine)
        good += [same(wide[:, 1].contiguous(), torch.cat(inputs)), same(wide[:, 0].contiguous(), nothing(9 * n))]
        out = nothing(3 * n)
        work = comm.all_to_all_single(out, mine, async_op=True)
        assert work.wait()
        assert work.is_success()
        assert work.is_completed()
        assert work.exception() is None
        good.append(same(out, torch.cat([x[rank * n : (rank + 1) * n] for x in inputs])))
        x = mine.clone()
        comm.broadcast(x, group_src=2)
        good.append(same(x, inputs[2]))
        x = torch.full((3 * n,), float(rank + 1))
        comm.all_reduce(x)
        good.append(bool((x == 6).all()))
        x = torch.full((n,), -1.0)
        comm.reduce_scatter_tensor(x, torch.full((3 * n,), float(rank + 1)))
        good.append(bool((x == 6).all()))
        assert comm.last_decision.mode == "native"
        assert comm._exchange._sequence == 0, "nothing was exchanged"
        return good

    assert ranks.each(run) == [[True] * 6] * 3
    assert ranks.comms[0].stats()["all_gather_into_tensor"]["raw_bytes"] == 2 * 3 * n * 2


def test_a_straight_call_stands_behind_the_coded_ones_before_it(make: Any) -> None:
    ranks = make(2, Policy(compress="auto", min_bytes=4096, timeout_s=20.0), link="straight", pause_s=0.001)
    n = 4 * BLOCK_WORDS
    inputs = [data(n, r) for r in range(2)]

    def run(rank: int) -> list[bool]:
        comm, out, small = ranks.comms[rank], nothing(2 * n), nothing(20)
        work = comm.all_gather_into_tensor(out, inputs[rank], async_op=True)
        comm.all_gather_into_tensor(small, inputs[rank][:10])
        posted = work._calls[0].done.is_set()
        work.wait()
        return [posted, same(out, torch.cat(inputs)), same(small, torch.cat([x[:10] for x in inputs]))]

    assert ranks.each(run) == [[True] * 3] * 2


def test_a_straight_call_behind_coded_ones_does_not_hold_up_the_caller(make: Any) -> None:
    ranks, n = make(2, ALWAYS, link="straight"), BLOCK_WORDS
    inputs, gate = [data(n, r) for r in range(2)], Event()
    for device in ranks.devices:
        device.queued_ahead = gate

    def issue(rank: int) -> tuple[list[Any], list[torch.Tensor]]:
        comm, out, numbers = ranks.comms[rank], nothing(2 * n), torch.full((4,), -1)
        works = [comm.all_gather_into_tensor(out, inputs[rank], async_op=True)]
        works.append(comm.all_gather_into_tensor(numbers, torch.tensor([rank, 7]), async_op=True))
        return works, [out, numbers]

    issued = ranks.each(issue)  # comes back before the gate is open
    time.sleep(0.1)
    assert not any(work.is_completed() for works, _ in issued for work in works)
    gate.done.set()
    assert ranks.each(lambda rank: [work.wait() for work in reversed(issued[rank][0])]) == [[True] * 2] * 2
    for _, (out, numbers) in issued:
        assert same(out, torch.cat(inputs))
        assert numbers.tolist() == [0, 7, 1, 7]


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_a_dropped_straight_work_fills_a_strided_output_of_any_dtype(make: Any, dtype: torch.dtype) -> None:
    ranks = make(2, ALWAYS, link="straight")
    inputs = [torch.tensor([r, 1, 1 - r]).to(dtype) for r in range(2)]

    def run(rank: int) -> bool:
        wide = torch.zeros(6, 2).to(dtype)
        ranks.comms[rank].all_gather_into_tensor(wide[:, 1], inputs[rank], async_op=True)
        ranks.comms[rank].barrier()
        came = [wide[:, 1].tolist(), wide[:, 0].tolist()]
        return came == [torch.cat(inputs).tolist(), torch.zeros(6).to(dtype).tolist()]

    assert ranks.each(run) == [True] * 2


def test_an_ordered_sum_never_goes_straight(make: Any) -> None:
    ranks = make(3, Policy(compress="never", timeout_s=20.0), link="straight")
    inputs = [data(9, r, wild=True) for r in range(3)]

    def run(rank: int) -> bool:
        x = inputs[rank].clone()
        ranks.comms[rank].all_reduce(x)
        return same(x, summed(inputs))

    assert ranks.each(run) == [True] * 3


def test_the_probe_finds_one_threshold_on_all_ranks(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make(2, Policy(compress="auto", min_bytes=1 << 20, timeout_s=20.0), link="straight")
    monkeypatch.setattr(probe_module, "PROBED_BYTES", (1 << 20, 2 << 20, 4 << 20))
    monkeypatch.setattr(probe_module, "ROUNDS", 1)

    def time_us(exchange: Any, call: Any, device: Any) -> float:
        """Uncoded 100 µs; coded on rank 1 faster from 2 MiB on, on rank 0 never slower."""
        before = exchange._sequence
        call().wait()
        is_coded = exchange.last_decision.mode == "compressed" if exchange._sequence > before else False
        return 100.0 if not is_coded else (50.0 if exchange.rank == 0 else next(fakes))

    fakes = iter([120.0, 120.0, 90.0, 90.0] * 3)
    monkeypatch.setattr(probe_module, "_time_us", time_us)

    def run(rank: int) -> dict[str, int]:
        comm = ranks.comms[rank]
        probe_module.probe(comm._exchange, comm._probed, comm._memory.clear, torch.device("cpu"))
        return dict(comm._exchange.thresholds)

    found = ranks.each(run)
    assert found == [{"gather": 2 << 20, "all_to_all": 2 << 20, "reduce": 2 << 20}] * 2
    assert ranks.comms[0].stats().keys() == {"device_buffers"}, "the probe is not in the books"


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        ({1: [(10, 20)], 2: [(20, 19)], 4: [(40, 20)]}, 2),
        ({1: [(10, 5)], 2: [(20, 40)], 4: [(40, 20)]}, 4),
        ({1: [(10, 5)], 2: [(20, 40)]}, NEVER_BYTES),
        ({1: [(10, 5), (10, 9.9)]}, NEVER_BYTES),
        ({1: [(10, 5), (11, 9.9)]}, 1),
        ({}, NEVER_BYTES),
    ],
)
def test_coding_pays_from_where_it_is_faster_at_every_larger_size(times: Any, wanted: int) -> None:
    assert threshold_bytes(times) == wanted


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", [1, BLOCK_WORDS, (8 << 20) + 1, (1 << 31) + 1])
def test_chunks_cover_a_message_and_their_frames_do_not_touch(n: int, dtype: str) -> None:
    pieces = chunks_of(ALWAYS, n, dtype)
    assert len(pieces) <= MOST_CHUNKS
    assert pieces[0].first == 0
    assert [a.first + a.words for a in pieces] == [*[b.first for b in pieces[1:]], n]
    for a, b in zip(pieces, [*pieces[1:], None], strict=True):
        assert a.first % BLOCK_WORDS == 0
        assert a.at % 128 == 0
        assert a.capacity_bytes == max_frame_bytes(a.words, dtype)
        assert static_bytes(a.words) <= a.phase_one_bytes <= a.capacity_bytes
        assert a.at + a.capacity_bytes <= (b.at if b else buffer_bytes(pieces))


@pytest.mark.parametrize("n", [1, 65_536, 65_537, 100_000, 1 << 20, (1 << 20) + 1, 3 << 30])
def test_a_size_class_holds_what_was_asked_for_and_an_eighth_more_at_most(n: int) -> None:
    assert n <= size_class_bytes(n) <= max(65_536, n + n // 8 + 1)
    assert size_class_bytes(size_class_bytes(n)) == size_class_bytes(n)


def test_a_pool_lets_go_of_what_is_too_much() -> None:
    pool = Pool(lambda n: torch.empty(n, dtype=torch.uint8))
    for n in range(100_000, 1_000_000, 50_000):
        pool.give_back(pool.take([n, n]))
        assert pool.held_bytes <= pool.bound_bytes
    assert pool.made < 40
    pool.close()
    assert pool.held_bytes == 0


def test_the_record_of_a_call_without_tensors_does_not_overtake_those_of_calls_on_the_device(make: Any) -> None:
    ranks, n = make(2), BLOCK_WORDS
    gate = Event()
    ranks.devices[1].queued_ahead = gate

    def run(rank: int) -> list[Any]:
        outs = [nothing(2 * n) for _ in range(2)]
        works = [ranks.comms[rank].all_gather_into_tensor(out, data(n, rank), async_op=True) for out in outs]
        works.append(ranks.comms[rank].barrier(async_op=True))
        time.sleep(0.3)  # rank 1 encodes call 0 only now, so its progress thread has not come to call 1
        gate.done.set()
        return [work.wait() for work in works] + [same(out, torch.cat([data(n, r) for r in range(2)])) for out in outs]

    assert ranks.each(run) == [[True] * 5] * 2


# What the host does around the calls


def one_error(results: list[Any], kind: type[ZipcclError]) -> str:
    """The text of the one error that all ranks raised."""
    assert [type(error) for error in results] == [kind] * len(results), results
    assert len({str(error) for error in results}) == 1, results
    return str(results[0])


class DelayedInbox:
    """An inbox that gets one peer's call records late."""

    def __init__(self, inbox: Any, late: int, delay_s: float) -> None:
        self._inbox, self._late, self._delay_s = inbox, late, delay_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inbox, name)

    def put(self, control: Any) -> None:
        is_late = control.src == self._late and control.data and control.data.startswith(CallRecord.MAGIC)
        if is_late:
            threading.Timer(self._delay_s, self._inbox.put, (control,)).start()
        else:
            self._inbox.put(control)


def test_on_the_host_no_rank_waits_for_words_of_another_that_waits_for_its_own() -> None:
    """Each of three ranks hears another one last: what the first has sent must not be waited for meanwhile."""
    made = Ranks(3, Policy(compress="always", timeout_s=5.0))
    for rank, comm in enumerate(made.comms):
        transport = comm._exchange.transport
        transport.inbox = DelayedInbox(transport.inbox, (rank + 2) % 3, 0.05)
    assert made.gather() == [True] * 3
    made.close()


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("on_device", [True, False])
def test_the_backend_s_reductions_are_right_and_what_it_refuses_is_an_argument_s_error(
    make: Any, n_ranks: int, on_device: bool
) -> None:
    ranks = make(n_ranks)
    if not on_device:
        for comm in ranks.comms:
            comm._exchange.pipelines.clear()

    def maximum(rank: int) -> list[int]:
        out = torch.full((2,), -1)
        ranks.comms[rank].reduce_scatter_tensor(out, torch.arange(2 * n_ranks) + rank, dist.ReduceOp.MAX)
        return out.tolist()

    assert ranks.each(maximum) == [[2 * r + n_ranks - 1, 2 * r + n_ranks] for r in range(n_ranks)]
    if n_ranks > 1:
        refused = ranks.each(lambda rank: ranks.comms[rank].all_reduce(torch.ones(4), dist.ReduceOp.BAND))
        assert "the backend refuses it" in one_error(refused, InvalidArgument)
    assert gather(ranks, BLOCK_WORDS) == [True] * n_ranks, "the Communicator goes on"


@pytest.mark.parametrize("kind", [Sizes, Verdict])
@pytest.mark.parametrize("wrong", ["damaged", "of another call"])
def test_what_one_rank_alone_hears_wrongly_is_one_error_on_all(make: Any, kind: Any, wrong: str) -> None:
    ranks = make(3, Policy(compress="always", verify="wait", timeout_s=5.0))
    sent: list[bytes] = []
    send_control = ranks.comms[2]._exchange.transport.send_control

    def to_rank_0(data: bytes, peer: int) -> Any:
        if peer == 0 and data.startswith(kind.MAGIC) and not sent:
            sent.append(data)
            message = kind.parse(data)
            changed = bytearray(data)
            changed[60] ^= 1
            data = bytes(changed) if wrong == "damaged" else replace(message, sequence=message.sequence + 1).pack()
        return send_control(data, peer)

    ranks.comms[2]._exchange.transport.send_control = to_rank_0
    began = time.monotonic()
    first = gather(ranks, BLOCK_WORDS)
    assert isinstance(first[0], ZipcclError)
    text = one_error(gather(ranks, BLOCK_WORDS), type(first[0]))
    assert str(first[0]) == text
    assert "rank 2" in text
    assert " to rank 0" in text
    assert time.monotonic() - began < 4, "not by a missed deadline"
    assert sent


# Endings


def test_the_progress_thread_outlives_what_fails_on_the_device_after_a_call(make: Any) -> None:
    ranks = make(2, Policy(compress="always", timeout_s=10.0))

    def fail(rows: Any) -> Any:
        raise RuntimeError("a launch failed long ago")

    ranks.devices[1].headers = fail
    assert gather(ranks, BLOCK_WORDS) == [True] * 2
    time.sleep(0.1)  # between calls the thread looks after the device
    began = time.monotonic()
    text = one_error(ranks.each(lambda rank: ranks.comms[rank].barrier()), PeerError)
    assert "rank 1" in text
    assert "a launch failed long ago" in text
    assert time.monotonic() - began < 5


def test_calls_under_way_are_finished_when_their_communicator_is_dropped(make: Any) -> None:
    ranks, n = make(2, pause_s=0.02), 2 * BLOCK_WORDS
    inputs = [data(n, r) for r in range(2)]

    def run(rank: int) -> bool:
        out = nothing(2 * n)
        work = ranks.comms[rank].all_gather_into_tensor(out, inputs[rank], async_op=True)
        ranks.comms[rank]._exchange.stop(0)
        return work.wait() and same(out, torch.cat(inputs))

    assert ranks.each(run) == [True] * 2
    assert not any(link.aborted for link in ranks.links)


def test_a_peer_that_dies_while_words_travel_is_an_error_at_the_next_call_or_at_close(make: Any) -> None:
    ranks = make(2, Policy(compress="always", timeout_s=60.0))
    link = ranks.links[0]

    def stall(peer: int, received: torch.Tensor) -> None:
        while not link.aborted:
            time.sleep(0.01)

    link.change = stall
    out = nothing(2 * BLOCK_WORDS)
    works = ranks.each(
        lambda r: ranks.comms[r].all_gather_into_tensor(
            out if r == 0 else nothing(2 * BLOCK_WORDS), data(BLOCK_WORDS, r), async_op=True
        )
    )
    began = time.monotonic()
    while not all(work._calls[0].done.is_set() for work in works):
        time.sleep(0.01)
    ranks.comms[1]._exchange.transport.abort()  # its connections close, as when it dies
    assert works[0].wait(), "late: the words may be wrong"
    assert time.monotonic() - began < 10, "the streams go on before the deadline"
    with pytest.raises(PeerError, match="rank 1"):
        ranks.comms[0].close()
    ranks.comms[0].close()


def test_what_a_failed_call_used_is_kept_until_the_device_is_done_with_it(make: Any) -> None:
    """Neither the pool nor the framework's allocator may give to others what a device still writes to."""
    ranks = make(2, Policy(compress="always", timeout_s=0.5))
    gate = Event()
    ranks.devices[0].queued_ahead = gate
    outs = [nothing(2 * BLOCK_WORDS) for _ in range(2)]
    errors = ranks.each(lambda r: ranks.comms[r].all_gather_into_tensor(outs[r], data(BLOCK_WORDS, r)))
    assert isinstance(errors[0], RankTimeout)
    errors.clear()  # their tracebacks hold what was given
    storage = weakref.ref(outs[0].untyped_storage())
    outs.clear()
    gc.collect()
    assert storage() is not None
    gate.done.set()
    ranks.each(lambda rank: ranks.comms[rank].close())
    gc.collect()
    assert storage() is None


@pytest.mark.parametrize("verify", ["auto", "late"])
def test_every_control_message_of_a_call_that_failed_is_waited_for(make: Any, verify: Any) -> None:
    """gloo never delivers a send that is let go of before it is done."""
    ranks, n = make(3, Policy(compress="always", verify=verify, timeout_s=10.0)), BLOCK_WORDS
    left: list[Any] = []

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work = work
            left.append(self)

        def wait(self, timeout: Any) -> None:
            self.work.wait(timeout)
            left.remove(self)

    for comm in ranks.comms:
        transport = comm._exchange.transport
        transport.send_control = lambda data, peer, send=transport.send_control: Watched(send(data, peer))
    sizes = [n, n, n + 1]
    one_error(
        ranks.each(lambda r: ranks.comms[r].all_gather_into_tensor(nothing(3 * sizes[r]), data(sizes[r], r))), PeerError
    )
    assert left == []


def test_a_long_error_has_one_text_on_all_ranks(make: Any) -> None:
    ranks = make(2)
    ranks.pipeline(0)._wrong = CorruptFrame("é" * 2000)
    errors = gather(ranks, BLOCK_WORDS)
    assert len(one_error(errors, CorruptFrame)) > 100


@pytest.mark.parametrize("first", ["refused", "host"])
def test_verified_late_an_error_is_raised_by_the_same_calls_on_all_ranks(make: Any, first: str) -> None:
    """Some ranks meet the error in a call on the device, others in one on the host."""
    ranks = make(3, Policy(compress="always", verify="late", timeout_s=10.0))
    if first == "host":  # a call on the host that all ranks find wrong, but only after it has returned
        aside = [comm._exchange.pipelines.pop("cpu") for comm in ranks.comms]
        ranks.each(lambda r: ranks.comms[r].all_gather_into_tensor(nothing(3 * (9 + r // 2)), data(9 + r // 2, r)))
        for comm, pipeline in zip(ranks.comms, aside, strict=True):
            comm._exchange.pipelines["cpu"] = pipeline

    def refused_on_rank_1(rank: int) -> None:
        ranks.comms[rank].all_gather_into_tensor(nothing(3 * 100 - (rank == 1)), data(100, rank))

    if first == "host":
        assert "9 elements" in one_error(ranks.each(refused_on_rank_1), PeerError)
        one_error(ranks.each(lambda rank: ranks.comms[rank].barrier()), InvalidArgument)
    else:
        one_error(ranks.each(refused_on_rank_1), InvalidArgument)
    assert ranks.each(lambda rank: ranks.comms[rank].barrier()) == [None] * 3
    assert gather(ranks, BLOCK_WORDS) == [True] * 3


def test_a_pipeline_may_be_made_while_another_is_settled(make: Any) -> None:
    ranks = make(2)
    for comm in ranks.comms:
        pipelines = comm._exchange.pipelines
        settle = pipelines["cpu"].settle

        def and_make(pipelines: Any = pipelines, settle: Any = settle) -> Any:
            pipelines.setdefault("other", pipelines["cpu"])
            return settle()

        pipelines["cpu"].settle = and_make
    assert ranks.each(lambda rank: ranks.comms[rank].barrier()) == [None] * 2
    for comm in ranks.comms:
        comm._exchange.pipelines.pop("other")


@pytest.mark.parametrize(("coded_us", "threshold"), [(50.0, 1 << 20), (150.0, NEVER_BYTES)])
def test_where_only_larger_messages_than_it_makes_are_coded_the_probe_decides_by_its_largest(
    make: Any, monkeypatch: pytest.MonkeyPatch, coded_us: float, threshold: int
) -> None:
    ranks = make(2, Policy(compress="auto", min_bytes=1 << 20, timeout_s=20.0), link="straight")
    monkeypatch.setattr(probe_module, "PROBED_BYTES", (1 << 12, 1 << 14))
    monkeypatch.setattr(probe_module, "ROUNDS", 1)

    def time_us(exchange: Any, call: Any, device: Any) -> float:
        call().wait()
        return coded_us if 0 in exchange.thresholds.values() else 100.0

    monkeypatch.setattr(probe_module, "_time_us", time_us)

    def run(rank: int) -> tuple[set[int], str]:
        comm = ranks.comms[rank]
        probe_module.probe(comm._exchange, comm._probed, comm._memory.clear, torch.device("cpu"))
        comm.all_reduce(data(1 << 18, rank))
        return set(comm._exchange.thresholds.values()), comm.last_decision.reason

    pays = "a message of 524288 bytes has less than the 1048576 from which on coding was measured to pay on this link"
    why = pays if threshold == 1 << 20 else "coding was measured not to pay on this link"
    assert ranks.each(run) == [({threshold}, why)] * 2


def test_the_probe_leaves_nothing_behind(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make(2, Policy(compress="auto", min_bytes=1 << 20, timeout_s=20.0), link="straight")
    monkeypatch.setattr(probe_module, "PROBED_BYTES", (1 << 20,))
    monkeypatch.setattr(probe_module, "ROUNDS", 1)
    ranks.each(
        lambda r: probe_module.probe(
            ranks.comms[r]._exchange, ranks.comms[r]._probed, ranks.comms[r]._memory.clear, torch.device("cpu")
        )
    )
    for comm in ranks.comms:
        assert comm.last_decision is None
        assert comm.last_arrivals == []
        assert comm.arrived_last == {}
        assert comm.stats().keys() == {"device_buffers"}
        assert comm.stats()["device_buffers"]["held_bytes"] == 0


def test_the_probe_hears_nothing_that_is_for_the_progress_thread(make: Any) -> None:
    ranks = make(2)
    exchange = ranks.comms[0]._exchange
    heard: list[Any] = []
    exchange._take = heard.append
    done = Event()
    ranks.devices[0].queued_ahead = done
    exchange.transport.inbox.put("a message")
    threading.Timer(0.2, done.done.set).start()

    class Call:
        def wait(self) -> None:
            pass

    probe_module._time_us(exchange, Call, torch.device("cpu"))
    assert heard == []
    assert exchange.transport.inbox.get_nowait() == "a message"
    del exchange._take


def test_what_the_backend_refuses_of_a_straight_call_is_an_argument_s_error(make: Any) -> None:
    ranks = make(2, Policy(compress="never", timeout_s=10.0), link="straight")
    errors = ranks.each(lambda rank: ranks.comms[rank].all_gather_into_tensor(nothing(3), nothing(2)))
    assert [type(error) for error in errors] == [InvalidArgument] * 2
    assert all("the backend refuses it" in str(error) for error in errors)
    assert gather(ranks, 9) == [True] * 2


@pytest.mark.parametrize("step", ["_plan", "_encode", "_phase_one", "_phase_two", "_decode", "_retire"])
@pytest.mark.parametrize("kind", [RuntimeError, CorruptFrame])
def test_what_fails_on_one_rank_in_any_step_is_one_error_on_all(make: Any, step: str, kind: Any) -> None:
    ranks = make(3, Policy(compress="always", verify="wait", timeout_s=10.0))

    def fail(*args: Any) -> Any:
        raise kind("no such luck")

    setattr(ranks.pipeline(1), step, fail)
    began = time.monotonic()
    gather(ranks, BLOCK_WORDS)
    text = one_error(gather(ranks, BLOCK_WORDS), PeerError if kind is RuntimeError else kind)
    assert "rank 1" in text
    assert "no such luck" in text
    assert time.monotonic() - began < 5
