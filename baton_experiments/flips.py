"""Where the answer flips: the rate, or the SLO, from which on another placement is better. Pure.

The same requests are judged by limits from an eighth to eight times those given, so nothing is run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

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
                f"The answer flips between {per_second(told[0])} and {per_second(rate)}: more requests keep the SLO "
                f"with {told[1]} up to the one, with {comparison.better} from the other on."
            )
            found.append(Flip("rate", (told[0] + rate) / 2, told[1], comparison.better, sentence))
        told = rate, comparison.better
    sweeps = []
    axes: tuple[Axis, ...] = ("slo", "ttft", "tbt")
    for axis in axes:
        rows = _sweep(study, a, b, axis)
        sweeps.append({"axis": axis, "engine": a.engine, "placements": [a.placement, b.placement], "rows": rows})
        last: dict[str, Any] | None = None
        for row in rows:
            if row["better"] is None:
                continue
            if last and last["better"] != row["better"]:
                found.append(_flip(axis, last, row))
            last = row
    return found, sweeps


def steady(placements: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """Of rows that tell no flip: for which factors one is better, if any."""
    told = [row for row in rows if row["better"] is not None]
    span = "from an eighth of this one to eight times it"
    if not told:
        return f"No rate flips the answer, and no SLO {span} tells {enumerated(placements)} apart by goodput."
    sentence = f"The answer flips at no rate tried and for no SLO {span}"
    if len(told) == len(rows):
        return f"{sentence}."
    low, high = told[0], told[-1]
    return (
        f"{sentence}: {low['better']} has the higher goodput from {low['scale']:.2g} to {high['scale']:.2g} times this "
        "one; beyond that no difference can be told."
    )


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


def _flip(axis: Axis, low: dict[str, Any], high: dict[str, Any]) -> Flip:
    at = float(np.sqrt(low["scale"] * high["scale"]))
    ttft, tbt = ([limit_text(row[key]) for row in (low, high)] for key in ("ttft_ms", "tbt_ms"))
    limits = {
        "slo": f"TTFT {ttft[0]} and mean gap {tbt[0]}, to {ttft[1]} and {tbt[1]}",
        "ttft": f"TTFT {ttft[0]} to {ttft[1]}, the gaps' limit as it is",
        "tbt": f"mean gap {tbt[0]} to {tbt[1]}, the TTFT's limit as it is",
    }
    sentence = (
        f"With another SLO the answer flips: {low['better']} is better up to {low['scale']:.2g} times, "
        f"{high['better']} from {high['scale']:.2g} times on ({limits[axis]})."
    )
    return Flip(axis, at, low["better"], high["better"], sentence)
