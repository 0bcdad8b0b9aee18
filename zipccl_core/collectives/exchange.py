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
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CorruptFrame, InvalidArgument, PeerError, RankTimeout, ZipcclError
from ..frame import FORMAT_VERSION
from ..policy.switch import Decision, Policy, explain
from .board import Board
from .message import Incoming, Message, as_tensor, dtype_text, encode_message
from .reduce import ReduceSpec
from .wire import ALL_RANKS, CallRecord, Verdict

log = logging.getLogger("zipccl")

_RECORD_TAG, _VERDICT_TAG, _DATA_TAG = 1, 2, 3
_TAGS = 1 << 30
_GRACE_S = 1.0


@dataclass
class Call:
    """One collective call as the exchange sees it: what goes to and comes from each peer, and what to do then.

    Attributes:
        operation: method name.
        dtype: of all tensors.
        total_words: elements of the whole call where all ranks must have the same number, else 0.
        root: group rank that all must name alike, -1 if the operation has none.
        sends: [rank] → flat contiguous tensor for that rank; the own rank's entry is copied, never encoded.
        receives: [rank] → flat contiguous tensor to fill with that rank's elements.
        same_for_all: all peers get the same message, so it is encoded once.
        spec: the reduction, None if there is none.
        native: runs the backend's own collective instead of a data exchange; returns after it is done.
        finish: puts the result where the caller wants it, after all has been received.
        invalid: why this rank's arguments were refused, None if they were not.
        stage: 0, or more for the later calls of one that takes several; counted once.
    """

    operation: str = ""
    dtype: torch.dtype | None = None
    total_words: int = 0
    root: int = -1
    sends: list[torch.Tensor] = field(default_factory=list)
    receives: list[torch.Tensor] = field(default_factory=list)
    same_for_all: bool = False
    spec: ReduceSpec | None = None
    native: Callable[[dist.ProcessGroup, timedelta], None] | None = None
    native_reason: str = ""
    finish: Callable[[], None] = lambda: None
    invalid: InvalidArgument | None = None
    stage: int = 0
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
            self.total_words,
            self.root,
            self.invalid is None,
        )


