"""Figures over time: the steps of each worker, and the KV cache they held. Needs matplotlib (extra `experiments`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from baton.step_log import StepRecord
from baton_experiments.plot_style import DASHES, WIDTH, Look
from baton_experiments.records import Run, Setting
from baton_experiments.study import Study
from baton_experiments.words import number
from baton_experiments.worker_use import window

_KINDS = {"prefill": "#E69F00", "both": "#D55E00", "decode": "#56B4E9"}
MAX_GANTT_STEPS = 700
"""Of all workers of a placement, in the window that is drawn."""


def shown_runs(study: Study) -> list[tuple[Setting, Run]]:
    """Of each placement at its best, the run whose steps are drawn: all of one rate and seed, if they share one."""
    runs: dict[Setting, dict[tuple[float, int], Run]] = {}
    for run in study.steps:
        setting = run.setting
        if setting in study.best.values() and study.steps[run] and (setting, run.rate) in study.columns:
            runs.setdefault(setting, {})[run.rate, run.seed] = run
    if not runs:
        return []
    shared = set.intersection(*(set(r) for r in runs.values()))
    reach = max(study.goodput_of(setting).rate for setting in runs)
    wanted = sorted({rate for rate, _ in shared})
    rate = next((r for r in wanted if r >= reach), wanted[-1] if wanted else None)
    found = []
    for setting, mine in runs.items():
        key = min((k for k in shared if k[0] == rate), default=max(mine), key=lambda k: k[1])
        found.append((setting, mine[key]))
    order = list(study.best.values())
    return sorted(found, key=lambda pair: order.index(pair[0]))


def gantt(study: Study, summary: dict[str, Any], look: Look) -> Figure | None:
    shown = shown_runs(study)
    if not shown:
        return None
    begin, end = _gantt_window(study, [run for _, run in shown])
    lanes = {run: _workers(study, setting, run) for setting, run in shown}
    heights = [len(workers) + 0.6 for workers in lanes.values()]
    figure: Figure
    figure, axes = plt.subplots(
        len(shown), 1, figsize=(WIDTH, 1.0 + 0.42 * sum(heights)), sharex=True, squeeze=False, height_ratios=heights
    )
    for axis, (setting, run) in zip(axes[:, 0], shown, strict=True):
        first, _ = window(study, run, study.steps[run])
        bars: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
        for step in study.steps[run]:
            left, right = step.start_s - first, step.start_s - first + step.seconds
            if right > begin and left < end:
                lane = lanes[run].index(step.worker)
                box = [(left, lane - 0.38), (right, lane - 0.38), (right, lane + 0.38), (left, lane + 0.38)]
                bars[_kind(step)].append(box)
        for kind, boxes in bars.items():
            axis.add_collection(PolyCollection(boxes, facecolors=_KINDS[kind], edgecolors="white", linewidths=0.3))
        arrivals = [
            r.received_s - first
            for r in study.records[setting, run.rate]
            if r.seed == run.seed and r.received_s is not None and begin <= r.received_s - first <= end
        ]
        axis.plot(
            arrivals,
            np.full(len(arrivals), -0.62),
            marker="v",
            linestyle="",
            color="#333333",
            markersize=4,
            clip_on=False,
        )
        axis.set(yticks=range(len(lanes[run])), ylim=(len(lanes[run]) - 0.45, -0.75), xlim=(begin, end))
        axis.set_yticklabels(lanes[run])
        axis.set_title(f"{setting} at {number(run.rate)}/s, seed {run.seed}")
        axis.grid(axis="y", visible=False)
    axes[-1, 0].set_xlabel("seconds since the first measured arrival")
    names = {"prefill": "prompts only", "both": "prompts and tokens in one step", "decode": "tokens only"}
    handles: list[Any] = [Patch(color=_KINDS[kind], label=f"step with {name}") for kind, name in names.items()]
    handles.append(Line2D([], [], marker="v", linestyle="", color="#333333", label="a request arrives"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def kv(study: Study, summary: dict[str, Any], look: Look) -> Figure | None:
    shown = shown_runs(study)
    if not shown:
        return None
    share = all(worker in study.kv_blocks for shown_run in shown for worker in _workers(study, *shown_run))
    figure: Figure
    figure, axes = plt.subplots(
        len(shown), 1, figsize=(WIDTH, 0.9 + 1.5 * len(shown)), sharex=True, sharey=True, squeeze=False
    )
    for axis, (setting, run) in zip(axes[:, 0], shown, strict=True):
        steps = study.steps[run]
        first, _ = window(study, run, steps)
        for place, worker in enumerate(_workers(study, setting, run)):
            mine = [step for step in steps if step.worker == worker]
            mine = mine[:: max(1, len(mine) // 1500)]
            scale = 100 / study.kv_blocks[worker] if share else 1.0
            axis.step(
                [s.start_s - first for s in mine],
                [s.kv_blocks * scale for s in mine],
                where="post",
                linewidth=1.2,
                color=look.colour(setting),
                linestyle=DASHES[place % len(DASHES)],
                label=worker,
            )
        axis.set(ylabel="% of the blocks" if share else "blocks held", ylim=(0, 102 if share else None))
        axis.set_title(f"{setting} at {number(run.rate)}/s, seed {run.seed}")
        axis.legend(loc="upper left", ncols=4)
    axes[-1, 0].set_xlabel("seconds since the first measured arrival")
    return figure


def _gantt_window(study: Study, runs: Sequence[Run]) -> tuple[float, float]:
    """Of seconds since the first arrival, the same for all: around the longest step, few enough steps to see each."""
    longest, per_second, span = 0.0, 1.0, 0.0
    at = 0.0
    for run in runs:
        steps = study.steps[run]
        first, last = window(study, run, steps)
        inside = [s for s in steps if first <= s.start_s <= last] or list(steps)
        top = max(inside, key=lambda s: s.seconds)
        if top.seconds > longest:
            longest, at = top.seconds, top.start_s - first
        span = max(span, last - first)
        per_second = max(per_second, len(inside) / max(last - first, 1e-9))
    width = min(max(span, 1e-3), max(MAX_GANTT_STEPS / per_second, 4 * longest))
    begin = min(max(0.0, at - width / 3), max(0.0, span - width))
    return begin, begin + width


def _workers(study: Study, setting: Setting, run: Run) -> list[str]:
    """Those that prefill first."""
    prefill = {record.prefill_worker for record in study.records[setting, run.rate]}
    return sorted({step.worker for step in study.steps[run]}, key=lambda worker: (worker not in prefill, worker))


def _kind(step: StepRecord) -> str:
    if step.shape.chunks:
        return "both" if step.shape.decodes else "prefill"
    return "decode"
