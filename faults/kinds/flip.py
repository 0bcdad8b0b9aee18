"""Corrupt frame: one bit of a message flips, in a field or section of one's choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from faults.corruption import Corruption
from faults.fault import Moment
from faults.layout import FIELDS, places

RESERVED_FLAGS = range(2, 8)
LOW_HALVES = 1


class Flip(Corruption):
    """Byte and bit within the field are drawn."""

    name = "flip"
    injects = "one bit flipped in a field of envelope, header, directory, record or dynamic part"
    args: ClassVar[dict[str, dict[str, Any]]] = {"field": {"enum": [*FIELDS, "phase_two"]}}
    required = ("field",)

    @classmethod
    def draw(cls, rng: np.random.Generator, args: Mapping[str, Any], which: int, strikes: int, size: int) -> Any:
        bit = int(rng.integers(0, 8))
        if args["field"] == "directory.flags":
            bit = int(rng.integers(0, 2))  # stored, low halves
        elif args["field"] == "directory.reserved":
            bit = int(rng.integers(2, 8))
        return {"at": round(float(rng.uniform(0, 1)), 6), "bit": bit}

    def damage(self, strike: dict[str, Any], moment: Moment, message: np.ndarray) -> dict[str, Any]:
        name = self.planned.args["field"]
        if name == "phase_two":
            begin, end = 0, len(message)
        else:
            found = places(message)
            if name not in found:
                raise RuntimeError(f"flip: this message has no bytes of {name}; it has {sorted(found)}")
            begin, end = found[name]
        offset = begin + min(int(strike["at"] * (end - begin)), end - begin - 1)
        message[offset] ^= np.uint8(1 << strike["bit"])
        return {"field": name, "offset": offset, "bit": strike["bit"], "byte": int(message[offset])}
