"""Our own implementation with one defect planted in each that only shows under faults. Nothing here is ever right.

Each maker has the signature of `conformance.subjects.zipccl.communicator_with_seam`. Some spoil the whole process: use
one in ranks of its own, as faults/ does.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from conformance.subjects.zipccl import ZipcclCommunicator, communicator_with_seam
from zipccl_core.collectives import board, communicator, exchange, message, work
from zipccl_core.collectives.wire import Envelope
from zipccl_core.errors import CorruptFrame, PeerError, ZipcclError
from zipccl_core.frame import parse_header

Maker = Callable[..., ZipcclCommunicator]
_REAL = {
    "open": message.Incoming.open,
    "unpack": message.Incoming.unpack,
    "encode_message": message.encode_message,
    "wait_for": work.wait_for,
    "last_arrivals": exchange.Exchange.last_arrivals,
}


def ignores_digest(group: dist.ProcessGroup, seam: Any, **policy: Any) -> ZipcclCommunicator:
    """Takes the words of a frame whose Digest, or of elements whose CRC, does not fit."""

    def unpack(self: message.Incoming) -> None:
        try:
            _REAL["unpack"](self)
        except CorruptFrame as exc:
            if "CRC-32 of the elements" in str(exc):
                message.raw_view(self._flat).numpy()[:] = self._buffer[Envelope.BYTES :].numpy()
            elif "Digest" not in str(exc):
                raise

    message.Incoming.unpack = unpack  # type: ignore[method-assign]
    return communicator_with_seam(group, seam, **policy)


def accepts_stale(group: dist.ProcessGroup, seam: Any, **policy: Any) -> ZipcclCommunicator:
    """Believes that what comes is what it waits for: neither the envelope nor the frame behind it is compared."""

    def open_any(self: message.Incoming) -> torch.Tensor | None:
        envelope = Envelope.parse(self._buffer[: Envelope.BYTES].numpy().tobytes())
        expected = replace(envelope, sequence=self._sequence, src=self.src, dst=self._rank)
        self._buffer[: Envelope.BYTES] = message.as_tensor(expected.pack())
        return _REAL["open"](self)

    def unpack(self: message.Incoming) -> None:
        assert self._envelope is not None
        if self.coded:
            header = parse_header(self._buffer[Envelope.BYTES :].numpy().data)
            self._envelope = replace(self._envelope, payload_bytes=header.frame_bytes, digest=header.digest)
        else:
            elements = self._buffer[Envelope.BYTES :].numpy()
            self._envelope = replace(self._envelope, digest=zlib.crc32(elements.data))
        _REAL["unpack"](self)

    message.Incoming.open = open_any  # type: ignore[method-assign]
    message.Incoming.unpack = unpack  # type: ignore[method-assign]
    return communicator_with_seam(group, seam, **policy)


def decides_per_rank(group: dist.ProcessGroup, seam: Any, **policy: Any) -> ZipcclCommunicator:
    """Codes by a threshold of its own, as if it had learned one from its own past."""
    made = communicator_with_seam(group, seam, **policy)
    agreed = made.inner._exchange.policy
    own = replace(agreed, min_bytes=agreed.min_bytes * (1 + 2 * group.rank()))
    made.inner._exchange.policy = made.inner._policy = own
    return made


def falls_back_silently(group: dist.ProcessGroup, seam: Any, **policy: Any) -> ZipcclCommunicator:
    """Sends words as they are when they do not shrink, though the receivers expect a frame."""

    def encode_message(policy: Any, flat: Any, sequence: int, src: int, *dst: int) -> message.Message:
        coded = _REAL["encode_message"](policy, flat, sequence, src, *dst)
        if not coded.coded or coded.sent_bytes < coded.raw_bytes + Envelope.BYTES:
            return coded
        plain = _REAL["encode_message"](replace(policy, compress="never"), flat, sequence, src, *dst)
        sent = torch.zeros_like(coded.phase_one)
        kept = min(sent.numel(), plain.phase_one.numel())
        sent[:kept] = plain.phase_one[:kept]
        return replace(plain, phase_one=sent, phase_two=coded.phase_two)

    exchange.encode_message = encode_message  # type: ignore[assignment]
    return communicator_with_seam(group, seam, **policy)


def waits_without_bound(group: dist.ProcessGroup, seam: Any, **policy: Any) -> ZipcclCommunicator:
    """Waits for its peers for more than a day, whatever the policy says."""
    made = communicator_with_seam(group, seam, **policy)
    made.inner._exchange.policy = replace(made.inner._exchange.policy, timeout_s=1e5)
    return made


def swallows_peer_error(group: dist.ProcessGroup, seam: Any, **policy: Any) -> ZipcclCommunicator:
    """Returns as if all were well when a peer disagrees, failed or is gone."""

    def wait_for(*args: Any) -> None:
        with contextlib.suppress(PeerError):
            _REAL["wait_for"](*args)

    communicator.wait_for = work.wait_for = wait_for  # type: ignore[attr-defined]
    return communicator_with_seam(group, seam, **policy)


def blames_the_first(group: dist.ProcessGroup, seam: Any, **policy: Any) -> ZipcclCommunicator:
    """Reports arrivals in the wrong order: the straggler is whoever came first."""

    real = _REAL["last_arrivals"].fget

    def last_arrivals(self: exchange.Exchange) -> list[tuple[int, float]]:
        return list(real(self)[::-1])

    exchange.Exchange.last_arrivals = property(last_arrivals)  # type: ignore[method-assign,assignment]
    return communicator_with_seam(group, seam, **policy)


def impatient(group: dist.ProcessGroup, seam: Any, **policy: Any) -> ZipcclCommunicator:
    """Gives up after a fifth of what the policy allows."""
    made = communicator_with_seam(group, seam, **policy)
    agreed = made.inner._exchange.policy
    made.inner._exchange.policy = replace(agreed, timeout_s=agreed.timeout_s / 5)
    return made


def keeps_its_own_error(group: dist.ProcessGroup, seam: Any, **policy: Any) -> ZipcclCommunicator:
    """Raises what it saw itself, and asks nobody what the others raise."""

    def settle(self: board.Board, error: ZipcclError) -> ZipcclError:
        return type(error)(f"{error} (seen by rank {self._rank})")

    board.Board.settle = settle  # type: ignore[method-assign]
    board.Board.published = lambda self, grace_s: None  # type: ignore[method-assign]
    return communicator_with_seam(group, seam, **policy)


def deaf_to_the_seam(group: dist.ProcessGroup, seam: Any, **policy: Any) -> ZipcclCommunicator:
    """Has no seam, so that no fault can fire: what a suite sees when its injection has come off."""
    return communicator_with_seam(group, None, **policy)


def keeps_its_threads(group: dist.ProcessGroup, seam: Any, **policy: Any) -> ZipcclCommunicator:
    """close() ends neither threads nor connections."""
    made = communicator_with_seam(group, seam, **policy)
    made.close = made.inner.barrier
    _KEPT.append(made)
    return made


_KEPT: list[ZipcclCommunicator] = []
BROKEN: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (
        *(ignores_digest, accepts_stale, decides_per_rank, falls_back_silently, waits_without_bound),
        *(swallows_peer_error, blames_the_first, impatient, keeps_its_own_error, deaf_to_the_seam, keeps_its_threads),
    )
}
