"""Records of GPU runs: what ran on which GPU, with what verdicts, and a hash of the sources that ran.

    python -m conformance.record --out conformance/records    on a machine with a GPU: runs the suites, writes a record
    python -m conformance.record --collectives                on its GPUs: the selection -m gpu, link by link
    python -m conformance.record --check                      anywhere: is the record of these sources?
    python -m conformance.record --check --nightly            that of the collectives too

A CPU test calls `problems()`: a kernel that changed since its last run on a GPU fails the build. The collectives change
more often, and their record, of each link between GPUs, is checked nightly; reports of runs say in a line whether it is
stale. Sources are hashed by path; nothing of the core is imported.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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
SANITIZERS = ("memcheck", "racecheck", "initcheck")


class RecordError(RuntimeError):
    """What a record wants is not on this machine; one line."""


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
    """One hash over every file of codec/cuda, by name, without comments."""
    return _sha256((path.name, path) for path in _kernels())


def _kernels() -> list[Path]:
    paths = sorted(p for p in KERNELS.iterdir() if p.suffix in SUFFIXES)
    if not any(p.suffix == ".cu" for p in paths):
        raise FileNotFoundError(f"record: no kernels in {KERNELS}; restore them from git")
    return paths


def _sha256(named: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in named:
        digest.update(name.encode() + b"\0" + without_comments(path).encode() + b"\0")
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


def _told(command: list[str], otherwise: str) -> str:
    """The first line that a command prints.

    Raises:
        RecordError: it is not there, failed, or printed nothing; `otherwise`, and the end of what it said.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as exc:
        raise RecordError(f"{otherwise} ({exc})") from exc
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
        raise RecordError(f"{otherwise} (exit code {done.returncode}: {said})")
    return lines[0]


def machine() -> dict[str, str]:
    """GPU, driver, versions.

    Raises:
        RecordError: no GPU is visible, or torch or PyCUDA cannot be imported.
    """
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, _, driver = _told(query, "a record is of a machine with a GPU, and nvidia-smi finds none").partition(", ")
    report = (
        "import json, torch, pycuda; print(json.dumps([torch.__version__, torch.version.cuda, pycuda.VERSION_TEXT]))"
    )
    versions = _told([sys.executable, "-c", report], "a record wants torch and PyCUDA: pip install -e '.[cuda,test]'")
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
    """Run everything on this machine's GPU and write codec_<gpu>.json; (its path, whether all passed).

    Raises:
        RecordError: no GPU, or no compute-sanitizer where it is asked for; before anything runs.
    """
    there = machine()
    if sanitize and shutil.which("compute-sanitizer") is None:
        raise RecordError(
            "compute-sanitizer, of the CUDA toolkit, is not on PATH; put it there, or give --no-sanitizer for a record "
            "that is partial"
        )
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


# ---------------------------------------------------------------------------------------------------- collectives

CORE = ROOT / "zipccl_core"
COLLECTIVES_SUBJECT = "zipccl_gpu"
ALWAYS_ENV = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
LEAST_GPUS = 2
"""Of a whole record: on one GPU there are only the links on which ranks share GPUs."""
SHARING_RANKS = 4
LIMIT_S = 420.0
GROUP_TIMEOUT_S = 30.0
END_S = 60.0
NOT_PASSED = ("FAIL", "ERROR", "XFAIL")
SUITES = "suites, mirrored"
ON_DEVICE = "tensors on the device"


@dataclass(frozen=True)
class Link:
    """One way between GPUs, and how it is chosen.

    Attributes:
        shares: ranks share GPUs; groups are gloo's or, if backend says so, NCCL's with each rank as a host.
        backend: as --backend of the judge.
        env: what leaves NCCL no other way.
        most_s: how long its selection may take.
    """

    name: str
    shares: bool = False
    backend: str = "auto"
    env: Mapping[str, str] = field(default_factory=dict)
    most_s: float = 180.0

    def ranks(self, gpus: int) -> int:
        """How many run on a machine with so many GPUs."""
        return max(2 * gpus, SHARING_RANKS) if self.shares else gpus

    def runs_on(self, gpus: int) -> bool:
        """Whether a machine with so many GPUs has it."""
        return gpus >= (1 if self.shares else LEAST_GPUS)


