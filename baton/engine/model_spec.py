"""What a model is, as far as the engine must know it: read from its folder's JSON files.

Knows Hugging Face's file formats. Must not know weights (`baton.engine.weights`), where models come from,
or how they are computed (`baton.engine.model`, `baton.engine.transformers_model`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.engine.rope import Rope, read_ropes
from baton.errors import ModelError
from baton.layout import KVLayout


@dataclass(frozen=True)
class CausalLMSpec:
    """What the engine must know of any model. Sizes are numbers of elements."""

    architecture: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """The model's own limit of prompt plus output, in tokens."""
    eos_token_ids: tuple[int, ...]
    """Any of these ends a request; sorted."""
    stored_dtype: str
    """dtype that config.json names for the weights."""

    def kv_layout(self, block_size: int, dtype: str) -> KVLayout:
        """Layout of this model's KV blocks. `dtype`: `float32` or `bfloat16`, see `resolve_dtype`."""
        return KVLayout(self.num_layers, self.num_kv_heads, block_size, self.head_dim, dtype)


@dataclass(frozen=True)
class ModelSpec(CausalLMSpec):
    """Shapes and constants of a decoder that we compute ourselves."""

    hidden_size: int
    num_heads: int
    intermediate_size: int
    rms_norm_eps: float
    tie_embeddings: bool
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int, ...]
    """For each layer, its index into `ropes`."""
    layer_windows: tuple[int | None, ...]
    """For each layer, the tokens to which a token attends, itself included (sliding window); None: to all before it."""
    attention_scale: float
    """Factor on query times key."""
    attention_softcap: float | None = None
    """c: scores become c * tanh(score / c), before the mask."""
    logits_softcap: float | None = None
    """The same for the logits."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Of attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Each head's query and key pass an RMSNorm before the rotary embedding."""
    activation: str = "silu"
    """Of the MLP's gate: `silu` or `gelu_tanh`."""
    norm_offset: float = 0.0
    """Added to the stored weight of every RMSNorm (Gemma: 1); `DecoderWeights` holds the sum. Where it is not 0 a norm
    is rounded to the model's dtype after its weight is applied, else before."""
    post_norms: bool = False
    """Norms after attention and after the MLP, each before the sum with the residual (Gemma 2 and 3)."""
    embed_scale: float = 1.0
    """Factor on the embeddings, itself rounded to the model's dtype first."""


def _windows(config: Any) -> tuple[int | None, ...]:
    """`layer_windows` where config.json names each layer's type."""
    # `sliding_window` is None here for Qwen and SmolLM3 unless config.json says `use_sliding_window`.
    window = config.sliding_window if getattr(config, "use_sliding_window", True) else None
    known = ("full_attention", "sliding_attention") if window else ("full_attention",)
    if others := sorted(set(config.layer_types).difference(known)):
        raise ValueError(f"layer_types {', '.join(others)} are not supported; known: {', '.join(known)}")
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _gemma(config: Any) -> dict[str, Any]:
    if config.use_bidirectional_attention:
        raise ValueError("use_bidirectional_attention is not supported")
    return {"norm_offset": 1.0, "embed_scale": config.hidden_size**0.5}


def _gemma_2_or_3(config: Any) -> dict[str, Any]:
    return _gemma(config) | {
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias,
        "post_norms": True,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "logits_softcap": config.final_logit_softcapping,
        "layer_windows": _windows(config),
    }


ARCHITECTURES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "LlamaForCausalLM": lambda config: {
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    },
    "MistralForCausalLM": lambda config: {"layer_windows": (config.sliding_window,) * config.num_hidden_layers},
    "Qwen2ForCausalLM": lambda config: {"qkv_bias": True, "layer_windows": _windows(config)},
    "Qwen3ForCausalLM": lambda config: {
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias,
        "qk_norm": True,
        "layer_windows": _windows(config),
    },
    "SmolLM3ForCausalLM": lambda config: {
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "layer_windows": _windows(config),
    },
    "Phi3ForCausalLM": lambda config: {"layer_windows": (config.sliding_window,) * config.num_hidden_layers},
    "GemmaForCausalLM": lambda config: (
        _gemma(config) | {"qkv_bias": config.attention_bias, "out_bias": config.attention_bias}
    ),
    "Gemma2ForCausalLM": lambda config: _gemma_2_or_3(config) | {"attention_softcap": config.attn_logit_softcapping},
    # transformers does not look at Gemma 3's attn_logit_softcapping.
    "Gemma3ForCausalLM": lambda config: _gemma_2_or_3(config) | {"qk_norm": True},
}
"""What we compute ourselves, by its name in config.json: from transformers' config, the fields of `ModelSpec` in which
the architecture departs from the defaults. (A key that an architecture does not look at can be in its config.json all
the same, and must not count.)"""

