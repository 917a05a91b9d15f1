"""Our decoder gives Hugging Face's logits and greedy tokens, for every kind of model and every way to batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baton.engine.model_spec import ARCHITECTURES
from baton.engine.request import StepItem, StepPlan
from baton.engine.runner import ModelRunner
from baton.engine.weights import weight_files
from tests.golden.tiny_models import VOCAB, Driver, load_runner, make_tiny_model

MISTRAL = {"architecture": "MistralForCausalLM"}
QWEN2 = {"architecture": "Qwen2ForCausalLM"}
QWEN3 = {"architecture": "Qwen3ForCausalLM"}
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
    "Mistral, tied, head_dim apart from hidden_size": MISTRAL | {"tie_word_embeddings": True, "head_dim": 16},
    "Mistral, rope dynamic": MISTRAL
    | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    "Qwen2": QWEN2,
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
    "Qwen3, tied, head_dim apart from hidden_size": QWEN3 | {"tie_word_embeddings": True, "head_dim": 16},
    "Qwen3, biases, one kv head": QWEN3 | {"attention_bias": True, "num_key_value_heads": 1},
    "Qwen3, rope linear": QWEN3 | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 3.0}},
}
BLOCK = 16
TIE = 2e-5
"""Logits this close are equal: several times the rounding error measured against float64 (5e-6)."""


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


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by threads that wait for each other, seconds where other work shares the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, ModelRunner]:
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny_model(folder), load_runner(folder, block_size=BLOCK)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, **KINDS[kind])
    runner = load_runner(tmp_path)
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
    ("architecture", "block_size"),
    [*((name, 16) for name in ARCHITECTURES), *(("LlamaForCausalLM", size) for size in (1, 7, 64))],
)
def test_a_batch_of_everything(tmp_path: Path, architecture: str, block_size: int) -> None:
    """Requests at all stages in the same steps: decodes, first chunks, later chunks, last chunks. From shards."""
    model = make_tiny_model(tmp_path, architecture, max_shard_size="100KB")
    assert len(weight_files(tmp_path)) > 1
    driver = Driver(load_runner(tmp_path, block_size=block_size, num_blocks=600))
    rng = random.Random(block_size)
    requests = [driver.request(prompt_of(n)) for n in (1, 3, 16, 17, 40, 64, 65, 90)]
    goal = {id(r): r.num_tokens + 6 for r in requests}
    while live := [r for r in requests if r.num_tokens < goal[id(r)]]:
        chosen = [r for r in live if rng.random() < 0.7] or live
        driver.step([(r, min(rng.choice((1, 8, 30)), r.num_tokens - r.num_computed)) for r in chosen])
    for request in requests:
        assert_greedy(model, request.tokens, request.num_prompt)


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


@pytest.mark.parametrize(
    "kind",
    [
        MISTRAL | {"sliding_window": 48},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1},
        QWEN3 | {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1},
    ],
    ids=["Mistral", "Qwen2", "Qwen3"],
)
def test_a_sliding_window_is_right_up_to_its_length(tmp_path: Path, kind: dict[str, Any]) -> None:
    """And wrong beyond it, which is why `build_runner` refuses to go there."""
    model = make_tiny_model(tmp_path, **kind)
    runner = load_runner(tmp_path)
    assert runner.model.spec.sliding_window == 48
    driver = Driver(runner)
    request = driver.request(prompt_of(40))
    driver.prefill(request, chunk=16)
    driver.decode([request], 8)  # the last one has 48 tokens to attend to, itself included
    assert_greedy(model, request.tokens, 40)
    longer = driver.request(prompt_of(60))
    driver.prefill(longer)
    driver.decode([longer], 20)
    with pytest.raises(AssertionError, match="behind Hugging Face's"):
        assert_greedy(model, longer.tokens, 60)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_bfloat16_stays_close(tmp_path: Path, architecture: str) -> None:
    model = make_tiny_model(tmp_path, architecture, initializer_range=0.1)
    runner = load_runner(tmp_path, dtype="bfloat16")
    driver = Driver(runner)
    request = driver.request(prompt_of(40))
    request.blocks = [0, 1, 2]
    logits = runner.logits(StepPlan([StepItem(request, 40)]))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt_of(40)])).logits[0, -1:]
    assert torch.nn.functional.cosine_similarity(logits, expected).item() > 0.999
