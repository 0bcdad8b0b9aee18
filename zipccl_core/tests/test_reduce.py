"""The sum, against exact arithmetic with Python's fractions: rank order, float32 steps, one rounding."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from zipccl_core.collectives.reduce import ReduceSpec, ordered_sum, reduce_spec
from zipccl_core.errors import InvalidArgument

SUM = reduce_spec(dist.ReduceOp.SUM)
AVG = reduce_spec(dist.ReduceOp.AVG)


def summed(rows: list[list[int]], spec: ReduceSpec = SUM, dtype: type = np.uint16) -> list[int]:
    """ordered_sum of patterns, one row a rank, into an output that starts as something else."""
    out = np.full(len(rows[0]), 0xDEAD, dtype)
    ordered_sum([np.array(row, dtype) for row in rows], spec, out)
    return [int(x) for x in out]


def value(word: int) -> Fraction:
    return Fraction(float(torch.tensor([word], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()))


def rounded(x: Fraction, mantissa_bits: int, least_exponent: int) -> Fraction:
    """x to nearest, ties to even, with mantissa_bits after the leading one; exact."""
    if x == 0:
        return x
    exponent = 0
    magnitude = abs(x)
    while magnitude >= 2:
        magnitude, exponent = magnitude / 2, exponent + 1
    while magnitude < 1:
        magnitude, exponent = magnitude * 2, exponent - 1
    quantum = Fraction(2) ** (max(exponent, least_exponent) - mantissa_bits)
    return round(x / quantum) * quantum


finite_words = st.integers(0, 0xFFFF).filter(lambda w: 1 <= ((w >> 7) & 0xFF) <= 200)


@settings(max_examples=300, deadline=None)
@given(st.lists(finite_words, min_size=1, max_size=5))
def test_every_step_is_rounded_to_float32_and_the_end_to_bfloat16(column: list[int]) -> None:
    acc = value(column[0])
    for word in column[1:]:
        acc = rounded(acc + value(word), 23, -126)
    wanted = rounded(acc, 7, -126)
    (got,) = summed([[word] for word in column])
    assert value(got) == wanted


def test_minus_zero_of_all_ranks_stays_minus_zero() -> None:
    assert summed([[0x8000], [0x8000], [0x8000]]) == [0x8000]
    assert summed([[0x8000]]) == [0x8000]
    assert summed([[0x8000], [0x0000]]) == [0x0000]


def test_subnormals_are_not_flushed() -> None:
    assert summed([[0x0001], [0x0001], [0x0003]]) == [0x0005]
    assert summed([[1], [2]], dtype=np.uint32) == [3]


def test_one_rounding_at_the_end_and_not_one_an_addition() -> None:
    # 256 + 1 + 1: in bfloat16 steps 256 stays 256 twice; in float32 it is 258, which bfloat16 holds.
    assert summed([[0x4380], [0x3F80], [0x3F80]]) == [0x4381]


def test_rank_order_is_kept() -> None:
    big, minus_big, one = 0x7F00, 0xFF00, 0x3F80
    assert summed([[big], [minus_big], [one]]) == [one]
    assert summed([[big], [one], [minus_big]]) == [0]


@pytest.mark.parametrize("nan", [0x7F81, 0x7FFF, 0xFF81, 0xFFC0])
def test_every_nan_becomes_one_pattern(nan: int) -> None:
    assert summed([[nan]]) == [0x7FC0]
    assert summed([[nan], [0x3F80]]) == [0x7FC0]
    assert summed([[0x7F80], [0xFF80]]) == [0x7FC0]
    assert summed([[nan << 16], [0]], dtype=np.uint32) == [0x7FC00000]


def test_overflow_is_infinity_of_the_right_sign() -> None:
    assert summed([[0x7F7F], [0x7F7F]]) == [0x7F80]
    assert summed([[0xFF7F], [0xFF7F]]) == [0xFF80]


def test_avg_divides_the_float32_sum() -> None:
    # 1 + 2 + 2 = 5, and 5/3 rounds in float32 before bfloat16.
    wanted = np.float32(5) / np.float32(3)
    (got,) = summed([[0x3F80], [0x4000], [0x4000]], AVG)
    assert value(got) == rounded(Fraction(float(wanted)), 7, -126)


def test_premul_sum_scales_each_term_before_the_sum() -> None:
    spec = reduce_spec(dist._make_nccl_premul_sum(0.5))
    assert spec.name == "premul_sum"
    assert spec.factor_bits == 0x3F000000
    assert summed([[0x3F80] * 8, [0x4000] * 8], spec) == [0x3FC0] * 8  # 1.5
    # Largest finite twice: the halves add up to it again; the sum before scaling would be infinite.
    assert summed([[0x7F7F], [0x7F7F]], spec) == [0x7F7F]


def test_out_may_be_one_of_the_terms() -> None:
    terms = [np.array([0x3F80, 0x4000], np.uint16), np.array([0x3F80, 0x3F80], np.uint16)]
    ordered_sum(terms, SUM, terms[1])
    assert [int(x) for x in terms[1]] == [0x4000, 0x4040]


def test_chunks_do_not_show() -> None:
    rng = np.random.default_rng(5)
    rows = [rng.integers(0, 1 << 16, 100_003).astype(np.uint16) for _ in range(3)]
    whole = np.empty(100_003, np.uint16)
    ordered_sum(rows, SUM, whole)
    pieces = np.empty(100_003, np.uint16)
    for begin in range(0, 100_003, 777):
        ordered_sum([row[begin : begin + 777] for row in rows], SUM, pieces[begin : begin + 777])
    assert np.array_equal(whole, pieces)


@pytest.mark.parametrize("op", ["sum", None, 3, object()])
def test_what_is_no_reduce_op_is_refused(op: object) -> None:
    with pytest.raises(InvalidArgument, match="ReduceOp"):
        reduce_spec(op)
