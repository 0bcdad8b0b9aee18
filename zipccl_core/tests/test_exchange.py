"""The exchange from inside: ranks as threads of one process, and what a wire or a rank may do to it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from zipccl_core import Communicator, Policy
from zipccl_core.collectives import communicator as communicator_module
from zipccl_core.collectives import message as message_module
from zipccl_core.collectives.board import Board
from zipccl_core.collectives.exchange import Exchange, facts
from zipccl_core.collectives.message import patterns
from zipccl_core.collectives.point_to_point import Channels
from zipccl_core.collectives.reduce import ReduceSpec, ordered_sum
from zipccl_core.collectives.repeat import DIRECT_BYTES, Memory
from zipccl_core.collectives.seam import PHASES
from zipccl_core.collectives.wire import Envelope
from zipccl_core.errors import CorruptFrame, InvalidArgument, PeerError, RankTimeout, ZipcclError
from zipccl_core.frame import HEADER_BYTES, pack_header, parse_header

N_WORDS = 20_000
POLICY = Policy(compress="always", prefix_percent=0.0, timeout_s=20.0)  # every frame has a phase two


class Ranks:
    """Communicators of n ranks in one process, without torch.distributed's global state."""

    def __init__(self, n: int, policy: Policy | list[Policy] = POLICY) -> None:
        self.n = n
        self.policies = policy if isinstance(policy, list) else [policy] * n
        self.store = HashStore()
        self.pool = ThreadPoolExecutor(n)
        self.comms: list[Any] = self.each(self._make)

    def _make(self, rank: int) -> Communicator:
        board = Board(PrefixStore("test", self.store), rank, self.n)
        policy = self.policies[rank]
        board.agree(facts(policy, self.n), policy.timeout_s)
        comm = Communicator.__new__(Communicator)
        comm._rank, comm._size, comm._policy, comm._closed = rank, self.n, policy, False
        comm._group = None
        comm._exchange = Exchange(board, rank, self.n, policy)
        comm._channels = Channels(comm._exchange)
        comm._memory = Memory()
        return comm

    def each(self, action: Callable[[int], Any]) -> list[Any]:
        """action(rank) on all ranks at once: results, or the ZipcclError raised."""

        def run(rank: int) -> Any:
            try:
                return action(rank)
            except ZipcclError as exc:
                return exc

        return list(self.pool.map(run, range(self.n)))

    def gather(self) -> list[Any]:
        """all_gather of words that say rank and index: True on each rank if right, else its error."""

        def run(rank: int) -> Any:
            out = torch.full((self.n * N_WORDS,), -1, dtype=torch.int16).view(torch.bfloat16)
            self.comms[rank].all_gather_into_tensor(out, words(rank))
            return torch.equal(out.view(torch.int16), torch.cat([words(r) for r in range(self.n)]).view(torch.int16))

        return self.each(run)

    def close(self) -> None:
        self.each(lambda rank: self.comms[rank].close())
        self.pool.shutdown()


def test_a_group_in_the_place_of_async_op_is_refused_on_all_ranks(ranks: Ranks) -> None:
    """As in code written for torch, whose fourth argument is the group: it must not make the call asynchronous."""
    errors = ranks.each(
        lambda rank: ranks.comms[rank].all_reduce(words(rank), torch.distributed.ReduceOp.SUM, "a group")
    )
    assert [type(error) for error in errors] == [InvalidArgument] * ranks.n
    assert len({str(error) for error in errors}) == 1
    assert "async_op must be True or False, got 'a group'" in str(errors[0])
    assert all(good is True for good in ranks.gather())


