"""The exchange: call records, two phases and the verdict, on one progress thread a Communicator.

docs/DESIGN.md, "The exchange", says why each step is where it is. In short, for one call on one rank:

1. the caller's thread numbers the call and sends its record to every peer;
2. the progress thread takes calls in that order. It encodes, and as each peer's record arrives and agrees, posts phase
   one to and from that peer; a pair that disagrees moves no payload;
3. what a frame has beyond the agreed prefix follows as phase two, on a group of its own;
4. every rank tells every other how it went, and all raise the same error, or none.

Transport trouble and missed deadlines go another way: the first error published on the store's board is raised by all,
and the Communicator is finished, since nobody can know what its peers still have in flight.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..codebook import Codebook
from ..codec import exponent_histogram
from ..codec.cpu import decode_into, encode_into
from ..errors import CorruptFrame, InvalidArgument, PeerError, RankTimeout, ZipcclError
from ..frame import FORMAT_VERSION, max_frame_bytes, parse_header, static_bytes
from ..policy.switch import Decision, Policy, explain, prefix_bytes
from .board import Board
from .reduce import ReduceSpec
from .wire import ALL_RANKS, CallRecord, Envelope, Verdict

log = logging.getLogger("zipccl")

_RECORD_TAG, _VERDICT_TAG, _DATA_TAG = 1, 2, 3
_TAGS = 1 << 30
_GRACE_S = 1.0
_CODED = {torch.bfloat16: np.uint16, torch.float32: np.uint32}
_SAME_WIDTH = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def patterns(flat: torch.Tensor) -> NDArray[Any]:
    """The elements of a contiguous 1-D CPU tensor as unsigned patterns; no copy."""
    return flat.view(_SAME_WIDTH[flat.dtype]).numpy().view(_CODED[flat.dtype])


def raw_view(flat: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous 1-D CPU tensor of any dtype; no copy."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


def dtype_text(dtype: torch.dtype) -> str:
    """The dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


@dataclass
class Call:
    """One collective call as the exchange sees it: what goes to and comes from each peer, and what to do then.

    Attributes:
        operation: method name.
        dtype: of all tensors.
        sends: [rank] → flat contiguous tensor for that rank; the own rank's entry is copied, never encoded.
        receives: [rank] → flat contiguous tensor to fill with that rank's elements.
        same_for_all: all peers get the same message, so it is encoded once.
        spec: the reduction, None if there is none.
        native: runs the backend's own collective instead of a data exchange; returns after it is done.
        finish: puts the result where the caller wants it, after all has been received.
        invalid: why this rank's arguments were refused, None if they were not.
    """

    operation: str
    dtype: torch.dtype | None = None
    sends: list[torch.Tensor] = field(default_factory=list)
    receives: list[torch.Tensor] = field(default_factory=list)
    same_for_all: bool = False
    spec: ReduceSpec | None = None
    native: Callable[[dist.ProcessGroup, timedelta], None] | None = None
    native_reason: str = ""
    finish: Callable[[], None] = lambda: None
    invalid: InvalidArgument | None = None
    sequence: int = -1
    heard: dict[int, set[int]] = field(default_factory=lambda: {_RECORD_TAG: set(), _VERDICT_TAG: set()})
    record_sends: list[Any] = field(default_factory=list)
    send_failure: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)
    error: ZipcclError | None = None
    decision: Decision | None = None

    def record_for(self, rank: int, peer: int) -> CallRecord:
        """This rank's call record for one peer."""
        return CallRecord(
            self.sequence,
            self.operation,
            rank,
            dtype_text(self.dtype) if self.dtype else "",
            self.spec.name if self.spec else "",
            self.spec.factor_bits if self.spec else 0,
            self.sends[peer].numel() if self.sends else 0,
            self.receives[peer].numel() if self.receives else 0,
            self.invalid is None,
        )


