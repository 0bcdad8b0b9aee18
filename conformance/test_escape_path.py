"""Escapes from none to all, at the edge of the stored rule, and under a codebook that does not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conformance.exercise import (
    DTYPES,
    FURTHER,
    IN_PARTS,
    OPERATIONS,
    REDUCTIONS,
    exercise,
    inputs_of_all,
    needs,
    supported,
)
from conformance.oracle import assert_same_bits, tensor_of
from conformance.plugin import World
from conformance.strategies import (
    BLOCK_WORDS,
    ESCAPE_KINDS,
    GAUSSIAN_EXPONENTS,
    SIGMA,
    STORED_OVER_ESCAPES,
    patterns,
    rng_of,
    with_exponent,
    words_of,
)

RECORD_BYTES = 11264
HEADER_AND_DIRECTORY_BYTES = 128 + 128

EVERY_OPERATION = (*OPERATIONS, *FURTHER)

every_operation = pytest.mark.parametrize("operation", EVERY_OPERATION)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def with_codebooks(world: World) -> list[str]:
    """The default mode, and the variants under which escapes are relative to the codebook of the data here."""
    variants = [v for v in world.subject.capabilities.variants if v in ("fixed_codebook", "no_prefix")]
    return [world.subject.capabilities.modes[0], *variants]


@every_operation
@every_dtype
@pytest.mark.proves("ESC-1")
@pytest.mark.gpu
def test_any_share_of_escapes_goes_through_every_operation(world, operation, dtype):
    needs(world, operation)
    for mode in with_codebooks(world):
        comm = world.communicator(mode)
        for kind in ESCAPE_KINDS:
            inputs = inputs_of_all(operation, kind, 2 * BLOCK_WORDS + 77, world.world_size, dtype)
            exercise(world, comm, operation, inputs, dtype, what=f"({kind}, {mode})")


def gaussians(operation: str, k: int, n: int, world_size: int) -> list[np.ndarray]:
    """Words of all ranks whose sigma is 2^k times that of the fixed codebook."""
    total = n * world_size if operation in IN_PARTS else n
    return [words_of(rng_of("shift", k, rank).normal(0.0, SIGMA * 2.0**k, total)) for rank in range(world_size)]


@pytest.mark.proves("ESC-5")
def test_a_distribution_that_shifts_between_calls_stays_exact(world, mode):
    """Nothing learned from one call may be needed by the next, on either side."""
    operations = supported(world, EVERY_OPERATION)
    comm = world.communicator(mode)
    for operation in operations:
        for k in (0, 3, -3, 20, -20, 0):
            inputs = gaussians(operation, k, 12_000, world.world_size)
            exercise(world, comm, operation, inputs, "bfloat16", what=f"(sigma · 2^{k})")


@every_operation
@pytest.mark.proves("ESC-4")
def test_a_sigma_wrong_by_a_power_of_two_only_costs_bytes(world, operation):
    """The codebook stays that of sigma 0.02, or whatever the mode makes of it."""
    needs(world, operation)
    for mode in with_codebooks(world):
        comm = world.communicator(mode)
        for k in range(-8, 9, 2):
            inputs = gaussians(operation, k, BLOCK_WORDS + 100, world.world_size)
            exercise(world, comm, operation, inputs, "bfloat16", what=f"(sigma · 2^{k}, {mode})")
        if world.subject.capabilities.decides and operation in REDUCTIONS + OPERATIONS:
            stats = comm.stats()
            limit = 1.05 * stats["raw_bytes"] + 2000 * (world.world_size - 1) * 9
            assert stats["sent_bytes"] <= limit, f"{operation}, {mode}: wrong sigmas may cost a little, not {stats}"


@pytest.mark.requires("decides")
@pytest.mark.operation("all_gather_into_tensor")
@pytest.mark.proves("ESC-3")
@pytest.mark.gpu
def test_words_that_do_not_fit_any_codebook_cost_their_raw_size_and_a_little(world):
    world.require(modes="always")
    comm = world.communicator("always")
    n = 1 << 17
    inputs = [rng_of("noise", rank).integers(0, 1 << 16, n).astype(np.uint16) for rank in range(world.world_size)]
    exercise(world, comm, "all_gather_into_tensor", inputs, "bfloat16")
    stats = comm.stats()
    assert stats["raw_bytes"] == 2 * n * (world.world_size - 1)
    assert stats["sent_bytes"] <= stats["raw_bytes"] * 1.001 + 1000 * (world.world_size - 1)


@pytest.mark.requires("decides")
@pytest.mark.operation("all_gather_into_tensor")
@pytest.mark.proves("ESC-7")
@pytest.mark.gpu
def test_gaussian_words_are_sent_in_their_compressed_size(world):
    world.require_peers()
    world.require(modes="always")
    comm = world.communicator("always")
    n = 1 << 18
    inputs = [patterns("gaussian", n, rank) for rank in range(world.world_size)]
    exercise(world, comm, "all_gather_into_tensor", inputs, "bfloat16")
    stats = comm.stats()
    assert stats["sent_bytes"] <= stats["raw_bytes"] * 11.5 / 16
    assert 0.015 * n < stats["escapes"] / (world.world_size - 1) < 0.035 * n


@pytest.mark.requires("decides")
@pytest.mark.operation("reduce_scatter_tensor")
@pytest.mark.proves("ESC-7")
@pytest.mark.gpu
def test_gradients_widened_to_float32_are_sent_without_their_empty_halves(world):
    world.require("ordered_sum", modes="always")
    comm = world.communicator("always")
    n = 1 << 17
    inputs = inputs_of_all("reduce_scatter_tensor", "widened:gaussian", n, world.world_size, "float32")
    exercise(world, comm, "reduce_scatter_tensor", inputs, "float32")
    stats = comm.stats()
    assert stats["sent_bytes"] <= stats["raw_bytes"] * 11.6 / 32


@pytest.mark.requires("decides", variants="auto")
@pytest.mark.operation("all_gather_into_tensor")
@pytest.mark.proves("ESC-8", "ESC-5")
@pytest.mark.gpu
def test_coding_goes_off_where_it_does_not_pay_and_on_again_at_the_same_call_on_all_ranks(world):
    world.require_peers()
    n = 20_000
    comm = world.communicator("auto")
    modes: list[str] = []
    for call, kind in enumerate(["gaussian"] * 2 + ["noise"] * 8 + ["gaussian"] * 10):
        inputs = [
            patterns("gaussian", n, rank, call)
            if kind == "gaussian"
            else rng_of("noise", rank, call).integers(0, 1 << 16, n).astype(np.uint16)
            for rank in range(world.world_size)
        ]
        exercise(world, comm, "all_gather_into_tensor", inputs, "bfloat16", what=f"(call {call}, {kind})")
        modes.append(comm.last_decision.mode)
    assert set(map(tuple, world.exchange(modes))) == {tuple(modes)}, "the ranks decided differently"
    assert modes[:3] == ["compressed"] * 3, "nobody can know that noise does not shrink before it was tried"
    assert modes[3:10].count("native") >= 4, "words that do not shrink are coded on and on"
    assert modes[-2:] == ["compressed"] * 2, "coding is not tried again"
    on = modes.index("compressed", 10)
    assert modes[on:] == ["compressed"] * len(modes[on:]), "it flaps, though words shrink"


# ------------------------------------------------------------------------------------------------------ the codec


def block(escapes: int, m: int = BLOCK_WORDS) -> torch.Tensor:
    rng = rng_of("block", escapes, m)
    exponents = np.full(m, GAUSSIAN_EXPONENTS[3])
    exponents[rng.permutation(m)[:escapes]] = 7
    return tensor_of(with_exponent(exponents, rng), torch.bfloat16)


@pytest.mark.parametrize("escapes", [0, 1, STORED_OVER_ESCAPES - 1, STORED_OVER_ESCAPES])
@pytest.mark.proves("ESC-2")
def test_a_block_up_to_the_rule_costs_a_byte_an_escape(codec, escapes):
    words = block(escapes)
    frame = codec.encode(words, GAUSSIAN_EXPONENTS)
    assert frame.numel() == HEADER_AND_DIRECTORY_BYTES + RECORD_BYTES + escapes
    assert_same_bits(codec.decode(frame), words, f"{escapes} escapes")


@pytest.mark.parametrize("escapes", [STORED_OVER_ESCAPES + 1, BLOCK_WORDS - 1, BLOCK_WORDS])
@pytest.mark.proves("ESC-2", "ESC-3")
def test_a_block_over_the_rule_is_stored_and_costs_no_more(codec, escapes):
    words = block(escapes)
    frame = codec.encode(words, GAUSSIAN_EXPONENTS)
    assert frame.numel() == HEADER_AND_DIRECTORY_BYTES + 2 * BLOCK_WORDS
    assert_same_bits(codec.decode(frame), words, f"{escapes} escapes")


@pytest.mark.parametrize("m", [1, 2, 3, 5, 7, 8, 9, 16, 100, 127, 128, 129, 1000])
@pytest.mark.proves("ESC-2")
def test_the_rule_holds_in_short_blocks(codec, m):
    record = m + 3 * -(-m // 8)
    limit = max(0, 2 * m - record)
    for escapes in sorted({0, min(m, limit), min(m, limit + 1), m}):
        words = block(escapes, m)
        frame = codec.encode(words, GAUSSIAN_EXPONENTS)
        dynamic = escapes if escapes <= limit else limit
        assert frame.numel() == HEADER_AND_DIRECTORY_BYTES + -(-record // 128) * 128 + dynamic, (m, escapes)
        assert_same_bits(codec.decode(frame), words, f"{escapes} escapes of {m}")


@pytest.mark.parametrize("shift", range(-8, 9))
@pytest.mark.proves("ESC-3", "ESC-4")
def test_a_codebook_wrong_by_a_power_of_two_only_costs_bytes(codec, shift):
    words = tensor_of(patterns("gaussian", 3 * BLOCK_WORDS, seed=shift), torch.bfloat16)
    codebook = tuple(e + shift for e in GAUSSIAN_EXPONENTS)
    frame = codec.encode(words, codebook)
    assert frame.numel() <= 2 * words.numel() + 8 * 3 + 512
    assert_same_bits(codec.decode(frame), words, f"codebook shifted by {shift}")


@pytest.mark.proves("ESC-6")
def test_zeros_are_coded_when_the_codebook_holds_exponent_0(codec):
    words = tensor_of(patterns("zeros", BLOCK_WORDS), torch.bfloat16)
    coded = codec.encode(words, (0, 1, 2, 3, 4, 5, 6))
    assert coded.numel() == HEADER_AND_DIRECTORY_BYTES + RECORD_BYTES
    stored = codec.encode(words, GAUSSIAN_EXPONENTS)
    assert stored.numel() == HEADER_AND_DIRECTORY_BYTES + 2 * BLOCK_WORDS
    assert_same_bits(codec.decode(coded), words, "zeros, coded")
    assert_same_bits(codec.decode(stored), words, "zeros, stored")
