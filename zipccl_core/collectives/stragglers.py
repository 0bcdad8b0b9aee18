"""Threads in the backend that nobody waits for any more: one that comes back while Python ends aborts the process."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence

_let_go: dict[threading.Thread, float] = {}


def let_go(threads: Sequence[threading.Thread], limit_s: float) -> None:
    """Wait for threads no more, but at Python's end, where each may take so many seconds."""
    for ended in [thread for thread in list(_let_go) if not thread.is_alive()]:
        _let_go.pop(ended, None)
    _let_go.update((thread, limit_s) for thread in threads if thread.is_alive())


def join(threads: Sequence[threading.Thread], limit_s: float) -> None:
    """Wait for threads, so many seconds at most."""
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


@atexit.register
def _join_at_exit() -> None:
    began = time.monotonic()
    for thread, limit_s in list(_let_go.items()):
        thread.join(max(began + limit_s - time.monotonic(), 0.0))
