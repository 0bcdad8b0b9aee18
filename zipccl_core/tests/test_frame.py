"""Sizes, header and mixing functions of a frame."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zipccl_core import FORMAT_VERSION, FrameHeader, frame, max_frame_bytes, static_bytes
from zipccl_core.errors import CorruptFrame, InvalidArgument, TruncatedFrame, UnsupportedFrame, ZipcclError
from zipccl_core.frame import mix64, pack_header, parse_header, weight

EDGES = [0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 92, 93, 94, 8191, 8192, 8193, 16384, 16385, 131072, 131073, 1_000_003]


def naive_sizes(n: int, dtype: str) -> tuple[int, int]:
    """static_bytes and max_frame_bytes summed block by block."""
    blocks = [min(8192, n - start) for start in range(0, n, 8192)]
    records = [m + 3 * ((m + 7) // 8) for m in blocks]
    static = 128 + (8 * len(blocks) + 127) // 128 * 128 + sum((r + 127) // 128 * 128 for r in records)
    spill = sum(max(0, 2 * m - r) for m, r in zip(blocks, records, strict=True))
    return static, static + spill + (2 * n if dtype == "float32" else 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sizes_are_the_sums_of_the_law(dtype: str) -> None:
    for n in [*range(600), *EDGES]:
        assert (static_bytes(n), max_frame_bytes(n, dtype)) == naive_sizes(n, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_frame_exceeds_raw_bytes_by_at_most_8_a_block_and_512(dtype: str) -> None:
    for n in [*range(9000), *EDGES, (1 << 31) + 1, (1 << 48) - 1]:
        raw_bytes = n * frame.ELEMENT_BYTES[dtype]
        assert max_frame_bytes(n, dtype) <= raw_bytes + 8 * frame.n_blocks(n) + 512


def test_sizes_beyond_2_to_the_31_are_exact() -> None:
    n = (1 << 31) + 1
    assert static_bytes(n) == 128 + 8 * (1 << 18) + 128 + (1 << 18) * 11264 + 128
    assert max_frame_bytes(n) == static_bytes(n) + (1 << 18) * 5120
    assert max_frame_bytes(n, "float32") == max_frame_bytes(n) + 2 * n
    assert static_bytes((1 << 48) - 1) == 128 + 8 * (1 << 35) + (1 << 35) * 11264


@pytest.mark.parametrize("n", [-1, 1 << 48, 1 << 64])
def test_sizes_refuse_n_out_of_range(n: int) -> None:
    with pytest.raises(InvalidArgument, match=str(n)):
        static_bytes(n)
    with pytest.raises(InvalidArgument, match=str(n)):
        max_frame_bytes(n)


def test_dtype_is_a_torch_dtype_or_its_name() -> None:
    assert max_frame_bytes(9, torch.float32) == max_frame_bytes(9, "float32")
    assert max_frame_bytes(9, torch.bfloat16) == max_frame_bytes(9)
    for dtype in (torch.float16, "float64", None):
        with pytest.raises(InvalidArgument, match="bfloat16 or float32"):
            max_frame_bytes(9, dtype)


def test_mix64_is_the_published_finalizer() -> None:
    """The first outputs of splitmix64 seeded with 1234567, as published with it."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    states = [(1234567 + (i + 1) * 0x9E3779B97F4A7C15) % (1 << 64) for i in range(4)]
    assert [mix64(state) for state in states] == published


def test_weights_of_a_block_are_distinct_odd_and_32_bits() -> None:
    weights = [weight(k) for k in range(8192)]
    assert len(set(weights)) == 8192
    assert all(w % 2 == 1 and 0 < w < 1 << 32 for w in weights)


def headers() -> st.SearchStrategy[FrameHeader]:
    def build(n: int, dtype: str, extra: float, digest: int, escapes: float, codebook: list[int]) -> FrameHeader:
        low, high = static_bytes(n), max_frame_bytes(n, dtype)
        size = low + int(extra * (high - low))
        return FrameHeader(dtype, n, size, digest, int(escapes * n), tuple(sorted(codebook)))

    unit = st.floats(0, 1)
    book = st.lists(st.integers(0, 255), min_size=7, max_size=7, unique=True)
    return st.builds(
        build, st.integers(0, (1 << 48) - 1), st.sampled_from(["bfloat16", "float32"]), unit,
        st.integers(0, (1 << 64) - 1), unit, book,
    )  # fmt: skip


@given(headers())
def test_header_round_trips(header: FrameHeader) -> None:
    packed = pack_header(header)
    assert len(packed) == 128
    assert parse_header(packed, header.frame_bytes) == header


@given(headers(), st.integers(0, 128 * 8 - 1))
def test_header_with_a_flipped_bit_is_refused(header: FrameHeader, bit: int) -> None:
    packed = bytearray(pack_header(header))
    packed[bit // 8] ^= 1 << bit % 8
    wanted = UnsupportedFrame if 32 <= bit < 48 else CorruptFrame
    with pytest.raises(wanted):
        parse_header(packed, header.frame_bytes)


@given(st.binary(min_size=0, max_size=300))
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    with pytest.raises(ZipcclError):
        parse_header(data)


def test_header_says_what_follows_from_it() -> None:
    header = FrameHeader("float32", 8193, 11648 + 100, 7, 100, (1, 2, 3, 4, 5, 6, 7))
    assert header.version == FORMAT_VERSION == 1
    assert (header.static_bytes, header.dynamic_bytes, header.raw_bytes) == (11648, 100, 4 * 8193)
    assert header.bits_per_word == 8 * 11748 / 8193
    empty = dataclasses.replace(header, n_words=0, frame_bytes=128, escapes=0)
    assert empty.bits_per_word != empty.bits_per_word


def test_header_alone_is_enough_if_the_buffer_is_long_enough() -> None:
    packed = pack_header(FrameHeader("bfloat16", 5, 384, 0, 0, (1, 2, 3, 4, 5, 6, 7)))
    assert parse_header(packed, 384).n_words == 5
    with pytest.raises(TruncatedFrame, match="Frame_Bytes is 384"):
        parse_header(packed, 383)
