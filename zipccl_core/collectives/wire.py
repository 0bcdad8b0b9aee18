"""What ranks tell each other around the data: call record, envelope, sizes, verdict (docs/DESIGN.md, "The exchange").

All are little-endian, of fixed size, and end in a CRC-32 of what is before: nothing from a wire is believed unchecked.
"""

from __future__ import annotations

import functools
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

from ..errors import (
    CorruptFrame,
    InvalidArgument,
    PeerError,
    RankTimeout,
    TruncatedFrame,
    UnsupportedFrame,
    ZipcclError,
)
from ..frame import FORMAT_VERSION

OPERATIONS = (
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
    "close",
    "all_gather",
    "all_reduce",
    "broadcast",
    "scatter",
    "gather",
    "point_to_point",
)
ERROR_KINDS: tuple[type[ZipcclError], ...] = (
    PeerError,
    InvalidArgument,
    UnsupportedFrame,
    CorruptFrame,
    TruncatedFrame,
    RankTimeout,
)

ALL_RANKS = 0xFFFFFFFF
CONTROL_BYTES = 1024
MOST_DAMAGED = 64
MOST_CHUNKS = 24
_CRC = struct.Struct("<I")


def _seal(payload: bytes, size: int) -> bytes:
    padded = payload.ljust(size - _CRC.size, b"\0")
    return padded + _CRC.pack(zlib.crc32(padded))


def _unseal(data: bytes, what: str) -> bytes:
    body, (crc,) = data[: -_CRC.size], _CRC.unpack_from(data, len(data) - _CRC.size)
    if zlib.crc32(body) != crc:
        raise CorruptFrame(f"{what} is damaged: its CRC-32 must be {zlib.crc32(body):#010x}, got {crc:#010x}")
    return body


@dataclass(frozen=True)
class CallRecord:
    """What a rank calls, told to one peer before any payload moves.

    Attributes:
        sequence: number of the call on its Communicator, from 0.
        operation: name of the method.
        src: sender, a group rank.
        dtype: name of the dtype, at most 16 ASCII characters.
        reduce_op: "sum", "avg", "premul_sum", "max", …; empty if nothing is reduced.
        factor_bits: the float32 pattern of PREMUL_SUM's factor, 0 otherwise.
        send_words: elements src sends to this peer.
        recv_words: elements src expects from this peer.
        total_words: elements of the whole call where all ranks must have the same number, else 0.
        root: the group rank named as src or dst, -1 if the operation has none.
        policy: Policy.fingerprint() of src.
        device: type of the device that src's tensors are on, at most 8 ASCII characters; empty if there are none.
        valid: False if src's own arguments were refused: no payload will move to or from it.
    """

    sequence: int
    operation: str
    src: int
    dtype: str = ""
    reduce_op: str = ""
    factor_bits: int = 0
    send_words: int = 0
    recv_words: int = 0
    total_words: int = 0
    root: int = -1
    policy: int = 0
    device: str = ""
    valid: bool = True

    BYTES = CONTROL_BYTES
    _BODY = struct.Struct("<4sHBBQI16s16sIQQQiI8s")
    SEQUENCE_AT = 8  # where _BODY has it
    MAGIC = b"ZCLL"

    def pack(self) -> bytes:
        """CONTROL_BYTES bytes."""
        body = self._BODY.pack(
            self.MAGIC,
            FORMAT_VERSION,
            OPERATIONS.index(self.operation),
            self.valid,
            self.sequence,
            self.src,
            self.dtype.encode(),
            self.reduce_op.encode(),
            self.factor_bits,
            self.send_words,
            self.recv_words,
            self.total_words,
            self.root,
            self.policy,
            self.device.encode(),
        )
        return _seal(body, self.BYTES)

    @classmethod
    def parse(cls, data: bytes) -> CallRecord:
        """Raises CorruptFrame if damaged, UnsupportedFrame if of another version."""
        fields = cls._BODY.unpack_from(_unseal(data, "call record"))
        magic, version, operation, valid, sequence, src, dtype, reduce_op = fields[:8]
        factor_bits, send_words, recv_words, total_words, root, policy, device = fields[8:]
        if version != FORMAT_VERSION:
            raise UnsupportedFrame(f"call record of format {version}, this build speaks {FORMAT_VERSION}")
        if magic != cls.MAGIC or operation >= len(OPERATIONS):
            raise CorruptFrame(f"call record: magic {magic!r}, operation {operation} are none of ours")
        return cls(
            sequence,
            OPERATIONS[operation],
            src,
            dtype.rstrip(b"\0").decode(),
            reduce_op.rstrip(b"\0").decode(),
            factor_bits,
            send_words,
            recv_words,
            total_words,
            root,
            policy,
            device.rstrip(b"\0").decode(),
            bool(valid),
        )

    @classmethod
    def sequence_of(cls, data: bytes) -> int:
        """The sequence that a record says, unchecked: a tenth of the time of `parse`."""
        return int.from_bytes(data[cls.SEQUENCE_AT : cls.SEQUENCE_AT + 8], "little")

    def disagreement(self, peer: CallRecord) -> str:
        """What this rank's and the peer's call of one sequence number do not agree on; empty if nothing.

        Not all of it is seen by every pair: the verdict makes it one error on all ranks.
        """
        low, high = sorted((self, peer), key=lambda record: record.src)  # both sides say it in the same words
        for name in ("operation", "sequence", "dtype", "device", "reduce_op", "factor_bits", "root", "policy"):
            if getattr(low, name) != getattr(high, name):
                return f"rank {low.src} calls {low._called(name)}, rank {high.src} calls {high._called(name)}"
        for sender, receiver in ((low, high), (high, low)):
            if sender.send_words != receiver.recv_words:
                return (
                    f"rank {sender.src} sends {sender.send_words} elements to rank {receiver.src}, "
                    f"which expects {receiver.recv_words}"
                )
        if low.total_words != high.total_words:
            return f"rank {low.src} has {low.total_words} elements in all, rank {high.src} has {high.total_words}"
        return ""

    def _called(self, field_name: str) -> str:
        return f"{self.operation} #{self.sequence}" + (
            "" if field_name in ("operation", "sequence") else f" with {field_name} {getattr(self, field_name)!r}"
        )


