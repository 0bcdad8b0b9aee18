"""Corrupt frame: fields hold other values, and every check of envelope and header is made right again."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from faults.corruption import Corruption
from faults.fault import Moment
from faults.layout import FIELDS, places, reseal


class Forge(Corruption):
    """A message of another version, dtype, world or call, as a rank that runs something else would send it."""

    name = "forge"
    injects = "a number added to fields of envelope or header, with all their checks made right again"
    phases = ("send", "receive")
    args: ClassVar[dict[str, dict[str, Any]]] = {
        "fields": {
            "type": "array",
            "minItems": 1,
            "items": {"enum": [name for name in FIELDS if name.startswith(("envelope.", "header."))]},
        },
        "add": {"type": "integer"},
    }
    required = ("fields", "add")

    def damage(self, strike: dict[str, Any], moment: Moment, message: np.ndarray) -> dict[str, Any]:
        found = places(message)
        values = {}
        for name in self.planned.args["fields"]:
            begin, end = found[name]
            width = end - begin
            value = (int.from_bytes(message[begin:end].tobytes(), "little") + self.planned.args["add"]) % 256**width
            message[begin:end] = np.frombuffer(value.to_bytes(width, "little"), np.uint8)
            values[name] = value
        reseal(message)
        return {"values": values}
