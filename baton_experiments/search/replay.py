"""What-if: the attainment that each placement would have had on a recorded log, whose requests come when they came.

As in a search, phases are run apart and put together, and the placements with the fewest GPUs that look sufficient are
simulated as a whole until one of them is.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.errors import ConfigError
from baton_experiments.search.candidate import Candidate, Pool, all_candidates
from baton_experiments.search.jobs import Chain, Runner, Task, drive, runner_of
from baton_experiments.search.phases import Curve
from baton_experiments.search.planner import AT_ONCE, OnProgress, bottleneck, require_fitting
from baton_experiments.search.run import Outcome, Setup
from baton_experiments.search.study import Study

ENOUGH = 0.999
"""Attainment of a phase beyond which more workers change nothing."""


class ReplayRow(msgspec.Struct, frozen=True):
    """One candidate. Times in milliseconds."""

    candidate: Candidate
    gpus: int
    attainment: float
    at_most: bool
    """The attainment is that or less: what was counted is enough to tell that it does not suffice."""
    is_simulated: bool
    """As a whole; else the product of its phases."""
    chunk_tokens: int
    ttft_ms: dict[str, float] | None
    tbt_ms: dict[str, float] | None
    bottleneck: str
    """What the requests that missed the SLO lacked."""

    @property
    def name(self) -> str:
        return self.candidate.name


class Replayed(msgspec.Struct, frozen=True):
    """What a replay found."""

    rows: tuple[ReplayRow, ...]
    """Those that suffice first, fewest GPUs first."""
    winner: Candidate | None
    """The fewest GPUs that kept the SLO in a joint simulation; None: nothing did."""
    interrupted: bool = False

    def row(self, candidate: Candidate | None) -> ReplayRow | None:
        return next((row for row in self.rows if row.candidate == candidate), None)


class Replayer:
    """One replay, over all placements of at most `max_gpus`; or over `named` ones, all of them simulated as a whole."""

    def __init__(
        self,
        study: Study,
        *,
        max_gpus: int,
        gpus_per_node: int = 8,
        confirm: int = 6,
        named: Sequence[Candidate] = (),
        jobs: int = 1,
        on_progress: OnProgress = lambda done, total, text: None,
    ):
        if max_gpus < 1:
            raise ConfigError("--gpus", "must be positive", value=max_gpus, allowed=">= 1")
        self._study = study
        self._confirm = confirm
        self._jobs = jobs
        self._on_progress = on_progress
        tps = [tp for tp in sorted(study.profiles) if tp <= min(max_gpus, gpus_per_node)]
        self._candidates = list(named) or all_candidates(tps, max_gpus, decodes=study.load.decodes)
        self._named = bool(named)
        self._parts: dict[Candidate, Curve] = {}
        """Phases, and what was simulated as a whole."""
        self._enough: dict[tuple[str, int], int] = {}
        """Workers from which on more change nothing, by role and degree."""
        self._done = self._total = 0.0
        require_fitting(self._candidates, study, max_gpus)

    def run(self) -> Replayed:
        interrupted = False
        try:
            with runner_of(self._study, self._jobs) as runner:
                if self._named:
                    self._total = len(self._candidates)
                    self._drive([self._whole(candidate) for candidate in self._candidates], runner)
                else:
                    self._run_phases(runner)
                    self._run_whole(runner)
        except KeyboardInterrupt:
            interrupted = True
        rows = [row for candidate in self._candidates if (row := self._row(candidate)) is not None]
        rows.sort(key=self._order)
        winner = next((row.candidate for row in rows if row.is_simulated and self._suffices(row)), None)
        return Replayed(tuple(rows), winner, interrupted)

    def _run_phases(self, runner: Runner) -> None:
        roles: dict[tuple[str, int], int] = {}
        for candidate in self._candidates:
            for role, pool in candidate.pools.items():
                roles[role, pool.tp] = max(roles.get((role, pool.tp), 0), pool.workers)
        self._total = sum(roles.values()) + self._confirm
        self._drive([self._chain(role, tp, most) for (role, tp), most in roles.items()], runner)

    def _chain(self, role: str, tp: int, most: int) -> Chain:
        budgets = self._study.chunk_tokens if role != "decode" else (max(self._study.chunk_tokens),)
        for workers in range(1, most + 1):
            candidate = Candidate(**{role: Pool(workers, tp)})
            found = []
            for budget in budgets:
                found.append((yield Task(Setup(candidate, budget), "recorded")))
            best = max(found, key=lambda curve: (curve.outcomes[0].good, -curve.setup.chunk_tokens))
            self._parts[candidate] = best
            if not best.outcomes[0].stopped:
                budgets = (best.setup.chunk_tokens,)
            if best.outcomes[0].good >= ENOUGH:
                self._enough[role, tp] = workers
                self._total -= most - workers
                return

    def _run_whole(self, runner: Runner) -> None:
        left = self._confirm
        while left:
            rows = sorted((row for c in self._candidates if (row := self._row(c)) is not None), key=self._order)
            fewest = min((r.gpus for r in rows if r.is_simulated and self._suffices(r)), default=None)
            batch = [row.candidate for row in rows if not row.is_simulated and (fewest is None or row.gpus < fewest)][
                : min(left, AT_ONCE)
            ]
            if not batch or (fewest is not None and not any(self._suffices(r) for r in rows if r.candidate in batch)):
                break
            self._drive([self._whole(candidate) for candidate in batch], runner)
            left -= len(batch)
        self._total = self._done

    def _whole(self, candidate: Candidate) -> Chain:
        role, pool = next(iter(candidate.pools.items()))
        part = self._part(role, pool)
        budgets = (part.setup.chunk_tokens,) if part else self._study.chunk_tokens
        found = []
        for budget in budgets:
            found.append((yield Task(Setup(candidate, budget), "recorded", may_stop=False)))
        self._parts[candidate] = max(found, key=lambda curve: curve.outcomes[0].good)

    def _drive(self, chains: Sequence[Chain], runner: Runner) -> None:
        for task, curve in drive(chains, runner):
            self._done += 1
            self._total = max(self._total, self._done)
            outcome = curve.outcomes[0]
            share = f"{'at most ' if outcome.stopped else ''}{outcome.good:.1%}"
            self._on_progress(self._done, self._total, f"{task.setup.name}: {share}")

    # --- what came out --------------------------------------------------------------------------------

    def _part(self, role: str, pool: Pool) -> Curve | None:
        workers = min(pool.workers, self._enough.get((role, pool.tp), pool.workers))
        return self._parts.get(Candidate(**{role: Pool(workers, pool.tp)}))

    def _row(self, candidate: Candidate) -> ReplayRow | None:
        curve = self._parts.get(candidate)
        if curve is not None:
            outcome = curve.outcomes[0]
            return self._filled(candidate, outcome.good, [curve, curve], is_simulated=True)
        parts = [self._part(role, pool) for role, pool in candidate.pools.items()]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        together = 1.0
        for part in found:
            together *= part.outcomes[0].good
        return self._filled(candidate, together, found, is_simulated=False)

    def _filled(self, candidate: Candidate, share: float, parts: Sequence[Curve], *, is_simulated: bool) -> ReplayRow:
        outcomes: list[Outcome] = [part.outcomes[0] for part in parts]
        worst = min(parts, key=lambda part: part.outcomes[0].good)
        missed = worst.outcomes[0].good < 1
        return ReplayRow(
            candidate,
            candidate.gpus,
            share,
            any(outcome.stopped for outcome in outcomes),
            is_simulated,
            parts[0].setup.chunk_tokens,
            outcomes[0].ttft_ms if not outcomes[0].stopped else None,
            outcomes[-1].tbt_ms if not outcomes[-1].stopped else None,
            bottleneck(msgspec.structs.replace(worst, goodput=0.0)) if missed else "",
        )

    def _suffices(self, row: ReplayRow) -> bool:
        return not row.at_most and row.attainment >= self._study.share - 1e-9

    def _order(self, row: ReplayRow) -> tuple[object, ...]:
        enough = self._suffices(row)
        return (not enough, row.gpus if enough else 0, -row.attainment, not row.is_simulated, row.name)
