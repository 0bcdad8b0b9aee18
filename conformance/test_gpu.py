"""What CUDA adds: streams, work queued ahead, the allocator, threads, graphs. Results are compared bit for bit.

pytest conformance/test_gpu.py --subject zipccl_gpu --device cuda --world-size 2

Tests of streams and of the device itself need tensors on a GPU, and say so elsewhere; the others run on a CPU too, in
the one order that it has. Words come and go by copies in the streams under test: nothing else orders them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance.exercise import (
    FURTHER,
    IN_PARTS,
    OPERATIONS,
    Part,
    exercise,
    inputs_of_all,
    issue,
    meet,
    supported,
    synchronize,
    wanted,
)
from conformance.oracle import POISON_BYTE, Poisoned, check_output, poisoned, tensor_of
from conformance.plugin import World

# A subject that waits for verdicts in each call may hide what its streams do not wait for.
pytestmark = [pytest.mark.gpu, pytest.mark.limit_s(120), pytest.mark.instead(always="late")]

BF16 = torch.bfloat16
N, FEW = 40_007, 500
LAG_MS = 20.0
"""How long a stream is kept busy before that which must not be read too early."""
QUEUED_MS = 400.0
ISSUE_LIMIT_MS = 2.0
CALLS, CALLS_ON_CPU = 1000, 100
ALLOCATED_SLACK_BYTES = 1 << 20
RSS_SLACK_BYTES = 48 << 20
OTHERS_BITS = 0x7FC1
THREAD_LIMIT_S = 60.0

COLLECTIVES = tuple(o for o in (*OPERATIONS, *FURTHER) if o != "batch_isend_irecv")


@pytest.fixture
def _on_cuda(request: pytest.FixtureRequest) -> None:
    if request.config.option.device != "cuda":
        pytest.skip("UNSUPPORTED: needs tensors on a GPU: --device cuda")


needs_cuda = pytest.mark.usefixtures("_on_cuda")


class Lane:
    """A CUDA stream of its own as a context; on a CPU, where work is done when it is asked for, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._on = contextlib.ExitStack()

    def __enter__(self) -> Lane:
        if self._stream is not None:
            self._on.enter_context(torch.cuda.stream(self._stream))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._on.close()

    def synchronize(self) -> None:
        """The host waits for what the stream holds."""
        if self._stream is not None:
            self._stream.synchronize()


def spin(device: torch.device, ms: float) -> None:
    """Keep the current stream busy for about ms."""
    if device.type == "cuda":
        khz = getattr(torch.cuda.get_device_properties(device), "clock_rate", 1_500_000)
        torch.cuda._sleep(int(ms * khz))


def there(world: World, array: np.ndarray) -> torch.Tensor:
    """These bits on the device, before this returns."""
    made = tensor_of(array, BF16, world.device)
    synchronize(world.device)
    return made


