"""Shapes of models: a table of well-known ones, and any config.json that transformers knows.

Parameters are counted on the module that transformers builds of the config, on the meta device, so without memory for
them: whatever the architecture, the count is that of its weights. The table holds configs and what their makers say,
which tests compare. Knows transformers and torch; must not know weights.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from baton.engine.model_spec import stored_dtype
from baton.engine.transformers_spec import layer_windows
from baton.errors import BatonError, ModelError
from baton_experiments.anatomy.arithmetic import element_bytes
from baton_experiments.anatomy.quantization import Quantization, read_quantization
from baton_experiments.anatomy.shape import ModelShape
from baton_experiments.words import enumerated


class Known(msgspec.Struct, frozen=True):
    """A published model."""

    config: dict[str, Any]
    """What its config.json says, as far as sizes depend on it."""
    parameters: float
    """As published or counted from its files."""
    source: str


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, max_len: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "tie_word_embeddings": False,
        "dtype": "float16" if vocab == 32_000 else "bfloat16",
    }


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50_272,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "dtype": "float16",
    }


KNOWN: dict[str, Known] = {
    "llama-3.1-8b": Known(
        _llama(4096, 14336, 32, 32, 8, 128_256, 131_072), 8_030_261_248, "meta-llama/Llama-3.1-8B, safetensors index"
    ),
    "llama-3.1-70b": Known(
        _llama(8192, 28672, 80, 64, 8, 128_256, 131_072), 70_553_706_496, "meta-llama/Llama-3.1-70B, safetensors index"
    ),
    "llama-2-7b": Known(
        _llama(4096, 11008, 32, 32, 32, 32_000, 4096), 6_738_415_616, "meta-llama/Llama-2-7b-hf, safetensors index"
    ),
    "llama-2-13b": Known(
        _llama(5120, 13824, 40, 40, 40, 32_000, 4096), 13_015_864_320, "meta-llama/Llama-2-13b-hf, safetensors index"
    ),
    "llama-2-70b": Known(
        _llama(8192, 28672, 80, 64, 8, 32_000, 4096), 68_976_648_192, "meta-llama/Llama-2-70b-hf, safetensors index"
    ),
    "mistral-7b": Known(
        _llama(4096, 14336, 32, 32, 8, 32_000, 32_768)
        | {"model_type": "mistral", "sliding_window": 4096, "dtype": "bfloat16"},
        7_241_732_096,
        "mistralai/Mistral-7B-v0.1, safetensors index",
    ),
    "mixtral-8x7b": Known(
        _llama(4096, 14336, 32, 32, 8, 32_000, 32_768)
        | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "dtype": "bfloat16"},
        46_702_792_704,
        "mistralai/Mixtral-8x7B-v0.1, safetensors index",
    ),
    "qwen2.5-7b": Known(
        _llama(3584, 18944, 28, 28, 4, 152_064, 32_768) | {"model_type": "qwen2"},
        7_615_616_512,
        "Qwen/Qwen2.5-7B-Instruct, safetensors index",
    ),
    "qwen3-8b": Known(
        _llama(4096, 12288, 36, 32, 8, 151_936, 40_960) | {"model_type": "qwen3", "head_dim": 128},
        8_190_735_360,
        "Qwen/Qwen3-8B, safetensors index",
    ),
    "opt-13b": Known(_opt(5120, 40, 40), 13e9, "Zhang et al., arXiv 2205.01068, table 1"),
    "opt-66b": Known(_opt(9216, 64, 72), 66e9, "Zhang et al., arXiv 2205.01068, table 1"),
    "opt-175b": Known(_opt(12288, 96, 96), 175e9, "Zhang et al., arXiv 2205.01068, table 1"),
}
"""By the name that `baton anatomy` takes."""


def read_shape(source: str) -> ModelShape:
    """The shape of a model: a name of `KNOWN`, a folder, a config.json, `demo`, or a hub id (of which only its
    config.json is read).

    Raises ModelError for what is none of these, or that transformers cannot build.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    known = KNOWN.get(source.lower())
    if known is not None:
        config = known.config
        return shape_of(source.lower(), AutoConfig.for_model(**config), known.source)
    path = Path(source)
    near = near_names(source)
    if near and "/" not in source and not path.exists():  # the hub would be asked for it again and again
        raise ModelError(
            f"{source} is no folder and no known model; did you mean {enumerated(near, 'or')}? A model of the hub is "
            "named OWNER/NAME"
        )
    if source == "demo" or path.suffix == ".gguf":
        from baton.engine.weights import resolve_model

        path = resolve_model(source)
    if not path.exists() and (path.is_absolute() or source.startswith(".") or path.suffix == ".json"):
        raise ModelError(f"{source} does not exist")  # and is no hub id, which would be asked for over the network
    try:
        where = path.parent if path.is_file() else path
        read = AutoConfig.from_pretrained(where if path.exists() else source)
    except (OSError, ValueError, KeyError, StrictDataclassError) as e:
        problem = " ".join(str(e).split())
        hint = f" (did you mean {enumerated(near, 'or')}?)" if near else ""
        raise ModelError(
            f"{source} is no folder with a config.json, no hub id that can be reached, and none of "
            f"{', '.join(KNOWN)}{hint}: {problem[:300]}"
        ) from e
    except (ArithmeticError, AttributeError, IndexError, TypeError) as e:  # some configs compute without a look
        raise ModelError(
            f"{source}: its config.json cannot be made a model of: {' '.join(str(e).split())[:300]}"
        ) from e
    return shape_of(source, read, "its config.json")


