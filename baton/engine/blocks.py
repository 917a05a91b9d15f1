"""Which KV blocks are free. Knows ids only; who holds which block is the engine core's to know."""

from __future__ import annotations


class BlockPool:
    """Hands out block ids `0 .. num_blocks - 1`; each is held by exactly one owner or free (I3)."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` ids, or None if fewer are free: all or nothing, so that no two can wait for each other."""
        if num_blocks > len(self._free):
            return None
        if num_blocks == 0:
            return []
        blocks = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        for block in blocks:
            self._is_free[block] = 0
        return blocks

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            assert not self._is_free[block], f"block {block} freed twice"
            self._is_free[block] = 1
        self._free.extend(blocks)
