"""What a call on a device queues, in which order, and what it does not wait for: counted, behind gates that tests open.

No test depends on speed: what must go on meanwhile is waited for with a gate closed, and what must not can come to that
gate only.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from zipccl_core.collectives.buffers import CALLS_AT_ONCE
from zipccl_core.collectives.device import CALLERS
from zipccl_core.frame import BLOCK_WORDS
from zipccl_core.tests.test_pipeline import ALWAYS, DeviceRanks, data, gather, make, nothing, same, small_chunks
from zipccl_core.tests.thread_device import Event, ThreadDevice

__all__ = ["make", "small_chunks"]

CHUNK_WORDS = 2 * BLOCK_WORDS  # with small_chunks
WAITS = {"sleep", "wait", "join", "poll", "select", "SimpleQueue.get"}


@pytest.fixture
def gate(make: Any) -> Iterator[Callable[[], Event]]:
    """Makes events that are not done until a test says so; all are at its end, or no device would come to its own."""
    made: list[Event] = []

    def factory() -> Event:
        made.append(Event())
        return made[-1]

    yield factory
    for event in made:
        event.done.set()


@dataclass
class Launch:
    """A launch of the codec: the words that it reads and those that it writes, and the headers or verdicts of it."""

    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    result: Any

    @property
    def counts(self) -> list[int]:
        return [words.numel() for words in self.reads or self.writes]

    @property
    def is_over(self) -> bool:
        return bool(self.result.query() if hasattr(self.result, "query") else self.result.rows)


WORDS: dict[str, Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]] = {
    "encode": lambda words, codebooks, frames, scratch: (words, []),
    "decode": lambda frames, out: ([], out),
    "decode_reduce": lambda terms, out, kind, factor: ([t for t in terms if t.dtype != torch.uint8], [out]),
}


def watch(device: ThreadDevice, behind: dict[tuple[str, int], Event] | None = None) -> dict[str, list[Launch]]:
    """All launches from now on, by name.

    Args:
        behind: (name, number of the launch) → what its stream waits for before it.
    """
    launches: dict[str, list[Launch]] = {name: [] for name in WORDS}

    def launch(name: str, start: Callable[..., Any], *args: Any) -> Any:
        if (event := (behind or {}).get((name, len(launches[name])))) is not None:
            device.after(event)
        made = Launch(*WORDS[name](*args), start(*args))
        launches[name].append(made)
        return made.result

    for name in WORDS:
        setattr(device, name, functools.partial(launch, name, getattr(device, name)))
    return launches


def eventually(condition: Callable[[], object], within_s: float = 5.0) -> bool:
    """Whether it comes true; long before that, if the code is right."""
    until = time.monotonic() + within_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)
    return bool(condition())


def gather_async(ranks: DeviceRanks, n: int, calls: int = 1) -> list[list[tuple[Any, Tensor, Tensor]]]:
    """Of each rank, and of each all-gather that is under way when this returns: Work, output, and what it will be."""
    wanted = torch.cat([data(n, rank) for rank in range(ranks.n)])

    def issue(rank: int) -> list[tuple[Any, Tensor, Tensor]]:
        comm, outs = ranks.comms[rank], [nothing(ranks.n * n) for _ in range(calls)]
        return [(comm.all_gather_into_tensor(out, data(n, rank), async_op=True), out, wanted) for out in outs]

    return ranks.each(issue)


def come_right(ranks: DeviceRanks, issued: list[list[tuple[Any, Tensor, Tensor]]]) -> bool:
    """Whether all of `gather_async` end well."""
    ended = ranks.each(lambda rank: [work.wait() and same(out, wanted) for work, out, wanted in issued[rank]])
    return all(good is True for rank in ended for good in rank)


def test_two_calls_have_buffers_at_a_time_and_the_third_waits_for_the_first(make: Any, gate: Any) -> None:
    ranks, closed = make(2), gate()
    pipelines = [ranks.pipeline(rank) for rank in range(2)]
    watched = [watch(device, {("decode", 0): closed}) for device in ranks.devices]
    waits = [threading.Event() for _ in range(2)]
    for pipeline, waiting in zip(pipelines, waits, strict=True):
        retire = pipeline._retire
        pipeline._retire = lambda flight, retire=retire, waiting=waiting: (waiting.set(), retire(flight))
    issued = gather_async(ranks, BLOCK_WORDS, calls=6)
    begun = lambda: [len(launches["encode"]) for launches in watched]  # noqa: E731
    assert eventually(lambda: all(waiting.is_set() for waiting in waits) or max(begun()) > CALLS_AT_ONCE)
    assert begun() == [CALLS_AT_ONCE] * 2
    closed.done.set()
    assert come_right(ranks, issued)
    for pipeline in pipelines:
        assert pipeline.pool.made == 3 * CALLS_AT_ONCE, "one to send, one to receive, one of scratch, for each"
        assert pipeline.pool.held_bytes <= pipeline.pool.bound_bytes


@pytest.mark.usefixtures("small_chunks")
def test_all_messages_of_a_call_are_one_launch_a_chunk(make: Any) -> None:
    """Three chunks to the next rank and one to the one after it."""
    ranks = make(3)
    sizes = [[(5, 3 * CHUNK_WORDS, CHUNK_WORDS)[(dst - src) % 3] for dst in range(3)] for src in range(3)]
    watched = [watch(device) for device in ranks.devices]

    def run(rank: int) -> None:
        out, mine = nothing(sum(row[rank] for row in sizes)), data(sum(sizes[rank]), rank)
        ranks.comms[rank].all_to_all_single(out, mine, [row[rank] for row in sizes], sizes[rank])
        ranks.comms[rank].reduce_scatter_tensor(nothing(2 * CHUNK_WORDS), data(6 * CHUNK_WORDS, rank))

    assert ranks.each(run) == [None] * 3
    exchanged = [[CHUNK_WORDS] * 2, [CHUNK_WORDS], [CHUNK_WORDS]]
    for launches in watched:
        assert [launch.counts for launch in launches["encode"]] == [*exchanged, *[[CHUNK_WORDS] * 2] * 2]
        assert [launch.counts for launch in launches["decode"]] == exchanged
        assert len(launches["decode_reduce"]) == 2


@pytest.mark.usefixtures("small_chunks")
def test_a_message_for_all_peers_is_encoded_once(make: Any) -> None:
    ranks, n = make(3), 2 * CHUNK_WORDS
    watched = [watch(device) for device in ranks.devices]

    def encoded(act: Callable[[Any], object]) -> list[list[list[int]]]:
        for launches in watched:
            launches["encode"].clear()
        assert not any(ranks.each(lambda rank: act(ranks.comms[rank])))
        return [[launch.counts for launch in launches["encode"]] for launches in watched]

    once = [[CHUNK_WORDS], [CHUNK_WORDS]]
    for _ in range(2):  # the second as a call that is known
        assert encoded(lambda comm: comm.all_gather_into_tensor(nothing(3 * n), data(n, 0))) == [once] * 3
    assert [ranks.pipeline(rank).pool.made for rank in range(3)] == [1 + 2 + 1] * 3, "to send, to receive, scratch"
    assert encoded(lambda comm: comm.all_gather([nothing(n) for _ in range(3)], data(n, 0))) == [once] * 3
    assert encoded(lambda comm: comm.broadcast(data(n, 0), group_src=1)) == [[], once, []]


@pytest.mark.usefixtures("small_chunks")
def test_a_chunk_moves_while_the_next_is_encoded_and_is_decoded_while_the_next_moves(make: Any, gate: Any) -> None:
    ranks, encoding, moving = make(2), gate(), gate()
    watched = [watch(device, {("encode", 2): encoding}) for device in ranks.devices]
    came = [0, 0]

    def arrive(rank: int, peer: int, received: Tensor) -> None:
        if came[rank] == 2:
            moving.hold_up()
        came[rank] += 1

    for rank, link in enumerate(ranks.links):
        link.change = functools.partial(arrive, rank)
    issued = gather_async(ranks, 3 * CHUNK_WORDS)
    assert eventually(lambda: came == [2, 2]), "a chunk moves once it is encoded"
    decoded = lambda: [[launch.is_over for launch in launches["decode"]] for launches in watched]  # noqa: E731
    assert eventually(lambda: decoded() == [[True, True, False]] * 2), "a chunk is decoded once it has come"
    assert not any(launches["encode"][2].is_over for launches in watched)
    encoding.done.set()
    moving.done.set()
    assert come_right(ranks, issued)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("async_op", [True, False])
def test_all_is_posted_and_its_decoding_queued_before_the_device_has_come_to_the_call(
    make: Any, gate: Any, async_op: bool
) -> None:
    ranks, n = make(2), 3 * CHUNK_WORDS
    for device in ranks.devices:
        device.queued_ahead = gate()
    watched = [watch(device) for device in ranks.devices]

    def run(rank: int) -> bool:
        out = nothing(2 * n)
        work = ranks.comms[rank].all_gather_into_tensor(out, data(n, rank), async_op=async_op)
        return (work is None or work.wait()) and same(out, torch.cat([data(n, r) for r in range(2)]))

    runs = [ranks.pool.submit(run, rank) for rank in range(2)]
    queued = lambda: [(len(ranks.links[r].posts), len(watched[r]["decode"])) for r in range(2)]  # noqa: E731
    assert eventually(lambda: queued() == [(3, 3)] * 2), queued()
    assert not any(launch.is_over for launches in watched for launch in launches["encode"])
    for device in ranks.devices:
        device.queued_ahead.done.set()
    assert [running.result(20) for running in runs] == [True, True]


def test_a_straight_call_behind_a_coded_one_is_behind_what_its_caller_s_stream_held(make: Any, gate: Any) -> None:
    """The caller's stream writes the input while the call stands behind the coded one, and after that has gone."""
    ranks, n = make(2, ALWAYS, link="straight"), BLOCK_WORDS
    coded_held, written = gate(), [gate() for _ in range(2)]
    inputs, outs = [torch.zeros(2, dtype=torch.int64) for _ in range(2)], [torch.full((4,), -1) for _ in range(2)]

    def issue(rank: int) -> list[Any]:
        device, comm = ranks.devices[rank], ranks.comms[rank]
        device.queued_ahead = coded_held
        coded = comm.all_gather_into_tensor(nothing(2 * n), data(n, rank), async_op=True)
        device.queued_ahead = written[rank]
        straight = comm.all_gather_into_tensor(outs[rank], inputs[rank], async_op=True)
        device.queued_ahead = None  # what is noted when it is issued counts
        return [coded, straight]

    works = ranks.each(issue)
    coded_held.done.set()
    assert all(ahead.awaited.wait(5) for ahead in written), "nothing waits for what the caller's stream held"
    assert not any(straight.is_completed() for _, straight in works)
    for rank in range(2):
        inputs[rank].fill_(rank + 7)
        written[rank].done.set()
    assert ranks.each(lambda rank: [work.wait() for work in works[rank]]) == [[True, True]] * 2
    assert [out.tolist() for out in outs] == [[7, 7, 8, 8]] * 2


