"""What limits a setting at a rate: one of five, each with the numbers that say so.

    prefill compute   prompts wait for a prefill worker that is busy, take too long themselves, or, where prompts and
                      tokens share steps, hold the tokens up
    decode batch      decode steps take too long, or requests wait for their turn in them
    KV space          requests wait, or are computed again, while the blocks of a worker are taken
    hand-off          the KV cache takes too long from prefill to decode
    router            requests wait in the router, or on their way to a worker, though workers have time

The requests that miss the SLO vote, each for the part of its time that is largest among those that count for the limit
it misses. Where none miss it, the fullest of the resources is named: the first to give way. Nothing limits workers that
keep the SLO and are idle most of the time; of requests that all failed nobody can tell.

Arithmetic over records and steps. Must not know how it is said to people beyond one sentence.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Literal, cast

import msgspec
import numpy as np

from baton_experiments.columns import Floats
from baton_experiments.goodput import DEFINITIONS
from baton_experiments.records import Setting
from baton_experiments.study import MAIN, SHARE, Study
from baton_experiments.words import milliseconds, number, percent
from baton_experiments.worker_use import FULL, worker_use

Limit = Literal["prefill compute", "decode batch", "KV space", "hand-off", "router", "failures"]

BUSY = 0.7
"""Of the time in steps: from here on a queue before a worker is its own."""
QUEUES = 0.5
"""A prefill worker that is busier explains by itself that prompts wait for it: an M/D/1 queue waits half a prompt's
time then. (A decode worker is busy whenever anything runs there, so its share of time says little.)"""
SMALL_BATCH, DISTURBED = 1.5, 2.5
"""Requests in a decode step that cost about what one does; and how many times as long as alone such a step takes where
something else must have slowed the machine down."""
IDLE = 0.3
"""Of the time in steps: where no worker is busier and the SLO is kept, nothing limits."""


class Bottleneck(msgspec.Struct, frozen=True):
    placement: str
    chunk_tokens: int | None
    engine: str
    rate: float
    limit: Limit | None
    """None: nothing limits, or it cannot be told."""
    missed: float
    """Share of the requests that miss the SLO."""
    votes: dict[str, float]
    """By limit: share of those that miss it."""
    sentence: str
    evidence: dict[str, Any]


def bottleneck(study: Study, setting: Setting, rate: float) -> Bottleneck:
    """Of a point of `study`."""
    columns = study.columns[setting, rate]
    good = DEFINITIONS[MAIN].good
    assert good is not None
    missed = ~good(columns, study.slo)
    view = _View(study, setting, rate)
    votes: dict[str, float] = defaultdict(float)
    for row in np.flatnonzero(missed):
        votes[view.blame(int(row), study.slo.ttft_ms, study.slo.tbt_ms)] += 1
    share = float(missed.mean())
    limit: Limit | None
    if not columns.done.any() or (share <= 1 - SHARE + 1e-9 and view.is_idle):
        limit = None
    elif votes:
        limit = cast(Limit, max(votes, key=lambda name: votes[name]))
    else:
        limit = view.fullest()
    votes = {name: count / int(missed.sum()) for name, count in sorted(votes.items(), key=lambda v: -v[1])}
    first = columns.done & (columns.ttft > study.slo.ttft_ms)
    late = columns.done & (columns.tpot > study.slo.tbt_ms)
    failed = ~columns.done
    evidence = view.evidence() | {
        "slowdown": view.slowdown,
        "disturbed": view.is_disturbed,
        "error": view.error,
        "missed_ttft": float(first.mean()),
        "missed_tbt": float(late.mean()),
        "failed": float(failed.mean()),
    }
    return Bottleneck(
        setting.placement,
        setting.chunk_tokens,
        setting.engine,
        rate,
        limit,
        share,
        votes,
        _sentence(limit, share, float(failed.mean()), _facts(limit, view, gaps=bool(late.sum() >= first.sum()))),
        evidence,
    )


class _View:
    """One point, as seen by who looks for its limit."""

    def __init__(self, study: Study, setting: Setting, rate: float):
        records = study.records[setting, rate]
        self.columns = columns = study.columns[setting, rate]
        self.uses = worker_use(study, setting, rate)
        self._runs = {run: steps for run, steps in study.steps.items() if (run.setting, run.rate) == (setting, rate)}
        self._needed_tokens = sum(study.needed_tokens.get(run, 0) for run in self._runs)
        self.shared = bool(
            {r.prefill_worker for r in records if r.error is None}
            & {r.decode_worker for r in records if r.error is None}
        )
        """Some worker does both."""
        reference = study.reference
        self.alone_ms: float | None = None
        """A request's mean gap where it has the system to itself."""
        if reference is not None and len(columns):
            self.alone_ms = float(reference.tbt(columns.prompt_tokens, columns.output_tokens).mean())
        self.known = bool(columns.stages)
        self.stages = columns.stages or defaultdict(lambda: np.zeros(len(columns)))
        errors = Counter((r.error or "").partition(":")[0] for r in records if r.error is not None)
        self.error = errors.most_common(1)[0][0] if errors else None
        """The code that most failures have."""
        self.num_prefill = max(1, len({r.prefill_worker for r in records if r.prefill_worker}))
        self.window_s = sum(float(np.ptp(columns.at_s[columns.seed == seed])) for seed in np.unique(columns.seed))
        """From the first arrival to the last, summed over seeds."""

    # --- how full things are ------------------------------------------------------------------------

    def busy(self, *, prefill: bool) -> float | None:
        """Of the workers that prefill, or decode; None where no steps were recorded."""
        mine = [use.busy for use in self.uses.values() if (use.prefills if prefill else use.decodes)]
        return float(np.mean(mine)) if mine else None

    def prefill_busy(self) -> float:
        """From steps, else from the time that prompts were in prefill, which counts twice what is computed together."""
        found = self.busy(prefill=True)
        if found is not None:
            return found
        seconds = float(self.stages["prefill"].sum()) / 1e3
        return min(1.0, seconds / (self.window_s * self.num_prefill)) if self.window_s > 0 else 0.0

    @cached_property
    def is_idle(self) -> bool:
        """Known from steps: no worker has much to do or to hold."""
        return bool(self.uses) and all(u.busy < IDLE and (u.kv_full or 0.0) < FULL for u in self.uses.values())

    @cached_property
    def slowdown(self) -> float | None:
        """Known from steps and from requests that ran alone: how much longer the decode steps of workers that are not
        busy, and have hardly a batch, take than such a request's gaps. The engine has no reason to be slower then."""
        uses = [u for u in self.uses.values() if u.decodes and u.step_ms is not None]
        quiet = uses and all(u.busy < BUSY and u.batch < SMALL_BATCH for u in uses)
        if not quiet or self.alone_ms is None or self.alone_ms <= 0:
            return None
        return float(np.mean([u.step_ms for u in uses if u.step_ms is not None])) / self.alone_ms

    @property
    def is_disturbed(self) -> bool:
        return self.slowdown is not None and self.slowdown > DISTURBED

    @cached_property
    def kv_is_full(self) -> bool:
        """Some worker had hardly a free block for a good part of its steps, and requests waited."""
        return any(use.kv_full_share > 0.2 for use in self.uses.values())

    @cached_property
    def prompts_hold_tokens_up(self) -> bool:
        """The workers that decode spend a good part of their time on steps with a prompt's chunk, which take longer."""
        mixed = [u for u in self.uses.values() if u.decodes and u.chunk_step_ms is not None]
        if mixed:
            busy = sum(u.busy for u in mixed)
            share = sum(u.busy * u.prompt_share for u in mixed) / busy if busy > 0 else 0.0
            longer = any(u.step_ms is None or (u.chunk_step_ms or 0.0) > 1.5 * u.step_ms for u in mixed)
            return share > 0.3 and longer
        if self.uses or not self.shared or not self.columns.gaps.size:
            return False
        # No steps: the long gaps of a worker that does both are those with a chunk in them.
        median, slow = np.percentile(self.columns.gaps, (50, 95))
        return bool(slow > 2 * median)

    # --- one request that missed ----------------------------------------------------------------------

    def blame(self, row: int, ttft_ms: float, tbt_ms: float) -> Limit:
        c = self.columns
        if not c.done[row]:
            return "failures"
        over_first = c.ttft[row] / ttft_ms
        over_gap = c.tpot[row] / tbt_ms
        return self._blame_first(row) if over_first >= over_gap else self._blame_gaps(row)

    def _blame_first(self, row: int) -> Limit:
        if not self.known:
            return self._queue()
        queue = self._at("router_queue", row) + self._at("prefill_queue", row)
        way = self._at("placement", row) + max(0.0, float(self.columns.residual[row]))
        prefill = self._at("prefill", row)
        if way > max(queue, prefill):
            return "router"
        if prefill >= queue:
            return "prefill compute" if not self._decode_holds_prompts_up else "decode batch"
        return self._queue(of_router=self._at("router_queue", row) > self._at("prefill_queue", row))

    @cached_property
    def _decode_holds_prompts_up(self) -> bool:
        """A worker that does both and spends its time on tokens: few steps have a chunk."""
        mixed = [u for u in self.uses.values() if u.prefills and u.decodes]
        return bool(mixed) and float(np.mean([u.prompt_share for u in mixed])) < 0.3

    def _queue(self, *, of_router: bool = False) -> Limit:
        """Why requests wait before their prefill. A prefill worker does not begin before decode has blocks, and the
        router holds back what no worker has room for."""
        if self.kv_is_full:
            return "KV space"
        prefill, decode = self.prefill_busy(), self.busy(prefill=False) or 0.0
        if self.shared and self.uses:
            mixed = [u for u in self.uses.values() if u.prefills and u.decodes]
            share = float(np.mean([u.prompt_share for u in mixed])) if mixed else 1.0
            if max(prefill, decode) >= BUSY:
                return "prefill compute" if share >= 0.5 else "decode batch"
        elif prefill >= QUEUES and not of_router:
            return "prefill compute"
        elif decode >= BUSY:
            return "decode batch"
        if of_router and prefill < BUSY:
            return "router"
        return "prefill compute"

    def _blame_gaps(self, row: int) -> Limit:
        if self.known:
            hand_off = self._at("handoff_wait", row) + self._at("wire", row)
            queue = self._at("decode_queue", row)
            steps = self._at("first_decode_step", row) + self._at("decode_steps", row)
            if hand_off > max(queue, steps):
                return "hand-off"
            if queue > steps:
                return "KV space" if self.kv_is_full else "decode batch"
        if self.prompts_hold_tokens_up:
            return "prefill compute"
        if self.kv_is_full and self.recomputed > 0.1:
            return "KV space"
        return "decode batch"

    def _at(self, stage: str, row: int) -> float:
        return float(self.stages[stage][row])

    # --- where none missed ----------------------------------------------------------------------------

    def fullest(self) -> Limit:
        """The resource that is used most."""
        shares: dict[Limit, float] = {"prefill compute": self.prefill_busy()}
        decode = self.busy(prefill=False)
        if decode is not None:
            shares["decode batch"] = decode
        if self.shared and self.uses:
            mixed = [u for u in self.uses.values() if u.prefills and u.decodes]
            busy = float(np.mean([u.busy for u in mixed])) if mixed else 0.0
            prompts = float(np.mean([u.busy * u.prompt_share for u in mixed])) if mixed else 0.0
            shares = {"prefill compute": prompts, "decode batch": busy - prompts}
        elif not self.uses and self.known:
            total = max(float(self.stages["decode_steps"].sum() + self.stages["first_decode_step"].sum()), 1e-9)
            shares = {"prefill compute": float(self.stages["prefill"].sum()) / total, "decode batch": 1.0}
        full = [use.kv_full for use in self.uses.values() if use.kv_full is not None]
        if full:
            shares["KV space"] = max(full) if max(full) > 0.9 else 0.0
        return max(shares, key=lambda name: shares[name])

    # --- numbers ----------------------------------------------------------------------------------------

    @cached_property
    def recomputed(self) -> float:
        """Tokens that were computed beyond what the requests needed, as a share of that; over whole runs."""
        computed = sum(step.shape.chunk_tokens + step.shape.decodes for steps in self._runs.values() for step in steps)
        return max(0.0, computed / self._needed_tokens - 1) if self._needed_tokens else 0.0

    def mean_stage(self, *names: str) -> float:
        done = self.columns.done
        return sum(float(self.stages[name][done].mean()) for name in names) if done.any() else 0.0

    def evidence(self) -> dict[str, Any]:
        prefill, decode = self.busy(prefill=True), self.busy(prefill=False)
        found: dict[str, Any] = {
            "prefill_busy": prefill,
            "decode_busy": decode,
            "mean_stages_ms": {s: self.mean_stage(s) for s in self.columns.stages if self.stages[s].any()},
            "tbt_p50_ms": _quantile(self.columns.gaps, 0.5),
            "tbt_p99_ms": _quantile(self.columns.gaps, 0.99),
            "workers": {name: msgspec.to_builtins(use) for name, use in self.uses.items()},
        }
        return {key: value for key, value in found.items() if value not in (None, {})}


