"""Who is named: a rank that is stopped half-way, among ranks that then wait for each other in different calls."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from zipccl_core import Policy
from zipccl_core.collectives.wire import Verdict
from zipccl_core.errors import RankTimeout, ZipcclError
from zipccl_core.tests.test_exchange import Ranks
from zipccl_core.tests.test_pipeline import data, make, nothing

__all__ = ["make"]  # a fixture

N = 30_000
STOP_S = 30.0


class Stopped:
    """A rank that does nothing more from a moment on, until the test lets go of it."""

    def __init__(self, ranks: Any, rank: int) -> None:
        self.exchange = ranks.comms[rank]._exchange
        self.over, self.fired = threading.Event(), threading.Event()
        failed = self.exchange.transport_failed

        def failed_too(*args: Any) -> ZipcclError:  # its other threads say nothing either
            if self.fired.is_set():
                self.over.wait(STOP_S)
            answer: ZipcclError = failed(*args)
            return answer

        self.exchange.transport_failed = failed_too
        asked = self.exchange.transport.asked
        self.exchange.transport.asked = lambda: None if self.fired.is_set() else asked()

    def here(self) -> None:
        """The calling thread stays."""
        self.fired.set()
        self.over.wait(STOP_S)

    def before_telling(self, kind: bytes, peer: int, sequence: int) -> None:
        """Before it tells one peer a control message of a kind, of one call."""
        tell = self.exchange._tell

        def told(call: Any, control: bytes, to: int) -> None:
            if to == peer and control[:4] == kind and call.sequence == sequence:
                self.here()
            tell(call, control, to)

        self.exchange._tell = told

    def before_words(self) -> None:
        """Before anything more of its words goes."""
        transport = self.exchange.transport
        send = transport.send

        def sent(group: str, *args: Any) -> Any:
            if group == "data":
                self.here()
            return send(group, *args)

        transport.send = sent


def survivors(ranks: Any, stopped: Stopped, run: Any) -> list[str]:
    """What the ranks but the stopped one raise, as soon as they have all raised."""
    victim = stopped.exchange.rank
    begun = {rank: ranks.pool.submit(run, rank) for rank in range(ranks.n)}
    texts = []
    for rank, each in begun.items():
        if rank != victim:
            with pytest.raises(ZipcclError) as raised:
                each.result(timeout=STOP_S)
            assert type(raised.value) is RankTimeout, raised.value
            texts.append(str(raised.value))
    assert stopped.fired.is_set()
    stopped.over.set()
    with pytest.raises(ZipcclError):
        begun[victim].result(timeout=STOP_S)
    return texts


def with_callers(make: Any, n: int) -> tuple[Any, list[torch.Tensor], Stopped]:
    """Ranks whose calls may go to their callers' streams, words of each, and the last, which stops before any go."""
    ranks = make(n, Policy(compress="always", verify="late", timeout_s=1.5))
    ranks.each(lambda rank: setattr(ranks.devices[rank], "has_callers", True))
    stopped = Stopped(ranks, n - 1)
    stopped.before_words()
    return ranks, [data(N, rank) for rank in range(n)], stopped


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_rank_that_stops_between_telling_two_peers_is_named_alone(make: Any, where: str) -> None:
    """One peer goes on to the next call, whose deadline is before that of the verdict which the other waits for."""
    policy = Policy(compress="always", verify="wait", timeout_s=1.5)
    ranks = Ranks(3, policy) if where == "cpu" else make(3, policy)
    stopped = Stopped(ranks, 1)
    stopped.before_telling(Verdict.MAGIC, 2, 1)
    words = [data(N, rank) for rank in range(3)]

    def run(rank: int) -> None:
        for _ in range(4):
            ranks.comms[rank].broadcast(words[rank], group_src=0)

    texts = survivors(ranks, stopped, run)
    assert len(set(texts)) == 1
    assert ": rank 1 of 3 did not arrive" in texts[0]
    if where == "cpu":
        ranks.close()


