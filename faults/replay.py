"""Running a stored run again, and whether it went the same way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from faults.lab import Job
from faults.record import Record

VOLATILE = ("at_s", "link", "ms", "pid", "took_s")


def job_of(directory: Path, target: Path) -> Job:
    """What runs the scenario of a stored run again, by the plan that it followed.

    Raises:
        OSError, ValueError: the directory holds no run.
    """
    record = Record.read(directory)
    if record.damage:
        raise ValueError(f"{directory} cannot be replayed: {record.damage}")
    plan = json.loads((directory / "plan.json").read_text())
    scenario = record.scenario
    return Job(
        scenario.data, target, scenario.needs_own_ranks, scenario.limit_s, record.request.get("subject", "zipccl"), plan
    )


def differences(old: Record, new: Record) -> list[str]:
    """Where two runs of one plan went different ways: strikes, inputs, outcomes, and outputs that are promised."""
    problems = []
    if [p.as_json() for p in old.plan] != [p.as_json() for p in new.plan]:
        problems.append("the plans differ")
    for rank in range(old.size):
        for name, course in (("strikes", _strikes), ("calls", _calls)):
            before, after = course(old, rank), course(new, rank)
            if before != after:
                at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), -1)
                was, came = (before[at], after[at]) if at >= 0 else (f"{len(before)} of them", f"{len(after)} of them")
                problems.append(f"rank {rank}: {name} differ: {was} before, {came} now")
    return problems


def _strikes(record: Record, rank: int) -> list[dict[str, Any]]:
    return [{k: v for k, v in e.items() if k not in VOLATILE} for e in record.of_rank(rank, "fired")]


def _calls(record: Record, rank: int) -> list[Any]:
    """What every call put in and how it ended; without outputs that nobody promises."""
    undefined = record.scenario.expect.get("undefined", [])
    inputs = {(e["beat"], e["index"]): e["input_sha256"] for e in record.of_rank(rank, "call")}
    course = []
    for e in record.of_rank(rank, "done"):
        promised = e["outcome"] == "returned" and not (e["beat"] == "armed" and e["index"] in undefined)
        output = e["output_sha256"] if promised else e.get("error", "")
        course.append([e["beat"], e["index"], e["outcome"], inputs.get((e["beat"], e["index"])), output])
    return course
