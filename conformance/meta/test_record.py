"""The records of GPU runs: when they are stale, what is written of a run, and what reports say of them."""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conformance import record, report
from conformance.launch import Run

pytestmark = pytest.mark.outer

MACHINE = {"gpu": "NVIDIA H999", "driver": "1", "cuda": "13.0", "torch": "2", "pycuda": "1", "python": "3", "gpus": 2}
NODEID = "conformance/test_x.py::test_it"


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources that are hashed, and an empty folder of records."""
    there = tmp_path / "zipccl_core"
    shutil.copytree(record.CORE, there, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    monkeypatch.setattr(record, "CORE", there)
    monkeypatch.setattr(record, "KERNELS", there / "codec" / "cuda")
    monkeypatch.setattr(record, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(record, "problems", lambda: [])
    return there


class Machine:
    """Stands for pytest on a machine with GPUs: writes what a run would have written.

    Attributes:
        asked: (command, environment) of every run.
        kinds: of the verdicts of each run's tests.
        code: of the processes; None for one that had to be ended.
        warmed: whether kernels were compiled before anything else.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], dict[str, str]]] = []
        self.kinds = ["PASS", "PASS", "UNSUPPORTED"]
        self.code: int | None = 0
        self.writes = True
        self.warmed = False

    def __call__(self, command: list[str], env: dict[str, str], limit_s: float) -> tuple[int | None, str]:
        if "doctor" in command:
            self.warmed = not self.asked
            return self.code, ""
        self.asked.append((command, env))
        [run_dir] = [Path(a.removeprefix("--run-dir=")) for a in command if a.startswith("--run-dir=")]
        results = [
            {"nodeid": f"{NODEID}[{i}]", "kind": kind, "reason": f"why {i}"} for i, kind in enumerate(self.kinds)
        ]
        rows = [{"table": "issuing", "median_us": 7.0}, {"table": "frames"}]
        if self.writes:
            run_dir.mkdir(parents=True)
            told = {"results": results, "problems": [], "not_run": [], "rows": rows}
            (run_dir / "report.json").write_text(json.dumps(told))
        return self.code, "the end of its output"


def write(run: Machine, links: Any = record.LINKS) -> tuple[dict[str, Any], bool]:
    path, passed = record.write_collectives(record.RECORDS, links, run, MACHINE)
    assert path.name == "collectives_h999x2.json"
    return json.loads(path.read_text()), passed


# --------------------------------------------------------------------------------------------------- what is stale


def test_without_a_record_nightly_fails_and_the_report_says_so(core, capsys):
    assert record.main(["--check"]) == 0
    assert record.main(["--check", "--nightly"]) == 1
    assert "has no collectives_*.json" in capsys.readouterr().out
    assert "no record" in record.collectives_line()


def test_a_record_of_these_sources_passes_and_is_told_in_a_line(core):
    _, passed = write(Machine())
    assert passed
    assert record.collectives_problems() == []
    assert record.main(["--check", "--nightly"]) == 0
    assert "of these sources: 2 × NVIDIA H999" in record.collectives_line()
    assert "20 passed" in record.collectives_line()


HASHED = (
    *("collectives/link.py", "collectives/communicator.py", "policy/switch.py", "codec/__init__.py"),
    *("codec/cuda/encode.py", "codec/cuda/layout.cuh", "codec/cuda/decode_reduce.cu", "frame.py", "codebook.py"),
    *("codec/cpu.py", "errors.py"),
)


@pytest.mark.parametrize("changed", HASHED)
def test_a_changed_source_makes_the_record_stale(core, changed, capsys):
    write(Machine())
    path = core / changed
    path.write_text(path.read_text() + "\nx = 1\n")
    assert record.main(["--check", "--nightly"]) == 1
    assert "run `python -m conformance.record --collectives` on GPUs again" in capsys.readouterr().out
    assert "STALE" in record.collectives_line()
    assert record.main(["--check"]) == 0, "the check of every build asks for the codec's record only"


def test_a_new_file_and_a_renamed_one_make_the_record_stale(core):
    first = record.collectives_sha256()
    (core / "collectives" / "more.py").write_text("x = 1\n")
    second = record.collectives_sha256()
    (core / "collectives" / "more.py").rename(core / "policy" / "more.py")
    assert len({first, second, record.collectives_sha256()}) == 3


def test_comments_docstrings_and_other_sources_leave_it_fresh(core):
    write(Machine())
    for name in HASHED:
        path = core / name
        comment = "# a comment\n" if path.suffix == ".py" else "// a comment\n"
        path.write_text(path.read_text() + comment)
    init = core / "codec" / "__init__.py"
    init.write_text(init.read_text().replace('"""', '"""Another word. ', 1))
    (core / "codec" / "reference.py").write_text("x = 1\n")
    assert record.collectives_problems() == []


def test_a_failure_and_a_link_that_did_not_run_are_problems(core):
    machine = Machine()
    machine.kinds = ["PASS", "FAIL"]
    _, passed = write(machine, record.LINKS[:2])
    assert not passed
    wrong = record.collectives_problems()
    assert [w for w in wrong if "nvlink: FAIL" in w and NODEID in w]
    assert {w.split(": ")[1] for w in wrong if "did not run" in w} == {
        f"{link.name} did not run" for link in record.LINKS[2:]
    }
    assert "not all passed" in record.collectives_line()


