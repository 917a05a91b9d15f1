"""Paged attention in plain torch: right on every device and shape, the reference for faster ones.

Sequences with one row this step (decodes, mostly) are gathered and attended together; longer ones one by one.
Measured on the CPU (torch 2.13): `enable_gqa` beats expanding the key heads, a float mask a boolean
one, and indexing blocks and heads at once (one copy) a gather followed by a transpose (two).
Of a sliding window's sequences only the blocks inside the window are read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from baton.engine.attention import AttentionBatch, AttentionKind
from baton.engine.attention.torch_static import TorchDecode, graph_widths
from baton.engine.kv_cache import KVCache


@dataclass(frozen=True)
class _Singles:
    """Sequences of one row each, whose numbers of blocks differ by less than a factor of 2."""

    rows: torch.Tensor
    """`[n]`: their packed rows."""
    table: torch.Tensor
    """`[n, 1, blocks]`: block tables, within the window; short ones padded with their own first block."""
    mask: torch.Tensor
    """`[n, 1, 1, blocks * block_size]`: 0 where there is a token within the window, else -inf."""


@dataclass(frozen=True)
class _Chunk:
    """One sequence of several rows."""

    first: int
    end: int
    """Packed rows `[first, end)`."""
    table: torch.Tensor | None
    """`[1, blocks]`, within the window; None where nothing came before: the rows attend to each other, without the
    pool."""
    mask: torch.Tensor | None
    """`[rows, tokens]`, over the tokens of `table`, or over the rows: 0 or -inf. None: causal over the rows."""


@dataclass(frozen=True)
class _Reads:
    """What is read from the pool by layers of one window."""

    singles: tuple[_Singles, ...]
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True)
class _Step:
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    """`[rows]` each: where the row's key and value go."""
    every_head: torch.Tensor
    """`[kv_heads, 1]`: makes an index with a block table of all heads of its blocks."""
    reads: dict[int | None, _Reads]
    """By window."""


