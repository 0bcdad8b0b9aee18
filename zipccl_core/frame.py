"""Constants, sizes and the header of a frame (FORMAT.md 1–3, 6.1). Standard library only."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise

from .errors import CorruptFrame, InvalidArgument, TruncatedFrame, UnsupportedFrame

FORMAT_VERSION = 1
MAGIC = b"ZCCL"
HEADER_BYTES = 128
BLOCK_WORDS = 8192
ALIGN_BYTES = 128
DIRECTORY_ENTRY_BYTES = 8
MAX_WORDS = 1 << 48

DTYPES = {"bfloat16": 1, "float32": 2}
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}

SCHEME_FAST = 1
PLANES = 3
CODEBOOK_EXPONENTS = (1 << PLANES) - 1
CODEBOOK_FIELD_BYTES = 56
ESCAPE = 0

OFFSET_MASK = (1 << 56) - 1
STORED_BIT = 1 << 56
LOW_HALVES_BIT = 1 << 57
RESERVED_DIRECTORY_BITS = ((1 << 64) - 1) ^ (OFFSET_MASK | STORED_BIT | LOW_HALVES_BIT)

_HEADER = struct.Struct("<4sHBBQQQQI20s56sQ")
_CHECKED = struct.Struct("<15Q")
_U64 = (1 << 64) - 1


def mix64(z: int) -> int:
    """Mix 64 bits (FORMAT.md 6.1); the finalizer of the published splitmix64 generator."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def weight(k: int) -> int:
    """The odd 32-bit weight of unit k of a block (FORMAT.md 6.3)."""
    x = ((k + 1) * 0x9E3779B1) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x85EBCA77) & 0xFFFFFFFF
    return (x ^ (x >> 13)) | 1


def align128(n_bytes: int) -> int:
    """The next multiple of 128 not below n_bytes."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


def n_blocks(n: int) -> int:
    """Blocks in a frame of n words (FORMAT.md 2.1)."""
    return -(-n // BLOCK_WORDS)


def record_bytes(m: int) -> int:
    """R, the bytes of the record of a block of m words before padding (FORMAT.md 2.3)."""
    return m + PLANES * (-(-m // 8))


def spill_bytes(m: int) -> int:
    """max(0, 2m − R): what the record of a stored block cannot hold, and the most escapes a coded one has (4.4)."""
    return max(0, 2 * m - record_bytes(m))


def _split(n: int) -> tuple[int, int]:
    """(full blocks, words of the partial last block or 0); n is checked."""
    if not 0 <= n < MAX_WORDS:
        raise InvalidArgument(f"frame: n must be 0 <= n < 2**48 words, got {n}")
    return divmod(n, BLOCK_WORDS)


def static_bytes(n: int) -> int:
    """Bytes of the static part of a frame of n words (FORMAT.md 2.5).

    A function of n alone, so that every rank knows it without asking.

    Args:
        n: words; 0 <= n < 2**48.

    Returns:
        bytes, a multiple of 128.

    Raises:
        InvalidArgument: n out of range.
    """
    full, rest = _split(n)
    return (
        HEADER_BYTES
        + align128(DIRECTORY_ENTRY_BYTES * n_blocks(n))
        + full * align128(record_bytes(BLOCK_WORDS))
        + (align128(record_bytes(rest)) if rest else 0)
    )


def max_frame_bytes(n: int, dtype: object = "bfloat16") -> int:
    """The most bytes a frame of n elements can have, for every input and codebook (FORMAT.md 2.6).

    Args:
        n: elements; 0 <= n < 2**48.
        dtype: torch.bfloat16, torch.float32, or the name of one.

    Returns:
        bytes; at most raw bytes + 8 a block + 512.

    Raises:
        InvalidArgument: n out of range, or another dtype.
    """
    full, rest = _split(n)
    low = 2 * n if dtype_name(dtype) == "float32" else 0
    return static_bytes(n) + full * spill_bytes(BLOCK_WORDS) + (spill_bytes(rest) if rest else 0) + low


def dtype_name(dtype: object) -> str:
    """ "bfloat16" or "float32" from a torch dtype or a name; InvalidArgument otherwise."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise InvalidArgument(f"frame: dtype must be bfloat16 or float32, got {dtype}; send other dtypes uncoded")
    return name