def _quantile(values: Floats, share: float) -> float | None:
    return float(np.quantile(values, share)) if values.size else None


# --- sentences ------------------------------------------------------------------------------------------


def _sentence(limit: Limit | None, missed: float, failed: float, facts: Iterable[str]) -> str:
    """What it is and the numbers that say so."""
    if failed == 1:
        return "all requests failed, so what limits it is not known"
    because = f": {told}" if (told := "; ".join(facts)) else ""
    failures = f", {percent(failed)} failed" if failed else ""
    misses = f" ({percent(missed)} of the requests miss the SLO{failures})" if missed else ""
    if limit is None:
        return f"nothing limits it at such rates{misses}{because}"
    if missed:
        return f"{limit}{misses}{because}"
    return f"nothing yet, all requests keep the SLO; the first to give way is {limit}{because}"


def _facts(limit: Limit | None, view: _View, *, gaps: bool) -> Iterable[str]:
    """`gaps`: not first tokens, but the gaps between tokens are what is late, if anything is."""
    prefill, decode = view.busy(prefill=True), view.busy(prefill=False)
    uses = list(view.uses.values())
    if view.is_disturbed:
        yield (
            f"a decode step of hardly more than one request takes {number(view.slowdown or 0.0, 2)} times as long as "
            "one that runs alone, so something else had the machine: repeat the run"
        )
    if limit is None:
        yield f"no worker is busy for more than {percent(max((u.busy for u in uses), default=0.0))} of the time"
    elif limit == "prefill compute":
        if gaps and view.shared and view.prompts_hold_tokens_up:
            mixed = [u for u in uses if u.decodes and u.chunk_step_ms is not None]
            if mixed:
                chunk = max(u.chunk_step_ms or 0.0 for u in mixed)
                plain = [u.step_ms for u in mixed if u.step_ms is not None]
                against = f" against {milliseconds(min(plain))} without" if plain else ""
                yield f"tokens wait for prompts: a step with a prompt's chunk takes {milliseconds(chunk)}{against}"
            else:
                median, slow = np.percentile(view.columns.gaps, (50, 99))
                yield (
                    f"tokens wait for prompts: gaps of {milliseconds(slow)} at p99 against {milliseconds(median)} at "
                    "the median"
                )
        if prefill is not None:
            yield f"workers that prefill are busy {percent(prefill)} of the time"
        if view.known:
            yield (
                f"a prompt waits {milliseconds(view.mean_stage('router_queue', 'prefill_queue'))} on average and takes "
                f"{milliseconds(view.mean_stage('prefill'))}"
            )
    elif limit == "failures":
        yield f"most of them as `{view.error}`; latencies are those of the others"
    elif limit == "decode batch":
        if decode is not None:
            yield f"workers that decode are busy {percent(decode)} of the time"
        steps = [u.step_ms for u in uses if u.decodes and u.step_ms is not None]
        if steps:
            batch = max(u.batch for u in uses if u.decodes)
            yield f"a decode step takes {milliseconds(max(steps))} for {batch:.1f} requests on average"
        elif view.columns.gaps.size:
            yield f"the median gap between tokens is {milliseconds(float(np.median(view.columns.gaps)))}"
        if view.mean_stage("decode_queue") > 1:
            yield f"a request waits {milliseconds(view.mean_stage('decode_queue'))} for its first decode step"
    elif limit == "KV space":
        full = max((u.kv_full_share for u in uses), default=0.0)
        yield f"a worker has less than 5 % of its KV blocks free in {percent(full)} of its steps"
        if prefill is not None:
            yield f"workers that prefill are busy {percent(prefill)} of the time"
        if view.recomputed > 0.02:
            yield f"{percent(view.recomputed)} of the tokens are computed again"
        queued = view.mean_stage("router_queue", "prefill_queue", "decode_queue")
        yield f"a request waits {milliseconds(queued)} for its turn"
    elif limit == "hand-off":
        whole, wire = view.mean_stage("handoff_wait", "wire"), view.mean_stage("wire")
        yield (
            f"the KV cache takes {milliseconds(whole)} from the first token to the decode worker, "
            f"{milliseconds(wire)} of it on the wire"
        )
    else:
        yield (
            f"a request waits {milliseconds(view.mean_stage('router_queue'))} in the router and "
            f"{milliseconds(view.mean_stage('placement'))} on its way to a worker"
        )
        if prefill is not None:
            yield f"workers that prefill are busy only {percent(prefill)} of the time"
