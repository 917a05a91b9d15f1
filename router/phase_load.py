"""How full prefill and decode are, each on the whole: what the role planner goes by.

Pure arithmetic over what workers reported and what the router placed on them; time is an argument. Must not know what
follows from it.

A phase's *work* is the number of workers that it takes, its *share* that by the workers there are:

    prefill  (tokens that come a second + tokens that wait / horizon_s) * seconds a token
    decode   the largest of   KV of the requests that decode, or only wait for decode / KV pool of a worker
                              these requests / places in a batch
                              the same / as many as decode within the promised time between tokens

So a worker more or less changes the share at once and the work not at all. Work is smoothed: it is what it lately was.
"""

from __future__ import annotations

import math

import msgspec

from baton.config import ClusterConfig
from router.view import ClusterView, WorkerView


class PhaseLoad(msgspec.Struct, frozen=True):
    work: float
    """Workers that it takes."""
    workers: int
    """Those that take requests."""
    words: str = ""
    """What the work comes from."""

    @property
    def share(self) -> float:
        return self.with_workers(self.workers)

    def with_workers(self, workers: int, grown: float = 1.0) -> float:
        """The share of so many workers, if the work were `grown` times what it is."""
        if workers > 0:
            return self.work * grown / workers
        return math.inf if self.work else 0.0


class Loads(msgspec.Struct, frozen=True):
    prefill: PhaseLoad
    decode: PhaseLoad

    def __str__(self) -> str:
        return (
            f"prefill {self.prefill.share:.2f} on {self.prefill.workers} ({self.prefill.words}), "
            f"decode {self.decode.share:.2f} on {self.decode.workers} ({self.decode.words})"
        )


