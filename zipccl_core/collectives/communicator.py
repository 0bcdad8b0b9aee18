"""The public collectives: torch.distributed's names and argument order, lossless and verified."""

from __future__ import annotations

import enum
import functools
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any, Final

import torch
import torch.distributed as dist

from ..errors import InvalidArgument, again
from ..frame import DTYPES
from ..policy.switch import Decision, Policy, explain_straight
from . import straight
from .arguments import (
    are_given,
    bare,
    bytes_of,
    check_async_op,
    check_modes,
    check_tensor,
    flat_input,
    flat_output,
    flat_outputs,
    hashable,
    no_inference,
    split,
)
from .board import Board, group_stores
from .call import Call, nothing
from .cuda_device import has_nccl, pipeline_on_cuda, refuse_capture
from .device import MESSAGES, Device
from .exchange import BEHIND_S, Exchange, facts
from .message import dtype_text, patterns
from .point_to_point import TAGS, Channels
from .probe import probe
from .reduce import ReduceSpec, all_reduce_native, ordered_sum, reduce_scatter_native, reduce_spec
from .repeat import (
    UNREPEATABLE,
    Alike,
    Known,
    Memory,
    exchanging,
    gathering,
    is_direct,
    is_plain,
    overlaps,
    reducing,
    reducing_in_place,
    terms_of,
)
from .straight import Start, go_straight
from .transport import nap_s
from .work import TorchWork, Work, wait_for

LEAST_MEETING_S = 10.0


class _New(enum.Enum):
    """Instead of a Work, or None: a call like it has not been seen."""

    NEW = enum.auto()