class Slot:
    """The buffers of one operation on this rank, filled, passed and read in whatever stream is the current one.

    Args:
        n: elements, or elements a rank where each gets a part of its own.
    """

    def __init__(self, world: World, operation: str, n: int) -> None:
        self.operation, self.n, self._world = operation, n, world
        size, is_root = world.world_size, world.rank == 0
        counts = {
            "all_gather_into_tensor": [n * size],
            "all_to_all_single": [n * size],
            "all_gather": [n] * size,
            "gather": [n] * size if is_root else [],
        }.get(operation, [n])
        self.outs = [poisoned(count, BF16, world.device) for count in counts]
        self.reads: torch.Tensor | None = None
        if operation == "all_reduce" or (operation == "broadcast" and is_root):
            self.reads = self.outs[0].tensor
        elif operation != "broadcast" and (operation != "scatter" or is_root):
            self.reads = poisoned(n * size if operation in IN_PARTS else n, BF16, world.device).tensor

    def inputs(self, seed: int) -> list[np.ndarray]:
        """Of all ranks."""
        return inputs_of_all(self.operation, "gaussian", self.n, self._world.world_size, "bfloat16", seed)

    def fill(self, words: torch.Tensor) -> None:
        """Poison the outputs, and put this rank's input where the operation reads it."""
        for out in self.outs:
            out.storage.view(torch.uint8).fill_(POISON_BYTE)
        if self.reads is not None:
            self.reads.view(torch.int16).copy_(words.view(torch.int16))

    def call(self, comm: Any, async_op: bool) -> Any:
        outs, call, how = [out.tensor for out in self.outs], getattr(comm, self.operation), {"async_op": async_op}
        if self.operation in OPERATIONS:
            return call(outs[0], self.reads, **how)
        if self.operation == "all_gather":
            return call(outs, self.reads, **how)
        if self.operation == "gather":
            return call(self.reads, outs or None, dst=0, **how)
        if self.operation == "scatter":
            return call(
                outs[0], None if self.reads is None else list(self.reads.chunk(self._world.world_size)), 0, **how
            )
        return call(outs[0], **({"src": 0} if self.operation == "broadcast" else {}), **how)

    def take(self) -> list[Poisoned]:
        """Copies of the outputs and of what lies around them."""
        copies = [(out, out.storage.clone()) for out in self.outs]
        return [Poisoned(s[out.first : out.first + out.tensor.numel()], s, out.first) for out, s in copies]

    def check(self, taken: list[Poisoned], inputs: list[np.ndarray], what: str) -> None:
        """Every bit of the copies is right; the stream in which they were taken is the current one, or is over."""
        want = wanted(self.operation, inputs, self._world.rank)
        begin = 0
        for out in taken:
            end = begin + out.tensor.numel()
            check_output(out, want[begin:end], f"{self.operation} of {self.n}, {what}, on rank {self._world.rank}")
            begin = end


def default_mode(world: World) -> str:
    """The subject's, or its variant "late": see pytestmark."""
    return "late" if "late" in world.subject.capabilities.variants else ""


def wait_for(work: Any) -> None:
    """Of a call with async_op: torch gives a Work of its gather to dst alone."""
    if work is not None:
        work.wait()


def slots_of(world: World, n: int = N) -> list[Slot]:
    """One for each operation of the subject."""
    return [Slot(world, operation, n) for operation in supported(world, COLLECTIVES)]


# ------------------------------------------------------------------------------------------------------ streams


def read_behind_the_wait(world: World, mode: str, lanes: torch.device) -> None:
    """The input is made late on one stream and the call issued on it; a second one waits, and reads the output.

    Where the input is made lie other words before, which a call sends that reads too early; where the output comes,
    poison, which a reader sees that does not wait. Each operation in turn.

    Args:
        lanes: a CPU for one stream, the caller's.
    """
    comm, maker, reader = world.communicator(mode), Lane(lanes), Lane(lanes)
    for slot in slots_of(world):
        for seed in range(3):
            inputs = slot.inputs(seed)
            words, others = there(world, inputs[world.rank]), there(world, inputs[world.rank][::-1])
            slot.fill(others)
            synchronize(world.device)
            with maker:
                spin(world.device, LAG_MS)
                slot.fill(words)
                work = slot.call(comm, async_op=True)
            with reader:
                wait_for(work)
                taken = slot.take()
            reader.synchronize()
            slot.check(taken, inputs, f"round {seed}")
            synchronize(world.device)


@needs_cuda
@pytest.mark.proves("GPU-1")
def test_an_input_made_on_a_side_stream_is_sent_and_another_stream_that_waited_reads_the_output(world, mode):
    read_behind_the_wait(world, mode, world.device)


@pytest.mark.proves("WORK-8")
def test_an_input_made_just_before_the_call_is_sent_and_read_just_behind_the_wait(world):
    read_behind_the_wait(world, default_mode(world), torch.device("cpu"))


