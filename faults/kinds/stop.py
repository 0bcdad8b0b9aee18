"""SIGSTOP, then SIGCONT: the rank stops as a whole, and goes on later as if nothing had been."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

from faults.fault import SCRIPT_PHASES, SEAM_PHASES, Fault, Moment, Planned
from faults.kinds.delay import lateness_unseen
from faults.record import Record


class Stop(Fault):
    """The rank stops itself; the process that holds it sends SIGCONT after resume_after_s, or never."""

    name = "stop"
    injects = "SIGSTOP to the rank, and SIGCONT resume_after_s later (0: never)"
    phases = (*SCRIPT_PHASES, *SEAM_PHASES)
    args: ClassVar[dict[str, dict[str, Any]]] = {"resume_after_s": {"type": "number", "minimum": 0, "maximum": 60}}
    required = ("resume_after_s",)
    lethal = True

    def strike(self, strike: dict[str, Any], moment: Moment) -> None:
        self.fired(strike, pid=os.getpid())
        self.ledger.write("wants_resume", after_s=self.planned.args["resume_after_s"])
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread does not go one step further

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        rank = record.scenario.members[planned.ranks[0]]
        stopped = [e for e in record.launch if e["event"] == "stopped" and e["rank"] == rank]
        resumed = [e for e in record.launch if e["event"] == "resumed" and e["rank"] == rank]
        wanted_s = planned.args["resume_after_s"]
        if not stopped:
            return [f"the kernel never reported rank {rank} as stopped"]
        if bool(resumed) != bool(wanted_s):
            return [f"rank {rank} was{' not' if wanted_s else ''} resumed"]
        ms = 1000 * (resumed[0]["at_s"] - stopped[0]["at_s"]) if resumed else 1e9
        until_s = stopped[0]["at_s"] + wanted_s
        numbers = [s["sequence"] for s in planned.strikes]
        return lateness_unseen(planned, record, dict.fromkeys(numbers, ms), dict.fromkeys(numbers, until_s))

    @classmethod
    def sound(cls, planned: Planned, entry: Mapping[str, Any]) -> str:
        return "" if entry.get("pid") else "no process was stopped"