_NEW: Final = _New.NEW


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

    A process that is forked has no part in it: there every call is refused. A signal's handler should set a flag, and
    not call: a call on a device that it interrupts does not go on while it waits.

    Tensors on CUDA go through the GPU's codec, and NCCL if the group has it for CUDA ("cpu:gloo,cuda:nccl"; each rank's
    current device is taken when the Communicator is made), else by way of the host and gloo. Such calls are ordered
    after and before work on the current stream, as torch's are: `wait()` lets the stream wait for the words, and holds
    up the host only until the messages of all ranks are encoded, so that their sizes are known. Before it returns, the
    tensors are the call's own: whatever else uses them, another call too, is in no order with it. A call none of whose
    messages is coded goes straight to NCCL, without a comparison of arguments: it has torch's guarantees, and as with
    torch, a thread that reads its result by Tensor.cpu() holds up the process's others until peers have come (copy to
    pinned memory where several threads call). Calls cannot be captured into a CUDA graph. On CUDA, "auto" measures when
    a Communicator is made, in about a second, from which size on coding pays.

    Args:
        group: a process group; the default group if None.
        policy: what to compress and how; see Policy.

    Raises:
        InvalidArgument: not a member of the group, or not a Policy.
        PeerError: the ranks differ in policy, frame version or size; one is gone, or NCCL cannot connect it.
        RankTimeout: a rank did not make its Communicator within policy.timeout_s, or 10 s if that is less; or NCCL did
            not connect it within as long, or 30 s.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, policy: Policy | None = None) -> None:
        group = dist.group.WORLD if group is None else group
        policy = Policy() if policy is None else policy
        if not isinstance(group, dist.ProcessGroup):
            raise InvalidArgument(
                f"Communicator: group must be a process group that this rank is in, got {group!r}; "
                "call init_process_group first, and make no Communicator on ranks outside the group"
            )
        self._rank, self._size = group.rank(), group.size()
        self._policy, self._group = policy, group
        is_policy = isinstance(policy, Policy)
        patience_s = max(policy.timeout_s, LEAST_MEETING_S) if is_policy else LEAST_MEETING_S
        store, of_backends = group_stores(group, patience_s)
        board = Board(store, self._rank, self._size, of_backends)
        if not is_policy:  # the others are coming, and count this one too
            text = f"Communicator: policy must be a zipccl_core.Policy, got {policy!r} (on rank {self._rank})"
            raise board.settle(InvalidArgument(text))
        board.agree(facts(policy, self._size), patience_s)
        self._exchange = Exchange(board, self._rank, self._size, policy)
        self._channels = Channels(self._exchange)
        self._closed = False
        self._memory = Memory()
        if has_nccl(group):
            self._exchange.transport.share_memory(board, self._rank, patience_s)
            device = torch.device("cuda", torch.cuda.current_device())
            self._exchange.pipelines["cuda"] = pipeline_on_cuda(self._exchange, group, device)
            if policy.compress == "auto" and self._size > 1:
                probe(self._exchange, self._probed, self._memory.clear, device)

    # Collectives

    def all_gather_into_tensor(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, async_op: bool = False
    ) -> TorchWork | None:
        """Gather every rank's input into output, in rank order.

        Bit-exact for every pattern of every dtype; bfloat16 and float32 are coded as the policy says. Strided tensors
        are taken in their logical order. The input may be the own slot of the output (in place).

        Args:
            output_tensor: world size × input elements, dtype of the input, device of the input, any shape.
            input_tensor: any shape, cpu or cuda; may be empty; the same number of elements on all ranks.
            async_op: return a Work at once.

        Returns:
            None once done, or a Work.

        Raises:
            InvalidArgument: dtype, device, layout or sizes of some rank are wrong; on all ranks.
            PeerError: ranks call it differently; on all ranks, naming the pair.
            CorruptFrame: a message was damaged on the way; on all ranks, naming sender and receiver.
            RankTimeout: a rank did not come within the deadline; on all ranks, naming it.
        """

        done = self._repeat("all_gather_into_tensor", output_tensor, input_tensor, None, async_op)
        if done is not _NEW:
            return done

        def build() -> list[Call]:
            output, input = self._checked(output_tensor, input_tensor)
            n = input.numel()
            if output.numel() != n * self._size:
                raise InvalidArgument(
                    f"output must have {self._size} × {n} = {n * self._size} elements, got {output.numel()}"
                )
            flat_out, finish = flat_output(output)
            slots = [flat_out.narrow(0, r * n, n) for r in range(self._size)]
            in_place = is_plain(input) and input.data_ptr() == slots[self._rank].data_ptr()
            flat_in = input.reshape(-1) if in_place else flat_input(input, output)
            alike = functools.partial(gathering, output, input, self._size)
            self._note("all_gather_into_tensor", output, input, None, alike, self._rank * bytes_of(input))
            return [self._gathering(flat_in, slots, n, finish)]

        if (group := self._straight("gather", input_tensor)) is not None:
            return self._go_straight(
                "all_gather_into_tensor",
                output_tensor,
                input_tensor,
                functools.partial(straight.gather, group, input_tensor.dtype),
                self._size - 1,
                async_op,
                in_place_at=self._rank * bytes_of(input_tensor),
            )
        return self._issue("all_gather_into_tensor", build, async_op, output_tensor)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> TorchWork | None:
        """Sum every rank's input, and leave the own shard of the sum in output.

        SUM, AVG and PREMUL_SUM of bfloat16 and float32 are summed in float32 in rank order and rounded once: the same
        bits on every run, for every policy but reduction="native" (docs/DESIGN.md, "The sum"). PREMUL_SUM must have
        the same factor on all ranks. Other ops and dtypes use the backend's own reduction; `last_decision` says so.

        Args:
            output: shard, cpu or cuda, any shape; may be the own shard of the input (in place).
            input: world size × output elements, dtype and device of the output.
            op: torch.distributed.ReduceOp.
            async_op: return a Work at once.

        Returns, raises:
            As all_gather_into_tensor; InvalidArgument also if the backend does not know op or dtype.
        """

        more = hashable(op)
        if (done := self._repeat("reduce_scatter_tensor", output, input, more, async_op)) is not _NEW:
            return done

        def build() -> list[Call]:
            to, source = self._checked(output, input)
            spec, in_place_at = reduce_spec(op), -self._rank * bytes_of(to)
            n = to.numel()
            if source.numel() != n * self._size:
                raise InvalidArgument(
                    f"input must have {self._size} × {n} = {n * self._size} elements, got {source.numel()}"
                )
            ordered = not self._why_native(spec, to.dtype, bytes_of(to), to.device.type)
            in_place = ordered and is_plain(source) and is_plain(to)
            in_place = in_place and source.data_ptr() == to.data_ptr() + in_place_at
            flat_in = source.reshape(-1) if in_place else flat_input(source, to)
            flat_out, finish = flat_output(to)
            shards = [flat_in.narrow(0, r * n, n) for r in range(self._size)]
            if ordered:
                alike = functools.partial(reducing, to, source, self._size, spec)
                self._note("reduce_scatter_tensor", to, source, more, alike, in_place_at)
            return [self._reduction(spec, shards, flat_in, flat_out, finish)]

        if (found := self._straight_reduction(output, 1, op)) is not None:
            group, spec = found
            return self._go_straight(
                "reduce_scatter_tensor",
                output,
                input,
                functools.partial(straight.reduce_scatter, group, spec),
                self._size - 1,
                async_op,
                more,
                -self._rank * bytes_of(output),
            )
        return self._issue("reduce_scatter_tensor", build, async_op, output)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> TorchWork | None:
        """Send part r of the input to rank r; receive rank r's part for this rank as part r of the output.

        Whether a part is coded is decided for each pair of ranks by the part's bytes. Parts may be empty.

        Args:
            output: [rows, …]; dtype, device and row shape of the input.
            input: [rows, …], cpu or cuda.
            output_split_sizes: rows from each rank, adding up to output's rows; equal parts if None or empty, which
                must be so on all ranks or on none.
            input_split_sizes: rows to each rank, adding up to input's rows; equal parts likewise.
            async_op: return a Work at once.

        Returns, raises:
            As all_gather_into_tensor. What rank i sends to j must be what j expects from i; the error names the pair.
        """

        equal = not are_given(input_split_sizes) and not are_given(output_split_sizes)
        if equal and (done := self._repeat("all_to_all_single", output, input, None, async_op)) is not _NEW:
            return done

        def build() -> list[Call]:
            to, source = self._checked(output, input)
            flat_in = flat_input(source, to)
            flat_out, finish = flat_output(to)
            sends = split(flat_in, source, input_split_sizes, self._size, "input")
            receives = split(flat_out, to, output_split_sizes, self._size, "output")
            if sends[self._rank].numel() != receives[self._rank].numel():
                raise InvalidArgument(
                    f"this rank's part for itself has {sends[self._rank].numel()} elements in the input "
                    f"and {receives[self._rank].numel()} in the output"
                )
            if equal and to is not source:
                alike = functools.partial(exchanging, to, source, self._size)
                self._note("all_to_all_single", to, source, None, alike)
            return [Call(dtype=flat_in.dtype, sends=sends, receives=receives, finish=finish)]

        if equal and (group := self._straight("all_to_all", input, self._size)) is not None:
            return self._go_straight(
                "all_to_all_single",
                output,
                input,
                functools.partial(straight.exchange_parts, group, input.dtype),
                (self._size - 1) / self._size,
                async_op,
            )
        return self._issue("all_to_all_single", build, async_op, output)

    def all_gather(
        self, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, async_op: bool = False
    ) -> TorchWork | None:
        """Gather every rank's tensor into the tensors of a list, in rank order.

        Args:
            tensor_list: world size tensors with the elements of `tensor`, dtype and device of it, any layout.
            tensor: any shape, cpu or cuda; the same number of elements on all ranks.
            async_op: return a Work at once.

        Returns, raises:
            As all_gather_into_tensor.
        """

        def build() -> list[Call]:
            outputs, mine = self._check_list("tensor_list", tensor_list, tensor)
            flat_in = flat_input(mine, *outputs)
            slots, finish = flat_outputs(outputs)
            return [self._gathering(flat_in, slots, flat_in.numel(), finish)]

        return self._issue("all_gather", build, async_op, tensor_list)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False) -> TorchWork | None:
        """Sum every rank's tensor in place; all ranks end with the same bits.

        An ordered reduce-scatter of shards of ⌈n ÷ world size⌉ elements (the last may be shorter or empty), and an
        all-gather of the sums: each element is what reduce_scatter_tensor gives it. Two ranks send each other all of
        it, and sum it both: no more bytes, and one exchange instead of two; on the CPU up to 1 MiB. Where verdicts come
        late (Policy.verify), a rank may by then have words that another has not; the next call says so on all ranks.

        Args:
            tensor: any shape, cpu or cuda; the same number of elements on all ranks. Undefined until done, and after an
                error.
            op: as in reduce_scatter_tensor.
            async_op: return a Work at once.

        Returns, raises:
            As reduce_scatter_tensor.
        """

        more = hashable(op)
        if (done := self._repeat("all_reduce", tensor, tensor, more, async_op)) is not _NEW:
            return done

        def build() -> list[Call]:
            words, _ = self._checked(tensor, tensor)
            spec = reduce_spec(op)
            flat, finish = flat_output(words)
            if not is_plain(words):
                flat.copy_(words.reshape(-1))
            n = flat.numel()
            direct = is_direct(self._size, bytes_of(flat), flat.device.type in self._exchange.pipelines)
            shards = terms_of(flat, self._size, direct)
            why = self._why_native(spec, flat.dtype, bytes_of(shards[0]), flat.device.type)
            if why:
                native = Call(
                    dtype=flat.dtype, total_words=n, sends=shards, spec=spec, native_reason=why, finish=finish
                )
                native.receives = [shards[self._rank]] * self._size
                native.native = lambda group, timeout: all_reduce_native(group, flat, spec, timeout)
                return [native]
            mine = shards[self._rank]
            alike = functools.partial(reducing_in_place, flat, self._rank, self._size, direct, spec)
            self._note("all_reduce", words, words, more, alike)
            if direct:
                return [self._reduction(spec, shards, flat, flat, finish)]
            reduction = self._reduction(spec, shards, flat, mine)
            return [reduction, self._gathering(mine, shards, n, finish)]

        parts = 1 if is_direct(self._size, 0, on_device=True) else self._size
        if (found := self._straight_reduction(tensor, parts, op)) is not None:
            group, spec = found
            return self._go_straight(
                "all_reduce",
                tensor,
                tensor,
                functools.partial(straight.all_reduce, group, spec),
                2 * (self._size - 1) / self._size,
                async_op,
                more,
            )
        return self._issue("all_reduce", build, async_op, tensor)

    def broadcast(
        self, tensor: torch.Tensor, src: int | None = None, async_op: bool = False, group_src: int | None = None
    ) -> TorchWork | None:
        """Give every rank the tensor of src.

        Args:
            tensor: read on src, written elsewhere; any shape, cpu or cuda; the same number of elements on all ranks.
            src: global rank; or
            group_src: rank of the group.
            async_op: return a Work at once.

        Returns, raises:
            As all_gather_into_tensor.
        """

        def build() -> list[Call]:
            root = self._root("src", src, group_src)
            words, call = self._rooted(tensor, root)
            call.same_for_all = True
            if self._rank == root:
                flat = flat_input(words)
                call.sends = [call.sends[root] if r == root else flat for r in range(self._size)]
            else:
                call.receives[root], call.finish = flat_output(words)
            return [call]

        given = (src, group_src) if {type(src), type(group_src)} <= {int, NoneType} else UNREPEATABLE
        if (done := self._repeat("broadcast", tensor, tensor, given, async_op)) is not _NEW:
            return done
        if (group := self._straight("gather", tensor)) is not None:
            root = self._root("src", src, group_src)
            others = self._size - 1 if self._rank == root else 0
            return self._go_straight(
                "broadcast",
                tensor,
                tensor,
                functools.partial(straight.broadcast, group, root, tensor.dtype),
                others,
                async_op,
                given,
            )
        return self._issue("broadcast", build, async_op, tensor)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: Sequence[torch.Tensor] | None = None,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> TorchWork | None:
        """Give rank r the tensor r of src's list.

        Args:
            tensor: output; any shape, cpu or cuda; the same number of elements on all ranks.
            scatter_list: on src, world size tensors with the elements of `tensor`; None elsewhere.
            src, group_src, async_op: as in broadcast.

        Returns, raises:
            As all_gather_into_tensor.
        """

        def build() -> list[Call]:
            root = self._root("src", src, group_src)
            words, call = self._rooted(tensor, root)
            call.receives[root], call.finish = flat_output(words)
            if self._rank == root:
                inputs, _ = self._check_list("scatter_list", scatter_list, tensor)
                call.sends = [flat_input(each, words) for each in inputs]
            elif scatter_list:
                raise InvalidArgument("scatter_list is for src alone; give None on other ranks")
            return [call]

        return self._issue("scatter", build, async_op, tensor)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: Sequence[torch.Tensor] | None = None,
        dst: int | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> TorchWork | None:
        """Gather every rank's tensor into dst's list, in rank order.

        Args:
            tensor: any shape, cpu or cuda; the same number of elements on all ranks.
            gather_list: on dst, world size tensors with the elements of `tensor`; None elsewhere.
            dst: global rank; or
            group_dst: rank of the group.
            async_op: return a Work at once.

        Returns, raises:
            As all_gather_into_tensor.
        """

        def build() -> list[Call]:
            root = self._root("dst", dst, group_dst)
            words, call = self._rooted(tensor, root)
            outputs: list[torch.Tensor] = []
            if self._rank == root:
                outputs, _ = self._check_list("gather_list", gather_list, tensor)
                call.receives, call.finish = flat_outputs(outputs)
            elif gather_list:
                raise InvalidArgument("gather_list is for dst alone; give None on other ranks")
            call.sends[root] = flat_input(words, *outputs)
            return [call]

        return self._issue("gather", build, async_op, gather_list)

    # Point to point

    def send(self, tensor: torch.Tensor, dst: int | None = None, tag: int = 0, group_dst: int | None = None) -> None:
        """Send a tensor; returns once the receiver has it.

        Messages of one sender, receiver and tag arrive in the order in which they were sent; others do not wait for
        each other. A tensor on CUDA goes by way of the host, in as much pinned memory, which torch keeps for others; so
        does one that is received.

        Args:
            tensor: any shape, cpu or cuda.
            dst: global rank, another than this; or
            group_dst: rank of the group.
            tag: 0 to 2**27 − 1.

        Raises:
            InvalidArgument: this rank's arguments are wrong; the receiver, if there is one, gets the same error.
            PeerError: the receiver expects something else; on both.
            RankTimeout, CorruptFrame: as in all_gather_into_tensor; on both.
        """
        self.isend(tensor, dst, tag, group_dst).wait()

    def isend(self, tensor: torch.Tensor, dst: int | None = None, tag: int = 0, group_dst: int | None = None) -> Work:
        """`send` that returns a Work at once; the tensor must not change until it is done."""
        return self._point_to_point("dst", dst, group_dst, tag, tensor)

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0, group_src: int | None = None) -> int:
        """Receive a tensor; returns the sender's global rank.

        Args:
            tensor: output; any shape, cpu or cuda; the elements and dtype that are sent.
            src: global rank, another than this; or
            group_src: rank of the group. A receive from any rank is refused: nobody could say whom it waits for.
            tag: the sender's.

        Raises:
            As send.
        """
        self.irecv(tensor, src, tag, group_src).wait()
        peer = self._root("src", src, group_src)
        return peer if self._group is None else dist.get_global_rank(self._group, peer)

    def irecv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0, group_src: int | None = None) -> Work:
        """`recv` that returns a Work at once."""
        return self._point_to_point("src", src, group_src, tag, tensor)

    def batch_isend_irecv(self, p2p_op_list: Sequence[dist.P2POp]) -> list[Work]:
        """Issue torch.distributed.P2POps of isend and irecv together; a Work for each, in the list's order.

        Raises:
            InvalidArgument: not a non-empty list of P2POps, or another operation in it.
        """
        ops = list(p2p_op_list) if isinstance(p2p_op_list, Iterable) else []
        if not ops or not all(isinstance(op, dist.P2POp) for op in ops):
            raise InvalidArgument("batch_isend_irecv: p2p_op_list must be a list of torch.distributed.P2POp, not empty")
        methods = {dist.isend: self.isend, dist.irecv: self.irecv}
        return [methods[op.op](op.tensor, op.peer, op.tag) for op in ops]

    # Objects: never coded, straight through the group

    def all_gather_object(self, object_list: list[Any], obj: Any) -> None:
        """torch.distributed.all_gather_object on the group; no deadline but the group's own."""
        dist.all_gather_object(object_list, obj, group=self._group)

    def broadcast_object_list(self, object_list: list[Any], src: int | None = None, **kwargs: Any) -> None:
        """torch.distributed.broadcast_object_list on the group."""
        dist.broadcast_object_list(object_list, src, group=self._group, **kwargs)

    def gather_object(self, obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = None) -> None:
        """torch.distributed.gather_object on the group."""
        dist.gather_object(obj, object_gather_list, dst, group=self._group)

    def scatter_object_list(
        self, output_list: list[Any], input_list: list[Any] | None = None, src: int | None = None
    ) -> None:
        """torch.distributed.scatter_object_list on the group."""
        dist.scatter_object_list(output_list, input_list, src, group=self._group)

    all_gather_single = all_gather_into_tensor
    reduce_scatter_single = reduce_scatter_tensor

    # Meeting and parting

    def barrier(self, async_op: bool = False) -> TorchWork | None:
        """Return once every rank has come here; devices may still be at what was queued before.

        Returns, raises:
            As all_gather_into_tensor.
        """
        return self._issue("barrier", lambda: [Call()], async_op)

    def close(self) -> None:
        """Finish every call under way, meet the other ranks, and free connections and the progress thread.

        Collective, and bounded by the deadline; a second close does nothing. After an error that finished the
        Communicator it only frees.

        Raises:
            RankTimeout: a rank did not close within the deadline; everything is freed all the same.
            PeerError: a rank issued another call where this one closes.
            ZipcclError: what finished the Communicator after its last call had returned, if no call has raised it.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._exchange.broken is None:
                wait_for(self._submit("close", lambda: [Call()]))
        finally:
            self._memory.clear()  # it knows the backend's group
            self._channels.stop(self._policy.timeout_s)
            self._exchange.stop(self._policy.timeout_s)
        if (untold := self._exchange.untold) is not None:
            raise again(untold)

    def __reduce__(self) -> Any:
        raise InvalidArgument("a Communicator cannot be copied or pickled: it is of this process; make another")

    def __del__(self) -> None:
        exchange = getattr(self, "_exchange", None)
        if exchange is not None and not self._closed:
            self._channels.stop(0)
            exchange.stop(0)

    # What it did

    @property
    def last_decision(self) -> Decision | None:
        """What the latest finished data call of this Communicator did, and why; None before the first."""
        return self._exchange.last_decision

    @property
    def last_arrivals(self) -> list[tuple[int, float]]:
        """Who came to the latest collective call, and when: (group rank, microseconds after the first), in that order.

        Own time is that of the call, other ranks' that at which their record came here.
        """
        return self._exchange.last_arrivals

    @property
    def arrived_last(self) -> dict[int, int]:
        """Group rank → collective calls to which it came last: all ranks look slow, and this one is guilty."""
        return dict(self._exchange.arrived_last)

    def stats(self) -> dict[str, dict[str, float]]:
        """Counts since the start, for each operation.

        Returns:
            operation → {"calls", "raw_bytes": payload for other ranks, "sent_bytes": what was sent for it, envelopes
            included, "ratio": raw ÷ sent, "coded_words", "escapes": among those, "phase_two_messages",
            "retransmissions": messages that came damaged and were asked for again, "compressed" and "native": calls
            by decision}. Call records and verdicts, 2048 bytes a peer and call, are not counted. After the first call
            on a device also "device_buffers" → {"held_bytes": now, "bound_bytes": the most while nothing is under way,
            twice what the largest call has taken, "made": allocations so far}.
        """
        report: dict[str, dict[str, float]] = {}
        for operation, books in self._exchange.books().items():
            sent = books["sent_bytes"]
            keys = (
                "calls",
                "raw_bytes",
                "sent_bytes",
                "coded_words",
                "escapes",
                "phase_two_messages",
                "retransmissions",
            )
            report[operation] = {key: books[key] for key in (*keys, "compressed", "native")}
            report[operation]["ratio"] = books["raw_bytes"] / sent if sent else 1.0
        for pipeline in self._exchange.pipelines.values():
            pool = pipeline.pool
            report["device_buffers"] = {
                "held_bytes": float(pool.held_bytes),
                "bound_bytes": float(pool.bound_bytes),
                "made": float(pool.made),
            }
        return report

    # How

    def _issue(
        self, operation: str, build: Callable[[], list[Call]], async_op: bool, outputs: Any = None
    ) -> TorchWork | None:
        """Build and submit the calls of an operation; wait for them unless async_op.

        Args:
            outputs: the tensor, or the list of tensors, to fill, as given; for their Work.
        """
        if self._closed:
            raise InvalidArgument(f"{operation}: this Communicator is closed; make another")

        def checked() -> list[Call]:
            check_async_op(async_op)
            return build()

        calls = self._submit(operation, checked, here=async_op is False)
        if async_op:
            return Work(
                calls, (outputs,) if isinstance(outputs, torch.Tensor) else tuple(() if outputs is None else outputs)
            )
        wait_for(calls)
        return None

    def _submit(self, operation: str, build: Callable[[], list[Call]], here: bool = False) -> list[Call]:
        try:
            check_modes()
            with no_inference():
                calls = build()
        except Exception as exc:  # InvalidArgument, or torch's own dislike of an argument
            # The peers wait for this rank's records: tell them, and raise with them what the verdict says.
            invalid = InvalidArgument(f"{operation}: {exc} (on rank {self._rank} of {self._size})")
            self._exchange.submit(told := Call(operation, invalid=invalid))
            wait_for([told])
            raise invalid from exc  # not reached: the verdict holds an error, this one or a lower rank's
        first = calls[0]
        device = (first.sends or first.receives)[0].device.type if first.sends or first.receives else ""
        for stage, call in enumerate(calls):
            call.operation, call.stage, call.device = operation, stage, device
        self._exchange.submit(*calls, here=here)
        return calls

    def _checked(self, output: torch.Tensor, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, bare, if they are right together; one twice if they are one."""
        if input is output:
            check_tensor("tensor", output)
        else:
            check_tensor("output", output)
            check_tensor("input", input)
        if output.dtype != input.dtype:
            raise InvalidArgument(f"output must have the input's dtype {input.dtype}, got {output.dtype}")
        if output.device != input.device:
            raise InvalidArgument(f"output must be on the input's device {input.device}, got {output.device}")
        if any(stride == 0 and size > 1 for stride, size in zip(output.stride(), output.shape, strict=True)):
            raise InvalidArgument("output must not be expanded: elements share one place; call .contiguous()")
        if output.device.type != "cpu" and output.device.type not in self._exchange.pipelines:
            refuse_capture(output.device)  # before anything is made there
            self._exchange.pipelines[output.device.type] = pipeline_on_cuda(self._exchange, self._group, output.device)
        if (pipeline := self._exchange.pipelines.get(output.device.type)) is not None:
            pipeline.device.check(output.device)
        plain = bare(output)
        return plain, plain if input is output else bare(input)

    def _straight(self, kind: str, tensor: Any, parts: int = 1) -> Any:
        """The backend's group, if calls of this kind on such tensors go straight to it; else None.

        Args:
            parts: messages that the tensor is cut into.
        """
        if (group := self._straight_group(tensor)) is None:
            return None
        dtype, n_bytes = dtype_text(tensor.dtype), -(-tensor.numel() // parts) * tensor.element_size()
        return None if self._exchange.codes_on_device(kind, dtype, n_bytes) else group

    def _straight_reduction(self, tensor: Any, parts: int, op: Any) -> tuple[Any, ReduceSpec] | None:
        """As _straight, for a reduction; with what `op` asks for."""
        if (group := self._straight_group(tensor)) is None:
            return None
        try:
            spec = reduce_spec(op)
        except InvalidArgument:
            return None  # is said to all ranks
        n_bytes = -(-tensor.numel() // parts) * tensor.element_size()
        return (group, spec) if self._why_native(spec, tensor.dtype, n_bytes, tensor.device.type) else None

    def _straight_group(self, tensor: Any) -> Any:
        """The backend's group, if it takes such tensors without asking."""
        pipelines = self._exchange.pipelines
        if not pipelines or self._closed or not isinstance(tensor, torch.Tensor):
            return None
        pipeline = pipelines.get(tensor.device.type)
        return None if pipeline is None or not pipeline.link.straight else pipeline.link.group()

    def _repeat(self, operation: str, output: Any, input: Any, more: Any, async_op: object) -> TorchWork | _New | None:
        """Make a call like an earlier one, without looking at its tensors again; what it returns, or _NEW if none is.

        Args:
            more: see Memory.
        """
        exchange = self._exchange
        if self._closed or exchange.broken is not None or (async_op is not True and async_op is not False):
            return _NEW
        known = self._memory.find(operation, output, input, more)
        if known is None:
            return _NEW
        if known.alike is not None:
            calls = known.alike.calls(output, input, not async_op)
            exchange.submit(*calls, here=not async_op)
            if async_op:
                return Work(calls, (output,))
            wait_for(calls)
            return None
        if exchange.is_queuing():
            return _NEW
        start = known.start_async if async_op else known.start
        assert start is not None
        assert known.decision is not None
        work = straight.guarded(exchange, operation, start, output, input)
        exchange.count_native(operation, known.sent_bytes, known.decision)
        if async_op:
            return straight.Begun(exchange, operation, work, output)
        if work is not None:  # torch gives none of what is in the caller's stream already
            work.wait()
        return None

    def _note(
        self,
        operation: str,
        output: torch.Tensor,
        input: torch.Tensor,
        more: Any,
        alike: Callable[[], Alike],
        in_place_at: int | None = None,
    ) -> None:
        """Remember a coded call on a device, whose arguments were right. The host's are told of as they are issued."""
        pipeline = self._exchange.pipelines.get(output.device.type)
        if pipeline is not None:
            known = Known(pipeline.device, bytes_of(output), bytes_of(input), in_place_at, alike=alike())
            self._memory.note(operation, output, input, more, known)

    def _go_straight(
        self,
        operation: str,
        output: torch.Tensor,
        input: torch.Tensor,
        start: Callable[[bool], Start],
        times: float,
        async_op: bool,
        more: Any = None,
        in_place_at: int | None = None,
    ) -> TorchWork | None:
        """Start a call of the backend on flat tensors; what this rank sends is `times` as much as the smaller of both.

        Args:
            output, input: the same tensor for what is done in place.
            start: async_op → what starts the backend's call.
            more, in_place_at: what to remember it by, and with; see Memory and Known.
        """
        check_async_op(async_op)
        with no_inference():
            to, source = self._checked(output, input)
            is_strided = not is_plain(to)
            flat_out, finish = flat_output(to)
            copied = is_strided or not is_plain(source)
            in_place = operation in ("all_reduce", "broadcast")
            if in_place:
                if is_strided:
                    flat_out.copy_(to.reshape(-1))
                flat_in = flat_out
            elif copied or overlaps(to, bytes_of(to), source, bytes_of(source), in_place_at):
                flat_in = flat_input(source, to)
            else:
                flat_in = source.view(-1)
            sent_bytes = int(min(flat_in.numel(), flat_out.numel()) * times) * to.element_size()
            decision = Decision("native", explain_straight(self._policy, dtype_text(to.dtype)), operation, -1)
            call = Call(operation, device=to.device.type, finish=finish)
            call.straight = lambda: start(True)(flat_out, flat_in)
            work = go_straight(self._exchange, call, output, async_op, is_strided, sent_bytes, decision)
        if to.dim() == source.dim() == 1 and (to is not source or in_place):
            device, sizes = self._exchange.pipelines[to.device.type].device, (bytes_of(to), bytes_of(source))
            known = Known(device, *sizes, in_place_at, start(False), start(True), None, sent_bytes, decision)
            self._memory.note(operation, to, source, more, known)
        return work

    def _probed(self, kind: str, out: torch.Tensor, words: torch.Tensor) -> Any:
        """A call of a kind, for `probe`."""
        if kind == "gather":
            return self.all_gather_into_tensor(out, words, async_op=True)
        if kind == "all_to_all":
            return self.all_to_all_single(out, words, async_op=True)
        return self.reduce_scatter_tensor(out[: words.numel() // self._size], words, async_op=True)

    def _root(self, name: str, rank: int | None, group_rank: int | None) -> int:
        """The group rank of a src or dst given as global or as group rank."""
        if (rank is None) == (group_rank is None):
            raise InvalidArgument(f"give {name} (a global rank) or group_{name} (a rank of the group), and not both")
        try:
            rank, group_rank = (None if given is None else operator.index(given) for given in (rank, group_rank))
        except TypeError as exc:
            raise InvalidArgument(f"{name} and group_{name} are numbers, got {rank!r} and {group_rank!r}") from exc
        if group_rank is None:
            assert rank is not None
            members = range(self._size) if self._group is None else dist.get_process_group_ranks(self._group)
            if rank not in members:
                raise InvalidArgument(f"{name} must be one of the group's ranks {list(members)}, got {rank}")
            group_rank = list(members).index(rank)
        if group_rank not in range(self._size):
            raise InvalidArgument(f"group_{name} must be 0 to {self._size - 1}, got {group_rank}")
        return group_rank

    def _check_list(
        self, name: str, tensors: Sequence[torch.Tensor] | None, like: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The tensors of a list, one a rank, each with the dtype and elements of `like`; and that. All are bare."""
        if tensors is None or len(tensors) != self._size:
            came = "None" if tensors is None else f"{len(tensors)}"
            raise InvalidArgument(f"{name} must have one tensor a rank, {self._size}, got {came}")
        found = [self._checked(each, like) for each in tensors]
        for each, _ in found:
            if each.numel() != like.numel():
                raise InvalidArgument(f"{name}: every tensor must have {like.numel()} elements, got {each.numel()}")
        return [each for each, _ in found], found[0][1]

    def _point_to_point(
        self, name: str, rank: int | None, group_rank: int | None, tag: int, tensor: torch.Tensor
    ) -> Work:
        if self._closed:
            raise InvalidArgument("point_to_point: this Communicator is closed; make another")
        peer = self._root(name, rank, group_rank)
        if peer == self._rank:
            raise InvalidArgument(f"{name} must be another rank than this, {peer}")
        if not isinstance(tag, int) or not 0 <= tag < TAGS:
            raise InvalidArgument(f"tag must be 0 to {TAGS - 1}, got {tag!r}")
        call, is_sender = Call("point_to_point"), name == "dst"
        try:
            with no_inference():
                self._lay_out_message(call, tensor, is_sender)
        except Exception as exc:
            call.invalid = InvalidArgument(f"{'send' if is_sender else 'recv'}: {exc} (on rank {self._rank})")
        self._channels.submit(call, peer, tag, is_sender)
        return Work([call], () if is_sender else (tensor,))

    def _lay_out_message(self, call: Call, tensor: torch.Tensor, is_sender: bool) -> None:
        """Give a call between two ranks its tensor; one of a device goes by way of the host."""
        words, _ = self._checked(tensor, tensor)
        pipeline = self._exchange.pipelines.get(words.device.type)
        call.dtype = words.dtype
        if not is_sender:
            if pipeline is None:
                flat, call.finish = flat_output(words)
            else:
                flat, call.finish = _by_way_of_the_host(call, words, pipeline.device)
            call.receives = [flat]
        elif pipeline is None:
            call.sends = [flat_input(words)]
        elif words.numel():
            call.lay_out = _to_the_host(flat_input(words), pipeline.device, self._exchange)
        else:
            call.sends = [torch.empty(0, dtype=words.dtype, device="cpu")]

    def _codes(self, device: str, dtype: str, raw_bytes: int) -> bool:
        """Whether a term of a reduction of raw_bytes is coded."""
        if device in self._exchange.pipelines:
            return self._exchange.codes_on_device("reduce", dtype, raw_bytes)
        return self._policy.codes(dtype, raw_bytes)

    def _why_native(self, spec: ReduceSpec, dtype: torch.dtype, raw_bytes: int, device: str) -> str:
        """Why a reduction is the backend's own; empty if it is the ordered sum."""
        name = dtype_text(dtype)
        if not spec.ordered:
            return f"{spec.name} is the backend's own reduction"
        if name not in DTYPES:
            return f"{name} is not coded, and reduced by the backend"
        if self._policy.reduction == "native" and not self._codes(device, name, raw_bytes):
            return 'reduction="native", and the call is not coded'
        return ""

    def _rooted(self, tensor: torch.Tensor, root: int) -> tuple[torch.Tensor, Call]:
        """The tensor, bare, and a call about one rank, with nothing to send or receive yet."""
        tensor, _ = self._checked(tensor, tensor)
        nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        call = Call(dtype=tensor.dtype, total_words=tensor.numel(), root=root)
        call.sends, call.receives = [nothing] * self._size, [nothing] * self._size
        return tensor, call

    def _gathering(
        self, mine: torch.Tensor, slots: list[torch.Tensor], total_words: int, finish: Callable[[], None]
    ) -> Call:
        """Send every rank the same, and fill the slots with what they send."""
        return Call(
            dtype=mine.dtype,
            total_words=total_words,
            sends=[mine] * self._size,
            receives=slots,
            same_for_all=True,
            finish=finish,
        )

    def _reduction(
        self,
        spec: ReduceSpec,
        shards: list[torch.Tensor],
        flat_in: torch.Tensor,
        flat_out: torch.Tensor,
        finish: Callable[[], None] = nothing,
    ) -> Call:
        """Send every rank its shard, and sum what comes into flat_out."""
        call = Call(dtype=flat_in.dtype, total_words=flat_in.numel(), sends=shards, spec=spec, finish=finish)
        why = self._why_native(spec, flat_in.dtype, shards[0].numel() * shards[0].element_size(), flat_in.device.type)
        if why:
            call.receives, call.native_reason = [flat_out] * self._size, why
            call.native = lambda group, timeout: reduce_scatter_native(group, flat_out, flat_in, spec, timeout)
            return call
        if flat_out.device.type in self._exchange.pipelines:
            call.receives, call.target = [flat_out] * self._size, flat_out
            return call
        terms = call.receives = [torch.empty_like(flat_out) for _ in shards]

        def reduce_and_finish() -> None:
            ordered_sum([patterns(term) for term in terms], spec, patterns(flat_out))
            finish()

        call.finish = reduce_and_finish
        return call


def _by_way_of_the_host(call: Call, target: torch.Tensor, device: Device) -> tuple[torch.Tensor, Callable[[], None]]:
    """A flat host tensor to fill, and what brings it to the device, after what the caller's stream holds now."""
    flat, issued = torch.empty(target.numel(), dtype=target.dtype, device="cpu"), device.now()

    def finish() -> None:
        with device.attached(), device.on(MESSAGES):
            device.after(issued)
            device.to_device(target, flat.view(target.shape))
            device.keep(target)
            call.on, call.finished = device, device.mark()

    return flat, finish


def _to_the_host(flat: torch.Tensor, device: Device, exchange: Exchange) -> Callable[[Call], None]:
    """What brings a flat tensor of a device, as the caller's stream leaves it, into the call as what it sends.

    The copy has begun, in that stream; it is waited for, within the deadline, by whoever carries the call through.
    """
    copy, dtype = device.copy_of_callers(flat), flat.dtype

    def lay_out(call: Call) -> None:
        began = time.monotonic()
        deadline = began + exchange.policy.timeout_s + BEHIND_S
        with device.attached():
            while not copy.query():
                if exchange.broken is not None:
                    raise again(exchange.broken)
                if exchange.leaving or time.monotonic() > deadline:
                    raise exchange.transport_failed("send from a device", RuntimeError("timed out"), [exchange.rank])
                time.sleep(nap_s(time.monotonic() - began))
        call.sends = [copy.tensor().view(dtype)]

    return lay_out
