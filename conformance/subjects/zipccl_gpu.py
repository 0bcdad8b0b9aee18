"""Our implementation on GPUs as the judge sees it, whose tensors stay on the CPU: each call runs on mirrors of them.

pytest conformance --subject zipccl_gpu --world-size 2 -m gpu

For a call every tensor's whole storage is copied to the device, so that offsets, strides, alignment and what arguments
share are the same there; the real Communicator is called with those; and when the call is over, every byte that it has
changed in a storage comes back, wherever it lies: a write beside an output is seen. Tensors that are on the device
already (--device cuda) are passed as they are.

`on_cpu` and `on_threads` are the same mirror with the CPU as its device, over the plain Communicator and over the
pipeline on a device made of threads: they judge the mirror, on any machine.
"""

from __future__ import annotations

import atexit
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from conformance.oracle import on_host
from conformance.subject import Codec, Subject
from conformance.subjects.zipccl import ZipcclCommunicator, ZipcclSubject, policy_of
from conformance.subjects.zipccl_cuda import DeviceCodec
from zipccl_core import Communicator
from zipccl_core.collectives import communicator, cuda_device, link
from zipccl_core.collectives.board import Board
from zipccl_core.collectives.exchange import Exchange
from zipccl_core.collectives.link import NcclLink
from zipccl_core.collectives.probe import KINDS

ALIGN_BYTES = 16
HALVED_BYTES = 1 << 14
"""So that messages of the judge's sizes go in halves, and others whole."""


class Mirrored:
    """One storage of the CPU and its copy on the device.

    Args:
        storage: of a tensor that the judge passed.
        device: where the copy goes; the current stream orders it.
    """

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        self.host = _bytes_of(storage)
        self.pad_bytes = storage.data_ptr() % ALIGN_BYTES
        self._buffer = torch.empty(self.pad_bytes + storage.nbytes() + ALIGN_BYTES, dtype=torch.uint8, device=device)
        assert self._buffer.data_ptr() % ALIGN_BYTES == 0, f"the allocator of {device} aligns to 16 bytes"
        self.there = self._buffer[self.pad_bytes : self.pad_bytes + storage.nbytes()]
        self._before = self.host.clone()
        self.there.copy_(self._before)

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """The mirror of a tensor in this storage."""
        width = like.element_size()
        assert self.pad_bytes % width == 0, f"a storage of {like.dtype} that begins within an element"
        made = torch.empty(0, dtype=like.dtype, device=self._buffer.device)
        offset = self.pad_bytes // width + like.storage_offset()
        return made.set_(self._buffer.untyped_storage(), offset, like.shape, like.stride())

    def bring_back(self) -> None:
        """Write to the host what has changed on the device, and nothing else: calls may share a storage."""
        after = on_host(self.there)
        changed = torch.nonzero(after != self._before).flatten()
        self.host[changed] = after[changed]


class Mirror:
    """The mirrors of one call: one for each storage, however many tensors lie in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_place: dict[tuple[int, int], Mirrored] = {}

    def of(self, argument: Any) -> Any:
        """An argument with every CPU tensor in it replaced by its mirror; anything else as it is."""
        if isinstance(argument, (list, tuple)) and any(isinstance(x, (torch.Tensor, dist.P2POp)) for x in argument):
            return [self.of(x) for x in argument]
        if isinstance(argument, dist.P2POp):
            return dist.P2POp(argument.op, self.of(argument.tensor), argument.peer, argument.group, argument.tag)
        if not self._mirrors(argument):
            return argument
        return self._mirrored(argument).tensor(argument.detach())

    def behind(self, argument: Any) -> list[Mirrored]:
        """The mirrors of the storages that an argument lies in, each once."""
        tensors = argument if isinstance(argument, (list, tuple)) else [argument]
        found = [self._mirrored(x) for x in tensors if self._mirrors(x)]
        return list({id(m): m for m in found}.values())

    @property
    def all(self) -> list[Mirrored]:
        return list(self._by_place.values())

    def _mirrors(self, argument: Any) -> bool:
        strided = isinstance(argument, torch.Tensor) and argument.layout == torch.strided
        return strided and argument.device.type == "cpu"

    def _mirrored(self, tensor: torch.Tensor) -> Mirrored:
        storage = tensor.untyped_storage()
        place = (storage.data_ptr(), storage.nbytes())
        if place not in self._by_place:
            self._by_place[place] = Mirrored(storage, self._device)
        return self._by_place[place]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """[n] uint8: the storage itself, kept alive."""
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


class MirrorWork:
    """A Work that brings outputs back in `wait`; everything else is the Work's own.

    It holds the mirrors of outputs only. Those of inputs belong to whoever needs them: were they let go of too early,
    the allocator would give their memory away, and the words would be wrong.

    Args:
        inner: the Work on the device.
        outputs: what it writes to.
        in_order: it is over on the host when a later one in order is; its device may still be at work then.
        over: called when a wait has returned.
    """

    def __init__(
        self, inner: Any, outputs: list[Mirrored], in_order: bool, over: Callable[[MirrorWork | None, bool], None]
    ) -> None:
        self._inner, self._outputs, self.in_order, self._over = inner, outputs, in_order, over
        self._lock = threading.Lock()

    def wait(self, *timeout: Any) -> Any:
        """The Work's wait; then the outputs are on the host."""
        returned = self._inner.wait(*timeout)
        self._over(self, self.in_order)
        self.bring_back()
        return returned

    def bring_back(self) -> None:
        """Copy the outputs to the host, once; behind a wait in the same stream."""
        with self._lock:
            outputs, self._outputs = self._outputs, []
            for mirrored in outputs:
                mirrored.bring_back()

    def bring_back_unasked(self) -> None:
        """The same for a Work that is over on the host and that nobody has waited for; nothing if it failed."""
        if self._inner.exception() is None:
            self._inner.wait()
            self.bring_back()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


