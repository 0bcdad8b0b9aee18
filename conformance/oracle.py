"""What is right, computed independently of every subject: the ordered sum, and comparisons of bits.

The ordered sum: acc = term of rank 0 (not 0 + it: −0 stays −0); acc = fl32(acc + term_r) for r = 1 … N−1; PREMUL_SUM:
term = fl32(x · f); AVG: fl32(acc ÷ N); one rounding to nearest even at the end; every NaN is 0x7FC0 (float32:
0x7FC00000). It is written here in integers and float64, whose numbers cover every float32 subnormal as a normal one, so
that a thread that flushes subnormals to zero cannot change it: 53 bits are at least 2·24 + 2, so an operation on two
float32 rounded to float64 and then to float32 is rounded as if once; the last rounding is done on integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

NAN16 = 0x7FC0
NAN32 = 0x7FC00000
POISON_BYTE = 0xA5
GUARD_ELEMENTS = 24
MISALIGNED_ELEMENTS = 1
U16 = np.uint16
U32 = np.uint32

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


# ------------------------------------------------------------------------------------------------- the ordered sum


def widen16(patterns: np.ndarray) -> np.ndarray:
    """bf16 patterns as float32 patterns (exact: low halves are zero)."""
    return patterns.astype(U32) << U32(16)


def to_float64(p: np.ndarray) -> np.ndarray:
    """The exact value of every float32 pattern as float64, in integers: no float32 subnormal is ever an operand."""
    p = p.astype(np.uint64)
    sign = (p >> np.uint64(31)) << np.uint64(63)
    exponent = (p >> np.uint64(23)) & np.uint64(0xFF)
    mantissa = p & np.uint64(0x7FFFFF)
    normal = ((exponent + np.uint64(1023 - 127)) << np.uint64(52)) | (mantissa << np.uint64(29))
    special = (np.uint64(0x7FF) << np.uint64(52)) | (mantissa << np.uint64(29))
    bits = np.where(exponent == 255, special, normal)
    value = (bits | sign).view(np.float64)
    small = mantissa.astype(np.float64) * 2.0**-149  # zero and subnormals: an integer times a power of two
    small = (small.view(np.uint64) | sign).view(np.float64)
    return np.where(exponent == 0, small, value)


def to_pattern32(x: np.ndarray) -> np.ndarray:
    """float64 rounded to nearest even float32, as patterns, in integers; every NaN is 0x7FC00000."""
    bits = np.ascontiguousarray(x, dtype=np.float64).view(np.uint64)
    sign = ((bits >> np.uint64(63)) << np.uint64(31)).astype(U32)
    exponent = ((bits >> np.uint64(52)) & np.uint64(0x7FF)).astype(np.int64) - 1023
    mantissa = bits & np.uint64((1 << 52) - 1)
    full = mantissa | np.uint64(1 << 52)
    # Bits of the significand that fall off: 29 for a normal float32, more below 2^-126, all of them below 2^-151.
    drop = np.clip(29 + np.maximum(0, -126 - exponent), 29, 54).astype(np.uint64)
    kept = full >> drop
    rest = full & ((np.uint64(1) << drop) - np.uint64(1))
    half = np.uint64(1) << (drop - np.uint64(1))
    up = (rest > half) | ((rest == half) & ((kept & np.uint64(1)) == 1))
    kept = kept + up.astype(np.uint64)
    # A carry out of the significand runs into the exponent field, which is what it should do.
    biased = np.maximum(exponent + 127, 1) - 1
    magnitude = kept + (biased.astype(np.uint64) << np.uint64(23))
    magnitude = np.where(exponent < -151, np.uint64(0), magnitude)
    infinity = np.uint64(0x7F800000)
    magnitude = np.where(exponent > 127, infinity, np.minimum(magnitude, infinity))
    out = magnitude.astype(U32) | sign
    return np.where((exponent == 1024) & (mantissa != 0), U32(NAN32), out)


def round16(p: np.ndarray) -> np.ndarray:
    """float32 patterns rounded to nearest even bf16 patterns, in integers; every NaN is 0x7FC0."""
    p = p.astype(np.uint64)
    up = np.uint64(0x7FFF) + ((p >> np.uint64(16)) & np.uint64(1))
    rounded = ((p + up) >> np.uint64(16)).astype(U16)
    nan = (p & np.uint64(0x7FFFFFFF)) > np.uint64(0x7F800000)
    return np.where(nan, U16(NAN16), rounded)


def ordered_sum(terms: Sequence[np.ndarray], op: str = "sum", factor: float = 1.0) -> np.ndarray:
    """The ordered sum of the terms of all ranks, in rank order.

    Args:
        terms: one array a rank, equal shapes, uint16 (bf16 patterns) or uint32 (float32 patterns).
        op: "sum", "avg" or "premul_sum".
        factor: of premul_sum; rounded to float32 first.

    Returns:
        Patterns of the terms' dtype.
    """
    narrow = terms[0].dtype == U16
    assert all(t.dtype == terms[0].dtype and t.shape == terms[0].shape for t in terms), "terms differ in kind"
    patterns = [widen16(t) if narrow else t.astype(U32) for t in terms]
    with np.errstate(all="ignore"):
        if op == "premul_sum":
            f = to_float64(to_pattern32(np.array([factor], np.float64)))
            patterns = [to_pattern32(to_float64(p) * f) for p in patterns]
        acc = patterns[0]
        for p in patterns[1:]:
            acc = to_pattern32(to_float64(acc) + to_float64(p))
        if op == "avg":
            acc = to_pattern32(to_float64(acc) / np.float64(len(terms)))
        elif op not in ("sum", "premul_sum"):
            raise ValueError(f"ordered_sum: op must be sum, avg or premul_sum, got {op!r}")
    nan = (acc & U32(0x7FFFFFFF)) > U32(0x7F800000)
    return round16(acc) if narrow else np.where(nan, U32(NAN32), acc)


# ------------------------------------------------------------------------------------------------------- tensors


def tensor_of(patterns: np.ndarray, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor with exactly these bits: no number is computed with."""
    assert patterns.itemsize == dtype.itemsize, f"{patterns.dtype} patterns do not fit {dtype}"
    signed = np.ascontiguousarray(patterns).view(f"i{patterns.itemsize}" if patterns.itemsize > 1 else "u1")
    return torch.from_numpy(signed.copy()).view(dtype).to(device)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is on the CPU, else a copy there, of what the current stream leaves in it.

    By way of pinned memory: while cudaMemcpyAsync copies to any other, as in Tensor.cpu(), it waits for the stream
    under a lock of the driver's, and no other thread of this process can start anything. If the stream waits for a
    peer, and the peer in its own copy for what another thread of this process was to start, nobody gets on.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return copy


