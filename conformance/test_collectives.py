"""What torch's collectives promise, of any subject: shapes, splits, layouts, arguments, groups. Bits, never numbers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from conformance.exercise import Part, disagreed, errors_of_all, refused
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
from conformance.strategies import patterns, rng_of
from conformance.subject import PremulSum

CODED = {"bfloat16": torch.bfloat16, "float32": torch.float32}
OTHERS = {"float16": torch.float16, "float64": torch.float64, "int32": torch.int32, "uint8": torch.uint8}
DTYPES = {**CODED, **OTHERS}
OPS = ("sum", "avg", "premul_sum")
COUNTS = (0, 1, 7, 33, 1009, 8193)
FACTOR = 1 / 3

coded_dtypes = pytest.mark.parametrize("dtype", CODED)
all_gather = pytest.mark.operation("all_gather_into_tensor")
reduce_scatter = pytest.mark.operation("reduce_scatter_tensor")
all_to_all = pytest.mark.operation("all_to_all_single")
every_operation = pytest.mark.parametrize(
    "operation", ["all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"]
)


def bits(dtype: str, n: int, rank: int, kind: str = "gaussian", seed: int = 0) -> np.ndarray:
    """[n] patterns of a dtype: of a kind for those that are coded, random bits for the others."""
    if dtype in CODED:
        return patterns(kind, n, rank, seed, dtype=dtype)
    size = DTYPES[dtype].itemsize
    return rng_of("bits", dtype, n, rank, seed).integers(0, 256, n * size, dtype=np.uint8).view(f"u{size}")


def others(world: World) -> list[str]:
    """Those dtypes outside CODED that the subject carries."""
    return [d for d in OTHERS if d in world.subject.capabilities.dtypes]


def tensor(world: World, dtype: str, array: np.ndarray, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A misaligned tensor of these bits on the world's device."""
    t = tensor_of(array, DTYPES[dtype], world.device)
    return misaligned(t if shape is None else t.view(shape))


def gather_and_check(world: World, comm: Any, dtype: str, n: int, kind: str = "gaussian", seed: int = 0) -> None:
    """One all_gather_into_tensor of n elements a rank, checked bit for bit."""
    mine = tensor(world, dtype, bits(dtype, n, world.rank, kind, seed))
    out = poisoned(n * world.world_size, DTYPES[dtype], world.device)
    comm.all_gather_into_tensor(out.tensor, mine)
    want = np.concatenate([bits(dtype, n, r, kind, seed) for r in range(world.world_size)])
    check_output(out, want, f"all_gather_into_tensor of {n} {dtype} ({kind}) on rank {world.rank}")


# ------------------------------------------------------------------------------------------------ right results


@all_gather
@coded_dtypes
@pytest.mark.proves("BITS-2", "BITS-3", "LAYOUT-4")
def test_all_gather_returns_the_bits_of_every_rank(world, mode, dtype):
    world.require(operations="all_gather_into_tensor", dtypes=dtype)
    comm = world.communicator(mode)
    for n in COUNTS:
        gather_and_check(world, comm, dtype, n)
    for kind in ("indexed", "nan_payloads", "zeros"):
        gather_and_check(world, comm, dtype, 4099, kind)


@all_gather
@pytest.mark.proves("BITS-7")
def test_all_gather_of_other_dtypes_returns_the_bits_of_every_rank(world, mode):
    comm = world.communicator(mode)
    for dtype in others(world):
        for n in COUNTS:
            gather_and_check(world, comm, dtype, n)


@all_gather
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.proves("EXCH-7")
def test_all_gather_works_in_any_world_size(world, mode):
    comm = world.communicator(mode)
    for dtype in CODED:
        gather_and_check(world, comm, dtype, 0)
        gather_and_check(world, comm, dtype, 20_011)