@dataclass(frozen=True)
class FrameHeader:
    """What the header of a frame says (FORMAT.md 3.1).

    Attributes:
        dtype: "bfloat16" or "float32".
        n_words: elements in the frame.
        frame_bytes: bytes of the whole frame.
        digest: 64 bits over the source elements (FORMAT.md 6).
        escapes: words whose exponent is not in the codebook.
        codebook: its exponents, ascending.
        version, scheme: as in the frame.
    """

    dtype: str
    n_words: int
    frame_bytes: int
    digest: int
    escapes: int
    codebook: tuple[int, ...]
    version: int = FORMAT_VERSION
    scheme: int = SCHEME_FAST

    @property
    def static_bytes(self) -> int:
        """Bytes before the dynamic part."""
        return static_bytes(self.n_words)

    @property
    def dynamic_bytes(self) -> int:
        """Bytes of the dynamic part."""
        return self.frame_bytes - self.static_bytes

    @property
    def raw_bytes(self) -> int:
        """Bytes of the source elements."""
        return self.n_words * ELEMENT_BYTES[self.dtype]

    @property
    def bits_per_word(self) -> float:
        """8·frame_bytes ÷ n_words; NaN for an empty frame."""
        return 8 * self.frame_bytes / self.n_words if self.n_words else float("nan")


def _header_check(header: bytes) -> int:
    words = _CHECKED.unpack_from(header)
    return sum(mix64(h ^ mix64(i + 1)) for i, h in enumerate(words)) & _U64


def pack_header(header: FrameHeader) -> bytes:
    """The 128 bytes of a header, Header_Check included (FORMAT.md 3)."""
    packed = _HEADER.pack(
        MAGIC,
        header.version,
        DTYPES[header.dtype],
        header.scheme,
        header.n_words,
        header.frame_bytes,
        header.digest,
        header.escapes,
        BLOCK_WORDS,
        bytes(20),
        bytes(header.codebook).ljust(CODEBOOK_FIELD_BYTES, b"\0"),
        0,
    )
    return packed[:120] + _header_check(packed).to_bytes(8, "little")


def parse_header(buffer: bytes | bytearray | memoryview, buffer_bytes: int | None = None) -> FrameHeader:
    """Read and check the header of the frame at the start of a buffer (FORMAT.md 8.1–8.8).

    Args:
        buffer: at least the first 128 bytes of the frame.
        buffer_bytes: bytes of the whole buffer the frame lies in, if `buffer` is only its start.

    Raises:
        TruncatedFrame, CorruptFrame, UnsupportedFrame: as FORMAT.md 8 says, naming field, offset, wanted and came.
    """
    size = len(buffer) if buffer_bytes is None else buffer_bytes
    if size < HEADER_BYTES:
        raise TruncatedFrame(f"decode: a frame has {HEADER_BYTES} bytes or more, got {size}; send it whole")
    fields = _HEADER.unpack_from(buffer)
    magic, version, dtype, scheme, n, frame_bytes, digest, escapes, block_words, reserved, codebook, check = fields
    if magic != MAGIC:
        raise CorruptFrame(f"decode: Magic at byte 0 must be {MAGIC!r}, got {magic!r}; this is no zipccl frame")
    if version != FORMAT_VERSION:
        raise UnsupportedFrame(
            f"decode: Version at byte 4 is {version}, this build reads {FORMAT_VERSION} only; upgrade the older side"
        )
    wanted = _header_check(bytes(buffer[:HEADER_BYTES]))
    if check != wanted:
        raise CorruptFrame(f"decode: Header_Check at byte 120 must be {wanted:#018x}, got {check:#018x}")
    if dtype not in DTYPE_NAMES:
        raise UnsupportedFrame(f"decode: Dtype at byte 6 is {dtype}, this build reads {sorted(DTYPE_NAMES)} only")
    if scheme != SCHEME_FAST:
        raise UnsupportedFrame(f"decode: Scheme at byte 7 is {scheme}, this build reads {SCHEME_FAST} only")
    if block_words != BLOCK_WORDS:
        raise CorruptFrame(f"decode: Block_Words at byte 40 must be {BLOCK_WORDS}, got {block_words}")
    if any(reserved):
        raise CorruptFrame("decode: the reserved bytes 44 to 63 must be zero")
    exponents = tuple(codebook[:CODEBOOK_EXPONENTS])
    if any(a >= b for a, b in pairwise(exponents)):
        raise CorruptFrame(f"decode: Codebook at byte 64 must be ascending and distinct, got {list(exponents)}")
    if any(codebook[CODEBOOK_EXPONENTS:]):
        raise CorruptFrame(f"decode: Codebook bytes {64 + CODEBOOK_EXPONENTS} to 119 must be zero")
    if n >= MAX_WORDS:
        raise CorruptFrame(f"decode: N_Words at byte 8 must be below 2**48, got {n}")
    name = DTYPE_NAMES[dtype]
    low, high = static_bytes(n), max_frame_bytes(n, name)
    if not low <= frame_bytes <= high:
        raise CorruptFrame(f"decode: Frame_Bytes at byte 16 must be {low} to {high} for {n} words, got {frame_bytes}")
    if escapes > n:
        raise CorruptFrame(f"decode: Escapes at byte 32 must be at most N_Words = {n}, got {escapes}")
    if size < frame_bytes:
        raise TruncatedFrame(f"decode: Frame_Bytes is {frame_bytes}, the buffer has {size}; receive the frame whole")
    return FrameHeader(name, n, frame_bytes, digest, escapes, exponents)
