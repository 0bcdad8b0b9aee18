"""What callers give: tensors of every making, sizes of every type, and what is refused alike on all ranks."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from zipccl_core import Policy
from zipccl_core.errors import InvalidArgument
from zipccl_core.frame import BLOCK_WORDS
from zipccl_core.tests.test_exchange import Ranks, one_error
from zipccl_core.tests.test_pipeline import ALWAYS, data, make, nothing, same, summed

__all__ = ["make"]  # a fixture

N = BLOCK_WORDS + 2
WAIT = Policy(compress="always", timeout_s=20.0, verify="wait")


@pytest.fixture(params=["cpu", "threads", "straight"])
def ranks(request: pytest.FixtureRequest, make: Any) -> Iterator[Ranks]:
    if request.param == "cpu":
        made = Ranks(2, WAIT)
        yield made
        made.close()
    else:
        never = Policy(compress="never", timeout_s=20.0)
        yield make(2, ALWAYS if request.param == "threads" else never, link=request.param)


def zero_tensor() -> torch.Tensor:
    return torch._efficientzerotensor(8)


def shrunk() -> torch.Tensor:
    made = torch.ones(8)
    made.untyped_storage().resize_(28)
    return made


def refused() -> dict[str, Callable[[], torch.Tensor]]:
    return {
        "AsyncCollectiveTensor": lambda: AsyncCollectiveTensor(torch.ones(8)),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(6)]),
        "quantized": lambda: torch._empty_affine_quantized([8], scale=0.1, zero_point=0, dtype=torch.quint8),
        "sparse_coo": lambda: torch.eye(8).to_sparse(),
        "meta": lambda: torch.empty(8, device="meta"),
        "torch.func": lambda: torch._to_functional_tensor(torch.ones(8)),
        "dtype": lambda: torch.empty(8, dtype=torch.uint4),
        "memory for all": zero_tensor,
        "storage is smaller": shrunk,
    }


CALLS: dict[str, Callable[[Any, int, torch.Tensor], Any]] = {
    "all_gather_into_tensor": lambda comm, rank, t: comm.all_gather_into_tensor(torch.empty(16), t),
    "reduce_scatter_tensor": lambda comm, rank, t: comm.reduce_scatter_tensor(torch.empty(4), t),
    "all_to_all_single": lambda comm, rank, t: comm.all_to_all_single(t, torch.empty(8), [4, 4], [4, 4]),
    "all_gather": lambda comm, rank, t: comm.all_gather([torch.empty(8), t], torch.empty(8)),
    "all_reduce": lambda comm, rank, t: comm.all_reduce(t),
    "all_reduce of the backend": lambda comm, rank, t: comm.all_reduce(t, dist.ReduceOp.MAX),
    "broadcast": lambda comm, rank, t: comm.broadcast(t, group_src=0),
    "scatter": lambda comm, rank, t: comm.scatter(t, None if rank else [t, t], group_src=0),
    "gather": lambda comm, rank, t: comm.gather(t, None if rank else [t, t], group_dst=0),
    "send": lambda comm, rank, t: comm.recv(t, group_src=0) if rank else comm.send(t, group_dst=1),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("what", list(refused()))
def test_tensors_without_memory_of_their_own_are_refused_alike_on_all_ranks(ranks: Ranks, what: str) -> None:
    for operation, call in CALLS.items():
        errors = ranks.each(lambda rank: call(ranks.comms[rank], rank, refused()[what]()))  # noqa: B023
        assert [type(error) for error in errors] == [InvalidArgument] * 2, (operation, errors)
        assert what in str(errors[0])
        assert ranks.each(lambda rank: ranks.comms[rank].barrier()) == [None] * 2


def test_tensors_that_torch_func_wraps_are_refused(ranks: Ranks) -> None:
    def run(rank: int) -> Any:
        return torch.vmap(lambda row: ranks.comms[rank].all_reduce(row) or row)(torch.ones(1, 8))

    assert "must have memory" in one_error(ranks.each(run), InvalidArgument)


class Noted(torch.Tensor):
    """A class of somebody's own, that sees every function of torch it is given to."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(threading.current_thread().name)
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.parametrize("mode", ["fake", "trace"])
def test_modes_in_which_tensors_hold_no_words_are_refused(ranks: Ranks, mode: str) -> None:
    def run(rank: int) -> None:
        words = data(N, rank)
        if mode == "fake":
            with FakeTensorMode(allow_non_fake_inputs=True):
                ranks.comms[rank].all_reduce(words)
        else:
            torch.jit.trace(lambda x: ranks.comms[rank].all_reduce(x) or x, words, check_trace=False)

    assert "not within" in one_error(ranks.each(run), InvalidArgument)
    assert ranks.each(lambda rank: ranks.comms[rank].barrier()) == [None] * 2


