"""The reference codec: slow, obvious, one function per section of FORMAT.md, the rule above each step.

Lists of integers and loops; no NumPy, no torch. Every other codec must give the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from ..codebook import Codebook, sample_stride
from ..errors import CorruptFrame, InvalidArgument
from ..frame import (
    BLOCK_WORDS,
    DIRECTORY_ENTRY_BYTES,
    DTYPES,
    ELEMENT_BYTES,
    ESCAPE,
    HEADER_BYTES,
    LOW_HALVES_BIT,
    OFFSET_MASK,
    PLANES,
    RESERVED_DIRECTORY_BITS,
    STORED_BIT,
    FrameHeader,
    align128,
    dtype_name,
    mix64,
    n_blocks,
    pack_header,
    parse_header,
    record_bytes,
    spill_bytes,
    static_bytes,
    weight,
)

_U64 = (1 << 64) - 1


# --- 1. Words ---------------------------------------------------------------------------------------------------------


def split_element(element: int, dtype: str) -> tuple[int, int]:
    """The word and the low half of an element (FORMAT.md 1.1); bfloat16 has no low half: 0."""
    # "1 bfloat16 | 16 bits | the element's 16-bit pattern | none"
    if dtype == "bfloat16":
        return element, 0
    # "2 float32 | 32 bits | bits 31–16 of the element's pattern | bits 15–0 of the element's pattern"
    return element >> 16, element & 0xFFFF


def join_element(word: int, low_half: int, dtype: str) -> int:
    """The element of a word and a low half; the inverse of split_element."""
    return word if dtype == "bfloat16" else word << 16 | low_half


def exponent_of(word: int) -> int:
    """The exponent of a word (FORMAT.md 1.2)."""
    # "the exponent (bits 14–7, 8 bits)"
    return word >> 7 & 0xFF


def sign_mantissa_of(word: int) -> int:
    """The sign_mantissa of a word (FORMAT.md 1.2)."""
    # "bit 7 of sign_mantissa is bit 15 of the word (the sign), bits 6–0 are bits 6–0 of the word"
    return (word >> 15) << 7 | word & 0x7F


def join_word(exponent: int, sign_mantissa: int) -> int:
    """The word of an exponent and a sign_mantissa."""
    return (sign_mantissa >> 7) << 15 | exponent << 7 | sign_mantissa & 0x7F


# --- 2. Blocks --------------------------------------------------------------------------------------------------------


def cut_blocks(elements: Sequence[int]) -> list[Sequence[int]]:
    """The blocks of a vector, in order (FORMAT.md 2.1)."""
    # "Words are cut, in order, into blocks of Block_Words = 8192; the last block holds what is left"
    return [elements[start : start + BLOCK_WORDS] for start in range(0, len(elements), BLOCK_WORDS)]


def block_words(n: int, b: int) -> int:
    """m, the words of block b of a frame of n words (FORMAT.md 2.1)."""
    return min(BLOCK_WORDS, n - b * BLOCK_WORDS)


# --- 4. Codes and records ---------------------------------------------------------------------------------------------


def code_of(exponent: int, codebook: Codebook) -> int:
    """The code of a word with this exponent (FORMAT.md 4.1)."""
    # "The code of a word is i if its exponent is c_i, and ESCAPE = 0 if its exponent is not in the codebook."
    for i, coded in enumerate(codebook.exponents, start=1):
        if exponent == coded:
            return i
    return ESCAPE


def is_stored(m: int, coded_dynamic_bytes: int) -> bool:
    """Whether a block of m words is stored (FORMAT.md 4.4)."""
    # "the block is stored exactly if C > max(0, 2m − R)"
    return coded_dynamic_bytes > spill_bytes(m)


def coded_record(words: Sequence[int], codebook: Codebook) -> bytes:
    """The record of a coded block, padding included (FORMAT.md 4.2)."""
    m = len(words)
    plane_bytes = -(-m // 8)
    record = bytearray(align128(record_bytes(m)))
    # "the sign_mantissa plane, m bytes, byte i for word i of the block"
    for i, word in enumerate(words):
        record[i] = sign_mantissa_of(word)
    # "then k1 code planes p = 0 … k1−1 of ⌈m/8⌉ bytes each, bit (i mod 8) of byte ⌊i/8⌋ of plane p being bit p of the
    # code of word i; then padding"
    for i, word in enumerate(words):
        code = code_of(exponent_of(word), codebook)
        for p in range(PLANES):
            record[m + p * plane_bytes + i // 8] |= (code >> p & 1) << (i % 8)
    return bytes(record)


def word_bytes(words: Sequence[int]) -> bytes:
    """The bytes of words, each word's low byte first (FORMAT.md 4.3)."""
    return b"".join(word.to_bytes(2, "little") for word in words)


