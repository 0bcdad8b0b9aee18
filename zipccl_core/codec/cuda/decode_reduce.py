"""Launches decode_reduce.cu: the terms of all ranks to their sum, without a decoded copy in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import InvalidArgument
from .decode import ACCUMULATOR_BYTES, COUNTER_BYTES, NAMES, Verdicts, frame_job
from .jit import (
    BLOCK_THREADS,
    TABLE_SIGNATURE,
    VERDICT_BYTES,
    Job,
    Launch,
    Place,
    Start,
    Table,
    element_bytes_of,
    make_table,
    start,
)

__all__ = ["decode_reduce", "launch_decode_reduce"]


def decode_reduce(
    terms: Sequence[Tensor], out: Tensor, *, average: bool = False, factor: float | None = None
) -> Verdicts:
    """Sum the terms of all ranks, in rank order, and write the result once: one launch of one kernel.

    Exactly: acc = term of rank 0; acc = fl32(acc + term); with `factor`, a term is fl32(x · factor); with `average`,
    fl32(acc ÷ ranks) at the end; one rounding to nearest even; every NaN is 0x7FC0 (float32: 0x7FC00000). The bits are
    those of the CPU layer's sum. Frames are checked as by decode_frames, with the same reserve: **until
    Verdicts.check() has said so, the sum may be wrong**; but if the header of a frame says that it is longer than its
    buffer, nothing is written. Ordered after and before work on torch's current stream, from any thread; never waits
    for the device.

    Args:
        terms: one a rank, in rank order, at least one: a frame ([any] uint8, 128-byte aligned), or the elements
            themselves (as `out`: a rank's own part is not encoded). cuda, contiguous; must not change until the launch
            is done.
        out: [n] bfloat16 or float32, cuda, contiguous; n may be 0. May be one of the terms that are not frames, or
            overlap none.
        average: divide by the number of terms.
        factor: multiply each term first; taken as float32. Not both.

    Returns:
        Verdicts, one a term; terms that are no frames have an empty one.

    Raises:
        InvalidArgument: wrong dtype, device, layout, alignment or length, or both scalings; nothing is launched.
        TruncatedFrame: a frame's buffer of under 128 bytes; nothing is launched.
    """
    if not terms:
        raise InvalidArgument("decode_reduce: wanted at least one term, got none")
    if average and factor is not None:
        raise InvalidArgument("decode_reduce: average and factor exclude each other; divide the factor instead")
    element_bytes = element_bytes_of("decode_reduce", [out])
    jobs = []
    for i, term in enumerate(terms):
        if term.dtype == torch.uint8:
            job = frame_job("decode_reduce", i, term, out, 0)
            if not job.coded:  # too short for its static part: nothing of it may be read
                raise InvalidArgument(
                    f"decode_reduce: frame {i} has {term.numel()} bytes, too few for {out.numel()} elements of "
                    f"{out.dtype}; receive it whole"
                )
        else:
            if element_bytes_of("decode_reduce", [out, term]) and term.numel() != out.numel():
                raise InvalidArgument(
                    f"decode_reduce: term {i} must have {out.numel()} elements as out has, got {term.numel()}"
                )
            job = Job(term.data_ptr(), 0, term.numel(), 0)
        jobs.append(job)
    with Launch(out) as launch:
        table = make_table(jobs, out.device, same_tiles=True)
        rows = torch.empty((len(jobs), VERDICT_BYTES // 8), dtype=torch.int64, device=out.device)
        launch_decode_reduce(launch, table, element_bytes, out.data_ptr(), average, factor, rows.data_ptr())
    return Verdicts(rows)


def launch_decode_reduce(
    place: Place, table: Table, element_bytes: int, out: int, average: bool, factor: float | None, rows: int
) -> list[Start]:
    """Launch the kernel on terms that are known to be right.

    Args:
        table: of each term, for the same blocks, the frame's address and bytes, or the address of the words.
        element_bytes: of the sum, and of terms that are words.
        out: address of the sum.
        average, factor: as decode_reduce.
        rows: address of VERDICT_BYTES bytes a term, for the verdicts.

    Returns:
        See launch_encode.
    """
    number = factor if factor is not None else float(table.jobs) if average else 0.0
    kind = "premul" if factor is not None else "average" if average else "sum"
    scratch = place.zeroed("read", COUNTER_BYTES + ACCUMULATOR_BYTES * table.jobs)
    place.begin()
    name = f"decode_reduce_{kind}_{NAMES[element_bytes]}_kernel"
    kernel = place.device.persistent(name, "decode_reduce", "REDUCE", element_bytes, f"{TABLE_SIGNATURE}PfPP")
    grid = (max(1, min(table.tiles, place.most_blocks(kernel.most_blocks))), 1)
    starts = [kernel.told(grid, BLOCK_THREADS, table.packed, out, number, scratch, rows)]
    start(starts, place.stream)
    return starts
