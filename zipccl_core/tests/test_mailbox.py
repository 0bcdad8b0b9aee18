"""Mailboxes: what is put on one side is taken on the other, in order, whatever is full, missing or gone."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from zipccl_core.collectives import mailbox as mailbox_module
from zipccl_core.collectives.board import Board
from zipccl_core.collectives.mailbox import SLOTS, Mailbox, connect
from zipccl_core.collectives.transport import Control, Inbox, Transport
from zipccl_core.collectives.wire import CONTROL_BYTES
from zipccl_core.errors import RankTimeout

needs_order = pytest.mark.skipif(
    mailbox_module.platform.machine() not in mailbox_module._ORDERED, reason="this machine has no mailboxes"
)


def message(number: int) -> bytes:
    return number.to_bytes(8, "little") * (CONTROL_BYTES // 8)


def number_of(data: bytes) -> int:
    number = int.from_bytes(data[:8], "little")
    assert data == message(number), "a message in pieces"
    return number


def both_sides() -> tuple[Mailbox, Mailbox]:
    memory = bytearray(mailbox_module._BOX_BYTES)
    return Mailbox(memoryview(memory)), Mailbox(memoryview(memory))


def on_all(n: int, action: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(action, range(n)))


def boards(n: int) -> list[Board]:
    store = HashStore()
    return [Board(PrefixStore("test", store), rank, n) for rank in range(n)]


def connected(n: int) -> list[dict[int, tuple[Mailbox, Mailbox]]]:
    made = boards(n)
    return on_all(n, lambda r: connect(made[r], r, [p for p in range(n) if p != r], 10.0))


def test_messages_come_in_order_with_the_time_they_were_put():
    writer, reader = both_sides()
    assert reader.take() is None
    for number in range(3 * SLOTS + 5):
        before = time.monotonic()
        assert writer.put(message(number))
        found = reader.take()
        assert found is not None
        assert number_of(found[1]) == number
        assert before <= found[0] <= time.monotonic()
    assert reader.take() is None


def test_a_full_box_takes_nothing_and_loses_nothing():
    writer, reader = both_sides()
    for number in range(SLOTS):
        assert writer.put(message(number))
    assert not writer.put(message(SLOTS))
    assert number_of((reader.take() or (0, b""))[1]) == 0
    assert writer.put(message(SLOTS))
    assert [number_of((reader.take() or (0, b""))[1]) for _ in range(SLOTS)] == list(range(1, SLOTS + 1))


def test_one_thread_reads_what_another_writes_at_the_same_time():
    writer, reader = both_sides()
    seen: list[int] = []

    def read() -> None:
        until = time.monotonic() + 30
        while len(seen) < 20_000 and time.monotonic() < until:
            if (found := reader.take()) is not None:
                seen.append(number_of(found[1]))

    thread = threading.Thread(target=read)
    thread.start()
    number = 0
    until = time.monotonic() + 30
    while number < 20_000 and time.monotonic() < until:
        number += writer.put(message(number))
    thread.join()
    assert seen == list(range(20_000))


@needs_order
@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_pair_has_boxes_of_its_own_and_no_file_is_left(n, monkeypatch, tmp_path):
    monkeypatch.setattr(mailbox_module, "_FOLDER", str(tmp_path))
    found = connected(n)
    for rank in range(n):
        for peer, (to, _) in found[rank].items():
            assert to.put(message(100 * rank + peer))
    for rank in range(n):
        assert sorted(found[rank]) == [p for p in range(n) if p != rank]
        for peer, (_, come) in found[rank].items():
            taken = come.take()
            assert taken is not None
            assert number_of(taken[1]) == 100 * peer + rank
            assert come.take() is None
    assert not os.listdir(tmp_path)


@needs_order
def test_no_file_is_left_if_a_peer_never_comes(monkeypatch, tmp_path):
    monkeypatch.setattr(mailbox_module, "_FOLDER", str(tmp_path))
    with pytest.raises(RankTimeout):
        connect(boards(2)[0], 0, [1], 0.3)
    assert not os.listdir(tmp_path)


@needs_order
def test_another_process_sees_what_is_put(tmp_path: Path):
    code = (
        "import sys; from torch.distributed import FileStore\n"
        "from zipccl_core.collectives.board import Board; from zipccl_core.collectives.mailbox import connect\n"
        "board = Board(FileStore(sys.argv[1], 2), 1, 2); to, come = connect(board, 1, [0], 60.0)[0]\n"
        "import time; until = time.monotonic() + 60\n"
        "while (found := come.take()) is None and time.monotonic() < until: time.sleep(0)\n"
        "to.put(found[1][::-1]); board.share('end', 0, 60.0)\n"
    )
    from torch.distributed import FileStore

    path = str(tmp_path / "store")
    child = subprocess.Popen([sys.executable, "-c", code, path])
    board = Board(FileStore(path, 2), 0, 2)
    to, come = connect(board, 0, [1], 60.0)[1]
    assert to.put(message(0x0102030405060708))
    until = time.monotonic() + 60
    while (found := come.take()) is None and time.monotonic() < until:
        time.sleep(0.001)
    board.share("end", 0, 60.0)
    assert child.wait(60) == 0
    assert found is not None
    assert found[1] == message(0x0102030405060708)[::-1]


@needs_order
def test_ranks_that_do_not_map_the_same_memory_have_none_and_all_know(monkeypatch):
    opened = mailbox_module._open

    def all_but_one(path: str, token: bytes, size: int) -> Any:
        return opened(path, token, size) if threading.current_thread().name != "far" else None

    monkeypatch.setattr(mailbox_module, "_open", all_but_one)
    made = boards(3)

    def run(rank: int) -> Any:
        threading.current_thread().name = "far" if rank == 2 else "near"
        return connect(made[rank], rank, [p for p in range(3) if p != rank], 10.0)

    assert [sorted(found) for found in on_all(3, run)] == [[1], [0], []]


@pytest.mark.parametrize("missing", ["order", "folder"])
def test_where_there_can_be_none_nobody_has_any(monkeypatch, missing):
    if missing == "order":
        monkeypatch.setattr(mailbox_module, "_ORDERED", ())
    else:
        monkeypatch.setattr(mailbox_module, "_FOLDER", "/nowhere")
    assert connected(2) == [{}, {}]


def test_news_that_a_peer_is_gone_comes_after_what_it_left():
    writer, reader = both_sides()
    inbox = Inbox()
    inbox.add({1: reader}, lambda: None)
    inbox.put(Control(1, None, 0.0, "gone"))
    assert writer.put(message(7))
    assert number_of(inbox.get(timeout=1.0).data or b"") == 7
    assert inbox.get(timeout=1.0).lost == "gone"
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0.01)
    with pytest.raises(queue.Empty):
        inbox.get_nowait()


@needs_order
def test_what_there_is_no_room_for_follows_in_order():
    made = boards(2)
    transports = on_all(2, lambda r: Transport(made[r], r, 2, 20.0))
    on_all(2, lambda r: transports[r].share_memory(made[r], r, 20.0))
    for number in range(2 * SLOTS + 3):
        transports[0].send_control(message(number), 1)
    seen: list[int] = []
    while len(seen) < 2 * SLOTS + 3:
        seen.append(number_of(transports[1].inbox.get(timeout=10.0).data or b""))
        with pytest.raises(queue.Empty):
            transports[0].inbox.get_nowait()  # looking for messages leaves those that wait
    assert seen == list(range(2 * SLOTS + 3))
    on_all(2, lambda r: transports[r].close())
    with pytest.raises(RuntimeError, match="closed"):
        transports[0].send_control(message(0), 1)
