"""Tiny seeded models made by transformers, of every architecture, and a loop that drives our runner by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from baton.engine.attention import attention_backend
from baton.engine.kv_cache import KVCache
from baton.engine.model import DecoderModel
from baton.engine.model_spec import load_model_config
from baton.engine.request import EngineRequest, StepItem, StepPlan
from baton.engine.runner import ModelRunner
from baton.engine.weights import iter_weights
from baton.protocol import RequestKey, SamplingParams

VOCAB = 211


def make_tiny_model(
    folder: Path, architecture: str = "LlamaForCausalLM", *, max_shard_size: str = "1GB", **changes: Any
) -> transformers.PreTrainedModel:
    """Save a random model of two layers and return it. `changes` override its config."""
    torch.manual_seed(7)
    model_class = getattr(transformers, architecture)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,  # logits far enough apart that rounding does not decide
    }
    model: transformers.PreTrainedModel = model_class(model_class.config_class(**(settings | changes))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)  # not their neutral values
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def load_runner(folder: Path, *, block_size: int = 16, num_blocks: int = 200, dtype: str = "float32") -> ModelRunner:
    spec = load_model_config(folder)
    model = DecoderModel(spec, iter_weights(folder), attention_backend("torch", torch.device("cpu")), dtype=dtype)
    cache = KVCache(spec.kv_layout(block_size, dtype), num_blocks)
    return ModelRunner(model, cache)


class Driver:
    """Runs steps by hand: hands out blocks, advances requests, keeps every logits row."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self._next_block = 0

    def request(self, prompt: list[int], **sampling: Any) -> EngineRequest:
        params = SamplingParams(max_tokens=1000, **sampling)
        return EngineRequest(RequestKey(f"{self._next_block:032x}", 0), prompt, params)

    def step(self, work: list[tuple[EngineRequest, int]]) -> None:
        """Compute so many further tokens of each; append what is sampled."""
        layout = self.runner.kv_cache.layout
        for request, n in work:
            while len(request.blocks) < layout.num_blocks_for(request.num_computed + n):
                request.blocks.append(self._next_block)
                self._next_block += 1
        plan = StepPlan([StepItem(request, n) for request, n in work])
        for item, token in zip(plan.items, self.runner.run(plan), strict=True):
            item.request.num_computed += item.num_tokens
            assert (token is not None) == item.samples
            if token is not None:
                item.request.tokens.append(token)

    def prefill(self, request: EngineRequest, chunk: int | None = None) -> None:
        while left := request.num_tokens - request.num_computed:
            self.step([(request, min(left, chunk or left))])
            if left <= (chunk or left):
                return

    def decode(self, requests: list[EngineRequest], steps: int) -> None:
        for _ in range(steps):
            self.step([(request, 1) for request in requests])
