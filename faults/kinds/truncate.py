"""Corrupt frame: the end of a message never came, and zeros are in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from faults.corruption import Corruption
from faults.fault import Moment


class Truncate(Corruption):
    """The number of bytes on the wire stays, as receivers know it; what is behind the cut is zero."""

    name = "truncate"
    injects = "all bytes of a message behind a drawn place are zero"
    args: ClassVar[dict[str, dict[str, Any]]] = {
        "keep_percent": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
    }
    required = ("keep_percent",)

    @classmethod
    def draw(cls, rng: np.random.Generator, args: Mapping[str, Any], which: int, strikes: int, size: int) -> Any:
        return {"keep": round(float(rng.uniform(*args["keep_percent"])) / 100, 6)}

    def damage(self, strike: dict[str, Any], moment: Moment, message: np.ndarray) -> dict[str, Any]:
        kept = int(strike["keep"] * len(message))
        message[kept:] = 0
        return {"kept_bytes": kept, "message_bytes": len(message)}
