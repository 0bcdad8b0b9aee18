"""What ranks agree on through the store: that they are alike when a Communicator is made, and the one fatal error."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ..errors import PeerError, RankTimeout, ZipcclError
from .wire import ERROR_KINDS

_ERROR_KEY = "error"
_POLL_S = 0.005
_KINDS = {kind.__name__: kind for kind in ERROR_KINDS}


def group_store(group: dist.ProcessGroup, timeout_s: float) -> Store:
    """A store of this Communicator alone, the same on all ranks of the group: named by the group and a running number.

    Its blocking calls are bounded by timeout_s. The store itself counts the Communicators that each rank makes on a
    group, so they must be made in one order on all its ranks, as with torch's own groups; and a group that is made
    again with an old name on an old store meets no old keys.
    """
    get = getattr(dist.distributed_c10d, "_get_process_group_store")  # noqa: B009  (private, hence spelled out)
    store = get(group)
    if hasattr(store, "clone"):  # a client of its own: a thread that waits in the store holds its client's lock
        store = store.clone()
        store.set_timeout(timedelta(seconds=timeout_s))
    name = f"zipccl/{group.group_name}"
    number = store.add(f"{name}/made by rank {group.rank()}", 1)
    return PrefixStore(f"{name}/{number}", store)


class Board:
    """Store-backed agreement of the ranks of one Communicator.

    Args:
        store: of this Communicator alone (`group_store`).
        rank, size: in the group.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def agree(self, facts: dict[str, Any], timeout_s: float) -> None:
        """Compare `facts` of all ranks; the same error on every rank if they differ or one does not come.

        Raises:
            PeerError: naming the first pair and fact that differ.
            RankTimeout: naming the ranks that did not come within timeout_s.
        """
        mine = json.dumps(facts, sort_keys=True)
        self._store.set(f"facts/{self._rank}", mine)
        deadline = time.monotonic() + timeout_s
        all_facts: list[dict[str, Any]] = []
        for rank in range(self._size):
            key = f"facts/{rank}"
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    missing = [r for r in range(self._size) if not self._store.check([f"facts/{r}"])]
                    raise self.settle(
                        RankTimeout(
                            f"Communicator: ranks {missing} of {self._size} did not come within {timeout_s:g} s; "
                            "making one is collective: all ranks of the group must do it, in the same order"
                        )
                    )
                time.sleep(_POLL_S)
            all_facts.append(json.loads(self._store.get(key)))
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
            RankTimeout: naming the ranks that said nothing within timeout_s; on all that do.
        """
        self._store.set(f"{name}/{self._rank}", json.dumps(mine))
        keys = [f"{name}/{rank}" for rank in range(self._size)]
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank, key in enumerate(keys) if not self._store.check([key])]:
            if time.monotonic() > deadline:
                text = f"Communicator: ranks {missing} of {self._size} said nothing of {name} within {timeout_s:g} s"
                raise self.settle(RankTimeout(text))
            time.sleep(_POLL_S)
        return [json.loads(self._store.get(key)) for key in keys]

    def settle(self, error: ZipcclError) -> ZipcclError:
        """Publish a fatal error and return the one that all ranks raise: the first that was published."""
        mine = json.dumps({"kind": type(error).__name__, "text": str(error)})
        try:
            winner = self._store.compare_set(_ERROR_KEY, "", mine)
        except (RuntimeError, ValueError) as exc:
            return RankTimeout(f"the store of the process group is gone ({exc}); this rank knows only: {error}")
        return _revive(winner)

    def published(self, grace_s: float) -> ZipcclError | None:
        """The fatal error that some rank has published, or publishes within grace_s; None otherwise."""
        deadline = time.monotonic() + grace_s
        try:
            while not self._store.check([_ERROR_KEY]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_S)
            return _revive(self._store.get(_ERROR_KEY))
        except RuntimeError:
            return None

    def backend_store(self, name: str) -> Store:
        """A store in which the process group `name` of this Communicator finds its ranks."""
        return PrefixStore(name, self._store)


def _revive(published: bytes) -> ZipcclError:
    entry = json.loads(published)
    return _KINDS.get(entry["kind"], PeerError)(entry["text"])
