"""Torch's own collectives, or our pipeline on a device made of threads, with one defect each that must be found.

By conformance/test_gpu.py; named by --subject.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from conformance.subjects.torch_native import NativeCommunicator, TorchNative
from conformance.subjects.zipccl import ZipcclCommunicator, ZipcclSubject
from conformance.subjects.zipccl_pipeline import PipelineSubject

KEPT_BYTES = 1 << 20


class _Leaky(NativeCommunicator):
    """Forgets to give back a buffer of every call."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._kept: list[torch.Tensor] = []

    def _count(self, n_bytes: int) -> None:
        super()._count(n_bytes)
        self._kept.append(torch.full((KEPT_BYTES,), 1, dtype=torch.uint8))


class _Beside(NativeCommunicator):
    """Writes one element too many."""

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Any:
        work = super().all_gather_into_tensor(output, input, async_op)
        torch.as_strided(output, (1,), (1,), output.storage_offset() + output.numel()).fill_(1)
        return work


class _Spoilt(TorchNative):
    def __init__(self, kind: type[NativeCommunicator]) -> None:
        super().__init__()
        self._kind = kind

    def communicator(self, group: dist.ProcessGroup, *, mode: str = "", timeout_s: float = 20.0) -> NativeCommunicator:
        return self._kind(group)


class _Unjoined(PipelineSubject):
    """Whose wait() lets the current stream run ahead of the words."""

    def communicator(self, group: dist.ProcessGroup, *, mode: str = "", timeout_s: float = 20.0) -> ZipcclCommunicator:
        made = super().communicator(group, mode=mode, timeout_s=timeout_s)
        made.inner._exchange.pipelines["cpu"].device.join = lambda event: None  # type: ignore[method-assign]
        return made


def unjoined() -> ZipcclSubject:
    return _Unjoined()


def leaky() -> TorchNative:
    return _Spoilt(_Leaky)


def beside() -> TorchNative:
    return _Spoilt(_Beside)
