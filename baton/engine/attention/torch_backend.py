"""Paged attention in plain torch: right on every device and shape, the reference for faster ones.

Sequences with one row this step (decodes, mostly) are gathered and attended together; longer ones one by one.
Measured on the CPU (torch 2.13): `enable_gqa` beats expanding the key heads, a float mask a boolean
one, and indexing blocks and heads at once (one copy) a gather followed by a transpose (two).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from baton.engine.attention import AttentionBatch
from baton.engine.kv_cache import KVCache


@dataclass(frozen=True)
class _Singles:
    """Sequences of one row each, whose numbers of blocks differ by less than a factor of 2."""

    rows: torch.Tensor
    """`[n]`: their packed rows."""
    table: torch.Tensor
    """`[n, 1, blocks]`: block tables, short ones padded with their own first block."""
    mask: torch.Tensor
    """`[n, 1, 1, blocks * block_size]`: 0 where there is a token, else -inf."""


@dataclass(frozen=True)
class _Chunk:
    """One sequence of several rows."""

    first: int
    end: int
    """Packed rows `[first, end)`."""
    table: torch.Tensor | None
    """`[1, blocks]`; None where nothing came before: the rows attend to each other, without the pool."""
    mask: torch.Tensor | None
    """`[rows, start + rows]`: 0 or -inf."""


@dataclass(frozen=True)
class _Step:
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    """`[rows]` each: where the row's key and value go."""
    every_head: torch.Tensor
    """`[kv_heads, 1]`: makes an index with a block table of all heads of its blocks."""
    singles: tuple[_Singles, ...]
    chunks: tuple[_Chunk, ...]


class TorchAttention:
    """The `AttentionBackend` for any device that torch runs on."""

    def __init__(self, device: torch.device):
        self.device = device

    def prepare(self, batch: AttentionBatch, kv_cache: KVCache) -> _Step:
        """Index tensors and masks of one step, shared by all layers."""
        block_size = kv_cache.layout.block_size
        dtype = kv_cache.tensor.dtype
        write_blocks, write_offsets, fresh = [], [], []
        by_size: dict[int, list[tuple[int, int, np.ndarray]]] = {}  # row, tokens, table
        chunks, row = [], 0
        for start, length, blocks in zip(batch.starts, batch.lengths, batch.blocks, strict=True):
            end = start + length
            table = np.asarray(blocks[: -(-end // block_size)], dtype=np.int64)
            positions = np.arange(start, end)
            write_blocks.append(table[positions // block_size])
            write_offsets.append(positions % block_size)
            if end % block_size and start <= end - end % block_size:
                fresh.append(int(table[-1]))  # begun in this step and not filled by it, see KVCache
            if length == 1:
                by_size.setdefault(len(table).bit_length(), []).append((row, end, table))
            else:
                chunks.append(self._chunk(row, start, length, table, dtype))
            row += length
        kv_cache.clear(fresh)
        return _Step(
            write_blocks=self._tensor(np.concatenate(write_blocks)),
            write_offsets=self._tensor(np.concatenate(write_offsets)),
            every_head=torch.arange(kv_cache.layout.num_kv_heads, device=self.device)[:, None],
            singles=tuple(self._singles(group, block_size, dtype) for group in by_size.values()),
            chunks=tuple(chunks),
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, step: _Step
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        rows, heads, head_dim = query.shape
        kv_heads = key.shape[1]
        keys, values = kv_cache.layer(layer)
        keys[step.write_blocks, :, step.write_offsets] = key
        values[step.write_blocks, :, step.write_offsets] = value
        out = torch.empty(rows, heads, head_dim, dtype=query.dtype, device=query.device)
        for group in step.singles:
            n = len(group.rows)
            k = keys[group.table, step.every_head].view(n, kv_heads, -1, head_dim)
            v = values[group.table, step.every_head].view(n, kv_heads, -1, head_dim)
            # The query heads that share a key head stand where SDPA expects queries: no head is expanded.
            q = query[group.rows].view(n, kv_heads, heads // kv_heads, head_dim)
            out[group.rows] = scaled_dot_product_attention(q, k, v, attn_mask=group.mask).view(n, heads, head_dim)
        for c in step.chunks:
            if c.table is None:
                k, v = key[c.first : c.end].transpose(0, 1), value[c.first : c.end].transpose(0, 1)
            else:
                assert c.mask is not None
                context = c.mask.shape[1]
                k = keys[c.table, step.every_head].view(kv_heads, -1, head_dim)[:, :context]
                v = values[c.table, step.every_head].view(kv_heads, -1, head_dim)[:, :context]
            attended = scaled_dot_product_attention(
                query[c.first : c.end].transpose(0, 1)[None],
                k[None],
                v[None],
                attn_mask=c.mask,
                is_causal=c.mask is None,
                enable_gqa=heads != kv_heads,
            )
            out[c.first : c.end] = attended[0].transpose(0, 1)
        return out.view(rows, heads * head_dim)

    def _singles(self, group: list[tuple[int, int, np.ndarray]], block_size: int, dtype: torch.dtype) -> _Singles:
        width = max(len(table) for _, _, table in group)
        tables = np.empty((len(group), 1, width), dtype=np.int64)
        for i, (_, _, table) in enumerate(group):
            tables[i, 0, : len(table)] = table
            tables[i, 0, len(table) :] = table[0]  # its own: another's block may be being written
        hidden = np.arange(width * block_size) >= np.array([tokens for _, tokens, _ in group])[:, None]
        return _Singles(
            rows=self._tensor(np.array([row for row, _, _ in group], dtype=np.int64)),
            table=self._tensor(tables),
            mask=self._mask(hidden[:, None, None], dtype),
        )

    def _chunk(self, row: int, start: int, length: int, table: np.ndarray, dtype: torch.dtype) -> _Chunk:
        if start == 0:
            return _Chunk(first=row, end=row + length, table=None, mask=None)
        hidden = np.arange(start + length) > np.arange(start, start + length)[:, None]
        return _Chunk(first=row, end=row + length, table=self._tensor(table)[None], mask=self._mask(hidden, dtype))

    def _mask(self, hidden: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return self._tensor(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(dtype)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
