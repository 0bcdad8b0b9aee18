"""Random scenarios over all families: each a function of a seed and a number, and what must then hold worked out."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.strategies import rng_of
from faults.kinds.imbalance import MATRICES
from faults.layout import FIELDS
from faults.workload import OPERATIONS

FAMILIES = ("slow_rank", "load_imbalance", "escapes", "corrupt_frame", "dead_rank", "disagreement")
_KINDS_OF_WORDS = ("gaussian", "all_patterns", "zeros", "nan_payloads", "heavy_tail", "two_gaussians")
_ESCAPES = (
    *("escapes_none", "escapes_one_first", "escapes_one_last", "escapes_block_edge", "escapes_at_stored_rule"),
    *("escapes_over_stored_rule", "escapes_all", *_KINDS_OF_WORDS),
)
_GATHER = "all_gather_into_tensor"


class _Draw:
    """Choices by one generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def one(self, *choices: Any) -> Any:
        """One of them."""
        return choices[int(self.rng.integers(len(choices)))]

    def between(self, low: int, high: int) -> int:
        """An integer, both ends included."""
        return int(self.rng.integers(low, high + 1))

    def calls(self, count: int) -> list[dict[str, Any]]:
        """Any operations but messages between two ranks and barriers."""
        found = []
        for _ in range(count):
            operation = self.one(*[o for o in OPERATIONS if o not in ("batch_isend_irecv", "barrier")])
            call = {"operation": operation, "n": self.between(1, 12000), "kind": self.one(*_KINDS_OF_WORDS)}
            call["dtype"] = self.one("bfloat16", "bfloat16", "float32")
            if operation in ("reduce_scatter_tensor", "all_reduce"):
                call["op"] = self.one("sum", "avg", "premul_sum")
            if operation in ("broadcast", "scatter", "gather"):
                call["root"] = self.between(0, 1)
            found.append(call)
        return found

    def policy(self) -> dict[str, Any]:
        """Coded or not, with a phase two or without."""
        return {
            "compress": self.one("always", "always", "never", "auto"),
            "min_bytes": 8192,
            "prefix_percent": self.one(0.0, 3.0, 10.0),
            "codebook": self.one("fitted", "gaussian"),
        }


def random_scenario(seed: int, number: int) -> dict[str, Any]:
    """Scenario `number` of a soak, as plain data; the same for the same arguments, on every machine."""
    d = _Draw(rng_of("soak", seed, number))
    family = FAMILIES[number % len(FAMILIES)]
    scenario = {
        "id": f"soak_{seed}_{number}",
        "family": family,
        "summary": f"drawn by seed {seed}, number {number}",
        "seed": d.between(0, 1 << 30),
        "world_size": d.between(2, 4),
        "deadline_s": 8,
    }
    return {**scenario, **globals()[f"_{family}"](d, scenario["world_size"])}


def _correct() -> dict[str, Any]:
    return {"ranks": ["correct"], "then": "same_communicator"}


def _error(ranks: list[str], kinds: list[str], names: list[str], calls: list[int], then: str) -> dict[str, Any]:
    return {"ranks": ranks, "error": {"kinds": kinds, "names": names, "calls": calls}, "then": then}


def _slow_rank(d: _Draw, size: int) -> dict[str, Any]:
    """Late before or inside a call, under the limit: right bits, and the others see it."""
    calls = [{**call, "operation": _GATHER} for call in d.calls(d.between(2, 4))]
    which = d.between(0, len(calls) - 1)
    fault = {
        "fault": "delay",
        "rank": d.between(0, size - 1),
        "phase": d.one("before", "issue", "encode", "send", "receive", "decode", "verdict"),
        "operation": _GATHER,
        "sequence": which,
        "args": {"ms": d.between(150, 400), "shape": "constant"},
    }
    return {"policy": d.policy(), "calls": calls, "faults": [fault], "expect": _correct()}


def _load_imbalance(d: _Draw, size: int) -> dict[str, Any]:
    """Uneven bytes of words of any kind."""
    call = {"operation": "all_to_all_single", "splits": [[500] * size] * size, "kind": d.one(*_KINDS_OF_WORDS)}
    call["dtype"] = d.one("bfloat16", "float32")
    faults = [
        {
            "fault": "imbalance",
            "rank": "all",
            "phase": "call",
            "operation": "all_to_all_single",
            "sequence": i,
            "args": {"matrix": d.one(*MATRICES), "words": d.between(1, 6000)},
        }
        for i in range(2)
    ]
    return {"policy": d.policy(), "calls": [call] * 2, "faults": faults, "expect": _correct()}


def _escapes(d: _Draw, size: int) -> dict[str, Any]:
    """Words that the codebook does not hold, for some of the calls."""
    calls = [{"operation": _GATHER, "n": d.between(1, 20000)} for _ in range(d.between(1, 4))]
    touched = [i for i in range(len(calls)) if d.one(True, False)] or [0]
    policy = {"compress": "always", "sigma": 0.02, "prefix_percent": d.one(0.0, 3.0, 10.0)}
    fault = {"fault": "escapes", "rank": "all", "phase": "call", "operation": _GATHER, "sequence": touched}
    fault["args"] = {"kind": d.one(*_ESCAPES)}
    return {"policy": policy, "calls": calls, "faults": [fault], "expect": _correct()}


