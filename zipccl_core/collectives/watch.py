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

_FOREVER = float("inf")
_Entry = tuple[Any, float]
"""What is done, and its deadline: another object each time."""


class Watch:
    """The calls that are in the backend.

    Args:
        peer_is_lost: whether a peer is gone.
        overdue: (what) → gives up; called once, on the watch's own thread.
        patience_s: how long any may take.
    """

    def __init__(
        self, peer_is_lost: Callable[[], bool], overdue: Callable[[Any], object], patience_s: float = _FOREVER
    ) -> None:
        self._peer_is_lost, self._overdue, self._patience_s = peer_is_lost, overdue, patience_s
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

    def enter(self, what: Any, deadline: float = _FOREVER) -> None:
        """The calling thread goes into the backend, until `leave`.

        Args:
            what: for `overdue`.
            deadline: of time.monotonic().
        """
        self._inside[threading.get_ident()] = (what, deadline)

    def leave(self) -> None:
        """It is back."""
        self._inside.pop(threading.get_ident(), None)

    def _run(self) -> None:
        seen: dict[int, tuple[_Entry, float]] = {}  # what each thread is in, and since when
        lost_since = _FOREVER
        while not self._stopped.wait(PERIOD_S):
            now = time.monotonic()
            if self._peer_is_lost():
                lost_since = min(lost_since, now)
            before, seen = seen, {}
            for thread, entry in list(self._inside.items()):
                known = before.get(thread)
                since = known[1] if known is not None and known[0] is entry else now
                seen[thread] = entry, since
                what, deadline = entry
                if now > min(deadline, since + self._patience_s, max(since, lost_since) + LOST_S):
                    self._give_up(what)
                    return

    def _give_up(self, what: Any) -> None:
        try:
            self._overdue(what)
        except Exception:  # nobody else could hear of it
            log.exception("giving up a call of the backend's that does not come back")
