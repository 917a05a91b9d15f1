"""Our decoder gives Hugging Face's logits and greedy tokens, for every kind of model and every way to batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baton.engine.model_spec import ARCHITECTURES
from baton.engine.request import StepItem, StepPlan
from baton.engine.runner import ModelRunner
from baton.engine.weights import weight_files
from tests.golden.tiny_models import (
    Driver,
    assert_greedy,
    load_runner,
    make_tiny_model,
    prompt_of,
    serve_everything,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MISTRAL = {"architecture": "MistralForCausalLM"}
QWEN2 = {"architecture": "Qwen2ForCausalLM"}
QWEN3 = {"architecture": "Qwen3ForCausalLM"}
SMOLLM3 = {"architecture": "SmolLM3ForCausalLM", "num_hidden_layers": 3, "no_rope_layer_interval": 2}
PHI3 = {"architecture": "Phi3ForCausalLM"}
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.3, 1.4],
        "long_factor": [1.0, 2.0, 5.0, 9.0],
    },
}
GEMMA = {"architecture": "GemmaForCausalLM"}
GEMMA2 = {
    "architecture": "Gemma2ForCausalLM",
    "query_pre_attn_scalar": 5,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 7.0,
    "sliding_window": 24,
}
GEMMA3 = {
    "architecture": "Gemma3ForCausalLM",
    "query_pre_attn_scalar": 5,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "no groups": {"num_key_value_heads": 6},
    "one kv head": {"num_key_value_heads": 1, "num_hidden_layers": 3},
    "head_dim apart from hidden_size": {"head_dim": 16},
    "rope llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "rope yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "Mistral": MISTRAL | {"sliding_window": None},
    "Mistral, a window as long as the model": MISTRAL | {"sliding_window": 512},
    "Mistral, window": MISTRAL | {"sliding_window": 40},
    "Mistral, a window of one token": MISTRAL | {"sliding_window": 1},
    "Mistral, tied, head_dim apart from hidden_size": MISTRAL | {"tie_word_embeddings": True, "head_dim": 16},
    "Mistral, rope dynamic": MISTRAL
    | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    "Qwen2": QWEN2,
    "Qwen2, window in one layer": QWEN2 | {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1},
    "Qwen2, tied": QWEN2 | {"tie_word_embeddings": True},
    "Qwen2, rope yarn": QWEN2
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "Qwen3": QWEN3,
    "Qwen3, window in one layer": QWEN3 | {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1},
    "Qwen3, tied, head_dim apart from hidden_size": QWEN3 | {"tie_word_embeddings": True, "head_dim": 16},
    "Qwen3, biases, one kv head": QWEN3 | {"attention_bias": True, "num_key_value_heads": 1},
    "Qwen3, rope linear": QWEN3 | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 3.0}},
    "SmolLM3": SMOLLM3,
    "SmolLM3, biases, window": SMOLLM3
    | {"attention_bias": True, "mlp_bias": True, "use_sliding_window": True, "sliding_window": 24},
    "Phi3": PHI3,
    "Phi3, tied, window": PHI3 | {"tie_word_embeddings": True, "sliding_window": 40},
    "Phi3, a part of each head rotated": PHI3 | {"partial_rotary_factor": 0.5},
    "Phi3, longrope": PHI3 | LONGROPE,
    "Phi3, longrope of a part of each head": PHI3
    | LONGROPE
    | {
        "partial_rotary_factor": 0.5,
        "rope_parameters": LONGROPE["rope_parameters"] | {"short_factor": [1.0, 1.3], "long_factor": [1.0, 7.0]},
    },
    "Gemma": GEMMA,
    "Gemma, untied, biases, one kv head": GEMMA
    | {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 1, "head_dim": 16},
    "Gemma 2": GEMMA2,
    "Gemma 2, biases, no softcap of attention": GEMMA2 | {"attention_bias": True, "attn_logit_softcapping": None},
    "Gemma 3": GEMMA3,
    "Gemma 3, full attention only": GEMMA3 | {"layer_types": ["full_attention"] * 3},
    "Gemma 3, untied, biases, softcap of logits": GEMMA3
    | {"tie_word_embeddings": False, "attention_bias": True, "final_logit_softcapping": 7.0, "head_dim": 16},
    "Gemma 3, rope linear for global layers": GEMMA3
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
}
BLOCK = 16
KERNELS = ["torch", "native"]
"""Both implementations of our decoder."""


@pytest.fixture(scope="module", params=KERNELS)
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, ModelRunner]:
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny_model(folder), load_runner(folder, block_size=BLOCK, kernels=request.param)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind: str, kernels: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, **KINDS[kind])
    runner = load_runner(tmp_path, kernels=kernels)
    driver = Driver(runner)
    prompt = prompt_of(150)
    request = driver.request(prompt)
    driver.prefill(request, chunk=64)
    driver.decode([request], 12)
    assert request.num_outputs == 13
    assert_greedy(model, request.tokens, len(prompt))

    fresh = driver.request(prompt)
    fresh.blocks = request.blocks
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1:]
    logits = runner.logits(StepPlan([StepItem(fresh, len(prompt))]))
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_prompt_lengths_around_blocks(plain: tuple[PreTrainedModel, ModelRunner], length: int) -> None:
    model, runner = plain
    driver = Driver(runner)
    request = driver.request(prompt_of(length))
    driver.prefill(request)
    driver.decode([request], 17)  # past the next block boundary
    assert request.num_outputs == 18
    assert_greedy(model, request.tokens, length)


@pytest.mark.parametrize("chunk", [1, 5, 15, 16, 17, 64, 100])
def test_chunked_prefill(plain: tuple[PreTrainedModel, ModelRunner], chunk: int) -> None:
    model, runner = plain
    driver = Driver(runner)
    request = driver.request(prompt_of(100))
    driver.prefill(request, chunk)
    driver.decode([request], 4)
    assert request.num_outputs == 5
    assert_greedy(model, request.tokens, 100)


def test_every_architecture_is_here() -> None:
    assert {kind.get("architecture", "LlamaForCausalLM") for kind in KINDS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("kind", "block_size"),
    [
        *((kind, 16) for kind in ("Mistral, window", "Qwen2", "Qwen3", "Gemma", "Phi3, a part of each head rotated")),
        *((kind, 7) for kind in ("Qwen3, window in one layer", "SmolLM3, biases, window")),
        *((kind, size) for kind in ("plain", "Gemma 2", "Gemma 3") for size in (1, 7, 16, 64)),
    ],
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_batch_of_everything(tmp_path: Path, kind: str, block_size: int, kernels: str) -> None:
    """Requests at all stages in the same steps: decodes, first chunks, later chunks, last chunks. From shards."""
    model = make_tiny_model(tmp_path, max_shard_size="100KB", **KINDS[kind])
    assert len(weight_files(tmp_path)) > 1
    driver = Driver(load_runner(tmp_path, block_size=block_size, num_blocks=600, kernels=kernels))
    serve_everything(driver, random.Random(block_size), model)


@pytest.mark.parametrize("kernels", KERNELS)
def test_longrope_follows_what_is_served(kernels: str, tmp_path: Path) -> None:
    """Short factors where no request can be longer than the original limit, else long ones."""
    model = make_tiny_model(tmp_path, **PHI3, **LONGROPE)
    driver = Driver(load_runner(tmp_path, max_model_len=64, kernels=kernels))
    request = driver.request(prompt_of(50))
    driver.prefill(request, chunk=16)
    driver.decode([request], 13)
    assert_greedy(model, request.tokens, 50)


def test_a_step_that_samples_nothing(plain: tuple[PreTrainedModel, ModelRunner]) -> None:
    _, runner = plain
    driver = Driver(runner)
    request = driver.request(prompt_of(40))
    driver.step([(request, 20)])
    assert request.num_tokens == 40
    assert runner.run(StepPlan([])) == []


def test_sampled_tokens_do_not_depend_on_the_batch(plain: tuple[PreTrainedModel, ModelRunner]) -> None:
    _, runner = plain
    driver = Driver(runner)
    settings = {"temperature": 0.8, "seed": 11}
    alone = driver.request(prompt_of(20), **settings)
    driver.prefill(alone)
    driver.decode([alone], 10)
    crowd = [driver.request(prompt_of(n), temperature=1.0, seed=n) for n in (5, 50)]
    among = driver.request(prompt_of(20), **settings)
    for request in (*crowd, among):
        driver.prefill(request, 7)
    driver.decode([crowd[0], among, crowd[1]], 10)
    assert among.tokens == alone.tokens


@pytest.mark.parametrize("kind", ["plain", "Qwen3", "Phi3", "Gemma", "Gemma 2", "Gemma 3"])
@pytest.mark.parametrize(("kernels", "factor"), [("torch", 1.5), ("native", 1.1)])
def test_bfloat16_stays_close(tmp_path: Path, kind: str, kernels: str, factor: float) -> None:
    """To float32, hardly less than transformers in bfloat16 does."""
    model = make_tiny_model(tmp_path, **(KINDS[kind] | {"initializer_range": 0.1}))
    runner = load_runner(tmp_path, dtype="bfloat16", kernels=kernels)
    driver = Driver(runner)
    request = driver.request(prompt_of(40))
    request.blocks = [0, 1, 2]
    logits = runner.logits(StepPlan([StepItem(request, 40)]))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt_of(40)])).logits[0, -1:]
        theirs = model.bfloat16()(torch.tensor([prompt_of(40)])).logits[0, -1:].float()
    assert torch.nn.functional.cosine_similarity(logits, expected).item() > 0.999
    assert (logits - expected).norm() < factor * (theirs - expected).norm()