class Smoothed:
    """An average over time in which older values count exponentially less."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None
        """None: nothing was seen yet."""

    def add(self, value: float, weight: float) -> float:
        """`weight` of the new value, 0 to 1. Returns the average."""
        self.value = value if self.value is None else self.value + weight * (value - self.value)
        return self.value


class PhaseMeter:
    """Remembers what it saw before: `observe` at about equal intervals."""

    def __init__(self, config: ClusterConfig):
        self._smoothing_s = config.planner.smoothing_s
        self._horizon_s = config.planner.horizon_s
        target_ms = config.router.slo_tbt_ms or config.engine.step_time_target_ms
        self._target_s = None if target_ms is None else target_ms / 1e3
        self._seen_at: float | None = None
        self._arrived_tokens = 0
        self._cache: dict[str, tuple[int, int]] = {}
        """By incarnation: tokens that were looked for in its prefix cache so far, and those found."""
        self._rate, self._backlog, self._token_s = Smoothed(), Smoothed(), Smoothed()
        self._queried, self._hits = Smoothed(), Smoothed()
        self._requests, self._kv = Smoothed(), Smoothed()
        self._first_s, self._slope_s = Smoothed(), Smoothed()
        self._had_decode = False
        """Some worker decoded once: without any it is not just the beginning."""

    def observe(
        self, now: float, view: ClusterView, *, arrived_tokens: int, num_queued: int, queued_tokens: int
    ) -> Loads | None:
        """None: nothing can be told yet.

        `arrived_tokens`: of all prompts so far. `num_queued`, `queued_tokens`: requests that wait in the router, and
        their prompts' tokens.
        """
        prefill = [w for w in view.ready() if w.role == "prefill"]
        decode = [w for w in view.ready() if w.role == "decode"]
        elapsed = None if self._seen_at is None else now - self._seen_at
        came, self._arrived_tokens, self._seen_at = arrived_tokens - self._arrived_tokens, arrived_tokens, now
        found, looked_for = self._cache_news(prefill)
        if elapsed is None or elapsed <= 0:
            return None
        weight = 1.0 - math.exp(-elapsed / self._smoothing_s)

        # Decode reserves blocks before prefill computes. So what waits before that, in the router and for blocks, may
        # be held up by either; it goes by where the others are that have their blocks.
        uncredited = sum(w.load.num_uncredited for w in prefill)
        computing = sum(w.prefill_requests for w in view.ready())
        present = max(0, sum(w.decode_requests for w in decode) - computing)
        computing = max(0, computing - uncredited)
        share = computing / (computing + present) if computing or present else 1.0

        uncredited_tokens = sum(w.load.num_uncredited_tokens for w in prefill)
        credited_tokens = max(0, sum(w.queued_tokens for w in prefill) - uncredited_tokens)
        waiting_tokens = credited_tokens + share * (queued_tokens + uncredited_tokens)
        wanting = present + (1.0 - share) * (num_queued + uncredited)
        kv_tokens: float = sum((w.load.blocks_total - w.load.blocks_free) * w.block_size for w in decode)
        if computing or present:
            kv_tokens *= wanting / (computing + present)
        rate = self._rate.add(came / elapsed, weight)
        backlog = self._backlog.add(waiting_tokens, weight)
        queried, hits = self._queried.add(looked_for / elapsed, weight), self._hits.add(found / elapsed, weight)
        fresh = 1.0 - min(1.0, hits / queried) if queried else 1.0

        requests, kv = self._requests.add(wanting, weight), self._kv.add(kv_tokens, weight)
        self._measure(prefill, decode, weight)
        token_s = self._token_s.value
        self._had_decode = self._had_decode or bool(decode)
        if not self._had_decode or (decode and token_s is None):
            return None
        token_s = token_s or 0.0
        if decode:
            words, work = self._decode_work(decode, requests, kv)
        else:
            # Requests that it would take are refused, so they cannot tell.
            words, work = "there being nobody", 1.0
        taking = list(view.placeable())
        return Loads(
            PhaseLoad(
                (rate * fresh + backlog / self._horizon_s) * token_s,
                sum(w.role == "prefill" for w in taking),
                f"{rate * fresh:.0f} tokens/s to compute, {backlog:.0f} wait, {token_s * 1e3:.3g} ms a token",
            ),
            PhaseLoad(work, sum(w.role == "decode" for w in taking), f"{requests:.1f} requests, limited by {words}"),
        )

    def _cache_news(self, workers: list[WorkerView]) -> tuple[int, int]:
        """Tokens that the workers found in their prefix caches since the last call, and those that they looked for."""
        found = looked_for = 0
        seen: dict[str, tuple[int, int]] = {}
        for worker in workers:
            queried, hits = worker.load.cache_queried_tokens, worker.load.cache_hit_tokens
            before = self._cache.get(worker.info.incarnation, (0, 0))
            seen[worker.info.incarnation] = (queried, hits)
            looked_for += max(0, queried - before[0])
            found += max(0, hits - before[1])
        self._cache = seen
        return found, looked_for

    def _measure(self, prefill: list[WorkerView], decode: list[WorkerView], weight: float) -> None:
        """What the workers' own steps take. While none has measured, what was known before holds."""
        tokens = [w.load.prefill_token_s for w in prefill if w.load.prefill_token_s]
        if tokens:
            self._token_s.add(sum(tokens) / len(tokens), weight)
        loads = [w.load for w in decode if w.load.decode_step_s]
        if loads:
            slope = sum(load.decode_slope_s for load in loads) / len(loads)
            first = [load.decode_step_s - load.decode_slope_s * max(0, load.num_running - 1) for load in loads]
            self._slope_s.add(slope, weight)
            self._first_s.add(max(0.0, sum(first) / len(first)), weight)

    def _decode_work(self, workers: list[WorkerView], requests: float, kv: float) -> tuple[str, float]:
        """What limits decode, and the workers that it takes."""
        num = len(workers)
        parts = {
            "KV blocks": kv * num / sum(w.capacity for w in workers),
            "places in a batch": requests * num / sum(w.max_requests for w in workers),
        }
        if self._target_s is not None and self._first_s.value is not None:
            spare, slope = self._target_s - self._first_s.value, self._slope_s.value or 0.0
            within = 1.0 + spare / slope if slope > 0 else math.inf
            if spare < 0:
                within = 1.0  # not even one does: no number of workers changes that
            parts["the time between tokens"] = requests / within
        return max(parts.items(), key=lambda part: part[1])