def test_a_link_that_took_too_long_is_a_problem(core):
    told, _ = write(Machine())
    [path] = record.RECORDS.glob("*.json")
    told["links"][1]["seconds"] = record.LINKS[1].most_s + 1
    path.write_text(json.dumps(told))
    assert record.collectives_problems() == [f"{path.name}: host memory took 181 s, and may take 180"]


# ------------------------------------------------------------------------------------------------- what is written


def test_each_link_is_forced_and_multicast_is_off_in_all(core):
    machine = Machine()
    told, _ = write(machine)
    assert [link["name"] for link in told["links"]] == [link.name for link in record.LINKS]
    assert machine.warmed
    assert len(machine.asked) == 2 * len(record.LINKS)
    for (command, env), link in zip(machine.asked, [x for x in record.LINKS for _ in (0, 1)], strict=True):
        assert env == {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", **link.env}
        assert command[command.index("--world-size") + 1] == ("4" if "shared" in link.name else "2")
        assert command[command.index("--subject") + 1] == "zipccl_gpu"
        assert command[command.index("--backend") + 1] == link.backend
    mirrored, on_device = (command for command, _ in machine.asked[:2])
    assert mirrored[mirrored.index("-m", 3) + 1] == "gpu"
    assert "--device" not in mirrored
    assert on_device[on_device.index("--device") + 1] == "cuda"


def test_a_record_says_what_ran_and_what_did_not_pass(core):
    machine = Machine()
    machine.kinds = ["PASS", "FAIL", "ERROR", "UNSUPPORTED", "UNSUPPORTED"]
    machine.code = 1
    told, passed = write(machine, record.LINKS[:1])
    [link] = told["links"]
    assert not passed
    assert (link["verdict"], link["tests"]) == ("FAIL", 10)
    assert link["counts"] == {"PASS": 2, "FAIL": 2, "ERROR": 2, "UNSUPPORTED": 4}
    assert [t["test"] for t in link["not_passed"]] == [f"{NODEID}[1]", f"{NODEID}[2]"] * 2
    assert link["parts"][0]["output"] == "the end of its output"
    assert link["parts"][1]["rows"] == [{"table": "issuing", "median_us": 7.0}]
    assert told["machine"] == MACHINE
    assert told["sources_sha256"] == record.collectives_sha256()
    assert "--run-dir" not in link["parts"][0]["command"]


@pytest.mark.parametrize(
    "code, writes, kinds, problem",
    [
        (None, True, ["PASS"], "not finished within"),
        (1, False, [], "wrote no report"),
        (0, True, ["UNSUPPORTED"], ""),
        (0, True, [], ""),
        (3, True, ["PASS"], ""),
    ],
)
def test_what_hangs_dies_or_runs_nothing_is_no_pass(core, code, writes, kinds, problem):
    machine = Machine()
    machine.code, machine.writes, machine.kinds = code, writes, kinds
    told, passed = write(machine, record.LINKS[:1])
    assert not passed
    assert told["links"][0]["verdict"] == "FAIL"
    assert problem in " ".join(told["links"][0]["problems"])


def test_links_may_be_run_one_by_one_and_stale_ones_are_left_out(core):
    for link in record.LINKS:
        write(Machine(), [link])
    told, _ = write(Machine(), record.LINKS[:1])
    assert sorted(link["name"] for link in told["links"]) == sorted(link.name for link in record.LINKS)
    assert record.collectives_problems() == []
    (core / "frame.py").write_text("x = 1\n")
    told, _ = write(Machine(), record.LINKS[:1])
    assert [link["name"] for link in told["links"]] == [record.LINKS[0].name]


def test_what_ran_is_written_although_the_machine_goes_away(core):
    class Leaves(Machine):
        def __call__(self, *args: Any) -> Any:
            if len(self.asked) == 2:
                raise KeyboardInterrupt
            return super().__call__(*args)

    with pytest.raises(KeyboardInterrupt):
        write(Leaves())
    told = json.loads((record.RECORDS / "collectives_h999x2.json").read_text())
    assert [link["name"] for link in told["links"]] == ["nvlink"]


def test_on_one_gpu_there_are_the_links_of_ranks_that_share_it_and_others_are_too_much(core, capsys):
    one, machine = {**MACHINE, "gpus": 1}, Machine()
    path, passed = record.write_collectives(record.RECORDS, run=machine, there=one)
    assert (path.name, passed) == ("collectives_h999x1.json", True)
    assert "left out: nvlink; host memory; sockets\n" in capsys.readouterr().err
    assert {command[command.index("--world-size") + 1] for command, _ in machine.asked} == {"4"}
    assert [link["name"] for link in json.loads(path.read_text())["links"]] == [
        "sockets, shared GPUs",
        "gloo, shared GPUs",
    ]
    [wrong] = record.collectives_problems()
    assert "has no collectives_*.json of a machine with 2 GPUs" in wrong
    assert "STALE or not all passed" in (line := record.collectives_line())
    assert "1 × NVIDIA H999" in line
    assert line.endswith("8 passed of these sources")
    write(Machine())
    assert record.collectives_problems() == []
    with pytest.raises(record.RecordError, match="want 2 GPUs or more, found 1"):
        record.write_collectives(record.RECORDS, record.LINKS[:1], Machine(), one)


@pytest.mark.parametrize("gpus, alone, sharing", [(2, 2, 4), (3, 3, 6), (8, 8, 16)])
def test_as_many_ranks_as_gpus_or_twice_as_many(gpus, alone, sharing):
    assert {link.ranks(gpus) for link in record.LINKS} == {alone, sharing}


def test_an_unknown_link_is_refused(core, capsys):
    with pytest.raises(SystemExit, match="2"):
        record.main(["--collectives", "--link", "telegraph"])
    assert "argument --link: invalid choice: 'telegraph' (choose from" in capsys.readouterr().err


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, without any tool; and no suite may run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("_run", "run_bounded"):
        monkeypatch.setattr(record, name, None)
    return folder


def tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command ends, and status 2."""
    assert record.main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


NO_GPU = "record: a record is of a machine with a GPU, and nvidia-smi finds none"


@pytest.mark.parametrize(
    "arguments", [[], ["--no-sanitizer"], ["--collectives"], ["--collectives", "--link", "nvlink"]]
)
def test_without_a_gpu_nothing_runs_and_it_is_one_line(core, tools, capsys, arguments):
    assert refusal(capsys, *arguments).startswith(f"{NO_GPU} ([Errno 2] No such file")
    tool(tools, "nvidia-smi", "echo No devices were found; exit 6")
    assert refusal(capsys, *arguments) == f"{NO_GPU} (exit code 6: No devices were found)\n"
    tool(tools, "nvidia-smi", "exit 0")
    assert refusal(capsys, *arguments) == f"{NO_GPU} (exit code 0: it printed nothing)\n"


def test_without_pycuda_it_is_one_line(core, tools, capsys, monkeypatch):
    tool(tools, "nvidia-smi", "echo NVIDIA H999, 1")
    tool(tools, "python", "echo Traceback >&2; echo 'ModuleNotFoundError: pycuda' >&2; exit 1")
    monkeypatch.setattr(sys, "executable", str(tools / "python"))
    assert "wants torch and PyCUDA" in (said := refusal(capsys, "--collectives"))
    assert said.endswith("(exit code 1: ModuleNotFoundError: pycuda)\n")


def test_without_the_sanitizer_it_is_one_line_before_any_suite(core, tools, capsys, monkeypatch):
    monkeypatch.setattr(record, "machine", lambda: MACHINE)
    assert refusal(capsys).startswith("record: compute-sanitizer, of the CUDA toolkit, is not on PATH")


def test_a_machine_is_told_by_its_tools(tools, monkeypatch):
    tool(tools, "nvidia-smi", "echo NVIDIA H999, 1; echo NVIDIA H998, 2")
    tool(tools, "python", """echo '["2", "13.0", "1"]'""")
    monkeypatch.setattr(sys, "executable", str(tools / "python"))
    there = record.machine()
    assert {key: there[key] for key in ("gpu", "driver", "torch", "cuda", "pycuda")} == {
        key: MACHINE[key] for key in ("gpu", "driver", "torch", "cuda", "pycuda")
    }


@pytest.mark.parametrize("arguments", [[], ["--check"], ["--check", "--nightly"]])
def test_a_link_without_collectives_is_refused(core, tools, capsys, arguments):
    assert refusal(capsys, *arguments, "--link", "nvlink").startswith("record: --link is for --collectives")


def test_a_command_that_hangs_is_ended_at_its_limit_and_its_output_kept():
    began = time.monotonic()
    script = "import time; print('so far', flush=True); time.sleep(60)"
    code, output = record.run_bounded([sys.executable, "-c", script], {}, 2.0)
    assert code is None
    assert output == "so far\n"
    assert time.monotonic() - began < 30
    assert record.run_bounded([sys.executable, "-c", "import os; print(os.environ['X'])"], {"X": "1"}, 60) == (0, "1\n")


# ------------------------------------------------------------------------------------------------------ the report


def shown(subject: str) -> str:
    out = io.StringIO()
    report.show(Run(Path("nowhere"), 2, header={"subject": subject}), Console(file=out, width=200))
    return out.getvalue()


def test_a_report_of_our_subjects_has_the_line_and_of_others_none(core):
    assert "on GPUs: the collectives have no record" in shown("zipccl")
    write(Machine())
    assert "on GPUs: the collectives' record is of these sources" in shown("zipccl_gpu")
    (core / "frame.py").write_text("x = 1\n")
    assert "is STALE" in shown("zipccl")
    assert "on GPUs" not in shown("torch_native")


def test_a_record_that_cannot_be_read_does_not_take_the_report_along(core):
    record.RECORDS.mkdir()
    (record.RECORDS / "collectives_x.json").write_text("{")
    assert "cannot be read" in shown("zipccl")
