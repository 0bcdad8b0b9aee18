"""Launches decode.cu: frames to words, any number of them in one launch; and the verdicts on frames."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import CorruptFrame, InvalidArgument, TruncatedFrame
from ...frame import (
    DIRECTORY_ENTRY_BYTES,
    HEADER_BYTES,
    FrameHeader,
    max_frame_bytes,
    parse_header,
    static_bytes,
)
from .jit import (
    BLOCK_THREADS,
    TABLE_SIGNATURE,
    VERDICT_BYTES,
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

__all__ = ["Verdicts", "as_told", "decode_frames", "launch_decode", "read_header", "verdict_on"]

NAMES = {2: "bfloat16", 4: "float32"}
COUNTER_BYTES = 32
ACCUMULATOR_BYTES = 32
_VERDICT = struct.Struct("<8Q128s")
assert _VERDICT.size == VERDICT_BYTES
_STEP_MAGIC_SIZE_DIGEST = struct.Struct("<Q56xQ8xQQ96x")
assert _STEP_MAGIC_SIZE_DIGEST.size == VERDICT_BYTES

# Steps of FORMAT.md 8 that a verdict names; reader.cuh has the same.
_DIRECTORY, _RECORD, _CANONICAL, _DIGEST, _OTHER_FRAME = 9, 10, 11, 12, 20
_ESCAPES_FIELD = 0xFFFF


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of one launch on its frames, in device memory until somebody asks.

    Attributes:
        rows: [frames, 24] int64, cuda. Column 0 is the step of FORMAT.md 8 that failed, or 0: a kernel on the same
            stream may read it. Then block, detail, digest and escapes as counted, buffer bytes, n and element bytes as
            expected, and the frame's 16 header words.
        sources: the index each row has among the caller's frames.
    """

    rows: Tensor
    sources: tuple[int, ...] = field(default=())

    def check(self) -> list[FrameHeader | None]:
        """Wait for the launch, and raise the error of the first frame that was refused.

        Returns:
            The header of each frame, in order; None for a term that was no frame.

        Raises:
            TruncatedFrame, UnsupportedFrame, CorruptFrame: as FORMAT.md 8 says.
            InvalidArgument: the frame is sound as far as its header goes, but of another n or dtype than the output.
        """
        packed = self.rows.cpu().numpy().tobytes()
        return [verdict_on(packed, i) for i in range(self.rows.shape[0])]


