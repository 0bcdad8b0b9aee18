"""The public collectives: torch.distributed's names and argument order, lossless and verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InvalidArgument
from ..frame import DTYPES
from ..policy.switch import Decision, Policy
from .board import Board, group_store
from .exchange import Call, Exchange, Work, dtype_text, facts, patterns
from .reduce import ReduceSpec, ordered_sum, reduce_spec


class Communicator:
    """Collectives over the ranks of a process group that compress what they send without losing a bit.

    Making one is collective: all ranks of the group make theirs, in the same order if they make several, and with the
    same policy, which is compared. It opens connections of its own and never uses the group's, so calls on it and on
    the group may be mixed freely. Any number may live at once, on one group or on overlapping ones.

    Calls must be issued in the same order on all ranks, as with torch. With `async_op=True` a call returns a Work at
    once; a progress thread carries it through, whether and in whichever order Works are waited for. Every call first
    compares its arguments across ranks, and every message is verified on receipt; what goes wrong is one error of one
    kind with one text on all ranks. After a PeerError or RankTimeout that came from the transport the Communicator is
    finished and repeats that error; after any other it can be used on. Outputs are undefined after an error.

    Args:
        group: a process group with CPU tensors (gloo); the default group if None.
        policy: what to compress and how; see Policy.

    Raises:
        InvalidArgument: not a member of the group, or not a Policy.
        PeerError: the ranks differ in policy, frame version or size.
        RankTimeout: a rank did not make its Communicator within policy.timeout_s.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, policy: Policy | None = None) -> None:
        group = dist.group.WORLD if group is None else group
        policy = Policy() if policy is None else policy
        if not isinstance(policy, Policy):
            raise InvalidArgument(f"Communicator: policy must be a zipccl_core.Policy, got {policy!r}")
        if not isinstance(group, dist.ProcessGroup):
            raise InvalidArgument(
                f"Communicator: group must be a process group that this rank is in, got {group!r}; "
                "call init_process_group first, and make no Communicator on ranks outside the group"
            )
        self._rank, self._size = group.rank(), group.size()
        self._policy = policy
        board = Board(group_store(group, policy.timeout_s), self._rank, self._size)
        board.agree(facts(policy, self._size), policy.timeout_s)
        self._exchange = Exchange(board, self._rank, self._size, policy)
        self._closed = False

    # Collectives

    def all_gather_into_tensor(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, async_op: bool = False
    ) -> Work | None:
        """Gather every rank's input into output, in rank order.

        Bit-exact for every pattern of every dtype; bfloat16 and float32 are coded as the policy says. Strided tensors
        are taken in their logical order. The input may be the own slot of the output (in place).

        Args:
            output_tensor: world size × input elements, dtype of the input, cpu, any shape.
            input_tensor: any shape, cpu; may be empty; the same number of elements on all ranks.
            async_op: return a Work at once.

        Returns:
            None once done, or a Work.

        Raises:
            InvalidArgument: dtype, device, layout or sizes of some rank are wrong; on all ranks.
            PeerError: ranks call it differently; on all ranks, naming the pair.
            CorruptFrame: a message was damaged on the way; on all ranks, naming sender and receiver.
            RankTimeout: a rank did not come within the deadline; on all ranks, naming it.
        """

        def build() -> Call:
            _check_pair(output_tensor, input_tensor)
            n = input_tensor.numel()
            if output_tensor.numel() != n * self._size:
                raise InvalidArgument(
                    f"output must have {self._size} × {n} = {n * self._size} elements, got {output_tensor.numel()}"
                )
            flat_out, finish = _flat_output(output_tensor)
            slots = [flat_out.narrow(0, r * n, n) for r in range(self._size)]
            in_place = input_tensor.is_contiguous() and input_tensor.data_ptr() == slots[self._rank].data_ptr()
            flat_in = input_tensor.detach().reshape(-1) if in_place else _flat_input(input_tensor, output_tensor)
            return Call("", flat_in.dtype, [flat_in] * self._size, slots, same_for_all=True, finish=finish)

        return self._issue("all_gather_into_tensor", build, async_op)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Sum every rank's input, and leave the own shard of the sum in output.

        SUM, AVG and PREMUL_SUM of bfloat16 and float32 are summed in float32 in rank order and rounded once: the same
        bits on every run, for every policy but reduction="native" (docs/DESIGN.md, "The sum"). PREMUL_SUM must have
        the same factor on all ranks. Other ops and dtypes use the backend's own reduction; `last_decision` says so.

        Args:
            output: shard, cpu, any shape; may be the own shard of the input (in place).
            input: world size × output elements, dtype of the output, cpu.
            op: torch.distributed.ReduceOp.
            async_op: return a Work at once.

        Returns, raises:
            As all_gather_into_tensor; InvalidArgument also if the backend does not know op or dtype.
        """

        def build() -> Call:
            _check_pair(output, input)
            spec = reduce_spec(op)
            n = output.numel()
            if input.numel() != n * self._size:
                raise InvalidArgument(
                    f"input must have {self._size} × {n} = {n * self._size} elements, got {input.numel()}"
                )
            flat_in = _flat_input(input, output)
            flat_out, finish = _flat_output(output)
            shards = [flat_in.narrow(0, r * n, n) for r in range(self._size)]
            return self._reduction(spec, shards, flat_in, flat_out, finish)

        return self._issue("reduce_scatter_tensor", build, async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Send part r of the input to rank r; receive rank r's part for this rank as part r of the output.

        Whether a part is coded is decided for each pair of ranks by the part's bytes. Parts may be empty.

        Args:
            output: [rows, …], cpu; dtype and row shape of the input.
            input: [rows, …], cpu.
            output_split_sizes: rows from each rank, adding up to output's rows; equal parts if None or empty.
            input_split_sizes: rows to each rank, adding up to input's rows; equal parts if None or empty.
            async_op: return a Work at once.

        Returns, raises:
            As all_gather_into_tensor. What rank i sends to j must be what j expects from i; the error names the pair.
        """

        def build() -> Call:
            _check_pair(output, input)
            flat_in = _flat_input(input, output)
            flat_out, finish = _flat_output(output)
            sends = _split(flat_in, input, input_split_sizes, self._size, "input")
            receives = _split(flat_out, output, output_split_sizes, self._size, "output")
            if sends[self._rank].numel() != receives[self._rank].numel():
                raise InvalidArgument(
                    f"this rank's part for itself has {sends[self._rank].numel()} elements in the input "
                    f"and {receives[self._rank].numel()} in the output"
                )
            return Call("", flat_in.dtype, sends, receives, finish=finish)

        return self._issue("all_to_all_single", build, async_op)

    def barrier(self, async_op: bool = False) -> Work | None:
        """Return once every rank has come here.

        Returns, raises:
            As all_gather_into_tensor.
        """
        return self._issue("barrier", lambda: Call(""), async_op)

    def close(self) -> None:
        """Finish every call under way, meet the other ranks, and free connections and the progress thread.

        Collective, and bounded by the deadline; a second close does nothing. After an error that finished the
        Communicator it only frees.

        Raises:
            RankTimeout: a rank did not close within the deadline; everything is freed all the same.
            PeerError: a rank issued another call where this one closes.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._exchange.broken is None:
                self._submit("close", lambda: Call("")).wait()
        finally:
            self._exchange.stop(self._policy.timeout_s)

    def __del__(self) -> None:
        exchange = getattr(self, "_exchange", None)
        if exchange is not None and not self._closed:
            exchange.stop(0)

    # What it did

    @property
    def last_decision(self) -> Decision | None:
        """What the latest finished data call of this Communicator did, and why; None before the first."""
        return self._exchange.last_decision

    def stats(self) -> dict[str, dict[str, float]]:
        """Counts since the start, for each operation.

        Returns:
            operation → {"calls", "raw_bytes": payload for other ranks, "sent_bytes": what was sent for it, envelopes
            included, "ratio": raw ÷ sent, "coded_words", "escapes": among those, "phase_two_messages", "compressed"
            and "native": calls by decision}. Call records and verdicts, 1152 bytes a peer and call, are not counted.
        """
        report: dict[str, dict[str, float]] = {}
        for operation, books in self._exchange.stats.items():
            sent = books["sent_bytes"]
            keys = ("calls", "raw_bytes", "sent_bytes", "coded_words", "escapes", "phase_two_messages")
            report[operation] = {key: books[key] for key in (*keys, "compressed", "native")}
            report[operation]["ratio"] = books["raw_bytes"] / sent if sent else 1.0
        return report

    # How

    def _issue(self, operation: str, build: Callable[[], Call], async_op: bool) -> Work | None:
        if self._closed:
            raise InvalidArgument(f"{operation}: this Communicator is closed; make another")
        work = self._submit(operation, build)
        if async_op:
            return work
        work.wait()
        return None

    def _submit(self, operation: str, build: Callable[[], Call]) -> Work:
        try:
            call = build()
        except Exception as exc:  # InvalidArgument, or torch's own dislike of an argument
            # The peers wait for this rank's record: tell them, and raise with them what the verdict says.
            invalid = InvalidArgument(f"{operation}: {exc} (on rank {self._rank} of {self._size})")
            self._exchange.submit(Call(operation, invalid=invalid)).wait()
            raise invalid from exc  # the verdict was another rank's: not reached
        call.operation = operation
        return self._exchange.submit(call)

    def _reduction(
        self,
        spec: ReduceSpec,
        shards: list[torch.Tensor],
        flat_in: torch.Tensor,
        flat_out: torch.Tensor,
        finish: Callable[[], None],
    ) -> Call:
        name = dtype_text(flat_in.dtype)
        raw_bytes = shards[0].numel() * shards[0].element_size()
        why = ""
        if not spec.ordered:
            why = f"{spec.name} is the backend's own reduction"
        elif name not in DTYPES:
            why = f"{name} is not coded, and reduced by the backend"
        elif self._policy.reduction == "native" and not self._policy.codes(name, raw_bytes):
            why = 'reduction="native", and the call is not coded'
        if why:

            def native(group: Any, timeout: timedelta) -> None:
                _reduce_scatter_native(group, flat_out, flat_in, spec, timeout)

            return Call("", flat_in.dtype, shards, shards, spec=spec, native=native, native_reason=why, finish=finish)

        terms = [torch.empty_like(shard) for shard in shards]

        def reduce_and_finish() -> None:
            ordered_sum([patterns(term) for term in terms], spec, patterns(flat_out))
            finish()

        return Call("", flat_in.dtype, shards, terms, spec=spec, finish=reduce_and_finish)


def _check_pair(output: torch.Tensor, input: torch.Tensor) -> None:
    for name, tensor in (("output", output), ("input", input)):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise InvalidArgument(f"{name} must be a strided cpu tensor, got {tensor.layout} on {tensor.device}")
    if output.dtype != input.dtype:
        raise InvalidArgument(f"output must have the input's dtype {input.dtype}, got {output.dtype}")
    if any(stride == 0 and size > 1 for stride, size in zip(output.stride(), output.shape, strict=True)):
        raise InvalidArgument("output must not be expanded: elements share one place; call .contiguous()")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() > 0 and b.numel() > 0


def _flat_input(input: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The input in logical order, as it is now: a copy if it is strided or shares memory with the output."""
    flat = input.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.clone() if _overlap(flat, output) else flat


