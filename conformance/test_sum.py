"""The facts of the ordered sum that implementations get wrong, through reduce_scatter_tensor (docs/DESIGN.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from conformance.exercise import DTYPES, inputs_of_all
from conformance.oracle import assert_same_bits, ordered_sum, patterns_of, poisoned, tensor_of
from conformance.strategies import patterns
from conformance.subject import PremulSum

pytestmark = [pytest.mark.requires("ordered_sum"), pytest.mark.operation("reduce_scatter_tensor")]

MINUS_ZERO, ONE, NAN = 0x8000, 0x3F80, 0x7FC0


def reduce_columns(world, comm, columns: Sequence[int], op: Any = dist.ReduceOp.SUM, n: int = 8201) -> np.ndarray:
    """The sum of n equal words a rank, columns[r] on rank r."""
    return reduce_inputs(world, comm, [np.full(n * world.world_size, w, np.uint16) for w in columns], op)


def reduce_inputs(world, comm, inputs: Sequence[np.ndarray], op: Any = dist.ReduceOp.SUM) -> np.ndarray:
    dtype = DTYPES["bfloat16" if inputs[0].itemsize == 2 else "float32"]
    out = poisoned(len(inputs[0]) // world.world_size, dtype, world.device)
    comm.reduce_scatter_tensor(out.tensor, tensor_of(inputs[world.rank], dtype, world.device), op)
    return patterns_of(out.tensor)


def all_equal(got: np.ndarray, word: int, what: str) -> None:
    assert_same_bits(got, np.full(len(got), word, got.dtype), what)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.proves("SUM-2")
@pytest.mark.gpu
def test_minus_zero_of_all_ranks_stays_minus_zero(world, mode):
    got = reduce_columns(world, world.communicator(mode), [MINUS_ZERO] * world.world_size)
    all_equal(got, MINUS_ZERO, "sum of -0")


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("nan", [0x7F81, 0x7FFF, 0xFFC0, 0xFFFF])
@pytest.mark.proves("SUM-5")
@pytest.mark.gpu
def test_every_nan_becomes_one_pattern_on_any_number_of_ranks(world, nan):
    comm = world.communicator()
    for where in range(world.world_size):
        columns = [ONE] * world.world_size
        columns[where] = nan
        all_equal(reduce_columns(world, comm, columns, n=33), NAN, f"NaN 0x{nan:04X} on rank {where}")
    wide = [np.full(7 * world.world_size, nan << 16 | 1, np.uint32)] * world.world_size
    all_equal(reduce_inputs(world, comm, wide), NAN << 16, "float32 NaN")


@pytest.mark.ranks(2, 4)
@pytest.mark.proves("SUM-5")
def test_infinities_of_both_signs_give_the_one_nan(world, mode):
    columns = [0x7F80, 0xFF80] * (world.world_size // 2)
    all_equal(reduce_columns(world, world.communicator(mode), columns), NAN, "inf - inf")


@pytest.mark.proves("SUM-7")
@pytest.mark.gpu
def test_subnormals_are_summed_though_the_caller_flushes_them(world, mode):
    had = np.float32(1e-40) * np.float32(0.5) == 0
    if world.rank % 2 == 0:
        torch.set_flush_denormal(True)
    try:
        comm = world.communicator(mode)  # made, with whatever threads it has, while the mode is on
        all_equal(reduce_columns(world, comm, [1] * world.world_size), world.world_size, "sum of least subnormals")
        inputs = inputs_of_all("reduce_scatter_tensor", "subnormals", 4099, world.world_size, "bfloat16")
        got = reduce_inputs(world, comm, inputs)
    finally:
        torch.set_flush_denormal(bool(had))
    n = 4099
    want = ordered_sum([i[world.rank * n : (world.rank + 1) * n] for i in inputs])
    assert_same_bits(got, want, "sum of subnormals")


@pytest.mark.ranks(3, 4)
@pytest.mark.proves("SUM-3")
@pytest.mark.gpu
def test_one_rounding_at_the_end_and_not_one_an_addition(world, mode):
    # 256 + 1 + 1 (+ 0): rounded to bfloat16 after each addition it would stay 256.
    columns = [0x4380, ONE, ONE, 0][: world.world_size]
    all_equal(reduce_columns(world, world.communicator(mode), columns), 0x4381, "256 + 1 + 1")


@pytest.mark.ranks(3, 4)
@pytest.mark.proves("SUM-4")
@pytest.mark.gpu
def test_the_order_is_rank_order(world, mode):
    big, minus_big = 0x7F00, 0xFF00
    comm = world.communicator(mode)
    rest = [0x8000] * (world.world_size - 3)
    all_equal(reduce_columns(world, comm, [big, minus_big, ONE, *rest]), ONE, "big - big + 1")
    all_equal(reduce_columns(world, comm, [big, ONE, minus_big, *rest]), 0, "big + 1 - big")
    all_equal(reduce_columns(world, comm, [ONE, big, minus_big, *rest]), 0, "1 + big - big")


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.proves("SUM-6")
@pytest.mark.gpu
def test_a_fused_multiply_add_would_show(world, mode):
    # x·f is rounded to float32 before it is added: 1 + 2^-23 squared has bits beyond float32 that an FMA would keep.
    comm = world.communicator(mode)
    one_and_a_bit, factor = 0x3F800001, 1 + 2.0**-23
    minus = np.float32(-(np.float32(1 + 2.0**-23) * np.float32(1 + 2.0**-23)))
    scaled_back = (minus / np.float32(factor)).view(np.uint32)
    columns = [one_and_a_bit, int(scaled_back)] + [0] * (world.world_size - 2)
    inputs = [np.full(5 * world.world_size, c, np.uint32) for c in columns]
    got = reduce_inputs(world, comm, inputs, PremulSum(factor))
    assert_same_bits(got, ordered_sum([i[:5] for i in inputs], "premul_sum", factor), "premultiplied sum")


@pytest.mark.proves("SUM-11")
def test_premul_sum_by_a_half_is_not_zero(world, mode):
    columns = [0x3F80, 0x4000, 0x4040, 0x4080][: world.world_size]
    got = reduce_columns(world, world.communicator(mode), columns, PremulSum(0.5))
    total = sum(0.5 * (r + 1) for r in range(world.world_size))
    all_equal(got, int(patterns_of(torch.tensor([total], dtype=torch.bfloat16))[0]), "half of 1 + 2 + …")


@pytest.mark.proves("SUM-11")
def test_avg_is_the_mean_and_not_the_sum(world, mode):
    got = reduce_columns(world, world.communicator(mode), [0x40A0] * world.world_size, dist.ReduceOp.AVG)
    all_equal(got, 0x40A0, "mean of fives")


@pytest.mark.parametrize("op", ["sum", "avg", "premul_sum"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.proves("SUM-12")
@pytest.mark.gpu
def test_the_bits_are_the_same_whichever_way_the_words_went(world, op, dtype):
    torch_op = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "premul_sum": PremulSum(1 / 3)}[op]
    n = 9001
    inputs = inputs_of_all("reduce_scatter_tensor", "heavy_tail", n, world.world_size, dtype)
    want = ordered_sum([i[world.rank * n : (world.rank + 1) * n] for i in inputs], op, 1 / 3)
    for mode in world.subject.capabilities.modes:
        assert_same_bits(reduce_inputs(world, world.communicator(mode), inputs, torch_op), want, f"{op} in {mode}")


@pytest.mark.proves("SUM-9")
def test_a_sum_does_not_depend_on_what_else_is_in_the_tensor(world):
    comm = world.communicator()
    n = 8192 + 5
    pieces = [[patterns("gaussian", n, rank, seed) for rank in range(world.world_size)] for seed in range(2)]
    whole = [
        np.concatenate([np.tile(pieces[0][rank], 1), pieces[1][rank]] * world.world_size)
        for rank in range(world.world_size)
    ]
    together = reduce_inputs(world, comm, whole)
    for k, piece in enumerate(pieces):
        alone = reduce_inputs(world, comm, [np.tile(p, world.world_size) for p in piece])
        assert_same_bits(together[k * n : (k + 1) * n], alone, f"piece {k} summed alone")


@pytest.mark.proves("SAME-4")
def test_every_run_gives_the_same_bits(world, mode):
    comm = world.communicator(mode)
    inputs = inputs_of_all("reduce_scatter_tensor", "two_gaussians", 5003, world.world_size, "bfloat16")
    first = reduce_inputs(world, comm, inputs)
    for _ in range(3):
        assert_same_bits(reduce_inputs(world, comm, inputs), first, "the same call again")