def verdict_on(packed: bytes, index: int) -> FrameHeader | None:
    """The header of frame `index` of a launch, from all the rows of its verdicts; errors as Verdicts.check."""
    return _verdict(index, _VERDICT.unpack_from(packed, index * VERDICT_BYTES), len(packed) // VERDICT_BYTES)


def as_told(packed: bytes, told: Sequence[tuple[int, int]]) -> bool:
    """Whether every frame of a launch was found sound, and is of the bytes and the digest that were told of it.

    Args:
        packed: the rows of the verdicts.
        told: of each frame, in order; terms that are no frames have none.
    """
    found = []
    for step, magic, frame_bytes, digest in _STEP_MAGIC_SIZE_DIGEST.iter_unpack(packed):
        if step:
            return False
        if magic:
            found.append((frame_bytes, digest))
    return found == list(told)


def _verdict(index: int, fields: tuple[int | bytes, ...], frames: int) -> FrameHeader | None:
    step, block, detail, digest, escapes, capacity, n, element_bytes = (int(f) for f in fields[:8])
    packed = bytes(fields[8])  # type: ignore[arg-type]
    if not any(packed) and step == 0:
        return None
    header = parse_header(packed, capacity)  # raises for steps 8.2 to 8.8
    name = NAMES[element_bytes]
    where = f"decode: frame {index} of {frames}: " if frames > 1 else "decode: "
    at = HEADER_BYTES + DIRECTORY_ENTRY_BYTES * block
    if step == 0:
        return header
    if step == _OTHER_FRAME:
        raise InvalidArgument(
            f"{where}out must have {header.n_words} elements of {header.dtype}, as the frame has, got {n} of {name}"
        )
    if step == _DIRECTORY:
        raise CorruptFrame(f"{where}directory entry {block} at byte {at} breaks FORMAT.md 8.9; receive the frame again")
    if step == _RECORD:
        raise CorruptFrame(
            f"{where}block {block}: its record or the size of its dynamic part breaks FORMAT.md 8.10, got {detail}"
        )
    if step == _CANONICAL and detail == _ESCAPES_FIELD:
        raise CorruptFrame(f"{where}Escapes at byte 32 must be {escapes}, got {header.escapes}")
    if step == _CANONICAL:
        raise CorruptFrame(f"{where}block {block} is not as an encoder writes it (FORMAT.md 5.5), got {detail}")
    if step == _DIGEST:
        raise CorruptFrame(
            f"{where}Digest at byte 24 must be {digest:#018x} for the elements, got {header.digest:#018x}"
        )
    raise CorruptFrame(f"{where}the device found step {step}, which this build does not know")


def frame_job(what: str, index: int, frame: Tensor, out: Tensor, words: int) -> Job:
    """The job of reading one frame for `out`.

    A buffer too short for the static part is only looked at for its header: what is wrong will be there.

    Raises:
        InvalidArgument: not a frame buffer on this device.
        TruncatedFrame: under 128 bytes.
    """
    check_frame(what, index, frame, out)
    size = frame.numel()
    if size < HEADER_BYTES:
        raise TruncatedFrame(f"{what}: a frame has {HEADER_BYTES} bytes or more, got {size}; send it whole")
    n = out.numel()
    return Job(words, frame.data_ptr(), n, size, coded=size >= static_bytes(n))


def decode_frames(frames: Sequence[Tensor], out: Sequence[Tensor]) -> Verdicts:
    """Decode frames, each into a tensor, or a slice of one, of its own (FORMAT.md 8): one launch of one kernel.

    Everything a decoder must check is checked, and the digest computed from the words rebuilt; the verdicts stay on the
    device. **Until Verdicts.check() has said so, the words may be wrong**: of a frame that is refused, any part of
    `out` may have been written. Nothing else is ever written, nor anything outside the frames' buffers read, whatever
    is in them. Ordered after and before work on torch's current stream, from any thread; never waits for the device.

    Args:
        frames: each [any] uint8, cuda, contiguous, 128-byte aligned; bytes beyond the frame are ignored. The frames
            must not change until the launch is done.
        out: each [n] bfloat16, or each [n] float32, same device, contiguous, n as in the frame; those at a multiple of
            16 bytes are faster. Overlapping neither frames nor each other.

    Raises:
        InvalidArgument: wrong dtype, device, layout or alignment; nothing is launched.
        TruncatedFrame: a buffer of under 128 bytes; nothing is launched.
    """
    if len(frames) != len(out):
        raise InvalidArgument(f"decode: {len(frames)} frames for {len(out)} outputs; one each")
    element_bytes = element_bytes_of("decode", out)
    jobs = [frame_job("decode", i, f, o, o.data_ptr()) for i, (f, o) in enumerate(zip(frames, out, strict=True))]
    with Launch(out[0]) as launch:
        table = make_table(jobs, out[0].device)
        rows = torch.empty((len(jobs), VERDICT_BYTES // 8), dtype=torch.int64, device=out[0].device)
        launch_decode(launch, table, element_bytes, rows.data_ptr())
    return Verdicts(rows)


def launch_decode(place: Place, table: Table, element_bytes: int, rows: int) -> list[Start]:
    """Launch the kernel on jobs that are known to be right.

    Args:
        table: of each frame its address and bytes, and the address and number of the words to write.
        element_bytes: of all outputs.
        rows: address of VERDICT_BYTES bytes a job, for the verdicts.

    Returns:
        See launch_encode.
    """
    scratch = place.zeroed("read", COUNTER_BYTES + ACCUMULATOR_BYTES * table.jobs)
    place.begin()
    name = f"decode_{NAMES[element_bytes]}_kernel"
    kernel = place.device.persistent(name, "decode", "DECODE", element_bytes, f"{TABLE_SIGNATURE}2P")
    grid = (max(1, min(table.tiles, place.most_blocks(kernel.most_blocks))), 1)
    starts = [kernel.told(grid, BLOCK_THREADS, table.packed, scratch, rows)]
    start(starts, place.stream)
    return starts


def read_header(frame: Tensor) -> FrameHeader:
    """The header of a frame on the device (FORMAT.md 8.1–8.8). Waits for its 128 bytes.

    Raises:
        TruncatedFrame, CorruptFrame, UnsupportedFrame: as FORMAT.md 8 says.
    """
    return parse_header(frame[:HEADER_BYTES].cpu().numpy().tobytes(), frame.numel())


def frame_capacity(n: int, dtype: torch.dtype) -> int:
    """max_frame_bytes rounded up to 128, so that frames may lie one after another in one buffer."""
    return -(-max_frame_bytes(n, dtype) // 128) * 128
