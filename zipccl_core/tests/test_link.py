"""The NCCL link's own part: how it connects, and what goes in halves, on which communicator, in which order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zipccl_core import Policy
from zipccl_core.collectives import link
from zipccl_core.collectives.cuda_device import connect_within
from zipccl_core.collectives.link import NcclLink, Piece, halves
from zipccl_core.errors import PeerError, RankTimeout
from zipccl_core.tests.test_exchange import Ranks
from zipccl_core.tests.thread_device import ThreadDevice

HALVED_BYTES = 4096


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HALVED_BYTES", HALVED_BYTES)


@pytest.mark.parametrize("n", [1, HALVED_BYTES - 1, HALVED_BYTES, HALVED_BYTES + 1, 3 * HALVED_BYTES + 77])
def test_halves_are_the_piece_cut_where_both_ends_cut_it(n: int) -> None:
    data = torch.arange(n).to(torch.uint8)
    first, second = halves([Piece(3, data)])
    assert [piece.peer for piece in (*first, *second)] == [3] * (1 + (n >= HALVED_BYTES))
    assert torch.equal(torch.cat([piece.data for piece in (*first, *second)]), data)
    for piece in second:  # what NCCL copies fast begins at an aligned address
        assert (piece.data.data_ptr() - data.data_ptr()) % 128 == 0
        assert abs(piece.data.numel() - n / 2) <= 128


def test_pieces_of_all_sizes_keep_their_order() -> None:
    sizes = [5, HALVED_BYTES, 7, 2 * HALVED_BYTES]
    first, second = halves([Piece(peer, torch.empty(n, dtype=torch.uint8)) for peer, n in enumerate(sizes)])
    assert [(piece.peer, piece.data.numel()) for piece in first] == [(0, 5), (1, 2048), (2, 7), (3, 4096)]
    assert [(piece.peer, piece.data.numel()) for piece in second] == [(1, 2048), (3, 4096)]


class Looped:
    """In NCCL's place: what is sent to a peer is received from it, on the stream that was named."""

    def __init__(self) -> None:
        self.communicators: list[int] = []

    def exchange(self, parts: Any) -> None:
        for communicator, sends, receives, stream in parts:
            self.communicators.append(communicator)
            for (to, data), (src, into) in zip(sends, receives, strict=True):
                assert (to, data.numel()) == (src, into.numel())
                stream.put(lambda into=into, data=data: into.copy_(data))


class Backend:
    def __init__(self, number: int, ended: list[str]) -> None:
        self._number, self._ended = number, ended

    def _comm_ptr(self) -> int:
        return self._number

    def abort(self) -> None:
        """As on a device where kernels of both wait for a peer that is gone: over when both have been told."""
        self._ended.append("abort")
        until = time.monotonic() + 5
        while self._ended.count("abort") < 2:
            assert time.monotonic() < until, "the end of one waits for the other's"
            time.sleep(0.001)

    def shutdown(self) -> None:
        self._ended.append(f"shutdown {self._number}")


class LoopedLink(NcclLink):
    def __init__(self, device: ThreadDevice) -> None:
        self.ended: list[str] = []
        self.looped = Looped()
        self._backends: Any = [Backend(n, self.ended) for n in range(2)]
        self._nccl: Any = self.looped
        self._device, self._stream = device, lambda: device.stream  # type: ignore[assignment,return-value]
        self._aborted, self._lock = False, threading.Lock()


@pytest.fixture
def device() -> Iterator[ThreadDevice]:
    made = ThreadDevice()
    yield made
    made.close()


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("slow", ["move", "beside"])
def test_both_halves_come_after_what_the_stream_holds_and_before_what_follows(
    device: ThreadDevice, slow: str, in_order: bool
) -> None:
    made = LoopedLink(device)
    sizes = [9, 5 * HALVED_BYTES + 3]
    sources = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
    targets = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
    seen: list[torch.Tensor] = []

    def fill() -> None:
        for source in sources:
            source.fill_(7)

    device.streams[slow].put(lambda: time.sleep(0.1))
    with device.attached(), device.on("move"):
        device.stream.put(fill)
        pieces = [[Piece(1, tensor) for tensor in tensors] for tensors in (sources, targets)]
        posted = made.post(pieces[0], pieces[1], 0, time.monotonic() + 10, in_order)
        posted.arrive(time.monotonic() + 10)
        device.stream.put(lambda: seen.extend(target.clone() for target in targets))
        end = device.mark()
    assert end.done.wait(10)
    assert all(bool((target == 7).all()) for target in seen)
    assert [target.numel() for target in seen] == sizes
    assert made.looped.communicators == [0, 1]


