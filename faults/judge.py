"""The judge of a run: from its directory alone, without a cluster.

Nothing is believed that can be computed: the plan is drawn again, inputs and outputs are computed again from their
seeds, and a fault that did not fire, or that no victim saw, is a failure. A verdict has clauses; a run is good if none
of them has a complaint.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.kinds import KINDS
from faults.record import Record
from faults.workload import CallSpec, seed_of, sha256_of

DETECTION_GRACE_S = 2.0
MEMORY_GRACE_BYTES = 64 << 20
CLAUSES = (
    "directory",
    "harness",
    "clean",
    "fired",
    "observed",
    "outcome",
    "agreement",
    "bystanders",
    "healed",
    "leaks",
)
EVEN = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather", "all_reduce", "all_to_all_single")
MANIFEST = "manifest.json"
VERDICT = "verdict.json"


@dataclass
class Verdict:
    """What is wrong with a run, by clause; and the ledger: how far each fault came.

    Attributes:
        ledger: one a fault: {"fault", "where", "planned", "fired", "observed", "healed"}, the last four True or False.
        seconds: from the first to the last event.
        detected_s: longest time from a failing call to its error, over ranks; 0 if no error was due.
        figures: of the armed beat, over ranks: sent_bytes_max, imbalance (maximum ÷ mean of sent bytes), and
            slowest_call_s.
    """

    scenario: str
    family: str
    clauses: dict[str, list[str]] = field(default_factory=dict)
    ledger: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    detected_s: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """No complaint."""
        return not any(self.clauses.values())

    def complaints(self) -> list[str]:
        """clause: complaint."""
        return [f"{clause}: {text}" for clause, texts in self.clauses.items() for text in texts]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "scenario": self.scenario,
            "family": self.family,
            "ok": self.ok,
            "clauses": {clause: texts for clause, texts in self.clauses.items() if texts},
            "ledger": self.ledger,
            "seconds": self.seconds,
            "detected_s": self.detected_s,
            "figures": self.figures,
        }

    @classmethod
    def of(cls, data: dict[str, Any]) -> Verdict:
        """From as_json's data."""
        return cls(
            data["scenario"],
            data["family"],
            dict(data["clauses"]),
            data["ledger"],
            data["seconds"],
            data["detected_s"],
            data["figures"],
        )


def check(directory: Path) -> Verdict:
    """Judge a finished run, tampering included; the same verdict on any machine, at any time."""
    damage = _manifest_damage(directory)
    try:
        record = Record.read(directory)
    except (OSError, ValueError, KeyError) as exc:
        damage.append(f"scenario.json cannot be read: {type(exc).__name__}: {exc}")
        return Verdict(directory.name, "", {"directory": damage})
    verdict = judge(record)
    verdict.clauses["directory"] = [*damage, *verdict.clauses["directory"]]
    try:
        stored = json.loads((directory / VERDICT).read_text())
        if stored != verdict.as_json() and not damage:
            verdict.clauses["directory"].append("verdict.json is not what this run is judged as")
    except (OSError, ValueError) as exc:
        verdict.clauses["directory"].append(f"verdict.json cannot be read: {exc}")
    return verdict


def finish(directory: Path) -> Verdict:
    """Judge a run that has just ended, draw its picture and its trace, and seal the directory."""
    from faults.picture import draw, trace

    record = Record.read(directory)
    verdict = judge(record)
    (directory / VERDICT).write_text(json.dumps(verdict.as_json(), indent=1))
    (directory / "timeline.svg").write_text(draw(record, verdict))
    (directory / "trace.json").write_text(trace(record))
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(directory.iterdir()) if p.is_file()}
    (directory / MANIFEST).write_text(json.dumps({"sha256": files}, indent=1))
    return verdict


