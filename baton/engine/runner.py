"""From a step plan to tokens: packs the batch, runs the model, samples.

Knows requests and plans (to read, never to change) and the parts it joins. Must not know queues, hand-offs
or time: what comes next is decided in `baton.engine.core`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from baton.engine.attention import AttentionBatch
from baton.engine.batch import Batch
from baton.engine.kv_cache import KVCache
from baton.engine.model import Model
from baton.engine.request import StepItem, StepPlan
from baton.engine.step_sampler import StepSampler, prompt_places
from baton.engine.structured import Grammars


class Runner(Protocol):
    """Computes one engine step."""

    def run(self, plan: StepPlan) -> list[int | None]:
        """One entry per item of the plan: the sampled token, or None where the item does not sample.

        Writes the KV of the plan's tokens into the pool, and to the items what their requests want to know
        (`logprobs`, `prompt_logprobs`) or why one cannot go on (`problem`). Reads requests and changes none.
        """
        ...

    def set_num_threads(self, num_threads: int) -> None:
        """Compute with so many threads from now on, on behalf of the calling thread."""
        ...


class ModelRunner:
    """The `Runner` that computes with a model."""

    def __init__(self, model: Model, kv_cache: KVCache, grammars: Grammars | None = None):
        """`grammars`: for structured output; without them such requests end with an error."""
        self.model = model
        self.kv_cache = kv_cache
        self._sampler = StepSampler(grammars or Grammars(None, model.spec.vocab_size, ()))

    def run(self, plan: StepPlan) -> list[int | None]:
        """See `Runner.run`."""
        try:
            return self._run(plan)
        finally:  # of a step that failed, too: its blocks are freed while kernels may still write them
            self.kv_cache.mark_written()

    def _run(self, plan: StepPlan) -> list[int | None]:
        for source, target in plan.copies:
            self.kv_cache.copy(source, target)
        items = plan.items
        sampling = [item for item in items if item.samples]
        asked = [item for item in items if not item.request.plain and item.request.wants_prompt_logprobs]
        logits = self.logits(plan, about_prompts=bool(asked))
        sampled = iter(self._sampler.sample(sampling, logits[: len(sampling)]) if sampling else ())
        if asked:
            self._sampler.report_prompts(asked, logits[len(sampling) :])
        return [next(sampled) if item.samples else None for item in items]

    def set_num_threads(self, num_threads: int) -> None:
        """See `Runner.set_num_threads`."""
        self.model.set_num_threads(num_threads)

    def logits(self, plan: StepPlan, *, about_prompts: bool = False) -> torch.Tensor:
        """Compute the plan's tokens; logits `[n, vocab]` float32 of the n items that sample, in their order.

        `about_prompts`: after them rows of all `prompt_places`.
        """
        items = plan.items
        if not items:
            return torch.empty(0, self.model.spec.vocab_size)
        lengths = [item.num_tokens for item in items]
        ends = np.cumsum(lengths)
        logits_rows = ends[[item.samples for item in items]] - 1
        if about_prompts:
            places = [
                end - item.num_tokens - item.start + place
                for item, end in zip(items, ends, strict=True)
                for place in prompt_places(item)
            ]
            logits_rows = np.concatenate((logits_rows, np.array(places, dtype=logits_rows.dtype)))
        batch = Batch(
            AttentionBatch([item.start for item in items], lengths, [item.request.blocks for item in items]),
            tokens=np.array([token for item in items for token in _tokens(item)], dtype=np.int64),
            logits_rows=logits_rows,
        )
        return self.model.forward(batch, self.kv_cache)


def _tokens(item: StepItem) -> list[int]:
    if item.num_tokens == 1:
        return [item.request.tokens[item.start]]
    return item.request.tokens[item.start : item.start + item.num_tokens]
