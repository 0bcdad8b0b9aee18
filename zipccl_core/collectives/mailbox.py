"""Control messages between processes of one host by way of memory that both have mapped: seen within a microsecond.

By gloo the same message wakes three threads on its way, each of which may sleep deeper than a transfer takes. Gloo
stays for ranks on other hosts, for machines whose stores may be seen in another order, and for the news that a peer is
gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import struct
import tempfile
import time
from collections.abc import Sequence

from .board import Board
from .wire import CONTROL_BYTES

SLOTS = 256
_LINE_BYTES = 128  # two neighbouring cache lines: counters of two processes are not in one
_STAMP = struct.Struct("d")
_SLOT_BYTES = CONTROL_BYTES + _LINE_BYTES
_BOX_BYTES = 2 * _LINE_BYTES + SLOTS * _SLOT_BYTES
_TOKEN_BYTES = 16
_FOLDER = "/dev/shm"
_ORDERED = ("x86_64", "AMD64")  # where what one processor stores is seen by others in that order


class Mailbox:
    """A ring of control messages from one process to one other.

    Args:
        memory: _BOX_BYTES bytes that both have mapped, zero at first.
    """

    def __init__(self, memory: memoryview) -> None:
        self._bytes = memory
        self._numbers = memory.cast("Q")  # an item is stored at once, not byte by byte
        self._count = 0  # of messages put, or taken, on this side

    def put(self, data: bytes) -> bool:
        """Leave a message, if there is room."""
        if self._count - self._numbers[_LINE_BYTES // 8] >= SLOTS:
            return False
        at = 2 * _LINE_BYTES + self._count % SLOTS * _SLOT_BYTES
        _STAMP.pack_into(self._bytes, at, time.monotonic())
        self._bytes[at + _LINE_BYTES : at + _SLOT_BYTES] = data
        self._count += 1
        self._numbers[0] = self._count  # last: now it is there
        return True

    def take(self) -> tuple[float, bytes] | None:
        """The next message and when it was put (of time.monotonic()), if there is one."""
        if self._numbers[0] == self._count:
            return None
        at = 2 * _LINE_BYTES + self._count % SLOTS * _SLOT_BYTES
        (put_s,) = _STAMP.unpack_from(self._bytes, at)
        data = bytes(self._bytes[at + _LINE_BYTES : at + _SLOT_BYTES])
        self._count += 1
        self._numbers[_LINE_BYTES // 8] = self._count
        return put_s, data


def connect(board: Board, rank: int, peers: Sequence[int], timeout_s: float) -> dict[int, tuple[Mailbox, Mailbox]]:
    """Mailboxes to and from each peer that maps the same memory. Collective; leaves nothing in the file system.

    Returns:
        peer → (for messages to it, for those from it); peers on other hosts are missing.
    """
    size = _TOKEN_BYTES + _LINE_BYTES + len(peers) * _BOX_BYTES
    path, token, own = _make(size)
    boxes_of: dict[int, mmap.mmap | None] = {}
    try:
        told = board.share("mailbox", [path, token.hex()], timeout_s)
        if path:
            boxes_of = {peer: _open(told[peer][0], bytes.fromhex(told[peer][1]), size) for peer in peers}
        mine = [peer for peer, memory in boxes_of.items() if memory is not None]
        opened = board.share("mailbox opened", mine, timeout_s)
    finally:
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)
    found: dict[int, tuple[Mailbox, Mailbox]] = {}
    for peer in peers:
        memory = boxes_of.get(peer)
        if own is None or memory is None or rank not in opened[peer]:
            continue
        others = [p for p in (*peers, rank) if p != peer]
        found[peer] = _box(memory, sorted(others).index(rank)), _box(own, sorted(peers).index(peer))
    return found


def _box(memory: mmap.mmap, index: int) -> Mailbox:
    begin = _LINE_BYTES + index * _BOX_BYTES
    return Mailbox(memoryview(memory)[begin : begin + _BOX_BYTES])


def _make(size: int) -> tuple[str, bytes, mmap.mmap | None]:
    """A file in memory, zero but for a token; its path is empty if there cannot be one."""
    token = os.urandom(_TOKEN_BYTES)
    if platform.machine() not in _ORDERED:
        return "", token, None
    try:
        handle, path = tempfile.mkstemp(prefix="zipccl-", dir=_FOLDER)
    except OSError:
        return "", token, None
    try:
        os.posix_fallocate(handle, 0, size)  # a page that is missing later would end the process
        memory = mmap.mmap(handle, size)
        memory[:_TOKEN_BYTES] = token
        return path, token, memory
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return "", token, None
    finally:
        os.close(handle)


def _open(path: str, token: bytes, size: int) -> mmap.mmap | None:
    """The memory of a peer, if this is its file."""
    if not path:
        return None
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(handle).st_size != size:
            return None
        memory = mmap.mmap(handle, size)
        return memory if memory[:_TOKEN_BYTES] == token else None
    except OSError:
        return None
    finally:
        os.close(handle)
