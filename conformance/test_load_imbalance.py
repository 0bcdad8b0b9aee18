"""Loads as experts of an MoE see them: who sends how much to whom, and whose words compress how well, is uneven."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conformance.exercise import (
    DTYPES,
    FURTHER,
    IN_PARTS,
    OPERATIONS,
    configurations,
    exercise,
    inputs_of_all,
    supported,
)
from conformance.matrices import FOLDER, NAMES, imbalance, load, parse
from conformance.oracle import check_output, misaligned, poisoned, tensor_of
from conformance.plugin import World
from conformance.strategies import patterns, rng_of

pytestmark = pytest.mark.operation("all_to_all_single")

every_matrix = pytest.mark.parametrize("matrix", NAMES)


def route(world: World, comm: Any, sends: list[list[int]], dtype: str, kind: Callable[[int], str], what: str) -> float:
    """One all_to_all_single of sends[i][j] bytes from rank i to rank j, checked bit for bit; its seconds."""
    me, size = world.rank, world.world_size
    itemsize = DTYPES[dtype].itemsize
    counts = [[n_bytes // itemsize for n_bytes in row] for row in sends]
    data = [patterns(kind(i), sum(row), i, dtype=dtype) for i, row in enumerate(counts)]
    starts = [np.cumsum([0, *row]) for row in counts]
    receives = [counts[i][me] for i in range(size)]
    want = np.concatenate([data[i][starts[i][me] : starts[i][me + 1]] for i in range(size)])
    out = poisoned(len(want), DTYPES[dtype], world.device)
    mine = misaligned(tensor_of(data[me], DTYPES[dtype], world.device))
    began = time.monotonic()
    comm.all_to_all_single(out.tensor, mine, receives, counts[me])
    seconds = time.monotonic() - began
    check_output(out, want, f"{what}: all_to_all_single of {dtype}, {receives} elements, on rank {me}")
    return seconds


def told_by_all(world: World, comm: Any, seconds: float) -> dict[str, float]:
    """Maximum and imbalance over ranks: the mean alone would hide the one rank that all wait for."""
    mine = comm.stats() if world.subject.capabilities.decides else {"raw_bytes": 0, "sent_bytes": 0}
    told = world.exchange((mine["raw_bytes"], mine["sent_bytes"], seconds))
    raw, sent, times = (list(column) for column in zip(*told, strict=True))
    return {
        "max_raw_bytes": max(raw),
        "raw_imbalance": imbalance(raw),
        "max_sent_bytes": max(sent),
        "sent_imbalance": imbalance(sent),
        "max_us": 1e6 * max(times),
    }


@every_matrix
@pytest.mark.proves("LOAD-1", "LOAD-2", "LOAD-5")
@pytest.mark.gpu
def test_bytes_of_a_matrix_reach_the_ranks_they_are_for(world, record_row, matrix):
    """In every mode: there, and back again as in the combine behind a dispatch."""
    sends = load(matrix, world.world_size)
    back = [list(column) for column in zip(*sends, strict=True)]
    for mode in world.subject.capabilities.modes:
        comm = world.communicator(mode)
        for dtype in DTYPES:
            seconds = route(world, comm, sends, dtype, lambda i: "gaussian", f"{matrix}, {mode}")
            if dtype == "bfloat16":
                record_row("load imbalance", matrix=matrix, mode=mode, **told_by_all(world, comm, seconds))
            route(world, comm, back, dtype, lambda i: "gaussian", f"{matrix} back, {mode}")


@pytest.mark.requires("decides")
@pytest.mark.proves("LOAD-4")
def test_the_rank_that_sends_most_is_told_apart_from_the_mean(world, record_row):
    """What a rank counts is what it sent, and not a share of what all sent."""
    mode = "always" if "always" in world.subject.capabilities.modes else ""
    comm = world.communicator(mode)
    size = world.world_size
    sends = [[(40_000 if i == 0 else 4_000) for _ in range(size)] for i in range(size)]
    told = told_by_all(world, comm, route(world, comm, sends, "bfloat16", lambda i: "gaussian", "one loud rank"))
    wanted = imbalance([sum(row) for row in sends])
    assert abs(told["raw_imbalance"] - wanted) < 0.01, f"raw bytes must be {wanted:.3f} imbalanced, are {told}"
    if size > 1:
        assert told["sent_imbalance"] > 0.8 * wanted, f"the loud rank sent most: {told}"
    record_row("load imbalance", matrix="one loud rank", mode=mode or "default", **told)


COMPRESSIBILITY: dict[str, Callable[[int, int], str]] = {
    "one_zeros_one_random": lambda rank, size: {0: "zeros", size - 1: "all_patterns"}.get(rank, "gaussian"),
    "one_random": lambda rank, size: "all_patterns" if rank == 0 else "one_exponent",
    "one_zeros": lambda rank, size: "zeros" if rank == 0 else "all_patterns",
}


@pytest.mark.parametrize("shares", COMPRESSIBILITY)
@pytest.mark.proves("LOAD-3", "LOAD-5")
@pytest.mark.gpu
def test_ranks_whose_words_compress_unevenly(world, record_row, shares):
    size = world.world_size
    sends = [[40_000] * size for _ in range(size)]
    for mode in configurations(world):
        comm = world.communicator(mode)
        what = f"{shares}, {mode}"
        seconds = route(world, comm, sends, "bfloat16", lambda i: COMPRESSIBILITY[shares](i, size), what)
        record_row("load imbalance", matrix=shares, mode=mode, **told_by_all(world, comm, seconds))


@pytest.mark.operation("every")
@pytest.mark.proves("LOAD-3")
def test_one_rank_zeros_and_one_random_bits_through_every_operation(world, mode):
    comm = world.communicator(mode)
    for operation in supported(world, (*OPERATIONS, *FURTHER)):
        n = 12_000 * (world.world_size if operation in IN_PARTS else 1)
        inputs = inputs_of_all(operation, "gaussian", 12_000, world.world_size, "bfloat16")
        inputs[0] = np.zeros(n, np.uint16)
        inputs[-1] = rng_of("random bits", n).integers(0, 1 << 16, n).astype(np.uint16)
        exercise(world, comm, operation, inputs, "bfloat16", root=world.world_size - 1)


@pytest.mark.proves("LOAD-2")
def test_loads_that_change_from_call_to_call(world, mode):
    """Nothing of one call's sizes may be left for the next; all are in flight in turn on one Communicator."""
    comm = world.communicator(mode)
    for name, dtype in itertools.product((*NAMES, *reversed(NAMES)), ("bfloat16",)):
        route(world, comm, load(name, world.world_size), dtype, lambda i: "two_gaussians", name)