def stored_record(words: Sequence[int]) -> bytes:
    """The record of a stored block, padding included (FORMAT.md 4.3)."""
    m = len(words)
    # "the first min(2m, R) bytes of the block's words (each word's low byte first); then padding"
    return word_bytes(words)[: min(2 * m, record_bytes(m))].ljust(align128(record_bytes(m)), b"\0")


# --- 5. Directory and dynamic parts -----------------------------------------------------------------------------------


def directory_entry(offset: int, stored: bool, low_halves: bool) -> bytes:
    """The directory's 8 bytes for a block (FORMAT.md 5.1)."""
    # "0–55 Dynamic_Offset | 56 Stored | 57 Low_Halves | 58–63 reserved, zero"
    return (offset | stored << 56 | low_halves << 57).to_bytes(DIRECTORY_ENTRY_BYTES, "little")


def dynamic_part(
    words: Sequence[int], low_halves: Sequence[int], codebook: Codebook, stored: bool, low_halves_present: bool
) -> bytes:
    """The dynamic part of a block (FORMAT.md 5.3)."""
    m = len(words)
    if stored:
        # "stored block: the max(0, 2m − R) bytes of its words that its record does not hold"
        part = word_bytes(words)[min(2 * m, record_bytes(m)) :]
    else:
        # "coded block: the exponents of its escapes, one byte each, in word order"
        exponents = [exponent_of(word) for word in words]
        part = bytes(e for e in exponents if code_of(e, codebook) == ESCAPE)
    # "then, if Low_Halves: the m low halves, 2 bytes each, in word order"
    if low_halves_present:
        part += b"".join(low.to_bytes(2, "little") for low in low_halves)
    return part


# --- 6. Digest --------------------------------------------------------------------------------------------------------

_weight = functools.cache(weight)


def units(block: Sequence[int], dtype: str) -> list[int]:
    """The 32-bit units of a block of elements (FORMAT.md 6.2)."""
    # "float32: the whole pattern of element k, m units"
    if dtype == "float32":
        return list(block)
    # "bfloat16: word 2k + 2^16·word (2k+1), a word beyond m counting as 0, ⌈m/2⌉ units"
    padded = [*block, 0]
    return [padded[k] + (padded[k + 1] << 16) for k in range(0, len(block), 2)]


def digest(elements: Sequence[int], dtype: str) -> int:
    """The Digest of a vector of element patterns (FORMAT.md 6.4)."""
    # "Digest = mix64(4·n + Dtype) + Σ_b mix64(D_b xor mix64(b + 1)) mod 2^64"
    total = mix64(4 * len(elements) + DTYPES[dtype])
    for b, block in enumerate(cut_blocks(elements)):
        # "D_b = Σ_k u_k · w_k mod 2^64 over the units of block b"
        d = sum(u * _weight(k) for k, u in enumerate(units(block, dtype))) & _U64
        total += mix64(d ^ mix64(b + 1))
    return total & _U64


# --- 7. Codebooks -----------------------------------------------------------------------------------------------------


def histogram(elements: Sequence[int], dtype: str) -> list[int]:
    """The 256 counts of the exponents of the sample of a vector (FORMAT.md 7.3)."""
    counts = [0] * 256
    # "those at 0, t, 2t, … below n, with t = ⌊n / 2^16⌋ or 1"
    for element in elements[:: sample_stride(len(elements))]:
        word, _ = split_element(element, dtype)
        counts[exponent_of(word)] += 1
    return counts


# --- Encode: the parts in the order of 2.4 ----------------------------------------------------------------------------


