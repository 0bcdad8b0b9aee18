"""The connections of one Communicator: gloo groups of its own, and who listens to the peers.

Records and verdicts are control messages. One listener thread a peer receives them, so that waiting for one has an
exact deadline, the order of arrival is known, and a peer whose connection closes is noticed at once, whatever this rank
is waiting for. (A gloo wait that runs out closes every connection of its group: it serves to give up, and for nothing
else.)
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..errors import PeerError, ZipcclError
from .board import Board
from .mailbox import Mailbox, connect
from .message import Message, as_tensor
from .stragglers import let_go
from .wire import CONTROL_BYTES

_CONTROL_TAG, _ABORT_TAG = 1, 2
_FOREVER = timedelta(days=3650)
_FAREWELL_S = 2.0
_CONNECT_S, _CONNECT_LOOK_S = 30.0, 0.05
_BYE = b"ZBYE".ljust(CONTROL_BYTES, b"\0")
_ASK = b"ZASK".ljust(CONTROL_BYTES, b"\0")
_NAP_S, _LONGEST_NAP_S = 50e-6, 1e-3
LOOKS, _LOOKS_ELSEWHERE = 200, 8
GROUPS = ("control", "data", "phase_two", "native")


def nap_s(waited_s: float) -> float:
    """How long to sleep before looking again: a fiftieth of what has been waited, for whoever looks often takes the
    interpreter from others. A processor that has slept for a millisecond then does everything at a fourth of its speed.
    """
    return min(max(_NAP_S, waited_s / 50), _LONGEST_NAP_S)


# Lets another thread run, if one wants to, and goes on at once. time.sleep(0) sets a timer and sleeps until it rings:
# where processors are virtual that takes longer than most of what is waited for, and leaves the caches cold.
let_others: Callable[[], object] = getattr(os, "sched_yield", functools.partial(time.sleep, 0))


def is_of_the_connection(exc: BaseException) -> bool:
    """Whether a backend's error is of a connection, or of the time, and not of what it was asked to do."""
    marks = ("imed out", "onnection", "roken pipe", "transport/tcp")
    return isinstance(exc, (Disconnected, dist.DistError)) or any(mark in str(exc) for mark in marks)


class Disconnected(RuntimeError):
    """The connection to a peer is lost, which may show when a transfer is posted as well as when it is waited for.

    Attributes:
        peer: group rank.
    """

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer = peer


@dataclass(slots=True)
class Control:
    """A control message, or the news that no more will come from a peer.

    Attributes:
        src: the peer, a group rank.
        data: CONTROL_BYTES bytes; none if a transfer that is watched is over; None if the peer is gone.
        arrived_s: time.monotonic() when it came.
        lost: why the peer is gone.
    """

    src: int
    data: bytes | None
    arrived_s: float
    lost: str = ""


class Inbox:
    """What has come from all peers, whichever way; taken by one thread at a time.

    Attributes:
        looks: how often it is looked for something before the thread sleeps; a sleep takes longer than most waits.
    """

    def __init__(self) -> None:
        self.looks = 0
        self._queue: queue.SimpleQueue[Control] = queue.SimpleQueue()
        self._news: Control | None = None  # taken from there, and to be told once the mailboxes are empty
        self._boxes: list[tuple[int, Mailbox]] = []
        self._flush: Callable[[], None] = lambda: None

    def add(self, boxes: dict[int, Mailbox], flush: Callable[[], None]) -> None:
        """Look into mailboxes too; `flush` is called before."""
        self._boxes, self._flush = list(boxes.items()), flush

    def put(self, control: Control) -> None:
        """From any thread."""
        self._queue.put(control)

    def get_nowait(self) -> Control:
        """The next message; queue.Empty if there is none."""
        if not self._boxes:
            return self._queue.get_nowait()
        for _ in range(2):  # what a peer left before it went comes before the news that it is gone
            if (control := self._in_a_box()) is not None:
                return control
            if self._news is not None:
                news, self._news = self._news, None
                return news
            self._news = self._queue.get_nowait()
        raise AssertionError("not reached: there were news")

    def _in_a_box(self) -> Control | None:
        """The next message of a mailbox, if there is one."""
        self._flush()
        for src, box in self._boxes:
            if (found := box.take()) is not None:
                return Control(src, found[1], min(found[0], time.monotonic()))
        return None

    def get(self, timeout: float) -> Control:
        """The next message, if it comes within so many seconds; else queue.Empty."""
        began = time.monotonic()
        deadline = began + timeout
        for look in range(self.looks):
            if (control := self._in_a_box()) is not None:
                return control
            if look % _LOOKS_ELSEWHERE == 0 and not self._queue.empty():
                break
            let_others()
        while self._boxes:
            with contextlib.suppress(queue.Empty):
                return self.get_nowait()
            now = time.monotonic()
            if now > deadline:
                raise queue.Empty
            with contextlib.suppress(queue.Empty):
                self._news = self._queue.get(timeout=nap_s(now - began))
        return self._queue.get(timeout=max(deadline - time.monotonic(), 0.001))


