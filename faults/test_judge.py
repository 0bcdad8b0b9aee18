"""The judge is judged: it needs no cluster, finds out what was tampered with, and believes nothing it can compute."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.__main__ import main
from faults.judge import MANIFEST, VERDICT, check, judge
from faults.lab import Job, Lab
from faults.ledger import FIRST_LINK, Ledger, link_of, read_ledger
from faults.record import Record
from faults.replay import differences, job_of
from faults.scenario import BadScenario, Scenario, library, load
from faults.soak import FAMILIES, random_scenario

Event = dict[str, Any]


@pytest.fixture(scope="session")
def late(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run of a slow rank."""
    return carried_out(lab, "late_one_off", tmp_path_factory)


@pytest.fixture(scope="session")
def corrupt(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run of a corrupt frame."""
    return carried_out(lab, "flip_record_sign_mantissa", tmp_path_factory)


def carried_out(lab: Lab, name: str, factory: pytest.TempPathFactory) -> Path:
    scenario = library()[name]
    directory = factory.mktemp("run") / name
    verdict = lab.run(Job(scenario.data, directory, scenario.needs_own_ranks, scenario.limit_s))
    assert verdict["ok"], verdict["clauses"]
    return directory


def forged(source: Path, target: Path, change: Callable[[Event], Event | None]) -> Path:
    """A copy whose ranks' events went through `change`, with links and manifest made right again."""
    shutil.copytree(source, target)
    for path in target.glob("rank*.jsonl"):
        link, lines = FIRST_LINK, []
        for event in read_ledger(path)[0]:
            changed = change({k: v for k, v in event.items() if k != "link"})
            if changed is not None:
                body = json.dumps(changed)
                link = link_of(link, body)
                lines.append(f'{body[:-1]}, "link": "{link}"}}\n')
        path.write_text("".join(lines))
    return sealed(target)


def sealed(directory: Path) -> Path:
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir() if p.name != MANIFEST}
    (directory / MANIFEST).write_text(json.dumps({"sha256": files}))
    return directory


def test_a_stored_run_is_judged_again_as_it_was(late: Path, corrupt: Path) -> None:
    for directory in (late, corrupt):
        verdict = check(directory)
        assert verdict.ok, verdict.complaints()
        assert verdict.as_json() == json.loads((directory / VERDICT).read_text())


