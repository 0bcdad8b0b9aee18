"""How bytes on a device get to the same device of another rank: NCCL between streams, or gloo by way of the host."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidArgument
from .board import Board
from .device import Device, Event, HostCopy
from .stragglers import join, let_go
from .transport import Transport

log = logging.getLogger("zipccl")

NCCL_GRACE_S = 60.0
POST_S = 2.0
ABORT_S = 2.0
"""How long who gives up waits for NCCL to do so. A kernel that waits for a peer takes 60 ms to notice, each one that is
queued, and a thousand may be."""
_CONNECT_NAP_S = 0.001
HALVED_BYTES = 16 << 20
"""From which size on a piece goes in two halves at once. Below, starting the second costs more than it saves."""
_ALIGN_BYTES = 128


class Piece(NamedTuple):
    """Bytes to or from a peer: [n] uint8 on the device, contiguous, at least one."""

    peer: int
    data: Tensor


class Posted(Protocol):
    """Pieces under way."""

    def arrive(self, deadline: float) -> None:
        """The stream in use goes on when all pieces have come and gone; the host may have to wait. May be repeated."""


class Link(Protocol):
    """The way between the devices of a Communicator's ranks. Used by the thread that carries calls through.

    Two ranks post alike: what one sends in its n-th post to the other, the other receives in its n-th post from it.
    Trouble is a RuntimeError, "timed out" in its text if it was the deadline (of time.monotonic()).

    Attributes:
        straight: its group takes the device's tensors on any stream, in order with the posts: a call that is not coded
            may go there without asking.
    """

    straight: bool

    def post(
        self, sends: Sequence[Piece], receives: Sequence[Piece], tag: int, deadline: float, in_order: bool = False
    ) -> Posted:
        """Post pieces together, after what the stream in use holds. They are kept alive by the caller.

        Args:
            in_order: only the stream in use will ask for their arrival.
        """

    def group(self) -> Any:
        """The backend's process group, for collectives of its own."""

    def begin(self, start: Callable[[], Any]) -> Posted:
        """Start a collective of the group, after what the stream in use holds; only where `straight`."""

    def abort(self) -> None:
        """Give up everything under way: streams that wait for it go on. From any thread; may be repeated."""

    def close(self) -> None:
        """Free it, with nothing under way."""


