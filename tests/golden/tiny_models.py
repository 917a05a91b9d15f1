"""Tiny seeded models made by transformers, a loop that drives our runner by hand, and the comparison of both."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel

from baton.engine.attention import attention_backend
from baton.engine.kv_cache import KVCache
from baton.engine.model import DecoderModel, Model
from baton.engine.model_spec import ModelSpec, load_spec
from baton.engine.native.decoder import NativeDecoder
from baton.engine.native.library import kernels as native_kernels
from baton.engine.request import EngineRequest, StepItem, StepPlan
from baton.engine.runner import ModelRunner
from baton.engine.transformers_model import TransformersModel
from baton.engine.weights import iter_weights
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams

VOCAB = 211
TIE = 2e-5
"""Logits this close are equal: several times the rounding error measured against float64 (5e-6)."""


def make_tiny_model(
    folder: Path, architecture: str = "LlamaForCausalLM", *, max_shard_size: str = "1GB", **changes: Any
) -> PreTrainedModel:
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
        "pad_token_id": 0,  # some architectures' own is beyond our vocabulary
    }
    model: PreTrainedModel = model_class(model_class.config_class(**(settings | changes))).eval()
    neutral = 0.0 if "Gemma" in architecture else 1.0  # Gemma adds 1
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=neutral * ("norm" in name), std=0.2)  # not their neutral values
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of one word per token id."""
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0"
    )
    tokenizer.save_pretrained(folder)


def load_runner(
    folder: Path,
    *,
    block_size: int = 16,
    num_blocks: int = 200,
    dtype: str = "float32",
    max_model_len: int | None = None,
    impl: str = "auto",
    kernels: str = "torch",
    attention: str = "torch",
) -> ModelRunner:
    """`kernels`: `torch` or `native`, of our own decoder. `attention`: the same, of what torch computes."""
    if "native" in (kernels, attention) and native_kernels() is None:
        pytest.skip("the native kernels were not built")
    spec = load_spec(folder, impl, max_model_len)
    backend = attention_backend(attention, torch.device("cpu"))
    model: Model
    if isinstance(spec, ModelSpec) and kernels == "native":
        model = NativeDecoder(spec, iter_weights(folder), dtype=dtype)
    elif isinstance(spec, ModelSpec):
        model = DecoderModel(spec, iter_weights(folder), backend, dtype=dtype)
    else:
        model = TransformersModel(spec, folder, backend, dtype=dtype)
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


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@torch.inference_mode()
def assert_greedy(model: PreTrainedModel, tokens: list[int], num_prompt: int) -> None:
    """Each token after the prompt is Hugging Face's most probable one given those before it, or ties with it.

    One pass over the whole sequence. Where two logits agree to float32's last digits either may win: the
    order of sums decides.
    """
    logits = model(torch.tensor([tokens])).logits[0, num_prompt - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens[num_prompt:])[:, None])[:, 0]
    behind = logits.max(dim=-1).values - chosen
    assert behind.max() <= TIE, f"new token {int(behind.argmax())} is {float(behind.max())} behind Hugging Face's"


def serve_everything(driver: Driver, rng: random.Random, model: PreTrainedModel) -> None:
    """Requests at all stages in the same steps: decodes, first chunks, later chunks, last chunks."""
    requests = [driver.request(prompt_of(n)) for n in (1, 3, 16, 17, 40, 64, 65, 90)]
    goal = {id(r): r.num_tokens + 6 for r in requests}
    while live := [r for r in requests if r.num_tokens < goal[id(r)]]:
        chosen = [r for r in live if rng.random() < 0.7] or live
        driver.step([(r, min(rng.choice((1, 8, 30)), r.num_tokens - r.num_computed)) for r in chosen])
    for request in requests:
        assert_greedy(model, request.tokens, request.num_prompt)
