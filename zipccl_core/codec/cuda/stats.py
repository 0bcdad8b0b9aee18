"""Launches stats.cu: histograms of exponents, and codebooks, that stay on the device."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...codebook import Codebook, sample_stride
from ...errors import InvalidArgument
from .jit import (
    COUNTERS_BYTES,
    STATISTICS_BYTES,
    TABLE_SIGNATURE,
    Job,
    Launch,
    Place,
    Start,
    Table,
    element_bytes_of,
    make_table,
    start,
)

__all__ = ["DeviceCodebook", "DeviceStatistics", "launch_measure", "measure"]

_THREADS = 512
_SAMPLES_A_BLOCK = 512  # one a thread: adding to few counters takes turns
_NAMES = {2: "bfloat16", 4: "float32"}
_HISTOGRAM_AT = 8


@dataclass(frozen=True)
class DeviceCodebook:
    """A codebook that the device holds and that the host has not seen.

    Attributes:
        exponents: [1] int64, cuda: 7 distinct exponents, ascending, from the lowest byte; the highest is 0. Whoever
            makes one otherwise than by `measure` vouches for that: a frame with another one is refused by decoders.
    """

    exponents: Tensor

    def address(self, device: torch.device) -> int:
        """Where it is, for a kernel on `device`; InvalidArgument if it is elsewhere."""
        e = self.exponents
        if e.dtype != torch.int64 or e.numel() != 1 or e.device != device:
            raise InvalidArgument(
                f"DeviceCodebook: exponents must be one int64 on {device}, got {e.numel()} {e.dtype} on {e.device}"
            )
        return e.data_ptr()

    def codebook(self) -> Codebook:
        """The same on the host; waits for the device."""
        return Codebook(tuple(int(self.exponents.item()).to_bytes(8, "little")[:7]))


@dataclass(frozen=True)
class DeviceStatistics:
    """What `measure` found of each tensor, in device memory; ordered on the stream that was current then.

    Attributes:
        rows: [tensors, 264] int64, cuda: fitted codebook, gaussian codebook, sigma (the bits of a float64), words
            sampled, 4 reserved, 256 counts.
    """

    rows: Tensor

    def fitted(self, index: int = 0) -> DeviceCodebook:
        """The 7 most frequent exponents of tensor `index` (FORMAT.md 7.4)."""
        return DeviceCodebook(self.rows[index, 0:1])

    def gaussian(self, index: int = 0) -> DeviceCodebook:
        """The Gaussian run of the histogram of tensor `index` (FORMAT.md 7.5)."""
        return DeviceCodebook(self.rows[index, 1:2])

    def histogram(self, index: int = 0) -> Tensor:
        """[256] int64, cuda: the sample's counts, one an exponent (FORMAT.md 7.3)."""
        return self.rows[index, _HISTOGRAM_AT:]

    def sigma(self, index: int = 0) -> float:
        """Standard deviation of the Gaussian whose histogram has the mean square of this one (FORMAT.md 7.5).

        Within 1% for Gaussian words; 0.0 if nothing finite and not zero is in the sample.

        Waits for the device.
        """
        return float(struct.unpack("<d", struct.pack("<q", int(self.rows[index, 2].item())))[0])


def measure(words: Sequence[Tensor]) -> DeviceStatistics:
    """Count the exponents of each tensor's sample (FORMAT.md 7.3) and fit codebooks: one launch of one kernel.

    Integers only: the same in every run. Ordered after and before work on torch's current stream, from any thread;
    never waits for the device. At most 2**17 words of a tensor are read.

    Args:
        words: each [n] bfloat16, or each [n] float32, cuda, contiguous; n may be 0, and may differ.

    Raises:
        InvalidArgument: wrong dtype, device or layout, or none at all, or over 65535 of them.
    """
    element_bytes = element_bytes_of("measure", words)
    if len(words) > 65535:
        raise InvalidArgument(f"measure: at most 65535 tensors a launch, got {len(words)}")
    device = words[0].device
    with Launch(words[0]) as launch:
        table = make_table([measuring(w) for w in words], device)
        rows = torch.empty((len(words), STATISTICS_BYTES // 8), dtype=torch.int64, device=device)
        launch_measure(launch, table, element_bytes, max(samples_of(w) for w in words), rows.data_ptr())
    return DeviceStatistics(rows)


def measuring(words: Tensor) -> Job:
    """The job of measuring a tensor: no job is about blocks here; n alone counts."""
    return Job(words.data_ptr(), 0, words.numel(), 0, coded=False)


def samples_of(words: Tensor) -> int:
    """How many words of a tensor are in its sample."""
    n = words.numel()
    return -(-n // sample_stride(n))


def launch_measure(place: Place, table: Table, element_bytes: int, most_samples: int, rows: int) -> list[Start]:
    """Launch the kernel on tensors that are known to be right.

    Args:
        table: of `measuring` of each tensor.
        element_bytes: of all tensors.
        most_samples: samples_of the tensor that has most.
        rows: address of STATISTICS_BYTES bytes a tensor: fitted codebook, gaussian codebook, and so on.

    Returns:
        See launch_encode.
    """
    counters = place.zeroed("stats", COUNTERS_BYTES * table.jobs)
    place.begin()
    kernel = place.device.kernel(f"count_exponents_{_NAMES[element_bytes]}_kernel", "stats", f"{TABLE_SIGNATURE}2P")
    grid = (max(1, -(-most_samples // _SAMPLES_A_BLOCK)), table.jobs)
    starts = [kernel.told(grid, _THREADS, table.packed, counters, rows)]
    start(starts, place.stream)
    return starts
