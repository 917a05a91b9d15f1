"""RolePlanner: when a prefill worker should become a decode worker, or the other way round.

Pure: no clock, randomness or messages; sees two loads and a list of workers, answers with at most one change. Must not
know how loads are measured (`router.phase_load`) or how a worker changes its role (`router.roles` and the launchers).

A change is wanted where one phase has `high` load or more. It is made if nothing of this speaks against it, looked at
in this order:

    another one is under way, or ended less than `cooldown_s` ago
    a worker was lost lately: it will be back
    the other phase has more than `low`, or would have fewer than its minimum of workers
    the fuller of the two would be about as full as now, or the giver's load `high`: it would change back
    `max_changes_per_minute` were begun in the last minute
    no worker has had its role for `dwell_s`

A change costs both phases a worker until it has ended: the giver's must finish what it has, then start anew.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from baton.config import PlannerConfig
from router.phase_load import Loads

Phase = Literal["prefill", "decode"]
ChangeState = Literal["draining", "drained", "done", "abandoned"]
Objection = Literal["cooldown", "lost", "no_spare", "minimum", "no_gain", "cap", "dwell"]
GAIN = 0.1
"""Share by which the fuller phase must become less full."""
MAX_REMEMBERED = 50
MINUTE_S = 60.0


class PlannedWorker(msgspec.Struct, frozen=True):
    """A worker as the planner sees it."""

    worker_id: str
    incarnation: str
    role: Phase
    state: Literal["ready", "draining", "lost"]
    num_outstanding: int = 0
    """Parts of requests that it has to finish."""
    seen_at: float = 0.0
    """When it was last heard of."""


class RoleChange(msgspec.Struct):
    """One worker's change, from the decision to its end."""

    number: int
    worker_id: str
    incarnation: str
    """Its life that shall end."""
    from_role: Phase
    to_role: Phase
    reason: str
    began_at: float
    state: ChangeState = "draining"
    """`drained`: nothing is left there, its launcher may replace it."""
    ended_at: float | None = None
    outcome: str = ""

    def __str__(self) -> str:
        return f"{self.worker_id} from {self.from_role} to {self.to_role}"


class Refusal(msgspec.Struct, frozen=True):
    """A change that was wanted and not made."""

    at: float
    objection: Objection
    words: str


