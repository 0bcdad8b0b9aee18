"""The same bytes in every run and on every rank; the same words in every configuration and however a tensor is cut."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from conformance.exercise import (
    DTYPES,
    FURTHER,
    IN_PARTS,
    OPERATIONS,
    claimed,
    configurations,
    exercise,
    inputs_of_all,
    issue,
    supported,
)
from conformance.oracle import misaligned, patterns_of, tensor_of
from conformance.plugin import World
from conformance.strategies import BLOCK_WORDS, GAUSSIAN_EXPONENTS, KINDS, patterns

ALL = (*OPERATIONS, *FURTHER)


def fingerprint(tensor: torch.Tensor) -> str:
    return hashlib.sha256(patterns_of(tensor).tobytes()).hexdigest()


@pytest.mark.requires("codec")
@pytest.mark.proves("SAME-1")
def test_every_rank_writes_the_same_frame(world):
    """Ranks are processes of their own: nothing of a process, an address or a hash seed may be in a frame."""
    codec = world.subject.codec()
    assert codec is not None
    frames = hashlib.sha256()
    for kind, dtype, n in itertools.product(KINDS, DTYPES, (0, 1, 33, 2 * BLOCK_WORDS + 5)):
        words = misaligned(tensor_of(patterns(kind, n, dtype=dtype), DTYPES[dtype]), world.rank % 8)
        frame = codec.encode(words, GAUSSIAN_EXPONENTS)
        assert fingerprint(codec.encode(words, GAUSSIAN_EXPONENTS)) == fingerprint(frame), f"{kind}: encoded again"
        frames.update(patterns_of(frame).tobytes())
    told = world.exchange(frames.hexdigest())
    assert len(set(told)) == 1, f"the ranks wrote different frames of the same words: {told}"


@pytest.mark.requires("decides")
@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("SAME-2")
@pytest.mark.gpu
def test_the_same_call_sends_as_many_bytes_every_time_on_every_rank(world, mode):
    """Each rank has the same words, so each must send as much, in this call and in the same call again."""
    comms = [world.communicator(mode) for _ in range(2)]
    inputs = [patterns("heavy_tail", 20_000)] * world.world_size
    sent = []
    for comm in (*comms, comms[0]):
        before = comm.stats()["sent_bytes"]
        exercise(world, comm, "all_gather_into_tensor", inputs, "bfloat16")
        sent.append(comm.stats()["sent_bytes"] - before)
    told = world.exchange(sent)
    assert len({n for mine in told for n in mine}) == 1, f"bytes sent by rank, in three equal calls: {told}"


@pytest.mark.parametrize("operation", ALL)
@pytest.mark.proves("SAME-3")
def test_every_configuration_gives_the_same_words(world, operation):
    """Whatever codebook, prefix or threshold: the words, and for a reduction the sum, are those of the oracle."""
    supported(world, [operation])
    for mode in configurations(world):
        comm = world.communicator(mode)
        for kind, dtype in (
            ("two_gaussians", "float32"),
            ("escapes_at_stored_rule", "bfloat16"),
            ("zeros", "bfloat16"),
        ):
            inputs = inputs_of_all(operation, kind, BLOCK_WORDS + 9, world.world_size, dtype)
            exercise(world, comm, operation, inputs, dtype, what=f"({kind}, {mode})")


@pytest.mark.proves("SAME-4")
@pytest.mark.gpu
def test_the_same_call_again_and_again_gives_the_same_bits(world, mode):
    """Reductions without a claim on their order too: whatever it is, it must not change from call to call."""
    comm = world.communicator(mode)
    for operation in claimed(world, ALL):
        inputs = inputs_of_all(operation, "two_gaussians", 3001, world.world_size, "bfloat16")
        seen = set()
        for _ in range(3):
            call = issue(world, comm, operation, inputs, "bfloat16")
            seen.add("".join(fingerprint(out.tensor) for out in call.outs))
        assert len(seen) == 1, f"{operation}: the same call gave {len(seen)} different results"


CUTS: dict[str, list[int]] = {
    "in two": [0, 10_000, 20_011],
    "first word alone": [0, 1, 20_011],
    "last word alone": [0, 20_010, 20_011],
    "at a block": [0, BLOCK_WORDS, 2 * BLOCK_WORDS, 20_011],
    "across blocks": [0, BLOCK_WORDS - 1, BLOCK_WORDS + 1, 20_011],
    "in sevens": list(np.linspace(0, 20_011, 8).astype(int)),
    "with empty pieces": [0, 0, 10_005, 10_005, 20_011, 20_011],
}


def piece_of(operation: str, inputs: list[np.ndarray], begin: int, end: int) -> list[np.ndarray]:
    """The inputs of all ranks cut to elements begin … end of each, or of each rank's part."""
    if operation not in IN_PARTS:
        return [mine[begin:end] for mine in inputs]
    size = len(inputs)
    return [np.concatenate([part[begin:end] for part in np.split(mine, size)]) for mine in inputs]


@pytest.mark.parametrize("operation", ALL)
@pytest.mark.proves("CUT-1", "CUT-2")
def test_a_tensor_cut_into_several_calls_gives_the_same_words(world, operation):
    """Each piece is checked against what the whole gives there, so any cut must give the same."""
    supported(world, [operation])
    n = 20_011
    inputs = inputs_of_all(operation, "two_gaussians", n, world.world_size, "bfloat16")
    for mode in configurations(world):
        comm = world.communicator(mode)
        exercise(world, comm, operation, inputs, "bfloat16", what=f"(whole, {mode})")
        is_default = mode == world.subject.capabilities.modes[0]
        for name in CUTS if is_default else ("across blocks",):
            bounds = CUTS[name]
            calls = [
                issue(
                    world,
                    comm,
                    operation,
                    piece_of(operation, inputs, a, b),
                    "bfloat16",
                    async_op=True,
                    what=f"({name}, {mode})",
                )
                for a, b in itertools.pairwise(bounds)
            ]
            for call in calls:
                call.finish()


@pytest.mark.requires("codec")
@pytest.mark.proves("CUT-2")
def test_frames_of_pieces_decode_to_the_whole(world):
    codec: Any = world.subject.codec()
    words = patterns("all_patterns", 20_011, world.rank)
    for bounds in CUTS.values():
        pieces = [
            patterns_of(codec.decode(codec.encode(tensor_of(words[a:b], torch.bfloat16), GAUSSIAN_EXPONENTS)))
            for a, b in itertools.pairwise(bounds)
        ]
        assert np.array_equal(np.concatenate(pieces), words)


@pytest.mark.requires("ordered_sum")
@pytest.mark.requires(operations="reduce_scatter_tensor")
@pytest.mark.proves("SUM-1", "SAME-4")
def test_sums_do_not_depend_on_how_many_communicators_live(world: World) -> None:
    """The count of other live communicators must not choose an order of summation."""
    inputs = inputs_of_all("reduce_scatter_tensor", "two_gaussians", 3001, world.world_size, "bfloat16")
    for _ in range(3):
        exercise(world, world.communicator(), "reduce_scatter_tensor", inputs, "bfloat16")
