"""Runs the launcher as a person would, in a process of its own, and reads what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from conformance.nursery import SOCKET_ENV, NoNursery, shared

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Launched:
    """What one launch printed and wrote."""

    returncode: int
    out: str
    err: str
    run_dir: Path

    def __post_init__(self) -> None:
        path = self.run_dir / "report.json"
        report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.report = report
        self.results = {r["nodeid"].split("::")[-1]: r for r in report.get("results", [])}
        self.problems = "\n".join(report.get("problems", []))

    def kinds(self) -> dict[str, str]:
        """Test name → kind of verdict."""
        return {name: r["kind"] for name, r in self.results.items()}

    def junit(self) -> dict[str, str]:
        """Test name → tag of its outcome in the JUnit ("" if it passed)."""
        cases = ElementTree.parse(self.run_dir / "junit.xml").iter("testcase")
        return {c.get("name", ""): next((e.tag for e in c if e.tag != "system-out"), "") for c in cases}


def run_pytest(run_dir: Path, *args: str, cwd: Path = ROOT, limit_s: float = 120.0) -> Launched:
    """`python -m pytest ARGS --run-dir RUN_DIR` without this process's ranks, forked from the shared nursery.

    Raises:
        subprocess.TimeoutExpired: it did not end within limit_s (and was ended).
    """
    env = without_ranks()
    command = [*args, "--run-dir", str(run_dir)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = start_pytest(command, env, cwd, out, err)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            raise
        out.seek(0)
        err.seek(0)
        return Launched(process.returncode or 0, out.read(), err.read(), run_dir)


def without_ranks() -> dict[str, str]:
    """This process's environment, for a launch of its own."""
    ours = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("PYTEST_")}
    return env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def ranked_args(ranks: int) -> list[str]:
    """To run a file outside the suite on ranks, with the control subject."""
    return ["-p", "conformance.plugin", "--ranked", "--subject", "torch_native", "--world-size", str(ranks)]


def start_pytest(args: list[str], env: dict[str, str], cwd: Path, out: Any, err: Any) -> Any:
    """Start it; something with the names of subprocess.Popen."""
    if env.get(SOCKET_ENV) != "0":
        with contextlib.suppress(NoNursery):
            return shared().start("conformance.nursery:pytest_main", args, env=env, cwd=cwd, stdout=out, stderr=err)
    return subprocess.Popen([sys.executable, "-m", "pytest", *args], cwd=cwd, env=env, stdout=out, stderr=err)


def run_file(folder: Path, source: str, ranks: int, *args: str, limit_s: float = 120.0) -> Launched:
    """Write a test file and run it on ranks with the control subject."""
    folder.mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\nxfail_strict = true\n")
    (folder / "test_it.py").write_text(source)
    return run_pytest(
        folder / "run", *ranked_args(ranks), str(folder / "test_it.py"), *args, cwd=folder, limit_s=limit_s
    )