def patterns_of(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a tensor as unsigned integers of its element size, in its logical order."""
    bits = on_host(tensor.detach().contiguous().view(_BITS[tensor.element_size()])).numpy()
    return np.asarray(bits).view(_UNSIGNED[tensor.element_size()])


def bits_of(x: torch.Tensor | np.ndarray) -> np.ndarray:
    """patterns_of for tensors; arrays as they are."""
    return patterns_of(x) if isinstance(x, torch.Tensor) else x


def assert_same_bits(got: torch.Tensor | np.ndarray, want: torch.Tensor | np.ndarray, what: str) -> None:
    """Fail unless shapes and bits are equal; says how many differ, where the first is, and both patterns."""
    g, w = bits_of(got), bits_of(want)
    assert g.shape == w.shape, f"{what}: shape wanted {w.shape}, got {g.shape}"
    assert g.dtype == w.dtype, f"{what}: element bits wanted {w.dtype}, got {g.dtype}"
    if np.array_equal(g, w):
        return
    differ = np.flatnonzero(g.reshape(-1) != w.reshape(-1))
    digits = 2 * g.itemsize
    shown = ", ".join(
        f"[{i}] wanted 0x{int(w.reshape(-1)[i]):0{digits}X} got 0x{int(g.reshape(-1)[i]):0{digits}X}"
        for i in differ[:4]
    )
    raise AssertionError(
        f"{what}: {differ.size} of {g.size} elements differ, the first at {differ[0]}, the last at {differ[-1]}: "
        f"{shown}{', …' if differ.size > 4 else ''}"
    )


@dataclass(frozen=True)
class Poisoned:
    """An output nobody has written yet.

    Attributes:
        tensor: what to pass as the output; filled with a pattern that cannot be an answer by chance, and misaligned.
        storage: the whole of it, with guards before and behind.
        first: index in `storage` of the output's first element.
    """

    tensor: torch.Tensor
    storage: torch.Tensor
    first: int


def poisoned(
    shape: int | tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    misaligned_elements: int = MISALIGNED_ELEMENTS,
) -> Poisoned:
    """An output of this shape: poison inside, guard elements beyond both ends, at a misaligned storage offset.

    Args:
        misaligned_elements: storage offset of the first element past a 16-element boundary.
    """
    shape = (shape,) if isinstance(shape, int) else shape
    n = int(np.prod(shape, dtype=np.int64))
    guard = -(-GUARD_ELEMENTS // 16) * 16
    first = guard + misaligned_elements
    storage = torch.full(((first + n + guard) * dtype.itemsize,), POISON_BYTE, dtype=torch.uint8, device=device)
    storage = storage.view(dtype)
    return Poisoned(storage[first : first + n].view(shape), storage, first)


def misaligned(tensor: torch.Tensor, elements: int = MISALIGNED_ELEMENTS) -> torch.Tensor:
    """A contiguous copy whose first element lies `elements` past an aligned address."""
    p = poisoned(tuple(tensor.shape), tensor.dtype, tensor.device, elements)
    bits = _BITS[tensor.element_size()]
    p.tensor.view(bits).copy_(tensor.contiguous().view(bits))
    return p.tensor


def check_guards(p: Poisoned, what: str) -> None:
    """Fail if anything before or behind the output was written."""
    raw = p.storage.view(torch.uint8)
    size = p.storage.element_size()
    n = p.tensor.numel()
    for side, part in (("before", raw[: p.first * size]), ("behind", raw[(p.first + n) * size :])):
        written = torch.nonzero(part != POISON_BYTE).flatten().tolist()
        assert not written, f"{what}: {len(written)} bytes {side} the output were written, the first at {written[0]}"


def check_output(p: Poisoned, want: torch.Tensor | np.ndarray, what: str) -> None:
    """assert_same_bits and check_guards."""
    assert_same_bits(p.tensor, want, what)
    check_guards(p, what)


def untouched(p: Poisoned, what: str) -> None:
    """Fail if any byte of the output or around it was written."""
    written = int((p.storage.view(torch.uint8) != POISON_BYTE).sum())
    assert not written, f"{what}: {written} bytes of the output were written, none should be"
