"""The summary of an experiment for a terminal, and where numbers come from. Computes no statistics."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from baton_experiments.words import number

_STATISTICS = ("p50", "p90", "p99", "max")


def tables(summary: dict[str, Any]) -> Iterable[RenderableType]:
    """What `summarize` found: points, goodput under each definition, the verdict; and the notes, where it has some."""
    yield points_table(summary["points"])
    yield goodput_table(summary)
    for at, sentence in enumerate(summary["verdict"]["sentences"]):
        yield Padding(Text(sentence, style="" if at else "bold"), (0, 0, 0 if at else 1, 0))
    for note in summary.get("notes", ()):
        yield Text(note, style="dim")


def points_table(points: list[dict[str, Any]]) -> Table:
    """Latencies of each setting at each rate; of a placement with several chunk sizes the best is marked."""
    counts = "/".join(map(str, sorted({point["requests"] for point in points})))
    title = f"TTFT and time between tokens (TBT), in ms; {counts} requests a row"
    result = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("rate\n/s", justify="right")
    has_chunks, has_engines = _columns_of_setting(result, points)
    for name in ("TTFT", "TBT"):
        for statistic in _STATISTICS:
            result.add_column(f"{name if statistic == 'p50' else ''}\n{statistic}", justify="right", no_wrap=True)
    result.add_column("SLO\nkept", justify="right")
    result.add_column("tokens\n/s", justify="right")
    for point in sorted(points, key=lambda p: p["rate"]):
        cells = [f"{point['rate']:g}", *_setting(point, has_chunks, has_engines)]
        for name in ("ttft_ms", "tbt_ms"):
            values = point[name] or {}
            cells += [_milliseconds(values.get(key)) for key in _STATISTICS]
        rate = point["output_tokens_per_s"]
        result.add_row(*cells, f"{point['goodput_share']:.0%}", f"{rate:,.1f}" if rate else "-")
    return result


def goodput_table(summary: dict[str, Any]) -> Table:
    """The rates that each setting reaches, at 90 and 99 % of the requests, one column a definition."""
    slo = summary["slo"]
    limits = f"TTFT {slo['ttft_ms']:g} ms, TBT {slo['tbt_ms']:g} ms"
    result = Table(title=f"Goodput in requests/s at 90 | 99 %: {limits}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rows = summary["goodput"]
    has_chunks, has_engines = _columns_of_setting(result, rows)
    names = list(dict.fromkeys(row["definition"] for row in rows))
    for name in names:
        result.add_column(f"\n{summary['definitions'][name]['label']}", justify="right")
    result.add_column("95 % interval\nof DistServe's at 90 %", justify="right")
    for row in (r for r in rows if r["definition"] == names[0]):
        mine = {r["definition"]: r for r in rows if _key(r) == _key(row)}
        cells = [" | ".join(rate_text(mine[name], share) for share in ("90", "99")) for name in names]
        result.add_row(*_setting(row, has_chunks, has_engines), *cells, interval_text(row, "90"))
    return result


def rate_text(row: dict[str, Any], share: str) -> str:
    """Of an entry of `goodput`: `1.42`, `>= 3` where the SLO was kept at every rate, `0` where at none."""
    return f"{'>= ' if row['at_least'][share] else ''}{number(row['rate'][share])}"


def interval_text(row: dict[str, Any], share: str) -> str:
    if row["interval"][share] is None:
        return "-"
    low, high = row["interval"][share]
    return f"{number(low)} to {number(high) if high is not None else 'more than tried'}"


def _columns_of_setting(table: Table, rows: list[dict[str, Any]]) -> tuple[bool, bool]:
    """Adds those that `_setting` fills: chunk size and engine only where there are any."""
    chunks, engines = any(row["chunk_tokens"] for row in rows), len({row["engine"] for row in rows}) > 1
    table.add_column("\nplacement", no_wrap=True)
    if chunks:
        table.add_column("\nchunk", justify="right")
    if engines:
        table.add_column("\nengine")
    return chunks, engines


def _setting(row: dict[str, Any], has_chunks: bool, has_engines: bool) -> list[str]:
    cells = [row["placement"]]
    if has_chunks:
        chunk = "" if row["chunk_tokens"] is None else str(row["chunk_tokens"])
        cells.append(f"{chunk}{'*' if chunk and row['best'] else ''}")
    return [*cells, row["engine"]] if has_engines else cells


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["placement"], row["chunk_tokens"], row["engine"]


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def environment() -> dict[str, Any]:
    """Where the numbers come from: machine, versions, commit where there is one."""
    from importlib.metadata import version

    commit = None
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, cwd=Path(__file__).parent
        )
        commit = found.stdout.strip() or None if found.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired):
        pass  # an installed package has no history
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("baton-serve", "torch", "ray", "transformers", "pyzmq")},
        "commit": commit,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
