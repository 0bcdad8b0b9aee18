"""What one rank does: the five beats of a scenario, as a training script would do them.

1. clean: the calls, without a fault;  2. arm;  3. armed: the calls again, with other words, while faults strike;
4. (the judge's, afterwards);  5. disarm, and healed: the calls once more, on the same Communicator or on one of a new
group of the survivors.

It writes down what it did and what it was told, and judges nothing.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from faults.fault import Fault, Moment, Planned, Shelf, call_faults
from faults.injector import Injector
from faults.kinds import KINDS
from faults.kinds.order import Order
from faults.kinds.raise_error import SCRIPT_DIES, TEXT
from faults.ledger import Ledger
from faults.scenario import Scenario
from faults.workload import POINT_TO_POINT, Place, Running, seed_of, start

MEET_TIMEOUT_S = 30.0
RELEASE_LIMIT_S = 5.0


def maker_of(subject: str) -> Callable[..., Any]:
    """What makes Communicators with a seam: of "zipccl", or of "broken.NAME", which may spoil its whole process.

    Raises:
        ValueError: no such subject.
    """
    if subject == "zipccl":
        from conformance.subjects.zipccl import communicator_with_seam

        return communicator_with_seam
    from conformance.subjects.broken import under_faults

    name = subject.removeprefix("broken.")
    if name == subject or name not in under_faults.BROKEN:
        raise ValueError(f"no subject {subject!r}; zipccl, or broken. and one of {sorted(under_faults.BROKEN)}")
    return under_faults.BROKEN[name]


def resources() -> dict[str, int]:
    """What this process holds: Python threads, threads of the system, file descriptors, resident bytes."""
    gc.collect()
    # Memory of its own: pages of the libraries count as resident too once they are touched, as by the first exception.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "python_threads": threading.active_count(),
        "threads": len(os.listdir("/proc/self/task")),
        "file_descriptors": len(os.listdir("/proc/self/fd")),
        "resident_bytes": 1024 * int(status["RssAnon"].split()[0]),
    }


class RankRun:
    """One scenario on one rank.

    Args:
        job: {"directory", "scenario", "subject", "key", "plan" or None}.
        rank: global.
        store: of the launch.
    """

    def __init__(self, job: dict[str, Any], rank: int, store: Any) -> None:
        self.scenario = Scenario.of(job["scenario"])
        self.directory, self.rank, self.job = Path(job["directory"]), rank, job
        self.ledger = Ledger(self.directory / f"rank{rank}.jsonl")
        self.store = dist.PrefixStore(job["key"], store)
        self.injector = Injector(self.ledger)
        self.place: Place | None = None
        self.faults: list[Fault] = []

    def run(self) -> None:
        """All of it. What goes wrong in the harness itself is an event "harness_error"."""
        self.ledger.write("start", pid=os.getpid(), rank=self.rank)
        try:
            before = resources()
            plan = self._share_plan()
            self._beats(plan)
            self.ledger.write("resources", before=before, after=self._released(before))
        except Exception:
            self.ledger.write("harness_error", text=traceback.format_exc())
        finally:
            self.ledger.write("end")
            self.ledger.close()

    # Meeting without the thing under test

    def _share_plan(self) -> list[Planned]:
        """Rank 0 draws, or has been given, the plan; all others read it."""
        if self.rank == 0:
            given = self.job.get("plan")
            text = json.dumps(given if given is not None else [p.as_json() for p in self.scenario.plan()], indent=1)
            self.store.set("plan", text)
            (self.directory / "plan.json").write_text(text)
        self.store.wait(["plan"], timedelta(seconds=MEET_TIMEOUT_S))
        entries = json.loads(self.store.get("plan"))
        self.ledger.write("plan", entries=entries)
        return [Planned.of(entry) for entry in entries]

    def _meet(self, name: str, ranks: Sequence[int]) -> None:
        """Wait for other global ranks, through the store."""
        self.store.set(f"meet/{name}/{self.rank}", "")
        self.store.wait([f"meet/{name}/{r}" for r in ranks], timedelta(seconds=MEET_TIMEOUT_S))

    # The beats

    def _beats(self, plan: list[Planned]) -> None:
        scenario = self.scenario
        timeout = timedelta(seconds=scenario.policy["timeout_s"] + MEET_TIMEOUT_S)
        self._init_world("group", self.rank, scenario.world_size, timeout)
        try:
            # All ranks make all groups: with use_local_synchronization a group's name depends on how many groups a
            # rank is in, and ranks that are in different numbers of them would wait for each other for ever.
            bystanders = self._subgroup(scenario.bystanders)
            group = self._subgroup(scenario.members)
            aside = self._bystanders(bystanders)
            if self.rank in scenario.members:
                assert group is not None
                self._in_group(group, plan, aside)
            elif aside is not None:
                self._aside(aside)
        finally:
            self.place = None
            dist.destroy_process_group()

    def _init_world(self, name: str, rank: int, size: int, timeout: timedelta) -> None:
        store = dist.PrefixStore(name, self.store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)

    def _subgroup(self, members: Sequence[int]) -> dist.ProcessGroup | None:
        """The world's own group if it is all of it; None if this rank is not in it."""
        if len(members) in (0, self.scenario.world_size):
            return dist.group.WORLD if members else None
        group = dist.new_group(list(members), backend="gloo", timeout=timedelta(seconds=MEET_TIMEOUT_S))
        return group if self.rank in members else None

    def _group_of_survivors(self, survivors: Sequence[int]) -> dist.ProcessGroup:
        """A new group, without a word from the ranks that are gone: by torch's new_group, or as a new world."""
        timeout = timedelta(seconds=MEET_TIMEOUT_S)
        if len(self.scenario.members) == self.scenario.world_size:
            group = dist.new_group(list(survivors), timeout=timeout, backend="gloo", use_local_synchronization=True)
        else:
            dist.destroy_process_group()
            self._init_world("survivors", survivors.index(self.rank), len(survivors), timeout)
            group = dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _in_group(self, group: dist.ProcessGroup, plan: list[Planned], aside: Any) -> None:
        scenario = self.scenario
        mine = scenario.members.index(self.rank)
        self.place = Place(mine, scenario.members, group)
        first = self._make("clean", scenario.policy)
        self._calls(first, "clean", fresh=True)
        self._meet("armed", scenario.members)

        shelf = Shelf(self.store)
        self.faults = [KINDS[p.fault](p, mine, self.ledger, shelf) for p in plan if mine in p.ranks]
        self.injector.arm(self.faults)
        for each in self.faults:
            if isinstance(each, Order):
                each.calls = {sequence: call for call, sequence in scenario.numbered_calls}
        armed: Any = first
        remade = any(p.phase == "make" for p in plan)
        if remade:
            policy = dict(scenario.policy)
            for each in self.faults:
                policy = each.policy(policy)
            armed = self._make("armed", policy)
        failed = armed is None
        if armed is not None:
            failed = self._calls(armed, "armed", fresh=remade)
        self.injector.disarm()
        if aside is not None:
            self._aside(aside)

        if scenario.expect["then"] == "new_group":
            if failed and armed is not None:
                self._repeat(armed)
            for communicator in {id(c): c for c in (first, armed) if c is not None}.values():
                self._close(communicator, "armed")
            survivors = [scenario.members[r] for r in scenario.survivors]
            self._meet("survivors", survivors)
            self.place = Place(survivors.index(self.rank), survivors, self._group_of_survivors(survivors))
            healed = self._make("healed", scenario.policy)
            if healed is not None:
                self._calls(healed, "healed", fresh=True)
                self._close(healed, "healed")
            return
        if remade and armed is not None:
            self._close(armed, "armed")
        if first is not None:
            self._meet("healed", [scenario.members[r] for r in scenario.survivors])
            self._calls(first, "healed", fresh=False, rounds_before=1 if remade else 2)
            self._close(first, "healed")

    def _bystanders(self, group: dist.ProcessGroup | None) -> Any:
        """A Communicator of another group, made before anything happens; with the place of this rank in it."""
        scenario = self.scenario
        if group is None or self.rank not in scenario.bystanders:
            return None
        place = Place(scenario.bystanders.index(self.rank), scenario.bystanders, group)
        return place, maker_of(self.job["subject"])(group, None, **scenario.policy)

    def _aside(self, aside: Any) -> None:
        place, communicator = aside
        self._meet("bystanders", self.scenario.bystanders)
        for index, (call, sequence) in enumerate(self.scenario.numbered_calls):
            seed = seed_of(self.scenario.seed, "bystanders", index)
            start(call, place, communicator, self.ledger, "bystanders", index, sequence, seed).finish()
        self._close(communicator, "bystanders")

    # Steps

    def _make(self, beat: str, policy: dict[str, Any]) -> Any:
        """A Communicator, or None if making it failed."""
        began = time.monotonic()
        assert self.place is not None
        communicator: Any = None
        how: dict[str, Any] = {"outcome": "made"}
        try:
            communicator = maker_of(self.job["subject"])(self.place.group, self.injector, **policy)
        except Exception as exc:
            how = {"outcome": "error", "error": type(exc).__name__, "text": str(exc)}
        self.ledger.write("made", beat=beat, took_s=round(time.monotonic() - began, 6), **how)
        return communicator

    def _calls(self, communicator: Any, beat: str, *, fresh: bool, rounds_before: int = 1) -> bool:
        """Make the scenario's calls; True if one failed in a way after which no further one is made."""
        scenario, failed = self.scenario, False
        rounds = 0 if fresh else rounds_before
        messages = sum(call.operation == POINT_TO_POINT for call in scenario.calls)
        self.injector.begin(beat, rounds * messages)
        under_way: list[Running] = []
        for index, (planned_call, sequence) in enumerate(scenario.numbered_calls):
            call = planned_call
            if beat == "armed":
                call = call_faults(self.faults, call, sequence)
            seen_as = "point_to_point" if call.operation == POINT_TO_POINT else call.operation
            self._script("before", seen_as, sequence)
            self.injector.calling(sequence)
            assert self.place is not None
            seed = seed_of(scenario.seed, beat, index)
            running = start(call, self.place, communicator, self.ledger, beat, index, sequence, seed)
            if call.asynchronous and running.failed is None:
                under_way.append(running)
            elif (error := running.finish()) is not None:
                self._die_of(error)
                failed = True
                if scenario.expect["then"] == "new_group":
                    break
            self._script("after", seen_as, sequence)
        for running in reversed(under_way):
            failed = running.finish() is not None or failed
        return failed

    def _script(self, phase: str, operation: str, sequence: int) -> None:
        try:
            self.injector.tell(Moment(phase, operation, sequence))
        except Exception as exc:
            self._die_of(exc)
            raise

    def _die_of(self, error: BaseException) -> None:
        """A script that meets an exception it does not expect ends with exit code 1."""
        injected = any(p.planned.fault == "raise_error" and p.planned.phase in SCRIPT_DIES for p in self.faults)
        if injected and str(error) == TEXT:
            self.ledger.write("dies", error=type(error).__name__, text=str(error))
            os._exit(1)

    def _repeat(self, communicator: Any) -> None:
        """A Communicator that is finished says so again, with the same error."""
        self.injector.begin("armed", 0)
        assert self.place is not None
        barrier = type(self.scenario.calls[0])("barrier")
        start(barrier, self.place, communicator, self.ledger, "armed", -1, -1, "").finish()

    def _close(self, communicator: Any, beat: str) -> None:
        began = time.monotonic()
        how: dict[str, Any] = {"outcome": "closed"}
        try:
            communicator.close()
        except Exception as exc:
            how = {"outcome": "error", "error": type(exc).__name__, "text": str(exc)}
        self.ledger.write("closed", beat=beat, took_s=round(time.monotonic() - began, 6), **how)

    def _released(self, before: dict[str, int]) -> dict[str, int]:
        """Resources once threads and descriptors are back to what they were, or when waiting for that is over."""
        self.faults, self.injector = [], Injector(self.ledger)
        until = time.monotonic() + RELEASE_LIMIT_S
        while True:
            after = resources()
            back = all(after[k] <= before[k] for k in ("python_threads", "threads", "file_descriptors"))
            if back or time.monotonic() > until:
                return after
            time.sleep(0.02)


def serve(rank: int, commands_fd: int, replies_fd: int) -> None:
    """Take jobs, one JSON line each, until the pipe ends; the first line is the store's port. Never returns normally.

    Standard output and error go to the job's rank<r>.log.
    """
    import faulthandler

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with os.fdopen(commands_fd) as commands, os.fdopen(replies_fd, "w", buffering=1) as replies:
        store: Any = None
        for line in commands:
            message = json.loads(line)
            if store is None:
                store = dist.TCPStore(
                    "127.0.0.1", message["port"], is_master=False, timeout=timedelta(seconds=MEET_TIMEOUT_S)
                )
                continue
            log = os.open(Path(message["directory"]) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            faulthandler.enable(all_threads=True)
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            RankRun(message, rank, store).run()
            replies.write(f"{rank}\n")
