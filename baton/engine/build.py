"""From the configuration to a worker's engine: finds and loads the model, sizes the KV pool, joins the two."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from baton.config import ClusterConfig, EngineConfig, PoolConfig
from baton.engine.cuda_graphs import CudaCapture, GraphedDecoder, graph_sizes, warm_up
from baton.engine.kv_cache import KVCache
from baton.engine.load import load_model
from baton.engine.memory import MemoryPlan, plan_memory
from baton.engine.model import DecoderModel, Model
from baton.engine.model_spec import CausalLMSpec, resolve_dtype
from baton.engine.runner import ModelRunner
from baton.engine.spec_cache import cached_spec
from baton.engine.structured import Grammars
from baton.engine.weights import fingerprint, resolve_model
from baton.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltRunner:
    """All that a worker needs of its engine."""

    runner: ModelRunner
    spec: CausalLMSpec
    kv_cache: KVCache
    memory: MemoryPlan
    fingerprint: str
    engine: str
    """What computes, and in which dtype, in words."""
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
    shared_pool: bool = False,
    link_bytes: Callable[[int], int] = lambda block_bytes: 0,
) -> BuiltRunner:
    """Find and load the model and size the KV pool for a worker of `pool`. Takes seconds.

    `model`: one that is loaded already, of the same configuration: workers of one process share it.
    `shared_pool`: the KV pool lies in memory that other processes of this machine can map.
    `link_bytes`: of a GPU, what links to other workers will take for KV blocks of so many bytes.
    Raises ModelError (model) or ConfigError (sizes, device). Leaves the number of threads as it is.
    """
    device = resolve_device(pool)
    path = resolve_model(config.model.source, progress=progress)
    spec = cached_spec(path, config.engine.model_impl, config.model.max_model_len)
    dtype = resolve_dtype(config.model.dtype, device)
    limit = config.model.max_model_len
    if limit is not None and limit > spec.max_position_embeddings:
        raise ConfigError(
            "model.max_model_len",
            "exceeds the model's own limit",
            value=limit,
            allowed=f"<= {spec.max_position_embeddings}",
        )
    runtime = psutil.Process().memory_info().rss if device == "cpu" else 0
    if model is None:
        model = load_model(config.engine, spec, path, dtype=dtype, device=device)
    engine = config.engine
    layout = spec.kv_layout(config.block_size_of(pool), dtype)
    memory = plan_memory(
        pool,
        layout,
        runtime=runtime,
        weights=model.weight_bytes,
        step=model.step_bytes(engine.max_batch_tokens, min(engine.max_batch_requests, engine.max_batch_tokens)),
        links=link_bytes(layout.block_bytes) if device == "cuda" else 0,
        device_bytes=_free_bytes() + model.weight_bytes if device == "cuda" else None,
    )
    log.info("%s in %s; memory: %s", model.computed_by, dtype, memory)
    if isinstance(model, GraphedDecoder):
        model = model.model  # its graphs are of another worker's pool
    graphed = device == "cuda" and engine.cuda_graphs and isinstance(model, DecoderModel)
    kv_cache = KVCache(layout, memory.num_blocks, device, scratch=graphed, shared=shared_pool)
    if graphed and isinstance(model, DecoderModel):
        longest = limit or spec.max_position_embeddings
        model = _capture(model, kv_cache, engine, layout.num_blocks_for(longest), progress or log.info)
    return BuiltRunner(
        runner=ModelRunner(model, kv_cache, Grammars(path, spec.vocab_size, spec.eos_token_ids)),
        spec=spec,
        kv_cache=kv_cache,
        memory=memory,
        fingerprint=fingerprint(path, dtype),
        engine=f"{model.computed_by} in {dtype}",
        dtype=dtype,
        device=device,
        max_model_len=limit or spec.max_position_embeddings,
    )


def _free_bytes() -> int:
    """Of the GPU: what neither the model and CUDA's own needs nor anybody else take."""
    torch.cuda.empty_cache()  # what loading has left behind
    return torch.cuda.mem_get_info()[0]


def _capture(
    model: DecoderModel, kv_cache: KVCache, engine: EngineConfig, max_blocks: int, progress: Callable[[str], None]
) -> GraphedDecoder:
    warm_up(model, kv_cache, engine.max_batch_tokens)
    sizes = graph_sizes(min(engine.max_batch_requests, engine.max_batch_tokens))
    return GraphedDecoder(model, kv_cache, sizes=sizes, max_blocks=max_blocks, capture=CudaCapture(), progress=progress)


def resolve_device(pool: PoolConfig) -> str:
    """`cpu` or `cuda`. Raises ConfigError if a GPU is demanded and torch sees none."""
    if pool.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "torch sees no GPU here", value="cuda", allowed="auto, cpu")
    if pool.device == "auto":
        return "cuda" if pool.gpus > 0 and torch.cuda.is_available() else "cpu"
    return pool.device
