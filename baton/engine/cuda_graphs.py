"""Decode steps as CUDA graphs: all kernels of a step are launched by one call, which matters where they are short.

A graph is captured for a number of sequences (and, where attention asks for it, a greatest number of blocks per
sequence); a step takes the smallest that holds it. Rows that fill it up are sequences of one token in the pool's
scratch block, which no request owns, so they change no other row: each row's arithmetic reads its own row, its own
blocks and the weights. Steps of any other shape run eagerly. (The idea of padding to captured sizes: vLLM.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from baton.engine.attention import AttentionBatch, StaticAttention, StaticDecode
from baton.engine.batch import Batch
from baton.engine.kv_cache import KVCache
from baton.engine.model import DecoderModel
from baton.engine.model_spec import ModelSpec
from baton.engine.upload import pinned

Compute = Callable[[], torch.Tensor]
Replay = Callable[[], None]

WARM_UP_ROWS = 128
"""More than FlashInfer's bound (64) between kernels for short and for long chunks, so that both are built early."""


def graph_sizes(max_requests: int) -> list[int]:
    """Numbers of sequences to capture: 1, 2, 4, the multiples of 8, and the greatest that can occur."""
    return sorted({*(n for n in (1, 2, 4) if n <= max_requests), *range(8, max_requests + 1, 8), max_requests})


class CudaCapture:
    """Captures computations as CUDA graphs that share one pool of memory, since they never run at once."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> tuple[torch.Tensor, Replay]:
        """The tensor that each replay writes, and the replay."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what a first call allocates, builds or picks must not be captured
            compute()
            compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use CUDA meanwhile (workers of one process).
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = compute()
        return out, graph.replay


@dataclass(frozen=True)
class _Graph:
    static: StaticDecode
    inputs: torch.Tensor
    """`[2 * size]`: tokens, then positions."""
    logits: torch.Tensor
    replay: Replay


class GraphedDecoder:
    """A `Model` that replays decode steps over one pool and leaves all else to `model`.

    `kv_cache` must have a scratch block, `model.attention` be a `StaticAttention`. `max_blocks`: of the longest
    sequence. `capture`: `CudaCapture()`, or a stand-in. Takes seconds; the first time FlashInfer builds its kernels,
    minutes.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_cache: KVCache,
        *,
        sizes: list[int],
        max_blocks: int,
        capture: Callable[[Compute], tuple[torch.Tensor, Replay]],
        progress: Callable[[str], None] = lambda text: None,
    ):
        assert kv_cache.scratch_block is not None, "padding needs a block of its own"
        assert isinstance(model.attention, StaticAttention), f"{type(model.attention).__name__} has no static steps"
        self.model = model
        self.device = model.device
        self._kv_cache = kv_cache
        self._scratch = [kv_cache.scratch_block]
        self._sizes = sizes
        widths = {size: list(model.attention.graph_widths(size, max_blocks)) for size in sizes}
        shapes = [(size, width) for size in sizes for width in widths[size]]
        self._widths = widths
        self._graphs: dict[tuple[int, int], _Graph] = {}
        # The largest first: the others then live in the memory that it took.
        for number, (size, width) in enumerate(reversed(shapes), 1):
            progress(f"capturing decode steps: {number} of {len(shapes)}")
            self._graphs[size, width] = self._capture(size, width, capture)

    @property
    def spec(self) -> ModelSpec:
        """See `Model.spec`."""
        return self.model.spec

    def set_num_threads(self, num_threads: int) -> None:
        """See `Model.set_num_threads`."""
        self.model.set_num_threads(num_threads)

    @property
    def computed_by(self) -> str:
        """See `Model.computed_by`."""
        return f"{self.model.computed_by} with CUDA graphs"

    @property
    def weight_bytes(self) -> int:
        """See `Model.weight_bytes`."""
        return self.model.weight_bytes

    def step_bytes(self, rows: int, logits_rows: int) -> int:
        """See `Model.step_bytes`."""
        return self.model.step_bytes(rows, logits_rows)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """See `Model.forward`. A replay's logits hold until the next call."""
        shape = self.shape_of(batch) if kv_cache is self._kv_cache else None
        if shape is None:
            return self.model.forward(batch, kv_cache)
        graph = self._graphs[shape]
        self._fill(graph, batch)
        graph.replay()
        return graph.logits[: len(batch.tokens)]

    def shape_of(self, batch: Batch) -> tuple[int, int] | None:
        """Sequences and width of the graph that computes this batch; None: it runs eagerly."""
        rows, starts = len(batch.tokens), batch.sequences.starts
        if len(starts) != rows or not np.array_equal(batch.logits_rows, np.arange(rows)):
            return None
        size = next((size for size in self._sizes if size >= rows), None)
        if size is None:
            return None
        blocks = max(starts) // self._kv_cache.layout.block_size + 1
        width = next((width for width in self._widths[size] if width >= blocks), None)
        return None if width is None else (size, width)

    def _fill(self, graph: _Graph, batch: Batch) -> None:
        size, rows = graph.static.size, len(batch.tokens)
        sequences, missing = batch.sequences, size - rows
        starts = [*sequences.starts, *[0] * missing]
        graph.static.fill(AttentionBatch(starts, [1] * size, [*sequences.blocks, *[self._scratch] * missing]))
        inputs = np.zeros(2 * size, dtype=np.int64)
        inputs[:rows], inputs[size:] = batch.tokens, starts
        graph.inputs.copy_(pinned(inputs, self.device), non_blocking=True)

    @torch.inference_mode()
    def _capture(self, size: int, width: int, capture: Callable[[Compute], tuple[torch.Tensor, Replay]]) -> _Graph:
        model, kv_cache, attention = self.model, self._kv_cache, self.model.attention
        assert isinstance(attention, StaticAttention)
        static = attention.static_decode(size, width, model.spec.num_heads, set(model.kinds), kv_cache)
        static.fill(AttentionBatch([0] * size, [1] * size, [self._scratch] * size))
        inputs = torch.zeros(2 * size, dtype=torch.int64, device=self.device)
        tokens, positions = inputs[:size], inputs[size:]
        logits, replay = capture(lambda: model.compute(tokens, positions, None, kv_cache, static))
        return _Graph(static, inputs, logits, replay)


def warm_up(model: DecoderModel, kv_cache: KVCache, max_rows: int) -> None:
    """Compute chunks of all sorts into the scratch block: no request then waits for kernels to be built or loaded."""
    assert kv_cache.scratch_block is not None
    for rows in {1, min(8, max_rows), min(WARM_UP_ROWS, max_rows)}:
        table = [kv_cache.scratch_block] * kv_cache.layout.num_blocks_for(rows)
        batch = Batch(
            AttentionBatch([0], [rows], [table]),
            tokens=np.zeros(rows, dtype=np.int64),
            logits_rows=np.array([rows - 1], dtype=np.int64),
        )
        model.forward(batch, kv_cache)
