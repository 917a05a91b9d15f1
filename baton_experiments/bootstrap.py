"""Bootstrap: how far a figure may be off, from the seeds and the requests of an experiment.

Each replicate draws units with replacement. With `MANY_SEEDS` or more, a unit is a seed. With fewer, seeds are drawn,
and within each drawn one blocks of consecutive requests: neighbours share a queue, so a request by itself is no
independent draw (Künsch's block bootstrap, blocks of about n^(1/3)). That errs on the wide side, unless
seeds differ far more than the blocks of one do. With one seed the blocks are all there is: the interval then tells
nothing about other seeds, and `method` says so.

Placements, chunk sizes and rates that were given the same work share the draws: a replicate holds the same requests
for all of them, so differences are paired. Intervals are wider than the replicates' middle 95 %, as units are few
(`_expanded`).

Pure: random numbers come from a seed. Must not know what is measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from scipy import stats

from baton_experiments.columns import Bools, Floats, Ints

Method = Literal["seeds", "seeds, and requests within each", "requests of one seed"]
Interval = tuple[float, float]

MANY_SEEDS = 20
"""Intervals of fewer draws are too narrow: of normal ones, 5 draws hold the mean in 85 % of cases and 20 in 93 %."""
FEWEST_UNITS, FEWEST_REQUESTS = 6, 20
"""Fewer units, or fewer requests at a rate, tell no interval: replicates of a handful of draws agree by chance."""
FEWEST_BEYOND = 5
"""Values beyond a quantile that are the least for an interval of it: fewer, and replicates only repeat the largest."""
MAX_BLOCKS = 100
"""Per seed: more say nothing new and cost time."""
LEVEL = 95
"""Percent, of every interval."""
_BINS = 128


def blocks_of(num_requests: int) -> int:
    """Blocks of consecutive requests that a run of `num_requests` is cut into."""
    length = max(1.0, math.pow(num_requests, 1 / 3))
    return min(MAX_BLOCKS, max(1, round(num_requests / length)))


class Bootstrap:
    """`runs`: the indices of the requests that were played, by (rate, seed), over all settings."""

    def __init__(self, runs: Mapping[tuple[float, int], Iterable[int]], *, replicates: int = 1000, seed: int = 0):
        self.seeds = sorted({seed for _, seed in runs})
        self._indices = {key: np.unique(np.fromiter(indices, np.int64)) for key, indices in runs.items()}
        most = max((len(indices) for indices in self._indices.values()), default=0)
        self.method: Method
        rng = np.random.default_rng(seed)
        num_seeds = len(self.seeds)
        even = np.full(max(num_seeds, 1), 1 / max(num_seeds, 1))
        drawn = rng.multinomial(num_seeds, even, size=replicates)
        if num_seeds >= MANY_SEEDS:
            self.method, self._blocks = "seeds", 1
            self.weights: Floats = drawn.astype(np.float64)
        else:
            self.method = "seeds, and requests within each" if num_seeds > 1 else "requests of one seed"
            self._blocks = blocks_of(most)
            within = rng.multinomial(drawn * self._blocks, np.full(self._blocks, 1 / self._blocks))
            self.weights = within.reshape(replicates, -1).astype(np.float64)
        self.num_units = num_seeds * self._blocks
        by_rate: dict[float, int] = defaultdict(int)
        for (rate, _), indices in self._indices.items():
            by_rate[rate] += len(indices)
        self.tells = self.num_units >= FEWEST_UNITS and min(by_rate.values(), default=0) >= FEWEST_REQUESTS
        """Whether there are enough of both for intervals."""
        self.ends = _expanded(max(self.num_units, 2))
        """Quantiles of replicates between which a 95 % interval lies."""

    def units(self, rate: float, seeds: Ints, indices: Ints) -> Ints:
        """The unit of each request of a point."""
        units = np.zeros(len(seeds), dtype=np.int64)
        for number, seed in enumerate(self.seeds):
            mine = seeds == seed
            if mine.any():
                known = self._indices[rate, seed]
                rank = np.searchsorted(known, indices[mine])
                units[mine] = number * self._blocks + rank * self._blocks // len(known)
        return units

    def means(self, rows: Sequence[Floats | Bools], units: Ints) -> Floats:
        """[replicates, rows] means of each of `rows`; NaN where a replicate holds none of the requests."""
        sums = [np.bincount(units, weights=row, minlength=self.num_units) for row in rows]
        drawn = self.weights @ np.column_stack([self._counts(units), *sums])
        total = drawn[:, :1]
        return np.where(total > 0, drawn[:, 1:] / np.maximum(total, 1e-12), np.nan)

    def quantiles(self, values: Floats, units: Ints, shares: Sequence[float]) -> Floats:
        """[shares, replicates] quantiles, read from a histogram whose bins are the values' own quantiles."""
        if not values.size:
            return np.full((len(shares), len(self.weights)), np.nan)
        tail = 1 - np.geomspace(0.2, 1e-4, _BINS // 2)
        edges = np.unique(np.quantile(values, np.concatenate([np.linspace(0, 1, _BINS), tail])))
        if len(edges) == 1:
            return np.where(self.weights @ self._counts(units) > 0, edges[0], np.nan)[None].repeat(len(shares), 0)
        # Bin i holds what is above edge i-1 and not above edge i: then the share up to an edge is exact.
        bins = np.searchsorted(edges, values)
        table = np.bincount(units * len(edges) + bins, minlength=self.num_units * len(edges))
        upto = np.cumsum(self.weights @ table.reshape(self.num_units, len(edges)).astype(np.float64), axis=1)
        total = upto[:, -1]
        found = np.empty((len(shares), len(self.weights)))
        for row, share in enumerate(shares):
            at = share * total
            right = np.minimum((upto < at[:, None] - 1e-9).sum(axis=1), len(edges) - 1)
            left = np.maximum(right - 1, 0)
            before = np.where(right > 0, np.take_along_axis(upto, left[:, None], 1)[:, 0], 0.0)
            inside = np.take_along_axis(upto, right[:, None], 1)[:, 0] - before
            part = np.clip((at - before) / np.maximum(inside, 1e-12), 0.0, 1.0)
            value = edges[left] + part * (edges[right] - edges[left])
            found[row] = np.where(total > 0, value, np.nan)
        return found

    def interval(self, replicates: Floats) -> Interval | None:
        """95 %, from a figure's replicates; None where there are too few units to tell."""
        there = replicates[~np.isnan(replicates)]
        if not self.tells or there.size < len(replicates) / 2:
            return None
        low, high = np.quantile(there, self.ends)
        return float(low), float(high)

    def _counts(self, units: Ints) -> Floats:
        return np.bincount(units, minlength=self.num_units).astype(np.float64)


def _expanded(n: int) -> tuple[float, float]:
    """The replicates of n units spread too little, by sqrt((n - 1) / n), and have the normal distribution's tails where
    Student's are due; so quantiles further out are taken (the expanded percentile interval of Hesterberg, What Teachers
    Should Know About the Bootstrap, 2015)."""
    z = math.sqrt(n / (n - 1)) * float(stats.t.ppf((100 + LEVEL) / 200, n - 1))
    high = float(stats.norm.cdf(z))
    return 1 - high, high


def excludes_zero(interval: Interval | None) -> bool:
    return interval is not None and (interval[0] > 0 or interval[1] < 0)