@all_gather
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.proves("OPS-5")
def test_all_gather_of_matrices_concatenates_or_stacks(world, mode, stacked):
    if stacked:
        world.require("stacked_gather")
    shape = (world.world_size, 3, 5) if stacked else (world.world_size * 3, 5)
    comm = world.communicator(mode)
    for dtype in CODED:
        out = poisoned(shape, DTYPES[dtype], world.device)
        comm.all_gather_into_tensor(out.tensor, tensor(world, dtype, bits(dtype, 15, world.rank), (3, 5)))
        want = np.concatenate([bits(dtype, 15, r) for r in range(world.world_size)]).reshape(shape)
        check_output(out, want, f"all_gather_into_tensor of 3×5 {dtype}")


@all_gather
@pytest.mark.proves("LAYOUT-3")
def test_all_gather_in_place_leaves_the_own_slot_and_fills_the_others(world, mode):
    n = 10_007
    comm = world.communicator(mode)
    for dtype in CODED:
        out = poisoned(n * world.world_size, DTYPES[dtype], world.device)
        mine = out.tensor.narrow(0, world.rank * n, n)
        mine.copy_(tensor_of(bits(dtype, n, world.rank), DTYPES[dtype], world.device))
        comm.all_gather_into_tensor(out.tensor, mine)
        want = np.concatenate([bits(dtype, n, r) for r in range(world.world_size)])
        check_output(out, want, f"in-place all_gather of {dtype}")


