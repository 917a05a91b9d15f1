"""Where a request goes: `Placement(prefill, decode)` with the score of every candidate.

Pure: reads a ClusterView, changes nothing. Must not know requests' tokens, attempts or messages.

Candidates are the pairs of a prefill and a decode worker, and each `both` worker paired with
itself. Equal ids mean that nothing is handed off; there is no mode flag. Where a pool of dedicated
workers has no counterpart (prefill and both, no decode), a `both` worker serves as the counterpart.
A pair's score is the sum of its halves, so the best pair is the best half of each kind.

Scores: lower is better. `least_loaded` gives prefill the queued prompt tokens in engine steps, and
decode the share of its batch plus the share of its KV pool that is taken. `round_robin` gives minus
the number of placements since the worker was last chosen. Both take the larger of what the router
placed itself and what the worker reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

import msgspec

from baton.config import ClusterConfig
from baton.errors import OverloadedError
from baton.protocol import WorkerInfo
from router.view import ClusterView, WorkerView

SUSPECT_BEATS = 3.0
"""A worker silent for this many heartbeats is chosen only where nobody else is left."""
SUSPECT_PENALTY = 1e9

Part = Literal["prefill", "decode", "both"]


class Demand(msgspec.Struct, frozen=True):
    """What a placement needs to know of a request, in tokens."""

    context: int
    """Prompt and tokens of earlier attempts: what prefill computes."""
    total: int
    """Prompt plus max_tokens: what decode may have to hold."""


class Score(msgspec.Struct, frozen=True):
    """How good a worker looked for a part of the request; lower is better."""

    worker_id: str
    part: Part
    value: float


class Placement(msgspec.Struct, frozen=True):
    """Which workers run a request. Equal ids: colocated."""

    prefill: str
    decode: str
    scores: tuple[Score, ...] = ()
    """Of all candidates at that moment, for `baton explain`."""

    @property
    def colocated(self) -> bool:
        return self.prefill == self.decode


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
        self._prefill_round_robin = config.router.prefill_policy == "round_robin"
        self._decode_round_robin = config.router.decode_policy == "round_robin"
        self._step_tokens = config.engine.max_batch_tokens
        self._suspect_s = SUSPECT_BEATS * config.liveness.heartbeat_s
        self._max_model_len = config.model.max_model_len

    def place(self, demand: Demand, view: ClusterView, now: float, avoid: Collection[str] = ()) -> Placement:
        """The best candidate that lives and is large enough, none of `avoid` (worker ids).

        Raises OverloadedError if there is none, saying what is missing.
        """
        usable = [w for w in view.placeable() if w.worker_id not in avoid]
        prefill, decode, both = _sides(usable)
        pre = self._rank((w for w in prefill if self._fits(w.info, demand.context, demand.total)), "prefill", view, now)
        dec = self._rank((w for w in decode if self._fits(w.info, demand.total, demand.total)), "decode", view, now)
        two = self._rank((w for w in both if self._fits(w.info, demand.total, demand.total)), "both", view, now)
        scores = tuple(score for _, score in (*pre, *dec, *two))
        if pre and dec and not (two and two[0][1].value < pre[0][1].value + dec[0][1].value):
            return Placement(pre[0][1].worker_id, dec[0][1].worker_id, scores)
        if two:
            return Placement(two[0][1].worker_id, two[0][1].worker_id, scores)
        raise OverloadedError(_nobody(demand, view, usable))

    def place_decode(
        self, demand: Demand, prefill: WorkerView, view: ClusterView, now: float, refused: Collection[str]
    ) -> Placement | None:
        """Another decode worker for a request that is at `prefill`, after `refused` (worker ids) declined it.

        Equal ids if only the prefill worker itself is left and it may decode; None if nobody is.
        """
        others = (
            w
            for w in view.placeable()
            if w.can_decode
            and w is not prefill
            and w.worker_id not in refused
            and self._fits(w.info, demand.total, demand.total)
        )
        ranked = self._rank(others, "decode", view, now)
        if ranked:
            return Placement(prefill.worker_id, ranked[0][1].worker_id, tuple(score for _, score in ranked))
        if prefill.can_decode and self._fits(prefill.info, demand.total, demand.total):
            return Placement(prefill.worker_id, prefill.worker_id)
        return None

    def fits_somewhere(self, demand: Demand, view: ClusterView) -> bool:
        """Whether some placement on the known workers, lost ones included, could ever hold it."""
        prefill, decode, both = _sides(view.workers.values())
        if any(self._fits(w.info, demand.total, demand.total) for w in both):
            return True
        return any(self._fits(w.info, demand.context, demand.total) for w in prefill) and any(
            self._fits(w.info, demand.total, demand.total) for w in decode
        )

    def capacity(self, view: ClusterView) -> Capacity | None:
        """What the known workers, lost ones included, can hold at most; None while nobody has joined."""
        prefill, decode, both = _sides(view.workers.values())
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

    def _fits(self, info: WorkerInfo, held: int, total: int) -> bool:
        """Whether `info`'s pool can hold `held` tokens and its model reads `total`."""
        if total > info.max_model_len or (self._max_model_len is not None and total > self._max_model_len):
            return False
        return info.layout.num_blocks_for(held) <= info.num_blocks

    def _rank(
        self, workers: Iterable[WorkerView], part: Part, view: ClusterView, now: float
    ) -> list[tuple[tuple[float, int, str], Score]]:
        """Best first; equal scores by who waited longest for work, then by id, so that it is deterministic."""
        ranked = []
        for worker in workers:
            value = 0.0
            if part != "decode":
                value += self._prefill_score(worker, view)
            if part != "prefill":
                value += self._decode_score(worker, view)
            if now - worker.seen > self._suspect_s:
                value += SUSPECT_PENALTY
            last = worker.last_decode if part == "decode" else worker.last_prefill
            ranked.append(((value, last, worker.worker_id), Score(worker.worker_id, part, value)))
        ranked.sort(key=_sort_key)
        return ranked

    def _prefill_score(self, worker: WorkerView, view: ClusterView) -> float:
        if self._prefill_round_robin:
            return float(worker.last_prefill - view.num_placed)
        return max(worker.prefill_tokens, worker.load.num_pending_tokens) / self._step_tokens

    def _decode_score(self, worker: WorkerView, view: ClusterView) -> float:
        if self._decode_round_robin:
            return float(worker.last_decode - view.num_placed)
        info, load = worker.info, worker.load
        requests = max(worker.decode_requests, load.num_running + load.num_waiting)
        blocks = max(info.layout.num_blocks_for(worker.decode_tokens), load.blocks_total - load.blocks_free)
        return requests / max(1, info.max_batch_requests) + blocks / max(1, info.num_blocks)


