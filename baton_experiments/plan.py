"""What an experiment compares: placements with their chunk sizes, rates and seeds, and in which order they run.

A *setting* is a placement with a chunk size, and where simulated engines are compared one of these; a *point* is a
setting at one rate with one seed. Must not know clusters, results or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from baton.errors import ConfigError
from baton_experiments.placement import num_workers, parse_placement
from baton_experiments.records import Setting, Slo
from baton_experiments.work import Work

MAX_RAMP = 200
"""Requests: the ramp of a long point need not grow with it."""
MIN_RATE, MAX_RATE = 1e-4, 1e6
"""Requests per second. At fewer, nearly three hours apart, a cluster idles; no cluster gets more."""
MAX_GAP_S = 86_400.0
"""Between two arrivals: nothing happens in it, and a simulated cluster ticks through it all the same."""

EngineName = Literal["real", "simulated"]
_NEVER_IDLE = 0.01
"""From this rate on, no gap of independent arrivals is as long."""


class Point(NamedTuple):
    """One run: a setting under the work of one seed at one rate (requests per second, of the whole cluster)."""

    setting: Setting
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """For a file; different for different points."""
        return f"{self.setting.file_name}_rate{self.rate!r}_seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.setting} at {self.rate:g}/s, seed {self.seed}"


class Plan(msgspec.Struct, frozen=True):
    """What to compare, on what work, how often."""

    placements: tuple[str, ...] = ("colocated:2", "split:1+1")
    rates: tuple[float, ...] = (0.5, 1.0)
    seeds: tuple[int, ...] = (0,)
    num_requests: int = 20
    """Measured in each point; `num_ramp` more are sent before and after them."""
    work: Work = Work()
    chunk_tokens: tuple[int, ...] = ()
    """Chunk sizes to run each placement with; none: the configured one."""
    colocated_chunk_tokens: tuple[int, ...] = ()
    """The same for colocated placements alone, in place of `chunk_tokens`: so they can be had at their best."""
    engine: EngineName = "real"
    profiles: tuple[str, ...] = ()
    """Names of the engines that are simulated."""
    ramp: float = 0.1
    """Of `num_requests`: sent before the measured ones, while the cluster fills, and after, so that it stays full."""
    slo_ttft_ms: float | None = None
    slo_tbt_ms: float | None = None
    """None: derived from what single requests take."""
    slo_e2el_ms: float | None = None
    """None: no limit to the last token."""
    allow_unequal: bool = False

    @property
    def num_ramp(self) -> int:
        return min(MAX_RAMP, math.ceil(self.ramp * self.num_requests))

    @property
    def settings(self) -> tuple[Setting, ...]:
        engines = self.profiles if len(self.profiles) > 1 else ("",)
        return tuple(
            Setting(placement, chunk, engine)
            for engine in engines
            for placement in self.placements
            for chunk in self._chunks_of(placement) or (None,)
        )

    @property
    def worker_counts(self) -> dict[str, int]:
        return {placement: num_workers(placement) for placement in self.placements}

    @property
    def is_unequal(self) -> bool:
        return len(set(self.worker_counts.values())) > 1

    def check(self) -> None:
        """Raises ConfigError for what cannot be run or would say nothing, names that are no placements included."""
        options: dict[str, tuple[Any, ...]] = {
            "--placement": self.placements,
            "--rate": self.rates,
            "--seed": self.seeds,
            "--chunk": self.chunk_tokens,
            "--colocated-chunk": self.colocated_chunk_tokens,
            "--profile": self.profiles,
        }
        for option, values in options.items():
            if len(set(values)) < len(values):
                raise ConfigError(option, "names one twice", value=list(values))
        for option in ("--placement", "--rate", "--seed"):
            if not options[option]:
                raise ConfigError(option, "must be given at least once")
        if (self.engine == "simulated") != bool(self.profiles):
            needed = "is needed for a simulated engine" if not self.profiles else "is for simulated engines only"
            raise ConfigError("--profile", needed, value=list(self.profiles) or None, allowed="a profile of step times")
        for placement in self.placements:
            parse_placement(placement)
        if len({setting.file_name for setting in self.settings}) < len(self.settings):
            raise ConfigError("--profile", "names differ in signs alone, so files would not", value=list(self.profiles))
        if self.is_unequal and not self.allow_unequal:
            raise ConfigError(
                "placements",
                "use unequal resources, so the comparison would say little",
                value=self.worker_counts,
                allowed="equal numbers of workers; --allow-unequal compares them all the same, and says so",
            )
        if not all(rate > 0 and math.isfinite(rate) for rate in self.rates):
            raise ConfigError("--rate", "must be positive", value=list(self.rates), allowed="requests per second, > 0")
        if not all(MIN_RATE <= rate <= MAX_RATE for rate in self.rates):
            raise ConfigError(
                "--rate",
                "is not one that a cluster is asked at",
                value=list(self.rates),
                allowed=f"requests per second, {MIN_RATE:g} to {MAX_RATE:,.0f}",
            )
        if not all(0 <= seed < 2**63 for seed in self.seeds):
            raise ConfigError("--seed", "is out of range", value=list(self.seeds), allowed="0 to 2^63 - 1")
        if self.num_requests < 1:
            raise ConfigError("--requests", "must be positive", value=self.num_requests, allowed=">= 1")
        if not 0 <= self.ramp <= 1:
            raise ConfigError("--ramp", "is no share of the requests", value=self.ramp, allowed="0 to 1")
        for option, chunks in (("--chunk", self.chunk_tokens), ("--colocated-chunk", self.colocated_chunk_tokens)):
            if any(chunk < 1 for chunk in chunks):
                raise ConfigError(option, "must be positive", value=list(chunks), allowed="tokens, >= 1")
        if self.colocated_chunk_tokens and not any(map(_is_colocated, self.placements)):
            raise ConfigError("--colocated-chunk", "applies to none of the placements", value=list(self.placements))
        limits = {"--slo-ttft": self.slo_ttft_ms, "--slo-tbt": self.slo_tbt_ms, "--slo-e2e": self.slo_e2el_ms}
        for option, limit in limits.items():
            if limit is not None and not (limit > 0 and math.isfinite(limit)):
                raise ConfigError(option, "must be positive", value=limit, allowed="milliseconds, > 0")
        self.work.check(self.num_requests + 2 * self.num_ramp, self.seeds)
        self._check_gaps()

    def slo(self, reference: Slo | None) -> Slo | None:
        """What was asked for, the rest from `reference`; None where neither says it."""
        ttft, tbt = self.slo_ttft_ms, self.slo_tbt_ms
        if reference is not None:
            ttft = reference.ttft_ms if ttft is None else ttft
            tbt = reference.tbt_ms if tbt is None else tbt
        return None if ttft is None or tbt is None else Slo(ttft, tbt, self.slo_e2el_ms)

    def schedule(self, groups: Sequence[Sequence[Setting]] | None = None) -> list[Point]:
        """All points, in the order in which they run: settings take turns, and another one begins each round.

        So a slow spell of the machine falls on none of them alone. `groups`: settings that are up together, where not
        all can be; then the groups take turns seed by seed.
        """
        rounds = 0
        points = []
        for seed in self.seeds:
            for group in groups if groups is not None else [self.settings]:
                for rate in self.rates:
                    first = rounds % len(group)
                    points += [Point(setting, rate, seed) for setting in (*group[first:], *group[:first])]
                    rounds += 1
        return points

    def _check_gaps(self) -> None:
        """Raises ConfigError for requests that are more than `MAX_GAP_S` apart."""
        rate = min(self.rates)
        if rate >= _NEVER_IDLE and self.work.arrivals in ("poisson", "constant"):
            return
        for seed in self.seeds:
            before = 0.0
            for shape in self.work.of(
                rate=rate, seed=seed, num_requests=self.num_requests + 2 * self.num_ramp, max_model_len=1 << 30
            ):
                if shape.at_s - before > MAX_GAP_S:
                    raise ConfigError(
                        "--rate",
                        f"leaves nothing to do for {(shape.at_s - before) / 3600:,.0f} hours between two requests of "
                        f"seed {seed}",
                        value=rate,
                        allowed=f"at most {MAX_GAP_S / 3600:.0f} hours; a higher rate, or more even --arrivals",
                    )
                before = shape.at_s

    def _chunks_of(self, placement: str) -> tuple[int, ...]:
        if self.colocated_chunk_tokens and _is_colocated(placement):
            return self.colocated_chunk_tokens
        return self.chunk_tokens


class Estimate:
    """How long the rest takes: by the arrivals of what is to come, and by how much longer than that points took so far.

    `planned_s`: from the first arrival to the last, of all points together. `at_planned_speed`: a point takes at least
    about that long, as a real one does; a simulated one may take any time. `now` is of one clock, in seconds.
    """

    def __init__(self, planned_s: float, *, at_planned_speed: bool):
        self.planned_s = planned_s
        self._first_guess = 1.0 if at_planned_speed else None
        self._done = self._took = self._present = 0.0
        self._began: float | None = None

    def begin(self, planned_s: float, now: float) -> None:
        """A point that is planned to take so long starts."""
        self._present, self._began = planned_s, now

    def end(self, planned_s: float, took_s: float) -> None:
        """Such a point has ended, in this run or a former one."""
        self._done += planned_s
        self._took += took_s
        self._began = None

    def done(self, now: float) -> float:
        """Planned seconds that are over, of all points."""
        factor = self._factor()
        if self._began is None or not factor:
            return self._done
        return self._done + min(self._present, (now - self._began) / factor)

    def left(self, now: float) -> float | None:
        """Seconds; None: nothing is known yet."""
        factor = self._factor()
        return None if factor is None else max(0.0, self.planned_s - self.done(now)) * factor

    def _factor(self) -> float | None:
        return self._took / self._done if self._done > 0 and self._took > 0 else self._first_guess


def _is_colocated(placement: str) -> bool:
    return placement.startswith("colocated:")
