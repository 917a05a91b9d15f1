"""The native kernels on the KV pool against float64, for every instruction set that there is here.

All memory that no sequence owns is NaN, which would show in any result that it touched.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from baton.engine.native import ops
from tests.native.instruction_sets import (
    EMULATED,
    NATIVE,
    forget_kernels,
    use_instruction_set,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

assert ops  # registers the operators

HEAD_SIZES, GROUPS, BLOCK_SIZES = (8, 16, 64, 80, 96, 128, 256), (1, 2, 3, 4, 8, 9), (1, 7, 16, 32, 64)
KINDS: list[tuple[int | None, float | None]] = [
    (None, None),
    (1, None),
    (5, None),
    (64, None),
    (100, None),
    (1000, None),
    (None, 1.5),
    (20, 1.5),
]
"""Window and softcap."""
SEQUENCES = [(0, 1), (14, 1), (15, 1), (16, 1), (62, 1), (63, 1), (64, 1), (130, 1)]
SEQUENCES += [(0, 2), (0, 17), (0, 63), (1, 64), (60, 9), (127, 2), (50, 33)]
"""Tokens in the pool already, rows: around the ends of blocks and of the 64 positions that are taken together."""


@pytest.fixture(autouse=True, params=[*NATIVE, *EMULATED])
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernels of one instruction set, which all operators use meanwhile."""
    yield use_instruction_set(request.param, request, monkeypatch)
    forget_kernels(monkeypatch)