class Work:
    """A call under way, with the methods of torch's Work. Dropping it changes nothing: the call goes on."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the call is done; True, or the error that all ranks raise.

        Args:
            timeout: how long to wait; the policy's deadline if None.

        Raises:
            RankTimeout: the call is still under way after `timeout`; it goes on.
            ZipcclError: the call failed, in the same way on all ranks.
        """
        if not self._call.done.wait(None if timeout is None else timeout.total_seconds()):
            raise RankTimeout(
                f"{self._call.operation} #{self._call.sequence} is still under way after {timeout}; wait() again"
            )
        if self._call.error is not None:
            raise _again(self._call.error)
        return True

    def is_completed(self) -> bool:
        """Whether the call is done, well or not; never blocks."""
        return self._call.done.is_set()

    def is_success(self) -> bool:
        """Whether the call is done without an error."""
        return self._call.done.is_set() and self._call.error is None

    def exception(self) -> ZipcclError | None:
        """The error of a call that is done, else None."""
        return self._call.error


def _again(error: ZipcclError) -> ZipcclError:
    """A fresh error of the same kind and text: an exception object must not be raised in two threads."""
    return type(error)(*error.args)


@dataclass
class _Message:
    """An encoded or plain message: one buffer, sent as phase one and, if the prefix overflows, phase two."""

    phase_one: torch.Tensor
    phase_two: torch.Tensor | None
    coded: bool
    escapes: int = 0


@dataclass
class _Arrival:
    """What one peer's message is received into."""

    src: int
    buffer: torch.Tensor
    work: Any
    coded: bool
    words: int
    split: int  # bytes of phase one
    envelope: Envelope | None = None


