"""Asynchronous calls: however Works are waited for, dropped, or crossed with other groups, the data is right."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
import torch.distributed as dist

from conformance.exercise import FURTHER, OPERATIONS, Issued, inputs_of_all, issue, needs, supported

N = 12_000

every_operation = pytest.mark.parametrize("operation", OPERATIONS)


def start(world, comm, operation: str, seed: int, n: int = N, kind: str = "indexed") -> Issued:
    inputs = inputs_of_all(operation, kind, n, world.world_size, "bfloat16", seed)
    return issue(world, comm, operation, inputs, "bfloat16", async_op=True, what=f"(call {seed})")


@every_operation
@pytest.mark.proves("EXCH-1")
@pytest.mark.gpu
def test_waits_in_reverse_order_on_some_ranks_give_each_call_its_own_data(world, mode, operation):
    needs(world, operation)
    comm = world.communicator(mode)
    # Equal sizes: a call that got another's bytes would not be noticed by any size check.
    calls = [start(world, comm, operation, k, kind="gaussian") for k in range(4)]
    for call in reversed(calls) if world.rank % 2 else calls:
        call.finish()


@every_operation
@pytest.mark.requires(operations="barrier")
@pytest.mark.proves("EXCH-2")
@pytest.mark.gpu
def test_a_wait_behind_a_barrier_of_another_group_is_no_deadlock(world, mode, operation):
    needs(world, operation)
    a, b = world.communicator(mode), world.communicator(mode)
    call = start(world, a, operation, 1)
    if world.rank == 0:
        b.barrier()
        call.finish()
    else:
        call.finish()
        b.barrier()


@every_operation
@pytest.mark.proves("EXCH-2")
def test_a_wait_behind_a_barrier_of_torch_s_group_is_no_deadlock(world, mode, operation):
    needs(world, operation)
    comm = world.communicator(mode)
    call = start(world, comm, operation, 1)
    if world.rank == 0:
        dist.barrier(world.group)
        call.finish()
    else:
        call.finish()
        dist.barrier(world.group)


@every_operation
@pytest.mark.requires(operations="barrier")
@pytest.mark.proves("WORK-4")
@pytest.mark.gpu
def test_a_work_dropped_without_wait_finishes_all_the_same(world, mode, operation):
    needs(world, operation)
    comm = world.communicator(mode)
    call = start(world, comm, operation, 1)
    call.work = None
    gc.collect()
    comm.barrier()  # calls of one Communicator finish in order
    call.check_dropped()
    start(world, comm, operation, 2).finish()


@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("EXCH-1", "EXCH-5")
@pytest.mark.gpu
def test_gathers_prefetched_and_reductions_behind_them_as_in_fsdp2(world, mode):
    needs(world, "reduce_scatter_tensor")
    gathers, reductions = world.communicator(mode), world.communicator(mode)
    layers = 4
    prefetched = start(world, gathers, "all_gather_into_tensor", 0)
    pending = None
    for layer in range(layers):
        ahead = start(world, gathers, "all_gather_into_tensor", layer + 1) if layer + 1 < layers else None
        prefetched.finish()
        if pending is not None:
            pending.finish()
        pending = start(world, reductions, "reduce_scatter_tensor", 100 + layer, kind="gaussian")
        prefetched = ahead
    assert pending is not None
    pending.finish()


@pytest.mark.requires("independent")
@pytest.mark.requires(operations=("all_gather_into_tensor", "all_to_all_single"))
@pytest.mark.proves("EXCH-5")
@pytest.mark.gpu
def test_two_communicators_called_in_another_order_on_each_rank(world, mode):
    a, b = world.communicator(mode), world.communicator(mode)
    pair = [("all_gather_into_tensor", a, 1), ("all_to_all_single", b, 2)]
    calls = [start(world, comm, operation, seed) for operation, comm, seed in (pair if world.rank % 2 else pair[::-1])]
    for call in calls:
        call.finish()


@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("EXCH-2")
def test_torch_s_own_collectives_between_ours_are_not_disturbed(world, mode):
    comm = world.communicator(mode)
    call = start(world, comm, "all_gather_into_tensor", 1)
    ours = np.arange(5) * (world.rank + 1)
    import torch

    mine = torch.from_numpy(ours)
    gathered = [torch.full((5,), -1) for _ in range(world.world_size)]
    dist.all_gather(gathered, mine, group=world.group)
    call.finish()
    assert [g.tolist() for g in gathered] == [(np.arange(5) * (r + 1)).tolist() for r in range(world.world_size)]


@every_operation
@pytest.mark.proves("EXCH-6")
def test_calls_without_data_between_calls_with_data(world, mode, operation):
    needs(world, operation)
    comm = world.communicator(mode)
    for call in [start(world, comm, operation, k, n) for k, n in enumerate((0, N, 0, 0, 1, 0))]:
        call.finish()


@pytest.mark.proves("WORK-7")
def test_inputs_dropped_after_the_call_live_as_long_as_it_needs_them(world, mode):
    """The caller lets go of every tensor it passed, and takes memory of the same size, while a peer is still late."""
    comm = world.communicator(mode)
    world.barrier_store("together")
    if world.rank == 0:
        time.sleep(0.2)
    calls = [start(world, comm, operation, k) for k, operation in enumerate(supported(world, (*OPERATIONS, *FURTHER)))]
    others = []
    for call in calls:
        call.kept = None
        others.append(np.full(world.world_size * N, 0x7FC1, np.uint16))
    gc.collect()
    for call in calls:
        call.finish()
    assert all((other == 0x7FC1).all() for other in others)


@pytest.mark.requires("verifies")
@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("WORK-3")
def test_a_work_knows_when_it_is_done(world, mode):
    comm = world.communicator(mode)
    if world.rank == 0:
        world.barrier_store("the others have called, and looked")
    call = start(world, comm, "all_gather_into_tensor", 1)
    if world.rank:
        assert not call.work.is_completed()
        world.barrier_store("the others have called, and looked")
    call.finish()
    assert call.work.is_completed()
