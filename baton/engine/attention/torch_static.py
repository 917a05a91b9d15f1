"""Decode attention in plain torch over buffers that never move: what CUDA graphs capture where FlashInfer is not.

All sequences' blocks are gathered to one width, so a step costs by its widest sequence. Also the reference, on any
device, for how a padded batch must behave.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from baton.engine.attention import AttentionBatch, AttentionKind
from baton.engine.attention.tables import begun_blocks
from baton.engine.kv_cache import KVCache
from baton.engine.upload import pinned

MAX_GATHERED_BLOCKS = 4096
"""Sequences times width of one graph: each layer gathers that many blocks' keys and values."""
FIRST_WIDTH = 8


def graph_widths(size: int, max_blocks: int) -> list[int]:
    """Powers of two times `FIRST_WIDTH`, up to the longest sequence or the limit on what is gathered."""
    widths, width = [], FIRST_WIDTH
    while size * width <= MAX_GATHERED_BLOCKS:
        widths.append(min(width, max_blocks))
        if width >= max_blocks:
            break
        width *= 2
    return widths


class TorchDecode:
    """The `StaticDecode` of `TorchAttention`."""

    def __init__(self, size: int, width: int, kv_cache: KVCache):
        self.size = size
        self._width = width
        self._kv_cache = kv_cache
        self._block_size = kv_cache.layout.block_size
        # One tensor, so that a step is one copy: positions, then the table of each sequence.
        self._inputs = torch.zeros(size * (1 + width), dtype=torch.int64, device=kv_cache.device)
        self._positions = self._inputs[:size]
        self._tables = self._inputs[size:].view(size, width)

    def fill(self, batch: AttentionBatch) -> None:
        """See `StaticDecode.fill`. Clears blocks that the step begins, as `KVCache` wants."""
        self._kv_cache.clear(begun_blocks(batch, self._block_size))
        tables = np.empty((self.size, self._width), dtype=np.int64)
        for table, start, blocks in zip(tables, batch.starts, batch.blocks, strict=True):
            count = start // self._block_size + 1
            table[:count] = blocks[:count]
            table[count:] = blocks[0]  # its own: another's block may be being written
        packed = np.concatenate((np.asarray(batch.starts, dtype=np.int64), tables.reshape(-1)))
        self._inputs.copy_(pinned(packed, self._inputs.device), non_blocking=True)

    def attend(
        self, layer: int, kind: AttentionKind, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        size, heads, head_dim = query.shape
        kv_heads = key.shape[1]
        keys, values = self._kv_cache.layer(layer)
        positions, block_size = self._positions, self._block_size
        blocks = self._tables.gather(1, (positions // block_size)[:, None])[:, 0]
        offsets = positions % block_size
        keys[blocks, :, offsets] = key
        values[blocks, :, offsets] = value
        places = torch.arange(self._width * block_size, device=query.device)
        hidden = places > positions[:, None]
        if kind.window is not None:
            hidden = hidden | (places <= positions[:, None] - kind.window)
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill(hidden, -torch.inf)
        every_head = torch.arange(kv_heads, device=query.device)[:, None]
        k = keys[self._tables[:, None], every_head].view(size, kv_heads, -1, head_dim)
        v = values[self._tables[:, None], every_head].view(size, kv_heads, -1, head_dim)
        # The query heads that share a key head stand where SDPA expects queries: no head is expanded.
        grouped = query.view(size, kv_heads, heads // kv_heads, head_dim)
        if kind.softcap is None:
            out = scaled_dot_product_attention(grouped, k, v, mask[:, None, None], scale=kind.scale)
        else:
            scores = grouped @ k.transpose(-1, -2) * kind.scale
            scores = (scores / kind.softcap).tanh() * kind.softcap + mask[:, None, None]
            out = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ v
        return out.reshape(size, heads * head_dim)
