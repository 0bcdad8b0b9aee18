"""The other operations: lists, all_reduce, roots, point to point, objects. Bits, order, arguments, Works."""

from __future__ import annotations

import gc
import hashlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from conformance.exercise import (
    DTYPES,
    FURTHER,
    REDUCTIONS,
    ROOTED,
    AllOf,
    Part,
    claimed,
    configurations,
    disagreed,
    errors_of_all,
    exercise,
    inputs_of_all,
    issue,
    loaded,
    meet,
    needs,
    refused,
    supported,
    wanted,
)
from conformance.oracle import (
    assert_same_bits,
    check_guards,
    check_output,
    misaligned,
    ordered_sum,
    patterns_of,
    poisoned,
    tensor_of,
)
from conformance.plugin import World
from conformance.strategies import KINDS, patterns, rng_of
from conformance.subject import PremulSum

ALL_PATTERNS = 1 << 16
SIZES = (0, 1, 2, 3, 5, 7, 33, 1009, 8193, 20_011)
"""Below, at and beyond the world size, and divisible by none."""

OPS: dict[str, tuple[Any, float]] = {
    "sum": (dist.ReduceOp.SUM, 1.0),
    "avg": (dist.ReduceOp.AVG, 1.0),
    "premul_sum": (PremulSum(1 / 3), 1 / 3),
}

every_operation = pytest.mark.parametrize("operation", FURTHER)
all_reduce = pytest.mark.operation("all_reduce")
send_recv = pytest.mark.operation("send_recv")
needs_send_recv = pytest.mark.requires(operations=("send", "recv", "isend", "irecv"))


# ------------------------------------------------------------------------------------------------ right results


@every_operation
@pytest.mark.proves("BITS-1", "OPS-1")
@pytest.mark.gpu
def test_all_65536_patterns_survive(world, operation):
    needs(world, operation)
    for mode in world.subject.capabilities.modes:
        comm = world.communicator(mode)
        for dtype in DTYPES:
            inputs = inputs_of_all(operation, "all_patterns", ALL_PATTERNS, world.world_size, dtype)
            exercise(world, comm, operation, inputs, dtype, root=1, what=f"({mode})")


@every_operation
@pytest.mark.proves("BITS-2", "OPS-1", "OPS-3")
@pytest.mark.gpu
def test_every_size_from_every_root(world, operation):
    needs(world, operation)
    for mode in world.subject.capabilities.modes:
        comm = world.communicator(mode)
        dtypes = DTYPES if mode == world.subject.capabilities.modes[0] else ["bfloat16"]
        for (k, n), dtype in itertools.product(enumerate(SIZES), dtypes):
            inputs = inputs_of_all(operation, "gaussian", n, world.world_size, dtype, seed=k)
            exercise(world, comm, operation, inputs, dtype, root=k, offset=k, what=f"({mode})")


@every_operation
@pytest.mark.proves("BITS-3")
def test_every_kind_of_data(world, operation):
    """In the modes in turn; the product of kinds and modes is test_bit_exactness.py's."""
    needs(world, operation)
    comms = [world.communicator(mode) for mode in world.subject.capabilities.modes]
    for comm, kind in zip(itertools.cycle(comms), KINDS, strict=False):
        inputs = inputs_of_all(operation, kind, 9001, world.world_size, "bfloat16")
        exercise(world, comm, operation, inputs, "bfloat16", what=f"({kind})")


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.proves("OPS-1", "EXCH-7")
def test_every_operation_in_any_world_size(world, mode):
    comm = world.communicator(mode)
    for operation, dtype in itertools.product(supported(world, FURTHER), DTYPES):
        for n in (0, 1, 2, 8197):
            inputs = inputs_of_all(operation, "heavy_tail", n, world.world_size, dtype)
            exercise(world, comm, operation, inputs, dtype, root=n, what=f"in a world of {world.world_size}")


@pytest.mark.proves("BITS-7", "OPS-1")
@pytest.mark.gpu
def test_other_dtypes_pass_unchanged(world, mode):
    comm = world.communicator(mode)
    others = [d for d in ("float16", "float64", "int32", "uint8") if d in world.subject.capabilities.dtypes]
    moves = supported(world, [o for o in FURTHER if o not in REDUCTIONS])
    for operation, dtype, n in itertools.product(moves, others, (1, 1009)):
        size = getattr(torch, dtype).itemsize
        total = n * world.world_size if operation == "scatter" else n
        inputs = [
            rng_of("bits", dtype, n, rank).integers(0, 256, total * size, dtype=np.uint8).view(f"u{size}")
            for rank in range(world.world_size)
        ]
        exercise(world, comm, operation, inputs, dtype)