def test_the_codec_reads_the_caller_s_input_and_writes_its_output_and_nothing_is_copied(make: Any) -> None:
    ranks, n = make(3), 3 * BLOCK_WORDS
    watched = [watch(device) for device in ranks.devices]
    memory = lambda tensor: tensor.untyped_storage().data_ptr()  # noqa: E731

    def run(rank: int) -> list[str]:
        comm, launches, strays = ranks.comms[rank], watched[rank], []
        x, wide, shard = data(3 * n, rank), nothing(3 * n), nothing(n)
        mine, own_slot = x[:n], wide[rank * n : (rank + 1) * n]
        for name, input, output, act in (
            ("gather", x, wide, lambda how: comm.all_gather_into_tensor(wide, mine, async_op=how)),
            ("gather in place", wide, wide, lambda how: comm.all_gather_into_tensor(wide, own_slot, async_op=how)),
            ("all-to-all", x, wide, lambda how: comm.all_to_all_single(wide, x, async_op=how)),
            ("reduce-scatter", x, shard, lambda how: comm.reduce_scatter_tensor(shard, x, async_op=how)),
            ("all-reduce", x, x, lambda how: comm.all_reduce(x, async_op=how)),
        ):
            for async_op in (True, True, False):  # the second and the third as calls that are known
                if (work := act(async_op)) is not None:
                    work.wait()
                made = [launch for found in launches.values() for launch in found]
                read = {memory(words) for launch in made for words in launch.reads}
                written = {memory(words) for launch in made for words in launch.writes}
                if (read, written) != ({memory(input)}, {memory(output)}):
                    strays.append(f"{name}, async_op={async_op}")
                for found in launches.values():
                    found.clear()
        return strays

    assert ranks.each(run) == [[]] * 3


