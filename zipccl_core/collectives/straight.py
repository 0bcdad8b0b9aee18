"""Calls on a device that are not coded go straight to the backend, on the caller's thread and stream.

Which calls these are is a function of operation, dtype and size, which all ranks have alike if they call alike. Nothing
is exchanged about them: they have the backend's guarantees only, and cost what the backend costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from ..errors import InvalidArgument, ZipcclError
from ..policy.switch import Decision
from .call import Call
from .exchange import Exchange
from .message import Sent, raw_view
from .reduce import ReduceSpec


def go_straight(
    exchange: Exchange, call: Call, async_op: bool, is_strided: bool, words: int, raw_bytes: int, reason: str
) -> Any:
    """Start a call of the backend; behind the calls that this Communicator still has to queue, if there are any.

    All of them use one connection, whose order must be every rank's. A call that stands behind others is started by the
    progress thread, as is one whose result has to be brought into a strided output whether or not it is waited for.

    Args:
        call: with operation, device, `straight` and `finish`.
        async_op: give its Work.
        is_strided: `finish` has something to do.
        words, raw_bytes: that this rank sends to others, for the books.
        reason: for last_decision.

    Returns:
        A Work, or None once the current stream waits for the result.

    Raises:
        ZipcclError: what has finished this Communicator.
        InvalidArgument: the backend refuses the arguments; on this rank.
    """
    exchange.check_open(call.operation)
    start = call.straight
    assert start is not None
    call.straight = lambda: _guarded(exchange, call.operation, start)
    last = exchange.last_call
    work: Any
    if (last is not None and not last.done.is_set()) or (async_op and is_strided):
        work = exchange.follow(call)
    else:
        work = call.straight()
    decision = Decision("native", reason, call.operation, -1)
    exchange.count(call.operation, [Sent(raw_bytes, raw_bytes, words)], 1, decision=decision)
    if async_op:
        return work
    work.wait()
    if call.on is None:
        call.finish()
    return None


def _guarded(exchange: Exchange, operation: str, start: Callable[[], Any]) -> Any:
    """What start gives, or an error of ours."""
    try:
        return start()
    except (ZipcclError, torch.cuda.OutOfMemoryError):
        raise
    except dist.DistError as exc:  # of the connections, which nobody can use any more
        raise exchange.transport_failed(operation, exc, exchange.peers) from exc
    except (RuntimeError, ValueError, TypeError) as exc:
        raise InvalidArgument(f"{operation}: the backend refuses it: {exc} (on rank {exchange.rank})") from exc


def gather(group: Any, output: Tensor, input: Tensor) -> Any:
    """Start the backend's all-gather of flat tensors, as bytes: backends lack dtypes."""
    return group._allgather_base(raw_view(output), raw_view(input), AllgatherOptions())


def exchange_parts(group: Any, output: Tensor, input: Tensor) -> Any:
    """Start the backend's all-to-all of equal parts of flat tensors, as bytes."""
    return group.alltoall_base(raw_view(output), raw_view(input), [], [], dist.AllToAllOptions())


def broadcast(group: Any, tensor: Tensor, root: int) -> Any:
    """Start the backend's broadcast of a flat tensor, as bytes."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return group.broadcast([raw_view(tensor)], options)


def reduce_scatter(group: Any, output: Tensor, input: Tensor, spec: ReduceSpec) -> Any:
    """Start the backend's own reduce-scatter of flat tensors."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = spec.torch_op
    return group._reduce_scatter_base(output, input, options)


def all_reduce(group: Any, tensor: Tensor, spec: ReduceSpec) -> Any:
    """Start the backend's own all-reduce in place."""
    options = dist.AllreduceOptions()
    options.reduceOp = spec.torch_op
    return group.allreduce([tensor], options)
