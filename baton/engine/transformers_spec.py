"""Which models transformers computes for us, and what the engine must know of them: read from config.json.

Knows transformers' configs and model classes. Must not know weights. What cannot be told from a config is checked when
the model is loaded (`baton.engine.transformers_model`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.engine.model_spec import CausalLMSpec, eos_token_ids, read_json, stored_dtype
from baton.errors import ModelError


def load_transformers_config(path: Path) -> CausalLMSpec:
    """Read the folder of a model that transformers shall compute, with our attention over the KV pool.

    Raises ModelError if it cannot be read, if transformers does not have its architecture, or if its state is not one
    key and one value per token, layer and key head, of one size, attended to as `AttentionBackend` does.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = read_json(path / "config.json")
    named = (plain.get("architectures") or ["(none named)"])[0]
    try:
        config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
        known = type(config) in AutoModelForCausalLM._model_mapping
        model_class: Any = AutoModelForCausalLM._model_mapping[type(config)] if known else None
        if model_class is None or model_class.__name__ != named:
            raise ModelError(f"{path}: transformers has no causal language model {named} for its config.json")
        if reason := next(_obstacles(config, model_class), None):
            raise ModelError(f"{path}: {named} cannot be served over a paged KV cache: {reason}")
        heads = config.num_attention_heads
        return CausalLMSpec(
            architecture=named,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            num_kv_heads=1 if _own(config, "multi_query") else _own(config, "num_key_value_heads") or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            max_position_embeddings=config.max_position_embeddings,
            eos_token_ids=eos_token_ids(path, plain),
            stored_dtype=stored_dtype(config),
        )
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        ImportError,
        StrictDataclassError,
    ) as e:
        raise ModelError(f"{path / 'config.json'}: {e}") from e


def layer_windows(config: Any) -> list[int | None] | None:
    """The sliding window of each layer as `config` says it, None where it never ends before the first token.

    None for all: there is one, but `config` does not say in which layers.
    """
    window = _own(config, "sliding_window") if getattr(config, "use_sliding_window", True) else None
    types = getattr(config, "layer_types", None)
    if not window or window >= config.max_position_embeddings:
        return [None] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types] if types else None


def _own(config: Any, name: str) -> Any:
    """A setting that the architecture knows, else None: a config.json may hold other architectures' keys."""
    return getattr(config, name, None) if hasattr(type(config), name) or name in config.attribute_map else None


def _obstacles(config: Any, model_class: Any) -> Iterator[str]:
    """Why not; nothing where no reason is known."""
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder and a decoder"
    if config.get_text_config() is not config:
        yield "it is more than a model of text"
    if getattr(config, "add_cross_attention", False):
        yield "it has cross attention"
    if getattr(config, "kv_lora_rank", None):
        yield "its attention is latent (MLA)"
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        yield "its attention is biased by distance (ALiBi)"
    if model_class._is_stateful:
        yield "it keeps a recurrent state (as Mamba does) beside keys and values"
    kinds = {"full_attention", "sliding_attention"}
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - kinds):
        yield f"it has layers of type {', '.join(others)}"
    if not model_class._supports_attention_backend:
        yield "transformers does not let its attention be replaced"
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    if any(p.get("rope_type") == "longrope" for p in each):
        yield "its rotary embedding (longrope) changes with the length of the longest request of a step"
