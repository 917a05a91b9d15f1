"""BlockPool: states of a block, counts of holders, what is remembered and what is given away first."""

from __future__ import annotations

import pytest

from baton.engine.blocks import BlockPool


def held(pool: BlockPool, count: int, *names: str) -> list[int]:
    """So many blocks, the first ones registered by these names."""
    blocks = pool.allocate(count)
    assert blocks is not None
    for block, name in zip(blocks, names, strict=False):
        pool.register(block, name.encode())
    pool.check_integrity()
    return blocks


def cached(pool: BlockPool, *names: str) -> list[str]:
    return [name for name in names if pool.find(name.encode()) is not None]


def test_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.allocate(0) == []
    assert len(held(pool, 3)) == 3
    assert pool.allocate(1) is None


def test_a_registered_block_stays_when_nobody_holds_it_and_counts_as_free() -> None:
    pool = BlockPool(4)
    blocks = held(pool, 3, "a", "b")
    pool.free(blocks)
    pool.check_integrity()
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.find(b"a") == blocks[0]
    pool.share(blocks[0])
    assert (pool.num_free, pool.num_cached) == (3, 1)
    pool.share(blocks[0])
    pool.free([blocks[0]])
    assert pool.num_free == 3, "it still has a holder"
    pool.free([blocks[0]])
    assert (pool.num_free, pool.num_cached) == (4, 2)


def test_free_blocks_go_first_and_then_what_was_not_held_for_longest_each_chain_from_its_end() -> None:
    pool = BlockPool(7)
    old, new = held(pool, 3, "a0", "a1", "a2"), held(pool, 3, "b0", "b1", "b2")
    pool.free(old)
    pool.free(new)
    names = ("a0", "a1", "a2", "b0", "b1", "b2")
    gone = []
    for _ in range(7):
        held(pool, 1)
        gone.append(cached(pool, *names))
    assert gone == [
        ["a0", "a1", "a2", "b0", "b1", "b2"],
        ["a0", "a1", "b0", "b1", "b2"],
        ["a0", "b0", "b1", "b2"],
        ["b0", "b1", "b2"],
        ["b0", "b1"],
        ["b0"],
        [],
    ]


def test_a_hit_makes_a_block_young_again() -> None:
    pool = BlockPool(2)
    a, b = held(pool, 2, "a", "b")
    pool.free([a])
    pool.free([b])
    pool.share(a)
    pool.free([a])
    held(pool, 1)
    assert cached(pool, "a", "b") == ["a"]


def test_a_block_may_be_known_by_several_keys_and_loses_all_of_them_when_it_is_reused() -> None:
    pool = BlockPool(1)
    (block,) = held(pool, 1, "tail")
    pool.register(block, b"full")
    pool.register(block, b"full")
    assert pool.keys_of(block) == (b"tail", b"full")
    pool.free([block])
    held(pool, 1)
    assert cached(pool, "tail", "full") == []


def test_the_first_block_with_a_content_stays_the_one_that_is_found() -> None:
    pool = BlockPool(2)
    first, second = held(pool, 2, "a", "a")
    assert pool.find(b"a") == first
    pool.free([second])
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_what_is_forgotten_is_found_no_more_and_stays_its_holders() -> None:
    pool = BlockPool(1)
    (block,) = held(pool, 1, "a")
    pool.share(block)
    pool.forget(block)
    assert cached(pool, "a") == []
    pool.free([block])
    pool.check_integrity()
    assert pool.num_free == 0
    pool.free([block])
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_misuse_is_noticed() -> None:
    pool = BlockPool(2)
    (block,) = held(pool, 1)
    with pytest.raises(AssertionError, match="no known content"):
        pool.share(block)
    pool.free([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block])
    with pytest.raises(AssertionError, match="no holder"):
        pool.register(block, b"a")
