"""pytest-xdist: each worker has ranks of its own, a death in one harms nobody, and there is one report."""

from __future__ import annotations

import pytest

from conformance.meta.launching import Launched, run_file
from conformance.spread import devices_of

pytestmark = pytest.mark.outer

SOURCE = """
import os, signal
import pytest
import torch
import torch.distributed as dist

@pytest.mark.parametrize("i", range(12))
def test_sum(world, i, record_row):
    x = torch.tensor([float(i + world.rank)])
    dist.all_reduce(x)
    assert x.item() == 2 * i + 1
    record_row("where", port=os.environ["MASTER_PORT"], worker=os.environ["PYTEST_XDIST_WORKER"])
    assert "PYTEST_XDIST_TESTRUNUID" in os.environ

def test_fails(world):
    assert world.rank == 0, "planted"

def test_dies(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))

def test_skips(world):
    world.require("ordered_sum")

def test_sum_at_the_end(world):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2
"""


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return run_file(tmp_path_factory.mktemp("spread"), SOURCE, 2, "-n2", "--dist=load")


def test_every_test_has_its_verdict_once(spread):
    kinds = spread.kinds()
    assert kinds == {f"test_sum[{i}]": "PASS" for i in range(12)} | {
        "test_fails": "FAIL",
        "test_dies": "FAIL",
        "test_skips": "UNSUPPORTED",
        "test_sum_at_the_end": "PASS",
    }, spread.out + spread.err
    assert spread.returncode == 1
    assert not spread.problems
    assert "13 passed" in spread.out
    assert "2 failed" in spread.out


def test_each_worker_has_ranks_and_a_port_of_its_own(spread):
    places = {(row["worker"], row["port"]) for row in spread.report["rows"]}
    assert {worker for worker, _ in places} == {"gw0", "gw1"}
    ports = [{port for worker, port in places if worker == w} for w in ("gw0", "gw1")]
    assert not ports[0] & ports[1], places


def test_the_one_junit_and_the_reasons_name_ranks(spread):
    assert spread.results["test_dies"]["reason"] == "rank 1 died: signal SIGKILL"
    assert "rank 1 failed in call" in spread.results["test_fails"]["reason"]
    assert "rank 1 failed in call" in spread.out
    junit = spread.junit()
    assert set(junit) == set(spread.results)
    assert junit["test_dies"] == junit["test_fails"] == "failure"
    assert junit["test_skips"] == "skipped"


def test_gpus_are_dealt_out_without_overlap(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert devices_of(0, 2, 2) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert devices_of(1, 2, 2) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    with pytest.raises(pytest.UsageError, match="wants 6 GPUs, there are 4"):
        devices_of(0, 3, 2)
