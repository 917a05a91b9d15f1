"""The summary of an experiment for a terminal, and where numbers come from. Computes no statistics."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from baton_experiments.number_table import NumberTable
from baton_experiments.short_names import shortened
from baton_experiments.study import MAIN
from baton_experiments.words import counted, limit_text, number

_STATISTICS = ("p50", "p90", "p99", "max")


def tables(summary: dict[str, Any]) -> Iterable[RenderableType]:
    """What `summarize` found: points and goodput, one table of each per engine; the verdict; and notes, if any."""
    summary, _ = shortened(summary)
    for engine in dict.fromkeys(point["engine"] for point in summary["points"]) or ("",):
        points = [point for point in summary["points"] if point["engine"] == engine]
        goodputs = [row for row in summary["goodput"] if row["engine"] == engine]
        yield points_table(points, engine)
        yield goodput_table(goodputs, summary["definitions"], summary["slo"], engine)
    for at, sentence in enumerate(summary["verdict"]["sentences"]):
        yield Padding(Text(sentence, style="" if at else "bold"), (0, 0, 0 if at else 1, 0))
    for note in summary.get("notes", ()):
        yield Text(note, style="dim")


def points_table(points: list[dict[str, Any]], engine: str = "") -> NumberTable:
    """Latencies of each setting at each rate; of a placement with several chunk sizes the best is marked."""
    *fewer, most = sorted({point["requests"] for point in points}) or [0]
    counts = "".join(f"{count:,} or " for count in fewer) + counted(most, "request")
    result = _table(f"TTFT and time between tokens (TBT), in ms; {counts} a row", engine)
    result.add_column("rate\n/s", is_key=True)
    has_chunks = _add_setting(result, points)
    for name in ("TTFT", "TBT"):
        for statistic in _STATISTICS:
            result.add_column(statistic, group=name)
    result.add_column("SLO\nkept")
    result.add_column("tokens\n/s")
    for point in sorted(points, key=lambda p: p["rate"]):
        cells = [number(point["rate"], 4), *_setting(point, has_chunks)]
        for name in ("ttft_ms", "tbt_ms"):
            values = point[name] or {}
            cells += [_milliseconds(values.get(key)) for key in _STATISTICS]
        rate = point["output_tokens_per_s"]
        result.add_row(*cells, f"{point['goodput_share']:.0%}", number(rate) if rate else "-")
    return result


def goodput_table(
    rows: list[dict[str, Any]], definitions: dict[str, Any], slo: dict[str, Any], engine: str = ""
) -> NumberTable:
    """The rates that each setting reaches, a row for 90 and one for 99 % of the requests, one column a definition."""
    limits = f"TTFT {limit_text(slo['ttft_ms'])}, TBT {limit_text(slo['tbt_ms'])}"
    result = _table(f"Goodput in requests/s: {limits}", engine)
    has_chunks = _add_setting(result, rows)
    result.add_column("of", is_key=True)
    names = list(dict.fromkeys(row["definition"] for row in rows))
    for name in names:
        result.add_column(definitions[name]["label"].replace(" ", "\n"))
    result.add_column("95 % interval\nof DistServe's")
    for row in (r for r in rows if r["definition"] == MAIN):
        mine = {r["definition"]: r for r in rows if _key(r) == _key(row)}
        for share in ("90", "99"):
            cells = [rate_text(mine[name], share) for name in names]
            result.add_row(*_setting(row, has_chunks), f"{share} %", *cells, interval_text(row, share))
    return result


def rate_text(row: dict[str, Any], share: str) -> str:
    """Of an entry of `goodput`: `1.42`, `>= 3` where the SLO was kept at every rate, `0` where at none."""
    return f"{'>= ' if row['at_least'][share] else ''}{number(row['rate'][share])}"


def interval_text(row: dict[str, Any], share: str) -> str:
    if row["interval"][share] is None:
        return "-"
    low, high = row["interval"][share]
    return f"{number(low)} {f'to {number(high)}' if high is not None else 'or more'}"


def _table(title: str, engine: str) -> NumberTable:
    """Narrow: a terminal of 80 columns holds it, where numbers are not large."""
    return NumberTable(title + (f"; on {engine}" if engine else ""))


def _add_setting(table: NumberTable, rows: list[dict[str, Any]]) -> bool:
    """Adds the columns that `_setting` fills. Whether there is one of the chunk size."""
    has_chunks = any(row["chunk_tokens"] for row in rows)
    table.add_column("placement", is_key=True, is_right=False)
    if has_chunks:
        table.add_column("chunk", is_key=True)
    return has_chunks


def _setting(row: dict[str, Any], has_chunks: bool) -> list[str]:
    if not has_chunks:
        return [row["placement"]]
    chunk = "" if row["chunk_tokens"] is None else f"{row['chunk_tokens']:,}"
    return [row["placement"], f"{chunk}{'*' if chunk and row['best'] else ''}"]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["placement"], row["chunk_tokens"]


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def environment() -> dict[str, Any]:
    """Where the numbers come from: machine, versions, commit where there is one."""
    from importlib.metadata import version

    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("baton-serve", "torch", "ray", "transformers", "pyzmq")},
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Of this source, with `-dirty` where tracked files differ from it; None where it has no history.

    An installed package may lie in the working tree of another project, whose commit says nothing.
    """
    here = Path(__file__)
    if _git("ls-files", "--error-unmatch", here.name) is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(*command: str) -> str | None:
    """What git says about the folder of this file; None: nothing."""
    try:
        found = subprocess.run(["git", *command], capture_output=True, text=True, timeout=5, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