def exact_terms(dtype: str, n: int, world_size: int) -> list[np.ndarray]:
    """Whole numbers, n a rank, whose sum and mean every dtype holds exactly, in any order of summation."""
    top = 16 if world_size <= 4 else max(1, 256 // world_size**2)
    i = np.arange(n)
    return [(i * 7 + 3 * r) % top * world_size for r in range(world_size)]


def number_bits(dtype: str, numbers: np.ndarray) -> np.ndarray:
    """Patterns of whole numbers that the dtype holds exactly."""
    return patterns_of(torch.from_numpy(numbers.astype(np.float64)).to(DTYPES[dtype]))


def torch_op(op: str, factor: float) -> Any:
    return {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "premul_sum": PremulSum(factor)}[op]


@reduce_scatter
@pytest.mark.parametrize("op", OPS)
@pytest.mark.proves("SUM-10", "BITS-7")
def test_reduce_scatter_of_whole_numbers_is_exact(world, mode, op):
    """Needs no order of summation, so every subject must pass it."""
    world.require(operations="reduce_scatter_tensor", reduce_ops=op)
    comm = world.communicator(mode)
    names = [*CODED, *(others(world) if op == "sum" else ())]
    for dtype, n in itertools.product(names, COUNTS):
        terms = exact_terms(dtype, n * world.world_size, world.world_size)
        out = poisoned(n, DTYPES[dtype], world.device)
        comm.reduce_scatter_tensor(
            out.tensor, tensor(world, dtype, number_bits(dtype, terms[world.rank])), torch_op(op, 0.5)
        )
        total = np.sum(terms, axis=0)
        total = {"sum": total, "avg": total / world.world_size, "premul_sum": total * 0.5}[op]
        want = number_bits(dtype, total)[world.rank * n : (world.rank + 1) * n]
        check_output(out, want, f"reduce_scatter_tensor({op}) of {n} {dtype} on rank {world.rank}")


@reduce_scatter
@coded_dtypes
@pytest.mark.parametrize("op", OPS)
@pytest.mark.requires("ordered_sum")
@pytest.mark.proves("SUM-1")
def test_reduce_scatter_is_the_ordered_sum(world, mode, dtype, op):
    world.require(operations="reduce_scatter_tensor", dtypes=dtype, reduce_ops=op)
    comm = world.communicator(mode)
    for n, kind in ((5, "gaussian"), (8195, "gaussian"), (4099, "subnormals"), (4099, "nan_payloads")):
        terms = [bits(dtype, n * world.world_size, r, kind) for r in range(world.world_size)]
        out = poisoned(n, DTYPES[dtype], world.device)
        comm.reduce_scatter_tensor(out.tensor, tensor(world, dtype, terms[world.rank]), torch_op(op, FACTOR))
        shards = [t[world.rank * n : (world.rank + 1) * n] for t in terms]
        want = ordered_sum(shards, op, FACTOR)
        check_output(out, want, f"reduce_scatter_tensor({op}) of {n} {dtype} ({kind}) on rank {world.rank}")


@reduce_scatter
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.requires("ordered_sum")
@pytest.mark.proves("SUM-1", "EXCH-7")
def test_reduce_scatter_is_the_ordered_sum_in_any_world_size(world, mode):
    comm = world.communicator(mode)
    for dtype in CODED:
        n = 8197
        terms = [bits(dtype, n * world.world_size, r, "heavy_tail") for r in range(world.world_size)]
        out = poisoned(n, DTYPES[dtype], world.device)
        comm.reduce_scatter_tensor(out.tensor, tensor(world, dtype, terms[world.rank]))
        want = ordered_sum([t[world.rank * n : (world.rank + 1) * n] for t in terms])
        check_output(out, want, f"reduce_scatter_tensor of {n} {dtype} on rank {world.rank}")


@all_to_all
@pytest.mark.proves("OPS-6", "BITS-7")
def test_all_to_all_sends_each_piece_to_its_rank(world, mode):
    comm = world.communicator(mode)
    for dtype, n in itertools.product([*CODED, *others(world)], COUNTS):
        out = poisoned(n * world.world_size, DTYPES[dtype], world.device)
        comm.all_to_all_single(out.tensor, tensor(world, dtype, bits(dtype, n * world.world_size, world.rank)))
        sent = [bits(dtype, n * world.world_size, r) for r in range(world.world_size)]
        want = np.concatenate([s[world.rank * n : (world.rank + 1) * n] for s in sent])
        check_output(out, want, f"all_to_all_single of {n} {dtype} a pair on rank {world.rank}")


# ---------------------------------------------------------------------------------------------- uneven splits

SPLITS: dict[str, Callable[[int, int], int]] = {
    "each_pair_another": lambda i, j: 3 * i + 5 * j + 1,
    "large_and_small": lambda i, j: 4001 if i == j + 1 else 1,
    "all_zero": lambda i, j: 0,
    "silent_sender": lambda i, j: 0 if i == 1 else 9 + i,
    "silent_receiver": lambda i, j: 0 if j == 1 else 9 + i,
    "silent_both": lambda i, j: 0 if 1 in (i, j) else 700,
    "half_of_the_ranks": lambda i, j: 11 if i % 2 == 0 == j % 2 else 0,
    "diagonal": lambda i, j: 13 if i == j else 0,
    "one_hot": lambda i, j: 2111 if j == 0 else 0,
    "one_pair": lambda i, j: 2111 if (i, j) == (0, 1) else 0,
    "triangle": lambda i, j: max(0, i - j) * 17,
}
"""(sender, receiver) → rows."""

COLUMNS = 3


def exchange_rows(world: World, comm: Any, dtype: str, rows: Callable[[int, int], int], what: str) -> None:
    """One all_to_all_single with these splits, checked bit for bit."""
    n, me = world.world_size, world.rank
    sends = [[rows(i, j) for j in range(n)] for i in range(n)]
    data = [bits(dtype, sum(s) * COLUMNS, i).reshape(-1, COLUMNS) for i, s in enumerate(sends)]
    receives = [sends[i][me] for i in range(n)]
    out = poisoned((sum(receives), COLUMNS), DTYPES[dtype], world.device)
    mine = tensor(world, dtype, data[me].reshape(-1), data[me].shape)
    comm.all_to_all_single(out.tensor, mine, receives, sends[me])
    starts = [np.cumsum([0, *s]) for s in sends]
    want = np.concatenate([data[i][starts[i][me] : starts[i][me + 1]] for i in range(n)])
    check_output(out, want, f"{what}: all_to_all_single of {dtype}, rows {receives}, on rank {me}")


@all_to_all
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.proves("LOAD-1", "LOAD-2")
def test_all_to_all_with_uneven_and_zero_splits(world, splits):
    """In every mode: communicators of all of them live at once."""
    for mode in world.subject.capabilities.modes:
        comm = world.communicator(mode)
        for dtype in CODED:
            exchange_rows(world, comm, dtype, SPLITS[splits], f"{splits}, mode {mode}")


@all_to_all
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.proves("LOAD-1", "EXCH-7")
def test_all_to_all_with_uneven_splits_in_any_world_size(world, mode):
    comm = world.communicator(mode)
    for name in ("each_pair_another", "silent_sender", "all_zero"):
        exchange_rows(world, comm, "bfloat16", SPLITS[name], name)


@all_to_all
@pytest.mark.proves("LOAD-1", "BITS-7")
def test_all_to_all_with_uneven_splits_of_other_dtypes(world, mode):
    comm = world.communicator(mode)
    for dtype, name in itertools.product(others(world), ("each_pair_another", "silent_receiver")):
        exchange_rows(world, comm, dtype, SPLITS[name], name)


@all_to_all
@pytest.mark.proves("LOAD-2")
def test_ranks_without_rows_take_part_again_in_the_way_back(world, mode):
    """Dispatch to experts and combine: a rank that got nothing must neither run ahead nor be waited for."""
    comm = world.communicator(mode)
    rows = SPLITS["silent_receiver"]
    for _ in range(3):
        exchange_rows(world, comm, "bfloat16", rows, "dispatch")
        exchange_rows(world, comm, "bfloat16", lambda i, j: rows(j, i), "combine")


# -------------------------------------------------------------------------------------------------- the contract


def issue(
    world: World, comm: Any, operation: str, seed: int = 0, async_op: bool = False, n: int = 9001
) -> tuple[Any, Callable[[], None]]:
    """Issue one bf16 call. Returns what it returned, and a function that checks its output."""
    size, me = world.world_size, world.rank
    group_wide = [bits("bfloat16", n * size, r, seed=seed) for r in range(size)]
    whole = tensor(world, "bfloat16", group_wide[me])
    if operation == "all_gather_into_tensor":
        out = poisoned(n * size, torch.bfloat16, world.device)
        returned = comm.all_gather_into_tensor(out.tensor, whole[:n], async_op=async_op)
        want = np.concatenate([g[:n] for g in group_wide])
    elif operation == "all_to_all_single":
        out = poisoned(n * size, torch.bfloat16, world.device)
        returned = comm.all_to_all_single(out.tensor, whole, async_op=async_op)
        want = np.concatenate([g[me * n : (me + 1) * n] for g in group_wide])
    else:
        terms = exact_terms("bfloat16", n * size, size)
        out = poisoned(n, torch.bfloat16, world.device)
        mine = tensor(world, "bfloat16", number_bits("bfloat16", np.roll(terms[me], seed)))
        returned = comm.reduce_scatter_tensor(out.tensor, mine, async_op=async_op)
        total = np.roll(np.sum(terms, axis=0), seed)
        want = number_bits("bfloat16", total)[me * n : (me + 1) * n]
    return returned, lambda: check_output(out, want, f"{operation} (seed {seed}) on rank {me}")


@every_operation
@pytest.mark.proves("WORK-1")
def test_sync_call_returns_none_with_the_output_done(world, mode, operation):
    returned, check = issue(world, world.communicator(mode), operation)
    assert returned is None, f"{operation} without async_op must return None, got {returned!r}"
    check()


@every_operation
@pytest.mark.proves("WORK-1", "WORK-3")
def test_async_call_returns_a_work_that_completes(world, mode, operation):
    work, check = issue(world, world.communicator(mode), operation, async_op=True)
    assert hasattr(work, "wait"), f"{operation} with async_op must return a Work, got {work!r}"
    work.wait()
    check()
    world.require("completion")
    assert work.is_completed() is True, f"{operation}: is_completed() must be True after wait()"


@every_operation
@pytest.mark.proves("WORK-2")
def test_a_second_wait_returns_at_once(world, mode, operation):
    work, check = issue(world, world.communicator(mode), operation, async_op=True)
    work.wait()
    work.wait()
    check()


@every_operation
@pytest.mark.proves("EXCH-6")
def test_many_calls_in_a_row_give_each_its_own_data(world, mode, operation):
    comm = world.communicator(mode)
    for seed in range(12):
        issue(world, comm, operation, seed, n=517)[1]()


@pytest.mark.requires(operations=("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"))
@pytest.mark.proves("EXCH-6")
def test_calls_of_all_kinds_in_flight_together(world, mode):
    comm = world.communicator(mode)
    operations = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single") * 3
    issued = [issue(world, comm, op, seed, async_op=True) for seed, op in enumerate(operations)]
    for work, _ in issued:
        work.wait()
    for _, check in issued:
        check()


@pytest.mark.operation("barrier")
@pytest.mark.proves("EXCH-8")
def test_barrier_returns_only_when_the_last_rank_has_come(world, mode):
    comm = world.communicator(mode)
    world.barrier_store("before")
    if world.rank == world.world_size - 1:
        time.sleep(0.5)
        number = world.take_number()
        comm.barrier()
    else:
        comm.barrier()
        number = world.take_number()
    numbers = world.exchange(number)
    for rank, left in enumerate(numbers[:-1]):
        assert left > numbers[-1], f"barrier: rank {rank} left it before the last rank had come"


@pytest.mark.operation("barrier")
@pytest.mark.proves("WORK-1", "WORK-3")
def test_async_barrier_returns_a_work(world, mode):
    work = world.communicator(mode).barrier(async_op=True)
    work.wait()
    assert work.is_completed() is True


@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("EXCH-9")
def test_close_twice_and_a_new_communicator_after_it(world, mode):
    first = world.communicator(mode)
    gather_and_check(world, first, "bfloat16", 100)
    first.close()
    first.close()
    gather_and_check(world, world.communicator(mode), "bfloat16", 100)


@pytest.mark.requires("decides")
@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("TELL-1", "TELL-2")
def test_last_decision_and_stats_tell_what_was_done(world, mode):
    world.require_peers()
    comm = world.communicator(mode)
    assert comm.last_decision is None, f"before the first call last_decision must be None, got {comm.last_decision}"
    n = 20_000
    gather_and_check(world, comm, "bfloat16", n)
    decision, stats = comm.last_decision, comm.stats()
    assert decision.mode in ("compressed", "raw", "native"), f"unknown decision {decision.mode!r}"
    assert isinstance(decision.reason, str), f"a decision has a reason in words, got {decision.reason!r}"
    assert decision.reason, f"a decision has a reason, {decision.mode!r} has none"
    assert stats["calls"] == 1, f"one call was made, stats() says {stats['calls']}"
    assert stats["raw_bytes"] > 0, "raw_bytes of a call that sent something must not be 0"
    if decision.mode == "compressed":
        assert stats["sent_bytes"] < stats["raw_bytes"], f"compressed, and yet sent no less: {stats}"
    gather_and_check(world, comm, "bfloat16", n, seed=1)
    assert comm.stats()["calls"] == 2
    told = world.exchange(comm.last_decision.mode)
    assert len(set(told)) == 1, f"the ranks decided differently: {told}"


@pytest.mark.requires("decides")
@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("TELL-3")
def test_dtypes_that_are_not_coded_run_native_and_say_so(world, mode):
    comm = world.communicator(mode)
    for dtype in sorted(set(others(world)) - world.subject.capabilities.coded_dtypes):
        gather_and_check(world, comm, dtype, 5000)
        assert comm.last_decision.mode == "native", f"{dtype} is not coded, decision was {comm.last_decision}"


# --------------------------------------------------------------------------------------------- wrong arguments


def zeros(world: World, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=world.device)


def _gather(out: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[World, Any], None]:
    """all_gather_into_tensor of 4 elements into out per rank; if that is not 4, the world size does not divide it."""
    return lambda w, c: c.all_gather_into_tensor(zeros(w, out * w.world_size + out - 4), zeros(w, 4, dtype=dtype))


def _scatter(in_: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[World, Any], None]:
    return lambda w, c: c.reduce_scatter_tensor(zeros(w, 4), zeros(w, in_ * w.world_size + in_ - 4, dtype=dtype))


def _to_all(rows: int, sends: Any, receives: Any, dtype: torch.dtype = torch.bfloat16) -> Callable[[World, Any], None]:
    """all_to_all_single of rows + (rows of the default); splits are functions of the world size."""

    def call(w: World, c: Any) -> None:
        n = w.world_size
        c.all_to_all_single(
            zeros(w, 2 * n + rows, 3),
            zeros(w, 2 * n + rows, 3, dtype=dtype),
            receives and receives(n),
            sends and sends(n),
        )

    return call


def _twos(n: int) -> list[int]:
    return [2] * n


WRONG = {
    "all_gather_output_too_large": _gather(5),
    "all_gather_output_too_small": _gather(3),
    "all_gather_output_of_another_dtype": _gather(4, torch.float32),
    "reduce_scatter_input_too_large": _scatter(5),
    "reduce_scatter_input_too_small": _scatter(3),
    "reduce_scatter_output_of_another_dtype": _scatter(4, torch.float32),
    "all_to_all_rows_not_divisible": _to_all(1, None, None),
    "all_to_all_rows_not_divisible_empty_splits": _to_all(1, lambda n: [], lambda n: []),
    "all_to_all_send_splits_too_large": _to_all(0, lambda n: [3, *_twos(n - 1)], _twos),
    "all_to_all_receive_splits_too_small": _to_all(0, _twos, lambda n: [1, *_twos(n - 1)]),
    "all_to_all_too_few_splits": _to_all(0, lambda n: [4, *_twos(n - 2)], _twos),
    "all_to_all_negative_split": _to_all(0, lambda n: [-1, 5, *_twos(n - 2)], _twos),
    "all_to_all_output_of_another_dtype": _to_all(0, _twos, _twos, torch.float32),
}
ABOUT = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}
RIGHT = {"all_gather": _gather(4), "reduce_scatter": _scatter(4), "all_to_all": _to_all(0, _twos, _twos)}


