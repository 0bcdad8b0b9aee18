"""A CUDA device for the pipeline: torch's streams over PyCUDA's, and the kernels of codec/cuda."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..codebook import Codebook
from ..codec.cuda import jit
from ..codec.cuda.decode import Verdicts, decode_frames
from ..codec.cuda.decode_reduce import decode_reduce
from ..codec.cuda.encode import encode_frames
from ..codec.cuda.stats import measure
from ..errors import InvalidArgument, ZipcclError
from ..frame import FrameHeader
from .device import STREAMS, Event
from .exchange import Exchange
from .link import GlooLink, Link, NcclLink
from .pipeline import Pipeline

_thread = threading.local()
_THREAD_LOCAL_MODE = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def _keep_out_of_captures() -> None:
    """This thread's queries and allocations are no error of a graph that another thread captures meanwhile."""
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL_MODE)))


class _Copy:
    """A pinned tensor and the event after which it is filled."""

    def __init__(self, pinned: Tensor, event: torch.cuda.Event) -> None:
        self._pinned, self._event = pinned, event

    def query(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def tensor(self) -> Tensor:
        return self._pinned


class CudaDevice:
    """See Device.

    Args:
        device: with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Streams of its own: what waits for a peer in a stream holds up all that is behind it, and were that another
        # Communicator's, two ranks could wait for each other.
        self._streams = dict(zip(STREAMS, _lend_streams(device, len(STREAMS)), strict=True))

    def attach(self) -> None:
        # Else a thread is on device 0, and its first query of an event makes a context there.
        torch.cuda.set_device(self._device)
        if not getattr(_thread, "queries_in_peace", False):
            _thread.queries_in_peace = True
            _keep_out_of_captures()

    def now(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def join(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)  # type: ignore[arg-type]

    def check(self, device: torch.device) -> None:
        if device != self._device:
            raise InvalidArgument(
                f"tensors of one Communicator must be on one device: this one began on {self._device}, got {device}; "
                "make another Communicator for it"
            )
        with torch.cuda.device(self._device):  # a stream is current on each device
            capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            raise InvalidArgument(
                "a collective cannot be captured into a CUDA graph, since the host takes part in it; "
                "keep it out of the graph, or use the process group's own"
            )

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._streams[stream]):
            yield

    def mark(self) -> torch.cuda.Event:
        return self.now()

    def after(self, event: Event) -> None:
        self.join(event)

    def empty(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, device=self._device)

    def run(self, work: Callable[[], object]) -> None:
        work()

    def release(self) -> None:
        streams, self._streams = self._streams, {}
        _take_back_streams(list(streams.values()))

    def encode(self, words: Sequence[Tensor], codebooks: Sequence[object], frames: Sequence[Tensor]) -> None:
        encode_frames(words, codebooks, frames)  # type: ignore[arg-type]

    def codebooks(self, words: Sequence[Tensor], kind: str | Codebook) -> Sequence[object]:
        if isinstance(kind, Codebook):
            return [kind] * len(words)
        statistics = measure(words)
        pick = statistics.fitted if kind == "fitted" else statistics.gaussian
        return [pick(i) for i in range(len(words))]

    def decode(self, frames: Sequence[Tensor], out: Sequence[Tensor]) -> Tensor:
        return decode_frames(frames, out).rows

    def decode_reduce(self, terms: Sequence[Tensor], out: Tensor, kind: str, factor: float | None) -> Tensor:
        return decode_reduce(terms, out, average=kind == "avg", factor=factor).rows

    def to_host(self, tensors: Sequence[Tensor]) -> _Copy:
        flats = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
        flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        pinned = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=True)
        pinned.copy_(flat, non_blocking=True)
        return _Copy(pinned, self.now())

    def to_device(self, target: Tensor, source: Tensor) -> None:
        # torch's pinned allocator does not reuse the block before the copy is done
        target.copy_(source.pin_memory(), non_blocking=True)

    def headers(self, rows: Tensor) -> list[FrameHeader | ZipcclError | None]:
        found: list[FrameHeader | ZipcclError | None] = []
        for row in rows.view(torch.int64).view(-1, 1, jit.VERDICT_BYTES // 8):
            try:
                found += Verdicts(row).check()
            except ZipcclError as error:
                found.append(error)
        return found


_idle: dict[int, list[Any]] = {}
"""Device index → streams of PyCUDA's making that were lent and are not in use."""


def _lend_streams(device: torch.device, count: int) -> list[torch.cuda.ExternalStream]:
    """As many streams that nobody else has, until they are taken back; kernels are launched from them without events.

    Non-blocking with respect to the default stream.
    """
    found = jit.device_of(torch.empty(0, device=device))
    with found.lock, found.pushed():
        idle = _idle.setdefault(found.index, [])
        make = type(found.streams[0])
        lent = [idle.pop() if idle else make(1) for _ in range(count)]
        found.by_handle.update({int(stream.handle): stream for stream in lent})
    return [torch.cuda.ExternalStream(int(s.handle), device=found.index) for s in lent]  # type: ignore[no-untyped-call]


def _take_back_streams(streams: Sequence[torch.cuda.ExternalStream]) -> None:
    """Lend them to others from now on. Nothing may be left in them."""
    for stream in streams:
        found = jit.device_of(torch.empty(0, device=stream.device))
        with found.lock:
            _idle[found.index].append(found.by_handle[stream.cuda_stream])


def pipeline_on_cuda(exchange: Exchange, group: dist.ProcessGroup, device: torch.device) -> Pipeline:
    """The pipeline of a Communicator on this rank's device: over NCCL if the group has it for CUDA, else over gloo.

    Raises:
        InvalidArgument: no PyCUDA.
    """
    link: Link
    if has_nccl(group):  # then all ranks are here at once, and must know before they connect that none is missing
        made = _made_on_all_ranks(exchange, device)
        link = NcclLink(exchange.board, exchange.rank, exchange.size, device, exchange.policy.timeout_s)
    else:
        made = CudaDevice(device)

        def poll(query: Callable[[], bool], deadline: float) -> None:
            exchange.poll(query, deadline, "copying to the host", [exchange.rank])

        link = GlooLink(exchange.transport, made, poll)
    return Pipeline(exchange, made, link)


def _made_on_all_ranks(exchange: Exchange, device: torch.device) -> CudaDevice:
    made, trouble = None, ""
    try:
        made = CudaDevice(device)
    except Exception as exc:  # no PyCUDA, or a driver that does not work
        trouble = str(exc) or type(exc).__name__
    for rank, text in enumerate(exchange.board.share("device", trouble, exchange.policy.timeout_s)):
        if text:
            raise InvalidArgument(f"Communicator: rank {rank} has no device to work with: {text}")
    assert made is not None
    return made


def has_nccl(group: dist.ProcessGroup) -> bool:
    """Whether a group carries CUDA tensors by NCCL."""
    return torch.cuda.is_available() and _backend_name(group) == "nccl"


def _backend_name(group: dist.ProcessGroup) -> str:
    """What the group has for CUDA tensors; empty if nothing."""
    try:
        return str(group._get_backend(torch.device("cuda")).name())
    except RuntimeError:
        return ""
