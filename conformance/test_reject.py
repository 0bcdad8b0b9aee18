"""A decoder trusts nothing: every broken frame ends in the one kind of error that FORMAT.md 8 names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conformance.oracle import patterns_of, tensor_of
from conformance.strategies import GAUSSIAN_EXPONENTS, patterns, rng_of
from conformance.vectors import InvalidCase, invalid_cases

KINDS = ("TruncatedFrame", "CorruptFrame", "UnsupportedFrame")


def case_id(case: InvalidCase) -> str:
    return f"{case.topic}:{case.name}"


def outcome(codec, buffer: bytes | np.ndarray) -> tuple[str, np.ndarray | None]:
    """The kind of error that decoding ends in, or ("", the patterns)."""
    frame = torch.frombuffer(bytearray(bytes(buffer)), dtype=torch.uint8) if len(buffer) else torch.empty(0).byte()
    try:
        return "", patterns_of(codec.decode(frame))
    except Exception as exc:
        return type(exc).__name__, None


@pytest.mark.parametrize("case", invalid_cases(), ids=case_id)
@pytest.mark.proves("REJECT-1")
def test_a_broken_frame_is_refused_as_the_law_says(codec, case):
    assert outcome(codec, case.frame)[0] == case.error, f"{case.name} (FORMAT.md {case.section})"


@pytest.mark.parametrize("kind", ["gaussian", "escapes_over_stored_rule"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.proves("REJECT-2")
def test_no_flipped_bit_gives_other_words(codec, kind, dtype):
    elements = patterns(kind, 8192 + 40, dtype=dtype)
    torch_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    sound = patterns_of(codec.encode(tensor_of(elements, torch_dtype), GAUSSIAN_EXPONENTS))
    rng = rng_of("flips", kind, dtype)
    places = [*range(0, 8 * 300, 7), *rng.integers(0, 8 * len(sound), 600)]
    for place in places:
        frame = sound.copy()
        frame[place // 8] ^= 1 << (place % 8)
        error, _ = outcome(codec, frame)
        assert error in KINDS, f"bit {place % 8} of byte {place // 8} flipped: got {error or 'words'}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.proves("REJECT-3")
def test_every_truncation_is_found(codec, dtype):
    elements = patterns("gaussian", 100, dtype=dtype)
    torch_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    sound = patterns_of(codec.encode(tensor_of(elements, torch_dtype), GAUSSIAN_EXPONENTS))
    for length in range(len(sound)):
        assert outcome(codec, sound[:length])[0] == "TruncatedFrame", f"{length} of {len(sound)} bytes"


@pytest.mark.proves("REJECT-5")
def test_bytes_behind_a_frame_are_not_part_of_it(codec):
    elements = patterns("gaussian", 1000)
    sound = patterns_of(codec.encode(tensor_of(elements, torch.bfloat16), GAUSSIAN_EXPONENTS))
    error, words = outcome(codec, np.concatenate([sound, rng_of("behind").integers(0, 256, 999).astype(np.uint8)]))
    assert error == ""
    assert np.array_equal(words, elements)


@pytest.mark.proves("REJECT-4")
def test_random_bytes_are_no_frame(codec):
    rng = rng_of("no frame")
    for n in (0, 1, 127, 128, 129, 5000):
        assert outcome(codec, rng.integers(0, 256, n).astype(np.uint8))[0] in KINDS
