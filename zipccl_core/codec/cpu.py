"""The CPU codec: FORMAT.md vectorised with NumPy, a few blocks at a time so that they stay in cache.

Integers only: no result depends on a floating-point mode. Calls share nothing, so threads may run them at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..codebook import Codebook, sample_stride
from ..errors import CorruptFrame, InvalidArgument
from ..frame import (
    BLOCK_WORDS,
    DIRECTORY_ENTRY_BYTES,
    DTYPES,
    ESCAPE,
    HEADER_BYTES,
    LOW_HALVES_BIT,
    OFFSET_MASK,
    PLANES,
    RESERVED_DIRECTORY_BITS,
    STORED_BIT,
    FrameHeader,
    align128,
    max_frame_bytes,
    mix64,
    n_blocks,
    pack_header,
    parse_header,
    record_bytes,
    spill_bytes,
    static_bytes,
    weight,
)

if sys.byteorder != "little":  # planes and stored words are viewed in place
    raise ImportError("zipccl_core.codec.cpu needs a little-endian machine")

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U64 = NDArray[np.uint64]
Elements = NDArray[Any]  # uint16 for bfloat16, uint32 for float32

CHUNK_BLOCKS = 8
_DTYPE_OF = {np.dtype(np.uint16): "bfloat16", np.dtype(np.uint32): "float32"}
_U64_MASK = (1 << 64) - 1


class _Chunk(NamedTuple):
    """A run of blocks of one size: full ones, or the partial last one."""

    first_block: int
    blocks: int
    m: int  # words of each

    @property
    def numbers(self) -> slice:
        return slice(self.first_block, self.first_block + self.blocks)

    @property
    def words(self) -> slice:
        start = self.first_block * BLOCK_WORDS
        return slice(start, start + self.blocks * self.m)

    def records(self, n: int) -> slice:
        start = HEADER_BYTES + align128(DIRECTORY_ENTRY_BYTES * n_blocks(n))
        start += self.first_block * align128(record_bytes(BLOCK_WORDS))
        return slice(start, start + self.blocks * align128(record_bytes(self.m)))


def _chunks(n: int) -> Iterator[_Chunk]:
    full, rest = divmod(n, BLOCK_WORDS)
    for first in range(0, full, CHUNK_BLOCKS):
        yield _Chunk(first, min(CHUNK_BLOCKS, full - first), BLOCK_WORDS)
    if rest:
        yield _Chunk(full, 1, rest)


# --- Digest (FORMAT.md 6) ---------------------------------------------------------------------------------------------


@functools.cache
def _weights() -> U64:
    weights = np.array([weight(k) for k in range(BLOCK_WORDS)], dtype=np.uint64)
    weights.setflags(write=False)
    return weights


def _mix64(z: U64) -> U64:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _block_sums(elements: Elements) -> U64:
    """D_b of each row of [blocks, m] elements (FORMAT.md 6.2–6.4)."""
    if elements.dtype == np.uint16:
        if elements.shape[1] % 2:
            elements = np.pad(elements, ((0, 0), (0, 1)))
        elements = elements.view(np.uint32)
    sums: U64 = elements.astype(np.uint64) @ _weights()[: elements.shape[1]]
    return sums


def _digest(n: int, dtype: str, block_sums: U64) -> int:
    numbers = np.arange(1, len(block_sums) + 1, dtype=np.uint64)
    mixed = _mix64(block_sums ^ _mix64(numbers))
    return (mix64(4 * n + DTYPES[dtype]) + int(mixed.sum(dtype=np.uint64))) & _U64_MASK


def digest(elements: Elements) -> int:
    """The Digest of a contiguous vector of patterns, uint16 for bfloat16 or uint32 for float32 (FORMAT.md 6)."""
    dtype = _dtype_of("digest", elements)
    sums = [_block_sums(elements[c.words].reshape(c.blocks, c.m)) for c in _chunks(elements.size)]
    return _digest(elements.size, dtype, np.concatenate([np.empty(0, np.uint64), *sums]))


# --- Encode -----------------------------------------------------------------------------------------------------------


def encode_into(elements: Elements, codebook: Codebook, out: U8) -> FrameHeader:
    """Encode a vector of patterns into one frame at the start of `out`.

    Args:
        elements: [n] uint16 (bfloat16 patterns) or uint32 (float32 patterns), contiguous, at any alignment; n may be 0.
        codebook: 7 distinct exponents.
        out: [max_frame_bytes(n, dtype)] uint8 or longer, contiguous, not overlapping `elements`. Bytes beyond
            Frame_Bytes keep what they held.

    Returns:
        The header of the frame.

    Raises:
        InvalidArgument: wrong dtype, layout or capacity; nothing has been written.
    """
    dtype = _dtype_of("encode", elements)
    n = elements.size
    _check_bytes("encode", "out", out, writable=True)
    wanted = max_frame_bytes(n, dtype)
    if out.size < wanted:
        raise InvalidArgument(
            f"encode: out must hold max_frame_bytes({n}, {dtype}) = {wanted} bytes, got {out.size}; allocate that many"
        )
    if np.may_share_memory(elements, out[:wanted]):
        raise InvalidArgument("encode: out must not overlap the words; give it memory of its own")

    table = _code_table(codebook.exponents)
    static = static_bytes(n)
    entries = np.zeros(n_blocks(n), dtype=np.uint64)
    block_sums = np.zeros(n_blocks(n), dtype=np.uint64)
    end = escapes = 0  # end: of the dynamic parts written so far, counted from static
    for chunk in _chunks(n):
        rows = elements[chunk.words].reshape(chunk.blocks, chunk.m)
        records = out[chunk.records(n)].reshape(chunk.blocks, -1)
        block_sums[chunk.numbers] = _block_sums(rows)
        end, chunk_escapes = _encode_chunk(rows, table, records, out[static:], end, entries[chunk.numbers])
        escapes += chunk_escapes

    directory = out[HEADER_BYTES : HEADER_BYTES + align128(DIRECTORY_ENTRY_BYTES * entries.size)]
    directory[: entries.nbytes] = entries.view(np.uint8)
    directory[entries.nbytes :] = 0
    header = FrameHeader(dtype, n, static + end, _digest(n, dtype, block_sums), escapes, codebook.exponents)
    out[:HEADER_BYTES] = np.frombuffer(pack_header(header), dtype=np.uint8)
    return header


def _encode_chunk(rows: Elements, table: bytes, records: U8, dynamic: U8, end: int, entries: U64) -> tuple[int, int]:
    """Write records, directory entries and dynamic parts of [blocks, m] elements.

    Returns (the new end of the dynamic parts, escapes).
    """
    m = rows.shape[1]
    words = _words_of(rows)
    upper, lower = (words >> 8).astype(np.uint8), words.astype(np.uint8)
    exponents = (upper + upper) | (lower >> np.uint8(7))
    sign_mantissa = (upper & np.uint8(0x80)) | (lower & np.uint8(0x7F))
    codes = _translate(exponents, table)
    escaped = codes == ESCAPE
    counts = _true_counts(escaped)
    low = _low_halves(rows)
    low_present = [False] * len(rows) if low is None else [bool(row.any()) for row in low]
    _write_coded(sign_mantissa, codes, records)

    most = spill_bytes(m)
    if not any(low_present) and max(counts) <= most:
        escape_bytes = exponents.reshape(-1)[np.flatnonzero(escaped)]
        dynamic[end : end + escape_bytes.size] = escape_bytes
        entries[:] = end + np.cumsum([0, *counts[:-1]])
        return end + escape_bytes.size, escape_bytes.size

    for b, count in enumerate(counts):
        entry = end
        if count > most:
            entry |= STORED_BIT
            raw = words[b].view(np.uint8)
            held = min(2 * m, record_bytes(m))
            records[b, :held] = raw[:held]
            records[b, held:] = 0
            body = raw[held:]
        else:
            body = exponents[b][escaped[b]]
        dynamic[end : end + body.size] = body
        end += body.size
        if low is not None and low_present[b]:
            entry |= LOW_HALVES_BIT
            dynamic[end : end + 2 * m] = low[b].view(np.uint8)
            end += 2 * m
        entries[b] = entry
    return end, sum(counts)


def _write_coded(sign_mantissa: U8, codes: U8, records: U8) -> None:
    """Fill [blocks, align128(R)] records of coded blocks (FORMAT.md 4.2)."""
    m = codes.shape[1]
    plane_bytes = -(-m // 8)
    records[:, :m] = sign_mantissa
    for p in range(PLANES):
        plane = np.packbits(codes & np.uint8(1 << p), axis=1, bitorder="little")
        records[:, m + p * plane_bytes : m + (p + 1) * plane_bytes] = plane
    records[:, record_bytes(m) :] = 0


# --- Decode -----------------------------------------------------------------------------------------------------------


def read_header(frame: U8) -> FrameHeader:
    """Read and check the header of the frame at the start of a uint8 buffer (FORMAT.md 8.1–8.8).

    Raises:
        TruncatedFrame, CorruptFrame, UnsupportedFrame: as FORMAT.md 8 says.
        InvalidArgument: not a contiguous uint8 vector.
    """
    _check_bytes("decode", "frame", frame)
    return parse_header(frame[:HEADER_BYTES].tobytes(), frame.size)


def decode_into(frame: U8, out: Elements) -> FrameHeader:
    """Decode the frame at the start of a buffer into a vector of patterns.

    Args:
        frame: uint8, contiguous, at any alignment; bytes beyond Frame_Bytes are ignored.
        out: [n] uint16 (bfloat16 patterns) or uint32 (float32 patterns), contiguous, at any alignment, exactly as long
            as the frame says, not overlapping `frame`.

    Returns:
        The header of the frame.

    Raises:
        TruncatedFrame, UnsupportedFrame, CorruptFrame: as FORMAT.md 8 says. When the fault is beyond the header, part
            of `out` may have been written by then: its contents are not to be used. Nothing outside it is written.
        InvalidArgument: `out` has another dtype, length or layout; nothing has been written.
    """
    header = read_header(frame)
    dtype = _dtype_of("decode", out)
    n = header.n_words
    if dtype != header.dtype or out.size != n:
        raise InvalidArgument(
            f"decode: out must have {n} elements of {header.dtype}, as the frame has, got {out.size} of {dtype}"
        )
    if not out.flags.writeable:
        raise InvalidArgument("decode: out must be writable")
    if np.may_share_memory(frame, out):
        raise InvalidArgument("decode: out must not overlap the frame; give it memory of its own")

    frame = frame[: header.frame_bytes]
    source = _Source(
        frame, header, *_read_directory(frame, header), _exponent_table(header), _code_table(header.codebook)
    )
    block_sums = np.zeros(n_blocks(n), dtype=np.uint64)
    escapes = 0
    for chunk in _chunks(n):
        rows = out[chunk.words].reshape(chunk.blocks, chunk.m)
        escapes += _decode_chunk(source, chunk, rows)
        block_sums[chunk.numbers] = _block_sums(rows)

    if escapes != header.escapes:
        raise CorruptFrame(f"decode: Escapes at byte 32 must be {escapes}, got {header.escapes}")
    came = _digest(n, dtype, block_sums)
    if came != header.digest:
        raise CorruptFrame(
            f"decode: Digest at byte 24 must be {came:#018x} for the elements, got {header.digest:#018x}"
        )
    return header


class _Source(NamedTuple):
    """A frame whose header and directory have been checked."""

    frame: U8
    header: FrameHeader
    entries: U64
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    exponent_table: bytes
    code_table: bytes


def _read_directory(frame: U8, header: FrameHeader) -> tuple[U64, NDArray[np.int64], NDArray[np.int64]]:
    """Directory entries, and begins and ends of the dynamic parts from static_bytes on, checked (FORMAT.md 8.9)."""
    n, count = header.n_words, n_blocks(header.n_words)
    directory = frame[HEADER_BYTES : HEADER_BYTES + align128(DIRECTORY_ENTRY_BYTES * count)]
    used = DIRECTORY_ENTRY_BYTES * count
    _check_zero(directory[used:], HEADER_BYTES + used, "directory padding")
    entries = directory[:used].copy().view(np.uint64)
    begins = (entries & np.uint64(OFFSET_MASK)).astype(np.int64)
    ends = np.append(begins, header.dynamic_bytes)[1:]

    def refuse(bad: NDArray[np.bool_], rule: str) -> None:
        if bad.any():
            b = int(bad.argmax())
            raise CorruptFrame(
                f"decode: directory entry of block {b} at byte {HEADER_BYTES + DIRECTORY_ENTRY_BYTES * b}: {rule}, got "
                f"{int(entries[b]):#018x}, and its dynamic part ends at {int(ends[b])}"
            )

    refuse((entries & np.uint64(RESERVED_DIRECTORY_BITS)) != 0, "bits 58 to 63 must be zero")
    if header.dtype != "float32":
        refuse((entries & np.uint64(LOW_HALVES_BIT)) != 0, f"Low_Halves must be 0 for {header.dtype}")
    refuse(begins[:1] != 0, "the first Dynamic_Offset must be 0")
    sizes = ends - begins
    refuse(sizes < 0, "a Dynamic_Offset must not be above the next, nor above Dynamic_Bytes")
    low = 2 if header.dtype == "float32" else 0
    most = np.full(count, spill_bytes(BLOCK_WORDS) + low * BLOCK_WORDS)
    if rest := n % BLOCK_WORDS:
        most[-1] = spill_bytes(rest) + low * rest
    refuse(sizes > most, "its dynamic part is larger than a block of this dtype has")
    return entries, begins, ends


def _decode_chunk(source: _Source, chunk: _Chunk, rows: Elements) -> int:
    """Decode blocks of one size into [blocks, m] elements and check them (FORMAT.md 8.10, 8.11); returns escapes."""
    m, static = chunk.m, source.header.static_bytes
    place = chunk.records(source.header.n_words)
    records = source.frame[place].reshape(chunk.blocks, -1)
    codes = _read_codes(records, m)
    counts = _true_counts(codes == ESCAPE)
    flags = (source.entries[chunk.numbers] & np.uint64(STORED_BIT | LOW_HALVES_BIT)).tolist()
    begins, ends = source.begins[chunk.numbers].tolist(), source.ends[chunk.numbers].tolist()
    words = rows if rows.dtype == np.uint16 else np.empty(rows.shape, dtype=np.uint16)

    if not any(flags):
        for b, count in enumerate(counts):
            _check_coded(chunk.first_block + b, m, count, ends[b] - begins[b])
        _check_coded_records(records, m, chunk.first_block, place.start)
        body = source.frame[static + begins[0] : static + ends[-1]]
        _check_escapes(source, body, static + begins[0])
        _join_words(records, codes, source.exponent_table, body, words)
        if rows.dtype == np.uint32:
            np.left_shift(words, 16, out=rows, dtype=np.uint32)
        return int(body.size)

    escapes = 0
    for b in range(chunk.blocks):
        block, one = chunk.first_block + b, slice(b, b + 1)
        low_bytes = 2 * m if flags[b] & LOW_HALVES_BIT else 0
        record_at = place.start + b * records.shape[1]
        begin, end = static + begins[b], static + ends[b]
        body = source.frame[begin : end - low_bytes]
        if flags[b] & STORED_BIT:
            block_escapes = _read_stored(source, block, records[b], record_at, end - begin - low_bytes, body, words[b])
        else:
            block_escapes = counts[b]
            _check_coded(block, m, block_escapes, end - begin - low_bytes)
            _check_coded_records(records[one], m, block, record_at)
            _check_escapes(source, body, begin)
            _join_words(records[one], codes[one], source.exponent_table, body, words[one])
        escapes += block_escapes
        if rows.dtype == np.uint32:
            np.left_shift(words[b], 16, out=rows[b], dtype=np.uint32)
            if low_bytes:
                low = source.frame[end - low_bytes : end].copy().view(np.uint16)
                if not low.any():
                    raise CorruptFrame(
                        f"decode: block {block}: Low_Halves must be 0 when every low half is zero, got 1"
                    )
                rows[b] |= low
    return escapes


def _read_stored(source: _Source, block: int, record: U8, record_at: int, body_bytes: int, body: U8, words: U16) -> int:
    """Rebuild the m words of a stored block and check it; returns its escapes."""
    m = words.size
    if body_bytes != spill_bytes(m):
        raise CorruptFrame(
            f"decode: block {block}: without low halves its dynamic part must have {spill_bytes(m)} bytes as it is "
            f"stored, got {body_bytes}"
        )
    held = min(2 * m, record_bytes(m))
    _check_zero(record[held:], record_at + held, f"record padding of block {block}")
    words[:] = np.concatenate([record[:held], body]).view(np.uint16)
    escapes = m - int(np.count_nonzero(_translate((words >> 7).astype(np.uint8), source.code_table)))
    if escapes <= spill_bytes(m):
        raise CorruptFrame(f"decode: block {block}: Stored must be 0 with {escapes} escapes of {m} words, got 1")
    return escapes


def _read_codes(records: U8, m: int) -> U8:
    """[blocks, m] codes of [blocks, align128(R)] records; of a stored block, noise."""
    plane_bytes = -(-m // 8)
    codes: U8 = np.zeros((len(records), m), dtype=np.uint8)
    for p in range(PLANES):
        plane = records[:, m + p * plane_bytes : m + (p + 1) * plane_bytes]
        codes |= np.unpackbits(plane, axis=1, count=m, bitorder="little") * np.uint8(1 << p)
    return codes


def _join_words(records: U8, codes: U8, table: bytes, escapes: U8, words: U16) -> None:
    """Rebuild [blocks, m] words of coded blocks from planes, codes and the exponents of their escapes, in order.

    Shifts to the left are products here: NumPy has vector code for those.
    """
    sign_mantissa = records[:, : words.shape[1]]
    exponents = _translate(codes, table)
    exponents.reshape(-1)[np.flatnonzero(codes == ESCAPE)] = escapes
    high = (sign_mantissa & np.uint8(0x80)) | (exponents >> np.uint8(1))
    low = (sign_mantissa & np.uint8(0x7F)) | (exponents * np.uint8(1 << 7))
    np.multiply(high, 1 << 8, out=words, dtype=np.uint16)
    words |= low


def _check_coded(block: int, m: int, escapes: int, body_bytes: int) -> None:
    if escapes != body_bytes:
        raise CorruptFrame(
            f"decode: block {block}: without low halves its dynamic part must have {escapes} bytes, one an escape, "
            f"got {body_bytes}"
        )
    if escapes > spill_bytes(m):
        raise CorruptFrame(f"decode: block {block}: Stored must be 1 with {escapes} escapes of {m} words, got 0")


def _check_escapes(source: _Source, body: U8, at: int) -> None:
    coded = _translate(body, source.code_table) != ESCAPE
    if coded.any():
        i = int(coded.argmax())
        raise CorruptFrame(
            f"decode: the escape at byte {at + i} must not be in the codebook {list(source.header.codebook)}, "
            f"got {int(body[i])}"
        )


def _check_coded_records(records: U8, m: int, block: int, at: int) -> None:
    """Bits of the code planes beyond m, and padding (FORMAT.md 4.2). Only a last block has either: one row."""
    plane_bytes, used = -(-m // 8), record_bytes(m)
    if m % 8 and (records[:, m + plane_bytes - 1 : used : plane_bytes] >> np.uint8(m % 8)).any():
        raise CorruptFrame(f"decode: block {block}: bits of its code planes at and beyond {m} must be zero")
    _check_zero(records[:, used:].reshape(-1), at + used, f"record padding of block {block}")


def _check_zero(padding: U8, at: int, what: str) -> None:
    if padding.any():
        i = int((padding != 0).argmax())
        raise CorruptFrame(f"decode: {what}: byte {at + i} must be zero, got {int(padding[i]):#04x}")


# --- Statistics and helpers -------------------------------------------------------------------------------------------


def exponent_histogram(elements: Elements) -> NDArray[np.int64]:
    """[256] int64 counts of the exponents of the sample of FORMAT.md 7.3."""
    _dtype_of("exponent_histogram", elements)
    sample = np.ascontiguousarray(elements[:: sample_stride(elements.size)])
    return np.bincount((_words_of(sample) >> 7).astype(np.uint8), minlength=256).astype(np.int64)


def _code_table(exponents: tuple[int, ...]) -> bytes:
    """Code of each of the 256 exponents (FORMAT.md 4.1)."""
    table = bytearray(256)
    for code, exponent in enumerate(exponents, start=1):
        table[exponent] = code
    return bytes(table)


def _exponent_table(header: FrameHeader) -> bytes:
    """Exponent of each code; 0 for ESCAPE, which is filled in later."""
    return bytes([0, *header.codebook]).ljust(256, b"\0")


def _translate(values: U8, table: bytes) -> U8:
    return np.frombuffer(bytearray(values).translate(table), dtype=np.uint8).reshape(values.shape)


def _true_counts(rows: NDArray[np.bool_]) -> list[int]:
    return [int(np.count_nonzero(row)) for row in rows]


def _words_of(elements: Elements) -> U16:
    if elements.dtype == np.uint16:
        return elements.view(np.uint16)
    return (elements >> 16).astype(np.uint16)


def _low_halves(elements: Elements) -> U16 | None:
    return None if elements.dtype == np.uint16 else elements.astype(np.uint16)


def _dtype_of(what: str, elements: Elements) -> str:
    dtype = _DTYPE_OF.get(elements.dtype)
    if dtype is None or elements.ndim != 1 or not elements.flags.c_contiguous:
        raise InvalidArgument(
            f"{what}: elements must be a contiguous vector of uint16 (bfloat16) or uint32 (float32) patterns, got "
            f"{elements.dtype} of shape {elements.shape}"
        )
    return dtype


def _check_bytes(what: str, name: str, buffer: U8, writable: bool = False) -> None:
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise InvalidArgument(
            f"{what}: {name} must be a contiguous vector of uint8, got {buffer.dtype} of shape {buffer.shape}"
        )
    if writable and not buffer.flags.writeable:
        raise InvalidArgument(f"{what}: {name} must be writable")
