"""What the figures of an experiment have in common: colours, dashes, type. Needs matplotlib (extra `experiments`).

One colour per placement in all figures, of Okabe and Ito's palette, which colour-blind people tell apart.
"""

from __future__ import annotations

from typing import Any

from baton_experiments.records import Setting
from baton_experiments.study import Study

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_WIDTHS = (2.8, 1.6, 0.9)
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 2.8,  # of two dashes
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.hashsalt": "baton",  # the same figure, the same bytes
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
}
WIDTH = 9.6
"""Inches, of each figure."""


class Look:
    """What a setting looks like: colour by placement, dashes by engine, thin where it is not the placement's best."""

    def __init__(self, study: Study):
        self._placements = list(dict.fromkeys(s.placement for s in study.settings))
        self._engines = list(dict.fromkeys(s.engine for s in study.settings))
        self._kinds = list(dict.fromkeys((s.placement, s.engine) for s in study.settings))
        self._best = set(study.best.values())

    def colour(self, setting: Setting) -> str:
        return _COLOURS[self._placements.index(setting.placement) % len(_COLOURS)]

    def line(self, setting: Setting) -> dict[str, Any]:
        """Later placements are narrower and above, so that those that coincide are all seen."""
        is_best = setting in self._best
        kind = self._kinds.index((setting.placement, setting.engine))
        width = _WIDTHS[self._placements.index(setting.placement) % len(_WIDTHS)]
        return {
            "color": self.colour(setting),
            "linestyle": DASHES[self._engines.index(setting.engine) % len(DASHES)],
            "marker": _MARKERS[kind % len(_MARKERS)],
            "markersize": 3 + 1.8 * width,
            "alpha": 1.0 if is_best else 0.35,
            "linewidth": width if is_best else 1.0,
            "label": str(setting),
        }

    def plain(self, setting: Setting) -> dict[str, Any]:
        return {key: value for key, value in self.line(setting).items() if not key.startswith("marker")}
