"""Records of GPU runs: what ran on which GPU, with what verdicts, and a hash of the kernel sources that ran.

    python -m conformance.record --out conformance/records    on a machine with a GPU: runs the suites, writes a record
    python -m conformance.record --check                      anywhere: is the record of these sources?

A CPU test calls `problems()`: a kernel that changed since its last run on a GPU fails the build. Sources are hashed by
path; nothing of the core is imported.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RECORDS = Path(__file__).with_name("records")
KERNELS = ROOT / "zipccl_core" / "codec" / "cuda"
SUFFIXES = (".cu", ".cuh", ".py")
CODEC_SUITES = ("test_bit_exactness.py", "test_digest.py", "test_escape_path.py", "test_reject.py")
SUBJECTS = (
    "zipccl_cuda",
    "conformance.subjects.zipccl_cuda:cuda_to_cpu",
    "conformance.subjects.zipccl_cuda:cpu_to_cuda",
)
# Tests of communicators that do not ask first whether the subject has one.
NOT_ABOUT_CODECS = (
    "conformance/test_bit_exactness.py::test_all_gather_in_place_of_all_patterns",
    "conformance/test_escape_path.py::test_a_distribution_that_shifts_between_calls_stays_exact",
)
SANITIZERS = ("memcheck", "racecheck", "initcheck")


def without_comments(path: Path) -> str:
    """The text of a source file without comments, docstrings, blank lines and the space around lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        dropped: set[int] = set()
        for node in ast.walk(ast.parse(text)):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                value = body[0].value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    dropped.update(range(body[0].lineno, (body[0].end_lineno or body[0].lineno) + 1))
        lines = [line for i, line in enumerate(text.splitlines(), 1) if i not in dropped]
        lines = [line.rstrip() for line in lines if not line.lstrip().startswith("#")]
    else:
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
        lines = [re.sub(r"//.*", "", line).strip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line.strip())


def sources_sha256() -> str:
    """One hash over every file of codec/cuda, by path, without comments."""
    digest = hashlib.sha256()
    paths = sorted(p for p in KERNELS.iterdir() if p.suffix in SUFFIXES)
    if not any(p.suffix == ".cu" for p in paths):
        raise FileNotFoundError(f"record: no kernels in {KERNELS}; restore them from git")
    for path in paths:
        digest.update(path.name.encode() + b"\0" + without_comments(path).encode() + b"\0")
    return digest.hexdigest()


def problems() -> list[str]:
    """What is wrong with the records: none, stale, or with a verdict that is no pass. Empty if all is well."""
    found = sorted(RECORDS.glob("codec_*.json"))
    if not found:
        return [f"{RECORDS} has no codec_*.json; run `python -m conformance.record` on a machine with a GPU"]
    wanted, wrong = sources_sha256(), []
    for path in found:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["sources_sha256"] != wanted:
            wrong.append(
                f"{path.name}: ran with sources {record['sources_sha256'][:12]}, codec/cuda now is {wanted[:12]}; run "
                f"`python -m conformance.record` on a GPU again, and commit what it writes"
            )
        verdicts = {run["name"]: run["verdict"] for run in record["runs"]}
        wrong += [f"{path.name}: {name}: {verdict}" for name, verdict in verdicts.items() if verdict != "PASS"]
        missing = {*_run_names()} - verdicts.keys()
        wrong += [f"{path.name}: {name} did not run" for name in sorted(missing)]
    return wrong


def _run_names() -> list[str]:
    return ["white-box", *(f"suites, {s}" for s in SUBJECTS), *(f"compute-sanitizer {t}" for t in SANITIZERS)]