class NcclLink:
    """NCCL, in the order of the posts; no host waits.

    It has two communicators: a large piece goes in two halves, one on each, at the same time. Over the host's memory
    two kernels move 31 GB/s where one moves 26, with however many channels (docs/PERFORMANCE.md).

    Args:
        board: where the ranks find each other.
        rank, size: in the group.
        device, index: of this rank; no two ranks may share it.
        stream: gives the handle of the device's stream in use.
    """

    straight = True

    def __init__(
        self,
        board: Board,
        rank: int,
        size: int,
        device: Device,
        index: torch.device,
        timeout_s: float,
        stream: Callable[[], int],
    ) -> None:
        options = dist.ProcessGroupNCCL.Options()
        # Only what this layer has lost track of may run into NCCL's own limit, which ends the process.
        options._timeout = timedelta(seconds=timeout_s + NCCL_GRACE_S)
        stores = [board.backend_store(name) for name in ("nccl", "nccl halves")]
        self._backends = [dist.ProcessGroupNCCL(store, rank, size, options) for store in stores]
        self._group = dist.ProcessGroup(stores[0], rank, size)
        self._group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        self._group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, self._backends[0])
        self._nccl = Nccl()
        self._rank, self._size = rank, size
        self._device, self._index, self._stream = device, index, stream
        self._aborted = False
        self._lock = threading.Lock()

    def connect(self) -> None:
        """Connect all ranks, each with each, before anything is posted; blocks for as long as one of them does not.

        They must at once, and in the first post that could not be said: some may have nothing to send. NCCL connects
        two ranks when they first exchange something, and waits there for the other.
        """
        for backend in self._backends:
            backend.eager_connect_single_device(self._index)
        peers = [peer for peer in range(self._size) if peer != self._rank]
        if not peers:
            return
        with self._device.attached(), self._device.on("move"):
            rooms = [self._device.empty(_ALIGN_BYTES * self._size) for _ in range(2)]
            sends, receives = ([Piece(peer, room[_ALIGN_BYTES * peer :][:1]) for peer in peers] for room in rooms)
            for which in range(len(self._backends)):
                self._nccl.exchange([(self._communicator(which), sends, receives, self._stream())])
            done, deadline = self._device.mark(), time.monotonic() + NCCL_GRACE_S
            while not done.query():
                if time.monotonic() > deadline:
                    raise dist.DistBackendError("timed out")
                time.sleep(_CONNECT_NAP_S)

    def post(
        self, sends: Sequence[Piece], receives: Sequence[Piece], tag: int, deadline: float, in_order: bool = False
    ) -> Posted:
        if not sends and not receives:
            return _Nothing()
        with self._lock:
            if self._aborted:
                raise dist.DistBackendError("the connections of this Communicator are closed")
            (sends, more_sends), (receives, more_receives) = halves(sends), halves(receives)
            parts = [(self._communicator(0), sends, receives, self._stream())]
            if not more_sends and not more_receives:
                self._nccl.exchange(parts)
            else:
                begun = self._device.mark()
                with self._device.on("beside"):
                    self._device.after(begun)
                    self._nccl.exchange([*parts, (self._communicator(1), more_sends, more_receives, self._stream())])
                    ended = self._device.mark()
                self._device.after(ended)
        if in_order:
            return _Nothing()
        return Ordered(self._device, self._device.mark())

    def _communicator(self, which: int) -> int:
        return int(self._backends[which]._comm_ptr())  # type: ignore[attr-defined]  # torch may have given it up

    def group(self) -> Any:
        return self._group

    def begin(self, start: Callable[[], Any]) -> Posted:
        return _Begun(start())

    def abort(self) -> None:
        if self._end():
            # At once: the end of one communicator may wait for the device, and there a kernel of the other for a peer
            # that is gone.
            aborts = [threading.Thread(target=_abort, args=(backend,), daemon=True) for backend in self._backends]
            for abort in aborts:
                abort.start()
            join(aborts, ABORT_S)
            let_go(aborts, NCCL_GRACE_S)

    def close(self) -> None:
        if self._end():
            for backend in self._backends:
                backend.shutdown()

    def _end(self) -> bool:
        """No post after this; whether it is the first time. A post that hangs is ended by what comes."""
        held = self._lock.acquire(timeout=POST_S)
        first, self._aborted = not self._aborted, True
        if held:
            self._lock.release()
        return first


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except Exception:  # whoever gives up goes on with the rest
        log.exception("giving up a communicator of NCCL's")


