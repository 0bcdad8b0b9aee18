"""How fast and how small: the CUDA codec beside a device copy and nvCOMP's ANS, over sizes and kinds of data.

    python benchmarks/codec.py [--quick] [--out benchmarks/results]

Prints a table, writes codec_<gpu>.json and draws codec_<gpu>.png. Needs one GPU and matplotlib; with the wheels
nvidia-nvcomp-cu13 and nvidia-libnvcomp-cu13 it also measures nvCOMP, without them it says so and leaves its rows out.

How it measures. Every figure is a median over rounds; a round times each operation once, in turn, so that what changes
over time changes all of them. An operation is timed by two events around calls over rotating sets of buffers (at least
four, and more than the L2 holds up to 2^26 words), enqueued while the device is still busy with a delay, so that the
host's own time does not count: the figure is that of back-to-back work on one stream. nvCOMP works on a stream of its
own and waits for the device in each call, so it is timed by the host's clock, and so is the copy beside it.
`launch_us` is the host's time for one call of encode.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.collectives import commit  # noqa: E402
from conformance.record import sources_sha256  # noqa: E402
from fixtures import tensors as fixture_tensors  # noqa: E402
from zipccl_core import Codebook, max_frame_bytes  # noqa: E402
from zipccl_core.codec.cuda import jit  # noqa: E402
from zipccl_core.codec.cuda.decode import decode_frames  # noqa: E402
from zipccl_core.codec.cuda.decode_reduce import decode_reduce  # noqa: E402
from zipccl_core.codec.cuda.encode import encode_frames  # noqa: E402
from zipccl_core.codec.cuda.stats import measure  # noqa: E402

SIZES_LOG2 = (16, 18, 20, 22, 24, 26, 28)
SIGMAS = (0.02, 1e-3, 1.0)
ROTATE_BYTES = 512 << 20  # of raw words: several times the L2
DELAY_CYCLES_A_CALL = 250_000
NVCOMP_BLOCK = 1 << 18

# What must be reached on one H200, N(0, 0.02^2): words -> (encode/copy, decode/copy).
TARGETS = {1 << 28: (1.20, 1.00), 1 << 26: (1.35, 1.10), 1 << 24: (1.80, 1.40)}
REDUCE_TARGETS = {2: 1.4, 8: 1.8}


def machine() -> dict[str, str]:
    """GPU, driver, versions and commit."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    run = lambda *c: subprocess.run(c, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()  # noqa: E731
    import pycuda

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": run(*query).splitlines()[0],
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "pycuda": pycuda.VERSION_TEXT,
        "compiler": jit._nvcc_version(jit.nvcc_path()) if jit.nvcc_path() else jit._nvrtc_version(),
        "python": platform.python_version(),
        "commit": commit(),
        "sources_sha256": sources_sha256(),
    }


def timed(calls: list[Callable[[], Any]]) -> float:
    """Microseconds a call, on the device, back to back."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(DELAY_CYCLES_A_CALL * len(calls))
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / len(calls)


def timed_by_host(calls: list[Callable[[], Any]]) -> float:
    """Microseconds a call, by the host's clock, until the device is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6 / len(calls)


def medians(
    operations: dict[str, list[Callable[[], Any]]], rounds: int, clock: Callable[..., float] = timed
) -> dict[str, float]:
    """Median microseconds of each operation, measured in turn."""
    for calls in operations.values():
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(rounds):
        for name, calls in operations.items():
            times[name].append(clock(calls))
    return {name: statistics.median(values) for name, values in times.items()}


def gaussian(n: int, sigma: float, seed: int) -> torch.Tensor:
    words = torch.empty(n, dtype=torch.bfloat16, device="cuda")
    return words.normal_(0, sigma, generator=torch.Generator(device="cuda").manual_seed(seed))