@pytest.mark.parametrize("verify", ["late", "wait"])
def test_a_rank_that_stops_between_its_sizes_and_its_words_is_named_by_those_who_wait_behind_them(
    make: Any, verify: Any
) -> None:
    """What the others encode next is behind words that do not come; neither may name itself, or the other."""
    ranks = make(3, Policy(compress="always", verify=verify, timeout_s=1.5))
    words = [data(N, rank) for rank in range(3)]
    assert ranks.each(lambda rank: ranks.comms[rank].all_reduce(words[rank].clone())) == [None] * 3
    stopped = Stopped(ranks, 2)
    stopped.before_words()

    def run(rank: int) -> None:
        ranks.comms[rank].all_reduce(words[rank])
        ranks.comms[rank].barrier()

    texts = survivors(ranks, stopped, run)
    assert len(set(texts)) == 1
    assert ": rank 2 of 3 did not arrive" in texts[0]


@pytest.mark.parametrize("async_op", [False, True])
def test_of_two_ranks_the_other_is_named_where_a_call_waits_for_its_words_in_the_caller_s_stream(
    make: Any, async_op: bool
) -> None:
    ranks, words, stopped = with_callers(make, 2)

    def run(rank: int) -> None:
        comm, out, shard = ranks.comms[rank], nothing(2 * N), nothing(N)
        for _ in range(2):
            for issue in (
                lambda: comm.all_gather_into_tensor(out, words[rank], async_op=async_op),
                lambda: comm.reduce_scatter_tensor(shard, out, async_op=async_op),
            ):
                work = issue()
                if work is not None:
                    work.wait()
        comm.barrier()

    assert [": rank 1 of 2 did not arrive" in text for text in survivors(ranks, stopped, run)] == [True]


def test_a_message_behind_a_collective_blames_the_collective_s_late_rank(make: Any) -> None:
    """Its copy is in the caller's stream, behind words that a third rank does not send."""
    ranks, words, stopped = with_callers(make, 3)

    def run(rank: int) -> None:
        comm, out = ranks.comms[rank], nothing(3 * N)
        comm.all_gather_into_tensor(out, words[rank], async_op=True).wait()
        if rank == 0:
            comm.send(out[:5], group_dst=1)
        elif rank == 1:
            comm.recv(torch.empty(5, dtype=torch.bfloat16), group_src=0)
        comm.barrier()

    assert all(": rank 2 of 3 did not arrive" in text for text in survivors(ranks, stopped, run))


@pytest.mark.parametrize("how", ["send", "recv"])
@pytest.mark.parametrize("where", ["cpu", "device"])
def test_who_waits_in_a_message_for_the_rank_that_stopped_is_not_named(make: Any, where: str, how: str) -> None:
    """Others wait for both, in a collective, and come to their deadline first."""
    policy = Policy(compress="always", timeout_s=1.5)
    ranks = Ranks(3, policy) if where == "cpu" else make(3, policy)
    words = [data(N, rank) for rank in range(3)]
    stopped = Stopped(ranks, 2)

    def run(rank: int) -> None:
        comm = ranks.comms[rank]
        if rank == 2:
            stopped.here()
        if rank == 1:
            comm.send(words[1], group_dst=2) if how == "send" else comm.recv(words[1], group_src=2)
        comm.all_reduce(words[rank])

    texts = survivors(ranks, stopped, run)
    assert len(set(texts)) == 1
    assert "all_reduce #0: rank 2 of 3 did not arrive" in texts[0]
    if where == "cpu":
        ranks.close()


def test_who_has_begun_a_message_and_does_not_wait_for_it_is_named_if_it_is_late() -> None:
    ranks = Ranks(3, Policy(timeout_s=1.5))
    late = threading.Event()

    def run(rank: int) -> None:
        comm = ranks.comms[rank]
        if rank == 2:
            comm.irecv(data(N, 2), group_src=0)
            late.wait(STOP_S)
        if rank == 1:
            comm.recv(data(N, 1), group_src=2)
        comm.barrier()

    begun = [ranks.pool.submit(run, rank) for rank in range(3)]
    with pytest.raises(RankTimeout, match="barrier #0: rank 2 of 3 did not arrive"):
        begun[0].result(STOP_S)
    late.set()
    for each in begun[1:]:
        with pytest.raises(RankTimeout, match="barrier #0: rank 2 of 3 did not arrive"):
            each.result(STOP_S)
    ranks.close()
