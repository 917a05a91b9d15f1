"""PNGs of an anatomy. Needs matplotlib (extra `demo`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files only; a server has no screen
from matplotlib import pyplot as plt

from baton_experiments.plot_ticks import log_ticks

ALLOCATIONS = {
    "max": "reserve max",
    "pow2": "power of two",
    "oracle": "oracle",
    "oracle_first_fit": "oracle, no buddies",
    "paged": "paged",
}
PARTS = {
    "token": ("tokens", "#2b7a4b"),
    "reservation": ("reservation", "#e0b040"),
    "internal": ("internal fragmentation", "#d9733f"),
    "external": ("external, and not given out", "#9aa0a6"),
}


def plot_anatomy(data: dict[str, Any], folder: Path) -> list[Path]:
    """What there is of `data` (`baton_experiments.anatomy.report`, with `measured` where it was). Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = data.get("measured") or {}
    plots: dict[str, Callable[[Any], None]] = {}
    if data["device"] is not None:
        plots["roofline"] = lambda axes: _roofline(axes, data["prefill"], data["decode"], data["device"])
    if data["kv_memory_use"] is not None:
        plots["kv-memory-use"] = lambda axes: _memory_use(axes, data["kv_memory_use"])
    work = measured if measured else data
    key, unit, label = ("seconds", 1.0, "seconds, measured") if measured else ("operations", 1e9, "GFLOP")
    plots["work"] = lambda axes: _work(axes, work["work_with_cache"], work["work_without_cache"], key, unit, label)
    plots["kv-share"] = lambda axes: _share(
        axes, data["decode"], measured.get("kv_share_of_bytes"), data["model"]["name"]
    )
    if measured:
        plots["utilization"] = lambda axes: _utilization(axes, measured["utilization"])
    files = []
    for name, draw in plots.items():
        figure, axes = plt.subplots(figsize=(7, 4.2))
        draw(axes)
        figure.tight_layout()
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=120)
        plt.close(figure)
    return files


def _roofline(axes: Any, prefills: list[dict[str, Any]], decodes: list[dict[str, Any]], device: dict[str, Any]) -> None:
    points = [e["intensity"] for e in (*prefills, *decodes)]
    xs = [min(*points, device["ridge"]) / 2, device["ridge"], max(*points, device["ridge"]) * 2]
    axes.loglog(
        xs, [min(device["tflops"], x * device["gb_per_s"] / 1e3) for x in xs], color="black", label=device["name"]
    )
    for entries, key, name, marker, beside in (
        (prefills, "tokens", "prefill, by tokens", "s", (-6, 5)),
        (decodes, "batch", "decode, by batch", "o", (16, -10)),
    ):
        ys = [min(device["tflops"], e["intensity"] * device["gb_per_s"] / 1e3) for e in entries]
        axes.plot([e["intensity"] for e in entries], ys, marker, label=name)
        for entry, y in zip(entries, ys, strict=True):
            place = {"textcoords": "offset points", "xytext": beside, "ha": "right"}
            axes.annotate(f"{entry[key]:,}", (entry["intensity"], y), fontsize=7, **place)
    _plain_ticks(axes)
    axes.axvline(device["ridge"], color="gray", linewidth=0.8, linestyle=":")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("attainable TFLOP/s")
    axes.set_title("left of the dotted line memory is the limit, right of it arithmetic")
    axes.legend()
    axes.grid(alpha=0.3)


def _memory_use(axes: Any, use: dict[str, Any]) -> None:
    names = [name for name in ALLOCATIONS if name in use["usage"]]
    bottom = [0.0] * len(names)
    for part, (label, color) in PARTS.items():
        values = [100 * use["usage"][name][part] for name in names]
        axes.bar(range(len(names)), values, bottom=bottom, label=label, color=color)
        if part == "token":
            for x, value in enumerate(values):
                axes.text(x, max(value / 2, 2.5), f"{value:.1f} %", ha="center", va="center", color="white", fontsize=8)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    axes.set_xticks(range(len(names)), [ALLOCATIONS[name] for name in names], fontsize=8)
    axes.set_ylabel("% of KV memory")
    axes.set_title(f"{use['lengths']}, {use['slots']:,} token slots")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncol=4)


def _work(
    axes: Any, with_cache: list[dict[str, Any]], without: list[dict[str, Any]], key: str, unit: float, label: str
) -> None:
    for entries, name in ((without, "without KV cache"), (with_cache, "with KV cache")):
        axes.loglog([e["generated"] for e in entries], [e[key] / unit for e in entries], "o-", label=name)
    _plain_ticks(axes)
    axes.set_xlabel("generated tokens")
    axes.set_ylabel(label)
    axes.set_title("an answer token by token")
    axes.legend()
    axes.grid(alpha=0.3)


def _share(axes: Any, decodes: list[dict[str, Any]], measured: list[dict[str, Any]] | None, name: str) -> None:
    axes.semilogx(
        [e["batch"] for e in decodes],
        [100 * e["kv_share_of_bytes"] for e in decodes],
        "o-",
        label=f"of bytes, at {decodes[0]['context']:,} tokens of context",
    )
    if measured:
        xs = [e["batch"] for e in measured]
        context = measured[0]["context"]
        axes.semilogx(xs, [100 * e["share"] for e in measured], "s-", label=f"of bytes, at {context:,} tokens, as run")
        axes.semilogx(xs, [100 * e["share_of_time"] for e in measured], "^--", label=f"of time, at {context:,} tokens")
    _plain_ticks(axes, y=False)
    axes.set_xlabel("decode batch")
    axes.set_ylabel("% that is KV cache")
    axes.set_title(f"what a decode step of {name} reads")
    axes.legend()
    axes.grid(alpha=0.3)


def _plain_ticks(axes: Any, *, y: bool = True) -> None:
    """Of a figure of this module's size."""
    log_ticks(axes.xaxis, room=70)
    if y:
        log_ticks(axes.yaxis, room=18, stacked=True)


def _utilization(axes: Any, utilization: dict[str, Any]) -> None:
    entries = [(f"prefill {e['tokens']}", e) for e in utilization["prefill"]]
    entries += [(f"decode {e['batch']}", e) for e in utilization["decode"]]
    xs = range(len(entries))
    axes.bar([x - 0.2 for x in xs], [100 * e["of_peak"] for _, e in entries], 0.4, label="of the arithmetic peak")
    axes.bar([x + 0.2 for x in xs], [100 * e["of_bandwidth"] for _, e in entries], 0.4, label="of the bandwidth")
    axes.set_xticks(list(xs), [name for name, _ in entries], rotation=45, ha="right", fontsize=8)
    axes.set_ylabel("%")
    axes.set_title("measured shares of this machine's measured peaks")
    axes.legend()
