"""How long prompts and outputs are: distributions of token counts, drawn by their quantile functions.

Pure: a distribution is asked for the length at a quantile in [0, 1), and whoever asks brings the random
number. One number a length, so that two workloads of one seed differ in nothing but their distributions.
Lengths are rounded to whole tokens, which also absorbs what `math` may differ by between platforms (one
unit in the last place, against a rounding boundary: about once in 10^12 draws).

Must not know prompts, arrivals or files.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, pairwise
from statistics import NormalDist
from typing import Protocol

import msgspec

from baton.errors import ConfigError

_NORMAL = NormalDist()
_MEAN_STEPS = 20_000


class LengthDistribution(Protocol):
    """A distribution of lengths in tokens, each at least 1."""

    @property
    def longest(self) -> int | None:
        """No length is above it; None: any may come."""

    def at(self, quantile: float) -> int:
        """The length at `quantile`, in [0, 1)."""

    def scaled(self, factor: float) -> LengthDistribution:
        """The same with all lengths multiplied, for a smaller or larger model."""


class Fixed(msgspec.Struct, frozen=True, tag="fixed"):
    """Always the same."""

    tokens: int

    def __post_init__(self) -> None:
        _require_tokens("tokens", self.tokens)

    @property
    def longest(self) -> int:
        return self.tokens

    def at(self, quantile: float) -> int:
        return self.tokens

    def scaled(self, factor: float) -> Fixed:
        return Fixed(_times(self.tokens, factor))


class Uniform(msgspec.Struct, frozen=True, tag="uniform"):
    """Every length from `low` to `high`, both included, equally often."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _require_tokens("low", self.low)
        _require_order("low", self.low, self.high)

    @property
    def longest(self) -> int:
        return self.high

    def at(self, quantile: float) -> int:
        return self.low + int(quantile * (self.high - self.low + 1))

    def scaled(self, factor: float) -> Uniform:
        return Uniform(_times(self.low, factor), _times(self.high, factor))


class LogNormal(msgspec.Struct, frozen=True, tag="lognormal"):
    """exp of a normal distribution: most lengths moderate, a long tail. Those beyond `low` and `high` are set to them.

    From other statistics: `from_mean_median`, `from_mean_cv`, `from_percentiles`; they leave `low` and `high` out
    of account, so a `high` that cuts much lowers the mean (`mean_tokens` tells).
    """

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    low: int = 1
    high: int | None = None

    def __post_init__(self) -> None:
        _require_tokens("low", self.low)
        if not (self.median > 0 and math.isfinite(self.median)):
            raise ConfigError("median", "must be positive", value=self.median, allowed="> 0")
        if not (self.sigma >= 0 and math.isfinite(self.sigma)):
            raise ConfigError("sigma", "must not be negative", value=self.sigma, allowed=">= 0")
        if self.high is not None:
            _require_order("low", self.low, self.high)

    @classmethod
    def from_mean_median(cls, mean: float, median: float, *, low: int = 1, high: int | None = None) -> LogNormal:
        """Raises ConfigError if the mean is below the median, which no lognormal distribution has."""
        if not mean >= median > 0:
            raise ConfigError("mean", "must be at least the median", value=mean, allowed=f">= {median}")
        return cls(median, math.sqrt(2 * math.log(mean / median)), low, high)

    @classmethod
    def from_mean_cv(cls, mean: float, cv: float, *, low: int = 1, high: int | None = None) -> LogNormal:
        """`cv`: standard deviation over mean."""
        if not cv >= 0:
            raise ConfigError("cv", "must not be negative", value=cv, allowed=">= 0")
        variance = math.log1p(cv * cv)
        return cls(mean * math.exp(-variance / 2), math.sqrt(variance), low, high)

    @classmethod
    def from_percentiles(
        cls, first: tuple[float, float], second: tuple[float, float], *, low: int = 1, high: int | None = None
    ) -> LogNormal:
        """Through two (percentile, length) points, such as (50, 1020) and (90, 2734)."""
        (p, a), (q, b) = sorted((first, second))
        if not (0 < p < q < 100 and 0 < a <= b):
            raise ConfigError(
                "percentiles", "must rise with their lengths", value=(first, second), allowed="0 < p < 100"
            )
        z, y = _NORMAL.inv_cdf(p / 100), _NORMAL.inv_cdf(q / 100)
        sigma = math.log(b / a) / (y - z)
        return cls(a * math.exp(-sigma * z), sigma, low, high)

    @property
    def longest(self) -> int | None:
        return self.high

    def at(self, quantile: float) -> int:
        if quantile <= 0:
            return self.low
        length = round(self.median * math.exp(self.sigma * _NORMAL.inv_cdf(quantile)))
        return max(self.low, length if self.high is None else min(length, self.high))

    def scaled(self, factor: float) -> LogNormal:
        high = None if self.high is None else _times(self.high, factor)
        return LogNormal(self.median * factor, self.sigma, _times(self.low, factor), high)