def halves(pieces: Sequence[Piece]) -> tuple[Sequence[Piece], list[Piece]]:
    """The pieces, or the first half of each that is large; and the other halves. Sender and receiver cut alike."""
    if max((piece.data.numel() for piece in pieces), default=0) < HALVED_BYTES:
        return pieces, []
    first, second = [], []
    for peer, data in pieces:
        n = data.numel()
        cut = n if n < HALVED_BYTES else -(-n // (2 * _ALIGN_BYTES)) * _ALIGN_BYTES
        first.append(Piece(peer, data[:cut]))
        if cut < n:
            second.append(Piece(peer, data[cut:]))
    return first, second


class Nccl:
    """Grouped sends and receives on a communicator of torch's, on a stream of our own: torch's cost ten times as much
    of the host's time, for streams, events and a watchdog that the pipeline has itself.

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/p2p.html

    Raises:
        InvalidArgument: torch's NCCL cannot be reached so.
    """

    _UINT8, _IN_PROGRESS = 1, 7

    def __init__(self) -> None:
        library = ctypes.CDLL("libnccl.so.2")  # the one that torch has loaded
        version = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(version))
        major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
        if version.value != 10000 * major + 100 * minor + patch:
            raise InvalidArgument(
                f"Communicator: torch has NCCL {major}.{minor}.{patch}, and libnccl.so.2 is {version.value}; use a "
                "torch that loads NCCL as a library, and the same one"
            )
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._start, self._end = library.ncclGroupStart, library.ncclGroupEnd
        self._send, self._recv = library.ncclSend, library.ncclRecv
        for function in (self._send, self._recv):
            function.argtypes = [pointer, size, number, number, pointer, pointer]
        self._error = library.ncclGetLastError
        self._error.argtypes, self._error.restype = [pointer], ctypes.c_char_p

    def exchange(self, parts: Sequence[tuple[int, Sequence[Piece], Sequence[Piece], int]]) -> None:
        """All of it in one group; DistBackendError if NCCL refuses.

        Args:
            parts: a communicator, what it sends and receives, and the handle of the stream that this goes to, each.
        """
        failed = self._start()
        for communicator, sends, receives, stream in parts:
            for function, pieces in ((self._send, sends), (self._recv, receives)):
                for peer, data in pieces:
                    failed = failed or function(data.data_ptr(), data.numel(), self._UINT8, peer, communicator, stream)
        ended = self._end()
        if failed or ended:
            why = (self._error(communicator) or b"").decode(errors="replace")
            if self._IN_PROGRESS in (failed, ended):
                why = "the communicator does not block; unset TORCH_NCCL_USE_COMM_NONBLOCKING"
            raise dist.DistBackendError(f"NCCL error {failed or ended}: {why}")


class _Nothing:
    """What the stream in use has, or comes to, by itself."""

    def arrive(self, deadline: float) -> None:
        pass


class Ordered:
    """What is over where an event is."""

    def __init__(self, device: Device, event: Event) -> None:
        self._device, self._event = device, event

    def arrive(self, deadline: float) -> None:
        self._device.after(self._event)


class _Begun:
    """A Work whose wait() orders streams and does not hold up the host."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def arrive(self, deadline: float) -> None:
        self._work.wait()


class GlooLink:
    """gloo between host copies: any ranks, on any devices; the host waits in `post` and in `arrive`.

    Args:
        transport: its group "data" carries the pieces.
        device: of this rank.
        poll: waits until a query is true, bounded by a deadline.
    """

    straight = False

    def __init__(self, transport: Transport, device: Device, poll: Callable[[Callable[[], bool], float], None]) -> None:
        self._transport, self._device, self._poll = transport, device, poll
        self._copies: list[tuple[int, HostCopy]] = []  # those of the latest post live on, lest it is given up half-way

    def post(
        self, sends: Sequence[Piece], receives: Sequence[Piece], tag: int, deadline: float, in_order: bool = False
    ) -> Posted:
        arrivals = []
        for peer, data in receives:
            buffer = torch.empty(data.numel(), dtype=torch.uint8, device="cpu")
            arrivals.append((data, buffer, self._transport.recv("data", buffer, peer, tag)))
        self._copies = [(peer, self._device.to_host([data])) for peer, data in sends]
        departures = []
        for peer, copy in self._copies:
            self._poll(copy.query, deadline)
            departures.append(self._transport.send("data", copy.tensor(), peer, tag))
        return _Carried(self._device, arrivals, departures)

    def group(self) -> Any:
        return self._transport.group("native")

    def begin(self, start: Callable[[], Any]) -> Posted:
        raise NotImplementedError("nothing goes straight to gloo")

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        pass


class _Carried:
    def __init__(self, device: Device, arrivals: list[tuple[Tensor, Tensor, Any]], departures: list[Any]) -> None:
        self._device, self._arrivals, self._departures = device, arrivals, departures

    def arrive(self, deadline: float) -> None:
        arrivals, self._arrivals = self._arrivals, []
        for data, buffer, work in arrivals:
            work.wait(_left(deadline))
            self._device.to_device(data, buffer)
        departures, self._departures = self._departures, []
        for work in departures:
            work.wait(_left(deadline))


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))
