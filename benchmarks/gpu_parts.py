"""Parts of `benchmarks.gpu_check`: what a GPU gives, a model of random weights made on it, and timed steps of one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from baton.engine.attention import AttentionBackend, AttentionBatch
from baton.engine.batch import Batch
from baton.engine.kv_cache import KVCache
from baton.engine.model import DecoderModel, Model
from baton.engine.model_spec import ModelSpec, load_spec

DTYPE = "bfloat16"
BLOCK_SIZE = 16
CHUNK = 2048
"""Rows of one step of a prompt."""

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": DTYPE,
}
"""Shapes of Llama 3.1 8B; its rotary scaling is left out, which costs nothing at run time."""


def event_ms(call: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of the device for `call`, the device idle before each."""
    samples = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return float(np.median(samples))


def _bytes_per_ms() -> float:
    """Of the GPU's memory, the better of reading and of copying."""
    data = torch.ones(min(4 << 30, torch.cuda.mem_get_info()[0] // 8) // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(data)
    read = data.nbytes / event_ms(data.sum, 7)
    return max(read, 2 * data.nbytes / event_ms(lambda: target.copy_(data), 7))


def measure_gpu() -> dict[str, float]:
    """Memory bandwidth (GB/s), rate of matrix products (bfloat16, GFLOP/s), copies from and to pinned memory (GB/s)."""
    bandwidth = _bytes_per_ms() / 1e6
    n = 8192
    left, right = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = event_ms(lambda: left @ right, 7)
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    return {
        "read_gb_per_s": bandwidth,
        "gemm_gflops": 2 * n**3 / product / 1e6,
        "to_host_gb_per_s": host.nbytes / event_ms(lambda: host.copy_(device, non_blocking=True), 5) / 1e6,
        "to_device_gb_per_s": host.nbytes / event_ms(lambda: device.copy_(host, non_blocking=True), 5) / 1e6,
    }


def random_model(config: dict[str, Any], attention: AttentionBackend, device: str = "cuda") -> DecoderModel:
    """A Llama of these shapes; weights are drawn on the device, small enough that activations stay finite."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        spec = load_spec(Path(folder))
    assert isinstance(spec, ModelSpec)
    return DecoderModel(spec, random_weights(spec, torch.device(device)), attention, dtype=DTYPE, device=device)


def random_weights(spec: ModelSpec, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a Llama without biases, by Hugging Face's names; norms are ones."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    heads, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator).mul_(shape[-1] ** -0.5)

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16, device=device)

    yield "model.embed_tokens.weight", drawn(spec.vocab_size, hidden)
    for i in range(spec.num_layers):
        prefix = f"model.layers.{i}"
        for name, outs, ins in (
            ("self_attn.q_proj", heads, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, heads),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            yield f"{prefix}.{name}.weight", drawn(outs, ins)
        yield f"{prefix}.input_layernorm.weight", ones()
        yield f"{prefix}.post_attention_layernorm.weight", ones()
    yield "model.norm.weight", ones()
    if not spec.tie_embeddings:
        yield "lm_head.weight", drawn(spec.vocab_size, hidden)


def pool_for(spec: ModelSpec, device: str, tokens: int, share: float = 0.7) -> KVCache:
    """A pool with a scratch block for so many tokens, or for what `share` of the free memory holds."""
    layout = spec.kv_layout(BLOCK_SIZE, DTYPE)
    blocks = layout.num_blocks_for(tokens)
    if device == "cuda":
        blocks = min(blocks, int(torch.cuda.mem_get_info()[0] * share) // layout.block_bytes)
    return KVCache(layout, blocks, device, scratch=True)


def decode_batch(batch: int, context: int, num_blocks: int) -> Batch | None:
    """One row for each of `batch` sequences, the last of `context` tokens; None where the pool is too small."""
    each = -(-context // BLOCK_SIZE)
    if batch * each > num_blocks:
        return None
    order = np.random.default_rng(0).permutation(num_blocks)[: batch * each].reshape(batch, each)
    return Batch(
        AttentionBatch([context - 1] * batch, [1] * batch, order.tolist()),
        tokens=np.arange(batch, dtype=np.int64) + 5,
        logits_rows=np.arange(batch, dtype=np.int64),
    )


def prefill_batches(tokens: int, num_blocks: int) -> list[Batch] | None:
    """The chunks of one prompt; None where the pool is too small."""
    each = -(-tokens // BLOCK_SIZE)
    if each > num_blocks:
        return None
    table = np.random.default_rng(1).permutation(num_blocks)[:each].tolist()
    chunks = []
    for start in range(0, tokens, CHUNK):
        rows = min(CHUNK, tokens - start)
        last = np.array([rows - 1] if start + rows == tokens else [], dtype=np.int64)
        prompt = (np.arange(start, start + rows, dtype=np.int64) * 7919) % 1000
        chunks.append(Batch(AttentionBatch([start], [rows], [table]), tokens=prompt, logits_rows=last))
    return chunks


def step_ms(model: Model, batches: list[Batch], kv_cache: KVCache, *, seconds: float = 0.6) -> dict[str, float]:
    """Milliseconds from packed arrays to sampled tokens on the host (argmax), after warming up: median, p10, p90."""

    def step() -> None:
        for batch in batches:
            logits = model.forward(batch, kv_cache)
        torch.argmax(logits, dim=-1).tolist()

    for _ in range(2):
        step()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 5 or (time.perf_counter() < end and len(samples) < 200):
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    p10, median, p90 = np.percentile(samples, (10, 50, 90)) * 1e3
    return {"median_ms": float(median), "p10_ms": float(p10), "p90_ms": float(p90), "samples": len(samples)}