def called(act: Callable[[], object]) -> set[str]:
    """The names of all functions that this thread calls meanwhile."""
    names: set[str] = set()

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            names.add(frame.f_code.co_name if event == "call" else function.__qualname__)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return names


def test_the_issuing_call_waits_for_nothing_and_leaves_all_but_an_event_to_the_progress_thread(make: Any) -> None:
    """It comes back while nobody else can do anything, and by then nothing is sent, queued, posted or allocated."""
    ranks, n = make(2), BLOCK_WORDS
    assert gather(ranks, n) == [True] * 2
    watched, posts, made = [watch(d) for d in ranks.devices], len(ranks.links[0].posts), ranks.pipeline(0).pool.made
    told: list[int] = []
    events: list[Event] = []
    now, send = ranks.devices[0].now, ranks.comms[0]._exchange.transport.send_control
    ranks.devices[0].now = lambda: events.append(now()) or events[-1]
    ranks.comms[0]._exchange.transport.send_control = lambda data, peer: (told.append(peer), send(data, peer))[1]
    sizes = (n, 2 * n)  # of a call that is known, and of one that is not
    inputs = [[data(k, rank) for k in sizes] for rank in range(2)]
    outs = [[nothing(2 * k) for k in sizes] for _ in range(2)]
    works: list[list[Any]] = [[], []]

    def issue(rank: int) -> None:
        for out, mine in zip(outs[rank], inputs[rank], strict=True):
            works[rank].append(ranks.comms[rank].all_gather_into_tensor(out, mine, async_op=True))

    with contextlib.ExitStack() as stack:
        for comm in ranks.comms:
            stack.enter_context(comm._exchange._baton)
        issuing = [ranks.pool.submit(called, functools.partial(issue, rank)) for rank in range(2)]
        names = set().union(*(issued.result(10) for issued in issuing))
        assert "submit" in names
        assert not names & WAITS
        assert len(events) == 2
        assert told == []
        assert not any(found for launches in watched for found in launches.values())
        assert (len(ranks.links[0].posts), ranks.pipeline(0).pool.made) == (posts, made)
    assert ranks.each(lambda rank: [work.wait() for work in works[rank]]) == [[True, True]] * 2
    wanted = [torch.cat(both) for both in zip(*inputs, strict=True)]
    assert all(same(out, it) for found in outs for out, it in zip(found, wanted, strict=True))


def test_after_wait_the_current_stream_waits_for_the_words_and_the_host_does_not(make: Any, gate: Any) -> None:
    ranks, closed = make(2), gate()
    for device in ranks.devices:
        device.has_callers = True
        watch(device, {("decode", 0): closed})
    issued = gather_async(ranks, BLOCK_WORDS)
    assert ranks.each(lambda rank: issued[rank][0][0].wait(timedelta(seconds=10))) == [True, True]
    read: list[list[Tensor]] = [[], []]
    for device, ((_, out, _),), seen in zip(ranks.devices, issued, read, strict=True):
        device.streams[CALLERS].put(lambda out=out, seen=seen: seen.append(out.clone()))
    ends = [work._calls[0].finished for ((work, _, _),) in issued]
    assert eventually(lambda: all(end.awaited.is_set() for end in ends) or any(read))
    assert read == [[], []], "read before it was there"
    closed.done.set()
    for device, ((_, _, wanted),), seen in zip(ranks.devices, issued, read, strict=True):
        device.come_to_the_callers()
        assert same(seen[0], wanted)
