"""A KV pool that other processes read in place, as its owner lends blocks of it and as a peer reads them.

    owner   lend(block) ──► ref ──(a message)──► peer   copy(ref ...) ──► valid before and after, or torn
            give_back(block): once nobody has it, its refs are void

A ref says which block, which of its lives, and which of its lendings: each block has an epoch in a table that the
owner writes and peers see but cannot write, as they do the pool. The owner moves the epoch on before it gives a block
away; a peer looks at it before and after it copies, and a copy during which it moved counts as never made. So the
owner need not wait for a peer that stalls in the middle of a copy, and a ref to a former life reads nothing. (Idea: a
seqlock, with the reader in another process.)

    ref   | epoch, 23 bits | lending, 12 bits | block, 28 bits |      63 bits, so that it fits a signed integer

The lending counts how often the block was lent. It is not looked at by who copies: it makes the ref of a block that is
lent again another one, while other transfers still lend the block and its epoch stays. So a target can tell a block
that it is to fetch once more from a message that it hears once more.

The second look must not be done before the copy is. x86 keeps loads in order; elsewhere the locks which numpy
takes behind a copy do.

How the pool itself is reached is a subclass's: `LentPool` and `BorrowedPool` are for shared memory of the host, the
other transports that pull have their own. Knows memory, blocks and refs; must not know transfers or sockets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from baton.host_memory import HostMemory, map_read_only
from kv_transfer.base import BlockMemory, Write
from kv_transfer.checksum import copy_bytes

MAX_SHARED_BLOCKS = 1 << 28
LENDINGS = 1 << 12
"""They count modulo this. A block would have to be lent to others so often before it is lent anew over a new link."""
EPOCHS = 1 << 23
"""They count modulo this. A ref would have to be as many lives of its block late to be mistaken."""


def block_of(ref: int) -> int:
    """In the owner's pool; not necessarily one that the pool has."""
    return ref % MAX_SHARED_BLOCKS


def epoch_of(ref: int) -> int:
    """What the table must say of the block."""
    return ref // (MAX_SHARED_BLOCKS * LENDINGS)


@runtime_checkable
class SharedBlocks(BlockMemory, Protocol):
    """A pool in `HostMemory`: block `i` is the `block_bytes` bytes at `i * block_bytes`."""

    host_memory: HostMemory


class Fetch(msgspec.Struct, frozen=True):
    """One block to be copied."""

    index: int
    """In its transfer."""
    ref: int
    block: int
    """In the reader's pool."""


class LentBlocks:
    """The owner's side: which blocks are lent, in which life. Raises MemoryError where there is none for the table.

    `shared`: the table is a file that other processes can map.
    """

    def __init__(self, pool: BlockMemory, *, shared: bool = True):
        assert pool.num_blocks < MAX_SHARED_BLOCKS, f"{pool.num_blocks} blocks are more than refs can name"
        self.num_blocks, self.block_bytes = pool.num_blocks, pool.block_bytes
        self.table = HostMemory(8 * pool.num_blocks, shared=shared)
        """The epoch of each block, 8 bytes in the machine's order."""
        self._epochs = self.table.array.data.cast("Q")  # faster than NumPy, one by one
        self._lent: Counter[int] = Counter()
        """How often each block is lent now."""
        self._lendings = memoryview(bytearray(2 * pool.num_blocks)).cast("H")
        """How often each block was ever lent, modulo `LENDINGS`."""

    def lend(self, block: int) -> int:
        """A ref by which peers may read the block until it was given back as often as it was lent.

        Each call gives another ref.
        """
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} is not in a pool of {self.num_blocks}")
        self._lent[block] += 1
        self._lendings[block] = lending = (self._lendings[block] + 1) % LENDINGS
        return (self._epochs[block] * LENDINGS + lending) * MAX_SHARED_BLOCKS + block

    def give_back(self, block: int) -> None:
        """A reader is done, or is to be kept out. Its owner may write the block again once this was the last one."""
        self._lent[block] -= 1
        if not self._lent[block]:
            del self._lent[block]
            self._epochs[block] = (self._epochs[block] + 1) % EPOCHS

    def num_lent(self) -> int:
        """Blocks that peers may read now."""
        return len(self._lent)