def encode(elements: Iterable[int], dtype: str, codebook: Codebook) -> bytes:
    """Encode a vector of element patterns into one frame.

    Args:
        elements: unsigned patterns, 16 bits each for bfloat16, 32 bits for float32; there may be none.
        dtype: "bfloat16" or "float32".
        codebook: 7 distinct exponents.

    Returns:
        The frame, Frame_Bytes bytes.

    Raises:
        InvalidArgument: another dtype, or a pattern out of range.
    """
    dtype = dtype_name(dtype)
    elements = [int(element) for element in elements]
    limit = 1 << 8 * ELEMENT_BYTES[dtype]
    for i, element in enumerate(elements):
        if not 0 <= element < limit:
            raise InvalidArgument(f"encode: patterns of {dtype} must be 0 to {limit - 1}, got {element} at element {i}")

    directory, records, dynamic, escapes = bytearray(), bytearray(), bytearray(), 0
    for block in cut_blocks(elements):
        words = [split_element(element, dtype)[0] for element in block]
        low_halves = [split_element(element, dtype)[1] for element in block]
        # "C the number of bytes that coding would put into the block's dynamic part without low halves (for fast: the
        # number of its escapes)"
        block_escapes = sum(code_of(exponent_of(word), codebook) == ESCAPE for word in words)
        stored = is_stored(len(words), block_escapes)
        # "Low_Halves is 1 exactly if the dtype is float32 and a low half of the block is not zero"
        low_halves_present = dtype == "float32" and any(low_halves)
        # "that of every other is the end of the dynamic part before it"
        directory += directory_entry(len(dynamic), stored, low_halves_present)
        records += stored_record(words) if stored else coded_record(words, codebook)
        dynamic += dynamic_part(words, low_halves, codebook, stored, low_halves_present)
        # "the number of words of the frame whose exponent is not in the codebook, those of stored blocks included"
        escapes += block_escapes

    n = len(elements)
    directory = directory.ljust(align128(len(directory)), b"\0")
    frame_bytes = HEADER_BYTES + len(directory) + len(records) + len(dynamic)
    header = pack_header(FrameHeader(dtype, n, frame_bytes, digest(elements, dtype), escapes, codebook.exponents))
    return header + bytes(directory) + bytes(records) + bytes(dynamic)


# --- 8. Decode: the checks in the order of the table ------------------------------------------------------------------


def read_directory(frame: bytes, header: FrameHeader) -> list[tuple[int, int, bool, bool]]:
    """(begin, end, stored, low_halves) of the dynamic part of each block, begin and end counted in the frame (8.9)."""
    b_count = n_blocks(header.n_words)
    static = static_bytes(header.n_words)
    entries = []
    for b in range(b_count):
        at = HEADER_BYTES + DIRECTORY_ENTRY_BYTES * b
        entries.append(int.from_bytes(frame[at : at + DIRECTORY_ENTRY_BYTES], "little"))
    # "padding zero"
    padding_at = HEADER_BYTES + DIRECTORY_ENTRY_BYTES * b_count
    _check_zero(frame, padding_at, HEADER_BYTES + align128(DIRECTORY_ENTRY_BYTES * b_count), "directory padding")

    parts = []
    for b, entry in enumerate(entries):
        at = HEADER_BYTES + DIRECTORY_ENTRY_BYTES * b
        where = f"directory entry of block {b} at byte {at}"
        # "flags as 5.1"
        if entry & RESERVED_DIRECTORY_BITS:
            raise CorruptFrame(f"decode: {where}: bits 58 to 63 must be zero, got {entry:#018x}")
        stored, low_halves = bool(entry & STORED_BIT), bool(entry & LOW_HALVES_BIT)
        if low_halves and header.dtype != "float32":
            raise CorruptFrame(f"decode: {where}: Low_Halves must be 0 for {header.dtype}, got 1")
        # "offsets begin at 0, never fall"; "the last dynamic part ends at Frame_Bytes"
        begin = entry & OFFSET_MASK
        end = entries[b + 1] & OFFSET_MASK if b + 1 < b_count else header.dynamic_bytes
        if b == 0 and begin != 0:
            raise CorruptFrame(f"decode: {where}: the first Dynamic_Offset must be 0, got {begin}")
        if end < begin:
            raise CorruptFrame(f"decode: {where}: Dynamic_Offset must be at most {end}, where the next is, got {begin}")
        # "give each block a dynamic part no larger than its dtype allows"
        m = block_words(header.n_words, b)
        most = spill_bytes(m) + (2 * m if header.dtype == "float32" else 0)
        if end - begin > most:
            raise CorruptFrame(f"decode: {where}: a dynamic part has at most {most} bytes here, got {end - begin}")
        parts.append((static + begin, static + end, stored, low_halves))
    return parts


