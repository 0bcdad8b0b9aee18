"""One rank comes late to an uneven all-to-all: how much is left to do for the others once it is here?

    torchrun --nproc-per-node 4 benchmarks/late_rank.py                     # CUDA if a GPU is visible, else gloo
    torchrun --nproc-per-node 4 benchmarks/late_rank.py --late-ms 0 100 --rows 8192

A mixture of experts sends each token (a row) to the rank of its expert; experts are chosen by a Zipf law, so low ranks
get most. One rank sleeps t ms before its call, and three ways to exchange the same rows are taken in turn, round by
round:

- `native`: torch.distributed.all_to_all_single, uncompressed;
- `zipccl`: Communicator.all_to_all_single, in two phases: static parts, whose sizes all know, go before the late rank
  has come;
- `sizes first`: the same codec without static parts: encode, all-gather the sizes of the frames, then exchange frames.
  No payload moves before the late rank has said how large its frames are.

No rank can be done before the late one's rows are here. So what is reported is what a user sees: for ranks on time,
the time from the common start to having everything, less t (median over these ranks and rounds; spread: third quartile
minus first; and the median over rounds of the slowest of them); and for the late rank, the time in its own call. At
t = 0 nobody is late. Host clocks, on CUDA until the device is done. Outputs are compared bit for bit after each series.
Prints a table, writes late_rank_<gpu>x<ranks>.json into --out, and draws it. --out is runs/benchmarks, which git
ignores; the committed figures are written only with --out benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.collectives import OUT, commit, result_name, status_of  # noqa: E402
from zipccl_core import Codebook, Communicator, Policy, bench, decode, encode, read_header  # noqa: E402

START = "torchrun --nproc-per-node 4 benchmarks/late_rank.py"
SIGMA = 0.02
CODEBOOK = Codebook.gaussian(SIGMA)  # for both ways that compress, so that they code alike
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Exchange = Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], object]


def zipf_splits(rows: int, world_size: int, exponent: float, rank: int) -> list[int]:
    """Rows that a rank sends to each: every row's expert is drawn with weight 1/(r+1)^exponent for rank r."""
    weights = torch.arange(1, world_size + 1, dtype=torch.float64) ** -exponent
    generator = torch.Generator().manual_seed(rank)
    chosen = torch.multinomial(weights, rows, replacement=True, generator=generator)
    return [int(count) for count in torch.bincount(chosen, minlength=world_size)]


