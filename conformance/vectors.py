"""Golden and broken frames from fixtures/v1, for any codec.

A missing file, folder or case is an error, never a skip: a suite that found no vectors would prove nothing.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parents[1] / "fixtures" / "v1"
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class ValidCase:
    """Elements and codebook give exactly this frame, and this frame gives the elements.

    Attributes:
        topic: the file it is in.
        name: a fact; unique.
        section: of docs/FORMAT.md.
        flags: keys of `notes()`, which say what kind of bug the case catches.
        dtype: "bfloat16" or "float32".
        n: elements.
        codebook: 7 exponents, ascending.
        elements: little-endian patterns, 2·n or 4·n bytes.
        frame: Frame_Bytes bytes.
    """

    topic: str
    name: str
    section: str
    flags: tuple[str, ...]
    dtype: str
    n: int
    codebook: tuple[int, ...]
    elements: bytes
    frame: bytes


@dataclass(frozen=True)
class InvalidCase:
    """One thing is wrong with this buffer, and decoding it must end in this error.

    Attributes:
        topic, name, section, flags: as above; the name says what is wrong.
        dtype, n: of the sound frame `base` that it was made from; its own header may say otherwise.
        error: "TruncatedFrame", "CorruptFrame" or "UnsupportedFrame".
        frame: the whole buffer; it may be empty.
    """

    topic: str
    name: str
    section: str
    flags: tuple[str, ...]
    base: str
    dtype: str
    n: int
    error: str
    frame: bytes


@functools.cache
def notes() -> dict[str, str]:
    """What each flag of a case means."""
    return dict(_index()["notes"])


@functools.cache
def valid_cases() -> tuple[ValidCase, ...]:
    """Every case of fixtures/v1/valid, in order.

    Raises:
        FileNotFoundError, ValueError: a file is missing, or does not hold what the index and its hashes say.
    """
    cases = []
    for topic, case in _cases("valid"):
        elements = _unpack(case, "elements", case["n"] * ELEMENT_BYTES[case["dtype"]], ELEMENT_BYTES[case["dtype"]])
        frame = _unpack(case, "frame", case["frame_bytes"])
        cases.append(
            ValidCase(
                topic,
                case["name"],
                case["section"],
                tuple(case["flags"]),
                case["dtype"],
                case["n"],
                tuple(case["codebook"]),
                elements,
                frame,
            )
        )
    return tuple(cases)


@functools.cache
def invalid_cases() -> tuple[InvalidCase, ...]:
    """Every case of fixtures/v1/invalid, in order; raises as valid_cases does."""
    cases = []
    for topic, case in _cases("invalid"):
        frame = _unpack(case, "frame", case["buffer_bytes"])
        cases.append(
            InvalidCase(
                topic,
                case["name"],
                case["section"],
                tuple(case["flags"]),
                case["base"],
                case["dtype"],
                case["n"],
                case["error"],
                frame,
            )
        )
    return tuple(cases)


def _index() -> dict[str, Any]:
    index: dict[str, Any] = json.loads((VECTORS / "index.json").read_text(encoding="utf-8"))
    return index


def _cases(kind: str) -> list[tuple[str, dict[str, Any]]]:
    counts: dict[str, int] = _index()[kind]
    on_disk = {path.stem for path in (VECTORS / kind).glob("*.json")}
    if on_disk != set(counts):
        raise FileNotFoundError(f"{VECTORS / kind}: the index lists {sorted(counts)}, the folder has {sorted(on_disk)}")
    found = []
    for topic, count in counts.items():
        cases = json.loads((VECTORS / kind / f"{topic}.json").read_text(encoding="utf-8"))["cases"]
        if len(cases) != count:
            raise ValueError(f"{VECTORS / kind / topic}.json: the index says {count} cases, the file has {len(cases)}")
        found += [(topic, case) for case in cases]
    return found


def _unpack(case: dict[str, Any], key: str, size: int, planes: int = 2) -> bytes:
    """The data of a case: base64 of zlib of byte planes, checked against its size and hash."""
    packed = zlib.decompress(base64.b64decode(case[key], validate=True))
    if len(packed) != size:
        raise ValueError(f"{case['name']}: {key} must have {size} bytes, got {len(packed)}; the file is damaged")
    data, at = bytearray(size), 0
    for i in range(planes):
        count = len(range(i, size, planes))
        data[i::planes] = packed[at : at + count]
        at += count
    came = hashlib.sha256(data).hexdigest()
    if came != case[f"{key}_sha256"]:
        raise ValueError(f"{case['name']}: {key}_sha256 must be {case[f'{key}_sha256']}, got {came}")
    return bytes(data)
