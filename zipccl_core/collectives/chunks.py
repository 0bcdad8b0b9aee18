"""How a message on a device is cut into chunks, and where their frames lie: a pure function of what both ends know."""

from __future__ import annotations

from dataclasses import dataclass

from ..frame import BLOCK_WORDS, ELEMENT_BYTES, align128, max_frame_bytes, static_bytes
from ..policy.switch import Policy, prefix_bytes
from .wire import MOST_CHUNKS

CHUNK_BYTES = 96 << 20  # each more costs NCCL a start, some 80 µs; docs/PERFORMANCE.md


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a message in the pipeline, a frame of its own.

    Attributes:
        first: element of the message that it begins with; a multiple of a block, so that alignment is the message's.
        words: its elements.
        at: byte of the message's buffer at which its frame begins; a multiple of 128.
        phase_one_bytes: static part and agreed prefix of the dynamic part: what travels without asking.
        capacity_bytes: the most bytes its frame can have.
    """

    first: int
    words: int
    at: int
    phase_one_bytes: int
    capacity_bytes: int


def chunks_of(policy: Policy, n: int, dtype: str) -> tuple[Chunk, ...]:
    """The chunks of a coded message of n elements: as few as CHUNK_BYTES allows, all but the last equally long.

    Args:
        policy: for the prefix.
        n: elements, at least 1.
        dtype: "bfloat16" or "float32".
    """
    most_words = max(CHUNK_BYTES // ELEMENT_BYTES[dtype], -(-n // MOST_CHUNKS))
    count = -(-n // most_words)
    words = -(-n // (count * BLOCK_WORDS)) * BLOCK_WORDS
    chunks, at = [], 0
    for first in range(0, n, words):
        mine = min(words, n - first)
        capacity = max_frame_bytes(mine, dtype)
        phase_one = static_bytes(mine) + prefix_bytes(policy, mine, dtype)
        chunks.append(Chunk(first, mine, at, min(phase_one, capacity), capacity))
        at += align128(capacity)
    return tuple(chunks)


def buffer_bytes(chunks: tuple[Chunk, ...]) -> int:
    """Bytes of a buffer for the frames of a message, one after another."""
    return chunks[-1].at + align128(chunks[-1].capacity_bytes) if chunks else 0
