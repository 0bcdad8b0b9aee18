"""The digest of a frame (FORMAT.md 6): the changes that simpler formulas miss. It stands at byte 24 of the header."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from conformance.oracle import patterns_of, tensor_of
from conformance.strategies import BLOCK_WORDS, GAUSSIAN_EXPONENTS, patterns, rng_of

UNITS = BLOCK_WORDS // 2


def digest(codec, words: np.ndarray) -> int:
    dtype = torch.bfloat16 if words.itemsize == 2 else torch.float32
    frame = patterns_of(codec.encode(tensor_of(words, dtype), GAUSSIAN_EXPONENTS))
    return int.from_bytes(frame[24:32].tobytes(), "little")


@pytest.mark.proves("DIGEST-1")
def test_a_swap_of_two_blocks_of_equal_sums_is_seen(codec):
    a, b = patterns("gaussian", BLOCK_WORDS, 0), patterns("gaussian", BLOCK_WORDS, 1)
    # Weights 2i + 1 over the frame: make the plain sums of both blocks equal, in one word that has room for it.
    b[0] = 0
    for i in range(1, 64):
        gap = int(a.astype(np.int64).sum() - b.astype(np.int64).sum())
        b[i] = min(max(int(b[i]) + gap, 0), 0xFFFF)
    assert a.astype(np.int64).sum() == b.astype(np.int64).sum()
    assert digest(codec, np.concatenate([a, b])) != digest(codec, np.concatenate([b, a]))


@pytest.mark.proves("DIGEST-1")
def test_rows_permuted_by_whole_blocks_are_seen(codec):
    rows = [patterns("gaussian", BLOCK_WORDS, r) for r in range(4)]
    seen = {digest(codec, np.concatenate(np.roll(rows, k, axis=0))) for k in range(4)}
    assert len(seen) == 4


@pytest.mark.proves("DIGEST-1")
def test_two_rows_with_one_equal_word_swapped_are_seen(codec):
    a, b = np.zeros(BLOCK_WORDS, np.uint16), np.zeros(BLOCK_WORDS, np.uint16)
    a[5], b[4000] = 0x3F80, 0x3F80
    assert digest(codec, np.concatenate([a, b])) != digest(codec, np.concatenate([b, a]))
    assert digest(codec, a) != digest(codec, b)


@pytest.mark.proves("DIGEST-2")
def test_three_bit_flips_that_cancel_under_linear_weights_are_seen(codec):
    words = patterns("gaussian", BLOCK_WORDS)
    words[[0, 2, 4]] = 0x3F00, 0x3F02, 0x3F00
    before = digest(codec, words)
    # With weights 2i + 1 on units 0, 1, 2 (1, 3, 5): +1·1 − 2·3 + 1·5 = 0.
    words[[0, 2, 4]] = 0x3F01, 0x3F00, 0x3F01
    assert digest(codec, words) != before


@pytest.mark.proves("DIGEST-3")
def test_no_two_units_of_a_block_have_the_same_weight(codec):
    # One bit in a block of zeros: equal weights would give equal digests. Neighbours, and pairs far apart.
    seen: dict[int, int] = {}
    for k in [*range(0, UNITS, 7), *range(64)]:
        words = np.zeros(BLOCK_WORDS, np.uint16)
        words[2 * k] = 1
        other = seen.setdefault(digest(codec, words), k)
        assert other == k, f"units {other} and {k} weigh the same"


@pytest.mark.proves("DIGEST-4")
def test_zeros_do_not_give_zero(codec):
    assert all(digest(codec, np.zeros(n, np.uint16)) for n in (0, 1, 8, BLOCK_WORDS, 3 * BLOCK_WORDS))


@pytest.mark.proves("DIGEST-4")
def test_a_word_and_the_word_with_a_zero_behind_it_differ(codec):
    assert digest(codec, np.array([5], np.uint16)) != digest(codec, np.array([5, 0], np.uint16))
    zeros = [digest(codec, np.zeros(n, np.uint16)) for n in range(1, 40)]
    assert all(a != b for a, b in pairwise(zeros))
    assert len(set(zeros)) == len(zeros)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.proves("DIGEST-3")
def test_two_unequal_units_of_a_block_swapped_are_seen(codec, dtype):
    words = patterns("gaussian", BLOCK_WORDS, dtype=dtype)
    before = digest(codec, words)
    rng = rng_of("swap", dtype)
    step = 2 if dtype == "bfloat16" else 1
    for _ in range(40):
        i, j = (rng.permutation(BLOCK_WORDS // step)[:2] * step).tolist()
        swapped = words.copy()
        swapped[i : i + step], swapped[j : j + step] = words[j : j + step], words[i : i + step]
        assert (digest(codec, swapped) != before) == bool((swapped != words).any())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.proves("DIGEST-2")
def test_every_flipped_bit_of_a_unit_is_seen(codec, dtype):
    words = patterns("gaussian", 100, dtype=dtype)
    before = digest(codec, words)
    for bit in range(8 * words.itemsize):
        for i in (0, 1, 50, 99):
            changed = words.copy()
            changed[i] ^= words.dtype.type(1 << bit)
            assert digest(codec, changed) != before, f"bit {bit} of element {i}"


@pytest.mark.proves("DIGEST-4")
def test_the_low_halves_of_float32_count(codec):
    words = patterns("widened:gaussian", BLOCK_WORDS + 9, dtype="float32")
    changed = words.copy()
    changed[BLOCK_WORDS + 8] |= 1
    assert digest(codec, changed) != digest(codec, words)


@pytest.mark.proves("DIGEST-4")
def test_the_dtype_counts(codec):
    narrow = patterns("gaussian", 64)
    wide = narrow.astype(np.uint32) << 16
    assert digest(codec, narrow) != digest(codec, wide)
