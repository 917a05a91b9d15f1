"""When requests arrive: processes that yield arrival times, in seconds, without end.

Each is a sequence of gaps of mean 1 that depends on the seed alone, stretched by the rate. So the arrivals
at one rate are those at another, scaled in time, and rates are compared on the same pattern. Gaps are whole
multiples of 2^-24 of the mean gap: sums are exact, and the same on every platform.

Must not know lengths, prompts or files.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from itertools import cycle
from statistics import NormalDist
from typing import Protocol

import msgspec

from baton.errors import ConfigError

_GRID = 1 << 24
_NORMAL = NormalDist()


class Arrivals(Protocol):
    """An arrival process."""

    def times(self, seed: int) -> Iterator[float]:
        """Seconds since the start, not falling. The same seed gives the same times."""


class _Steady(msgspec.Struct, frozen=True):
    """A process of one mean rate: its pattern of gaps, stretched. `rate` in requests per second."""

    rate: float

    def __post_init__(self) -> None:
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise ConfigError("rate", "must be positive", value=self.rate, allowed="requests per second, > 0")

    def times(self, seed: int) -> Iterator[float]:
        return (total / _GRID / self.rate for total in self.units(seed))

    def units(self, seed: int) -> Iterator[int]:
        """Arrivals at a rate of 1, in multiples of 1 / `_GRID`."""
        raise NotImplementedError


class Poisson(_Steady, frozen=True, tag="poisson"):
    """Independent users: gaps exponential, coefficient of variation 1."""

    def units(self, seed: int) -> Iterator[int]:
        draw = random.Random(f"arrivals/{seed}")
        return _summed(-math.log(1.0 - draw.random()) for _ in _forever())


class Gamma(_Steady, frozen=True, tag="gamma"):
    """Gaps of a gamma distribution. `cv` is their standard deviation over their mean: above 1 bursts, below 1 evenness.

    The shape is 1 / cv^2 (Marsaglia and Tsang, "A simple method for generating gamma variables", 2000).
    """

    cv: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.cv > 0 and math.isfinite(self.cv)):
            raise ConfigError("cv", "must be positive", value=self.cv, allowed="> 0; `constant` has none")

    def units(self, seed: int) -> Iterator[int]:
        draw = random.Random(f"arrivals/{seed}")
        shape = 1.0 / (self.cv * self.cv)
        return _summed(_gamma(draw, shape) / shape for _ in _forever())


class Constant(_Steady, frozen=True, tag="constant"):
    """One request every 1 / `rate` seconds, the first after one gap."""

    def units(self, seed: int) -> Iterator[int]:
        return _summed(1.0 for _ in _forever())


class Phase(msgspec.Struct, frozen=True):
    """`seconds` at `rate` times the process's own; 0 is a pause."""

    seconds: float
    rate: float


class Phased(msgspec.Struct, frozen=True, tag="phased"):
    """A process whose rate changes by phases, which repeat: load steps, days and nights.

    Phases do not restart the process: the gap in which one begins is stretched for the part that lies in it, so a
    Poisson process stays one, of that rate. Its mean rate is the process's times the phases' mean.
    """

    process: Poisson | Gamma | Constant
    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        for phase in self.phases:
            if not (0 < phase.seconds < math.inf and 0 <= phase.rate < math.inf):
                raise ConfigError(
                    "phases", "must have a length and a rate", value=phase, allowed="seconds > 0, rate >= 0"
                )
        if not any(phase.rate > 0 for phase in self.phases):
            raise ConfigError("phases", "must not all pause", value=self.phases)

    def times(self, seed: int) -> Iterator[float]:
        phases = cycle(self.phases)
        phase = next(phases)
        start = 0.0  # of the phase
        done = 0.0  # arrivals expected before it, of a process of rate 1
        for units in self.process.units(seed):
            due = units / _GRID
            while due >= done + phase.seconds * phase.rate * self.process.rate:
                start, done = start + phase.seconds, done + phase.seconds * phase.rate * self.process.rate
                phase = next(phases)
            yield start + (due - done) / (phase.rate * self.process.rate)


class Recorded:
    """Arrival times from elsewhere, such as a trace's, whatever the seed. Ends where they do."""

    def __init__(self, times: Iterable[float]):
        self._times = times

    def times(self, seed: int) -> Iterator[float]:
        return iter(self._times)


ArrivalProcess = Poisson | Gamma | Constant | Phased
"""Those that are plain data, for a configuration."""


def _forever() -> Iterator[None]:
    while True:
        yield None


def _summed(gaps: Iterator[float]) -> Iterator[int]:
    total = 0
    for gap in gaps:
        total += round(gap * _GRID)
        yield total


def _gamma(draw: random.Random, shape: float) -> float:
    # Only `random()` is used: it alone is promised to give the same numbers in every version of Python.
    if shape < 1:
        return _gamma(draw, shape + 1) * math.pow(1.0 - draw.random(), 1.0 / shape)
    d = shape - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    while True:
        x = _NORMAL.inv_cdf(draw.random() or 0.5)
        v = (1.0 + c * x) ** 3
        if v > 0 and math.log(1.0 - draw.random()) < 0.5 * x * x + d - d * v + d * math.log(v):
            return d * v
