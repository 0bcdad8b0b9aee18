"""Defects that need no product: torch's own collectives, spoilt, and claiming more than they do."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from conformance.subjects.torch_native import NativeCommunicator, TorchNative


class _Spoilt(TorchNative):
    """torch_native with another communicator and further claims."""

    def __init__(self, name: str, communicator: type[NativeCommunicator], **claims: Any) -> None:
        super().__init__()
        self.name = f"broken.{name}"
        self.capabilities = dataclasses.replace(self.capabilities, **claims)
        self._communicator = communicator

    def communicator(self, group: dist.ProcessGroup, *, mode: str = "", timeout_s: float = 20.0) -> NativeCommunicator:
        return self._communicator(group)


class _FirstRankOnly(NativeCommunicator):
    """Right on rank 0; on every other rank one bit of the last element is wrong."""

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Any:
        work = super().all_gather_into_tensor(output, input, async_op)
        if not async_op and self.group.rank() and output.numel():
            output.view(-1)[-1:].view(torch.uint8)[0] ^= 1
        return work


class _WritesBehind(NativeCommunicator):
    """Right words, and two bytes written behind the output."""

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Any:
        work = super().all_gather_into_tensor(output, input, async_op)
        storage = torch.empty(0, dtype=torch.uint8).set_(output.untyped_storage())
        end = (output.storage_offset() + output.numel()) * output.element_size()
        storage[end : end + 2] = 0
        return work


class _SilentOnMismatch(NativeCommunicator):
    """Claims to check arguments; cuts or repeats what does not fit instead."""

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Any:
        whole = torch.zeros(input.numel() * self.group.size(), dtype=input.dtype)
        work = super().all_gather_into_tensor(whole, input.view(-1), async_op)
        n = min(output.numel(), whole.numel())
        output.view(-1)[:n] = whole[:n].to(output.dtype)
        return work


def unordered_sum() -> _Spoilt:
    """gloo's own reduction, which rounds to bf16 at every step and in an order of its own, called ordered."""
    return _Spoilt("unordered_sum", NativeCommunicator, ordered_sum=True)


def first_rank_only() -> _Spoilt:
    return _Spoilt("first_rank_only", _FirstRankOnly)


def writes_behind() -> _Spoilt:
    return _Spoilt("writes_behind", _WritesBehind)


def silent_on_mismatch() -> _Spoilt:
    return _Spoilt("silent_on_mismatch", _SilentOnMismatch, checks_arguments=True)