@pytest.mark.operation("barrier")
@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("EXCH-8")
def test_a_barrier_may_be_the_first_call_of_a_subgroup(world, mode):
    everyone = range(world.world_size)
    parts = [[r for r in everyone if r % 2 == k] for k in (0, 1) if world.world_size > k]
    groups = [world.subgroup(p) for p in parts]
    k = world.rank % 2
    comm = world.communicator(mode, groups[k])
    comm.barrier()
    inputs = inputs_of_all("all_gather_into_tensor", "indexed", 501, len(parts[k]), "bfloat16", seed=k)
    exercise(Part(world, parts[k], groups[k]), comm, "all_gather_into_tensor", inputs, "bfloat16")


@pytest.mark.proves("OPS-2", "OPS-3")
def test_roots_and_peers_of_a_subgroup_are_global_ranks(world, mode):
    """Members are neither the first ranks of the world nor numbered as in it."""
    members = list(range(world.world_size))[1:] or [0]
    operations = supported(world, FURTHER)
    group = world.subgroup(members)
    if group is None:
        return
    comm = world.communicator(mode, group)
    part = Part(world, members, group)
    for operation, root in itertools.product(operations, range(len(members))):
        inputs = inputs_of_all(operation, "gaussian", 1501, len(members), "bfloat16", seed=root)
        exercise(part, comm, operation, inputs, "bfloat16", root=root, what=f"in {members}, root {root}")


# --------------------------------------------------------------------------------------------------- all_reduce


@all_reduce
@pytest.mark.requires("ordered_sum", operations="all_reduce")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.proves("SUM-1", "SUM-8", "SUM-9")
@pytest.mark.gpu
def test_all_reduce_is_the_ordered_sum_of_each_element(world, op):
    world.require(reduce_ops=op)
    given, factor = OPS[op]
    comms = {mode: world.communicator(mode) for mode in world.subject.capabilities.modes}
    for (mode, comm), dtype in itertools.product(comms.items(), DTYPES):
        for n, kind in ((3, "gaussian"), (8195, "two_gaussians"), (4099, "subnormals"), (1021, "nan_payloads")):
            inputs = inputs_of_all("all_reduce", kind, n, world.world_size, dtype)
            how = {"op": given, "how": (op, factor), "what": f"({op}, {kind}, {mode})"}
            exercise(world, comm, "all_reduce", inputs, dtype, **how)


@all_reduce
@pytest.mark.requires(operations="all_reduce")
@pytest.mark.proves("SUM-8")
def test_all_ranks_of_an_all_reduce_have_the_same_bits(world, mode):
    """Whatever the order of summation is, it must be one; NaNs aside, which the backend's own sum may treat apart."""
    comm = world.communicator(mode)
    for dtype, n in itertools.product(DTYPES, (1, 5, 8193)):
        inputs = inputs_of_all("all_reduce", "heavy_tail", n, world.world_size, dtype)
        mine = loaded(inputs[world.rank], DTYPES[dtype], world.device)
        comm.all_reduce(mine.tensor)
        told = world.exchange(hashlib.sha256(patterns_of(mine.tensor).tobytes()).hexdigest())
        assert len(set(told)) == 1, f"all_reduce of {n} {dtype}: the ranks ended with different bits: {told}"
        check_guards(mine, "all_reduce")


@all_reduce
@pytest.mark.requires(operations="all_reduce")
@pytest.mark.proves("SUM-10")
@pytest.mark.gpu
def test_all_reduce_of_whole_numbers_is_exact(world, mode):
    """Needs no order of summation, so every subject must pass it."""
    comm = world.communicator(mode)
    for name in [d for d in ("bfloat16", "float32", "float64", "int32") if d in world.subject.capabilities.dtypes]:
        dtype = getattr(torch, name)
        for n in SIZES:
            terms = [torch.from_numpy((np.arange(n) * 7 + 3 * r) % 16).to(dtype) for r in range(world.world_size)]
            mine = misaligned(terms[world.rank].to(world.device))
            comm.all_reduce(mine)
            total = torch.stack(terms).double().sum(0).to(dtype)
            assert_same_bits(mine, total, f"all_reduce of {n} {name}")