class Work:
    """One or more calls under way, with the methods of torch's Work. Dropping it changes nothing: they go on."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all is done; True, or the error that all ranks raise.

        Args:
            timeout: how long to wait; the policy's deadline if None.

        Raises:
            RankTimeout: still under way after `timeout`; it goes on.
            ZipcclError: failed, in the same way on all ranks.
        """
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for call in self._calls:
            if not call.done.wait(None if deadline is None else max(deadline - time.monotonic(), 0)):
                raise RankTimeout(f"{title(call)} is still under way after {timeout}; wait() again")
        if (error := self.exception()) is not None:
            raise again(error)
        return True

    def is_completed(self) -> bool:
        """Whether all is done, well or not; never blocks."""
        return all(call.done.is_set() for call in self._calls)

    def is_success(self) -> bool:
        """Whether all is done without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> ZipcclError | None:
        """The first error of the calls that are done, else None."""
        return next((call.error for call in self._calls if call.error is not None), None)


def again(error: ZipcclError) -> ZipcclError:
    """A fresh error of the same kind and text: an exception object must not be raised in two threads."""
    return type(error)(*error.args)


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
        self._books_lock = threading.Lock()
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

    def submit(self, *calls: Call) -> Work:
        """Number calls, tell every peer of them, and hand them to the progress thread; nothing comes between them."""
        with self._lock:
            self.check_open(calls[0].operation)
            for call in calls:
                call.sequence = self._sequence
                self._sequence += 1
                try:
                    for peer in self._peers:
                        record = call.record_for(self.rank, peer).pack()
                        call.record_sends.append(self.send("control", record, peer, _RECORD_TAG))
                except (RuntimeError, KeyError) as exc:  # KeyError: the groups went just now; `broken` says why
                    call.send_failure = exc
                self._calls.put(call)
        return Work(calls)

    def check_open(self, operation: str) -> None:
        """Raise what finished this Communicator, if anything did."""
        if self.broken is not None:
            raise again(self.broken)
        if self._stopped:
            raise InvalidArgument(f"{operation}: this Communicator is closed; make another")

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
                call.error = again(exc)  # without the traceback, which holds on to the buffers
            except BaseException as exc:  # a waiter must never be left hanging, whatever went wrong here
                call.error = self.give_up(
                    PeerError(f"rank {self.rank} failed in {title(call)}: {type(exc).__name__}: {exc}"), exc
                )
            finally:
                call.finish = lambda: None  # let go of the caller's tensors
                call.sends, call.receives, call.native = [], [], None
                call.done.set()
                del call
        self._groups.clear()

    def _execute(self, call: Call) -> None:
        if self.broken is not None:
            raise again(self.broken)
        deadline = time.monotonic() + self.policy.timeout_s
        if call.send_failure is not None:
            raise self.transport_failed(title(call), call.send_failure, self._peers)
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
        arrivals: list[tuple[Incoming, Any]] = []
        complaint: _Refused | None = None
        all_valid = call.invalid is None
        for _ in self._peers:
            src, data = self._next_control(call, _RECORD_TAG, CallRecord.BYTES, deadline)
            try:
                record = CallRecord.parse(data)
            except ZipcclError as exc:
                raise _Refused(type(exc)(f"{title(call)}: from rank {src} to rank {self.rank}: {exc}"), True) from None
            all_valid = all_valid and record.valid
            if call.invalid is not None or not record.valid:
                continue
            wrong = call.record_for(self.rank, src).disagreement(record)
            if wrong:
                wrong = f"{title(call)}: {wrong}; call it alike on all ranks"
                # A rank that closes makes no further call: the others cannot go on either.
                closes = "close" in (call.operation, record.operation)
                complaint = complaint or _Refused(PeerError(wrong), closes)
            elif call.native is None:
                self._post(call, src, messages, arrivals, transfers)
        overflows: list[tuple[Incoming, Any]] = []
        for incoming, work in arrivals:
            self._wait(call, work, deadline, [incoming.src])
            complaint = self._open(call, incoming, overflows) or complaint
        for incoming, work in overflows:
            self._wait(call, work, deadline, [incoming.src])
            complaint = self._unpack(call, incoming) or complaint
        if complaint is not None:
            raise complaint
        if not all_valid:
            return
        if call.native is not None and self._peers:
            self._run_native(call, deadline)
        elif call.sends:
            call.receives[self.rank].copy_(call.sends[self.rank])
        self._account(call, messages)

    def _encode(self, call: Call) -> dict[int, Message]:
        """Every message this rank will send: peer → message; one object for all peers if they get the same."""
        messages: dict[int, Message] = {}
        if call.native is not None or call.invalid is not None:
            return messages
        for peer in self._peers if call.sends else []:
            if call.sends[peer].numel() == 0:
                continue
            if call.same_for_all and messages:
                messages[peer] = next(iter(messages.values()))
            else:
                dst = ALL_RANKS if call.same_for_all else peer
                messages[peer] = encode_message(self.policy, call.sends[peer], call.sequence, self.rank, dst)
        return messages

    def _post(
        self,
        call: Call,
        peer: int,
        messages: dict[int, Message],
        arrivals: list[tuple[Incoming, Any]],
        transfers: list[Any],
    ) -> None:
        """Post phase one to and from a peer whose record agrees, and phase two to it if the prefix overflowed."""
        tag = _DATA_TAG + call.sequence % _TAGS
        if (message := messages.get(peer)) is not None:
            transfers += [(peer, work) for work in self.send_message(message, peer, tag)]
        if call.receives and call.receives[peer].numel():
            incoming = Incoming(self.policy, call.receives[peer], call.sequence, peer, self.rank)
            arrivals.append((incoming, self.recv("data", incoming.phase_one, peer, tag)))

    def _open(self, call: Call, incoming: Incoming, overflows: list[tuple[Incoming, Any]]) -> _Refused | None:
        """Look at a message whose phase one is here: unpack it, or post its phase two."""
        try:
            rest = incoming.open()
        except CorruptFrame as exc:
            # Without a size to believe, a phase two cannot be received, so the sender may be left with it.
            return _Refused(CorruptFrame(f"{self._where(call, incoming)}: {exc}"), incoming.coded)
        if rest is None:
            return self._unpack(call, incoming)
        tag = _DATA_TAG + call.sequence % _TAGS
        overflows.append((incoming, self.recv("phase_two", rest, incoming.src, tag)))
        return None

    def _unpack(self, call: Call, incoming: Incoming) -> _Refused | None:
        """Decode or copy a message that is here whole, and verify it."""
        try:
            incoming.unpack()
        except ZipcclError as exc:
            return _Refused(type(exc)(f"{self._where(call, incoming)}: {exc}"), False)
        return None

    def _run_native(self, call: Call, deadline: float) -> None:
        assert call.native is not None
        try:
            call.native(self._groups["native"], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as exc:
            if "imed out" in str(exc) or "onnection" in str(exc):
                raise self.transport_failed(title(call), exc, self._peers) from exc
            raise _Refused(InvalidArgument(f"{title(call)}: the backend refuses it: {exc}"), False) from exc

    def _share_verdict(self, call: Call, verdict: Verdict, deadline: float) -> list[Verdict]:
        """All ranks' verdicts on a call, in rank order."""
        packed = verdict.pack()
        verdicts = {self.rank: Verdict.parse(packed)}  # as the peers read it
        for peer in self._peers:
            call.record_sends.append(self.send("control", packed, peer, _VERDICT_TAG))
        for _ in self._peers:
            src, data = self._next_control(call, _VERDICT_TAG, Verdict.BYTES, deadline)
            verdicts[src] = Verdict.parse(data)
            if verdicts[src].sequence != call.sequence:
                raise PeerError(f"{title(call)}: rank {src} speaks of call #{verdicts[src].sequence}")
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

    def send(self, group: str, data: bytes, peer: int, tag: int) -> Any:
        """Post bytes to a peer on one of the groups; a Work that keeps them alive."""
        tensor = as_tensor(data)
        return _Kept(self._groups[group].send([tensor], peer, tag), tensor)

    def recv(self, group: str, buffer: torch.Tensor, peer: int, tag: int) -> Any:
        """Post a receive from a peer on one of the groups; a Work."""
        return self._groups[group].recv([buffer], peer, tag)

    def send_message(self, message: Message, peer: int, tag: int) -> list[Any]:
        """Post both phases of a message; a Work for each."""
        works = [_Kept(self._groups["data"].send([message.phase_one], peer, tag), message.phase_one)]
        if message.phase_two is not None:
            works.append(_Kept(self._groups["phase_two"].send([message.phase_two], peer, tag), message.phase_two))
        return works

    def _wait(self, call: Call, work: Any, deadline: float, waiting_for: list[int]) -> None:
        self.wait_until(deadline, work, title(call), waiting_for)

    def wait_until(self, deadline: float, work: Any, what: str, waiting_for: list[int]) -> None:
        """Wait for a transfer until the deadline (of time.monotonic); the agreed fatal error if it does not come."""
        try:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as exc:
            raise self.transport_failed(what, exc, waiting_for) from exc

    def transport_failed(self, what: str, exc: BaseException, ranks: list[int]) -> ZipcclError:
        """What to raise after a transfer failed: the error that some rank has published, or a new one."""
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
        if "imed out" in str(exc):
            return self.give_up(
                RankTimeout(
                    f"{what}: {names} of {self.size} did not arrive within {self.policy.timeout_s:g} s; "
                    "see what kept it, or raise Policy(timeout_s=…)"
                ),
                exc,
            )
        # A peer that gave up has published why before it closed its connections; one that died has not.
        published = self._board.published(_GRACE_S)
        if published is not None:
            return self._break(published)
        return self.give_up(
            PeerError(f"{what}: lost the connection while waiting for {names}: {exc}; see whether it died"), exc
        )

    def give_up(self, error: ZipcclError, cause: BaseException) -> ZipcclError:
        """Finish the Communicator with an error, or with the one that was published before it; returns that."""
        log.debug("rank %d gives up: %s", self.rank, error, exc_info=cause)
        return self._break(self._board.settle(error))

    def _break(self, error: ZipcclError) -> ZipcclError:
        """No call can follow; peers that wait for this rank notice by its closed connections."""
        self.broken = error
        self._groups.clear()
        return again(error)

    # Books

    def _where(self, call: Call, incoming: Incoming) -> str:
        return f"{title(call)}: message from rank {incoming.src} to rank {self.rank}"

    def _account(self, call: Call, messages: dict[int, Message]) -> None:
        if not call.sends:
            self.count(call.operation, [], calls=1)
            return
        dtype = dtype_text(call.dtype) if call.dtype else ""
        coded = sum(message.coded for message in messages.values())
        largest = max((message.raw_bytes for message in messages.values()), default=0)
        reason = call.native_reason or explain(self.policy, dtype, coded, len(messages), largest)
        decision = Decision("compressed" if coded else "native", reason, call.operation, call.sequence)
        sent_natively = 0
        if call.native is not None:
            sent_natively = sum(call.sends[peer].numel() * call.sends[peer].element_size() for peer in self._peers)
        self.count(call.operation, list(messages.values()), int(call.stage == 0), sent_natively, decision)

    def count(
        self,
        operation: str,
        messages: list[Message],
        calls: int,
        sent_natively_bytes: int = 0,
        decision: Decision | None = None,
    ) -> None:
        """Enter what one call sent into the books; from any thread."""
        with self._books_lock:
            books = self.stats.setdefault(operation, Counter())
            books["calls"] += calls
            books["raw_bytes"] += sent_natively_bytes
            books["sent_bytes"] += sent_natively_bytes
            for message in messages:
                books["raw_bytes"] += message.raw_bytes
                books["sent_bytes"] += message.sent_bytes
                books["phase_two_messages"] += message.phase_two is not None
                books["coded_words"] += message.words if message.coded else 0
                books["escapes"] += message.escapes
            if decision is not None:
                books[decision.mode] += calls
                self.last_decision = decision
                log.debug("rank %d: %s #%d: %s", self.rank, operation, decision.sequence, decision.reason)


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


def title(call: Call) -> str:
    """What an error calls the call."""
    return f"{call.operation} #{call.sequence}"


def facts(policy: Policy, size: int) -> dict[str, Any]:
    """What must be alike on all ranks of a Communicator."""
    return {"format version": FORMAT_VERSION, "world size": size, "policy": repr(policy)}
