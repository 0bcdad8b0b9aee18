"""Bounds calls into the backend that may not come back: NCCL waits there for peers, and for the device, without an end.

Only another thread can end such a call, by giving up the connections that it waits on.
"""

from __future__ import annotations

import itertools
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


class Watch:
    """The calls that are in the backend.

    Args:
        peer_is_lost: whether a peer is gone.
        overdue: (what) → gives up; called once, on the watch's own thread.
        patience_s: how long a straight call may take.

    Attributes:
        straight, count: the operation of a straight call that is in the backend, empty if none is, and how many there
            have been. Set by who makes one, in as few steps as there can be: they cost as much as all the rest of it.
    """

    def __init__(
        self, peer_is_lost: Callable[[], bool], overdue: Callable[[Any], object], patience_s: float = _FOREVER
    ) -> None:
        self._peer_is_lost, self._overdue, self._patience_s = peer_is_lost, overdue, patience_s
        self.straight, self.count = "", 0
        self._inside: dict[int, tuple[int, Any, float]] = {}
        self._numbers = itertools.count()
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
        self._inside[threading.get_ident()] = next(self._numbers), what, deadline

    def leave(self) -> None:
        """It is back."""
        self._inside.pop(threading.get_ident(), None)

    def _run(self) -> None:
        since: dict[Any, float] = {}  # what is there → when it was seen first
        lost_since = _FOREVER
        while not self._stopped.wait(PERIOD_S):
            now = time.monotonic()
            if self._peer_is_lost():
                lost_since = min(lost_since, now)
            there = [(thread, *entry) for thread, entry in list(self._inside.items())]
            if operation := self.straight:
                there.append((0, self.count, operation, _FOREVER))
            since = {(thread, which): since.get((thread, which), now) for thread, which, _, _ in there}
            for thread, which, what, deadline in there:
                seen = since[thread, which]
                until = min(deadline, seen + self._patience_s) if thread == 0 else deadline
                if now > min(until, max(seen, lost_since) + LOST_S):
                    self._give_up(what)
                    return

    def _give_up(self, what: Any) -> None:
        try:
            self._overdue(what)
        except Exception:  # nobody else could hear of it
            log.exception("giving up a call of the backend's that does not come back")
