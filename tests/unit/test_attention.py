"""Every backend that works here against attention written out densely, over every shape that matters."""

from __future__ import annotations

import random

import pytest
import torch

from baton.engine.attention import AttentionBackend, AttentionBatch, AttentionKind, attention_backend
from baton.engine.kv_cache import KVCache
from baton.errors import ConfigError
from baton.layout import KVLayout

Sequence = tuple[int, int]
"""Tokens in the pool already, rows of this step."""

MIXES: dict[str, list[Sequence]] = {
    "one decode": [(9, 1)],
    "first token": [(0, 1)],
    "one prompt": [(0, 13)],
    "later chunk": [(11, 6)],
    "decodes of ragged lengths": [(0, 1), (3, 1), (4, 1), (40, 1), (15, 1), (16, 1), (17, 1)],
    "prompts": [(0, 2), (0, 16), (0, 17), (0, 31)],
    "all kinds": [(20, 1), (0, 7), (33, 1), (16, 16), (5, 2), (1, 1), (0, 1), (7, 25)],
}


PLAIN = AttentionKind(8**-0.5)
KINDS: dict[str, AttentionKind] = {
    "scale": AttentionKind(0.9),
    "a window of itself": AttentionKind(0.5, window=1),
    "window": AttentionKind(0.5, window=6),
    "a window of a block": AttentionKind(0.5, window=16),
    "a window longer than most": AttentionKind(0.5, window=19),
    "a window longer than all": AttentionKind(0.5, window=1000),
    "softcap": AttentionKind(1.0, softcap=1.5),
    "softcap and window": AttentionKind(1.0, window=6, softcap=1.5),
}


def dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, kind: AttentionKind
) -> torch.Tensor:
    """Rows `[n, heads, d]` over all keys `[tokens, kv_heads, d]`, one query and head at a time."""
    n, heads, d = query.shape
    out = torch.empty(n, heads, d)
    for i in range(n):
        for h in range(heads):
            kv = h // (heads // keys.shape[1])
            end = start + i + 1
            first = max(0, end - (kind.window or end))
            scores = keys[first:end, kv] @ query[i, h] * kind.scale
            if kind.softcap:
                scores = kind.softcap * torch.tanh(scores / kind.softcap)
            out[i, h] = torch.softmax(scores, 0) @ values[first:end, kv]
    return out.flatten(1)


@pytest.fixture(autouse=True, params=["torch", "native"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which backend a `Scene` runs."""
    try:
        monkeypatch.setattr(Scene, "backend", attention_backend(request.param, torch.device("cpu")), raising=False)
    except ConfigError as e:
        pytest.skip(str(e))


class Scene:
    """A pool with earlier tokens in it, everything else filled with `garbage`, and one step's rows."""

    backend: AttentionBackend

    def __init__(self, mix: list[Sequence], kv_heads: int, group: int, block_size: int, garbage: float = 0.0):
        torch.manual_seed(len(mix) * 100 + kv_heads * 10 + block_size)
        d, total = 8, [start + rows for start, rows in mix]
        self.mix = mix
        self.cache = KVCache(KVLayout(2, kv_heads, block_size, d, "float32"), 150)
        self.cache.tensor.fill_(garbage)
        free = random.Random(0).sample(range(150), 150)
        self.tables = [[free.pop() for _ in range(-(-n // block_size) + 1)] for n in total]
        self.keys = [torch.randn(n, kv_heads, d) for n in total]
        self.values = [torch.randn(n, kv_heads, d) for n in total]
        self.query = torch.randn(sum(rows for _, rows in mix), kv_heads * group, d)
        for i, (start, _) in enumerate(mix):
            if start % block_size:  # its owner has cleared it
                self.cache.clear([self.tables[i][start // block_size]])
            for p in range(start):
                self.where(i, p, 0)[:] = self.keys[i][p]
                self.where(i, p, 1)[:] = self.values[i][p]

    def where(self, i: int, position: int, kv: int, layer: int = 1) -> torch.Tensor:
        block, offset = divmod(position, self.cache.layout.block_size)
        return self.cache.layer(layer)[kv][self.tables[i][block], :, offset]

    def run(self, kind: AttentionKind = PLAIN) -> torch.Tensor:
        batch = AttentionBatch([s for s, _ in self.mix], [n for _, n in self.mix], self.tables)
        step = self.backend.prepare(batch, {PLAIN, *KINDS.values()}, self.cache)
        new = [torch.cat([x[s:] for x, (s, _) in zip(xs, self.mix, strict=True)]) for xs in (self.keys, self.values)]
        return self.backend.attend(1, kind, self.query, new[0], new[1], self.cache, step)

    def expected(self, kind: AttentionKind = PLAIN) -> torch.Tensor:
        rows = torch.split(self.query, [n for _, n in self.mix])
        each = zip(rows, self.keys, self.values, self.mix, strict=True)
        return torch.cat([dense(q, k, v, start, kind) for q, k, v, (start, _) in each])


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 1), (2, 3), (1, 8)])
def test_equals_dense_attention(mix: list[Sequence], block_size: int, kv_heads: int, group: int) -> None:
    scene = Scene(mix, kv_heads, group, block_size)
    torch.testing.assert_close(scene.run(), scene.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize(("block_size", "garbage"), [(1, 0.0), (5, float("nan")), (16, float("nan"))])
def test_every_kind_equals_dense_attention(
    mix: list[Sequence], kind: AttentionKind, block_size: int, garbage: float
) -> None:
    scene = Scene(mix, 2, 3, block_size, garbage)
    torch.testing.assert_close(scene.run(kind), scene.expected(kind), atol=2e-6, rtol=1e-5)


def test_a_window_reads_only_its_blocks() -> None:
    """Blocks before it may hold anything."""
    scene = Scene([(100, 1), (70, 9)], 2, 2, 4)
    kind = KINDS["window"]
    for i, (start, _) in enumerate(scene.mix):
        for p in range((start - kind.window + 1) // 4 * 4):  # type: ignore[operator]
            scene.where(i, p, 0)[:] = scene.where(i, p, 1)[:] = float("nan")
    torch.testing.assert_close(scene.run(kind), scene.expected(kind), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_new_keys_and_values_are_in_the_pool(mix: list[Sequence]) -> None:
    scene = Scene(mix, kv_heads=2, group=2, block_size=4)
    other_layer = scene.cache.layer(0)[0].clone()
    scene.run()
    for i, (start, rows) in enumerate(mix):
        for p in range(start + rows):
            assert torch.equal(scene.where(i, p, 0), scene.keys[i][p])
            assert torch.equal(scene.where(i, p, 1), scene.values[i][p])
    assert torch.equal(scene.cache.layer(0)[0], other_layer)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("block_size", [4, 16])
def test_garbage_in_unused_memory_does_not_leak(mix: list[Sequence], block_size: int) -> None:
    """Bytes of a failed transfer may be NaN, and masking multiplies by 0."""
    scene = Scene(mix, kv_heads=2, group=2, block_size=block_size, garbage=float("nan"))
    torch.testing.assert_close(scene.run(), scene.expected(), atol=2e-6, rtol=1e-5)


def test_unknown_backend() -> None:
    with pytest.raises(ConfigError, match=r"engine\.attention"):
        attention_backend("flashinfer9", torch.device("cpu"))
