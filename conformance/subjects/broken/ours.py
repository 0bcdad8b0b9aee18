"""Our own implementation with one defect planted in each. Nothing here is ever right."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from conformance.oracle import patterns_of, tensor_of
from conformance.subjects.zipccl import ZipcclCodec, ZipcclCommunicator, ZipcclSubject
from zipccl_core import Communicator
from zipccl_core.codec import cpu
from zipccl_core.errors import CorruptFrame, ZipcclError


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
