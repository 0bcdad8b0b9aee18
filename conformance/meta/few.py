"""Subjects that claim few operations and have no others: torch's own, correct. What they do not claim is not judged."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
import torch.distributed as dist

from conformance.subject import OPERATIONS
from conformance.subjects.torch_native import NativeCommunicator, TorchNative

LAG_S = 0.5


class FewCommunicator:
    """Some operations of torch, of everybody on a group of its own; the others are missing."""

    def __init__(self, group: dist.ProcessGroup, operations: frozenset[str]) -> None:
        everyone = dist.get_process_group_ranks(dist.group.WORLD)
        is_whole = dist.get_process_group_ranks(group) == everyone
        self._native = NativeCommunicator(dist.new_group(everyone) if is_whole else group)
        self._operations = operations

    def __getattr__(self, name: str) -> Any:
        if name in OPERATIONS and name not in self._operations:
            raise AttributeError(f"this Communicator has no {name}")
        return getattr(self._native, name)


class Few(TorchNative):
    """torch.distributed, of which only some operations are claimed and there."""

    def __init__(self, *operations: str) -> None:
        super().__init__()
        self.name = "few: " + ", ".join(operations)
        self.capabilities = dataclasses.replace(
            self.capabilities, operations=frozenset(operations), independent=True, completion=False
        )

    def communicator(self, group: dist.ProcessGroup, *, mode: str = "", timeout_s: float = 20.0) -> Any:
        return FewCommunicator(group, self.capabilities.operations)


class Lagging(Few):
    """As Few; a Communicator of the last rank is made once the first's has been, and needs it to be there still."""

    def communicator(self, group: dist.ProcessGroup, *, mode: str = "", timeout_s: float = 20.0) -> Any:
        made = super().communicator(group, mode=mode, timeout_s=timeout_s)
        rank, last, tensor = dist.get_rank(group), dist.get_world_size(group) - 1, torch.zeros(1)
        if rank == 0 < last:
            made.sent = dist.isend(tensor, group=group, group_dst=last)
        elif rank == last > 0:
            time.sleep(LAG_S)
            dist.recv(tensor, group=group, group_src=0)
        return made


def lagging() -> Lagging:
    return Lagging("all_reduce")


def barrier() -> Few:
    return Few("barrier")


def all_gather_into_tensor() -> Few:
    return Few("all_gather_into_tensor")


def all_to_all_single() -> Few:
    return Few("all_to_all_single")


def all_reduce() -> Few:
    return Few("all_reduce")


def send_and_recv() -> Few:
    return Few("send", "recv")
