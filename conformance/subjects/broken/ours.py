"""Our own implementation with one defect planted in each. Nothing here is ever right."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from conformance.oracle import patterns_of, tensor_of
from conformance.subjects.zipccl import ZipcclCodec, ZipcclCommunicator, ZipcclSubject
from zipccl_core import Codebook, Communicator, frame
from zipccl_core.codec import cpu
from zipccl_core.errors import CorruptFrame, RankTimeout, ZipcclError
from zipccl_core.policy import Decision


class BrokenSubject(ZipcclSubject):
    """zipccl with another Communicator or codec."""

    def __init__(self, name: str, communicator: type[ZipcclCommunicator], codec: type[ZipcclCodec]) -> None:
        self.name = f"broken.{name}"
        self._communicator, self._codec = communicator, codec

    def communicator(self, group: dist.ProcessGroup, *, mode: str = "", timeout_s: float = 20.0) -> ZipcclCommunicator:
        sound = super().communicator(group, mode=mode, timeout_s=timeout_s)
        return self._communicator(sound.inner)

    def codec(self) -> ZipcclCodec:
        return self._codec()


# ------------------------------------------------------------------------------------------------------- defects


class CanonicalNan(ZipcclCommunicator):
    """Computes with words: NaN payloads are lost, as in any trip over float32."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.all_gather_into_tensor = lambda output, input, async_op=False: inner.all_gather_into_tensor(
            output, (input.double() * 1.0).to(input.dtype), async_op
        )


class SumFromZero(ZipcclCommunicator):
    """Starts the sum at +0, so that −0 becomes +0."""

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False
    ) -> Any:
        work = super().reduce_scatter_tensor(output, input, op, async_op)
        if work is not None:
            work.wait()
        output += 0.0
        return work


class RoundsEachAddition(ZipcclCommunicator):
    """Sums in bfloat16: rounds after every addition and not once at the end."""

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False
    ) -> Any:
        if input.dtype != torch.bfloat16 or op is not dist.ReduceOp.SUM:
            return super().reduce_scatter_tensor(output, input, op, async_op)
        size, n = input.numel() // output.numel(), output.numel()
        parts = torch.empty_like(input)
        self.inner.all_to_all_single(parts, input)
        acc = parts[:n].clone()
        for rank in range(1, size):
            acc = acc + parts[rank * n : (rank + 1) * n]
        output.copy_(acc)
        return _Done() if async_op else None