OVER_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
LINKS = (
    Link("nvlink"),
    Link("host memory", env={"NCCL_P2P_DISABLE": "1"}),
    Link("sockets", env=OVER_SOCKETS),
    Link("sockets, shared GPUs", shares=True, backend="nccl", env=OVER_SOCKETS, most_s=300.0),  # kernels take turns
    Link("gloo, shared GPUs", shares=True),
)

Runner = Callable[[list[str], dict[str, str], float], tuple[int | None, str]]


def collectives_sha256() -> str:
    """One hash over what runs when a collective moves tensors between GPUs, by path, without comments."""
    folders = [*sorted((CORE / "collectives").glob("*.py")), *sorted((CORE / "policy").glob("*.py")), *_kernels()]
    single = [CORE / "codec" / "__init__.py", CORE / "codec" / "cpu.py"]  # messages between two ranks are coded there
    single += [CORE / name for name in ("codebook.py", "errors.py", "frame.py")]
    if not any(path.parent.name == "collectives" for path in folders):
        raise FileNotFoundError(f"record: no collectives in {CORE}; restore them from git")
    return _sha256((f"{path.parent.name}/{path.name}", path) for path in (*folders, *single))


def collectives_problems() -> list[str]:
    """What is wrong with the records of collectives: none, stale, a link that did not run or pass. Empty if well."""
    return _problems_of(_judged_records())


def _problems_of(judged: list[tuple[dict[str, Any], list[str]]]) -> list[str]:
    wrong = [problem for _, problems in judged for problem in problems]
    if any(record["machine"]["gpus"] >= LEAST_GPUS for record, _ in judged):
        return wrong
    missing = f"{RECORDS} has no collectives_*.json of a machine with {LEAST_GPUS} GPUs"
    return [f"{missing}; run `python -m conformance.record --collectives` on one", *wrong]


def _judged_records() -> list[tuple[dict[str, Any], list[str]]]:
    """Each record of collectives, and what is wrong with it."""
    wanted, judged = collectives_sha256(), []
    for path in sorted(RECORDS.glob("collectives_*.json")):
        record, wrong = json.loads(path.read_text(encoding="utf-8")), []
        if record["sources_sha256"] != wanted:
            wrong.append(
                f"{path.name}: ran with sources {record['sources_sha256'][:12]}, they are {wanted[:12]} now; run "
                "`python -m conformance.record --collectives` on GPUs again, and commit what it writes"
            )
        links = {link["name"]: link for link in record["links"]}
        there = [link.name for link in LINKS if link.runs_on(record["machine"]["gpus"])]
        wrong += [f"{path.name}: {name} did not run" for name in there if name not in links]
        most_s = {link.name: link.most_s for link in LINKS}
        for name, link in links.items():
            if link["seconds"] > most_s.get(name, link["seconds"]):
                wrong.append(f"{path.name}: {name} took {link['seconds']:g} s, and may take {most_s[name]:g}")
            if link["verdict"] != "PASS":
                tests = ", ".join(t["test"] for t in link["not_passed"][:3])
                wrong.append(f"{path.name}: {name}: {link['verdict']} ({tests or link['problems'][:1]})")
        judged.append((record, wrong))
    return judged


def collectives_line() -> str:
    """The records of collectives in one line, for the report of a run."""
    if not (judged := _judged_records()):
        return "on GPUs: the collectives have no record of a run (python -m conformance.record --collectives)"
    wrong, told = _problems_of(judged), []
    for record, problems in judged:
        there, passed = record["machine"], sum(link["counts"].get("PASS", 0) for link in record["links"])
        of_these = " of these sources" if wrong and not problems else ""
        told.append(f"{there['gpus']} × {there['gpu']} on {record['date']}, {passed} passed{of_these}")
    state = (
        "STALE or not all passed, see `python -m conformance.record --check --nightly`" if wrong else "of these sources"
    )
    return f"on GPUs: the collectives' record is {state}: {'; '.join(told)}"


