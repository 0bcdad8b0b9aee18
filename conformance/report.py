"""What a person sees of a run, and what machines read: live progress, tables, one JUnit XML, one JSON.

A finished run can be judged again from its directory: `python -m conformance.report RUN_DIR [JUNIT_XML]`. That is
also how a run under a torchrun of one's own (several hosts, CI) gets its JUnit.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from conformance.launch import Follower, Result, Run, read_run
from conformance.record import collectives_line

KINDS = ("PASS", "FAIL", "UNSUPPORTED", "XFAIL", "ERROR")
COLOURS = {"PASS": "green", "FAIL": "red", "ERROR": "red", "UNSUPPORTED": "yellow", "XFAIL": "yellow"}
PYTEST_WORDS = {"PASS": "passed", "FAIL": "failed", "UNSUPPORTED": "skipped", "ERROR": "errors", "XFAIL": "xfailed"}
TICK_S = 5.0
ROWS_SHOWN = 40
REASON_CHARS = 200
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd]")
AGAIN = re.compile(r"^(?:E +)?run it again: (.+)$", re.MULTILINE)
MIN_COLUMNS = 100
DOCUMENT = Path(__file__).parents[1] / "docs" / "CONFORMANCE.md"


class Reporter:
    """Prints while a run goes on and writes its reports at the end. A failed report goes to stderr at once.

    Args:
        again: node id → the command that runs it again.
    """

    def __init__(self, run_dir: Path, subject: str, again: Callable[[str], str], *, verbose: int = 0) -> None:
        self.again = again
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr)
        self.run_dir = run_dir
        self.verbose = verbose
        self._began = time.monotonic()
        self._last_tick = self._began
        self._live: Live | None = None
        self._file = ""
        self._in_file: Counter[str] = Counter()
        self._done = 0
        self.out.print(f"conformance: subject {subject}; logs and reports in {run_dir}", highlight=False)

    def on_result(self, result: Result) -> None:
        """Count it, and print it if it failed."""
        self._done += 1
        file = result.nodeid.split("::")[0]
        if file != self._file:
            self._close_file()
            self._file = file
        self._in_file[result.kind] += 1
        if self.verbose > 0:
            self.out.print(f"{result.nodeid} {result.kind} {result.reason}"[:300], markup=False, highlight=False)
        if result.kind in ("FAIL", "ERROR"):
            heading = f" {result.kind} {result.nodeid} ".center(self.err.width, "_")  # whole, however long
            self.err.print(Text(heading, style=COLOURS[result.kind]), soft_wrap=True)
            self.err.print(Text(result.text or result.reason), soft_wrap=True)
            if not AGAIN.search(result.text):
                self.err.print(Text(f"run it again: {self.again(result.nodeid)}"), soft_wrap=True)

    def _close_file(self) -> None:
        if self._file and not self._live:
            counts = ", ".join(f"{n} {k}" for k, n in self._in_file.items())
            self.out.print(f"{self._file}: {counts} ({time.monotonic() - self._began:.0f} s)", highlight=False)
            self._last_tick = time.monotonic()
        self._in_file.clear()

    def on_tick(self, run: Run, follower: Follower) -> None:
        """On a terminal one line that changes; elsewhere a line every few seconds while nothing else is said."""
        if self.out.is_terminal:
            if self._live is None:
                self._live = Live(console=self.out, transient=True, refresh_per_second=8)
                self._live.start()
            self._live.update(Text(self._progress(run, follower), style="cyan"))
        elif time.monotonic() - self._last_tick > TICK_S:
            self._last_tick = time.monotonic()
            self.out.print(self._progress(run, follower), markup=False, highlight=False, soft_wrap=True)

    def _progress(self, run: Run, follower: Follower) -> str:
        now = {r.in_test["nodeid"] for r in follower.ranks.values() if r.in_test}
        where = min(now, default="starting ranks" if not run.nodeids else "")
        return f"[{len(run.results)}/{len(run.nodeids) or '?'}] {time.monotonic() - self._began:.0f} s {where}"

    def finish(self, run: Run, junit: Path) -> None:
        """Tables, JUnit, JSON, and the closing line."""
        if self._live:
            self._live.stop()
            self._live = None
        self._close_file()
        show(run, self.out, self.again)
        write_junit(run, junit)
        (self.run_dir / "report.json").write_text(json.dumps(as_json(run), indent=1) + "\n")
        self.out.print(f"reports: {junit}, {self.run_dir / 'report.json'}", highlight=False, soft_wrap=True)
        self.out.print(closing_line(run), style="green" if run.ok() else "red", markup=False, highlight=False)


def _console(stream: Any) -> Console:
    console = Console(file=stream, soft_wrap=False)
    return console if console.is_terminal else Console(file=stream, width=max(console.width, MIN_COLUMNS))


def suite_of(nodeid: str) -> str:
    """test_sum of conformance/test_sum.py::test_x[…]"""
    return Path(nodeid.split("::")[0]).stem


def counts(run: Run) -> Counter[str]:
    """How many tests have each kind of verdict."""
    return Counter(r.kind for r in run.results.values())


def closing_line(run: Run) -> str:
    """Pytest's own form: "==== 12 passed, 0 failed, 3 skipped in 40.21s ===="."""
    by = counts(run)
    parts = [f"{by[k]} {PYTEST_WORDS[k]}" for k in ("PASS", "FAIL", "UNSUPPORTED")]
    parts += [f"{by[k]} {PYTEST_WORDS[k]}" for k in ("ERROR", "XFAIL") if by[k]]
    return f" {', '.join(parts)} in {run.ended - run.started:.2f}s ".center(80, "=")


