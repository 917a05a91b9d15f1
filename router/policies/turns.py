"""Policies that look at no loads: in turns, at random. And one that looks at the loads of two."""

from __future__ import annotations

from router.candidates import Candidates
from router.policies.base import Costs, Part, Policy, Query, mix

UNDRAWN = 1e6
"""Added to what a worker costs that was not drawn; far less than what a silent one costs."""
_STREAMS: dict[Part, int] = {"prefill": 1, "decode": 2, "both": 3, "local": 4}


class RoundRobin(Policy):
    """Who waited longest: minus the number of placements since its last one."""

    name = "round_robin"

    def prefill(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        placed = query.view.num_placed
        return [last - placed for last in candidates.column("last_prefill")], {}

    def decode(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        placed = query.view.num_placed
        return [last - placed for last in candidates.column("last_decode")], {}


class _Drawn(Policy):
    """Draws from a counter, the placements so far, so that the same view gives the same draw."""

    def __init__(self, seed: int):
        self._seed = mix(seed)

    def _draw(self, query: Query, part: Part) -> int:
        """64 random bits. Both halves of a colocated request get the same, so that they name the same worker."""
        return mix(self._seed + query.view.num_placed * len(_STREAMS) + _STREAMS[part])


class Random(_Drawn):
    """One worker at random costs a number below 1, all others 1 more."""

    name = "random"

    def prefill(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        draw = self._draw(query, part)
        luck = (draw >> 32) / (1 << 32)  # between workers of different roles the smaller number decides
        values = [1.0 + luck] * len(candidates)
        values[(draw & 0xFFFFFFFF) * len(candidates) >> 32] = luck
        return values, {}

    decode = prefill


class PowerOfTwo(_Drawn):
    """Of two workers at random the one with fewer outstanding tokens (Mitzenmacher 2001)."""

    name = "power_of_two"

    def prefill(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        pair = self._pair(query, len(candidates), part)
        return _of_pair(len(candidates), {i: float(candidates.workers[i].queued_tokens) for i in pair})

    def decode(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        pair = self._pair(query, len(candidates), part)
        return _of_pair(len(candidates), {i: float(candidates.workers[i].held_tokens) for i in pair})

    def _pair(self, query: Query, count: int, part: Part) -> tuple[int, ...]:
        if count == 1:
            return (0,)
        draw = self._draw(query, part)
        first = (draw & 0xFFFFFFFF) * count >> 32
        second = (draw >> 32) * (count - 1) >> 32
        return first, second + (second >= first)


def _of_pair(count: int, tokens: dict[int, float]) -> Costs:
    values, drawn = [UNDRAWN] * count, [0.0] * count
    for i, outstanding in tokens.items():
        values[i], drawn[i] = outstanding, 1.0
    return values, {"drawn": drawn}
