"""Inputs: deterministic patterns that say which rank and index they come from, and Hypothesis strategies for bits.

Numbers are never drawn, only patterns: a drawn float can never be a NaN with a payload. bf16 is uint16, float32 uint32.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from conformance.in_step import in_step as in_step

BLOCK_WORDS = 8192
STORED_OVER_ESCAPES = 5120
"""Of a full block: one more escape than this, and it is stored (FORMAT.md 4.4)."""

SIGMA = 0.02
GAUSSIAN_EXPONENTS = (116, 117, 118, 119, 120, 121, 122)
"""The Gaussian codebook of sigma 0.02 (FORMAT.md 7.2)."""

ESCAPE_KINDS = (
    "escapes_none",
    "escapes_one_first",
    "escapes_one_last",
    "escapes_block_edge",
    "escapes_at_stored_rule",
    "escapes_over_stored_rule",
    "escapes_all",
)
KINDS = (
    "gaussian",
    "all_patterns",
    "zeros",
    "one_exponent",
    "nan_payloads",
    "heavy_tail",
    "two_gaussians",
    "subnormals",
    "indexed",
    *ESCAPE_KINDS,
)

_KEPT_WORDS = 1 << 15


def sizes() -> tuple[int, ...]:
    """Word counts at which codecs break: around bytes, warps and blocks, and primes."""
    return (0, 1, 7, 8, 9, 31, 32, 33, 127, 1009, BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 1, 3 * BLOCK_WORDS + 17)


def rng_of(*key: object) -> np.random.Generator:
    """A generator that depends on the key alone: the same on every machine, in every process."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def patterns(
    kind: str,
    n: int,
    rank: int = 0,
    seed: int = 0,
    *,
    dtype: str = "bfloat16",
    codebook: Sequence[int] = GAUSSIAN_EXPONENTS,
) -> np.ndarray:
    """n patterns of a kind; different for every rank and seed.

    Args:
        kind: one of KINDS. The escapes_* kinds are relative to `codebook`, and hold for every full block.
        dtype: "bfloat16" gives uint16; "float32" gives uint32 whose top halves are of the kind and whose low halves
            are random, except for "widened:KIND": low halves zero.
        codebook: the coded exponents, for escapes_* kinds.

    Returns:
        [n] uint16 or uint32.
    """
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"patterns: dtype must be bfloat16 or float32, got {dtype!r}")
    draw = _drawn if n <= _KEPT_WORDS else _drawn.__wrapped__
    return draw(kind, n, rank, seed, dtype, tuple(codebook)).copy()


@functools.lru_cache(maxsize=512)
def _drawn(kind: str, n: int, rank: int, seed: int, dtype: str, codebook: tuple[int, ...]) -> np.ndarray:
    """What `patterns` gives a copy of: each configuration of a test asks for the same again, on every rank for all."""
    kind, widened = kind.removeprefix("widened:"), kind.startswith("widened:")
    rng = rng_of(kind, n, rank, seed)
    words = _KINDS[kind](n, rank, rng, codebook).astype(np.uint16)
    if dtype == "bfloat16":
        return words
    low = np.zeros(n, np.uint32) if widened else rng.integers(0, 1 << 16, n, dtype=np.uint32)
    return (words.astype(np.uint32) << np.uint32(16)) | low


