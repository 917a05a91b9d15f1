"""Block tables as the kernels take them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.engine.attention import AttentionBatch


def block_tables(batch: AttentionBatch) -> npt.NDArray[np.int32]:
    """`[n, width]`, short tables padded with 0."""
    tables = np.zeros((len(batch.blocks), max(map(len, batch.blocks), default=0)), dtype=np.int32)
    for row, blocks in zip(tables, batch.blocks, strict=True):
        row[: len(blocks)] = blocks
    return tables