@pytest.mark.requires("checks_arguments")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("ARGS-1")
def test_wrong_arguments_are_one_value_error_on_every_rank(world, wrong):
    about, right = next((name, call) for name, call in RIGHT.items() if wrong.startswith(name))
    world.require(operations=ABOUT[about])
    if "not_divisible" in wrong and world.world_size == 1:
        return
    comm = world.communicator()
    refused(world, wrong, WRONG[wrong], comm)
    alone = WRONG[wrong] if world.rank == world.world_size - 1 else right
    refused(world, f"{wrong}, on the last rank only", alone, comm)
    gather_and_check(world, comm, "bfloat16", 100)


DISAGREEMENTS: dict[str, Callable[[World, Any, bool], None]] = {
    "numel": lambda w, c, odd: (
        _gather(4)(w, c) if not odd else c.all_gather_into_tensor(zeros(w, 8 * w.world_size), zeros(w, 8))
    ),
    "dtype": lambda w, c, odd: c.all_gather_into_tensor(
        zeros(w, 4 * w.world_size, dtype=torch.float32 if odd else torch.bfloat16),
        zeros(w, 4, dtype=torch.float32 if odd else torch.bfloat16),
    ),
    "operation": lambda w, c, odd: (_scatter(4) if odd else _gather(4))(w, c),
    "reduction": lambda w, c, odd: c.reduce_scatter_tensor(
        zeros(w, 4), zeros(w, 4 * w.world_size), dist.ReduceOp.AVG if odd else dist.ReduceOp.SUM
    ),
    "splits": lambda w, c, odd: c.all_to_all_single(
        zeros(w, 2 * w.world_size, 3),
        zeros(w, 2 * w.world_size, 3),
        _twos(w.world_size),
        [3, 1, *_twos(w.world_size - 2)] if odd else _twos(w.world_size),
    ),
}


