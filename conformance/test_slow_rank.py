"""Each rank in turn is late: nothing but the time changes. Too late, and all say who; in time, all know how much."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from conformance.exercise import FURTHER, OPERATIONS, ROOTED, Issued, exercise, inputs_of_all, issue, supported
from conformance.oracle import check_output, misaligned, poisoned, tensor_of
from conformance.plugin import World
from conformance.strategies import patterns

LATE_S = 0.06
LIMIT_S = 1.5
OVER_S = 5.0
"""The timeout of calls that must run out, and what more they may take to say so."""
MAKING_S = 10.0
"""What making a Communicator may take at least: ranks start far apart."""

COLLECTIVES = tuple(o for o in (*OPERATIONS, *FURTHER) if o != "batch_isend_irecv")


def start(world: World, comm: Any, operation: str, seed: int, async_op: bool = True) -> Issued:
    inputs = inputs_of_all(operation, "gaussian", 6001, world.world_size, "bfloat16", seed)
    return issue(world, comm, operation, inputs, "bfloat16", async_op=async_op, root=seed, what=f"(call {seed})")


# ------------------------------------------------------------------------------------------------------ in time


@pytest.mark.proves("SLOW-1", "SLOW-2")
def test_each_rank_in_turn_late_before_each_operation_changes_nothing(world, mode):
    comm = world.communicator(mode)
    for operation in supported(world, (*OPERATIONS, *FURTHER)):
        for late in range(world.world_size):
            if world.rank == late:
                time.sleep(LATE_S)
            start(world, comm, operation, late, async_op=False).finish()


@pytest.mark.proves("SLOW-1")
def test_one_rank_late_before_every_wait_and_not_before_the_calls(world, mode):
    """Progress must not hang on wait(): the calls of the others end while one rank has not waited yet."""
    comm = world.communicator(mode)
    for late in range(world.world_size):
        calls = [start(world, comm, o, late) for o in supported(world, COLLECTIVES)]
        if world.rank == late:
            time.sleep(4 * LATE_S)
        for call in calls:
            call.finish()


@pytest.mark.requires(operations="all_to_all_single")
@pytest.mark.proves("SLOW-1", "SLOW-2")
@pytest.mark.parametrize("shape", ["jitter", "ramp", "on_and_off", "once"])
def test_lateness_of_any_shape_changes_no_bit(world, shape):
    comm = world.communicator()
    rng = np.random.default_rng(17)  # the same on all ranks
    late = world.world_size - 1
    for k in range(12):
        waits = {
            "jitter": rng.random(world.world_size)[world.rank] * LATE_S,
            "ramp": k * LATE_S / 12 * (world.rank == late),
            "on_and_off": LATE_S * (world.rank == late) * (k // 3 % 2),
            "once": 5 * LATE_S * (world.rank == late and k == 6),
        }
        time.sleep(waits[shape])
        start(world, comm, "all_to_all_single", k).finish()


@pytest.mark.operation("all_gather_into_tensor")
@pytest.mark.proves("SLOW-2")
def test_slow_first_use_is_no_timeout_of_what_was_called_before(world):
    """A rank that spends long on its first call (compiling, allocating) is late to the second as well."""
    comm = world.communicator(timeout_s=4 * LIMIT_S)
    calls = [start(world, comm, "all_gather_into_tensor", 0)]
    if world.rank == 0:
        time.sleep(LIMIT_S)
    calls += [start(world, comm, "all_gather_into_tensor", k) for k in (1, 2)]
    for call in calls:
        call.finish()


# ----------------------------------------------------------------------------------------------- over the limit


def outcome(action: Callable[[], Any], began: float) -> tuple[str, str, float]:
    """(class name of the error, "" if none; its text; seconds after began)."""
    try:
        action()
    except Exception as e:
        return type(e).__name__, str(e), time.monotonic() - began
    return "", "", time.monotonic() - began


def named(text: str) -> set[int]:
    """The ranks an error names last: "rank 3", "ranks [1, 3]"; before it may say which message it speaks of."""
    found = re.findall(r"ranks? (\d+|\[[\d, ]+\])", text)
    return {int(n) for n in re.findall(r"\d+", found[-1])} if found else set()


def settle(world: World, late: int, calls: dict[str, Callable[[], Any]]) -> dict[str, list[tuple[str, str, float]]]:
    """Make the calls on all ranks, on `late` only when the others have given up; the outcomes of all ranks by call.

    The calls run side by side, each on a thread of its own, so that all run out at one time.
    """
    mine: dict[str, tuple[str, str, float]] = {}
    world.barrier_store("before the late ones")
    if world.rank == late:
        world.exchange(None, limit_s=LIMIT_S + 4 * OVER_S)
    began = time.monotonic()
    threads = []
    for name, call in calls.items():

        def run(name: str = name, call: Callable[[], Any] = call) -> None:
            mine[name] = outcome(call, began)

        threads.append(threading.Thread(target=run, name=name, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(LIMIT_S + 2 * OVER_S)
    if world.rank != late:
        world.exchange(None, limit_s=LIMIT_S + 4 * OVER_S)
    everyone = world.exchange(dict(mine), limit_s=LIMIT_S + 4 * OVER_S)
    return {name: [told.get(name, ("", "did not return", 0.0)) for told in everyone] for name in calls}


def names_the_late_one(
    what: str, outcomes: list[tuple[str, str, float]], late: int, ranks: list[int], limit_s: float = LIMIT_S
) -> None:
    for rank in ranks:
        kind, text, seconds = outcomes[rank]
        assert kind == "RankTimeout", (
            f"{what}, rank {late} late: wanted RankTimeout on rank {rank}, got {kind} {text!r}"
        )
        assert named(text) == {late}, f"{what}: the error on rank {rank} must name rank {late} alone, says {text!r}"
        limit = limit_s + OVER_S
        assert seconds < limit, f"{what}: rank {rank} took {seconds:.1f} s to say so, the limit is {limit:g} s"


@pytest.mark.requires("names_stragglers")
@pytest.mark.limit_s(120)
@pytest.mark.proves("SLOW-3", "SLOW-4", "SLOW-5")
def test_a_rank_over_the_limit_is_named_by_all_in_every_operation(world):
    """By itself too, when it comes at last; and no call hangs."""
    if world.world_size == 1:
        return
    late_rank = world.world_size - 1
    comms = {o: world.communicator(timeout_s=LIMIT_S) for o in supported(world, (*COLLECTIVES, "barrier"))}
    calls: dict[str, Callable[[], Any]] = {
        o: (lambda o=o: start(world, comms[o], o, 0, async_op=False)) if o != "barrier" else comms[o].barrier
        for o in comms
    }
    told = settle(world, late_rank, calls)
    for operation, outcomes in told.items():
        names_the_late_one(operation, outcomes, late_rank, list(range(world.world_size)))


@pytest.mark.operation("all_gather_into_tensor")
@pytest.mark.requires("names_stragglers")
@pytest.mark.requires(operations="barrier")
@pytest.mark.proves("SLOW-3", "SLOW-6", "SLOW-7")
def test_every_rank_over_the_limit_is_named_and_a_new_communicator_works(world):
    """One rank fails, too, before it makes its Communicator on a second group, whose other ranks wait in vain."""
    if world.world_size == 1:
        return
    everyone = list(range(world.world_size))
    absent, second = everyone[-1], world.subgroup(everyone)
    told: list[tuple[str, str, float]] = []
    began = time.monotonic()

    def make() -> None:
        told.append(outcome(lambda: world.subject.communicator(second, timeout_s=LIMIT_S), began))

    making = threading.Thread(target=make, daemon=True)
    if world.rank != absent:
        making.start()
    for late in everyone:
        comm = world.communicator(timeout_s=LIMIT_S)
        call = {"all_gather": lambda comm=comm: start(world, comm, "all_gather_into_tensor", 0, async_op=False)}
        outcomes = settle(world, late, call)["all_gather"]
        names_the_late_one("all_gather_into_tensor", outcomes, late, everyone)
        again = outcome(comm.barrier, time.monotonic())
        assert again[0] == "RankTimeout", f"a finished Communicator repeats its error, got {again}"
        comm.close()
    start(world, world.communicator(), "all_gather_into_tensor", 1).finish()
    if world.rank != absent:
        making.join(MAKING_S + OVER_S)
    outcomes = world.exchange(told[0] if told else ("", "did not return", 0.0), limit_s=MAKING_S + 2 * OVER_S)
    names_the_late_one("making a Communicator", outcomes, absent, everyone[:-1], MAKING_S)


@pytest.mark.operation("send_recv")
@pytest.mark.requires("names_stragglers", operations=("send", "recv", "barrier"))
@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.proves("SLOW-3")
def test_a_late_side_of_a_message_is_named_by_the_other(world, side):
    if world.world_size == 1:
        return
    comm = world.communicator(timeout_s=LIMIT_S)
    x = torch.zeros(9, dtype=torch.bfloat16, device=world.device)
    late = 0 if side == "sender" else 1
    call = {0: lambda: comm.send(x, dst=1), 1: lambda: comm.recv(x, src=0)}.get(world.rank, lambda: None)
    outcomes = settle(world, late, {"message": call})["message"]
    names_the_late_one(f"a message whose {side} is late", outcomes, late, [0, 1])
    mine = outcome(comm.barrier, time.monotonic())
    names_the_late_one("the next call", world.exchange(mine), late, list(range(world.world_size)))


# -------------------------------------------------------------------------------------------------- who was late


@pytest.mark.requires("names_stragglers")
@pytest.mark.proves("SLOW-8")
def test_arrivals_tell_the_straggler_and_how_late_it_was(world, record_row):
    if world.world_size == 1:
        return
    comm = world.communicator()
    late_s = 0.4
    last: Counter[int] = Counter()
    for late_in_turn, operation in enumerate(supported(world, COLLECTIVES)):
        late = late_in_turn % world.world_size
        world.barrier_store(operation)
        if world.rank == late:
            time.sleep(late_s)
        before_s = time.monotonic()
        call = start(world, comm, operation, 0)
        after_s = time.monotonic()
        call.finish()
        called_s = world.exchange(before_s if world.rank == late else after_s)
        arrivals = list(comm.last_arrivals)
        ranks = [rank for rank, _ in arrivals]
        lateness = [us for _, us in arrivals]
        assert sorted(ranks) == list(range(world.world_size)), f"{operation}: arrivals must list every rank: {arrivals}"
        assert lateness == sorted(lateness), f"{operation}: arrivals must be in order: {arrivals}"
        assert lateness[0] == 0, f"{operation}: lateness counts from the first: {arrivals}"
        last[ranks[-1]] += 1
        late_us = dict(arrivals)[late]
        if world.rank != late:
            # Before this rank had called, somebody had come; and before the late one called, its record had not.
            least_us = 1e6 * (called_s[late] - called_s[world.rank])
            assert late_us >= least_us, f"{operation}: rank {late} was {least_us:.0f} µs late or more: {arrivals}"
        told = world.exchange(late_us)
        record_row("stragglers", operation=operation, late_rank=late, slept_us=1e6 * late_s, lateness_us=max(told))
    assert dict(comm.arrived_last) == dict(last), f"last were {dict(last)}, arrived_last says {dict(comm.arrived_last)}"


@pytest.mark.operation("send_recv")
@pytest.mark.requires(operations=("isend", "irecv"))
@pytest.mark.proves("SLOW-1")
def test_a_late_receiver_or_sender_gets_and_gives_the_same_words(world, mode):
    comm, me = world.communicator(mode), world.rank
    peer = me ^ 1
    if peer >= world.world_size:
        return
    for late in (0, 1):
        if me % 2 == late:
            time.sleep(2 * LATE_S)
        words, theirs = patterns("gaussian", 9001, me, late), patterns("gaussian", 9001, peer, late)
        mine = misaligned(tensor_of(words, torch.bfloat16, world.device))
        out = poisoned(9001, torch.bfloat16, world.device)
        works = [comm.isend(mine, dst=peer), comm.irecv(out.tensor, src=peer)]
        for work in works:
            work.wait()
        check_output(out, theirs, f"message from rank {peer}, side {late} late")


@pytest.mark.parametrize("operation", ROOTED)
@pytest.mark.proves("SLOW-1")
def test_a_late_root_and_late_others(world, operation):
    world.require(operations=operation)
    comm = world.communicator()
    for late in (0, world.world_size - 1):
        if world.rank == late:
            time.sleep(2 * LATE_S)
        inputs = inputs_of_all(operation, "gaussian", 9001, world.world_size, "bfloat16", late)
        exercise(world, comm, operation, inputs, "bfloat16", root=0)
