"""python -m faults list | run SCENARIO… | replay DIR | check DIR… | soak --seed S --count N"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from conformance.launch import new_run_dir
from faults.lab import ROOT, Job, Lab, LabError

RUNS = ROOT / "runs" / "faults"
MARKS = {True: "[green]✓[/]", False: "[red]✗[/]"}


def main(argv: list[str] | None = None) -> int:
    """0 if all is well, 1 if a run is not good or is missing, 2 if what was asked for is not there or cannot be."""
    from faults.scenario import BadScenario

    args = _parser().parse_args(argv)
    try:
        return int(args.act(args))
    except KeyboardInterrupt:
        print("faults: interrupted; everything that was started has ended", file=sys.stderr)
        return 130
    except (BadScenario, LabError, OSError, ValueError) as exc:
        print(f"faults: {exc}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, act: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(act=act)
        return sub

    def running(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--jobs", type=int, default=4, help="scenarios at once (default 4)")
        sub.add_argument("--out", type=Path, default=RUNS, help="where run directories go (default runs/faults)")

    sub = command("list", _list, "Show the scenarios.")
    sub.add_argument("names", nargs="*", metavar="SCENARIO", help="ids, families or patterns; all if none")
    sub = command("run", _run, "Run scenarios, and judge them.")
    sub.add_argument("names", nargs="*", metavar="SCENARIO", help="ids, families, patterns or YAML files; all if none")
    sub.add_argument("--nightly", action="store_true", help="those marked nightly too")
    sub.add_argument("--subject", default="zipccl", help="zipccl, or broken.NAME")
    running(sub)
    sub = command("replay", _replay, "Run a stored run's plan again, and say where it went another way.")
    sub.add_argument("directory", type=Path)
    sub.add_argument("--out", type=Path, default=RUNS)
    sub = command("check", _check, "Judge stored runs again, without a cluster.")
    sub.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="of one run, or of many")
    sub = command("soak", _soak, "Run random scenarios over all families.")
    sub.add_argument("--seed", type=int, required=True)
    sub.add_argument("--count", type=int, required=True)
    sub.add_argument("--first", type=int, default=0, help="number of the first (default 0)")
    running(sub)
    return parser


def _at_least_one(**options: int) -> None:
    """Raise ValueError unless every one of these options is 1 or more."""
    for name, value in options.items():
        if value < 1:
            raise ValueError(f"--{name} must be 1 or more, got {value}")


def _known(subject: str) -> None:
    """Raise ValueError if no rank could make this subject; torch is imported only for one that is broken."""
    if subject != "zipccl":
        from faults.rank import maker_of

        maker_of(subject)


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 110)
    return console


def _list(args: argparse.Namespace) -> int:
    from faults.scenario import chosen

    scenarios = chosen(args.names, nightly=True)
    table = Table("family", "scenario", "ranks", "when", "what", box=None)
    for s in scenarios:
        table.add_row(s.family, s.id, str(s.world_size), "nightly" if s.nightly else "", s.summary)
    _console().print(table)
    nightly = sum(s.nightly for s in scenarios)
    print(f"{len(scenarios)} scenarios, {nightly} of them nightly")
    return 0


def _run(args: argparse.Namespace) -> int:
    from faults.scenario import chosen

    _at_least_one(jobs=args.jobs)
    _known(args.subject)
    scenarios = chosen(args.names, nightly=args.nightly)
    args.out.mkdir(parents=True, exist_ok=True)
    directory = new_run_dir(args.out)
    jobs = [Job(s.data, directory / s.id, s.needs_own_ranks, s.limit_s, args.subject) for s in scenarios]
    return _carry_out(jobs, args.jobs, directory)


def _carry_out(jobs: list[Job], at_once: int, directory: Path, *, quiet: bool = False) -> int:
    """Run jobs with a bar, and end with a table; 0 if there are some, and all were judged and are good."""
    console, began = _console(), time.monotonic()
    console.print(f"faults: {len(jobs)} scenarios; runs go to {directory}", soft_wrap=True)
    verdicts = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Lab() as lab, Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(jobs))
        for job, verdict in lab.run_all(jobs, at_once):
            verdicts.append((job, verdict))
            progress.update(bar, advance=1, description=job.directory.name)
            if not verdict["ok"]:
                progress.console.print(f"[red]FAILED[/] {job.directory}", soft_wrap=True)
                for line in _complaints(verdict):
                    progress.console.print(f"  {line}", markup=False, soft_wrap=True)
    shown = [v for _, v in verdicts if not quiet or not v["ok"]]
    if shown:
        console.print(_table(shown))
    bad = sum(not v["ok"] for _, v in verdicts)
    hung = sum("hung" in " ".join(v["clauses"].get("harness", [])) for _, v in verdicts)
    wrong = sum("other bits" in " ".join(_complaints(v)) for _, v in verdicts)
    detected = max((v["detected_s"] for _, v in verdicts), default=0.0)
    summary = {
        "asked": len(jobs),
        "scenarios": len(verdicts),
        "bad": bad,
        "hung": hung,
        "silently_wrong": wrong,
        "longest_detection_s": detected,
        "seconds": round(time.monotonic() - began, 1),
    }
    (directory / "summary.json").write_text(json.dumps(summary, indent=1))
    console.print(
        f"{len(verdicts)} scenarios in {summary['seconds']} s: {len(verdicts) - bad} good, {bad} bad, {hung} hung, "
        f"{wrong} silently wrong; the longest from call to error was {detected} s",
        soft_wrap=True,
    )
    if not jobs or len(verdicts) < len(jobs):
        print(f"faults: {len(jobs)} scenarios were asked for, and {len(verdicts)} were judged", file=sys.stderr)
        return 1
    return int(bad > 0)


def _complaints(verdict: dict[str, Any]) -> list[str]:
    return [f"{clause}: {text}" for clause, texts in verdict["clauses"].items() for text in texts]


def _table(verdicts: Iterable[dict[str, Any]]) -> Table:
    table = Table("family", "scenario", "fault", "planned", "fired", "observed", "healed", "verdict", "s", box=None)
    for v in sorted(verdicts, key=lambda v: (v["family"], v["scenario"])):
        for i, entry in enumerate(v["ledger"] or [{}]):
            marks = [MARKS[entry[k]] if entry else "" for k in ("planned", "fired", "observed", "healed")]
            head = (v["family"], v["scenario"]) if i == 0 else ("", "")
            where = f"{entry.get('fault', '')} ({entry.get('where', '')})" if entry else ""
            last = ("[green]good[/]" if v["ok"] else "[red]BAD[/]", f"{v['seconds']:.1f}") if i == 0 else ("", "")
            table.add_row(*head, where, *marks, *last)
    return table


def _replay(args: argparse.Namespace) -> int:
    from faults.record import Record, runs_in
    from faults.replay import differences, job_of

    directory = runs_in(args.directory)[0]
    if directory != args.directory:
        raise ValueError(f"{args.directory} is a folder of runs; replay one of them, for instance {directory}")
    job = job_of(directory, args.out)
    _known(job.subject)
    args.out.mkdir(parents=True, exist_ok=True)
    target = job.directory = new_run_dir(args.out) / directory.resolve().name
    with Lab() as lab:
        verdict = lab.run(job)
    console = _console()
    console.print(_table([verdict]))
    for line in _complaints(verdict):
        console.print(f"  {line}", markup=False, soft_wrap=True)
    different = differences(Record.read(args.directory), Record.read(target))
    for line in different:
        console.print(f"  went another way: {line}", markup=False, soft_wrap=True)
    console.print(
        f"replayed {args.directory} in {target}: {'another' if different else 'the same'} course", soft_wrap=True
    )
    return int(bool(different) or not verdict["ok"])


def _check(args: argparse.Namespace) -> int:
    from faults.judge import check
    from faults.record import runs_in

    found = [run for directory in args.directories for run in runs_in(directory)]
    verdicts, console = [], _console()
    for directory in found:
        verdict = check(directory)
        verdicts.append(verdict.as_json())
        for line in verdict.complaints():
            console.print(f"{directory}: {line}", markup=False, soft_wrap=True)
    console.print(_table(verdicts))
    bad = sum(not v["ok"] for v in verdicts)
    console.print(f"{len(verdicts)} runs judged again: {len(verdicts) - bad} good, {bad} bad")
    return int(bad > 0)


def _soak(args: argparse.Namespace) -> int:
    from faults.scenario import Scenario
    from faults.soak import random_scenario

    _at_least_one(jobs=args.jobs, count=args.count)
    args.out.mkdir(parents=True, exist_ok=True)
    directory = new_run_dir(args.out)
    jobs = []
    for number in range(args.first, args.first + args.count):
        s = Scenario.of(random_scenario(args.seed, number), f"soak {args.seed}, number {number}")
        jobs.append(Job(s.data, directory / s.id, s.needs_own_ranks, s.limit_s))
    return _carry_out(jobs, args.jobs, directory, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