class Exchange:
    """The groups and the progress thread of one Communicator.

    Args:
        board: agreement through the store.
        rank, size: in the group.
        policy: the agreed one.
    """

    def __init__(self, board: Board, rank: int, size: int, policy: Policy) -> None:
        self.rank, self.size, self.policy = rank, size, policy
        self.broken: ZipcclError | None = None
        self.stats: dict[str, Counter[str]] = {}
        self.last_decision: Decision | None = None
        self._board = board
        self._peers = [r for r in range(size) if r != rank]
        self._sequence = 0
        self._stopped = False
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._stash: dict[int, dict[int, deque[bytes]]] = {
            tag: {p: deque() for p in self._peers} for tag in (_RECORD_TAG, _VERDICT_TAG)
        }
        self._groups: dict[str, Any] = {}
        if size > 1:
            # The backend's own timeout stands above ours: ours names the rank.
            timeout = timedelta(seconds=policy.timeout_s + 60)
            for name in ("control", "data", "phase_two", "native"):
                store = board.backend_store(name)
                self._groups[name] = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._thread = threading.Thread(target=self._run, name="zipccl-progress", daemon=True)
        self._thread.start()

    # The caller's thread

    def submit(self, call: Call) -> Work:
        """Number a call, tell every peer of it, and hand it to the progress thread."""
        with self._lock:
            if self.broken is not None:
                raise _again(self.broken)
            if self._stopped:
                raise InvalidArgument(f"{call.operation}: this Communicator is closed; make another")
            call.sequence = self._sequence
            self._sequence += 1
            try:
                for peer in self._peers:
                    self._send("control", call.record_for(self.rank, peer).pack(), peer, _RECORD_TAG, call.record_sends)
            except (RuntimeError, KeyError) as exc:  # KeyError: the groups went just now; `broken` says why
                call.send_failure = exc
            self._calls.put(call)
        return Work(call)

    def stop(self, timeout_s: float) -> None:
        """End the progress thread after the calls it has; waits at most timeout_s."""
        with self._lock:
            self._stopped = True
            self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # The progress thread

    def _run(self) -> None:
        torch.set_flush_denormal(False)  # the mode is inherited from the thread that made this one
        while (call := self._calls.get()) is not None:
            try:
                self._execute(call)
            except ZipcclError as exc:
                call.error = _again(exc)  # without the traceback, which holds on to the buffers
            except BaseException as exc:  # a waiter must never be left hanging, whatever went wrong here
                call.error = self._give_up(
                    PeerError(f"rank {self.rank} failed in {_title(call)}: {type(exc).__name__}: {exc}"), exc
                )
            finally:
                call.finish = lambda: None  # let go of the caller's tensors
                call.sends, call.receives, call.native = [], [], None
                call.done.set()
                del call
        self._groups.clear()

    def _execute(self, call: Call) -> None:
        if self.broken is not None:
            raise _again(self.broken)
        deadline = time.monotonic() + self.policy.timeout_s
        if call.send_failure is not None:
            raise self._transport_failed(call, call.send_failure, self._peers)
        transfers: list[Any] = []
        verdict = Verdict(call.sequence, self.rank)
        try:
            self._exchange(call, deadline, transfers)
            if call.invalid is not None:
                verdict = Verdict(call.sequence, self.rank, call.invalid)
        except _Refused as refused:
            verdict = Verdict(call.sequence, self.rank, refused.error, refused.fatal)
        verdicts = self._share_verdict(call, verdict, deadline + _GRACE_S)
        error = next((v.error for v in verdicts if v.error is not None), None)
        if error is not None and any(v.fatal for v in verdicts):
            raise self._break(error)
        for peer, work in transfers:  # all peers have spoken, so these are done or about to be
            self._wait(call, work, deadline + _GRACE_S, [peer])
        for work in call.record_sends:
            self._wait(call, work, deadline + _GRACE_S, self._peers)
        if error is not None:
            raise error
        call.finish()

    def _exchange(self, call: Call, deadline: float, transfers: list[Any]) -> None:
        """Records, phase one, phase two; _Refused if something that came is wrong."""
        messages = self._encode(call)
        arrivals: list[_Arrival] = []
        complaint: _Refused | None = None
        all_valid = call.invalid is None
        for _ in self._peers:
            src, data = self._next_control(call, _RECORD_TAG, CallRecord.BYTES, deadline)
            try:
                record = CallRecord.parse(data)
            except ZipcclError as exc:
                raise _Refused(type(exc)(f"{_title(call)}: from rank {src} to rank {self.rank}: {exc}"), True) from None
            all_valid = all_valid and record.valid
            if call.invalid is not None or not record.valid:
                continue
            wrong = call.record_for(self.rank, src).disagreement(record)
            if wrong:
                wrong = f"{_title(call)}: {wrong}; call it alike on all ranks"
                # A rank that closes makes no further call: the others cannot go on either.
                closes = "close" in (call.operation, record.operation)
                complaint = complaint or _Refused(PeerError(wrong), closes)
            elif call.native is None:
                self._post(call, src, messages, arrivals, transfers)
        for arrival in arrivals:
            self._wait(call, arrival.work, deadline, [arrival.src])
            complaint = self._open(call, arrival) or complaint
        for arrival in arrivals:
            if arrival.envelope is not None and arrival.work is not None:
                self._wait(call, arrival.work, deadline, [arrival.src])
                complaint = self._unpack(call, arrival) or complaint
        if complaint is not None:
            raise complaint
        if not all_valid:
            return
        if call.native is not None and self._peers:
            self._run_native(call, deadline)
        elif call.sends:
            call.receives[self.rank].copy_(call.sends[self.rank])
        self._account(call, messages)

    def _encode(self, call: Call) -> dict[int, _Message]:
        """Every message this rank will send: peer → message; one object for all peers if they get the same."""
        messages: dict[int, _Message] = {}
        if call.native is not None or call.invalid is not None:
            return messages
        for peer in self._peers if call.sends else []:
            if call.sends[peer].numel() == 0:
                continue
            if call.same_for_all and messages:
                messages[peer] = next(iter(messages.values()))
            else:
                messages[peer] = self._encode_one(call, peer)
        return messages

    def _encode_one(self, call: Call, peer: int) -> _Message:
        flat = call.sends[peer]
        raw = raw_view(flat)
        dst = ALL_RANKS if call.same_for_all else peer
        head = Envelope.BYTES
        dtype = dtype_text(flat.dtype)
        if not self.policy.codes(dtype, raw.numel()):
            buffer = torch.empty(head + raw.numel(), dtype=torch.uint8)
            buffer[head:] = raw
            check = zlib.crc32(buffer[head:].numpy().data)
            envelope = Envelope(call.sequence, self.rank, dst, False, raw.numel(), check)
            buffer[:head] = _tensor(envelope.pack())
            return _Message(buffer, None, False)
        n = flat.numel()
        buffer = torch.empty(head + max_frame_bytes(n, dtype), dtype=torch.uint8)
        codebook = self._codebook(flat)
        header = encode_into(patterns(flat), codebook, buffer[head:].numpy())
        split = head + static_bytes(n) + prefix_bytes(self.policy, n, dtype)
        end = head + header.frame_bytes
        buffer[end:split].zero_()  # what the prefix has room for beyond the frame
        envelope = Envelope(call.sequence, self.rank, dst, True, header.frame_bytes, header.digest)
        buffer[:head] = _tensor(envelope.pack())
        return _Message(buffer[:split], buffer[split:end] if end > split else None, True, header.escapes)

    def _codebook(self, flat: torch.Tensor) -> Codebook:
        chosen = self.policy.codebook
        if isinstance(chosen, Codebook):
            return chosen
        histogram = exponent_histogram(flat).tolist()
        return Codebook.fitted(histogram) if chosen == "fitted" else Codebook.gaussian_of_histogram(histogram)

    def _post(
        self, call: Call, peer: int, messages: dict[int, _Message], arrivals: list[_Arrival], transfers: list[Any]
    ) -> None:
        """Post phase one to and from a peer whose record agrees, and phase two to it if the prefix overflowed."""
        tag = _DATA_TAG + call.sequence % _TAGS
        if (message := messages.get(peer)) is not None:
            transfers.append((peer, self._groups["data"].send([message.phase_one], peer, tag)))
            if message.phase_two is not None:
                transfers.append((peer, self._groups["phase_two"].send([message.phase_two], peer, tag)))
        if call.receives and (n := call.receives[peer].numel()):
            raw_bytes = raw_view(call.receives[peer]).numel()
            dtype = dtype_text(call.receives[peer].dtype)
            coded = self.policy.codes(dtype, raw_bytes)
            whole = Envelope.BYTES + (max_frame_bytes(n, dtype) if coded else raw_bytes)
            split = Envelope.BYTES + static_bytes(n) + prefix_bytes(self.policy, n, dtype) if coded else whole
            buffer = torch.empty(whole, dtype=torch.uint8)
            work = self._groups["data"].recv([buffer[:split]], peer, tag)
            arrivals.append(_Arrival(peer, buffer, work, coded, n, split))

    def _open(self, call: Call, arrival: _Arrival) -> _Refused | None:
        """Check the envelope of a message whose phase one is here; post its phase two, or unpack it at once."""
        arrival.work = None
        try:
            envelope = Envelope.parse(arrival.buffer[: Envelope.BYTES].numpy().tobytes())
            self._check_envelope(call, arrival, envelope)
        except CorruptFrame as exc:
            # Without a size to believe, a phase two cannot be received, so the sender may be left with it.
            return _Refused(CorruptFrame(f"{self._where(call, arrival)}: {exc}"), arrival.coded)
        arrival.envelope = envelope
        end = Envelope.BYTES + envelope.payload_bytes
        if end <= arrival.split:
            return self._unpack(call, arrival)
        tag = _DATA_TAG + call.sequence % _TAGS
        arrival.work = self._groups["phase_two"].recv([arrival.buffer[arrival.split : end]], arrival.src, tag)
        return None

    def _check_envelope(self, call: Call, arrival: _Arrival, envelope: Envelope) -> None:
        wanted = (call.sequence, arrival.src, arrival.coded)
        came = (envelope.sequence, envelope.src, envelope.coded)
        if came != wanted or envelope.dst not in (self.rank, ALL_RANKS):
            raise CorruptFrame(
                f"message of another exchange: wanted (sequence, src, coded) = {wanted} for rank {self.rank}, "
                f"got {came} for rank {envelope.dst}"
            )
        flat = call.receives[arrival.src]
        low = static_bytes(arrival.words) if arrival.coded else raw_view(flat).numel()
        high = arrival.buffer.numel() - Envelope.BYTES
        if not low <= envelope.payload_bytes <= high:
            raise CorruptFrame(f"payload_bytes must be {low} to {high}, got {envelope.payload_bytes}")

    def _unpack(self, call: Call, arrival: _Arrival) -> _Refused | None:
        """Decode or copy a message that is here whole, and verify its digest."""
        assert arrival.envelope is not None
        arrival.work = None
        envelope, flat = arrival.envelope, call.receives[arrival.src]
        payload = arrival.buffer[Envelope.BYTES : Envelope.BYTES + envelope.payload_bytes].numpy()
        try:
            if arrival.coded:
                header = parse_header(payload.data, arrival.buffer.numel() - Envelope.BYTES)
                if (header.frame_bytes, header.digest) != (envelope.payload_bytes, envelope.digest):
                    raise CorruptFrame(
                        f"frame of {header.frame_bytes} bytes with digest {header.digest:#018x} does not match its "
                        f"envelope's {envelope.payload_bytes} bytes and {envelope.digest:#018x}: stale or swapped"
                    )
                decode_into(payload, patterns(flat))
            else:
                check = zlib.crc32(payload.data)
                if check != envelope.digest:
                    raise CorruptFrame(f"CRC-32 of the elements must be {envelope.digest:#x}, got {check:#x}")
                raw_view(flat).numpy()[:] = payload
        except ZipcclError as exc:
            return _Refused(type(exc)(f"{self._where(call, arrival)}: {exc}"), False)
        return None

    def _run_native(self, call: Call, deadline: float) -> None:
        assert call.native is not None
        try:
            call.native(self._groups["native"], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as exc:
            if "imed out" in str(exc) or "onnection" in str(exc):
                raise self._transport_failed(call, exc, self._peers) from exc
            raise _Refused(InvalidArgument(f"{_title(call)}: the backend refuses it: {exc}"), False) from exc

    def _share_verdict(self, call: Call, verdict: Verdict, deadline: float) -> list[Verdict]:
        """All ranks' verdicts on a call, in rank order."""
        packed = verdict.pack()
        verdicts = {self.rank: Verdict.parse(packed)}  # as the peers read it
        for peer in self._peers:
            self._send("control", packed, peer, _VERDICT_TAG, call.record_sends)
        for _ in self._peers:
            src, data = self._next_control(call, _VERDICT_TAG, Verdict.BYTES, deadline)
            verdicts[src] = Verdict.parse(data)
            if verdicts[src].sequence != call.sequence:
                raise PeerError(f"{_title(call)}: rank {src} speaks of call #{verdicts[src].sequence}")
        return [verdicts[r] for r in range(self.size)]

    def _next_control(self, call: Call, tag: int, size: int, deadline: float) -> tuple[int, bytes]:
        """The next record or verdict of this call: from whichever peer is first, one a peer and call."""
        heard, stash = call.heard[tag], self._stash[tag]
        while True:
            for peer in self._peers:
                if peer not in heard and stash[peer]:
                    heard.add(peer)
                    return peer, stash[peer].popleft()
            buffer = torch.empty(size, dtype=torch.uint8)
            missing = [p for p in self._peers if p not in heard]
            work = self._groups["control"].recv_anysource([buffer], tag)
            self._wait(call, work, deadline, missing)
            stash[work._source_rank()].append(buffer.numpy().tobytes())

    # Waiting, and giving up

    def _send(self, group: str, data: bytes, peer: int, tag: int, keep: list[Any]) -> None:
        tensor = _tensor(data)
        keep.append(_Kept(self._groups[group].send([tensor], peer, tag), tensor))

    def _wait(self, call: Call, work: Any, deadline: float, waiting_for: list[int]) -> None:
        """Wait for a transfer until the deadline; the agreed fatal error if it does not come."""
        try:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as exc:
            raise self._transport_failed(call, exc, waiting_for) from exc

    def _transport_failed(self, call: Call, exc: BaseException, ranks: list[int]) -> ZipcclError:
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
        if "imed out" in str(exc):
            return self._give_up(
                RankTimeout(
                    f"{_title(call)}: {names} of {self.size} did not arrive within {self.policy.timeout_s:g} s; "
                    "see what kept it, or raise Policy(timeout_s=…)"
                ),
                exc,
            )
        # A peer that gave up has published why before it closed its connections; one that died has not.
        published = self._board.published(_GRACE_S)
        if published is not None:
            return self._break(published)
        return self._give_up(
            PeerError(f"{_title(call)}: lost the connection while waiting for {names}: {exc}; see whether it died"), exc
        )

    def _give_up(self, error: ZipcclError, cause: BaseException) -> ZipcclError:
        log.debug("rank %d gives up: %s", self.rank, error, exc_info=cause)
        return self._break(self._board.settle(error))

    def _break(self, error: ZipcclError) -> ZipcclError:
        """No call can follow; peers that wait for this rank notice by its closed connections."""
        self.broken = error
        self._groups.clear()
        return _again(error)

    # Books

    def _where(self, call: Call, arrival: _Arrival) -> str:
        return f"{_title(call)}: message from rank {arrival.src} to rank {self.rank}"

    def _account(self, call: Call, messages: dict[int, _Message]) -> None:
        books = self.stats.setdefault(call.operation, Counter())
        coded = 0
        largest = 0
        for peer, message in messages.items():
            raw = raw_view(call.sends[peer]).numel()
            largest = max(largest, raw)
            coded += message.coded
            books["raw_bytes"] += raw
            books["sent_bytes"] += message.phase_one.numel()
            if message.phase_two is not None:
                books["sent_bytes"] += message.phase_two.numel()
                books["phase_two_messages"] += 1
            if message.coded:
                books["coded_words"] += call.sends[peer].numel()
                books["escapes"] += message.escapes
        if call.native is not None:
            raw = sum(raw_view(call.sends[peer]).numel() for peer in self._peers)
            books["raw_bytes"] += raw
            books["sent_bytes"] += raw
        books["calls"] += 1
        if not call.sends:
            return
        dtype = dtype_text(call.dtype) if call.dtype else ""
        reason = call.native_reason or explain(self.policy, dtype, coded, len(messages), largest)
        call.decision = Decision("compressed" if coded else "native", reason, call.operation, call.sequence)
        books[call.decision.mode] += 1
        self.last_decision = call.decision
        log.debug("rank %d: %s: %s, %s", self.rank, _title(call), call.decision.mode, reason)


class _Refused(Exception):
    """Something that came, or was given, is wrong in a way that the verdict can tell all ranks."""

    def __init__(self, error: ZipcclError, fatal: bool) -> None:
        super().__init__(str(error))
        self.error, self.fatal = error, fatal


@dataclass
class _Kept:
    """A send together with the tensor that must live until it is done."""

    work: Any
    tensor: torch.Tensor

    def wait(self, timeout: timedelta) -> None:
        self.work.wait(timeout)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _title(call: Call) -> str:
    return f"{call.operation} #{call.sequence}"


def facts(policy: Policy, size: int) -> dict[str, Any]:
    """What must be alike on all ranks of a Communicator."""
    return {"format version": FORMAT_VERSION, "world size": size, "policy": repr(policy)}