WRITES_TO: dict[str, tuple[int, str]] = {
    "all_gather_into_tensor": (0, "output_tensor"),
    "reduce_scatter_tensor": (0, "output"),
    "all_to_all_single": (0, "output"),
    "all_gather": (0, "tensor_list"),
    "all_reduce": (0, "tensor"),
    "broadcast": (0, "tensor"),
    "scatter": (0, "tensor"),
    "gather": (1, "gather_list"),
    "send": (0, ""),
    "isend": (0, ""),
    "recv": (0, "tensor"),
    "irecv": (0, "tensor"),
}
"""Operation → position and name of the argument that it writes to; no name if it writes to none."""
MESSAGES = {"send", "isend", "recv", "irecv"}
"""They stand in no order with collectives."""


class MirrorCommunicator:
    """A Communicator for CPU tensors over one for tensors on a device.

    Works that nobody waits for are brought back once a later call of the Communicator is over: its calls end in order,
    and a barrier behind a dropped Work is how the judge knows that it has ended.

    Args:
        inner: takes tensors on the device.
        device: with its index.
    """

    def __init__(self, inner: Any, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self._lock = threading.Lock()
        self._open: list[MirrorWork] = []

    def __getattr__(self, name: str) -> Any:
        if name in WRITES_TO:
            return lambda *args, **named: self._call(name, args, named)
        return getattr(self._inner, name)

    def barrier(self, async_op: bool = False) -> Any:
        return self._called(self._inner.barrier(async_op=async_op), [], in_order=True)

    def batch_isend_irecv(self, p2p_op_list: Sequence[dist.P2POp]) -> list[Any]:
        mirror = Mirror(self._device)
        works = self._inner.batch_isend_irecv(mirror.of(p2p_op_list))
        outputs = [mirror.behind(op.tensor) if op.op is dist.irecv else [] for op in p2p_op_list]
        return [self._called(work, mine, in_order=False) for work, mine in zip(works, outputs, strict=True)]

    def close(self) -> None:
        """The inner close, which ends every call."""
        self._inner.close()
        with self._lock:
            self._open.clear()

    def _call(self, operation: str, args: Sequence[Any], named: dict[str, Any]) -> Any:
        mirror = Mirror(self._device)
        there, named_there = [mirror.of(x) for x in args], {name: mirror.of(x) for name, x in named.items()}
        returned = getattr(self._inner, operation)(*there, **named_there)
        position, name = WRITES_TO[operation]
        given = args[position] if position < len(args) else named.get(name)
        outputs = mirror.behind(given) if name else []
        if not hasattr(returned, "wait"):
            for mirrored in mirror.all:  # inputs too: a write to one is seen
                mirrored.bring_back()
        return self._called(returned, outputs, operation not in MESSAGES)

    def _called(self, returned: Any, outputs: list[Mirrored], in_order: bool) -> Any:
        """What a call gives back to the judge: its Work, or what it returned when it was over."""
        if not hasattr(returned, "wait"):
            self._settle(None, in_order)
            return returned
        work = MirrorWork(returned, outputs, in_order, self._settle)
        with self._lock:
            self._open.append(work)
        return work

    def _settle(self, last: MirrorWork | None, in_order: bool) -> None:
        """`last` is over (None: a call after all of them): so is what was issued before it in order, and may be others.

        They are brought back; those in order are waited for, since the device may still be at work for them.
        """
        with self._lock:
            end = len(self._open) if last is None else self._open.index(last) + 1 if last in self._open else 0
            before = self._open[:end]
            over = [w for w in before if w is last or (in_order and w.in_order) or w.is_completed()]
            self._open = [work for work in self._open if work not in over]
        for work in over:
            if work is not last:
                work.bring_back_unasked()


class MirrorSubject:
    """A subject whose Communicators work on a device, under a judge whose tensors are on the CPU.

    Args:
        inner: makes the Communicators that take tensors on the device.
        device: "cuda" is the process's current GPU.
    """

    def __init__(self, inner: Subject, device: str, name: str) -> None:
        self.name, self._inner, self._device = name, inner, device
        self.capabilities = dataclasses.replace(inner.capabilities, codec=True, gpu=device == "cuda")

    def communicator(self, group: dist.ProcessGroup, *, mode: str = "", timeout_s: float = 20.0) -> Any:
        device = torch.device(self._device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        return MirrorCommunicator(self._inner.communicator(group, mode=mode, timeout_s=timeout_s), device)

    def codec(self) -> Codec:
        return DeviceCodec(self._device, self._device)


class _LentLink(NcclLink):
    """A connection that goes from a Communicator that was closed in peace to the next one of the same ranks.

    NCCL takes from a third of a second to a whole one to connect and to part, and the judge makes hundreds of
    Communicators. Each that was lent TIMES times is parted from in earnest, and so is one that was aborted.
    """

    TIMES = 16
    idle: ClassVar[list[_LentLink]] = []
    made: ClassVar[int] = 0
    members: tuple[int, ...] = ()  # on the class: of the Communicator that is being made
    is_connected = False

    @classmethod
    def lend(cls, board: Board, rank: int, size: int, device: Any, index: torch.device, *how: Any) -> _LentLink:
        """What NcclLink(...) is; collective."""
        timeout_s, stream = how
        found = next((idle for idle in cls.idle if idle.members == cls.members), None)
        numbers = board.share("idle link", -1 if found is None else found.number, timeout_s)
        if found is not None:
            cls.idle.remove(found)
            if numbers == [found.number] * size:
                found._device, found._stream = device, stream
                return found
            found.abort()
        made = cls(board, rank, size, device, index, timeout_s, stream)
        cls.made += 1
        made.number, made.members, made.left = cls.made, cls.members, cls.TIMES
        return made

    def connect(self) -> None:
        if not self.is_connected:  # torch would make new communicators of NCCL's in the place of those it has
            super().connect()
            self.is_connected = True

    def close(self) -> None:
        self.left -= 1
        if self._aborted or self.left <= 0:
            super().close()
        else:
            self.idle.append(self)


@atexit.register
def _part() -> None:
    for idle in _LentLink.idle:
        idle.abort()


class _OnGpu(ZipcclSubject):
    """zipccl_core with verdicts that are waited for, so that each call has its own, but in the variant "late"."""

    def communicator(self, group: dist.ProcessGroup, *, mode: str = "", timeout_s: float = 20.0) -> ZipcclCommunicator:
        _LentLink.members = tuple(dist.get_process_group_ranks(group))
        return ZipcclCommunicator(Communicator(group, policy_of(mode, timeout_s, verify="wait")))


def _not_measured(exchange: Exchange, *args: Any) -> None:
    """In the place of the probe: "auto" codes from min_bytes on, or what the judge sends might never be coded."""
    exchange.thresholds.update(dict.fromkeys(KINDS, exchange.policy.min_bytes))


def subject() -> MirrorSubject:
    """Named by --subject zipccl_gpu."""
    communicator.probe = _not_measured  # type: ignore[attr-defined]
    cuda_device.NcclLink = _LentLink.lend  # type: ignore[assignment,misc]
    link.HALVED_BYTES = HALVED_BYTES
    return MirrorSubject(_OnGpu(), "cuda", "zipccl_gpu")


def on_cpu() -> MirrorSubject:
    """The mirror of CPU tensors on the CPU, over the plain Communicator."""
    return MirrorSubject(ZipcclSubject(), "cpu", "zipccl_mirror_on_cpu")


def on_threads() -> MirrorSubject:
    """The mirror of CPU tensors on the CPU, over the pipeline on a device made of threads."""
    from conformance.subjects.zipccl_pipeline import PipelineSubject

    return MirrorSubject(PipelineSubject(), "cpu", "zipccl_mirror_on_threads")
