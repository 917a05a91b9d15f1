"""Models that transformers computes with our attention give its own logits and tokens; others are refused in words."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.engine.attention.torch_backend import TorchAttention
from baton.engine.model_spec import ModelSpec, load_spec
from baton.engine.request import StepItem, StepPlan
from baton.engine.transformers_model import TransformersModel
from baton.errors import ModelError
from tests.golden.tiny_models import (
    Driver,
    assert_greedy,
    load_runner,
    make_tiny_model,
    prompt_of,
    serve_everything,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4}
GPT2: dict[str, Any] = {"n_positions": 512, "n_embd": 48, "n_layer": 2, "n_head": 6}
KINDS: dict[str, dict[str, Any]] = {
    "Granite": {
        "architecture": "GraniteForCausalLM",
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.7,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
    },
    "OLMo 2": {"architecture": "Olmo2ForCausalLM"},
    "GPT-NeoX": {"architecture": "GPTNeoXForCausalLM", "rotary_pct": 0.5},
    "Phi": {"architecture": "PhiForCausalLM", "partial_rotary_factor": 0.5},
    "GPT-2": {"architecture": "GPT2LMHeadModel"} | GPT2,
    "Cohere": {"architecture": "CohereForCausalLM", "use_qk_norm": True},
    "Cohere 2, windows": {"architecture": "Cohere2ForCausalLM", "sliding_window": 24, "sliding_window_pattern": 2},
    "Starcoder 2, window": {"architecture": "Starcoder2ForCausalLM", "sliding_window": 24},
    "Mixtral, window": {"architecture": "MixtralForCausalLM", "sliding_window": 24} | MOE,
    "Qwen3-MoE": {"architecture": "Qwen3MoeForCausalLM"} | MOE,
    "OLMoE": {"architecture": "OlmoeForCausalLM"} | MOE,
}


@pytest.mark.parametrize("attention", ["torch", "native"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind: str, attention: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, **KINDS[kind])
    runner = load_runner(tmp_path, attention=attention)
    assert isinstance(runner.model, TransformersModel)
    driver = Driver(runner)
    prompt = prompt_of(150)
    request = driver.request(prompt)
    driver.prefill(request, chunk=64)
    driver.decode([request], 12)
    assert_greedy(model, request.tokens, len(prompt))

    fresh = driver.request(prompt)
    fresh.blocks = request.blocks
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1:]
    logits = runner.logits(StepPlan([StepItem(fresh, len(prompt))]))
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("block_size", [7, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_everything(kind: str, block_size: int, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, max_shard_size="50KB", **KINDS[kind])
    driver = Driver(load_runner(tmp_path, block_size=block_size, num_blocks=600))
    serve_everything(driver, random.Random(block_size), model)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("attention", ["torch", "native"])
def test_our_own_architectures(architecture: str, attention: str, tmp_path: Path) -> None:
    """On demand. Gemma 2: softcap and windows go through, too."""
    windows: dict[str, Any] = (
        {} if architecture.startswith("Llama") else {"sliding_window": 24, "query_pre_attn_scalar": 5}
    )
    model = make_tiny_model(tmp_path, architecture, **windows)
    runner = load_runner(tmp_path, num_blocks=600, impl="transformers", attention=attention)
    assert isinstance(runner.model, TransformersModel)
    serve_everything(Driver(runner), random.Random(1), model)
    assert isinstance(load_spec(tmp_path), ModelSpec)


def test_ours_on_demand_is_never_another(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_config("GraniteForCausalLM")))
    assert not isinstance(load_spec(tmp_path), ModelSpec)
    with pytest.raises(ModelError, match="GraniteForCausalLM is not supported; known: LlamaForCausalLM, "):
        load_spec(tmp_path, "baton")


@pytest.mark.parametrize("attention", ["torch", "native"])
@pytest.mark.parametrize("kind", ["Granite", "GPT-NeoX", "Qwen3-MoE"])
def test_bfloat16_stays_close(tmp_path: Path, kind: str, attention: str) -> None:
    model = make_tiny_model(tmp_path, **(KINDS[kind] | {"initializer_range": 0.1}))
    runner = load_runner(tmp_path, dtype="bfloat16", attention=attention)
    request = Driver(runner).request(prompt_of(40))
    request.blocks = [0, 1, 2]
    logits = runner.logits(StepPlan([StepItem(request, 40)]))
    with torch.inference_mode():
        theirs = model.bfloat16()(torch.tensor([prompt_of(40)])).logits[0, -1:].float()
    assert torch.nn.functional.cosine_similarity(logits, theirs).item() > 0.999


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"architecture": "StableLmForCausalLM"}, "does not let its attention be replaced"),
        ({"architecture": "DeepseekV3ForCausalLM"}, "latent"),
        ({"architecture": "MambaForCausalLM"}, "recurrent state"),
        ({"architecture": "Lfm2ForCausalLM", "layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ({"architecture": "Gemma3ForConditionalGeneration"}, "more than a model of text"),
        ({"architecture": "Gemma4ForCausalLM"}, "per-layer attribute"),
        ({"architecture": "T5ForConditionalGeneration"}, "no causal language model T5ForConditionalGeneration"),
        (
            {
                "architecture": "PhimoeForCausalLM",
                "original_max_position_embeddings": 64,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0] * 4,
                    "long_factor": [1.0] * 4,
                    "short_mscale": 1.0,
                    "long_mscale": 1.0,
                },
            },
            "longest request",
        ),
    ],
)
def test_refused_by_config(kind: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = _config(**kind)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        load_spec(tmp_path)


def test_refused_for_what_attention_is_told(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "GptOssForCausalLM", num_local_experts=4)  # attention sinks
    with pytest.raises(ModelError, match="s_aux"):
        load_runner(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_kv_heads": 3}, "should be .1, 3, 3, 8"),
        ({"num_layers": 1}, "not once per layer"),
        ({"num_layers": 3}, "2 of its 3"),
    ],
)
def test_refused_for_another_state_than_its_config_says(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "GraniteForCausalLM")
    spec = dataclasses.replace(load_spec(tmp_path), **change)
    with pytest.raises(ModelError, match=words):
        TransformersModel(spec, tmp_path, TorchAttention(torch.device("cpu")), dtype="float32")


def test_refused_for_windows_that_layers_do_not_tell(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"layer_types": ["full_attention", "sliding_attention"]}  # which it does not look at
    make_tiny_model(tmp_path, "Starcoder2ForCausalLM", sliding_window=24, **changes)
    with pytest.raises(ModelError, match="sliding windows"):
        load_runner(tmp_path)


def test_refused_where_results_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else a model does with its rows: here its positions are not those that it is given."""
    make_tiny_model(tmp_path, "GPT2LMHeadModel", **GPT2)
    forward = transformers.GPT2Model.forward

    def counts_rows(self: Any, input_ids: torch.Tensor, *args: Any, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        return forward(self, input_ids, *args, position_ids=torch.arange(input_ids.shape[1])[None], **kwargs)

    monkeypatch.setattr(transformers.GPT2Model, "forward", counts_rows)
    with pytest.raises(ModelError, match="away from those of transformers' own"):
        load_runner(tmp_path)


def test_refused_where_the_weights_do_not_fit(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "GraniteForCausalLM")
    file = tmp_path / "model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if name != "model.norm.weight"}, file)
    with pytest.raises(ModelError, match=r"lack 1 tensors, model\.norm\.weight"):
        load_runner(tmp_path)
    file.write_bytes(b"junk")
    with pytest.raises(ModelError, match="transformers cannot load"):
        load_runner(tmp_path)


def _config(architecture: str, **changes: Any) -> dict[str, Any]:
    small = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 6}
    config: dict[str, Any] = getattr(transformers, architecture).config_class(**(small | changes)).to_dict()
    return config | {"architectures": [architecture]}
