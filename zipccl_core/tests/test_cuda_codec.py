"""The kernels agree with the CPU codec byte for byte, refuse what it refuses, and never touch what is not theirs."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from conformance.oracle import ordered_sum, patterns_of, tensor_of
from conformance.strategies import GAUSSIAN_EXPONENTS, KINDS, patterns, rng_of
from conformance.vectors import invalid_cases, valid_cases
from zipccl_core import Codebook, decode, encode, max_frame_bytes, read_header
from zipccl_core.codec import cpu, exponent_histogram
from zipccl_core.codec.cuda import jit
from zipccl_core.codec.cuda.decode import Verdicts, decode_frames, frame_capacity, launch_decode
from zipccl_core.codec.cuda.decode_reduce import decode_reduce
from zipccl_core.codec.cuda.encode import encode_frames, launch_encode, scratch_bytes
from zipccl_core.codec.cuda.stats import DeviceCodebook, measure
from zipccl_core.errors import CorruptFrame, InvalidArgument, TruncatedFrame, ZipcclError
from zipccl_core.frame import HEADER_BYTES, n_blocks, static_bytes

pytestmark = pytest.mark.gpu

BLOCK = 8192
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
GAUSS = Codebook.gaussian(0.02)
SPREAD = Codebook.given([0, 3, 17, 118, 120, 127, 255])
SIZES = [0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 127, 1009, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 40 * BLOCK + 5]
GUARD, GUARD_BYTES = 0xA5, 128


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("these tests need a CUDA device and found none; deselect them with -m 'not gpu'")


def on_device(elements: np.ndarray, dtype: str, offset: int = 0) -> torch.Tensor:
    """The patterns on the device, `offset` elements behind a multiple of 512 bytes."""
    memory = torch.zeros(elements.size + offset, dtype=DTYPES[dtype], device="cuda")
    memory[offset:] = tensor_of(elements, DTYPES[dtype]).cuda()
    return memory[offset:]


def cpu_frame(elements: np.ndarray, codebook: Codebook) -> np.ndarray:
    out = np.zeros(max_frame_bytes(elements.size, "bfloat16" if elements.itemsize == 2 else "float32"), np.uint8)
    return out[: cpu.encode_into(elements, codebook, out).frame_bytes]


def guarded_frame(n: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.full((2 * GUARD_BYTES + max_frame_bytes(n, dtype),), GUARD, dtype=torch.uint8, device="cuda")
    return memory, memory[GUARD_BYTES:-GUARD_BYTES]


def check_both_ways(elements: np.ndarray, dtype: str, codebook: Codebook, offset: int = 0) -> None:
    want = cpu_frame(elements, codebook)
    memory, frame = guarded_frame(elements.size, dtype)
    words = on_device(elements, dtype, offset)
    encode_frames([words], [codebook], [frame])
    came = memory.cpu().numpy()
    body = came[GUARD_BYTES : GUARD_BYTES + want.size]
    if not np.array_equal(body, want):
        at = int(np.flatnonzero(body != want)[0])
        raise AssertionError(f"byte {at} of {want.size}: wanted {want[at]:#04x}, got {body[at]:#04x}")
    assert (came[:GUARD_BYTES] == GUARD).all()
    assert (came[GUARD_BYTES + want.size :] == GUARD).all()

    exact = torch.from_numpy(want.copy()).cuda()  # a buffer that ends with the frame
    for source in (frame, exact):
        out = torch.full((elements.size + offset + 8,), -1.5, dtype=DTYPES[dtype], device="cuda")
        part = out[offset : offset + elements.size]
        header = decode_frames([source], [part]).check()[0]
        assert header == read_header(frame)
        assert np.array_equal(patterns_of(part), elements)
        assert (out[:offset] == -1.5).all()
        assert (out[offset + elements.size :] == -1.5).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_every_size_gives_the_bytes_of_the_cpu_codec(n, dtype):
    for kind in ("gaussian", "widened:gaussian") if dtype == "float32" else ("gaussian",):
        for codebook in (GAUSS, SPREAD):
            check_both_ways(patterns(kind, n, dtype=dtype), dtype, codebook)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_bytes_of_the_cpu_codec(kind, dtype):
    n = 1 << 16 if kind == "all_patterns" else 9 * BLOCK + 4001
    for codebook in (GAUSS, SPREAD, Codebook.given(range(7)), Codebook.given(range(249, 256))):
        check_both_ways(patterns(kind, n, dtype=dtype), dtype, codebook)
    if dtype == "float32":
        check_both_ways(patterns(f"widened:{kind}", n, dtype=dtype), dtype, GAUSS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", range(1, 8))
def test_every_alignment_gives_the_bytes_of_the_cpu_codec(offset, dtype):
    for kind in ("gaussian", "escapes_over_stored_rule"):
        check_both_ways(patterns(kind, 2 * BLOCK + 11, dtype=dtype), dtype, GAUSS, offset)


def test_many_blocks_in_flight_give_the_bytes_of_the_cpu_codec():
    check_both_ways(patterns("two_gaussians", 3000 * BLOCK + 77), "bfloat16", GAUSS)
    check_both_ways(patterns("gaussian", 1200 * BLOCK + 77, dtype="float32"), "float32", GAUSS)


@pytest.mark.parametrize("case", valid_cases(), ids=lambda c: f"{c.topic}:{c.name}")
def test_golden_frames_both_ways(case):
    elements = np.frombuffer(case.elements, np.uint16 if case.dtype == "bfloat16" else np.uint32)
    check_both_ways(elements, case.dtype, Codebook(case.codebook))
    assert cpu_frame(elements, Codebook(case.codebook)).tobytes() == case.frame


def test_many_frames_in_one_launch():
    rng = rng_of("many")
    for count in (2, 16, 17, 100):
        elements = [patterns("gaussian", int(n), seed=i) for i, n in enumerate(rng.integers(0, 5 * BLOCK, count))]
        words = [on_device(e, "bfloat16", i % 3) for i, e in enumerate(elements)]
        books = [GAUSS if i % 2 else SPREAD for i in range(count)]
        capacity = [frame_capacity(e.size, torch.bfloat16) for e in elements]
        memory = torch.full((sum(capacity),), GUARD, dtype=torch.uint8, device="cuda")
        frames = list(memory.split(capacity))
        encode_frames(words, books, frames)
        out = [torch.full_like(w, -1.5) for w in words]
        headers = decode_frames(frames, out).check()
        for e, book, frame, o, header in zip(elements, books, frames, out, headers, strict=True):
            want = cpu_frame(e, book)
            assert header.frame_bytes == want.size
            assert np.array_equal(frame.cpu().numpy()[: want.size], want)
            assert np.array_equal(patterns_of(o), e)


def test_slices_of_one_tensor_in_one_launch():
    elements = patterns("gaussian", 10 * BLOCK + 10)
    words = on_device(elements, "bfloat16")
    parts = words.split(3 * BLOCK + 7)
    frames = [torch.empty(frame_capacity(p.numel(), p.dtype), dtype=torch.uint8, device="cuda") for p in parts]
    encode_frames(parts, [GAUSS] * len(parts), frames)
    out = torch.full_like(words, -1.5)
    decode_frames(frames, out.split(3 * BLOCK + 7)).check()
    assert np.array_equal(patterns_of(out), elements)


def outcome(call) -> str:
    try:
        call()
    except ZipcclError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("case", invalid_cases(), ids=lambda c: f"{c.topic}:{c.name}")
def test_broken_vectors_are_refused_as_the_law_says(case):
    frame = torch.from_numpy(np.frombuffer(case.frame, np.uint8).copy()).cuda()
    memory = torch.full((case.n + 128,), -1.5, dtype=DTYPES[case.dtype], device="cuda")
    out = memory[64 : 64 + case.n]
    came = outcome(lambda: decode_frames([frame], [out]).check())
    # a header that says another n or dtype, and is sound, does not fit this output
    assert came == case.error or (came == "InvalidArgument" and case.topic in ("header", "digest"))
    assert (memory[:64] == -1.5).all()
    assert (memory[64 + case.n :] == -1.5).all()
    assert outcome(lambda: decode(frame)) == case.error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["gaussian", "escapes_over_stored_rule"])
def test_flipped_bits_are_found_or_change_nothing(kind, dtype):
    elements = patterns(kind, BLOCK + 40, dtype=dtype)
    sound = cpu_frame(elements, GAUSS)
    rng = rng_of("flips", kind, dtype)
    places = [*range(0, 8 * 300, 3), *rng.integers(0, 8 * sound.size, 900)]
    frames = np.repeat(sound[None], len(places), axis=0)
    for row, place in zip(frames, places, strict=True):
        row[place // 8] ^= 1 << (place % 8)
    room = -(-sound.size // 128) * 128
    memory = torch.full((len(places), room), GUARD, dtype=torch.uint8, device="cuda")
    memory[:, : sound.size] = torch.from_numpy(frames).cuda()
    out = torch.zeros((len(places), elements.size + 8), dtype=DTYPES[dtype], device="cuda")
    rows = decode_frames(
        [memory[i, : sound.size] for i in range(len(places))], [out[i, : elements.size] for i in range(len(places))]
    )
    steps = rows.rows[:, 0].cpu()
    assert (steps != 0).all(), f"bit {places[int((steps == 0).nonzero()[0])]} of the frame flipped unseen"
    assert (out[:, elements.size :] == 0).all()
    with pytest.raises(ZipcclError):
        rows.check()


def test_random_bytes_are_refused():
    rng = rng_of("noise")
    for n in (1, 100, BLOCK, 3 * BLOCK + 5):
        sound = cpu_frame(patterns("gaussian", n), GAUSS)
        for _ in range(20):
            frame = sound.copy()
            frame[128:] = rng.integers(0, 256, frame.size - 128)
            out = torch.empty(n, dtype=torch.bfloat16, device="cuda")
            with pytest.raises(CorruptFrame):
                decode_frames([torch.from_numpy(frame).cuda()], [out]).check()


def test_truncated_buffers_are_found():
    sound = torch.from_numpy(cpu_frame(patterns("gaussian", 2 * BLOCK + 9), GAUSS)).cuda()
    out = torch.empty(2 * BLOCK + 9, dtype=torch.bfloat16, device="cuda")
    for size in (0, 1, 127, 128, 500, static_bytes(2 * BLOCK + 9), sound.numel() - 1):
        with pytest.raises(TruncatedFrame):
            decode_frames([sound[:size]], [out]).check()


def test_a_sound_frame_of_another_length_or_dtype_is_an_invalid_argument():
    frame = torch.from_numpy(cpu_frame(patterns("gaussian", 100), GAUSS)).cuda()
    for out in (torch.empty(99, dtype=torch.bfloat16, device="cuda"), torch.empty(100, device="cuda")):
        with pytest.raises(InvalidArgument, match="must have 100 elements of bfloat16"):
            decode_frames([frame], [out]).check()


def test_a_refused_frame_leaves_nothing_behind_for_the_next():
    elements = patterns("gaussian", 5 * BLOCK)
    sound = cpu_frame(elements, GAUSS)
    broken = sound.copy()
    broken[9000] ^= 1
    out = torch.empty(elements.size, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        with pytest.raises(CorruptFrame):
            decode_frames([torch.from_numpy(broken).cuda()], [out]).check()
        decode_frames([torch.from_numpy(sound).cuda()], [out]).check()
        assert np.array_equal(patterns_of(out), elements)


# --- The sum ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "factor"), [("sum", 1.0), ("avg", 1.0), ("premul_sum", 0.3), ("premul_sum", 1e-30)])
def test_decode_reduce_gives_the_bits_of_the_ordered_sum(dtype, op, factor):
    for n in (0, 1, 33, BLOCK, 2 * BLOCK + 77, 400 * BLOCK + 3):
        for ranks in (1, 2, 3, 8) if n < 10 * BLOCK else (3,):
            kinds = ("gaussian", "all_patterns", "nan_payloads", "subnormals") if n < 10 * BLOCK else ("gaussian",)
            for kind in kinds:
                inputs = [patterns(kind, n, rank, dtype=dtype) for rank in range(ranks)]
                terms = []
                for rank, elements in enumerate(inputs):
                    words = on_device(elements, dtype, rank % 2)
                    if rank == 1:
                        terms.append(words)
                        continue
                    frame = torch.empty(max_frame_bytes(n, dtype), dtype=torch.uint8, device="cuda")
                    encode_frames([words], [GAUSS if rank % 3 else SPREAD], [frame])
                    terms.append(frame)
                out = torch.full((n + 3,), 7.25, dtype=DTYPES[dtype], device="cuda")
                verdicts = decode_reduce(
                    terms, out[1 : n + 1], average=op == "avg", factor=factor if op == "premul_sum" else None
                )
                headers = verdicts.check()
                assert [h is None for h in headers] == [rank == 1 for rank in range(ranks)]
                assert np.array_equal(patterns_of(out[1 : n + 1]), ordered_sum(inputs, op, factor)), (n, ranks, kind)
                assert (out[[0, n + 1, n + 2]] == 7.25).all()


def test_decode_reduce_of_forty_ranks():
    inputs = [patterns("gaussian", BLOCK + 9, rank) for rank in range(40)]
    terms = [torch.from_numpy(cpu_frame(e, GAUSS)).cuda() for e in inputs]
    out = torch.empty(BLOCK + 9, dtype=torch.bfloat16, device="cuda")
    assert len(decode_reduce(terms, out).check()) == 40
    assert np.array_equal(patterns_of(out), ordered_sum(inputs))


def test_decode_reduce_names_the_broken_frame():
    frames = [cpu_frame(patterns("gaussian", 3 * BLOCK, rank), GAUSS) for rank in range(3)]
    frames[2][20_000] ^= 4
    out = torch.empty(3 * BLOCK, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(CorruptFrame, match="frame 2 of 3"):
        decode_reduce([torch.from_numpy(f).cuda() for f in frames], out).check()


def test_a_sum_of_a_frame_longer_than_its_buffer_leaves_everything_as_it_is_and_blames_that_frame():
    """So that it can be made once the rest has come, even where the sum takes the place of a term."""
    n = 3 * BLOCK
    inputs = [patterns("gaussian", n, rank) for rank in range(3)]
    own = on_device(inputs[1], "bfloat16")
    whole = [torch.from_numpy(cpu_frame(inputs[rank], GAUSS)).cuda() for rank in (0, 2)]
    phase_one = whole[1][: static_bytes(n)].clone()
    with pytest.raises(TruncatedFrame):
        decode_reduce([whole[0], own, phase_one], own).check()
    assert np.array_equal(patterns_of(own), inputs[1])
    decode_reduce([whole[0], own, whole[1]], own).check()
    assert np.array_equal(patterns_of(own), ordered_sum(inputs))


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_launches_on_a_lane_of_its_own_give_the_same_bytes(dtype, shares):
    """With few thread blocks, too, each of which then takes many tiles; header and verdicts in memory of the host."""
    n = 700 * BLOCK + 5
    elements = patterns("gaussian", n, 3, dtype=dtype)
    want = cpu_frame(elements, GAUSS)
    words, out = on_device(elements, dtype), torch.full((n,), -1.5, dtype=DTYPES[dtype], device="cuda")
    frame = torch.empty(max_frame_bytes(n, dtype), dtype=torch.uint8, device="cuda")
    scratch = torch.empty(scratch_bytes(n_blocks(n)), dtype=torch.uint8, device="cuda")
    rows = torch.empty((1, jit.VERDICT_BYTES // 8), dtype=torch.int64, pin_memory=True)
    header = torch.empty(HEADER_BYTES, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    [lane] = jit.lend_lanes(words.device, 1)
    lane.shares = shares
    exponents = int.from_bytes(bytes(GAUSS.exponents), "little")
    with lane.device.pushed():
        for _ in range(2):  # what a launch leaves zero is what the next one needs
            header.fill_(0xA5)
            where = {"codebook": exponents, "header_copy": header.data_ptr()}
            job = jit.Job(words.data_ptr(), frame.data_ptr(), n, frame.numel(), **where)
            size = words.element_size()
            launch_encode(lane, jit.make_table([job], words.device), size, scratch.data_ptr())
            job = jit.Job(out.data_ptr(), frame.data_ptr(), n, frame.numel())
            launch_decode(lane, jit.make_table([job], words.device), size, rows.data_ptr())
    torch.cuda.synchronize()
    assert np.array_equal(frame[: want.size].cpu().numpy(), want)
    assert np.array_equal(header.numpy(), want[:HEADER_BYTES])
    assert Verdicts(rows).check()[0] is not None
    assert np.array_equal(patterns_of(out), elements)
    jit.take_back_lanes([lane])
    assert jit.lend_lanes(words.device, 1)[0].handle == lane.handle


# --- Statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 100, 65535, 65536, 131071, 131072, 3_000_001])
def test_statistics_are_those_of_the_cpu(n, dtype):
    for kind in ("gaussian", "zeros", "nan_payloads", "two_gaussians", "all_patterns"):
        elements = patterns(kind, n, dtype=dtype)
        words = on_device(elements, dtype, 1)
        want = cpu.exponent_histogram(elements)
        for _ in range(2):
            found = measure([words])
            assert np.array_equal(found.histogram().cpu().numpy(), want)
            assert found.fitted().codebook() == Codebook.fitted(want.tolist())
            assert found.gaussian().codebook() == Codebook.gaussian_of_histogram(want.tolist())
        assert torch.equal(exponent_histogram(words).cpu(), torch.from_numpy(want))


def test_statistics_of_many_tensors_in_one_launch():
    elements = [patterns("gaussian", 1000 * i, seed=i) for i in range(20)]
    found = measure([on_device(e, "bfloat16") for e in elements])
    for i, e in enumerate(elements):
        assert np.array_equal(found.histogram(i).cpu().numpy(), cpu.exponent_histogram(e))


def test_measured_sigma_is_that_of_a_gaussian():
    for sigma in (1e-3, 0.02, 1.7, 300.0):
        words = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)) * sigma).bfloat16().cuda()
        assert measure([words]).sigma() == pytest.approx(sigma, rel=0.02)


def test_a_codebook_that_stays_on_the_device_gives_the_same_frame():
    elements = patterns("two_gaussians", 7 * BLOCK + 3)
    words = on_device(elements, "bfloat16")
    frame = torch.empty(max_frame_bytes(elements.size), dtype=torch.uint8, device="cuda")
    for choose in ("fitted", "gaussian"):
        book: DeviceCodebook = getattr(measure([words]), choose)()
        encode_frames([words], [book], [frame])
        want = cpu_frame(elements, book.codebook())
        assert np.array_equal(frame.cpu().numpy()[: want.size], want)


# --- Streams, threads, memory -----------------------------------------------------------------------------------------


def everything(words: torch.Tensor, frame: torch.Tensor, out: torch.Tensor):
    """Every launch there is, on the current stream, without asking for anything."""
    book = measure([words]).gaussian()
    encode_frames([words], [book], [frame])
    return decode_frames([frame], [out]), decode_reduce([frame, words], torch.empty_like(words))


def test_nothing_waits_for_the_device():
    words = on_device(patterns("gaussian", 100 * BLOCK), "bfloat16")
    frame = torch.empty(max_frame_bytes(words.numel()), dtype=torch.uint8, device="cuda")
    out = torch.empty_like(words)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), *jit.pool_streams(0)]
    for stream in streams:
        with torch.cuda.stream(stream):
            everything(words, frame, out)
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)
            verdicts = everything(words, frame, out)
            assert not stream.query(), "a launch waited for the device"
            for v in verdicts:
                v.check()
            assert np.array_equal(patterns_of(out), patterns_of(words))


def test_launches_are_ordered_with_the_callers_stream():
    first, second = patterns("gaussian", 64 * BLOCK, 0), patterns("gaussian", 64 * BLOCK, 1)
    a, b = on_device(first, "bfloat16"), on_device(second, "bfloat16")
    words, out = torch.empty_like(a), torch.empty_like(a)
    frame = torch.empty(max_frame_bytes(a.numel()), dtype=torch.uint8, device="cuda")
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(), *jit.pool_streams(0)):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            results = []
            for source in (a, b):
                torch.cuda._sleep(20_000_000)
                words.copy_(source)
                encode_frames([words], [GAUSS], [frame])
                words.zero_()
                decode_frames([frame], [out])
                frame.zero_()
                results.append(out.clone())
                out.zero_()
            stream.synchronize()
        assert np.array_equal(patterns_of(results[0]), first)
        assert np.array_equal(patterns_of(results[1]), second)


def test_threads_launch_at_once():
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            elements = patterns("gaussian", 20 * BLOCK + seed, seed=seed)
            stream = torch.cuda.Stream() if seed % 2 else torch.cuda.default_stream()
            with torch.cuda.stream(stream):
                words = on_device(elements, "bfloat16")
                frame = torch.empty(max_frame_bytes(words.numel()), dtype=torch.uint8, device="cuda")
                want = cpu_frame(elements, GAUSS)
                for _ in range(50):
                    out = torch.full_like(words, -1.5)
                    encode_frames([words], [GAUSS], [frame])
                    decode_frames([frame], [out]).check()
                    assert np.array_equal(patterns_of(out), elements)
                assert np.array_equal(frame.cpu().numpy()[: want.size], want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_nothing_leaks_over_ten_thousand_calls():
    words = on_device(patterns("gaussian", 3 * BLOCK), "bfloat16")
    frame = torch.empty(max_frame_bytes(words.numel()), dtype=torch.uint8, device="cuda")
    out = torch.empty_like(words)

    def calls(count: int) -> None:
        for i in range(count):
            with torch.cuda.stream(streams[i % len(streams)]):
                everything(words, frame, out)

    streams = [torch.cuda.Stream() for _ in range(3)]
    calls(300)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before, driver_before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    objects = len(gc.get_objects())
    calls(2_500)  # of four launches each
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.mem_get_info()[0] >= driver_before - (8 << 20)
    assert len(gc.get_objects()) < objects + 1000


def test_a_cuda_graph_replays_encode_and_decode():
    elements = [patterns("gaussian", 30 * BLOCK + 5, seed=i) for i in range(3)]
    words = on_device(elements[0], "bfloat16")
    frame = torch.empty(max_frame_bytes(words.numel()), dtype=torch.uint8, device="cuda")
    out = torch.empty_like(words)
    everything(words, frame, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        encode_frames([words], [GAUSS], [frame])
        verdicts = decode_frames([frame], [out])
    for e in elements:
        words.copy_(on_device(e, "bfloat16"))
        graph.replay()
        verdicts.check()
        want = cpu_frame(e, GAUSS)
        assert np.array_equal(frame.cpu().numpy()[: want.size], want)
        assert np.array_equal(patterns_of(out), e)


def test_the_public_functions_take_cuda_tensors():
    elements = patterns("gaussian", 2 * BLOCK + 5)
    words = on_device(elements, "bfloat16", 3)
    want = cpu_frame(elements, GAUSS)
    frame = encode(words, GAUSS)
    assert np.array_equal(frame.cpu().numpy()[: want.size], want)
    shifted = torch.empty(frame.numel() + 5, dtype=torch.uint8, device="cuda")[5:]
    encode(words, GAUSS, out=shifted)
    assert np.array_equal(shifted.cpu().numpy()[: want.size], want)
    assert read_header(shifted).frame_bytes == want.size
    assert np.array_equal(patterns_of(decode(shifted)), elements)
    shifted[300] ^= 1
    with pytest.raises(CorruptFrame):
        decode(shifted)


def test_more_than_two_to_the_31_words():
    """Offsets, sizes and tile numbers beyond 32 bits; the frame is checked against its digest and against the words."""
    n = (1 << 31) + BLOCK + 1
    words = torch.empty(n, dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(3)
    for part in words.split(1 << 28):
        part.normal_(0, 0.02, generator=generator)
    frame = torch.empty(max_frame_bytes(n), dtype=torch.uint8, device="cuda")
    encode_frames([words], [GAUSS], [frame])
    out = torch.full_like(words, -1.5)
    header = decode_frames([frame], [out]).check()[0]
    assert header.n_words == n
    for a, b in zip(words.split(1 << 28), out.split(1 << 28), strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))
    last = cpu_frame(patterns_of(words[-BLOCK - 1 :]), GAUSS)  # its records are the last of the large frame too
    begin, small = static_bytes(n), static_bytes(BLOCK + 1)
    records = frame[begin - (small - 256) : begin].cpu().numpy()
    assert np.array_equal(records, last[256:small])


@pytest.mark.parametrize(
    ("words", "frame", "match"),
    [
        (torch.zeros(10, dtype=torch.float16), 1024, "bfloat16 or float32"),
        (torch.zeros(10, dtype=torch.bfloat16), 100, "must hold max_frame_bytes"),
        (torch.zeros(10, 10, dtype=torch.bfloat16).t()[:5], 1024, "contiguous"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_launched(words, frame, match):
    with pytest.raises(InvalidArgument, match=match):
        encode_frames([words.cuda()], [GAUSS], [torch.empty(frame, dtype=torch.uint8, device="cuda")])


def test_a_frame_off_its_alignment_is_refused():
    frame = torch.empty(4096, dtype=torch.uint8, device="cuda")[16:]
    words = torch.zeros(10, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(InvalidArgument, match="multiple of 128"):
        encode_frames([words], [GAUSS], [frame])
    with pytest.raises(InvalidArgument, match="multiple of 128"):
        decode_frames([frame], [words])


def test_gaussian_exponents_of_the_suite_are_those_of_the_codebook():
    assert GAUSS.exponents == GAUSSIAN_EXPONENTS
