"""Pareto fronts: what nothing else beats in every respect.

    latency   goodput a GPU against p90 of TTFT and of the time between tokens, over every rate at which a candidate was
              simulated as a whole and kept the SLO
    total     goodput against GPUs

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from baton_experiments.search.planner import Plan, Row

T = TypeVar("T")


class Point(msgspec.Struct, frozen=True):
    """A candidate at one rate. Milliseconds, requests per second."""

    name: str
    gpus: int
    rate: float
    per_gpu: float
    ttft_ms: float
    """p90, as the next."""
    tbt_ms: float
    attainment: float


def pareto(items: Iterable[T], costs: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Those of which no other is as low in every cost and lower in one, by rising costs. Of equals the first."""
    front: list[tuple[tuple[float, ...], T]] = []
    for cost, item in sorted(((costs(item), item) for item in items), key=lambda pair: pair[0]):
        # Those before are no higher in the first cost; only they can beat this one.
        if not any(all(a <= b for a, b in zip(other, cost, strict=True)) for other, _ in front):
            front.append((cost, item))
    return [item for _, item in front]


def points(plan: Plan, share: float) -> list[Point]:
    """All rates that kept the SLO of all candidates that were simulated as a whole."""
    found = []
    for curve in plan.curves:
        if curve.setup.phase != "whole":
            continue
        for o in curve.outcomes:
            if o.rate > 0 and not o.stopped and not o.piled_up and o.good >= share - 1e-9 and o.ttft_ms and o.tbt_ms:
                gpus = curve.setup.candidate.gpus
                found.append(
                    Point(curve.setup.name, gpus, o.rate, o.rate / gpus, o.ttft_ms["p90"], o.tbt_ms["p90"], o.good)
                )
    return found


def latency_front(found: Sequence[Point]) -> list[Point]:
    """Highest goodput a GPU first."""
    return pareto(found, lambda p: (-p.per_gpu, p.ttft_ms, p.tbt_ms))


def total_front(rows: Iterable[Row]) -> list[Row]:
    """Fewest GPUs first."""
    return pareto((row for row in rows if row.goodput > 0), lambda row: (row.gpus, -row.goodput))