@pytest.mark.requires("checks_arguments")
@pytest.mark.parametrize("what", DISAGREEMENTS)
@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("ARGS-2")
@pytest.mark.gpu
def test_ranks_that_disagree_get_one_error_on_every_rank(world, what):
    world.require_peers()
    comm = world.communicator()
    if what in ("operation", "reduction"):  # in the first of them one rank only calls it
        world.require(operations="reduce_scatter_tensor")
    odd = world.rank == world.world_size - 1
    disagreed(world, what, lambda: DISAGREEMENTS[what](world, comm, odd))
    gather_and_check(world, world.communicator(), "bfloat16", 100)


# ------------------------------------------------------------------------------------------------ groups, layouts


@pytest.mark.requires(operations=("all_gather_into_tensor", "all_to_all_single"))
@pytest.mark.proves("EXCH-3")
def test_two_subgroups_at_once_keep_their_data_apart(world, mode):
    everyone = list(range(world.world_size))
    parts = [[r for r in everyone if r % 2 == k] for k in (0, 1) if len(everyone) > k]
    groups = [world.subgroup(p) for p in parts]
    k = world.rank % 2
    comm = world.communicator(mode, groups[k])
    part: Any = Part(world, parts[k], groups[k])
    for seed in range(4):
        gather_and_check(part, comm, "bfloat16", 3001, seed=10 * k + seed)
        issue(part, comm, "all_to_all_single", 10 * k + seed)[1]()


