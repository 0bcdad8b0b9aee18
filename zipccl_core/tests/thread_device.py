"""A device made of threads: streams as lazy as a GPU's, on CPU tensors. What is not ordered runs in a wrong order here.

A stream is a thread that runs what is queued on it, in order, after a random pause; an event is done when its stream
has come to it. The codec is the CPU's. So the pipeline's own logic, and above all its orders between streams, is tested
on any machine; what only a GPU can show (kernels, NCCL, the driver) is not.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from zipccl_core import Codebook
from zipccl_core.codec import exponent_histogram
from zipccl_core.codec.cpu import decode_into, encode_into
from zipccl_core.collectives.device import CALLERS, MESSAGES, STREAMS
from zipccl_core.collectives.link import Ordered, Piece
from zipccl_core.collectives.message import patterns, raw_view
from zipccl_core.collectives.reduce import ReduceSpec, ordered_sum
from zipccl_core.collectives.transport import Transport
from zipccl_core.errors import InvalidArgument, TruncatedFrame, ZipcclError
from zipccl_core.frame import HEADER_BYTES, FrameHeader, parse_header

Row = FrameHeader | ZipcclError | None


class Event:
    """See zipccl_core.collectives.device.Event; `awaited` is set once a stream has come to where it waits for it."""

    def __init__(self, done: bool = False) -> None:
        self.done, self.awaited = threading.Event(), threading.Event()
        if done:
            self.done.set()

    def query(self) -> bool:
        return self.done.is_set()

    def hold_up(self) -> None:
        """What a stream does that waits for it."""
        self.awaited.set()
        self.done.wait(60)


class Stream:
    """Runs what it is given, in order, on a thread of its own; the first thing that raises is kept in `failed`."""

    def __init__(self, pause_s: float) -> None:
        self.failed: BaseException | None = None
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._pause_s, self._random = pause_s, random.Random(0)
        self._thread = threading.Thread(target=self._run, name="a stream", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    @property
    def busy(self) -> bool:
        return not self._work.empty()

    @property
    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(10)
        assert not self._thread.is_alive(), "a stream still waits"

    def _run(self) -> None:
        torch.set_flush_denormal(False)  # a device has a mode of its own, and not that of who queues
        while (work := self._work.get()) is not None:
            if self._pause_s:
                time.sleep(self._random.random() * self._pause_s)
            try:
                work()
            except BaseException as exc:
                self.failed = self.failed or exc


class Copy(Event):
    def __init__(self) -> None:
        super().__init__()
        self.event = self
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def read(self) -> bytes:
        return self.tensor().numpy().tobytes()

    def tensor(self) -> Tensor:
        assert self.query(), "read before it was there"
        return self.bytes


class Rows:
    """Verdicts, there once the stream has come past them."""

    def __init__(self) -> None:
        self.rows: list[Row] = []


class ThreadDevice:
    """See zipccl_core.collectives.device.Device.

    Args:
        pause_s: the longest that a stream pauses before each piece of work.
    """

    def __init__(self, pause_s: float = 0.0) -> None:
        self.streams = {name: Stream(pause_s) for name in (*STREAMS, MESSAGES, CALLERS, "link")}
        self.has_callers = False
        self.key: Hashable = self
        self._in_use = threading.local()
        self.queued_ahead: Event | None = None
        self.released_busy = False
        self.capturing = False

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
        assert not self.released_busy, "streams were given back with work in them"
        failed = next((s.failed for s in self.streams.values() if s.failed), None)
        if failed:
            raise failed

    @property
    def stream(self) -> Stream:
        found: Stream = self._in_use.stream
        return found

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        self._in_use.attached = True
        try:
            yield
        finally:
            self._in_use.attached = False

    def framework(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def now(self) -> Event:
        if self.has_callers:
            with self.on(CALLERS):
                return self.mark()
        return self.queued_ahead or Event(done=True)

    def copy_of_callers(self, tensor: Tensor) -> Copy:
        if self.has_callers:
            with self.on(CALLERS):
                return self.to_host([tensor])
        copy = Copy()
        copy.bytes, copy.done = raw_view(tensor).clone(), self.now().done
        return copy

    def join(self, event: Event) -> None:
        if self.has_callers:
            self.streams[CALLERS].put(event.hold_up)
        else:
            assert event.done.wait(60), "the device never came to an event"

    def come_to_the_callers(self) -> None:
        """Wait for everything in the stream of who calls, as its owner would before it reads."""
        end = Event()
        self.streams[CALLERS].put(end.done.set)
        assert end.done.wait(60), "the caller's stream never came to its end"

    def check(self, device: torch.device) -> None:
        if self.capturing:
            raise InvalidArgument("a collective cannot be captured")

    def can_use_callers(self) -> bool:
        return self.has_callers

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before = getattr(self._in_use, "stream", None)
        self._in_use.stream = self.streams[stream]
        try:
            yield
        finally:
            self._in_use.stream = before

    def is_current(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return self.capturing

    def share(self, shares: bool) -> None:
        pass

    def mark(self) -> Event:
        event = Event()
        self.stream.put(event.done.set)
        return event

    def after(self, event: Event) -> None:
        self.stream.put(event.hold_up)

    def empty(self, n_bytes: int) -> Tensor:
        assert self._in_use.attached, "by a thread that does not work for this device"
        assert self.stream, "of no stream: what was queued on another may still use it"
        return torch.full((n_bytes,), 0xA5, dtype=torch.uint8)

    def run(self, work: Callable[[], object]) -> None:
        self.stream.put(work)

    def keep(self, tensor: Tensor) -> None:
        self.stream.put(lambda: tensor)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.stream.put(lambda: target.copy_(source))

    def release(self) -> None:
        self.released_busy = any(self.streams[name].busy for name in (*STREAMS, MESSAGES))

    def codebooks(self, words: Sequence[Tensor], kind: str | Codebook) -> list[list[Codebook]]:
        found: list[list[Codebook]] = [[] for _ in words]

        def measure() -> None:
            for w, out in zip(words, found, strict=True):
                if isinstance(kind, Codebook):
                    out.append(kind)
                    continue
                histogram = exponent_histogram(w).tolist()
                fit = Codebook.fitted if kind == "fitted" else Codebook.gaussian_of_histogram
                out.append(fit(histogram))

        self.stream.put(measure)
        return found

    def scratch_bytes(self, words: Sequence[int]) -> int:
        return sum(words)

    def encode(
        self, words: Sequence[Tensor], codebooks: Sequence[Any], frames: Sequence[Tensor], scratch: Tensor
    ) -> Copy:
        assert scratch.numel() >= self.scratch_bytes([w.numel() for w in words])

        def work() -> None:
            for w, book, frame in zip(words, codebooks, frames, strict=True):
                encode_into(patterns(w), book[0], frame.numpy())

        self.stream.put(work)
        return self.to_host([frame[:HEADER_BYTES] for frame in frames])

    def decode(self, frames: Sequence[Tensor], out: Sequence[Tensor]) -> Any:
        rows = Rows()

        def work() -> None:
            rows.rows = [_decoded(frame, target) for frame, target in zip(frames, out, strict=True)]

        self.stream.put(work)
        return rows

    def decode_reduce(self, terms: Sequence[Tensor], out: Tensor, kind: str, factor: float | None) -> Any:
        rows = Rows()

        def work() -> None:
            words, too_long = [], False
            for term in terms:
                if term.dtype != torch.uint8:
                    rows.rows.append(None)
                    words.append(term)
                    continue
                decoded = torch.empty_like(out)
                row = _decoded(term, decoded)
                too_long = too_long or isinstance(row, TruncatedFrame)
                rows.rows.append(row)
                words.append(decoded)
            if too_long:
                return
            number = None if factor is None else torch.tensor(factor, dtype=torch.float32).numpy()[()]
            ordered_sum([patterns(w) for w in words], ReduceSpec(kind, number), patterns(out))

        self.stream.put(work)
        return rows

    def to_host(self, tensors: Sequence[Any]) -> Copy:
        copy = Copy()

        def work() -> None:
            copy.bytes = torch.cat([raw_view(t.reshape(-1)) for t in tensors])
            copy.done.set()

        self.stream.put(work)
        return copy

    def to_device(self, target: Tensor, source: Tensor) -> None:
        self.stream.put(lambda: target.copy_(source))

    def as_told(self, verdicts: Any, told: Sequence[tuple[int, int]]) -> bool:
        rows = [row for row in self.headers(verdicts) if row is not None]
        return [(row.frame_bytes, row.digest) for row in rows if isinstance(row, FrameHeader)] == list(told)

    def headers(self, verdicts: Any) -> list[Row]:
        found: list[Row] = verdicts.rows
        assert found, "read before they were there"
        return found


def _decoded(frame: Tensor, out: Tensor) -> Row:
    try:
        header = parse_header(frame.numpy().data, frame.numel())
        decode_into(frame[: header.frame_bytes].numpy(), patterns(out))
        return header
    except ZipcclError as error:
        return error


class ThreadLink:
    """What NCCL does, by gloo: posts are carried out in order on a stream of the link's own, and no host waits.

    Attributes:
        straight: uncoded calls may go to gloo without asking; unless they follow others, they are done at once.
        change: what happens to bytes that come, for tests: (peer, bytes) → None, in place.
    """

    def __init__(self, transport: Transport, device: ThreadDevice, straight: bool = False) -> None:
        self.straight = straight
        self._transport, self._device = transport, device
        self.change: Callable[[int, Tensor], None] = lambda peer, data: None
        self.aborted = False
        self._gone = threading.Event()
        self.posts: list[list[int]] = []

    def post(
        self, sends: Sequence[Piece], receives: Sequence[Piece], tag: int, deadline: float, in_order: bool = False
    ) -> Any:
        self.posts.append([piece.data.numel() for piece in sends])
        ready, arrived, link = self._device.mark(), Event(), self._device.streams["link"]

        def work() -> None:
            ready.done.wait(60)
            try:
                into = [(p, self._transport.recv("data", p.data, p.peer, tag)) for p in receives]
                out = [self._transport.send("data", p.data.clone(), p.peer, tag) for p in sends]
                for piece, transfer in into:
                    transfer.wait(timedelta(seconds=60))
                    self.change(piece.peer, piece.data)
                for transfer in out:
                    transfer.wait(timedelta(seconds=60))
            except RuntimeError:  # a peer is gone: as with NCCL, the stream hangs until it is aborted
                if not self._gone.wait(60):
                    raise
            finally:
                arrived.done.set()

        link.put(work)
        return Ordered(self._device, arrived)

    def group(self) -> Any:
        group = self._transport.group("native")
        return _InOrder(group, self._device.streams["link"]) if self.straight else group

    def begin(self, start: Callable[[], Any]) -> Any:
        ready, arrived = self._device.mark(), Event()

        def work() -> None:
            ready.done.wait(60)
            try:
                start().wait(timedelta(seconds=60))
            finally:
                arrived.done.set()

        self._device.streams["link"].put(work)
        return Ordered(self._device, arrived)

    def abort(self) -> None:
        self.aborted = True
        self._gone.set()
        self._transport.abort()

    def close(self) -> None:
        self._device.streams["link"].put(lambda: None)


class _InOrder:
    """A group whose calls stand behind what the link's stream still has to start."""

    def __init__(self, group: Any, link: Stream) -> None:
        self._group, self._link = group, link

    def __getattr__(self, name: str) -> Any:
        if not self._link.is_this_thread:
            begun = Event()
            self._link.put(begun.done.set)
            assert begun.done.wait(60), "the link never came to its end"
        return getattr(self._group, name)
