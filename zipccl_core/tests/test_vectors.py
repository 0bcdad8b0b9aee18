"""The vectors of fixtures/v1: both codecs write and read every golden frame, and refuse every broken one as it says."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from conformance.vectors import InvalidCase, ValidCase, invalid_cases, notes, valid_cases
from fixtures import vectorgen
from zipccl_core import Codebook, ZipcclError, decode, errors, max_frame_bytes, static_bytes
from zipccl_core.codec import cpu, reference
from zipccl_core.frame import parse_header

PATTERNS = {"bfloat16": np.dtype("<u2"), "float32": np.dtype("<u4")}
GUARD, GUARD_BYTES = 0xA5, 64


def elements_of(case: ValidCase) -> np.ndarray:
    return np.frombuffer(case.elements, dtype=PATTERNS[case.dtype])


def encode_reference(case: ValidCase) -> bytes:
    return reference.encode(elements_of(case).tolist(), case.dtype, Codebook.given(case.codebook))


def encode_cpu(case: ValidCase) -> bytes:
    capacity = max_frame_bytes(case.n, case.dtype)
    out = np.full(capacity + GUARD_BYTES, GUARD, dtype=np.uint8)
    header = cpu.encode_into(elements_of(case), Codebook.given(case.codebook), out[:capacity])
    assert (out[header.frame_bytes :] == GUARD).all()
    return out[: header.frame_bytes].tobytes()


def decode_reference(frame: bytes, dtype: str, n: int) -> bytes:
    came_dtype, elements = reference.decode(frame)
    return np.array(elements, dtype=PATTERNS[came_dtype]).tobytes()


def decode_cpu(frame: bytes, dtype: str, n: int) -> bytes:
    """Decode into guarded memory of the size that the header asks for, or n if it cannot be read."""
    try:
        header = parse_header(frame)
        dtype, n = header.dtype, header.n_words
    except ZipcclError:
        pass
    size = n * PATTERNS[dtype].itemsize
    memory = np.full(GUARD_BYTES + size + GUARD_BYTES, GUARD, dtype=np.uint8)
    out = memory[GUARD_BYTES : GUARD_BYTES + size]
    try:
        cpu.decode_into(np.frombuffer(frame, dtype=np.uint8), out.view(PATTERNS[dtype]))
    finally:
        assert (memory[:GUARD_BYTES] == GUARD).all()
        assert (memory[GUARD_BYTES + size :] == GUARD).all()
    return out.tobytes()


def decode_tensor(frame: bytes, dtype: str, n: int) -> bytes:
    out = decode(torch.tensor(list(frame), dtype=torch.uint8))
    return out.view(torch.uint8).numpy().tobytes()


ENCODERS = {"reference": encode_reference, "cpu": encode_cpu}
DECODERS = {"reference": decode_reference, "cpu": decode_cpu, "tensor": decode_tensor}


def test_files_are_what_the_generator_writes() -> None:
    assert vectorgen.differences() == []


def test_there_are_enough_cases_and_each_is_explained() -> None:
    assert len(valid_cases()) >= 60
    assert len(invalid_cases()) >= 60
    for case in (*valid_cases(), *invalid_cases()):
        assert set(case.flags) <= set(notes())


@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize("case", valid_cases(), ids=lambda case: case.name)
def test_golden_frame_is_what_the_encoder_writes(case: ValidCase, codec: str) -> None:
    assert ENCODERS[codec](case) == case.frame
    assert static_bytes(case.n) <= len(case.frame) <= max_frame_bytes(case.n, case.dtype)


@pytest.mark.parametrize("codec", DECODERS)
@pytest.mark.parametrize("case", valid_cases(), ids=lambda case: case.name)
def test_golden_frame_decodes_to_its_elements(case: ValidCase, codec: str) -> None:
    assert DECODERS[codec](case.frame, case.dtype, case.n) == case.elements


@pytest.mark.parametrize("codec", DECODERS)
@pytest.mark.parametrize("case", invalid_cases(), ids=lambda case: case.name)
def test_broken_frame_ends_in_its_error(case: InvalidCase, codec: str) -> None:
    with pytest.raises(ZipcclError) as caught:
        DECODERS[codec](case.frame, case.dtype, case.n)
    assert type(caught.value) is getattr(errors, case.error)


def refused_or_same(decoder: Callable[[bytes, str, int], bytes], frame: bytes, case: ValidCase) -> bool:
    """True if refused with a typed error; anything but that or the right elements is a failure."""
    try:
        elements = decoder(frame, case.dtype, case.n)
    except (errors.CorruptFrame, errors.TruncatedFrame, errors.UnsupportedFrame):
        return True
    assert elements == case.elements
    return False


@pytest.mark.parametrize("case", valid_cases(), ids=lambda case: case.name)
def test_no_flipped_bit_is_decoded(case: ValidCase) -> None:
    rng = random.Random(case.name)
    bits = 8 * len(case.frame)
    header, static = range(8 * 128), static_bytes(case.n)
    flips = [rng.randrange(bits) for _ in range(40)] + [rng.choice(header) for _ in range(10)]
    flips += [rng.randrange(8 * static, bits) for _ in range(10)] if len(case.frame) > static else []
    for bit in flips:
        assert refused_or_same(decode_cpu, vectorgen.flip(case.frame, bit), case), f"bit {bit} flipped was not seen"
    for bit in flips[:3] if case.n <= 2000 else []:
        assert refused_or_same(decode_reference, vectorgen.flip(case.frame, bit), case), (
            f"bit {bit} flipped was not seen"
        )


def test_every_bit_of_a_small_frame_matters() -> None:
    for name in ("float32_of_9_elements", "a_block_of_9_words_with_4_escapes_is_stored"):
        (case,) = (case for case in valid_cases() if case.name == name)
        for bit in range(8 * len(case.frame)):
            for decoder in (decode_cpu, decode_reference):
                assert refused_or_same(decoder, vectorgen.flip(case.frame, bit), case), f"{name}: bit {bit}"


def test_every_truncation_of_a_small_frame_is_refused() -> None:
    (case,) = (case for case in valid_cases() if case.name == "float32_of_9_elements")
    for size in range(len(case.frame)):
        for decoder in DECODERS.values():
            with pytest.raises(errors.TruncatedFrame):
                decoder(case.frame[:size], case.dtype, case.n)


def test_bytes_beyond_the_frame_are_ignored() -> None:
    for case in valid_cases()[::9]:
        for tail in (bytes(1), b"\xff" * 200):
            for decoder in DECODERS.values():
                assert decoder(case.frame + tail, case.dtype, case.n) == case.elements


@pytest.mark.parametrize("seed", range(30))
def test_damage_of_many_bytes_is_refused(seed: int) -> None:
    """Bytes overwritten, cut out and exchanged, with a Header_Check that is right again: later checks see it."""
    rng = random.Random(seed)
    cases = [case for case in valid_cases() if 0 < case.n <= 20000]
    for _ in range(20):
        case = rng.choice(cases)
        frame = bytearray(case.frame)
        for _ in range(rng.randrange(1, 4)):
            at, size = rng.randrange(len(frame)), rng.choice((1, 2, 8, 64, 500))
            kind = rng.randrange(4)
            if kind == 0:
                frame[at : at + size] = rng.randbytes(len(frame[at : at + size]))
            elif kind == 1:
                frame[at : at + size] = bytes(len(frame[at : at + size]))
            elif kind == 2:
                del frame[at : at + size]
            else:
                frame[at:at] = frame[rng.randrange(len(frame)) :][:size]
        if len(frame) >= 128 and rng.random() < 0.7:
            frame[120:128] = vectorgen.header_check(bytes(frame[:120]))
        if bytes(frame[: len(case.frame)]) != case.frame:
            assert refused_or_same(decode_cpu, bytes(frame), case)