@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("EXCH-3")
def test_a_subgroup_in_another_order_of_calls_than_the_world(world, mode):
    """Members and others interleave their calls differently: groups must not wait for each other."""
    everyone = list(range(world.world_size))
    members = everyone[1:] or everyone
    group = world.subgroup(members)
    comm = world.communicator(mode)
    if group is not None:
        inner = world.communicator(mode, group)
        part: Any = Part(world, members, group)
        gather_and_check(part, inner, "bfloat16", 777, seed=1)
        gather_and_check(world, comm, "bfloat16", 777, seed=2)
        gather_and_check(part, inner, "bfloat16", 777, seed=3)
    else:
        gather_and_check(world, comm, "bfloat16", 777, seed=2)


@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("EXCH-5")
def test_several_communicators_on_one_group_keep_their_data_apart(world, mode):
    comms = [world.communicator(mode) for _ in range(3)]
    for seed in range(4):
        issued = [
            issue(world, comm, "all_gather_into_tensor", 10 * seed + k, async_op=True) for k, comm in enumerate(comms)
        ]
        for work, check in reversed(issued):
            work.wait()
            check()


@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("EXCH-5")
def test_communicators_of_different_modes_live_together(world):
    comms = [world.communicator(mode) for mode in world.subject.capabilities.modes]
    for seed in range(2):
        for k, comm in enumerate(comms):
            gather_and_check(world, comm, "bfloat16", 2503, seed=10 * seed + k)


