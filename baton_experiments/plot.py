"""Plots of an experiment's records. Needs matplotlib (extra `demo`)."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np

from baton_experiments.experiment import RequestRecord

mpl.use("Agg")  # files only; a server has no screen
from matplotlib import pyplot as plt


def plot_latency(records: list[RequestRecord], path: Path) -> None:
    """Cumulative distributions of TTFT and TBT, one line per placement, one row per rate."""
    rates = sorted({r.rate for r in records})
    placements = sorted({r.placement for r in records})
    figure, axes = plt.subplots(len(rates), 2, figsize=(9, 3 * len(rates)), squeeze=False)
    for row, rate in enumerate(rates):
        for placement in placements:
            group = [r for r in records if r.rate == rate and r.placement == placement and r.error is None]
            series = ([r.ttft_ms for r in group if r.ttft_ms is not None], [gap for r in group for gap in r.tbt_ms])
            for axis, values in zip(axes[row], series, strict=True):
                if values:
                    axis.step(
                        np.sort(values), np.arange(1, len(values) + 1) / len(values), where="post", label=placement
                    )
        for axis, name in zip(axes[row], ("time to first token", "time between tokens"), strict=True):
            axis.set_xlabel(f"{name} (ms)")
            axis.set_ylabel("share of requests" if "first" in name else "share of gaps")
            axis.set_title(f"{rate:g} requests/s")
            axis.set_ylim(0, 1.02)
            axis.grid(alpha=0.3)
            if axis.has_data():
                axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
