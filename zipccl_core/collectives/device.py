"""What the pipeline needs of a device: streams, events, the codec, and copies to the host. An interface.

`cuda_device` is the one that ships. Whatever obeys it can stand in its place: the tests run the pipeline on a device
made of threads, whose streams are as lazy as a GPU's, so that a missing order between two streams shows on any machine.

Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..codebook import Codebook
from ..errors import ZipcclError
from ..frame import FrameHeader

_T = TypeVar("_T")

STREAMS = ("encode", "move", "beside", "decode")
"""A Communicator's own; "beside" is the link's, for what moves at the same time as what the stream in use holds."""
MESSAGES = "messages"
"""Its own too, for messages between two ranks: they wait for what a caller's stream holds, and no collective may so."""
CALLERS = "caller's"


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether everything before it is done; never waits."""


class HostBytes(Protocol):
    """Bytes on their way from the device to the host. To be kept until they are here."""

    @property
    def event(self) -> Event:
        """After which they are."""

    def query(self) -> bool:
        """Whether they are here; never waits."""

    def read(self) -> bytes:
        """They; only after query() was true."""


class HostCopy(HostBytes, Protocol):
    """A copy on its way from the device to the host."""

    def tensor(self) -> Tensor:
        """[n] uint8, cpu: the same without a copy, as long as this lives; only after query() was true."""


class Device(Protocol):
    """One device, for one Communicator. Used by the thread that carries calls through; `now`, `join`,
    `copy_of_callers` and whatever goes to MESSAGES by any.

    Work goes to the stream chosen with `on`, in order; streams are not ordered among each other but by `after`.

    Attributes:
        key: equal for those of this process whose CALLERS is one stream.
    """

    key: Hashable

    def attached(self) -> AbstractContextManager[None]:
        """Within, the calling thread works for this device; only there may it use it, but for `now` and `join`."""

    def now(self) -> Event:
        """An event in the calling thread's current stream of the framework."""

    def join(self, event: Event) -> None:
        """The calling thread's current stream of the framework waits for the event; the host does not."""

    def copy_of_callers(self, tensor: Tensor) -> HostCopy:
        """Start copying a contiguous tensor to the host, in the calling thread's current stream of the framework.

        Neither the copy nor the tensor need be kept until it is here.
        """

    def check(self, device: torch.device) -> None:
        """InvalidArgument if this is not that device, or if the current stream is being captured into a graph."""

    def is_current(self) -> bool:
        """Whether it is the calling thread's current device of the framework."""

    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream of the framework is being captured, on its current device."""

    def can_use_callers(self) -> bool:
        """Whether CALLERS is the calling thread's current stream of the framework: what goes there needs no order."""

    def on(self, stream: str) -> AbstractContextManager[None]:
        """Everything within goes to this stream of STREAMS, to MESSAGES, or to CALLERS, if that can be used."""

    def share(self, shares: bool) -> None:
        """Whether kernels of the stream in use leave room, from now on, for those that move words meanwhile."""

    def mark(self) -> Event:
        """An event in the stream in use."""

    def after(self, event: Event) -> None:
        """The stream in use waits for the event; the host does not."""

    def empty(self, n_bytes: int) -> Tensor:
        """[n_bytes] uint8 on the device, at a multiple of 128 bytes; free for what comes in the stream in use."""

    def run(self, work: Callable[[], _T]) -> _T:
        """Call what queues operations of the framework, as part of the stream in use; its result if there is one."""

    def framework(self) -> AbstractContextManager[object]:
        """Within, the framework's current stream is the stream in use, for who calls the framework without `run`."""

    def keep(self, tensor: Tensor) -> None:
        """Nobody else is given the memory of a tensor, if it is let go of, before the stream in use has come here."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between contiguous tensors of as many bytes, on the device."""

    def release(self) -> None:
        """Give back its streams; nothing may be left in them, and nothing comes after it."""

    def scratch_bytes(self, words: Sequence[int]) -> int:
        """Bytes that `encode` needs for tensors of so many words each."""

    def encode(
        self, words: Sequence[Tensor], codebooks: Sequence[object], frames: Sequence[Tensor], scratch: Tensor
    ) -> HostBytes:
        """Encode each tensor into its frame buffer; one launch. Launches on one stream may have the same scratch.

        Returns:
            The headers of the frames, one after another; they are here when the frames are there.
        """

    def codebooks(self, words: Sequence[Tensor], kind: str | Codebook) -> Sequence[object]:
        """A codebook for each tensor, for `encode`: "fitted", "gaussian", or the one that is given."""

    def decode(self, frames: Sequence[Tensor], out: Sequence[Tensor]) -> Any:
        """Decode each frame into its tensor; one launch.

        Returns:
            The verdicts, for `as_told` and `headers` once the stream has come past them. To be kept until then.
        """

    def decode_reduce(self, terms: Sequence[Tensor], out: Tensor, kind: str, factor: float | None) -> Any:
        """Sum frames (uint8) and words, in order, into out; one launch. The verdicts, as `decode`.

        If a frame is longer than its buffer, which its header says, out stays as it is.

        Args:
            kind: "sum", "avg" or "premul_sum".
        """

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Start copying the bytes of contiguous tensors, one after another, to the host."""

    def to_device(self, target: Tensor, source: Tensor) -> None:
        """Start copying a tensor of the host into one of its shape on the device; keeps the source alive until then."""

    def as_told(self, verdicts: Any, told: Sequence[tuple[int, int]]) -> bool:
        """Whether all frames are sound, and have the bytes and the digest that were told of each, in order."""

    def headers(self, verdicts: Any) -> list[FrameHeader | ZipcclError | None]:
        """Of each frame, or word, of a launch: its header, or why it was refused; None if it is no frame."""