@every_operation
@pytest.mark.proves("BITS-4")
def test_any_storage_offset_gives_the_same_bits(world, operation):
    if operation == "reduce_scatter_tensor":
        world.require("ordered_sum")
    comm = world.communicator()
    for offset in (1, 2, 3, 5, 7):
        call_at_offset(world, comm, operation, offset)


def call_at_offset(world: World, comm: Any, operation: str, offset: int) -> None:
    n, size, me = 1003, world.world_size, world.rank
    data = [bits("bfloat16", n * size, r, "indexed", offset) for r in range(size)]
    mine = misaligned(tensor_of(data[me], torch.bfloat16, world.device), offset)
    if operation == "all_gather_into_tensor":
        out = poisoned(n * size, torch.bfloat16, world.device, offset)
        comm.all_gather_into_tensor(out.tensor, mine[:n])
        want = np.concatenate([d[:n] for d in data])
    elif operation == "all_to_all_single":
        out = poisoned(n * size, torch.bfloat16, world.device, offset)
        comm.all_to_all_single(out.tensor, mine)
        want = np.concatenate([d[me * n : (me + 1) * n] for d in data])
    else:
        out = poisoned(n, torch.bfloat16, world.device, offset)
        comm.reduce_scatter_tensor(out.tensor, mine)
        want = ordered_sum([d[me * n : (me + 1) * n] for d in data])
    check_output(out, want, f"{operation} at storage offset {offset}")


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.view(8, 12).t().contiguous().t(),
    "every_second": lambda t: torch.stack([t, torch.full_like(t, 7)], 1)[:, 0],
    "channels_last": lambda t: t.view(2, 4, 3, 4).contiguous(memory_format=torch.channels_last),
    "column": lambda t: torch.stack([torch.full_like(t.view(48, 2), 7), t.view(48, 2)], 2)[:, :, 1],
}