def packed_record(sequence: int, *others: Any) -> bytes:
    """CallRecord(sequence, *others).pack(), in a fifth of the time: what others come to is remembered."""
    before, behind = _around_sequence(*others)
    body = before + sequence.to_bytes(8, "little") + behind
    return body + _CRC.pack(zlib.crc32(body))


@functools.lru_cache(4096)
def _around_sequence(*others: Any) -> tuple[bytes, bytes]:
    """A packed record, before its sequence and from there to its CRC."""
    packed = CallRecord(0, *others).pack()
    return packed[: CallRecord.SEQUENCE_AT], packed[CallRecord.SEQUENCE_AT + 8 : -_CRC.size]


@dataclass(frozen=True)
class Envelope:
    """What travels before the payload of one message: all about the run that a frame must not hold.

    Attributes:
        sequence, src: as in the call record.
        dst: receiver, or ALL_RANKS for a message that all peers get alike.
        coded: whether the payload is a frame; otherwise it is the elements as they are.
        payload_bytes: bytes of the frame, or of the elements.
        digest: the frame's Digest, or the CRC-32 of the elements.
    """

    sequence: int
    src: int
    dst: int
    coded: bool
    payload_bytes: int
    digest: int

    BYTES = 128  # so that the frame behind it keeps its alignment
    _BODY = struct.Struct("<4sIQIIQQ")
    _MAGIC = b"ZENV"

    def pack(self) -> bytes:
        """128 bytes."""
        body = self._BODY.pack(
            self._MAGIC, self.coded, self.sequence, self.src, self.dst, self.payload_bytes, self.digest
        )
        return _seal(body, self.BYTES)

    @classmethod
    def parse(cls, data: bytes) -> Envelope:
        """Raises CorruptFrame if damaged."""
        magic, coded, sequence, src, dst, payload_bytes, digest = cls._BODY.unpack_from(_unseal(data, "envelope"))
        if magic != cls._MAGIC or coded > 1:
            raise CorruptFrame(f"envelope: magic {magic!r}, coded {coded} are none of ours")
        return cls(sequence, src, dst, bool(coded), payload_bytes, digest)


