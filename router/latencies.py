"""How long requests and tokens take, as the router delivers them: over the last minute, and since it started.

Pure: sees what the core wants done (`router.desk.Observer`) and when. Must not know who asks or how it is shown.

A `Window` counts in steps of 5 %, so a percentile of it is within 2.5 % of the true one; what is older than a minute
leaves it a second at a time. A `Histogram` counts since the start, in the buckets that it is given.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from baton.protocol import Submit
from baton.timeline import Mark
from router.actions import NewTokens, RequestDone, RequestFailed, RouterAction, SendWorker
from router.core import RouterCore

WINDOW_S = 60
MAX_NOTED = 1024
_STEP = 1.05
_LEAST_S = 1e-5
_MOST_S = 1e4
_BOUNDS = [_LEAST_S * _STEP**i for i in range(math.ceil(math.log(_MOST_S / _LEAST_S, _STEP)) + 1)]
"""Bucket i holds what is above bound i-1 and at most bound i."""

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""vLLM's buckets, in seconds, so that boards made for it show the same."""


class Histogram:
    """How many values fell into which bucket since the start. `bounds`: the buckets' upper ends, ascending."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Iterable[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """By bucket, not summed up; the last one has what is above all bounds."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        for bucket, count in _counted(values, self.bounds):
            self.counts[bucket] += count
        self.sum += sum(values)

    @property
    def count(self) -> int:
        return sum(self.counts)


class Window:
    """Durations in seconds that were seen in the last `WINDOW_S` whole seconds and the current one."""

    def __init__(self) -> None:
        self._second = -1
        """The current one; of those before it that had any, `_past` has the buckets and `_counts` their sum."""
        self._current = [0] * (len(_BOUNDS) + 1)
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._past: deque[tuple[int, list[tuple[int, int]]]] = deque()

    def observe_all(self, values: Sequence[float], at: float) -> None:
        """All were seen within the second of `at`, which is none that was over before."""
        self._advance(int(at))
        for bucket, count in _counted(values, _BOUNDS):
            self._current[bucket] += count

    def count(self, now: float) -> int:
        self._advance(int(now))
        return sum(self._counts) + sum(self._current)

    def percentiles(self, shares: Sequence[float], now: float) -> list[float | None]:
        """For each of the ascending `shares` (0 to 1) the seconds that so many did not exceed, or None."""
        self._advance(int(now))
        counts = [past + current for past, current in zip(self._counts, self._current, strict=True)]
        total = sum(counts)
        if not total:
            return [None] * len(shares)
        found: list[float | None] = []
        seen, bucket = 0, -1
        for share in shares:
            wanted = max(1, math.ceil(share * total))
            while seen < wanted:
                bucket += 1
                seen += counts[bucket]
            found.append(_BOUNDS[min(bucket, len(_BOUNDS) - 1)] / math.sqrt(_STEP))
        return found

    def _advance(self, second: int) -> None:
        if second <= self._second:
            return
        ended = [(bucket, count) for bucket, count in enumerate(self._current) if count]
        if ended:
            self._past.append((self._second, ended))
            for bucket, count in ended:
                self._counts[bucket] += count
                self._current[bucket] = 0
        self._second = second
        while self._past and self._past[0][0] < second - WINDOW_S:
            for bucket, count in self._past.popleft()[1]:
                self._counts[bucket] -= count


def _counted(values: Sequence[float], bounds: Sequence[float]) -> list[tuple[int, int]]:
    """The buckets that the values fall into, each with how many do."""
    if len(values) == 1:
        return [(bisect_left(bounds, values[0]), 1)]
    buckets, counts = np.unique(np.searchsorted(bounds, values), return_counts=True)
    return list(zip(buckets.tolist(), counts.tolist(), strict=True))


class Latency:
    """One kind of duration, in both ways."""

    def __init__(self, bounds: Iterable[float]):
        self.window = Window()
        self.ever = Histogram(bounds)

    def observe(self, value: float, now: float) -> None:
        self.observe_all((value,), now)

    def observe_all(self, values: Sequence[float], at: float) -> None:
        """All were seen within the second of `at`, which is none that was over before."""
        self.window.observe_all(values, at)
        self.ever.observe_all(values)


class _Open:
    """A request that runs. `told_at`: by sample, when it was last given a token."""

    __slots__ = ("prompt_tokens", "received_at", "told_at")

    def __init__(self, received_at: float, prompt_tokens: int, n: int):
        self.received_at = received_at
        self.prompt_tokens = prompt_tokens
        self.told_at: list[float | None] = [None] * n


class Latencies:
    """Watches one core. What there is to do per token is kept for `settle`, which does it for many at once."""

    def __init__(self, core: RouterCore, now: float):
        self.started_at = now
        self.ttft = Latency(TTFT_BUCKETS)
        """From a request's arrival to the first token of a sample."""
        self.tbt = Latency(TOKEN_BUCKETS)
        """Between a sample's tokens. Of those that come at once all but the first follow after nothing."""
        self.e2e = Latency(REQUEST_BUCKETS)
        """From a request's arrival to its orderly end."""
        self.prompt_tokens = 0
        """Of requests that got a token."""
        self._core = core
        self._open: dict[str, _Open] = {}
        self._gaps: list[float] = []
        """Between tokens, seen before `_second_ends` and not counted yet."""
        self._second_ends = math.floor(now) + 1.0

    @property
    def generated_tokens(self) -> int:
        """Tokens that were delivered; `settle` before."""
        return self.ttft.ever.count + self.tbt.ever.count

    def settle(self) -> None:
        """Count what is only noted; whoever reads calls it first."""
        if self._gaps:
            self.tbt.observe_all(self._gaps, self._second_ends - 1.0)
            self._gaps.clear()

    def on_action(self, action: RouterAction, now: float) -> None:
        kind = type(action)
        if kind is NewTokens:
            self._on_tokens(action, now)  # type: ignore[arg-type]
        elif kind is SendWorker:
            if type(action.message) is Submit:  # type: ignore[union-attr]
                self._on_submit(action.message.key.request_id)  # type: ignore[union-attr]
        elif kind is RequestDone or kind is RequestFailed:
            self._on_end(action, now)  # type: ignore[arg-type]

    def _on_tokens(self, action: NewTokens, now: float) -> None:
        request = self._open.get(action.request_id)
        if request is None:
            return
        if now >= self._second_ends or len(self._gaps) > MAX_NOTED:
            self.settle()
            self._second_ends = math.floor(now) + 1.0
        sample = action.sample
        told_at = request.told_at[sample]
        request.told_at[sample] = now
        if told_at is not None:
            self._gaps.append(now - told_at)
        else:
            self.ttft.observe(now - request.received_at, now)
            if not sample:
                self.prompt_tokens += request.prompt_tokens
        if len(action.tokens) > 1:
            self._gaps += [0.0] * (len(action.tokens) - 1)

    def _on_submit(self, request_id: str) -> None:
        if request_id in self._open:
            return  # another sample of it, or another attempt
        request = self._core.request(request_id)
        if request is not None:
            received_at = request.timeline.marks[Mark.RECEIVED]
            self._open[request_id] = _Open(received_at, len(request.prompt), len(request.owner.samples))

    def _on_end(self, action: RequestDone | RequestFailed, now: float) -> None:
        request = self._open.pop(action.request_id, None)
        if request is not None and type(action) is RequestDone and action.finish_reason != "abort":
            self.e2e.observe(now - request.received_at, now)
