"""Every native kernel but attention against float64, for every instruction set that there is here.

AVX-512 is emulated too (`tests/native`): its packing, tiles, masks and dot products are tested on any CPU.
"""

from __future__ import annotations

import itertools
import math
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

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=[*NATIVE, *EMULATED])
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernels of one instruction set, which all operators use meanwhile."""
    torch.manual_seed(0)
    yield use_instruction_set(request.param, request, monkeypatch)
    forget_kernels(monkeypatch)


def rounds_inputs(table: Any, dtype: torch.dtype) -> bool:
    """Whether the inputs of products are rounded to bfloat16 as the weights are: the dot product takes such only."""
    return dtype == torch.bfloat16 and table.name == b"avx512bf16"


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    packed = ops.pack(weight)
    out: torch.Tensor = torch.ops.baton.linear(x, packed, len(weight), weight.dtype == torch.bfloat16, bias)
    return out


# --- linear ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ins", [1, 2, 7, 64, 129])
def test_linear(table: Any, dtype: torch.dtype, ins: int) -> None:
    """Outputs around whole panels, rows around whole tiles; each output is one sum of `ins` products."""
    panel = table.panel
    all_rows = (*range(1, 14), 33, 64)
    for outs, with_bias in itertools.product((1, panel - 1, panel, panel + 1, 2 * panel, 3 * panel - 5), (False, True)):
        weight = torch.randn(outs, ins).to(dtype)
        bias = torch.randn(outs) if with_bias else None
        x = torch.randn(max(all_rows), ins)
        taken = (x.bfloat16() if rounds_inputs(table, dtype) else x).double()
        expected = taken @ weight.double().t() + (0 if bias is None else bias.double())
        scale = taken.abs() @ weight.double().abs().t() + 1
        out = product(x, weight, bias)
        assert ((out - expected).abs() <= 3e-7 * math.sqrt(ins + 8) * scale).all()
        for rows in all_rows:
            assert torch.equal(product(x[:rows], weight, bias), out[:rows]), "a row depends on how many there are"


def test_many_bfloat16_rows_are_widened_without_a_change(table: Any) -> None:
    """Where a panel in float32 has room it is unpacked once for many rows; each row is what it is alone."""
    for ins in (130, 2 * (64 << 10) // table.panel):  # the latter's panel has no room
        weight, x = torch.randn(table.panel + 3, ins).bfloat16(), torch.randn(40, ins)
        alone = torch.cat([product(row[None], weight) for row in x])
        assert torch.equal(product(x, weight), alone)


def test_many_rows_are_taken_in_blocks(table: Any) -> None:
    """Their inputs do not fit into the second-level cache together."""
    weight, x = torch.randn(5, 3000), torch.randn(70, 3000)
    assert torch.equal(product(x, weight), torch.cat([product(row[None], weight) for row in x]))


def test_packing_pads_with_zeros(table: Any) -> None:
    """What is beyond a weight's outputs and inputs must not be what memory held."""
    weight = torch.randn(table.panel + 1, 3).bfloat16()
    packed = ops.pack(weight).view(torch.bfloat16).view(2, 2, table.panel, 2)
    assert torch.equal(packed[0].permute(1, 0, 2).flatten(1)[:, :3], weight[: table.panel])
    assert torch.equal(packed[1, :, 0].flatten()[:3], weight[-1])
    assert packed.count_nonzero() == weight.count_nonzero()


# --- norm, gate, rotation ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5, 8, 15, 16, 17, 31, 64, 99, 576])
def test_rms_norm(size: int) -> None:
    x, weight = 3 * torch.randn(5, size), torch.randn(size)
    expected = torch.nn.functional.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    out = torch.ops.baton.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, expected.float(), atol=1e-6, rtol=2e-6)
    assert torch.equal(torch.ops.baton.rms_norm(x[3:4], weight, 1e-5), out[3:4])


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("size", [1, 3, 8, 16, 33, 112])
def test_gated(gelu: bool, size: int) -> None:
    gate, up = 4 * torch.randn(7, size), torch.randn(7, size)
    torch.testing.assert_close(
        torch.ops.baton.gated(torch.cat((gate, up), 1), gelu), gated(gate, up, gelu), atol=2e-6, rtol=2e-6
    )


