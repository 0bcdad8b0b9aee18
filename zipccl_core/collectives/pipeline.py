"""Calls on a device: chunks through encode → move → decode on streams of their own, without the host waiting for them.

docs/DESIGN.md, "On a device", says why each step is where it is. For one call, on the thread that carries it
through (see Exchange.submit):

1. encode every message's chunks, ordered after what the caller's stream held when the call was issued;
2. when all records are here and agree, post phase one of every chunk, ordered after its encoding, and decode each,
   ordered after its arrival: all that is to be decoded is there, unless a frame was too long;
3. when the encoder's sizes have come to the host, tell each peer those of its frames, or what is wrong; hear the same;
4. if a chunk overflowed, post its phase two, and decode once more, now that all is there;
5. the call is over for the caller, whose stream waits for the rest. What the decoder's verdict was is read when the
   device is done, at the latest with the next call but one, and told with that call's sizes (verify="late"); or waited
   for and told at once (verify="wait").
"""

from __future__ import annotations

import logging
import struct
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CorruptFrame, PeerError, ZipcclError
from ..frame import HEADER_BYTES
from .buffers import CALLS_AT_ONCE, Buffer, Pool
from .call import Call, Refused, data_tag, nothing, phase_range, title
from .device import CALLERS, MESSAGES, STREAMS, Device, Event, HostBytes
from .link import Link, Piece, Posted
from .message import raw_view
from .plan import NO_MESSAGES, DeviceMessage, Plan, Planner
from .transport import is_of_the_connection
from .wire import Sizes

if TYPE_CHECKING:
    from .exchange import Exchange

log = logging.getLogger("zipccl")

_QUIET_S = 2.0
_QUIET_NAP_S = 0.001
_SIZE_DIGEST_ESCAPES = struct.Struct(f"<16x3Q{HEADER_BYTES - 40}x")  # of a frame header that this rank has made

_users: Counter[Hashable] = Counter()
"""Device.key → pipelines of it that are not closed."""
_users_lock = threading.RLock()


_untouchable: list[object] = []


def _count_users(key: Hashable, more: int) -> None:
    with _users_lock:
        _users[key] += more


MOST_IN_ORDER_BYTES = 24 << 20


@dataclass(slots=True)
class _Verdict:
    """The verdicts of one launch, to be read when it is over, and which frames they are about: (src, chunk) each."""

    verdicts: Any
    about: list[tuple[int, int]]


@dataclass(slots=True)
class _InFlight:
    """A call that the device is still busy with, and everything that must live until it is done."""

    title: str
    deadline: float
    finished: Event
    verdicts: list[_Verdict]
    incoming: dict[int, DeviceMessage]
    buffers: list[Buffer]
    control_sends: list[tuple[int, Any]]
    kept: list[Any]


