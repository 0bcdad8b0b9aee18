"""Corrupt frame: a stretch of a message arrives twice, the second time over what follows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from faults.corruption import Corruption
from faults.fault import Moment


class Duplicate(Corruption):
    """Begin and length of the stretch are drawn, within the message's second quarter."""

    name = "duplicate"
    injects = "a drawn stretch of a message delivered twice, over the bytes behind it"
    args: ClassVar[dict[str, dict[str, Any]]] = {}

    @classmethod
    def draw(cls, rng: np.random.Generator, args: Mapping[str, Any], which: int, strikes: int, size: int) -> Any:
        return {"at": round(float(rng.uniform(0.25, 0.35)), 6), "share": round(float(rng.uniform(0.02, 0.15)), 6)}

    def damage(self, strike: dict[str, Any], moment: Moment, message: np.ndarray) -> dict[str, Any]:
        begin, length = int(strike["at"] * len(message)), max(1, int(strike["share"] * len(message)))
        message[begin + length : begin + 2 * length] = message[begin : begin + length].copy()
        return {"begin": begin, "stretch_bytes": length}
