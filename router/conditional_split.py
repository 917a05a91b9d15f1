"""When a request had better be prefilled on a decode worker, although there are prefill workers.

A prompt that is short, or of which a decode worker has the KV, is computed there in one step; the way over a prefill
worker costs its queue and the hand-over. It is worth it where the request itself is predicted to be faster, and where
the others that decode there do not notice: the step with the prompt keeps the promised time between tokens
(`router.slo_tbt_ms`), or without a promise takes at most twice as long as one without.

Hysteresis, per size of what is to be computed (a power of two): the exception begins where it is clearly faster, and
ends where it is not faster any more, so that requests of a kind do not go here and there around the threshold.
Pure. Must not know where requests would go otherwise, or why.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.config import ClusterConfig
from router.candidates import Candidates
from router.policies.base import Query
from router.policies.predicted import load_ms_of, transfer_ms
from router.view import WorkerView

HANDOFF_MS = 2.0
"""What a hand-over takes beside the blocks' way: offer, commit and answer, each from thread to thread."""
MARGIN_MS = 1.0
MARGIN = 0.1
"""To begin it must be faster by this, and by this share of what the other way takes until decode can begin."""
STALL_MS = 5.0
"""Without a promise, a step may always be delayed by so much."""
RULED_OUT = 1e9
"""Added to the cost of a worker that would compute for more than a step, or delay others too long."""


class Verdict(NamedTuple):
    workers: list[WorkerView]
    """The decode workers that were considered."""
    values: list[float]
    """What each of them would take, in milliseconds; to compare with `split_ms`."""
    columns: dict[str, list[float]]
    chosen: WorkerView | None
    """Which of them gets the request; None: it is split."""


class ConditionalSplit:
    """See the module. Remembers for which sizes the exception holds."""

    def __init__(self, config: ClusterConfig):
        self._step_tokens = config.engine.max_batch_tokens
        self._tbt_ms = config.router.slo_tbt_ms
        self._local: dict[int, bool] = {}
        """By the number of bits of the number of tokens to compute."""

    def judge(
        self, query: Query, prefill: WorkerView, decode: WorkerView, candidates: Candidates, silent_since: float
    ) -> Verdict | None:
        """Whether a decode worker should do all of it, instead of `prefill` and `decode`, where it goes otherwise.

        That may be `decode`, or the one of `candidates` that has most of the prompt cached; none that was not heard of
        since `silent_since`. None: there is none that could compute it in one step.
        """
        context = query.demand.context
        cached = query.cached(candidates)
        workers = [decode]
        if cached and (most := candidates.workers[max(cached, key=cached.__getitem__)]) is not decode:
            workers.append(most)
        if context > self._step_tokens:
            workers = [w for w in workers if context - query.cached_tokens(w) <= self._step_tokens]
        workers = [w for w in workers if w.role == "decode" and w.seen >= silent_since]
        if not workers:
            return None
        sent_ms = transfer_ms(decode, max(0, context - query.cached_tokens(decode)))
        first_ms = prefill.queue_ms + _num_new(query, prefill) * prefill.token_ms + HANDOFF_MS + sent_ms
        split_ms = first_ms + load_ms_of(query, decode)
        num_new = [_num_new(query, w) for w in workers]
        compute = [n * w.token_ms for n, w in zip(num_new, workers, strict=True)]
        load = [load_ms_of(query, w) for w in workers]
        # Where others decode, the prompt is computed in their next step, and makes that longer.
        values = [
            w.queue_ms + c + w.beside_ms + a + (RULED_OUT if self._delays(w, c) else 0.0)
            for w, c, a in zip(workers, compute, load, strict=True)
        ]
        columns = {
            "queue_ms": [w.queue_ms for w in workers],
            "compute_ms": compute,
            "cached_tokens": [float(context - n) for n in num_new],
            "load_ms": load,
            "step_ms": [w.beside_ms for w in workers],
            "split_ms": [split_ms] * len(workers),
        }
        low = min(values)
        at = values.index(low)
        return Verdict(
            workers, values, columns, workers[at] if self._holds(num_new[at], split_ms - low, first_ms) else None
        )

    def _delays(self, worker: WorkerView, compute_ms: float) -> bool:
        """Whether those that decode there would notice."""
        step_ms = worker.beside_ms
        if not step_ms:
            return False
        return compute_ms > (max(step_ms, STALL_MS) if self._tbt_ms is None else self._tbt_ms - step_ms)

    def _holds(self, num_new: int, gain_ms: float, first_ms: float) -> bool:
        size = num_new.bit_length()
        needed = 0.0 if self._local.get(size, False) else max(MARGIN_MS, MARGIN * first_ms)
        holds = self._local[size] = gain_ms > needed
        return holds


def _num_new(query: Query, worker: WorkerView) -> int:
    """Tokens to be computed there; the last one is in any case."""
    return max(1, query.demand.context - query.cached_tokens(worker))
