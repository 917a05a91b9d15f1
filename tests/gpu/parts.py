"""Runners on a GPU, for tests and `benchmarks.gpu_check`: either backend of attention, with CUDA graphs or without."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from baton.engine.attention import attention_backend
from baton.engine.attention.flashinfer_backend import unavailable
from baton.engine.cuda_graphs import CudaCapture, GraphedDecoder
from baton.engine.kv_cache import KVCache
from baton.engine.model import DecoderModel, Model
from baton.engine.model_spec import ModelSpec, load_spec
from baton.engine.runner import ModelRunner
from baton.engine.weights import iter_weights

CUDA = torch.device("cuda")
SIZES = [1, 2, 4, 8]
TIE = 1e-4
"""Float32 logits this close are equal: sums of a GPU's kernels and of the CPU's differ in their order."""
HEAD_DIM = 64
"""The least that FlashInfer takes."""


def no_flashinfer() -> str | None:
    """Why tests of it cannot run here."""
    return unavailable(CUDA, "bfloat16", HEAD_DIM)


def gpu_runner(
    folder: Path, *, dtype: str, attention: str, graphs: bool, block_size: int = 16, num_blocks: int = 400
) -> ModelRunner:
    """`attention`: `torch` or `flashinfer`. `graphs`: of up to 8 sequences of 512 tokens."""
    spec = load_spec(folder)
    assert isinstance(spec, ModelSpec)
    backend = attention_backend(attention, CUDA, dtype=dtype, head_dim=spec.head_dim)
    decoder = DecoderModel(spec, iter_weights(folder), backend, dtype=dtype, device="cuda")
    cache = KVCache(spec.kv_layout(block_size, dtype), num_blocks, "cuda", scratch=True)
    model: Model = decoder
    if graphs:
        blocks = -(-512 // block_size)
        model = GraphedDecoder(decoder, cache, sizes=SIZES, max_blocks=blocks, capture=CudaCapture())
    return ModelRunner(model, cache)


@torch.inference_mode()
def behind(model: PreTrainedModel, tokens: list[int], num_prompt: int) -> float:
    """How far the logit of any token after the prompt is below Hugging Face's highest, at most. Computed on the CPU."""
    logits = model(torch.tensor([tokens])).logits[0, num_prompt - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(tokens[num_prompt:])[:, None])[:, 0]
    return float((logits.max(dim=-1).values - chosen).max())
