"""Disagreement: one rank's build speaks another version of the frame."""

from __future__ import annotations

from typing import Any, ClassVar

from faults.fault import Fault, Planned
from faults.kinds.policy import making_unseen
from faults.record import Record


class FormatVersion(Fault):
    """What it says when Communicators are compared; its frames stay as they are."""

    name = "format_version"
    injects = "one rank says that its frame version is another"
    phases = ("make",)
    args: ClassVar[dict[str, dict[str, Any]]] = {"version": {"type": "integer", "minimum": 2}}
    required = ("version",)

    def policy(self, policy: dict[str, Any]) -> dict[str, Any]:
        self.fired(self.planned.strikes[0], version=self.planned.args["version"])
        return {**policy, "format_version": self.planned.args["version"]}

    @classmethod
    def observed(cls, planned: Planned, record: Record) -> list[str]:
        return making_unseen(planned, record, "format version")
