"""Launches encode.cu: words to frames, any number of them in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...codebook import Codebook
from ...errors import InvalidArgument
from ...frame import max_frame_bytes
from .jit import (
    BLOCK_THREADS,
    SLOT_BYTES,
    TABLE_SIGNATURE,
    Job,
    Launch,
    Place,
    Start,
    Table,
    check_frame,
    element_bytes_of,
    make_table,
    start,
)
from .stats import DeviceCodebook

__all__ = ["encode_frames", "launch_encode", "scratch_bytes"]

_PACKERS_A_MULTIPROCESSOR = 2
_TILES_A_PACKER = {2: 8, 4: 1}  # or more; low halves of one tile are work enough for a thread block
_FRAME_SUMS_BYTES = 32
_PACK_THREADS = 512
_NAMES = {2: "bfloat16", 4: "float32"}
_SIGNATURE = f"{TABLE_SIGNATURE}4P"


def encode_frames(
    words: Sequence[Tensor], codebooks: Sequence[Codebook | DeviceCodebook], out: Sequence[Tensor]
) -> None:
    """Encode tensors, or slices of one, each into a frame of its own (FORMAT.md 3): one launch of two kernels.

    Bit-exact for every pattern; the bytes are those of the reference, however many frames and blocks are in flight.
    Ordered after and before work on torch's current stream, from any thread; never waits for the device. Sizes and
    digests are in the frames' headers, on the device. May be captured in a CUDA graph, with at most 16 frames.

    Args:
        words: each [n] bfloat16, or each [n] float32, cuda, contiguous; n may be 0, and may differ. bfloat16 at any
            alignment; those at a multiple of 16 bytes are faster.
        codebooks: one a tensor; a DeviceCodebook is read on the device.
        out: each [max_frame_bytes(n, dtype)] uint8 or longer, same device, contiguous, 128-byte aligned; overlapping
            neither words nor each other. Bytes beyond the frame keep what they held.

    Raises:
        InvalidArgument: wrong dtype, device, layout, alignment or capacity; nothing is launched.

    Takes scratch of 8210 bytes a block (half of bfloat16 words) from torch's allocator until the kernels are done; what
    the words' escapes do not need of it is never touched.
    """
    if not len(words) == len(codebooks) == len(out):
        raise InvalidArgument(f"encode: {len(words)} tensors, {len(codebooks)} codebooks, {len(out)} frames; one each")
    element_bytes = element_bytes_of("encode", words)
    jobs = []
    for i, (source, codebook, frame) in enumerate(zip(words, codebooks, out, strict=True)):
        check_frame("encode", i, frame, source)
        n = source.numel()
        wanted = max_frame_bytes(n, source.dtype)
        if frame.numel() < wanted:
            raise InvalidArgument(
                f"encode: frame {i} must hold max_frame_bytes({n}, {source.dtype}) = {wanted} bytes, "
                f"got {frame.numel()}; allocate that many"
            )
        if source.data_ptr() % element_bytes:
            raise InvalidArgument(f"encode: tensor {i} must be aligned to its elements, got {source.data_ptr():#x}")
        address, exponents = 0, 0
        if isinstance(codebook, DeviceCodebook):
            address = codebook.address(source.device)
        else:
            exponents = int.from_bytes(bytes(codebook.exponents), "little")
        jobs.append(Job(source.data_ptr(), frame.data_ptr(), n, frame.numel(), address, exponents))

    with Launch(words[0]) as launch:
        table = make_table(jobs, words[0].device)
        scratch = torch.empty(scratch_bytes(table.tiles), dtype=torch.uint8, device=words[0].device)
        launch_encode(launch, table, element_bytes, scratch.data_ptr())


def scratch_bytes(tiles: int) -> int:
    """Bytes of scratch that encoding so many blocks in one launch takes."""
    return tiles * SLOT_BYTES + 16 * tiles + -(-2 * tiles // 16) * 16


def launch_encode(place: Place, table: Table, element_bytes: int, scratch: int) -> list[Start]:
    """Launch the kernels on jobs that are known to be right.

    Args:
        table: words, frame, n, capacity and codebook of each tensor.
        element_bytes: of all tensors.
        scratch: address of scratch_bytes(table.tiles) bytes, at a multiple of 16, until the kernels are done.

    Returns:
        What was started, to be started again with everything at the same places.
    """
    device, tiles = place.device, table.tiles
    sums = place.zeroed("encode", _FRAME_SUMS_BYTES * table.jobs)
    counts = scratch + tiles * SLOT_BYTES
    arguments = (table.packed, sums, counts, counts + 16 * tiles, scratch)
    place.begin()
    name = _NAMES[element_bytes]
    encode = device.persistent(f"encode_{name}_kernel", "encode", "ENCODE", element_bytes, _SIGNATURE)
    pack = device.kernel(f"pack_{name}_kernel", "encode", _SIGNATURE + "I")
    packers = min(-(-tiles // _TILES_A_PACKER[element_bytes]), device.multiprocessors * _PACKERS_A_MULTIPROCESSOR)
    starts = [pack.told((packers + table.jobs, 1), _PACK_THREADS, *arguments, packers)]
    if tiles:
        starts.insert(0, encode.told((min(tiles, place.most_blocks(encode.most_blocks)), 1), BLOCK_THREADS, *arguments))
    with device.lock:  # the two kernels share sums, so that no other thread's may come between them
        start(starts, place.stream)
    return starts
