"""Does the suite give the same verdicts every time on a machine that is kept busy by something else?

    python benchmarks/flake_hunt.py                                  # 20 runs of about a minute, 2 processes of load
    python benchmarks/flake_hunt.py --repeat 5 --load 4 -- conformance/test_sum.py --world-size 2

What follows `--` goes to pytest. Every run is judged from its report.json: it must be sound and have the verdicts of
the first. Prints a table and writes benchmarks/results/flake_hunt.json. Exit code 0 if no run differed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "flake_hunt.json"
SELECTION = ("conformance/test_exchange.py", "conformance/test_slow_rank.py", "conformance/test_stateful.py")
BURN = "import hashlib\nx = b'0' * 65536\nwhile True:\n    x = hashlib.sha256(x).digest() * 2048\n"
RUN_LIMIT_S = 900.0


def one_run(args: list[str], folder: Path) -> dict[str, Any]:
    """Run pytest once; seconds, exit code, verdict of every test, problems."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *args, "--run-dir", str(folder)],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    seconds = time.monotonic() - began
    path = folder / "report.json"
    report = json.loads(path.read_text()) if path.exists() else {"results": [], "problems": [done.stdout + done.stderr]}
    return {
        "seconds": seconds,
        "exit_code": done.returncode,
        "kinds": {r["nodeid"]: r["kind"] for r in report["results"]},
        "reasons": {r["nodeid"]: r["reason"] for r in report["results"] if r["kind"] in ("FAIL", "ERROR")},
        "problems": report["problems"],
        "load_average": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20, help="runs (default 20)")
    parser.add_argument("--load", type=int, default=2, help="processes that keep a core busy meanwhile (default 2)")
    parser.add_argument("pytest_args", nargs="*", default=list(SELECTION), help="what to run, after --")
    options = parser.parse_args()

    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(options.load)]
    runs: list[dict[str, Any]] = []
    try:
        print(f"{'run':>4} {'seconds':>8} {'load':>6}  verdicts", flush=True)
        with tempfile.TemporaryDirectory(prefix="flake-hunt-") as folder:
            for number in range(1, options.repeat + 1):
                run = one_run(options.pytest_args, Path(folder, str(number)))
                runs.append(run)
                counts = ", ".join(f"{n} {kind}" for kind, n in Counter(run["kinds"].values()).items())
                flag = "" if run["exit_code"] == 0 and run["kinds"] == runs[0]["kinds"] else "  <- differs"
                print(f"{number:>4} {run['seconds']:8.1f} {run['load_average']:6.1f}  {counts}{flag}", flush=True)
                for what in [*(f"{k}: {v}" for k, v in run["reasons"].items()), *run["problems"]]:
                    print(f"       {what[:300]}", flush=True)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    bad = [i for i, r in enumerate(runs, 1) if r["exit_code"] or r["kinds"] != runs[0]["kinds"]]
    seconds = sorted(r["seconds"] for r in runs)
    spread = f"{seconds[0]:.0f} to {seconds[-1]:.0f} s, median {seconds[len(seconds) // 2]:.0f} s"
    print(f"{len(runs)} runs, {len(bad)} differ; {spread}")
    RESULTS.parent.mkdir(exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    record = {
        "commit": commit,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_processes": options.load,
        "pytest_args": options.pytest_args,
        "tests": len(runs[0]["kinds"]),
        "runs": [{k: r[k] for k in ("seconds", "exit_code", "load_average", "reasons", "problems")} for r in runs],
        "differing": bad,
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