@pytest.mark.parametrize(("n_bytes", "stages"), [(DIRECT_BYTES, 1), (DIRECT_BYTES + 2, 2)])
def test_two_ranks_of_the_host_reduce_in_one_exchange_if_it_is_little(n_bytes: int, stages: int) -> None:
    made = Ranks(2)
    exchange = made.comms[0]._exchange
    carry, carried = exchange._carry_through, []
    exchange._carry_through = lambda call, **how: (carried.append(call.stage), carry(call, **how))
    inputs = [words(rank).repeat(n_bytes // (2 * N_WORDS) + 1)[: n_bytes // 2].clone() for rank in range(2)]
    wanted = torch.empty_like(inputs[0])
    ordered_sum([patterns(x) for x in inputs], ReduceSpec("sum"), patterns(wanted))
    assert made.each(lambda rank: made.comms[rank].all_reduce(inputs[rank])) == [None] * 2
    assert all(torch.equal(x.view(torch.int16), wanted.view(torch.int16)) for x in inputs)
    assert carried == list(range(stages))
    made.close()


def words(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(N_WORDS, generator=generator).to(torch.bfloat16)


def one_error(results: list[Any], kind: type[ZipcclError]) -> str:
    """The text of the one error that all ranks raised."""
    assert [type(r) for r in results] == [kind] * len(results), results
    assert len({str(r) for r in results}) == 1, results
    return str(results[0])


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(3)
    yield made
    made.close()


class Tampering:
    """A group whose next sends to `dst` are changed on the way. `fired` proves that they were."""

    def __init__(self, inner: Any, dst: int, change: Callable[[torch.Tensor], torch.Tensor], times: int) -> None:
        self._inner, self._dst, self._change, self._times, self.fired = inner, dst, change, times, 0
        self.kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        if dst == self._dst and self.fired < self._times:
            self.fired += 1
            tensors = [self._change(tensors[0])]
        self.kept.append(tensors)
        return self._inner.send(tensors, dst, tag)


def flip(at: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(message: torch.Tensor) -> torch.Tensor:
        damaged = message.clone()
        damaged[at] ^= 0x10
        return damaged

    return change


def tamper(
    ranks: Ranks, src: int, dst: int, group: str, change: Callable[[torch.Tensor], torch.Tensor], times: int = 1
) -> Tampering:
    groups = ranks.comms[src]._exchange.transport._groups
    groups[group] = tampering = Tampering(groups[group], dst, change, times)
    return tampering


@pytest.mark.parametrize(
    ("group", "at", "what"),
    [
        ("data", Envelope.BYTES + 9, "Header_Check"),
        ("data", Envelope.BYTES + 24, "Header_Check"),
        ("data", Envelope.BYTES + 128, "block"),
        ("data", Envelope.BYTES + 3000, "Digest"),
        ("data", Envelope.BYTES + 256 + 8192 + 5, ""),
        ("phase_two", 3, ""),
    ],
)
def test_a_bit_flipped_in_a_frame_is_one_error_and_the_next_call_is_right(
    ranks: Ranks, group: str, at: int, what: str
) -> None:
    tampering = tamper(ranks, 2, 1, group, flip(at))
    text = one_error(ranks.gather(), CorruptFrame)
    assert tampering.fired == 1
    assert "message from rank 2 to rank 1" in text
    assert what in text
    assert ranks.gather() == [True] * 3


def test_a_bit_flipped_in_words_sent_as_they_are_is_found() -> None:
    made = Ranks(2, Policy(compress="never", timeout_s=20.0))
    tampering = tamper(made, 0, 1, "data", flip(Envelope.BYTES + 777))
    assert "CRC-32" in one_error(made.gather(), CorruptFrame)
    assert tampering.fired == 1
    assert made.gather() == [True] * 2
    made.close()


def test_a_damaged_envelope_is_one_error_and_ends_the_communicator(ranks: Ranks) -> None:
    tampering = tamper(ranks, 0, 2, "data", flip(20))
    began = time.monotonic()
    text = one_error(ranks.gather(), CorruptFrame)
    assert tampering.fired == 1
    assert "envelope" in text
    assert "from rank 0 to rank 2" in text
    assert one_error(ranks.gather(), CorruptFrame) == text
    assert time.monotonic() - began < POLICY.timeout_s / 2


def test_a_stale_message_is_refused(ranks: Ranks) -> None:
    old: list[torch.Tensor] = []

    def keep(message: torch.Tensor) -> torch.Tensor:
        old.append(message.clone())
        return message

    tamper(ranks, 1, 0, "data", keep)
    assert ranks.gather() == [True] * 3
    tampering = tamper(ranks, 1, 0, "data", lambda message: old[0])
    assert "another exchange" in one_error(ranks.gather(), CorruptFrame)
    assert tampering.fired == 1


def test_a_frame_swapped_behind_a_true_envelope_is_refused(ranks: Ranks) -> None:
    def swap(message: torch.Tensor) -> torch.Tensor:
        # The frame of an earlier call: whole in itself, and of the same size on the wire.
        return torch.cat([message[: Envelope.BYTES], old[0][Envelope.BYTES :]])

    old: list[torch.Tensor] = []

    def keep(message: torch.Tensor) -> torch.Tensor:
        old.append(message.clone())
        return message

    made = Ranks(2, Policy(compress="always", prefix_percent=10.0, timeout_s=20.0))

    def gather_of(value: float) -> list[Any]:
        def run(rank: int) -> Any:
            out = torch.empty(2 * N_WORDS, dtype=torch.bfloat16)
            made.comms[rank].all_gather_into_tensor(out, words(rank) * value)
            return True

        return made.each(run)

    tamper(made, 1, 0, "data", keep)
    assert gather_of(1.0) == [True] * 2
    tampering = tamper(made, 1, 0, "data", swap)
    assert "does not match its envelope" in one_error(gather_of(1.5), CorruptFrame)
    assert tampering.fired == 1
    made.close()


@pytest.mark.parametrize("change", [{"n_words": N_WORDS - 1}, {"dtype": "float32"}])
def test_a_sound_frame_of_another_size_or_dtype_is_corrupt_and_nobody_s_wrong_argument(
    ranks: Ranks, change: dict[str, Any]
) -> None:
    def forge(message: torch.Tensor) -> torch.Tensor:
        forged, head = message.clone(), slice(Envelope.BYTES, Envelope.BYTES + HEADER_BYTES)
        header = replace(parse_header(forged[head].numpy().tobytes(), 1 << 40), **change)
        forged[head] = torch.frombuffer(bytearray(pack_header(header)), dtype=torch.uint8)
        return forged

    tampering = tamper(ranks, 2, 1, "data", forge)
    assert "the call has 20000 of bfloat16" in one_error(ranks.gather(), CorruptFrame)
    assert tampering.fired == 1
    assert ranks.gather() == [True] * 3


def test_a_late_rank_is_named_by_all_and_by_itself() -> None:
    made = Ranks(3, Policy(timeout_s=1.0))

    def run(rank: int) -> Any:
        if rank == 1:
            time.sleep(2.0)
        return made.comms[rank].barrier()

    began = time.monotonic()
    assert "rank 1 of 3 did not arrive within 1 s" in one_error(made.each(run), RankTimeout)
    assert time.monotonic() - began < 5
    assert "rank 1" in one_error(made.gather(), RankTimeout)
    made.close()


def test_a_rank_that_fails_inside_is_named_on_all(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    real = message_module.encode_into

    def out_of_memory_on_rank_1(elements: Any, codebook: Any, out: Any) -> Any:
        if threading.current_thread() is ranks.comms[1]._exchange._thread:
            raise MemoryError("no room")
        return real(elements, codebook, out)

    monkeypatch.setattr(message_module, "encode_into", out_of_memory_on_rank_1)
    began = time.monotonic()
    text = one_error(ranks.gather(), PeerError)
    assert "rank 1 failed" in text
    assert "MemoryError: no room" in text
    assert time.monotonic() - began < POLICY.timeout_s / 2


def test_a_rank_that_is_gone_is_an_error_on_the_others_and_not_a_hang() -> None:
    made = Ranks(3, Policy(timeout_s=60.0))
    began = time.monotonic()
    made.comms[2]._exchange.transport.abort()  # its connections close, as when it dies
    results = made.each(lambda rank: rank == 2 or made.comms[rank].barrier())
    assert results[2] is True
    assert "rank 2" in one_error(results[:2], PeerError)
    assert time.monotonic() - began < 5
    made.close()


class Dying:
    """A seam by which rank 1 dies in one phase, and the others go on in one of theirs only when they can know of it."""

    def __init__(self, made: Ranks, rank: int, dead: threading.Event, over: threading.Event, phase: str) -> None:
        self._transport = made.comms[rank]._exchange.transport
        self._rank, self._dead, self._over, self._phase = rank, dead, over, phase

    def reached(self, phase: str, operation: str, sequence: int, peer: int, data: Any) -> None:
        if self._rank == 1 and phase == ("encode" if self._phase == "encode" else "verdict"):
            time.sleep(0.2)  # what it has sent arrives
            self._transport.abort()
            self._dead.set()
            self._over.wait(30)  # the dead say nothing
        elif self._rank != 1 and phase == self._phase and (phase != "receive" or peer == 1):
            assert self._dead.wait(10)
            time.sleep(0.2)  # the news arrives


@pytest.mark.parametrize("phase", ["encode", "receive", "verdict"])
@pytest.mark.parametrize("operation", ["all_gather", "send"])
def test_a_rank_that_died_before_anything_was_posted_to_it_is_named_on_the_others(phase: str, operation: str) -> None:
    made = Ranks(2 if operation == "send" else 3, replace(POLICY, timeout_s=60.0))
    dead, over = threading.Event(), threading.Event()
    for rank, comm in enumerate(made.comms):
        comm._exchange.seam = Dying(made, rank, dead, over, phase)
    others = [rank for rank in range(made.n) if rank != 1]
    left = threading.Barrier(len(others), over.set)

    def run(rank: int) -> Any:
        if operation == "send":
            comm = made.comms[rank]
            works = [comm.isend(words(rank), 1 - rank), comm.irecv(words(9), 1 - rank)]
        else:
            out = torch.empty(made.n * N_WORDS, dtype=torch.bfloat16)
            works = [made.comms[rank].all_gather_into_tensor(out, words(rank), async_op=True)]
        try:
            for work in works:
                work.wait()
        finally:
            if rank != 1:
                left.wait()

    results = made.each(run)
    text = one_error([results[rank] for rank in others], PeerError)
    assert "rank 1" in text
    assert "see whether it died" in text
    made.close()


def test_a_rank_that_dies_in_the_backend_s_own_collective_is_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made, over = Ranks(3, replace(POLICY, timeout_s=60.0)), threading.Event()
    reduce = communicator_module.all_reduce_native

    def dying(group: Any, *how: Any) -> None:
        if group.rank() != 1:
            reduce(group, *how)
            return
        time.sleep(0.2)
        made.comms[1]._exchange.transport.abort()
        over.wait(30)

    monkeypatch.setattr(communicator_module, "all_reduce_native", dying)
    left = threading.Barrier(2, over.set)

    def run(rank: int) -> Any:
        try:
            made.comms[rank].all_reduce(torch.ones(1000, dtype=torch.int64))
        finally:
            if rank != 1:
                left.wait(30)

    results = made.each(run)
    assert "waiting for rank 1: " in one_error([results[0], results[2]], PeerError)
    made.close()


def test_a_rank_that_stops_while_it_waits_for_a_late_one_is_named_and_the_late_one_is_not() -> None:
    made, over = Ranks(3, replace(POLICY, timeout_s=2.0)), threading.Event()

    class Stopping:
        def reached(self, phase: str, operation: str, sequence: int, peer: int, data: Any) -> None:
            if phase == "send" and peer == 2:  # rank 0 has its words by then
                over.wait(30)

    made.comms[1]._exchange.seam = Stopping()
    left = threading.Barrier(2, over.set)

    def run(rank: int) -> Any:
        if rank == 2:
            time.sleep(1.5)
        out = torch.empty(3 * N_WORDS, dtype=torch.bfloat16)
        try:
            made.comms[rank].all_gather_into_tensor(out, words(rank))
        finally:
            if rank != 1:
                left.wait(30)

    assert "#0: rank 1 of 3 did not arrive" in one_error(made.each(run), RankTimeout)
    made.close()


def test_an_error_is_raised_even_if_giving_up_fails_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Ranks(2, replace(POLICY, timeout_s=3.0))

    class Failing:
        def reached(self, phase: str, operation: str, sequence: int, peer: int, data: Any) -> None:
            if phase == "encode":
                raise MemoryError("no room")

    transport = made.comms[0]._exchange.transport
    made.comms[0]._exchange.seam = Failing()

    def failing() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(transport, "abort", failing)
    text = one_error(made.gather(), PeerError)
    assert "rank 0 failed" in text
    assert "no room" in text
    monkeypatch.undo()
    transport.abort()
    made.close()


class Local:
    """Something that only the caller's frame holds."""


@pytest.mark.parametrize("how", ["late", "gone"])
def test_an_error_keeps_no_frame_of_the_caller_s(how: str) -> None:
    made, held = Ranks(2, replace(POLICY, timeout_s=1.0)), []
    if how == "gone":
        made.comms[1]._exchange.transport.abort()
        time.sleep(0.3)

    def run(rank: int) -> Any:
        if rank == 1 and how == "gone":
            return PeerError("gone")
        if rank == 1:
            time.sleep(2.0)
        local = Local()
        held.append(weakref.ref(local))
        out = torch.empty(2 * N_WORDS, dtype=torch.bfloat16)
        try:
            return made.comms[rank].all_gather_into_tensor(out, words(rank))
        except ZipcclError as exc:
            return type(exc)(str(exc))  # without the traceback, which holds this frame

    gc.disable()
    try:
        results = made.each(run)
        assert all(isinstance(r, ZipcclError) for r in results)
        assert [r() for r in held] == [None] * len(held)
    finally:
        gc.enable()
    made.close()


@pytest.mark.parametrize(("which", "at"), [("record", 20), ("record", 1), ("verdict", 20), ("verdict", 1)])
def test_a_damaged_control_message_is_one_error_at_once(which: str, at: int) -> None:
    made = Ranks(3, replace(POLICY, timeout_s=60.0))
    seen: list[int] = []

    def nth(message: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return flip(at)(message) if len(seen) == (1 if which == "record" else 2) else message

    tamper(made, 0, 1, "control", nth, times=2)
    began = time.monotonic()
    results = made.each(lambda rank: [made.comms[rank].barrier() for _ in range(2)])  # a verdict: perhaps with the next
    assert "from rank 0 to rank 1" in one_error(results, CorruptFrame)
    assert time.monotonic() - began < 10
    made.close()


@pytest.mark.parametrize("which", ["record", "verdict"])
def test_a_damaged_control_message_between_two_ranks_is_one_error_at_once(which: str) -> None:
    made = Ranks(2, replace(POLICY, timeout_s=60.0))
    seen: list[int] = []

    def nth(message: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return flip(20)(message) if len(seen) == (1 if which == "record" else 2) else message

    tamper(made, 0, 1, "control", nth, times=2)

    def run(rank: int) -> None:
        comm = made.comms[rank]
        for _ in range(2):
            work = comm.irecv(words(9), group_src=0) if rank else comm.isend(words(0), group_dst=1)
            work.wait()

    began = time.monotonic()
    one_error(made.each(run), CorruptFrame)
    assert time.monotonic() - began < 10
    made.close()


class DeafStore:
    """A store whose host is stopped: no call returns."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self.over.wait(60)


def test_a_store_that_never_answers_holds_nobody_up() -> None:
    store = DeafStore()
    began = time.monotonic()
    board = Board(store, 0, 2)  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="does not answer; see whether the process that hosts it"):
        board.agree({"a": 1}, 0.5)
    error = RankTimeout("rank 1 did not arrive")
    assert str(board.settle(error)) == str(error)
    assert board.published(0.5) is None
    assert board.absent("anywhere", 0.5) == []
    assert time.monotonic() - began < 5
    board = Board(store, 0, 2)  # type: ignore[arg-type]
    assert type(board.settle(error)) is RankTimeout
    assert time.monotonic() - began < 10
    store.over.set()


def test_a_message_issued_while_another_thread_closes_is_refused_and_not_lost() -> None:
    made = Ranks(2)
    made.comms[0]._channels.stop(0)
    with pytest.raises(InvalidArgument, match="closed"):
        made.comms[0].isend(words(0), group_dst=1)
    made.close()


def test_a_rank_that_waits_for_another_is_woken_when_a_third_gives_up() -> None:
    made = Ranks(3, Policy(timeout_s=60.0))

    def run(rank: int) -> Any:
        if rank == 2:
            time.sleep(0.5)
            made.comms[2]._exchange.give_up(PeerError("rank 2 has had enough"), RuntimeError())
            return PeerError("rank 2 has had enough")
        return made.comms[rank].barrier()

    began = time.monotonic()
    assert one_error(made.each(run), PeerError) == "rank 2 has had enough"
    assert time.monotonic() - began < 5
    made.close()


@pytest.mark.parametrize("group", ["data", "phase_two"])
def test_a_damaged_message_is_sent_once_more_if_the_policy_says_so(group: str) -> None:
    made = Ranks(3, Policy(compress="always", prefix_percent=0.0, retransmit=True, timeout_s=20.0))
    tampering = tamper(made, 2, 1, group, flip(Envelope.BYTES + 3000 if group == "data" else 3))
    assert made.gather() == [True] * 3
    assert tampering.fired == 1
    assert [made.comms[r].stats()["all_gather_into_tensor"]["retransmissions"] for r in range(3)] == [0, 1, 0]
    assert made.gather() == [True] * 3
    made.close()


def test_a_message_damaged_twice_is_an_error_on_all() -> None:
    made = Ranks(2, Policy(compress="always", retransmit=True, timeout_s=20.0))
    tampering = tamper(made, 0, 1, "data", flip(Envelope.BYTES + 3000), times=2)
    assert "from rank 0 to rank 1" in one_error(made.gather(), CorruptFrame)
    assert tampering.fired == 2
    assert made.gather() == [True] * 2
    made.close()


def test_verified_late_the_next_call_raises_on_all_ranks_and_the_one_after_it_is_right() -> None:
    made = Ranks(3, Policy(compress="always", verify="late", timeout_s=20.0))
    tampering = tamper(made, 2, 1, "data", flip(Envelope.BYTES + 3000))
    first = made.gather()
    assert tampering.fired == 1
    assert first[0] is True
    assert first[2] is True
    assert first[1] is not True or first[1] is False  # its words are wrong, or not: nothing is promised
    assert "from rank 2 to rank 1" in one_error(made.each(lambda rank: made.comms[rank].barrier()), CorruptFrame)
    assert made.gather() == [True] * 3
    made.close()


def test_verified_late_close_raises_what_nobody_has_asked_for() -> None:
    made = Ranks(2, Policy(compress="always", verify="late", timeout_s=20.0))
    tamper(made, 0, 1, "data", flip(Envelope.BYTES + 3000))
    made.gather()
    assert "from rank 0 to rank 1" in one_error(made.each(lambda rank: made.comms[rank].close()), CorruptFrame)


def test_verified_late_a_disagreement_is_raised_by_the_next_call_too() -> None:
    made = Ranks(3, Policy(verify="late", timeout_s=20.0))

    def uneven(rank: int) -> Any:
        sends = {0: [1, 1, 1], 1: [1, 1, 2], 2: [1, 1, 1]}[rank]  # rank 1 sends 2 to rank 2, which expects 1
        made.comms[rank].all_to_all_single(torch.empty(3), torch.empty(sum(sends)), [1, 1, 1], sends)
        return True

    results = made.each(uneven)
    assert {type(results[1]), type(results[2])} == {PeerError}
    assert "rank 1 sends 2 elements to rank 2" in one_error(made.each(lambda r: made.comms[r].barrier()), PeerError)
    assert made.gather() == [True] * 3
    made.close()


def test_coding_goes_off_and_on_again_at_the_same_call_on_all_ranks() -> None:
    made = Ranks(3, Policy(compress="auto", min_bytes=1000, timeout_s=20.0))
    noise = [torch.randint(-(1 << 15), 1 << 15, (N_WORDS,), dtype=torch.int16) for _ in range(3)]
    kinds = ["words"] * 2 + ["noise"] * 6 + ["words"] * 6

    def run(rank: int) -> Any:
        modes = []
        for kind in kinds:
            mine = [words(r) if kind == "words" or r else noise[r].view(torch.bfloat16) for r in range(3)]
            mine = [noise[r].view(torch.bfloat16) for r in range(3)] if kind == "noise" else mine
            out = torch.full((3 * N_WORDS,), -1, dtype=torch.int16).view(torch.bfloat16)
            made.comms[rank].all_gather_into_tensor(out, mine[rank])
            assert torch.equal(out.view(torch.int16), torch.cat(mine).view(torch.int16))
            modes.append(made.comms[rank].last_decision.mode)
        return modes

    seen = made.each(run)
    c, n = "compressed", "native"
    # Noise is coded once, then 1 call is not, one is, 2 are not, one is; then 4 are not, and words are coded again.
    assert seen == [[c, c, c, n, c, n, n, c, n, n, n, n, c, c]] * 3
    made.close()


def test_the_last_to_arrive_is_known_with_its_lateness(ranks: Ranks) -> None:
    def run(rank: int) -> Any:
        if rank == 1:
            time.sleep(0.3)
        ranks.comms[rank].barrier()
        return ranks.comms[rank].last_arrivals, dict(ranks.comms[rank].arrived_last)

    for arrivals, last in ranks.each(run):
        assert [rank for rank, _ in arrivals][-1] == 1
        assert arrivals[0][1] == 0
        assert 0.15e6 < arrivals[-1][1] < 2e6
        assert last == {1: 1}


def test_a_seam_sees_every_phase_and_costs_nothing_when_there_is_none(ranks: Ranks) -> None:
    seen: list[tuple[str, str, int, int]] = []

    class Recorder:
        def reached(self, phase: str, operation: str, sequence: int, peer: int, data: Any) -> None:
            seen.append((phase, operation, sequence, peer))

    assert ranks.comms[0]._exchange.seam is None
    ranks.comms[0]._exchange.seam = Recorder()
    assert ranks.gather() == [True] * 3
    assert {phase for phase, *_ in seen} == set(PHASES)
    assert {(operation, sequence) for _, operation, sequence, _ in seen} == {("all_gather_into_tensor", 0)}
    assert {peer for phase, _, _, peer in seen if phase in ("send", "receive", "decode")} == {1, 2}


def test_messages_between_two_ranks_of_one_tag_keep_their_order_and_tags_do_not_wait(ranks: Ranks) -> None:
    def run(rank: int) -> Any:
        comm = ranks.comms[rank]
        if rank == 0:
            works = [comm.isend(words(k), 1, tag=k % 2) for k in range(6)]
            reply = torch.empty(3)
            comm.recv(reply, 1, tag=9)
            return [w.wait() for w in works] == [True] * 6 and reply.tolist() == [1.0, 2.0, 3.0]
        if rank == 1:
            comm.send(torch.tensor([1.0, 2.0, 3.0]), 0, tag=9)
            got = {}
            for k in (1, 3, 5, 0, 2, 4):  # the odd tag first
                got[k] = torch.empty(N_WORDS, dtype=torch.bfloat16)
                comm.recv(got[k], 0, tag=k % 2)
            return all(torch.equal(got[k].view(torch.int16), words(k).view(torch.int16)) for k in got)
        return True

    assert ranks.each(run) == [True] * 3


def test_a_bit_flipped_in_a_message_between_two_ranks_is_one_error_on_both(ranks: Ranks) -> None:
    tampering = tamper(ranks, 0, 1, "data", flip(Envelope.BYTES + 3000))

    def run(rank: int) -> Any:
        out = torch.empty(N_WORDS, dtype=torch.bfloat16)
        return {
            0: lambda: ranks.comms[0].send(words(0), 1),
            1: lambda: ranks.comms[1].recv(out, 0),
            2: lambda: None,
        }[rank]()

    results = ranks.each(run)
    assert "from rank 0 to rank 1" in one_error(results[:2], CorruptFrame)
    assert tampering.fired == 1
    assert ranks.gather() == [True] * 3


def test_policies_that_differ_are_one_error_on_all() -> None:
    made = Ranks(3, [POLICY, POLICY, Policy(compress="never")])
    text = one_error(made.comms, PeerError)
    assert "on rank 0" in text
    assert "on rank 2" in text
    assert "policy" in text


def test_a_rank_that_makes_no_communicator_is_named() -> None:
    store = HashStore()
    board = Board(PrefixStore("test", store), 0, 2)
    with pytest.raises(RankTimeout, match=r"ranks \[1\] of 2"):
        board.agree(facts(POLICY, 2), 0.2)


def test_the_first_error_on_the_board_is_everybody_s() -> None:
    store = HashStore()
    boards = [Board(PrefixStore("test", store), rank, 2) for rank in range(2)]
    assert boards[1].published(0.0) is None
    first = boards[0].settle(RankTimeout("rank 1 is late"))
    second = boards[1].settle(PeerError("lost the connection"))
    assert [type(first), str(first)] == [type(second), str(second)] == [RankTimeout, "rank 1 is late"]
    assert str(boards[1].published(0.0)) == "rank 1 is late"


def test_threads_and_tensors_are_let_go_of() -> None:
    before = {t.ident for t in threading.enumerate()}
    made = Ranks(2)
    assert made.gather() == [True] * 2
    made.close()
    gc.collect()
    left = [t for t in threading.enumerate() if t.ident not in before and t.name.startswith("zipccl")]
    assert left == []


def test_a_work_that_is_dropped_lets_the_call_go_on(ranks: Ranks) -> None:
    def run(rank: int) -> Any:
        out = torch.empty(3 * N_WORDS, dtype=torch.bfloat16)
        ranks.comms[rank].all_gather_into_tensor(out, words(rank), async_op=True)
        gc.collect()
        ranks.comms[rank].barrier()
        return torch.equal(out.view(torch.int16), torch.cat([words(r) for r in range(3)]).view(torch.int16))

    assert ranks.each(run) == [True] * 3


def test_a_signal_s_handler_may_use_what_it_interrupts() -> None:
    ranks = Ranks(2)

    def run(rank: int) -> int:
        comm = ranks.comms[rank]
        with comm._exchange._lock, comm._channels._lock:  # as if it came in between
            comm.barrier()
            comm.isend(words(rank), group_dst=1 - rank)
            out = torch.empty(N_WORDS, dtype=torch.bfloat16)
            comm.irecv(out, group_src=1 - rank)
        comm.barrier()
        with comm._exchange._books_lock:
            return int(comm.stats()["barrier"]["calls"])

    running = [ranks.pool.submit(run, rank) for rank in range(2)]
    assert [each.result(20) for each in running] == [2, 2]
    ranks.close()


def test_a_closed_communicator_refuses_calls_and_closes_again(ranks: Ranks) -> None:
    ranks.each(lambda rank: ranks.comms[rank].close())
    assert "closed" in one_error(ranks.each(lambda rank: ranks.comms[rank].barrier()), InvalidArgument)
    assert ranks.each(lambda rank: ranks.comms[rank].close()) == [None] * 3


def test_closing_where_another_rank_calls_is_an_error_on_both() -> None:
    made = Ranks(2)
    results = made.each(lambda rank: made.comms[rank].close() if rank else made.comms[rank].barrier())
    text = one_error(results, PeerError)
    assert "barrier #0" in text
    assert "close #0" in text
    made.close()