def requirements(run: Run) -> dict[str, list[str]]:
    """Of the requirements of docs/CONFORMANCE.md: which a test that passed in this run proves, and which none does."""
    document = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    known = re.findall(r"^\| ([A-Z0-9]+-\d+) \| ", document, re.MULTILINE)
    passed = (run.cites.get(r.nodeid, []) for r in run.results.values() if r.kind == "PASS")
    proved = {name for cited in passed for name in cited}
    return {"proved": [i for i in known if i in proved], "not_proved": [i for i in known if i not in proved]}


def frames_by_kind(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the table "frames", summed by kind and dtype: bits per word, ratio (raw ÷ frame), escape rate."""
    sums: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row["table"] == "frames":
            for name in ("n_words", "raw_bytes", "frame_bytes", "escapes"):
                sums[row["kind"], row["dtype"]][name] += row[name]
    return [
        {
            "kind": kind,
            "dtype": dtype,
            "n_words": s["n_words"],
            "bits_per_word": 8 * s["frame_bytes"] / s["n_words"],
            "ratio": s["raw_bytes"] / s["frame_bytes"],
            "escape_rate": s["escapes"] / s["n_words"],
        }
        for (kind, dtype), s in sums.items()
        if s["n_words"]
    ]


def show(run: Run, out: Console, again: Callable[[str], str] | None = None) -> None:
    """The tables of a run, its problems, and a line for every test that failed or was not supported.

    Args:
        again: node id → the command that runs it again, shown below each that failed; None: it is not known.
    """
    if run.header:
        out.print(_table("run", ["", ""], list(run.header.items())))
    per: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for r in run.results.values():
        per[suite_of(r.nodeid), r.operation][r.kind] += 1
    columns = [k for k in KINDS if counts(run)[k]]
    lines = [(suite, op or "–", *(str(c[k] or "") for k in columns)) for (suite, op), c in per.items()]
    total = ("all", "", *(str(counts(run)[k]) for k in columns))
    if run.results:
        out.print(_table("verdicts", ["suite", "collective", *columns], [*lines, total]))
    if frames := frames_by_kind(run.rows):
        cells = [
            (
                f["kind"],
                f["dtype"],
                f"{f['n_words']:,}",
                f"{f['bits_per_word']:.3f}",
                f"{f['ratio']:.3f}",
                f"{100 * f['escape_rate']:.2f} %",
            )
            for f in frames
        ]
        out.print(_table("frames", ["kind", "dtype", "words", "bits per word", "ratio", "escapes"], cells))
    others: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in run.rows:
        if row["table"] != "frames":
            others[row["table"]].append({k: v for k, v in row.items() if k != "table"})
    for name, table_rows in others.items():
        names = list(dict.fromkeys(k for row in table_rows for k in row))
        cells_any = [tuple(_cell(row.get(k, "")) for k in names) for row in table_rows[:ROWS_SHOWN]]
        out.print(_table(name, names, cells_any))
        if len(table_rows) > ROWS_SHOWN:
            out.print(f"  … and {len(table_rows) - ROWS_SHOWN} more rows in report.json")
    told = requirements(run)
    if told["proved"]:
        line = f"requirements: {len(told['proved'])} proved in this run"
        if told["not_proved"]:
            few = len(told["not_proved"]) <= ROWS_SHOWN
            which = ", ".join(told["not_proved"]) if few else "see report.json"
            line += f"; {len(told['not_proved'])} not (the judge's own tests prove some of them): {which}"
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    if line := on_gpus(run):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    reasons = Counter(r.reason for r in run.results.values() if r.kind == "UNSUPPORTED")
    for reason, n in reasons.most_common(ROWS_SHOWN):
        out.print(f"SKIPPED [{n}] {reason}", markup=False, highlight=False, soft_wrap=True)
    for r in run.results.values():
        if r.kind in ("FAIL", "ERROR", "XFAIL"):
            word = {"FAIL": "FAILED", "ERROR": "ERROR", "XFAIL": "XFAIL"}[r.kind]
            out.print(f"{word} {r.nodeid} - {r.reason[:REASON_CHARS]}", markup=False, highlight=False, soft_wrap=True)
            drawn = AGAIN.search(r.text)  # runs the one example again
            if r.kind != "XFAIL" and (drawn or again):
                line = drawn[1] if drawn else again(r.nodeid) if again else ""
                out.print(f"  run it again: {line}", markup=False, highlight=False, soft_wrap=True)
    for problem in run.problems:
        out.print(f"PROBLEM {problem}", style="red", markup=False, highlight=False, soft_wrap=True)


def on_gpus(run: Run) -> str:
    """Of our own collectives: what is recorded of them on GPUs, in a line; "" for other subjects."""
    if not run.header.get("subject", "").startswith("zipccl"):
        return ""
    try:
        return collectives_line()
    except (OSError, ValueError, KeyError) as e:  # the report of this run must not fail of it
        return f"on GPUs: the collectives' records cannot be read: {type(e).__name__}: {e}"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(title: str, columns: list[str], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for i, column in enumerate(columns):
        table.add_column(column, style=COLOURS.get(column), justify="left" if i < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def as_json(run: Run) -> dict[str, Any]:
    """The run as plain data; what `report.json` holds."""
    return {
        "header": run.header,
        "world_size": run.world_size,
        "ok": run.ok(),
        "started": run.started,
        "seconds": run.ended - run.started,
        "counts": dict(counts(run)),
        "problems": run.problems,
        "results": [vars(r) for r in run.results.values()],
        "not_run": [n for n in run.nodeids if n not in run.results],
        "frames": frames_by_kind(run.rows),
        "rows": run.rows,
        "cites": run.cites,
        "requirements": requirements(run),
        "on_gpus": on_gpus(run),
    }


def from_json(data: dict[str, Any], run_dir: Path) -> Run:
    """The Run of a `report.json`."""
    run = Run(run_dir, data["world_size"], header=data["header"], rows=data["rows"], problems=data["problems"])
    run.results = {r["nodeid"]: Result(**r) for r in data["results"]}
    run.nodeids = [*run.results, *data["not_run"]]
    run.cites = data["cites"]
    run.started, run.ended = data["started"], data["started"] + data["seconds"]
    return run


def write_junit(run: Run, path: Path) -> None:
    """The one JUnit XML of a run, with every rank's line."""
    suites = ElementTree.Element("testsuites", name="conformance")
    by = counts(run)
    suite = ElementTree.SubElement(
        suites,
        "testsuite",
        name="conformance",
        tests=str(len(run.results) + len(run.problems)),
        failures=str(by["FAIL"]),
        errors=str(by["ERROR"] + len(run.problems)),
        skipped=str(by["UNSUPPORTED"] + by["XFAIL"]),
        time=f"{run.ended - run.started:.3f}",
    )
    for r in run.results.values():
        file, _, name = r.nodeid.partition("::")
        case = ElementTree.SubElement(
            suite, "testcase", classname=file.removesuffix(".py").replace("/", "."), name=name, time=f"{r.seconds:.3f}"
        )
        tag = {"FAIL": "failure", "ERROR": "error", "UNSUPPORTED": "skipped", "XFAIL": "skipped"}.get(r.kind)
        if tag:
            ElementTree.SubElement(case, tag, message=_xml(r.reason)).text = _xml(r.text)
        lines = "\n".join(f"rank {rank}: {line}" for rank, line in r.by_rank.items())
        ElementTree.SubElement(case, "system-out").text = _xml(lines)
    for number, problem in enumerate(run.problems):
        case = ElementTree.SubElement(suite, "testcase", classname="conformance", name=f"the run itself [{number}]")
        ElementTree.SubElement(case, "error", message=_xml(problem.splitlines()[0])).text = _xml(problem)
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suites).write(path, encoding="utf-8", xml_declaration=True)


def _xml(text: str) -> str:
    return NOT_XML.sub("?", text)


def main(argv: list[str]) -> int:
    """Show a run again from its directory, and write its one JUnit if asked; exit code 0 if it was sound."""
    if len(argv) not in (1, 2) or not Path(argv[0]).is_dir():
        sys.exit("usage: python -m conformance.report RUN_DIR [JUNIT_XML]")
    run = read_run(Path(argv[0]))
    if len(argv) == 2:
        write_junit(run, Path(argv[1]))
    console = _console(sys.stdout)
    show(run, console)
    console.print(closing_line(run), markup=False, highlight=False)
    return 0 if run.ok() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
