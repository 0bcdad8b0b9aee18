"""ASYNC_EXC and out of memory: an exception that nobody expects, on the caller's thread or inside the call."""

from __future__ import annotations

from typing import Any, ClassVar

from faults.fault import SCRIPT_PHASES, SEAM_PHASES, Fault, Moment, Planned
from faults.kinds.signal import death_unseen
from faults.record import Record

ERRORS: dict[str, type[Exception]] = {"RuntimeError": RuntimeError, "MemoryError": MemoryError, "OSError": OSError}
TEXT = "injected by faults"
SCRIPT_DIES = (*SCRIPT_PHASES, "issue")


class RaiseError(Fault):
    """On the caller's thread (before, issue, after) it ends the script, exit code 1; inside, the exchange meets it."""

    name = "raise_error"
    injects = "an exception: on the caller's thread, which ends the script; or inside the call"
    phases = (*SCRIPT_PHASES, *SEAM_PHASES)
    args: ClassVar[dict[str, dict[str, Any]]] = {"error": {"enum": list(ERRORS)}}
    required = ("error",)
    lethal = True

    def strike(self, strike: dict[str, Any], moment: Moment) -> None:
        self.fired(strike, error=self.planned.args["error"])
        raise ERRORS[self.planned.args["error"]](TEXT)

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        if planned.phase in SCRIPT_DIES:
            return death_unseen(planned, record, "exit code 1")
        wanted = f"{planned.args['error']}: {TEXT}"
        return [
            f"rank {rank} has no error that says rank {planned.ranks[0]} failed with {wanted}"
            for rank in range(record.size)
            if not any(
                f"rank {planned.ranks[0]} failed" in e["text"] and wanted in e["text"] for e in record.errors(rank)
            )
        ]
