"""A CUDA device for the pipeline: torch's streams over PyCUDA's, and the kernels of codec/cuda."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..codebook import Codebook
from ..codec.cuda import jit
from ..codec.cuda.decode import as_told, launch_decode, verdict_on
from ..codec.cuda.decode_reduce import launch_decode_reduce
from ..codec.cuda.encode import launch_encode, scratch_bytes
from ..codec.cuda.stats import launch_measure, measuring, samples_of
from ..errors import InvalidArgument, PeerError, ZipcclError
from ..frame import HEADER_BYTES, FrameHeader, n_blocks
from .device import CALLERS, MESSAGES, STREAMS, Event
from .exchange import Exchange
from .link import GlooLink, Link, Nccl, NcclLink
from .message import raw_view
from .pipeline import Pipeline
from .stragglers import let_go

LEAST_CONNECT_S = 30.0

_T = TypeVar("_T")
_Event = torch._C._CudaEventBase  # torch.cuda.Event asks more each time
_THREAD_LOCAL_MODE = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_LEAST_ROWS_BYTES, _ROWS_AT_ONCE = 512, 16
_MOST_STARTS = 1024  # of 1 KiB each
_CONNECT_NAP_S, _CONNECT_EXIT_S, _NEWS_S = 0.01, 2.0, 0.5
_CODEBOOK_AT = {"fitted": 0, "gaussian": 8}


class _CaptureMode:
    """Of the calling thread: in thread-local mode its queries and allocations are no error of a graph that another
    thread captures meanwhile."""

    def __init__(self) -> None:
        self._exchange: Callable[[Any], object] = lambda mode: None
        with contextlib.suppress(OSError, AttributeError):
            self._exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode

    def exchange(self, mode: int) -> int:
        """Set it; what it was."""
        number = ctypes.c_int(mode)
        self._exchange(ctypes.byref(number))
        return number.value


class _Copy:
    """A pinned tensor and the event after which it is filled."""

    def __init__(self, pinned: Tensor, event: _Event) -> None:
        self._pinned, self.event = pinned, event

    def query(self) -> bool:
        return self.event.query()

    def read(self) -> bytes:
        return self._pinned.numpy().tobytes()

    def tensor(self) -> Tensor:
        return self._pinned


class _Rows:
    """Pinned bytes that a kernel writes: into the host's memory itself, for a copy takes as long as starting a kernel.

    They are used again when this is let go of, which must not be before the kernel is done.

    Attributes:
        address: of the first, for the kernel.
        event: after which they are written, if somebody asks.
    """

    event: _Event

    def __init__(self, place: tuple[int, memoryview], n_bytes: int, free: list[tuple[int, memoryview]]) -> None:
        self.address, self._memory = place
        self._n_bytes, self._free = n_bytes, free

    def __del__(self) -> None:
        self._free.append((self.address, self._memory))

    def query(self) -> bool:
        return self.event.query()

    def read(self) -> bytes:
        return bytes(self._memory[: self._n_bytes])


def _class_bytes(n_bytes: int) -> int:
    """What places for so many bytes have: a power of two, with lines of their own."""
    return max(_LEAST_ROWS_BYTES, 1 << (n_bytes - 1).bit_length())


def _add_rows(free: list[tuple[int, memoryview]], n_bytes: int) -> None:
    """More places, for so many bytes each; each keeps the memory of all."""
    size = _class_bytes(n_bytes)
    pinned = torch.empty(size * _ROWS_AT_ONCE, dtype=torch.uint8, device="cpu", pin_memory=True)
    whole = pinned.numpy().data
    free += [(pinned.data_ptr() + at, whole[at : at + size]) for at in range(0, size * _ROWS_AT_ONCE, size)]


@functools.lru_cache(64)
def _packed(codebook: Codebook) -> int:
    """A codebook as a job holds it."""
    return int.from_bytes(bytes(codebook.exponents), "little")


class _Attached:
    """The calling thread works for a device, and afterwards for what it worked before."""

    def __init__(self, device: torch.device, context: Any) -> None:
        self._index, self._context, self._mode = device.index, context, _CaptureMode()
        self._before = threading.local()

    def __enter__(self) -> None:
        # Else a thread is on device 0, and its first query of an event makes a context there.
        before = torch._C._cuda_getDevice()
        if before != self._index:
            torch._C._cuda_setDevice(self._index)
        self._before.device, self._before.mode = before, self._mode.exchange(_THREAD_LOCAL_MODE)
        self._context.push()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._context.pop()
        self._mode.exchange(self._before.mode)
        if self._before.device != self._index:
            torch._C._cuda_setDevice(self._before.device)


class _Chosen(threading.local):
    """The lanes that a thread has chosen, the one in use last."""

    def __init__(self) -> None:
        self.lanes: list[jit.Lane] = []


class _On:
    """Everything within goes to a lane. Costs next to nothing, unlike torch's own way of choosing a stream."""

    def __init__(self, chosen: _Chosen, lane: jit.Lane) -> None:
        self._chosen, self._lane = chosen, lane

    def __enter__(self) -> None:
        self._chosen.lanes.append(self._lane)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._chosen.lanes.pop()


