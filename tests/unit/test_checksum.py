"""The checksum of a block that is computed while it is copied is that of the library, for every way to compute it."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from baton.engine.native.library import COPY_HASH_SHORTEST, copy_hash, plain_copy
from kv_transfer import checksum
from kv_transfer.checksum import block_checksum, copy_block, copy_bytes

SIZES = [
    *range(COPY_HASH_SHORTEST - 2, COPY_HASH_SHORTEST + 70),
    1023,
    1024,
    1025,
    1088,
    2047,
    2048,
    2049,
    4096,
    65_537,
]


@pytest.mark.parametrize("native", [True, False])
def test_copied_blocks(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if native and copy_hash() is None:
        pytest.skip("the native kernels were not built")
    if not native:
        monkeypatch.setattr(checksum, "copy_hash", lambda: None)
    noise = np.random.default_rng(1).integers(0, 256, max(SIZES) + 1, dtype=np.uint8)
    for size in (0, 1, 100, *SIZES):
        for shift in (0, 1):  # from memory that lies on no boundary, into such
            source, target = noise[shift:][:size], np.zeros(size + 65, dtype=np.uint8)
            inside = target[shift:][:size]
            expected = xxhash.xxh3_64_intdigest(source.tobytes())
            assert copy_block(inside, source) == expected == block_checksum(inside), size
            np.testing.assert_array_equal(inside, source)
            assert not target[:shift].any()
            assert not target[shift + size :].any(), "nothing is written behind the block"


@pytest.mark.parametrize("native", [True, False])
def test_copied_bytes(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if native and plain_copy() is None:
        pytest.skip("the native kernels were not built")
    if not native:
        monkeypatch.setattr(checksum, "plain_copy", lambda: None)
    noise = np.random.default_rng(1).integers(0, 256, max(SIZES) + 40, dtype=np.uint8)
    for size in (0, 1, 31, 32, 63, 64, 65, *SIZES):
        for shift in (0, 1, 31):
            source, target = noise[shift:][:size], np.zeros(size + 65, dtype=np.uint8)
            copy_bytes(target[shift:][:size], source)
            np.testing.assert_array_equal(target[shift:][:size], source)
            assert not target[:shift].any()
            assert not target[shift + size :].any(), "nothing is written behind the block"


def test_one_bit_anywhere_changes_it() -> None:
    block = np.zeros(5_000, dtype=np.uint8)
    target = np.empty_like(block)
    seen = {copy_block(target, block)}
    for place in range(0, 5_000, 97):
        block[place] ^= 1 << place % 8
        seen.add(copy_block(target, block))
        block[place] = 0
    assert len(seen) == 1 + len(range(0, 5_000, 97))


@pytest.mark.skipif(copy_hash() is None, reason="the native kernels were not built")
def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    target = np.zeros(4_000, dtype=np.uint8)
    with pytest.raises(ValueError, match="4096 bytes cannot be copied to 4000"):
        copy_block(target, np.ones(4_096, dtype=np.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        copy_block(target[:2_000], np.ones(4_000, dtype=np.uint8)[::2])
    assert not target.any()
