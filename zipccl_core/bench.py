"""`zipccl bench`: every collective over a sweep of sizes, timed and checked bit for bit.

    torchrun --nproc-per-node 2 -m zipccl_core.cli bench -b 4K -e 64M -f 4 -o all_gather all_reduce

Sizes, counts, algbw and busbw are those of nccl-tests, of raw bytes: what is compressed away still counts as moved. A
call's time is that of the rank for which it took longest. What a call must give is computed apart from it: every rank
draws every rank's input again from (seed, rank, size), and sums in the documented order (docs/DESIGN.md, "The sum")
with torch's own operations.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import subprocess
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from .collectives import Communicator
from .errors import InvalidArgument
from .frame import FORMAT_VERSION
from .policy.switch import COMPRESS, Policy

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SAME_WIDTH = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
POISON = {torch.bfloat16: -0x5B, torch.float32: -0x5A5A5B}
"""0xFFA5 and 0xFFA5A5A5: NaNs that no input holds and no sum can be."""
NAN = {torch.bfloat16: 0x7FC0, torch.float32: 0x7FC00000}
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
ROOT = 0
HOW_TO_START = "torchrun --nproc-per-node 2 -m zipccl_core.cli bench -b 4K -e 64M -f 4 -o all"

Placement = Literal["out_of_place", "in_place"]


@dataclass(frozen=True)
class Operation:
    """A collective as it is measured.

    Attributes:
        name: of the option and the table.
        method: of the Communicator, and of its stats().
        sums: whether it is a reduction.
        sharded: whether a size is world size × count elements (nccl-tests counts a rank's part), and not count.
        placements: those that torch's interface has.
    """

    name: str
    method: str
    sums: bool
    sharded: bool
    placements: tuple[Placement, ...]

    def busbw_factor(self, world_size: int) -> float:
        """busbw ÷ algbw, as nccl-tests has it."""
        if self.name == "broadcast":
            return 1.0
        return (2 if self.name == "all_reduce" else 1) * (world_size - 1) / world_size

    def count(self, size_bytes: int, dtype: torch.dtype, world_size: int) -> int:
        """Elements in the table's sense that a size holds, rounded down."""
        return size_bytes // dtype.itemsize // (world_size if self.sharded else 1)

    def size_bytes(self, count: int, dtype: torch.dtype, world_size: int) -> int:
        """The size of a count: the larger of a rank's input and output."""
        return count * dtype.itemsize * (world_size if self.sharded else 1)

    def input_words(self, count: int, world_size: int) -> int:
        """Elements of a rank's input."""
        return count * world_size if self.name in ("reduce_scatter", "all_to_all") else count

    def bytes_per_rank(self, input_bytes: int, world_size: int) -> int:
        """Raw bytes that a rank must send to others, from those of its input; for broadcast, the root."""
        if self.name in ("all_gather", "broadcast"):
            return input_bytes
        return (2 if self.name == "all_reduce" else 1) * input_bytes * (world_size - 1) // world_size


OPERATIONS = {
    o.name: o
    for o in (
        Operation("all_gather", "all_gather_into_tensor", False, True, ("out_of_place", "in_place")),
        Operation("reduce_scatter", "reduce_scatter_tensor", True, True, ("out_of_place", "in_place")),
        Operation("all_to_all", "all_to_all_single", False, True, ("out_of_place",)),
        Operation("all_reduce", "all_reduce", True, False, ("in_place",)),
        Operation("broadcast", "broadcast", False, False, ("in_place",)),
    )
}


# What is sent, and what must come


def draw(
    seed: int, rank: int, n: int, dtype: torch.dtype, sigma: float, device: torch.device, widened: bool = False
) -> torch.Tensor:
    """The input of a rank: N(0, sigma²), the same wherever it is drawn on the same kind of device.

    Drawn in float32 by torch.randn on the device, from a generator whose seed is the CRC-32 of "seed/rank/n"; times
    sigma; rounded to dtype.

    Args:
        n: elements.
        widened: round to bfloat16 first, so that a float32 has a low half of zeros.

    Returns:
        [n] dtype, on the device.
    """
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{rank}/{n}".encode()))
    words = torch.randn(n, generator=generator, device=device).mul_(sigma)
    return words.to(torch.bfloat16).to(dtype) if widened else words.to(dtype)


def expected(operation: Operation, rank: int, world_size: int, input_of: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """What an operation must leave on a rank, from the inputs of all ranks; no collective has a part in it.

    Args:
        input_of: rank → its input, contiguous; called once a rank, in rank order.

    Returns:
        The output, in the inputs' dtype and on their device.
    """

    def part(words: torch.Tensor) -> torch.Tensor:
        return words.view(world_size, -1)[rank]

    if operation.name == "broadcast":
        return input_of(ROOT)
    if operation.name == "all_gather":
        return torch.cat([input_of(r) for r in range(world_size)])
    if operation.name == "all_to_all":
        return torch.cat([part(input_of(r)) for r in range(world_size)])
    first = input_of(0)
    mine = part if operation.name == "reduce_scatter" else torch.Tensor.flatten
    acc = mine(first).to(torch.float32, copy=True)
    for r in range(1, world_size):
        acc += mine(input_of(r)).to(torch.float32)
    bits = acc.to(first.dtype).view(SAME_WIDTH[first.dtype])
    return bits.masked_fill_(acc.isnan(), NAN[first.dtype]).view(first.dtype)


def count_wrong(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """Elements whose bit pattern is not the wanted one; shapes and dtypes must be equal. Waits for the device."""
    same_width = SAME_WIDTH[wanted.dtype]
    return int(got.view(same_width).ne(wanted.view(same_width)).sum())


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with a pattern that cannot be an answer."""
    tensor.view(SAME_WIDTH[tensor.dtype]).fill_(POISON[tensor.dtype])


class Trial:
    """The buffers of one operation at one size on this rank, and the call on them.

    Args:
        operation, placement: one of the operation's.
        mine: this rank's input; copied at each reset, never written.
        rank, world_size: of the group.

    Attributes:
        output: what the call fills, to be compared with `expected`.
    """

    def __init__(
        self, operation: Operation, placement: Placement, mine: torch.Tensor, rank: int, world_size: int
    ) -> None:
        self._operation, self._mine, self._rank = operation, mine, rank
        name, n = operation.name, mine.numel()
        if name in ("all_reduce", "broadcast"):
            self.output = self._input = torch.empty_like(mine)
        elif placement == "out_of_place":
            words = {"all_gather": n * world_size, "reduce_scatter": n // world_size, "all_to_all": n}[name]
            self._input, self.output = torch.empty_like(mine), mine.new_empty(words)
        elif name == "all_gather":
            self.output = mine.new_empty(n * world_size)
            self._input = self.output[rank * n : (rank + 1) * n]
        else:
            self._input = torch.empty_like(mine)
            self.output = self._input.view(world_size, -1)[rank]

    def reset(self) -> None:
        """Poison the output, and put the input in place; in place, the input where both are one."""
        poison(self.output)
        if self._operation.name != "broadcast" or self._rank == ROOT:
            self._input.copy_(self._mine)

    def call(self, comm: Any, async_op: bool = False) -> Any:
        """The collective on a Communicator, or on whatever has its methods; its Work if async_op."""
        name = self._operation.name
        if name == "all_reduce":
            return comm.all_reduce(self.output, async_op=async_op)
        if name == "broadcast":
            return comm.broadcast(self.output, ROOT, async_op=async_op)
        return getattr(comm, self._operation.method)(self.output, self._input, async_op=async_op)


# Time


def meet(device: torch.device) -> None:
    """Return when all ranks are here; on CUDA what is queued next also starts together on all devices."""
    dist.all_reduce(torch.zeros(1))
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device))


def timed_us(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds a synchronous call takes: by the host's clock; on CUDA by events on the current stream around it.

    On CUDA the stream is idle, so the host's time in the call counts as well. Waits until it is done.
    """
    if device.type == "cuda":
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def slowest(values: Sequence[float]) -> list[float]:
    """Each value's maximum over the ranks; collective."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(value) for value in tensor]


def over_ranks(values: Sequence[float]) -> list[float]:
    """Each value's sum over the ranks; collective."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor]


def spread(values: Sequence[float]) -> float:
    """Third quartile minus first; 0 of fewer than two values."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


# Options and machine


def parse_bytes(text: str) -> int:
    """Bytes of "4096", "4K", "64M", "1G"; K is 1024.

    Raises:
        InvalidArgument: anything else.
    """
    found = re.fullmatch(r"([0-9]+)([KMG]?)", text.strip().upper())
    if not found:
        raise InvalidArgument(f"a size must be a whole number of bytes, perhaps with K, M or G; got {text!r}")
    return int(found[1]) * UNITS[found[2]]


def sizes(least_bytes: int, most_bytes: int, factor: int) -> list[int]:
    """least_bytes, then factor times as many, up to most_bytes.

    Raises:
        InvalidArgument: none, or no end.
    """
    if not 0 < least_bytes <= most_bytes:
        raise InvalidArgument(
            f"sizes must be positive, the first (-b) not above the last (-e); got {least_bytes} and {most_bytes} bytes"
        )
    if factor < 2:
        raise InvalidArgument(f"the factor between sizes (-f) must be 2 or more, got {factor}")
    found = [least_bytes]
    while found[-1] * factor <= most_bytes:
        found.append(found[-1] * factor)
    return found


def device_type_of(asked: Literal["cpu", "cuda"] | None) -> Literal["cpu", "cuda"]:
    """What is asked for; without a wish "cuda" where one is visible, else "cpu"."""
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def at_least(least: int, **options: int) -> None:
    """Raise InvalidArgument unless each of these options, `issue_rounds` for --issue-rounds, is `least` or more."""
    for name, value in options.items():
        if value < least:
            raise InvalidArgument(f"--{name.replace('_', '-')} must be {least} or more, got {value}")


def require_writable(path: Path | None) -> None:
    """Find out on rank 0 whether a file can be written; it is left as it is. Collective on the default group.

    Raises:
        InvalidArgument: it cannot; on all ranks, with the reason on rank 0, which prints it.
    """
    why = ""
    if path is not None and dist.get_rank() == 0:
        there = path.exists()
        try:
            path.open("ab").close()
            if not there:
                path.unlink()
        except OSError as error:
            why = f": {error.strerror}"
    if over_ranks([float(bool(why))])[0]:
        raise InvalidArgument(f"{path} cannot be written{why}; nothing was measured")


def open_ranks(device_type: Literal["cpu", "cuda"] | None, how_to_start: str = HOW_TO_START) -> torch.device:
    """Join the default group from the environment that torchrun sets; this rank's device.

    CPU tensors go over gloo, CUDA tensors over NCCL, in one group.

    Args:
        device_type: "cpu" or "cuda"; "cuda" where one is visible if None.
        how_to_start: a command, for the error.

    Raises:
        InvalidArgument: not started by torchrun, or fewer devices than ranks; alike on all ranks of the host.
    """
    if "RANK" not in os.environ:
        raise InvalidArgument(f"RANK is not set: start it on every rank, for instance `{how_to_start}`")
    if device_type_of(device_type) == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    local, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.device_count() < ranks:
        raise InvalidArgument(
            f"{ranks} ranks on this host need {ranks} CUDA devices, {torch.cuda.device_count()} are visible; "
            "start fewer ranks, or give --device cpu"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def machine(device: torch.device) -> dict[str, Any]:
    """What figures of this machine must be read with: devices, versions, cores and how busy they were."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = re.findall(r"model name\s*: (.*)", info.read_text(encoding="utf-8"))
        cpu = models[0] if models else cpu
    facts = {
        "host_cpu": cpu,
        "host_cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "frame_format": FORMAT_VERSION,
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["driver"] = _driver()
        facts["cuda"] = torch.version.cuda
        nccl_version: Any = torch.cuda.nccl.version
        facts["nccl"] = ".".join(map(str, nccl_version()))
    else:
        facts["gpu"] = None
    return facts


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zipccl bench`."""
    parser.add_argument(
        "-b", "--min-bytes", default="4K", metavar="SIZE", help="first size, e.g. 4K (default %(default)s)"
    )
    parser.add_argument("-e", "--max-bytes", default="64M", metavar="SIZE", help="last size (default %(default)s)")
    parser.add_argument("-f", "--factor", type=int, default=4, help="between sizes (default %(default)s)")
    parser.add_argument("-o", "--op", nargs="+", default=["all"], choices=[*OPERATIONS, "all"], help="(default all)")
    parser.add_argument("-d", "--dtype", default="bfloat16", choices=list(DTYPES), help="(default %(default)s)")
    parser.add_argument("-n", "--iterations", type=int, default=20, help="timed calls a size (default %(default)s)")
    parser.add_argument("-w", "--warmups", type=int, default=5, help="calls before them (default %(default)s)")
    parser.add_argument("--sigma", type=float, default=0.02, help="of the data, N(0, sigma^2) (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the data (default %(default)s)")
    parser.add_argument("--compress", default="auto", choices=COMPRESS, help="the policy (default %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda if one is visible)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write machine, options and rows there")


# The table

_BLOCK = ("time", "spread", "algbw", "busbw", "#wrong")
_LEFT, _MIDDLE = "{:>14} {:>12} {:>12} {:>8} {:>5}", "{:>10} {:>9} {:>8} {:>8} {:>7}"


def headings() -> list[str]:
    """The lines above the rows."""
    block = len(_MIDDLE.format(*_BLOCK))
    left = len(_LEFT.format(*[""] * 5))
    return [
        f"#{'':{left - 1}}  {'out-of-place':^{block}}  {'in-place':^{block}}",
        "#"
        + _LEFT.format("op", "size", "count", "type", "redop")[1:]
        + f"  {_MIDDLE.format(*_BLOCK)}  {_MIDDLE.format(*_BLOCK)} {'ratio':>7} decision",
        "#"
        + _LEFT.format("", "(B)", "(elements)", "", "")[1:]
        + f"  {_MIDDLE.format('(us)', '(us)', '(GB/s)', '(GB/s)', '')}" * 2,
    ]


def line(row: dict[str, Any]) -> str:
    """A row of the table; N/A where torch has no such call."""

    def block(figures: dict[str, Any] | None) -> str:
        if figures is None:
            return _MIDDLE.format(*["N/A"] * 5)
        return _MIDDLE.format(
            f"{figures['time_us']:.1f}",
            f"{figures['spread_us']:.1f}",
            f"{figures['algbw_gb_s']:.3f}",
            f"{figures['busbw_gb_s']:.3f}",
            figures["wrong"],
        )

    left = _LEFT.format(row["op"], row["size_bytes"], row["count"], row["dtype"], row["redop"])
    return f"{left}  {block(row['out_of_place'])}  {block(row['in_place'])} {row['ratio']:7.3f} {row['decision']}"


# The sweep


@dataclass(frozen=True)
class Sweep:
    """What is the same for all rows."""

    comm: Communicator
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    iterations: int
    warmups: int
    sigma: float
    seed: int

    def row(self, operation: Operation, count: int) -> dict[str, Any]:
        """Measure and check one size of one operation; collective, the same on all ranks."""
        n = operation.input_words(count, self.world_size)

        def input_of(rank: int) -> torch.Tensor:
            return draw(self.seed, rank, n, self.dtype, self.sigma, self.device)

        size_bytes = operation.size_bytes(count, self.dtype, self.world_size)
        wanted = expected(operation, self.rank, self.world_size, input_of)
        mine = input_of(self.rank)
        blocks: dict[str, dict[str, Any] | None] = {"out_of_place": None, "in_place": None}
        before = books(self.comm, operation)
        for placement in operation.placements:
            trial = Trial(operation, placement, mine, self.rank, self.world_size)
            times = self._time(trial)
            trial.reset()
            trial.call(self.comm)
            [wrong] = over_ranks([count_wrong(trial.output, wanted)])
            time_us = statistics.median(times)
            algbw = size_bytes / time_us / 1e3
            blocks[placement] = {
                "time_us": time_us,
                "spread_us": spread(times),
                "algbw_gb_s": algbw,
                "busbw_gb_s": algbw * operation.busbw_factor(self.world_size),
                "wrong": int(wrong),
            }
        ratio, decision = since(books(self.comm, operation), before)
        return {
            "op": operation.name,
            "size_bytes": size_bytes,
            "count": count,
            "dtype": str(self.dtype).removeprefix("torch."),
            "redop": "sum" if operation.sums else "none",
            **blocks,
            "ratio": ratio,
            "decision": decision,
        }

    def _time(self, trial: Trial) -> list[float]:
        """Microseconds of each timed call, on the rank for which it took longest."""
        times = []
        for number in range(self.warmups + self.iterations):
            trial.reset()
            meet(self.device)
            took = timed_us(lambda: trial.call(self.comm), self.device)
            if number >= self.warmups:
                times.append(took)
        return slowest(times)


def books(comm: Communicator, operation: Operation) -> list[float]:
    """What a Communicator's books say of an operation so far; collective, and after all that was called is settled.

    Returns:
        Raw and sent bytes of all ranks; and of the root's calls, how many were compressed and how many native.
    """
    comm.barrier()
    entries = comm.stats().get(operation.method, {})
    totals = [entries.get(key, 0.0) for key in ("raw_bytes", "sent_bytes")]
    calls = [entries.get(key, 0.0) if dist.get_rank() == ROOT else 0.0 for key in ("compressed", "native")]
    return over_ranks([*totals, *calls])


def since(now: Sequence[float], before: Sequence[float]) -> tuple[float, str]:
    """Ratio (raw ÷ sent bytes) and decision of the calls between two looks at the books."""
    raw, sent, coded, native = (a - b for a, b in zip(now, before, strict=True))
    decision = "compressed" if coded else "native"
    if coded and native:  # "auto" decides call by call
        decision = f"compressed {coded:.0f} of {coded + native:.0f}"
    return raw / sent if sent else 1.0, decision


def run(options: argparse.Namespace) -> int:
    """Run a sweep on all ranks; prints on rank 0, each row as soon as it is measured.

    Returns:
        Exit status: 1 if an element was wrong, else 0.

    Raises:
        InvalidArgument: what the options ask for cannot be done; alike on all ranks.
        ZipcclError: a collective failed; alike on all ranks.
    """
    chosen = list(OPERATIONS) if "all" in options.op else list(dict.fromkeys(options.op))
    sweep_bytes = sizes(parse_bytes(options.min_bytes), parse_bytes(options.max_bytes), options.factor)
    if options.iterations < 1 or options.warmups < 0:
        raise InvalidArgument(
            f"-n must be 1 or more and -w not negative, got {options.iterations} and {options.warmups}"
        )
    if not (math.isfinite(options.sigma) and options.sigma >= 0):
        raise InvalidArgument(f"--sigma must be finite and not negative, got {options.sigma}")
    device = open_ranks(options.device)
    rank, world_size, dtype = dist.get_rank(), dist.get_world_size(), DTYPES[options.dtype]
    if sweep_bytes[0] < world_size * dtype.itemsize:
        raise InvalidArgument(
            f"the first size (-b) must be {world_size * dtype.itemsize} bytes or more, an element a rank; "
            f"got {sweep_bytes[0]}"
        )
    require_writable(options.json)
    comm = Communicator(policy=Policy(compress=options.compress))
    sweep = Sweep(
        comm, rank, world_size, device, dtype, options.iterations, options.warmups, options.sigma, options.seed
    )
    rows: list[dict[str, Any]] = []
    facts = machine(device)

    def say(*lines: str) -> None:
        if rank == 0:
            print(*lines, sep="\n", flush=True)

    say(
        f"# zipccl bench: {world_size} ranks, {facts['gpu'] or 'cpu'} ({'nccl' if facts['gpu'] else 'gloo'}), torch "
        f"{facts['torch']}, compress={options.compress}, N(0, {options.sigma:g}^2) of seed {options.seed}, "
        f"{options.iterations} calls after {options.warmups}",
        "# time: median over the calls, each on its slowest rank; spread: third quartile - first; "
        "algbw, busbw: of raw bytes",
        *headings(),
    )
    for name in chosen:
        operation = OPERATIONS[name]
        for size_bytes in sweep_bytes:
            rows.append(sweep.row(operation, operation.count(size_bytes, dtype, world_size)))
            say(line(rows[-1]))
    wrong = sum(block["wrong"] for row in rows for block in (row["out_of_place"], row["in_place"]) if block)
    say(f"# wrong elements: {wrong}")
    if rank == 0 and options.json:
        asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
        report = {"machine": facts, "world_size": world_size, "options": asked, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    comm.close()
    dist.destroy_process_group()
    return 1 if wrong else 0
