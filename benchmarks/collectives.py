"""Are compressed collectives faster? torch.distributed and zipccl in turn, round by round, in one run.

    torchrun --nproc-per-node 2 benchmarks/collectives.py                   # CUDA over NVLink if a GPU is visible
    torchrun --nproc-per-node 2 benchmarks/collectives.py --link host       # the same GPUs over host memory
    torchrun --nproc-per-node 2 benchmarks/collectives.py --device cpu      # gloo

Prints a table as it goes, and merges its rows into collectives_<gpu>x<ranks>.json of --out, drawn beside it: a row
takes the place of the one of the same operation, link, dtype, policy and bytes, and all others stay. --out is
runs/benchmarks, which git ignores; the committed figures are written only with --out benchmarks/results. Any row whose
output has a wrong bit becomes an error instead of a figure, and the exit status 1.

How it measures. A size is the raw bytes that a rank sends to others. Data is N(0, 0.02²), drawn anew by every rank for
every rank, so that what must come is known apart from any collective. A round takes native and each policy once, each
after all ranks have met; a call's time is that of its slowest rank (zipccl_core/bench.py: by the host's clock on CPU;
on CUDA by events around 20 synchronous calls back to back, divided by their number, as in nccl-tests). Policies have
reduction="native": a reduction that is not coded is the backend's own, whose bits are not promised and not checked;
figures are medians over rounds, spreads third quartile minus first. `host_issue_us` is the host's time in the issuing
call with async_op=True: 4 calls on buffers of their own are issued one after another, as by a step of training, and
only then waited for; the median over all of them, `host_issue_first_us` over the first of each round, which finds the
processor's caches cold; `host_wait_us` over the first one's wait(). Each is that of the rank where it is longest. On
CUDA some 5 ms of work are queued ahead, by a hundred launches, so that a call that waits for the device shows.

Each policy has a Communicator of its own, and where a process has several on a device none uses the caller's stream
(docs/DESIGN.md, "On a device"): name one --policy to see what one has alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "runs" / "benchmarks"
NCCL_LINKS = {
    "nvlink": {},
    "host": {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_PCI_CHUNKSIZE": "524288", "NCCL_MIN_P2P_NCHANNELS": "16"},
    "sockets": {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_P2P_NET_CHUNKSIZE": "1048576",
        "NCCL_BUFFSIZE": "8388608",
        "NCCL_NCHANNELS_PER_NET_PEER": "4",
    },
}
"""What leaves NCCL no other way, and what lets its sends and receives fill that way, for native and zipccl alike
(docs/PERFORMANCE.md, "What NCCL is told")."""
OPERATIONS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
DATA = {"bfloat16": ("bfloat16", False), "float32 widened from bfloat16": ("float32", True)}
POLICIES = ("auto", "always")
SIGMA = 0.02
SIZES = {
    "cuda": ["4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M", "256M"],
    "cpu": ["4K", "64K", "1M", "16M"],
}
START = "torchrun --nproc-per-node 2 benchmarks/collectives.py"
AHEAD_CYCLES, AHEAD_LAUNCHES = 100_000, 100  # about 5 ms at 2 GHz
ISSUES = 4


def parser() -> argparse.ArgumentParser:
    """The options; no torch needed."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if one is visible")
    found.add_argument("--link", choices=list(NCCL_LINKS), help="for CUDA (default nvlink); on CPU it is gloo")
    found.add_argument("--sizes", nargs="+", metavar="SIZE", help="raw bytes a rank sends, e.g. 4K 1M 256M")
    found.add_argument("--op", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    found.add_argument("--dtype", nargs="+", choices=list(DATA), default=list(DATA))
    found.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    found.add_argument("--rounds", type=int, default=15)
    found.add_argument("--calls", type=int, help="calls back to back a round; default: 20 on CUDA, 1 on CPU")
    found.add_argument("--issue-rounds", type=int, default=7, help="rounds for the host's times")
    found.add_argument("--warmups", type=int, default=3)
    found.add_argument(
        "--out",
        type=Path,
        default=OUT,
        help="folder of the results (default runs/benchmarks, which git ignores; benchmarks/results holds the figures "
        "that are committed, and is written only if it is named)",
    )
    return found


def choose_link(link: str | None, environment: Any) -> None:
    """Set what makes NCCL take a link (nvlink if None), and unset what another one needs; before NCCL starts."""
    for name in {name for names in NCCL_LINKS.values() for name in names}:
        environment.pop(name, None)
    environment.update(NCCL_LINKS[link or "nvlink"], NCCL_NVLS_ENABLE="0")


if __name__ == "__main__":
    choose_link(parser().parse_args().link, os.environ)

sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from zipccl_core import Communicator, Policy, ZipcclError, bench  # noqa: E402

# 2.13 renamed these two and warns about the old names; 2.11 and 2.12 have the old names only.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Native:
    """torch.distributed on the default group, with a Communicator's methods."""

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> Any:
        return _all_gather(output, input, async_op=async_op)

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> Any:
        return _reduce_scatter(output, input, async_op=async_op)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> Any:
        return dist.all_to_all_single(output, input, async_op=async_op)

    def all_reduce(self, tensor: torch.Tensor, async_op: bool) -> Any:
        return dist.all_reduce(tensor, async_op=async_op)


def commit() -> str:
    """The commit that is checked out, marked if the core differs from it; "unknown" without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "zipccl_core", ":!zipccl_core/tests")
        return git("rev-parse", "HEAD") + (" and changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def host_times(trials: Sequence[bench.Trial], comm: Any, device: torch.device) -> tuple[list[float], float]:
    """Microseconds of the host in each of the issuing calls, and in the first one's wait()."""
    for trial in trials:
        trial.reset()
    bench.meet(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
        for _ in range(AHEAD_LAUNCHES):  # as a step of training would: this thread is at work, and not just woken
            torch.cuda._sleep(AHEAD_CYCLES)
    issued_us, works = [], []
    for trial in trials:
        start = time.perf_counter()
        work = trial.call(comm, async_op=True)
        issued_us.append((time.perf_counter() - start) * 1e6)
        works.append(work)
    start = time.perf_counter()
    works[0].wait()
    waited_us = (time.perf_counter() - start) * 1e6
    for work in works[1:]:
        work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return issued_us, waited_us


def measure(
    operation: bench.Operation,
    sent_bytes: int,
    data: str,
    native: Any,
    comms: dict[str, Communicator],
    device: torch.device,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """The rows of one operation, size and kind of data, one a policy; collective, the same on all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dtype, widened = bench.DTYPES[DATA[data][0]], DATA[data][1]
    input_bytes = sent_bytes * world_size // (operation.bytes_per_rank(world_size, world_size) or world_size)
    words = max(input_bytes // dtype.itemsize // world_size, 1) * world_size

    def input_of(r: int) -> torch.Tensor:
        return bench.draw(1, r, words, dtype, SIGMA, device, widened)

    wanted = bench.expected(operation, rank, world_size, input_of)
    mine = input_of(rank)
    trials = [bench.Trial(operation, operation.placements[0], mine, rank, world_size) for _ in range(ISSUES)]
    trial = trials[0]
    subjects: dict[str, Any] = {"native": native, **comms}
    before = {policy: bench.books(comm, operation) for policy, comm in comms.items()}
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(options.warmups + options.rounds):
        for name, comm in subjects.items():
            trial.reset()
            bench.meet(device)
            took = bench.timed_us(lambda comm=comm: [trial.call(comm) for _ in range(options.calls)], device)
            if number >= options.warmups:
                times[name].append(took / options.calls)
    host: dict[str, list[tuple[list[float], float]]] = {name: [] for name in subjects}
    for _ in range(options.issue_rounds):
        for name, comm in subjects.items():
            host[name].append(host_times(trials, comm, device))
    wrong = {}
    for name, comm in subjects.items():
        trial.reset()
        trial.call(comm)
        # a backend's own sum has other bits, of which nothing is promised
        [differ] = bench.over_ranks([bench.count_wrong(trial.output, wanted)])
        own = name == "native" or (world_size > 1 and comm.last_decision.mode == "native")
        wrong[name] = 0 if own and operation.sums else int(differ)

    taken = {name: bench.slowest(values) for name, values in times.items()}
    hosts = {}
    for name, found in host.items():
        issues, waits = [issued_us for issued_us, _ in found], [waited_us for _, waited_us in found]
        medians = {"issue": itertools.chain(*issues), "issue_first": [first for first, *_ in issues], "wait": waits}
        hosts[name] = {f"host_{part}_us": bench.slowest([statistics.median(v)])[0] for part, v in medians.items()}
    native_us = statistics.median(taken["native"])
    rows = []
    for policy, comm in comms.items():
        ratio, decision = bench.since(bench.books(comm, operation), before[policy])
        row: dict[str, Any] = {
            "op": operation.name,
            "link": options.link,
            "dtype": data,
            "policy": policy,
            "input_bytes": words * dtype.itemsize,
            "bytes_per_rank": operation.bytes_per_rank(words * dtype.itemsize, world_size),
        }
        if wrong[policy] or wrong["native"]:
            row["error"] = f"wrong elements: {wrong[policy]} of zipccl, {wrong['native']} of native"
        else:
            zipccl_us = statistics.median(taken[policy])
            row |= {
                "native_us": round(native_us, 1),
                "native_spread_us": round(bench.spread(taken["native"]), 1),
                "zipccl_us": round(zipccl_us, 1),
                "zipccl_spread_us": round(bench.spread(taken[policy]), 1),
                "speedup": round(native_us / zipccl_us, 4),
                **{part: round(value, 1) for part, value in hosts[policy].items()},
                **{f"native_{part}": round(value, 1) for part, value in hosts["native"].items()},
                "ratio": round(ratio, 4),
                "decision": decision,
            }
        rows.append(row)
    return rows


HEADING = (
    f"{'op':14} {'link':7} {'dtype':9} {'policy':6} {'bytes/rank':>10} {'native us':>10} {'spread':>8} "
    f"{'zipccl us':>10} {'spread':>8} {'speedup':>7} {'issue us':>9} {'first':>7} {'wait us':>9} {'ratio':>6} decision"
)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    dtype = row["dtype"].replace("float32 widened from bfloat16", "widened")
    left = f"{row['op']:14} {row['link']:7} {dtype:9} {row['policy']:6} {row['bytes_per_rank']:>10} "
    if "error" in row:
        return left + f"ERROR {row['error']}"
    return left + (
        f"{row['native_us']:10.1f} {row['native_spread_us']:8.1f} {row['zipccl_us']:10.1f} "
        f"{row['zipccl_spread_us']:8.1f} {row['speedup']:7.3f} {row['host_issue_us']:9.1f} "
        f"{row['host_issue_first_us']:7.1f} {row['host_wait_us']:9.1f} "
        f"{row['ratio']:6.3f} {row['decision']}"
    )


def result_name(facts: dict[str, Any], world_size: int) -> str:
    """Name of the files of a machine, without a suffix."""
    gpu = (facts["gpu"] or "cpu").lower().replace("nvidia ", "").replace(" ", "_")
    return f"collectives_{gpu}x{world_size}"


KEY = ("op", "link", "dtype", "policy", "bytes_per_rank")
OF_A_RUN = ("commit", "rounds", "calls_a_round")


def merged(path: Path, facts: dict[str, Any], link: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a results file should hold: these rows, each in the place of the one with its KEY, and all others it has.

    `machine` is that of the latest run, and `runs` has that of the latest of each link. Rows may be older than that, so
    each says itself what is OF_A_RUN; those written before they did are given it from `runs`.
    """
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": [], "runs": {}}
    found = {}
    for run_of, some in ((known["runs"], known["rows"]), ({link: facts}, rows)):
        for row in some:
            run = run_of[row["link"]]
            found[tuple(row[k] for k in KEY)] = row | {k: run[k] for k in OF_A_RUN if k not in row}
    return {"machine": facts, "runs": {**known["runs"], link: facts}, "rows": list(found.values())}


def draw(result: dict[str, Any], path: Path) -> None:
    """Speedup over bytes: a column of panels a link, a row of them a policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if "error" not in row]
    links, policies = (
        [k for k in known if any(r[f] == k for r in rows)]
        for f, known in (("link", [*NCCL_LINKS, "gloo"]), ("policy", POLICIES))
    )
    size = (1 + 6 * len(links), 1 + 4 * len(policies))
    figure, axes = plt.subplots(len(policies), len(links), figsize=size, squeeze=False, constrained_layout=True)
    for i, policy in enumerate(policies):
        for j, link in enumerate(links):
            axis = axes[i][j]
            for k, operation in enumerate(OPERATIONS):
                for data, style in zip(DATA, ("-", "--"), strict=True):
                    key = (operation, link, data, policy)
                    chosen = [r for r in rows if (r["op"], r["link"], r["dtype"], r["policy"]) == key]
                    chosen.sort(key=lambda r: r["bytes_per_rank"])
                    if chosen:
                        axis.plot(
                            [r["bytes_per_rank"] for r in chosen],
                            [r["speedup"] for r in chosen],
                            style,
                            color=f"C{k}",
                            marker="o",
                            label=f"{operation}, {data.replace(' from bfloat16', '')}",
                        )
            if not axis.lines:
                axis.set_axis_off()
                continue
            axis.axhline(1, color="black", linewidth=1)
            axis.set_xscale("log", base=2)
            axis.set(xlabel="raw bytes a rank sends", ylabel="native time ÷ zipccl's", title=f"{link}, {policy}")
            axis.set_ylim(bottom=0)
            axis.grid(True, alpha=0.3)
    max((axis for row in axes for axis in row), key=lambda axis: len(axis.lines)).legend(fontsize=7)
    machine = result["machine"]
    figure.suptitle(f"{machine['gpu'] or machine['host_cpu']}, {machine['ranks']} ranks, torch {machine['torch']}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def check(options: argparse.Namespace) -> None:
    """Refuse what cannot be measured, and fill in the link and the calls of a round; before any rank is joined.

    Raises:
        InvalidArgument: a number below its least, or a link without CUDA.
    """
    device_type = bench.device_type_of(options.device)
    if options.calls is None:
        options.calls = 1 if device_type == "cpu" else 20
    bench.at_least(1, rounds=options.rounds, calls=options.calls, issue_rounds=options.issue_rounds)
    bench.at_least(0, warmups=options.warmups)
    if device_type == "cpu" and options.link:
        raise bench.InvalidArgument(
            f"--link {options.link} is one between GPUs, and on the CPU it is gloo; leave it out"
        )
    options.link = "gloo" if device_type == "cpu" else options.link or "nvlink"


def run(options: argparse.Namespace) -> int:
    """Measure on all ranks; files, table and picture on rank 0. Exit status: 1 if an output had a wrong bit."""
    check(options)
    device = bench.open_ranks(options.device, START)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    facts = {**bench.machine(device), "ranks": world_size, "commit": commit()}
    facts |= {"rounds": options.rounds, "calls_a_round": options.calls, "sigma": SIGMA}
    if world_size < 2:
        raise bench.InvalidArgument("two ranks or more have something to send, got 1; raise --nproc-per-node")
    all_bytes = [bench.parse_bytes(size) for size in options.sizes or SIZES[device.type]]
    if min(all_bytes) < 4 * world_size:
        raise bench.InvalidArgument(
            f"--sizes must be {4 * world_size} bytes or more, an element a rank; got {min(all_bytes)}"
        )
    comms = {policy: Communicator(policy=Policy(compress=policy, reduction="native")) for policy in options.policy}
    native = Native()
    if rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{result_name(facts, world_size)}.json"
    rows: list[dict[str, Any]] = []
    if rank == 0:
        print(HEADING, flush=True)
    for name in options.op:
        for data in options.dtype:
            for sent_bytes in all_bytes:
                new = measure(bench.OPERATIONS[name], sent_bytes, data, native, comms, device, options)
                rows += new
                if rank == 0:
                    print(*map(line, new), sep="\n", flush=True)
                    result = merged(path, facts, options.link, rows)
                    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if rank == 0:
        draw(result, path.with_suffix(".png"))
        print(json.dumps(facts), f"load average at the end: {os.getloadavg()[0]:.2f}", path, sep="\n")
    for comm in comms.values():
        comm.close()
    dist.destroy_process_group()
    return 1 if any("error" in row for row in rows) else 0


def status_of(script: str, work: Callable[[], int]) -> int:
    """The exit status of a benchmark; an error of ours, the same on all ranks, is a line on rank 0 and status 1."""
    try:
        return work()
    except ZipcclError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"benchmarks/{script}: {error}", file=sys.stderr)
        return 1


def main() -> int:
    return status_of("collectives.py", lambda: run(parser().parse_args()))


if __name__ == "__main__":
    sys.exit(main())
