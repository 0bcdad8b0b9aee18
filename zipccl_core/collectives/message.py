"""One message from one rank to another: coded or as it is, in one buffer, as phase one and perhaps phase two."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..codebook import Codebook
from ..codec import exponent_histogram
from ..codec.cpu import decode_into, encode_into
from ..errors import CorruptFrame
from ..frame import max_frame_bytes, parse_header, static_bytes
from ..policy.switch import Policy, prefix_bytes
from .wire import ALL_RANKS, Envelope

_PATTERNS = {torch.bfloat16: (torch.int16, np.uint16), torch.float32: (torch.int32, np.uint32)}


def patterns(flat: torch.Tensor) -> NDArray[Any]:
    """The elements of a contiguous 1-D CPU tensor of a coded dtype as unsigned patterns; no copy."""
    same_width, unsigned = _PATTERNS[flat.dtype]
    return flat.view(same_width).numpy().view(unsigned)


def raw_view(flat: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous 1-D tensor of any dtype; no copy."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.stride() != (1,):  # of none or one element any stride counts as contiguous
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


@functools.cache
def dtype_text(dtype: torch.dtype) -> str:
    """The dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def _codebook(policy: Policy, flat: torch.Tensor) -> Codebook:
    if isinstance(policy.codebook, Codebook):
        return policy.codebook
    histogram = exponent_histogram(flat).tolist()
    return Codebook.fitted(histogram) if policy.codebook == "fitted" else Codebook.gaussian_of_histogram(histogram)


def _phase_one_bytes(policy: Policy, n: int, dtype: str) -> int:
    return Envelope.BYTES + static_bytes(n) + prefix_bytes(policy, n, dtype)


@dataclass(slots=True)
class Sent:
    """What the books keep of a message.

    Attributes:
        raw_bytes: bytes of its elements.
        sent_bytes: bytes that travel, envelope included.
        words: elements.
        coded: whether they travel as frames.
        phase_two: whether the prefix overflowed.
        escapes: of the frames.
    """

    raw_bytes: int
    sent_bytes: int
    words: int
    coded: bool = False
    phase_two: bool = False
    escapes: int = 0


