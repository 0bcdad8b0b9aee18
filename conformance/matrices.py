"""Who sends how many bytes to whom: matrices in the text format of nccl-tests' all-to-all-v, from conformance/matrices.

One line a sender, one number a receiver, in bytes, separated by white space or commas. Empty lines, and what follows
a `#`, are not read. The files here have 8 ranks; a smaller world uses the top left corner, which shows the same trait,
and a larger one repeats the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "matrices"
NAMES = (
    *("uniform", "hot_rank", "silent_sender", "silent_receiver", "zero_row_and_column"),
    *("diagonal", "zipf", "log_normal", "all_zero"),
)


def parse(text: str, where: str = "matrix") -> list[list[int]]:
    """The matrix of a text: [sender][receiver] → bytes.

    Raises:
        ValueError: not a square of whole numbers that are not negative; says which line.
    """
    rows: list[list[int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = line.partition("#")[0].replace(",", " ").split()
        if not cells:
            continue
        if not all(cell.isdecimal() for cell in cells):
            raise ValueError(f"{where}, line {number}: wanted bytes as whole numbers, got {line.strip()!r}")
        rows.append([int(cell) for cell in cells])
        if len(rows[-1]) != len(rows[0]):
            raise ValueError(f"{where}, line {number}: wanted {len(rows[0])} numbers as before, got {len(rows[-1])}")
    if not rows or len(rows) != len(rows[0]):
        width = len(rows[0]) if rows else 0
        raise ValueError(f"{where}: wanted as many lines as numbers a line, got {len(rows)} lines of {width}")
    return rows


def load(name: str, world_size: int) -> list[list[int]]:
    """The matrix of a file of the folder, for a world of this size."""
    path = FOLDER / f"{name}.txt"
    matrix = parse(path.read_text(encoding="utf-8"), path.name)
    n = len(matrix)
    return [[matrix[i % n][j % n] for j in range(world_size)] for i in range(world_size)]


def imbalance(values: Sequence[float]) -> float:
    """Maximum ÷ mean over ranks: 1 is even, the number of ranks is one rank alone; 1 if there is nothing."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
