"""Messages between two ranks: one channel, with a thread and numbers of its own, for each peer, direction and tag.

A message goes as a collective call does, between two: both sides tell their record, the payload moves in one or two
phases if the records agree, and both tell how it went, so that both raise the same error or none. Channels do not wait
for each other: `isend` then `irecv` here against `irecv` then `isend` there, or tags taken in another order, are no
deadlock.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from typing import Any

import torch

from ..errors import CorruptFrame, InvalidArgument, PeerError, ZipcclError, again
from ..policy.switch import Decision, explain
from .call import Call, nothing
from .exchange import BEHIND_S, EXIT_S, GRACE_S, Exchange
from .message import Incoming, Message, dtype_text, encode_message
from .stragglers import join
from .transport import Disconnected
from .wire import CallRecord, Verdict

TAGS = 1 << 27
_FIRST_TAG = 1 << 30  # above every tag of the collectives
_RECORD, _DATA, _VERDICT, _MIRROR = 0, 1, 2, 4
_TAGS_A_CHANNEL = 8


_live: weakref.WeakSet[Channels] = weakref.WeakSet()


@atexit.register
def _stop_at_exit() -> None:
    """As for the progress thread; runs before it, since it is registered after it."""
    deadline = time.monotonic() + EXIT_S
    for channels in list(_live):
        channels.stop(max(deadline - time.monotonic(), 0))


def _leave_to_the_parent() -> None:
    """In a process that was forked: its parent's threads are not here, whatever lock they had is nobody's."""
    for channels in list(_live):
        channels.leave_to_the_parent()


os.register_at_fork(after_in_child=_leave_to_the_parent)


class Channels:
    """The channels of one Communicator, made when they are first used.

    Args:
        exchange: its groups, policy and books.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._lock = threading.RLock()
        self._stopped = False
        self._channels: dict[tuple[int, int, bool], _Channel] = {}
        _live.add(self)

    def submit(self, call: Call, peer: int, tag: int, is_sender: bool) -> None:
        """Hand a call with one tensor to send, or one to receive, to its channel.

        Raises:
            PeerError: no thread can be started for it.
        """
        with self._lock:
            self._exchange.check_open("send" if is_sender else "recv")
            if self._stopped:
                raise InvalidArgument("point_to_point: this Communicator is closed; make another")
            key = (peer, tag, is_sender)
            if key not in self._channels:
                self._channels[key] = self._channel(*key)
            self._channels[key].calls.put(call)

    def _channel(self, peer: int, tag: int, is_sender: bool) -> _Channel:
        try:
            return _Channel(self._exchange, peer, tag, is_sender)
        except RuntimeError as exc:  # the peer waits, and nobody would ever answer
            text = f"rank {self._exchange.rank} cannot start a thread for its messages: {exc}; raise the limit"
            raise self._exchange.give_up(PeerError(text), exc) from exc

    def leave_to_the_parent(self) -> None:
        """This process was forked."""
        self._lock, self._channels = threading.RLock(), {}

    def stop(self, timeout_s: float) -> None:
        """End the threads after the messages they have; waits at most timeout_s."""
        with self._lock:
            self._stopped = True
            channels = list(self._channels.values())
        for channel in channels:
            channel.calls.put(None)
        threads = [channel.thread for channel in channels]
        join([thread for thread in threads if thread is not threading.current_thread()], timeout_s)