def refuse_capture(device: torch.device) -> None:
    """InvalidArgument if the calling thread's current stream on a device is being captured into a graph."""
    with torch.cuda.device(device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise InvalidArgument(
            "a collective cannot be captured into a CUDA graph, since the host takes part in it; "
            "keep it out of the graph, or use the process group's own"
        )


class CudaDevice:
    """See Device. Torch's own current stream is set only where torch's operations are called: that is slow.

    Args:
        device: with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.key: Hashable = device.index
        # Streams of its own: what waits for a peer in a stream holds up all that is behind it, and were that another
        # Communicator's, two ranks could wait for each other.
        own = (*STREAMS, MESSAGES)
        self._lanes = jit.lend_lanes(device, len(own))
        self._chosen = _Chosen()
        lanes = [*self._lanes, jit.default_lane(device)]
        self._on = {name: _On(self._chosen, lane) for name, lane in zip((*own, CALLERS), lanes, strict=True)}
        self._attached = _Attached(device, self._lanes[0].device.context)
        self._current: dict[int, torch.cuda.Stream] = {}
        self._starts: dict[tuple[Any, ...], list[jit.Start]] = {}
        self._free_rows: dict[int, list[tuple[int, memoryview]]] = {}

    @property
    def lane(self) -> jit.Lane:
        """The one in use, in the calling thread."""
        return self._chosen.lanes[-1]

    def attached(self) -> _Attached:
        return self._attached

    def now(self) -> _Event:
        event = _Event()
        event.record(self._current_stream())
        return event

    def join(self, event: Event) -> None:
        event.wait(self._current_stream())  # type: ignore[attr-defined]

    def copy_of_callers(self, tensor: Tensor) -> _Copy:
        # Pinned: to any other memory the driver copies under a lock of its own, and no other thread could start what a
        # peer may be waiting for. torch's allocators keep both ends from others until the copy is done.
        source = raw_view(tensor)
        pinned = torch.empty(source.numel(), dtype=torch.uint8, device="cpu", pin_memory=True)
        pinned.copy_(source, non_blocking=True)
        return _Copy(pinned, self.now())

    def _current_stream(self) -> torch.cuda.Stream:
        """The caller's; torch makes a new object each time, and asks much before."""
        handle = torch._C._cuda_getCurrentRawStream(self._device.index)
        found = self._current.get(handle)
        if found is None:
            found = self._current[handle] = torch.cuda.current_stream(self._device)
        return found

    def check(self, device: torch.device) -> None:
        if device != self._device:
            raise InvalidArgument(
                f"tensors of one Communicator must be on one device: this one began on {self._device}, got {device}; "
                "make another Communicator for it"
            )
        refuse_capture(device)

    def is_current(self) -> bool:
        return torch._C._cuda_getDevice() == self._device.index

    def is_capturing(self) -> bool:
        return torch._C._cuda_isCurrentStreamCapturing()

    def can_use_callers(self) -> bool:
        return torch._C._cuda_getCurrentRawStream(self._device.index) == 0  # PyCUDA launches on no other of torch's

    def on(self, stream: str) -> _On:
        return self._on[stream]

    def share(self, shares: bool) -> None:
        self.lane.shares = shares

    def mark(self) -> _Event:
        event = _Event()
        event.record(self.lane.torch_stream)
        return event

    def after(self, event: Event) -> None:
        event.wait(self.lane.torch_stream)  # type: ignore[attr-defined]

    def empty(self, n_bytes: int) -> Tensor:
        return self.run(lambda: torch.empty(n_bytes, dtype=torch.uint8, device=self._device))

    def run(self, work: Callable[[], _T]) -> _T:
        with self.framework():
            return work()

    def framework(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self.lane.torch_stream)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self.lane.torch_stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.lane.copy(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())

    def release(self) -> None:
        lanes, self._lanes = self._lanes, []
        jit.take_back_lanes(lanes)

    def scratch_bytes(self, words: Sequence[int]) -> int:
        return scratch_bytes(sum(n_blocks(n) for n in words))

    def encode(
        self, words: Sequence[Tensor], codebooks: Sequence[object], frames: Sequence[Tensor], scratch: Tensor
    ) -> _Rows:
        headers = self._rows(HEADER_BYTES * len(words))
        jobs = []
        to = headers.address
        for source, codebook, frame in zip(words, codebooks, frames, strict=True):
            address, exponents = (codebook, 0) if type(codebook) is int else (0, _packed(codebook))
            n, capacity = source.numel(), frame.numel()
            jobs.append((source.data_ptr(), frame.data_ptr(), n, capacity, address, exponents, True, to))
            to += HEADER_BYTES
        element_bytes, at = words[0].element_size(), scratch.data_ptr()
        self._start(
            ("encode", element_bytes, at, *jobs), lambda table: launch_encode(self.lane, table, element_bytes, at), jobs
        )
        headers.event = self.mark()
        return headers

    def codebooks(self, words: Sequence[Tensor], kind: str | Codebook) -> Sequence[object]:
        if isinstance(kind, Codebook):
            return [kind] * len(words)
        rows = self.lane.room("statistics", jit.STATISTICS_BYTES * len(words))
        element_bytes, jobs = words[0].element_size(), [measuring(w) for w in words]

        def launch(table: jit.Table) -> list[jit.Start]:
            return launch_measure(self.lane, table, element_bytes, max(samples_of(w) for w in words), rows)

        self._start(("measure", element_bytes, rows, *jobs), launch, jobs)
        return [rows + jit.STATISTICS_BYTES * i + _CODEBOOK_AT[kind] for i in range(len(words))]

    def decode(self, frames: Sequence[Tensor], out: Sequence[Tensor]) -> _Rows:
        jobs = [(o.data_ptr(), f.data_ptr(), o.numel(), f.numel()) for f, o in zip(frames, out, strict=True)]
        verdicts, element_bytes = self._rows(jit.VERDICT_BYTES * len(jobs)), out[0].element_size()
        rows = verdicts.address
        self._start(
            ("decode", element_bytes, rows, *jobs),
            lambda table: launch_decode(self.lane, table, element_bytes, rows),
            jobs,
        )
        return verdicts

    def decode_reduce(self, terms: Sequence[Tensor], out: Tensor, kind: str, factor: float | None) -> _Rows:
        n = out.numel()
        jobs = []
        for term in terms:
            address, is_frame = term.data_ptr(), term.dtype == torch.uint8
            jobs.append((0, address, n, term.numel()) if is_frame else (address, 0, n, 0))
        verdicts, element_bytes, to = self._rows(jit.VERDICT_BYTES * len(jobs)), out.element_size(), out.data_ptr()
        rows = verdicts.address

        def launch(table: jit.Table) -> list[jit.Start]:
            return launch_decode_reduce(self.lane, table, element_bytes, to, kind == "avg", factor, rows)

        self._start(("reduce", element_bytes, to, kind, repr(factor), rows, *jobs), launch, jobs, same_tiles=True)
        return verdicts

    def _start(
        self,
        key: tuple[Any, ...],
        launch: Callable[[jit.Table], list[jit.Start]],
        jobs: Sequence[tuple[Any, ...]],
        same_tiles: bool = False,
    ) -> None:
        """Launch on the lane in use; what was launched before with everything at the same places is started again.

        Args:
            key: all that `launch` depends on, but for the lane.
            jobs: fields of jit.Job.
        """
        if len(jobs) > jit.INLINE_JOBS:  # their table is copied ahead of the kernel, and is the lane's until it is done
            with self.framework():
                launch(jit.make_table([jit.Job(*job) for job in jobs], self._device, same_tiles=same_tiles))
            return
        lane = self.lane
        key = (lane.handle, lane.generation, lane.shares, *key)
        known = self._starts.get(key)
        if known is not None:
            jit.start(known, lane.stream)
            return
        table = jit.make_table([jit.Job(*job) for job in jobs], self._device, same_tiles=same_tiles)
        starts = launch(table)
        if lane.generation == key[1]:
            if len(self._starts) >= _MOST_STARTS:
                self._starts.clear()
            self._starts[key] = starts

    def _rows(self, n_bytes: int) -> _Rows:
        free = self._free_rows.setdefault(_class_bytes(n_bytes), [])
        if not free:
            _add_rows(free, n_bytes)
        return _Rows(free.pop(), n_bytes, free)

    def to_host(self, tensors: Sequence[Tensor]) -> _Copy:
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        pinned = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=True)
        at = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            self.lane.to_host(pinned[at : at + size], tensor.data_ptr())
            at += size
        return _Copy(pinned, self.mark())

    def to_device(self, target: Tensor, source: Tensor) -> None:
        # torch's pinned allocator does not reuse the block before the copy is done
        self.run(lambda: target.copy_(source.pin_memory(), non_blocking=True))

    def as_told(self, verdicts: _Rows, told: Sequence[tuple[int, int]]) -> bool:
        return as_told(verdicts.read(), told)

    def headers(self, verdicts: _Rows) -> list[FrameHeader | ZipcclError | None]:
        found: list[FrameHeader | ZipcclError | None] = []
        packed = verdicts.read()
        for index in range(len(packed) // jit.VERDICT_BYTES):
            try:
                found.append(verdict_on(packed, index))
            except ZipcclError as error:
                found.append(error)
        return found


def pipeline_on_cuda(exchange: Exchange, group: dist.ProcessGroup, device: torch.device) -> Pipeline:
    """The pipeline of a Communicator on this rank's device: over NCCL if the group has it for CUDA, else over gloo.

    Raises:
        InvalidArgument: no PyCUDA.
        PeerError, RankTimeout: NCCL could not connect the ranks, or not in time.
    """
    link: Link
    if has_nccl(group):  # then all ranks are here at once, and must know before they connect that none is missing
        made = _made_on_all_ranks(exchange, device)
        timeout_s, board = exchange.policy.timeout_s, exchange.board
        link = NcclLink(board, exchange.rank, exchange.size, made, device, timeout_s, lambda: made.lane.handle)
        connect_within(max(timeout_s, LEAST_CONNECT_S), exchange, link.connect)
    else:
        made = CudaDevice(device)

        def poll(query: Callable[[], bool], deadline: float) -> None:
            exchange.poll(query, deadline, "copying to the host", [exchange.rank])

        link = GlooLink(exchange.transport, made, poll)
    return Pipeline(exchange, made, link)


def connect_within(timeout_s: float, exchange: Exchange, connect: Callable[[], None]) -> None:
    """Connect the ranks, on a thread of its own: it would wait for ever for one that does not come.

    Raises:
        PeerError: a rank is gone, or could not; on all ranks.
        RankTimeout: one did not within timeout_s; on all ranks.
    """
    what, failures = "Communicator: connecting NCCL", list[BaseException]()

    def run() -> None:
        try:
            connect()
        except BaseException as exc:
            failures.append(exc)

    thread = threading.Thread(target=run, name="zipccl-connect", daemon=True)
    thread.start()
    try:
        _connected(thread, failures, exchange, what, timeout_s)
    finally:
        let_go([thread], _CONNECT_EXIT_S)
    if failures:
        if gone := exchange.first_lost(_NEWS_S):  # NCCL may hear of it sooner than we
            raise exchange.transport_failed(what, failures[0], gone)
        text = " ".join((str(failures[0]) or type(failures[0]).__name__).split())
        told = (
            f"{what}: rank {exchange.rank} of {exchange.size} failed: {text}; every rank needs a GPU of its own, and a "
            "Communicator 0.8 GiB of it"
        )
        raise exchange.give_up(PeerError(told), failures[0]) from failures[0]


def _connected(
    thread: threading.Thread, failures: list[BaseException], exchange: Exchange, what: str, timeout_s: float
) -> None:
    """Wait until all ranks are connected, or this one failed: one alone must not go on, and hear of others later."""
    deadline, lost = time.monotonic() + timeout_s, exchange.transport.lost
    while thread.is_alive() or (not failures and _is_missing_one(exchange)):
        thread.join(_CONNECT_NAP_S)
        if lost:
            raise exchange.transport_failed(what, RuntimeError("its connection is lost"), lost[:1])
        if time.monotonic() > deadline:
            late = exchange.peers or [exchange.rank]
            raise exchange.transport_failed(what, RuntimeError("timed out"), late, timeout_s)
        if not thread.is_alive():
            time.sleep(_CONNECT_NAP_S)


def _is_missing_one(exchange: Exchange) -> bool:
    try:
        return bool(exchange.board.absent("connected", 0.0))
    except ZipcclError as exc:  # published by one that could not
        raise exchange.give_up(exc, exc) from exc


def _made_on_all_ranks(exchange: Exchange, device: torch.device) -> CudaDevice:
    made, trouble = None, ""
    try:
        Nccl()
        made = CudaDevice(device)
    except Exception as exc:  # no PyCUDA, a driver that does not work, or another NCCL than torch's
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
