"""Which KV blocks are free, how often the others are held, and what those that may be reused contain.

Knows ids, counts and keys only; who holds which block, and what a key means, is `baton.engine.block_tables`' to know.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from baton.engine.prefix_log import PrefixLog


class BlockPool:
    """Hands out block ids `0 .. num_blocks - 1`. Each is in one of three states (I3):

        free ──allocate──► held (`refs` > 0) ──free──► free, or cached if it is registered
                             ▲──share──────── cached ──allocate──► held anew, its registration dropped

    A cached block has no holder and keeps its content until no free block is left; then those that were held the
    longest time ago go first, and of the blocks that are freed together the last.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        """Holders by block id."""
        self.lives = [0] * num_blocks
        """How often each block was given out for new content."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Registered blocks without a holder, in the order in which they are given away."""
        self._keys: list[tuple[bytes, ...]] = [()] * num_blocks
        """What each block is registered as."""
        self._by_key: dict[bytes, int] = {}
        self.log: PrefixLog | None = None
        """Told of every key that comes or goes."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, the cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content is still known."""
        return len(self._cached)

    # --- holding --------------------------------------------------------------------------------

    def allocate(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` ids, or None if fewer are free: all or nothing, so that no two can wait for each other."""
        assert num_blocks >= 0, f"{num_blocks} blocks asked for"
        if num_blocks == 1 and self._free:
            block = self._free.pop()
            self.refs[block] = 1
            self.lives[block] += 1
            return [block]
        if num_blocks > self.num_free:
            return None
        if num_blocks == 0:
            return []
        blocks = self._free[: -num_blocks - 1 : -1]  # in the order of single ones, which keeps neighbours together
        del self._free[-num_blocks:]
        while len(blocks) < num_blocks:
            block, _ = self._cached.popitem(last=False)
            self.forget(block)
            blocks.append(block)
        refs, lives = self.refs, self.lives
        for block in blocks:
            refs[block] = 1
            lives[block] += 1
        return blocks

    def share(self, block: int) -> None:
        """One more holder of a registered block."""
        if self.refs[block] == 0:
            del self._cached[block]
        assert self._keys[block], f"block {block} has no known content"
        self.refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One holder less of each. The last of them is the first to be given away: a chain goes from its end."""
        refs, keys, free = self.refs, self._keys, self._free
        for block in reversed(blocks):
            left = refs[block] - 1
            assert left >= 0, f"block {block} freed twice"
            refs[block] = left
            if left == 0:
                if keys[block]:
                    self._cached[block] = None
                else:
                    free.append(block)

    def num_unheld(self, blocks: Sequence[int]) -> int:
        """How many of them count as free now, and would not if they were shared."""
        return sum(self.refs[block] == 0 for block in blocks)

    # --- content --------------------------------------------------------------------------------

    def register(self, block: int, key: bytes) -> None:
        """The held block contains what `key` says. Where another block does already, that one stays the one."""
        assert self.refs[block] > 0, f"block {block} has no holder"
        by_key = self._by_key
        if key not in by_key:
            by_key[key] = block
            if self.log is not None:
                self.log.note(key, True)
            known = self._keys[block]
            self._keys[block] = (*known, key) if known else (key,)

    def find(self, key: bytes) -> int | None:
        """The block that contains this, held or cached."""
        return self._by_key.get(key)

    def keys_of(self, block: int) -> tuple[bytes, ...]:
        return self._keys[block]

    def forget(self, block: int) -> None:
        """Drop what the block, which is not a cached one, is registered as. Its holders keep it."""
        assert block not in self._cached
        for key in self._keys[block]:
            del self._by_key[key]
            if self.log is not None:
                self.log.note(key, False)
        self._keys[block] = ()

    def all_keys(self) -> Iterable[bytes]:
        """Whatever can be found."""
        return self._by_key.keys()

    # --- audit ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that each block is free, cached or held, and that keys and blocks agree."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free) and free.isdisjoint(cached)
        for block, (refs, keys) in enumerate(zip(self.refs, self._keys, strict=True)):
            assert (refs > 0) + (block in free) + (block in cached) == 1, f"block {block} has {refs} holders"
            assert keys or block not in cached, f"block {block} is cached as nothing"
            assert not keys or block not in free, f"block {block} is free and registered"
            assert all(self._by_key[key] == block for key in keys)
        assert len(self._by_key) == sum(len(keys) for keys in self._keys)