def _flat_output(output: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """A flat tensor to fill, and what brings it into a strided output afterwards."""
    target = output.detach()
    if target.is_contiguous():
        return target.reshape(-1), lambda: None
    flat = torch.empty(target.numel(), dtype=target.dtype)
    return flat, lambda: _scatter_back(target, flat)


def _scatter_back(target: torch.Tensor, flat: torch.Tensor) -> None:
    target.copy_(flat.reshape(target.shape))


def _split(
    flat: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int] | None, world_size: int, name: str
) -> list[torch.Tensor]:
    """One flat part a rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % world_size:
            raise InvalidArgument(f"{name}: {rows} rows do not divide by {world_size} ranks; give {name}_split_sizes")
        sizes = [rows // world_size] * world_size
    sizes = [int(size) for size in sizes]
    if len(sizes) != world_size or min(sizes) < 0 or sum(sizes) != rows:
        raise InvalidArgument(
            f"{name}_split_sizes must be {world_size} sizes, none negative, adding up to {rows} rows; got {sizes}"
        )
    row_words = flat.numel() // rows if rows else 0
    return list(torch.split(flat, [size * row_words for size in sizes]))


def _reduce_scatter_native(
    group: Any, output: torch.Tensor, input: torch.Tensor, spec: ReduceSpec, timeout: timedelta
) -> None:
    options = dist.ReduceScatterOptions()
    options.reduceOp = spec.torch_op
    options.timeout = timeout
    # The backend's method was renamed in torch 2.13; a build has one name or both.
    method = getattr(group, "_reduce_scatter_base", None) or group.reduce_scatter_single
    method(output, input, options).wait(timeout)
