"""Making a Communicator when a rank is late, stopped, or lacks something: bounded, and one error on all."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from zipccl_core import Policy
from zipccl_core.collectives import transport
from zipccl_core.collectives.board import Board
from zipccl_core.collectives.call import Call
from zipccl_core.collectives.exchange import Exchange
from zipccl_core.collectives.stragglers import _let_go, let_go
from zipccl_core.collectives.transport import Transport
from zipccl_core.collectives.work import wait_for
from zipccl_core.errors import PeerError, RankTimeout, ZipcclError
from zipccl_core.tests.test_exchange import one_error


class Groups:
    """In the place of gloo's constructor: a rank may fail there, or stay. `begun` counts the ranks that are in it."""

    def __init__(self, stays: tuple[int, ...] = (), fails: dict[int, str] | None = None) -> None:
        self._stays, self._fails = stays, fails or {}
        self.over = threading.Event()

    def __call__(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        if rank in self._fails:
            raise RuntimeError(self._fails[rank])
        if rank in self._stays:
            self.over.wait(60)
        raise RuntimeError("this is not reached in time")


def boards(n: int) -> list[Board]:
    store = HashStore()
    return [Board(PrefixStore("test", store), rank, n) for rank in range(n)]


def connect(made: list[Board], timeout_s: float = 1.0) -> tuple[list[Any], float]:
    """A Transport of each rank at once: what each raises, and how long the slowest took, seconds."""

    def run(rank: int) -> Any:
        try:
            return Transport(made[rank], rank, len(made), timeout_s)
        except ZipcclError as exc:
            return exc

    began = time.monotonic()
    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(run, range(len(made)))), time.monotonic() - began


def test_a_rank_that_lacks_something_names_itself_and_the_others_hear_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = Groups(stays=(0, 2), fails={1: "[gloo/transport/tcp/loop.cc] epoll_create: Too many open files"})
    monkeypatch.setattr(transport.dist, "ProcessGroupGloo", groups)
    results, took_s = connect(boards(3))
    text = one_error(results, PeerError)
    assert "rank 1 of 3 cannot connect" in text
    assert "Too many open files; see what it lacks" in text
    assert took_s < 5
    groups.over.set()


def test_ranks_that_do_not_connect_are_named_by_those_who_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(stays=(2,), fails=dict.fromkeys((0, 1), "Gloo connectFullMesh failed with timed out"))
    monkeypatch.setattr(transport.dist, "ProcessGroupGloo", groups)
    results, took_s = connect(boards(3))
    assert "ranks [2] of 3 did not connect" in one_error(results, PeerError)
    assert took_s < 6
    groups.over.set()


def test_a_store_whose_host_stops_while_ranks_connect_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(stays=(0, 1))
    monkeypatch.setattr(transport.dist, "ProcessGroupGloo", groups)
    monkeypatch.setattr(transport, "_CONNECT_S", 1.0)
    made = boards(2)
    for board in made:
        board.gone = "no answer"
    results, took_s = connect(made)
    assert "the store of the process group does not answer" in one_error(results, PeerError)
    assert took_s < 8
    assert len([thread for thread in _let_go if thread.name == "zipccl-connect" and thread.is_alive()]) == 2
    groups.over.set()
    for thread in list(_let_go):
        thread.join(5)
    let_go([], 0.0)
    assert not [thread for thread in _let_go if thread.name == "zipccl-connect"]


def test_a_rank_that_comes_late_hears_what_the_others_have_published() -> None:
    first = boards(2)
    with pytest.raises(RankTimeout, match=r"ranks \[1\] of 2") as early:
        first[0].agree({"a": 1}, 0.2)
    began = time.monotonic()
    with pytest.raises(RankTimeout) as late:
        first[1].agree({"a": 1}, 20.0)
    assert time.monotonic() - began < 2
    assert str(late.value) == str(early.value)


def test_who_waits_for_others_hears_of_an_error_that_one_has_published() -> None:
    made = boards(3)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(made[0].share, "device", "", 20.0), pool.submit(made[1].absent, "late", 20.0)]
        time.sleep(0.2)
        made[2].settle(PeerError("rank 2 failed"))
        for each in waiting:
            with pytest.raises(PeerError, match="rank 2 failed"):
                each.result(timeout=5)


def test_a_store_that_is_slow_while_ranks_connect_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be: many ask it then. The board asks it later on, too."""
    made = boards(2)
    slow = threading.Event()

    class Slow:
        def __getattr__(self, name: str) -> Any:
            def ask(*args: Any) -> Any:
                slow.wait(3.0)
                return getattr(store, name)(*args)

            return ask

    store = made[1]._store
    made[1]._store = Slow()  # type: ignore[assignment]
    real = transport.dist.ProcessGroupGloo
    monkeypatch.setattr(transport.dist, "ProcessGroupGloo", lambda *args: time.sleep(1.5) or real(*args))
    results, _ = connect(made)
    assert [type(result) for result in results] == [Transport] * 2
    slow.set()
    assert made[1].gone == ""
    assert made[1].published(0.0) is None
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Transport.close, results))


def test_a_board_and_backends_have_clients_of_their_own() -> None:
    """A thread that waits in a store holds its client: the board must be able to ask meanwhile."""
    store = HashStore()
    (board,) = [Board(PrefixStore("test", HashStore()), 0, 1, PrefixStore("test", store))]
    board.backend_store("control").set("a", "1")
    assert bytes(store.get("test/control/a")) == b"1"


@pytest.mark.parametrize("which", ["zipccl-listener", "zipccl-progress", "zipccl-store"])
def test_a_rank_that_cannot_start_a_thread_says_so_to_all(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    start, store = threading.Thread.start, HashStore()
    here, fired = threading.local(), threading.Event()

    def some_start(self: threading.Thread) -> None:
        if getattr(here, "rank", 0) == 1 and self.name.startswith(which):
            fired.set()
            raise RuntimeError("can't start new thread")
        start(self)

    def run(rank: int) -> Any:
        board = Board(PrefixStore("test", store), rank, 2)
        here.rank = rank
        try:
            board.agree({"a": 1}, 5.0)
            made = Exchange(board, rank, 2, Policy(timeout_s=20.0))
            made.submit(call := Call("barrier"))
            wait_for([call])
        except ZipcclError as exc:
            return exc

    monkeypatch.setattr(threading.Thread, "start", some_start)
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(run, range(2)))
    assert fired.is_set()
    assert "can't start new thread" in str(errors[1])
    assert time.monotonic() - began < 10
    if which != "zipccl-store":
        assert "rank 1 cannot start a thread" in one_error(errors, PeerError)