class RolePlanner:
    """Ask `observe` every `interval_s`, and tell what becomes of a change. Times are seconds of any clock."""

    def __init__(self, config: PlannerConfig):
        self.change: RoleChange | None = None
        """The one under way."""
        self.history: deque[RoleChange] = deque(maxlen=MAX_REMEMBERED)
        """The last ones, the one under way included."""
        self.refusal: Refusal | None = None
        """Why a change that is wanted now is not made; None: none is wanted, or one is under way."""
        self.num_changes: Counter[Phase] = Counter()
        """Changes that were completed, by the new role."""
        self.num_abandoned = 0
        self.num_refused: Counter[str] = Counter()
        """Looks at which a change was wanted and not made, by the objection."""
        self._config = config
        self._number = 0
        self._begun: deque[float] = deque()
        """When changes of the last minute began."""
        self._ended_at: float | None = None
        self._since: dict[str, tuple[Phase, float]] = {}
        """By worker: its role, and since when."""
        self._news: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._said: Objection | None = None

    # --- decisions ------------------------------------------------------------------------------------

    def observe(self, now: float, loads: Loads | None, workers: Sequence[PlannedWorker]) -> RoleChange | None:
        """A change to be begun now, or None. `loads`: None if nothing is known yet."""
        self._remember(now, workers)
        if self.change is not None:
            if now >= self.change.began_at + self._config.give_up_s:
                self.abandon(now, f"it took longer than planner.give_up_s, {self._config.give_up_s:g} s")
            return None
        self.refusal = None
        if loads is None or max(loads.prefill.share, loads.decode.share) < self._config.high:
            return None
        to: Phase = "prefill" if loads.prefill.share >= loads.decode.share else "decode"
        found = self._choose(now, to, loads, workers)
        if isinstance(found, Refusal):
            self._refuse(found, to)
            return None
        return self._begin(now, found, to, loads)

    def _choose(self, now: float, to: Phase, loads: Loads, workers: Sequence[PlannedWorker]) -> PlannedWorker | Refusal:
        """Who changes, or why nobody does."""
        config = self._config

        def no(objection: Objection, words: str) -> Refusal:
            return Refusal(now, objection, words)

        if self._ended_at is not None and now < self._ended_at + config.cooldown_s:
            ago = f"the last change ended {now - self._ended_at:.0f} s ago"
            return no("cooldown", f"{ago}, less than planner.cooldown_s, {config.cooldown_s:g} s")
        lost = [w for w in workers if w.state == "lost" and now < w.seen_at + config.dwell_s]
        if lost:
            return no("lost", f"{lost[0].worker_id} is lost and may be back soon")
        taker, giver = (loads.prefill, loads.decode) if to == "prefill" else (loads.decode, loads.prefill)
        other: Phase = "decode" if to == "prefill" else "prefill"
        if giver.share >= config.high:
            return no("no_spare", "both phases are full: more workers would help, other roles would not")
        if giver.share > config.low:
            return no("no_spare", f"{other} has none to spare: its load is above planner.low, {config.low:g}")
        least = self.least(other)
        if giver.workers <= least:
            return no("minimum", f"{other} keeps at least {least} of its {giver.workers} workers (planner.min_{other})")
        # What prefill could not do until now comes to decode as soon as it can.
        grown = 1.0
        if to == "prefill" and taker.workers:
            grown = max(1.0, min(taker.share, (taker.workers + 1) / taker.workers))
        left, relieved = giver.with_workers(giver.workers - 1, grown), taker.with_workers(taker.workers + 1)
        if left >= config.high or max(left, relieved) > (1.0 - GAIN) * taker.share:
            would = f"{to} would have {relieved:.2f}, {other} {left:.2f}"
            return no("no_gain", f"a change would not help enough, or not for long: {would}")
        while self._begun and now >= self._begun[0] + MINUTE_S:
            self._begun.popleft()
        if len(self._begun) >= config.max_changes_per_minute:
            return no("cap", f"{len(self._begun)} changes began in the last minute (planner.max_changes_per_minute)")
        ready = [w for w in workers if w.role == other and w.state == "ready"]
        steady = [w for w in ready if now >= self._since[w.worker_id][1] + config.dwell_s]
        if not steady:
            return no("dwell", f"all {other} workers have had their role for less than {config.dwell_s:g} s")
        return min(steady, key=lambda w: (w.num_outstanding, w.worker_id))

    def _begin(self, now: float, worker: PlannedWorker, to: Phase, loads: Loads) -> RoleChange:
        self._number += 1
        change = RoleChange(
            self._number, worker.worker_id, worker.incarnation, worker.role, to, f"{to} is full: {loads}", now
        )
        self.change = change
        self.history.append(change)
        self._begun.append(now)
        self._said = None
        self._news.append(f"changes {change}: {change.reason}")
        return change

    def _refuse(self, refusal: Refusal, to: Phase) -> None:
        self.refusal = refusal
        self.num_refused[refusal.objection] += 1
        if refusal.objection != self._said:
            self._said = refusal.objection
            self._news.append(f"{to} is full, and no worker changes: {refusal.words}")

    def _remember(self, now: float, workers: Sequence[PlannedWorker]) -> None:
        since: dict[str, tuple[Phase, float]] = {}
        for worker in workers:
            role, at = self._since.get(worker.worker_id, (None, now))
            since[worker.worker_id] = (worker.role, at if role == worker.role else now)
        self._since = since

    def least(self, phase: Phase) -> int:
        """So many workers it keeps."""
        return self._config.min_decode if phase == "decode" else self._config.min_prefill

    # --- what becomes of a change -----------------------------------------------------------------------

    def drained(self) -> None:
        """Its worker has nothing left."""
        assert self.change is not None
        self.change.state = "drained"

    def restarted(self, incarnation: str) -> None:
        """Its worker died and came back as it was: it is this life that shall end."""
        assert self.change is not None
        self.change.incarnation, self.change.state = incarnation, "draining"

    def done(self, now: float) -> None:
        """Its worker has joined in the new role."""
        change = self._end(now, "done", "")
        self.num_changes[change.to_role] += 1
        self._news.append(f"changed {change}, within {now - change.began_at:.1f} s")

    def abandon(self, now: float, why: str) -> None:
        """It will not be made. No-op where none is under way."""
        if self.change is not None:
            change = self._end(now, "abandoned", why)
            self.num_abandoned += 1
            self._news.append(f"does not change {change}: {why}")

    def _end(self, now: float, state: ChangeState, outcome: str) -> RoleChange:
        change, self.change = self.change, None
        assert change is not None
        change.state, change.outcome, change.ended_at = state, outcome, now
        self._ended_at = now
        return change

    def take_news(self) -> list[str]:
        """What has happened since the last call, in words, for a log."""
        news = list(self._news)
        self._news.clear()
        return news