def read_codes(record: bytes, m: int, b: int) -> list[int]:
    """The m codes of a coded record (4.2, 8.10)."""
    plane_bytes = -(-m // 8)
    codes = [ESCAPE] * m
    for p in range(PLANES):
        plane = record[m + p * plane_bytes : m + (p + 1) * plane_bytes]
        for i in range(m):
            codes[i] |= (plane[i // 8] >> (i % 8) & 1) << p
        # "Bits of a code plane at and beyond m must be zero."
        if m % 8 and plane[-1] >> m % 8:
            raise CorruptFrame(f"decode: block {b}: bits of code plane {p} at and beyond {m} must be zero")
    return codes


def read_block(
    frame: bytes, header: FrameHeader, b: int, record_at: int, part: tuple[int, int, bool, bool]
) -> tuple[list[int], int]:
    """The elements of block b and the number of its escapes (8.10, 8.11)."""
    m = block_words(header.n_words, b)
    begin, end, stored, low_halves_present = part
    codebook = Codebook(header.codebook)
    record = frame[record_at : record_at + align128(record_bytes(m))]
    low_bytes = 2 * m if low_halves_present else 0

    held = min(2 * m, record_bytes(m)) if stored else record_bytes(m)
    _check_zero(frame, record_at + held, record_at + len(record), f"record padding of block {b}")
    codes = [] if stored else read_codes(record, m, b)
    # "the dynamic part of each block has exactly the bytes of 5.3"
    body_bytes = spill_bytes(m) if stored else codes.count(ESCAPE)
    if end - begin != body_bytes + low_bytes:
        raise CorruptFrame(
            f"decode: block {b}: its dynamic part at byte {begin} must have {body_bytes + low_bytes} bytes, "
            f"got {end - begin}"
        )
    body = frame[begin : begin + body_bytes]

    if stored:
        raw = record[:held] + body
        words = [int.from_bytes(raw[2 * i : 2 * i + 2], "little") for i in range(m)]
        escapes = sum(code_of(exponent_of(word), codebook) == ESCAPE for word in words)
    else:
        escaped = iter(body)
        exponents = [codebook.exponents[code - 1] if code != ESCAPE else next(escaped) for code in codes]
        words = [join_word(e, sign_mantissa) for e, sign_mantissa in zip(exponents, record[:m], strict=True)]
        escapes = body_bytes
        # "an escape whose exponent is in the codebook" is refused
        for i, exponent in enumerate(body):
            if code_of(exponent, codebook) != ESCAPE:
                raise CorruptFrame(
                    f"decode: block {b}: the escape at byte {begin + i} has the coded exponent {exponent}"
                )
    # "a block stored or coded against 4.4" is refused
    if is_stored(m, escapes) != stored:
        raise CorruptFrame(
            f"decode: block {b}: Stored must be {int(not stored)} with {escapes} escapes of {m} words, "
            f"got {int(stored)}"
        )

    low = frame[begin + body_bytes : end]
    low_halves = [int.from_bytes(low[2 * i : 2 * i + 2], "little") for i in range(m)] if low_bytes else [0] * m
    # "low halves that are all zero" are refused
    if low_halves_present and not any(low_halves):
        raise CorruptFrame(f"decode: block {b}: Low_Halves must be 0 when every low half is zero, got 1")
    return [join_element(word, half, header.dtype) for word, half in zip(words, low_halves, strict=True)], escapes


def decode(buffer: bytes | bytearray | memoryview) -> tuple[str, list[int]]:
    """Decode the frame at the start of a buffer.

    Args:
        buffer: the frame; bytes beyond Frame_Bytes are ignored.

    Returns:
        (dtype, element patterns).

    Raises:
        TruncatedFrame, CorruptFrame, UnsupportedFrame: as FORMAT.md 8 says.
    """
    buffer = bytes(buffer)
    header = parse_header(buffer)  # 8.1 to 8.8
    frame = buffer[: header.frame_bytes]
    parts = read_directory(frame, header)  # 8.9
    record_at = HEADER_BYTES + align128(DIRECTORY_ENTRY_BYTES * len(parts))
    elements: list[int] = []
    escapes = 0
    for b, part in enumerate(parts):
        block, block_escapes = read_block(frame, header, b, record_at, part)
        record_at += align128(record_bytes(len(block)))
        elements += block
        escapes += block_escapes
    # "Escapes is the number of escapes"
    if escapes != header.escapes:
        raise CorruptFrame(f"decode: Escapes at byte 32 must be {escapes}, got {header.escapes}")
    # "The Digest is that of the source … and the two must be equal."
    came = digest(elements, header.dtype)
    if came != header.digest:
        raise CorruptFrame(
            f"decode: Digest at byte 24 must be {came:#018x} for the elements, got {header.digest:#018x}"
        )
    # "a decoder must refuse a frame that no encoder writes": what the checks above leave open, if anything
    if encode(elements, header.dtype, Codebook(header.codebook)) != frame:
        raise CorruptFrame("decode: the frame is not the one an encoder writes for its elements and codebook")
    return header.dtype, elements


def _check_zero(frame: bytes, begin: int, end: int, what: str) -> None:
    for at in range(begin, end):
        if frame[at]:
            raise CorruptFrame(f"decode: {what}: byte {at} must be zero, got {frame[at]:#04x}")
