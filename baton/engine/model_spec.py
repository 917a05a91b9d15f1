"""What a model is, as far as the engine must know it: read from its folder's JSON files.

Knows Hugging Face's file formats. Must not know weights (`baton.engine.weights`), where models come from,
or how they are computed (`baton.engine.model`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ModelError
from baton.layout import KVLayout

_STATIC_ROPES = ("default", "linear", "dynamic", "yarn", "llama3")
"""Rotary embeddings whose frequencies do not change within the model's limit. (`dynamic` changes beyond it.)"""


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and constants of a decoder-only model. Sizes are numbers of elements."""

    architecture: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    tie_embeddings: bool
    max_position_embeddings: int
    """The model's own limit of prompt plus output, in tokens."""
    rope_inv_freq: tuple[float, ...]
    """Radians per position, for each of the `head_dim / 2` rotary pairs; scaling applied."""
    rope_scaling: float
    """Factor on cosine and sine (YaRN's attention factor; else 1)."""
    eos_token_ids: tuple[int, ...]
    """Any of these ends a request; sorted."""
    stored_dtype: str
    """dtype that config.json names for the weights."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Of attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Each head's query and key pass an RMSNorm before the rotary embedding."""
    sliding_window: int | None = None
    """Tokens, itself included, to which a token attends in some layer; None: to all before it. The decoder attends
    to all, which is the same up to this length: `build_runner` refuses to serve more."""

    def kv_layout(self, block_size: int, dtype: str) -> KVLayout:
        """Layout of this model's KV blocks. `dtype`: `float32` or `bfloat16`, see `resolve_dtype`."""
        return KVLayout(self.num_layers, self.num_kv_heads, block_size, self.head_dim, dtype)


def _window_by_layer(config: Any) -> int | None:
    # `config.sliding_window` is None here unless config.json says `use_sliding_window`.
    known = ("full_attention", "sliding_attention") if config.sliding_window else ("full_attention",)
    if others := sorted(set(config.layer_types).difference(known)):
        raise ValueError(f"layer_types {', '.join(others)} are not supported; known: {', '.join(known)}")
    return config.sliding_window if "sliding_attention" in config.layer_types else None


ARCHITECTURES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "LlamaForCausalLM": lambda config: {
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    },
    "MistralForCausalLM": lambda config: {"sliding_window": config.sliding_window},
    "Qwen2ForCausalLM": lambda config: {"qkv_bias": True, "sliding_window": _window_by_layer(config)},
    "Qwen3ForCausalLM": lambda config: {
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias,
        "qk_norm": True,
        "sliding_window": _window_by_layer(config),
    },
}
"""What `baton.engine.model` computes, by its name in config.json: from transformers' config, the fields of `ModelSpec`
in which the architecture departs from the defaults. (A key that an architecture does not look at can be in its
config.json all the same, and must not count.)"""


def load_model_config(path: Path) -> ModelSpec:
    """Read the folder of a model. Raises ModelError if it cannot be read or is not of a known kind."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    plain = read_json(path / "config.json")
    named = plain.get("architectures") or ["(none named)"]
    if named[0] not in ARCHITECTURES:
        raise ModelError(f"{path}: architecture {named[0]} is not supported; known: {', '.join(ARCHITECTURES)}")
    try:
        config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
        if named[0].removesuffix("ForCausalLM").lower() != config.model_type:  # which transformers goes by
            raise ModelError(f"{path}: architecture {named[0]} with model_type {config.model_type} is not supported")
        traits = ARCHITECTURES[named[0]](config)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as e:
        raise ModelError(f"{path / 'config.json'}: {e}") from e
    if config.hidden_act != "silu":
        raise ModelError(f"{path}: hidden_act {config.hidden_act} is not supported; known: silu")
    if not config.num_key_value_heads or config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"{path}: {config.num_attention_heads} heads cannot share {config.num_key_value_heads} key heads evenly"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inv_freq, scaling = _rope(config, head_dim, path)
    return ModelSpec(
        architecture=named[0],
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        tie_embeddings=bool(config.tie_word_embeddings),
        max_position_embeddings=config.max_position_embeddings,
        rope_inv_freq=inv_freq,
        rope_scaling=scaling,
        eos_token_ids=_eos_token_ids(path, plain),
        stored_dtype=str(config.dtype or "float32").removeprefix("torch."),
        **traits,
    )


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


def _rope(config: Any, head_dim: int, path: Path) -> tuple[tuple[float, ...], float]:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in _STATIC_ROPES:
        raise ModelError(f"{path}: rope_type {kind} is not supported; known: {', '.join(_STATIC_ROPES)}")
    if kind == "default":
        # RoFormer (Su et al. 2021), eq. 15. float32 as in transformers, for equal tokens.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()), 1.0
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if len(inv_freq) != head_dim // 2:
        raise ModelError(f"{path}: rotary embeddings of a part of each head are not supported")
    return tuple(inv_freq.float().tolist()), float(scaling)


def _eos_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
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
