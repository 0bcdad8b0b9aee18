"""How fast is the CPU codec on one core, next to a memory copy and to zstd?

    python benchmarks/codec_cpu.py [--rounds 15] [--log2-words 24]

One run measures everything in turn, round after round, so that all share what the machine does meanwhile. Rates are of
raw bytes; every call writes to memory that has been written before. Writes benchmarks/results/codec_cpu.json.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before the imports below read it

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rich
import torch
import zstandard
from rich.table import Table

from zipccl_core import FORMAT_VERSION, Codebook, decode, encode, max_frame_bytes, read_header

RESULT = Path(__file__).parent / "results" / "codec_cpu.json"
SIGMA = 0.02


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def commit() -> str:
    """The commit that is checked out, marked if the codec differs from it."""
    root = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    changed = git(
        "status", "--porcelain", "--", "zipccl_core/codec/cpu.py", "zipccl_core/frame.py", "zipccl_core/codebook.py"
    )
    return git("rev-parse", "HEAD") + (" and changes" if changed else "")


def cases(words: torch.Tensor) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """What to time by name, and the bytes that each codec makes of the words; every result is checked once."""
    raw = words.view(torch.uint8)
    codebook = Codebook.gaussian(SIGMA)
    copied = torch.full_like(raw, 0xA5)
    frame = torch.full((max_frame_bytes(words.numel(), words.dtype),), 0xA5, dtype=torch.uint8)
    back = torch.full_like(words, float("nan"))
    encode(words, codebook, out=frame)
    frame_bytes = read_header(frame).frame_bytes
    decode(frame, out=back)

    data = raw.numpy().tobytes()
    compressor = zstandard.ZstdCompressor(level=1)
    decompressor = zstandard.ZstdDecompressor()
    compressed = memoryview(bytearray(len(data) + len(data) // 128 + 1024))
    restored = memoryview(bytearray(len(data)))
    zstd_bytes = read_all(compressor.stream_reader(data, size=len(data)), compressed)
    read_all(decompressor.stream_reader(compressed[:zstd_bytes]), restored)

    if not torch.equal(back.view(torch.uint8), raw) or restored != data:
        raise RuntimeError("a codec did not give back what it was given")
    return {
        "memory copy": lambda: copied.copy_(raw),
        "zipccl encode": lambda: encode(words, codebook, out=frame),
        "zipccl decode": lambda: decode(frame, out=back),
        "zstd -1 compress": lambda: read_all(compressor.stream_reader(data, size=len(data)), compressed),
        "zstd -1 decompress": lambda: read_all(decompressor.stream_reader(compressed[:zstd_bytes]), restored),
    }, {"zipccl": frame_bytes, "zstd -1": zstd_bytes}


def read_all(reader: Any, out: memoryview) -> int:
    """Read a stream into memory; returns its bytes."""
    filled = 0
    while count := reader.readinto(out[filled:]):
        filled += count
    return filled


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            if number:
                seconds[name].append(elapsed)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--log2-words", type=int, default=24)
    options = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)

    n = 1 << options.log2_words
    draw = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    bf16 = (draw * SIGMA).to(torch.bfloat16)
    report: dict[str, Any] = {
        "question": "MB/s of raw bytes, one core",
        "cpu": cpu_model(),
        "core": core,
        "load_average_at_start": os.getloadavg()[0],
        "versions": {
            "format": FORMAT_VERSION,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "zstandard": zstandard.__version__,
        },
        "commit": commit(),
        "sigma": SIGMA,
        "n_words": n,
        "rounds": options.rounds,
        "inputs": {},
    }
    for title, words in {"bfloat16": bf16, "float32 widened from bfloat16": bf16.float()}.items():
        calls, sizes = cases(words)
        raw_bytes = words.numel() * words.element_size()
        table = Table(title=f"{title}, N(0, {SIGMA}²), {n} words, {raw_bytes / 1e6:.0f} MB, {cpu_model()}")
        for column in ("", "median MB/s", "slowest", "fastest", "ratio"):
            table.add_column(column, justify="left" if not column else "right")
        rates = {}
        for name, seconds in measure(calls, options.rounds).items():
            median, slowest, fastest = statistics.median(seconds), max(seconds), min(seconds)
            rates[name] = {
                "median_mb_s": round(raw_bytes / median / 1e6, 1),
                "slowest_mb_s": round(raw_bytes / slowest / 1e6, 1),
                "fastest_mb_s": round(raw_bytes / fastest / 1e6, 1),
            }
            ratio = next((raw_bytes / size for codec, size in sizes.items() if name.startswith(codec)), 1.0)
            table.add_row(name, *(f"{rate:.0f}" for rate in rates[name].values()), f"{ratio:.3f}")
        report["inputs"][title] = {
            "raw_bytes": raw_bytes,
            "compressed_bytes": sizes,
            "ratio": {codec: round(raw_bytes / size, 4) for codec, size in sizes.items()},
            "rates": rates,
        }
        rich.print(table)
    report["load_average_at_end"] = os.getloadavg()[0]
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
