"""The exchange: call records, two phases and the verdict, on one progress thread a Communicator.

docs/DESIGN.md, "The exchange", says why each step is where it is. In short, for one call on one rank:

1. the caller's thread numbers the call and sends its record to every peer;
2. the progress thread takes calls in that order. It encodes, and as each peer's record arrives and agrees, posts phase
   one to and from that peer; a pair that disagrees moves no payload;
3. what a frame has beyond the agreed prefix follows as phase two, on a group of its own;
4. every rank tells every other how it went, and all raise the same error, or none.

Transport trouble and missed deadlines go another way: the first error published on the store's board is raised by all,
and the Communicator is finished, since nobody can know what its peers still have in flight. It closes its connections,
which wakes whoever waits for it.

Calls on a device go through a `Pipeline`, which uses the same records, control messages, deadlines and books.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch

from ..errors import CorruptFrame, InvalidArgument, PeerError, RankTimeout, ZipcclError, again
from ..frame import DTYPES, FORMAT_VERSION
from ..policy.switch import Decision, Policy, Switch, explain
from .board import LATE, Board
from .call import Call, Heard, Refused, data_tag, nothing, phase_range, title
from .link import NCCL_GRACE_S
from .message import Incoming, Message, Sent, dtype_text, encode_message
from .pipeline import Pipeline
from .seam import Seam
from .stragglers import join
from .transport import LEFT, Control, Disconnected, Transport, Watched, is_of_the_connection, let_others, nap_s
from .watch import Watch
from .wire import ALL_RANKS, MOST_DAMAGED, CallRecord, Sizes, Verdict

log = logging.getLogger("zipccl")

GRACE_S = 1.0
_ANSWER_S, _ANSWERS_S = 0.5, 1.1  # for one that is asked; until who comes to its deadline within GRACE_S has
BEHIND_S = 2 * GRACE_S
"""How much longer a message is waited for: it may be behind a collective, and whom that waits for is named by then."""
_NEWS_S, _NEWS_NAP_S = 0.2, 0.002
# How often the progress thread looks at a device. Seldom: to take the interpreter from a thread that makes calls stops
# that for a tenth of a millisecond.
_SWEEP_S = 0.02
_PATIENCE_S = 0.002  # what is less late is waited for: watching transfers costs a thread each
_SPINS, _SPINS_A_LOOK = 48, 8
EXIT_S = 5.0
_MOST_STRAIGHT = 1024

_WAKE = Call("wake")
"""Stands in the queue of calls for no call, so that the progress thread looks at the devices again."""

_Told = TypeVar("_Told", Sizes, Verdict)
_Parsed = TypeVar("_Parsed")


_live: weakref.WeakSet[Exchange] = weakref.WeakSet()


@atexit.register
def _part_at_exit() -> None:
    """End what nobody has closed: a thread that waits in the backend when Python ends would abort the process."""
    exchanges = list(_live)
    for exchange in exchanges:
        exchange.stop(0)
    deadline = time.monotonic() + EXIT_S
    for exchange in exchanges:
        exchange.stop(max(deadline - time.monotonic(), 0))
        exchange.leaving = True
        exchange.transport.abort()
    join([thread for exchange in exchanges for thread in exchange.threads()], GRACE_S + 1)


def _leave_to_the_parent() -> None:
    """In a process that was forked: threads and connections are its parent's, and its ending must not touch them."""
    for exchange in list(_live):
        exchange.leave_to_the_parent()
    _live.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)


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
        self.untold: ZipcclError | None = None  # what has finished it with no call under way: nobody has raised it yet
        self._free_s = 0.0  # when the call before was over
        self._fingerprint = policy.fingerprint()
        self._switch, self._plain = Switch(policy), replace(policy, compress="never")
        self._books: dict[str, Counter[str]] = {}
        self._straight: deque[tuple[str, int]] = deque()  # (operation, bytes) of calls that are not in them yet
        self.last_decision: Decision | None = None
        self.board = board
        self.peers = [r for r in range(size) if r != rank]
        self._sequence = 0
        self._stopped = False
        self.leaving = False  # this rank closes the connections: what is still under way is of its doing
        self.is_parents = False  # of the process that this one was forked from
        self._lock = threading.RLock()  # a signal's handler may come in between
        self._books_lock = threading.RLock()
        self.seam: Seam | None = None
        self.channel_threads: list[threading.Thread] = []
        self._arrivals_s: dict[int, float] = {}  # of the latest call: rank → when it came
        self.arrived_last: Counter[int] = Counter()
        self._pending: ZipcclError | None = None
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._handed = self._taken = 0  # calls put there, and those of them that are over
        self._baton = threading.Lock()  # who has it executes a call, or looks after a device
        self._dozing = False  # the progress thread knows of no device yet, and waits until it is given something
        self._ahead: deque[Call | None] = deque()  # taken from there before their turn; of the progress thread
        self._stash: dict[int, dict[bytes, deque[Control]]] = {
            p: {CallRecord.MAGIC: deque(), Sizes.MAGIC: deque(), Verdict.MAGIC: deque()} for p in self.peers
        }
        self._lost: dict[int, str] = {}
        self.pipelines: dict[str, Pipeline] = {}
        self.thresholds: dict[str, int] = {}
        self.last_call: Call | None = None
        self.transport = Transport(board, rank, size, policy.timeout_s)
        # As long as the backend itself would let it.
        self.watch = Watch(lambda: bool(self.transport.lost), self._overdue, policy.timeout_s + NCCL_GRACE_S)
        self._waiting: set[Any] = set()  # calls, and what else just now waits for peers
        self._thread = threading.Thread(target=self._run, name="zipccl-progress", daemon=True)
        self.transport.asked = self._say_whether_it_waits
        try:
            self._thread.start()
        except RuntimeError as exc:
            raise self.transport.failed_to_begin(board, rank, exc) from exc
        _live.add(self)

    # The caller's thread

    def submit(self, *calls: Call, here: bool = False) -> None:
        """Number the calls of an operation, tell every peer of them, and hand them to the progress thread.

        They have one number, so that ranks which disagree on the operation still agree on the number of the next.

        Args:
            here: the caller waits for them at once. Those on a device it then carries through itself, if nothing is
                before them: to wake another thread, and to be woken, takes longer than much of the rest.
        """
        taken = False
        try:
            with self._lock:
                self.check_open(calls[0].operation)
                pipeline = self.pipelines.get(calls[0].device)
                taken = here and pipeline is not None and self._may_carry_here()
                issued = None
                if pipeline is not None and not (taken and pipeline.can_use_callers()):
                    issued = pipeline.device.now()
                number, self._sequence = self._sequence, self._sequence + 1
                now_s, before = time.monotonic(), None
                for call in calls:
                    call.sequence, call.before, call.issued, call.waited_for = number, before, issued, taken
                    if self.seam is not None:
                        self.reached("issue", call)
                    call.arrivals_s[self.rank] = now_s
                    if not self.pipelines:
                        self.send_records(call)
                    if not taken:
                        if here:  # the tensors are the caller's own: they may change
                            call.ensure_laid_out()
                        self._hand_over(call)
                    self.last_call = before = call
            if taken:
                for call in calls:
                    self.send_records(call)  # of all stages: nobody then waits for those of the next
                for call in calls:
                    self._carry_through(call, interruptible=True)
        except BaseException as exc:  # the peers must know, and whoever waits
            if taken:
                self._end_unfinished(calls, exc)
            raise
        finally:
            if taken:
                self._baton.release()
        if taken and self._dozing:
            self._calls.put(_WAKE)

    def _may_carry_here(self) -> bool:
        """Whether the calling thread may carry calls through; if so, it has the baton.

        Nothing may be before them, and torch must do in this thread what it does in any other.
        """
        modes = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
        if modes or torch.is_inference_mode_enabled() or self._handed != self._taken:
            return False
        return self._baton.acquire(blocking=False)

    def _end_unfinished(self, calls: Sequence[Call], exc: BaseException) -> None:
        """End calls that were numbered, and that nobody will carry through, with an error that the peers hear of."""
        for call in calls:
            if call.sequence >= 0 and not call.done.is_set():
                text = f"rank {self.rank} failed in {title(call)}: {type(exc).__name__}: {exc}"
                call.error = again(self.broken or self.give_up(PeerError(text), exc))
                self._let_go(call)

    def _hand_over(self, call: Call) -> None:
        self._handed += 1
        self._calls.put(call)

    def send_records(self, call: Call) -> None:
        """Tell every peer of a call, once. A Communicator with a device tells on its progress thread.

        That spares the caller the time; and as peers take records in the order in which they come, one thread tells of
        all calls, also of those that are not on the device.
        """
        call.ensure_laid_out()
        call.told = True
        for peer in self.peers:
            try:
                self._tell(call, call.packed_for(self.rank, peer, self._fingerprint), peer)
            except RuntimeError as exc:
                exc.__cause__ = exc.__context__ = None  # as the traceback, they hold the caller's frames
                call.send_failure = call.send_failure or (peer, exc.with_traceback(None))

    def _tell(self, call: Call, control: bytes, peer: int) -> None:
        """Post a control message about a call, which is over when that is."""
        work = self.transport.send_control(control, peer)
        if work is not LEFT:
            call.control_sends.append((peer, work))

    def follow(self, call: Call) -> None:
        """Hand a straight call to the progress thread, behind all others: it has no number."""
        with self._lock:
            self.check_open(call.operation)
            call.issued = self.pipelines[call.device].device.now()
            self._hand_over(call)
            self.last_call = call

    def is_queuing(self) -> bool:
        """Whether the latest call is not over for the host: a straight one would overtake it."""
        return self.last_call is not None and not self.last_call.done.is_set()

    def check_open(self, operation: str) -> None:
        """Raise what finished this Communicator, if anything did."""
        if self.broken is not None:
            self.untold = None
            raise again(self.broken)
        if self._stopped:
            raise InvalidArgument(f"{operation}: this Communicator is closed; make another")

    def leave_to_the_parent(self) -> None:
        """This process was forked: refuse every call, and never free what it has no threads to free."""
        self._lock, self._books_lock = threading.RLock(), threading.RLock()  # whoever had them is not here
        self.is_parents, self.seam = True, None
        self.broken = InvalidArgument(
            "this process was forked from the one that made the Communicator, and has none of its connections; make "
            "another here, or start the process by spawn"
        )
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def stop(self, timeout_s: float) -> None:
        """End the progress thread after the calls it has, and part from the peers; waits at most timeout_s."""
        if self.is_parents:
            return
        with self._lock:
            self._stopped = True
            self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def reached(self, phase: str, call: Call, peer: int = -1, data: torch.Tensor | None = None) -> torch.Tensor | None:
        """Tell the seam, if there is one; see Seam."""
        if self.seam is None:
            return None
        return self.seam.reached(phase, call.operation, call.sequence, peer, data)

    def threads(self) -> list[threading.Thread]:
        """All threads that may wait in the backend."""
        own = [self._thread] if self.watch.thread is None else [self._thread, self.watch.thread]
        return [*own, *self.transport.listeners, *self.transport.watchers, *self.channel_threads]

    # The progress thread

    def _run(self) -> None:
        torch.set_flush_denormal(False)  # the mode is inherited from the thread that made this one
        while (call := self._next()) is not None:
            with self._baton:
                self._carry_through(call)
            self._taken += 1
            del call
        with self._baton:
            for pipeline in list(self.pipelines.values()):
                try:
                    pipeline.close()
                except Exception:  # the peers must hear of the end, whatever becomes of the device
                    log.exception("rank %d: closing what is on a device", self.rank)
        self.watch.stop()
        self.leaving = True
        self.transport.close()

    def _carry_through(self, call: Call, interruptible: bool = False) -> None:
        """Execute a call, and let go of what it needed; whoever has the baton.

        Args:
            interruptible: by what is no Exception, which then is raised once the peers know.
        """
        failed = True
        try:
            self._execute(call)
            failed = False
        except ZipcclError as exc:
            call.error = again(exc)  # without the traceback, which holds on to the buffers
        except Disconnected as exc:  # a peer may be gone before anything was posted to it
            call.error = again(self.transport_failed(title(call), exc, [exc.peer]))
        except BaseException as exc:  # a waiter must never be left hanging, whatever went wrong here
            call.error = self.give_up(
                PeerError(f"rank {self.rank} failed in {title(call)}: {type(exc).__name__}: {exc}"), exc
            )
            if interruptible and not isinstance(exc, Exception):
                raise
        finally:
            if failed and call.error is None:  # giving up failed as well
                call.error = self.broken or PeerError(f"rank {self.rank} failed in {title(call)}")
            self._free_s = time.monotonic()
            self._let_go(call)

    def _let_go(self, call: Call) -> None:
        """A call is over: let go of the caller's tensors, and of who waits."""
        call.control_sends, call.send_failure = [], None
        call.finish = nothing
        call.sends, call.receives, call.messages, call.native, call.before = [], [], {}, None, None
        call.target = call.issued = call.straight = call.given = call.lay_out = None
        call.done.set()

    def _next(self) -> Call | None:
        """The next call, None for the end; looks after what devices are busy with meanwhile."""
        while not self._ahead:
            self._dozing = True  # said before it is looked: who uses a device for the first time after that wakes it
            self._dozing = not self.pipelines
            try:
                found = self._calls.get(timeout=None if self._dozing else _SWEEP_S)
                if found is not _WAKE:
                    return found
            except queue.Empty:
                busy = [p for p in list(self.pipelines.values()) if p.busy] if self.broken is None else []
                if busy and self._baton.acquire(blocking=False):
                    try:
                        self._sweep(busy)
                    finally:
                        self._baton.release()
        return self._ahead.popleft()

    def _sweep(self, busy: list[Pipeline]) -> None:
        try:
            for pipeline in busy:
                pipeline.sweep()
        except BaseException as exc:  # the next call says so, or close(); this thread must go on for them
            if self.broken is None:
                text = f"rank {self.rank} failed in what a device still does: {type(exc).__name__}: {exc}"
                self.give_up(PeerError(text), exc)
            self.untold = self.broken

    def tell_ahead(self, call: Call) -> None:
        """Tell of the calls that are queued: their records travel while this rank waits for what this call needs.

        On the progress thread alone, which takes them from the queue: not if the call's own caller carries it through.
        """
        if call.waited_for:
            return
        with contextlib.suppress(queue.Empty):
            while True:
                queued = self._calls.get_nowait()
                if queued is _WAKE:
                    continue
                self._ahead.append(queued)
                if queued is not None and queued.straight is None and not queued.told:
                    self.send_records(queued)

    def _execute(self, call: Call) -> None:
        if self.broken is not None:
            self.untold = None
            raise again(self.broken)
        deadline = time.monotonic() + self.policy.timeout_s
        pipeline = self.pipelines.get(call.device)
        if call.straight is not None:
            assert pipeline is not None
            pipeline.follow(call, deadline)
            return
        if call.before is not None and call.before.error is not None:
            self.end_transfers(call, [], deadline)
            raise again(call.before.error)
        if not call.told:
            self.send_records(call)
        if pipeline is not None:
            self.tell_ahead(call)
        if call.send_failure is not None:
            raise self.transport_failed(title(call), call.send_failure[1], [call.send_failure[0]])
        pending, self._pending = self._pending, None  # what the call before found out after it had returned
        if pipeline is not None:
            self._execute_on(pipeline, call, deadline, pending)
            return
        wrong = [error for p in list(self.pipelines.values()) if (error := p.settle()) is not None]
        transfers: list[Any] = []
        refused = Refused(wrong[0], False) if wrong else None
        complete = False
        try:
            complete = self._exchange(call, deadline, transfers) and refused is None
        except Refused as exc:
            refused = exc.after(refused)
        # Whether any rank may have returned before the verdict: all ranks know that alike, and raise its error later.
        some_late = self.policy.verify == "late" and pending is None and call.alike
        some_late = some_late and call.operation not in ("barrier", "close")  # where ranks meet, all is settled
        late = some_late and (complete if refused is None else bool(refused.damaged))
        if late:
            self._finish(call)
            call.done.set()
        error = self._agree(call, refused, deadline, transfers)
        if some_late or pending is not None:
            self._pending = error  # the next call raises it on all ranks, those too that raise it now
        if late:
            return
        if pending is not None or error is not None:
            raise pending or error or AssertionError
        self._finish(call)

    def _execute_on(self, pipeline: Pipeline, call: Call, deadline: float, pending: ZipcclError | None) -> None:
        """Carry a call on a device through; raise what a call on the host found out late before it, on all ranks."""
        try:
            pipeline.execute(call, deadline)
        except ZipcclError as exc:
            if pending is None or self.broken is not None:
                raise
            self._pending = again(exc)
        if pending is not None:
            raise pending

    def _finish(self, call: Call) -> None:
        self.reached("reduce", call)
        with phase_range(call, "finish"):
            call.finish()
        self.account(call, {peer: message.sent() for peer, message in call.messages.items()})

    def _agree(self, call: Call, refused: Refused | None, deadline: float, transfers: list[Any]) -> ZipcclError | None:
        """Share this rank's verdict on a call, repair what can be repaired, end its transfers; the ranks' one error."""
        verdicts = self._share_verdict(call, refused, deadline + GRACE_S)
        error = next((v.error for v in verdicts if v.error is not None), None)
        if error is not None and any(v.fatal for v in verdicts):
            # Published, because giving up may cut off this rank's own verdict on its way.
            raise self.give_up(error, error)
        self.end_transfers(call, transfers, deadline)
        if error is None:  # as on every other rank
            raw, sent = sum(v.raw_bytes for v in verdicts), sum(v.sent_bytes for v in verdicts)
            self.learn(call, raw, sent)
        repairable = self.policy.retransmit and self.policy.verify != "late"
        if error is not None and repairable and all(v.error is None or v.damaged for v in verdicts):
            return self._retransmit(call, verdicts, time.monotonic() + self.policy.timeout_s)
        return error

    def _retransmit(self, call: Call, verdicts: list[Verdict], deadline: float) -> ZipcclError | None:
        """Send the messages that came damaged once more, as they are; every rank knows which from the verdicts."""
        tag = data_tag(call)
        transfers: list[Any] = []
        arrivals: list[tuple[Incoming, Any]] = []
        for verdict in verdicts:
            if self.rank in verdict.damaged:
                message = encode_message(self._plain, call.sends[verdict.src], call.sequence, self.rank, verdict.src)
                transfers += [(verdict.src, w) for w in self.transport.send_message(message, verdict.src, tag)]
                self.count(call.operation, [message.sent()], 0)
        for src in verdicts[self.rank].damaged:
            incoming = Incoming(self._plain, call.receives[src], call.sequence, src, self.rank)
            arrivals.append((incoming, self.transport.recv("data", incoming.phase_one, src, tag)))
        refused: Refused | None = None
        for incoming, work in arrivals:
            self._wait(call, work, deadline, [incoming.src])
            refused = self._open(call, incoming, deque()) or refused
        with self._books_lock:
            self._books.setdefault(call.operation, Counter())["retransmissions"] += len(arrivals)
        log.warning("rank %d: %s: %d damaged messages were sent again", self.rank, title(call), len(arrivals))
        verdicts = self._share_verdict(call, refused, deadline + GRACE_S)
        self.end_transfers(call, transfers, deadline)
        return next((v.error for v in verdicts if v.error is not None), None)

    def end_transfers(self, call: Call, transfers: list[Any], deadline: float) -> None:
        """Wait for everything this rank has sent: a send that is let go of before it is done never arrives."""
        for peer, work in (*transfers, *call.control_sends):  # all peers have spoken: done, or about to be
            self._wait(call, work, deadline + GRACE_S, [peer])
        transfers.clear()
        call.control_sends.clear()

    def _exchange(self, call: Call, deadline: float, transfers: list[Any]) -> bool:
        """Records, phase one, phase two; whether all is here. Refused if something that came is wrong."""
        call.paused = not self.codes_now(call)
        messages = call.messages = self._encode(call)
        if call.sends and call.native is None and call.invalid is None:
            call.receives[self.rank].copy_(call.sends[self.rank])
        arrivals: deque[tuple[Incoming, Any]] = deque()
        overflows: deque[tuple[Incoming, Any]] = deque()
        wrong: Refused | None = None

        def take(phase: deque[tuple[Incoming, Any]], index: int = 0) -> None:
            """Wait for a message that is posted, and unpack it, or post its phase two."""
            nonlocal wrong
            incoming, work = phase[index]
            del phase[index]
            self._wait(call, work, deadline, [incoming.src])
            if phase is arrivals:
                self.received("receive", call, incoming.src, incoming.phase_one)
                wrong = _after(wrong, self._open(call, incoming, overflows))
            else:
                self.received("receive_phase_two", call, incoming.src, work.tensor)
                wrong = _after(wrong, self._unpack(call, incoming))

        def take_one_that_is_here() -> bool:
            """Whether there was one. It must not be waited for: its sender may itself wait, for what this rank sends
            to a third as soon as it has the record that is missing."""
            for phase in (arrivals, overflows):
                for i, (incoming, work) in enumerate(phase):
                    if not isinstance(work, Watched):
                        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
                        phase[i] = (incoming, self.transport.watch(work, incoming.src, left))
                    elif work.over.is_set():
                        take(phase, i)
                        return True
            return False

        # While a late rank's record is missing, what the others have sent is unpacked: its lateness is not wasted.
        heard = self.records(
            call,
            deadline,
            lambda src: self._post(call, src, messages, arrivals, transfers),
            meanwhile=take_one_that_is_here,
        )
        # Whoever came first gives up first: all give up then, and each names whom it waits for itself.
        deadline = min(deadline, max(min(call.arrivals_s.values()), self._free_s) + self.policy.timeout_s)
        while arrivals or overflows:
            take(arrivals or overflows)
        refused = _after(heard.refused, wrong)
        if refused is not None:
            raise refused
        if not heard.all_valid:
            return False
        if call.native is not None:
            self.run_native(call, lambda: self.transport.group("native"), deadline)
        return True

    def records(
        self, call: Call, deadline: float, agrees: Callable[[int], None], meanwhile: Callable[[], bool] | None = None
    ) -> Heard:
        """Hear every peer's record of a call; `agrees` is told of each that fits, unless there is no data to exchange.

        Args:
            meanwhile: what to do while none is there; False if there is nothing to do.

        Raises:
            ZipcclError: a record is damaged, or one did not come; the Communicator is finished.
        """
        heard = Heard(None, call.invalid is None, True)
        for src, data in self._control(call, CallRecord.MAGIC, deadline, meanwhile):
            if call.invalid is None and data == call.packed_from(src, self.rank, self._fingerprint):
                if call.native is None:
                    agrees(src)
                continue
            record = self.parsed(self._told_by(call, src), CallRecord.parse, data)
            heard.all_valid = heard.all_valid and record.valid
            if call.invalid is not None or not record.valid:
                continue
            heard.one_device = heard.one_device and record.device == call.device
            wrong = call.record_for(self.rank, src, self._fingerprint).disagreement(record)
            if wrong:
                wrong = f"{title(call)}: {wrong}; call it alike on all ranks"
                # A rank that closes makes no further call: the others cannot go on either.
                closes = "close" in (call.operation, record.operation)
                heard.refused = Refused(PeerError(wrong), closes).after(heard.refused)
            elif call.native is None:
                agrees(src)
        self._note_arrivals(call)
        call.alike = heard.all_valid and heard.one_device
        if call.invalid is not None:
            heard.refused = Refused(call.invalid, False).after(heard.refused)
        return heard

    def codes_now(self, call: Call) -> bool:
        """Whether the place of a call is not paused."""
        return self._switch.codes_now(call.place)

    def codes_on_device(self, kind: str, dtype: str, raw_bytes: int) -> bool:
        """Whether a message of raw_bytes of a call on a device is coded; kind as in `probe`."""
        if self.policy.compress != "auto":
            return self.policy.codes(dtype, raw_bytes)
        return dtype in DTYPES and raw_bytes >= max(self.thresholds.get(kind, self.policy.min_bytes), 1)

    def learn(self, call: Call, raw_bytes: int, sent_bytes: int) -> None:
        """What all ranks' coded messages of a call weighed; see Switch."""
        self._switch.learn(call.place, raw_bytes, sent_bytes)

    def received(self, phase: str, call: Call, src: int, buffer: torch.Tensor) -> None:
        """Let the seam see, and perhaps change, bytes that have come."""
        changed = self.reached(phase, call, src, buffer)
        if changed is not None:
            buffer.copy_(changed)

    def _note_arrivals(self, call: Call) -> None:
        """Who came when, in microseconds after the first."""
        if call.stage:
            return
        self._arrivals_s = call.arrivals_s
        if len(self._arrivals_s) > 1:
            self.arrived_last[max(self._arrivals_s, key=self._arrivals_s.__getitem__)] += 1

    @property
    def last_arrivals(self) -> list[tuple[int, float]]:
        """Who came when to the latest collective call: (rank, microseconds after the first), in that order."""
        order = sorted(self._arrivals_s.items(), key=lambda item: item[1])
        return [(rank, (at - order[0][1]) * 1e6) for rank, at in order]

    def _encode(self, call: Call) -> dict[int, Message]:
        """Every message this rank will send: peer → message; one object for all peers if they get the same."""
        messages: dict[int, Message] = {}
        if call.native is not None or call.invalid is not None:
            return messages
        for peer in self.peers if call.sends else []:
            if call.sends[peer].numel() == 0:
                continue
            self.reached("encode", call, peer, call.sends[peer])
            if call.same_for_all and messages:
                messages[peer] = next(iter(messages.values()))
            else:
                dst = ALL_RANKS if call.same_for_all else peer
                policy = self._plain if call.paused else self.policy
                with phase_range(call, "encode"):
                    messages[peer] = encode_message(policy, call.sends[peer], call.sequence, self.rank, dst)
        return messages

    def _post(
        self,
        call: Call,
        peer: int,
        messages: dict[int, Message],
        arrivals: deque[tuple[Incoming, Any]],
        transfers: list[Any],
    ) -> None:
        """Post phase one to and from a peer whose record agrees, and phase two to it if the prefix overflowed."""
        tag = data_tag(call)
        if (message := messages.get(peer)) is not None:
            message = self.sent(call, peer, message)
            transfers += [(peer, work) for work in self.transport.send_message(message, peer, tag)]
        if call.receives and call.receives[peer].numel():
            policy = self._plain if call.paused else self.policy
            incoming = Incoming(policy, call.receives[peer], call.sequence, peer, self.rank)
            arrivals.append((incoming, self.transport.recv("data", incoming.phase_one, peer, tag)))

    def sent(self, call: Call, peer: int, message: Message) -> Message:
        """The message as the seam lets it go."""
        if self.seam is None:
            return message
        one, two = self.reached("send", call, peer, message.phase_one), None
        if message.phase_two is not None:
            two = self.reached("send_phase_two", call, peer, message.phase_two)
        return replace(
            message,
            phase_one=message.phase_one if one is None else one,
            phase_two=message.phase_two if two is None else two,
        )

    def _open(self, call: Call, incoming: Incoming, overflows: deque[tuple[Incoming, Any]]) -> Refused | None:
        """Look at a message whose phase one is here: unpack it, or post its phase two."""
        try:
            rest = incoming.open()
        except CorruptFrame as exc:
            # Without a size to believe, a phase two cannot be received, so the sender may be left with it.
            damaged = () if incoming.coded else (incoming.src,)
            return Refused(CorruptFrame(f"{self._where(call, incoming)}: {exc}"), incoming.coded, damaged)
        if rest is None:
            return self._unpack(call, incoming)
        tag = data_tag(call)
        overflows.append((incoming, self.transport.recv("phase_two", rest, incoming.src, tag)))
        return None

    def _unpack(self, call: Call, incoming: Incoming) -> Refused | None:
        """Decode or copy a message that is here whole, and verify it."""
        self.reached("decode", call, incoming.src)
        try:
            with phase_range(call, "decode"):
                incoming.unpack()
        except ZipcclError as exc:
            return Refused(type(exc)(f"{self._where(call, incoming)}: {exc}"), False, (incoming.src,))
        return None

    def run_native(self, call: Call, group: Callable[[], Any], deadline: float) -> None:
        """The backend's own collective on one of its groups, after all ranks have agreed to it.

        Raises:
            Refused: the backend does not know operation or dtype.
        """
        assert call.native is not None
        if not self.peers:  # there is no group, and nothing to reduce with
            call.receives[self.rank].copy_(call.sends[self.rank])
            if call.spec is not None and call.spec.factor is not None:
                call.receives[self.rank].mul_(float(call.spec.factor))
            return
        try:
            call.native(group(), timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as exc:
            if is_of_the_connection(exc):
                raise self.transport_failed(title(call), exc, self.peers) from exc
            raise Refused(InvalidArgument(f"{title(call)}: the backend refuses it: {exc}"), False) from exc

    def _share_verdict(self, call: Call, refused: Refused | None, deadline: float) -> list[Verdict]:
        """All ranks' verdicts on a call, in rank order."""
        coded = [message for message in call.messages.values() if message.coded]
        raw, sent = sum(message.raw_bytes for message in coded), sum(message.sent_bytes for message in coded)
        mine = Verdict(call.sequence, self.rank, raw_bytes=raw, sent_bytes=sent)
        if refused is not None:
            damaged = refused.damaged if len(refused.damaged) <= MOST_DAMAGED else ()
            mine = replace(mine, error=refused.error, fatal=refused.fatal, damaged=damaged)
        packed = mine.pack()
        verdicts = {self.rank: Verdict.parse(packed)}  # as the peers read it
        self.reached("verdict", call)
        for peer in self.peers:
            self._tell(call, packed, peer)
        for src, data in self._control(call, Verdict.MAGIC, deadline):
            verdicts[src] = self._parsed(call, src, Verdict.parse, data)
        return [verdicts[r] for r in range(self.size)]

    def share(self, call: Call, refused: Refused | None, deadline: float) -> ZipcclError | None:
        """Share this rank's verdict on a call that is over on all ranks; the error that all raise."""
        verdicts = self._share_verdict(call, refused, deadline + GRACE_S)
        error = next((v.error for v in verdicts if v.error is not None), None)
        if error is not None and any(v.fatal for v in verdicts):
            raise self.give_up(error, error)
        self.end_transfers(call, [], deadline)
        return error

    def share_sizes(self, call: Call, mine: Callable[[int], Sizes], deadline: float) -> list[Sizes]:
        """Tell every peer what is for it, and hear the same; all that is known, in rank order, own included."""
        own = mine(self.rank)
        known = {self.rank: own if own.error is None else Sizes.parse(own.pack())}  # as the peers read it
        for peer in self.peers:
            self._tell(call, mine(peer).pack(), peer)
        self.tell_ahead(call)
        for src, data in self._control(call, Sizes.MAGIC, deadline):
            known[src] = self._parsed(call, src, Sizes.parse, data)
        return [known[r] for r in range(self.size)]

    def parsed(self, what: Callable[[], str], parse: Callable[[bytes], _Parsed], data: bytes) -> _Parsed:
        """What a peer tells; the agreed fatal error if it is damaged, since this rank alone has seen that.

        Args:
            what: what the error calls it.
        """
        try:
            return parse(data)
        except ZipcclError as exc:
            raise self.give_up(type(exc)(f"{what()}: {exc}"), exc) from exc

    def _told_by(self, call: Call, src: int) -> Callable[[], str]:
        return lambda: f"{title(call)}: from rank {src} to rank {self.rank}"

    def _parsed(self, call: Call, src: int, parse: Callable[[bytes], _Told], data: bytes) -> _Told:
        """What a peer tells of this call and no other; see parsed."""
        told = self.parsed(self._told_by(call, src), parse, data)
        if told.sequence != call.sequence:
            error = PeerError(f"{title(call)}: rank {src} speaks of call #{told.sequence} to rank {self.rank}")
            raise self.give_up(error, error)
        return told

    def _control(
        self, call: Call, kind: bytes, deadline: float, meanwhile: Callable[[], bool] | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """One control message of a kind from every peer, whoever is first."""
        missing, patience_s = list(self.peers), _PATIENCE_S
        while missing:
            for peer in missing:
                if self._stash[peer][kind]:
                    break
            else:
                if meanwhile is None:
                    self._hear(call, missing, deadline)
                elif not self._hear_within(patience_s):
                    patience_s = 0.0
                    if not meanwhile():
                        self._hear(call, missing, deadline)
                continue
            control = self._stash[peer][kind].popleft()
            assert control.data is not None
            if kind == CallRecord.MAGIC and is_stale(control.data, call.sequence):
                continue
            missing.remove(peer)
            if kind == CallRecord.MAGIC:
                call.arrivals_s[peer] = control.arrived_s
            yield peer, control.data

    def _hear(self, call: Call, missing: list[int], deadline: float) -> None:
        """Take one control message from the inbox; the agreed fatal error if none comes or one of `missing` is gone."""
        for gone in missing if self._lost else ():
            if gone in self._lost:
                raise self.transport_failed(title(call), RuntimeError(self._lost[gone]), [gone])
        self._waiting.add(call)
        try:
            control = self.transport.inbox.get(timeout=max(deadline - time.monotonic(), 0.001))
        except queue.Empty as exc:
            raise self.transport_failed(title(call), RuntimeError("timed out"), missing) from exc
        finally:
            self._waiting.discard(call)
        self._take(control)

    def _hear_within(self, seconds: float) -> bool:
        """Take one control message if one comes within so many seconds; whether one did."""
        try:
            self._take(self.transport.inbox.get(timeout=seconds))
        except queue.Empty:
            return False
        return True

    def _take(self, control: Control) -> None:
        if control.data == b"":
            return  # what is watched is over: whoever watches it looks
        if control.data is None:
            self._lost[control.src] = control.lost
            return
        stash = self._stash[control.src]
        came = control.data[:4]
        # What is none of them is damaged; whoever waits, for whatever, parses it and says so.
        for kind in (came,) if came in stash else tuple(stash):
            stash[kind].append(control)

    # Waiting, and giving up

    def poll(self, query: Callable[[], bool], deadline: float, what: str, ranks: list[int]) -> None:
        """Wait until a query is true, on the progress thread; the agreed fatal error if that does not come.

        Args:
            deadline: of time.monotonic(). Less if a peer is gone: what it sent before may arrive within GRACE_S.
            ranks: whom a missed deadline names.
        """
        gone: int | None = None
        began = time.monotonic()
        for spin in itertools.count():
            if query():
                self._waiting.discard(what)
                return
            if spin == _SPINS and ranks != [self.rank]:
                self._waiting.add(what)
            if gone is None and spin % _SPINS_A_LOOK == 0 and (gone := self.lost_peer()) is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline:
                if gone is not None:
                    raise self.transport_failed(what, RuntimeError(self._lost[gone]), [gone])
                raise self.transport_failed(what, RuntimeError("timed out"), ranks)
            if spin < _SPINS:
                let_others()
            else:
                time.sleep(nap_s(time.monotonic() - began))

    def lost_peer(self) -> int | None:
        """A peer that is gone, if one is; never waits. On the progress thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(self.transport.inbox.get_nowait())
        return next(iter(self._lost), None)

    def _wait(self, call: Call, work: Any, deadline: float, waiting_for: list[int]) -> None:
        self.wait_until(deadline, work, title(call), waiting_for, call)

    def wait_until(
        self, deadline: float, work: Any, what: str, waiting_for: list[int], call: Call | None = None
    ) -> None:
        """Wait for a transfer until the deadline (of time.monotonic); the agreed fatal error if it does not come.

        Args:
            call: that it is of.
        """
        self._waiting.add(call)
        try:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as exc:
            raise self.transport_failed(what, exc, waiting_for) from exc
        finally:
            self._waiting.discard(call)

    def transport_failed(
        self, what: str, exc: BaseException, ranks: list[int], limit_s: float | None = None
    ) -> ZipcclError:
        """What to raise after a transfer failed: the error that some rank has published, or a new one.

        Args:
            ranks: whom to name, unless exc knows better.
            limit_s: how long was waited for them, if that is the trouble; the policy's deadline if None.
        """
        if "imed out" in str(exc):
            if ranks != [self.rank]:
                try:
                    ranks = self._absent(ranks)
                except ZipcclError as told:
                    return self._break(told)
            text = (
                f"{what}: {_names(ranks)} of {self.size} did not arrive within {limit_s or self.policy.timeout_s:g} s; "
                "see what kept it, or raise Policy(timeout_s=…)"
            )
            return self.give_up(RankTimeout(text), exc)
        if self.leaving:
            text = (
                f"{what}: rank {self.rank} of {self.size} left while it was under way; close() before the script ends"
            )
            return self.give_up(PeerError(text), exc)
        # A peer that gave up has published why before it closed its connections; one that died has not.
        published = self.board.published(GRACE_S)
        if published is not None:
            return self._break(published)
        ranks = self.first_lost(_NEWS_S) or ([exc.peer] if isinstance(exc, Disconnected) else ranks)
        why = "" if self.board.gone else f": {exc}"  # without a store all say the same only if none says its own ports
        text = f"{what}: lost the connection while waiting for {_names(ranks)}{why}; see whether it died"
        return self.give_up(PeerError(text), exc)

    def _overdue(self, what: Any) -> None:
        """Give up, since a call into the backend does not come back: that of a Call, or of an operation."""
        if self.broken is None:
            lost = self.transport.lost[:1]
            trouble = RuntimeError("its connection is lost" if lost else "timed out")
            self.transport_failed(title(what) if isinstance(what, Call) else what, trouble, lost or self.peers)

    def _absent(self, ranks: list[int]) -> list[int]:
        """Those of some ranks that do not wait for others, here or elsewhere; all of them if none is like that.

        Whoever waits says so when it is asked. Who comes to its deadline meanwhile, and knows whom it waits for, names
        that one, and all take its word: so if all of them wait, one of those is given time to.

        Raises:
            ZipcclError: what another rank has published.
        """
        until = time.monotonic() + _ANSWERS_S
        while True:
            self.transport.ask(ranks)
            found = self.board.absent(LATE, _ANSWER_S)
            absent = [rank for rank in ranks if rank in found]
            over = time.monotonic() > (until if absent else until + BEHIND_S)
            if len(absent) == 1 or over or self.board.gone:
                return absent or ranks
            if not found:  # all have come here, and it was not waited for them
                time.sleep(_ANSWER_S)

    def _say_whether_it_waits(self) -> None:
        """A peer asks who is late. Not this rank, if it waits for peers; for a message, if that is waited for too."""
        for what in list(self._waiting):
            if not isinstance(what, Call) or not what.is_message or what.done.is_waited_for:
                self.board.say_late()
                return

    def first_lost(self, within_s: float) -> list[int]:
        """The peer whose connection was lost first, if its listener knows within_s: others have only followed it."""
        until = time.monotonic() + within_s
        while not self.transport.lost and time.monotonic() < until:
            time.sleep(_NEWS_NAP_S)
        return self.transport.lost[:1]

    def give_up(self, error: ZipcclError, cause: BaseException) -> ZipcclError:
        """Finish the Communicator with an error, or with the one that was published before it; returns that."""
        log.debug("rank %d gives up: %s", self.rank, error, exc_info=cause)
        return self._break(self.board.settle(error))

    def _break(self, error: ZipcclError) -> ZipcclError:
        """No call can follow; peers that wait for this rank notice by its closed connections."""
        self.broken = error
        for abort in (self.transport.abort, *(p.link.abort for p in self.pipelines.values())):
            try:
                abort()
            except Exception:  # the error must be raised, whatever becomes of the connections
                log.exception("rank %d: giving up", self.rank)
        return again(error)

    # Books

    def _where(self, call: Call, incoming: Incoming) -> str:
        return f"{title(call)}: message from rank {incoming.src} to rank {self.rank}"

    def account(self, call: Call, messages: dict[int, Sent]) -> None:
        """Enter a call that is over into the books: peer → what was sent to it."""
        if not call.sends:
            self.count(call.operation, [], calls=1)
            return
        sent = list(messages.values())
        coded = len([message for message in sent if message.coded])
        reason = call.native_reason
        if call.paused:
            reason = reason or "coding did not pay at this place; it is tried again later"
        elif not reason:
            largest = max([message.raw_bytes for message in sent], default=0)
            dtype, measured = dtype_text(call.dtype) if call.dtype else "", self.thresholds.get(call.kind)
            reason = explain(
                self.policy, dtype, coded, len(sent), largest, measured if call.device in self.pipelines else None
            )
        decision = Decision("compressed" if coded else "native", reason, call.operation, call.sequence)
        sent_natively = 0
        if call.native is not None:
            sent_natively = sum(call.sends[peer].numel() * call.sends[peer].element_size() for peer in self.peers)
        self.count(call.operation, sent, int(call.stage == 0), sent_natively, decision)

    def forget(self) -> None:
        """Empty the books: what was called so far was nobody's call. With nothing under way."""
        with self._books_lock:
            self._books.clear()
            self._straight.clear()
            self.last_decision, self._arrivals_s = None, {}
            self.arrived_last.clear()

    def count_native(self, operation: str, sent_bytes: int, decision: Decision) -> None:
        """Count a call that went straight to the backend; from any thread. There is little else in such a call."""
        self._straight.append((operation, sent_bytes))
        if len(self._straight) > _MOST_STRAIGHT:
            with self._books_lock:
                self._fold()
        self._decided(decision)

    def books(self) -> dict[str, Counter[str]]:
        """What was counted, for each operation."""
        with self._books_lock:
            self._fold()
            return {operation: Counter(books) for operation, books in self._books.items()}

    def _fold(self) -> None:
        """Enter the straight calls that were only counted; with the books' lock."""
        counted = Counter(self._straight.popleft() for _ in range(len(self._straight)))  # others may come meanwhile
        for (operation, sent_bytes), calls in counted.items():
            sent = calls * sent_bytes
            more = {"calls": calls, "native": calls, "raw_bytes": sent, "sent_bytes": sent}
            self._books.setdefault(operation, Counter()).update(more)

    def _decided(self, decision: Decision) -> None:
        self.last_decision = decision
        if log.isEnabledFor(logging.DEBUG):  # asked before the sentence is put together
            log.debug("rank %d: %s #%d: %s", self.rank, decision.operation, decision.sequence, decision.reason)

    def count(
        self,
        operation: str,
        messages: list[Sent],
        calls: int,
        sent_natively_bytes: int = 0,
        decision: Decision | None = None,
    ) -> None:
        """Enter what one call sent into the books; from any thread."""
        with self._books_lock:
            books = self._books.setdefault(operation, Counter())
            books["calls"] += calls
            books["raw_bytes"] += sent_natively_bytes
            books["sent_bytes"] += sent_natively_bytes
            for message in messages:
                books["raw_bytes"] += message.raw_bytes
                books["sent_bytes"] += message.sent_bytes
                books["phase_two_messages"] += message.phase_two
                books["coded_words"] += message.words if message.coded else 0
                books["escapes"] += message.escapes
            if decision is not None:
                books[decision.mode] += calls
                self._decided(decision)


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


def _after(first: Refused | None, second: Refused | None) -> Refused | None:
    return first if second is None else second.after(first)


def is_stale(data: bytes, sequence: int) -> bool:
    """Whether a call record is of a stage that was not made, since the stage before it had failed."""
    if CallRecord.sequence_of(data) >= sequence:
        return False
    try:
        return CallRecord.parse(data).sequence < sequence
    except ZipcclError:
        return False  # whoever reads it says what is wrong with it


def facts(policy: Policy, size: int) -> dict[str, Any]:
    """What must be alike on all ranks of a Communicator."""
    return {"format version": FORMAT_VERSION, "world size": size, "policy": repr(policy)}
