"""The oracle is right, and its comparisons see what they are for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conformance.oracle import (
    NAN32,
    assert_same_bits,
    check_guards,
    misaligned,
    ordered_sum,
    patterns_of,
    poisoned,
    round16,
    tensor_of,
    to_float64,
    to_pattern32,
    untouched,
)
from conformance.strategies import ESCAPE_KINDS, GAUSSIAN_EXPONENTS, KINDS, patterns, rng_of, sizes
from conformance.subject import Capabilities, UnknownCapability

pytestmark = pytest.mark.outer

N = 200_000


def random32(*key: object) -> np.ndarray:
    """float32 patterns: any bits, and many subnormals."""
    p = rng_of("oracle", *key).integers(0, 1 << 32, N, dtype=np.uint32)
    p[: N // 4] &= np.uint32(0x80FFFFFF)
    return p


def by_numpy(values: np.ndarray) -> np.ndarray:
    """float32 values as patterns with the one NaN."""
    return np.where(np.isnan(values), np.uint32(NAN32), values.view(np.uint32))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ordered_sum_equals_numpys_float32_in_rank_order():
    terms = [random32(r) for r in range(5)]
    acc = terms[0].view(np.float32)
    for t in terms[1:]:
        acc = acc + t.view(np.float32)
    assert_same_bits(ordered_sum(terms), by_numpy(acc), "sum of 5")
    assert_same_bits(ordered_sum(terms, "avg"), by_numpy(acc / np.float32(5)), "mean of 5")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("factor", [0.5, 1 / 3, 1e-20, 3e38, -0.0])
def test_premul_rounds_before_the_sum(factor):
    terms = [random32("premul", r) for r in range(3)]
    f = np.float32(factor)
    acc = terms[0].view(np.float32) * f
    for t in terms[1:]:
        acc = acc + t.view(np.float32) * f
    assert_same_bits(ordered_sum(terms, "premul_sum", factor), by_numpy(acc), f"premul {factor}")


def test_flush_to_zero_does_not_reach_the_oracle():
    terms = [patterns("subnormals", 4096, r) for r in range(3)]
    before = ordered_sum(terms)
    assert torch.set_flush_denormal(True), "this machine cannot flush subnormals"
    try:
        flushed = torch.tensor([2.0**-130]) + torch.tensor([2.0**-130])
        assert flushed.item() == 0.0, "flushing is not in force, this test shows nothing"
        during = ordered_sum(terms)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(during, before, "the ordered sum of subnormals")


def test_signed_zeros_and_nans_have_one_answer():
    negative_zero = np.array([0x8000], np.uint16)
    assert_same_bits(ordered_sum([negative_zero]), negative_zero, "−0 alone")
    assert_same_bits(ordered_sum([negative_zero] * 3), negative_zero, "three of −0")
    for n in (1, 2):
        payload = [np.array([0xFF81], np.uint16)] * n
        assert_same_bits(ordered_sum(payload), np.array([0x7FC0], np.uint16), f"NaN at {n} ranks")
        payload32 = [np.array([0xFFC00001], np.uint32)] * n
        assert_same_bits(ordered_sum(payload32), np.array([NAN32], np.uint32), f"float32 NaN at {n} ranks")
    infinities = [np.array([0x7F80], np.uint16), np.array([0xFF80], np.uint16)]
    assert_same_bits(ordered_sum(infinities), np.array([0x7FC0], np.uint16), "∞ − ∞")


def test_sum_is_rounded_once():
    """1 + 2^-8 + 2^-8: rounded to bf16 after each step it stays 1; once at the end it is 1 + 2^-7."""
    one, small = np.array([0x3F80], np.uint16), np.array([0x3B80], np.uint16)
    assert_same_bits(ordered_sum([one, small, small]), np.array([0x3F81], np.uint16), "1 + 2^-8 + 2^-8")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_conversions_agree_with_numpy_and_torch():
    p = random32("convert")
    values = p.view(np.float32)
    wide = values.astype(np.float64)
    number = ~np.isnan(values)
    assert_same_bits(to_float64(p).view(np.uint64)[number], wide.view(np.uint64)[number], "float32 to float64")
    bits = rng_of("float64").integers(0, 1 << 64, N, dtype=np.uint64)
    bits = (bits & ~np.uint64(0x7FF << 52)) | (np.uint64(860) + bits % np.uint64(300) << np.uint64(52))
    doubles = bits.view(np.float64)
    assert_same_bits(to_pattern32(doubles), by_numpy(doubles.astype(np.float32)), "float64 to float32")
    finite = p[np.isfinite(values)]
    by_torch = patterns_of(tensor_of(finite, torch.float32).to(torch.bfloat16))
    assert_same_bits(round16(finite), by_torch, "float32 to bf16")


def test_comparison_tells_zeros_and_nans_apart_and_says_where():
    want = tensor_of(np.array([0, 0x7FC0, 5], np.uint16), torch.bfloat16)
    assert_same_bits(want.clone(), want, "equal")
    got = tensor_of(np.array([0x8000, 0x7FC1, 5], np.uint16), torch.bfloat16)
    with pytest.raises(AssertionError, match=r"2 of 3 elements differ, the first at 0.*0x0000 got 0x8000.*0x7FC1"):
        assert_same_bits(got, want, "two wrong")
    with pytest.raises(AssertionError, match="shape"):
        assert_same_bits(want[:2], want, "shorter")
    with pytest.raises(AssertionError, match="element bits"):
        assert_same_bits(want.to(torch.float32), want, "wider")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_guards_see_one_byte_on_either_side(dtype):
    size = dtype.itemsize
    for at in (-1, 5 * size):
        p = poisoned((5,), dtype)
        assert p.tensor.storage_offset() % 16 == 1
        check_guards(p, "untouched")
        untouched(p, "untouched")
        p.storage.view(torch.uint8)[p.first * size + at] = 0
        with pytest.raises(AssertionError, match=r"1 bytes (before|behind)"):
            check_guards(p, "one byte")
    p = poisoned((0, 3), dtype)
    assert p.tensor.shape == (0, 3)
    p = poisoned(4, dtype)
    p.tensor.fill_(1)
    check_guards(p, "output written")
    with pytest.raises(AssertionError, match="none should be"):
        untouched(p, "output written")


def test_misaligned_copies_bits():
    source = tensor_of(np.arange(1 << 16, dtype=np.uint16), torch.bfloat16)
    for offset in (1, 2, 7):
        copy = misaligned(source, offset)
        assert copy.storage_offset() % 16 == offset
        assert_same_bits(copy, source, "misaligned")


@pytest.mark.parametrize("kind", KINDS)
def test_patterns_are_the_same_each_time_and_others_on_each_rank(kind):
    for n in sizes():
        for dtype, unsigned in (("bfloat16", np.uint16), ("float32", np.uint32)):
            p = patterns(kind, n, 1, dtype=dtype)
            assert p.dtype == unsigned
            assert p.shape == (n,)
            assert_same_bits(patterns(kind, n, 1, dtype=dtype), p, kind)
    assert (patterns(kind, 1009, 0) != patterns(kind, 1009, 1)).mean() > 0.3
    wide = patterns(f"widened:{kind}", 1009, dtype="float32")
    assert not (wide & np.uint32(0xFFFF)).any()


def test_escape_kinds_have_the_escapes_they_name():
    n = 2 * 8192
    counts = []
    for kind in ESCAPE_KINDS:
        escapes = ~np.isin((patterns(kind, n) >> 7) & 0xFF, GAUSSIAN_EXPONENTS)
        counts.append(int(escapes[:8192].sum()))
    assert counts == [0, 1, 0, 2, 5120, 5121, 8192]


def test_all_patterns_and_nan_payloads_are_complete():
    assert len(np.unique(patterns("all_patterns", 1 << 16))) == 1 << 16
    nans = patterns("nan_payloads", 256)
    assert len(np.unique(nans)) == 256
    assert ((nans & 0x7F80) == 0x7F80).all()


def test_unknown_capability_is_an_error_and_not_a_no():
    c = Capabilities(operations=frozenset({"barrier"}), dtypes=frozenset({"bfloat16"}))
    assert c.missing(dtypes="bfloat16") == ""
    assert "ordered_sum" in c.missing("ordered_sum")
    assert "float32" in c.missing(dtypes=("bfloat16", "float32"))
    for flags, members in ((("odered_sum",), {}), (("dtypes",), {}), ((), {"dtype": "bfloat16"}), ((), {"codec": "x"})):
        with pytest.raises(UnknownCapability):
            c.missing(*flags, **members)