_MODEL_TYPES = {"Gemma3ForCausalLM": "gemma3_text"}
"""config.json's model_type, by which transformers goes, where it is not the architecture's name."""
_PARTIAL_ROPE = ("Phi3ForCausalLM",)
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def load_model_config(path: Path, max_model_len: int | None = None) -> ModelSpec:
    """Read the folder of a model of `ARCHITECTURES`.

    `max_model_len`: tokens that will be served, None: the model's limit; see `read_ropes`.
    Raises ModelError if it cannot be read or is not of a known kind.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    plain = read_json(path / "config.json")
    named = plain.get("architectures") or ["(none named)"]
    if named[0] not in ARCHITECTURES:
        raise ModelError(f"{path}: architecture {named[0]} is not supported; known: {', '.join(ARCHITECTURES)}")
    try:
        config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
        expected = _MODEL_TYPES.get(named[0], named[0].removesuffix("ForCausalLM").lower())
        if config.model_type != expected:
            raise ModelError(f"{path}: architecture {named[0]} with model_type {config.model_type} is not supported")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        traits: dict[str, Any] = {
            "layer_windows": (None,) * config.num_hidden_layers,
            "attention_scale": head_dim**-0.5,
        } | ARCHITECTURES[named[0]](config)
        max_len = max_model_len or config.max_position_embeddings
        ropes, layer_ropes = read_ropes(config, head_dim, max_len, partial=named[0] in _PARTIAL_ROPE)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as e:
        raise ModelError(f"{path / 'config.json'}: {e}") from e
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in _ACTIVATIONS:
        raise ModelError(f"{path}: hidden_act {activation} is not supported; known: {', '.join(_ACTIVATIONS)}")
    if not config.num_key_value_heads or config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"{path}: {config.num_attention_heads} heads cannot share {config.num_key_value_heads} key heads evenly"
        )
    return ModelSpec(
        architecture=named[0],
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=eos_token_ids(path, plain),
        stored_dtype=stored_dtype(config),
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        tie_embeddings=bool(config.tie_word_embeddings),
        ropes=ropes,
        layer_ropes=layer_ropes,
        activation=_ACTIVATIONS[activation],
        **traits,
    )


def load_spec(path: Path, impl: str = "auto", max_model_len: int | None = None) -> CausalLMSpec:
    """Read the folder of a model: a `ModelSpec` if we compute it ourselves, another spec if transformers shall.

    `impl`: `auto` (ours where the architecture is of `ARCHITECTURES`), `baton` or `transformers`. Raises ModelError.
    """
    from baton.engine.transformers_spec import load_transformers_config

    named = read_json(path / "config.json").get("architectures") or [None]
    if impl == "baton" or (impl == "auto" and (named[0] is None or named[0] in ARCHITECTURES)):
        return load_model_config(path, max_model_len)
    return load_transformers_config(path)


def stored_dtype(config: Any) -> str:
    """The dtype that transformers' `config` names for the weights."""
    return str(config.dtype or "float32").removeprefix("torch.")


def resolve_dtype(name: str, device: str) -> str:
    """`auto` -> `bfloat16` where `device` computes it natively, else `float32`; other names as they are."""
    if name != "auto":
        return name
    import torch

    if torch.device(device).type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    # torch runs bfloat16 on every CPU, without these instructions far slower than float32. It has no public
    # question for that; both are False where the names are gone.
    capable = (
        getattr(torch.cpu, "_is_avx512_bf16_supported", bool)() or getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    )
    return "bfloat16" if capable else "float32"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's folder; ModelError names the file and what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror or e}") from e
    except ValueError as e:
        raise ModelError(f"{path} is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def eos_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """All end tokens that generation_config.json, config.json and the tokenizer name."""
    ids: set[int] = set()
    generation = path / "generation_config.json"
    for source in (config, read_json(generation) if generation.exists() else {}):
        value = source.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    settings = path / "tokenizer_config.json"
    if settings.exists():
        eos = read_json(settings).get("eos_token")
        text = eos.get("content") if isinstance(eos, dict) else eos
        if text and (path / "tokenizer.json").exists():
            tokenizer = read_json(path / "tokenizer.json")
            ids.update(t["id"] for t in tokenizer.get("added_tokens", ()) if t["content"] == text)
    return tuple(sorted(ids))
