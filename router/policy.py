"""Where a request goes: `Placement(prefill, decode)` with the score of every candidate.

Reads a ClusterView, changes nothing in it. Must not know requests' tokens, attempts or messages. What a worker costs
is the business of `router.policies`, one policy for prefill and one for decode.

Candidates are the pairs of a prefill and a decode worker, and each `both` worker paired with
itself. Equal ids mean that nothing is handed off; there is no mode flag. Where a pool of dedicated
workers has no counterpart (prefill and both, no decode), a `both` worker serves as the counterpart.
A pair's score is the sum of its halves, so the best pair is the best half of each kind. With
`router.conditional_split` a decode worker may do all of a request by itself (`router.conditional_split`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import add

import msgspec

from baton.config import ClusterConfig
from baton.errors import OverloadedError
from router.candidates import Candidates, Sides, sides_of
from router.conditional_split import ConditionalSplit
from router.policies import make_policy
from router.policies.base import Costs, Demand, Part, Query
from router.view import ClusterView, WorkerView

__all__ = ["Capacity", "Demand", "Part", "Placement", "PlacementPolicy", "Ranking", "Score"]

SUSPECT_BEATS = 3.0
"""A worker silent for this many heartbeats is chosen only where nobody else is left."""
SUSPECT_PENALTY = 1e9


class Score(msgspec.Struct, frozen=True):
    """How good a worker looked for a part of the request; lower is better."""

    worker_id: str
    part: Part
    value: float
    policy: str = ""
    parts: dict[str, float] = {}
    """What the value is made of, as the policy says; in milliseconds where the name ends so."""


class Ranking(msgspec.Struct, frozen=True):
    """What all candidates cost for a part of the request: columns of equal length, so that a decision stays cheap."""

    policy: str
    part: Part
    worker_ids: list[str]
    values: list[float]
    columns: Mapping[str, Sequence[float]] = {}

    def scores(self) -> list[Score]:
        """The same, worker by worker, the best first."""
        scores = [
            Score(
                worker_id,
                self.part,
                value,
                self.policy,
                {name: float(column[i]) for name, column in self.columns.items() if len(column)},
            )
            for i, (worker_id, value) in enumerate(zip(self.worker_ids, self.values, strict=True))
        ]
        return sorted(scores, key=lambda score: score.value)


class Placement(msgspec.Struct, frozen=True):
    """Which workers run a request. Equal ids: colocated."""

    prefill: str
    decode: str
    rankings: tuple[Ranking, ...] = ()
    """Of all candidates at that moment, for `baton explain`."""

    @property
    def colocated(self) -> bool:
        return self.prefill == self.decode

    @property
    def scores(self) -> tuple[Score, ...]:
        """Of every candidate, part by part, the best first."""
        return tuple(score for ranking in self.rankings for score in ranking.scores())


_Choice = tuple[WorkerView, float, Ranking]
"""The best of some workers, what it costs, and all of them."""


class Capacity(msgspec.Struct, frozen=True):
    """The most tokens (prompt plus output) that some placement on the known workers can ever hold."""

    tokens: int
    max_model_len: int
    """What the models allow, pools apart."""
    blocks: int
    """KV blocks of the largest pool that can decode."""
    block_size: int


class PlacementPolicy:
    """Both policies, chosen apart for prefill and decode (`router.prefill_policy`, `router.decode_policy`)."""

    def __init__(self, config: ClusterConfig):
        self._prefill = make_policy(config.router.prefill_policy, config)
        self._decode = make_policy(config.router.decode_policy, config)
        self._split = ConditionalSplit(config) if config.router.conditional_split else None
        self.uses_prefixes = config.engine.prefix_cache and (
            self._prefill.uses_prefixes or self._decode.uses_prefixes or self._split is not None
        )
        """Whether it matters what is cached where: workers are to tell, and a `Demand` has its `prompt`."""
        self._suspect_s = SUSPECT_BEATS * config.liveness.heartbeat_s
        self._max_model_len = config.model.max_model_len

    def place(
        self,
        demand: Demand,
        view: ClusterView,
        now: float,
        avoid: Collection[str] = (),
        full: Collection[str] = (),
    ) -> Placement:
        """The best candidate that lives and is large enough, none of `avoid` (worker ids), none of `full` to decode.

        Raises OverloadedError if there is none, saying what is missing.
        """
        prefill, decode, both = view.sides(avoid)
        if full:
            decode, both = decode.without(full), both.without(full)
        query, total = Query(demand, view), demand.total
        pre = self._best(query, self._fitting(prefill, demand.context, total), "prefill", now)
        holders = self._fitting(decode, total, total)
        dec = self._best(query, holders, "decode", now)
        two = self._best(query, self._fitting(both, total, total), "both", now) if both.workers else None
        rankings = tuple([choice[2] for choice in (pre, dec, two) if choice is not None])
        if pre is not None and dec is not None and (two is None or two[1] >= pre[1] + dec[1]):
            local = None
            if self._split is not None:
                local, rankings = self._find_local(query, pre[0], dec[0], holders, rankings, now)
            return Placement(local or pre[0].worker_id, local or dec[0].worker_id, rankings)
        if two is not None:
            return Placement(two[0].worker_id, two[0].worker_id, rankings)
        raise OverloadedError(_nobody(demand, view, view.sides(avoid)))

    def place_decode(
        self, demand: Demand, prefill: WorkerView, view: ClusterView, now: float, refused: Collection[str]
    ) -> Placement | None:
        """Another decode worker for a request that is at `prefill`, after `refused` (worker ids) declined it.

        Equal ids if only the prefill worker itself is left and it may decode; None if nobody is.
        """
        others = [w for w in view.placeable() if w.can_decode and w is not prefill and w.worker_id not in refused]
        fitting = self._fitting(Candidates(others), demand.total, demand.total)
        best = self._best(Query(demand, view), fitting, "decode", now)
        if best is not None:
            return Placement(prefill.worker_id, best[0].worker_id, (best[2],))
        if prefill.can_decode and self._fitting(Candidates([prefill]), demand.total, demand.total).workers:
            return Placement(prefill.worker_id, prefill.worker_id)
        return None

    def fits_somewhere(self, demand: Demand, view: ClusterView) -> bool:
        """Whether some placement on the known workers, lost ones included, could ever hold it."""
        context, total = demand.context, demand.total
        if self._max_model_len is not None and total > self._max_model_len:
            return False
        can_prefill = can_decode = False
        for w in view.workers.values():
            if total <= w.max_model_len:
                holds = total <= w.capacity
                if holds and w.role == "both":
                    return True
                can_prefill = can_prefill or (w.role == "prefill" and context <= w.capacity)
                can_decode = can_decode or (w.role == "decode" and holds)
                if can_prefill and can_decode:
                    return True
        prefill, decode, _ = sides_of(view.workers.values())  # where `both` workers stand in for one side
        return bool(self._fitting(prefill, context, total).workers and self._fitting(decode, total, total).workers)

    def capacity(self, view: ClusterView) -> Capacity | None:
        """What the known workers, lost ones included, can hold at most; None while nobody has joined."""
        prefill, decode, both = (side.workers for side in sides_of(view.workers.values()))
        holders = [*both, *(decode if prefill else ())]
        if not holders:
            return None
        limit = self._max_model_len or max(w.info.max_model_len for w in holders)
        lengths = [min(w.info.max_model_len, limit) for w in holders]
        reach = max((w.info.max_model_len for w in prefill), default=0)
        tokens = [
            min(length, w.info.num_blocks * w.info.layout.block_size, *(() if w.info.role == "both" else (reach,)))
            for w, length in zip(holders, lengths, strict=True)
        ]
        largest = max(holders, key=lambda w: w.info.num_blocks * w.info.layout.block_size)
        return Capacity(max(tokens), max(lengths), largest.info.num_blocks, largest.info.layout.block_size)

    # --- inside -----------------------------------------------------------------------------------

    def _fitting(self, candidates: Candidates, held: int, total: int) -> Candidates:
        """Those whose pool can hold `held` tokens and whose model reads `total`."""
        if self._max_model_len is not None and total > self._max_model_len:
            return Candidates([])
        return candidates.fitting(held, total)

    def _best(self, query: Query, candidates: Candidates, part: Part, now: float) -> _Choice | None:
        """The worker that costs least; of several who waited longest for work, then by id: it is deterministic."""
        workers = candidates.workers
        if not workers:
            return None
        if part == "prefill":
            name, (values, columns) = self._prefill.name, self._prefill.prefill(query, candidates, part)
        elif part == "decode":
            name, (values, columns) = self._decode.name, self._decode.decode(query, candidates, part)
        else:
            name, (values, columns) = self._both(query, candidates, part)
        silent_since = now - self._suspect_s
        if candidates.any_silent(silent_since):
            values = [
                value + SUSPECT_PENALTY if w.seen < silent_since else value
                for w, value in zip(workers, values, strict=True)
            ]
        low = min(values)
        best = workers[values.index(low)]
        if values.count(low) > 1:
            equal = [w for w, value in zip(workers, values, strict=True) if value == low]
            best = min(equal, key=_last_decode if part == "decode" else _last_prefill)
        return best, low, Ranking(name, part, candidates.ids, values, columns)

    def _both(self, query: Query, candidates: Candidates, part: Part) -> tuple[str, Costs]:
        """What the two halves of a colocated request cost together, with the policies' names."""
        prefill, decode = self._prefill, self._decode
        one, columns = prefill.prefill(query, candidates, part)
        other, more_columns = decode.decode(query, candidates, part)
        name = prefill.name if prefill.name == decode.name else f"{prefill.name} + {decode.name}"
        return name, (list(map(add, one, other)), {**columns, **more_columns})

    def _find_local(
        self,
        query: Query,
        prefill: WorkerView,
        decode: WorkerView,
        candidates: Candidates,
        rankings: tuple[Ranking, ...],
        now: float,
    ) -> tuple[str | None, tuple[Ranking, ...]]:
        """The decode worker that should do all of it instead of these two, if there is one; and all rankings."""
        assert self._split is not None
        verdict = self._split.judge(query, prefill, decode, candidates, now - self._suspect_s)
        if verdict is None:
            return None, rankings
        workers, values, columns, chosen = verdict
        ranking = Ranking("conditional_split", "local", [w.worker_id for w in workers], values, columns)
        return None if chosen is None else chosen.worker_id, (*rankings, ranking)


def _last_prefill(worker: WorkerView) -> tuple[int, str]:
    return worker.last_prefill, worker.worker_id


def _last_decode(worker: WorkerView) -> tuple[int, str]:
    return worker.last_decode, worker.worker_id


def _nobody(demand: Demand, view: ClusterView, usable: Sides) -> str:
    if not view.workers:
        return "no worker has joined the cluster yet; retry in a moment, or look at `baton status`"
    prefill, decode, both = (side.workers for side in usable)
    missing = [name for name, side in (("prefill", prefill), ("decode", decode)) if not side]
    if missing and not both:
        lost = sorted(w.worker_id for w in view.workers.values() if not w.ready)
        away = [f"lost: {', '.join(lost)}"] if lost else []
        away += [f"draining: {', '.join(sorted(view.draining))}"] if view.draining else []
        gone = f" ({'; '.join(away)})" if away else ""
        return f"no live {' and no live '.join(missing)} worker{gone}; retry when one has rejoined"
    return f"no live worker can hold the {demand.total} tokens of this request; retry when a larger one has rejoined"