class TorchAttention:
    """The `AttentionBackend` for any device that torch runs on."""

    def __init__(self, device: torch.device):
        self.device = device

    def prepare(self, batch: AttentionBatch, kinds: Collection[AttentionKind], kv_cache: KVCache) -> _Step:
        """Index tensors and masks of one step, shared by all layers of a window."""
        block_size = kv_cache.layout.block_size
        write_blocks, write_offsets, fresh, tables = [], [], [], []
        for start, length, blocks in zip(batch.starts, batch.lengths, batch.blocks, strict=True):
            end = start + length
            table = np.asarray(blocks[: -(-end // block_size)], dtype=np.int64)
            tables.append(table)
            positions = np.arange(start, end)
            write_blocks.append(table[positions // block_size])
            write_offsets.append(positions % block_size)
            if end % block_size and start <= end - end % block_size:
                fresh.append(int(table[-1]))  # begun in this step and not filled by it, see KVCache
        kv_cache.clear(fresh)
        longest = max(start + length for start, length in zip(batch.starts, batch.lengths, strict=True))
        reads: dict[int | None, _Reads] = {}
        for window in {kind.window for kind in kinds}:
            effective = None if window is None or window >= longest else window
            if effective not in reads:
                reads[effective] = self._reads(batch, tables, effective, block_size, kv_cache.tensor.dtype)
            reads[window] = reads[effective]
        return _Step(
            write_blocks=self._tensor(np.concatenate(write_blocks)),
            write_offsets=self._tensor(np.concatenate(write_offsets)),
            every_head=torch.arange(kv_cache.layout.num_kv_heads, device=self.device)[:, None],
            reads=reads,
        )

    def attend(
        self,
        layer: int,
        kind: AttentionKind,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: KVCache,
        step: _Step | TorchDecode,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        if isinstance(step, TorchDecode):
            return step.attend(layer, kind, query, key, value)
        rows, heads, head_dim = query.shape
        kv_heads = key.shape[1]
        keys, values = kv_cache.layer(layer)
        keys[step.write_blocks, :, step.write_offsets] = key
        values[step.write_blocks, :, step.write_offsets] = value
        out = torch.empty(rows, heads, head_dim, dtype=query.dtype, device=query.device)
        reads = step.reads[kind.window]
        for group in reads.singles:
            n = len(group.rows)
            k = keys[group.table, step.every_head].view(n, kv_heads, -1, head_dim)
            v = values[group.table, step.every_head].view(n, kv_heads, -1, head_dim)
            # The query heads that share a key head stand where SDPA expects queries: no head is expanded.
            q = query[group.rows].view(n, kv_heads, heads // kv_heads, head_dim)
            out[group.rows] = _attention(q, k, v, group.mask, kind).view(n, heads, head_dim)
        for c in reads.chunks:
            if c.table is None:
                k, v = key[c.first : c.end].transpose(0, 1), value[c.first : c.end].transpose(0, 1)
            else:
                assert c.mask is not None
                context = c.mask.shape[1]
                k = keys[c.table, step.every_head].view(kv_heads, -1, head_dim)[:, :context]
                v = values[c.table, step.every_head].view(kv_heads, -1, head_dim)[:, :context]
            attended = _attention(query[c.first : c.end].transpose(0, 1)[None], k[None], v[None], c.mask, kind)
            out[c.first : c.end] = attended[0].transpose(0, 1)
        return out.view(rows, heads * head_dim)

    def graph_widths(self, size: int, max_blocks: int) -> Sequence[int]:
        """See `StaticAttention.graph_widths`."""
        return graph_widths(size, max_blocks)

    def static_decode(
        self, size: int, width: int, num_heads: int, kinds: Collection[AttentionKind], kv_cache: KVCache
    ) -> TorchDecode:
        """See `StaticAttention.static_decode`."""
        return TorchDecode(size, width, kv_cache)

    def _reads(
        self, batch: AttentionBatch, tables: list[np.ndarray], window: int | None, block_size: int, dtype: torch.dtype
    ) -> _Reads:
        by_size: dict[int, list[tuple[int, int, np.ndarray]]] = {}  # row, tokens, table
        chunks, row = [], 0
        for start, length, table in zip(batch.starts, batch.lengths, tables, strict=True):
            # Blocks before the first row's window are left out: what follows counts from there.
            skipped = 0 if window is None else max(0, start + 1 - window) // block_size
            table, start = table[skipped:], start - skipped * block_size
            if length == 1:
                by_size.setdefault(len(table).bit_length(), []).append((row, start + 1, table))
            else:
                chunks.append(self._chunk(row, start, length, table, window, dtype))
            row += length
        groups = (self._singles(group, window, block_size, dtype) for group in by_size.values())
        return _Reads(tuple(groups), tuple(chunks))

    def _singles(
        self, group: list[tuple[int, int, np.ndarray]], window: int | None, block_size: int, dtype: torch.dtype
    ) -> _Singles:
        width = max(len(table) for _, _, table in group)
        tables = np.empty((len(group), 1, width), dtype=np.int64)
        for i, (_, _, table) in enumerate(group):
            tables[i, 0, : len(table)] = table
            tables[i, 0, len(table) :] = table[0]  # its own: another's block may be being written
        ends = np.array([tokens for _, tokens, _ in group])[:, None]
        hidden = _hidden(ends - 1, width * block_size, window)
        return _Singles(
            rows=self._tensor(np.array([row for row, _, _ in group], dtype=np.int64)),
            table=self._tensor(tables),
            mask=self._mask(hidden[:, None, None], dtype),
        )

    def _chunk(
        self, row: int, start: int, length: int, table: np.ndarray, window: int | None, dtype: torch.dtype
    ) -> _Chunk:
        alone = start == 0
        mask = None
        if not alone or (window is not None and window < length):
            hidden = _hidden(np.arange(start, start + length)[:, None], start + length, window)
            mask = self._mask(hidden, dtype)
        return _Chunk(first=row, end=row + length, table=None if alone else self._tensor(table)[None], mask=mask)

    def _mask(self, hidden: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return self._tensor(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(dtype)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _hidden(rows: np.ndarray, tokens: int, window: int | None) -> np.ndarray:
    """`[rows, tokens]`: whether a row may not attend to a token. `rows`: positions `[rows, 1]`."""
    positions = np.arange(tokens)
    hidden: np.ndarray = positions > rows
    return hidden if window is None else hidden | (positions <= rows - window)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, kind: AttentionKind
) -> torch.Tensor:
    """query `[n, heads, rows, head_dim]`, key and value `[n, kv_heads, tokens, head_dim]`; as query.

    `mask` is added to the scores; None: causal, as many tokens as rows.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    if kind.softcap is None:
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=kind.scale, enable_gqa=heads != kv_heads
        )
    # SDPA has no softcap. Head by key head: the scores of all at once would take memory by the heads.
    rows, tokens = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.full((rows, tokens), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    grouped = query.view(query.shape[0], kv_heads, heads // kv_heads, rows, -1)
    out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
    for head in range(kv_heads):
        k, v = key[:, head, None], value[:, head, None]
        scores = grouped[:, head] @ k.transpose(-1, -2) * kind.scale
        scores = (scores / kind.softcap).tanh() * kind.softcap + mask
        out[:, head] = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ v
    return out.flatten(1, 2)
