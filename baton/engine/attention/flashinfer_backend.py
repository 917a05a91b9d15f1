"""Paged attention by FlashInfer's kernels, for pools in float16 or bfloat16 on a GPU.

Written against the sources of FlashInfer 0.7.4, by names that 0.6.0 has too: a layer's keys and values go in as a
tuple of strided views in layout HND (`paged_kv_t` takes the strides of a page, a head and a token from the tensors;
only the last dimension must be contiguous and both must have the same strides). Sequences of one row and those of
several are planned apart, since their kernels differ; what a plan depends on beside the batch is an `AttentionKind`,
so there is a wrapper for each kind. (Ye et al., "FlashInfer", MLSys 2025; decodes apart from chunks as in vLLM.)

Tensor cores compute decodes, too: they take any number of query heads per key head.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from baton.engine.attention import AttentionBatch, AttentionKind
from baton.engine.attention.tables import PagedTables, begun_blocks
from baton.engine.kv_cache import TORCH_DTYPES, KVCache
from baton.engine.upload import pinned, upload

WORKSPACE_BYTES = 384 << 20
"""For partial results of sequences that several blocks of threads share; one for all plans, which run one by one."""
HEAD_DIMS = (64, 128, 256)


def unavailable(device: torch.device, dtype: str, head_dim: int) -> str | None:
    """Why FlashInfer cannot compute this; None: it can."""
    if device.type != "cuda":
        return f"FlashInfer needs a GPU, and the device is {device.type}"
    if TORCH_DTYPES[dtype].itemsize != 2:
        return f"FlashInfer takes float16 and bfloat16, and the KV pool holds {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"FlashInfer takes heads of {', '.join(map(str, HEAD_DIMS))} elements, and the model's have {head_dim}"
    try:
        importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as e:  # absent, or for another CUDA or torch
        return f"flashinfer cannot be imported ({e}); it comes with the extra `cuda`"
    return None


@dataclass
class _Part:
    """Some of the batch's sequences, either all of one row or all of several."""

    tables: PagedTables
    rows: slice | torch.Tensor
    """Their packed rows, in order."""
    indices: torch.Tensor
    """`tables.indices` on the device."""
    chunks: bool
    """Of several rows each."""
    planned: dict[AttentionKind, Any] = field(default_factory=dict)
    """The wrapper of each kind that a layer has asked for."""


@dataclass(frozen=True)
class _Step:
    write: tuple[torch.Tensor, ...]
    """What `append_paged_kv_cache` takes: `[rows]` sequence and position of each row, then the batch's tables
    (indices, indptr, last lengths); int32, on the device."""
    parts: tuple[_Part, ...]


class FlashInferAttention:
    """The `AttentionBackend` on FlashInfer, of one stream; `unavailable` says where it works."""

    def __init__(self, device: torch.device):
        self._flashinfer = importlib.import_module("flashinfer")
        self.device = device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[int, bool, AttentionKind], Any] = {}
        """By thread, too: workers of one process may share a model, and a plan must last until its step ends."""
        self._copied: dict[int, torch.cuda.Event] = {}
        """By wrapper: after its last plan's copy out of its pinned buffer, which its next plan overwrites."""
        # cuDNN, which FlashInfer prefers for some shapes on newer GPUs, is left out: it was not read for strides.
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        self._chunk_kernels = "auto" if hopper else "fa2"

    def prepare(self, batch: AttentionBatch, kinds: Collection[AttentionKind], kv_cache: KVCache) -> _Step:
        """See `AttentionBackend.prepare`. A kind is planned when a layer first asks: its query tells the heads."""
        block_size = kv_cache.layout.block_size
        kv_cache.clear(begun_blocks(batch, block_size))
        whole = PagedTables.of(batch, block_size)
        single = np.asarray(batch.lengths) == 1
        split = not single.all() and bool(single.any())
        groups = [np.flatnonzero(single), np.flatnonzero(~single)] if split else [np.arange(len(single))]
        tables = [PagedTables.of(_subset(batch, group), block_size) for group in groups] if split else [whole]
        rows = [_rows_of(group, whole.row_indptr) for group in groups]
        uploaded = upload(
            [
                *whole.row_places(batch.starts),
                whole.indices,
                whole.indptr,
                whole.last_lengths,
                *(t.indices for t in tables if t is not whole),
                *(r for r in rows if not isinstance(r, slice)),
            ],
            self.device,
        )
        write, rest = tuple(uploaded[:5]), iter(uploaded[5:])
        indices = [write[2] if t is whole else next(rest) for t in tables]
        places = [r if isinstance(r, slice) else next(rest).long() for r in rows]
        parts = zip(tables, places, indices, groups, strict=True)
        return _Step(write, tuple(_Part(t, r, i, chunks=not single[g[0]]) for t, r, i, g in parts))

    def attend(
        self,
        layer: int,
        kind: AttentionKind,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: KVCache,
        step: _Step | FlashInferDecode,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        pages = kv_cache.layer(layer)
        places, (indices, indptr, last_lengths) = step.write[:2], step.write[2:]
        self._flashinfer.append_paged_kv_cache(
            key, value, *places, pages, indices, indptr, last_lengths, kv_layout="HND"
        )
        if isinstance(step, FlashInferDecode):
            out: torch.Tensor = step.wrapper(kind).run(query, pages)
            return out.flatten(1)
        if len(step.parts) == 1:
            out = self._planned(step.parts[0], kind, query, kv_cache).run(query, pages)
            return out.flatten(1)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for part in step.parts:
            out[part.rows] = self._planned(part, kind, query, kv_cache).run(query[part.rows], pages)
        return out.flatten(1)

    def graph_widths(self, size: int, max_blocks: int) -> Sequence[int]:
        """See `StaticAttention.graph_widths`: the kernels' grid does not follow the context, so one is enough."""
        return (max_blocks,)

    def static_decode(
        self, size: int, width: int, num_heads: int, kinds: Collection[AttentionKind], kv_cache: KVCache
    ) -> FlashInferDecode:
        """See `StaticAttention.static_decode`."""
        return FlashInferDecode(self, size, width, num_heads, kinds, kv_cache)

    def decode_wrapper(self, **buffers: Any) -> Any:
        """A wrapper for sequences of one row each."""
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=True, backend="fa2", **buffers
        )

    def plan(self, wrapper: Any, *tables: torch.Tensor, **options: Any) -> None:
        """Plan once the wrapper's pinned buffer was read for its last plan: steps that sample nothing run ahead."""
        copied = self._copied.get(id(wrapper))
        if copied is not None:
            copied.synchronize()
        wrapper.plan(*tables, **options)
        if self.device.type == "cuda":
            copied = copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._copied[id(wrapper)] = copied

    def _planned(self, part: _Part, kind: AttentionKind, query: torch.Tensor, kv_cache: KVCache) -> Any:
        wrapper = part.planned.get(kind)
        if wrapper is not None:
            return wrapper
        owner = (threading.get_ident(), part.chunks, kind)
        if (wrapper := self._wrappers.get(owner)) is None:
            wrapper = self._wrappers[owner] = self._chunk_wrapper() if part.chunks else self.decode_wrapper()
        tables = part.tables
        options = plan_options(kind, query.shape[1], kv_cache)
        indptr, last_lengths = pinned(tables.indptr, self.device), pinned(tables.last_lengths, self.device)
        if part.chunks:
            options["head_dim_qk"] = options.pop("head_dim")
            rows = pinned(tables.row_indptr, self.device)
            self.plan(wrapper, rows, indptr, part.indices, last_lengths, causal=True, **options)
        else:
            self.plan(wrapper, indptr, part.indices, last_lengths, **options)
        part.planned[kind] = wrapper
        return wrapper

    def _chunk_wrapper(self) -> Any:
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend=self._chunk_kernels)