def sizes_first(output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]) -> None:
    """all_to_all_single by frames whose sizes are exchanged before them; the own part is copied."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts, places = input.split(input_splits), output.split(output_splits)
    frames = [input.new_empty(0, dtype=torch.uint8)] * world_size
    for r in range(world_size):
        if r != rank and parts[r].numel():
            frame = encode(parts[r], CODEBOOK)
            frames[r] = frame[: read_header(frame).frame_bytes]
    mine = torch.tensor([frame.numel() for frame in frames], device=input.device)
    everyones = mine.new_empty(world_size * world_size)
    _all_gather(everyones, mine)
    coming = everyones.view(world_size, world_size)[:, rank].tolist()
    received = input.new_empty(sum(coming), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(frames), coming, [frame.numel() for frame in frames])
    places[rank].copy_(parts[rank])
    for r, frame in enumerate(received.split(coming)):
        if frame.numel():
            decode(frame, out=places[r])


class Case:
    """The rows of one rank, and what must come."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), device
        every = [zipf_splits(options.rows, self.world_size, options.zipf, r) for r in range(self.world_size)]
        self.splits = every
        self.sends, self.receives = every[self.rank], [splits[self.rank] for splits in every]

        def rows_of(rank: int) -> torch.Tensor:
            n = options.rows * options.hidden
            return bench.draw(1, rank, n, torch.bfloat16, SIGMA, device).view(options.rows, options.hidden)

        self.input = rows_of(self.rank)
        self.wanted = torch.cat([rows_of(r).split(every[r])[self.rank] for r in range(self.world_size)])
        self.output = torch.empty_like(self.wanted)

    def time(self, exchange: Exchange, late_rank: int, late_ms: float) -> float:
        """Microseconds until all is here: from the common start, less the lateness; on the late rank from its call."""
        bench.poison(self.output)
        bench.meet(self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        if self.rank == late_rank:
            time.sleep(late_ms / 1e3)
            start = time.perf_counter()
        exchange(self.output, self.input, self.receives, self.sends)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        taken_us = (time.perf_counter() - start) * 1e6
        return taken_us if self.rank == late_rank else taken_us - late_ms * 1e3

    def check(self, what: str) -> None:
        """Raise on all ranks if an output has a wrong bit."""
        [wrong] = bench.over_ranks([bench.count_wrong(self.output, self.wanted)])
        if wrong:
            raise RuntimeError(f"{what}: {wrong:.0f} elements are wrong")


def from_all_ranks(values: list[float]) -> list[list[float]]:
    """[rank] → its values; collective, as many on all ranks."""
    rank, world_size, n = dist.get_rank(), dist.get_world_size(), len(values)
    flat = bench.over_ranks([0.0] * (rank * n) + values + [0.0] * ((world_size - 1 - rank) * n))
    return [flat[r * n : (r + 1) * n] for r in range(world_size)]


def measure(
    case: Case, exchanges: dict[str, Exchange], late_ms: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row a way to exchange; collective, the same on all ranks."""
    times: dict[str, list[float]] = {name: [] for name in exchanges}
    for number in range(options.warmups + options.rounds):
        for name, exchange in exchanges.items():
            taken = case.time(exchange, options.late_rank, late_ms)
            if number >= options.warmups:
                times[name].append(taken)
            if number == options.warmups + options.rounds - 1:
                case.check(f"{name}, {late_ms:g} ms late")
    rows = []
    for name, own in times.items():
        ranks = from_all_ranks(own)
        late = ranks.pop(options.late_rank)
        on_time = [value for values in ranks for value in values]
        slowest = [max(values) for values in zip(*ranks, strict=True)]
        rows.append(
            {
                "scheme": name,
                "late_ms": late_ms,
                "on_time_after_us": round(statistics.median(on_time), 1),
                "on_time_after_spread_us": round(bench.spread(on_time), 1),
                "on_time_slowest_after_us": round(statistics.median(slowest), 1),
                "on_time_total_us": round(statistics.median(on_time) + late_ms * 1e3, 1),
                "late_rank_us": round(statistics.median(late), 1),
                "late_rank_spread_us": round(bench.spread(late), 1),
            }
        )
    return rows


HEADING = (
    f"{'scheme':12} {'late ms':>8} {'on time: after it, us':>22} {'spread':>9} {'slowest us':>11} {'in all us':>11} "
    f"{'late rank us':>13} {'spread':>9}"
)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    return (
        f"{row['scheme']:12} {row['late_ms']:8g} {row['on_time_after_us']:22.0f} {row['on_time_after_spread_us']:9.0f} "
        f"{row['on_time_slowest_after_us']:11.0f} {row['on_time_total_us']:11.0f} {row['late_rank_us']:13.0f} "
        f"{row['late_rank_spread_us']:9.0f}"
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """What is left to do after the late rank's call, over its lateness: for those on time, and for itself."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, constrained_layout=True)
    panels = (
        ("on_time_after", "ranks on time: after the late rank's call"),
        ("late_rank", "the late rank: in its call"),
    )
    for axis, (key, title) in zip(axes, panels, strict=True):
        for scheme in dict.fromkeys(row["scheme"] for row in result["rows"]):
            rows = sorted((r for r in result["rows"] if r["scheme"] == scheme), key=lambda r: r["late_ms"])
            axis.errorbar(
                [r["late_ms"] for r in rows],
                [r[f"{key}_us"] / 1e3 for r in rows],
                yerr=[r[f"{key}_spread_us"] / 2e3 for r in rows],
                marker="o",
                capsize=3,
                label=scheme,
            )
        axis.set(xlabel="late by (ms)", ylabel="ms", title=title)
        axis.set_ylim(bottom=0)
        axis.grid(True, alpha=0.3)
    axes[0].legend()
    machine = result["machine"]
    figure.suptitle(
        f"all_to_all of {result['rows_per_rank']} rows of {result['row_bytes']} bytes a rank, Zipf {result['zipf']:g}; "
        f"{machine['gpu'] or machine['host_cpu']}, {machine['ranks']} ranks; bars: half the spread"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if one is visible")
    found.add_argument("--rows", type=int, default=4096, help="tokens that a rank sends (default %(default)s)")
    found.add_argument("--hidden", type=int, default=1024, help="bfloat16 words of a row (default %(default)s)")
    found.add_argument("--zipf", type=float, default=1.2, help="exponent (default %(default)s)")
    found.add_argument("--late-ms", type=float, nargs="+", default=[0, 20, 100, 300])
    found.add_argument("--late-rank", type=int, help="default: the last")
    found.add_argument("--rounds", type=int, default=15)
    found.add_argument("--warmups", type=int, default=2)
    found.add_argument(
        "--out",
        type=Path,
        default=OUT,
        help="folder of the results (default runs/benchmarks, which git ignores; benchmarks/results holds the figures "
        "that are committed, and is written only if it is named)",
    )
    return found


def check(options: argparse.Namespace) -> None:
    """Refuse what cannot be measured, before any rank is joined.

    Raises:
        InvalidArgument: a number below its least.
    """
    bench.at_least(1, rounds=options.rounds, rows=options.rows, hidden=options.hidden)
    bench.at_least(0, warmups=options.warmups)
    if not all(0 <= late_ms < math.inf for late_ms in options.late_ms):
        raise bench.InvalidArgument(f"--late-ms must be finite and not negative, got {options.late_ms}")


def run(options: argparse.Namespace) -> int:
    """Measure on all ranks; file, table and picture on rank 0."""
    check(options)
    device = bench.open_ranks(options.device, START)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size < 2:
        raise bench.InvalidArgument("one rank is late and others are not: that takes two or more; got 1")
    if options.late_rank is None:
        options.late_rank = world_size - 1
    if not 0 <= options.late_rank < world_size:
        raise bench.InvalidArgument(f"--late-rank must be 0 to {world_size - 1}, got {options.late_rank}")
    facts = {**bench.machine(device), "ranks": world_size, "commit": commit()}
    case = Case(options, device)
    comm = Communicator(policy=Policy(compress="always", codebook=CODEBOOK))
    exchanges: dict[str, Exchange] = {
        "native": dist.all_to_all_single,
        "zipccl": comm.all_to_all_single,
        "sizes first": sizes_first,
    }
    rows: list[dict[str, Any]] = []
    if rank == 0:
        print(HEADING, flush=True)
    for late_ms in options.late_ms:
        new = measure(case, exchanges, late_ms, options)
        rows += new
        if rank == 0:
            print(*map(line, new), sep="\n", flush=True)
    if rank == 0:
        result = {
            "question": "how much is left to do once the late rank has come",
            "machine": facts,
            "rows_per_rank": options.rows,
            "row_bytes": options.hidden * 2,
            "zipf": options.zipf,
            "splits": case.splits,
            "late_rank": options.late_rank,
            "rounds": options.rounds,
            "ratio": round(comm.stats()["all_to_all_single"]["ratio"], 4),
            "rows": rows,
        }
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{result_name(facts, world_size).replace('collectives', 'late_rank')}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        draw(result, path.with_suffix(".png"))
        print(json.dumps(facts), f"load average at the end: {os.getloadavg()[0]:.2f}", path, sep="\n")
    comm.close()
    dist.destroy_process_group()
    return 0


def main() -> int:
    return status_of("late_rank.py", lambda: run(parser().parse_args()))


if __name__ == "__main__":
    sys.exit(main())
