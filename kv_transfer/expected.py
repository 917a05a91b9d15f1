"""What a transport may write into the pool, and what it has counted. Pure; shared by transports that push."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.protocol import TransferId


class TransportStats(msgspec.Struct):
    """Counted since the transport was opened."""

    num_dropped: int = 0
    """Blocks that came for a transfer or an index that was not announced, or no more, or a second time."""
    num_malformed: int = 0
    """Messages that no transport of this release sends."""
    blocks_written: int = 0
    blocks_shipped: int = 0


class ExpectedBlocks:
    """Blocks announced by `receive` and not yet written. Each can be claimed once, so a repeated frame finds none."""

    def __init__(self) -> None:
        self._blocks: dict[TransferId, dict[int, int]] = {}

    def announce(self, transfer: TransferId, blocks: Sequence[tuple[int, int]]) -> None:
        if blocks:
            self._blocks.setdefault(transfer, {}).update(blocks)

    def claim(self, transfer: TransferId, index: int) -> int | None:
        """The block id to write index `index` to, or None: it must be dropped."""
        blocks = self._blocks.get(transfer)
        if blocks is None:
            return None
        block = blocks.pop(index, None)
        if not blocks:
            del self._blocks[transfer]
        return block

    def claim_all(self, transfer: TransferId, indices: Sequence[int]) -> list[int]:
        """Claim each of these; those that could be claimed."""
        blocks = self._blocks.get(transfer)
        if blocks is None:
            return []
        if len(blocks) == len(indices) and blocks.keys() == set(indices):
            del self._blocks[transfer]
            return list(indices)
        return [index for index in indices if self.claim(transfer, index) is not None]

    def find(self, transfer: TransferId, index: int) -> int | None:
        """As `claim`, which can still be called after it."""
        return self._blocks.get(transfer, {}).get(index)

    def cancel(self, transfer: TransferId) -> None:
        self._blocks.pop(transfer, None)

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))