def test_small_pieces_go_on_one_communicator(device: ThreadDevice) -> None:
    made = LoopedLink(device)
    source, target = torch.ones(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    with device.attached(), device.on("move"):
        made.post([Piece(1, source)], [Piece(1, target)], 0, time.monotonic() + 10)
        assert device.mark().done.wait(10)
    assert torch.equal(target, source)
    assert made.looped.communicators == [0]


@pytest.mark.parametrize(
    ("end", "told"),
    [("abort", ["abort", "abort"]), ("close", ["shutdown 0", "shutdown 1"])],
)
def test_both_communicators_end_and_once(device: ThreadDevice, end: str, told: list[str]) -> None:
    made = LoopedLink(device)
    getattr(made, end)()
    made.abort()
    made.close()
    assert made.ended == told
    with device.attached(), device.on("move"), pytest.raises(RuntimeError, match="closed"):
        made.post([Piece(1, torch.ones(1, dtype=torch.uint8))], [], 0, time.monotonic() + 10)


@pytest.mark.parametrize("who", ["never comes", "is gone", "fails"])
def test_connecting_is_bounded_and_one_error_on_all_ranks(who: str) -> None:
    ranks = Ranks(2, Policy(timeout_s=5.0))
    ended = threading.Event()

    def run(rank: int) -> None:
        exchange = ranks.comms[rank]._exchange

        def connect() -> None:
            if rank == 1 and who == "fails":
                raise RuntimeError("Duplicate GPU detected :\nrank 0 and rank 1")
            ended.wait(20)

        if rank == 1 and who == "is gone":
            exchange.transport.abort()
        elif rank == 1 and who == "never comes":
            time.sleep(1.5)
        else:
            connect_within(1.0, exchange, connect)

    began = time.monotonic()
    errors = ranks.each(run)
    assert time.monotonic() - began < 5
    ended.set()
    kind, text = {
        "never comes": (RankTimeout, "rank 1 of 2 did not arrive within 1 s"),
        "is gone": (PeerError, "lost the connection while waiting for rank 1"),
        "fails": (PeerError, "rank 1 of 2 failed: Duplicate GPU detected : rank 0 and rank 1; every rank needs a GPU"),
    }[who]
    assert type(errors[0]) is kind
    assert "Communicator: connecting NCCL: " in str(errors[0])
    assert text in str(errors[0])
    if who == "fails":
        assert str(errors[1]) == str(errors[0])
    ranks.close()


@pytest.mark.parametrize("trouble", [RuntimeError("no memory"), SystemExit()])
def test_a_rank_that_fails_when_others_are_connected_is_told_to_all(trouble: BaseException) -> None:
    ranks = Ranks(3, Policy(timeout_s=5.0))

    def run(rank: int) -> None:
        def connect() -> None:
            if rank == 1:
                time.sleep(0.3)
                raise trouble

        connect_within(5.0, ranks.comms[rank]._exchange, connect)

    errors = ranks.each(run)
    assert [type(error) for error in errors] == [PeerError] * 3
    assert len({str(error) for error in errors}) == 1
    assert "rank 1 of 3 failed" in str(errors[0])
    ranks.close()


def test_ranks_that_all_come_are_connected() -> None:
    ranks, meeting = Ranks(2), threading.Barrier(2)
    assert ranks.each(lambda r: connect_within(5.0, ranks.comms[r]._exchange, meeting.wait)) == [None] * 2
    assert all(good is True for good in ranks.gather())
    ranks.close()
