"""Ticks of logarithmic axes as plain numbers, as many as there is room for. Needs matplotlib (extra `experiments`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axis import Axis
from matplotlib.ticker import Locator, MaxNLocator, NullLocator

from baton_experiments.words import number

_STEPS = ((1, 2, 5), (1, 3), (1,))
"""Of each power of ten, the first that has room."""


def plain_number(value: float, _at: float | None = None) -> str:
    """Of a tick, without powers of ten."""
    return number(value, 4 if abs(value) >= 1000 else 6)


def log_ticks(axis: Axis, *, room: float, stacked: bool = False) -> None:
    """`room`: how many characters fit along the axis, or how many lines where labels are `stacked`: a vertical one."""
    axis.set_major_locator(LogTicks(room, stacked=stacked))
    axis.set_major_formatter(plain_number)
    axis.set_minor_locator(NullLocator())


class LogTicks(Locator):
    """At 1, 2 and 5 times each power of ten if their labels have room, else at fewer."""

    def __init__(self, room: float, *, stacked: bool = False):
        self._room = room
        self._stacked = stacked

    def __call__(self) -> Sequence[float]:
        assert self.axis is not None
        low, high = self.axis.get_view_interval()
        return self.tick_values(low, high)

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        low, high = sorted((vmin, vmax))
        if not 0 < low < high:
            return []
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        for steps in _STEPS:
            ticks = _within(low, high, (step * 10.0**power for power in range(first, last + 1) for step in steps))
            if len(ticks) < 2:  # a narrow range; fewer of these would tell less
                ticks = _within(low, high, MaxNLocator(4).tick_values(low, high)) or ticks
            if self._has_room(ticks, low, high):
                return ticks
        for apart in range(2, last - first + 2):
            ticks = _within(low, high, (10.0**power for power in range(first, last + 1) if power % apart == 0))
            if self._has_room(ticks, low, high):
                return ticks
        return []

    def _has_room(self, ticks: Sequence[float], low: float, high: float) -> bool:
        def place(value: float) -> float:
            return self._room * math.log(value / low) / math.log(high / low)

        return all(place(b) - place(a) >= self._length(a, b) for a, b in pairwise(ticks))

    def _length(self, one: float, two: float) -> float:
        """From the middle of one label to that of its neighbour, at least."""
        return 1.5 if self._stacked else (len(plain_number(one)) + len(plain_number(two))) / 2 + 1


def _within(low: float, high: float, ticks: Iterable[Any]) -> list[float]:
    return [float(tick) for tick in ticks if low <= tick <= high]
