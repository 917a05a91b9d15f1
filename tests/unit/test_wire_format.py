"""Which part of which local block a wire block is: against a reference that goes token by token."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.layout import KVLayout
from kv_transfer.wire_format import WireFormat, common_heads, padding, pieces, reslice

LAYERS, HEADS, HEAD_DIM = 2, 4, 3
UNTOUCHED = -1.0
SIZES = [(16, 32), (32, 16), (8, 24), (24, 8), (16, 24), (24, 16), (16, 16), (1, 5), (5, 1)]

Array = npt.NDArray[np.float32]


def kv_of(num_tokens: int) -> Array:
    """`[layers, 2, heads, tokens, head_dim]`, every number another one."""
    shape = (LAYERS, 2, HEADS, num_tokens, HEAD_DIM)
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


def in_blocks(kv: Array, size: int, heads: range) -> list[Array]:
    """As a worker holds it that has these heads; what follows the last token is not a number."""
    blocks = []
    for start in range(0, kv.shape[3], size):
        block = np.full((LAYERS, 2, len(heads), size, HEAD_DIM), np.nan, dtype=np.float32)
        part = kv[:, :, heads.start : heads.stop, start : start + size]
        block[:, :, :, : part.shape[3]] = part
        blocks.append(block)
    return blocks


def moved(wire: list[Array], size: int, num_tokens: int, first: int, sent: int, *shards: range) -> list[Array]:
    """Local blocks of `size`, after wire blocks from index `sent` on have come. `shards`: heads there, heads here."""
    theirs, ours = shards
    wire_size = wire[0].shape[3]
    shape = (LAYERS, 2, len(ours), size, HEAD_DIM)
    local = [np.full(shape, UNTOUCHED, dtype=np.float32) for _ in range(-(-num_tokens // size))]
    heads = common_heads(theirs, ours)
    for index in range(sent, len(wire)) if heads is not None else ():
        assert heads is not None
        parts = pieces(index, wire_size, size, num_tokens, first)
        rest = padding(index, wire_size, size, num_tokens) if parts else None
        reslice(wire[index], dict(enumerate(local)), parts, rest, heads)
    return local


def one_by_one(kv: Array, size: int, first: int, heads: range) -> list[Array]:
    """What must be in the local blocks, token by token."""
    num_tokens = kv.shape[3]
    local = []
    for place in range(-(-num_tokens // size)):
        block = np.full((LAYERS, 2, len(heads), size, HEAD_DIM), UNTOUCHED, dtype=np.float32)
        for position in range(size):
            token = place * size + position
            for mine, head in enumerate(heads):
                if token >= num_tokens:
                    block[:, :, mine, position] = 0
                elif token >= first:
                    block[:, :, mine, position] = kv[:, :, head, token]
        local.append(block)
    return local


def check(wire_size: int, size: int, num_tokens: int, first: int, theirs: range, ours: range) -> None:
    kv = kv_of(num_tokens)
    local = moved(in_blocks(kv, wire_size, theirs), size, num_tokens, first, first // wire_size, theirs, ours)
    expected = one_by_one(kv, size, first, ours)
    if first == num_tokens and num_tokens % size:
        expected[-1][...] = UNTOUCHED  # all is here: nothing moves, and nothing is written
    for place, (got, wanted) in enumerate(zip(local, expected, strict=True)):
        np.testing.assert_array_equal(got, wanted, err_msg=f"local block {place}")


@pytest.mark.parametrize(("wire_size", "size"), SIZES)
def test_every_boundary(wire_size: int, size: int) -> None:
    """Contexts and prefixes that end at, before and behind every boundary of either side."""
    every = range(HEADS)
    lengths = {k * b + d for b in (wire_size, size) for k in range(1, 4) for d in (-1, 0, 1)} - {0}
    for num_tokens in sorted(lengths):
        for first in {0, *range(0, num_tokens, size), num_tokens}:
            check(wire_size, size, num_tokens, first, every, every)


@pytest.mark.parametrize(("degree", "other"), [*itertools.product((1, 2, 4), repeat=2)])
@pytest.mark.parametrize(("wire_size", "size"), [(16, 16), (16, 24), (8, 4)])
def test_tensor_parallel_shards(degree: int, other: int, wire_size: int, size: int) -> None:
    """`degree` ranks there, each with its heads in blocks of its own, `other` ranks here: each gets its heads whole."""
    num_tokens, first = 37, size
    kv = kv_of(num_tokens)
    there = [range(HEADS * r // degree, HEADS * (r + 1) // degree) for r in range(degree)]
    for rank in range(other):
        ours = range(HEADS * rank // other, HEADS * (rank + 1) // other)
        got = [np.full((LAYERS, 2, len(ours), size, HEAD_DIM), UNTOUCHED, np.float32) for _ in range(-(-37 // size))]
        for theirs in there:
            came = moved(in_blocks(kv, wire_size, theirs), size, num_tokens, first, first // wire_size, theirs, ours)
            for mine, block in zip(got, came, strict=True):
                written = block != UNTOUCHED
                assert (mine[written] == UNTOUCHED).all(), "two shards wrote the same heads"
                mine[written] = block[written]
        for block, wanted in zip(got, one_by_one(kv, size, first, ours), strict=True):
            np.testing.assert_array_equal(block, wanted)


def test_shards_without_a_head_in_common() -> None:
    assert common_heads(range(2), range(2, 4)) is None
    assert common_heads(range(4), range(1, 3)) == (slice(1, 3), slice(0, 2))


@settings(max_examples=80, deadline=None)
@given(data=st.data(), wire_size=st.integers(1, 40), size=st.integers(1, 40), num_tokens=st.integers(1, 130))
def test_any_sizes(data: st.DataObject, wire_size: int, size: int, num_tokens: int) -> None:
    first = data.draw(st.sampled_from([*range(0, num_tokens, size), num_tokens]))
    bounds = st.lists(st.integers(0, HEADS), min_size=2, max_size=2, unique=True).map(sorted)
    a, b = data.draw(bounds)
    c, d = data.draw(st.tuples(st.integers(a, b - 1), st.integers(a + 1, b)).filter(lambda p: p[0] < p[1]))
    check(wire_size, size, num_tokens, first, range(a, b), range(c, d))


@settings(max_examples=150, deadline=None)
@given(wire_size=st.integers(1, 40), size=st.integers(1, 40), num_tokens=st.integers(1, 200), first=st.integers(0, 200))
def test_every_token_goes_once(wire_size: int, size: int, num_tokens: int, first: int) -> None:
    seen = []
    for index in range(-(-num_tokens // wire_size)):
        for place, source, target in pieces(index, wire_size, size, num_tokens, first):
            assert 0 <= target.start < target.stop <= size and 0 <= source.start < source.stop <= wire_size
            tokens = range(index * wire_size + source.start, index * wire_size + source.stop)
            assert tokens == range(place * size + target.start, place * size + target.stop)
            seen += tokens
    assert seen == list(range(first, num_tokens))


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_bytes_on_the_wire(dtype: str, size: int) -> None:
    layout = KVLayout(30, 3, 16, 64, dtype)  # type: ignore[arg-type]
    numbers = 30 * 2 * 3 * 16 * 64
    assert WireFormat(layout).block_bytes == numbers * size == layout.block_bytes
    for encoding in ("int8", "fp8"):
        assert WireFormat(layout, encoding).block_bytes == numbers + 30 * 2 * 3 * 4  # type: ignore[arg-type]
