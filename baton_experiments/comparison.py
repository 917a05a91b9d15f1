"""Comparison: two placements under one objective, and whether their difference can be told.

A difference is *told* where the 95 % interval of the paired difference excludes zero and it is no trifle. Must not know
which objective decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from baton_experiments.bootstrap import Interval, excludes_zero
from baton_experiments.records import Setting
from baton_experiments.study import MAIN, Study
from baton_experiments.words import per_second

TRIFLE = 0.02
"""Of the larger value: a smaller difference is not told, however certain it is."""

Objective = Literal["goodput", "attainment", "tbt_p99", "tbt_max", "ttft_p50", "ttft_p99"]
QUANTILES: dict[Objective, tuple[str, float]] = {
    "tbt_p99": ("tbt", 0.99),
    "tbt_max": ("tbt", 1.0),
    "ttft_p50": ("ttft", 0.5),
    "ttft_p99": ("ttft", 0.99),
}
"""Of latencies: what is measured, and which quantile of it."""
_UNITS: dict[Objective, str] = {"goodput": "requests/s", "attainment": "share"}


class Comparison(msgspec.Struct, frozen=True):
    """Two placements under one objective."""

    objective: Objective
    unit: str
    engine: str
    rate: float | None
    """None: over all rates."""
    placements: tuple[str, str]
    values: tuple[float | None, float | None]
    difference: float | None
    """The first's less the second's."""
    interval: Interval | None
    """95 %, of the difference."""
    better: str | None
    """None: no difference can be told."""


def compare(study: Study, objective: Objective, a: Setting, b: Setting, rate: float | None = None) -> Comparison:
    """`rate`: of all objectives but `goodput`."""
    values: tuple[float | None, float | None]
    interval: Interval | None
    if objective == "goodput":
        values = study.reach(a), study.reach(b)
        interval = study.bootstrap.interval(study.goodput_difference(a, b))
    else:
        assert rate is not None, "of a rate"
        if objective == "attainment":
            values = study.kept(a, rate, MAIN), study.kept(b, rate, MAIN)
            one, other = (study.share_replicates(s, rate, MAIN) for s in (a, b))
            interval = study.bootstrap.interval(one - other)
        else:
            name, share = QUANTILES[objective]
            values = study.quantile(a, rate, name, share), study.quantile(b, rate, name, share)
            # A maximum cannot be resampled: replicates never exceed it.
            interval = None if share == 1.0 or None in values else study.quantile_difference(a, b, rate, name, share)
    difference = None if values[0] is None or values[1] is None else values[0] - values[1]
    better = None
    if difference is not None and is_told(difference, interval, values):
        more_is_better = objective in ("goodput", "attainment")
        better = (a if (difference > 0) == more_is_better else b).placement
    return Comparison(
        objective,
        unit_of(study, objective),
        a.engine if a.engine == b.engine else f"{a.engine} | {b.engine}",
        rate,
        (a.placement, b.placement),
        values,
        difference,
        interval,
        better,
    )


def reach_text(study: Study, setting: Setting) -> str:
    """`1.4/s`, or `2.8/s (1.4/s per worker)`."""
    rate = study.goodput_of(setting).rate
    return per_second(rate) + (f" ({per_second(study.reach(setting))} per worker)" if study.is_unequal else "")


def unit_of(study: Study, objective: Objective) -> str:
    """Of what `compare` tells; goodputs of placements of unequal size are compared per worker."""
    unit = _UNITS.get(objective, "ms")
    return f"{unit} per worker" if objective == "goodput" and study.is_unequal else unit


def is_told(difference: float, interval: Interval | None, values: Iterable[float | None]) -> bool:
    if not excludes_zero(interval):
        return False
    assert interval is not None
    same_side = (interval[0] > 0) == (difference > 0)
    return same_side and abs(difference) > TRIFLE * max(abs(v or 0.0) for v in values)
