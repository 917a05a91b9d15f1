"""Attention over a paged KV pool: the interface of its backends, and which one to take.

Knows token counts, block tables and tensors. Must not know requests, sampling or the model's layers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from baton.engine.kv_cache import KVCache
from baton.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionBatch:
    """Who attends to what in one packed step, one entry per sequence, in the order of the packed rows."""

    starts: Sequence[int]
    """Tokens whose KV is in the pool already; also the position of the sequence's first row."""
    lengths: Sequence[int]
    """Rows of this step, at least 1 each."""
    blocks: Sequence[Sequence[int]]
    """Block tables, long enough for `start + length` tokens; longer is fine."""


@dataclass(frozen=True)
class AttentionKind:
    """How a layer attends. Layers of one model may differ in it."""

    scale: float
    """Factor on query times key."""
    window: int | None = None
    """Tokens to which a token attends, itself included; None: to all before it."""
    softcap: float | None = None
    """c: scaled scores become c * tanh(score / c), before the mask."""


class AttentionBackend(Protocol):
    """Causal attention of packed rows over the pool, with grouped query heads.

    `prepare` runs once per step and builds what layers share, `attend` once per layer.
    """

    def prepare(self, batch: AttentionBatch, kinds: Collection[AttentionKind], kv_cache: KVCache) -> Any:
        """The step's metadata, for `attend` only. May clear blocks that this step starts to fill.

        `kinds`: all with which `attend` will be called in this step; the same for every step of a model.
        """
        ...

    def attend(
        self,
        layer: int,
        kind: AttentionKind,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: KVCache,
        step: Any,
    ) -> torch.Tensor:
        """Write `key` and `value` into the pool, then attend.

        query `[rows, heads, head_dim]`, key and value `[rows, kv_heads, head_dim]`, rotary embedding
        applied. Returns `[rows, heads * head_dim]`.
        """
        ...


class StaticDecode(Protocol):
    """Attention's part of a decode step in buffers that never move, so that a CUDA graph can replay its kernels."""

    size: int
    """Sequences, of one row each."""

    def fill(self, batch: AttentionBatch) -> None:
        """Make it the step of this batch of `size` sequences; ordered with the device's current stream."""
        ...


@runtime_checkable
class StaticAttention(AttentionBackend, Protocol):
    """A backend whose `attend` also takes a `StaticDecode` as its step, and then reads nothing on the host."""

    def graph_widths(self, size: int, max_blocks: int) -> Sequence[int]:
        """Ascending: the numbers of blocks per sequence for which graphs of `size` sequences are worth having.

        `max_blocks`: of the longest possible sequence.
        """
        ...

    def static_decode(
        self, size: int, width: int, num_heads: int, kinds: Collection[AttentionKind], kv_cache: KVCache
    ) -> StaticDecode:
        """Of sequences of up to `width` blocks; `fill` it before `attend` sees it."""
        ...


def attention_backend(
    name: str, device: torch.device, *, dtype: str = "float32", head_dim: int = 0
) -> AttentionBackend:
    """The backend called `name`; `auto` takes the fastest that works on `device`. `dtype`, `head_dim`: of the KV pool.

    Raises ConfigError where the one that is asked for cannot be had.
    """
    from baton.engine.attention.flashinfer_backend import FlashInferAttention, unavailable
    from baton.engine.attention.torch_backend import TorchAttention
    from baton.engine.native.library import kernels

    native = device.type == "cpu" and kernels() is not None
    if name == "native" and not native:
        raise ConfigError("engine.attention", "needs a CPU and a built library", value=name, allowed="auto, torch")
    if name == "native" or (name == "auto" and native):
        from baton.engine.attention.native_backend import NativeAttention

        return NativeAttention()
    if name == "flashinfer" or (name == "auto" and device.type == "cuda"):
        reason = unavailable(device, dtype, head_dim)
        if reason is None:
            return FlashInferAttention(device)
        if name == "flashinfer":
            raise ConfigError("engine.attention", f"cannot be used: {reason}", value=name, allowed="auto, torch")
        log.warning("attention is computed by torch, which is slower: %s", reason)
    if name in ("auto", "torch"):
        return TorchAttention(device)
    raise ConfigError("engine.attention", "is not known", value=name, allowed="auto, torch, native, flashinfer")