# ------------------------------------------------------------------------------------------------- the matrices


@pytest.mark.proves("LOAD-6")
def test_every_file_has_the_trait_it_is_named_for():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(NAMES)
    for size in (2, 4, 8, 12):
        matrices = {name: load(name, size) for name in NAMES}
        received = {name: [sum(column) for column in zip(*m, strict=True)] for name, m in matrices.items()}
        sent = {name: [sum(row) for row in m] for name, m in matrices.items()}
        assert len({b for row in matrices["uniform"] for b in row}) == 1
        assert imbalance(received["hot_rank"]) > 1.5
        assert received["hot_rank"][0] == max(received["hot_rank"])
        assert sent["silent_sender"][1] == 0 < received["silent_sender"][1]
        assert received["silent_receiver"][1] == 0 < sent["silent_receiver"][1]
        assert sent["zero_row_and_column"][1] == received["zero_row_and_column"][1] == 0 < sum(sent["uniform"])
        assert all((b > 0) == (i % 8 == j % 8) for i, r in enumerate(matrices["diagonal"]) for j, b in enumerate(r))
        assert received["zipf"][0] > 1.3 * received["zipf"][1]
        assert imbalance([b for row in matrices["log_normal"] for b in row]) > 1.2
        assert sum(sent["all_zero"]) == 0


@pytest.mark.proves("LOAD-6")
@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "1 2\n3\n", "1 2\n", "1 2\n3 4\n5 6\n", "1 -2\n3 4\n", "1 2.5\n3 4\n", "1 x\n3 4\n"]
)
def test_a_text_that_is_no_matrix_is_refused(text):
    with pytest.raises(ValueError, match=r"matrix.*wanted"):
        parse(text)


@pytest.mark.proves("LOAD-6")
def test_white_space_commas_and_comments_are_read():
    assert parse("# who to whom\n\n 1,\t2 # first\n3 , 4\n") == [[1, 2], [3, 4]]
    assert imbalance([4, 0, 0, 0]) == 4.0
    assert imbalance([2, 2]) == imbalance([0, 0]) == 1.0
