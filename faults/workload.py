"""The calls of a scenario: what each rank puts in, what must come out, and how one call is made and written down."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from conformance import exercise
from conformance.oracle import check_guards, misaligned, poisoned, tensor_of
from conformance.strategies import patterns
from conformance.subject import PremulSum
from faults.ledger import Ledger

POINT_TO_POINT = "batch_isend_irecv"
OPERATIONS = (*exercise.OPERATIONS, *exercise.FURTHER, "barrier")


@dataclass(frozen=True)
class CallSpec:
    """One call.

    Attributes:
        operation: the Communicator's method; batch_isend_irecv is a ring, to the next rank from the one before.
        n: elements a rank puts in; for reduce_scatter, all_to_all and scatter, elements it sends each rank.
        dtype: torch's name.
        kinds: of the words (conformance.strategies), one for all ranks or one a rank.
        op, factor: of reductions.
        root: of broadcast, scatter, gather.
        splits: [i][j] elements that rank i sends rank j, for an uneven all_to_all_single; else empty.
        asynchronous: waited for at the end of the beat, the last first.
    """

    operation: str
    n: int = 9001
    dtype: str = "bfloat16"
    kinds: tuple[str, ...] = ("gaussian",)
    op: str = "sum"
    factor: float = 1.0
    root: int = 0
    splits: tuple[tuple[int, ...], ...] = ()
    asynchronous: bool = False

    @classmethod
    def of(cls, data: dict[str, Any]) -> CallSpec:
        """From a scenario's or a ledger's data."""
        known = dict(data)
        known["kinds"] = tuple(known.get("kinds") or [known.pop("kind", "gaussian")])
        known.pop("kind", None)
        known["splits"] = tuple(tuple(row) for row in known.get("splits", ()))
        return cls(**known)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def kind_of(self, rank: int) -> str:
        """Of the words of one rank."""
        return self.kinds[rank % len(self.kinds)]

    def inputs(self, size: int, seed: str) -> list[np.ndarray]:
        """The patterns of all ranks."""
        if self.operation == "barrier":
            return [np.zeros(0, np.uint16)] * size
        if self.splits:
            totals = [sum(row) for row in self.splits]
        else:
            totals = [self.n * (size if self.operation in exercise.IN_PARTS else 1)] * size
        return [
            patterns(self.kind_of(r), totals[r], r, seed, dtype=self.dtype)  # type: ignore[arg-type]
            for r in range(size)
        ]

    def wanted(self, inputs: Sequence[np.ndarray], rank: int) -> np.ndarray:
        """What must come out on one rank, all outputs one behind the other."""
        if self.operation == "barrier":
            return inputs[rank]
        if self.splits:
            parts = []
            for src, row in enumerate(self.splits):
                begin = sum(row[:rank])
                parts.append(inputs[src][begin : begin + row[rank]])
            return np.concatenate(parts)
        return exercise.wanted(self.operation, inputs, rank, self.op, self.factor, self.root % len(inputs))


def seed_of(scenario_seed: int, beat: str, index: int) -> str:
    """What the inputs of one call depend on: no two calls of a run have the same words."""
    return f"{scenario_seed}/{beat}/{index}"


def sha256_of(*arrays: np.ndarray) -> str:
    """Of the bytes, one array behind the other."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Place:
    """The ranks that call together, as conformance.exercise needs them."""

    rank: int
    members: Sequence[int]
    group: dist.ProcessGroup
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return len(self.members)


class Running:
    """A call that was made, and is to be finished.

    Args:
        communicator: to ask what it did.
        ledger: where "done" goes.
        head: what is common to "call" and "done".
    """

    def __init__(self, communicator: Any, ledger: Ledger, head: dict[str, Any], began: float) -> None:
        self.communicator, self.ledger, self.head, self.began = communicator, ledger, head, began
        self.issued: Any = None
        self.failed: BaseException | None = None

    def finish(self) -> BaseException | None:
        """Wait, write down how it went, and return what it raised, if anything."""
        if self.failed is None and self.issued is not None and self.issued.work is not None:
            try:
                self.issued.work.wait()
            except Exception as exc:
                self.failed = exc
        took_s = round(time.monotonic() - self.began, 6)
        if self.failed is not None:
            error = {"outcome": "error", "error": type(self.failed).__name__, "text": str(self.failed)}
            self.ledger.write("done", **self.head, **error, took_s=took_s, **self._books())
            return self.failed
        outs = self.issued.outs if self.issued is not None else []
        guards = ""
        for out in outs:
            try:
                check_guards(out, "output")
            except AssertionError as exc:
                guards = str(exc)
        output = sha256_of(*(out.tensor.view(torch.uint8).numpy() for out in outs))
        self.ledger.write(
            "done", **self.head, outcome="returned", took_s=took_s, output_sha256=output, guards=guards, **self._books()
        )
        return None

    def _books(self) -> dict[str, Any]:
        """What the Communicator says it did, as far as it has ended its calls."""
        decision, inner = self.communicator.last_decision, self.communicator.inner
        return {
            "decision": None if decision is None else [decision.mode, decision.sequence, decision.reason],
            "arrivals": [[rank, round(late_us, 1)] for rank, late_us in inner.last_arrivals],
            "arrived_last": {str(rank): count for rank, count in inner.arrived_last.items()},
            "stats": inner.stats(),
        }


def start(
    call: CallSpec, place: Place, communicator: Any, ledger: Ledger, beat: str, index: int, sequence: int, seed: str
) -> Running:
    """Make a call; errors are kept for `finish`. Only what is no Exception passes through."""
    inputs = call.inputs(place.world_size, seed)
    head = {"beat": beat, "index": index, "operation": call.operation, "sequence": sequence}
    ledger.write("call", **head, seed=seed, spec=call.as_json(), input_sha256=sha256_of(inputs[place.rank]))
    running = Running(communicator, ledger, head, time.monotonic())
    try:
        if call.operation == "barrier":
            communicator.barrier()
        elif call.splits:
            running.issued = _uneven(call, place, communicator, inputs)
        else:
            op = None
            if call.operation in exercise.REDUCTIONS:
                op = PremulSum(call.factor) if call.op == "premul_sum" else getattr(dist.ReduceOp, call.op.upper())
            running.issued = exercise.issue(
                place,  # type: ignore[arg-type]
                communicator,
                call.operation,
                inputs,
                call.dtype,
                async_op=call.asynchronous,
                root=call.root,
                op=op,
                how=(call.op, call.factor),
            )
    except Exception as exc:
        running.failed = exc
    return running


@dataclass
class _Issued:
    work: Any
    outs: list[Any]


def _uneven(call: CallSpec, place: Place, communicator: Any, inputs: Sequence[np.ndarray]) -> _Issued:
    kind, rank = getattr(torch, call.dtype), place.rank
    receives = [row[rank] for row in call.splits]
    out = poisoned(sum(receives), kind)
    given = misaligned(tensor_of(inputs[rank], kind))
    work = communicator.all_to_all_single(
        out.tensor, given, receives, list(call.splits[rank]), async_op=call.asynchronous
    )
    return _Issued(work, [out])


def altered(call: CallSpec, **changes: Any) -> CallSpec:
    """The call with some fields changed."""
    return replace(call, **changes)
