"""A pool's blocks in other formats than its own: host buffers that a transport takes for blocks.

    ship      block ──encode──► buffer ──hash──► transport, until nothing reads the buffer any more
    receive   transport ──► buffer ──hash──► decode, re-slice ──► the pool

Ids from `num_blocks` on are buffers, each of its own size, which exist while they hold something. Blocks of the pool
itself are passed through. The pool is written in `land` alone, so after a cancel nothing is on its way into it (I5).

Used by one thread, the worker's I/O thread. Must not know transfers or transports.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.layout import DTYPE_BYTES, KVLayout
from kv_transfer.base import BlockMemory, StagedMemory
from kv_transfer.wire_encoding import decode, encode
from kv_transfer.wire_format import Encoding, Landing, WireFormat, common_heads, padding, pieces, reslice

MAX_SPARE_BYTES = 64 << 20
"""Of buffers that are kept for later use."""


class WireBlocks:
    """`BlockMemory` over a pool whose blocks are of `layout`; `encoding` is what `encode` makes of them."""

    def __init__(self, pool: BlockMemory, layout: KVLayout, encoding: Encoding = "plain"):
        self.num_blocks, self.block_bytes = pool.num_blocks, pool.block_bytes
        self.format = WireFormat(layout, encoding)
        """In which this worker ships."""
        self._pool = pool
        self._layout = layout
        self._ids = itertools.count(pool.num_blocks)
        self._sizes: dict[int, int] = {}
        """Bytes, by buffer id, of all that are open."""
        self._buffers: dict[int, npt.NDArray[np.uint8]] = {}
        """Made when they are first asked for: what is only announced takes no memory."""
        self._spare: defaultdict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)
        self._spare_bytes = 0

    @property
    def num_open(self) -> int:
        """Buffers in use, those without memory yet included."""
        return len(self._sizes)

    def block(self, block_id: int) -> npt.NDArray[np.uint8]:
        """See `BlockMemory.block`; a buffer has the size of what it is for. KeyError for one that is not open."""
        if block_id < self.num_blocks:
            return self._pool.block(block_id)
        buffer = self._buffers.get(block_id)
        if buffer is None:
            size = self._sizes[block_id]
            if self._spare[size]:
                buffer = self._spare[size].pop()
                self._spare_bytes -= size
            else:
                buffer = np.empty(size, dtype=np.uint8)
            self._buffers[block_id] = buffer
        return buffer

    def open(self, count: int, size: int) -> list[int]:
        """Ids of `count` buffers of `size` bytes, until `close`."""
        ids = list(itertools.islice(self._ids, count))
        self._sizes.update(dict.fromkeys(ids, size))
        return ids

    def close(self, ids: Iterable[int]) -> None:
        """Nothing reads or writes these buffers any more."""
        for block_id in ids:
            size = self._sizes.pop(block_id)
            buffer = self._buffers.pop(block_id, None)
            if buffer is not None and self._spare_bytes + size <= MAX_SPARE_BYTES:
                self._spare[size].append(buffer)
                self._spare_bytes += size

    def encode(self, block_ids: Sequence[int]) -> list[int]:
        """Blocks of the pool in the format of this worker: ids of their buffers, in order."""
        buffers = self.open(len(block_ids), self.format.block_bytes)
        for block_id, buffer in zip(block_ids, buffers, strict=True):
            encode(self._pool.block(block_id), self._layout, self.format.encoding, self.block(buffer))
        return buffers

    def land(self, landing: Landing, arrived: Mapping[int, int]) -> None:
        """Write what has come, buffer id by index, where it belongs in the pool; complete on return."""
        if isinstance(self._pool, StagedMemory):
            with self._pool.writing() as tensor:
                for index, buffer in arrived.items():
                    numbers = torch.from_numpy(self._numbers(landing.format, buffer)).view(tensor.dtype)
                    self._scatter(landing, index, numbers.to(tensor.device), tensor)
            return
        for index, buffer in arrived.items():
            self._scatter(landing, index, self._numbers(landing.format, buffer), None)

    def _scatter(self, landing: Landing, index: int, source: Any, tensor: torch.Tensor | None) -> None:
        """`tensor`: the pool; None: it is reached by `BlockMemory.block`."""
        sizes = landing.format.layout.block_size, self._layout.block_size
        parts = pieces(index, *sizes, landing.num_context, landing.first_token)
        rest = padding(index, *sizes, landing.num_context) if parts else None
        places = {part.place for part in parts} | ({rest[0]} if rest is not None else set())
        targets = {place: self._target(landing.blocks[place], tensor) for place in places}
        heads = common_heads(range(landing.format.layout.num_kv_heads), range(self._layout.num_kv_heads))
        assert heads is not None
        reslice(source, targets, parts, rest, heads)

    def _target(self, block_id: int, tensor: torch.Tensor | None) -> Any:
        if tensor is not None:
            return tensor[block_id]
        return _integers(self._pool.block(block_id), self._layout)

    def _numbers(self, format: WireFormat, buffer: int) -> npt.NDArray[Any]:
        """What a buffer holds, shape `[layers, 2, kv_heads, block_size, head_dim]`."""
        data = self.block(buffer)
        if format.encoding == "plain":
            return _integers(data, format.layout)
        return decode(data, format.layout, format.encoding)


def _integers(block: npt.NDArray[np.uint8], layout: KVLayout) -> npt.NDArray[Any]:
    """The block in its shape, its numbers seen as integers: what is only moved need not be a dtype that NumPy has."""
    return block.view(f"i{DTYPE_BYTES[layout.dtype]}").reshape(layout.block_shape)
