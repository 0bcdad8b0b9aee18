"""Corrupt frame: a message for one peer goes to another; or one sender's bytes are taken for another's."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from faults.corruption import Corruption
from faults.fault import Moment


class Misdeliver(Corruption):
    """The second message of a call, whichever it is, is replaced by the first: sound in itself, and of this call."""

    name = "misdeliver"
    injects = "the message of one peer in place of another's, within one call"
    phases = ("send", "receive")
    args: ClassVar[dict[str, dict[str, Any]]] = {}

    def arm(self) -> None:
        super().arm()
        self._first: dict[int, np.ndarray] = {}

    def reached(self, moment: Moment) -> torch.Tensor | None:
        if moment.phase != self.planned.phase or moment.data is None:
            return None
        if moment.sequence not in self._first:
            self._first[moment.sequence] = moment.data.numpy().copy()
            return None
        return super().reached(moment)

    def damage(self, strike: dict[str, Any], moment: Moment, message: np.ndarray) -> dict[str, Any]:
        message[:] = self._first[moment.sequence]
        return {}
