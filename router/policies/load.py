"""Policies that go by how much there is to do, whatever it is that is to be done.

Both take the larger of what the router placed itself and what the worker reported.
"""

from __future__ import annotations

from operator import add, truediv

from router.candidates import Candidates
from router.policies.base import Costs, Part, Policy, Query


class LeastLoaded(Policy):
    """Prefill: queued prompt tokens in engine steps. Decode: the share of its batch plus that of its KV pool in use."""

    name = "least_loaded"

    def __init__(self, step_tokens: int):
        self._step_tokens = step_tokens

    def prefill(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        step_tokens = self._step_tokens
        return [tokens / step_tokens for tokens in candidates.column("queued_tokens")], {}

    def decode(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        batch = candidates.column("batch_share").copy()
        pool = list(map(truediv, candidates.column("held_tokens"), candidates.column("capacity")))
        return list(map(add, batch, pool)), {"batch_share": batch, "pool_share": pool}


class LeastOutstandingTokens(Policy):
    """Prompt tokens that are not computed yet; tokens that may have to be held. Large workers count like small ones."""

    name = "least_outstanding_tokens"

    def prefill(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        return candidates.column("queued_tokens").copy(), {}

    def decode(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        return candidates.column("held_tokens").copy(), {}