class _Left:
    """A message in a mailbox: nothing has to be kept for it, or waited for."""

    def wait(self, timeout: timedelta) -> None:
        pass


LEFT = _Left()


class Transport:
    """Groups, listeners and the inbox.

    Args:
        board: where the groups find each other.
        rank, size: in the group.
        timeout_s: of the policy; connecting may take 30 s if that is less.

    Raises:
        PeerError: the ranks cannot connect.
    """

    def __init__(self, board: Board, rank: int, size: int, timeout_s: float) -> None:
        self.inbox = Inbox()
        self.asked: Callable[[], None] = lambda: None  # what to do when a peer asks whether this rank waits for others
        self._asking: list[Any] = []  # kept: they may still be under way
        self._boxes: dict[int, Mailbox] = {}
        self._waiting: deque[tuple[int, bytes]] = deque()  # for room in the mailboxes
        self._box_lock = threading.Lock()
        self._peers = [r for r in range(size) if r != rank]
        self._groups: dict[str, Any] = {}
        self.listeners: list[threading.Thread] = []
        self.watchers: list[threading.Thread] = []
        self.lost: list[int] = []  # peers whose connections are gone, in the order of the news
        self._watched: dict[int, queue.SimpleQueue[tuple[Watched, timedelta] | None]] = {}
        if not self._peers:
            return
        self._connect(board, rank, size, max(timeout_s, _CONNECT_S))
        try:
            for peer in self._peers:
                name = f"zipccl-listener-{peer}"
                thread = threading.Thread(target=self._listen, args=(peer,), name=name, daemon=True)
                thread.start()
                self.listeners.append(thread)
        except RuntimeError as exc:
            raise self.failed_to_begin(board, rank, exc) from exc

    def _connect(self, board: Board, rank: int, size: int, limit_s: float) -> None:
        """Make the groups, on a thread of its own: for a store whose host is stopped, gloo waits without an end."""
        failures: list[RuntimeError] = []

        def run() -> None:
            try:
                for name in GROUPS:
                    store = board.backend_store(name)
                    self._groups[name] = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=limit_s))
            except RuntimeError as exc:
                failures.append(exc)

        thread, over = threading.Thread(target=run, name="zipccl-connect", daemon=True), threading.Event()
        deadline = time.monotonic() + limit_s + _FAREWELL_S
        try:
            news = board.watch_for(over)
            thread.start()
            while thread.is_alive() and time.monotonic() < deadline and not news:
                thread.join(_CONNECT_LOOK_S)
        except RuntimeError as exc:  # no thread can be started
            news = []
            failures.append(exc)
        finally:
            over.set()
            let_go([thread], _FAREWELL_S)
        if thread.is_alive():
            failures.append(RuntimeError("timed out"))
        if news:
            raise news[0]
        if not failures:
            return
        why, absent = failures[0], list[int]()
        if "imed out" in str(why) or "onnection" in str(why):  # else this rank lacks something
            absent = board.absent("cannot connect", _FAREWELL_S)
            board.check()
        who = f"ranks {absent} of {size} did not connect" if absent else f"rank {rank} of {size} cannot connect"
        hint = "see whether they died" if absent else "see what it lacks"
        raise board.settle(PeerError(f"Communicator: {who}: {why}; {hint}")) from why

    def failed_to_begin(self, board: Board, rank: int, exc: RuntimeError) -> ZipcclError:
        """What all ranks raise if this one cannot start a thread; the peers are woken."""
        text = f"Communicator: rank {rank} cannot start a thread: {exc}; raise its limit of threads"
        error = board.settle(PeerError(text))
        self.abort()
        return error

    def ask(self, peers: list[int]) -> None:
        """Ask peers whether they wait for others; `asked` there is called, by its listener."""
        for peer in peers:
            with contextlib.suppress(RuntimeError):
                self._asking.append(self.send("control", _ASK, peer, _CONTROL_TAG))

    def group(self, name: str) -> Any:
        """One of GROUPS; RuntimeError once they are gone."""
        try:
            return self._groups[name]
        except KeyError:
            raise RuntimeError("the connections of this Communicator are closed") from None

    def send(self, group: str, data: bytes | torch.Tensor, peer: int, tag: int) -> Any:
        """Post bytes to a peer; a Work that keeps them alive. Disconnected if that cannot be, here or in its wait."""
        tensor = as_tensor(data) if isinstance(data, bytes) else data
        try:
            return _Kept(self.group(group).send([tensor], peer, tag), tensor, peer)
        except RuntimeError as exc:
            _lost(peer, exc)

    def recv(self, group: str, buffer: torch.Tensor, peer: int, tag: int) -> Any:
        """Post a receive from a peer; a Work. Disconnected as for `send`."""
        try:
            return _Kept(self.group(group).recv([buffer], peer, tag), buffer, peer)
        except RuntimeError as exc:
            _lost(peer, exc)

    def share_memory(self, board: Board, rank: int, timeout_s: float) -> None:
        """From now on, leave control messages in mailboxes where that can be, and look for them. Collective."""
        boxes = connect(board, rank, self._peers, timeout_s)
        self._boxes = {peer: box for peer, (box, _) in boxes.items()}
        self.inbox.add({peer: box for peer, (_, box) in boxes.items()}, self._flush)
        self.inbox.looks = LOOKS

    def send_control(self, data: bytes, peer: int) -> Any:
        """Post a control message of CONTROL_BYTES; a Work, LEFT if there is nothing to wait for."""
        if peer not in self._boxes:
            return self.send("control", data, peer, _CONTROL_TAG)
        if not self._groups:
            raise Disconnected(peer, "the connections of this Communicator are closed")
        with self._box_lock:
            if self._waiting or not self._boxes[peer].put(data):
                self._waiting.append((peer, data))
        return LEFT

    def _flush(self) -> None:
        """Leave what there was no room for."""
        if self._waiting:
            with self._box_lock:
                while self._waiting and self._boxes[self._waiting[0][0]].put(self._waiting[0][1]):
                    self._waiting.popleft()

    def send_message(self, message: Message, peer: int, tag: int) -> list[Any]:
        """Post both phases of a message; a Work for each."""
        works = [self.send("data", message.phase_one, peer, tag)]
        if message.phase_two is not None:
            works.append(self.send("phase_two", message.phase_two, peer, tag))
        return works

    def watch(self, work: Any, peer: int, timeout: timedelta) -> Watched:
        """Let another thread wait for a transfer from a peer; the inbox is told when it is over."""
        watched = Watched(work)
        if peer not in self._watched:
            self._watched[peer] = queue.SimpleQueue()
            thread = threading.Thread(target=self._watch, args=(peer,), name=f"zipccl-watcher-{peer}", daemon=True)
            self.watchers.append(thread)
            thread.start()
        self._watched[peer].put((watched, timeout))
        return watched

    def close(self) -> None:
        """Part from the peers: tell them, hear the same from them, free everything; bounded by 2 s."""
        with contextlib.suppress(RuntimeError):
            deadline = time.monotonic() + _FAREWELL_S
            while self._waiting and time.monotonic() < deadline:
                self._flush()
                time.sleep(_LONGEST_NAP_S)
            farewells = [self.send("control", _BYE, peer, _CONTROL_TAG) for peer in self._peers]
            for listener in self.listeners:
                listener.join(max(deadline - time.monotonic(), 0))
            # None is kept: a Work holds its group's connections, and abort() would not be their end.
            while farewells and not any(t.is_alive() for t in self.listeners):
                farewells.pop().wait(timedelta(seconds=_FAREWELL_S))
        self.abort()

    def abort(self) -> None:
        """Close every connection now; whoever waits on one, here or at a peer, is woken with an error."""
        groups, self._groups = self._groups, {}
        for waiting in list(self._watched.values()):
            waiting.put(None)
        hurry = any(listener.is_alive() for listener in self.listeners)
        for group in groups.values() if hurry else ():
            for peer in self._peers:  # the first that is still connected will do: its time-out closes all connections
                with contextlib.suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                    group.recv([nothing], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
        # A group's destructor waits for its event loop, about 25 ms of idleness: all together, not one by one.
        droppers = [threading.Thread(target=groups.pop, args=(name,), daemon=True) for name in list(groups)]
        try:
            for dropper in droppers:
                dropper.start()
        except RuntimeError:  # no thread can be started
            groups.clear()
            return
        for dropper in droppers:
            dropper.join(_FAREWELL_S)

    def _listen(self, peer: int) -> None:
        group = self._groups["control"]
        while True:
            buffer = torch.empty(CONTROL_BYTES, dtype=torch.uint8)
            try:
                group.recv([buffer], peer, _CONTROL_TAG).wait(_FOREVER)
            except RuntimeError as exc:
                if "Application timeout" not in str(exc):  # that is this rank's own giving up
                    self.lost.append(peer)
                self.inbox.put(Control(peer, None, time.monotonic(), f"its connection is lost: {exc}"))
                return
            data = buffer.numpy().tobytes()
            if data == _BYE:
                self.lost.append(peer)
                self.inbox.put(Control(peer, None, time.monotonic(), "it has given up its Communicator"))
                return
            if data == _ASK:
                self.asked()
                continue
            self.inbox.put(Control(peer, data, time.monotonic()))

    def _watch(self, peer: int) -> None:
        while (item := self._watched[peer].get()) is not None:
            watched, timeout = item
            watched.run(timeout)
            self.inbox.put(Control(peer, b"", time.monotonic()))


class Watched:
    """A transfer that another thread waits for. Gloo's own can be waited for, and closes all connections if in vain,
    but not asked whether it is over.

    Attributes:
        over: set when it is over, well or not.
    """

    def __init__(self, work: Any) -> None:
        self.over = threading.Event()
        self.tensor: torch.Tensor = work.tensor
        self._work = work
        self._failed: RuntimeError | None = None

    def run(self, timeout: timedelta) -> None:
        """Wait for it, on this thread."""
        try:
            self._work.wait(timeout)
        except RuntimeError as exc:
            self._failed = exc
        self.over.set()

    def wait(self, timeout: timedelta) -> None:
        """Wait until the other thread has; RuntimeError if it failed or is not over by then."""
        if not self.over.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self._failed is not None:
            raise self._failed


@dataclass
class _Kept:
    """A transfer together with the tensor that must live until it is done."""

    work: Any
    tensor: torch.Tensor
    peer: int

    def wait(self, timeout: timedelta) -> None:
        try:
            self.work.wait(timeout)
        except RuntimeError as exc:
            _lost(self.peer, exc)


def _lost(peer: int, exc: RuntimeError) -> NoReturn:
    """Say whose connection is lost; a time that is out says nothing of the connection."""
    if "imed out" in str(exc):
        raise exc
    raise Disconnected(peer, str(exc)) from exc
