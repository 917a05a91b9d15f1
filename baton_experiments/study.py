"""Study: the records of an experiment, grouped by setting and rate, with what every statistic of them shares.

Pure. Must not know how results are shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from baton_experiments.bootstrap import FEWEST_BEYOND, Bootstrap, Interval
from baton_experiments.columns import Columns, Floats, Ints
from baton_experiments.goodput import (
    DEFINITIONS,
    SLOWDOWNS,
    LinearReference,
    Reference,
    crossings,
    goodput,
    slowdowns,
    splitwise_slack,
)
from baton_experiments.placement import num_workers
from baton_experiments.records import RequestRecord, Run, Setting, Slo, Steps

MAIN = "distserve"
"""The definition that the verdict goes by."""
SHARE = 0.9
"""Of the requests that must meet the SLO, for the verdict."""
_NEVER = 1e9
"""The slowdown of a request that failed, where arithmetic needs a number."""


class GoodputEstimate(NamedTuple):
    rate: float
    at_least: bool
    interval: tuple[float, float | None] | None
    """95 %. An end of None: some replicates keep the SLO at every rate that was tried. None: not to be told."""
    replicates: Floats
    """Infinite where the SLO is never missed."""


class Study:
    """`records`: of any settings, rates and seeds; warm-up is left out. See `summary.summarize` for the arguments."""

    def __init__(
        self,
        records: Iterable[RequestRecord],
        slo: Slo,
        *,
        steps: Steps | None = None,
        kv_blocks: Mapping[str, int] | None = None,
        reference: Reference | None = None,
        replicates: int = 1000,
    ):
        groups: dict[tuple[Setting, float], list[RequestRecord]] = defaultdict(list)
        played: dict[tuple[float, int], set[int]] = defaultdict(set)
        self.windows: dict[Run, tuple[float, float]] = {}
        """Between the first and the last measured arrival of each run, on its router's clock."""
        self.num_warmup = 0
        self.needed_tokens: dict[Run, int] = defaultdict(int)
        """Of each run, warm-up included: what its steps compute at least where no prefix cache has any KV."""
        for record in records:
            self.needed_tokens[record.run] += record.prompt_tokens + max(record.output_tokens - 1, 0)
            if record.warmup:
                self.num_warmup += 1
                continue
            groups[record.run.setting, record.rate].append(record)
            played[record.rate, record.seed].add(record.index)
            if record.received_s is not None:
                first, last = self.windows.get(record.run, (record.received_s, record.received_s))
                self.windows[record.run] = min(first, record.received_s), max(last, record.received_s)
        self.slo = slo
        self.steps: Steps = steps or {}
        self.kv_blocks = dict(kv_blocks or {})
        self.records = dict(sorted(groups.items(), key=lambda item: (_order(item[0][0]), item[0][1])))
        """By setting and rate."""
        self.columns = {key: Columns.of(group) for key, group in self.records.items()}
        self.settings = list(dict.fromkeys(setting for setting, _ in self.columns))
        self.bootstrap = Bootstrap(played, replicates=replicates)
        self.units: dict[tuple[Setting, float], Ints] = {
            (setting, rate): self.bootstrap.units(rate, c.seed, c.index) for (setting, rate), c in self.columns.items()
        }
        sizes = {setting: num_workers(setting.placement) for setting in self.settings}
        self.is_unequal = len(set(sizes.values())) > 1
        """Whether placements have different numbers of workers: then goodputs are compared per worker."""
        self._shared_by = sizes if self.is_unequal else dict.fromkeys(sizes, 1)
        self._given_reference = reference
        self.goodput_of = cache(self._goodput_of)
        self.share_replicates = cache(self._share_replicates)
        self.quantile_replicates = cache(self._quantile_replicates)

    # --- what there is ------------------------------------------------------------------------------

    def rates(self, setting: Setting) -> list[float]:
        return [rate for other, rate in self.columns if other == setting]

    def common_rates(self, *settings: Setting) -> list[float]:
        """Of all of them, in order."""
        shared = set.intersection(*(set(self.rates(setting)) for setting in settings))
        return sorted(shared)

    def per_worker(self, setting: Setting, rate: float) -> float:
        """`rate` as it is compared with those of other settings: per worker where they are of unequal size."""
        return rate / self._shared_by[setting]

    def highest_common(self, *settings: Setting) -> float:
        """Up to which rate (`per_worker`) each was tried: what one does beyond tells nothing about the others."""
        return min(self.per_worker(setting, max(self.rates(setting))) for setting in settings)

    @cached_property
    def reference(self) -> Reference | None:
        """The one given, or an estimate over all placements at the lowest rate."""
        if self._given_reference is not None or not self.columns:
            return self._given_reference
        lowest = min(rate for _, rate in self.columns)
        source = "estimated from the fastest requests of this experiment at its lowest rate"
        return LinearReference.estimated([c for (_, rate), c in self.columns.items() if rate == lowest], source=source)

    # --- attainment and goodput ---------------------------------------------------------------------

    def kept(self, setting: Setting, rate: float, definition: str) -> float:
        """The share of requests that meet the SLO; for `splitwise` the least slack of the nine, kept if >= 1."""
        columns, good = self.columns[setting, rate], DEFINITIONS[definition].good
        if good is not None:
            return float(good(columns, self.slo).mean())
        if self.reference is None:
            return float("nan")
        return min(splitwise_slack(columns, self.reference).values())

    def _share_replicates(self, setting: Setting, rate: float, definition: str) -> Floats:
        """`kept` in each replicate."""
        columns, good, units = self.columns[setting, rate], DEFINITIONS[definition].good, self.units[setting, rate]
        if good is not None:
            return self.bootstrap.means([good(columns, self.slo)], units)[:, 0]
        if self.reference is None:
            return np.full(len(self.bootstrap.weights), np.nan)
        failed = np.flatnonzero(~columns.done)
        rows = {
            "ttft": np.flatnonzero(columns.done),
            "e2e": np.flatnonzero(columns.done),
            "tbt": np.flatnonzero(columns.done & (columns.num_gaps() > 0)),
        }
        least = np.full(len(self.bootstrap.weights), np.inf)
        for name, values in slowdowns(columns, self.reference).items():
            values = np.concatenate([values, np.full(len(failed), _NEVER)])
            limits = SLOWDOWNS[name]
            found = self.bootstrap.quantiles(
                values, units[np.concatenate([rows[name], failed])], [p / 100 for p in limits]
            )
            for row, limit in zip(found, limits.values(), strict=True):
                least = np.fmin(least, limit / np.maximum(row, 1e-12))
        return np.where(np.isinf(least), np.nan, least)

    def _goodput_of(self, setting: Setting, definition: str = MAIN, share: float = SHARE) -> GoodputEstimate:
        threshold = 1.0 if DEFINITIONS[definition].good is None else share
        rates = self.rates(setting)
        point = goodput({rate: self.kept(setting, rate, definition) for rate in rates}, threshold)
        table = np.column_stack([self.share_replicates(setting, rate, definition) for rate in rates])
        replicates = crossings(np.array(rates), table, threshold)
        interval: tuple[float, float | None] | None = None
        if self.bootstrap.tells:
            ordered = np.sort(replicates)  # percentiles by rank: no arithmetic between infinities
            low, high = (float(ordered[round(q * (len(ordered) - 1))]) for q in self.bootstrap.ends)
            interval = (min(low, rates[-1]), None if np.isinf(high) else high)
        return GoodputEstimate(point.rate, point.at_least, interval, replicates)

    def reach(self, setting: Setting, definition: str = MAIN) -> float:
        """Its goodput, as it is compared with others' (`per_worker`)."""
        return self.per_worker(setting, self.goodput_of(setting, definition).rate)

    def goodput_difference(self, a: Setting, b: Setting, definition: str = MAIN, share: float = SHARE) -> Floats:
        """Replicates of the `reach` of `a` less that of `b`, on the same draws, none beyond the rates that both ran."""
        top = self.highest_common(a, b)
        one, other = (
            np.minimum(self.goodput_of(s, definition, share).replicates / self._shared_by[s], top) for s in (a, b)
        )
        difference: Floats = one - other
        return difference

    # --- latencies ----------------------------------------------------------------------------------

    def _quantile_replicates(self, setting: Setting, rate: float, name: str, share: float) -> Floats:
        values, rows = self.columns[setting, rate].select(name)
        found: Floats = self.bootstrap.quantiles(values, self.units[setting, rate][rows], [share])[0]
        return found

    def quantile(self, setting: Setting, rate: float, name: str, share: float) -> float | None:
        """Of `ttft`, `tbt`, `tpot` or `latency`, in ms; None where there is no value."""
        values, _ = self.columns[setting, rate].select(name)
        return float(np.quantile(values, share)) if values.size else None

    def quantile_interval(self, setting: Setting, rate: float, name: str, share: float) -> Interval | None:
        """95 %, in ms; None where too few values lie beyond it."""
        if not self._tells(setting, rate, name, share):
            return None
        return self.bootstrap.interval(self.quantile_replicates(setting, rate, name, share))

    def _tells(self, setting: Setting, rate: float, name: str, share: float) -> bool:
        return self.columns[setting, rate].select(name)[0].size * (1 - share) >= FEWEST_BEYOND - 1e-9

    def quantile_difference(self, a: Setting, b: Setting, rate: float, name: str, share: float) -> Interval | None:
        """95 % interval of that of `a` less that of `b`, on the same draws."""
        if not all(self._tells(setting, rate, name, share) for setting in (a, b)):
            return None
        one, other = (self.quantile_replicates(s, rate, name, share) for s in (a, b))
        return self.bootstrap.interval(one - other)

    # --- the best chunk size ------------------------------------------------------------------------

    @cached_property
    def best(self) -> dict[tuple[str, str], Setting]:
        """Of each (engine, placement) its setting of the highest goodput, then of the shortest p99 gap at the highest
        rate that all its settings ran at; equal ones by the smaller chunk."""
        choices: dict[tuple[str, str], list[Setting]] = defaultdict(list)
        for setting in self.settings:
            choices[setting.engine, setting.placement].append(setting)
        return {key: min(settings, key=lambda s: self.rank(s, settings)) for key, settings in choices.items()}

    def rank(self, setting: Setting, rivals: Sequence[Setting]) -> tuple[Any, ...]:
        """The least is the best, among settings of one engine."""
        found = self.goodput_of(setting)
        common = self.common_rates(*rivals)
        pause = self.quantile(setting, common[-1], "tbt", 0.99) if common else None
        # Where all miss the SLO everywhere, the one that misses it least.
        share = self.kept(setting, common[0], MAIN) if common and found.rate == 0 else 0.0
        return (-self.reach(setting), -share, float("inf") if pause is None else pause, setting.chunk_tokens or 0)


def _order(setting: Setting) -> tuple[str, str, int]:
    return setting.engine, setting.placement, setting.chunk_tokens or 0
