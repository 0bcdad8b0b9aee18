"""Corrupt frame: the message of an earlier call comes in place of this one."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from faults.corruption import Corruption
from faults.fault import Moment
from faults.layout import ENVELOPE_BYTES


class Stale(Corruption):
    """What went to, or came from, the same peer `back` calls before: whole and sound in itself."""

    name = "stale"
    injects = "the whole message, or only the frame behind a true envelope, of an earlier call"
    phases = ("send", "receive")
    args: ClassVar[dict[str, dict[str, Any]]] = {
        "what": {"enum": ["message", "frame"]},
        "back": {"type": "integer", "minimum": 1, "maximum": 8},
    }
    required = ("what", "back")

    def arm(self) -> None:
        super().arm()
        self._kept: dict[tuple[int, int], np.ndarray] = {}

    def reached(self, moment: Moment) -> torch.Tensor | None:
        if moment.phase == self.planned.phase and moment.data is not None:
            self._kept[moment.sequence, moment.peer] = moment.data.numpy().copy()
        return super().reached(moment)

    def damage(self, strike: dict[str, Any], moment: Moment, message: np.ndarray) -> dict[str, Any]:
        old = self._kept[moment.sequence - self.planned.args["back"], moment.peer]
        if len(old) != len(message):
            raise RuntimeError(f"stale: the old message has {len(old)} bytes, this one {len(message)}; call them alike")
        begin = ENVELOPE_BYTES if self.planned.args["what"] == "frame" else 0
        message[begin:] = old[begin:]
        return {"of_sequence": moment.sequence - self.planned.args["back"]}
