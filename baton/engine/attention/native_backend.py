"""Paged attention by the native kernels, for models that torch computes on the CPU.

It walks the block tables: nothing is gathered, and nothing beyond a sequence's last token is read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from baton.engine.attention import AttentionBatch, AttentionKind
from baton.engine.kv_cache import KVCache
from baton.engine.native import ops
from baton.engine.native.tables import block_tables


@dataclass(frozen=True)
class _Step:
    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor


class NativeAttention:
    """The `AttentionBackend` on native kernels. Pools in float32 or bfloat16."""

    def prepare(self, batch: AttentionBatch, kinds: Collection[AttentionKind], kv_cache: KVCache) -> _Step:
        """See `AttentionBackend.prepare`."""
        counts = torch.from_numpy(np.array([batch.starts, batch.lengths], dtype=np.int32))
        return _Step(counts[0], counts[1], torch.from_numpy(block_tables(batch)))

    def attend(
        self,
        layer: int,
        kind: AttentionKind,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: KVCache,
        step: _Step,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        keys, values = kv_cache.layer(layer)
        where = (step.starts, step.lengths, step.tables)
        ops.write_kv(keys, values, key.float(), value.float(), *where)
        scaled = query.float() * kind.scale
        out: torch.Tensor = ops.paged_attention(scaled, keys, values, *where, kind.window, kind.softcap)
        return out.to(query.dtype).flatten(1)
