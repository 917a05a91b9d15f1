"""A KV pool on a GPU as transports see it: blocks pass through pinned host memory.

    ship      pool ──copy──► host copy ──hash──► transport, until nothing reads the copy any more
    receive   transport ──► host copy ──hash──► pool

Implements `kv_transfer.base.StagedMemory`. Used by one thread, the worker's I/O thread, which waits for each copy, so:

* what is shipped is complete: the copy waits for the event behind the last step that had ended (`KVCache.written`);
* what is received is in the pool before anybody hears of it, and after a cancel nothing is on its way there: a
  transport writes host memory only, and the pool is written in `store` alone (I5);
* and it lands after the kernels of that step, which may still have been writing for the block's former owner.

Copies run on a stream of their own: they wait for steps that have ended, not for the one that runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.kv_cache import KVCache

SLAB_BYTES = 32 << 20
"""Host memory is pinned in pieces of this size, at least a block, as more copies exist at once; none is given back."""

HostCopy = torch.Tensor
"""`[block_bytes]` uint8 in host memory."""


class StagedBlocks:
    """The `StagedMemory` of a pool. On a CPU pool it works as well, with plain copies."""

    def __init__(self, kv_cache: KVCache):
        self.num_blocks = kv_cache.num_blocks
        self.block_bytes = kv_cache.block_bytes
        self._kv_cache = kv_cache
        on_gpu = kv_cache.device.type == "cuda"
        self._stream = torch.cuda.Stream(kv_cache.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._free: list[HostCopy] = []
        self._open: dict[int, HostCopy] = {}
        """By block: what `block` shows until `close_views`."""
        self._fetched: set[int] = set()
        """Blocks of `_open` that belong to who called `fetch`."""
        self.num_slots = 0
        """Host copies that have ever existed at once."""

    def block(self, block_id: int) -> npt.NDArray[np.uint8]:
        """See `BlockMemory.block`: the host copy that `fetch` made, else a new one, to be written and stored."""
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} is not in a pool of {self.num_blocks}")
        if block_id not in self._open:
            self._open[block_id] = self._take()
        view: npt.NDArray[np.uint8] = self._open[block_id].numpy()
        return view

    def fetch(self, block_ids: Sequence[int]) -> list[HostCopy]:
        """See `StagedMemory.fetch`. Each call makes copies of its own: what a block holds later is another's."""
        copies = [self._take() for _ in block_ids]
        self._copy((copy, self._kv_cache.block_tensor(b)) for b, copy in zip(block_ids, copies, strict=True))
        self._open.update(zip(block_ids, copies, strict=True))
        self._fetched.update(block_ids)
        return copies

    def release(self, copies: Iterable[HostCopy]) -> None:
        """See `StagedMemory.release`."""
        self._free.extend(copies)

    def store(self, block_ids: Sequence[int]) -> None:
        """See `StagedMemory.store`."""
        self._copy((self._kv_cache.block_tensor(b), self._open[b]) for b in block_ids)

    @contextlib.contextmanager
    def writing(self) -> Iterator[torch.Tensor]:
        """See `StagedMemory.writing`."""
        if self._stream is None:
            yield self._kv_cache.tensor
            return
        with torch.cuda.stream(self._stream):
            if (written := self._kv_cache.written) is not None:
                self._stream.wait_event(written)
            yield self._kv_cache.tensor
        self._stream.synchronize()

    def close_views(self) -> None:
        """See `StagedMemory.close_views`."""
        self._free.extend(copy for block, copy in self._open.items() if block not in self._fetched)
        self._open.clear()
        self._fetched.clear()

    def _copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each (target, source); complete on return."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            if (written := self._kv_cache.written) is not None:
                self._stream.wait_event(written)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def _take(self) -> HostCopy:
        if not self._free:
            count = max(1, SLAB_BYTES // self.block_bytes)
            pin: dict[str, Any] = {"pin_memory": self._stream is not None}
            slab = torch.empty(count, self.block_bytes, dtype=torch.uint8, **pin)
            self._free.extend(slab.unbind())
            self.num_slots += count
        return self._free.pop()
