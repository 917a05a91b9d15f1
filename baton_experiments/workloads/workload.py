"""A workload: a stream of request shapes, and what was done to it in words and numbers.

A `Workload` is read as often as one likes, each time from the start and one request at a time; nothing is
held but what a change needs (a counter, a random stream). Each change returns a new workload whose
`description` states it, with counts from the last complete pass, so that a result says what was run:

    read_trace("azure.csv").first(1000).at_rate(4.0).scale_lengths(prompt=0.125).clip(2048)

Must not know file formats, placements or clusters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from baton.errors import ConfigError
from baton_experiments.workloads.arrivals import Arrivals
from baton_experiments.workloads.lengths import TokenLengths
from baton_experiments.workloads.request import PlannedRequest, RequestShape, plan

Shapes = Iterator[RequestShape]
Counts = dict[str, int]
Step = Callable[[Shapes, Counts], Shapes]


class SharedPrefixes(msgspec.Struct, frozen=True):
    """Prompts begin with one of `num` system prompts or documents of `tokens` tokens, each equally often.

    A prompt's length includes it; a shorter prompt is the beginning of its prefix.
    """

    num: int
    tokens: int

    def __post_init__(self) -> None:
        for name, value in (("num", self.num), ("tokens", self.tokens)):
            if value < 1:
                raise ConfigError(name, "must be positive", value=value, allowed=">= 1")


class Workload:
    """Request shapes in order of arrival. Iterating reads the source anew."""

    def __init__(
        self,
        source: Callable[[Counts], Shapes],
        description: dict[str, Any],
        *,
        has_times: bool = True,
        changes: tuple[tuple[dict[str, Any], Step], ...] = (),
    ):
        """`source` starts a pass and counts into the dict it is given, which ends up in the description."""
        self._source, self._description, self._changes = source, description, changes
        self._counts: tuple[Counts, ...] = tuple({} for _ in range(len(changes) + 1))
        self.has_times = has_times
        """Whether `at_s` is what the source says; if not, it is 0 and `with_arrivals` is needed."""

    def __iter__(self) -> Shapes:
        counts: tuple[Counts, ...] = tuple({} for _ in self._counts)
        stream = _counted(self._source(counts[0]), counts[0])
        for (_, step), tally in zip(self._changes, counts[1:], strict=True):
            stream = _counted(step(stream, tally), tally)
        yield from stream
        self._counts = counts

    @property
    def description(self) -> dict[str, Any]:
        """Source and changes in order, as plain data. Counts are of the last pass that reached the end, {} before one.

        Where a later change ends a pass early, `first` say, counts of what is before it are of the part that was read.
        """
        return {
            "source": self._description | {"counts": dict(self._counts[0])},
            "changes": [
                entry | {"counts": dict(counts)}
                for (entry, _), counts in zip(self._changes, self._counts[1:], strict=True)
            ],
        }

    def plan(self, *, vocab_size: int, seed: int, salt: str = "") -> Iterator[PlannedRequest]:
        """The requests with prompts; see `baton_experiments.workloads.request.plan`."""
        return plan(self, vocab_size=vocab_size, seed=seed, salt=salt)

    def mean_rate(self) -> float:
        """Requests per second: gaps over the time from the first arrival to the last. Reads the workload once.

        Raises ConfigError if there are no times, or no two requests apart.
        """
        self._require_times()
        gaps, first, last = -1, 0.0, 0.0
        for shape in self:
            gaps += 1
            first, last = (shape.at_s if gaps == 0 else first), shape.at_s
        if not last > first:
            raise ConfigError(
                "workload", "has no two requests at different times, so no rate", value=f"{gaps + 1} requests"
            )
        return gaps / (last - first)

    def first(self, num_requests: int) -> Workload:
        """The first so many, or as many as there are."""
        if num_requests < 1:
            raise ConfigError("first", "must be positive", value=num_requests, allowed=">= 1")
        return self._then({"change": "first", "requests": num_requests}, lambda s, _: islice(s, num_requests))

    def window(self, start_s: float, end_s: float) -> Workload:
        """Arrivals in [start_s, end_s), times counted from `start_s`."""
        self._require_times()
        if not 0 <= start_s < end_s:
            raise ConfigError("window", "must begin before it ends", value=(start_s, end_s), allowed="0 <= start < end")

        def step(shapes: Shapes, counts: Counts) -> Shapes:
            for shape in shapes:
                if shape.at_s >= end_s:
                    return
                if shape.at_s >= start_s:
                    yield msgspec.structs.replace(shape, at_s=shape.at_s - start_s)

        return self._then({"change": "window", "start_s": start_s, "end_s": end_s}, step)

    def keep(
        self,
        *,
        max_prompt_tokens: int | None = None,
        max_output_tokens: int | None = None,
        max_total_tokens: int | None = None,
        min_prompt_tokens: int = 1,
        min_output_tokens: int = 1,
    ) -> Workload:
        """Leave out requests that are longer or shorter; the others keep their times, so the rate falls."""
        prompt, output, total = (
            math.inf if limit is None else limit for limit in (max_prompt_tokens, max_output_tokens, max_total_tokens)
        )

        def step(shapes: Shapes, counts: Counts) -> Shapes:
            return (
                s
                for s in shapes
                if min_prompt_tokens <= s.prompt_tokens <= prompt
                and min_output_tokens <= s.output_tokens <= output
                and s.prompt_tokens + s.output_tokens <= total
            )

        limits = {
            "max_prompt_tokens": max_prompt_tokens,
            "max_output_tokens": max_output_tokens,
            "max_total_tokens": max_total_tokens,
            "min_prompt_tokens": min_prompt_tokens,
            "min_output_tokens": min_output_tokens,
        }
        return self._then({"change": "keep", **limits}, step)

    def sample(self, share: float, *, seed: int) -> Workload:
        """Each request with probability `share`, independently; the others keep their times, so the rate falls."""
        if not 0 < share <= 1:
            raise ConfigError("sample", "must be a share", value=share, allowed="> 0, <= 1")

        def step(shapes: Shapes, counts: Counts) -> Shapes:
            draw = random.Random(f"sample/{seed}")
            return (shape for shape in shapes if draw.random() < share)

        return self._then({"change": "sample", "share": share, "seed": seed}, step)

    def scale_time(self, factor: float) -> Workload:
        """Every arrival time times `factor`: 0.5 doubles the rate."""
        return self._scale_time(factor, {"change": "scale_time", "factor": factor})

    def at_rate(self, rate: float) -> Workload:
        """All times scaled by one factor, so that the mean rate is `rate`; bursts stay. Reads the workload once.

        To be asked of the workload as it is run: what leaves requests out afterwards lowers the rate again.
        """
        if not (rate > 0 and math.isfinite(rate)):
            raise ConfigError("rate", "must be positive", value=rate, allowed="requests per second, > 0")
        own = self.mean_rate()
        return self._scale_time(own / rate, {"change": "at_rate", "from_rate": own, "to_rate": rate})

    def with_arrivals(self, arrivals: Arrivals, *, seed: int) -> Workload:
        """Other arrival times, the lengths in their order. Ends where either does."""

        def step(shapes: Shapes, counts: Counts) -> Shapes:
            # Times first: where they end, zip must not have taken a shape that then has none.
            return (_at(shape, at_s) for at_s, shape in zip(arrivals.times(seed), shapes, strict=False))

        entry = {"change": "with_arrivals", "arrivals": _plain(arrivals), "seed": seed}
        workload = self._then(entry, step)
        workload.has_times = True
        return workload

    def scale_lengths(self, *, prompt: float = 1.0, output: float = 1.0) -> Workload:
        """Lengths times these factors, rounded, at least 1. Blocks shrink or grow with prompts and stay shared."""
        for factor in (prompt, output):
            if not (factor > 0 and math.isfinite(factor)):
                raise ConfigError("factor", "must be positive", value=factor, allowed="> 0")

        def step(shapes: Shapes, counts: Counts) -> Shapes:
            return (_scaled(shape, prompt, output) for shape in shapes)

        return self._then({"change": "scale_lengths", "prompt_factor": prompt, "output_factor": output}, step)

    def clip(self, max_model_len: int) -> Workload:
        """Cut requests whose prompt and output together are longer than the model takes.

        The output is cut to what the prompt leaves, but not below half of `max_model_len`; then the prompt, at its end.
        """
        if max_model_len < 2:
            raise ConfigError("max_model_len", "must hold a prompt and an output", value=max_model_len, allowed=">= 2")

        def step(shapes: Shapes, counts: Counts) -> Shapes:
            counts |= {"clipped": 0, "prompt_tokens_cut": 0, "output_tokens_cut": 0}
            for shape in shapes:
                if shape.prompt_tokens + shape.output_tokens <= max_model_len:
                    yield shape
                    continue
                output = min(shape.output_tokens, max(max_model_len // 2, max_model_len - shape.prompt_tokens))
                prompt = min(shape.prompt_tokens, max_model_len - output)
                counts["clipped"] += 1
                counts["prompt_tokens_cut"] += shape.prompt_tokens - prompt
                counts["output_tokens_cut"] += shape.output_tokens - output
                yield msgspec.structs.replace(shape, prompt_tokens=prompt, output_tokens=output)

        return self._then({"change": "clip", "max_model_len": max_model_len}, step)

    def _scale_time(self, factor: float, entry: dict[str, Any]) -> Workload:
        self._require_times()
        if not (factor > 0 and math.isfinite(factor)):
            raise ConfigError("factor", "must be positive", value=factor, allowed="> 0")
        return self._then(entry, lambda shapes, _: (_at(shape, shape.at_s * factor) for shape in shapes))

    def _then(self, entry: dict[str, Any], step: Step) -> Workload:
        changes = (*self._changes, (entry, step))
        return Workload(self._source, self._description, has_times=self.has_times, changes=changes)

    def _require_times(self) -> None:
        if not self.has_times:
            raise ConfigError("workload", "has no arrival times; give it an arrival process and a rate first")


def generate(
    arrivals: Arrivals,
    lengths: TokenLengths,
    *,
    seed: int,
    num_requests: int | None = None,
    prefixes: SharedPrefixes | None = None,
) -> Workload:
    """A made-up workload. Without `num_requests` it ends with the arrivals, which most processes never do.

    Lengths, arrivals and prefixes are drawn from streams of their own: a change of one leaves the others as they are.
    """
    if num_requests is not None and num_requests < 1:
        raise ConfigError("num_requests", "must be positive", value=num_requests, allowed=">= 1")

    def source(counts: Counts) -> Shapes:
        draw, choose = random.Random(f"lengths/{seed}"), random.Random(f"prefixes/{seed}")
        prompt, output = lengths.prompt.at, lengths.output.at
        for at_s in islice(arrivals.times(seed), num_requests):
            shape = RequestShape(at_s, prompt(draw.random()), output(draw.random()))
            if prefixes is not None:
                block = int(choose.random() * prefixes.num)
                shape = msgspec.structs.replace(shape, blocks=(block,), block_size=prefixes.tokens)
            yield shape

    description = {
        "kind": "generated",
        "arrivals": _plain(arrivals),
        "lengths": msgspec.to_builtins(lengths),
        "prefixes": msgspec.to_builtins(prefixes),
        "requests": num_requests,
        "seed": seed,
    }
    return Workload(source, description)


def _counted(shapes: Iterable[RequestShape], counts: Counts) -> Shapes:
    counts["requests"] = 0
    for shape in shapes:
        counts["requests"] += 1
        yield shape


def _at(shape: RequestShape, at_s: float) -> RequestShape:
    return RequestShape(at_s, shape.prompt_tokens, shape.output_tokens, shape.blocks, shape.block_size)


def _scaled(shape: RequestShape, prompt: float, output: float) -> RequestShape:
    """Whole blocks become whole blocks of the new size, so that equal prefixes stay equal; the rest is scaled too."""
    size = max(1, round(shape.block_size * prompt)) if shape.blocks else 0
    whole = min(len(shape.blocks), shape.prompt_tokens // shape.block_size) if shape.blocks else 0
    rest = shape.prompt_tokens - whole * shape.block_size
    scaled = max(1, round(rest * prompt)) if rest else 0
    if whole < len(shape.blocks):  # the rest is the beginning of a block, and must stay in it
        scaled = min(scaled, size)
    return RequestShape(
        shape.at_s, whole * size + scaled, max(1, round(shape.output_tokens * output)), shape.blocks, size
    )


def _plain(arrivals: Arrivals) -> Any:
    return msgspec.to_builtins(arrivals) if isinstance(arrivals, msgspec.Struct) else type(arrivals).__name__.lower()
