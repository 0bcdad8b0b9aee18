"""What stands for calls under way: a torch.distributed.Work by type, since torch's own callers ask for that.

FSDP2, for one, waits for what is an instance of it and for nothing else, and a DDP hook wants its future.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidArgument, RankTimeout, ZipcclError, again
from .call import Call, title
from .stragglers import let_go

_create_work_from_future = getattr(torch._C._distributed_c10d, "_create_work_from_future")  # noqa: B009  (private)
_SUCCESS = 0  # torch's WorkResult
_EXIT_S = 5.0


class TorchWork(dist.Work):
    """What of torch's Work follows from `wait`, `is_completed` and `exception`.

    Args:
        outputs: the tensors that the call fills, as the caller gave them.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        dist.Work.__init__(self)
        self._outputs = outputs

    def is_success(self) -> bool:
        """Whether all is done without an error, as far as is known."""
        return self.is_completed() and self.exception() is None

    def result(self) -> list[Tensor]:
        """The outputs; waits for them as wait() does."""
        self.wait()
        return list(self._outputs)

    def synchronize(self) -> None:
        """wait()."""
        self.wait()

    def block_current_stream(self) -> None:
        """wait(): the host may have to."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the outputs, which comes when wait() would return; whoever takes its value has that wait's order
        on the current stream. What it raises is wait()'s error. Its callbacks run on a thread of their own, and may
        call and wait."""
        return self._future(lambda: list(self._outputs))

    def get_future_result(self) -> torch.futures.Future[int]:
        """The same of torch's WorkResult: 0, or an error."""
        return self._future(lambda: _SUCCESS)

    def boxed(self) -> torch.ScriptObject:
        """Of a Work of torch's own, which lives without Python's."""
        made: dist.Work = _create_work_from_future(self.get_future())
        return made.boxed()

    def _devices(self) -> list[int | str | torch.device]:
        """Those of CUDA, for a future's order."""
        return sorted({t.device for t in self._outputs if t.is_cuda}, key=str)

    def _future(self, value: Callable[[], Any]) -> torch.futures.Future[Any]:
        devices = self._devices()
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)

        def run() -> None:
            try:
                with _stream_of_its_own(devices):  # the future takes its order from the current stream
                    self.wait()
                    future.set_result(value())
            except Exception as exc:
                fail(future, exc)

        thread = threading.Thread(target=run, name="zipccl-future", daemon=True)
        try:
            thread.start()
            let_go([thread], _EXIT_S)  # callbacks may still run when Python ends
        except RuntimeError:  # no thread can be started: then it is waited for here
            run()
        return future


class Work(TorchWork):
    """One or more calls under way. Dropping it changes nothing: they go on.

    Args:
        calls: that were submitted.
        outputs: as for TorchWork.
    """

    def __init__(self, calls: Sequence[Call], outputs: Sequence[Tensor] = ()) -> None:
        TorchWork.__init__(self, outputs)
        self._calls, self._process = calls, os.getpid()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all is done; True, or the error that all ranks raise.

        Of a call on a device: until its messages are encoded on all ranks and everything else is queued, here and, as
        far as this rank needs them, on its peers; the current stream then waits for the rest, and the host does not.

        Args:
            timeout: how long to wait; the policy's deadline if None or, as torch says it, 0.

        Raises:
            RankTimeout: still under way after `timeout`; it goes on.
            InvalidArgument: not a timedelta, or the call is of a process that this one was forked from.
            ZipcclError: failed, in the same way on all ranks.
        """
        if timeout is not None and not isinstance(timeout, timedelta):
            raise InvalidArgument(f"wait: timeout must be a datetime.timedelta, got {timeout!r}")
        if self._process != os.getpid():
            raise InvalidArgument("wait: the call was made in the process that this one was forked from; wait there")
        wait_for(self._calls, timeout or None)
        return True

    def is_completed(self) -> bool:
        """Whether all is done, on the device too, well or not; never blocks."""
        return all(c.done.is_set() and (c.finished is None or c.finished.query()) for c in self._calls)

    def exception(self) -> ZipcclError | None:
        """The first error of the calls that are done, else None."""
        return _error(self._calls)


def _stream_of_its_own(devices: Sequence[Any]) -> contextlib.AbstractContextManager[object]:
    """Within, the current stream of the first device is a new one; nothing of CUDA is touched if there is none."""
    if not devices:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(devices[0]))  # type: ignore[no-untyped-call]


def fail(future: torch.futures.Future[Any], exc: Exception) -> None:
    """End a future with an error: with a fresh one each time it is asked. By set_exception it is one, whose traceback
    then holds the frames of who asked, those hold the future, and that holds the error: for ever."""

    def raise_afresh(kept: ZipcclError) -> None:
        raise again(kept)

    future._set_unwrap_func(raise_afresh)  # type: ignore[attr-defined]
    future.set_result(exc.with_traceback(None))


def wait_for(calls: Sequence[Call], timeout: timedelta | None = None) -> None:
    """Block until calls that were submitted are done; see Work.wait."""
    deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
    for call in calls:
        if not call.done.wait(None if deadline is None else max(deadline - time.monotonic(), 0)):
            raise RankTimeout(f"{title(call)} is still under way after {timeout}; wait() again")
    if (error := _error(calls)) is not None:
        raise again(error)
    for call in calls:
        if call.on is not None and call.finished is not None:
            call.on.join(call.finished)


def _error(calls: Sequence[Call]) -> ZipcclError | None:
    return next((call.error for call in calls if call.error is not None), None)
