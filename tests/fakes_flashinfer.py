"""A stand-in for the module `flashinfer`: the names and parameters of release 0.7.4 that Baton uses, computed densely.

Checks what the real one demands: int32 tables, host tables where it plans on the host, equal strides of keys and
values with a contiguous last dimension, and, with `use_cuda_graph`, that buffers hold what is planned.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Pages = tuple[torch.Tensor, torch.Tensor]


def _check_pages(pages: Pages) -> None:
    keys, values = pages
    assert keys.dim() == 4
    assert keys.shape == values.shape
    assert keys.stride() == values.stride()
    assert keys.stride(-1) == 1


def _check_tables(*tables: torch.Tensor) -> None:
    for table in tables:
        assert table.dtype is torch.int32
        assert table.dim() == 1
        assert table.is_contiguous()


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Pages,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    assert kv_layout == "HND"
    _check_pages(paged_kv_cache)
    _check_tables(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    assert len(kv_indptr) == len(kv_last_page_len) + 1
    assert len(batch_indices) == len(positions) == len(append_key)
    page_size = paged_kv_cache[0].shape[2]
    for row, (i, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        block = int(kv_indices[int(kv_indptr[i]) + position // page_size])
        for pages, new in zip(paged_kv_cache, (append_key, append_value), strict=True):
            pages[block, :, position % page_size] = new[row]


class _Wrapper:
    """What both wrappers share: `plan` keeps its arguments, `run` attends one query row and head at a time."""

    made: list[Any] = []
    """All wrappers since the list was cleared."""

    def __init__(self) -> None:
        self.made.append(self)
        self.options: dict[str, Any] = {}
        self.num_plans = 0

    def _keep(self, tables: tuple[torch.Tensor, ...], options: dict[str, Any]) -> None:
        _check_tables(*tables)
        assert options["num_qo_heads"] % options["num_kv_heads"] == 0
        assert options["window_left"] >= -1
        assert options["q_data_type"] == options["kv_data_type"]
        self.options = options
        self.num_plans += 1

    def _attend(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pages,
        rows: list[int],
        tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        _check_pages(paged_kv_cache)
        options = self.options
        assert q.shape[1:] == (options["num_qo_heads"], options["head_dim"])
        assert q.dtype == options["q_data_type"]
        assert paged_kv_cache[0].shape[2] == options["page_size"]
        indptr, indices, last = (table.tolist() for table in tables)
        out = torch.empty(q.shape, dtype=q.dtype)
        for i, last_length in enumerate(last):
            blocks = torch.tensor(indices[indptr[i] : indptr[i + 1]])
            tokens = (len(blocks) - 1) * options["page_size"] + last_length
            k, v = (pages[blocks].transpose(1, 2).flatten(0, 1)[:tokens].float() for pages in paged_kv_cache)
            first, end = rows[i], rows[i + 1]
            for row in range(first, end):
                seen = tokens - (end - row - 1)
                start = 0 if options["window_left"] < 0 else max(0, seen - 1 - options["window_left"])
                for head in range(q.shape[1]):
                    kv = head // (options["num_qo_heads"] // options["num_kv_heads"])
                    scores = (
                        k[start:seen, kv] @ q[row, head].float() * (options["sm_scale"] or 1 / math.sqrt(q.shape[2]))
                    )
                    if cap := options["logits_soft_cap"]:
                        scores = cap * torch.tanh(scores / cap)
                    out[row, head] = torch.softmax(scores, 0) @ v[start:seen, kv]
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        assert kv_layout == "HND"
        assert backend in ("auto", "fa2")
        self.buffers: Any = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self.use_cuda_graph = use_cuda_graph
        if use_cuda_graph:
            _check_tables(*self.buffers)
            assert len(self.buffers[0]) == len(self.buffers[2]) + 1

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        tables = (indptr, indices, last_page_len)
        self._keep(tables, options)
        assert indptr.device.type == last_page_len.device.type == "cpu", "a plan would wait for the device"
        if not self.use_cuda_graph:
            self.buffers = tables
            return
        assert len(last_page_len) == len(self.buffers[2])
        for buffer, table in zip(self.buffers, tables, strict=True):
            buffer[: len(table)] = table

    def run(self, q: torch.Tensor, paged_kv_cache: Pages) -> torch.Tensor:
        assert len(q) == len(self.buffers[2])
        return self._attend(q, paged_kv_cache, list(range(len(q) + 1)), self.buffers)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto"):
        super().__init__()
        assert kv_layout == "HND"
        assert backend in ("auto", "fa2")

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        assert causal
        self._tables = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._rows = qo_indptr
        self._keep((qo_indptr, *self._tables), options | {"head_dim": head_dim_qk})
        assert qo_indptr.device.type == paged_kv_indptr.device.type == "cpu", "a plan would wait for the device"

    def run(self, q: torch.Tensor, paged_kv_cache: Pages) -> torch.Tensor:
        assert len(q) == int(self._rows[-1])
        return self._attend(q, paged_kv_cache, self._rows.tolist(), self._tables)