def _run(name: str, command: list[str], junit: Path | None = None, **env: str) -> dict[str, Any]:
    """One command: verdict, duration, counts of its JUnit file if it writes one, the end of its output if it fails."""
    begin = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, errors="replace", check=False
    )
    output = done.stdout + done.stderr
    run: dict[str, Any] = {
        "name": name,
        "command": " ".join(Path(c).name if i == 0 else c for i, c in enumerate(command)),
        "seconds": round(time.monotonic() - begin, 1),
    }
    good = done.returncode == 0
    if junit is not None:
        counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        if junit.exists():
            root = ElementTree.parse(junit).getroot()
            for suite in root.iter("testsuite"):
                for key in counts:
                    counts[key] += int(suite.get(key, 0))
        run.update(counts)
        good = good and counts["tests"] > counts["skipped"]
    elif "ERROR SUMMARY" in output or "RACECHECK SUMMARY" in output:
        run["summary"] = re.findall(r"((?:ERROR|RACECHECK) SUMMARY: .*)", output)[-1]
        good = good and "sanitized" in output and re.search(r"SUMMARY: 0 (errors|hazards)", run["summary"]) is not None
    else:
        good = False
    run["verdict"] = "PASS" if good else "FAIL"
    if not good:
        run["output"] = output[-6000:]
    return run


def machine() -> dict[str, str]:
    """GPU, driver, versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    report = (
        "import json, torch, pycuda; print(json.dumps([torch.__version__, torch.version.cuda, pycuda.VERSION_TEXT]))"
    )
    versions = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True).stdout
    torch_version, cuda, pycuda = json.loads(versions)
    return {
        "gpu": name,
        "driver": driver,
        "cuda": cuda,
        "torch": torch_version,
        "pycuda": pycuda,
        "python": platform.python_version(),
    }


def write_record(out: Path, sanitize: bool = True) -> tuple[Path, bool]:
    """Run everything on this machine's GPU and write codec_<gpu>.json; (its path, whether all passed)."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        white = Path(folder) / "white.xml"
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        runs.append(
            _run(
                "white-box",
                [*pytest, "-m", "gpu", "zipccl_core/tests/test_cuda_codec.py", f"--junitxml={white}"],
                white,
            )
        )
        for i, subject in enumerate(SUBJECTS):
            junit = Path(folder) / f"{i}.xml"
            command = [*pytest, *(f"conformance/{s}" for s in CODEC_SUITES), "--subject", subject, "--world-size", "1"]
            command += [f"--deselect={test}" for test in NOT_ABOUT_CODECS]
            command += [f"--run-dir={folder}/run{i}", f"--junitxml={junit}"]
            runs.append(_run(f"suites, {subject}", command, junit))
    if sanitize:
        for tool in SANITIZERS:
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
            command += [sys.executable, "-m", "zipccl_core.tests.sanitize_cuda"]
            runs.append(_run(f"compute-sanitizer {tool}", command, PYTORCH_NO_CUDA_MEMORY_CACHING="1"))
    for run in runs:
        run["command"] = re.sub(r"/tmp/\S*/", "", run["command"])
        print(json.dumps({k: v for k, v in run.items() if k != "output"}), flush=True)
        if "output" in run:
            print(run["output"][-2500:], flush=True)
    there = machine()
    record = {
        "machine": there,
        "sources_sha256": sources_sha256(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "runs": runs,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / ("codec_" + there["gpu"].lower().replace("nvidia ", "").replace(" ", "_") + ".json")
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path, all(run["verdict"] == "PASS" for run in runs)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write or check the record of a GPU run.")
    parser.add_argument("--check", action="store_true", help="say what is wrong with the records; run nothing")
    parser.add_argument("--no-sanitizer", action="store_true", help="leave it out; the record is partial")
    parser.add_argument("--out", type=Path, default=RECORDS)
    options = parser.parse_args()
    if options.check:
        wrong = problems()
        print("\n".join(wrong) or "the records are of these sources, and all passed")
        return bool(wrong)
    path, passed = write_record(options.out, not options.no_sanitizer)
    print(f"{path}: {'all passed' if passed else 'NOT all passed'}")
    return not passed


if __name__ == "__main__":
    sys.exit(main())
