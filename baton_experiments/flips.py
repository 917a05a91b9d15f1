"""Where the answer flips: the rate, or the SLO, from which on another placement is better. Pure.

The same requests are judged by limits from an eighth to eight times those given, so nothing is run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from baton_experiments.columns import Floats
from baton_experiments.comparison import compare, is_told
from baton_experiments.goodput import crossings
from baton_experiments.records import Setting
from baton_experiments.study import SHARE, Study
from baton_experiments.words import enumerated, limit_text, per_second

SCALES = tuple(float(2 ** (k / 4)) for k in range(-12, 13))
"""Of the SLO: from an eighth to eight times."""
_LOWEST = "an eighth"
Axis = Literal["slo", "ttft", "tbt"]


class Flip(msgspec.Struct, frozen=True):
    """Where another placement begins to be better."""

    axis: str
    """`rate`, or which limits of the SLO are scaled: `slo` both, `ttft`, `tbt`."""
    at: float
    """Requests per second, or the factor on the SLO."""
    below: str
    above: str
    sentence: str


def flips(study: Study, a: Setting, b: Setting) -> tuple[list[Flip], list[dict[str, Any]]]:
    """Between `a` and `b`: rates and factors on the SLO from which on another is better; what each factor gave."""
    found = []
    told: tuple[float, str] | None = None
    for rate in study.common_rates(a, b):
        comparison = compare(study, "attainment", a, b, rate)
        if comparison.better is None:
            continue
        if told and told[1] != comparison.better:
            sentence = (
                f"The answer flips between {per_second(told[0])} and {per_second(rate)}: at the one more requests keep "
                f"the SLO with {told[1]}, at the other with {comparison.better}."
            )
            found.append(Flip("rate", (told[0] + rate) / 2, told[1], comparison.better, sentence))
        told = rate, comparison.better
    sweeps = []
    axes: tuple[Axis, ...] = ("slo", "ttft", "tbt")
    for axis in axes:
        rows = _sweep(study, a, b, axis)
        sweeps.append({"axis": axis, "engine": a.engine, "placements": [a.placement, b.placement], "rows": rows})
        found += [_flip(axis, low, high) for low, high in pairwise(_told(rows)) if low.better != high.better]
    return found, sweeps


def steady(placements: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """Of rows that tell no flip: for which factors one is better, if any.

    `rows`: in ascending order of `scale`; each with `better`, None where no difference is told.
    """
    told = _told(rows)
    tried = f"{_factor(rows[0])} of this one to {_factor(rows[-1])} times it"
    if not told:
        return f"No rate flips the answer, and no SLO from {tried} tells {enumerated(placements)} apart by goodput."
    better = told[0].better
    if len(told[0].rows) == len(rows):
        return (
            f"The answer flips at no rate tried and for no SLO from {tried}: {better} has the higher goodput with all."
        )
    return (
        f"No rate tried flips the answer. With {_span(told)} {better} has the higher goodput; "
        f"{_elsewhere(told, rows)} no difference can be told."
    )


class _Stretch(NamedTuple):
    """Neighbouring rows of a sweep in which the same placement is told to be better."""

    better: str
    rows: list[dict[str, Any]]


def _told(rows: Sequence[dict[str, Any]]) -> list[_Stretch]:
    grouped = ((better, list(group)) for better, group in groupby(rows, key=itemgetter("better")))
    return [_Stretch(better, group) for better, group in grouped if better is not None]


def _span(stretches: Sequence[_Stretch], of: str = "this SLO") -> str:
    """`0.5 to 2 times this SLO`, of one or more stretches."""
    parts = []
    for stretch in stretches:
        low, high = _factor(stretch.rows[0]), _factor(stretch.rows[-1])
        parts.append(low if low == high else f"{low} to {high}")
    if parts == ["1"]:
        return of
    return f"{enumerated(parts)} {'of' if parts[-1] == _LOWEST else 'times'} {of}"


def _elsewhere(told: Sequence[_Stretch], rows: Sequence[dict[str, Any]]) -> str:
    """Where the rows are that are not in `told`."""
    if len(told) > 1:
        return f"with others from {_factor(rows[0])} to {_factor(rows[-1])} times"
    less, more = told[0].rows[0] is not rows[0], told[0].rows[-1] is not rows[-1]
    sides = [f"less, down to {_factor(rows[0])},"] if less else []
    sides += [f"more, up to {_factor(rows[-1])} times,"] if more else []
    return f"with {enumerated(sides)}"


def _factor(row: dict[str, Any]) -> str:
    """On the SLO; rounded, as it is a step of a sweep and no measurement."""
    names = {SCALES[0]: _LOWEST, SCALES[-1]: "eight"}
    return names.get(row["scale"], f"{row['scale']:.2g}")


def _sweep(study: Study, a: Setting, b: Setting, axis: Axis) -> list[dict[str, Any]]:
    """Goodputs where the limits of `axis` are so many times what they are, for each of `SCALES`; per worker where
    sizes are unequal."""
    limits = [
        (study.slo.ttft_ms * (scale if axis != "tbt" else 1.0), study.slo.tbt_ms * (scale if axis != "ttft" else 1.0))
        for scale in SCALES
    ]
    points, replicates = [], []
    top = study.highest_common(a, b)
    for setting in (a, b):
        rates = study.rates(setting)
        shares, drawn = [], []
        for rate in rates:
            c = study.columns[setting, rate]
            good = [c.done & (c.ttft <= ttft) & (c.tpot <= tbt) for ttft, tbt in limits]
            shares.append([row.mean() for row in good])
            drawn.append(study.bootstrap.means(good, study.units[setting, rate]))
        rates = [study.per_worker(setting, rate) for rate in rates]
        points.append(_capped(np.array(rates), np.array(shares).T, top))
        by_scale = np.stack(drawn, axis=2)  # replicates, scales, rates
        replicates.append([_capped(np.array(rates), by_scale[:, k], top) for k in range(len(SCALES))])
    rows = []
    for k, (scale, (ttft, tbt)) in enumerate(zip(SCALES, limits, strict=True)):
        values = float(points[0][k]), float(points[1][k])
        difference = values[0] - values[1]
        interval = study.bootstrap.interval(replicates[0][k] - replicates[1][k])
        better = (a if difference > 0 else b).placement if is_told(difference, interval, values) else None
        rows.append({"scale": scale, "ttft_ms": ttft, "tbt_ms": tbt, "goodput": values, "better": better})
    return rows


def _capped(rates: Floats, shares: Floats, top: float) -> Floats:
    capped: Floats = np.minimum(crossings(rates, shares, SHARE), top)
    return capped


def _flip(axis: Axis, low: _Stretch, high: _Stretch) -> Flip:
    """Between two stretches that follow each other."""
    last, first = low.rows[-1], high.rows[0]
    at = float(np.sqrt(last["scale"] * first["scale"]))
    ttft, tbt = (" to ".join(limit_text(row[key]) for row in (last, first)) for key in ("ttft_ms", "tbt_ms"))
    of, limits = {
        "slo": ("this one", f"TTFT {ttft} and mean gap {tbt}"),
        "ttft": ("this TTFT", f"TTFT {ttft}, the gaps' limit as it is"),
        "tbt": ("this mean gap", f"mean gap {tbt}, the TTFT's limit as it is"),
    }[axis]
    sentence = (
        f"With another SLO the answer flips: {low.better} has the higher goodput with {_span([low], of)}, "
        f"{high.better} with {_span([high], of)} (in between: {limits})."
    )
    return Flip(axis, at, low.better, high.better, sentence)
