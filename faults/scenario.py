"""Scenarios: read from YAML, checked against a schema, and drawn into a plan by a seed. Pure."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from conformance.strategies import rng_of
from faults.fault import Planned
from faults.workload import POINT_TO_POINT, CallSpec

HERE = Path(__file__).resolve().parent
SCENARIOS = HERE / "scenarios"
SCHEMA = SCENARIOS / "scenario.schema.json"
DEFAULT_POLICY: dict[str, Any] = {"compress": "always", "prefix_percent": 3.0, "timeout_s": 8.0}
MARGIN_S = 15.0


class BadScenario(ValueError):
    """A scenario that is not one: where, and what is wrong."""


@dataclass(frozen=True)
class Scenario:
    """See scenarios/scenario.schema.json for the fields.

    Attributes:
        members: global ranks of the group under test, in its order.
        data: the scenario as it was read.
    """

    id: str
    family: str
    summary: str
    seed: int
    world_size: int
    members: tuple[int, ...]
    bystanders: tuple[int, ...]
    policy: dict[str, Any]
    calls: tuple[CallSpec, ...]
    faults: tuple[dict[str, Any], ...]
    expect: dict[str, Any]
    deadline_s: float
    nightly: bool
    data: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, data: Mapping[str, Any], where: str = "scenario") -> Scenario:
        """From plain data, checked.

        Raises:
            BadScenario: against the schema, or against itself.
        """
        data = dict(data)
        errors = sorted(_validator().iter_errors(data), key=lambda e: list(map(str, e.absolute_path)))
        if errors:
            worst = errors[0]
            at = "/".join(map(str, worst.absolute_path)) or "the top"
            raise BadScenario(f"{where}: at {at}: {worst.message}")
        scenario = cls(
            data["id"],
            data["family"],
            data["summary"],
            data["seed"],
            data["world_size"],
            tuple(data.get("group", range(data["world_size"]))),
            tuple(data.get("bystanders", ())),
            DEFAULT_POLICY | data.get("policy", {}),
            tuple(CallSpec.of(call) for call in data["calls"]),
            tuple(data["faults"]),
            data["expect"],
            float(data["deadline_s"]),
            bool(data.get("nightly", False)),
            data,
        )
        scenario._check(where)
        return scenario

    def _check(self, where: str) -> None:
        from faults.kinds import KINDS

        size, known = len(self.members), dict.fromkeys(range(self.world_size))
        if not {*self.members, *self.bystanders} <= set(known):
            raise BadScenario(f"{where}: group and bystanders must be ranks below world_size {self.world_size}")
        if len(self.expect["ranks"]) not in (1, size):
            raise BadScenario(f"{where}: expect.ranks must have 1 or {size} verdicts, one a rank of the group")
        if "error" in self.verdicts and "error" not in self.expect:
            raise BadScenario(f"{where}: a rank is to raise an error, but expect.error does not say which")
        places = self.places
        for i, each in enumerate(self.faults):
            kind = KINDS.get(each["fault"])
            if kind is None:
                raise BadScenario(f"{where}: faults/{i}: {each['fault']!r} is none of {sorted(KINDS)}")
            if each["phase"] not in kind.phases:
                raise BadScenario(f"{where}: faults/{i}: {kind.name} strikes at {kind.phases}, not {each['phase']!r}")
            schema = {
                "type": "object",
                "properties": kind.args,
                "required": list(kind.required),
                "additionalProperties": False,
            }
            wrong = next(jsonschema.Draft202012Validator(schema).iter_errors(each.get("args", {})), None)
            if wrong is not None:
                raise BadScenario(f"{where}: faults/{i}/args: {wrong.message}")
            if max(_ranks(each["rank"], size)) >= size:
                raise BadScenario(f"{where}: faults/{i}: the group has ranks 0 to {size - 1}, not {each['rank']}")
            for sequence in _sequences(each):
                at = places.get((each.get("operation") == "point_to_point", sequence))
                if at is None or at != each.get("operation", at):
                    raise BadScenario(
                        f"{where}: faults/{i}: #{sequence} is {at or 'no call'}, not {each.get('operation')!r}"
                    )

    @property
    def verdicts(self) -> list[str]:
        """One for each rank of the group."""
        ranks = self.expect["ranks"]
        return ranks * len(self.members) if len(ranks) == 1 else list(ranks)

    @property
    def survivors(self) -> list[int]:
        """Ranks of the group that are there at the end."""
        return [rank for rank, verdict in enumerate(self.verdicts) if verdict in ("correct", "error")]

    @property
    def numbered_calls(self) -> list[tuple[CallSpec, int]]:
        """Each call and its number in a beat, from 0; messages between two ranks have numbers of their own."""
        found, collective, messages = [], 0, 0
        for call in self.calls:
            if call.operation == POINT_TO_POINT:
                found.append((call, messages))
                messages += 1
            else:
                found.append((call, collective))
                collective += 1
        return found

    @property
    def places(self) -> dict[tuple[bool, int], str]:
        """(between two ranks, sequence number) → the operation that the seam names."""
        found = {}
        for call, sequence in self.numbered_calls:
            if call.operation == POINT_TO_POINT:
                found[True, sequence] = "point_to_point"
            else:
                found[False, sequence] = call.operation
        return found

    @property
    def needs_own_ranks(self) -> bool:
        """Whether a rank may be lost, so that no other scenario can run on the same processes."""
        from faults.kinds import KINDS

        return any(KINDS[each["fault"]].lethal for each in self.faults)

    @property
    def limit_s(self) -> float:
        """When the ranks have hung, whatever happens: far above every deadline."""
        return 3 * max(self.deadline_s, self.policy["timeout_s"]) + MARGIN_S

    def plan(self) -> list[Planned]:
        """The faults with everything drawn: a function of the scenario alone, its seed included."""
        from faults.kinds import KINDS

        plan = []
        for index, each in enumerate(self.faults):
            kind, args = KINDS[each["fault"]], each.get("args", {})
            rng = rng_of("faults", self.id, self.seed, index)
            sequences = _sequences(each) or [0]
            drawn = [kind.draw(rng, args, i, len(sequences), len(self.members)) for i in range(len(sequences))]
            places, given = self.places, each.get("operation", "")
            strikes = [
                {"sequence": sequence, "operation": given or places.get((False, sequence), ""), **more}
                for sequence, more in zip(sequences, drawn, strict=True)
                if more is not None
            ]
            ranks = tuple(_ranks(each["rank"], len(self.members)))
            plan.append(
                Planned(
                    index,
                    kind.name,
                    ranks,
                    each["phase"],
                    each.get("peer", -1),
                    each.get("nth", 0),
                    dict(args),
                    tuple(strikes),
                )
            )
        return plan


def _ranks(rank: Any, size: int) -> list[int]:
    return list(range(size)) if rank == "all" else [rank] if isinstance(rank, int) else list(rank)


def _sequences(each: Mapping[str, Any]) -> list[int]:
    sequence = each.get("sequence", [])
    return [sequence] if isinstance(sequence, int) else list(sequence)


@functools.cache
def _validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def load(path: Path) -> Scenario:
    """One scenario from its YAML file, whose name is its id."""
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as exc:
        raise BadScenario(f"{path}: not YAML: {exc}") from exc
    if not isinstance(data, dict):
        raise BadScenario(f"{path}: must be a mapping, is {type(data).__name__}")
    scenario = Scenario.of(data, str(path))
    if scenario.id != path.stem or scenario.family != path.parent.name:
        raise BadScenario(f"{path}: must lie in scenarios/{scenario.family}/{scenario.id}.yaml")
    return scenario


@functools.cache
def library() -> dict[str, Scenario]:
    """id → scenario of all files under scenarios/, in order.

    Raises:
        BadScenario: one of them is not right, or there is none.
    """
    found: dict[str, Scenario] = {}
    for path in sorted(SCENARIOS.rglob("*.yaml")):
        scenario = load(path)
        if scenario.id in found:
            raise BadScenario(f"{path}: there are two scenarios of this id")
        found[scenario.id] = scenario
    if not found:
        raise BadScenario(f"{SCENARIOS}: no scenarios there")
    return found


def chosen(names: Iterable[str], *, nightly: bool = False) -> list[Scenario]:
    """Scenarios by id, family, pattern (fnmatch) or path of a YAML file; all if there are no names.

    Args:
        nightly: those marked nightly too; a scenario named by its id is always taken.

    Raises:
        BadScenario: a name that fits nothing.
    """
    import fnmatch

    everything = library()
    names = list(names)
    if not names:
        return [s for s in everything.values() if nightly or not s.nightly]
    found: dict[str, Scenario] = {}
    for name in names:
        if name.endswith(".yaml"):
            scenario = load(Path(name))
            found[scenario.id] = scenario
            continue
        if name in everything:
            found[name] = everything[name]
            continue
        fitting = {
            s.id: s
            for s in everything.values()
            if (s.family == name or fnmatch.fnmatch(s.id, name)) and (nightly or not s.nightly)
        }
        if not fitting:
            raise BadScenario(f"no scenario, family or pattern {name!r}; see python -m faults list")
        found |= fitting
    return list(found.values())
