"""What a call on a device sends and takes in: messages, their chunks and buffers, before anything is queued."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..policy.switch import Policy
from .buffers import Buffer, Pool
from .call import Call
from .chunks import Chunk, buffer_bytes, chunks_of
from .device import Device
from .message import Sent, dtype_text

_NO_BUFFER = Buffer(torch.empty(0, dtype=torch.uint8, device="cpu"))


@dataclass(slots=True)
class DeviceMessage:
    """What goes to, or comes from, one peer; or to several, if they get the same.

    Attributes:
        flat: the elements to send or to fill.
        chunks: of its frames; empty if it is not coded.
        buffer: of its frames, and of a reduction's terms that come uncoded; empty else.
        frames: bytes and digest of each chunk's frame, once they are known.
        escapes: in them, of a message that goes.
        late: the chunks whose frames phase one has no room for, once that is known.
        in_books: what `sent` has said.
    """

    flat: Tensor
    chunks: tuple[Chunk, ...] = ()
    buffer: Buffer = _NO_BUFFER
    frames: tuple[tuple[int, int], ...] = ()
    escapes: int = 0
    late: list[int] = field(default_factory=list)
    in_books: Sent | None = None

    def told(self, frames: tuple[tuple[int, int], ...], escapes: int = 0) -> None:
        """Take in what is known of its frames."""
        self.frames, self.escapes = frames, escapes
        for i, chunk in enumerate(self.chunks):
            if frames[i][0] > chunk.phase_one_bytes:
                self.late.append(i)

    @property
    def coded(self) -> bool:
        return bool(self.chunks)

    def words(self, chunk: Chunk) -> Tensor:
        return self.flat if len(self.chunks) == 1 else self.flat[chunk.first : chunk.first + chunk.words]

    def frame(self, chunk: Chunk) -> Tensor:
        return self.buffer.part(chunk.at, chunk.capacity_bytes)

    def phase_one(self, chunk: Chunk) -> Tensor:
        return self.buffer.part(chunk.at, chunk.phase_one_bytes)

    def rests(self) -> list[Tensor]:
        """What phase one had no room for, of all chunks."""
        found = []
        for i in self.late:
            chunk, size = self.chunks[i], self.frames[i][0]
            found.append(self.buffer.part(chunk.at + chunk.phase_one_bytes, size - chunk.phase_one_bytes))
        return found

    def came(self, index: int) -> Tensor:
        """A chunk's frame as far as it has come: phase one, or the whole once it is known to be longer."""
        chunk = self.chunks[index]
        return self.buffer.part(chunk.at, self.frames[index][0] if index in self.late else chunk.phase_one_bytes)

    def sent(self) -> Sent:
        """For the books, once the sizes are known."""
        if self.in_books is None:
            self.in_books = self._sent()
        return self.in_books

    def _sent(self) -> Sent:
        raw_bytes, n = self.flat.numel() * self.flat.element_size(), self.flat.numel()
        if not self.coded:
            return Sent(raw_bytes, raw_bytes, n)
        sent = sum([chunk.phase_one_bytes for chunk in self.chunks])
        sent += sum([self.frames[i][0] - self.chunks[i].phase_one_bytes for i in self.late])
        return Sent(raw_bytes, sent, n, coded=True, phase_two=bool(self.late), escapes=self.escapes)


@dataclass(frozen=True, slots=True)
class Shape:
    """What calls with messages of the same sizes have alike.

    Attributes:
        outgoing, incoming: (peer, chunks of its message, whether that takes a buffer) of each that has one.
        sizes: bytes of the buffers, those of outgoing messages before those of incoming ones, and the scratch's last.
        with_scratch: whether there is one.
        outgoing_chunks, incoming_chunks: of the message that has most.
        largest_bytes: the greatest of sizes.
    """

    outgoing: tuple[tuple[int, tuple[Chunk, ...], bool], ...]
    incoming: tuple[tuple[int, tuple[Chunk, ...], bool], ...]
    sizes: list[int]
    with_scratch: bool
    outgoing_chunks: int
    incoming_chunks: int
    largest_bytes: int


NO_MESSAGES = Shape((), (), [], False, 0, 0, 0)


