"""Curves: what was found of one set-up over the rates; and prefill and decode, simulated apart, put together.

A request keeps the SLO if it keeps TTFT in the prefill phase and the time between tokens in the decode phase. Where the
phases do not interact, the share that keeps both is the product of the shares, and never more than the smaller one,
that of the phase that limits. What they do to one another (decode that makes prefill wait, bursts that prefill
evens out) only a simulation of the whole shows.

Numbers of workers between simulated ones are taken to be between them, for each worker's share of the rate: a pool
that balances serves at least what its parts would.

Pure; must not know how curves are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from baton_experiments.search.candidate import Candidate, Pool
from baton_experiments.search.rates import Attainment, crossing, neighbours
from baton_experiments.search.run import Outcome, Setup


class Curve(msgspec.Struct, frozen=True):
    """One set-up, at the rates at which it was run."""

    setup: Setup
    goodput: float
    """The highest rate that kept the SLO; 0: none did."""
    outcomes: tuple[Outcome, ...]
    """By rate. The first may be of requests that ran alone (rate 0)."""
    warmup_s: float = 0.0

    @property
    def best(self) -> Outcome | None:
        """At the goodput."""
        return next((o for o in self.outcomes if o.rate == self.goodput and self.goodput > 0), None)

    @property
    def first_miss(self) -> Outcome | None:
        """The lowest rate above the goodput; without a goodput the lowest of all."""
        return next((o for o in self.outcomes if o.rate > self.goodput or self.goodput == 0), None)

    @property
    def alone(self) -> Outcome | None:
        return next((o for o in self.outcomes if o.rate == 0), None)

    @property
    def per_worker(self) -> float:
        """Goodput of each."""
        return self.goodput / sum(pool.workers for pool in self.setup.candidate.pools.values())

    def attainment(self) -> Attainment:
        """By rate in goodputs, whatever was run of it, from one request at a time on."""
        points = [(o.rate / (self.goodput or 1.0), 0.0 if o.piled_up else o.good) for o in self.outcomes]
        if points[0][0] > 0:
            points.append((0.0, points[0][1]))
        return Attainment(points)

    def nearest(self, rate: float) -> Outcome | None:
        """The whole run at the highest rate up to `rate`, else the lowest one."""
        whole = [o for o in self.outcomes if not o.stopped and o.rate > 0]
        return max(
            (o for o in whole if o.rate <= rate * (1 + 1e-9)), key=lambda o: o.rate, default=next(iter(whole), None)
        )


Curves = Mapping[Candidate, Curve]
"""By candidate, phases (candidates with one pool) included."""


class Estimate(msgspec.Struct, frozen=True):
    """What phases that were simulated apart say of a placement. Requests per second, of the whole cluster."""

    goodput: float
    phase_goodput: float
    """Of the phase that is the first to miss, by itself: together they do no better."""
    limited_by: str
    """The role of that phase."""


def estimate(candidate: Candidate, curves: Curves, share: float) -> Estimate | None:
    """None where a phase of it, or a colocated neighbour of it, was not simulated."""
    parts: dict[str, tuple[int, Callable[[float], float]]] = {}
    for role, pool in candidate.pools.items():
        found = _between(role, pool, curves)
        if found is None:
            return None
        parts[role] = pool.workers, found
    goodputs = {role: _highest(attains, workers, share) for role, (workers, attains) in parts.items()}
    limited_by = min(goodputs, key=lambda role: goodputs[role])
    highest = goodputs[limited_by]

    def together(rate: float) -> float:
        kept = 1.0
        for workers, attains in parts.values():
            kept *= attains(rate / workers)
        return kept

    return Estimate(crossing(together, share, 0.0, highest), highest, limited_by)


def _between(role: str, pool: Pool, curves: Curves) -> Callable[[float], float] | None:
    """Attainment by rate per worker.

    Its shape is that of the smallest number, which was run at rates far and near; its goodput, between those around.
    """
    simulated = _simulated(role, pool.tp, curves)
    if not simulated:
        return None
    below, above, weight = neighbours(sorted(simulated), pool.workers)
    goodput = (1 - weight) * simulated[below].per_worker + weight * simulated[above].per_worker
    able = [count for count, curve in simulated.items() if curve.goodput > 0]
    if not goodput or not able:
        return lambda rate: 0.0
    shape = simulated[min(able)].attainment()
    return lambda rate: shape.at(rate / goodput)


def of_pool(role: str, tp: int, curves: Curves) -> list[Curve]:
    """Those of this pool by itself, with any number of workers."""
    return list(_simulated(role, tp, curves).values())


def _simulated(role: str, tp: int, curves: Curves) -> dict[int, Curve]:
    """By number of workers, of those that have only this pool."""
    found = {}
    for candidate, curve in curves.items():
        pools = candidate.pools
        if list(pools) == [role] and pools[role].tp == tp:
            found[pools[role].workers] = curve
    return found


def _highest(attains: Callable[[float], float], workers: int, share: float) -> float:
    """The rate of all workers up to which the share is attained."""
    high = 1e-3
    while attains(high) > 0:
        high *= 2
    return crossing(attains, share, 0.0, high) * workers


def closest(candidate: Candidate, role: str, curves: Curves) -> Curve | None:
    """The simulated curve of its pool of this role with the most workers up to its number."""
    simulated = _simulated(role, candidate.pools[role].tp, curves)
    counts: Sequence[int] = [count for count in sorted(simulated) if count <= candidate.pools[role].workers]
    return simulated[counts[-1]] if counts else None
