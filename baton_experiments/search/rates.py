"""The highest rate at which a promise is kept, and attainment between the rates that were tried.

Pure; must not know what is run at a rate.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

MAX_DOUBLINGS = 20
"""From a guess up or down, before nothing is expected to be found."""


def highest_rate(
    keeps: Callable[[float], bool], guess: float, *, tolerance: float, step: float = 1.15, lowest: float = 0.0
) -> tuple[float, float]:
    """`(kept, missed)`: a rate at which the promise is kept, and one at most `1 + tolerance` times as high where not.

    Goes from `guess` by a factor that starts at `step` and is squared each time, until it is kept on one side and
    missed on the other; then the interval is halved, on a logarithmic scale. Where more is kept at some higher rate
    than below it, by chance, it ends at one of several crossings. `(0, lowest)` if no rate keeps it, `(highest, inf)`
    if all do. No rate below `lowest` is tried unless it is the guess.
    """
    assert guess > 0 and step > 1 and tolerance > 0, (guess, step, tolerance)
    rate = guess
    kept, missed = (rate, math.inf) if keeps(rate) else (0.0, rate)
    up = kept > 0
    for _ in range(MAX_DOUBLINGS):
        if (kept > 0 and missed < math.inf) or (not up and rate / step < lowest):
            break
        rate = rate * step if up else rate / step
        step = min(step * step, 2.0)
        if keeps(rate):
            kept = rate
        else:
            missed = rate
    while kept > 0 and missed < math.inf and missed / kept > 1 + tolerance:
        rate = math.sqrt(kept * missed)
        if keeps(rate):
            kept = rate
        else:
            missed = rate
    return kept, missed


class Attainment:
    """Share of requests in time by rate, between measured rates in a straight line, and never rising with the rate.

    Beyond the highest measured rate nothing is promised: 0.
    """

    def __init__(self, points: Sequence[tuple[float, float]]):
        """`points`: (rate, share), at least one. Where a share rises with the rate, by chance, the higher one counts.

        The work that is judged differs a little between rates, as more requests go by while the cluster warms up.
        """
        best = 0.0
        shares: list[tuple[float, float]] = []
        for rate, share in sorted(points, reverse=True):
            best = max(best, share)
            if not shares or shares[-1][0] != rate:
                shares.append((rate, best))
        self._rates = [rate for rate, _ in reversed(shares)]
        self._shares = [share for _, share in reversed(shares)]

    def at(self, rate: float) -> float:
        i = bisect_left(self._rates, rate)
        if i == len(self._rates):
            return 0.0
        if i == 0 or self._rates[i] == rate:
            return self._shares[i]
        low, high = self._rates[i - 1], self._rates[i]
        above, below = self._shares[i - 1], self._shares[i]
        return max(below, above + (below - above) * (rate - low) / (high - low))


def crossing(attainment: Callable[[float], float], share: float, low: float, high: float) -> float:
    """The highest rate in [low, high] with at least `share`, if attainment never rises; 0 if `low` has less."""
    if attainment(low) < share:
        return 0.0
    if attainment(high) >= share:
        return high
    for _ in range(50):
        middle = (low + high) / 2
        if attainment(middle) >= share:
            low = middle
        else:
            high = middle
    return low


def neighbours(counts: Sequence[int], count: int) -> tuple[int, int, float]:
    """The sampled counts around `count`, and how far between them it lies on a logarithmic scale, 0 to 1."""
    i = bisect_right(counts, count)
    if i == 0:
        return counts[0], counts[0], 0.0
    below = counts[i - 1]
    if below == count or i == len(counts):
        return below, below, 0.0
    above = counts[i]
    return below, above, math.log(count / below) / math.log(above / below)
