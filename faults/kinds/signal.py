"""SIGKILL, SIGTERM, OS_ABORT, SEGFAULT: the rank ends by a signal."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any, ClassVar

from faults.fault import SCRIPT_PHASES, SEAM_PHASES, Fault, Moment, Planned
from faults.record import Record

SIGNALS = ("SIGKILL", "SIGTERM", "SIGABRT", "SIGSEGV")


def death_unseen(planned: Planned, record: Record, how: str) -> list[str]:
    """What is missing of: the rank ended so, and every other rank of the group was told; shared with other kinds."""
    problems = []
    for rank in planned.ranks:
        ends = [e for e in record.launch if e["event"] == "exit" and e["rank"] == record.scenario.members[rank]]
        if not ends or ends[0]["how"] != how:
            problems.append(f"rank {rank} should have ended with {how}, the kernel says {[e['how'] for e in ends]}")
        for other in record.others(planned):
            if not any(f"rank {rank}" in e["text"] for e in record.errors(other)):
                problems.append(f"rank {other} has no error that names the dead rank {rank}")
    return problems


class Signal(Fault):
    """The rank sends itself a signal that ends it."""

    name = "signal"
    injects = "a signal that ends the rank: SIGKILL, SIGTERM, SIGABRT or SIGSEGV"
    phases = (*SCRIPT_PHASES, *SEAM_PHASES)
    args: ClassVar[dict[str, dict[str, Any]]] = {"signal": {"enum": list(SIGNALS)}}
    required = ("signal",)
    lethal = True

    def strike(self, strike: dict[str, Any], moment: Moment) -> None:
        self.fired(strike, pid=os.getpid())
        signal.pthread_kill(threading.get_ident(), getattr(signal, self.planned.args["signal"]))

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        return death_unseen(planned, record, planned.args["signal"])
