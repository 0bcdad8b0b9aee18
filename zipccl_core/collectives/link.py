"""How bytes on a device get to the same device of another rank: NCCL between streams, or gloo by way of the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .board import Board
from .device import Device, HostCopy
from .transport import Transport

NCCL_GRACE_S = 60.0


class Piece(NamedTuple):
    """Bytes to or from a peer: [n] uint8 on the device, contiguous, at least one."""

    peer: int
    data: Tensor


class Posted(Protocol):
    """Pieces under way."""

    def arrive(self, deadline: float) -> None:
        """The stream in use goes on when all pieces have come and gone; the host may have to wait for that."""


class Link(Protocol):
    """The way between the devices of a Communicator's ranks. Used from the progress thread.

    Two ranks post alike: what one sends in its n-th post to the other, the other receives in its n-th post from it.
    Trouble is a RuntimeError, "timed out" in its text if it was the deadline (of time.monotonic()).

    Attributes:
        straight: its group takes the device's tensors on any stream, in order with the posts: a call that is not coded
            may go there without asking.
    """

    straight: bool

    def post(self, sends: Sequence[Piece], receives: Sequence[Piece], tag: int, deadline: float) -> Posted:
        """Post pieces together, after what the stream in use holds. They are kept alive by the caller."""

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

    Args:
        board: where the ranks find each other.
        rank, size: in the group.
        device: of this rank; no two ranks may share it.
    """

    straight = True

    def __init__(self, board: Board, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        options = dist.ProcessGroupNCCL.Options()
        # Only what this layer has lost track of may run into NCCL's own limit, which ends the process.
        options._timeout = timedelta(seconds=timeout_s + NCCL_GRACE_S)
        store = board.backend_store("nccl")
        self._device = device
        self._backend = dist.ProcessGroupNCCL(store, rank, size, options)
        self._group = dist.ProcessGroup(store, rank, size)
        self._group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        self._group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, self._backend)
        # All ranks must connect at once, and in the first post that could not be said: some may have nothing to send.
        self._backend.eager_connect_single_device(device)
        self._aborted = False

    def post(self, sends: Sequence[Piece], receives: Sequence[Piece], tag: int, deadline: float) -> Posted:
        if not sends and not receives:
            return _Nothing()
        self._group._start_coalescing(self._device)
        for peer, data in sends:
            self._group.send([data], peer, 0)
        for peer, data in receives:
            self._group.recv([data], peer, 0)
        return _Ordered(self._group._end_coalescing(self._device))

    def group(self) -> Any:
        return self._group

    def begin(self, start: Callable[[], Any]) -> Posted:
        return _Ordered(start())

    def abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            self._backend.abort()

    def close(self) -> None:
        if not self._aborted:
            self._aborted = True
            self._backend.shutdown()


class _Nothing:
    def arrive(self, deadline: float) -> None:
        pass


class _Ordered:
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

    def post(self, sends: Sequence[Piece], receives: Sequence[Piece], tag: int, deadline: float) -> Posted:
        arrivals = []
        for peer, data in receives:
            buffer = torch.empty(data.numel(), dtype=torch.uint8)
            arrivals.append((data, buffer, self._transport.recv("data", buffer, peer, tag)))
        copies: list[tuple[int, HostCopy]] = [(peer, self._device.to_host([data])) for peer, data in sends]
        departures = []
        for peer, copy in copies:
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
        for data, buffer, work in self._arrivals:
            work.wait(_left(deadline))
            self._device.to_device(data, buffer)
        for work in self._departures:
            work.wait(_left(deadline))


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))
