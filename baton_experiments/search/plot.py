"""The Pareto fronts of a plan as a picture. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

from baton_experiments.records import Slo
from baton_experiments.search.fronts import Point, latency_front, points, total_front
from baton_experiments.search.planner import Plan, Row

mpl.use("Agg")  # files only; a server has no screen
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

_SPLIT, _COLOCATED = "#1f77b4", "#d95f02"


def plot_plan(plan: Plan, slo: Slo, share: float, path: Path) -> None:
    """Goodput a GPU against TTFT and TBT (p90), and goodput against GPUs; fronts as lines."""
    found = points(plan, share)
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.8))
    for axis, what, limit in ((axes[0], "ttft_ms", slo.ttft_ms), (axes[1], "tbt_ms", slo.tbt_ms)):
        _latencies(axis, found, what, limit)
    _totals(axes[2], plan)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _latencies(axis: plt.Axes, found: list[Point], what: str, limit: float) -> None:
    for split, color in ((True, _SPLIT), (False, _COLOCATED)):
        some = [p for p in found if p.name.startswith("split") == split]
        if not some:
            continue  # a legend without a point would promise one
        axis.scatter(
            [getattr(p, what) for p in some],
            [p.per_gpu for p in some],
            s=14,
            color=color,
            alpha=0.6,
            label="split" if split else "colocated",
        )
    front = sorted(latency_front(found), key=lambda p: float(getattr(p, what)))
    best = 0.0
    steps = [p for p in front if p.per_gpu > best and (best := p.per_gpu)]
    axis.step([getattr(p, what) for p in steps], [p.per_gpu for p in steps], where="post", color="black", lw=1)
    axis.axvline(limit, color="gray", ls=":", lw=1, label=f"SLO {limit:g} ms")
    name = "TTFT" if what == "ttft_ms" else "time between tokens"
    axis.set_title(f"What a GPU serves, by {name}")
    axis.set_xlabel(f"{name}, p90 of {'requests' if what == 'ttft_ms' else 'all gaps'} (ms)")
    axis.set_ylabel("requests/s per GPU, SLO kept")
    axis.grid(alpha=0.3)
    if found:
        axis.legend()
    else:
        axis.text(0.5, 0.5, "nothing simulated keeps the SLO", ha="center", transform=axis.transAxes)


def _totals(axis: plt.Axes, plan: Plan) -> None:
    for simulated, marker in ((True, "o"), (False, ".")):
        for split, color in ((True, _SPLIT), (False, _COLOCATED)):
            rows = [r for r in plan.rows if r.is_simulated == simulated and r.candidate.is_split == split]
            if not rows:
                continue
            axis.scatter(
                [r.gpus for r in rows],
                [r.goodput for r in rows],
                s=24 if simulated else 6,
                marker=marker,
                color=color,
                alpha=0.9 if simulated else 0.35,
                label=f"{'split' if split else 'colocated'}, {'simulated' if simulated else 'estimated'}",
            )
    front: list[Row] = total_front(plan.rows)
    axis.step([r.gpus for r in front], [r.goodput for r in front], where="post", color="black", lw=1)
    winner = plan.row(plan.winner)
    most = max((r.gpus for r in plan.rows), default=1)
    axis.set_xlim(0.5, most + 0.5)
    axis.set_ylim(0, 1.15 * max((r.goodput for r in plan.rows), default=0) or 1)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if winner is not None:  # named in the legend: beside its point a long name runs over frame or points
        axis.scatter(
            [winner.gpus], [winner.goodput], s=90, facecolors="none", edgecolors="black", label=f"found: {winner.name}"
        )
    axis.set_title("What so many GPUs serve, SLO kept")
    axis.set_xlabel("GPUs")
    axis.set_ylabel("goodput (requests/s)")
    axis.grid(alpha=0.3)
    if plan.rows:
        axis.legend()
