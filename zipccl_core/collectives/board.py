"""What ranks agree on through the store: that they are alike when a Communicator is made, and the one fatal error."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ..errors import PeerError, RankTimeout, ZipcclError
from .wire import ERROR_KINDS

_ERROR_KEY = "error"
_POLL_S, _WATCH_S = 0.005, 0.25
LATE = "late"
"""Where those who wait meet, when some ask who is late."""
_ANSWER_S = 2.0  # what a store may take for one answer
_Answer = TypeVar("_Answer")
_KINDS = {kind.__name__: kind for kind in ERROR_KINDS}


class StoreGone(RuntimeError):
    """The store does not answer. Most often the process that hosts it, rank 0's or the launcher, is dead or stopped."""


class NoThread(StoreGone):
    """The store was not asked: this process cannot start a thread."""


def bounded(ask: Callable[[], _Answer], seconds: float) -> _Answer:
    """What ask() gives. It runs on a thread of its own: a call on a store whose host is stopped never returns.

    Raises:
        StoreGone: it has not returned within so many seconds, or the store's connection is lost.
        ZipcclError: it did.
    """
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except Exception as exc:
            answers.put((None, exc.with_traceback(None)))

    try:
        threading.Thread(target=run, name="zipccl-store", daemon=True).start()
        answer, failed = answers.get(timeout=seconds)
    except queue.Empty:
        raise StoreGone(f"the store of the process group gives no answer within {seconds:g} s") from None
    except RuntimeError as exc:  # no thread can be started
        raise NoThread(str(exc)) from exc
    if isinstance(failed, (RuntimeError, ValueError)) and not isinstance(failed, ZipcclError):
        raise StoreGone(f"the store of the process group is gone: {failed}".splitlines()[0])
    if failed is not None:
        raise failed
    return cast("_Answer", answer)


def group_stores(group: dist.ProcessGroup, timeout_s: float) -> tuple[Store, Store]:
    """A store of this Communicator alone, the same on all ranks of the group: named by the group and a running number.

    By two clients, for the Board and for backends: a thread that waits in the store holds its client's lock. Blocking
    calls of the first are bounded by timeout_s. The store itself counts the Communicators that each rank makes on a
    group, so they must be made in one order on all its ranks, as with torch's own groups; and a group that is made
    again with an old name on an old store meets no old keys.

    Raises:
        PeerError: the group's store does not answer.
    """
    try:
        return bounded(lambda: _group_stores(group, timeout_s), timeout_s)
    except StoreGone as exc:
        raise _no_store(exc) from exc


def _no_store(exc: StoreGone) -> PeerError:
    """The same text on all ranks, whatever each has seen of the store."""
    if isinstance(exc, NoThread):
        return PeerError(f"Communicator: a rank cannot ask the store: {exc}; raise the limit of threads")
    return PeerError(
        "Communicator: the store of the process group does not answer; see whether the process that hosts it, often "
        "that of rank 0, is alive"
    )


def _group_stores(group: dist.ProcessGroup, timeout_s: float) -> tuple[Store, Store]:
    get = getattr(dist.distributed_c10d, "_get_process_group_store")  # noqa: B009  (private, hence spelled out)
    store = of_board = get(group)
    if hasattr(store, "clone"):
        of_board = store.clone()
        of_board.set_timeout(timedelta(seconds=timeout_s))
    name = f"zipccl/{group.group_name}"
    number = of_board.add(f"{name}/made by rank {group.rank()}", 1)
    return PrefixStore(f"{name}/{number}", of_board), PrefixStore(f"{name}/{number}", store)