class _Channel:
    """Messages of one tag to or from one peer, in order."""

    def __init__(self, exchange: Exchange, peer: int, tag: int, is_sender: bool) -> None:
        self._exchange, self._peer, self._tag, self._is_sender = exchange, peer, tag, is_sender
        self._first_tag = _FIRST_TAG + _TAGS_A_CHANNEL * tag
        self._sequence = 0
        self.calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"zipccl-channel-{peer}-{tag}", daemon=True)
        self.thread.start()
        exchange.channel_threads.append(self.thread)

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            call.sequence, self._sequence = self._sequence, self._sequence + 1
            failed = True
            try:
                self._exchange.check_open(call.operation)
                self._carry(call)
                failed = False
            except ZipcclError as exc:
                call.error = again(exc)
            except Disconnected as exc:
                call.error = again(self._exchange.transport_failed(self._title(call), exc, [exc.peer]))
            except BaseException as exc:  # a waiter must never be left hanging, whatever went wrong here
                what = f"rank {self._exchange.rank} failed in {self._title(call)}: {type(exc).__name__}: {exc}"
                call.error = self._exchange.give_up(PeerError(what), exc)
            finally:
                if failed and call.error is None:  # giving up failed as well
                    call.error = self._exchange.broken or PeerError(f"{self._title(call)} failed")
                call.finish = nothing
                call.sends, call.receives, call.lay_out = [], [], None
                call.done.set()
                del call

    def _title(self, call: Call) -> str:
        mine, peer = self._exchange.rank, self._peer
        src, dst = (mine, peer) if self._is_sender else (peer, mine)
        return f"message #{call.sequence} from rank {src} to rank {dst} (tag {self._tag})"

    def _carry(self, call: Call) -> None:
        exchange, title = self._exchange, self._title(call)
        deadline = time.monotonic() + exchange.policy.timeout_s + BEHIND_S
        call.ensure_laid_out()
        message = None
        if self._is_sender and call.sends and call.sends[0].numel():
            exchange.reached("encode", call, self._peer, call.sends[0])
            message = encode_message(exchange.policy, call.sends[0], call.sequence, exchange.rank, self._peer)
        mine = CallRecord(
            call.sequence,
            call.operation,
            exchange.rank,
            dtype_text(call.dtype) if call.dtype else "",
            send_words=call.sends[0].numel() if call.sends else 0,
            recv_words=call.receives[0].numel() if call.receives else 0,
            policy=exchange.policy.fingerprint(),
            valid=call.invalid is None,
        )
        came = self._swap(call, mine.pack(), CallRecord.BYTES, _RECORD, deadline, title)
        theirs = exchange.parsed(lambda: title, CallRecord.parse, came)
        transfers: list[Any] = []
        error: ZipcclError | None = call.invalid
        fatal = False
        if mine.valid and theirs.valid:
            wrong = mine.disagreement(theirs)
            if wrong:
                error = PeerError(f"{title}: {wrong}; call it alike on both ranks")
            elif message is not None:
                outgoing = exchange.sent(call, self._peer, message)
                transfers = exchange.transport.send_message(outgoing, self._peer, self._first_tag + _DATA)
            elif call.receives and call.receives[0].numel():
                error, fatal = self._receive(call, call.receives[0], deadline, title)
        exchange.reached("verdict", call, self._peer)
        verdict = Verdict(call.sequence, exchange.rank, error, fatal).pack()
        came = self._swap(call, verdict, Verdict.BYTES, _VERDICT, deadline + GRACE_S, title)
        answer = exchange.parsed(lambda: title, Verdict.parse, came)
        both = sorted((Verdict.parse(verdict), answer), key=lambda v: v.src)
        failed = next((v.error for v in both if v.error is not None), None)
        if failed is not None and any(v.fatal for v in both):
            raise exchange.give_up(failed, failed)
        for work in transfers:
            exchange.wait_until(deadline + GRACE_S, work, title, [self._peer], call)
        if failed is not None:
            raise failed
        call.finish()
        self._account(call, message)

    def _receive(self, call: Call, flat: torch.Tensor, deadline: float, title: str) -> tuple[ZipcclError | None, bool]:
        """What is wrong with what came, and whether a phase two may be left hanging."""
        exchange, tag = self._exchange, self._first_tag + _DATA
        incoming = Incoming(exchange.policy, flat, call.sequence, self._peer, exchange.rank)
        work = exchange.transport.recv("data", incoming.phase_one, self._peer, tag)
        exchange.wait_until(deadline, work, title, [self._peer], call)
        exchange.received("receive", call, self._peer, incoming.phase_one)
        try:
            rest = incoming.open()
        except CorruptFrame as exc:
            return CorruptFrame(f"{title}: {exc}"), incoming.coded
        try:
            if rest is not None:
                work = exchange.transport.recv("phase_two", rest, self._peer, tag)
                exchange.wait_until(deadline, work, title, [self._peer], call)
                exchange.received("receive_phase_two", call, self._peer, rest)
            exchange.reached("decode", call, self._peer)
            incoming.unpack()
        except ZipcclError as exc:
            if exchange.broken is not None:
                raise
            return type(exc)(f"{title}: {exc}"), False
        return None, False

    def _swap(self, call: Call, data: bytes, size: int, kind: int, deadline: float, title: str) -> bytes:
        """Send bytes to the peer and return its bytes of the same kind."""
        exchange, tag = self._exchange, self._first_tag + kind
        # The two directions between two ranks are two channels: the sender's side of each has tags of its own.
        out, back = (tag, tag + _MIRROR) if self._is_sender else (tag + _MIRROR, tag)
        buffer = torch.empty(size, dtype=torch.uint8)
        sent = exchange.transport.send("control", data, self._peer, out)
        came = exchange.transport.recv("control", buffer, self._peer, back)
        exchange.wait_until(deadline, came, title, [self._peer], call)
        exchange.wait_until(deadline, sent, title, [self._peer], call)
        return buffer.numpy().tobytes()

    def _account(self, call: Call, message: Message | None) -> None:
        if not self._is_sender:
            self._exchange.count("recv", [], 1)
            return
        messages = [] if message is None else [message.sent()]
        coded = sum(m.coded for m in messages)
        dtype = dtype_text(call.dtype) if call.dtype else ""
        reason = explain(self._exchange.policy, dtype, coded, len(messages), message.raw_bytes if message else 0)
        decision = Decision("compressed" if coded else "native", reason, "send", call.sequence)
        self._exchange.count("send", messages, 1, 0, decision)