def _manifest_damage(directory: Path) -> list[str]:
    try:
        listed = json.loads((directory / MANIFEST).read_text())["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        return [f"{MANIFEST} cannot be read: {exc}"]
    found = {p.name for p in directory.iterdir() if p.is_file()} - {MANIFEST}
    problems = [f"{name} is not in the manifest" for name in sorted(found - set(listed))]
    for name, digest in listed.items():
        path = directory / name
        if name not in found:
            problems.append(f"{name} is missing")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            problems.append(f"{name} is not what the manifest says")
    return problems


def judge(record: Record) -> Verdict:
    """All clauses."""
    scenario = record.scenario
    verdict = Verdict(scenario.id, scenario.family, {clause: [] for clause in CLAUSES})
    c = verdict.clauses
    c["directory"] = [*record.damage, *_plan_damage(record)]
    c["harness"] = _harness(record)
    bits = _Bits(record)
    everybody = list(range(record.size))
    c["clean"] = bits.all_right("clean", everybody, everybody)
    c["fired"], c["observed"] = _faults(record, verdict)
    c["outcome"] = _outcome(record, bits, verdict)
    c["agreement"] = _agreement(record)
    c["bystanders"] = _bystanders(record)
    again = scenario.survivors if scenario.expect["then"] == "new_group" else everybody
    c["healed"] = [*bits.all_right("healed", again, again), *_still_striking(record)]
    c["leaks"] = _leaks(record)
    for entry in verdict.ledger:
        entry["healed"] = not c["healed"]
    verdict.figures = _figures(record)
    times = [e["at_s"] for events in (*record.events.values(), record.launch) for e in events]
    verdict.seconds = round(max(times) - min(times), 3) if times else 0.0
    return verdict


def _figures(record: Record) -> dict[str, float]:
    """Always the maximum over ranks: the mean hides the one that all wait for."""
    ranks = [rank for rank in record.scenario.survivors if record.done(rank, "armed")]
    sent_bytes = [record.total(rank, "sent_bytes") for rank in ranks]
    took_s = [e["took_s"] for rank in ranks for e in record.done(rank, "armed")]
    if not took_s or not sum(sent_bytes):
        return {}
    most = max(sent_bytes)
    imbalance = round(most * len(sent_bytes) / sum(sent_bytes), 3)
    return {"sent_bytes_max": most, "imbalance": imbalance, "slowest_call_s": max(took_s)}


def _plan_damage(record: Record) -> list[str]:
    problems = []
    mine = json.loads(json.dumps([p.as_json() for p in record.plan]))
    for rank, events in record.events.items():
        told = next((e["entries"] for e in events if e["event"] == "plan"), None)
        if told != mine:
            problems.append(f"rank {rank} followed another plan than plan.json")
    drawn = json.loads(json.dumps([p.as_json() for p in record.scenario.plan()]))
    if drawn != mine and not record.request.get("plan_given"):
        problems.append("plan.json is not what this scenario and its seed give")
    return problems


def _harness(record: Record) -> list[str]:
    """The suite itself, and whoever hung."""
    problems = []
    for rank, events in record.events.items():
        problems += [f"rank {rank}: {e['text']}" for e in events if e["event"] == "harness_error"]
    for e in record.launch:
        if e["event"] == "hung":
            problems.append(f"rank {e['rank']} hung: it had not ended {e['limit_s']:g} s after the start")
    if not any(e["event"] == "left" for e in record.launch):
        problems.append("the launch did not end")
    for rank in range(record.scenario.world_size):
        if rank not in record.scenario.members and not record.events.get(rank):
            problems.append(f"rank {rank} left no events")
    return problems


class _Bits:
    """Inputs and outputs, computed again."""

    def __init__(self, record: Record) -> None:
        self.record, self.scenario = record, record.scenario
        self._inputs = functools.lru_cache(8)(self._compute)

    def _compute(self, call: CallSpec, size: int, seed: str) -> list[Any]:
        return call.inputs(size, seed)

    def wrong(self, done: dict[str, Any], events: Sequence[dict[str, Any]], rank: int, size: int) -> str:
        """What is wrong with a call that returned: "" if its inputs and outputs are what they must be."""
        begun = [e for e in events if e["event"] == "call" and e["beat"] == done["beat"]]
        call_event = next((e for e in begun if e["index"] == done["index"]), None)
        if call_event is None:
            return "it was never begun"
        seed = seed_of(self.scenario.seed, done["beat"], done["index"])
        if call_event["seed"] != seed:
            return f"it was made with seed {call_event['seed']}, not {seed}"
        call = CallSpec.of(call_event["spec"])
        planned = self.scenario.calls[done["index"]]
        touched = done["beat"] == "armed" and any(
            p.phase == "call" and any(s["sequence"] == done["sequence"] for s in p.strikes) for p in self.record.plan
        )
        if call != planned and not touched:
            return f"the rank called {call} in place of {planned}"
        inputs = self._inputs(call, size, seed)
        if sha256_of(inputs[rank]) != call_event["input_sha256"]:
            return "its inputs are not those of its seed"
        if done["guards"]:
            return done["guards"]
        if sha256_of(call.wanted(inputs, rank)) != done["output_sha256"]:
            return "its output is wrong: other bits than were sent"
        return ""

    def all_right(self, beat: str, ranks: Sequence[int], members: Sequence[int]) -> list[str]:
        """Complaints about a beat in which every call of `ranks` must have been right; members is the group then."""
        problems = []
        for rank in ranks:
            for e in self.record.of_rank(rank, "made"):
                if e["beat"] == beat and e["outcome"] != "made":
                    problems.append(f"rank {rank}: making a Communicator: {e['error']}: {e['text']}")
            done = self.record.done(rank, beat)
            if len(done) != len(self.scenario.calls):
                problems.append(f"rank {rank} finished {len(done)} of {len(self.scenario.calls)} calls")
            problems += self.complaints(rank, done, members)
        return problems

    def complaints(self, rank: int, done: Sequence[dict[str, Any]], members: Sequence[int]) -> list[str]:
        """Calls of a rank of the group that failed or came out wrong; its place is that among `members`."""
        problems = []
        events = self.record.events.get(self.scenario.members[rank], [])
        for e in done:
            name = f"rank {rank}, {e['operation']} #{e['sequence']}"
            if e["outcome"] != "returned":
                problems.append(f"{name}: {e['error']}: {e['text']}")
            elif wrong := self.wrong(e, events, list(members).index(rank), len(members)):
                problems.append(f"{name}: {wrong}")
        return problems


def _faults(record: Record, verdict: Verdict) -> tuple[list[str], list[str]]:
    """What has not fired, what has not been observed; fills the ledger."""
    not_fired, not_seen = [], []
    for planned in record.plan:
        kind = KINDS[planned.fault]
        entries = record.fired(planned.index)
        name = f"{planned.fault} on rank {', '.join(map(str, planned.ranks))}"
        wanted = {(rank, s["sequence"], s["operation"]) for rank in planned.ranks for s in planned.strikes}
        came = [(rank, e["sequence"], e["operation"]) for rank, e in entries]
        mine = []
        if sorted(came) != sorted(wanted):
            mine.append(f"{name}: should have fired at (rank, sequence, operation) {sorted(wanted)}, did at {came}")
        armed = [r for r in range(record.size) if any(e["fault"] == planned.index for e in record.of_rank(r, "armed"))]
        if armed != sorted(planned.ranks):
            mine.append(f"{name}: was armed on ranks {armed}")
        for rank, e in entries:
            if problem := kind.sound(planned, e):
                mine.append(f"{name}: rank {rank}, #{e['sequence']}: {problem}")
        try:
            unseen = kind.observed(planned, record)
        except (KeyError, IndexError, TypeError, StopIteration, ValueError) as exc:
            unseen = [f"{name}: the events do not show it: {type(exc).__name__}: {exc}"]
        not_fired += mine
        not_seen += unseen
        verdict.ledger.append(
            {
                "fault": planned.fault,
                "where": f"rank {', '.join(map(str, planned.ranks))}, {planned.phase}, "
                f"#{', #'.join(str(s['sequence']) for s in planned.strikes)}",
                "planned": bool(planned.strikes),
                "fired": bool(entries) and not mine,
                "observed": bool(entries) and not unseen,
                "healed": False,
            }
        )
        if not planned.strikes:
            not_fired.append(f"{name}: the plan has no strike")
    return not_fired, not_seen


def _outcome(record: Record, bits: _Bits, verdict: Verdict) -> list[str]:
    scenario, problems = record.scenario, []
    everybody = list(range(record.size))
    undefined = set(scenario.expect.get("undefined", []))
    texts: dict[int, set[str]] = {}
    for rank, wanted in enumerate(scenario.verdicts):
        if wanted not in ("correct", "error"):
            problems += _end_problems(record, rank, wanted)
            continue
        if not any(e["event"] == "end" for e in record.events.get(scenario.members[rank], [])):
            ends = [e["how"] for e in record.launch if e["event"] == "exit" and e["rank"] == scenario.members[rank]]
            problems.append(f"rank {rank} did not come to its end: {ends or 'it hung'}")
        done = record.done(rank, "armed")
        if wanted == "correct":
            if len(done) != len(scenario.calls):
                problems.append(f"rank {rank} finished {len(done)} of {len(scenario.calls)} calls")
            judged = [e for e in done if not (e["index"] in undefined and e["outcome"] == "returned")]
            problems += bits.complaints(rank, judged, everybody)
            continue
        errors = record.errors(rank)
        problems += _error_problems(record, rank, errors, verdict)
        for e in errors:
            texts.setdefault(e.get("index", -2), set()).add(f"{e['error']}: {e['text']}")
        if scenario.expect["then"] == "same_communicator" and errors and errors[0]["event"] == "done":
            judged = [e for e in done if e["outcome"] == "returned" and e["index"] not in undefined]
            problems += bits.complaints(rank, judged, everybody)
            if len(done) != len(scenario.calls):
                problems.append(f"rank {rank} finished {len(done)} of {len(scenario.calls)} calls")
    if scenario.expect["then"] == "new_group":  # it is finished: there is one error, whenever a rank meets it
        texts = {-2: set().union(*texts.values())} if texts else {}
    for index, different in texts.items():
        if len(different) > 1:
            at = f"call {index}: " if index >= 0 else ""
            problems.append(f"{at}the ranks raised different errors: {sorted(different)}")
    return problems


def _end_problems(record: Record, rank: int, wanted: str) -> list[str]:
    number = record.scenario.members[rank]
    if wanted == "SIGSTOP":
        ok = any(e["event"] == "stopped_for_good" and e["rank"] == number for e in record.launch)
        return [] if ok else [f"rank {rank} should have been stopped for good"]
    ends = [e["how"] for e in record.launch if e["event"] == "exit" and e["rank"] == number]
    return [] if ends == [wanted] else [f"rank {rank} should have ended with {wanted}, ended with {ends}"]


def _error_problems(record: Record, rank: int, errors: list[dict[str, Any]], verdict: Verdict) -> list[str]:
    scenario, wanted = record.scenario, record.scenario.expect["error"]
    if not errors:
        return [f"rank {rank} should have raised one of {wanted['kinds']}, raised nothing"]
    problems = []
    if "calls" in wanted and [e.get("index") for e in errors] != sorted(wanted["calls"]):
        problems.append(f"rank {rank}: calls {wanted['calls']} should fail, {[e.get('index') for e in errors]} did")
    for e in errors:
        if e["error"] not in wanted["kinds"]:
            problems.append(f"rank {rank}: wanted one of {wanted['kinds']}, came {e['error']}: {e['text']}")
        missing = [name for name in wanted["names"] if name not in e["text"]]
        if missing:
            problems.append(f"rank {rank}: the error names not {missing}: {e['text']}")
        took_s = _took_s(record, rank, e)
        verdict.detected_s = round(max(verdict.detected_s, took_s), 3)
        if took_s > scenario.deadline_s + DETECTION_GRACE_S:
            problems.append(
                f"rank {rank}: the error came after {took_s:.1f} s, the deadline was {scenario.deadline_s:g}"
            )
    if scenario.expect["then"] == "new_group" and errors[0]["event"] == "done":
        again = [e for e in record.of_rank(rank, "done") if e["beat"] == "armed" and e["index"] == -1]
        last = errors[-1]
        if not again or (again[0].get("error"), again[0].get("text")) != (last["error"], last["text"]):
            problems.append(f"rank {rank}: the next call should repeat the error of the finished Communicator: {again}")
    return problems


def _took_s(record: Record, rank: int, error: dict[str, Any]) -> float:
    """From the call to its error, less the time for which the rank itself did not run."""
    number = record.scenario.members[rank]
    asleep = 0.0
    began_s = error["at_s"] - error["took_s"]
    for down in record.launch:
        if down["event"] == "stopped" and down["rank"] == number:
            up = next((e for e in record.launch if e["event"] == "resumed" and e["rank"] == number), None)
            asleep += (up["at_s"] if up else error["at_s"]) - max(down["at_s"], began_s)
    for planned in record.plan:
        if planned.fault in ("delay", "hold_gil") and rank in planned.ranks:
            asleep += sum(e["ms"] / 1000 for r, e in record.fired(planned.index) if r == rank)
    return float(error["took_s"] - max(0.0, asleep))


def _agreement(record: Record) -> list[str]:
    """All ranks decide the same at one sequence number."""
    problems = []
    for beat in ("clean", "armed", "healed"):
        decisions: dict[int, dict[str, list[int]]] = {}
        for rank in range(record.size):
            for e in record.done(rank, beat):
                uneven = any(p.fault == "imbalance" for p in record.plan) and beat == "armed"
                call = record.scenario.calls[e["index"]]
                if e["operation"] in EVEN and e["outcome"] == "returned" and e["decision"] and not uneven:
                    if call.splits or call.asynchronous:
                        continue
                    decisions.setdefault(e["index"], {}).setdefault(e["decision"][0], []).append(rank)
        for index, by_mode in decisions.items():
            if len(by_mode) > 1:
                problems.append(f"{beat}, call {index}: the ranks decided differently: {by_mode}")
    return problems


def _bystanders(record: Record) -> list[str]:
    """The other group's calls are right, in the middle of it."""
    scenario, problems = record.scenario, []
    members = scenario.bystanders
    for rank in members:
        done = [e for e in record.events.get(rank, []) if e["event"] == "done" and e["beat"] == "bystanders"]
        if len(done) != len(scenario.calls):
            problems.append(f"rank {rank} finished {len(done)} of {len(scenario.calls)} calls of the other group")
        for e in done:
            seed = seed_of(scenario.seed, "bystanders", e["index"])
            call = scenario.calls[e["index"]]
            inputs = call.inputs(len(members), seed)
            if e["outcome"] != "returned":
                problems.append(f"rank {rank}: {e['error']}: {e['text']}")
            elif sha256_of(call.wanted(inputs, members.index(rank))) != e["output_sha256"]:
                problems.append(f"rank {rank}, {e['operation']}: wrong bits in the other group")
    return problems


def _still_striking(record: Record) -> list[str]:
    problems = []
    for rank in range(record.size):
        events = record.events.get(record.scenario.members[rank], [])
        disarmed = {e["fault"]: e["at_s"] for e in events if e["event"] == "disarmed"}
        for e in events:
            if e["event"] == "fired" and e["at_s"] > disarmed.get(e["fault"], float("inf")):
                problems.append(f"rank {rank}: {e['kind']} struck after it was disarmed")
    return problems


def _leaks(record: Record) -> list[str]:
    """Threads, descriptors, memory and processes that are left."""
    problems = []
    scenario = record.scenario
    gone = {scenario.members[r] for r in range(record.size) if r not in scenario.survivors}
    for rank in range(scenario.world_size):
        if rank in gone:
            continue
        held = next((e for e in record.events.get(rank, []) if e["event"] == "resources"), None)
        if held is None:
            problems.append(f"rank {rank} did not say what it holds")
            continue
        before, after = held["before"], held["after"]
        for what in ("python_threads", "threads", "file_descriptors"):
            if after[what] > before[what]:
                problems.append(f"rank {rank}: {what} were {before[what]} before and {after[what]} after")
        grown = after["resident_bytes"] - before["resident_bytes"]
        if grown > MEMORY_GRACE_BYTES:
            problems.append(f"rank {rank} holds {grown >> 20} MiB more than before")
    for rank in range(record.size):
        for e in record.of_rank(rank, "closed"):
            if e["outcome"] != "closed":
                problems.append(f"rank {rank}: close() after {e['beat']}: {e['error']}: {e['text']}")
    for e in record.launch:
        if e["event"] == "left" and e["alive"]:
            problems.append(f"processes {e['alive']} are still there")
    return problems
