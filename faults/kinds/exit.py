"""The rank ends by itself: exit 0 or another code, without a word to anybody."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from faults.fault import SCRIPT_PHASES, SEAM_PHASES, Fault, Moment, Planned
from faults.kinds.signal import death_unseen
from faults.record import Record


class Exit(Fault):
    """os._exit: no Python is run on the way out, the kernel closes what is open."""

    name = "exit"
    injects = "the rank's process exits with a code, 0 included, without closing anything"
    phases = (*SCRIPT_PHASES, *SEAM_PHASES)
    args: ClassVar[dict[str, dict[str, Any]]] = {"code": {"type": "integer", "minimum": 0, "maximum": 125}}
    required = ("code",)
    lethal = True

    def strike(self, strike: dict[str, Any], moment: Moment) -> None:
        self.fired(strike, pid=os.getpid())
        os._exit(self.planned.args["code"])

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        return death_unseen(planned, record, f"exit code {planned.args['code']}")
