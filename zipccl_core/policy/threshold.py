"""From which size on coding pays, from a short measurement of both. Pure: times in, bytes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PROBED_BYTES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
MARGIN = 1.03
NEVER_BYTES = 1 << 62


def threshold_bytes(times_us: Mapping[int, Sequence[tuple[float, float]]]) -> int:
    """The least probed size from which on coding is faster by MARGIN; NEVER_BYTES if it is not at the largest.

    A collective takes as long as on its slowest rank, so that is what is compared. Every rank gives the same answer
    to the same times.

    Args:
        times_us: bytes of a message → (uncoded, coded) microseconds of each rank.
    """
    least = NEVER_BYTES
    for n_bytes in sorted(times_us, reverse=True):
        uncoded, coded = (max(column) for column in zip(*times_us[n_bytes], strict=True))
        if uncoded < MARGIN * coded:
            break
        least = n_bytes
    return least
