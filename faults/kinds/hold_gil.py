"""LOCK_GIL: a thread of the rank holds Python's global lock, as a call into C that does not let go of it does."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from faults.fault import SCRIPT_PHASES, SEAM_PHASES, Fault, Moment, Planned
from faults.kinds.delay import lateness_unseen, went_on_s
from faults.record import Record


class HoldGil(Fault):
    """No Python thread of the rank runs for a while; threads of C++ go on."""

    name = "hold_gil"
    injects = "a thread of the rank holds the GIL, so that none of its Python threads runs"
    phases = (*SCRIPT_PHASES, *SEAM_PHASES)
    args: ClassVar[dict[str, dict[str, Any]]] = {"ms": {"type": "number", "exclusiveMinimum": 0, "maximum": 60000}}
    required = ("ms",)
    lethal = True

    def strike(self, strike: dict[str, Any], moment: Moment) -> None:
        began = time.monotonic()
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(self.planned.args["ms"] * 1000)))
        self.fired(strike, ms=round((time.monotonic() - began) * 1000, 1))

    @classmethod
    def sound(cls, planned: Planned, entry: Mapping[str, Any]) -> str:
        wanted = planned.args["ms"]
        return "" if entry["ms"] >= 0.99 * wanted else f"held {entry['ms']} ms in place of {wanted}"

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        late_ms = {s["sequence"]: planned.args["ms"] for s in planned.strikes}
        return lateness_unseen(planned, record, late_ms, went_on_s(planned, record))
