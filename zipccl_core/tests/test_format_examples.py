"""Every example in FORMAT.md is run: the law cannot say one thing and the code do another."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zipccl_core import Codebook, max_frame_bytes, static_bytes
from zipccl_core.codec import cpu, reference
from zipccl_core.frame import mix64, weight

FORMAT = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text(encoding="utf-8")
PATTERNS = {"bfloat16": np.uint16, "float32": np.uint32}


def blocks(kind: str) -> list[Any]:
    found = re.findall(rf"^```json {kind}\n(.*?)^```$", FORMAT, re.MULTILINE | re.DOTALL)
    if not found:
        raise LookupError(f"FORMAT.md has no ```json {kind} block")
    return [entry for text in found for entry in json.loads(text)]


EXAMPLES = blocks("example")
FRAMES = blocks("frames")


def full_histogram(histogram: dict[str, int]) -> list[int]:
    return [histogram.get(str(exponent), 0) for exponent in range(256)]


def digest(words: list[int], dtype: str) -> int:
    result = reference.digest(words, dtype)
    assert cpu.digest(np.array(words, dtype=PATTERNS[dtype])) == result
    return result


CALLS: dict[str, Callable[..., Any]] = {
    "static_bytes": static_bytes,
    "max_frame_bytes": max_frame_bytes,
    "mix64": mix64,
    "weight": weight,
    "digest": digest,
    "gaussian": lambda sigma: list(Codebook.gaussian(sigma).exponents),
    "fitted": lambda histogram: list(Codebook.fitted(full_histogram(histogram)).exponents),
    "gaussian_of_histogram": lambda histogram: list(
        Codebook.gaussian_of_histogram(full_histogram(histogram)).exponents
    ),
}


def test_every_call_has_an_example() -> None:
    assert {example["call"] for example in EXAMPLES} == set(CALLS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e['call']}-{json.dumps(e['args'])}")
def test_example_gives_its_result(example: dict[str, Any]) -> None:
    assert set(example) == {"call", "args", "result"}
    assert CALLS[example["call"]](**example["args"]) == example["result"]


def elements_of(example: dict[str, Any]) -> list[int]:
    elements: list[int] = []
    for item in example["words"]:
        pattern, count = (item, 1) if isinstance(item, str) else item
        elements += [int(pattern, 16)] * count
    return elements


def frame_of(example: dict[str, Any]) -> bytes:
    frame = bytearray(example["frame_bytes"])
    for offset, text in example["frame"]:
        data = bytes.fromhex(text)
        assert offset + len(data) <= len(frame)
        assert not any(frame[offset : offset + len(data)]), "two entries for the same bytes"
        frame[offset : offset + len(data)] = data
    return bytes(frame)


def test_worked_frames_are_all_there() -> None:
    assert len(FRAMES) >= 4
    assert len({frame["name"] for frame in FRAMES}) == len(FRAMES)


@pytest.mark.parametrize("example", FRAMES, ids=lambda e: e["name"].replace(" ", "_"))
def test_worked_frame_is_what_both_codecs_write_and_read(example: dict[str, Any]) -> None:
    elements, frame, dtype = elements_of(example), frame_of(example), example["dtype"]
    codebook = Codebook.given(example["codebook"])
    assert reference.encode(elements, dtype, codebook) == frame
    assert reference.decode(frame) == (dtype, elements)

    words = np.array(elements, dtype=PATTERNS[dtype])
    out = np.full(max_frame_bytes(len(elements), dtype), 0xA5, dtype=np.uint8)
    header = cpu.encode_into(words, codebook, out)
    assert out[: header.frame_bytes].tobytes() == frame
    decoded = np.full_like(words, 0xA5A5)
    cpu.decode_into(np.frombuffer(frame, dtype=np.uint8), decoded)
    assert decoded.tolist() == elements
