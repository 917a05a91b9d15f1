"""FlashInfer's attention over our strided pool in float16 and bfloat16 against torch's in float32, eager and static."""

from __future__ import annotations

import random

import pytest
import torch

from baton.engine.attention import AttentionBackend, AttentionBatch, AttentionKind, StaticAttention, attention_backend
from baton.engine.attention.torch_backend import TorchAttention
from baton.engine.kv_cache import TORCH_DTYPES, KVCache
from baton.layout import KVLayout
from tests.gpu.parts import CUDA, no_flashinfer
from tests.unit.test_attention import KINDS, MIXES, PLAIN

MIX = MIXES["all kinds"]
DECODES = [(0, 1), (3, 1), (40, 1), (15, 1), (16, 1), (300, 1)]
LONG = [(0, 200), (100, 70), (500, 1), (37, 2)]
"""With chunks for which FlashInfer takes other kernels on Hopper."""


class Scene:
    """Pools of equal content, for FlashInfer and in float32 for torch, with garbage in unused blocks; a step's rows."""

    def __init__(self, mix: list[tuple[int, int]], dtype: str, heads: int, kv_heads: int, head_dim: int, block: int):
        torch.manual_seed(1)
        layouts = [KVLayout(3, kv_heads, block, head_dim, which) for which in (dtype, "float32")]
        self.pools = [KVCache(layout, 400, "cuda", scratch=True) for layout in layouts]
        self.pools[0].tensor.fill_(float("nan"))
        free = random.Random(0).sample(range(400), 400)
        tables = [[free.pop() for _ in range(-(-(start + n) // block))] for start, n in mix]
        for (start, _), table in zip(mix, tables, strict=True):
            for b in table[: -(-start // block)]:
                self.pools[0].tensor[b].normal_()
        self.pools[1].tensor.copy_(self.pools[0].tensor)
        self.batch = AttentionBatch([s for s, _ in mix], [n for _, n in mix], tables)
        rows = sum(n for _, n in mix)
        fused = torch.randn(rows, heads + 2 * kv_heads, head_dim, dtype=TORCH_DTYPES[dtype], device=CUDA)
        # Views of one tensor, as the decoder's are.
        self.query, self.key, self.value = fused.tensor_split([heads, heads + kv_heads], dim=1)

    def run(self, backend: AttentionBackend, pool: KVCache, kind: AttentionKind, step: object) -> torch.Tensor:
        query, key, value = (x.to(pool.tensor.dtype) for x in (self.query, self.key, self.value))
        return backend.attend(1, kind, query, key, value, pool, step)


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    if (reason := no_flashinfer()) is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture(scope="module")
def backends(dtype: str) -> tuple[AttentionBackend, AttentionBackend]:
    return attention_backend("flashinfer", CUDA, dtype=dtype, head_dim=128), TorchAttention(CUDA)


def close(scene: Scene, found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 5e-3 if found.dtype is torch.float16 else 4e-2  # probabilities are rounded to the dtype
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
    written = torch.tensor(sorted({b for table in scene.batch.blocks for b in table}), device=CUDA)
    a, b = (pool.tensor[written, 1] for pool in scene.pools)
    assert torch.equal(a.float().nan_to_num(7.0), b.nan_to_num(7.0)), "both wrote the same keys and values"


@pytest.mark.parametrize("mix", [MIX, DECODES, LONG], ids=["mixed", "decodes", "long chunks"])
@pytest.mark.parametrize("kind", [PLAIN, *KINDS.values()], ids=["plain", *KINDS])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block"), [(8, 2, 128, 16), (9, 3, 64, 16), (4, 4, 64, 7)])
def test_equals_torch(
    backends: tuple[AttentionBackend, AttentionBackend],
    dtype: str,
    mix: list[tuple[int, int]],
    kind: AttentionKind,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block: int,
) -> None:
    scene = Scene(mix, dtype, heads, kv_heads, head_dim, block)
    out = [
        scene.run(backend, pool, kind, backend.prepare(scene.batch, {kind}, pool))
        for backend, pool in zip(backends, scene.pools, strict=True)
    ]
    close(scene, *out)


@pytest.mark.parametrize("kind", [PLAIN, *KINDS.values()], ids=["plain", *KINDS])
def test_static_decodes_equal_torch(
    backends: tuple[AttentionBackend, AttentionBackend], dtype: str, kind: AttentionKind
) -> None:
    scene = Scene(DECODES, dtype, 8, 2, 128, 16)
    flashinfer, reference = backends
    assert isinstance(flashinfer, StaticAttention)
    static = flashinfer.static_decode(len(DECODES), 25, 8, {kind}, scene.pools[0])
    static.fill(scene.batch)
    found = scene.run(flashinfer, scene.pools[0], kind, static)
    close(
        scene, found, scene.run(reference, scene.pools[1], kind, reference.prepare(scene.batch, {kind}, scene.pools[1]))
    )
