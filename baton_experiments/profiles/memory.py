"""How many tokens' KV a GPU holds beside a model's weights. Plain arithmetic."""

from __future__ import annotations

import re

from baton.errors import ConfigError
from baton_experiments.anatomy.devices import DEVICES
from baton_experiments.profiles.shapes import Decoder

USABLE = 0.9
"""Of a GPU's memory: vLLM's default, for weights and KV cache together."""
_GIB = (re.compile(r"(\d+)\s*gb", re.IGNORECASE), re.compile(r"(?<=[-_ ])(\d+)g\b", re.IGNORECASE))
"""As names say it: `h100-80gb`, else `A100-80G`."""
LEFT = "the KV cache has what"
TOO_LARGE = "the weights do not fit"
"""How notes of profiles begin whose `kv_tokens` come from here, or cannot."""
_ELSEWHERE = {"RTXPRO6000": 96.0}
"""NVIDIA RTX PRO 6000 Blackwell datasheet."""


def memory_gib(hardware: str) -> float:
    """Of one GPU: in its name, or known. Raises ConfigError where it is neither."""
    for pattern in _GIB:
        if match := pattern.search(hardware):
            return float(match[1])
    known = DEVICES.get(hardware.lower())
    gib = _ELSEWHERE.get(hardware) or (known.memory_gib if known else None)
    if gib is None:
        raise ConfigError("hardware", "has a memory that is not known here; say gpu_memory_gib", value=hardware)
    return gib


def kv_note(gib: float) -> str:
    """What `kv_tokens_that_fit` assumes of GPUs with so much memory, for a profile's notes."""
    return f"{LEFT} {USABLE:g} of {gib:g} GiB a GPU leave beside the weights"


def kv_tokens_that_fit(shape: Decoder, gib: float, kv_bytes_per_token: int) -> int:
    """In what `USABLE` of so much memory leaves beside the weights. Raises ConfigError if they do not fit."""
    left = int(USABLE * gib * 2**30) - shape.weight_bytes
    if left < kv_bytes_per_token:
        raise ConfigError(
            "tp",
            f"gives the weights {USABLE * gib:.0f} GiB, they take {shape.weight_bytes / 2**30:.0f}",
            allowed="more GPUs",
        )
    return left // kv_bytes_per_token
