"""Figures of an experiment, from its study and summary. Needs matplotlib (extra `experiments`).

Must not compute statistics beyond what a drawing needs.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np

from baton.timeline import Stage
from baton_experiments.columns import STAGES, Floats
from baton_experiments.plot_steps import gantt, kv
from baton_experiments.plot_style import STYLE, WIDTH, Look
from baton_experiments.plot_ticks import log_ticks, plain_number
from baton_experiments.records import Setting
from baton_experiments.study import MAIN, Study
from baton_experiments.words import number

mpl.use("Agg")  # files only; a server has no screen
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullLocator

_STAGE_COLOURS = {
    Stage.ROUTER_QUEUE: "#BBBBBB",
    Stage.PLACEMENT: "#777777",
    Stage.PREFILL_QUEUE: "#F5C77E",
    Stage.PREFILL: "#E69F00",
    Stage.HANDOFF_WAIT: "#E3B3CD",
    Stage.WIRE: "#CC79A7",
    Stage.DECODE_QUEUE: "#A6D3EE",
    Stage.FIRST_DECODE_STEP: "#56B4E9",
    Stage.DECODE_STEPS: "#0072B2",
}
MAX_ROWS = 3
"""Rates that distributions are drawn of."""


def figures(study: Study, summary: dict[str, Any]) -> dict[str, Figure]:
    """By name, those there is data for. Close them after use (`close`)."""
    if not study.columns:
        return {}
    makers: dict[str, Callable[[Study, dict[str, Any], Look], Figure | None]] = {
        "attainment": _attainment,
        "latency": _latency,
        "distributions": _distributions,
        "stages": _stages,
        "gantt": gantt,
        "kv": kv,
        "slo": _slo_sweep,
    }
    with mpl.rc_context(STYLE):
        look = Look(study)
        made = {name: figure for name, maker in makers.items() if (figure := maker(study, summary, look)) is not None}
        for figure in made.values():
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # laid out once, however many formats it is saved in
    return made


def svg(figure: Figure) -> str:
    """An `svg` element. The same figure gives the same text."""
    file = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def close(figures: Iterable[Figure]) -> None:
    for figure in figures:
        plt.close(figure)


# --- over rates -----------------------------------------------------------------------------------------


def _attainment(study: Study, summary: dict[str, Any], look: Look) -> Figure:
    figure: Figure
    figure, axis = plt.subplots(figsize=(WIDTH, 3.9))
    for share in (90, 99):
        axis.axhline(share, color="#666666", linewidth=0.8, linestyle=":")
        axis.annotate(
            f"{share} %",
            (1.0, share),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color="#666666",
        )
    for setting in study.settings:
        rows = [p for p in summary["points"] if _is(p, setting)]
        rates = [p["rate"] for p in rows]
        axis.plot(rates, [100 * p["goodput_share"] for p in rows], **look.line(setting))
        bands = [p["intervals"]["goodput_share"] for p in rows]
        if setting in study.best.values() and all(bands):
            low, high = ([100 * band[end] for band in bands] for end in (0, 1))
            axis.fill_between(rates, low, high, color=look.colour(setting), alpha=0.15, linewidth=0)
    for place, setting in enumerate(study.best.values()):
        found = next(g for g in summary["goodput"] if _is(g, setting) and g["definition"] == MAIN)
        rate, interval = found["rate"]["90"], found["interval"]["90"]
        if rate > 0:
            at = 3 + 3.5 * place
            style = {"color": look.colour(setting), "clip_on": False, "zorder": 5}
            axis.plot([rate, rate], [at, 90], linewidth=0.9, linestyle=":", **style)
            axis.plot([rate], [at], marker=">" if found["at_least"]["90"] else "d", markersize=8, linestyle="", **style)
            if interval:
                top = interval[1] if interval[1] is not None else max(study.rates(setting))
                axis.plot([interval[0], top], [at, at], linewidth=3.5, alpha=0.55, solid_capstyle="round", **style)
    axis.set(xlabel="requests per second", ylabel="requests that meet the SLO (%)", ylim=(-2.5, 103))
    handles, labels = axis.get_legend_handles_labels()
    if has_goodput(summary):
        handles.append(Line2D([], [], color="#444444", marker="d", markersize=7, linewidth=3, alpha=0.7))
        labels.append("goodput at 90 %, with its 95 % interval (▸ at least)")
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def has_goodput(summary: dict[str, Any]) -> bool:
    """Whether a goodput is drawn below the curves of attainment: one of 0 has no place there."""
    return any(g["rate"]["90"] > 0 for g in summary["goodput"] if g["best"] and g["definition"] == MAIN)


def _latency(study: Study, summary: dict[str, Any], look: Look) -> Figure:
    """Median and p99 of TTFT and gaps against rate."""
    figure: Figure
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.6))
    limits = {"ttft_ms": study.slo.ttft_ms, "tbt_ms": study.slo.tbt_ms}
    for axis, (key, name) in zip(
        axes, (("ttft_ms", "time to first token"), ("tbt_ms", "time between tokens")), strict=True
    ):
        for setting in study.best.values():
            rows = [p for p in summary["points"] if _is(p, setting) and p[key]]
            rates = [p["rate"] for p in rows]
            style = look.line(setting) | {"linestyle": "-"}
            axis.plot(rates, [p[key]["p50"] for p in rows], **style)
            dashed = {"linestyle": (0, (4, 2)), "markerfacecolor": "white"}
            axis.plot(rates, [p[key]["p99"] for p in rows], **style | dashed)
            bands = [p["intervals"][key]["p99"] for p in rows]
            if all(bands):
                low, high = ([band[end] for band in bands] for end in (0, 1))
                axis.fill_between(rates, low, high, color=look.colour(setting), alpha=0.12, linewidth=0)
        _limit(axis, limits[key], vertical=False)
        axis.set(xlabel="requests per second", ylabel="ms", title=name, yscale="log")
        log_ticks(axis.yaxis, room=18, stacked=True)
    handles = [Line2D([], [], **look.line(s) | {"linestyle": "-"}) for s in study.best.values()]
    handles += [
        Line2D([], [], color="#444444", label="median"),
        Line2D([], [], color="#444444", linestyle=(0, (4, 2)), label="p99, with its 95 % interval"),
        Line2D([], [], color="#999999", linestyle=":", label="SLO"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


def _slo_sweep(study: Study, summary: dict[str, Any], look: Look) -> Figure | None:
    sweeps = [s for s in summary["verdict"]["slo_sweep"] if s["engine"] == summary["verdict"]["slo_sweep"][0]["engine"]]
    if not sweeps:
        return None
    titles = {"slo": "both limits", "ttft": "the TTFT limit alone", "tbt": "the gaps' limit alone"}
    figure: Figure
    figure, axes = plt.subplots(1, len(sweeps), figsize=(WIDTH, 3.1), sharey=True, squeeze=False)
    for axis, sweep in zip(axes[0], sweeps, strict=True):
        scales = [row["scale"] for row in sweep["rows"]]
        for place, placement in enumerate(sweep["placements"]):
            line = look.line(study.best[sweep["engine"], placement])
            axis.plot(scales, [row["goodput"][place] for row in sweep["rows"]], markevery=2, **line)
        axis.axvline(1, color="#999999", linestyle=":", linewidth=1)
        axis.set(
            xscale="log",
            xlabel="times the SLO",
            title=titles[sweep["axis"]],
            xticks=[1 / 8, 1 / 2, 1, 2, 8],
        )
        axis.set_ylim(bottom=-0.03 * axis.get_ylim()[1])  # a line at 0 is seen whole
        axis.xaxis.set_major_formatter(plain_number)
        axis.minorticks_off()
    unit = "requests/s per worker" if study.is_unequal else "requests/s"
    axes[0][0].set_ylabel(f"goodput at 90 % ({unit})")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


# --- over requests --------------------------------------------------------------------------------------


def _distributions(study: Study, summary: dict[str, Any], look: Look) -> Figure:
    """Share of the values that are longer, so that one in a hundred is seen as well as the median."""
    rates = spread(sorted({rate for _, rate in study.columns}), MAX_ROWS)
    figure: Figure
    figure, axes = plt.subplots(
        len(rates), 3, figsize=(WIDTH, 0.7 + 2.4 * len(rates)), squeeze=False, sharex="col", sharey=True
    )
    names = (("ttft", "TTFT"), ("tbt", "TBT (each gap)"), ("tpot", "TPOT (a request's mean gap)"))
    limits = {"ttft": study.slo.ttft_ms, "tbt": study.slo.tbt_ms, "tpot": study.slo.tbt_ms}
    for at, (row, rate) in enumerate(zip(axes, rates, strict=True)):
        for axis, (name, label) in zip(row, names, strict=True):
            for setting in study.best.values():
                if (setting, rate) in study.columns:
                    x, y = _longer(study.columns[setting, rate].select(name)[0])
                    axis.step(x, y, where="post", **look.plain(setting))
            _limit(axis, limits[name], vertical=True)
            axis.set(xscale="log", yscale="log", ylim=(8e-4, 1.3), yticks=[1, 0.5, 0.1, 0.01, 0.001])
            axis.yaxis.set_major_formatter(lambda value, _at: f"{100 * value:g} %")
            axis.yaxis.set_minor_locator(NullLocator())
            log_ticks(axis.xaxis, room=40)
            if at == 0:
                axis.set_title(label)
            if at == len(rates) - 1:
                axis.set_xlabel("ms")
        row[0].set_ylabel(f"{number(rate)}/s\nlonger than x")
    handles = [Line2D([], [], **look.plain(s)) for s in study.best.values()]
    handles.append(Line2D([], [], color="#999999", linestyle=":", label="SLO"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def _longer(values: Floats) -> tuple[Floats, Floats]:
    """Points of the share of `values` that are longer, at most a thousand."""
    ordered = np.sort(values)
    count = len(ordered)
    if count > 1000:  # evenly in the bulk, and all of the last
        keep = np.unique(
            np.concatenate([np.linspace(0, count - 1, 600), count - np.geomspace(1, count, 400)]).astype(np.int64)
        )
        return ordered[keep], 1 - keep / count
    return ordered, 1 - np.arange(count) / count if count else ordered


def _stages(study: Study, summary: dict[str, Any], look: Look) -> Figure | None:
    points = [p for p in summary["points"] if p["best"] and p["stages_ms"]]
    if not points:
        return None
    rates = spread(sorted({p["rate"] for p in points}), 5)
    rows = [p for rate in rates for p in points if p["rate"] == rate]
    figure: Figure
    figure, axes = plt.subplots(
        1, 2, figsize=(WIDTH, 1.2 + 0.28 * len(rows) + 0.12 * len(rates)), sharey=True, width_ratios=(1, 1)
    )
    places, labels, at = [], [], 0.0
    for row, point in enumerate(rows):
        at += 1.0 if row == 0 or rows[row - 1]["rate"] == point["rate"] else 1.5
        places.append(at)
        setting = Setting(point["placement"], point["chunk_tokens"], point["engine"])
        labels.append(f"{number(point['rate'])}/s   {setting}")
    halves = (STAGES[:4], STAGES[4:])
    used: list[str] = []
    for axis, stages, title in zip(axes, halves, ("until the first token", "after the first token"), strict=True):
        left = np.zeros(len(rows))
        for stage in stages:
            widths = np.array([point["stages_ms"].get(stage, 0.0) for point in rows])
            if widths.any():
                axis.barh(places, widths, left=left, height=0.82, color=_STAGE_COLOURS[Stage(stage)])
            left += widths
        used += [s for s in stages if any(p["stages_ms"].get(s, 0.0) > left.max() / 200 for p in rows)]
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.xaxis.set_major_formatter(plain_number)
        axis.set(title=title, xlabel="ms, mean of all requests")
        axis.grid(axis="y", visible=False)
        axis.margins(y=0.02)
        axis.set_xlim(left=0)
    axes[0].set_yticks(places, labels)
    axes[0].invert_yaxis()
    handles = [Patch(color=_STAGE_COLOURS[Stage(stage)], label=stage.replace("_", " ")) for stage in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


# --- parts ----------------------------------------------------------------------------------------------


def spread(values: Sequence[float], count: int) -> list[float]:
    """At most `count` of them, first and last included, evenly between."""
    if len(values) <= count:
        return list(values)
    return [values[i] for i in sorted({round(k * (len(values) - 1) / (count - 1)) for k in range(count)})]


def _is(row: dict[str, Any], setting: Setting) -> bool:
    return (row["placement"], row["chunk_tokens"], row["engine"]) == setting


def _limit(axis: Axes, value: float, *, vertical: bool) -> None:
    (axis.axvline if vertical else axis.axhline)(value, color="#999999", linestyle=":", linewidth=1)
