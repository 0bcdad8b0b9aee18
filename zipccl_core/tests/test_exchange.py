"""The exchange from inside: ranks as threads of one process, and what a wire or a rank may do to it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from zipccl_core import Communicator, Policy
from zipccl_core.collectives import message as message_module
from zipccl_core.collectives.board import Board
from zipccl_core.collectives.exchange import Exchange, facts
from zipccl_core.collectives.point_to_point import Channels
from zipccl_core.collectives.wire import Envelope
from zipccl_core.errors import CorruptFrame, InvalidArgument, PeerError, RankTimeout, ZipcclError

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
    """A group whose next send to `dst` is changed on the way. `fired` proves that it was."""

    def __init__(self, inner: Any, dst: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._inner, self._dst, self._change, self.fired = inner, dst, change, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        if dst == self._dst and not self.fired:
            self.fired += 1
            tensors = [self._change(tensors[0])]
        self.kept = tensors
        return self._inner.send(tensors, dst, tag)


def flip(at: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(message: torch.Tensor) -> torch.Tensor:
        damaged = message.clone()
        damaged[at] ^= 0x10
        return damaged

    return change


def tamper(ranks: Ranks, src: int, dst: int, group: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tampering:
    groups = ranks.comms[src]._exchange._groups
    groups[group] = tampering = Tampering(groups[group], dst, change)
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
    made = Ranks(3, Policy(timeout_s=3.0))
    made.comms[2]._exchange._groups.clear()  # its connections close, as when it dies
    results = made.each(lambda rank: rank == 2 or made.comms[rank].barrier())
    assert results[2] is True
    text = one_error(results[:2], type(results[0]))
    assert type(results[0]) in (PeerError, RankTimeout)
    assert "2" in text
    made.close()


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
    left = [t for t in threading.enumerate() if t.ident not in before and t.name == "zipccl-progress"]
    assert left == []


def test_a_work_that_is_dropped_lets_the_call_go_on(ranks: Ranks) -> None:
    def run(rank: int) -> Any:
        out = torch.empty(3 * N_WORDS, dtype=torch.bfloat16)
        ranks.comms[rank].all_gather_into_tensor(out, words(rank), async_op=True)
        gc.collect()
        ranks.comms[rank].barrier()
        return torch.equal(out.view(torch.int16), torch.cat([words(r) for r in range(3)]).view(torch.int16))

    assert ranks.each(run) == [True] * 3


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