@pytest.mark.parametrize("ahead", [0, 1], ids=["waited_for", "one_ahead"])
@pytest.mark.proves("WORK-8")
def test_buffers_are_used_again_behind_the_wait_without_synchronising(world, mode, ahead):
    """The next input is put where the last one was, and the output poisoned, in the stream that has waited."""
    comm = world.communicator(mode)
    for operation in supported(world, COLLECTIVES):
        slots = [Slot(world, operation, N) for _ in range(ahead + 1)]
        rounds = [slots[0].inputs(seed) for seed in range(8)]
        words = [there(world, inputs[world.rank]) for inputs in rounds]
        taken: list[list[Poisoned]] = []
        under_way: list[tuple[Slot, Any]] = []
        for seed, mine in enumerate(words):
            slot = slots[seed % len(slots)]
            slot.fill(mine)
            under_way.append((slot, slot.call(comm, async_op=bool(ahead))))
            if len(under_way) > ahead:
                done, work = under_way.pop(0)
                wait_for(work)
                taken.append(done.take())
        for done, work in under_way:
            wait_for(work)
            taken.append(done.take())
        synchronize(world.device)
        for seed, (copies, inputs) in enumerate(zip(taken, rounds, strict=True)):
            slots[0].check(copies, inputs, f"call {seed}")


@pytest.mark.requires(variants="auto")
@pytest.mark.proves("WORK-8", "EXCH-6")
def test_calls_that_are_coded_and_calls_that_are_not_keep_their_order(world):
    """Small ones between large ones, all under way together, of each operation; inputs are made late."""
    comm, maker, reader = world.communicator("auto"), Lane(world.device), Lane(world.device)
    for seed, operation in enumerate(supported(world, COLLECTIVES)):
        slots = [Slot(world, operation, n) for n in (N, FEW, FEW + 1, N + 1, FEW)]
        inputs = [slot.inputs(10 * seed + k) for k, slot in enumerate(slots)]
        words = [there(world, mine[world.rank]) for mine in inputs]
        for slot, mine in zip(slots, inputs, strict=True):
            slot.fill(there(world, mine[world.rank][::-1]))
        synchronize(world.device)
        with maker:
            spin(world.device, LAG_MS)
            works = []
            for slot, mine in zip(slots, words, strict=True):
                slot.fill(mine)
                works.append(slot.call(comm, async_op=True))
        with reader:
            for work in works[::-1]:
                wait_for(work)
            taken = [slot.take() for slot in slots]
        reader.synchronize()
        for k, slot in enumerate(slots):
            slot.check(taken[k], inputs[k], f"call {k}")
        synchronize(world.device)


# ------------------------------------------------------------------------------------------- groups and threads


