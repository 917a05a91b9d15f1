"""The report of an experiment: one HTML file that loads nothing else, and its figures as PNGs beside it.

Needs matplotlib and jinja2 (extra `experiments`). Whatever comes from outside is escaped by the template. Computes no
statistics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup
from matplotlib.figure import Figure

from baton_experiments import plot
from baton_experiments.records import RequestRecord, Setting, Slo, Steps
from baton_experiments.report import interval_text, rate_text
from baton_experiments.short_names import shortened
from baton_experiments.study import Study
from baton_experiments.words import counted, limit_text, number

REPORT, FIGURES = "report.html", "figures"
_CAPTIONS = {
    "attainment": (
        "SLO attainment against rate",
        "Share of the requests that meet the SLO by DistServe's definition. Bands are 95 % intervals.",
    ),
    "latency": ("Latency against rate", "Medians and 99th percentiles over all requests, or all gaps, of a rate."),
    "distributions": (
        "Distributions of TTFT, TBT and TPOT",
        "How large a share of the requests, or of the gaps, is longer than x: at 1 % a line shows its 99th percentile.",
    ),
    "stages": (
        "Where the time of a request went",
        "Mean time in each stage of a request's timeline, until its first token and after it.",
    ),
    "gantt": (
        "Steps of each worker",
        "Around the longest step, the same seconds for all placements. A worker that computes prompts and tokens in "
        "one step holds up every request it decodes for as long as the step takes.",
    ),
    "kv": ("KV cache in use", "Blocks that requests hold, when each step was planned."),
    "slo": (
        "Goodput if the SLO were another",
        "The same requests judged by limits from an eighth to eight times those given. Where lines cross, the answer "
        "may flip: the verdict says where it is told.",
    ),
}


def write_report(folder: Path, records: Sequence[RequestRecord], steps: Steps | None, summary: dict[str, Any]) -> Path:
    """`report.html` and `figures/*.png` in `folder`; returns the former.

    `summary`: of `summarize` over the same records, and whatever else of it is known (`config`, `engine`,
    `environment`, `workload`, `notes`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary, short = shortened(summary)
    if short:
        records = [msgspec.structs.replace(r, engine=short.get(r.engine, r.engine)) for r in records]
        steps = {run._replace(engine=short.get(run.engine, run.engine)): some for run, some in (steps or {}).items()}
    slo = Slo(**{name: summary["slo"].get(name) for name in Slo.__struct_fields__})
    blocks = (summary.get("engine") or {}).get("kv_blocks")
    study = Study(records, slo, steps=steps, kv_blocks=blocks, replicates=1)  # intervals come with the summary
    figures = plot.figures(study, summary)
    try:
        (folder / FIGURES).mkdir(exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(folder / FIGURES / f"{name}.png", dpi=130)
        path = folder / REPORT
        path.write_text(render(summary, figures), encoding="utf-8")
    finally:
        plot.close(figures.values())
    return path


def render(summary: dict[str, Any], figures: dict[str, Figure]) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("baton_experiments"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ms": _ms,
        "number": number,
        "percent": lambda value: f"{value:.0%}",
        "code": _code,
        "limit": limit_text,
        "counted": counted,
    }
    points = sorted(summary["points"], key=lambda p: p["rate"])
    definitions = summary["definitions"]
    goodput = [
        {
            "setting": _name(row),
            "best": row["best"],
            "cells": [
                {"rates": [rate_text(mine, share) for share in ("90", "99")], "interval": interval_text(mine, "90")}
                for mine in (
                    next(r for r in summary["goodput"] if r["definition"] == name and _name(r) == _name(row))
                    for name in definitions
                )
            ],
        }
        for row in summary["goodput"]
        if row["definition"] == next(iter(definitions))
    ]
    verdict = summary["verdict"]
    return environment.get_template("report.html.j2").render(
        summary=summary,
        verdict=verdict,
        rest=[s for s in verdict["sentences"] if s not in verdict["sentence"]],
        points=[{"name": _name(point)} | point for point in points],
        against=summary.get("against"),
        goodput=goodput,
        definitions=definitions,
        comparisons=[c for c in verdict["comparisons"] if c["objective"] != "tbt_max"],
        figures=[
            {
                "name": name,
                "title": title,
                "caption": _caption(name, caption, summary),
                "svg": _svg(figures[name], title),
            }
            for name, (title, caption) in _CAPTIONS.items()
            if name in figures
        ],
        details={
            key: json.dumps(msgspec.to_builtins(summary[key]), indent=1, default=str)
            for key in ("workload", "engine", "environment", "config")
            if summary.get(key)
        },
    )


def _caption(name: str, caption: str, summary: dict[str, Any]) -> str:
    """With what only some figures of that name show."""
    if name != "attainment":
        return caption
    if plot.has_goodput(summary):
        caption += " Below, the rate up to which 90 % of the requests meet it, with its interval."
    if not all(point["best"] for point in summary["points"]):
        caption += " Faint lines are chunk sizes that did worse."
    return caption


def _code(text: str) -> Markup:
    """Escaped, what stands between backticks as code."""
    # Markup: escaped before.
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(Markup.escape(text))))


def _svg(figure: Figure, title: str) -> Markup:
    """Inline, as wide as its place; ids are its own, as those of all figures share one page."""
    text = plot.svg(figure)
    prefix = re.sub(r"\W", "", title)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    head = f'<svg role="img" aria-label="{Markup.escape(title)}"'
    # Markup: matplotlib made it, and escapes the labels in it.
    return Markup(
        re.sub(
            r'^<svg(.*?) width="[^"]*"',
            rf"{head}\1",
            re.sub(r' height="[^"]*pt"', "", text, count=1),
            count=1,
            flags=re.S,
        )
    )


def _name(row: dict[str, Any]) -> str:
    return str(Setting(row["placement"], row["chunk_tokens"], row["engine"]))


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"