@dataclass(frozen=True)
class Verdict:
    """How a call went for one rank, told to all before it returns on any.

    Attributes:
        sequence, src: as in the call record.
        error: kind and text, None if all went well.
        fatal: transfers may be left hanging, so that the Communicator cannot go on.
        damaged: ranks whose message to src was damaged, if that is all that is wrong; at most MOST_DAMAGED.
        raw_bytes, sent_bytes: of the messages that src coded in this call.
    """

    sequence: int
    src: int
    error: ZipcclError | None = field(default=None)
    fatal: bool = False
    damaged: tuple[int, ...] = ()
    raw_bytes: int = 0
    sent_bytes: int = 0

    BYTES = CONTROL_BYTES
    _BODY = struct.Struct(f"<4sBBQIQQHH{MOST_DAMAGED}I")
    _TEXT_BYTES = CONTROL_BYTES - _BODY.size - _CRC.size
    MAGIC = b"ZVER"

    def pack(self) -> bytes:
        """CONTROL_BYTES bytes; a longer text is cut."""
        kind, text = _packed_error(self.error, self._TEXT_BYTES)
        damaged = (*self.damaged, *[0] * (MOST_DAMAGED - len(self.damaged)))
        numbers = (kind, self.fatal, self.sequence, self.src, self.raw_bytes, self.sent_bytes, len(text))
        return _seal(self._BODY.pack(self.MAGIC, *numbers, len(self.damaged), *damaged) + text, self.BYTES)

    @classmethod
    def parse(cls, data: bytes) -> Verdict:
        """Raises CorruptFrame if damaged."""
        body = _unseal(data, "verdict")
        magic, kind, fatal, sequence, src, raw, sent, text_bytes, n_damaged, *damaged = cls._BODY.unpack_from(body)
        if magic != cls.MAGIC or kind > len(ERROR_KINDS) or text_bytes > cls._TEXT_BYTES or n_damaged > MOST_DAMAGED:
            raise CorruptFrame(f"verdict: magic {magic!r}, kind {kind} are none of ours")
        error = _unpacked_error(kind, body[cls._BODY.size :][:text_bytes])
        return cls(sequence, src, error, bool(fatal), tuple(damaged[:n_damaged]), raw, sent)


@dataclass(slots=True)
class Sizes:
    """What a rank's encoder made of its message to one peer, told as soon as it is known; of calls on a device.

    Attributes:
        sequence, src: as in the call record.
        error: what src knows to be wrong with this call or an earlier one, None if nothing: no phase two will follow.
        fatal: the Communicator cannot go on.
        raw_bytes, sent_bytes: of all messages that src coded in this call.
        frames: bytes and digest of each chunk's frame to this peer, in order; empty if its message is not coded.
    """

    sequence: int
    src: int
    error: ZipcclError | None = field(default=None)
    fatal: bool = False
    raw_bytes: int = 0
    sent_bytes: int = 0
    frames: tuple[tuple[int, int], ...] = ()

    BYTES = CONTROL_BYTES
    _HEAD, _FRAME = struct.Struct("<4sBBQIQQHH"), struct.Struct("<QQ")
    _TEXT_AT = _HEAD.size + MOST_CHUNKS * _FRAME.size
    _TEXT_BYTES = CONTROL_BYTES - _TEXT_AT - _CRC.size
    MAGIC = b"ZSIZ"

    def pack(self) -> bytes:
        """CONTROL_BYTES bytes; a longer text is cut."""
        kind, text = _packed_error(self.error, self._TEXT_BYTES)
        head = (kind, self.fatal, self.sequence, self.src, self.raw_bytes, self.sent_bytes, len(text))
        packed = self._HEAD.pack(self.MAGIC, *head, len(self.frames))
        for frame in self.frames:
            packed += self._FRAME.pack(*frame)
        return _seal(packed.ljust(self._TEXT_AT, b"\0") + text, self.BYTES)

    @classmethod
    def parse(cls, data: bytes) -> Sizes:
        """Raises CorruptFrame if damaged."""
        body = _unseal(data, "sizes")
        magic, kind, fatal, sequence, src, raw, sent, text_bytes, n_frames = cls._HEAD.unpack_from(body)
        if magic != cls.MAGIC or kind > len(ERROR_KINDS) or text_bytes > cls._TEXT_BYTES or n_frames > MOST_CHUNKS:
            raise CorruptFrame(f"sizes: magic {magic!r}, kind {kind}, {n_frames} frames are none of ours")
        error = _unpacked_error(kind, body[cls._TEXT_AT :][:text_bytes]) if kind else None
        frames = tuple(cls._FRAME.iter_unpack(body[cls._HEAD.size : cls._HEAD.size + n_frames * cls._FRAME.size]))
        return cls(sequence, src, error, bool(fatal), raw, sent, frames)


def _packed_error(error: ZipcclError | None, most_bytes: int) -> tuple[int, bytes]:
    """(0, nothing), or 1 + the kind's index and the text, cut to most_bytes."""
    return (0, b"") if error is None else (1 + _kind_index(error), str(error).encode()[:most_bytes])


def _unpacked_error(kind: int, text: bytes) -> ZipcclError | None:
    """The error that was packed so; kind is checked."""
    return ERROR_KINDS[kind - 1](text.decode(errors="replace")) if kind else None


def _kind_index(error: ZipcclError) -> int:
    return ERROR_KINDS.index(type(error)) if type(error) in ERROR_KINDS else 0