def tiled(tensor: torch.Tensor, n: int, seed: int) -> torch.Tensor:
    """The tensor again and again, rotated a little, n elements in all."""
    flat = tensor.reshape(-1).cuda().roll(seed * 1009)
    return flat.repeat(-(-n // flat.numel()))[:n].contiguous()


class Nvcomp:
    """nvCOMP's ANS on 16-bit floats."""

    def __init__(self) -> None:
        from nvidia import nvcomp

        self.nvcomp = nvcomp
        self.codec = nvcomp.Codec(algorithm="ANS", data_type="<f2", uncomp_chunk_size=NVCOMP_BLOCK)
        self.version = str(nvcomp.__version__)

    def array(self, words: torch.Tensor) -> Any:
        torch.cuda.synchronize()  # it works on a stream of its own
        return self.nvcomp.as_array(words.view(torch.int16).view(torch.float16))


def load_nvcomp() -> tuple[Nvcomp | None, str]:
    try:
        nvcomp = Nvcomp()
        array = nvcomp.array(gaussian(1 << 16, 0.02, 0))
        nvcomp.codec.decode(nvcomp.codec.encode(array))
        return nvcomp, nvcomp.version
    except Exception as error:  # whatever keeps it from working here is told in the result
        return None, f"not measured: {type(error).__name__}: {error}"


def rows_of(
    n: int, data: str, make: Callable[[int], torch.Tensor], codebook: Codebook | None, rounds: int, peer: Nvcomp | None
) -> list[dict[str, Any]]:
    """Measure one size of one kind of data: our row, and the peer's."""
    first = make(0)
    raw_bytes = first.numel() * first.element_size()
    copies = 4 if n > 1 << 26 else max(4, min(32, -(-ROTATE_BYTES // raw_bytes)))
    sets = 2 if n > 1 << 26 else copies
    words = [first] + [make(seed) for seed in range(1, sets)]
    book = codebook or measure([first]).fitted().codebook()
    frames = [torch.empty(max_frame_bytes(n, first.dtype), dtype=torch.uint8, device="cuda") for _ in range(sets)]
    out = [torch.empty_like(first) for _ in range(sets)]
    for w, f, o in zip(words, frames, out, strict=True):
        encode_frames([w], [book], [f])
        header = decode_frames([f], [o]).check()[0]
        assert header is not None
        if not torch.equal(o.view(torch.uint8), w.view(torch.uint8)):
            raise RuntimeError(f"{data}, {n} words: decoded words differ")

    def each(call: Callable[[int], Any]) -> list[Callable[[], Any]]:
        return [lambda i=i: call(i % sets) for i in range(copies)]

    def terms(ranks: int, i: int) -> list[torch.Tensor]:
        return [frames[(i + r) % sets] for r in range(ranks)]

    operations = {
        "copy": each(lambda i: out[i].copy_(words[i])),
        "encode": each(lambda i: encode_frames([words[i]], [book], [frames[i]])),
        "decode": each(lambda i: decode_frames([frames[i]], [out[i]])),
        "stats": each(lambda i: measure([words[i]])),
    }
    # R frames of their own, so that no rank's frame is in the cache because another read it
    many = [frames[i] if i < sets else frames[i % sets].clone() for i in range(8)] if n <= 1 << 28 else frames
    for ranks in REDUCE_TARGETS:
        operations[f"reduce_{ranks}"] = each(
            lambda i, ranks=ranks: decode_reduce([many[(i * ranks + r) % len(many)] for r in range(ranks)], out[i])
        )
    us = medians(operations, rounds)
    begin = time.perf_counter()
    for _ in range(20):
        encode_frames([words[0]], [book], [frames[0]])
    launch_us = (time.perf_counter() - begin) / 20 * 1e6
    torch.cuda.synchronize()

    bandwidth = 2 * raw_bytes / us["copy"]
    row: dict[str, Any] = {
        "codec": "zipccl",
        "scheme": "fast",
        "n_words": n,
        "dtype": str(first.dtype).removeprefix("torch."),
        "data": data,
        "bits_per_word": header.bits_per_word,
        "escape_share": header.escapes / n,
        "buffer_sets": sets,
        "copy_us": us["copy"],
        "copy_gb_per_s": bandwidth / 1e3,
        "encode_us": us["encode"],
        "decode_us": us["decode"],
        "stats_us": us["stats"],
        "launch_us": launch_us,
        "encode_over_copy": us["encode"] / us["copy"],
        "decode_over_copy": us["decode"] / us["copy"],
        "stats_over_encode": us["stats"] / us["encode"],
    }
    for ranks in REDUCE_TARGETS:
        floor_us = (ranks * header.frame_bytes + raw_bytes) / bandwidth
        row[f"decode_reduce_{ranks}_us"] = us[f"reduce_{ranks}"]
        row[f"decode_reduce_{ranks}_over_bytes"] = us[f"reduce_{ranks}"] / floor_us
    rows = [row]
    if peer and first.dtype == torch.bfloat16:
        arrays = [peer.array(w) for w in words]
        coded = [peer.codec.encode(a) for a in arrays]
        sizes = int(coded[0].buffer_size)
        theirs = medians(
            {
                "copy": operations["copy"],
                "encode": each(lambda i: peer.codec.encode(arrays[i])),
                "decode": each(lambda i: peer.codec.decode(coded[i])),
            },
            max(3, rounds // 3),
            timed_by_host,
        )
        rows.append(
            {
                "codec": "nvcomp-ans",
                "scheme": "<f2",
                "n_words": n,
                "dtype": "bfloat16",
                "data": data,
                "bits_per_word": 8 * sizes / n,
                "copy_us": theirs["copy"],
                "encode_us": theirs["encode"],
                "decode_us": theirs["decode"],
                "encode_over_copy": theirs["encode"] / theirs["copy"],
                "decode_over_copy": theirs["decode"] / theirs["copy"],
            }
        )
    return rows


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must be reached beside what was."""
    ours = {(r["n_words"], r["data"]): r for r in rows if r["codec"] == "zipccl"}
    found = []

    def add(what: str, limit: float, came: float) -> None:
        found.append({"what": what, "limit": limit, "measured": came, "reached": came <= limit})

    for n, (encode, decode) in TARGETS.items():
        row = ours.get((n, "N(0,0.02^2)"))
        if row:
            add(f"encode/copy at {n} words", encode, row["encode_over_copy"])
            add(f"decode/copy at {n} words", decode, row["decode_over_copy"])
    if row := ours.get((1 << 28, "N(0,0.02^2)")):
        for ranks, limit in REDUCE_TARGETS.items():
            add(f"decode-reduce over its bytes, R={ranks}", limit, row[f"decode_reduce_{ranks}_over_bytes"])
        add("statistics over encode at 2^28 words", 0.05, row["stats_over_encode"])
    small = [r["stats_us"] for r in rows if r["codec"] == "zipccl" and r["n_words"] < 1 << 26]
    if small:
        add("statistics below 2^26 words, us", 8.0, max(small))
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'codec':11} {'data':26} {'words':>7} {'bits':>6} {'copy us':>8} {'enc/copy':>8} {'dec/copy':>8} {'red2':>5} "
        f"{'red8':>5} {'stats us':>8} {'launch us':>9}"
    ]
    for r in rows:
        log = r["n_words"].bit_length() - 1
        lines.append(
            f"{r['codec']:11} {r['data'][:26]:26} {f'2^{log}':>7} {r['bits_per_word']:6.2f} {r['copy_us']:8.1f} "
            f"{r['encode_over_copy']:8.2f} {r['decode_over_copy']:8.2f} "
            f"{r.get('decode_reduce_2_over_bytes', float('nan')):5.2f} "
            f"{r.get('decode_reduce_8_over_bytes', float('nan')):5.2f} {r.get('stats_us', float('nan')):8.1f} "
            f"{r.get('launch_us', float('nan')):9.1f}"
        )
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(16, 5), constrained_layout=True)
    for axis, key, title in ((axes[0], "encode", "encode"), (axes[1], "decode", "decode")):
        for codec in ("zipccl", "nvcomp-ans"):
            chosen = [r for r in result["rows"] if r["codec"] == codec and r["data"] == "N(0,0.02^2)"]
            if chosen:
                axis.plot(
                    [r["n_words"] for r in chosen], [r[f"{key}_over_copy"] for r in chosen], marker="o", label=codec
                )
        limits = {n: pair[key == "decode"] for n, pair in TARGETS.items()}
        axis.scatter(limits.keys(), limits.values(), marker="_", s=400, color="black", label="must reach")
        axis.set(xscale="log", yscale="log", xlabel="words", ylabel="time ÷ time of a device copy", title=title)
        axis.set_xscale("log", base=2)
        axis.grid(True, which="both", alpha=0.3)
        axis.legend()
    largest = max(r["n_words"] for r in result["rows"])
    chosen = [r for r in result["rows"] if r["codec"] == "zipccl" and r["n_words"] == largest]
    labels = [r["data"] for r in chosen]
    places = range(len(chosen))
    axes[2].barh([p + 0.2 for p in places], [r["encode_over_copy"] for r in chosen], height=0.4, label="encode")
    axes[2].barh([p - 0.2 for p in places], [r["decode_over_copy"] for r in chosen], height=0.4, label="decode")
    for p, r in zip(places, chosen, strict=True):
        axes[2].text(0.02, p, f"{r['bits_per_word']:.2f} bits", va="center", fontsize=7, color="white")
    axes[2].set_yticks(list(places), labels, fontsize=7)
    axes[2].set(xlabel="time ÷ time of a device copy", title=f"kinds of data, 2^{largest.bit_length() - 1} words")
    axes[2].legend()
    figure.suptitle(f"{result['machine']['gpu']}, driver {result['machine']['driver']}")
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="N(0, 0.02^2) alone, and no peer")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/codec.py: no CUDA device")
    jit.warm()
    peer, peer_version = (None, "not measured: --quick") if options.quick else load_nvcomp()
    kinds: list[tuple[str, Callable[[int, int], torch.Tensor], Codebook | None]] = [
        (f"N(0,{sigma:g}^2)", lambda n, seed, sigma=sigma: gaussian(n, sigma, seed), Codebook.gaussian(sigma))
        for sigma in (SIGMAS[:1] if options.quick else SIGMAS)
    ]
    if not options.quick:
        for kind, names in fixture_tensors.by_kind().items():
            tensor = fixture_tensors.load(names[-1])
            kinds.append((f"{kind}: {names[-1]}", lambda n, seed, tensor=tensor: tiled(tensor, n, seed), None))
    rows: list[dict[str, Any]] = []
    for data, make, codebook in kinds:
        for log in SIZES_LOG2:
            try:
                words = lambda seed, log=log, make=make: make(1 << log, seed)  # noqa: E731
                rows += rows_of(1 << log, data, words, codebook, options.rounds, peer)
            except torch.OutOfMemoryError as error:
                raise SystemExit(f"{data}, 2^{log} words: {error}") from error
        torch.cuda.empty_cache()
    result = {
        "machine": {**machine(), "nvcomp": peer_version},
        "resident_blocks": jit.RESIDENT_BLOCKS["sm_90"],
        "stages": jit.STAGES,
        "targets": targets(rows),
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    name = "codec_" + result["machine"]["gpu"].lower().replace("nvidia ", "").replace(" ", "_")
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, options.out / f"{name}.png")
    print(table(rows))
    for t in result["targets"]:
        print(f"{'reached' if t['reached'] else 'MISSED ':7} {t['what']}: {t['measured']:.3f}, limit {t['limit']}")
    print(json.dumps(result["machine"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