class FlashInferDecode:
    """`StaticDecode` on FlashInfer: its wrappers for CUDA graphs, over buffers that are ours."""

    def __init__(
        self,
        attention: FlashInferAttention,
        size: int,
        width: int,
        num_heads: int,
        kinds: Collection[AttentionKind],
        kv_cache: KVCache,
    ):
        device = attention.device
        self.size = size
        self._attention = attention
        self._options = {kind: plan_options(kind, num_heads, kv_cache) for kind in kinds}
        self._kv_cache = kv_cache
        int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._positions = torch.zeros(size, **int32)
        indices, indptr = torch.zeros(size * width, **int32), torch.zeros(size + 1, **int32)
        last_lengths = torch.zeros(size, **int32)
        self.write = (torch.arange(size, **int32), self._positions, indices, indptr, last_lengths)
        """See `_Step.write`."""
        self._wrappers = {
            kind: attention.decode_wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=indptr,
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last_lengths,
            )
            for kind in kinds
        }

    def wrapper(self, kind: AttentionKind) -> Any:
        return self._wrappers[kind]

    def fill(self, batch: AttentionBatch) -> None:
        """See `StaticDecode.fill`."""
        block_size, device = self._kv_cache.layout.block_size, self._attention.device
        self._kv_cache.clear(begun_blocks(batch, block_size))
        tables = PagedTables.of(batch, block_size)
        positions, indices = upload([np.asarray(batch.starts, np.int32), tables.indices], device)
        self._positions.copy_(positions)
        indptr, last_lengths = pinned(tables.indptr, device), pinned(tables.last_lengths, device)
        for kind, wrapper in self._wrappers.items():  # each writes the same tables into the buffers they share
            self._attention.plan(wrapper, indptr, indices, last_lengths, **self._options[kind])


def plan_options(kind: AttentionKind, num_heads: int, kv_cache: KVCache) -> dict[str, Any]:
    """What plans take beside a batch, by FlashInfer's names; the prefill wrapper calls `head_dim` `head_dim_qk`."""
    layout = kv_cache.layout
    return {
        "num_qo_heads": num_heads,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "page_size": layout.block_size,
        "sm_scale": kind.scale,
        # Tokens before a token's own; ours count that one.
        "window_left": -1 if kind.window is None else kind.window - 1,
        "logits_soft_cap": kind.softcap,
        "q_data_type": kv_cache.tensor.dtype,
        "kv_data_type": kv_cache.tensor.dtype,
    }


def _subset(batch: AttentionBatch, which: np.ndarray) -> AttentionBatch:
    chosen: list[int] = which.tolist()
    starts, lengths = ([values[i] for i in chosen] for values in (batch.starts, batch.lengths))
    return AttentionBatch(starts, lengths, [batch.blocks[i] for i in chosen])


def _rows_of(which: np.ndarray, row_indptr: np.ndarray) -> Any:
    """Packed rows of these sequences: a slice where they are neighbours, as they mostly are, else their numbers."""
    if which[-1] - which[0] == len(which) - 1:
        return slice(int(row_indptr[which[0]]), int(row_indptr[which[-1] + 1]))
    return np.concatenate([np.arange(row_indptr[i], row_indptr[i + 1], dtype=np.int32) for i in which])
