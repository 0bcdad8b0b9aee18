"""`zipccl bench` and the benchmarks of collectives: their arithmetic, their judgement, and that they run."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import collectives, late_rank
from zipccl_core import Communicator, Policy, bench, cli
from zipccl_core.errors import InvalidArgument

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, ALL_REDUCE, BROADCAST = bench.OPERATIONS.values()


def float32_bits(*patterns: int) -> torch.Tensor:
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(bench.SAME_WIDTH[tensor.dtype]).tolist()


# Sizes and factors


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("1", 1), ("4096", 4096), ("4K", 4096), ("64m", 64 << 20), (" 3G ", 3 << 30), ("0", 0)]
)
def test_sizes_have_suffixes(text: str, n_bytes: int) -> None:
    assert bench.parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "K", "4T", "-4K", "1.5M", "4 K", "4KiB", "0x10"])
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(InvalidArgument, match="whole number of bytes"):
        bench.parse_bytes(text)


def test_a_sweep_ends_at_the_last_size_or_before() -> None:
    assert bench.sizes(4096, 65536, 4) == [4096, 16384, 65536]
    assert bench.sizes(4096, 65535, 4) == [4096, 16384]
    assert bench.sizes(8, 8, 2) == [8]


@pytest.mark.parametrize("sweep", [(0, 8, 2), (8, 4, 2), (4, 8, 1), (4, 8, 0)])
def test_a_sweep_without_sizes_or_end_is_refused(sweep: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgument):
        bench.sizes(*sweep)


@pytest.mark.parametrize(
    ("operation", "factor"),
    [(ALL_GATHER, 0.75), (REDUCE_SCATTER, 0.75), (ALL_TO_ALL, 0.75), (ALL_REDUCE, 1.5), (BROADCAST, 1.0)],
)
def test_busbw_factors_of_four_ranks_are_those_of_nccl_tests(operation: bench.Operation, factor: float) -> None:
    assert operation.busbw_factor(4) == factor


@pytest.mark.parametrize(
    ("operation", "count", "size_bytes", "input_words", "sends_bytes"),
    [
        (ALL_GATHER, 12, 96, 12, 24),  # 100 bytes of bfloat16 hold 12 words for each of 4 ranks
        (REDUCE_SCATTER, 12, 96, 48, 72),
        (ALL_TO_ALL, 12, 96, 48, 72),
        (ALL_REDUCE, 50, 100, 50, 150),
        (BROADCAST, 50, 100, 50, 100),
    ],
)
def test_counts_sizes_and_what_a_rank_sends(
    operation: bench.Operation, count: int, size_bytes: int, input_words: int, sends_bytes: int
) -> None:
    assert operation.count(100, torch.bfloat16, 4) == count
    assert operation.size_bytes(count, torch.bfloat16, 4) == size_bytes
    assert operation.input_words(count, 4) == input_words
    assert operation.bytes_per_rank(2 * input_words, 4) == sends_bytes


def test_spread_is_the_distance_of_the_quartiles() -> None:
    assert bench.spread([5.0, 1.0, 3.0, 2.0, 4.0]) == 2.0
    assert bench.spread([7.0]) == 0.0


def test_ratio_and_decision_are_of_the_calls_between_two_looks() -> None:
    assert bench.since([300, 200, 7, 1], [100, 100, 3, 1]) == (2.0, "compressed")
    assert bench.since([300, 300, 3, 9], [100, 100, 3, 1]) == (1.0, "native")
    assert bench.since([300, 200, 7, 3], [100, 100, 3, 1]) == (2.0, "compressed 4 of 6")
    assert bench.since([5, 5, 0, 1], [5, 5, 0, 0]) == (1.0, "native")


# What is sent, and what must come


def test_data_depends_on_seed_rank_and_size_alone() -> None:
    def words(seed: int, rank: int, n: int) -> torch.Tensor:
        return bench.draw(seed, rank, n, torch.bfloat16, 0.02, CPU)

    first = words(1, 0, 5000)
    torch.manual_seed(99)
    assert bits(first) == bits(words(1, 0, 5000))
    others = [words(1, 1, 5000), words(2, 0, 5000), words(1, 0, 5001)[:5000]]
    assert all(bits(first) != bits(other) for other in others)
    assert 0.019 < first.float().std() < 0.021


def test_widened_data_has_no_low_halves_and_float32_has() -> None:
    plain, widened = (bench.draw(1, 0, 1000, torch.float32, 0.02, CPU, w).view(torch.int32) for w in (False, True))
    assert not (widened & 0xFFFF).any()
    assert (plain & 0xFFFF).count_nonzero() > 900


def test_moves_are_expected_to_keep_every_bit() -> None:
    inputs = [torch.arange(100 * r, 100 * r + 6, dtype=torch.int16).view(torch.bfloat16) for r in range(3)]

    def wanted(operation: bench.Operation, rank: int) -> list[int]:
        return bits(bench.expected(operation, rank, 3, inputs.__getitem__))

    assert wanted(ALL_GATHER, 1) == [*range(6), *range(100, 106), *range(200, 206)]
    assert wanted(ALL_TO_ALL, 1) == [2, 3, 102, 103, 202, 203]
    assert wanted(BROADCAST, 2) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_expected_in_rank_order_rounded_once(dtype: torch.dtype) -> None:
    # 2^24 + 1 is no float32, so (2^24 + 1) - 2^24 is 0, and (2^24 - 2^24) + 1 would be 1; 1 + 2^-8 + 2^-8 in
    # bfloat16 is 1 + 2^-7 rounded once, and 1 if each addition rounded; -0 + -0 is -0; inf - inf is one NaN.
    inf, big, tiny = float("inf"), 2.0**24, 2.0**-8
    terms = [[big, 1.0, -0.0, inf, big, 3.0], [1.0, tiny, -0.0, -inf, -big, 4.0], [-big, tiny, -0.0, 1.0, 1.0, 5.0]]
    inputs = [torch.tensor(term, dtype=dtype) for term in terms]
    wanted = torch.tensor([0.0, 1 + 2 * tiny, -0.0, 0.0, 1.0, 12.0], dtype=dtype).view(bench.SAME_WIDTH[dtype])
    wanted[3] = bench.NAN[dtype]
    assert bits(bench.expected(ALL_REDUCE, 1, 3, inputs.__getitem__)) == wanted.tolist()
    shards = [bits(bench.expected(REDUCE_SCATTER, r, 3, inputs.__getitem__)) for r in range(3)]
    assert list(itertools.chain(*shards)) == wanted.tolist()
    assert bits(inputs[0]) == bits(torch.tensor(terms[0], dtype=dtype)), "the inputs are not written"


def test_wrong_elements_are_counted_by_their_bits() -> None:
    wanted = float32_bits(0x00000000, 0x7FC00000, 0x3F800000, 0x80000000)
    assert bench.count_wrong(wanted.clone(), wanted) == 0
    assert bench.count_wrong(float32_bits(0x80000000, 0x7FC00001, 0x3F800000, 0x80000000), wanted) == 2
    for bit in range(16):
        words = torch.zeros(9, dtype=torch.int16)
        words[4] = 1 << bit if bit < 15 else -(1 << 15)
        assert bench.count_wrong(words.view(torch.bfloat16), torch.zeros(9, dtype=torch.bfloat16)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("operation", bench.OPERATIONS.values(), ids=str)
def test_an_output_starts_as_no_answer_and_an_input_as_the_input(
    operation: bench.Operation, dtype: torch.dtype
) -> None:
    mine = bench.draw(1, 1, 6, dtype, 0.02, CPU)
    for placement in operation.placements:
        trial = bench.Trial(operation, placement, mine, 1, 3)
        bench.poison(trial._input)
        trial.reset()
        patterns = torch.tensor(bits(trial.output))
        poisoned = patterns == bench.POISON[dtype]
        if operation is BROADCAST:
            assert poisoned.all()
            continue
        assert bits(trial._input) == bits(mine)
        shared = trial.output.untyped_storage().data_ptr() == trial._input.untyped_storage().data_ptr()
        assert shared == (placement == "in_place")
        if not shared:
            assert poisoned.all()
        elif operation is ALL_GATHER:
            assert poisoned.tolist() == [True] * 6 + [False] * 6 + [True] * 6
            assert bits(trial.output[6:12]) == bits(mine)
        elif operation is REDUCE_SCATTER:
            assert bits(trial.output) == bits(mine[2:4])
    assert torch.full((1,), bench.POISON[dtype], dtype=bench.SAME_WIDTH[dtype]).view(dtype).isnan()


# A group of one


class Flipping(Communicator):
    """A Communicator that gets one bit of one element wrong."""

    def all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = super().all_reduce(tensor, *args, **kwargs)
        tensor.view(torch.int16)[3] ^= 1
        return work


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


SHORT = ["bench", "-b", "1K", "-e", "1K", "-o", "all_reduce", "broadcast", "-n", "2", "-w", "0", "--device", "cpu"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("kind", "wrong"), [(Communicator, 0), (Flipping, 1)])
def test_one_wrong_bit_is_counted_and_is_the_exit_status(
    kind: type, wrong: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "Communicator", kind)
    assert cli.main([*SHORT, "--json", str(tmp_path / "rows.json")]) == wrong
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["op"], row["out_of_place"], row["in_place"]["wrong"]) for row in rows] == [
        ("all_reduce", None, wrong),
        ("broadcast", None, 0),
    ]
    printed = capsys.readouterr().out
    assert f"# wrong elements: {wrong}\n" in printed
    [line] = [line for line in printed.splitlines() if line.split()[0] == "all_reduce"]
    assert line.split()[:5] == ["all_reduce", "1024", "512", "bfloat16", "sum"]
    assert line.split()[5:10] == ["N/A"] * 5
    assert line.split()[14] == str(wrong)


@pytest.mark.usefixtures("one_rank")
def test_a_benchmark_row_with_a_wrong_bit_is_an_error_and_no_figure() -> None:
    bench.open_ranks("cpu")
    options = argparse.Namespace(link="gloo", rounds=1, calls=2, warmups=0, issue_rounds=1)
    for kind, error in ((Communicator, None), (Flipping, "wrong elements: 1 of zipccl, 0 of native")):
        comm = kind(policy=Policy(compress="always"))
        [row] = collectives.measure(ALL_REDUCE, 1024, "bfloat16", collectives.Native(), {"always": comm}, CPU, options)
        comm.close()
        assert row.get("error") == error
        assert ("zipccl_us" in row) == ("speedup" in row) == (error is None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (SHORT, "RANK is not set: start it on every rank, for instance `torchrun "),
        (["bench", "-b", "4X"], "a size must be a whole number of bytes"),
        (["bench", "-n", "0"], "-n must be 1 or more"),
        (["bench", "--sigma", "nan"], "--sigma must be finite"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"zipccl bench: {text}")
    assert printed.err.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    if arguments is not SHORT:
        assert cli.main(arguments) == 1
        assert capsys.readouterr().err == "", "rank 0 says it"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("name", "why"), [("nowhere/rows.json", "No such file or directory"), ("", "Is a directory")])
def test_where_rows_cannot_be_written_is_known_before_the_sweep(
    name: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "Communicator", None)
    assert cli.main([*SHORT, "--json", str(tmp_path / name)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"zipccl bench: {tmp_path / name} cannot be written: {why}; nothing was measured\n"


@pytest.mark.usefixtures("one_rank")
def test_a_look_whether_a_file_can_be_written_leaves_no_trace(tmp_path: Path) -> None:
    bench.open_ranks("cpu")
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("rows")
    for path in (old, new, None):
        bench.require_writable(path)
    assert old.read_text() == "rows"
    assert not new.exists()


@pytest.mark.parametrize(
    ("program", "arguments", "text"),
    [
        (collectives, ["--rounds", "0"], "--rounds must be 1 or more, got 0"),
        (collectives, ["--calls", "0"], "--calls must be 1 or more, got 0"),
        (collectives, ["--issue-rounds", "0"], "--issue-rounds must be 1 or more, got 0"),
        (collectives, ["--warmups", "-1"], "--warmups must be 0 or more, got -1"),
        (
            collectives,
            ["--link", "nvlink"],
            "--link nvlink is one between GPUs, and on the CPU it is gloo; leave it out",
        ),
        (late_rank, ["--rounds", "0"], "--rounds must be 1 or more, got 0"),
        (late_rank, ["--rows", "0"], "--rows must be 1 or more, got 0"),
        (late_rank, ["--late-ms", "5", "-1"], "--late-ms must be finite and not negative, got [5.0, -1.0]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_benchmark_cannot_measure_is_one_line_before_ranks_join(
    program: Any, arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(bench, "open_ranks", None)
    monkeypatch.setattr(sys, "argv", ["a benchmark", "--device", "cpu", *arguments])
    assert program.main() == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"benchmarks/{program.__name__.removeprefix('benchmarks.')}.py: {text}\n"


def test_an_architecture_is_for_compiling_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--arch", "sm_90"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("zipccl doctor: --arch is for --warm")
    assert printed.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_no_gpu_is_visible_warming_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--warm"]) != 0
    assert "no GPU is visible; say for which, as in --arch sm_80 --arch" in capsys.readouterr().err


# Links, files and splits


@pytest.mark.parametrize("program", [collectives, late_rank])
def test_a_trial_writes_where_git_looks_away(program: Any) -> None:
    default = program.parser().parse_args([]).out
    assert default == ROOT / "runs" / "benchmarks"
    assert "/runs/" in (ROOT / ".gitignore").read_text().splitlines()
    assert "--out benchmarks/results" in program.__doc__


def test_links_and_calls_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for device, link in (("cpu", None), ("cuda", None), ("cuda", "host")):
        options = collectives.parser().parse_args(["--device", device, *(["--link", link] if link else [])])
        collectives.check(options)
        found[device, link] = (options.link, options.calls)
    assert found == {("cpu", None): ("gloo", 1), ("cuda", None): ("nvlink", 20), ("cuda", "host"): ("host", 20)}


def test_a_link_sets_what_it_needs_and_unsets_what_others_need() -> None:
    environment = {"HOME": "/root", "NCCL_SHM_DISABLE": "1"}
    collectives.choose_link("host", environment)
    assert environment.pop("NCCL_P2P_PCI_CHUNKSIZE") == "524288"
    assert environment.pop("NCCL_MIN_P2P_NCHANNELS") == "16"
    assert environment == {"HOME": "/root", "NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    collectives.choose_link("sockets", environment)
    assert environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert environment["NCCL_SHM_DISABLE"] == "1"
    for link in ("nvlink", None):
        collectives.choose_link(link, environment)
        assert environment == {"HOME": "/root", "NCCL_NVLS_ENABLE": "0"}


def facts_of(commit: str, rounds: int = 15) -> dict[str, Any]:
    return {"commit": commit, "rounds": rounds, "calls_a_round": 8, "gpu": "H999"}


def test_a_row_takes_the_place_of_its_like_alone_and_says_of_which_run_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    full = {"op": "all_gather", "link": "host", "dtype": "bfloat16", "policy": "auto", "bytes_per_rank": 4096}
    others = [{**full, key: f"another {key}"} for key in ("op", "dtype", "policy", "bytes_per_rank")]
    nvlink = {**full, "link": "nvlink"}
    for link, facts, rows in (
        ("host", facts_of("a"), [*others[:2], full, *others[2:]]),
        ("nvlink", facts_of("b"), [nvlink]),
        ("host", facts_of("c", rounds=1), [full]),
    ):
        path.write_text(json.dumps(collectives.merged(path, facts, link, rows)))
    of_a, of_b, of_c = (
        {"commit": commit, "rounds": rounds, "calls_a_round": 8} for commit, rounds in (("a", 15), ("b", 15), ("c", 1))
    )
    assert json.loads(path.read_text()) == {
        "machine": facts_of("c", rounds=1),
        "runs": {"host": facts_of("c", rounds=1), "nvlink": facts_of("b")},
        "rows": [
            *(row | of_a for row in others[:2]),
            full | of_c,
            *(row | of_a for row in others[2:]),
            nvlink | of_b,
        ],
    }


def test_rows_from_before_they_said_their_run_are_given_it_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    row = {"op": "all_gather", "link": "host", "dtype": "bfloat16", "policy": "auto", "bytes_per_rank": 4096}
    path.write_text(json.dumps({"machine": facts_of("old"), "runs": {"host": facts_of("old")}, "rows": [row]}))
    for commit in ("new", "newer"):
        other = {**row, "op": commit}
        path.write_text(json.dumps(collectives.merged(path, facts_of(commit), "host", [other])))
    assert [row["commit"] for row in json.loads(path.read_text())["rows"]] == ["old", "new", "newer"]


def test_zipf_splits_use_every_row_and_favour_low_ranks() -> None:
    splits = late_rank.zipf_splits(4000, 4, 1.2, 3)
    assert sum(splits) == 4000
    assert splits == sorted(splits, reverse=True)
    assert splits == late_rank.zipf_splits(4000, 4, 1.2, 3)
    assert splits != late_rank.zipf_splits(4000, 4, 1.2, 2)


# Under torchrun


def torchrun(*arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_bench_runs_on_two_ranks(tmp_path: Path) -> None:
    arguments = ["-b", "4K", "-e", "1M", "-f", "256", "-o", "all", "-n", "2", "-w", "0", "--device", "cpu"]
    printed = torchrun("-m", "zipccl_core.cli", "bench", *arguments, "--json", str(tmp_path / "rows.json"))
    report = json.loads((tmp_path / "rows.json").read_text())
    assert report["world_size"] == 2
    assert [(row["op"], row["size_bytes"]) for row in report["rows"]] == [
        (name, size) for name in bench.OPERATIONS for size in (4096, 1 << 20)
    ]
    for row in report["rows"]:
        operation = bench.OPERATIONS[row["op"]]
        assert [place for place in ("out_of_place", "in_place") if row[place]] == list(operation.placements)
        coded = row["size_bytes"] == 1 << 20  # half of it, for another rank, is more than min_bytes
        assert row["decision"] == ("compressed" if coded else "native")
        assert 1.4 < row["ratio"] < 1.44 if coded else 0.9 < row["ratio"] < 1
        for place in operation.placements:
            block = row[place]
            assert block["wrong"] == 0
            assert block["algbw_gb_s"] == pytest.approx(row["size_bytes"] / block["time_us"] / 1e3)
            assert block["busbw_gb_s"] == pytest.approx(block["algbw_gb_s"] * operation.busbw_factor(2))
        [line] = [line for line in printed.splitlines() if line.split()[:2] == [row["op"], str(row["size_bytes"])]]
        assert line.endswith(row["decision"])


def test_benchmarks_run_on_two_ranks(tmp_path: Path) -> None:
    small = ["--device", "cpu", "--rounds", "1", "--warmups", "0", "--out", str(tmp_path)]
    torchrun("benchmarks/collectives.py", "--sizes", "4K", "--issue-rounds", "1", *small)
    result = json.loads((tmp_path / "collectives_cpux2.json").read_text())
    assert (tmp_path / "collectives_cpux2.png").stat().st_size > 10_000
    assert {"gpu", "host_cores", "torch", "commit", "ranks"} <= result["machine"].keys()
    keys = [(row["op"], row["dtype"], row["policy"]) for row in result["rows"]]
    assert keys == [(o, d, p) for o in collectives.OPERATIONS for d in collectives.DATA for p in collectives.POLICIES]
    for row in result["rows"]:
        assert "error" not in row, row
        assert row["link"] == "gloo"
        assert row["bytes_per_rank"] == 4096
        assert row["speedup"] == pytest.approx(row["native_us"] / row["zipccl_us"], rel=0.01)
        assert row["decision"] == ("compressed" if row["policy"] == "always" else "native")


def test_the_late_rank_comes_late_on_two_ranks(tmp_path: Path) -> None:
    small = ["--rows", "64", "--hidden", "64", "--rounds", "2", "--warmups", "1", "--late-ms", "0", "60"]
    torchrun("benchmarks/late_rank.py", "--device", "cpu", "--out", str(tmp_path), *small)
    result = json.loads((tmp_path / "late_rank_cpux2.json").read_text())
    assert (tmp_path / "late_rank_cpux2.png").stat().st_size > 10_000
    assert [(row["scheme"], row["late_ms"]) for row in result["rows"]] == [
        (scheme, late) for late in (0, 60) for scheme in ("native", "zipccl", "sizes first")
    ]
    for row in result["rows"]:
        assert row["on_time_total_us"] >= row["late_ms"] * 1e3 / 2, "nobody is done before the late rank's rows"
        assert row["late_rank_us"] > 0