def near_names(source: str) -> list[str]:
    """Names of `KNOWN` that the last part of `source` may have been meant for, nearest first."""
    plain = {_plain(name): name for name in KNOWN}
    return [plain[match] for match in get_close_matches(_plain(source.rpartition("/")[2]), plain, n=2, cutoff=0.75)]


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def shape_of(name: str, config: Any, source: str) -> ModelShape:
    """Of a config of transformers. Raises ModelError where it has no causal language model of that kind."""
    quantization = read_quantization(config)
    config = config.get_text_config()
    try:
        _require_sizes(config)
        counts = _count(config, quantization)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        latent = getattr(config, "kv_lora_rank", None)
        qk_dim = (config.qk_nope_head_dim + config.qk_rope_head_dim) if latent else head_dim
        v_dim = config.v_head_dim if latent else head_dim
        kv_heads = _kv_heads(config)
        attention_layers, kv_layers = _attention_layers(config)
        per_layer = latent + config.qk_rope_head_dim if latent else kv_heads * (qk_dim + v_dim)
        if kv_layers * per_layer < 1:
            raise ValueError("none of its layers keeps keys and values")
        experts, chosen = _experts(config)
        return ModelShape(
            name=name,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=kv_heads,
            qk_dim=qk_dim,
            v_dim=v_dim,
            vocab=config.vocab_size,
            max_len=config.max_position_embeddings,
            experts=experts,
            experts_per_token=chosen,
            kv_per_token=kv_layers * per_layer,
            kv_windows=_windows(config),
            attention_layers=attention_layers,
            kv_layers=kv_layers,
            dtype=stored_dtype(config),
            quantization=None if quantization is None else quantization.method,
            source=source,
            **counts,
        )
    except BatonError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, ImportError) as e:
        raise ModelError(f"{name}: its config.json cannot be made a model of: {' '.join(str(e).split())[:300]}") from e


def _require_sizes(config: Any) -> None:
    """Raises ValueError for what is none of at least 1: transformers builds some of those, and nothing follows."""
    required = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    optional = ("num_key_value_heads", "num_kv_heads", "head_dim", "kv_lora_rank")
    values = {name: getattr(config, name) for name in required}
    values |= {name: value for name in optional if (value := getattr(config, name, None)) is not None}
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}, and must be 1 or more")


def _count(config: Any, quantization: Quantization | None) -> dict[str, Any]:
    """Parameters by what they cost: `parameters`, `body`, `head`, `experts_parameters` of `ModelShape`, and the bits of
    the second and the last."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
    total, body, experts = 0, 0, 0
    kept = {"body": 0, "experts": 0}  # of those, what is not quantised
    head = model.get_output_embeddings().weight
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for name, parameter in model.named_parameters():  # a shared one once
        total += parameter.numel()
        if parameter.ndim < 2 or parameter is head or id(parameter) in looked_up:
            continue
        is_expert = ".experts." in name
        if is_expert:
            experts += parameter.numel()
        else:
            body += parameter.numel()
        if quantization is not None and not quantization.includes(name, is_expert=is_expert):
            kept["experts" if is_expert else "body"] += parameter.numel()
    counts = {"parameters": total, "body": body, "head": head.numel(), "experts_parameters": experts}
    if quantization is None:
        return counts
    plain_bits = 8 * element_bytes(stored_dtype(config))
    return counts | {
        "body_bits": quantization.mean_bits(body, kept["body"], plain_bits),
        "experts_bits": quantization.mean_bits(experts, kept["experts"], plain_bits),
    }


def _kv_heads(config: Any) -> int:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    found = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    return int(found or config.num_attention_heads)


def _attention_layers(config: Any) -> tuple[int, int]:
    """That attend, and those of them that keep keys and values: the last ones may use what others keep."""
    layers = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    attend = ["attention" in kind and "linear" not in kind for kind in types] if types else [True] * layers
    is_known = hasattr(type(config), "num_kv_shared_layers")  # a config.json may hold other architectures' keys
    shared = config.num_kv_shared_layers if is_known else 0
    return sum(attend), sum(attend[: max(0, layers - shared)])


def _windows(config: Any) -> tuple[tuple[int, int], ...]:
    windows = layer_windows(config)
    if windows is None:  # it does not say in which layers: as its implementation, in all
        windows = [config.sliding_window] * config.num_hidden_layers
    sizes = sorted({window for window in windows if window is not None})
    return tuple((size, windows.count(size)) for size in sizes)


def _experts(config: Any) -> tuple[int, int]:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((int(n) for name in names if (n := getattr(config, name, None))), 1)
    return experts, int(getattr(config, "num_experts_per_tok", None) or experts)