def test_memory_that_two_storages_share_is_seen_to_overlap(ranks: Ranks) -> None:
    """As numpy's slices do: they make a storage each, somewhere in the same memory."""
    inputs = [data(N, rank) for rank in range(2)]

    def run(rank: int) -> list[bool]:
        memory = np.zeros(2 * N + 8, dtype=np.int16)
        out = torch.from_numpy(memory[: 2 * N]).view(torch.bfloat16)
        mine = torch.from_numpy(memory[N // 2 : N // 2 + N]).view(torch.bfloat16)
        mine.copy_(inputs[rank])
        ranks.comms[rank].all_gather_into_tensor(out, mine)
        gathered = same(out, torch.cat(inputs))
        mine.copy_(inputs[rank])
        half = N // 2
        to = torch.from_numpy(memory[half + 8 : half + 8 + N]).view(torch.bfloat16)
        ranks.comms[rank].all_to_all_single(to, mine)
        return [gathered, same(to, torch.cat([term.chunk(2)[rank] for term in inputs]))]

    assert ranks.each(run) == [[True, True]] * 2


def test_async_op_of_another_type_on_one_rank_is_told_to_all(ranks: Ranks) -> None:
    def run(rank: int) -> None:
        ranks.comms[rank].all_gather(
            [nothing(N), nothing(N)], data(N, rank), async_op=torch.tensor([True, False]) if rank else False
        )

    assert "async_op must be True or False" in one_error(ranks.each(run), InvalidArgument)
    assert ranks.each(lambda rank: ranks.comms[rank].barrier()) == [None] * 2


def test_messages_in_a_generator_are_all_issued_and_other_things_are_refused() -> None:
    ranks = Ranks(2)
    comm = ranks.comms[0]
    ops = [object.__new__(dist.P2POp) for _ in range(2)]
    issued: list[Any] = []
    comm.isend = lambda *args: issued.append(args)
    for op in ops:
        op.op, op.tensor, op.peer, op.tag = dist.isend, data(N, 0), 1, 0
    assert len(comm.batch_isend_irecv(op for op in ops)) == len(issued) == 2
    for wrong in (5, None, [], iter([])):
        with pytest.raises(InvalidArgument, match="p2p_op_list must be"):
            comm.batch_isend_irecv(wrong)
    del comm.isend
    with pytest.raises(InvalidArgument, match="are numbers"):
        comm.send(data(N, 0), group_dst=np.array([0, 1]))
    ranks.close()


def test_a_class_of_somebody_s_own_is_taken_and_not_called_from_other_threads(ranks: Ranks) -> None:
    Noted.seen.clear()
    inputs = [data(N, rank) for rank in range(2)]

    def run(rank: int) -> list[bool]:
        words, out = inputs[rank].clone().as_subclass(Noted), nothing(2 * N).as_subclass(Noted)
        ranks.comms[rank].all_gather_into_tensor(out, words)
        ranks.comms[rank].all_reduce(words)
        plain = [t.as_subclass(torch.Tensor) for t in (out, words)]
        return [same(plain[0], torch.cat(inputs)), same(plain[1], summed(inputs))]

    assert ranks.each(run) == [[True] * 2] * 2
    assert not [name for name in Noted.seen if "zipccl" in name]


def test_a_parameter_is_taken(ranks: Ranks) -> None:
    inputs = [data(N, rank) for rank in range(2)]

    def run(rank: int) -> bool:
        weight = torch.nn.Parameter(inputs[rank].clone())
        ranks.comms[rank].all_reduce(weight)
        return same(weight.detach(), summed(inputs)) and weight.grad_fn is None

    assert ranks.each(run) == [True] * 2


@pytest.mark.parametrize("stays", [True, False], ids=["called within", "called outside"])
def test_tensors_of_inference_mode_are_taken_as_torch_takes_them(ranks: Ranks, stays: bool) -> None:
    inputs = [data(2 * N, rank) for rank in range(2)]
    wanted = summed(inputs)

    def run(rank: int) -> list[bool]:
        comm, own = ranks.comms[rank], slice(rank * N, (rank + 1) * N)
        with torch.inference_mode():
            now, later, source, parts, message = (inputs[rank].clone() for _ in range(5))
            strided, out, part = nothing(4 * N).view(-1, 2)[:, 0], nothing(4 * N), nothing(N)
            strided.copy_(inputs[rank])
            odd = torch.view_as_complex(torch.arange(2.0 * N).view(-1, 2) * (rank + 1)).conj()
            numbers = torch.full((4,), rank, dtype=torch.int32)
        assert now.is_inference()
        with torch.inference_mode(stays):
            comm.all_reduce(now)
            comm.all_reduce(later, async_op=True).wait()
            comm.all_gather_into_tensor(out, source)
            comm.reduce_scatter_tensor(part, source)
            comm.all_reduce(strided)
            comm.broadcast(odd, group_src=1)
            comm.all_reduce(numbers, dist.ReduceOp.MAX)
            comm.all_to_all_single(parts, source)
            comm.recv(message, group_src=0) if rank else comm.send(message, group_dst=1)
        return [
            same(now, wanted),
            same(later, wanted),
            same(out, torch.cat(inputs)),
            same(part, wanted[own]),
            same(strided.clone(), wanted),
            torch.equal(odd, torch.view_as_complex(torch.arange(2.0 * N).view(-1, 2) * 2).conj()),
            numbers.tolist() == [1] * 4,
            same(parts, torch.cat([inputs[0][own], inputs[1][own]])),
            same(message, inputs[0]),
        ]

    assert ranks.each(run) == [[True] * 9] * 2
    # And what the Communicator keeps for itself is still anybody's.
    again = [data(2 * N, rank + 5) for rank in range(2)]
    kept = [term.clone() for term in again]
    assert ranks.each(lambda rank: ranks.comms[rank].all_reduce(kept[rank])) == [None] * 2
    assert all(same(term, summed(again)) for term in kept)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple, torch.Size], ids=["numpy", "tensor", "tuple", "Size"])
