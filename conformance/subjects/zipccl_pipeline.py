"""Our pipeline for devices as the judge sees it, on a device made of threads: the suites without a GPU.

pytest conformance --subject zipccl_pipeline

What it proves is the pipeline's own: chunks, phases, orders between streams, sizes, sums; not kernels, and not NCCL.
"""

from __future__ import annotations

import dataclasses
import weakref

import torch.distributed as dist

from conformance.subjects.zipccl import ZipcclCommunicator, ZipcclSubject, policy_of
from zipccl_core import Communicator
from zipccl_core.collectives import pipeline
from zipccl_core.tests.thread_device import ThreadDevice, ThreadLink

PAUSE_S = 0.0002
MOST_IN_ORDER_BYTES = 1 << 16  # so that calls of either kind are made: in one stream, and in several


class PipelineSubject(ZipcclSubject):
    """zipccl_core, whose CPU tensors count as a device's; verdicts are waited for, so that each call has its own,
    but in the variant "late"."""

    name = "zipccl_pipeline"
    capabilities = dataclasses.replace(
        ZipcclSubject.capabilities,
        codec=False,
    )

    def communicator(self, group: dist.ProcessGroup, *, mode: str = "", timeout_s: float = 20.0) -> ZipcclCommunicator:
        made = Communicator(group, policy_of(mode, timeout_s, verify="wait"))
        pipeline.MOST_IN_ORDER_BYTES = MOST_IN_ORDER_BYTES
        device = ThreadDevice(PAUSE_S)
        exchange = made._exchange
        exchange.transport.share_memory(exchange.board, exchange.rank, timeout_s)
        exchange.pipelines["cpu"] = pipeline.Pipeline(exchange, device, ThreadLink(exchange.transport, device))
        weakref.finalize(exchange, device.close)
        return ZipcclCommunicator(made)


def subject() -> PipelineSubject:
    """Named by --subject zipccl_pipeline."""
    return PipelineSubject()