class Pipeline:
    """The calls of one Communicator on one device. Used by one thread at a time: whoever carries calls through.

    Args:
        exchange: its records, control messages, policy and books.
        device: see Device.
        link: to the same device of the other ranks.
    """

    def __init__(self, exchange: Exchange, device: Device, link: Link) -> None:
        self._exchange, self.device, self.link = exchange, device, link
        self.pool = Pool(device.empty)
        self._in_flight: deque[_InFlight] = deque()
        exchange.watch.start()
        _count_users(device.key, 1)
        self._leave = weakref.finalize(self, _count_users, device.key, -1)
        self._planner = Planner(exchange.policy, exchange.peers, exchange.codes_on_device, device, self.pool)
        self._kept: list[Any] = []  # what must live until the device is done with the call in hand
        self._abandoned: list[Any] = []  # of calls that failed for good, until close()
        self._wrong: ZipcclError | None = None

    def can_use_callers(self) -> bool:
        """Whether a call may go to the calling thread's own stream, and wait for peers there.

        Not if there are several Communicators on it: two threads of a rank could then put one behind the other that the
        two of another rank put before it.
        """
        return _users[self.device.key] == 1 and self.device.can_use_callers()

    # One call

    def execute(self, call: Call, deadline: float) -> None:
        """Carry a call through; when it returns, the caller's stream may wait for `call.finished`.

        Raises:
            ZipcclError: the call failed, in the same way on all ranks; nothing of it is under way any more, or the
                Communicator is finished.
        """
        with self.device.attached():
            self._execute(call, deadline)

    def _execute(self, call: Call, deadline: float) -> None:
        exchange = self._exchange
        buffers: list[Buffer] = []
        self._kept = [call.sends, call.receives, call.finish]
        try:
            self._retire_finished()
            while len([flight for flight in self._in_flight if flight.buffers]) >= CALLS_AT_ONCE:
                self._retire(self._in_flight[0])
            plan = self._plan(call)
            if call.issued is None and call.stream != CALLERS:
                call.issued = self.device.now()
            buffers = plan.buffers
            self._kept += [plan]
            if call.waited_for and call.stream != CALLERS:  # the tensors are the caller's own: they may change
                self._kept += [t.untyped_storage() for t in (*call.sends[:1], call.target) if t is not None]
            flight = self._carry(call, plan, deadline)
            if isinstance(flight, ZipcclError):
                error: ZipcclError | None = flight
                self.pool.give_back(buffers)
            else:
                flight.buffers = buffers
                self._in_flight.append(flight)
                exchange.account(call, {peer: message.sent() for peer, message in plan.outgoing.items()})
                error = self._verified(call, flight, deadline) if exchange.policy.verify == "wait" else None
        except BaseException as exc:
            # The device may still be busy with them: neither the pool nor the framework may give them to anybody.
            self._abandoned += [buffers, self._kept]
            if exchange.broken is None and isinstance(exc, ZipcclError):  # this rank alone has seen it
                alone = type(exc)(f"{title(call)}: on rank {exchange.rank}: {exc}")
                raise exchange.give_up(alone, exc) from exc
            raise
        finally:
            self._kept = []
        if error is not None:
            raise error

    def follow(self, call: Call, deadline: float) -> None:
        """Start a straight call behind what has been posted; when it returns, `call.finished` is what to wait for."""
        start = call.straight
        assert start is not None
        assert call.issued is not None
        with self.device.attached(), self.device.on("move"), phase_range(call, "move"):
            self._retire_finished()
            self.device.after(call.issued)
            with self.device.framework():
                posted = self.link.begin(start)
                self._arrive(call, posted, deadline)
            if call.finish is not nothing:
                self.device.run(call.finish)
            call.finished, call.on = self.device.mark(), self.device
        kept = [call.straight, call.finish]
        self._in_flight.append(_InFlight(title(call), deadline, call.finished, [], {}, [], [], kept))

    def _carry(self, call: Call, plan: Plan, deadline: float) -> _InFlight | ZipcclError:
        """Queue all of a call; or, once nothing of it is under way any more, the error that all ranks know of.

        Raises:
            Whatever else goes wrong, on this rank alone or for good.
        """
        exchange, incoming = self._exchange, plan.incoming
        headers, begun = self._encode(call, plan)
        agreeing: list[int] = []
        heard = exchange.records(call, deadline, agreeing.append)
        agreed = len(agreeing) == len(exchange.peers)
        sends = plan.outgoing if agreed else {peer: m for peer, m in plan.outgoing.items() if peer in agreeing}
        receives = incoming if agreed else {peer: m for peer, m in incoming.items() if peer in agreeing}
        count = max(plan.shape.outgoing_chunks, plan.shape.incoming_chunks, 1)
        arrivals = self._phase_one(call, sends, receives, count, begun, deadline)
        exchange.tell_ahead(call)
        verdicts: dict[int, _Verdict] = {}
        early = call.alike and heard.refused is None and call.native is None
        if early:
            finished = self._decode(call, plan, arrivals, verdicts, None, begun, deadline)
        if call.alike:
            error = self._agree_on_sizes(call, heard.refused, plan, headers, deadline)
        else:  # a rank that has nothing to do with this device tells its verdict instead, and hears ours
            error = exchange.share(call, heard.refused, deadline)
        if error is None and call.native is not None:
            error = self._native(call, deadline)
        if error is not None:
            self._drain(call, arrivals, deadline)
            return error
        if self._phase_two(call, sends, receives, arrivals, deadline):
            finished = self._decode(call, plan, arrivals, verdicts, _overflowed(incoming), begun, deadline)
        elif not early:
            finished = self._decode(call, plan, arrivals, verdicts, None, begun, deadline)
        call.finished, call.on = finished, None if call.stream == CALLERS else self.device
        control_sends, call.control_sends = call.control_sends, []
        found = list(verdicts.values())
        return _InFlight(title(call), deadline, finished, found, incoming, [], control_sends, self._kept)

    def _verified(self, call: Call, flight: _InFlight, deadline: float) -> ZipcclError | None:
        """What is wrong with a call, on any rank, once the device is done with it."""
        self._retire(flight)
        wrong, self._wrong = self._wrong, None
        return self._exchange.share(call, None if wrong is None else Refused(wrong, False), deadline)

    def settle(self) -> ZipcclError | None:
        """Wait, bounded, for everything under way; what was wrong with it as far as this rank knows, once."""
        with self.device.attached():
            while self._in_flight:
                self._retire(self._in_flight[0])
        wrong, self._wrong = self._wrong, None
        return wrong

    def sweep(self) -> None:
        """Let go of what the device is done with; never waits but for what is overdue, or needs a peer that is gone."""
        with self.device.attached():
            self._retire_finished()
            if not self._in_flight:
                return
            if time.monotonic() > self._in_flight[0].deadline or self._exchange.lost_peer() is not None:
                self._retire(self._in_flight[0])

    @property
    def busy(self) -> bool:
        """Whether the device may still be busy with a call."""
        return bool(self._in_flight)

    def close(self) -> None:
        """Finish the calls under way, bounded by their deadlines; free the link and the buffers."""
        if self._exchange.broken is None:
            try:
                wrong = self.settle()
            except ZipcclError as exc:
                wrong = exc
            if wrong is not None:  # nobody is left who could raise it
                log.error("rank %d: after the last call: %s", self._exchange.rank, wrong)
        self._leave()
        if self._in_flight or self._abandoned:
            self.link.abort()
        else:
            self.link.close()
        with self.device.attached():
            is_quiet = self._is_quiet()
        if is_quiet:
            self._in_flight.clear()
            self._abandoned.clear()
            self.device.release()
        else:  # what the device may still touch must never be anybody else's
            _untouchable.append((self._in_flight, self._abandoned, self.device))
        self.pool.close()

    def _is_quiet(self) -> bool:
        """Whether the device comes to the end of all streams; waits at most _QUIET_S."""
        ends = self._ends(MESSAGES, *([CALLERS] if self._in_flight or self._abandoned else []))
        until = time.monotonic() + _QUIET_S
        while not all(end.query() for end in ends):
            if time.monotonic() > until:
                return False
            time.sleep(_QUIET_NAP_S)
        return True

    def _ends(self, *more: str) -> list[Event]:
        """Events behind what the streams of collectives hold, and more streams."""
        ends = []
        for stream in (*STREAMS, *more):
            with self.device.on(stream):
                ends.append(self.device.mark())
        return ends

    # Its steps

    def _plan(self, call: Call) -> Plan:
        """The messages to and from each peer, with buffers; and the stream that all goes to, if it is one."""
        call.paused = not self._exchange.codes_now(call)
        with self.device.on("encode"):
            plan = self._planner.plan(call, self._exchange.thresholds.get(call.kind))
        if call.waited_for and plan.shape is not NO_MESSAGES and plan.shape.largest_bytes <= MOST_IN_ORDER_BYTES:
            # No chunk could be worked on while another moves, and the caller does nothing meanwhile: what keeps streams
            # in order, much of the host's time in a call, can be spared.
            call.stream = CALLERS if call.issued is None else STREAMS[0]
        return plan

    def _encode(self, call: Call, plan: Plan) -> tuple[list[HostBytes], list[Event]]:
        """Encode chunk after chunk, all messages at once: the headers of each chunk on their way, and an event a chunk
        after which it may go; or one if there is none."""
        device, messages = self.device, plan.messages
        headers: list[HostBytes] = []
        with device.on(_stream(call, "encode")), phase_range(call, "encode"):
            before = call.before
            if not call.stream or before is None or before.stream != call.stream:
                if call.issued is not None:
                    device.after(call.issued)
                if before is not None and before.finished is not None:
                    device.after(before.finished)
            if not messages:
                return headers, [] if call.stream else [device.mark()]
            scratch = plan.scratch
            assert scratch is not None
            self._exchange.reached("encode", call)
            codebooks = device.codebooks([m.flat for m in messages], self._exchange.policy.codebook)
            for index in range(plan.shape.outgoing_chunks):
                batch = [i for i, m in enumerate(messages) if index < len(m.chunks)]
                device.share(index > 0)  # with the chunk before, on its way
                made = device.encode(
                    [messages[i].words(messages[i].chunks[index]) for i in batch],
                    [codebooks[i] for i in batch],
                    [messages[i].frame(messages[i].chunks[index]) for i in batch],
                    scratch,
                )
                headers.append(made)
                self._kept.append(made)
            return headers, [made.event for made in headers]

    def _phase_one(
        self,
        call: Call,
        sends: dict[int, DeviceMessage],
        receives: dict[int, DeviceMessage],
        count: int,
        begun: list[Event],
        deadline: float,
    ) -> list[Posted]:
        """Post what has a size that both ends know; an arrival a chunk. Uncoded messages go with the first.

        Args:
            count: posts to make, at least the chunks of any message.
        """
        arrivals: list[Posted] = []
        with self.device.on(_stream(call, "move")), phase_range(call, "move"):
            for index in range(count):
                if not call.stream:
                    self.device.after(begun[min(index, len(begun) - 1)])
                out = [piece for peer, m in sends.items() for piece in _pieces(peer, m, index)]
                into = [piece for peer, m in receives.items() for piece in _pieces(peer, m, index)]
                self._exchange.reached("send", call)
                arrivals.append(self._post(call, out, into, deadline))
        return arrivals

    def _agree_on_sizes(
        self,
        call: Call,
        refused: Refused | None,
        plan: Plan,
        headers: list[HostBytes],
        deadline: float,
    ) -> ZipcclError | None:
        """Tell every peer the sizes of its frames, hear the same; what all ranks then know to be wrong."""
        exchange, outgoing = self._exchange, plan.outgoing
        if headers:
            if not headers[-1].query():
                self._poll(headers[-1].query, call, deadline)
            found = [_SIZE_DIGEST_ESCAPES.iter_unpack(made.read()) for made in headers]
            for m in plan.messages:
                mine = [next(headers_of_chunk) for headers_of_chunk in found[: len(m.chunks)]]
                m.told(tuple([(size, digest) for size, digest, _ in mine]), sum([escapes for _, _, escapes in mine]))
        error, self._wrong = self._wrong, None
        fatal = False
        if error is None and refused is not None:
            error, fatal = refused.error, refused.fatal
        coded = [m.sent() for m in outgoing.values() if m.coded]
        raw, sent = sum([s.raw_bytes for s in coded]), sum([s.sent_bytes for s in coded])

        def to(peer: int) -> Sizes:
            frames = outgoing[peer].frames if peer in outgoing else ()
            return Sizes(call.sequence, exchange.rank, error, fatal, raw, sent, frames)

        known = exchange.share_sizes(call, to, deadline)
        errors = [s.error for s in known if s.error is not None]
        if errors:
            return exchange.give_up(errors[0], errors[0]) if any(s.fatal for s in known) else errors[0]
        exchange.learn(call, sum([s.raw_bytes for s in known]), sum([s.sent_bytes for s in known]))
        for peer, message in plan.incoming.items():
            self._check_sizes(call, peer, message, known[peer].frames)
            message.told(known[peer].frames)
        return None

    def _check_sizes(self, call: Call, src: int, message: DeviceMessage, frames: tuple[tuple[int, int], ...]) -> None:
        """What a peer says of its frames must be possible, or nothing more can be agreed on with it."""
        possible = len(frames) == len(message.chunks)
        for (size, _), chunk in zip(frames, message.chunks, strict=False):
            possible = possible and HEADER_BYTES <= size <= chunk.capacity_bytes
        if not possible:
            text = (
                f"{title(call)}: rank {src} tells of frames of {[size for size, _ in frames]} bytes where rank "
                f"{self._exchange.rank} expects {len(message.chunks)} of at most "
                f"{[chunk.capacity_bytes for chunk in message.chunks]}; run the same version on all ranks"
            )
            raise self._exchange.give_up(PeerError(text), ValueError(text))

    def _phase_two(
        self,
        call: Call,
        sends: dict[int, DeviceMessage],
        receives: dict[int, DeviceMessage],
        arrivals: list[Posted],
        deadline: float,
    ) -> bool:
        """Post what the prefixes had no room for; whether there is any. It arrives behind all of phase one."""
        out = [Piece(peer, rest) for peer, m in sends.items() if m.late for rest in m.rests()]
        into = [Piece(peer, rest) for peer, m in receives.items() if m.late for rest in m.rests()]
        if out or into:
            with self.device.on(_stream(call, "move")), phase_range(call, "move"):
                self._exchange.reached("send_phase_two", call)
                arrivals.append(self._post(call, out, into, deadline))
        return bool(out or into)

    def _decode(
        self,
        call: Call,
        plan: Plan,
        arrivals: list[Posted],
        verdicts: dict[int, _Verdict],
        late: set[int] | None,
        begun: list[Event],
        deadline: float,
    ) -> Event:
        """Decode, or sum, chunk after chunk as they arrive; the event after which all is done.

        Args:
            begun: see _encode.
            verdicts: of each chunk, to be filled.
            late: the chunks that were too long, once all has been posted; None at first: then all chunks.
        """
        device, rank, incoming = self.device, self._exchange.rank, plan.incoming
        arrived = 0

        def arrive(until: int) -> None:
            nonlocal arrived
            while arrived < until:
                self._arrive(call, arrivals[arrived], deadline)
                arrived += 1

        def copy_own() -> None:
            mine, own = call.sends[rank], call.receives[rank]
            if own.numel() and own.data_ptr() != mine.data_ptr():
                if not call.stream:
                    device.after(begun[-1])  # it fills the device, and is in no hurry
                device.copy(own, mine)

        with device.on(_stream(call, "decode")), phase_range(call, "decode"):
            if call.issued is not None and not call.stream:
                device.after(call.issued)  # the outputs may still be read there
            self._exchange.reached("decode", call)
            if late is not None:
                arrive(len(arrivals))
            make = self._decode_chunk if call.target is None else self._reduce_chunk
            count = plan.shape.incoming_chunks
            copies = late is None and call.target is None and call.native is None and bool(call.sends)
            if copies and count == 0:
                copy_own()
            for index in range(max(count, call.target is not None)):
                if copies and index + 1 == count:  # while the last chunk moves, and all others are decoded
                    copy_own()
                if late is None or index in late:
                    if incoming:
                        arrive(max(index + 1, arrived))
                    device.share(index + 1 < count)  # with the next chunk, on its way
                    verdicts[index] = make(call, incoming, index)
                    self._kept.append(verdicts[index])
            if arrived < len(arrivals):
                arrive(len(arrivals))
            if call.finish is not nothing:
                device.run(call.finish)
            return device.mark()

    def _decode_chunk(self, call: Call, incoming: dict[int, DeviceMessage], index: int) -> _Verdict:
        """Decode a chunk of every message, one launch."""
        batch = [(src, m) for src, m in incoming.items() if index < len(m.chunks)]
        found = self.device.decode([m.came(index) for _, m in batch], [m.words(m.chunks[index]) for _, m in batch])
        return _Verdict(found, [(src, index) for src, _ in batch])

    def _reduce_chunk(self, call: Call, incoming: dict[int, DeviceMessage], index: int) -> _Verdict:
        """Sum a chunk, in rank order; every rank cuts its shard alike, coded or not."""
        out = call.target
        assert out is not None
        assert call.spec is not None
        factor = None if call.spec.factor is None else float(call.spec.factor)
        chunks = next((m.chunks for m in incoming.values() if m.coded), ())
        begin, end = (chunks[index].first, chunks[index].first + chunks[index].words) if chunks else (0, out.numel())
        self._exchange.reached("reduce", call)
        terms, about = [], []
        for src in range(self._exchange.size):
            message = incoming.get(src)
            if message is None:  # this rank's own
                terms.append(call.sends[src][begin:end])
            elif message.coded:
                terms.append(message.came(index))
                about.append((src, index))
            else:
                terms.append(message.flat[begin:end])
        return _Verdict(self.device.decode_reduce(terms, out[begin:end], call.spec.name, factor), about)

    def _native(self, call: Call, deadline: float) -> ZipcclError | None:
        """The backend's own collective, once the device has come to it; what all ranks then know to be wrong."""
        exchange, refused = self._exchange, None
        with self.device.on("decode"):
            if call.issued is not None:
                self.device.after(call.issued)
            self._poll(self.device.mark().query, call, deadline)
            exchange.watch.enter(call, deadline)
            try:
                with self.device.framework():
                    exchange.run_native(call, self.link.group, deadline)
            except Refused as exc:
                refused = exc
            finally:
                exchange.watch.leave()
        return exchange.share(call, refused, deadline)

    # Endings

    def _poll(self, query: Callable[[], bool], call: Call, deadline: float) -> None:
        """Wait, bounded, for what this rank's device does in a call; that may be behind words of an earlier one, which
        are peers' to send."""
        poll, rank = self._exchange.poll, self._exchange.rank
        for flight in list(self._in_flight):
            over = flight.finished.query
            poll(lambda: query() or over(), flight.deadline, flight.title, self._exchange.peers)  # noqa: B023
        poll(query, deadline, title(call), [rank])

    def _retire_finished(self) -> None:
        """Let go of the calls that the device is done with; never waits for it."""
        while self._in_flight and self._in_flight[0].finished.query():
            self._take_back(self._in_flight[0])

    def _retire(self, flight: _InFlight) -> None:
        """Wait, bounded, until the device is done with a call; then as _take_back."""
        exchange = self._exchange
        exchange.poll(flight.finished.query, flight.deadline, flight.title, exchange.peers)
        self._take_back(flight)

    def _take_back(self, flight: _InFlight) -> None:
        """Of a call that the device is done with: note what was wrong, and take the buffers back."""
        exchange = self._exchange
        for verdict in flight.verdicts:
            self._wrong = self._wrong or self._judge(flight, verdict)
        for peer, work in flight.control_sends:
            exchange.wait_until(flight.deadline, work, flight.title, [peer])
        self._in_flight.remove(flight)
        self.pool.give_back(flight.buffers)

    def _judge(self, flight: _InFlight, verdict: _Verdict) -> ZipcclError | None:
        """What is wrong with the frames of one launch, if anything."""
        told = [flight.incoming[src].frames[index] for src, index in verdict.about]
        if self.device.as_told(verdict.verdicts, told):
            return None
        where = f"{flight.title}: message from rank {{}} to rank {self._exchange.rank}"
        headers = [h for h in self.device.headers(verdict.verdicts) if h is not None]
        for header, (src, index), (size, digest) in zip(headers, verdict.about, told, strict=True):
            if isinstance(header, ZipcclError):
                return CorruptFrame(f"{where.format(src)}: chunk {index}: {header}")
            if (header.frame_bytes, header.digest) != (size, digest):
                return CorruptFrame(
                    f"{where.format(src)}: chunk {index}: frame of {header.frame_bytes} bytes with digest "
                    f"{header.digest:#018x} does not match the {size} bytes and {digest:#018x} that were told: "
                    "stale or swapped"
                )
        return None

    def _drain(self, call: Call, arrivals: list[Posted], deadline: float) -> None:
        """Wait, bounded, for what was queued and the records of a call that failed: all posts have a counterpart."""
        with self.device.on(_stream(call, "move")):
            for posted in arrivals:
                self._arrive(call, posted, deadline)
        for end in self._ends(*([CALLERS] if call.stream == CALLERS else [])):
            self._exchange.poll(end.query, deadline, title(call), self._exchange.peers)
        self._exchange.end_transfers(call, [], deadline)

    def _post(self, call: Call, out: list[Piece], into: list[Piece], deadline: float) -> Posted:
        self._exchange.watch.enter(call, deadline)
        try:
            return self.link.post(out, into, data_tag(call), deadline, bool(call.stream))
        except RuntimeError as exc:
            if not is_of_the_connection(exc):  # this rank's own trouble: no memory, a device that fails
                raise
            raise self._exchange.transport_failed(title(call), exc, _peers(out, into)) from exc
        finally:
            self._exchange.watch.leave()

    def _arrive(self, call: Call, posted: Posted, deadline: float) -> None:
        try:
            posted.arrive(deadline)
        except RuntimeError as exc:
            if not is_of_the_connection(exc):
                raise
            raise self._exchange.transport_failed(title(call), exc, self._exchange.peers) from exc


def _stream(call: Call, name: str) -> str:
    """The stream of STREAMS for a step of a call."""
    return call.stream or name


def _overflowed(incoming: dict[int, DeviceMessage]) -> set[int]:
    """The chunks of which some peer's frame was too long for phase one."""
    return {i for m in incoming.values() for i in m.late}


def _pieces(peer: int, message: DeviceMessage, index: int) -> list[Piece]:
    """What goes with chunk `index` of phase one: the chunk's, or with the first the whole of an uncoded message."""
    if message.coded:
        return [Piece(peer, message.phase_one(message.chunks[index]))] if index < len(message.chunks) else []
    return [Piece(peer, raw_view(message.flat))] if index == 0 else []


def _peers(out: list[Piece], into: list[Piece]) -> list[int]:
    return sorted({piece.peer for piece in (*out, *into)})