class Board:
    """Store-backed agreement of the ranks of one Communicator.

    Args:
        store: of this Communicator alone (`group_stores`).
        rank, size: in the group.
        of_backends: the same by another client, for who waits in it; `store` if None.
    """

    def __init__(self, store: Store, rank: int, size: int, of_backends: Store | None = None) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._of_backends = store if of_backends is None else of_backends
        self.gone = ""  # why the store is not asked any more: a call that does not return holds its client

    def _ask(self, ask: Callable[[], _Answer], seconds: float) -> _Answer:
        """`bounded`, and no more once the store is gone."""
        if self.gone:
            raise StoreGone(self.gone)
        try:
            return bounded(ask, seconds)
        except StoreGone as exc:
            self.gone = str(exc)
            raise

    def agree(self, facts: dict[str, Any], timeout_s: float) -> None:
        """Compare `facts` of all ranks; the same error on every rank if they differ or one does not come.

        Raises:
            PeerError: naming the first pair and fact that differ.
            RankTimeout: naming the ranks that did not come within timeout_s.
            ZipcclError: what another rank has published.
        """
        try:
            self._ask(lambda: self._agree(facts, timeout_s), timeout_s + _ANSWER_S)
        except StoreGone as exc:
            raise _no_store(exc) from exc

    def _agree(self, facts: dict[str, Any], timeout_s: float) -> None:
        if missing := self._missing("facts", json.dumps(facts, sort_keys=True), timeout_s):
            text = (
                f"Communicator: ranks {missing} of {self._size} did not come within {timeout_s:g} s; "
                "making one is collective: all ranks of the group must do it, in the same order"
            )
            raise self.settle(RankTimeout(text))
        all_facts = [json.loads(self._store.get(f"facts/{rank}")) for rank in range(self._size)]
        for rank, other in enumerate(all_facts):
            for name, value in all_facts[0].items():
                if other.get(name) != value:
                    raise PeerError(
                        f"Communicator: {name} is {value!r} on rank 0 and {other.get(name)!r} on rank {rank}; "
                        "make it alike on all ranks"
                    )

    def share(self, name: str, mine: Any, timeout_s: float) -> list[Any]:
        """What every rank says under a name that is used once, in rank order; anything that JSON holds.

        Raises:
            PeerError: the group's store does not answer.
            RankTimeout: naming the ranks that said nothing within timeout_s; on all that do.
            ZipcclError: what another rank has published.
        """
        try:
            return self._ask(lambda: self._share(name, mine, timeout_s), timeout_s + _ANSWER_S)
        except StoreGone as exc:
            raise _no_store(exc) from exc

    def _share(self, name: str, mine: Any, timeout_s: float) -> list[Any]:
        if missing := self._missing(name, json.dumps(mine), timeout_s):
            text = f"Communicator: ranks {missing} of {self._size} said nothing of {name} within {timeout_s:g} s"
            raise self.settle(RankTimeout(text))
        return [json.loads(self._store.get(f"{name}/{rank}")) for rank in range(self._size)]

    def _missing(self, name: str, mine: str, timeout_s: float) -> list[int]:
        """Say something under a name, and wait until all ranks have; those that have not within timeout_s.

        Raises:
            ZipcclError: what a rank has published, perhaps before this one came: it does not wait here any more.
        """
        self._store.set(f"{name}/{self._rank}", mine)
        deadline = time.monotonic() + timeout_s
        while True:
            missing = [rank for rank in range(self._size) if not self._store.check([f"{name}/{rank}"])]
            if self._store.check([_ERROR_KEY]):
                raise _revive(self._store.get(_ERROR_KEY))
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(_POLL_S)

    def absent(self, name: str, grace_s: float) -> list[int]:
        """The ranks that do not come here within grace_s, under a name that is used once; none if the store is gone.

        Raises:
            ZipcclError: what a rank has published, at once.
        """
        try:
            return self._ask(lambda: self._missing(name, "here", grace_s), grace_s + _ANSWER_S)
        except StoreGone:
            return []

    def settle(self, error: ZipcclError) -> ZipcclError:
        """Publish a fatal error and return the one that all ranks raise: the first that was published.

        Without a store each rank raises what it knows.
        """
        mine = json.dumps({"kind": type(error).__name__, "text": str(error)})
        try:
            return _revive(self._ask(lambda: self._store.compare_set(_ERROR_KEY, "", mine), _ANSWER_S))
        except StoreGone:
            return type(error)(*error.args)

    def published(self, grace_s: float) -> ZipcclError | None:
        """The fatal error that some rank has published, or publishes within grace_s; None otherwise."""

        def look() -> bytes | None:
            deadline = time.monotonic() + grace_s
            while not self._store.check([_ERROR_KEY]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_S)
            return bytes(self._store.get(_ERROR_KEY))

        try:
            found = self._ask(look, grace_s + _ANSWER_S)
        except StoreGone:
            return None
        return None if found is None else _revive(found)

    def backend_store(self, name: str) -> Store:
        """A store in which the process group `name` of this Communicator finds its ranks."""
        return PrefixStore(name, self._of_backends)

    def say_late(self) -> None:
        """This rank waits for others: be not absent where some ask who is late."""
        with contextlib.suppress(StoreGone):
            self._ask(lambda: self._store.set(f"{LATE}/{self._rank}", "here"), _ANSWER_S)

    def watch_for(self, over: threading.Event) -> list[ZipcclError]:
        """What another rank publishes until it is over, as soon as it is here. A store that is slow is no trouble.

        Raises:
            RuntimeError: no thread can be started.
        """
        found: list[ZipcclError] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):
                while not over.wait(_WATCH_S) and not found:
                    if self._store.check([_ERROR_KEY]):
                        found.append(_revive(self._store.get(_ERROR_KEY)))

        threading.Thread(target=run, name="zipccl-news", daemon=True).start()
        return found

    def check(self) -> None:
        """Raise what no rank can go on after: what one has published, or that the store is gone."""
        if self.gone:
            raise _no_store(StoreGone(self.gone))
        if (error := self.published(0.0)) is not None:
            raise error


def _revive(published: bytes) -> ZipcclError:
    entry = json.loads(published)
    return _KINDS.get(entry["kind"], PeerError)(entry["text"])
