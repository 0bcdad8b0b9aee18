"""The judge of GPUs, judged without one: the mirror, the choice of a backend, and what test_gpu.py finds on a CPU."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance.meta.launching import run_pytest
from conformance.meta.test_requirements import every_test
from conformance.oracle import assert_same_bits, check_guards, patterns_of, poisoned, tensor_of
from conformance.plugin import NoGpu, backend_of
from conformance.subjects.zipccl_gpu import Mirror, MirrorCommunicator, Mirrored

pytestmark = pytest.mark.outer

CPU = torch.device("cpu")
HERE = "conformance.subjects.zipccl_gpu:"
SPOILT = "conformance.meta.spoilt_on_device:"


def words(n: int) -> torch.Tensor:
    return tensor_of(np.arange(n, dtype=np.uint16) * 977, torch.bfloat16)


# --------------------------------------------------------------------------------------------------- the mirror


LAYOUTS = {
    "whole": lambda t: t,
    "offset": lambda t: t[5:77],
    "column": lambda t: t.view(30, 4)[:, 1],
    "transposed": lambda t: t.view(30, 4).t(),
    "expanded": lambda t: t[7:8].expand(9),
    "as bytes": lambda t: t.view(torch.uint8)[3:40],
    "wide": lambda t: t.view(torch.int64)[2:9],
    "empty": lambda t: t[5:5],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mirror_has_offset_strides_alignment_and_bits(layout):
    tensor = LAYOUTS[layout](words(120))
    made = Mirror(CPU).of(tensor)
    assert made.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert made.storage_offset() == tensor.storage_offset()
    assert not tensor.numel() or made.data_ptr() % 16 == tensor.data_ptr() % 16
    assert_same_bits(made, tensor, layout)


@pytest.mark.parametrize("skipped_bytes", range(0, 16, 2))
def test_a_storage_at_any_address_keeps_its_place_within_16_bytes(skipped_bytes):
    tensor = torch.frombuffer(bytearray(range(200)), dtype=torch.bfloat16, offset=skipped_bytes)[3:]
    made = Mirror(CPU).of(tensor)
    assert made.data_ptr() % 16 == tensor.data_ptr() % 16
    assert_same_bits(made, tensor, "a mirror of memory that torch has not taken")


def test_arguments_that_share_memory_share_it_there():
    whole, mirror = words(100), Mirror(CPU)
    parts = mirror.of([whole[:50], whole[50:], whole])
    parts[0].fill_(1)
    parts[1].fill_(2)
    assert parts[2].tolist() == [1] * 50 + [2] * 50
    assert len(mirror.all) == len(mirror.behind([whole[3:], whole])) == 1


def test_what_is_no_cpu_tensor_passes_as_it_is():
    mirror, elsewhere = Mirror(CPU), torch.empty(3, device="meta")
    for thing in (elsewhere, [elsewhere], None, 3, [1, 2], "sum", [], torch.eye(2).to_sparse()):
        passed = mirror.of(thing)
        assert passed is thing or (isinstance(passed, list) and passed[0] is elsewhere)
    assert not mirror.all


class FakeWork:
    """A Work that ends when it is told to."""

    def __init__(self) -> None:
        self.is_over, self.is_well, self.waits = False, True, 0

    def wait(self) -> None:
        self.waits += 1

    def is_completed(self) -> bool:
        return self.is_over

    def exception(self) -> Exception | None:
        return RuntimeError("not well") if self.is_over and not self.is_well else None


class Fake:
    """A Communicator of one rank that writes ones, and where it is told to."""

    def __init__(self, beside: int = 0, spoils_input: bool = False) -> None:
        self.beside, self.spoils_input = beside, spoils_input
        self.works: list[FakeWork] = []

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Any:
        first = output.storage_offset() + self.beside
        torch.as_strided(output, (output.numel(),), (1,), first).fill_(1)
        if self.spoils_input:
            input.fill_(9)
        if not async_op:
            return None
        self.works.append(FakeWork())
        return self.works[-1]

    def irecv(self, tensor: torch.Tensor, src: int) -> Any:
        return self.all_gather_into_tensor(tensor, tensor, async_op=True)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        pass

    def barrier(self, async_op: bool = False) -> None:
        pass


def all_ones(out: Any) -> bool:
    return bool((patterns_of(out.tensor) == 0x3F80).all())


def untouched(out: Any) -> bool:
    return bool((patterns_of(out.storage) == 0xA5A5).all())


def test_a_sync_call_fills_the_output_and_nothing_else():
    out = poisoned(50, torch.bfloat16)
    MirrorCommunicator(Fake(), CPU).all_gather_into_tensor(out.tensor, words(50))
    assert all_ones(out)
    check_guards(out, "the mirror")


@pytest.mark.parametrize("beside", [-1, 1])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_write_beside_the_output_on_the_device_is_seen_by_the_judge(beside, async_op):
    out = poisoned(50, torch.bfloat16)
    work = MirrorCommunicator(Fake(beside), CPU).all_gather_into_tensor(out.tensor, words(50), async_op=async_op)
    if async_op:
        work.wait()
    with pytest.raises(AssertionError, match="were written"):
        check_guards(out, "the mirror")


def test_a_write_to_an_input_on_the_device_is_seen_by_the_judge():
    given = words(50)
    MirrorCommunicator(Fake(spoils_input=True), CPU).all_gather_into_tensor(poisoned(50, torch.bfloat16).tensor, given)
    assert given.tolist() == [9.0] * 50


def test_an_output_comes_with_the_wait_and_once():
    out, fake = poisoned(50, torch.bfloat16), Fake()
    work = MirrorCommunicator(fake, CPU).all_gather_into_tensor(out.tensor, words(50), async_op=True)
    assert untouched(out)
    assert not work.is_completed()
    fake.works[0].is_over = True
    assert work.is_completed()
    assert untouched(out)
    work.wait()
    assert all_ones(out)
    out.tensor.fill_(5)
    work.wait()
    assert (out.tensor == 5).all(), "what the caller has put there after the wait is the caller's"


def test_a_call_changes_nothing_that_another_has_written_to_the_same_storage():
    whole, fake = torch.zeros(100, dtype=torch.bfloat16), Fake()
    comm = MirrorCommunicator(fake, CPU)
    works = [comm.all_gather_into_tensor(whole[a : a + 50], words(50), async_op=True) for a in (0, 50)]
    for work in works:
        work.wait()
    assert (whole == 1).all()


@pytest.mark.parametrize("is_over", [False, True])
def test_a_dropped_collective_is_brought_back_behind_a_barrier_though_the_device_may_still_be_at_it(is_over):
    out, fake = poisoned(50, torch.bfloat16), Fake()
    comm = MirrorCommunicator(fake, CPU)
    comm.all_gather_into_tensor(out.tensor, words(50), async_op=True)
    fake.works[0].is_over = is_over
    gc.collect()
    comm.send(words(5), 0)
    assert untouched(out) != is_over, "a message stands in no order with collectives"
    comm.barrier()
    assert all_ones(out)
    assert fake.works[0].waits == 1
    assert not comm._open


def test_a_dropped_collective_that_failed_is_not_brought_back():
    out, fake = poisoned(50, torch.bfloat16), Fake()
    comm = MirrorCommunicator(fake, CPU)
    comm.all_gather_into_tensor(out.tensor, words(50), async_op=True)
    fake.works[0].is_over, fake.works[0].is_well = True, False
    comm.barrier()
    assert untouched(out)
    assert not comm._open


def test_a_message_is_brought_back_behind_a_barrier_if_it_is_over_and_not_waited_for_otherwise():
    out, fake = poisoned(50, torch.bfloat16), Fake()
    comm = MirrorCommunicator(fake, CPU)
    comm.irecv(out.tensor, 0)
    comm.barrier()
    assert untouched(out)
    assert fake.works[0].waits == 0
    fake.works[0].is_over = True
    comm.barrier()
    assert all_ones(out)


def test_a_call_under_way_holds_mirrors_of_its_outputs_and_not_of_its_inputs():
    """Who needs the input must keep it, or what the allocator puts there would be sent: that is under test."""
    comm = MirrorCommunicator(Fake(), CPU)
    out, given = poisoned(50, torch.bfloat16), words(50)
    before = sum(type(o) is Mirrored for o in gc.get_objects())
    comm.all_gather_into_tensor(out.tensor, given, async_op=True)
    assert sum(type(o) is Mirrored for o in gc.get_objects()) == before + 1


# -------------------------------------------------------------------------------------------------- on two ranks


SOME = (
    "conformance/test_bit_exactness.py::test_every_alignment_across_a_block_edge",
    "conformance/test_exchange.py::test_a_work_dropped_without_wait_finishes_all_the_same",
    "conformance/test_exchange.py::test_waits_in_reverse_order_on_some_ranks_give_each_call_its_own_data",
    "conformance/test_operations.py::test_strided_tensors_are_taken_and_filled_in_their_logical_order",
    "conformance/test_operations.py::test_the_tensor_may_be_one_of_the_list",
    "conformance/test_operations.py::test_a_batch_between_all_pairs_gives_a_work_for_each",
    "conformance/test_operations.py::test_nothing_is_read_or_written_once_wait_has_returned",
)


@pytest.mark.proves("JUDGE-2")
def test_suites_pass_through_the_mirror_on_the_cpu(tmp_path):
    run = run_pytest(tmp_path / "run", *SOME, "--subject", f"{HERE}on_cpu", "--world-size=2", limit_s=110)
    assert set(run.kinds().values()) == {"PASS"}, run.out + run.err
    assert len(run.kinds()) > 30


@pytest.mark.proves("JUDGE-1")
@pytest.mark.parametrize(
    "defect, test",
    [
        ("leaky", "test_memory_is_flat_over_a_thousand_mixed_calls"),
        ("beside", "test_an_input_made_just_before_the_call_is_sent_and_read_just_behind_the_wait"),
        ("beside", "test_buffers_are_used_again_behind_the_wait_without_synchronising"),
        ("unjoined", "test_an_input_made_just_before_the_call_is_sent_and_read_just_behind_the_wait"),
        ("unjoined", "test_buffers_are_used_again_behind_the_wait_without_synchronising[late-one_ahead]"),
    ],
)
def test_a_defect_is_found_on_a_cpu_too_by_the_tests_of_devices(defect, test, tmp_path):
    nodeid = f"conformance/test_gpu.py::{test}"
    run = run_pytest(tmp_path / "run", nodeid, "--subject", f"{SPOILT}{defect}", "--world-size=2", limit_s=100)
    assert set(run.kinds().values()) == {"FAIL"}, run.out + run.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("args", [("--device", "cuda"), ("--subject", "zipccl_gpu")], ids=lambda a: a[0])
def test_where_a_gpu_is_needed_and_missing_every_test_is_an_error(args, tmp_path):
    nodeid = "conformance/test_gpu.py::test_many_calls_issued_before_the_first_wait"
    run = run_pytest(tmp_path / "run", nodeid, "--world-size=2", *args)
    assert set(run.kinds().values()) == {"ERROR"}, run.out + run.err
    assert "torch.cuda finds none" in run.err
    assert run.returncode == 1


def test_tests_that_need_tensors_on_a_gpu_say_so_on_a_cpu(tmp_path):
    nodeid = "conformance/test_gpu.py::test_a_call_in_a_graph_under_capture_is_refused_and_harms_nothing"
    run = run_pytest(tmp_path / "run", nodeid, "--world-size=2", "--subject", "zipccl")
    assert set(run.kinds().values()) == {"UNSUPPORTED"}
    assert {r["reason"] for r in run.results.values()} == {"UNSUPPORTED: needs tensors on a GPU: --device cuda"}


# --------------------------------------------------------------------------------------- backend, and selection


@pytest.mark.parametrize(
    "choice, ranks, gpus, wanted",
    [
        ("auto", 2, 2, "nccl"),
        ("auto", 1, 8, "nccl"),
        ("auto", 4, 2, "gloo"),
        ("auto", 2, 1, "gloo"),
        ("gloo", 2, 2, "gloo"),
        ("nccl", 4, 2, "nccl"),
    ],
)
def test_nccl_is_taken_where_each_rank_has_a_gpu_of_its_own(choice, ranks, gpus, wanted):
    assert backend_of(choice, ranks, gpus) == wanted


@pytest.mark.parametrize("choice", ["auto", "gloo", "nccl"])
def test_without_a_gpu_there_is_no_backend_for_one(choice):
    with pytest.raises(NoGpu, match=r"torch\.cuda finds none"):
        backend_of(choice, 2, 0)


def test_the_selection_for_gpus_has_something_of_every_suite_that_moves_tensors():
    selected = {
        name
        for name, function, _ in every_test()
        if "gpu" in [mark.name for mark in getattr(function, "pytestmark", ())]
    }
    suites = {Path(name.split("::")[0]).stem.removeprefix("test_") for name in selected}
    moving = {"bit_exactness", "collectives", "determinism", "escape_path", "exchange", "load_imbalance", "operations"}
    assert suites == moving | {"sum"}
    assert len(selected) >= 35
