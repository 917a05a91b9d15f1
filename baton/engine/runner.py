"""From a step plan to tokens: packs the batch, runs the model, samples. And builds all of it from the config.

Knows requests and plans (to read, never to change) and the parts it joins. Must not know queues, hand-offs
or time: what comes next is decided in `baton.engine.core`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from baton.config import ClusterConfig, PoolConfig
from baton.engine.attention import AttentionBatch, attention_backend
from baton.engine.batch import Batch
from baton.engine.kv_cache import KVCache, num_blocks_in
from baton.engine.model import DecoderModel, Model
from baton.engine.model_spec import ModelSpec, load_model_config, resolve_dtype
from baton.engine.request import StepItem, StepPlan
from baton.engine.sampler import sample
from baton.engine.weights import fingerprint, iter_weights, resolve_model
from baton.errors import ConfigError, ModelError


class Runner(Protocol):
    """Computes one engine step."""

    def run(self, plan: StepPlan) -> list[int | None]:
        """One entry per item of the plan: the sampled token, or None where the item does not sample.

        Writes the KV of the plan's tokens into the pool. Reads requests and changes none.
        """
        ...

    def set_num_threads(self, num_threads: int) -> None:
        """Compute with so many threads from now on, on behalf of the calling thread."""
        ...


class ModelRunner:
    """The `Runner` that computes with a model."""

    def __init__(self, model: Model, kv_cache: KVCache):
        self.model = model
        self.kv_cache = kv_cache

    def run(self, plan: StepPlan) -> list[int | None]:
        """See `Runner.run`."""
        sampling = [item for item in plan.items if item.samples]
        logits = self.logits(plan)
        sampled = iter(
            sample(
                logits,
                [item.request.sampling for item in sampling],
                [item.request.sample for item in sampling],
                [item.request.num_tokens for item in sampling],
                [item.request.forbidden for item in sampling],
            )
            if sampling
            else ()
        )
        return [next(sampled) if item.samples else None for item in plan.items]

    def set_num_threads(self, num_threads: int) -> None:
        """See `Runner.set_num_threads`."""
        self.model.set_num_threads(num_threads)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Compute the plan's tokens; logits `[n, vocab]` float32 of the n items that sample, in their order."""
        items = plan.items
        if not items:
            return torch.empty(0, self.model.spec.vocab_size)
        lengths = [item.num_tokens for item in items]
        ends = np.cumsum(lengths)
        batch = Batch(
            AttentionBatch([item.start for item in items], lengths, [item.request.blocks for item in items]),
            tokens=np.array([token for item in items for token in _tokens(item)], dtype=np.int64),
            logits_rows=ends[[item.samples for item in items]] - 1,
        )
        return self.model.forward(batch, self.kv_cache)


def _tokens(item: StepItem) -> list[int]:
    if item.num_tokens == 1:
        return [item.request.tokens[item.start]]
    return item.request.tokens[item.start : item.start + item.num_tokens]


@dataclass(frozen=True)
class BuiltRunner:
    """All that a worker needs of its engine."""

    runner: ModelRunner
    spec: ModelSpec
    kv_cache: KVCache
    fingerprint: str
    dtype: str
    device: str
    max_model_len: int
    """Prompt plus output, in tokens, that the model and the configuration allow; pools are checked apart."""


def build_runner(
    config: ClusterConfig,
    pool: PoolConfig,
    *,
    progress: Callable[[str], None] | None = None,
    model: Model | None = None,
) -> BuiltRunner:
    """Find and load the model and size the KV pool for a worker of `pool`. Takes seconds.

    `model`: one that is loaded already, of the same configuration: workers of one process share it.
    Raises ModelError (model) or ConfigError (sizes, device). Leaves the number of threads as it is.
    """
    device = resolve_device(pool)
    path = resolve_model(config.model.source, progress=progress)
    spec = load_model_config(path)
    dtype = resolve_dtype(config.model.dtype, device)
    layout = spec.kv_layout(config.engine.block_size, dtype)
    num_blocks = pool.kv_blocks or num_blocks_in(pool.kv_memory_mib, layout)
    if not num_blocks:
        needed = -(-layout.block_bytes // 2**20)
        raise ConfigError(
            "kv_memory_mib", "holds not one KV block", value=pool.kv_memory_mib, allowed=f">= {needed} for this model"
        )
    limit = config.model.max_model_len
    if limit is not None and limit > spec.max_position_embeddings:
        raise ConfigError(
            "model.max_model_len",
            "exceeds the model's own limit",
            value=limit,
            allowed=f"<= {spec.max_position_embeddings}",
        )
    max_len = limit or spec.max_position_embeddings
    if spec.sliding_window is not None and max_len > spec.sliding_window:
        # Not a silent cap: who deploys a model for its long context shall learn it now, not from refused requests.
        raise ModelError(
            f"{path}: attention over a sliding window ({spec.sliding_window} tokens) is not supported, and requests of "
            f"up to {max_len} tokens would need it; set model.max_model_len to {spec.sliding_window} or less"
        )
    if model is None:
        attention = attention_backend(config.engine.attention, torch.device(device))
        model = DecoderModel(spec, iter_weights(path), attention, dtype=dtype, device=device)
    kv_cache = KVCache(layout, num_blocks, device)
    return BuiltRunner(
        runner=ModelRunner(model, kv_cache),
        spec=spec,
        kv_cache=kv_cache,
        fingerprint=fingerprint(path, dtype),
        dtype=dtype,
        device=device,
        max_model_len=max_len,
    )


def resolve_device(pool: PoolConfig) -> str:
    """`cpu` or `cuda`. Raises ConfigError if a GPU is demanded and torch sees none."""
    if pool.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "torch sees no GPU here", value="cuda", allowed="auto, cpu")
    if pool.device == "auto":
        return "cuda" if pool.gpus > 0 and torch.cuda.is_available() else "cpu"
    return pool.device
