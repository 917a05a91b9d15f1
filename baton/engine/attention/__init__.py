"""Attention over a paged KV pool: the interface of its backends, and which one to take.

Knows token counts, block tables and tensors. Must not know requests, sampling or the model's layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from baton.engine.kv_cache import KVCache
from baton.errors import ConfigError


@dataclass(frozen=True)
class AttentionBatch:
    """Who attends to what in one packed step, one entry per sequence, in the order of the packed rows."""

    starts: Sequence[int]
    """Tokens whose KV is in the pool already; also the position of the sequence's first row."""
    lengths: Sequence[int]
    """Rows of this step, at least 1 each."""
    blocks: Sequence[Sequence[int]]
    """Block tables, long enough for `start + length` tokens; longer is fine."""


class AttentionBackend(Protocol):
    """Causal attention of packed rows over the pool, with grouped query heads.

    `prepare` runs once per step and builds what all layers share, `attend` once per layer.
    """

    def prepare(self, batch: AttentionBatch, kv_cache: KVCache) -> Any:
        """The step's metadata, for `attend` only. May clear blocks that this step starts to fill."""
        ...

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, step: Any
    ) -> torch.Tensor:
        """Write `key` and `value` into the pool, then attend.

        query `[rows, heads, head_dim]`, key and value `[rows, kv_heads, head_dim]`, rotary embedding
        applied. Returns `[rows, heads * head_dim]`. Scores are scaled by head_dim^-0.5.
        """
        ...


def attention_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called `name`; `auto` takes the fastest that works on `device`. Raises ConfigError."""
    from baton.engine.attention.torch_backend import TorchAttention

    if name in ("auto", "torch"):
        return TorchAttention(device)
    raise ConfigError("engine.attention", "is not known", value=name, allowed="auto, torch")
