"""How far a simulation is off: its points against those of a real run of the same plan.

A figure is right if it is within 10 % of the real one or within the real runs' own 95 % interval, whichever is wider; a
comparison of two placements, if the simulation has the same winner wherever the real runs tell one. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from baton_experiments.bootstrap import excludes_zero
from baton_experiments.records import RequestRecord, Setting, Slo
from baton_experiments.study import Study

TOLERANCE = 0.1
FIGURES: tuple[tuple[str, float], ...] = (("ttft", 0.5), ("ttft", 0.9), ("tbt", 0.5), ("tbt", 0.9))
"""Quantiles that are compared."""


def compare(simulated: Sequence[RequestRecord], real: Sequence[RequestRecord], slo: Slo) -> dict[str, Any]:
    """`points`, `winners`, and a `sentence` about both, as plain data.

    Settings and rates that only one of them has count for nothing. Warm-up is left out.
    """
    ours, theirs = Study(simulated, slo), Study(real, slo)
    common = [key for key in theirs.columns if key in ours.columns]
    points = [_point(ours, theirs, setting, rate) for setting, rate in common]
    pairs = [
        (a, b, rate)
        for rate in sorted({rate for _, rate in common})
        for a, b in combinations([setting for setting, at in common if at == rate], 2)
        if a.placement != b.placement
    ]
    winners = [
        found for a, b, rate in pairs for figure in FIGURES if (found := _winner(ours, theirs, a, b, rate, figure))
    ]
    figures = [figure for point in points for figure in point["figures"].values()]
    within, same = sum(f["within"] for f in figures), sum(w["same"] for w in winners)
    worst = max((abs(f["error"]) for f in figures), default=0.0)
    sentence = (
        f"Against the real run, {within} of {len(figures)} medians and 90th percentiles of TTFT and TBT are within "
        f"{TOLERANCE:.0%} or the real runs' own interval (the furthest is {worst:.0%} off); the winner is the same in "
        f"{same} of {len(winners)} comparisons that the real runs decide."
    )
    if not figures:
        sentence = "Nothing is compared with the real run: at no setting and rate have both of them latencies."
    return {"points": points, "winners": winners, "within": within, "figures": len(figures), "sentence": sentence}


def _point(ours: Study, theirs: Study, setting: Setting, rate: float) -> dict[str, Any]:
    figures = {}
    for name, share in FIGURES:
        found, real = ours.quantile(setting, rate, name, share), theirs.quantile(setting, rate, name, share)
        if found is None or not real:
            continue
        interval = theirs.quantile_interval(setting, rate, name, share)
        error = found / real - 1
        inside = interval is not None and interval[0] <= found <= interval[1]
        figures[f"{name}_p{round(share * 100)}_ms"] = {
            "simulated": found,
            "real": real,
            "error": error,
            "real_interval": interval,
            "within": inside or abs(error) <= TOLERANCE,
        }
    return {**setting._asdict(), "rate": rate, "figures": figures}


def _winner(
    ours: Study, theirs: Study, a: Setting, b: Setting, rate: float, figure: tuple[str, float]
) -> dict[str, Any] | None:
    """None: the real runs do not tell."""
    interval = theirs.quantile_difference(a, b, rate, *figure)
    real = [theirs.quantile(setting, rate, *figure) for setting in (a, b)]
    found = [ours.quantile(setting, rate, *figure) for setting in (a, b)]
    if not excludes_zero(interval) or None in real or None in found:
        return None
    winners = [a if values[0] < values[1] else b for values in (real, found)]  # type: ignore[operator]  # no None
    return {
        "settings": [str(a), str(b)],
        "rate": rate,
        "figure": f"{figure[0]}_p{round(figure[1] * 100)}_ms",
        "real": str(winners[0]),
        "simulated": str(winners[1]),
        "same": winners[0] == winners[1],
    }