@dataclass(slots=True)
class Plan:
    """What a call sends and takes in, and what it has been given for that.

    Attributes:
        outgoing, incoming: peer → what goes to it, or comes from it.
        messages: those that go and are coded, each once.
        buffers: all that were taken from the pool.
        scratch: the encoder's, if there is anything to encode.
        shape: that of its messages; NO_MESSAGES if none are exchanged, but perhaps a collective of the backend's made.
    """

    outgoing: dict[int, DeviceMessage]
    incoming: dict[int, DeviceMessage]
    messages: list[DeviceMessage]
    buffers: list[Buffer]
    scratch: Tensor | None
    shape: Shape


class Planner:
    """Makes the plans of one Communicator's calls on one device.

    Args:
        policy: how messages are cut.
        peers: all other ranks.
        codes: (kind of the call, dtype, raw bytes) → whether a message is coded.
        device: says how much scratch its encoder needs.
        pool: gives the buffers.
    """

    def __init__(
        self, policy: Policy, peers: Sequence[int], codes: Callable[[str, str, int], bool], device: Device, pool: Pool
    ) -> None:
        self._policy, self._peers, self._codes, self._device, self._pool = policy, peers, codes, device, pool
        self._shape_of = functools.lru_cache(4096)(self._shape)

    def plan(self, call: Call, threshold: int | None) -> Plan:
        """The messages of a call to and from each peer, with buffers from the pool.

        Args:
            call: with all but its stream.
            threshold: what `codes` goes by, if that may change: what was planned before is for another one.
        """
        if call.native is not None or call.invalid is not None or not call.sends:
            return Plan({}, {}, [], [], None, NO_MESSAGES)
        shape = self._shape_of(
            call.kind,
            call.paused,
            threshold,
            call.sends[0].dtype,
            tuple([call.sends[peer].numel() for peer in self._peers[: 1 if call.same_for_all else None]]),
            tuple([call.receives[peer].numel() for peer in self._peers]),
        )
        buffers = self._pool.take(shape.sizes) if shape.sizes else []
        unused = iter(buffers)
        outgoing: dict[int, DeviceMessage] = {}
        messages: list[DeviceMessage] = []
        for peer, chunks, has_buffer in shape.outgoing:
            made = outgoing[peer] = DeviceMessage(call.sends[peer], chunks)
            if has_buffer:
                made.buffer = next(unused)
                messages.append(made)
        if call.same_for_all and outgoing:
            outgoing = dict.fromkeys(self._peers, made)
        incoming: dict[int, DeviceMessage] = {}
        for peer, chunks, has_buffer in shape.incoming:
            made = incoming[peer] = DeviceMessage(call.receives[peer], chunks)
            if has_buffer:
                made.buffer = next(unused)
                if not chunks:
                    n_bytes = made.flat.numel() * made.flat.element_size()
                    made.flat = made.buffer.part(0, n_bytes).view(made.flat.dtype)
        scratch = buffers[-1].whole if shape.with_scratch else None
        return Plan(outgoing, incoming, messages, buffers, scratch, shape)

    def _shape(
        self,
        kind: str,
        paused: bool,
        threshold: int | None,
        dtype: torch.dtype,
        sends: tuple[int, ...],
        receives: tuple[int, ...],
    ) -> Shape:
        """The shape of calls that send and receive so many words to and from each peer."""
        name, sizes = dtype_text(dtype), list[int]()

        def messages(words: tuple[int, ...], are_terms: bool) -> tuple[tuple[int, tuple[Chunk, ...], bool], ...]:
            found = []
            for peer, n in zip(self._peers, words, strict=False):
                n_bytes = n * dtype.itemsize
                coded = not paused and self._codes(kind, name, n_bytes)
                chunks = chunks_of(self._policy, n, name) if coded else ()
                if coded or (n and are_terms):
                    sizes.append(buffer_bytes(chunks) if coded else n_bytes)
                if n:
                    found.append((peer, chunks, coded or are_terms))
            return tuple(found)

        outgoing = messages(sends, False)
        incoming = messages(receives, kind == "reduce")
        scratch_bytes, count = 0, max((len(chunks) for _, chunks, _ in outgoing), default=0)
        for index in range(count):
            words = [chunks[index].words for _, chunks, _ in outgoing if index < len(chunks)]
            scratch_bytes = max(scratch_bytes, self._device.scratch_bytes(words))
        if scratch_bytes:
            sizes.append(scratch_bytes)
        incoming_count = max((len(chunks) for _, chunks, _ in incoming), default=0)
        return Shape(outgoing, incoming, sizes, scratch_bytes > 0, count, incoming_count, max(sizes, default=0))
