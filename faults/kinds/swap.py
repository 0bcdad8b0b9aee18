"""Corrupt frame: two senders' messages to one receiver are exchanged."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from faults.corruption import KINDS_OF_ERROR, Corruption
from faults.fault import Moment, Planned
from faults.record import Record

WAIT_S = 10.0


class Swap(Corruption):
    """Armed on two ranks; each sends `peer` what the other was to send. They meet in the store."""

    name = "swap"
    injects = "the messages of two ranks to a third, exchanged"
    phases = ("send",)
    args: ClassVar[dict[str, dict[str, Any]]] = {}

    def damage(self, strike: dict[str, Any], moment: Moment, message: np.ndarray) -> dict[str, Any]:
        [other] = [rank for rank in self.planned.ranks if rank != self.rank]
        key = f"swap/{self.planned.index}/{moment.sequence}"
        self.shelf.put(f"{key}/{self.rank}", message.tobytes())
        theirs = np.frombuffer(self.shelf.take(f"{key}/{other}", WAIT_S), np.uint8)
        if len(theirs) != len(message):
            raise RuntimeError(f"swap: messages of {len(message)} and {len(theirs)} bytes; give both ranks as many")
        message[:] = theirs
        return {"with_rank": other}

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        """The receiver names the first of the two that it meets: an error has one text."""
        dst = planned.peer
        named = [f"from rank {src} to rank {dst}" for src in planned.ranks]
        seen = any(
            e["error"] in KINDS_OF_ERROR and any(name in e["text"] for name in named) for e in record.errors(dst)
        )
        return [] if seen else [f"rank {dst} took the exchanged messages of ranks {planned.ranks} without a word"]
