"""Block tables as index arrays: which blocks, back to back, and where each row of a step goes. Pure numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.engine.attention import AttentionBatch

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PagedTables:
    """A batch's block tables in compressed rows, as FlashInfer takes them; all arrays int32."""

    row_indptr: Int32s
    """`[n + 1]`: sequence i has the packed rows `[row_indptr[i], row_indptr[i + 1])`."""
    indptr: Int32s
    """`[n + 1]`: and the blocks `indices[indptr[i]:indptr[i + 1]]`, just enough for its last row."""
    indices: Int32s
    last_lengths: Int32s
    """`[n]`: tokens in each last block, this step's included; 1 to the block size."""

    @classmethod
    def of(cls, batch: AttentionBatch, block_size: int) -> PagedTables:
        lengths = np.asarray(batch.lengths, dtype=np.int32)
        ends = np.asarray(batch.starts, dtype=np.int32) + lengths
        counts = -(-ends // block_size)
        indices = np.concatenate(
            [np.asarray(blocks[:count], np.int32) for blocks, count in zip(batch.blocks, counts, strict=True)]
        )
        return cls(_indptr(lengths), _indptr(counts), indices, (ends - 1) % block_size + 1)

    def row_places(self, starts: npt.ArrayLike) -> tuple[Int32s, Int32s]:
        """`[rows]` each: which sequence a row belongs to, and its position in it. `starts`: as the batch's."""
        lengths = np.diff(self.row_indptr)
        sequences = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        shift = np.asarray(starts, np.int32) - self.row_indptr[:-1]
        return sequences, np.arange(self.row_indptr[-1], dtype=np.int32) + shift[sequences]


def begun_blocks(batch: AttentionBatch, block_size: int) -> list[int]:
    """Blocks that this step begins and does not fill: their owner clears them, see `KVCache`."""
    begun = []
    for start, length, blocks in zip(batch.starts, batch.lengths, batch.blocks, strict=True):
        last, filled = divmod(start + length, block_size)
        if filled and start <= last * block_size:
            begun.append(blocks[last])
    return list(dict.fromkeys(begun))  # rows that fill up a batch share one


def _indptr(counts: Int32s) -> Int32s:
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums
