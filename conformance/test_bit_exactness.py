"""Lossless means every bit: all patterns, sizes, alignments, kinds of data, and the golden frames."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from conformance.exercise import DTYPES, OPERATIONS, exercise, inputs_of_all, needs
from conformance.oracle import assert_same_bits, check_output, misaligned, patterns_of, poisoned, tensor_of
from conformance.strategies import KINDS, codebooks, in_step, patterns, sizes, words
from conformance.vectors import ValidCase, valid_cases
from fixtures import tensors

every_operation = pytest.mark.parametrize("operation", OPERATIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)

ALL_PATTERNS = 1 << 16


@every_operation
@every_dtype
@pytest.mark.proves("BITS-1")
@pytest.mark.gpu
def test_all_65536_patterns_survive(world, mode, operation, dtype):
    needs(world, operation)
    inputs = inputs_of_all(operation, "all_patterns", ALL_PATTERNS, world.world_size, dtype)
    exercise(world, world.communicator(mode), operation, inputs, dtype)


@every_operation
@every_dtype
@pytest.mark.proves("BITS-2")
@pytest.mark.gpu
def test_every_size_around_bytes_and_blocks(world, mode, operation, dtype):
    needs(world, operation)
    comm = world.communicator(mode)
    for n in sizes():
        exercise(world, comm, operation, inputs_of_all(operation, "gaussian", n, world.world_size, dtype), dtype)


@every_operation
@every_dtype
@pytest.mark.proves("BITS-3")
def test_every_kind_of_data(world, mode, operation, dtype):
    needs(world, operation)
    comm = world.communicator(mode)
    for kind in (*KINDS, *(["widened:gaussian", "widened:zeros"] if dtype == "float32" else [])):
        inputs = inputs_of_all(operation, kind, 9001, world.world_size, dtype)
        exercise(world, comm, operation, inputs, dtype, what=f"({kind})")


@every_operation
@every_dtype
@pytest.mark.proves("BITS-4")
@pytest.mark.gpu
def test_every_alignment_across_a_block_edge(world, operation, dtype):
    needs(world, operation)
    comm = world.communicator()
    for offset in range(8):
        inputs = inputs_of_all(operation, "all_patterns", 8195, world.world_size, dtype, seed=offset)
        exercise(world, comm, operation, inputs, dtype, offset=offset, what=f"(offset {offset})")


@every_operation
@pytest.mark.proves("BITS-1", "BITS-2")
def test_drawn_patterns_survive(world, operation):
    needs(world, operation)
    comm = world.communicator()

    def check(drawn: np.ndarray) -> None:
        inputs = [np.roll(drawn, 3 * rank) for rank in range(world.world_size)]
        if operation != "all_gather_into_tensor":
            inputs = [np.tile(mine, world.world_size) for mine in inputs]
        exercise(world, comm, operation, inputs, "bfloat16")

    in_step(world, words(), check, max_examples=25)


@every_operation
@every_dtype
@pytest.mark.proves("BITS-5")
def test_training_tensors_survive(world, mode, operation, dtype):
    needs(world, operation)
    comm = world.communicator(mode)
    for names in tensors.by_kind().values():
        name = names[-1]
        if tensors.describe(name)["dtype"] != dtype:
            continue
        flat = patterns_of(tensors.load(name)).reshape(-1)
        flat = flat[: len(flat) // world.world_size * world.world_size]
        inputs = [np.roll(flat, 911 * rank) for rank in range(world.world_size)]
        exercise(world, comm, operation, inputs, dtype, what=f"({name})")


@pytest.mark.operation("all_gather_into_tensor")
@pytest.mark.proves("LAYOUT-3")
@pytest.mark.gpu
def test_all_gather_in_place_of_all_patterns(world, mode):
    needs(world, "all_gather_into_tensor")
    n = ALL_PATTERNS
    out = poisoned(n * world.world_size, torch.bfloat16, world.device)
    mine = out.tensor.narrow(0, world.rank * n, n)
    inputs = inputs_of_all("all_gather_into_tensor", "all_patterns", n, world.world_size, "bfloat16")
    mine.view(torch.int16).copy_(tensor_of(inputs[world.rank], torch.bfloat16, world.device).view(torch.int16))
    world.communicator(mode).all_gather_into_tensor(out.tensor, mine)
    check_output(out, np.concatenate(inputs), "in-place all_gather")


@pytest.mark.operation("reduce_scatter_tensor")
@pytest.mark.requires("ordered_sum", "any_layout")
@pytest.mark.proves("LAYOUT-3", "LAYOUT-4")
@pytest.mark.gpu
def test_reduce_scatter_into_the_own_shard_of_its_input(world, mode):
    n = 8200
    inputs = inputs_of_all("reduce_scatter_tensor", "gaussian", n, world.world_size, "bfloat16")
    mine = misaligned(tensor_of(inputs[world.rank], torch.bfloat16, world.device))
    shard = mine.narrow(0, world.rank * n, n)
    world.communicator(mode).reduce_scatter_tensor(shard, mine)
    from conformance.exercise import wanted

    assert_same_bits(shard, wanted("reduce_scatter_tensor", inputs, world.rank), "in-place reduce_scatter")
    before = patterns_of(mine)
    rest = np.delete(np.arange(n * world.world_size), np.arange(world.rank * n, (world.rank + 1) * n))
    assert_same_bits(before[rest], inputs[world.rank][rest], "the other shards of the input")


@pytest.mark.operation("all_to_all_single")
@pytest.mark.requires("any_layout")
@pytest.mark.proves("LAYOUT-3")
@pytest.mark.gpu
def test_all_to_all_onto_its_own_input(world, mode):
    n = 8200
    inputs = inputs_of_all("all_to_all_single", "indexed", n, world.world_size, "bfloat16")
    both = misaligned(tensor_of(inputs[world.rank], torch.bfloat16, world.device))
    world.communicator(mode).all_to_all_single(both, both)
    want = np.concatenate([i[world.rank * n : (world.rank + 1) * n] for i in inputs])
    assert_same_bits(both, want, "all_to_all onto its input")


# ------------------------------------------------------------------------------------------------------ the codec


def case_id(case: ValidCase) -> str:
    return f"{case.topic}:{case.name}"


def elements_of(case: ValidCase) -> torch.Tensor:
    array = np.frombuffer(case.elements, f"<u{DTYPES[case.dtype].itemsize}")
    return tensor_of(array, DTYPES[case.dtype])


@pytest.mark.parametrize("case", valid_cases(), ids=case_id)
@pytest.mark.proves("FRAME-1", "FRAME-2")
def test_a_golden_frame_is_written_and_read(codec, case):
    elements = elements_of(case)
    frame = codec.encode(elements, case.codebook)
    assert hashlib.sha256(patterns_of(frame).tobytes()).hexdigest() == hashlib.sha256(case.frame).hexdigest(), (
        f"{case.name}: the frame must have the {len(case.frame)} bytes of FORMAT.md {case.section}"
    )
    got = codec.decode(torch.frombuffer(bytearray(case.frame), dtype=torch.uint8))
    assert got.dtype == elements.dtype
    assert_same_bits(got, elements, case.name)


@pytest.mark.proves("FRAME-2")
def test_drawn_words_and_codebooks_round_trip(codec):
    from hypothesis import given, settings

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(words(), codebooks())
    def check(drawn: np.ndarray, codebook: tuple[int, ...]) -> None:
        elements = tensor_of(drawn, torch.bfloat16)
        assert_same_bits(codec.decode(codec.encode(elements, codebook)), elements, "round trip")

    check()


@every_dtype
@pytest.mark.proves("FRAME-3")
def test_one_input_gives_one_frame_wherever_it_lies(codec, dtype):
    for kind in ("gaussian", "escapes_over_stored_rule", "all_patterns"):
        elements = tensor_of(patterns(kind, 3 * 8192 + 5, dtype=dtype), DTYPES[dtype])
        first = codec.encode(elements, tuple(range(116, 123)))
        for offset in range(1, 8):
            again = codec.encode(misaligned(elements, offset), tuple(range(116, 123)))
            assert_same_bits(again, first, f"the frame of {kind} at offset {offset}")


@pytest.mark.parametrize("kind", tensors.KINDS)
@pytest.mark.proves("FRAME-2", "FRAME-4")
def test_training_tensors_round_trip_and_their_cost_is_told(codec, record_row, kind):
    for name in tensors.by_kind()[kind]:
        tensor = tensors.load(name)
        flat = tensor.reshape(-1)
        codebook = fitted(patterns_of(flat))
        frame = codec.encode(flat, codebook)
        assert_same_bits(codec.decode(frame), flat, name)
        halves = patterns_of(flat)
        exponents = ((halves >> (7 if halves.itemsize == 2 else 23)) & 0xFF).astype(np.int64)
        record_row(
            "frames",
            kind=kind,
            dtype=str(tensor.dtype).removeprefix("torch."),
            n_words=flat.numel(),
            raw_bytes=flat.numel() * flat.element_size(),
            frame_bytes=frame.numel(),
            escapes=int((~np.isin(exponents, codebook)).sum()),
        )
        assert frame.numel() <= flat.numel() * flat.element_size() + 8 * -(-flat.numel() // 8192) + 512, name


def fitted(halves: np.ndarray) -> tuple[int, ...]:
    """The seven most frequent exponents of 0 … 254, ties to the smaller; written here anew."""
    exponents = (halves >> (7 if halves.itemsize == 2 else 23)) & 0xFF
    counts = np.bincount(exponents.astype(np.int64), minlength=256)[:255]
    return tuple(sorted(int(e) for e in np.lexsort((np.arange(255), -counts))[:7]))
