"""What the pipeline needs of a device: streams, events, the codec, and copies to the host. An interface.

`cuda_device` is the one that ships. Whatever obeys it can stand in its place: the tests run the pipeline on a device
made of threads, whose streams are as lazy as a GPU's, so that a missing order between two streams shows on any machine.

Nothing here waits for the device except `HostCopy.check` and what says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from ..codebook import Codebook
from ..errors import ZipcclError
from ..frame import FrameHeader

STREAMS = ("encode", "move", "decode")


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether everything before it is done; never waits."""


class HostCopy(Protocol):
    """Bytes on their way from the device to the host."""

    def query(self) -> bool:
        """Whether they are here; never waits."""

    def tensor(self) -> Tensor:
        """[n] uint8, cpu; only after query() was true."""


class Device(Protocol):
    """One device, for one Communicator. Used from the progress thread; `now` and `join` from any thread.

    Work goes to the stream chosen with `on`, in order; streams are not ordered among each other but by `after`.
    """

    def attach(self) -> None:
        """The calling thread works for this device from now on. May be repeated; what queries events needs it too."""

    def now(self) -> Event:
        """An event in the calling thread's current stream of the framework."""

    def join(self, event: Event) -> None:
        """The calling thread's current stream of the framework waits for the event; the host does not."""

    def check(self, device: torch.device) -> None:
        """InvalidArgument if this is not that device, or if the current stream is being captured into a graph."""

    def on(self, stream: str) -> AbstractContextManager[None]:
        """Everything within goes to this stream of STREAMS."""

    def mark(self) -> Event:
        """An event in the stream in use."""

    def after(self, event: Event) -> None:
        """The stream in use waits for the event; the host does not."""

    def empty(self, n_bytes: int) -> Tensor:
        """[n_bytes] uint8 on the device, at a multiple of 128 bytes; free for what comes in the stream in use."""

    def run(self, work: Callable[[], object]) -> None:
        """Call what queues operations of the framework, as part of the stream in use."""

    def release(self) -> None:
        """Give back its streams; nothing may be left in them, and nothing comes after it."""

    def encode(self, words: Sequence[Tensor], codebooks: Sequence[object], frames: Sequence[Tensor]) -> None:
        """Encode each tensor into its frame buffer; one launch."""

    def codebooks(self, words: Sequence[Tensor], kind: str | Codebook) -> Sequence[object]:
        """A codebook for each tensor, for `encode`: "fitted", "gaussian", or the one that is given."""

    def decode(self, frames: Sequence[Tensor], out: Sequence[Tensor]) -> Tensor:
        """Decode each frame into its tensor; one launch. The verdicts, for `headers`, on the device."""

    def decode_reduce(self, terms: Sequence[Tensor], out: Tensor, kind: str, factor: float | None) -> Tensor:
        """Sum frames (uint8) and words, in order, into out; one launch. The verdicts, for `headers`, on the device.

        Args:
            kind: "sum", "avg" or "premul_sum".
        """

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Start copying the bytes of contiguous tensors, one after another, to the host."""

    def to_device(self, target: Tensor, source: Tensor) -> None:
        """Start copying host bytes into a contiguous tensor on the device; keeps the source alive until then."""

    def headers(self, rows: Tensor) -> list[FrameHeader | ZipcclError | None]:
        """Of each frame that verdicts, on the host now, are about: its header, or why it was refused; None if none."""