def test_judging_opens_no_process_group_and_starts_no_process(late: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import socket
    import subprocess

    import torch.distributed as dist

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("judging needs no cluster")

    for owner, name in ((dist, "init_process_group"), (socket, "socket"), (subprocess, "Popen"), (os, "fork")):
        monkeypatch.setattr(owner, name, never)
    assert check(late).ok


@pytest.mark.parametrize("name", ["scenario.json", "plan.json", "rank1.jsonl", "launch.jsonl", VERDICT, "timeline.svg"])
def test_a_changed_file_is_found_out(late: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(late, copy)
    path = copy / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    complaints = check(copy).complaints()
    assert any(name in text for text in complaints), complaints


def test_a_removed_and_an_added_file_are_found_out(late: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(late, copy)
    (copy / "rank0.jsonl").unlink()
    (copy / "notes.txt").write_text("all was well")
    text = "\n".join(check(copy).complaints())
    assert "rank0.jsonl is missing" in text
    assert "notes.txt is not in the manifest" in text


def test_a_removed_event_breaks_the_links_though_the_manifest_is_right(late: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(late, copy)
    path = copy / "rank1.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5] + lines[6:]))
    assert any("was changed" in text for text in check(sealed(copy)).complaints())


def without_strikes(event: Event) -> Event | None:
    return None if event["event"] == "fired" else event


def with_other_output(event: Event) -> Event:
    if event["event"] == "done" and event["beat"] == "healed":
        event["output_sha256"] = "0" * 64
    return event


def with_other_input(event: Event) -> Event:
    if event["event"] == "call" and event["beat"] == "clean":
        event["input_sha256"] = "0" * 64
    return event


def with_another_last(event: Event) -> Event:
    if event["event"] == "done" and event["beat"] == "armed":
        event["arrivals"] = event["arrivals"][::-1]
    return event


def with_another_plan(event: Event) -> Event:
    if event["event"] == "plan":
        event["entries"][0]["strikes"][0]["ms"] = 1.0
    return event


def with_more_threads(event: Event) -> Event:
    if event["event"] == "resources":
        event["after"]["threads"] += 1
    return event


def with_a_short_sleep(event: Event) -> Event:
    if event["event"] == "fired":
        event["ms"] = 1.0
    return event


def struck_later(event: Event) -> Event:
    if event["event"] == "fired":
        event["at_s"] += 1e6
    return event


@pytest.mark.parametrize(
    ("change", "clause"),
    [
        (without_strikes, "fired"),
        (with_a_short_sleep, "fired"),
        (with_another_last, "observed"),
        (with_other_output, "healed"),
        (with_other_input, "clean"),
        (with_another_plan, "directory"),
        (with_more_threads, "leaks"),
        (struck_later, "healed"),
    ],
)
def test_a_forged_run_is_not_good_though_every_hash_is_right(
    late: Path, tmp_path: Path, change: Callable[[Event], Event | None], clause: str
) -> None:
    verdict = check(forged(late, tmp_path / "copy", change))
    assert verdict.clauses[clause], verdict.complaints()


def with_a_bystander_later_still(event: Event) -> Event:
    if event["event"] == "done" and event["beat"] == "armed":
        *first, (bystander, _), (last, late_us) = event["arrivals"]
        event["arrivals"] = [*first, [last, late_us], [bystander, late_us + 5000.0]]
    return event


def test_a_machine_may_hold_up_anybody_as_long_as_the_late_rank_s_lateness_is_seen(late: Path, tmp_path: Path) -> None:
    assert check(forged(late, tmp_path / "copy", with_a_bystander_later_still)).ok


def unheard(event: Event) -> Event:
    if event["event"] == "done" and event["beat"] == "armed" and event["outcome"] == "error":
        return {**event, "outcome": "returned", "output_sha256": "0" * 64, "guards": ""}
    return event


def late_by_a_minute(event: Event) -> Event:
    if event["event"] == "done" and event["outcome"] == "error":
        event["took_s"] += 60.0
    return event


def one_has_another_error(event: Event) -> Event:
    if event["event"] == "done" and event["outcome"] == "error":
        event["text"] += f" at {event['at_s']}"
    return event


@pytest.mark.parametrize(
    ("change", "text"),
    [(unheard, "raised nothing"), (late_by_a_minute, "the deadline was"), (one_has_another_error, "different errors")],
)
def test_an_error_must_come_in_time_on_all_ranks_and_be_the_same(
    corrupt: Path, tmp_path: Path, change: Callable[[Event], Event | None], text: str
) -> None:
    complaints = check(forged(corrupt, tmp_path / "copy", change)).clauses["outcome"]
    assert any(text in each for each in complaints), complaints


def test_the_ledger_says_how_far_each_fault_came(late: Path, tmp_path: Path) -> None:
    [entry] = check(late).ledger
    assert [entry[k] for k in ("planned", "fired", "observed", "healed")] == [True] * 4
    [entry] = check(forged(late, tmp_path / "copy", without_strikes)).ledger
    assert [entry[k] for k in ("planned", "fired", "observed", "healed")] == [True, False, False, True]


def test_a_replay_follows_the_same_plan_to_the_same_end(lab: Lab, corrupt: Path, tmp_path: Path) -> None:
    target = tmp_path / "again"
    assert lab.run(job_of(corrupt, target))["ok"]
    assert differences(Record.read(corrupt), Record.read(target)) == []
    assert check(target).ok


def test_a_replay_that_goes_another_way_says_where(corrupt: Path, tmp_path: Path) -> None:
    other = forged(corrupt, tmp_path / "copy", with_other_output)
    assert "calls differ" in "".join(differences(Record.read(corrupt), Record.read(other)))
    assert "strikes differ" in "".join(
        differences(Record.read(corrupt), Record.read(forged(corrupt, tmp_path / "second", without_strikes)))
    )


def test_the_command_line_lists_checks_and_refuses(late: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "dead_rank"]) == 0
    assert "sigkill_encode" in capsys.readouterr().out
    assert main(["check", str(late)]) == 0
    assert "1 good, 0 bad" in capsys.readouterr().out
    assert main(["check", str(late.parent)]) == 0
    assert main(["run", "no_such_scenario"]) == 2
    assert "no_such_scenario" in capsys.readouterr().err


REFUSED = [
    (["run", "late_of_two", "--jobs", "0"], "--jobs must be 1 or more, got 0"),
    (["run", "late_of_two", "--jobs", "-3"], "--jobs must be 1 or more, got -3"),
    (["soak", "--seed", "1", "--count", "1", "--jobs", "0"], "--jobs must be 1 or more, got 0"),
    (["soak", "--seed", "1", "--count", "0"], "--count must be 1 or more, got 0"),
    (["soak", "--seed", "1", "--count", "-5"], "--count must be 1 or more, got -5"),
    (["run", "late_of_two", "--subject", "nope"], "no subject 'nope'; zipccl, or broken. and one of ['accepts_stale'"),
    (["run", "late_of_two", "--subject", "broken.nope"], "no subject 'broken.nope'"),
    (["run", "late_of_two", "--subject", "torch_native"], "no subject 'torch_native'"),
    (["run", "late_of_two", "--subject", "impatient"], "no subject 'impatient'"),
    (["run", "late_of_two", "--subject", "my.module:subject"], "no subject 'my.module:subject'"),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_what_makes_no_sense_is_one_line_and_starts_nothing(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("faults.__main__.Lab", None)
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"faults: {text}")
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["check", "replay"])
def test_where_no_run_is_is_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for directory, text in ((tmp_path / "nowhere", "is no directory; wanted"), (tmp_path, "holds no run; wanted")):
        assert main([command, str(directory)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(f"faults: {directory} {text}")
        assert printed.err.count("\n") == 1


def test_a_directory_of_runs_is_not_replayed(late: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(late.parent)]) == 2
    assert capsys.readouterr().err == (
        f"faults: {late.parent} is a folder of runs; replay one of them, for instance {late}\n"
    )


def test_a_run_that_lost_its_scenario_is_bad_and_not_passed_over(
    late: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(late, tmp_path / "a")
    shutil.copytree(late, tmp_path / "b")
    (tmp_path / "b" / "scenario.json").unlink()
    assert main(["check", str(tmp_path)]) == 1
    assert "2 runs judged again: 1 good, 1 bad" in capsys.readouterr().out


@pytest.mark.parametrize("answered", [0, 1])
def test_fewer_judged_than_asked_for_is_not_green(
    answered: int, late: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Forgetful:
        """A laboratory that gives back the first verdicts only."""

        def __enter__(self) -> Forgetful:
            return self

        def __exit__(self, *exc: object) -> None:
            return

        def run_all(self, jobs: list[Job], at_once: int) -> list[tuple[Job, Any]]:
            return [(job, check(late).as_json()) for job in jobs[:answered]]

    monkeypatch.setattr("faults.__main__.Lab", Forgetful)
    assert main(["run", "late_of_two", "late_one_off", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"faults: 2 scenarios were asked for, and {answered} were judged\n"


def test_no_place_for_jobs_is_an_error_and_not_an_end(lab: Lab, tmp_path: Path) -> None:
    scenario = library()["late_of_two"]
    job = Job(scenario.data, tmp_path / scenario.id, scenario.needs_own_ranks, scenario.limit_s)
    with pytest.raises(ValueError, match="at_once must be 1 or more, got 0"):
        list(lab.run_all([job], 0))


def test_the_command_line_runs_and_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "late_of_two", "--out", str(tmp_path)]) == 0
    [directory] = tmp_path.glob("*/late_of_two")
    assert {p.name for p in directory.iterdir()} >= {
        *("scenario.json", "plan.json", "request.json", "rank0.jsonl", "rank1.jsonl", "launch.jsonl"),
        *(VERDICT, MANIFEST, "timeline.svg", "trace.json"),
    }
    assert main(["replay", str(directory), "--out", str(tmp_path / "again")]) == 0
    assert "the same course" in capsys.readouterr().out


def test_the_picture_is_one_file_and_the_trace_has_every_rank(corrupt: Path) -> None:
    picture = (corrupt / "timeline.svg").read_text()
    from xml.etree import ElementTree

    ElementTree.fromstring(picture)
    assert "fault flip" in picture
    assert "href" not in picture
    events = json.loads((corrupt / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1, 2}
    assert any(e["name"] == "FAULT flip" for e in events)
    assert all({"ph", "pid", "name"} <= set(e) for e in events)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")


def test_a_plan_is_a_function_of_scenario_and_seed() -> None:
    scenario = library()["late_jitter"]
    assert scenario.plan() == Scenario.of(scenario.data).plan()
    other = Scenario.of({**scenario.data, "seed": scenario.seed + 1})
    assert other.plan() != scenario.plan()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"world_size": 9}, "world_size"),
        ({"surprise": 1}, "surprise"),
        ({"faults": [{"fault": "meteor", "rank": 0, "phase": "issue"}]}, "meteor"),
        ({"faults": [{"fault": "delay", "rank": 0, "phase": "make", "args": {"ms": 1, "shape": "constant"}}]}, "make"),
        ({"faults": [{"fault": "delay", "rank": 0, "phase": "issue", "args": {"ms": -1, "shape": "constant"}}]}, "-1"),
        ({"faults": [{"fault": "delay", "rank": 7, "phase": "issue", "args": {"ms": 1, "shape": "constant"}}]}, "7"),
        ({"expect": {"ranks": ["error"], "then": "new_group"}}, "expect.error"),
    ],
)
def test_a_wrong_scenario_is_refused_with_its_place(change: dict[str, Any], text: str) -> None:
    with pytest.raises(BadScenario, match=text):
        Scenario.of({**library()["late_one_off"].data, **change}, "here")


def test_a_fault_at_a_call_that_is_not_there_is_refused() -> None:
    data = json.loads(json.dumps(library()["late_one_off"].data))
    data["faults"][0]["sequence"] = 99
    with pytest.raises(BadScenario, match="no call"):
        Scenario.of(data)


def test_a_file_must_be_named_for_its_scenario(tmp_path: Path) -> None:
    path = tmp_path / "another.yaml"
    path.write_text(json.dumps(library()["late_one_off"].data))
    with pytest.raises(BadScenario, match=r"late_one_off\.yaml"):
        load(path)


def test_soak_scenarios_are_sound_and_cover_all_families() -> None:
    drawn = [Scenario.of(random_scenario(5, i)) for i in range(120)]
    assert {s.family for s in drawn} == set(FAMILIES)
    assert random_scenario(5, 7) == random_scenario(5, 7)
    assert random_scenario(5, 7) != random_scenario(6, 7)


def test_a_line_that_a_death_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    ledger = Ledger(path)
    ledger.write("one")
    ledger.write("two")
    ledger.close()
    with path.open("ab") as file:
        file.write(b'{"event": "thr')
    events, wrong = read_ledger(path)
    assert [e["event"] for e in events] == ["one", "two"]
    assert wrong == ""


def test_a_scenario_that_hangs_ends_its_own_ranks_alone(lab: Lab, tmp_path: Path) -> None:
    """The ranks of other scenarios, and the server, live on."""
    data = {**library()["stopped_for_good"].data, "deadline_s": 0.5}
    hung = Job(data, tmp_path / "hung", True, Scenario.of(data).limit_s, "broken.waits_without_bound")
    assert not lab.run(hung)["ok"]
    record = Record.read(hung.directory)
    assert {e["rank"] for e in record.launch if e["event"] == "hung"} == {0, 1}
    assert [e["alive"] for e in record.launch if e["event"] == "left"] == [[]]
    assert "hung" in " ".join(judge(record).clauses["harness"])
    assert "Thread" in (hung.directory / "rank0.log").read_text()  # its stacks
    good = library()["late_of_two"]
    assert lab.run(Job(good.data, tmp_path / "after", good.needs_own_ranks, good.limit_s))["ok"]
