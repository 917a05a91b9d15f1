"""Policies that weigh everything in milliseconds, as the workers' own measured step times predict it.

prefill   until the first token: what is queued there, then the part of the prompt that is not cached there
decode    the hand-over of what is not cached there, and the time between tokens with one request more
"""

from __future__ import annotations

from operator import add

from router.candidates import Candidates
from router.policies.base import Columns, Costs, Part, Policy, Query
from router.view import WorkerView

HORIZON = 64
"""Output tokens for which the time between tokens counts: how many a request will have nobody knows."""
LINK_BYTES_PER_MS = 1e6
"""What a hand-over is expected to move: 1 GB/s, less than links of one machine do and more than a slow network."""
LATE = 10.0
"""What a millisecond beyond a promised time costs, compared to one within it."""


Times = tuple[list[float], list[float], list[int]]


def prefill_times(query: Query, candidates: Candidates) -> Times:
    """Until each worker has computed the prompt: in its queue and computing, in ms; tokens whose KV it has."""
    context, token_ms = query.demand.context, candidates.column("token_ms")
    count, tokens = len(token_ms), float(context)  # a whole number would make each product slower
    if token_ms.count(token_ms[0]) == count:  # usually
        compute = [tokens * token_ms[0]] * count
    else:
        compute = [tokens * ms for ms in token_ms]
    cached = [0] * count
    for i, found in query.cached(candidates).items():
        cached[i] = found = min(found, context - 1)  # the last token is computed in any case
        compute[i] = (context - found) * token_ms[i]
    return candidates.column("queue_ms").copy(), compute, cached


def decode_load_ms(query: Query, candidates: Candidates) -> list[float]:
    """What its batch makes a request wait on each worker, over its first `HORIZON` tokens.

    It is more where the pool or the batch is full.
    """
    horizon = _horizon(query)
    return [horizon * ms for ms in candidates.column("load_ms")]


def load_ms_of(query: Query, worker: WorkerView) -> float:
    """The same of one worker."""
    return _horizon(query) * worker.load_ms


def _horizon(query: Query) -> float:
    """Tokens that count."""
    return float(min(HORIZON, max(1, query.demand.total - query.demand.context)))


def transfer_ms(worker: WorkerView, tokens: int) -> float:
    """What their KV takes on its way to this worker."""
    return tokens * worker.token_bytes / LINK_BYTES_PER_MS


def decode_times(query: Query, candidates: Candidates) -> Times:
    """Of decoding on each worker what another one has computed: load and transfer, in ms; tokens whose KV it has."""
    context = query.demand.context
    token_ms = transfer_ms(candidates.workers[0], 1)  # a token has as many bytes everywhere
    transfer, cached = [context * token_ms] * len(candidates), [0] * len(candidates)
    for i, found in query.cached(candidates).items():
        cached[i] = found = min(found, context)
        transfer[i] = (context - found) * token_ms
    return decode_load_ms(query, candidates), transfer, cached


class KvAware(Policy):
    """Everything in milliseconds: a cached prefix is worth the time that it saves, and no more.

    Computing counts twice: the request waits for it, and so does whoever comes after. That is why a burst of equal
    prompts stays where the first one went, until the queue there is longer than computing it elsewhere is worth.
    """

    name = "kv_aware"
    uses_prefixes = True

    def prefill(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        queue, compute, cached = prefill_times(query, candidates)
        values = [q + c + c for q, c in zip(queue, compute)]  # noqa: B905
        return values, {"queue_ms": queue, "compute_ms": compute, "cached_tokens": cached}

    def decode(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        if part != "decode":
            load = decode_load_ms(query, candidates)
            return load, {"load_ms": load}
        load, transfer, cached = decode_times(query, candidates)
        return list(map(add, load, transfer)), {"load_ms": load, "transfer_ms": transfer, "cached_tokens": cached}


class SloAware(Policy):
    """Within the promised times whoever has the least to do for the request; beyond them it costs `LATE` times as much.

    So a worker with a long queue that has the prompt cached gets it if the first token is still in time, and else does
    not. Without a promise every millisecond counts the same.
    """

    name = "slo_aware"
    uses_prefixes = True

    def __init__(self, ttft_ms: float | None, tbt_ms: float | None):
        self._ttft_ms = ttft_ms
        self._tbt_ms = tbt_ms

    def prefill(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        queue, compute, cached = prefill_times(query, candidates)
        ttft = list(map(add, queue, compute))
        columns: Columns = {"ttft_ms": ttft, "queue_ms": queue, "compute_ms": compute, "cached_tokens": cached}
        promised = self._ttft_ms
        if promised is None:
            return ttft, columns
        if max(ttft) <= promised:
            return [c + q * _IN_TIME for q, c in zip(queue, compute)], columns  # noqa: B905
        values = [
            c + q * _IN_TIME + (LATE * (t - promised) if t > promised else 0.0)
            for t, q, c in zip(ttft, queue, compute)  # noqa: B905
        ]
        return values, columns

    def decode(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        tbt = candidates.column("tbt_ms").copy()
        if part == "decode":
            load, transfer, _ = decode_times(query, candidates)
        else:
            load, transfer = decode_load_ms(query, candidates), [0.0] * len(candidates)
        columns: Columns = {"tbt_ms": tbt, "load_ms": load, "transfer_ms": transfer}
        promised = self._tbt_ms
        if promised is None:
            return list(map(add, load, transfer)), columns
        values = [b + a * _IN_TIME for a, b in zip(load, transfer)]  # noqa: B905
        if max(tbt) > promised:
            late = HORIZON * LATE
            values = [v + late * (t - promised) if t > promised else v for v, t in zip(values, tbt)]  # noqa: B905
        return values, columns


_IN_TIME = 1 / LATE
"""What a millisecond of waiting within a promised time costs, compared to one of work."""
