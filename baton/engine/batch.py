"""One step's rows, packed: what a model computes. Plain arrays, no requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.engine.attention import AttentionBatch

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Rows of any mix of sequences, sequence after sequence."""

    sequences: AttentionBatch
    tokens: Indices
    """`[rows]`: token ids."""
    logits_rows: Indices
    """`[n]`: the rows whose logits are wanted."""

    @property
    def positions(self) -> Indices:
        """`[rows]`: each row's position in its sequence."""
        lengths = np.asarray(self.sequences.lengths, dtype=np.int64)
        ends = np.cumsum(lengths)
        shift = np.asarray(self.sequences.starts, dtype=np.int64) - (ends - lengths)
        positions: Indices = np.arange(len(self.tokens)) + np.repeat(shift, lengths)
        return positions