def _sort_key(item: tuple[tuple[float, int, str], Score]) -> tuple[float, int, str]:
    return item[0]


def _sides(workers: Iterable[WorkerView]) -> tuple[list[WorkerView], list[WorkerView], list[WorkerView]]:
    """`(prefill side, decode side, both)`; `both` workers stand in for a side that has no dedicated worker."""
    by_role: dict[str, list[WorkerView]] = {"prefill": [], "decode": [], "both": []}
    for worker in workers:
        by_role[worker.info.role].append(worker)
    prefill, decode, both = by_role["prefill"], by_role["decode"], by_role["both"]
    if both and prefill and not decode:
        return prefill, both, both
    if both and decode and not prefill:
        return both, decode, both
    return prefill, decode, both


def _nobody(demand: Demand, view: ClusterView, usable: list[WorkerView]) -> str:
    if not view.workers:
        return "no worker has joined the cluster yet; retry in a moment, or look at `baton status`"
    prefill, decode, both = _sides(usable)
    missing = [name for name, side in (("prefill", prefill), ("decode", decode)) if not side]
    if missing and not both:
        lost = sorted(w.worker_id for w in view.workers.values() if not w.ready)
        away = [f"lost: {', '.join(lost)}"] if lost else []
        away += [f"draining: {', '.join(sorted(view.draining))}"] if view.draining else []
        gone = f" ({'; '.join(away)})" if away else ""
        return f"no live {' and no live '.join(missing)} worker{gone}; retry when one has rejoined"
    return f"no live worker can hold the {demand.total} tokens of this request; retry when a larger one has rejoined"
