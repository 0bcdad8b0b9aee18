"""Codebooks: which exponents are coded (FORMAT.md 7). Pure numbers, exact on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .errors import InvalidArgument
from .frame import CODEBOOK_EXPONENTS

# 2^0.717 as the nearest double, and the mean square that the histogram of such a Gaussian gives, in 1024ths
# (FORMAT.md 7.2, 7.5).
UPPER_RUN_FROM = float.fromhex("0x1.a4cd7adb52cf5p+0")
UPPER_RUN_FROM_SQUARED_1024 = 3494
LAST_RUN_START = 255 - CODEBOOK_EXPONENTS
SAMPLE_LOG2_WORDS = 16
HISTOGRAM_DEPTH = 15


def sample_stride(n: int) -> int:
    """Distance in words between sampled words of n (FORMAT.md 7.3); odd, lest one column of a matrix be all of it."""
    return (n >> SAMPLE_LOG2_WORDS) | 1


@dataclass(frozen=True)
class Codebook:
    """The 7 exponents that are coded, ascending; every other one escapes.

    Make one with `gaussian`, `fitted`, `gaussian_of_histogram` or `given`.

    Attributes:
        exponents: 7 distinct biased exponents, 0 to 255, ascending.
    """

    exponents: tuple[int, ...]

    def __post_init__(self) -> None:
        e = self.exponents
        if len(e) != CODEBOOK_EXPONENTS or list(e) != sorted(set(e)) or e[0] < 0 or e[-1] > 255:
            raise InvalidArgument(
                f"Codebook: wanted {CODEBOOK_EXPONENTS} distinct exponents from 0 to 255, got {list(e)}"
            )

    @classmethod
    def given(cls, exponents: Iterable[int]) -> Codebook:
        """A codebook of any 7 distinct exponents from 0 to 255, in any order (FORMAT.md 7.1).

        Raises:
            InvalidArgument: not 7, not distinct, or out of range.
        """
        return cls(tuple(sorted(int(e) for e in exponents)))

    @classmethod
    def gaussian(cls, sigma: float) -> Codebook:
        """The best run of 7 exponents for words of N(0, sigma²) (FORMAT.md 7.2; derived in docs/DESIGN.md).

        Codes 97.0–97.9% of such words. When in doubt, over-estimate sigma.

        Args:
            sigma: standard deviation; positive and finite.

        Raises:
            InvalidArgument: sigma is zero, negative, NaN or infinite.
        """
        sigma = float(sigma)
        if not (0 < sigma < math.inf):
            raise InvalidArgument(f"Codebook.gaussian: sigma must be positive and finite, got {sigma}")
        fraction, exponent = math.frexp(sigma)  # fraction in [0.5, 1)
        return cls._run(exponent - 1 + 122 + (2 * fraction >= UPPER_RUN_FROM))

    @classmethod
    def fitted(cls, histogram: Sequence[int]) -> Codebook:
        """The 7 most frequent exponents of 0 … 254, ties to the smaller (FORMAT.md 7.4).

        Args:
            histogram: 256 counts, one an exponent; see `zipccl_core.codec.exponent_histogram`.

        Raises:
            InvalidArgument: not 256 counts, or a negative one.
        """
        h = _checked(histogram)
        return cls(tuple(sorted(sorted(range(255), key=lambda e: (-h[e], e))[:CODEBOOK_EXPONENTS])))

    @classmethod
    def gaussian_of_histogram(cls, histogram: Sequence[int]) -> Codebook:
        """The Gaussian run for the standard deviation of a histogram, in integers (FORMAT.md 7.5).

        Zeros, infinities and NaNs do not count. Without any other word it is the run from exponent 0.

        Args:
            histogram: 256 counts, one an exponent; at most 2**17 in all.

        Raises:
            InvalidArgument: not 256 counts, or a negative one.
        """
        h = _checked(histogram)
        n = sum(h[1:255])
        if n == 0:
            return cls._run(0)
        top = max(e for e in range(1, 255) if h[e])
        s = sum(h[top - d] * 4 ** (HISTOGRAM_DEPTH - d) for d in range(min(HISTOGRAM_DEPTH, top - 1) + 1))
        j = 0
        while 3 * n * 4 ** (j + 1) <= 7 * s:
            j += 1
        upper = 7 * s * 1024 >= UPPER_RUN_FROM_SQUARED_1024 * 3 * n * 4**j
        return cls._run(top - 142 + j + 122 + upper)

    @classmethod
    def _run(cls, start: int) -> Codebook:
        start = min(max(int(start), 0), LAST_RUN_START)
        return cls(tuple(range(start, start + CODEBOOK_EXPONENTS)))


def _checked(histogram: Sequence[int]) -> list[int]:
    h = [int(count) for count in histogram]
    if len(h) != 256 or min(h) < 0:
        raise InvalidArgument(f"Codebook: a histogram has 256 counts, none negative; got {len(h)} of them")
    return h
