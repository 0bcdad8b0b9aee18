"""Bounds calls into the backend that may not come back: NCCL waits there for peers, and for the device, without an end.

Only another thread can end such a call, by giving up the connections that it waits on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("zipccl")

PERIOD_S = 0.25
LOST_S = 2.0
"""How long a call may go on once a peer is gone: what that has sent before may still come."""

_Entry = tuple[Any, float]


class Watch:
    """The calls that are in the backend, one a thread.

    Args:
        peer_is_lost: whether a peer is gone.
        overdue: (what) → gives up; called once, on the watch's own thread.
    """

    def __init__(self, peer_is_lost: Callable[[], bool], overdue: Callable[[Any], object]) -> None:
        self._peer_is_lost, self._overdue = peer_is_lost, overdue
        self._inside: dict[int, _Entry] = {}
        self._stopped = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on; nothing is bounded before."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="zipccl-watch", daemon=True)
            self.thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def enter(self, what: Any, deadline: float) -> None:
        """The calling thread goes into the backend, until `leave`.

        Args:
            what: for `overdue`.
            deadline: of time.monotonic().
        """
        self._inside[threading.get_ident()] = what, deadline

    def leave(self) -> None:
        """It is back."""
        self._inside.pop(threading.get_ident(), None)

    def _run(self) -> None:
        alone_since: dict[int, tuple[_Entry, float]] = {}
        while not self._stopped.wait(PERIOD_S):
            now, lost = time.monotonic(), self._peer_is_lost()
            for thread, entry in list(self._inside.items()):
                what, deadline = entry
                if lost:
                    seen, since = alone_since.get(thread, (None, now))
                    if seen is not entry:
                        since = now
                        alone_since[thread] = entry, now
                    deadline = min(deadline, since + LOST_S)
                if now > deadline:
                    try:
                        self._overdue(what)
                    except Exception:  # nobody else could hear of it
                        log.exception("giving up a call of the backend's that does not come back")
                    return