def run_bounded(command: list[str], env: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    """Run a command in the repository; (return code, or None if it was ended after limit_s; its output).

    What it says goes to stderr as it comes, too: it takes minutes.
    """
    said: list[str] = []
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )

    def listen() -> None:
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                said.append(line)
                sys.stderr.write(line)
                sys.stderr.flush()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    code: int | None = None
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.terminate()  # pytest ends its ranks
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    listener.join(END_S)  # others may have its output open
    return code, "".join(said)


def run_part(
    name: str, args: list[str], ranks: int, env: Mapping[str, str], run: Runner, subject: str
) -> dict[str, Any]:
    """One pytest of a link: verdict counts, what did not pass, problems, seconds; the end of its output."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args, "--subject", subject]
        command += ["--world-size", str(ranks), f"--deadline-s={LIMIT_S:g}", f"--run-dir={folder}/run"]
        command.append(f"--group-timeout-s={GROUP_TIMEOUT_S:g}")
        code, output = run(command, {**ALWAYS_ENV, **env}, LIMIT_S + END_S)
        path = Path(folder, "run", "report.json")
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results = report.get("results", [])
    problems = [*report.get("problems", []), *(f"{n}: never ran" for n in report.get("not_run", []))]
    if code is None:
        problems.append(f"not finished within {LIMIT_S:g} s")
    elif not report:
        problems.append(f"it wrote no report (exit code {code})")
    not_passed = [
        {"test": r["nodeid"], "verdict": r["kind"], "reason": r["reason"]} for r in results if r["kind"] in NOT_PASSED
    ]
    counts = Counter(r["kind"] for r in results)
    good = code == 0 and not problems and not any(t["verdict"] != "XFAIL" for t in not_passed) and counts["PASS"] > 0
    return {
        "name": name,
        "command": re.sub(r"(\S*/)?python\S*", "python", re.sub(r" --run-dir=\S+", "", " ".join(command)), count=1),
        "verdict": "PASS" if good else "FAIL",
        "tests": len(results),
        "counts": dict(counts),
        "unsupported": dict(Counter(r["reason"] for r in results if r["kind"] == "UNSUPPORTED")),
        "not_passed": not_passed,
        "problems": [problem[:2000] for problem in problems],
        "rows": [row for row in report.get("rows", []) if row["table"] in ("issuing", "memory")],
        "seconds": round(time.monotonic() - begin, 1),
        **({} if good else {"output": output[-6000:]}),
    }


def run_link(
    link: Link, gpus: int, run: Runner, subject: str = COLLECTIVES_SUBJECT, device: str = "cuda"
) -> dict[str, Any]:
    """The selection over one link: the suites on mirrors, and what needs tensors on the device."""
    ranks = link.ranks(gpus)
    gpu_tests, backend = "conformance/test_gpu.py", ["--backend", link.backend]
    suites = ["conformance", "-m", "gpu", f"--ignore={gpu_tests}", *backend]
    parts = [
        run_part(SUITES, suites, ranks, link.env, run, subject),
        run_part(ON_DEVICE, [gpu_tests, "--device", device, *backend], ranks, link.env, run, subject),
    ]
    counts: Counter[str] = sum((Counter(part["counts"]) for part in parts), Counter())
    return {
        "name": link.name,
        "ranks": ranks,
        "env": {**ALWAYS_ENV, **link.env},
        "verdict": "PASS" if all(part["verdict"] == "PASS" for part in parts) else "FAIL",
        "tests": sum(part["tests"] for part in parts),
        "counts": dict(counts),
        "not_passed": [test for part in parts for test in part["not_passed"]],
        "problems": [f"{part['name']}: {problem}" for part in parts for problem in part["problems"]],
        "seconds": round(sum(part["seconds"] for part in parts), 1),
        "parts": parts,
    }


def machine_of_collectives() -> dict[str, Any]:
    """GPUs, driver, and versions of what moves data between them.

    Raises:
        RecordError: as machine(), or this torch has no NCCL.
    """
    there = machine()
    report = "import torch; print(torch.cuda.device_count(), *torch.cuda.nccl.version(), sep='.')"
    gpus, _, nccl = _told([sys.executable, "-c", report], "a record of collectives wants a torch with NCCL").partition(
        "."
    )
    return {**there, "gpus": int(gpus), "nccl": nccl}


def write_collectives(
    out: Path,
    links: Iterable[Link] = LINKS,
    run: Runner = run_bounded,
    there: Mapping[str, Any] | None = None,
    **how: str,
) -> tuple[Path, bool]:
    """Run the selection over each link there is and write collectives_<gpu>x<n>.json; (its path, whether all passed).

    The record is written after every link, so that a machine that goes away leaves what it has done; links that the
    record has by then, of the same machine and sources, are kept: others may run at the same time.

    Args:
        run: runs a command with an environment and a limit.
        there: the machine; this one if None.
        how: subject and device, for run_link.

    Raises:
        RecordError: no link runs on so few GPUs, or as machine_of_collectives().
    """
    there = machine_of_collectives() if there is None else there
    named, links = list(links), [link for link in links if link.runs_on(there["gpus"])]
    if missing := [link.name for link in named if link not in links]:
        print(f"record: not on {there['gpus']} GPU, and so left out: {'; '.join(missing)}", file=sys.stderr)
    if not links:
        raise RecordError(f"--collectives: these links want {LEAST_GPUS} GPUs or more, found {there['gpus']}")
    # Kernels are compiled ahead: in a test, that would be a rank that does not come.
    warmed, output = run([sys.executable, "-m", "zipccl_core.cli", "doctor", "--warm"], {}, LIMIT_S)
    if warmed != 0:
        print(f"record: `zipccl doctor --warm` ended with {warmed}; the tests come all the same:\n{output[-2500:]}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"collectives_{there['gpu'].lower().replace('nvidia ', '').replace(' ', '_')}x{there['gpus']}.json"
    record: dict[str, Any] = {
        "machine": dict(there),
        "sources_sha256": collectives_sha256(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "links": [],
    }
    for link in links:
        done = run_link(link, there["gpus"], run, **how)
        print(json.dumps({k: v for k, v in done.items() if k not in ("parts", "env")}), flush=True)
        for part in done["parts"]:
            if "output" in part:
                print(part["output"][-2500:], flush=True)
        if path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            if all(old[key] == record[key] for key in ("machine", "sources_sha256")):
                record["links"] = old["links"]
        record["links"] = [x for x in record["links"] if x["name"] != link.name] + [done]
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path, all(link["verdict"] == "PASS" for link in record["links"])


# ----------------------------------------------------------------------------------------------------------- main


def main(argv: list[str] | None = None) -> int:
    """0 if all is well, 1 if a record is stale or not all passed, 2 if this machine has not what a record wants."""
    names = [link.name for link in LINKS]
    parser = argparse.ArgumentParser(description="Write or check the record of a GPU run.")
    parser.add_argument("--check", action="store_true", help="say what is wrong with the records; run nothing")
    parser.add_argument("--nightly", action="store_true", help="with --check: the record of the collectives too")
    parser.add_argument("--collectives", action="store_true", help="run the selection -m gpu over each link")
    parser.add_argument(
        "--link",
        action="append",
        choices=names,
        help="of --collectives: this one only, and may be repeated; the record then is partial",
    )
    parser.add_argument("--no-sanitizer", action="store_true", help="leave it out; the record is partial")
    parser.add_argument("--out", type=Path, default=RECORDS)
    options = parser.parse_args(argv)
    if options.link and not options.collectives:
        print("record: --link is for --collectives; give both, or neither", file=sys.stderr)
        return 2
    if options.check:
        wrong = [*problems(), *(collectives_problems() if options.nightly else [])]
        which = "the records are" if options.nightly else "the codec's record is"
        print("\n".join(wrong) or f"{which} of these sources, and all passed")
        return bool(wrong)
    try:
        if options.collectives:
            path, passed = write_collectives(options.out, [x for x in LINKS if x.name in (options.link or names)])
        else:
            path, passed = write_record(options.out, not options.no_sanitizer)
    except RecordError as error:
        print(f"record: {error}", file=sys.stderr)
        return 2
    print(f"{path}: {'all passed' if passed else 'NOT all passed'}")
    return not passed


if __name__ == "__main__":
    sys.exit(main())
