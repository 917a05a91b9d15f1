"""Turns a GGUF file into a model folder (config.json, safetensors, tokenizer), once, in a cache.

Knows GGUF's names and Hugging Face's; parsing and dequantizing are the `gguf` package's business. Must not
know how models are computed.

Going by `gguf` directly takes 14 s for the demo model on two cores (19 s with all imports); transformers 5.24's
`from_pretrained(gguf_file=...)` takes 40 s, because it parses the file three times, and a model loaded
that way refuses `save_pretrained` as quantized. The tensors are equal, bit for bit.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError

from baton.errors import ModelError

_FORMAT = 1
"""Raise it when the conversion changes; folders of other formats are then not found."""
_MODULES = {
    "self_attn.q_proj": ("weight", "bias"),
    "self_attn.k_proj": ("weight", "bias"),
    "self_attn.v_proj": ("weight", "bias"),
    "self_attn.o_proj": ("weight", "bias"),
    "mlp.gate_proj": ("weight",),
    "mlp.up_proj": ("weight",),
    "mlp.down_proj": ("weight",),
    "input_layernorm": ("weight",),
    "post_attention_layernorm": ("weight",),
}


def cache_root() -> Path:
    """`$BATON_CACHE`, else `$XDG_CACHE_HOME/baton`, else `~/.cache/baton`."""
    if own := os.environ.get("BATON_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


def converted(source: Path, progress: Callable[[str], None]) -> Path:
    """The cached folder of this GGUF file, converted now if it is not there. Weights become float32.

    Any number of processes may call this at once: one converts, the others wait for it. A folder appears
    complete or not at all. Raises ModelError for files that cannot be read or converted.
    """
    try:
        target = cache_root() / "models" / f"{source.stem}-{_identity(source)}"
    except OSError as e:
        raise ModelError(f"{source} cannot be read: {e.strerror or e}") from e
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{target}.lock"):
            if not target.is_dir():
                _convert_into(target, source, progress)
    except (OSError, SafetensorError) as e:
        raise ModelError(f"{source} cannot be converted into {target}: {e}; set BATON_CACHE to another folder") from e
    return target


def _identity(source: Path) -> str:
    digest = xxhash.xxh3_64(f"{_FORMAT}:{source.stat().st_size}".encode())
    with source.open("rb") as f:
        while piece := f.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()[:12]


def _convert_into(target: Path, source: Path, progress: Callable[[str], None]) -> None:
    progress(f"converting {source.name} to safetensors (once)")
    for dead in target.parent.glob(f".{target.name}.*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(dead, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        convert_gguf(source, scratch)
        scratch.chmod(0o755)  # mkdtemp and safetensors write for this user alone; a cache may be shared
        for file in scratch.iterdir():
            file.chmod(0o644)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(f"converted {source.name} into {target}")


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the model of a GGUF file into an existing folder. Llama architecture, unscaled rotary embedding."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file
    from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast
    from transformers.utils import logging

    try:
        reader = GGUFReader(source)
    except (ValueError, KeyError, IndexError) as e:
        raise ModelError(f"{source} is not a readable GGUF file: {e}") from e
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    try:
        config = LlamaConfig(**_config(reader, tensors, source))
    except KeyError as e:
        raise ModelError(f"{source} lacks the GGUF field {e}") from e
    save_file(_weights(tensors, config, source), folder / "model.safetensors", metadata={"format": "pt"})
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(source.parent, gguf_file=source.name)
    except (OSError, ValueError, KeyError) as e:
        raise ModelError(f"{source} has no tokenizer that can be converted: {e}") from e
    finally:
        if bars:
            logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)


def _config(reader: Any, tensors: dict[str, Any], source: Path) -> dict[str, Any]:
    def get(key: str, *default: Any) -> Any:
        field = reader.get_field(key)
        if field is None:
            if not default:
                raise KeyError(key)
            return default[0]
        return field.contents()

    architecture = get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{source}: GGUF architecture {architecture} is not supported; known: llama")
    # Llama 3.1 files keep their frequencies' scaling in a tensor of their own, not in a field.
    if get("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in tensors:
        raise ModelError(f"{source}: scaled rotary embeddings in GGUF are not supported; use the model's safetensors")
    heads, hidden = get("llama.attention.head_count"), get("llama.embedding_length")
    head_dim = get("llama.attention.key_length", hidden // heads)
    if get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{source}: rotary embeddings of a part of each head are not supported")
    tokens = reader.get_field("tokenizer.ggml.tokens")
    end = [get(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot")]
    eos = sorted({token for token in end if token is not None})
    return {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "vocab_size": get("llama.vocab_size", len(tokens.data) if tokens else 0),
        "hidden_size": hidden,
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("llama.context_length"),
        "rms_norm_eps": get("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": get("llama.rope.freq_base", 10000.0)},
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "bos_token_id": get("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": get("tokenizer.ggml.padding_token_id", None),
    }


def _weights(tensors: dict[str, Any], config: Any, source: Path) -> dict[str, npt.NDArray[Any]]:
    from gguf import MODEL_ARCH, dequantize, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def read(module: str, suffix: str) -> npt.NDArray[Any]:
        name = f"{names.get_name(module)}.{suffix}"
        if name not in tensors:
            raise ModelError(f"{source} lacks the tensor {name}")
        weight: npt.NDArray[Any] = np.asarray(dequantize(tensors[name].data, tensors[name].tensor_type), np.float32)
        if num_heads := heads.get(module.rpartition(".")[2]):
            # GGUF pairs dimensions (2i, 2i+1) of a head for the rotary embedding, Hugging Face (i, i + dim/2).
            pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        return np.ascontiguousarray(weight)

    weights = {
        f"model.layers.{layer}.{module}.{suffix}": read(f"model.layers.{layer}.{module}", suffix)
        for layer in range(config.num_hidden_layers)
        for module, suffixes in _MODULES.items()
        for suffix in suffixes
        if suffix == "weight" or config.attention_bias
    }
    weights["model.embed_tokens.weight"] = read("model.embed_tokens", "weight")
    weights["model.norm.weight"] = read("model.norm", "weight")
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = read("lm_head", "weight")
    return weights