@every_operation
@pytest.mark.requires("any_layout")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.proves("LAYOUT-1")
@pytest.mark.gpu
def test_inputs_that_are_not_contiguous_are_taken_in_their_logical_order(world, operation, layout):
    size, me = world.world_size, world.rank
    total = 96 * size
    data = [bits("bfloat16", total, r, "indexed") for r in range(size)]
    # One piece of 96 elements a rank; the pieces are laid out strangely, and for one rank the whole input is.
    piece = LAYOUTS[layout](tensor_of(data[me][:96], torch.bfloat16, world.device))
    assert not piece.is_contiguous()
    comm = world.communicator()
    if operation == "all_gather_into_tensor":
        out = poisoned(total, torch.bfloat16, world.device)
        want = np.concatenate([d[:96] for d in data])
        call: Callable[[], Any] = lambda: comm.all_gather_into_tensor(out.tensor, piece)  # noqa: E731
    else:
        rows = tensor_of(data[me], torch.bfloat16, world.device).view(size * 12, 8)
        strided = torch.stack([torch.full_like(rows, 7), rows], 2)[:, :, 1]
        assert not strided.is_contiguous()
        own = [d[me * 96 : (me + 1) * 96] for d in data]
        if operation == "all_to_all_single":
            out = poisoned((size * 12, 8), torch.bfloat16, world.device)
            want = np.concatenate(own).reshape(size * 12, 8)
            call = lambda: comm.all_to_all_single(out.tensor, strided)  # noqa: E731
        else:
            world.require("ordered_sum")
            out = poisoned((12, 8), torch.bfloat16, world.device)
            want = ordered_sum(own).reshape(12, 8)
            call = lambda: comm.reduce_scatter_tensor(out.tensor, strided)  # noqa: E731
    errors = errors_of_all(world, call)
    if any(name for name, _, _ in errors):
        assert all(is_value_error for _, is_value_error, _ in errors), f"refused on some ranks only: {errors}"
    else:
        check_output(out, want, f"{operation} of a {layout} input")


@all_gather
@pytest.mark.requires("any_layout")
@pytest.mark.proves("LAYOUT-2", "LAYOUT-4")
@pytest.mark.gpu
def test_an_output_that_is_not_contiguous_is_filled_in_its_logical_order(world, mode):
    n, size = 501, world.world_size
    comm = world.communicator(mode)
    out = poisoned((n * size, 2), torch.bfloat16, world.device)
    column = out.tensor[:, 1]
    mine = tensor(world, "bfloat16", bits("bfloat16", n, world.rank))
    errors = errors_of_all(world, lambda: comm.all_gather_into_tensor(column, mine))
    if any(name for name, _, _ in errors):
        assert all(is_value_error for _, is_value_error, _ in errors), f"refused on some ranks only: {errors}"
        return
    assert_same_bits(column, np.concatenate([bits("bfloat16", n, r) for r in range(size)]), "a column as output")
    poison = np.full(n * size, 0xA5A5, np.uint16)
    assert_same_bits(out.tensor[:, 0], poison, "the column beside the output")
    check_guards(out, "a column as output")