class Scene:
    """One layer of a pool full of NaN, and sequences whose blocks are scattered over it."""

    def __init__(
        self, sequences: list[tuple[int, int]], kv_heads: int, size: int, block_size: int, dtype: torch.dtype, seed: int
    ):
        draw = random.Random(seed)
        needs = [-(-(start + rows) // block_size) for start, rows in sequences]
        blocks = draw.sample(range(1, sum(needs) + 4), sum(needs))  # block 0, the padding of tables, is NaN too
        self.sequences, self.block_size = sequences, block_size
        self.tables = torch.zeros(len(sequences), max(needs) + 1, dtype=torch.int32)
        for i, n in enumerate(needs):
            self.tables[i, :n] = torch.tensor([blocks.pop() for _ in range(n)])
        pool = torch.full((sum(needs) + 4, 3, 2, kv_heads, block_size, size), torch.nan, dtype=dtype)
        self.keys, self.values = pool[:, 1, 0], pool[:, 1, 1]
        self.pool = pool
        self.starts = torch.tensor([start for start, _ in sequences], dtype=torch.int32)
        self.lengths = torch.tensor([rows for _, rows in sequences], dtype=torch.int32)

    def places(self, i: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks and offsets of positions [first, end) of sequence `i`."""
        positions = torch.arange(first, end)
        return self.tables[i].long()[positions // self.block_size], positions % self.block_size

    def fill(self, key: list[torch.Tensor], value: list[torch.Tensor]) -> None:
        """Sequence by sequence, `[tokens, kv_heads, size]`."""
        for i, (k, v) in enumerate(zip(key, value, strict=True)):
            blocks, offsets = self.places(i, 0, len(k))
            self.keys[blocks, :, offsets] = k.to(self.keys.dtype)
            self.values[blocks, :, offsets] = v.to(self.values.dtype)

    def attend(self, query: torch.Tensor, window: int | None, softcap: float | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.baton.paged_attention(
            query, self.keys, self.values, self.starts, self.lengths, self.tables, window, softcap
        )
        return out


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Rows `[n, heads, size]` of one sequence over `[tokens, kv_heads, size]`, in float64."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("nhd,thd->hnt", query.double(), key)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    rows, tokens = start + torch.arange(len(query))[:, None], torch.arange(len(key))
    hidden = tokens > rows
    if window is not None:
        hidden |= tokens <= rows - window
    return torch.einsum("hnt,thd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def check(
    table: Any,
    sequences: list[tuple[int, int]],
    *,
    size: int,
    group: int,
    block_size: int,
    dtype: torch.dtype,
    kind: tuple[int | None, float | None],
) -> None:
    torch.manual_seed(size + group)
    kv_heads = 2 if group < 8 else 1
    scene = Scene(sequences, kv_heads, size, block_size, dtype, seed=block_size)
    key = [torch.randn(start + rows, kv_heads, size).to(dtype) for start, rows in sequences]
    value = [torch.randn(start + rows, kv_heads, size).to(dtype) for start, rows in sequences]
    scene.fill(key, value)
    query = torch.randn(sum(rows for _, rows in sequences), kv_heads * group, size) * size**-0.5
    if kind[0] is not None:  # what is before all windows may be anything, too
        for i, (start, _) in enumerate(sequences):
            blocks, offsets = scene.places(i, 0, max(0, start - kind[0] + 1))
            scene.keys[blocks, :, offsets] = scene.values[blocks, :, offsets] = torch.nan
            for x in (key[i], value[i]):
                x[: len(blocks)] = 0  # masked, so only finite
    out = scene.attend(query, *kind)
    dot = dtype == torch.bfloat16 and table.name == b"avx512bf16"  # takes and gives bfloat16
    taken = query.bfloat16() if dot else query
    rows = torch.split(taken, [rows for _, rows in sequences])
    each = zip(rows, key, value, sequences, strict=True)
    expected = torch.cat([dense(q, k, v, start, *kind) for q, k, v, (start, _) in each]).float()
    atol, rtol = (1e-3, 5e-3) if dot else (3e-6, 1e-5)
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)


SHAPES = [
    (name, size, group)
    for name in (*NATIVE, *EMULATED)
    for size in HEAD_SIZES
    for group in GROUPS
    if name in NATIVE or size * group <= 200  # the others are too slow when emulated
]


@pytest.mark.parametrize(("table", "size", "group"), SHAPES, indirect=["table"])
def test_paged_attention(table: Any, size: int, group: int, request: pytest.FixtureRequest) -> None:
    emulated = request.node.callspec.params["table"] in EMULATED
    turn = HEAD_SIZES.index(size) + 2 * GROUPS.index(group)
    for i in range(2):  # two block sizes, both dtypes, one half of the sequences each
        check(
            table,
            SEQUENCES[turn % 4 :: 4] if emulated else SEQUENCES[(turn + i) % 2 :: 2],
            size=size,
            group=group,
            block_size=BLOCK_SIZES[(turn + 2 * i) % 5],
            dtype=(torch.float32, torch.bfloat16)[i],
            kind=KINDS[(turn + 3 * i) % len(KINDS)],
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_windows_and_softcaps(
    table: Any, kind: tuple[int | None, float | None], dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    emulated = request.node.callspec.params["table"] in EMULATED
    for block_size in (7,) if emulated else (1, 16):
        sequences = SEQUENCES[3::3] if emulated else SEQUENCES
        check(table, sequences, size=16, group=3, block_size=block_size, dtype=dtype, kind=kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [(None, None), (20, 1.5)], ids=str)
def test_a_row_depends_on_its_own_sequence_only(
    table: Any, kind: tuple[int | None, float | None], dtype: torch.dtype
) -> None:
    """Bit for bit: not on the rows beside it, the chunk it is in, the blocks' size or place, the tables' width."""
    sequences = [(0, 70), (3, 20), (66, 1), (40, 25)]
    key = [torch.randn(start + rows, 2, 24).to(dtype) for start, rows in sequences]
    value = [torch.randn(start + rows, 2, 24).to(dtype) for start, rows in sequences]
    query = torch.randn(sum(rows for _, rows in sequences), 6, 24)
    scene = Scene(sequences, 2, 24, 16, dtype, seed=1)
    scene.fill(key, value)
    together = torch.split(scene.attend(query, *kind), [rows for _, rows in sequences])
    queries = torch.split(query, [rows for _, rows in sequences])
    for i, (start, rows) in enumerate(sequences):
        for first, end in ((0, 1), (0, rows), (rows // 2, rows), (rows - 1, rows)):
            alone = Scene([(start + first, end - first)], 2, 24, 7, dtype, seed=i)
            alone.fill([key[i][: start + end]], [value[i][: start + end]])
            assert torch.equal(alone.attend(queries[i][first:end], *kind), together[i][first:end])


def test_what_is_not_a_number_comes_out(table: Any) -> None:
    """Of a sequence whose keys are broken; the others do not notice."""
    for softcap in (None, 2.0):
        scene = Scene([(80, 1), (80, 1)], 1, 16, 16, torch.float32, seed=0)
        key = [torch.randn(81, 1, 16) for _ in range(2)]
        scene.fill(key, key)
        blocks, offsets = scene.places(0, 3, 4)
        scene.keys[blocks, :, offsets] = torch.nan
        out = scene.attend(torch.randn(2, 1, 16), None, softcap)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_write_kv_writes_what_it_names_and_no_more(block_size: int, dtype: torch.dtype) -> None:
    for size in (8, 10, 80):
        scene = Scene(SEQUENCES, 3, size, block_size, dtype, seed=2)
        expected = scene.pool.clone()
        rows = int(scene.lengths.sum())
        key, value = torch.randn(rows, 3, size), torch.randn(rows, 3, size)
        row = 0
        for i, (start, length) in enumerate(SEQUENCES):
            blocks, offsets = scene.places(i, start, start + length)
            expected[blocks, 1, 0, :, offsets] = key[row : row + length].to(dtype)
            expected[blocks, 1, 1, :, offsets] = value[row : row + length].to(dtype)
            row += length
        torch.ops.baton.write_kv(scene.keys, scene.values, key, value, scene.starts, scene.lengths, scene.tables)
        torch.testing.assert_close(scene.pool, expected, atol=0, rtol=0, equal_nan=True)


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    """Ties, the largest, infinities, NaN and denormals as torch rounds them, in whole vectors and in the rest."""
    special = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.4e38, 3.38e38, torch.inf, -torch.inf, torch.nan]
    special += [1e-40, 1e-45, -0.0, 2.0**-133]
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF]).int().view(torch.float32)  # by their lower bits; all bits
    key = torch.cat((torch.tensor(special), nans)).repeat(3)[None, None]
    scene = Scene([(0, 1)], 1, key.shape[2], 1, torch.bfloat16, seed=0)
    torch.ops.baton.write_kv(scene.keys, scene.values, key, -key, scene.starts, scene.lengths, scene.tables)
    (block,), _ = scene.places(0, 0, 1)
    for sign, written in ((1, scene.keys), (-1, scene.values)):
        torch.testing.assert_close(written[block, :, 0], (sign * key[0]).bfloat16(), atol=0, rtol=0, equal_nan=True)


def test_operators_are_what_torch_expects() -> None:
    scene, checks = Scene([(0, 3), (5, 1)], 2, 8, 4, torch.float32, seed=0), ("test_schema", "test_faketensor")
    scene.pool.zero_()
    keys, values = scene.keys.clone(), scene.values.clone()
    where, rows = (scene.starts, scene.lengths, scene.tables), torch.randn(4, 2, 8)
    torch.library.opcheck(torch.ops.baton.write_kv.default, (keys, values, rows, rows, *where), test_utils=checks)
    attention = (torch.randn(4, 4, 8), keys, values, *where, 3, None)
    torch.library.opcheck(torch.ops.baton.paged_attention.default, attention, test_utils=checks)


def test_what_kernels_would_misread_is_an_error() -> None:
    scene = Scene([(0, 2)], 2, 8, 4, torch.float32, seed=0)
    where, rows = (scene.starts, scene.lengths, scene.tables), torch.randn(2, 2, 8)
    attend, write = torch.ops.baton.paged_attention, torch.ops.baton.write_kv
    with pytest.raises(TypeError, match=r"float32, not torch\.bfloat16"):
        attend(rows.bfloat16(), scene.keys, scene.values, *where, None, None)
    with pytest.raises(TypeError, match="keys and values must be float32 or bfloat16"):
        attend(rows, scene.keys.half(), scene.values.half(), *where, None, None)
    with pytest.raises(ValueError, match="must be dense"):
        attend(rows, scene.keys[:, :, ::2], scene.values[:, :, ::2], *where, None, None)
    with pytest.raises(ValueError, match="contiguous int32"):
        attend(rows, scene.keys, scene.values, scene.starts.long(), scene.lengths, scene.tables, None, None)
    with pytest.raises(ValueError, match="1 lengths of 2 rows in all and 1 block tables for 3 rows"):
        attend(torch.randn(3, 2, 8), scene.keys, scene.values, *where, None, None)
    with pytest.raises(ValueError, match="2 starts"):
        write(scene.keys, scene.values, rows, rows, scene.starts.repeat(2), scene.lengths, scene.tables)
    with pytest.raises(ValueError, match="queries"):
        attend(torch.randn(2, 3, 8), scene.keys, scene.values, *where, None, None)
    with pytest.raises(ValueError, match="for a pool"):
        write(scene.keys, scene.values, rows[..., :6], rows[..., :6], *where)
