"""Measures, when a Communicator is made, from which size on coding pays on its link: "auto" on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..policy.threshold import NEVER_BYTES, PROBED_BYTES, threshold_bytes
from .call import Call
from .exchange import Exchange
from .transport import let_others
from .work import wait_for

ROUNDS = 3
SIGMA = 0.02
KINDS = ("gather", "all_to_all", "reduce")


def probe(
    exchange: Exchange,
    calls: Callable[[str, torch.Tensor, torch.Tensor], Any],
    forget: Callable[[], None],
    device: torch.device,
) -> None:
    """Time calls of each kind, coded and not, until coding pays, and set the exchange's thresholds alike on all ranks.

    Collective. Takes room for twice as many messages of the largest size probed as there are ranks, while they are made
    for four times as many, and lets it go.

    Args:
        calls: (kind, out, words) → the Work of a call of that kind; out has ranks times the words of a message, and
            words the room for what the kind takes.
        forget: called when the same calls go another way from now on.
        device: where.
    """
    for kind in KINDS:
        times: dict[int, list[tuple[float, float]]] = {}
        for n_bytes in _sizes(exchange.policy.min_bytes):
            n = n_bytes // 2 * (exchange.size if kind != "gather" else 1)
            words = (torch.randn(n, device=device) * SIGMA).to(torch.bfloat16)
            out = torch.empty(n_bytes // 2 * exchange.size, dtype=torch.bfloat16, device=device)
            mine = []
            for threshold in (NEVER_BYTES, 0):
                exchange.thresholds[kind] = threshold
                forget()
                rounds = [_time_us(exchange, lambda: calls(kind, out, words), device) for _ in range(ROUNDS + 1)]  # noqa: B023
                mine.append(statistics.median(rounds[1:]))
            shared = exchange.board.share(f"probe/{kind}/{n_bytes}", mine, exchange.policy.timeout_s)
            times[n_bytes] = [(uncoded, coded) for uncoded, coded in shared]
            if threshold_bytes({n_bytes: times[n_bytes]}) != NEVER_BYTES:
                break  # it pays from here on
        exchange.thresholds[kind] = max(threshold_bytes(times), exchange.policy.min_bytes)
    exchange.submit(last := Call("barrier"))
    wait_for([last])  # nothing is under way after it
    exchange.forget()
    forget()
    for pipeline in exchange.pipelines.values():
        pipeline.pool.close()


def _sizes(least_bytes: int) -> Iterable[int]:
    """Those that matter; the largest if smaller messages are never coded: from there on it is taken for the rest."""
    return [n for n in PROBED_BYTES if n >= least_bytes] or PROBED_BYTES[-1:]


def _time_us(exchange: Exchange, call: Callable[[], Any], device: torch.device) -> float:
    """From the call until the device is done, microseconds.

    Raises:
        ZipcclError: it failed, or is not done by the deadline.
    """
    clock = exchange.pipelines[device.type].device
    began = time.perf_counter()
    call().wait()
    done = clock.now()
    deadline = time.monotonic() + exchange.policy.timeout_s
    while not done.query():  # not exchange.poll: what peers tell is for whoever carries calls through
        exchange.check_open("probe")
        if time.monotonic() > deadline:
            raise exchange.transport_failed("probe", RuntimeError("timed out"), exchange.peers)
        let_others()
    return (time.perf_counter() - began) * 1e6
