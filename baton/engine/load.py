"""Which implementation computes a model, and loading it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from baton.config import EngineConfig
from baton.engine.attention import attention_backend
from baton.engine.model import DecoderModel, Model
from baton.engine.model_spec import CausalLMSpec, ModelSpec
from baton.engine.native.decoder import NativeDecoder, unsupported
from baton.engine.transformers_model import TransformersModel
from baton.engine.weights import iter_weights
from baton.errors import ConfigError

log = logging.getLogger(__name__)


def load_model(config: EngineConfig, spec: CausalLMSpec, path: Path, *, dtype: str, device: str) -> Model:
    """The model in `path`, ready to compute on `device`.

    Raises ModelError where the weights do not fit, ConfigError where `engine.kernels` asks for what cannot be had.
    """
    if isinstance(spec, ModelSpec) and config.kernels != "torch":
        reason = unsupported(spec, dtype, device)
        if reason is None:
            return NativeDecoder(spec, iter_weights(path), dtype=dtype)
        if config.kernels == "native":
            raise ConfigError("engine.kernels", f"cannot be used: {reason}", value="native", allowed="auto, torch")
        if device == "cpu":
            log.warning("the native kernels are not used, which is slower: %s", reason)
    elif config.kernels == "native":
        raise ConfigError(
            "engine.kernels",
            "computes only what Baton's own decoder does, and this model runs through transformers",
            value="native",
            allowed="auto, torch",
        )
    attention = attention_backend(config.attention, torch.device(device), dtype=dtype, head_dim=spec.head_dim)
    if isinstance(spec, ModelSpec):
        return DecoderModel(spec, iter_weights(path), attention, dtype=dtype, device=device)
    return TransformersModel(spec, path, attention, dtype=dtype, device=device)
