"""Calls on a device that are not coded go straight to the backend, on the caller's thread and stream.

Which calls these are is a function of operation, dtype and size, which all ranks have alike if they call alike. Nothing
is exchanged about them: they have the backend's guarantees only, and cost what the backend costs.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from ..errors import InvalidArgument, PeerError, ZipcclError
from ..policy.switch import Decision
from .exchange import Exchange
from .message import Sent
from .reduce import ReduceSpec


class StraightWork:
    """A Work of the backend, and what brings its result into a strided output; the methods of torch's Work."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work, self._finish = work, finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As the backend's: the current stream waits."""
        done = bool(self._work.wait() if timeout is None else self._work.wait(timeout))
        finish, self._finish = self._finish, lambda: None
        finish()
        return done

    def is_completed(self) -> bool:
        """As the backend's."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """As the backend's."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """As the backend's."""
        found: BaseException | None = self._work.exception()
        return found


def go_straight(
    exchange: Exchange, operation: str, start: Callable[[], Any], words: int, raw_bytes: int, reason: str
) -> Any:
    """Start a call of the backend behind everything that this Communicator has under way; its Work.

    Args:
        start: makes the call.
        words, raw_bytes: that this rank sends to others, for the books.
        reason: for last_decision.

    Raises:
        ZipcclError: what has finished this Communicator.
        InvalidArgument: the backend refuses the arguments; on this rank.
    """
    exchange.check_open(operation)
    last = exchange.last_call
    if last is not None and not last.done.is_set():  # both use one connection, whose order must be every rank's
        last.done.wait()  # each call before it has a deadline; giving up here alone would put the ranks out of step
        exchange.check_open(operation)
    try:
        work = start()
    except (ZipcclError, torch.cuda.OutOfMemoryError):
        raise
    except dist.DistError as exc:  # of the connections, which nobody can use any more
        raise exchange.give_up(PeerError(f"{operation}: rank {exchange.rank} failed: {exc}"), exc) from exc
    except (RuntimeError, ValueError, TypeError) as exc:
        raise InvalidArgument(f"{operation}: the backend refuses it: {exc} (on rank {exchange.rank})") from exc
    decision = Decision("native", reason, operation, -1)
    exchange.count(operation, [Sent(raw_bytes, raw_bytes, words)], 1, decision=decision)
    return work


def gather(group: Any, output: Tensor, input: Tensor) -> Any:
    """Start the backend's all-gather of flat tensors."""
    return group._allgather_base(output, input, AllgatherOptions())


def exchange_parts(group: Any, output: Tensor, input: Tensor) -> Any:
    """Start the backend's all-to-all of equal parts of flat tensors."""
    return group.alltoall_base(output, input, [], [], dist.AllToAllOptions())


def broadcast(group: Any, tensor: Tensor, root: int) -> Any:
    """Start the backend's broadcast."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return group.broadcast([tensor], options)


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
