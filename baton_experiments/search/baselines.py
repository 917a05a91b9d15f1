"""DistServe's placement algorithms (Zhong et al., OSDI 2024, section 4), on goodputs of phases simulated here.

    algorithm 1   high node affinity: fast links join all GPUs. The degree of each phase with the highest goodput a GPU,
                  on its own; then as many replicas of each as the rate takes.
    algorithm 2   low node affinity: KV stays within a node. One prefill and one decode worker that fit a node together,
                  with the highest goodput a GPU as a pair; then as many pairs.

Both ask each phase for the SLO by itself, so their estimate is of the phase that is the first to miss it. They place
for a rate; here it is the largest one whose replicas fit a budget of GPUs. Pipeline parallel degrees are left out, as
profiles and engine have none.

Pure.
"""

from __future__ import annotations

import math

import msgspec

from baton_experiments.search.candidate import Candidate, Pool
from baton_experiments.search.phases import Curves


class Baseline(msgspec.Struct, frozen=True):
    """What an algorithm places."""

    name: str
    candidate: Candidate
    goodput: float
    """Requests per second, by its own estimate."""


def high_affinity(curves: Curves, max_gpus: int) -> Baseline | None:
    """Algorithm 1. None where a phase has no goodput, or a replica of each does not fit."""
    prefill, decode = _per_degree("prefill", curves), _per_degree("decode", curves)
    if not prefill or not decode:
        return None
    p, d = (max(degrees, key=lambda tp: (degrees[tp] / tp, -tp)) for degrees in (prefill, decode))
    best: tuple[float, int, Candidate] | None = None
    for workers in range(1, max_gpus // p + 1):
        rate = workers * prefill[p]
        # Either prefill is the phase that limits, or decode is with all GPUs that are left.
        enough = max(1, math.ceil(rate / decode[d] - 1e-9))
        others = min(enough, (max_gpus - workers * p) // d)
        if others < 1:
            continue
        found = min(rate, others * decode[d]), -(workers * p + others * d), Candidate(Pool(workers, p), Pool(others, d))
        best = found if best is None else max(best, found)
    return None if best is None else Baseline("DistServe, algorithm 1 (high node affinity)", best[2], best[0])


def low_affinity(curves: Curves, max_gpus: int, gpus_per_node: int) -> Baseline | None:
    """Algorithm 2. None where no pair fits a node."""
    prefill, decode = _per_degree("prefill", curves), _per_degree("decode", curves)
    pairs = [
        (min(prefill[p], decode[d]) / (p + d), -(p + d), p, d)
        for p in prefill
        for d in decode
        if p + d <= min(gpus_per_node, max_gpus)
    ]
    if not pairs:
        return None
    per_gpu, _, p, d = max(pairs)
    count = sum(nodes // (p + d) for nodes in _nodes(max_gpus, gpus_per_node))
    name = "DistServe, algorithm 2 (low node affinity)"
    return Baseline(name, Candidate(Pool(count, p), Pool(count, d)), per_gpu * count * (p + d))


def _nodes(gpus: int, per_node: int) -> list[int]:
    """GPUs of each node."""
    whole, rest = divmod(gpus, per_node)
    return [per_node] * whole + ([rest] if rest else [])


def _per_degree(role: str, curves: Curves) -> dict[int, float]:
    """Goodput of a single worker, by tensor parallel degree."""
    found = {}
    for candidate, curve in curves.items():
        pools = candidate.pools
        if list(pools) == [role] and pools[role].workers == 1 and curve.goodput > 0:
            found[pools[role].tp] = curve.goodput
    return found
