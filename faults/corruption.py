"""What the faults that damage messages have in common: bytes changed, and who must notice."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from faults.fault import Fault, Moment, Planned
from faults.record import Record

KINDS_OF_ERROR = ("CorruptFrame", "TruncatedFrame", "UnsupportedFrame")
MESSAGE_PHASES = ("send", "send_phase_two", "receive", "receive_phase_two")


class Corruption(Fault):
    """Changes the bytes of one message at the seam: at the sender before they go, or at the receiver as they come."""

    phases = MESSAGE_PHASES

    def strike(self, strike: dict[str, Any], moment: Moment) -> torch.Tensor | None:
        if moment.data is None:
            raise RuntimeError(f"{self.name}: the seam shows no bytes at {moment.phase}")
        before = moment.data.numpy()
        after = before.copy()
        figures = self.damage(strike, moment, after)
        changed = int((before != after).sum())
        self.fired(
            strike,
            peer=moment.peer,
            changed_bytes=changed,
            before_sha256=hashlib.sha256(before.tobytes()).hexdigest(),
            after_sha256=hashlib.sha256(after.tobytes()).hexdigest(),
            **figures,
        )
        return torch.from_numpy(after)

    def damage(self, strike: dict[str, Any], moment: Moment, message: np.ndarray) -> dict[str, Any]:
        """Change the message in place; figures for the ledger."""
        raise NotImplementedError

    @classmethod
    def sound(cls, planned: Planned, entry: Mapping[str, Any]) -> str:
        changed = entry["changed_bytes"] > 0 and entry["before_sha256"] != entry["after_sha256"]
        return "" if changed else "the message was not changed"

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        """The receiver has an error that names sender and receiver, or has asked for the message once more."""
        problems = []
        for rank, entry in record.fired(planned.index):
            src, dst = (rank, entry["peer"]) if planned.phase.startswith("send") else (entry["peer"], rank)
            named = any(
                e["error"] in KINDS_OF_ERROR and f"from rank {src} to rank {dst}" in e["text"]
                for e in record.errors(dst)
            )
            repaired = record.total(dst, "retransmissions") > 0 and not record.errors(dst)
            if not named and not repaired:
                problems.append(f"rank {dst} took the damaged message of rank {src} without a word")
        return problems