@pytest.mark.parametrize("gelu", [False, True])
def test_gated_far_from_zero(gelu: bool) -> None:
    """No overflow on the way: what is far below 0 is 0, what is far above it stays as it is."""
    values = [0.0, 1e-30, 20, 87, 88, 89, 200, 1e4, 1e12, 1e30, 3e38]
    gate = torch.tensor([values + [-value for value in values]])
    ups = torch.ones_like(gate)
    out = torch.ops.baton.gated(torch.cat((gate, ups), 1), gelu)
    torch.testing.assert_close(out, gated(gate, ups, gelu), atol=1e-6, rtol=2e-6)
    ends = torch.ops.baton.gated(torch.tensor([[torch.inf, torch.nan, 1.0, 1.0]]), gelu)
    assert ends[0, 0] == torch.inf
    assert ends[0, 1].isnan()


def gated(gate: torch.Tensor, up: torch.Tensor, gelu: bool) -> torch.Tensor:
    gate = gate.double()
    activated = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
    return (activated * up.double()).float()


@pytest.mark.parametrize(("size", "half"), [(8, 4), (8, 1), (16, 8), (10, 3), (64, 32), (80, 16), (96, 24), (6, 0)])
def test_rotate(size: int, half: int) -> None:
    """Pairs are element i and element half + i; what is beyond 2 * half stays."""
    x, angles = torch.randn(5, 3, size), 10 * torch.randn(5, half)
    cos, sin = angles.cos(), angles.sin()
    a, b, rest = x.double().tensor_split((half, 2 * half), dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    expected = torch.cat((a * c - b * s, b * c + a * s, rest), -1).float()
    out = torch.ops.baton.rotate(x, cos, sin)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(out[..., 2 * half :], x[..., 2 * half :])
    assert torch.equal(torch.ops.baton.rotate(x[2:3], cos[2:3], sin[2:3]), out[2:3])


# --- as operators ------------------------------------------------------------------------------------


def test_operators_are_what_torch_expects() -> None:
    x, weight = torch.randn(3, 10), torch.randn(7, 10)
    baton, checks = torch.ops.baton, ("test_schema", "test_faketensor")
    for op, args in (
        (baton.linear, (x, ops.pack(weight), 7, False, torch.randn(7))),
        (baton.rms_norm, (x, torch.randn(10), 1e-6)),
        (baton.gated, (x, True)),
        (baton.rotate, (torch.randn(3, 2, 10), torch.randn(3, 4), torch.randn(3, 4))),
    ):
        torch.library.opcheck(op.default, args, test_utils=checks)


def test_wrong_dtypes_and_sizes_are_errors() -> None:
    """A kernel would read beyond the tensor."""
    baton, x = torch.ops.baton, torch.randn(3, 10)
    with pytest.raises(TypeError, match=r"float32, not torch\.bfloat16"):
        baton.rms_norm(x.bfloat16(), torch.ones(10), 1e-6)
    with pytest.raises(TypeError, match=r"float32, not torch\.float64"):
        baton.gated(x.double(), True)
    with pytest.raises(ValueError, match=r"weight of shape .9. for rows of 10"):
        baton.rms_norm(x, torch.ones(9), 1e-6)
    with pytest.raises(ValueError, match="not that of 7 outputs and 10 inputs"):
        baton.linear(x, ops.pack(torch.randn(7, 12)), 7, False, None)
    with pytest.raises(ValueError, match="not that of 7 outputs and 10 inputs"):
        baton.linear(x, ops.pack(torch.randn(7, 10)), 7, False, torch.ones(6))
    with pytest.raises(ValueError, match="cosines"):
        baton.rotate(torch.randn(3, 2, 10), torch.randn(3, 6), torch.randn(3, 6))


def test_views_are_read_as_what_they_show() -> None:
    x, weight = torch.randn(10, 6).t(), torch.randn(20)[::2]
    assert torch.equal(
        torch.ops.baton.rms_norm(x, weight, 1e-6), torch.ops.baton.rms_norm(x.contiguous(), weight.contiguous(), 1e-6)
    )
    assert torch.equal(product(x, torch.randn(4, 10) * 0, weight[:4]), weight[:4].expand(6, 4))