def _corrupt_frame(d: _Draw, size: int) -> dict[str, Any]:
    """One message damaged; what must hold depends on where, and on the policy."""
    src = d.between(0, size - 1)
    dst = d.one(*[r for r in range(size) if r != src])
    compress, verify = d.one("always", "always", "never"), d.one("wait", "wait", "late")
    retransmit = verify == "wait" and d.one(True, False)
    calls = [{"operation": _GATHER, "n": 9001}] * 4
    coded = compress == "always"
    kind = d.one("flip", "flip", "flip", "truncate", "duplicate", "stale")
    phase = d.one("send", "receive")
    args: dict[str, Any] = {}
    in_envelope = False
    if kind == "flip":
        fields = [f for f in FIELDS if (f == "elements") != coded or f.startswith("envelope.")]
        args = {"field": d.one(*[f for f in fields if f not in ("dynamic", "directory.reserved")])}
        in_envelope = args["field"].startswith("envelope.")
    elif kind == "truncate":
        args = {"keep_percent": [20, 60]}
    elif kind == "stale":
        args = {"what": d.one("message", "frame"), "back": 1}
        in_envelope = args["what"] == "message"
    fault = {"fault": kind, "phase": phase, "operation": _GATHER, "sequence": 1, "args": args}
    fault |= {"rank": src, "peer": dst} if phase == "send" else {"rank": dst, "peer": src}
    fatal = in_envelope and coded  # its phase two has no size to believe
    if verify == "late" and fatal:
        # Raised where it is found, and by the others then or with the next call: which of the two is not promised. Take
        # the promise that is.
        verify = "wait"
    if retransmit and not fatal:
        expect = _correct()
    else:
        late = verify == "late"
        then = "new_group" if fatal else "same_communicator"
        kinds = ["CorruptFrame", "TruncatedFrame", "UnsupportedFrame"]
        expect = _error(["error"], kinds, [f"from rank {src} to rank {dst}"], [2 if late else 1], then)
        if late:
            expect["undefined"] = [1]
    policy = {"compress": compress, "verify": verify, "retransmit": bool(retransmit), "prefix_percent": 3.0}
    return {"policy": policy, "calls": calls, "faults": [fault], "expect": expect}


def _dead_rank(d: _Draw, size: int) -> dict[str, Any]:
    """One rank leaves, or fails, at any phase."""
    calls = [{**call, "operation": d.one(_GATHER, "reduce_scatter_tensor")} for call in d.calls(4)]
    calls = [{k: v for k, v in call.items() if k not in ("op", "root")} for call in calls]
    for call in calls:
        call["n"] = max(call["n"], 64)
    rank, which = d.between(0, size - 1), d.between(1, 2)
    kind, args, how = d.one(
        ("signal", {"signal": "SIGKILL"}, "SIGKILL"),
        ("signal", {"signal": "SIGABRT"}, "SIGABRT"),
        ("exit", {"code": 0}, "exit code 0"),
        ("exit", {"code": 3}, "exit code 3"),
        ("raise_error", {"error": "MemoryError"}, ""),
    )
    phase = d.one("before", "issue", "encode", "send", "receive", "decode", "verdict", "reduce", "after")
    names = [f"rank {rank}"]
    if kind == "raise_error":
        how = "exit code 1" if phase in ("before", "issue", "after") else ""
        names = names if how else [f"rank {rank} failed", "MemoryError"]
    ranks = [how if how and r == rank else "error" for r in range(size)]
    fails_at = which + 1 if phase == "after" or (phase == "reduce" and how) else which
    expect = _error(ranks, ["PeerError"], names, [fails_at], "new_group")
    if phase == "reduce" and not how:  # the others have their sums by then, and learn of it at the next call
        del expect["error"]["calls"]
    operation = calls[which]["operation"]
    fault = {"fault": kind, "rank": rank, "phase": phase, "operation": operation, "sequence": which, "args": args}
    return {"policy": d.policy(), "calls": calls, "faults": [fault], "expect": expect, "deadline_s": 4}


def _disagreement(d: _Draw, size: int) -> dict[str, Any]:
    """One rank has another policy, or calls otherwise."""
    rank = d.between(1, size - 1)
    if d.one(True, False):
        field, value = d.one(
            ("compress", "never"), ("min_bytes", 1 + d.between(0, 1 << 20)), ("verify", "late"), ("timeout_s", 7.5)
        )
        fault: dict[str, Any] = {"fault": "policy", "rank": rank, "phase": "make"}
        fault["args"] = {"field": field, "value": value}
        expect = _error(["error"], ["PeerError"], ["policy"], [0], "same_communicator")
        del expect["error"]["calls"]
        return {"calls": d.calls(2), "faults": [fault], "expect": expect}
    field, value, operation = d.one(
        ("dtype", "float32", _GATHER),
        ("n", d.between(1, 40), _GATHER),
        ("n", -1, "all_reduce"),
        ("n", d.between(1, 9), "reduce_scatter_tensor"),
        ("op", "avg", "all_reduce"),
        ("operation", _GATHER, "reduce_scatter_tensor"),
    )
    calls = [{"operation": operation, "n": d.between(50, 9000)}] * 3
    fault = {"fault": "arguments", "rank": rank, "phase": "call", "operation": operation, "sequence": 1}
    fault["args"] = {"field": field, "value": value}
    expect = _error(["error"], ["PeerError"], [f"rank {rank}"], [1], "same_communicator")
    return {"policy": d.policy(), "calls": calls, "faults": [fault], "expect": expect}