@pytest.mark.proves("EXCH-3", "EXCH-5")
def test_calls_of_several_groups_in_flight_together_give_each_its_own_data(world, mode):
    """Two of everybody, two that overlap, and one of each half; issued in one order, waited for in another on each."""
    everyone = list(range(world.world_size))
    half = world.world_size // 2
    members = [
        everyone,
        everyone,
        everyone[1:] or everyone,
        everyone[:-1] or everyone,
        everyone[:half],
        everyone[half:],
    ]
    parts = {}
    for k, ranks in enumerate(members):
        if ranks and (group := world.subgroup(ranks)) is not None:
            parts[k] = Part(world, ranks, group)
    comms = {k: world.communicator(mode, part.group) for k, part in parts.items()}
    operations = supported(world, COLLECTIVES)
    calls = []
    for seed, k in itertools.product(range(3), parts):
        operation, part = operations[(seed + k) % len(operations)], parts[k]
        inputs = inputs_of_all(operation, "gaussian", 9001, part.world_size, "bfloat16", seed=100 * k + seed)
        what = f"(call {seed} of group {k}, {part.members})"
        calls.append(issue(part, comms[k], operation, inputs, "bfloat16", async_op=True, root=seed, what=what))
    turn = world.rank % 3
    for call in [calls, calls[::-1], calls[len(calls) // 2 :] + calls[: len(calls) // 2]][turn]:
        call.finish()


@pytest.mark.requires("independent")
@pytest.mark.proves("EXCH-10")
def test_two_threads_call_on_communicators_of_their_own(world, mode):
    """One has a stream of its own; the other has not even chosen a device."""
    comms = [world.communicator(mode) for _ in range(2)]
    operations = supported(world, COLLECTIVES)
    work = [
        [(o, inputs_of_all(o, "gaussian", 9001, world.world_size, "bfloat16", k)) for o in operations] for k in (0, 1)
    ]
    failed: list[BaseException] = []

    def run(k: int) -> None:
        try:
            with Lane(world.device if k else torch.device("cpu")):
                for operation, inputs in (work[k] if k else work[k][::-1]) * 3:
                    exercise(world, comms[k], operation, inputs, "bfloat16", what=f"(thread {k})")
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(k,), name=f"caller {k}", daemon=True) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(THREAD_LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), f"a thread has not returned within {THREAD_LIMIT_S:g} s"
    for error in failed:
        raise error


# ------------------------------------------------------------------------------------------------------- memory


@pytest.mark.proves("WORK-4", "WORK-7")
def test_tensors_let_go_of_right_after_the_call_while_others_take_their_memory(world, mode):
    """Inputs of some calls, and of others everything. What the allocator has given away is whose it is now."""
    comm = world.communicator(mode)
    others = []
    for seed in range(3):
        calls = []
        for operation in supported(world, COLLECTIVES):
            inputs = inputs_of_all(operation, "gaussian", N, world.world_size, "bfloat16", seed)
            kept = issue(world, comm, operation, inputs, "bfloat16", async_op=True, what=f"(round {seed})")
            kept.kept = None
            calls.append(kept)
            issue(world, comm, operation, inputs, "bfloat16", async_op=True)  # and nothing of it is kept
            sizes = (len(inputs[world.rank]), *(len(out.storage) for out in kept.outs))
            others += [torch.full((n,), OTHERS_BITS, dtype=torch.int16, device=world.device) for n in sizes]
        for call in calls:
            call.finish()
    meet(world, comm)
    synchronize(world.device)
    for other in others:
        assert bool((other == OTHERS_BITS).all()), "a call has written to memory that was no longer its own"


@pytest.mark.proves("WORK-7")
def test_memory_is_not_given_away_while_a_call_that_another_stream_waited_for_still_uses_it(world):
    """Taken on the caller's stream, passed and waited for on a second, let go of, and taken again on the first."""
    comm, lane = world.communicator(default_mode(world)), Lane(world.device)
    others = []
    for seed, operation in itertools.product(range(3), supported(world, COLLECTIVES)):
        slot = Slot(world, operation, N)
        words = there(world, slot.inputs(seed)[world.rank])
        tensors = [*(out.storage for out in slot.outs), *([] if slot.reads is None else [slot.reads])]
        sizes = [t.numel() for t in tensors]
        with lane:
            slot.fill(words)
            wait_for(slot.call(comm, async_op=True))
        del slot, tensors
        others += [torch.full((n,), OTHERS_BITS, dtype=torch.int16, device=world.device) for n in sizes]
    synchronize(world.device)
    for other in others:
        assert bool((other == OTHERS_BITS).all()), "a call has written to memory that was no longer its own"


def memory_of(device: torch.device) -> tuple[int, int]:
    """(bytes that torch has given out on the GPU, bytes of the process), with everything under way done."""
    synchronize(device)
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # what the C library holds for later is not in use
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0, pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.proves("MEM-1")
def test_memory_is_flat_over_a_thousand_mixed_calls(world, record_row):
    comms = [world.communicator(m) for m in dict.fromkeys((default_mode(world), world.subject.capabilities.modes[-1]))]
    slots = [slot for n in (1, 3001, N) for slot in slots_of(world, n)]
    rounds = [slot.inputs(k) for k, slot in enumerate(slots)]
    words = [there(world, inputs[world.rank]) for inputs in rounds]
    turns = itertools.cycle(itertools.product(range(len(slots)), (False, True), comms))

    def call() -> None:
        k, async_op, comm = next(turns)
        slots[k].fill(words[k])
        wait_for(slots[k].call(comm, async_op))
        slots[k].check(slots[k].take(), rounds[k], "one of a thousand")

    for _ in range(2 * len(slots) * len(comms)):  # each once: pools and caches have what they need
        call()
    count = CALLS if world.device.type == "cuda" else CALLS_ON_CPU
    before = memory_of(world.device)
    for _ in range(count):
        call()
    allocated, rss = (b - a for a, b in zip(before, memory_of(world.device), strict=True))
    record_row("memory", calls=count, more_allocated_bytes=allocated, more_rss_bytes=rss)
    assert allocated <= ALLOCATED_SLACK_BYTES, f"{count} calls left {allocated} bytes allocated on the device"
    assert rss <= RSS_SLACK_BYTES, f"{count} calls left the process {rss} bytes larger"


# ------------------------------------------------------------------------------------------------- queued ahead


def issue_ahead(world: World, mode: str) -> tuple[list[float], bool]:
    """Three calls of each operation behind work that is queued; (ms on the host of each, whether the work was over)."""
    comm = world.communicator(mode)
    slots = [slot for _ in range(3) for slot in slots_of(world)]
    rounds = [slot.inputs(k) for k, slot in enumerate(slots)]
    for slot, inputs in zip(slots, rounds, strict=True):  # what is slow the first time is not the question
        slot.fill(there(world, inputs[world.rank]))
        slot.call(comm, async_op=False)
        slot.fill(there(world, inputs[world.rank]))
    synchronize(world.device)
    world.barrier_store("together")
    spin(world.device, QUEUED_MS)
    queued = torch.cuda.Event() if world.device.type == "cuda" else None
    if queued is not None:
        queued.record()
    took_ms, works = [], []
    for slot in slots:
        began = time.perf_counter()
        works.append(slot.call(comm, async_op=True))
        took_ms.append(1e3 * (time.perf_counter() - began))
    is_over = queued is None or queued.query()
    for slot, work, inputs in zip(slots, works, rounds, strict=True):
        wait_for(work)
        slot.check(slot.take(), inputs, "issued ahead")
    return took_ms, is_over


def tell(record_row: Any, world: World, mode: str, took_ms: list[float]) -> float:
    """A row for the report; the largest median of a rank, in ms."""
    told = world.exchange((statistics.median(took_ms), max(took_ms)))
    median_ms, most_ms = (max(column) for column in zip(*told, strict=True))
    record_row("issuing", mode=mode, calls=len(took_ms), median_us=1e3 * median_ms, max_us=1e3 * most_ms)
    return median_ms


@needs_cuda
@pytest.mark.proves("GPU-2")
def test_issuing_a_call_behind_queued_work_does_not_wait_for_the_device(world, mode, record_row):
    took_ms, is_over = issue_ahead(world, mode)
    median_ms = tell(record_row, world, mode, took_ms)
    assert not is_over, f"issuing {len(took_ms)} calls waited for the {QUEUED_MS:g} ms of work before them: {took_ms}"
    assert median_ms < ISSUE_LIMIT_MS, f"a call took the host {median_ms:.2f} ms, the limit is {ISSUE_LIMIT_MS:g} ms"


@pytest.mark.proves("EXCH-6")
def test_many_calls_issued_before_the_first_wait(world, record_row):
    took_ms, _ = issue_ahead(world, default_mode(world))
    tell(record_row, world, "default", took_ms)


@needs_cuda
@pytest.mark.requires("checks_arguments")
@pytest.mark.requires(operations="all_gather_into_tensor")
@pytest.mark.proves("GPU-3", "ARGS-3")
def test_a_call_in_a_graph_under_capture_is_refused_and_harms_nothing(world, mode):
    comm, slot = world.communicator(mode), Slot(world, "all_gather_into_tensor", N)
    inputs = slot.inputs(0)
    words = there(world, inputs[world.rank])
    slot.fill(words)
    slot.call(comm, async_op=False)
    x = torch.ones(8, device=world.device)
    graph, error = torch.cuda.CUDAGraph(), None
    synchronize(world.device)
    # thread_local: other threads, as NCCL's own, may ask the device about events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x += 1
        try:
            slot.call(comm, async_op=False)
        except Exception as e:
            error = e
        x += 1
    told = world.exchange((type(error).__name__, isinstance(error, ValueError), str(error)))
    assert all(is_value_error for _, is_value_error, _ in told), f"wanted a ValueError on every rank: {told}"
    assert len({name for name, _, _ in told}) == 1, f"the ranks raised different errors: {told}"
    graph.replay()
    assert x.tolist() == [3.0] * 8, "the graph does not hold what was captured beside the call"
    slot.fill(words)
    slot.call(comm, async_op=False)
    slot.check(slot.take(), inputs, "after the graph")