@dataclass(frozen=True)
class Message:
    """A message ready to be sent.

    Attributes:
        phase_one: uint8; its size is known to the receiver from policy, dtype and number of elements alone.
        phase_two: uint8; what the prefix had no room for, None if nothing.
        coded: whether the payload is a frame.
        raw_bytes: bytes of the elements.
        words: elements.
        escapes: of the frame, 0 if there is none.
    """

    phase_one: torch.Tensor
    phase_two: torch.Tensor | None
    coded: bool
    raw_bytes: int
    words: int
    escapes: int = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes of both phases, envelope included."""
        return self.phase_one.numel() + (0 if self.phase_two is None else self.phase_two.numel())

    def sent(self) -> Sent:
        """For the books."""
        return Sent(self.raw_bytes, self.sent_bytes, self.words, self.coded, self.phase_two is not None, self.escapes)


def encode_message(policy: Policy, flat: torch.Tensor, sequence: int, src: int, dst: int = ALL_RANKS) -> Message:
    """Encode, or copy, the elements of a flat tensor behind an envelope; the tensor may change afterwards."""
    raw, head, dtype, n = raw_view(flat), Envelope.BYTES, dtype_text(flat.dtype), flat.numel()
    if not policy.codes(dtype, raw.numel()):
        buffer = torch.empty(head + raw.numel(), dtype=torch.uint8)
        buffer[head:] = raw
        check = zlib.crc32(buffer[head:].numpy().data)
        buffer[:head] = as_tensor(Envelope(sequence, src, dst, False, raw.numel(), check).pack())
        return Message(buffer, None, False, raw.numel(), n)
    buffer = torch.empty(head + max_frame_bytes(n, dtype), dtype=torch.uint8)
    header = encode_into(patterns(flat), _codebook(policy, flat), buffer[head:].numpy())
    split, end = _phase_one_bytes(policy, n, dtype), head + header.frame_bytes
    buffer[end:split].zero_()  # what the prefix has room for beyond the frame
    buffer[:head] = as_tensor(Envelope(sequence, src, dst, True, header.frame_bytes, header.digest).pack())
    return Message(buffer[:split], buffer[split:end] if end > split else None, True, raw.numel(), n, header.escapes)


class Incoming:
    """A message to be received into a flat tensor: receive `phase_one`, `open`, perhaps receive more, `unpack`.

    Args:
        policy, sequence, src: as the sender has them.
        rank: the receiver.
        flat: contiguous, to be filled.
    """

    def __init__(self, policy: Policy, flat: torch.Tensor, sequence: int, src: int, rank: int) -> None:
        self.src, self._rank, self._sequence, self._flat = src, rank, sequence, flat
        raw_bytes, dtype, n = raw_view(flat).numel(), dtype_text(flat.dtype), flat.numel()
        self.coded = policy.codes(dtype, raw_bytes)
        self._least_bytes = static_bytes(n) if self.coded else raw_bytes
        self._most_bytes = max_frame_bytes(n, dtype) if self.coded else raw_bytes
        self._buffer = torch.empty(Envelope.BYTES + self._most_bytes, dtype=torch.uint8)
        self._split = _phase_one_bytes(policy, n, dtype) if self.coded else self._buffer.numel()
        self._envelope: Envelope | None = None

    @property
    def phase_one(self) -> torch.Tensor:
        """What phase one is received into."""
        return self._buffer[: self._split]

    def open(self) -> torch.Tensor | None:
        """Check the envelope, after phase one has come.

        Returns:
            What phase two is to be received into; None if phase one was all.

        Raises:
            CorruptFrame: damaged, or of another exchange. The size of a phase two is then unknown.
        """
        envelope = Envelope.parse(self._buffer[: Envelope.BYTES].numpy().tobytes())
        wanted, came = (self._sequence, self.src, self.coded), (envelope.sequence, envelope.src, envelope.coded)
        if came != wanted or envelope.dst not in (self._rank, ALL_RANKS):
            raise CorruptFrame(
                f"message of another exchange: wanted (sequence, src, coded) = {wanted} for rank {self._rank}, "
                f"got {came} for rank {envelope.dst}"
            )
        if not self._least_bytes <= envelope.payload_bytes <= self._most_bytes:
            raise CorruptFrame(
                f"payload_bytes must be {self._least_bytes} to {self._most_bytes}, got {envelope.payload_bytes}"
            )
        self._envelope = envelope
        end = Envelope.BYTES + envelope.payload_bytes
        return self._buffer[self._split : end] if end > self._split else None

    def unpack(self) -> None:
        """Decode or copy the whole message into the flat tensor, and verify it against its envelope.

        Raises:
            CorruptFrame, TruncatedFrame, UnsupportedFrame: the frame is not what was sent.
        """
        if self._envelope is None:
            raise RuntimeError("Incoming.unpack before open")
        envelope = self._envelope
        payload = self._buffer[Envelope.BYTES : Envelope.BYTES + envelope.payload_bytes].numpy()
        if not self.coded:
            check = zlib.crc32(payload.data)
            if check != envelope.digest:
                raise CorruptFrame(f"CRC-32 of the elements must be {envelope.digest:#010x}, got {check:#010x}")
            raw_view(self._flat).numpy()[:] = payload
            return
        header = parse_header(payload.data, self._most_bytes)
        if (header.frame_bytes, header.digest) != (envelope.payload_bytes, envelope.digest):
            raise CorruptFrame(
                f"frame of {header.frame_bytes} bytes with digest {header.digest:#018x} does not match its envelope's "
                f"{envelope.payload_bytes} bytes and {envelope.digest:#018x}: stale or swapped"
            )
        wanted = (dtype_text(self._flat.dtype), self._flat.numel())
        if (header.dtype, header.n_words) != wanted:  # the caller's arguments are not to blame
            raise CorruptFrame(
                f"frame holds {header.n_words} elements of {header.dtype}, the call has {wanted[1]} of {wanted[0]}"
            )
        decode_into(payload, patterns(self._flat))


def as_tensor(data: bytes) -> torch.Tensor:
    """A uint8 tensor of these bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
