"""From request records to a table, a summary and a plot. Reads records only; runs nothing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich import box
from rich.table import Table

from baton_experiments.experiment import RequestRecord

PERCENTILES = (50, 90, 99)


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p99 and max of `values` (linear interpolation), in their unit; None for no values."""
    if not values:
        return None
    points = np.percentile(np.asarray(values, dtype=np.float64), PERCENTILES)
    return {**{f"p{p}": float(v) for p, v in zip(PERCENTILES, points, strict=True)}, "max": float(max(values))}


def summarize(records: Iterable[RequestRecord]) -> list[dict[str, Any]]:
    """One point per placement and rate, over its seeds.

    `ttft_ms`, `tbt_ms` and `tpot_ms` (a request's mean gap) are distributions; `output_tokens_per_s` is
    all tokens over the time from the first arrival to the last token, summed over seeds.
    """
    groups: dict[tuple[float, str], list[RequestRecord]] = defaultdict(list)
    for record in records:
        groups[record.rate, record.placement].append(record)
    points = []
    for (rate, placement), group in sorted(groups.items()):
        good = [r for r in group if r.error is None]
        points.append(
            {
                "placement": placement,
                "rate": rate,
                "seeds": sorted({r.seed for r in group}),
                "requests": len(group),
                "errors": len(group) - len(good),
                "ttft_ms": distribution([r.ttft_ms for r in good if r.ttft_ms is not None]),
                "tbt_ms": distribution([gap for r in good for gap in r.tbt_ms]),
                "tpot_ms": distribution([float(np.mean(r.tbt_ms)) for r in good if r.tbt_ms]),
                "output_tokens_per_s": _throughput(good),
                "kv_bytes": sum(r.kv_bytes for r in good),
            }
        )
    return points


def _throughput(records: list[RequestRecord]) -> float | None:
    seconds = 0.0
    for seed in {r.seed for r in records}:
        run = [r for r in records if r.seed == seed]
        ends = [r.at_s + r.latency_ms / 1e3 for r in run if r.latency_ms is not None]
        seconds += max(ends, default=0.0) - min((r.at_s for r in run), default=0.0)
    return sum(r.output_tokens for r in records) / seconds if seconds > 0 else None


def table(points: list[dict[str, Any]]) -> Table:
    """The summary for a terminal."""
    requests = sorted({point["requests"] for point in points})
    counts = "/".join(map(str, requests))
    title = f"TTFT and time between tokens (TBT), in ms; {counts} requests a row"
    result = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("rate\n/s", justify="right")
    result.add_column("\nplacement", no_wrap=True)
    for name in ("TTFT", "TBT"):
        for statistic in ("p50", "p90", "p99", "max"):
            result.add_column(f"{name if statistic == 'p50' else ''}\n{statistic}", justify="right", no_wrap=True)
    result.add_column("tokens\n/s", justify="right")
    for point in points:
        cells = [f"{point['rate']:g}", point["placement"]]
        for name in ("ttft_ms", "tbt_ms"):
            values = point[name] or {}
            cells += [f"{values[key]:.0f}" if key in values else "-" for key in ("p50", "p90", "p99", "max")]
        rate = point["output_tokens_per_s"]
        result.add_row(*cells, f"{rate:.1f}" if rate else "-")
    return result


def comparisons(points: list[dict[str, Any]]) -> list[str]:
    """What the table says in words: for each rate, placements by their longest gap and their median TTFT."""
    lines = []
    for rate in sorted({point["rate"] for point in points}):
        group = [p for p in points if p["rate"] == rate and p["tbt_ms"] and p["ttft_ms"]]
        if len(group) > 1:
            gaps = sorted(group, key=lambda p: float(p["tbt_ms"]["max"]))
            waits = sorted(group, key=lambda p: float(p["ttft_ms"]["p50"]))
            lines.append(
                f"at {rate:g}/s the longest pause between tokens was "
                + ", ".join(f"{p['tbt_ms']['max']:.0f} ms with {p['placement']}" for p in gaps)
                + "; the median first token came after "
                + ", ".join(f"{p['ttft_ms']['p50']:.0f} ms with {p['placement']}" for p in waits)
            )
    return lines


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


def write_results(folder: Path, records: list[RequestRecord], resolved: dict[str, Any]) -> Path:
    """`records.jsonl`, `summary.json` and, where matplotlib is installed, `latency.png`. Returns the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "records.jsonl").open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(msgspec.to_builtins(record)) + "\n")
    points = summarize(records)
    summary = folder / "summary.json"
    summary.write_text(
        json.dumps({"points": points, "config": resolved, "environment": environment()}, indent=1), encoding="utf-8"
    )
    try:
        from baton_experiments.plot import plot_latency
    except ImportError:
        return summary  # plots need the extra `demo`
    if any(record.error is None for record in records):
        plot_latency(records, folder / "latency.png")
    return summary
