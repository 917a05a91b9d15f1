"""The FlashInfer backend against dense attention, over a stand-in with FlashInfer's parameters; choosing it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from baton.engine.attention import AttentionBatch, AttentionKind, StaticAttention, attention_backend
from baton.engine.attention import flashinfer_backend as backend_module
from baton.engine.attention.flashinfer_backend import FlashInferAttention, unavailable
from baton.engine.attention.torch_backend import TorchAttention
from baton.errors import ConfigError
from tests import fakes_flashinfer
from tests.unit.test_attention import KINDS, MIXES, PLAIN, Scene, Sequence

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DECODES = {
    name: mix
    for name, mix in (MIXES | {"a new block": [(16, 1), (3, 1), (31, 1)]}).items()
    if all(n == 1 for _, n in mix)
}


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashInferAttention]:
    monkeypatch.setitem(sys.modules, "flashinfer", fakes_flashinfer)
    monkeypatch.setattr(backend_module, "WORKSPACE_BYTES", 1 << 10)
    fakes_flashinfer._Wrapper.made.clear()
    attention = FlashInferAttention(CPU)
    monkeypatch.setattr(Scene, "backend", attention, raising=False)
    yield attention
    fakes_flashinfer._Wrapper.made.clear()


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("kind", [PLAIN, *KINDS.values()], ids=["plain", *KINDS])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_equals_dense_attention(
    attention: FlashInferAttention, mix: list[Sequence], kind: AttentionKind, block_size: int
) -> None:
    scene = Scene(mix, 2, 3, block_size, garbage=float("nan"))
    torch.testing.assert_close(scene.run(kind), scene.expected(kind), atol=2e-6, rtol=1e-5)


def test_one_plan_per_kind_and_step(attention: FlashInferAttention) -> None:
    scene = Scene([(20, 1), (0, 7), (33, 1)], 2, 2, 4)
    batch = AttentionBatch([20, 0, 33], [1, 7, 1], scene.tables)
    key, value = torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    for _ in range(2):
        step = attention.prepare(batch, {PLAIN, KINDS["window"]}, scene.cache)
        for kind in (PLAIN, KINDS["window"], PLAIN):
            attention.attend(1, kind, scene.query, key, value, scene.cache, step)
    made = fakes_flashinfer._Wrapper.made
    assert [wrapper.num_plans for wrapper in made] == [2] * 4, (
        "decodes and chunks of two kinds, each planned once a step"
    )


@pytest.mark.parametrize("mix", DECODES.values(), ids=DECODES.keys())
@pytest.mark.parametrize("kind", [PLAIN, *KINDS.values()], ids=["plain", *KINDS])
@pytest.mark.parametrize("which", ["flashinfer", "torch"])
def test_static_decodes_equal_dense_attention(
    attention: FlashInferAttention, mix: list[Sequence], kind: AttentionKind, which: str
) -> None:
    """The same buffers for one batch after another."""
    static: StaticAttention = attention if which == "flashinfer" else TorchAttention(CPU)
    scene = Scene(mix, 2, 3, 4, garbage=float("nan"))
    decode = static.static_decode(len(mix), 12, 6, {kind}, scene.cache)
    new = [torch.stack([x[-1] for x in xs]) for xs in (scene.keys, scene.values)]
    for order in (list(range(len(mix))), list(range(len(mix)))[::-1]):
        decode.fill(AttentionBatch([mix[i][0] for i in order], [1] * len(mix), [scene.tables[i] for i in order]))
        rows = torch.tensor(order)
        out = static.attend(1, kind, scene.query[rows], new[0][rows], new[1][rows], scene.cache, decode)
        torch.testing.assert_close(out, scene.expected(kind)[rows], atol=2e-6, rtol=1e-5)


def test_widths_of_graphs(attention: FlashInferAttention) -> None:
    assert attention.graph_widths(32, 512) == (512,)
    torch_attention = TorchAttention(CPU)
    assert torch_attention.graph_widths(1, 20) == [8, 16, 20]
    assert torch_attention.graph_widths(256, 512) == [8, 16], "what a layer would gather is bounded"


def test_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fakes_flashinfer)
    assert unavailable(CUDA, "bfloat16", 128) is None
    assert "GPU" in (unavailable(CPU, "bfloat16", 128) or "")
    assert "float32" in (unavailable(CUDA, "float32", 128) or "")
    assert "96" in (unavailable(CUDA, "bfloat16", 96) or "")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "extra `cuda`" in (unavailable(CUDA, "bfloat16", 128) or "")
    with pytest.raises(ConfigError, match=r"engine\.attention: cannot be used: flashinfer cannot be imported"):
        attention_backend("flashinfer", CUDA, dtype="bfloat16", head_dim=128)
    assert isinstance(attention_backend("auto", CUDA, dtype="bfloat16", head_dim=128), TorchAttention)