@all_reduce
@pytest.mark.requires("ordered_sum", operations=("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"))
@pytest.mark.proves("SUM-9")
def test_all_reduce_is_reduce_scatter_and_all_gather(world, mode):
    comm = world.communicator(mode)
    n = 4099
    inputs = inputs_of_all("reduce_scatter_tensor", "two_gaussians", n, world.world_size, "bfloat16")
    mine = tensor_of(inputs[world.rank], torch.bfloat16, world.device)
    shard = poisoned(n, torch.bfloat16, world.device)
    whole = poisoned(n * world.world_size, torch.bfloat16, world.device)
    comm.reduce_scatter_tensor(shard.tensor, mine)
    comm.all_gather_into_tensor(whole.tensor, shard.tensor)
    comm.all_reduce(mine)
    assert_same_bits(mine, whole.tensor, "all_reduce against reduce_scatter_tensor and all_gather_into_tensor")


# ---------------------------------------------------------------------------------------------- layouts, aliases


def columns(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The second of two columns: a strided tensor with these bf16 words, 7.0 beside each."""
    words = tensor_of(array, torch.bfloat16, device)
    return torch.stack([torch.full_like(words, 7), words], 1)[:, 1]


@every_operation
@pytest.mark.requires("any_layout")
@pytest.mark.proves("LAYOUT-1", "LAYOUT-2")
@pytest.mark.gpu
def test_strided_tensors_are_taken_and_filled_in_their_logical_order(world, operation):
    needs(world, operation)
    comm, size, me, n = world.communicator(), world.world_size, world.rank, 501
    inputs = inputs_of_all(operation, "indexed", n, size, "bfloat16")
    mine = columns(inputs[me], world.device)
    assert not mine.is_contiguous()

    def holes() -> torch.Tensor:
        return poisoned((n, 2), torch.bfloat16, world.device).tensor[:, 1]

    outs: list[torch.Tensor] = []
    if operation == "all_gather":
        outs = [holes() for _ in range(size)]
        comm.all_gather(outs, mine)
    elif operation == "gather":
        outs = [holes() for _ in range(size)] if me == 0 else []
        comm.gather(mine, outs or None, dst=0)
    elif operation == "scatter":
        outs = [holes()]
        comm.scatter(outs[0], [columns(p, world.device) for p in np.split(inputs[0], size)] if me == 0 else None, src=0)
    elif operation == "batch_isend_irecv":
        outs = [holes()] if size > 1 else []
        if outs:
            ops = [dist.P2POp(dist.isend, mine, (me + 1) % size, world.group)]
            ops.append(dist.P2POp(dist.irecv, outs[0], (me - 1) % size, world.group))
            AllOf(comm.batch_isend_irecv(ops)).wait()
    else:
        outs = [mine]
        comm.broadcast(mine, src=0) if operation == "broadcast" else comm.all_reduce(mine)
    want = wanted(operation, inputs, me)
    for k, out in enumerate(outs):
        assert_same_bits(out, want[k * n : (k + 1) * n], f"{operation} into a column, output {k}")
        beside = patterns_of(torch.as_strided(out, out.shape, out.stride(), out.storage_offset() - 1))
        assert len(set(beside.tolist())) == 1, f"{operation}: the column beside the output was written"


@pytest.mark.operation("broadcast")
@pytest.mark.requires("any_layout", operations="broadcast")
@pytest.mark.proves("LAYOUT-1")
def test_broadcast_of_channels_last_is_accepted(world):
    shape = (2, 3, 4, 5)
    words = patterns("indexed", 120)
    mine = tensor_of(words if world.rank == 0 else words[::-1], torch.bfloat16, world.device).view(shape)
    mine = mine.contiguous(memory_format=torch.channels_last)
    world.communicator().broadcast(mine, src=0)
    assert_same_bits(mine, words.reshape(shape), "channels_last broadcast")


@pytest.mark.requires("any_layout", operations=("all_gather", "scatter", "gather"))
@pytest.mark.proves("LAYOUT-3")
@pytest.mark.gpu
def test_the_tensor_may_be_one_of_the_list(world, mode):
    comm, size, me, n = world.communicator(mode), world.world_size, world.rank, 8197
    inputs = [patterns("gaussian", n, rank) for rank in range(size)]

    def listed(own: int) -> list[torch.Tensor]:
        outs = [poisoned(n, torch.bfloat16, world.device).tensor for _ in range(size)]
        outs[own].view(torch.int16).copy_(tensor_of(inputs[me], torch.bfloat16).view(torch.int16))
        return outs

    outs = listed(me)
    comm.all_gather(outs, outs[me])
    assert_same_bits(torch.stack(outs), np.stack(inputs), "all_gather in place")
    outs = listed(me)
    comm.gather(outs[me], outs if me == 0 else None, dst=0)
    if me == 0:
        assert_same_bits(torch.stack(outs), np.stack(inputs), "gather in place")
    parts = [tensor_of(np.roll(inputs[0], k), torch.bfloat16, world.device) for k in range(size)]
    mine = parts[0] if me == 0 else poisoned(n, torch.bfloat16, world.device).tensor
    comm.scatter(mine, parts if me == 0 else None, src=0)
    assert_same_bits(mine, np.roll(inputs[0], me), "scatter in place")


# ------------------------------------------------------------------------------------------------------ Works


@every_operation
@pytest.mark.proves("WORK-1", "WORK-2", "WORK-3")
def test_works_complete_and_may_be_waited_for_twice_and_in_any_order(world, mode, operation):
    needs(world, operation)
    comm = world.communicator(mode)
    inputs = [inputs_of_all(operation, "gaussian", 6001, world.world_size, "bfloat16", seed) for seed in range(4)]
    exercise(world, comm, operation, inputs[0], "bfloat16", what="(sync)")
    issued = [issue(world, comm, operation, i, "bfloat16", async_op=True, root=k) for k, i in enumerate(inputs)]
    for call in reversed(issued) if world.rank % 2 else issued:
        call.finish()
        if world.subject.capabilities.completion and call.work is not None:  # torch's gather gives dst alone a Work
            assert call.work.is_completed(), f"{operation}: is_completed() must be True after wait()"
            call.finish()


@pytest.mark.proves("WORK-1")
def test_a_sync_call_returns_none(world, mode):
    comm, me = world.communicator(mode), world.rank
    x = torch.zeros(4, dtype=torch.bfloat16, device=world.device)
    lists = [torch.zeros_like(x) for _ in range(world.world_size)]
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: comm.all_gather(lists, x),
        "all_reduce": lambda: comm.all_reduce(x),
        "broadcast": lambda: comm.broadcast(x, src=0),
        "scatter": lambda: comm.scatter(x, lists if me == 0 else None, src=0),
        "gather": lambda: comm.gather(x, lists if me == 0 else None, dst=0),
    }
    for name in claimed(world, list(calls)):
        returned = calls[name]()
        assert returned is None, f"{name} without async_op must return None, got {returned!r}"


@pytest.mark.requires(operations="barrier")
@pytest.mark.proves("WORK-4")
@pytest.mark.gpu
def test_dropped_works_finish_all_the_same(world, mode):
    comm = world.communicator(mode)
    operations = supported(world, [o for o in FURTHER if o != "batch_isend_irecv"])
    issued = []
    for operation in operations:
        inputs = inputs_of_all(operation, "gaussian", 6001, world.world_size, "bfloat16")
        issued.append(issue(world, comm, operation, inputs, "bfloat16", async_op=True))
        issued[-1].work = issued[-1].kept = None
    gc.collect()
    comm.barrier()  # calls of one Communicator finish in order
    for call in issued:
        call.check_dropped()


@pytest.mark.proves("EXCH-6")
@pytest.mark.gpu
def test_calls_of_all_operations_in_flight_together(world, mode):
    comm = world.communicator(mode)
    issued = []
    for seed, operation in enumerate(supported(world, FURTHER) * 2):
        inputs = inputs_of_all(operation, "gaussian", 4001, world.world_size, "bfloat16", seed)
        issued.append(issue(world, comm, operation, inputs, "bfloat16", async_op=True, root=seed))
    for call in reversed(issued):
        call.finish()


@pytest.mark.requires("decides")
@pytest.mark.proves("TELL-1", "TELL-2")
def test_every_operation_is_counted_once_and_decided_alike_on_every_rank(world, mode):
    world.require_peers()
    comm = world.communicator(mode)
    operations = supported(world, [o for o in FURTHER if o != "batch_isend_irecv"])
    for k, operation in enumerate(operations):
        inputs = inputs_of_all(operation, "gaussian", 20_000, world.world_size, "bfloat16")
        exercise(world, comm, operation, inputs, "bfloat16")
        calls = comm.stats()["calls"]
        assert calls == k + 1, f"{operation}: {k + 1} calls were made, stats() says {calls}"
    stats = comm.stats()
    told = world.exchange(stats["raw_bytes"])
    sends = max(told) if set(operations) <= set(ROOTED) else min(told)  # of a rooted one some ranks send nothing
    assert sends > 0, f"raw_bytes of the ranks after calls that sent something: {told}"
    if comm.last_decision.mode == "compressed" and stats["raw_bytes"]:
        assert stats["sent_bytes"] < stats["raw_bytes"], f"compressed, and yet sent no less: {stats}"


# ---------------------------------------------------------------------------------------------- wrong arguments


def four(w: World, n: int = 4, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(n, dtype=dtype, device=w.device)


def fours(w: World, extra: int = 0, **how: Any) -> list[torch.Tensor]:
    return [four(w, **how) for _ in range(w.world_size + extra)]


def _on_root(w: World, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    return tensors if w.rank == 0 else None


WRONG: dict[str, Callable[[World, Any], Any]] = {
    "all_gather_list_too_short": lambda w, c: c.all_gather(fours(w, -1), four(w)),
    "all_gather_list_of_another_dtype": lambda w, c: c.all_gather(fours(w, dtype=torch.float32), four(w)),
    "all_gather_list_too_large": lambda w, c: c.all_gather(fours(w, n=5), four(w)),
    "gather_list_too_short": lambda w, c: c.gather(four(w), _on_root(w, fours(w, -1)), dst=0),
    "gather_list_of_another_dtype": lambda w, c: c.gather(four(w), _on_root(w, fours(w, dtype=torch.float32)), dst=0),
    "gather_without_a_list_on_dst": lambda w, c: c.gather(four(w), None, dst=0),
    "gather_to_no_rank_of_the_group": lambda w, c: c.gather(four(w), None, dst=w.world_size),
    "scatter_list_too_long": lambda w, c: c.scatter(four(w), _on_root(w, fours(w, 1)), src=0),
    "scatter_list_of_other_sizes": lambda w, c: c.scatter(four(w), _on_root(w, fours(w, n=3)), src=0),
    "scatter_without_a_list_on_src": lambda w, c: c.scatter(four(w), None, src=0),
    "scatter_with_a_list_elsewhere": lambda w, c: c.scatter(four(w), fours(w), src=0),
    "broadcast_from_no_rank_of_the_group": lambda w, c: c.broadcast(four(w), src=w.world_size),
    "all_reduce_of_an_expanded_tensor": lambda w, c: c.all_reduce(four(w, 1).expand(4)),
    "all_reduce_with_no_reduction": lambda w, c: c.all_reduce(four(w), op="sum"),
}


@pytest.mark.requires("checks_arguments")
@pytest.mark.requires(operations=("all_gather", "all_reduce", "broadcast", "scatter", "gather"))
@pytest.mark.proves("ARGS-1")
@pytest.mark.gpu
def test_wrong_arguments_are_one_value_error_on_every_rank(world):
    comm = world.communicator()
    for name, call in WRONG.items():
        if name == "scatter_with_a_list_elsewhere" and world.world_size == 1:
            continue
        refused(world, name, call, comm)
    inputs = inputs_of_all("all_gather", "gaussian", 100, world.world_size, "bfloat16")
    exercise(world, comm, "all_gather", inputs, "bfloat16")


DISAGREEMENTS: dict[str, Callable[[World, Any, int], Any]] = {
    "root of broadcast": lambda w, c, odd: c.broadcast(four(w), src=odd),
    "root of gather": lambda w, c, odd: c.gather(four(w), fours(w) if w.rank == odd else None, dst=odd),
    "root of scatter": lambda w, c, odd: c.scatter(four(w), fours(w) if w.rank == odd else None, src=odd),
    "numel of all_reduce": lambda w, c, odd: c.all_reduce(four(w, 4 + odd)),
    "numel of broadcast": lambda w, c, odd: c.broadcast(four(w, 4 + odd), src=0),
    "numel of all_gather": lambda w, c, odd: c.all_gather(fours(w, n=4 + odd), four(w, 4 + odd)),
    "numel of gather": lambda w, c, odd: c.gather(four(w, 4 + odd), _on_root(w, fours(w)), dst=0),
    "dtype of all_reduce": lambda w, c, odd: c.all_reduce(four(w, dtype=torch.float32 if odd else torch.bfloat16)),
    "reduction of all_reduce": lambda w, c, odd: c.all_reduce(
        four(w), op=dist.ReduceOp.AVG if odd else dist.ReduceOp.SUM
    ),
    "operation": lambda w, c, odd: c.all_reduce(four(w)) if odd else c.broadcast(four(w), src=0),
}


@pytest.mark.requires("checks_arguments")
@pytest.mark.requires(operations=("all_gather", "all_reduce", "broadcast", "scatter", "gather"))
@pytest.mark.proves("ARGS-2", "ARGS-3")
@pytest.mark.gpu
def test_ranks_that_disagree_get_one_error_on_every_rank(world):
    if world.world_size == 1:
        return
    odd = int(world.rank == world.world_size - 1)
    comm = world.communicator()
    for what, call in DISAGREEMENTS.items():
        disagreed(world, what, lambda call=call: call(world, comm, odd))
    # None of these is trouble of the transport: the Communicator goes on.
    inputs = inputs_of_all("all_gather", "gaussian", 100, world.world_size, "bfloat16")
    exercise(world, comm, "all_gather", inputs, "bfloat16")


# ----------------------------------------------------------------------------------------------- point to point


def message(n: int, src: int, number: int, dtype: str = "bfloat16") -> np.ndarray:
    return patterns("gaussian", n, src, 1000 + number, dtype=dtype)


class Receipt:
    """A receive under way, and what it must hold."""

    def __init__(self, world: World, comm: Any, array: np.ndarray, src: int, tag: int, what: str) -> None:
        dtype = DTYPES["bfloat16" if array.itemsize == 2 else "float32"]
        self.out, self.want, self.what = poisoned(len(array), dtype, world.device), array, what
        self.work = comm.irecv(self.out.tensor, src=src, tag=tag)

    def finish(self) -> None:
        self.work.wait()
        check_output(self.out, self.want, self.what)


def isend(world: World, comm: Any, array: np.ndarray, dst: int, tag: int = 0) -> Any:
    dtype = DTYPES["bfloat16" if array.itemsize == 2 else "float32"]
    return comm.isend(misaligned(tensor_of(array, dtype, world.device)), dst=dst, tag=tag)


def pair_of(world: World) -> int | None:
    """The peer of this rank in pairs (0, 1), (2, 3), …; None for a rank that is left over."""
    peer = world.rank ^ 1
    return peer if peer < world.world_size else None


@send_recv
@pytest.mark.requires(operations=("send", "recv"))
@pytest.mark.proves("P2P-1", "BITS-1", "BITS-2")
def test_send_and_recv_move_every_pattern_and_size_between_all_pairs(world, mode):
    comm, me = world.communicator(mode), world.rank
    for dtype, n in itertools.product(DTYPES, (0, 1, 9, 1009, ALL_PATTERNS)):
        for src, dst in itertools.permutations(range(world.world_size), 2):
            array = patterns("all_patterns", n, src, dst, dtype=dtype)
            if me == src:
                comm.send(misaligned(tensor_of(array, DTYPES[dtype], world.device)), dst=dst)
            elif me == dst:
                out = poisoned(n, DTYPES[dtype], world.device)
                sender = comm.recv(out.tensor, src=src)
                assert sender == src, f"recv returns the sender, {src}, got {sender}"
                check_output(out, array, f"{n} {dtype} from rank {src} to rank {dst}")


@send_recv
@needs_send_recv
@pytest.mark.proves("P2P-2")
@pytest.mark.gpu
def test_isend_then_irecv_against_irecv_then_isend_with_two_messages_queued(world, mode):
    comm, me, peer = world.communicator(mode), world.rank, pair_of(world)
    if peer is None:
        return

    def send() -> list[Any]:
        return [isend(world, comm, message(20_001, me, k), peer) for k in (0, 1)]

    def receive() -> list[Receipt]:
        return [Receipt(world, comm, message(20_001, peer, k), peer, 0, f"message {k} to rank {me}") for k in (0, 1)]

    if me % 2:
        receipts = receive()
        sent = send()
    else:
        sent = send()
        receipts = receive()
    for receipt in reversed(receipts):
        receipt.finish()
    for work in sent:
        work.wait()


@send_recv
@needs_send_recv
@pytest.mark.proves("P2P-3")
def test_tags_may_be_taken_in_another_order_than_they_were_sent(world, mode):
    comm, me, peer = world.communicator(mode), world.rank, pair_of(world)
    if peer is None:
        return
    tags = (7, 3, 5)
    if me % 2 == 0:
        sent = [isend(world, comm, message(9001, me, tag), peer, tag) for tag in tags]
        for work in sent:
            work.wait()
        return
    for tag in sorted(tags):  # each is taken, to its end, before the next is asked for
        Receipt(world, comm, message(9001, peer, tag), peer, tag, f"the message of tag {tag}").finish()


@send_recv
@needs_send_recv
@pytest.mark.proves("P2P-3")
def test_many_messages_of_a_tag_keep_their_order(world, mode):
    comm, me, size = world.communicator(mode), world.rank, world.world_size
    if size == 1:
        return
    tags, count = (0, 9), 16
    turns = [(tag, number) for number in range(count) for tag in tags]
    sent = [isend(world, comm, message(301, me, 100 * t + k), (me + 1) % size, t) for t, k in turns]
    before = (me - 1) % size
    receipts = [
        Receipt(world, comm, message(301, before, 100 * t + k), before, t, f"message {k} of tag {t}") for t, k in turns
    ]
    for receipt in reversed(receipts) if me % 2 else receipts:
        receipt.finish()
    for work in sent:
        work.wait()


@send_recv
@needs_send_recv
@pytest.mark.requires("independent")
@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("P2P-4", "EXCH-4")
def test_messages_beside_collectives_do_not_wait_for_each_other(world, mode):
    comm, me, peer = world.communicator(mode), world.rank, pair_of(world)
    inputs = inputs_of_all("all_gather_into_tensor", "gaussian", 9001, world.world_size, "bfloat16")

    def collective() -> Any:
        return issue(world, comm, "all_gather_into_tensor", inputs, "bfloat16", async_op=True)

    if peer is None:
        collective().finish()
    elif me % 2:
        Receipt(world, comm, message(9001, peer, 1), peer, 1, "a message taken before the collective").finish()
        isend(world, comm, message(9001, me, 2), peer, 2).wait()
        collective().finish()
    else:
        under_way = collective()
        sent = isend(world, comm, message(9001, me, 1), peer, 1)
        Receipt(world, comm, message(9001, peer, 2), peer, 2, "a message taken beside the collective").finish()
        sent.wait()
        under_way.finish()


@send_recv
@pytest.mark.requires(operations="batch_isend_irecv")
@pytest.mark.proves("P2P-5")
def test_a_batch_between_all_pairs_gives_a_work_for_each(world, mode):
    comm, me = world.communicator(mode), world.rank
    others = [r for r in range(world.world_size) if r != me]
    if not others:
        return
    outs = {r: poisoned(2003, torch.bfloat16, world.device) for r in others}
    ops = [dist.P2POp(dist.irecv, outs[r].tensor, r, world.group) for r in others]
    kept = [tensor_of(message(2003, me, r), torch.bfloat16, world.device) for r in others]
    ops += [dist.P2POp(dist.isend, t, r, world.group) for t, r in zip(kept, others, strict=True)]
    works = comm.batch_isend_irecv(ops)
    assert len(works) == len(ops), f"{len(ops)} operations must give as many Works, got {len(works)}"
    for work in works:
        work.wait()
    for r in others:
        check_output(outs[r], message(2003, r, me), f"from rank {r} in a batch")


@send_recv
@needs_send_recv
@pytest.mark.requires("checks_arguments")
@pytest.mark.requires(operations="batch_isend_irecv")
@pytest.mark.proves("P2P-6", "ARGS-1")
def test_a_receive_from_anybody_and_a_message_to_oneself_are_refused(world):
    comm, me = world.communicator(), world.rank
    x = four(world)
    wrong: dict[str, Callable[[], Any]] = {
        "recv without src": lambda: comm.recv(x),
        "irecv without src": lambda: comm.irecv(x),
        "send to oneself": lambda: comm.send(x, dst=me),
        "recv from oneself": lambda: comm.recv(x, src=me),
        "send to no rank of the group": lambda: comm.send(x, dst=world.world_size),
        "a negative tag": lambda: comm.isend(x, dst=(me + 1) % world.world_size, tag=-1),
        "an empty batch": lambda: comm.batch_isend_irecv([]),
    }
    for name, call in wrong.items():
        began = time.monotonic()
        with pytest.raises(ValueError):
            call()
        assert time.monotonic() - began < 5, f"{name}: a wrong argument is seen at once"
    inputs = inputs_of_all("batch_isend_irecv", "gaussian", 100, world.world_size, "bfloat16")
    exercise(world, comm, "batch_isend_irecv", inputs, "bfloat16")


@send_recv
@pytest.mark.requires(operations=("send", "recv"))
@pytest.mark.requires("checks_arguments")
@pytest.mark.proves("P2P-7")
def test_sender_and_receiver_that_disagree_get_one_error_and_go_on(world):
    comm, me, peer = world.communicator(), world.rank, pair_of(world)

    def message_of(n: int, dtype: torch.dtype = torch.bfloat16) -> None:
        if peer is None:
            raise ValueError("left over")
        comm.recv(four(world, n, dtype), src=peer) if me % 2 else comm.send(four(world, 4), dst=peer)

    for what, n, dtype in (("numel", 5, torch.bfloat16), ("dtype", 4, torch.float32)):
        errors = errors_of_all(world, lambda n=n, dtype=dtype: message_of(n, dtype))
        assert all(name for name, _, _ in errors), f"{what}: some rank saw no error: {errors}"
        if peer is not None:
            assert errors[me][:2] == errors[peer][:2], f"{what}: the two raised different errors: {errors}"
    if peer is not None:
        message_of(4)


# ------------------------------------------------------------------------------------------------------- objects


@pytest.mark.operation("objects")
@pytest.mark.proves("OPS-4")
@pytest.mark.requires(operations=("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"))
def test_objects_reach_the_ranks_they_are_for(world):
    comm, me, size = world.communicator(), world.rank, world.world_size
    root = size - 1

    def thing(rank: int) -> dict[str, Any]:
        return {"rank": rank, "text": "x" * (rank * 1000), "nested": [rank, None, (1.5, rank)]}

    gathered: list[Any] = [None] * size
    comm.all_gather_object(gathered, thing(me))
    assert gathered == [thing(r) for r in range(size)]
    told: list[Any] = [thing(7), thing(8)] if me == root else [None, None]
    comm.broadcast_object_list(told, src=root)
    assert told == [thing(7), thing(8)]
    at_root: list[Any] | None = [None] * size if me == root else None
    comm.gather_object(thing(me), at_root, dst=root)
    assert at_root == ([thing(r) for r in range(size)] if me == root else None)
    mine: list[Any] = [None]
    comm.scatter_object_list(mine, [thing(r) for r in range(size)] if me == root else None, src=root)
    assert mine == [thing(me)]


# ------------------------------------------------------------------------------------------------------- lifetime


@pytest.mark.proves("WORK-5", "WORK-6")
def test_nothing_is_read_or_written_once_wait_has_returned(world, mode):
    """Inputs and outputs are the caller's again: what is put there after wait() stays, and is sent to nobody."""
    comm = world.communicator(mode)
    kept = []
    for operation in supported(world, ("all_gather_into_tensor", "all_to_all_single", *FURTHER)):
        inputs = inputs_of_all(operation, "gaussian", 9001, world.world_size, "bfloat16")
        call = issue(world, comm, operation, inputs, "bfloat16", async_op=True)
        call.finish()
        if isinstance(call.kept, torch.Tensor):
            call.kept.fill_(3.0)
        for out in call.outs:
            out.tensor.fill_(5.0)
        kept.append((operation, call))
    meet(world, comm)
    time.sleep(0.1)
    for operation, call in kept:
        for out in call.outs:
            five = np.full(out.tensor.shape, 0x40A0, np.uint16)
            assert_same_bits(out.tensor, five, f"{operation}: the output, which is the caller's after wait()")


@all_reduce
@pytest.mark.requires("ordered_sum", operations="all_reduce")
@pytest.mark.proves("SUM-9", "CUT-1")
def test_a_tensor_reduced_whole_or_row_by_row_has_the_same_bits(world):
    """One tensor, and its rows each alone: whichever shard or call an element is in, its sum is the same."""
    rows, width = 5, 1013
    inputs = inputs_of_all("all_reduce", "two_gaussians", rows * width, world.world_size, "bfloat16")
    want = ordered_sum(inputs).reshape(rows, width)
    for mode in configurations(world):
        comm = world.communicator(mode)
        mine = tensor_of(inputs[world.rank], torch.bfloat16, world.device)
        alone = mine.clone().view(rows, width)
        comm.all_reduce(mine)
        for row in alone:
            comm.all_reduce(row)
        assert_same_bits(mine.view(rows, width), want, f"whole, {mode}")
        assert_same_bits(alone, want, f"row by row, {mode}")


@pytest.mark.parametrize("operation", ROOTED)
@pytest.mark.proves("OPS-3")
def test_ranks_that_are_not_the_root_keep_their_inputs(world, operation):
    """gather and scatter write nothing but what they are asked for."""
    needs(world, operation)
    comm, me, n = world.communicator(), world.rank, 777
    inputs = inputs_of_all(operation, "indexed", n, world.world_size, "bfloat16")
    for root in range(world.world_size):
        call = issue(world, comm, operation, inputs, "bfloat16", root=root)
        call.finish()
        kept = call.kept if isinstance(call.kept, list) else [call.kept] if call.kept is not None else []
        if kept:
            joined = np.concatenate([patterns_of(t) for t in kept])
            assert_same_bits(joined, inputs[me], f"{operation}: the input of rank {me}")
