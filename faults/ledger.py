"""The ledger: what happened on one rank, as JSON lines, each bound to those before it."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any

FIRST_LINK = "0" * 16


def link_of(previous: str, body: str) -> str:
    """What binds a line to the one before it."""
    return hashlib.sha256(f"{previous}{body}".encode()).hexdigest()[:16]


class Ledger:
    """An append-only file of events; a line is with the kernel when `write` returns, so that no death loses it.

    Every line holds `event`, `at_s` (CLOCK_MONOTONIC in seconds, one clock for all ranks of a host) and `link`, a hash
    over the previous line's link and this line.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._link = FIRST_LINK
        self._lock = threading.Lock()

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; from any thread."""
        with self._lock:
            body = json.dumps({"event": event, "at_s": round(time.monotonic(), 6), **fields})
            self._link = link_of(self._link, body)
            self._file.write(f'{body[:-1]}, "link": "{self._link}"}}\n'.encode())

    def close(self) -> None:
        """No more events."""
        with self._lock:
            self._file.close()


def read_ledger(path: Path) -> tuple[list[dict[str, Any]], str]:
    """(events, what is wrong with the file or ""). The unfinished last line of a rank that died is left out."""
    events: list[dict[str, Any]] = []
    link = FIRST_LINK
    data = path.read_bytes()
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        text = line.decode(errors="replace")
        body, _, tail = text.rpartition(', "link": "')
        link = link_of(link, body + "}")
        try:
            event = json.loads(text)
        except json.JSONDecodeError:
            return events, f"{path.name}, line {number}: not JSON"
        if tail != f'{link}"}}' or not isinstance(event, dict):
            return events, f"{path.name}, line {number}: was changed, or one before it was changed, removed or added"
        events.append(event)
    return events, ""
