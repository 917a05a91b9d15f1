"""Session affinity: requests of one session go to one worker, as long as it is there and not overloaded."""

from __future__ import annotations

from itertools import repeat

from xxhash import xxh3_64_intdigest

from router.candidates import Candidates
from router.policies.base import Costs, Part, Policy, Query
from router.policies.load import LeastLoaded

QUEUED_STEPS = 4
"""Engine steps of queued prompt tokens that a worker may have beyond twice the average before others are preferred."""
OVERLOADED = 1.0
"""Added to what an overloaded worker costs: those that are not cost less than this."""


class Session(Policy):
    """Rendezvous hashing (Thaler and Ravishankar 1998): each worker has a number for each session, the smallest wins.

    So if a worker goes only its own sessions move, and come back with it. Who has no session is placed by load.
    """

    name = "session"

    def __init__(self, step_tokens: int):
        self._step_tokens = step_tokens
        self._by_load = LeastLoaded(step_tokens)

    def prefill(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        if not query.demand.session:
            return self._by_load.prefill(query, candidates, part)
        tokens = candidates.column("queued_tokens")
        limit = 2 * sum(tokens) / len(tokens) + QUEUED_STEPS * self._step_tokens
        over = [t > limit for t in tokens] if max(tokens) > limit else None
        return _ranked(query.demand.session, candidates, over)

    def decode(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        demand = query.demand
        if not demand.session:
            return self._by_load.decode(query, candidates, part)
        batch, held, capacity = map(candidates.column, ("batch_share", "held_tokens", "capacity"))
        total = demand.total
        over = [b >= 1 or h + total > c for b, h, c in zip(batch, held, capacity, strict=True)]
        return _ranked(demand.session, candidates, over if any(over) else None)


def _ranked(session: str, candidates: Candidates, overloaded: list[bool] | None) -> Costs:
    seed = xxh3_64_intdigest(session.encode())
    ranks = [number * _TO_UNIT for number in map(xxh3_64_intdigest, candidates.keys, repeat(seed))]
    if overloaded is None:
        return ranks, {}
    return (
        [rank + OVERLOADED if over else rank for rank, over in zip(ranks, overloaded, strict=True)],
        {"overloaded": [float(over) for over in overloaded]},
    )


_TO_UNIT = 2.0**-64
