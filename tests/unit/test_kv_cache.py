"""The pool's three views are the same memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from baton.engine.kv_cache import KVCache
from baton.errors import ConfigError
from baton.layout import KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_and_layer_views_share_memory(dtype: str) -> None:
    cache = KVCache(KVLayout(3, 2, 4, 8, dtype), 5)
    keys, values = cache.layer(1)
    assert keys.shape == values.shape == (5, 2, 4, 8)
    keys[2, 1, 3] = 7.0
    assert cache.tensor[2, 1, 0, 1, 3].tolist() == [7.0] * 8
    cache.block(4)[:] = cache.block(2)
    assert cache.layer(1)[0][4, 1, 3].tolist() == [7.0] * 8
    assert torch.count_nonzero(cache.tensor) == 16


def test_a_block_is_one_span_of_block_bytes() -> None:
    cache = KVCache(LAYOUT, 4)
    blocks = [cache.block(i) for i in range(4)]
    assert cache.block_bytes == LAYOUT.block_bytes == 3 * 2 * 2 * 4 * 8 * 4
    assert all(b.shape == (cache.block_bytes,) and b.flags.c_contiguous and b.flags.writeable for b in blocks)
    addresses = [b.ctypes.data for b in blocks]
    assert [b - a for a, b in itertools.pairwise(addresses)] == [cache.block_bytes] * 3
    assert addresses[0] % 64 == 0


def test_starts_as_zeros_and_clears() -> None:
    cache = KVCache(LAYOUT, 3)
    assert not cache.tensor.any()
    cache.block(1)[:] = 255  # NaNs
    cache.block(2)[:] = 1
    cache.clear([1])
    assert not cache.block(1).any()
    assert cache.block(2).all()


def test_copy() -> None:
    cache = KVCache(LAYOUT, 3)
    cache.block(0)[:] = 7
    cache.copy(0, 2)
    cache.block(0)[:] = 1
    assert (cache.block(2) == 7).all()
    assert not cache.block(1).any()


@pytest.mark.parametrize("block_id", [-1, 3])
def test_block_outside_the_pool(block_id: int) -> None:
    with pytest.raises(IndexError, match=f"block {block_id} is not in a pool of 3"):
        KVCache(LAYOUT, 3).block(block_id)


def test_a_pool_needs_a_block_and_memory() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        KVCache(LAYOUT, 0)
    with pytest.raises(ConfigError, match="cannot be allocated"):
        KVCache(LAYOUT, 1 << 45)