def test_split_sizes_may_be_any_sequence_of_whole_numbers(ranks: Ranks, kind: Any) -> None:
    inputs = [data(8, rank) for rank in range(2)]
    sizes = [[3, 5], [6, 2]]

    def run(rank: int) -> bool:
        theirs = [sizes[src][rank] for src in range(2)]
        out = nothing(sum(theirs))
        ranks.comms[rank].all_to_all_single(out, inputs[rank], kind(theirs), kind(sizes[rank]))
        return same(out, torch.cat([inputs[src].split(sizes[src])[rank] for src in range(2)]))

    assert ranks.each(run) == [True] * 2


@pytest.mark.parametrize("sizes", [[4.0, 4.0], [8.5, 8.5], ["4", "4"], 8, np.array([]), np.array([4.0, 4.0])])
def test_split_sizes_that_are_no_whole_numbers_are_refused_on_all_ranks(ranks: Ranks, sizes: Any) -> None:
    given = [sizes, [4, 4]]

    def run(rank: int) -> None:
        ranks.comms[rank].all_to_all_single(torch.empty(8), torch.ones(8), given[rank], given[rank])

    assert "split_sizes must be" in one_error(ranks.each(run), InvalidArgument)
    assert ranks.each(lambda rank: ranks.comms[rank].barrier()) == [None] * 2


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_communicator_is_not_copied_and_a_try_harms_nothing(how: Any) -> None:
    ranks = Ranks(2)
    with pytest.raises(InvalidArgument, match="cannot be copied"):
        how(ranks.comms[0])
    assert all(good is True for good in ranks.gather())
    ranks.close()
