"""Where the fields of a message lie (docs/FORMAT.md 2–5; docs/DESIGN.md, "The exchange"), for faults that damage them.

Written from the documents and independent of the codec, as a damaged wire is. Little-endian.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

ENVELOPE_BYTES = 128
HEADER_BYTES = 128
BLOCK_WORDS = 8192
CODE_PLANES = 3
_U64 = (1 << 64) - 1

ENVELOPE = {
    "magic": (0, 4),
    "coded": (4, 8),
    "sequence": (8, 16),
    "src": (16, 20),
    "dst": (20, 24),
    "payload_bytes": (24, 32),
    "digest": (32, 40),
    "padding": (40, 124),
    "check": (124, 128),
}
HEADER = {
    "magic": (0, 4),
    "version": (4, 6),
    "dtype": (6, 7),
    "scheme": (7, 8),
    "n_words": (8, 16),
    "frame_bytes": (16, 24),
    "digest": (24, 32),
    "escapes": (32, 40),
    "block_words": (40, 44),
    "reserved": (44, 64),
    "codebook": (64, 71),
    "codebook_padding": (71, 120),
    "header_check": (120, 128),
}
FRAME_FIELDS = (
    *(f"header.{name}" for name in HEADER),
    *("directory.offset", "directory.flags", "directory.reserved", "directory.padding"),
    *("record.sign_mantissa", *(f"record.code_plane_{p}" for p in range(CODE_PLANES)), "record.padding"),
    "dynamic",
)
FIELDS = (*(f"envelope.{name}" for name in ENVELOPE), *FRAME_FIELDS, "elements")


def align128(n_bytes: int) -> int:
    """The next multiple of 128."""
    return -(-n_bytes // 128) * 128


def is_coded(message: np.ndarray) -> bool:
    """Whether a phase one holds a frame, by its envelope."""
    return bool(int.from_bytes(message[4:8].tobytes(), "little"))


def places(message: np.ndarray) -> dict[str, tuple[int, int]]:
    """Field → (first byte, byte after the last) within a whole phase one that is still sound.

    The directory entry is that of block 0, the record that of the last block. A field without bytes is left out.
    """
    found = {f"envelope.{name}": place for name, place in ENVELOPE.items()}
    head = ENVELOPE_BYTES
    if not is_coded(message):
        found["elements"] = (head, len(message))
        return {name: place for name, place in found.items() if place[1] > place[0]}
    found |= {f"header.{name}": (head + a, head + b) for name, (a, b) in HEADER.items()}
    n = int.from_bytes(message[head + 8 : head + 16].tobytes(), "little")
    frame_bytes = int.from_bytes(message[head + 16 : head + 24].tobytes(), "little")
    blocks = -(-n // BLOCK_WORDS)
    directory = head + HEADER_BYTES
    found["directory.offset"] = (directory, directory + 7) if blocks else (0, 0)
    found["directory.flags"] = (directory + 7, directory + 8) if blocks else (0, 0)
    found["directory.reserved"] = found["directory.flags"]
    found["directory.padding"] = (directory + 8 * blocks, directory + align128(8 * blocks))
    record = directory + align128(8 * blocks)
    for block in range(blocks):
        m = min(BLOCK_WORDS, n - block * BLOCK_WORDS)
        plane = -(-m // 8)
        used = record + m + CODE_PLANES * plane
        found["record.sign_mantissa"] = (record, record + m)
        for p in range(CODE_PLANES):
            found[f"record.code_plane_{p}"] = (record + m + p * plane, record + m + (p + 1) * plane)
        found["record.padding"] = (used, record + align128(m + CODE_PLANES * plane))
        record += align128(m + CODE_PLANES * plane)
    found["dynamic"] = (record, min(len(message), head + frame_bytes))
    return {name: place for name, place in found.items() if place[1] > place[0]}


def reseal(message: np.ndarray) -> None:
    """Make the checks of envelope and header right again after fields were changed, in place."""
    if is_coded(message):
        header = message[ENVELOPE_BYTES : ENVELOPE_BYTES + HEADER_BYTES]
        words = struct.unpack("<15Q", header[:120].tobytes())
        check = sum(_mix64(word ^ _mix64(i + 1)) for i, word in enumerate(words)) & _U64
        header[120:128] = np.frombuffer(check.to_bytes(8, "little"), np.uint8)
    crc = zlib.crc32(message[:124].tobytes())
    message[124:128] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)


def _mix64(z: int) -> int:
    """FORMAT.md 6.1."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def phase_one_bytes(n: int, prefix_percent: float) -> int:
    """Bytes of a frame of n bfloat16 words that travel in phase one: static part and agreed prefix."""
    static, spill = HEADER_BYTES + align128(8 * -(-n // BLOCK_WORDS)), 0
    for begin in range(0, n, BLOCK_WORDS):
        m = min(BLOCK_WORDS, n - begin)
        record = m + CODE_PLANES * -(-m // 8)
        static += align128(record)
        spill += max(0, 2 * m - record)
    return static + min(spill, align128(int(n * prefix_percent / 100)))


def frame_bytes_of(words: np.ndarray, codebook: tuple[int, ...]) -> tuple[int, int, int]:
    """(Frame_Bytes, escapes, stored blocks) of bfloat16 words under a codebook (FORMAT.md 2, 4.4, 5.3)."""
    exponents = (words >> 7) & 0xFF
    escape = ~np.isin(exponents, codebook)
    size, stored = HEADER_BYTES + align128(8 * -(-len(words) // BLOCK_WORDS)), 0
    for begin in range(0, len(words), BLOCK_WORDS):
        block = escape[begin : begin + BLOCK_WORDS]
        m, escapes = len(block), int(block.sum())
        record = m + CODE_PLANES * -(-m // 8)
        spill = max(0, 2 * m - record)
        stored += escapes > spill
        size += align128(record) + min(escapes, spill)
    return size, int(escape.sum()), stored
