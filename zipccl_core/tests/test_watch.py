"""Calls into the backend that do not come back are given up by another thread, and are an error of ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from zipccl_core import Policy
from zipccl_core.collectives import exchange, link, stragglers, straight, watch
from zipccl_core.collectives.watch import Watch
from zipccl_core.errors import PeerError, RankTimeout
from zipccl_core.frame import BLOCK_WORDS
from zipccl_core.tests.test_pipeline import ALWAYS, DeviceRanks, data, make, nothing

__all__ = ["make"]

OPERATION = "all_gather_into_tensor"
LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PERIOD_S", 0.02)
    monkeypatch.setattr(watch, "LOST_S", 0.2)


class Stuck:
    """A call into a rank's backend that comes back only once that is given up."""

    def __init__(self, ranks: DeviceRanks, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self._given_up = threading.Event(), threading.Event()
        abort = ranks.links[rank].abort

        def abort_all() -> None:
            self._given_up.set()
            abort()

        monkeypatch.setattr(ranks.links[rank], "abort", abort_all)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.entered.set()
        assert self._given_up.wait(LIMIT_S), "nobody gives it up"


def test_a_post_that_does_not_come_back_is_one_error_on_all_ranks(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make(2, Policy(compress="always", timeout_s=1.0))
    stuck, post = Stuck(ranks, 0, monkeypatch), ranks.links[0].post

    def stuck_first(*args: Any, **kwargs: Any) -> Any:
        stuck()
        return post(*args, **kwargs)

    monkeypatch.setattr(ranks.links[0], "post", stuck_first)

    def run(rank: int) -> None:
        out = nothing(2 * BLOCK_WORDS)
        ranks.comms[rank].all_gather_into_tensor(out, data(BLOCK_WORDS, rank), async_op=True).wait()

    began = time.monotonic()
    errors = ranks.each(run)
    assert time.monotonic() - began < 10
    assert [type(error) for error in errors] == [RankTimeout] * 2
    assert str(errors[0]) == str(errors[1])


def test_a_straight_call_that_does_not_come_back_ends_once_a_peer_is_gone(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make(2, ALWAYS)
    stuck, of_rank_0 = Stuck(ranks, 0, monkeypatch), ranks.comms[0]._exchange
    running = ranks.pool.submit(straight.guarded, of_rank_0, OPERATION, stuck)
    assert stuck.entered.wait(LIMIT_S)
    time.sleep(0.5)
    assert not running.done(), "no peer is gone"
    ranks.comms[1]._exchange.transport.abort()
    with pytest.raises(PeerError, match="rank 1"):
        running.result(LIMIT_S)


def test_a_straight_call_that_never_comes_back_ends_when_the_backend_would_have_ended_the_process(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "NCCL_GRACE_S", 0.3)
    ranks = make(2, Policy(timeout_s=0.3))
    stuck, of_rank_0 = Stuck(ranks, 0, monkeypatch), ranks.comms[0]._exchange
    began = time.monotonic()
    with pytest.raises(RankTimeout):
        straight.guarded(of_rank_0, OPERATION, stuck)
    assert 0.6 <= time.monotonic() - began < 10


@pytest.mark.parametrize("is_straight", [False, True])
def test_a_call_that_comes_back_in_time_is_not_given_up_and_another_has_a_time_of_its_own(is_straight: bool) -> None:
    overdue: list[Any] = []
    lost = threading.Event()
    watching = Watch(lost.is_set, overdue.append)
    watching.start()
    lost.set()

    fake: Any = SimpleNamespace(watch=watching, broken=None)

    def call(what: str, start: Callable[[], object]) -> None:
        if is_straight:
            straight.guarded(fake, what, start)
            return
        watching.enter(what, time.monotonic() + 60)
        start()
        watching.leave()

    for number in range(10):  # a peer is gone for longer than each of them takes
        call(str(number), lambda: time.sleep(0.06))
    assert overdue == []
    over = threading.Event()
    threading.Thread(target=call, args=("stays", lambda: over.wait(LIMIT_S)), daemon=True).start()
    until = time.monotonic() + LIMIT_S
    while not overdue and time.monotonic() < until:
        time.sleep(0.01)
    over.set()
    assert overdue == ["stays"]
    watching.stop()
    assert watching.thread is not None
    watching.thread.join(LIMIT_S)
    assert not watching.thread.is_alive()


def test_who_gives_up_does_not_wait_for_all_that_nccl_has_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "ABORT_S", 0.2)
    ended = threading.Event()
    backend: Any = type("Backend", (), {"abort": lambda self: ended.wait(LIMIT_S)})()
    nccl = link.NcclLink.__new__(link.NcclLink)
    nccl._backends, nccl._aborted, nccl._lock = [backend] * 2, False, threading.Lock()
    began = time.monotonic()
    nccl.abort()
    assert 0.2 <= time.monotonic() - began < 5
    waiting = [thread for thread, limit_s in stragglers._let_go.items() if limit_s == link.NCCL_GRACE_S]
    assert [thread.is_alive() for thread in waiting[-2:]] == [True, True]
    ended.set()
    stragglers._join_at_exit()
    assert not any(thread.is_alive() for thread in waiting)


def test_of_two_threads_in_the_backend_the_one_that_stays_is_bounded_when_the_other_has_come_back() -> None:
    overdue: list[Any] = []
    watching = Watch(lambda: False, overdue.append, patience_s=1.0)
    fake: Any = SimpleNamespace(watch=watching, broken=None)
    watching.start()
    over, began = threading.Event(), threading.Event()

    def stay() -> None:
        began.set()
        over.wait(LIMIT_S)

    staying = threading.Thread(target=straight.guarded, args=(fake, "stays", stay), daemon=True)
    staying.start()
    assert began.wait(LIMIT_S)
    straight.guarded(fake, "comes back", lambda: None)
    until = time.monotonic() + LIMIT_S
    while not overdue and time.monotonic() < until:
        time.sleep(0.01)
    over.set()
    staying.join(LIMIT_S)
    assert overdue == ["stays"]
    watching.stop()
