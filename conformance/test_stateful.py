"""Any interleaving of asynchronous calls gives each call its own data: programs of calls are drawn, and shrunk.

A program is a list of steps that every rank runs at its own speed: issue a call on one of two Communicators of the
whole world or on one of a part of it, wait for a call on some ranks now and on the others later, drop a Work, meet at
a barrier of a Communicator or of torch's group. What is still open at the end is waited for in an order of the rank's
own. Every output is checked bit for bit.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from conformance.exercise import OPERATIONS, Issued, Part, inputs_of_all, issue, supported
from conformance.in_step import Program, programs_in_step

WHOLE = ("a", "b")
WHERE = (*WHOLE, "part")
SIZES = (300, 1, 0, 9000)
MOST_OPEN = 6
LATE_S = 0.01
TIMEOUT_S = 6.0

ranks = st.integers(0, 0b1111)
"""A set of ranks, as bits of (rank mod 4)."""


class Calls(Program):
    """Draws programs; remembers which calls are open, so that steps name calls that exist."""

    def begin(self) -> None:
        super().begin()
        self.open: list[int] = []
        self.issued = 0

    def _new(self) -> int:
        self.issued += 1
        self.open.append(self.issued)
        return self.issued

    def _one(self, which: int) -> int:
        return self.open[which % len(self.open)]

    @precondition(lambda self: len(self.open) < MOST_OPEN)
    @rule(where=st.sampled_from(WHERE), operation=st.integers(0, 2), size=st.sampled_from(SIZES))
    def issue(self, where: str, operation: int, size: int) -> None:
        self.program.append(("issue", self._new(), where, operation, size))

    @precondition(lambda self: len(self.open) < MOST_OPEN)
    @rule(operation=st.integers(0, 2), swapped=ranks)
    def issue_on_both(self, operation: int, swapped: int) -> None:
        """One call on each Communicator of the world, in the other order on some ranks."""
        self.program.append(("both", self._new(), self._new(), operation, swapped))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, MOST_OPEN), on=ranks)
    def wait(self, which: int, on: int) -> None:
        """Some ranks wait now; the others at a later wait, or at the end."""
        self.program.append(("wait", self._one(which), on))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, MOST_OPEN))
    def drop(self, which: int) -> None:
        """The Work is forgotten without a wait."""
        call = self._one(which)
        self.open.remove(call)
        self.program.append(("drop", call))

    @rule(where=st.sampled_from((*WHERE, "torch")))
    def barrier(self, where: str) -> None:
        self.program.append(("barrier", where))

    @rule(late=ranks)
    def be_late(self, late: int) -> None:
        self.program.append(("late", late))


class Player:
    """Runs programs on this rank, each with Communicators of its own."""

    def __init__(self, world: Any, mode: str, operations: list[str]) -> None:
        self.world, self.mode, self.operations = world, mode, operations
        members = list(range(world.world_size))[: max(1, world.world_size - 1)]
        group = world.subgroup(members)
        self.part = Part(world, members, group) if group is not None else None

    def play(self, program: list[Any]) -> None:
        self.communicators: dict[str, Any] = {}
        self.open: dict[int, Issued] = {}
        self.dropped: dict[str, list[Issued]] = {}
        self.where: dict[int, str] = {}
        for where in self._used(program):  # in one order on all ranks: making them is collective
            self._open(where)
        for step in program:
            getattr(self, f"do_{step[0]}")(*step[1:])
        self._finish()

    @staticmethod
    def _used(program: list[Any]) -> list[str]:
        named = {word for step in program for word in step if word in WHERE}
        if any(step[0] == "both" for step in program):
            named |= set(WHOLE)
        return [where for where in WHERE if where in named]

    def _open(self, where: str) -> None:
        if where == "part" and self.part is None:
            return
        group = self.part.group if where == "part" and self.part else None
        self.communicators[where] = self.world.communicator(self.mode, group, timeout_s=TIMEOUT_S)

    def _chosen(self, mask: int) -> bool:
        return bool(mask >> self.world.rank % 4 & 1)

    def do_issue(self, call: int, where: str, operation: int, size: int) -> None:
        comm = self.communicators.get(where)
        if comm is None:
            return
        there = self.part if where == "part" and self.part else self.world
        name = self.operations[operation % len(self.operations)]
        inputs = inputs_of_all(name, "gaussian", size, there.world_size, "bfloat16", seed=call)
        self.where[call] = where
        self.open[call] = issue(there, comm, name, inputs, "bfloat16", async_op=True, what=f"(call {call} on {where})")

    def do_both(self, first: int, second: int, operation: int, swapped: int) -> None:
        pair = [(first, "a"), (second, "b")]
        for call, where in pair[::-1] if self._chosen(swapped) else pair:
            self.do_issue(call, where, operation, SIZES[0])

    def do_wait(self, call: int, on: int) -> None:
        if self._chosen(on) and call in self.open:
            self.open.pop(call).finish()

    def do_drop(self, call: int) -> None:
        if call in self.open:
            issued = self.open.pop(call)
            issued.work = None
            gc.collect()
            self.dropped.setdefault(self.where[call], []).append(issued)

    def do_barrier(self, where: str) -> None:
        if where == "torch":
            dist.barrier(self.world.group)
        elif where in self.communicators:
            self.communicators[where].barrier()
            for issued in self.dropped.pop(where, []):  # calls of one Communicator finish in order
                issued.check_dropped()

    def do_late(self, late: int) -> None:
        if self._chosen(late):
            time.sleep(LATE_S)

    def _finish(self) -> None:
        left = sorted(self.open)
        for call in left[::-1] if self.world.rank % 2 else left:
            self.open.pop(call).finish()
        for where in list(self.dropped):
            self.do_barrier(where)


@pytest.mark.requires("independent", operations="barrier")
@pytest.mark.limit_s(150)
@pytest.mark.proves("EXCH-1", "EXCH-6", "WORK-4")
def test_any_interleaving_of_asynchronous_calls_gives_each_its_own_data(world, mode):
    player = Player(world, mode, supported(world, OPERATIONS))
    programs_in_step(world, Calls, player.play, max_examples=4, max_steps=30)
