"""Codebooks: optimal for Gaussians, exact functions of integers."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zipccl_core import Codebook
from zipccl_core.codebook import sample_stride
from zipccl_core.codec import exponent_histogram, reference
from zipccl_core.errors import InvalidArgument

HISTOGRAMS = st.lists(st.one_of(st.just(0), st.integers(0, 500)), min_size=256, max_size=256)


def exponent_probabilities(sigma: float) -> np.ndarray:
    """P(exponent = e) for N(0, sigma²) rounded to bf16: what is nearest to 2^k from below has its exponent already."""

    def below(edge: float) -> float:
        return math.erf(edge / sigma / math.sqrt(2))

    edges = [2.0 ** (e - 127) * (1 - 2.0**-9) for e in range(1, 256)]
    cumulated = np.array([0.0, *(below(edge) for edge in edges)])
    return np.append(np.diff(cumulated), 0)


def test_gaussian_is_the_best_run_and_covers_97_percent() -> None:
    coverages = []
    for step in range(256):
        sigma = 2.0 ** (step / 256)
        p = exponent_probabilities(sigma)
        runs = [p[start : start + 7].sum() for start in range(249)]
        mine = p[list(Codebook.gaussian(sigma).exponents)].sum()
        assert mine >= max(runs) - 1e-4, f"sigma 2^{step}/256"  # the best one but for the threshold's rounding
        coverages.append(mine)
    assert min(coverages) >= 0.9697
    assert max(coverages) <= 0.9788
    assert np.mean(coverages) == pytest.approx(0.9755, abs=2e-4)


def test_over_estimating_sigma_costs_less_than_under_estimating() -> None:
    for step in range(16):
        sigma = 2.0 ** (step / 16)
        p = exponent_probabilities(sigma)
        assert p[list(Codebook.gaussian(4 * sigma).exponents)].sum() >= 0.88
        assert p[list(Codebook.gaussian(sigma / 4).exponents)].sum() <= 0.77


@given(st.floats(1, 2, exclude_max=True), st.integers(-1074, 1023))
def test_gaussian_scales_by_powers_of_two(s: float, m: int) -> None:
    first = Codebook.gaussian(s).exponents[0]
    sigma = math.ldexp(s, m)
    if sigma != 0 and math.ldexp(sigma, -m) == s:  # not rounded as a subnormal
        assert Codebook.gaussian(sigma).exponents[0] == min(max(first + m, 0), 248)


def test_gaussian_changes_run_at_its_threshold() -> None:
    threshold = float.fromhex("0x1.a4cd7adb52cf5p+0")
    assert threshold == pytest.approx(2**0.717, rel=1e-15)
    assert Codebook.gaussian(threshold).exponents[0] == 123
    assert Codebook.gaussian(math.nextafter(threshold, 0)).exponents[0] == 122


@pytest.mark.parametrize("sigma", [0.0, -0.0, -1.0, math.inf, -math.inf, math.nan])
def test_gaussian_refuses_what_is_no_standard_deviation(sigma: float) -> None:
    with pytest.raises(InvalidArgument, match="sigma"):
        Codebook.gaussian(sigma)


@given(st.lists(st.integers(0, 255), min_size=7, max_size=7, unique=True))
def test_given_sorts_any_seven_distinct_exponents(exponents: list[int]) -> None:
    assert Codebook.given(exponents).exponents == tuple(sorted(exponents))


@pytest.mark.parametrize(
    "exponents",
    [[], range(6), range(8), [1, 1, 2, 3, 4, 5, 6], [-1, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 256]],
)
def test_given_refuses_wrong_counts_duplicates_and_range(exponents: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="7 distinct"):
        Codebook.given(exponents)


def test_a_codebook_must_be_ascending() -> None:
    with pytest.raises(InvalidArgument):
        Codebook((7, 6, 5, 4, 3, 2, 1))


@given(HISTOGRAMS)
def test_fitted_takes_the_most_frequent_and_of_equals_the_smaller(histogram: list[int]) -> None:
    chosen = Codebook.fitted(histogram).exponents
    assert list(chosen) == sorted(set(chosen))
    for inside in chosen:
        for outside in set(range(255)) - set(chosen):
            assert (histogram[inside], -inside) > (histogram[outside], -outside)
    assert 255 not in chosen


@given(HISTOGRAMS)
def test_gaussian_of_histogram_is_its_formula_in_exact_fractions(histogram: list[int]) -> None:
    chosen = Codebook.gaussian_of_histogram(histogram).exponents
    assert list(chosen) == list(range(chosen[0], chosen[0] + 7))
    n = sum(histogram[1:255])
    if n == 0:
        assert chosen[0] == 0
        return
    top = max(e for e in range(1, 255) if histogram[e])
    # Mean square in units of 4^(top − 127): 7/3 of 4^(e − 127) for each word, 16 binades deep.
    variance = sum(Fraction(7, 3) * histogram[e] / 4 ** (top - e) for e in range(max(1, top - 15), top + 1)) / n
    m = -16
    while Fraction(4) ** (m + 1) <= variance:
        m += 1
    upper = variance / Fraction(4) ** m >= Fraction(3494, 1024)
    assert chosen[0] == min(max(top - 127 + m + 122 + upper, 0), 248)


def test_gaussian_of_histogram_finds_sigma_from_a_sample() -> None:
    generator = torch.Generator().manual_seed(5)
    normals = torch.randn(1 << 17, generator=generator, dtype=torch.float64)
    for step in range(-200, 200):  # none of them next to the threshold, 5.736 / 8
        sigma = 2.0 ** (step / 8)
        words = (normals * sigma).to(torch.bfloat16)
        assert Codebook.gaussian_of_histogram(exponent_histogram(words).tolist()) == Codebook.gaussian(sigma)


def test_gaussian_of_histogram_changes_run_where_gaussian_does() -> None:
    """On the exact histogram of N(0, sigma²), in 2**16 words, not on a sample."""
    for step in range(1, 1000):
        if abs(step - 717) <= 1:
            continue
        sigma = 2.0 ** (step / 1000)
        counts = [round(p * (1 << 16)) for p in exponent_probabilities(sigma)]
        assert Codebook.gaussian_of_histogram(counts) == Codebook.gaussian(sigma), f"sigma 2^{step}/1000"


@pytest.mark.parametrize("histogram", [[], [0] * 255, [0] * 257, [0] * 255 + [-1]])
def test_histograms_of_wrong_length_or_sign_are_refused(histogram: list[int]) -> None:
    for choose in (Codebook.fitted, Codebook.gaussian_of_histogram):
        with pytest.raises(InvalidArgument, match="256 counts"):
            choose(histogram)


def test_sample_strides_are_odd_and_samples_bounded() -> None:
    for n in [0, 1, 65535, 65536, 131071, 131072, 196608, 1 << 20, (1 << 24) + 5, (1 << 31) + 1, (1 << 48) - 1]:
        stride = sample_stride(n)
        assert stride % 2 == 1
        assert -(-n // stride) < 1 << 17


@pytest.mark.parametrize("n", [0, 1, 5, 8192, 65536, 131072, 200_001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_histogram_counts_the_sample_of_the_law(n: int, dtype: torch.dtype) -> None:
    rng = random.Random(n)
    bits = 16 if dtype == torch.bfloat16 else 32
    patterns = [rng.getrandbits(bits) for _ in range(n)]
    array = np.array(patterns, dtype=f"<u{bits // 8}")
    words = torch.from_numpy(array.view(f"<i{bits // 8}")).view(dtype)
    counts = exponent_histogram(words)
    assert counts.dtype == torch.int64
    assert counts.tolist() == reference.histogram(patterns, str(dtype).removeprefix("torch."))