def words_of(values: np.ndarray) -> np.ndarray:
    """bf16 patterns of finite float64 values, rounded to nearest even."""
    p = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((p + 0x7FFF + ((p >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)


def with_exponent(exponents: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Words of these exponents with random sign and mantissa."""
    rest = rng.integers(0, 256, exponents.size, dtype=np.uint16)
    sign = (rest & np.uint16(0x80)) << np.uint16(8)
    return np.asarray(sign | (exponents.astype(np.uint16) << np.uint16(7)) | (rest & np.uint16(0x7F)))


def _gaussian(n: int, rank: int, rng: np.random.Generator, codebook: tuple[int, ...]) -> np.ndarray:
    return words_of(rng.normal(0.0, SIGMA, n))


def _all_patterns(n: int, rank: int, rng: np.random.Generator, codebook: tuple[int, ...]) -> np.ndarray:
    """Every pattern as often as n allows, in an order of the rank's own."""
    return rng.permutation(np.arange(n, dtype=np.int64) % (1 << 16))


def _zeros(n: int, rank: int, rng: np.random.Generator, codebook: tuple[int, ...]) -> np.ndarray:
    """+0 and −0."""
    return rng.integers(0, 2, n) << 15


def _one_exponent(n: int, rank: int, rng: np.random.Generator, codebook: tuple[int, ...]) -> np.ndarray:
    return with_exponent(np.full(n, 100 + rank % 8), rng)


def _nan_payloads(n: int, rank: int, rng: np.random.Generator, codebook: tuple[int, ...]) -> np.ndarray:
    """All 254 NaN patterns in turn, and infinities between them."""
    turn = (np.arange(n, dtype=np.int64) + rank) % 256
    return 0x7F80 | (turn & 0x7F) | ((turn >> 7) << 15)


def _heavy_tail(n: int, rank: int, rng: np.random.Generator, codebook: tuple[int, ...]) -> np.ndarray:
    """Student's t with 2 degrees of freedom: no variance."""
    return words_of(np.clip(SIGMA * rng.standard_t(2.0, n), -1e30, 1e30))


def _two_gaussians(n: int, rank: int, rng: np.random.Generator, codebook: tuple[int, ...]) -> np.ndarray:
    return words_of(rng.normal(0.0, 1.0, n) * np.where(rng.random(n) < 0.5, SIGMA, SIGMA * 2.0**12))


def _subnormals(n: int, rank: int, rng: np.random.Generator, codebook: tuple[int, ...]) -> np.ndarray:
    """Exponents 0 and 1: sums of these are where flush-to-zero shows."""
    return with_exponent(rng.integers(0, 2, n), rng)


def _indexed(n: int, rank: int, rng: np.random.Generator, codebook: tuple[int, ...]) -> np.ndarray:
    """Element i of rank r is a finite number that no near element and no other of 8 ranks has; sums stay finite."""
    i = np.arange(n, dtype=np.int64)
    return 0x3800 | ((i * 8 + rank % 8) & 0x07FF) | (((i >> 8) & 1) << 15)


def _escapes(where: Callable[[int], np.ndarray]) -> Callable[..., np.ndarray]:
    """Words of the codebook, with escapes at where(n)."""

    def make(n: int, rank: int, rng: np.random.Generator, codebook: tuple[int, ...]) -> np.ndarray:
        escaping = np.zeros(n, bool)
        if n:
            escaping[where(n)] = True
        others = np.array([e for e in range(256) if e not in codebook])
        exponents = np.where(escaping, rng.choice(others, n), rng.choice(np.array(codebook), n))
        return with_exponent(exponents, rng)

    return make


def _in_every_block(first: int) -> Callable[[int], np.ndarray]:
    """The first words of every block."""
    return lambda n: np.flatnonzero(np.arange(n) % BLOCK_WORDS < first)


_KINDS: dict[str, Callable[..., np.ndarray]] = {
    "gaussian": _gaussian,
    "all_patterns": _all_patterns,
    "zeros": _zeros,
    "one_exponent": _one_exponent,
    "nan_payloads": _nan_payloads,
    "heavy_tail": _heavy_tail,
    "two_gaussians": _two_gaussians,
    "subnormals": _subnormals,
    "indexed": _indexed,
    "escapes_none": _escapes(lambda n: np.array([], np.int64)),
    "escapes_one_first": _escapes(lambda n: np.array([0])),
    "escapes_one_last": _escapes(lambda n: np.array([n - 1])),
    "escapes_block_edge": _escapes(lambda n: np.flatnonzero(np.isin(np.arange(n) % BLOCK_WORDS, (0, BLOCK_WORDS - 1)))),
    "escapes_at_stored_rule": _escapes(_in_every_block(STORED_OVER_ESCAPES)),
    "escapes_over_stored_rule": _escapes(_in_every_block(STORED_OVER_ESCAPES + 1)),
    "escapes_all": _escapes(lambda n: np.arange(n)),
}


# ---------------------------------------------------------------------------------------------------- Hypothesis

EDGE_WORDS = (0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF)


def words(max_size: int = 300, min_size: int = 0) -> st.SearchStrategy[np.ndarray]:
    """Arrays of bf16 patterns, edge cases often."""
    element = st.one_of(st.integers(0, 0xFFFF), st.sampled_from(EDGE_WORDS))  # shrinks to a number
    return hnp.arrays(np.uint16, st.integers(min_size, max_size), elements=element)


def codebooks() -> st.SearchStrategy[tuple[int, ...]]:
    """Seven distinct exponents, ascending."""
    return st.lists(st.integers(0, 255), min_size=7, max_size=7, unique=True).map(lambda e: tuple(sorted(e)))
