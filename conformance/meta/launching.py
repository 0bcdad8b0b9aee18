"""Runs the launcher as a person would, in a process of its own, and reads what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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
    """`python -m pytest ARGS --run-dir RUN_DIR` without this process's ranks."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *args, "--run-dir", str(run_dir)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    return Launched(done.returncode, done.stdout, done.stderr, run_dir)


def run_file(folder: Path, source: str, ranks: int, *args: str, limit_s: float = 120.0) -> Launched:
    """Write a test file and run it on ranks with the control subject."""
    folder.mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\nxfail_strict = true\n")
    (folder / "test_it.py").write_text(source)
    common = ("-p", "conformance.plugin", "--ranked", "--subject", "torch_native", "--world-size", str(ranks))
    return run_pytest(folder / "run", *common, str(folder / "test_it.py"), *args, cwd=folder, limit_s=limit_s)