class Quantiles(msgspec.Struct, frozen=True, tag="quantiles"):
    """Through published percentiles: a distribution with more than one hump.

    Between two of them the logarithm of the length rises evenly, which suits long tails better than the length would.
    """

    percentiles: tuple[float, ...]
    """Rising, from 0 to 100."""
    tokens: tuple[float, ...]
    """The length at each, not falling; scaled ones are not rounded, as the lengths between them hang on them."""

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in pairwise(self.percentiles))
        if len(self.percentiles) < 2 or self.percentiles[0] != 0 or self.percentiles[-1] != 100 or not rises:
            raise ConfigError("percentiles", "must rise from 0 to 100", value=self.percentiles)
        if len(self.tokens) != len(self.percentiles) or any(a > b for a, b in pairwise(self.tokens)):
            raise ConfigError("tokens", "must be one length per percentile, not falling", value=self.tokens)
        _require_tokens("tokens", self.tokens[0])

    @property
    def longest(self) -> int:
        return round(self.tokens[-1])

    def at(self, quantile: float) -> int:
        percentile = quantile * 100
        i = min(bisect_right(self.percentiles, percentile), len(self.percentiles) - 1)
        p, q, a, b = self.percentiles[i - 1], self.percentiles[i], self.tokens[i - 1], self.tokens[i]
        return round(a * math.pow(b / a, (percentile - p) / (q - p)))

    def scaled(self, factor: float) -> Quantiles:
        _require_factor(factor)
        return Quantiles(self.percentiles, tuple(max(1.0, tokens * factor) for tokens in self.tokens))


class Empirical(msgspec.Struct, frozen=True, tag="empirical"):
    """The lengths that were seen, as often as they were seen."""

    tokens: tuple[int, ...]
    """Each length once, rising."""
    at_most: tuple[int, ...]
    """How many of those seen were `tokens[i]` or shorter, rising."""

    def __post_init__(self) -> None:
        if not self.tokens or any(a >= b for a, b in pairwise(self.tokens)):
            raise ConfigError("tokens", "must rise, and be one at least", value=self.tokens)
        if len(self.at_most) != len(self.tokens) or any(a >= b for a, b in pairwise((0, *self.at_most))):
            raise ConfigError("at_most", "must rise, one for each length", value=self.at_most)
        _require_tokens("tokens", self.tokens[0])

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Empirical:
        """Of all `lengths`, read once; holds a counter per distinct length."""
        return cls._counted(Counter(lengths))

    @classmethod
    def _counted(cls, counts: Counter[int]) -> Empirical:
        tokens = sorted(counts)
        return cls(tuple(tokens), tuple(accumulate(counts[length] for length in tokens)))

    @property
    def longest(self) -> int:
        return self.tokens[-1]

    def at(self, quantile: float) -> int:
        return self.tokens[bisect_right(self.at_most, int(quantile * self.at_most[-1]))]

    def scaled(self, factor: float) -> Empirical:
        counts: Counter[int] = Counter()
        for length, (before, at_most) in zip(self.tokens, pairwise((0, *self.at_most)), strict=True):
            counts[_times(length, factor)] += at_most - before
        return Empirical._counted(counts)


Distribution = Fixed | Uniform | LogNormal | Quantiles | Empirical


class TokenLengths(msgspec.Struct, frozen=True):
    """Prompts and outputs, drawn independently of each other."""

    prompt: Distribution
    output: Distribution

    def scaled(self, factor: float) -> TokenLengths:
        return TokenLengths(self.prompt.scaled(factor), self.output.scaled(factor))


class Lengths(msgspec.Struct, frozen=True):
    """Uniform prompt and output lengths, in tokens, both ends included."""

    prompt: tuple[int, int] = (32, 96)
    output: tuple[int, int] = (8, 24)

    def distributions(self) -> TokenLengths:
        return TokenLengths(Uniform(*self.prompt), Uniform(*self.output))


def mean_tokens(distribution: LengthDistribution) -> float:
    """The mean length, from evenly spaced quantiles: what a long run comes to, cuts included."""
    return sum(distribution.at((i + 0.5) / _MEAN_STEPS) for i in range(_MEAN_STEPS)) / _MEAN_STEPS


def _times(tokens: int, factor: float) -> int:
    _require_factor(factor)
    return max(1, round(tokens * factor))


def _require_factor(factor: float) -> None:
    if not (factor > 0 and math.isfinite(factor)):
        raise ConfigError("factor", "must be positive", value=factor, allowed="> 0")


def _require_tokens(name: str, tokens: float) -> None:
    if tokens < 1:
        raise ConfigError(name, "must be at least one token", value=tokens, allowed=">= 1")


def _require_order(name: str, low: int, high: int) -> None:
    if low > high:
        raise ConfigError(name, "is above the highest length", value=low, allowed=f"<= {high}")
