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

from ..errors import InvalidArgument, ZipcclError, again
from ..policy.switch import Decision
from .call import Call
from .exchange import Exchange
from .message import raw_view
from .reduce import ReduceSpec
from .transport import is_of_the_connection
from .work import TorchWork, Work, fail, wait_for


def go_straight(
    exchange: Exchange,
    call: Call,
    output: Tensor,
    async_op: bool,
    is_strided: bool,
    sent_bytes: int,
    decision: Decision,
) -> TorchWork | None:
    """Start a call of the backend; behind the calls that this Communicator still has to queue, if there are any.

    All of them use one connection, whose order must be every rank's. A call that stands behind others is started by the
    progress thread, as is one whose result has to be brought into a strided output whether or not it is waited for.

    Args:
        call: with operation, device, `straight` and `finish`.
        output: as the caller gave it.
        async_op: give its Work.
        is_strided: `finish` has something to do.
        sent_bytes, decision: for the books.

    Returns:
        A Work, or None once the current stream waits for the result.

    Raises:
        ZipcclError: what has finished this Communicator.
        InvalidArgument: the backend refuses the arguments; on this rank.
    """
    exchange.check_open(call.operation)
    start = call.straight
    assert start is not None
    call.straight = lambda: guarded(exchange, call.operation, start)
    follows = exchange.is_queuing() or (async_op and is_strided)
    work: Any = None
    if follows:
        exchange.follow(call)
    else:
        work = call.straight()
    exchange.count_native(call.operation, sent_bytes, decision)
    if async_op:
        return Work([call], (output,)) if follows else Begun(exchange, call.operation, work, output)
    if follows:
        wait_for([call])
        return None
    work.wait()
    call.finish()
    return None


class Begun(TorchWork):
    """The backend's Work of a call that went straight to it, with all methods of ours; NCCL's lacks some.

    Args:
        work: the backend's.
        output: as the caller gave it.
    """

    def __init__(self, exchange: Exchange, operation: str, work: Any, output: Tensor) -> None:
        TorchWork.__init__(self, (output,))
        self._exchange, self._operation, self._work = exchange, operation, work
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As the backend's; what that raises as an error of ours."""
        try:
            return bool(self._work.wait() if timeout is None else self._work.wait(timeout))
        except Exception as exc:
            self._error = refusal(self._exchange, self._operation, exc)
            raise self._error from exc

    def is_completed(self) -> bool:
        """As the backend's."""
        return bool(self._work.is_completed())

    def exception(self) -> Exception | None:
        """What wait() has raised, or what has finished the Communicator."""
        return self._error or self._exchange.broken

    def _future(self, value: Callable[[], Any]) -> torch.futures.Future[Any]:
        """The backend's, in whose order streams are: no thread waits."""

        future: torch.futures.Future[Any] = torch.futures.Future(devices=self._devices())

        def came(backends: torch.futures.Future[Any]) -> None:
            try:
                backends.value()
                future.set_result(value())
            except Exception as exc:
                fail(future, refusal(self._exchange, self._operation, exc))

        self._work.get_future().add_done_callback(came)
        return future


def guarded(exchange: Exchange, operation: str, start: Callable[..., Any], *tensors: Tensor) -> Any:
    """What start gives, or an error of ours; one too if it does not come back, or only since all was given up."""
    exchange.watch.enter(operation)
    try:
        work = start(*tensors)
    except Exception as exc:
        raise refusal(exchange, operation, exc) from exc
    finally:
        exchange.watch.leave()
    if exchange.broken is not None:
        raise again(exchange.broken)
    return work


def refusal(exchange: Exchange, operation: str, exc: Exception) -> Exception:
    """What to raise when the backend has raised this instead of starting a call."""
    if isinstance(exc, (ZipcclError, torch.cuda.OutOfMemoryError)):
        return exc
    if is_of_the_connection(exc):  # which nobody can use any more
        return exchange.transport_failed(operation, exc, exchange.peers)
    if isinstance(exc, (RuntimeError, ValueError, TypeError)):
        return InvalidArgument(f"{operation}: the backend refuses it: {exc} (on rank {exchange.rank})")
    return exc


Start = Callable[[Tensor, Tensor], Any]
"""(output, input) → the backend's Work; None if what is waited for is in the caller's stream already.

Asks nothing of the backend's group before it is called.
"""


def _options(kind: Any, async_op: bool) -> Any:
    """torch's options; without asyncOp the backend works on the caller's stream, and spares two events."""
    made = kind()
    if hasattr(made, "asyncOp"):
        made.asyncOp = async_op
    return made


def gather(group: Any, dtype: torch.dtype, async_op: bool) -> Start:
    """What starts the backend's all-gather of contiguous tensors."""
    options = _options(AllgatherOptions, async_op)
    return _of_known(dtype, lambda output, input: group._allgather_base(output, input, options))


def exchange_parts(group: Any, dtype: torch.dtype, async_op: bool) -> Start:
    """What starts the backend's all-to-all of equal parts of flat tensors."""
    options = _options(dist.AllToAllOptions, async_op)
    return _of_known(dtype, lambda output, input: group.alltoall_base(output, input, [], [], options))


def broadcast(group: Any, root: int, dtype: torch.dtype, async_op: bool) -> Start:
    """What starts the backend's broadcast of a contiguous tensor."""
    options = _options(dist.BroadcastOptions, async_op)
    options.rootRank, options.rootTensor = root, 0
    return _of_known(dtype, lambda tensor, same: group.broadcast([tensor], options))


def reduce_scatter(group: Any, spec: ReduceSpec, async_op: bool) -> Start:
    """What starts the backend's own reduce-scatter of contiguous tensors."""
    options = _options(dist.ReduceScatterOptions, async_op)
    options.reduceOp = spec.torch_op
    return lambda output, input: group._reduce_scatter_base(output, input, options)


def all_reduce(group: Any, spec: ReduceSpec, async_op: bool) -> Start:
    """What starts the backend's own all-reduce in place."""
    options = _options(dist.AllreduceOptions, async_op)
    options.reduceOp = spec.torch_op
    return lambda tensor, same: group.allreduce([tensor], options)


_KNOWN = {
    torch.bfloat16,
    torch.float32,
    torch.float16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
}
"""What every backend knows."""


def _of_known(dtype: torch.dtype, start: Start) -> Start:
    """The same on bytes, if a backend may lack the dtype."""
    return start if dtype in _KNOWN else lambda output, input: start(raw_view(output), raw_view(input))
