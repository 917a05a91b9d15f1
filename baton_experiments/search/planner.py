"""The search. Each placement that fits a budget of GPUs is estimated from phases that are simulated apart; the best are
then simulated as a whole, and what these simulations say is the answer.

    prefill, decode by degree and number of workers ─┐
    colocated by degree and number of workers ───────┼─► estimates of all ─► the best few, DistServe's two ─► joint runs
                                                     └─► are joint runs already

All runs have the same requests, in the same order, stretched in time. Ctrl-C ends it early with what is known by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from baton.errors import ConfigError
from baton_experiments.search.baselines import Baseline, high_affinity, low_affinity
from baton_experiments.search.candidate import Candidate, Pool, all_candidates, sampled_counts
from baton_experiments.search.jobs import Chain, Runner, Task, drive, keeps, runner_of
from baton_experiments.search.phases import Curve, closest, estimate, of_pool
from baton_experiments.search.run import Outcome, Setup
from baton_experiments.search.study import Study

Objective = Literal["per-gpu", "total"]
OnProgress = Callable[[float, float, str], None]
"""Work done, work in all, what was done last."""

WEIGHTS = {"prefill": 1.0, "decode": 6.0, "whole": 8.0}
"""What a task of each phase takes, roughly, compared to the others."""
COARSE = 0.3
"""A search with few requests takes so much of one with all."""
AT_ONCE = 4
"""Candidates that are chosen together to be simulated as a whole: the same ones in any number of processes."""
FULL_KV = 0.2
"""Share of the time without room for one more request from which on that is what limits."""


class Row(msgspec.Struct, frozen=True):
    """One candidate. Rates in requests per second of the whole cluster, times in milliseconds."""

    candidate: Candidate
    gpus: int
    goodput: float
    phase_goodput: float | None
    """Of the phase that is the first to miss, by itself; None: it was simulated as a whole."""
    is_simulated: bool
    """As a whole; else put together from phases, and times are those of the phases by themselves."""
    chunk_tokens: int
    ttft_ms: dict[str, float] | None
    tbt_ms: dict[str, float] | None
    attainment: float | None
    """At the goodput."""
    bottleneck: str

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def per_gpu(self) -> float:
        return self.goodput / self.gpus


class BaselineRow(msgspec.Struct, frozen=True):
    """What an algorithm of others places, what it expects of that, and what a joint simulation makes of it."""

    name: str
    candidate: Candidate
    expected: float
    simulated: float | None
    """None: it was not simulated, since the search was ended early."""


class Plan(msgspec.Struct, frozen=True):
    """What a search found."""

    rows: tuple[Row, ...]
    """Best first; among equals, simulated ones first."""
    winner: Candidate | None
    """By joint simulation; None: there was no time for one, or nothing keeps the SLO."""
    objective: Objective
    baselines: tuple[BaselineRow, ...]
    curves: tuple[Curve, ...]
    interrupted: bool = False
    num_runs: int = 0

    def row(self, candidate: Candidate | None) -> Row | None:
        return next((row for row in self.rows if row.candidate == candidate), None)


class Planner:
    """One search over all placements of at most `max_gpus`; or over `named` ones, all of them simulated as a whole.

    `confirm`: the most candidates that are simulated as a whole beside the colocated ones.
    """

    def __init__(
        self,
        study: Study,
        *,
        max_gpus: int,
        gpus_per_node: int = 8,
        objective: Objective = "per-gpu",
        confirm: int = 6,
        named: Sequence[Candidate] = (),
        jobs: int = 1,
        on_progress: OnProgress = lambda done, total, text: None,
    ):
        if max_gpus < 1:
            raise ConfigError("--gpus", "must be positive", value=max_gpus, allowed=">= 1")
        if confirm < 1:
            raise ConfigError("--confirm", "must be positive", value=confirm, allowed=">= 1")
        self._study = study
        self._max_gpus = max_gpus
        self._gpus_per_node = gpus_per_node
        self._objective = objective
        self._confirm = confirm
        self._jobs = jobs
        self._on_progress = on_progress
        self._curves: dict[Candidate, Curve] = {}
        self._rough: set[Candidate] = set()
        """Of these, the ones of fewer requests than are to be judged: good for guesses and estimates."""
        self._chunks: dict[tuple[str, int], int] = {}
        """The best step budget by role and degree, found with one worker."""
        self._warmup_s: dict[tuple[str, int], float] = {}
        self._alone: dict[tuple[str, int], Outcome] = {}
        """What came of requests that had such a worker to themselves, by role and degree."""
        self._tps = [tp for tp in sorted(study.profiles) if tp <= min(max_gpus, gpus_per_node)]
        self._candidates = list(named) or all_candidates(self._tps, max_gpus, decodes=study.load.decodes)
        self._named = bool(named)
        self._done = self._total = 0.0
        self._num_runs = 0
        require_fitting(self._candidates, study, max_gpus)

    def run(self) -> Plan:
        """Raises ConfigError if no placement keeps the SLO, even without load."""
        interrupted = False
        try:
            with runner_of(self._study, self._jobs) as runner:
                self._run_phases(runner)
                self._run_whole(runner)
        except KeyboardInterrupt:
            interrupted = True
        return self._plan(interrupted)

    # --- what is run ----------------------------------------------------------------------------------

    def _run_phases(self, runner: Runner) -> None:
        roles: dict[tuple[str, int], int] = {}
        for candidate in self._candidates:
            for role, pool in candidate.pools.items():
                roles[role, pool.tp] = max(roles.get((role, pool.tp), 0), pool.workers)
        chains = [self._chain(role, tp, most) for (role, tp), most in roles.items()]
        self._total = sum(self._weight(role) * self._num_tasks(role, most) for (role, _), most in roles.items())
        self._total += WEIGHTS["whole"] * (len(self._candidates) if self._named else self._confirm)
        self._drive(_largest_first(chains, roles), runner)
        self._require_attainable()

    def _weight(self, role: str) -> float:
        return WEIGHTS["whole" if role == "both" else role]

    def _num_tasks(self, role: str, most: int) -> float:
        choices = 0.0 if role == "decode" else COARSE * len(self._study.chunk_tokens)
        return choices + len(self._sampled(role, most))

    def _sampled(self, role: str, most: int) -> list[int]:
        return [] if self._named and role == "both" else sampled_counts(role, most)

    def _chain(self, role: str, tp: int, most: int) -> Chain:
        """One worker first, with each step budget; then more, each guessed from the one before."""
        chunk = max(self._study.chunk_tokens)
        guess: float | None = None
        warmup_s: float | None = None
        if role != "decode":
            found: dict[int, Curve] = {}
            for budget in self._study.chunk_tokens:
                found[budget] = yield Task(Setup(_phase(role, Pool(1, tp)), budget), "coarse")
            chunk = max(found, key=lambda budget: (found[budget].goodput, found[budget].outcomes[0].good, -budget))
            guess, warmup_s = found[chunk].goodput or None, found[chunk].warmup_s
            self._curves[_phase(role, Pool(1, tp))] = found[chunk]
            self._rough.add(_phase(role, Pool(1, tp)))
            self._note_alone(role, tp, found[chunk])
            if guess is None and not self._keeps_alone(role, tp):
                return
        self._chunks[role, tp] = chunk
        before = 1
        for workers in self._sampled(role, most):
            pool = Pool(workers, tp)
            if workers == 1 and role != "decode" and guess is None:
                continue
            if guess is not None:
                guess *= workers / before
            with_knee = role != "both" and workers == 1
            task = Task(Setup(_phase(role, pool), chunk), "search", guess, warmup_s, with_knee)
            curve = yield task
            self._keep(_phase(role, pool), curve)
            guess, warmup_s, before = curve.goodput or None, curve.warmup_s, workers
            self._warmup_s[role, tp] = warmup_s
            self._note_alone(role, tp, curve)
            if guess is None and not self._keeps_alone(role, tp):
                return

    def _keep(self, candidate: Candidate, curve: Curve) -> None:
        self._curves[candidate] = curve
        self._rough.discard(candidate)

    def _note_alone(self, role: str, tp: int, curve: Curve) -> None:
        if curve.alone is not None:
            self._alone[role, tp] = curve.alone

    def _keeps_alone(self, role: str, tp: int) -> bool:
        """Whether more workers may do what one cannot: without load it keeps the SLO."""
        alone = self._alone.get((role, tp))
        return alone is not None and keeps(self._study, alone)

    def _may_keep(self, candidate: Candidate) -> bool:
        """Whether each of its phases keeps the SLO by itself, at some rate or at least without load."""
        return all(
            self._keeps_alone(role, pool.tp) or any(c.goodput > 0 for c in of_pool(role, pool.tp, self._curves))
            for role, pool in candidate.pools.items()
        )

    def _run_whole(self, runner: Runner) -> None:
        """Joint simulations, always of the candidate that promises most, until none promises more than was found."""
        if self._named:
            self._drive([self._whole(candidate) for candidate in self._candidates], runner)
            return
        wanted = list({b.candidate: None for b in self._baselines()})
        wanted += self._unheard(wanted)
        self._total += WEIGHTS["whole"] * len(wanted)
        self._drive([self._whole(candidate) for candidate in wanted], runner)
        left = self._confirm
        while left and (batch := self._most_promising(min(left, AT_ONCE))):
            self._drive([self._whole(candidate) for candidate in batch], runner)
            left -= len(batch)
        self._total = self._done
        self._on_progress(self._done, self._total, "done")

    def _unheard(self, wanted: Sequence[Candidate]) -> list[Candidate]:
        """The one that promises most of a kind, split or colocated, of which nothing is simulated as a whole.

        An estimate of nothing does not mean that nothing is kept: where requests are late in one phase the same ones
        may be late in the other. So neither kind is said to miss the SLO by estimates alone.
        """
        heard = {c.is_split for c in [*wanted, *self._curves] if _is_whole(c) and c not in self._rough}
        best: dict[bool, tuple[tuple[float, ...], Candidate]] = {}
        for candidate in self._candidates:
            expected = estimate(candidate, self._curves, self._study.share)
            if candidate.is_split in heard or expected is None or not self._may_keep(candidate):
                continue
            values = (self._value(candidate, rate) for rate in (expected.goodput, expected.phase_goodput))
            found = (*values, candidate.gpus), candidate
            best[candidate.is_split] = max(best.get(candidate.is_split, found), found)
        return [candidate for _, candidate in best.values()]

    def _whole(self, candidate: Candidate) -> Chain:
        # Guessed now, not when the chain comes to run: by then others may have ended, or not.
        expected = estimate(candidate, self._curves, self._study.share)
        guess = expected.goodput or None if expected else None
        warmup_s = max((self._warmup_s.get((r, p.tp), 0.0) for r, p in candidate.pools.items()), default=0.0) or None

        def chain() -> Chain:
            self._keep(candidate, (yield Task(Setup(candidate, self._chunk_of(candidate)), "search", guess, warmup_s)))

        return chain()

    def _chunk_of(self, candidate: Candidate) -> int:
        """A cluster has one step budget; that of its prefill side counts, as decode seldom fills any."""
        role, pool = next(iter(candidate.pools.items()))
        return self._chunks.get((role, pool.tp), max(self._study.chunk_tokens))

    def _most_promising(self, count: int) -> list[Candidate]:
        """Candidates not simulated as a whole whose estimate, as far off as those before were, beats what was found."""
        best, optimism = 0.0, 1.0
        ratios = []
        for candidate, curve in self._curves.items():
            if _is_whole(candidate) and candidate not in self._rough:
                best = max(best, self._value(candidate, curve.goodput))
                expected = estimate(candidate, self._curves, self._study.share)
                if candidate.is_split and expected and expected.goodput and curve.goodput:
                    ratios.append(curve.goodput / expected.goodput)
        if ratios:
            optimism = max(ratios)
        open_ = []
        for candidate in self._candidates:
            if candidate in self._curves and candidate not in self._rough:
                continue
            expected = estimate(candidate, self._curves, self._study.share)
            if expected and self._value(candidate, expected.goodput) * optimism > best:
                open_.append((self._value(candidate, expected.goodput), candidate.gpus, candidate))
        return [candidate for _, _, candidate in sorted(open_, reverse=True)[:count]]

    def _value(self, candidate: Candidate, goodput: float) -> float:
        return goodput / candidate.gpus if self._objective == "per-gpu" else goodput

    def _drive(self, chains: Sequence[Chain], runner: Runner) -> None:
        for task, curve in drive(chains, runner):
            self._num_runs += len(curve.outcomes)
            weight = WEIGHTS[task.setup.phase]
            self._done += weight * (COARSE if task.kind == "coarse" else 1.0)
            self._total = max(self._total, self._done)
            self._on_progress(self._done, self._total, f"{task.setup.name}: {curve.goodput:.3g}/s")

    # --- what came out --------------------------------------------------------------------------------

    def _baselines(self) -> list[Baseline]:
        if self._named:
            return []
        found = (
            high_affinity(self._curves, self._max_gpus),
            low_affinity(self._curves, self._max_gpus, self._gpus_per_node),
        )
        return [baseline for baseline in found if baseline is not None]

    def _plan(self, interrupted: bool) -> Plan:
        rows = [row for candidate in self._candidates if (row := self._row(candidate)) is not None]
        for baseline in self._baselines():
            if baseline.candidate not in self._candidates and (row := self._row(baseline.candidate)) is not None:
                rows.append(row)
        rows.sort(key=lambda r: (self._value(r.candidate, r.goodput), r.is_simulated, -r.gpus), reverse=True)
        simulated = [row for row in rows if row.is_simulated and row.goodput > 0]
        winner = simulated[0].candidate if simulated else None
        return Plan(
            tuple(rows),
            winner,
            self._objective,
            tuple(
                BaselineRow(
                    b.name,
                    b.candidate,
                    b.goodput,
                    self._curves[b.candidate].goodput if b.candidate in self._curves else None,
                )
                for b in self._baselines()
            ),
            tuple(curve for candidate, curve in self._curves.items() if candidate not in self._rough),
            interrupted,
            self._num_runs,
        )

    def _row(self, candidate: Candidate) -> Row | None:
        curve = self._curves.get(candidate)
        if curve is not None and candidate not in self._rough:
            best = curve.best
            return Row(
                candidate=candidate,
                gpus=candidate.gpus,
                goodput=curve.goodput,
                phase_goodput=None,
                is_simulated=True,
                chunk_tokens=curve.setup.chunk_tokens,
                ttft_ms=best.ttft_ms if best else None,
                tbt_ms=best.tbt_ms if best else None,
                attainment=best.good if best else None,
                bottleneck=bottleneck(curve),
            )
        expected = estimate(candidate, self._curves, self._study.share)
        if expected is None:
            return None
        curves = {role: closest(candidate, role, self._curves) for role in candidate.pools}
        near: dict[str, Outcome | None] = {}
        for role, found in curves.items():
            if found is not None:
                simulated = sum(pool.workers for pool in found.setup.candidate.pools.values())
                near[role] = found.nearest(expected.goodput * simulated / candidate.pools[role].workers)
        limiting = curves[expected.limited_by]
        first, last = (near.get(role) for role in (next(iter(candidate.pools)), next(reversed(candidate.pools))))
        return Row(
            candidate=candidate,
            gpus=candidate.gpus,
            goodput=expected.goodput,
            phase_goodput=expected.phase_goodput,
            is_simulated=False,
            chunk_tokens=self._chunk_of(candidate),
            ttft_ms=first.ttft_ms if first else None,
            tbt_ms=last.tbt_ms if last else None,
            attainment=None,
            bottleneck=bottleneck(limiting) if limiting is not None else "",
        )

    def _require_attainable(self) -> None:
        """Raises ConfigError if nothing keeps the SLO even where requests run alone, and says how much is missing."""
        if not any(map(self._may_keep, self._candidates)):
            raise ConfigError("--slo-ttft, --slo-tbt", unattainable(self._study, self._alone))


def require_fitting(candidates: Sequence[Candidate], study: Study, max_gpus: int) -> None:
    """Raises ConfigError for a candidate that is too large, or of a degree that the profile cannot tell of."""
    if not candidates:
        have = ", ".join(f"TP {tp}" for tp in sorted(study.profiles))
        raise ConfigError("--gpus", f"are too few for any worker: the profile has {have}", value=max_gpus)
    for candidate in candidates:
        if candidate.is_split and not study.load.decodes:
            problem = "has nothing to decode, as no request has a second output token"
            raise ConfigError("--candidate", problem, value=candidate.name, allowed="colocated ones")
        if candidate.gpus > max_gpus:
            raise ConfigError(
                "--candidate", f"takes {candidate.gpus} GPUs", value=candidate.name, allowed=f"{max_gpus}"
            )
        for pool in candidate.pools.values():
            if pool.tp not in study.profiles:
                have = ", ".join(map(str, sorted(study.profiles)))
                problem = f"needs TP {pool.tp}, of which the profile tells nothing (or its KV cache is too small)"
                raise ConfigError("--candidate", problem, value=candidate.name, allowed=f"TP {have}")


def unattainable(study: Study, alone: Mapping[tuple[str, int], Outcome]) -> str:
    """Which part of the SLO no placement keeps without load, and by how much. `alone`: by role and degree."""
    share = f"{study.share:.0%}"
    problems = []
    for what, limit, roles in (
        ("TTFT", study.slo.ttft_ms, ("prefill", "both")),
        ("TPOT", study.slo.tbt_ms, ("decode", "both")),
    ):
        best: tuple[float, str] | None = None
        for (role, tp), outcome in alone.items():
            times = outcome.ttft_ms if what == "TTFT" else outcome.tpot_ms
            if times and role in roles:
                found = times["promised"], f"TP {tp}"
                best = found if best is None else min(best, found)
        if best is not None and best[0] > limit:
            over = best[0] - limit
            problems.append(
                f"{what} of {limit:g} ms is missed even without load, by {over:.0f} ms: "
                f"{share} of the requests take up to {best[0]:.0f} ms on {best[1]}, the fastest"
            )
    if problems:
        return "cannot be kept: " + "; ".join(problems)
    return (
        f"cannot be kept: fewer than {share} of the requests keep both even without load, on any tensor parallel degree"
    )


def bottleneck(curve: Curve) -> str:
    """What makes the SLO be missed first when the rate rises; `throughput` where work piles up before it is."""
    miss = curve.first_miss
    if miss is None:
        return ""
    split = curve.setup.candidate.is_split
    if miss.piled_up and not miss.stopped:
        return "throughput"
    if miss.failed > max(miss.missed_ttft, miss.missed_tbt):
        return "router"
    full = miss.kv_full >= FULL_KV
    if miss.missed_ttft >= miss.missed_tbt:
        if full and curve.setup.phase != "prefill":
            return "KV space"
        return "prefill compute" if curve.setup.phase != "decode" else "decode admission"
    if split and miss.missed_by_handoff > 0.5 * miss.missed_tbt:
        return "hand-off"
    if full:
        return "KV space"
    return "decode batch" if split else "decode beside prefill"


def _phase(role: str, pool: Pool) -> Candidate:
    return Candidate(**{role: pool})


def _is_whole(candidate: Candidate) -> bool:
    return candidate.both is not None or (candidate.prefill is not None and candidate.decode is not None)


def _largest_first(chains: Sequence[Chain], roles: dict[tuple[str, int], int]) -> list[Chain]:
    """So that at the end no process is left with a long one alone; the cheap prefill chains come last."""
    weights: dict[int, Any] = {}
    for chain, ((role, _), most) in zip(chains, roles.items(), strict=True):
        weights[id(chain)] = WEIGHTS["whole" if role == "both" else role] * len(sampled_counts(role, most))
    return sorted(chains, key=lambda chain: -weights[id(chain)])
