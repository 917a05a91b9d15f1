"""What engine steps were, and how long they took: what latency models are fitted to, and what a worker's chart shows.

Pure data; must not know clocks or tensors.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from baton.engine.request import StepPlan

MAX_STEPS = 200_000
"""Kept by a worker whose steps nobody takes: over an hour of steps of 20 ms."""


class StepShape(NamedTuple):
    """The work of one step, as far as its duration depends on it. A *chunk* is an item of more than one token.

    The token after a prompt's last full chunk may be an item of one token; it costs what a decode costs.
    """

    chunks: int = 0
    chunk_tokens: int = 0
    chunk_context: int = 0
    """Tokens whose KV was there before, summed over chunks."""
    chunk_attended: int = 0
    """Positions attended to, summed over the chunks' tokens: `n * start + n * (n + 1) / 2` for each."""
    decodes: int = 0
    decode_context: int = 0
    """Positions attended to, the token's own included, summed over the items of one token."""

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        chunks = chunk_tokens = chunk_context = chunk_attended = 0
        batch, items = plan.in_batch, plan.items
        decodes, decode_context = batch.stop - batch.start, plan.batch_context
        if decodes == len(items):
            return cls(0, 0, 0, 0, decodes, decode_context)
        for item in [*items[: batch.start], *items[batch.stop :]] if decodes else items:
            n, start = item.num_tokens, item.start
            if n == 1:
                decodes += 1
                decode_context += start + 1
            else:
                chunks += 1
                chunk_tokens += n
                chunk_context += start
                chunk_attended += n * start + n * (n + 1) // 2
        return cls(chunks, chunk_tokens, chunk_context, chunk_attended, decodes, decode_context)


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One step of one worker. `start_s`: on the router's clock (`baton.timeline`)."""

    worker: str
    start_s: float
    seconds: float
    shape: StepShape
    kv_blocks: int
    """Not free when the step was planned."""
    num_running: int
    num_waiting: int


class StepLog:
    """The last steps of one worker, until somebody takes them."""

    def __init__(self, max_steps: int = MAX_STEPS):
        self._steps: deque[StepRecord] = deque(maxlen=max_steps)
        self.num_lost = 0
        """Steps that were older than the last `max_steps` when they were taken."""

    def add(self, step: StepRecord) -> None:
        self.num_lost += len(self._steps) == self._steps.maxlen
        self._steps.append(step)

    def take(self) -> list[StepRecord]:
        """Those since the last call, in order."""
        steps, self._steps = self._steps, deque(maxlen=self._steps.maxlen)
        return list(steps)
