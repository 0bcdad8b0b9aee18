"""A short selection of every kernel, for compute-sanitizer: sizes, kinds, alignments, and every way to break a frame.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m zipccl_core.tests.sanitize_cuda

Without torch's cache every tensor is an allocation of its own, so that one byte beyond a buffer is seen. Ends with 0
and "sanitized" if all results are right too.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from conformance.oracle import ordered_sum, patterns_of, tensor_of
from conformance.strategies import patterns, rng_of
from conformance.vectors import invalid_cases
from zipccl_core import Codebook, max_frame_bytes
from zipccl_core.codec import cpu
from zipccl_core.codec.cuda.decode import decode_frames
from zipccl_core.codec.cuda.decode_reduce import decode_reduce
from zipccl_core.codec.cuda.encode import encode_frames
from zipccl_core.codec.cuda.stats import measure
from zipccl_core.errors import ZipcclError

BLOCK = 8192
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
BOOKS = (Codebook.gaussian(0.02), Codebook.given([0, 3, 17, 118, 120, 127, 255]))


def frame_of(elements: np.ndarray, codebook: Codebook) -> np.ndarray:
    out = np.zeros(max_frame_bytes(elements.size, "bfloat16" if elements.itemsize == 2 else "float32"), np.uint8)
    return out[: cpu.encode_into(elements, codebook, out).frame_bytes]


def check_sound(elements: np.ndarray, dtype: str, codebook: Codebook, offset: int) -> None:
    words = torch.zeros(elements.size + offset, dtype=DTYPES[dtype], device="cuda")
    words[offset:] = tensor_of(elements, DTYPES[dtype]).cuda()
    words = words[offset:]
    frame = torch.zeros(max_frame_bytes(elements.size, dtype), dtype=torch.uint8, device="cuda")
    encode_frames([words], [codebook], [frame])
    want = frame_of(elements, codebook)
    assert np.array_equal(frame.cpu().numpy()[: want.size], want)
    exact = torch.from_numpy(want.copy()).cuda()
    out = torch.zeros(elements.size + offset, dtype=DTYPES[dtype], device="cuda")[offset:]
    decode_frames([exact], [out]).check()
    assert np.array_equal(patterns_of(out), elements)
    total = torch.zeros_like(words)
    decode_reduce([exact, words, exact], total, average=True).check()
    assert np.array_equal(patterns_of(total), ordered_sum([elements] * 3, "avg"))
    if elements.size:
        assert np.array_equal(measure([words]).histogram().cpu().numpy(), cpu.exponent_histogram(elements))


def check_broken(frames: list[np.ndarray], n: int, dtype: str) -> None:
    buffers = [torch.from_numpy(f.copy()).cuda() for f in frames if f.size >= 128]
    out = [torch.zeros(n, dtype=DTYPES[dtype], device="cuda") for _ in buffers]
    assert (decode_frames(buffers, out).rows[:, 0] != 0).all()
    for buffer in buffers[:4]:
        try:
            decode_reduce([buffer, buffer], out[0]).check()
        except ZipcclError:
            continue
        raise AssertionError("a broken frame was summed")


def main() -> int:
    torch.cuda.init()
    for dtype in DTYPES:
        for n in (0, 1, 33, BLOCK - 1, BLOCK, 2 * BLOCK + 77):
            check_sound(patterns("gaussian", n, dtype=dtype), dtype, BOOKS[n % 2], n % 3)
        for kind in ("zeros", "escapes_over_stored_rule", "escapes_at_stored_rule", "heavy_tail"):
            check_sound(patterns(kind, BLOCK + 100, dtype=dtype), dtype, BOOKS[0], 0)
        check_sound(patterns("gaussian", 500 * BLOCK, dtype="bfloat16"), "bfloat16", BOOKS[0], 0)
        for kind in ("gaussian", "escapes_over_stored_rule"):
            sound = frame_of(patterns(kind, BLOCK + 40, dtype=dtype), BOOKS[0])
            rng = rng_of("sanitize", kind, dtype)
            flipped = []
            for place in [*rng.integers(0, 8 * 300, 30), *rng.integers(0, 8 * sound.size, 30)]:
                flipped.append(sound.copy())
                flipped[-1][place // 8] ^= 1 << (place % 8)
            check_broken(flipped, BLOCK + 40, dtype)
            noise = [sound.copy() for _ in range(8)]
            for frame in noise:
                frame[128:] = rng.integers(0, 256, frame.size - 128)
            check_broken(noise, BLOCK + 40, dtype)
            check_broken([sound[:size] for size in (128, 300, sound.size - 1)], BLOCK + 40, dtype)
        cases = [c for c in invalid_cases() if c.dtype == dtype]
        for n in sorted({c.n for c in cases}):
            check_broken([np.frombuffer(c.frame, np.uint8) for c in cases if c.n == n], n, dtype)
    print("sanitized")
    return 0


if __name__ == "__main__":
    sys.exit(main())