class _Done:
    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Lazy:
    """A Work that does its work only when it is waited for."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def wait(self) -> Any:
        call, self._call = self._call, None
        return call() if call else True

    def is_completed(self) -> bool:
        return self._call is None


class LazyWork(ZipcclCommunicator):
    """Moves data only inside wait(): waits in another order on another rank pair up wrongly."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)

        def lazy(call: Any) -> Any:
            def issue(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
                return _Lazy(lambda: call(*args, **kwargs)) if async_op else call(*args, **kwargs)

            return issue

        self.all_gather_into_tensor = lazy(inner.all_gather_into_tensor)
        self.all_to_all_single = lazy(inner.all_to_all_single)


class _Deaf:
    """A Work whose wait() forgets errors."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> bool:
        try:
            self._work.wait()
        except ZipcclError:
            return True
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class SwallowsErrors(ZipcclCommunicator):
    """Returns as if all were well, whatever the verdict was."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)

        def deaf(call: Any) -> Any:
            def issue(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
                try:
                    work = call(*args, async_op=async_op, **kwargs)
                except ZipcclError:
                    return None
                return _Deaf(work) if async_op else None

            return issue

        self.all_gather_into_tensor = deaf(inner.all_gather_into_tensor)
        self.all_to_all_single = deaf(inner.all_to_all_single)


class EveryPieceFromOffsetZero(ZipcclCommunicator):
    """Uneven all-to-all reads every piece at the start of the input."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)

        def from_zero(
            output: torch.Tensor, input: torch.Tensor, receives: Any = None, sends: Any = None, async_op: bool = False
        ) -> Any:
            if sends and max(sends) <= input.shape[0]:
                input = torch.cat([input[:rows] for rows in sends])
            return inner.all_to_all_single(output, input, receives, sends, async_op)

        self.all_to_all_single = from_zero


class IgnoresStrides(ZipcclCommunicator):
    """Takes the elements of an input as they lie in memory, and not in their logical order."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)

        def by_memory(output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Any:
            flat = torch.as_strided(input, (input.numel(),), (1,)) if not input.is_contiguous() else input
            return inner.all_gather_into_tensor(output, flat, async_op)

        self.all_gather_into_tensor = by_memory


class NativeSumWhenRaw(ZipcclCommunicator):
    """Uses the backend's own order of summation when it does not compress."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        if inner._policy.compress == "never":
            object.__setattr__(inner._policy, "reduction", "native")


class GatherSwapsTwoRanks(ZipcclCommunicator):
    """gather leaves the last two ranks' pieces in each other's place."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)

        def swapped(tensor: torch.Tensor, gather_list: Any = None, dst: int = 0, async_op: bool = False) -> Any:
            if gather_list:
                gather_list = [*gather_list[:-2], gather_list[-1], gather_list[-2]]
            return inner.gather(tensor, gather_list, dst, async_op)

        self.gather = swapped  # type: ignore[assignment]


class BroadcastFromRankZero(ZipcclCommunicator):
    """broadcast takes the tensor of the first rank, whoever src is."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        first = dist.get_process_group_ranks(inner._group)[0]
        self.broadcast = (  # type: ignore[assignment]
            lambda tensor, src=None, async_op=False, group_src=None: inner.broadcast(tensor, first, async_op)
        )


class ScatterShifted(ZipcclCommunicator):
    """scatter gives every rank the piece of the next."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)

        def shifted(tensor: torch.Tensor, scatter_list: Any = None, src: int = 0, async_op: bool = False) -> Any:
            if scatter_list:
                scatter_list = [*scatter_list[1:], scatter_list[0]]
            return inner.scatter(tensor, scatter_list, src, async_op)

        self.scatter = shifted  # type: ignore[assignment]


class AllReduceDiffersInOneBit(ZipcclCommunicator):
    """The last rank's all_reduce is one bit off in one word: no rank alone can see it, all together can."""

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False) -> Any:
        work = super().all_reduce(tensor, op, async_op)
        if work is not None:
            work.wait()
        if self.inner._rank == self.inner._size - 1 and tensor.numel():
            tensor.view(-1)[-1:].view(torch.uint8)[0] ^= 1
        return work


class AllReduceForgetsTheRest(ZipcclCommunicator):
    """Sums equal shards, and leaves what does not divide by the world size as it was."""

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False) -> Any:
        flat = tensor.view(-1)
        whole = flat.numel() // self.inner._size * self.inner._size
        return super().all_reduce(flat[:whole], op, async_op)


class IgnoresTags(ZipcclCommunicator):
    """Takes the next message, whatever its tag."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.isend = lambda tensor, dst=None, tag=0: inner.isend(tensor, dst)  # type: ignore[assignment]
        self.irecv = lambda tensor, src=None, tag=0: inner.irecv(tensor, src)  # type: ignore[assignment]


class LastInFirstOut(ZipcclCommunicator):
    """Of two receives that wait for one sender's messages, the later gets the first."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        waiting: dict[Any, torch.Tensor] = {}

        def irecv(tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> Any:
            before = waiting.pop((src, tag), None)
            if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
                waiting[src, tag] = tensor
                return inner.irecv(tensor, src, tag)
            work = inner.irecv(tensor, src, tag)
            return _Then(work, lambda: _swap(before, tensor))

        self.irecv = irecv  # type: ignore[assignment]


def _swap(a: torch.Tensor, b: torch.Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


class _Then:
    """A Work with something done to the data once it is here."""

    def __init__(self, work: Any, then: Any) -> None:
        self._work, self._then = work, then

    def wait(self) -> bool:
        self._work.wait()
        then, self._then = self._then, None
        if then:
            then()
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class NamesNobody(ZipcclCommunicator):
    """A timeout that says that something took too long, and not who."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)

        def nameless(call: Any) -> Any:
            def issue(*args: Any, **kwargs: Any) -> Any:
                try:
                    return call(*args, **kwargs)
                except RankTimeout:
                    raise RankTimeout("a collective timed out") from None

            return issue

        for name in ("all_gather_into_tensor", "all_to_all_single", "all_gather", "broadcast", "barrier"):
            setattr(self, name, nameless(getattr(inner, name)))


class BlamesTheFirst(ZipcclCommunicator):
    """Takes the rank that came first for the straggler."""

    @property
    def last_arrivals(self) -> list[tuple[int, float]]:
        ranks = [rank for rank, _ in super().last_arrivals]
        return list(zip(reversed(ranks), (late for _, late in super().last_arrivals), strict=True))


class BarrierDoesNotWait(ZipcclCommunicator):
    """barrier returns at once."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.barrier = lambda async_op=False: _Done() if async_op else None  # type: ignore[assignment,return-value]


class DoneTooEarly(ZipcclCommunicator):
    """A Work says that it is completed while a peer has not even come."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)

        def early(output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Any:
            work = inner.all_gather_into_tensor(output, input, async_op)
            return _Early(work) if work is not None else None

        self.all_gather_into_tensor = early


class _Early:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> Any:
        return self._work.wait()

    def is_completed(self) -> bool:
        return True


class WritesAfterWait(ZipcclCommunicator):
    """Keeps the output of the call before, and writes it once more after wait() has returned."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

        def again(output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Any:
            work = inner.all_gather_into_tensor(output, input, async_op)

            def keep() -> None:
                self._kept = (output, output.clone())

            return _Then(work, keep) if work is not None else keep()

        def barrier(async_op: bool = False) -> Any:
            if self._kept is not None:
                self._kept[0].copy_(self._kept[1])
            return inner.barrier(async_op)

        self.all_gather_into_tensor = again
        self.barrier = barrier  # type: ignore[assignment]


class ReadsBeyondOddSizes(ZipcclCommunicator):
    """Reads two words at a time: of an odd number of words the last comes from behind the input."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)

        def beyond(output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Any:
            n, end = input.numel(), input.storage_offset() + input.numel()
            room = input.untyped_storage().nbytes() // input.element_size()
            if n % 2 and input.is_contiguous() and end < room:
                flat = torch.as_strided(input, (n + 1,), (1,))
                input = torch.cat([flat[: n - 1], flat[n:]])
            return inner.all_gather_into_tensor(output, input, async_op)

        self.all_gather_into_tensor = beyond


class DecidesAlone(ZipcclCommunicator):
    """Falls back by what this rank alone has seen: the ranks differ in what they decide."""

    @property
    def last_decision(self) -> Any:
        decision = super().last_decision
        if decision is not None and self.inner._rank % 2:
            return Decision("native", "did not pay on this rank", decision.operation, decision.sequence)
        return decision


class FixedSigma(ZipcclCommunicator):
    """Clips exponents to the largest of the first call: what was learned once is taken to hold for ever."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self._top: int | None = None

        def clipped(output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Any:
            if input.dtype == torch.bfloat16 and input.numel():
                words = patterns_of(input.reshape(-1)).copy()
                exponents = (words >> 7) & 0xFF
                self._top = int(exponents.max()) if self._top is None else self._top
                over = exponents > self._top
                words[over] = (words[over] & 0x807F) | np.uint16(self._top << 7)
                input = tensor_of(words, torch.bfloat16)
            return inner.all_gather_into_tensor(output, input, async_op)

        self.all_gather_into_tensor = clipped


class StoredOneTooEarly(ZipcclCodec):
    """Stores a block that has just as many escapes as the rule still lets be coded."""

    def encode(self, words: torch.Tensor, codebook_exponents: tuple[int, ...]) -> torch.Tensor:
        sound = cpu.spill_bytes
        cpu.spill_bytes = lambda m: sound(m) - 1  # type: ignore[assignment]
        try:
            buffer = np.zeros(frame.max_frame_bytes(words.numel(), str(words.dtype).removeprefix("torch.")), np.uint8)
            header = cpu.encode_into(patterns_of(words), Codebook.given(codebook_exponents), buffer)
        finally:
            cpu.spill_bytes = sound
        return torch.from_numpy(buffer[: header.frame_bytes])


class LosesTheSignOfZero(ZipcclCodec):
    """Writes −0 as +0."""

    def encode(self, words: torch.Tensor, codebook_exponents: tuple[int, ...]) -> torch.Tensor:
        if words.dtype == torch.bfloat16:
            array = patterns_of(words).copy()
            array[array == 0x8000] = 0
            words = tensor_of(array, torch.bfloat16)
        return super().encode(words, codebook_exponents)


class FrameRemembersTheLast(ZipcclCodec):
    """Leaves in the frame something of the process that wrote it: here its number, in bytes nobody decodes."""

    def encode(self, words: torch.Tensor, codebook_exponents: tuple[int, ...]) -> torch.Tensor:
        made = super().encode(words, codebook_exponents).clone()
        if made.numel() > 128:
            made[128 + 127] = os.getpid() % 251
        return made


class NoDigestCheck(ZipcclCodec):
    """Decodes whatever the frame says, without looking at the digest."""

    def decode(self, frame: torch.Tensor) -> torch.Tensor:
        try:
            return super().decode(frame)
        except CorruptFrame as exc:
            if "Digest" not in str(exc):
                raise
            buffer = patterns_of(frame)
            header = cpu.read_header(buffer)
            out = np.zeros(header.n_words, np.uint16 if header.dtype == "bfloat16" else np.uint32)
            try:
                cpu.decode_into(buffer, out)
            except CorruptFrame:
                return tensor_of(out, torch.bfloat16 if out.itemsize == 2 else torch.float32)
            raise AssertionError("unreachable: it failed before") from exc


class DirtyPadding(ZipcclCodec):
    """Leaves a byte of the padding as it finds it."""

    def encode(self, words: torch.Tensor, codebook_exponents: tuple[int, ...]) -> torch.Tensor:
        frame = super().encode(words, codebook_exponents).clone()
        if words.numel() % 8192:
            frame[128 + 120] |= 1
        return frame


class TrustsTheSize(ZipcclCodec):
    """Reads a frame that is cut short as if zeros followed."""

    def decode(self, frame: torch.Tensor) -> torch.Tensor:
        return super().decode(torch.cat([frame, torch.zeros(1 << 16, dtype=torch.uint8)]))


def _communicator(name: str, kind: type[ZipcclCommunicator]) -> Any:
    return lambda: BrokenSubject(name, kind, ZipcclCodec)


def _codec(name: str, kind: type[ZipcclCodec]) -> Any:
    return lambda: BrokenSubject(name, ZipcclCommunicator, kind)


canonical_nan = _communicator("canonical_nan", CanonicalNan)
sum_from_zero = _communicator("sum_from_zero", SumFromZero)
rounds_each_addition = _communicator("rounds_each_addition", RoundsEachAddition)
lazy_work = _communicator("lazy_work", LazyWork)
swallows_errors = _communicator("swallows_errors", SwallowsErrors)
every_piece_from_offset_zero = _communicator("every_piece_from_offset_zero", EveryPieceFromOffsetZero)
ignores_strides = _communicator("ignores_strides", IgnoresStrides)
native_sum_when_raw = _communicator("native_sum_when_raw", NativeSumWhenRaw)
no_digest_check = _codec("no_digest_check", NoDigestCheck)
dirty_padding = _codec("dirty_padding", DirtyPadding)
trusts_the_size = _codec("trusts_the_size", TrustsTheSize)
gather_swaps_two_ranks = _communicator("gather_swaps_two_ranks", GatherSwapsTwoRanks)
broadcast_from_rank_zero = _communicator("broadcast_from_rank_zero", BroadcastFromRankZero)
scatter_shifted = _communicator("scatter_shifted", ScatterShifted)
all_reduce_differs_in_one_bit = _communicator("all_reduce_differs_in_one_bit", AllReduceDiffersInOneBit)
all_reduce_forgets_the_rest = _communicator("all_reduce_forgets_the_rest", AllReduceForgetsTheRest)
ignores_tags = _communicator("ignores_tags", IgnoresTags)
last_in_first_out = _communicator("last_in_first_out", LastInFirstOut)
names_nobody = _communicator("names_nobody", NamesNobody)
blames_the_first = _communicator("blames_the_first", BlamesTheFirst)
barrier_does_not_wait = _communicator("barrier_does_not_wait", BarrierDoesNotWait)
done_too_early = _communicator("done_too_early", DoneTooEarly)
writes_after_wait = _communicator("writes_after_wait", WritesAfterWait)
reads_beyond_odd_sizes = _communicator("reads_beyond_odd_sizes", ReadsBeyondOddSizes)
decides_alone = _communicator("decides_alone", DecidesAlone)
fixed_sigma = _communicator("fixed_sigma", FixedSigma)
stored_one_too_early = _codec("stored_one_too_early", StoredOneTooEarly)
loses_the_sign_of_zero = _codec("loses_the_sign_of_zero", LosesTheSignOfZero)
frame_remembers_the_last = _codec("frame_remembers_the_last", FrameRemembersTheLast)