class LentPool(LentBlocks):
    """The owner's side of a pool in shared memory: `pool.host_memory` must be shared."""

    def __init__(self, pool: SharedBlocks):
        assert pool.host_memory.fd is not None, "the pool's memory is private"
        super().__init__(pool)
        self._pool = pool

    @property
    def fds(self) -> tuple[int, int]:
        """Files of the pool and of the table, for `BorrowedPool`."""
        pool, table = self._pool.host_memory.fd, self.table.fd
        assert pool is not None and table is not None
        return pool, table


Target = TypeVar("Target", contravariant=True)
"""The reader's pool, as the kind of memory needs it to write there."""


class BorrowedBlocks(Generic[Target]):
    """The reader's side: the table, mapped read-only until this object goes, and a pool that a subclass reaches.

    `table_fd` may be closed afterwards. Raises ValueError if it is not what it should be.
    """

    def __init__(self, table_fd: int, num_blocks: int, block_bytes: int):
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self._epochs = map_read_only(table_fd, 8 * num_blocks).view(np.int64)

    def copy(self, fetches: Sequence[Fetch], target: Target) -> list[int]:
        """Copy blocks into `target`, the reader's whole pool; returns the indices that were copied whole.

        Neighbours in both pools are one copy; what is left out was lent no more.
        """
        count = len(fetches)
        lives, blocks = np.divmod(np.fromiter([f.ref for f in fetches], dtype=np.int64, count=count), MAX_SHARED_BLOCKS)
        here = np.fromiter([f.block for f in fetches], dtype=np.int64, count=count)
        lives //= LENDINGS
        valid = blocks < self.num_blocks
        if not valid.all():
            blocks[~valid] = 0
        valid &= self._epochs[blocks] == lives
        is_new = (np.diff(blocks, prepend=-2) != 1) | (np.diff(here, prepend=-2) != 1)
        is_new[1:] |= valid[1:] != valid[:-1]
        starts = np.flatnonzero(is_new)
        lengths = np.diff(starts, append=count)
        try:
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                if valid[start]:
                    self._copy_run(int(blocks[start]), int(here[start]), length, target)
        finally:
            self._wait()
        valid &= self._epochs[blocks] == lives
        if valid.all():
            return [fetch.index for fetch in fetches]
        return [fetch.index for fetch, is_valid in zip(fetches, valid.tolist(), strict=True) if is_valid]

    def _copy_run(self, source: int, block: int, count: int, target: Target) -> None:
        """Copy `count` neighbours, from `source` on there to `block` on here; complete when `_wait` returns."""
        raise NotImplementedError

    def _wait(self) -> None:
        """Until all copies are complete, so that the look at the table that follows comes after them."""

    def close(self) -> None:
        """Nothing is read from here any more."""


class OwnMemory(NamedTuple):
    """Where a `BorrowedPool` copies to."""

    array: npt.NDArray[np.uint8]
    """The reader's pool, all of it."""
    write: Write | None
    """None: it is only copied, neighbours at once."""


class BorrowedPool(BorrowedBlocks[OwnMemory]):
    """Another process's pool in shared memory, mapped read-only until this object goes.

    `fds` as in `LentPool.fds`; they may be closed afterwards. Raises ValueError if they are not what they should be.
    """

    def __init__(self, fds: Sequence[int], num_blocks: int, block_bytes: int):
        pool_fd, table_fd = fds
        super().__init__(table_fd, num_blocks, block_bytes)
        self._memory = map_read_only(pool_fd, num_blocks * block_bytes)

    def _copy_run(self, source: int, block: int, count: int, target: OwnMemory) -> None:
        size = self.block_bytes
        data = self._memory[source * size :][: count * size]
        if target.write is None:
            copy_bytes(target.array[block * size :][: count * size], data)
            return
        for i in range(count):
            target.write(block + i, data[i * size :][:size])
