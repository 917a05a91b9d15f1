"""KV blocks in one byte a number: how far off, and what becomes of numbers that are none."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from baton.engine.kv_cache import TORCH_DTYPES
from baton.layout import KVLayout
from kv_transfer.wire_encoding import decode, encode
from kv_transfer.wire_format import WireFormat

Dtype = Literal["float32", "bfloat16", "float16"]
Lossy = Literal["int8", "fp8"]
BOUND = {"int8": 0.5 / 127, "fp8": 1 / 16}
"""Largest error: of int8 half a step of the row's largest number; of fp8, with 3 bits of mantissa, 1/16 of itself."""
ROUNDING = {"float32": 1e-6, "bfloat16": 1 / 256, "float16": 1 / 2048}


def layout_of(dtype: Dtype) -> KVLayout:
    return KVLayout(num_layers=3, num_kv_heads=2, block_size=16, head_dim=8, dtype=dtype)


def through(numbers: torch.Tensor, dtype: Dtype, encoding: Lossy) -> torch.Tensor:
    """`numbers` `[layers, 2, heads, block_size, head_dim]` after the wire, as float64."""
    layout = layout_of(dtype)
    block = numbers.to(TORCH_DTYPES[dtype]).contiguous().view(-1).view(torch.uint8).numpy()
    assert block.nbytes == layout.block_bytes
    out = np.full(WireFormat(layout, encoding).block_bytes, 0xAB, dtype=np.uint8)
    encode(block, layout, encoding, out)
    decoded = torch.from_numpy(decode(out, layout, encoding)).view(TORCH_DTYPES[dtype])
    assert decoded.shape == layout.block_shape
    return decoded.double()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("encoding", ["int8", "fp8"])
def test_the_error_is_bounded_by_each_heads_own_scale(encoding: Lossy, dtype: Dtype) -> None:
    """Heads whose numbers differ a thousandfold do not disturb each other."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(*layout_of(dtype).block_shape, generator=generator)
    numbers *= torch.logspace(-2, 2, 12).view(3, 2, 2, 1, 1)
    exact = numbers.to(TORCH_DTYPES[dtype]).double()
    error = (through(numbers, dtype, encoding) - exact).abs()
    largest = exact.abs().amax((-2, -1), keepdim=True)
    scale = largest if encoding == "int8" else exact.abs().clamp(min=largest / 448 / 64)
    assert (error <= scale * (BOUND[encoding] * 1.001 + ROUNDING[dtype])).all()
    assert (error > 0).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_are_rounded_as_torch_rounds_them(dtype: Dtype) -> None:
    numbers = torch.randn(*layout_of(dtype).block_shape, generator=torch.Generator().manual_seed(2))
    exact = through(numbers.to(TORCH_DTYPES[dtype]).float(), "float32", "int8").float()
    assert torch.equal(through(numbers, dtype, "int8"), exact.to(TORCH_DTYPES[dtype]).double())


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
def test_zeros_stay_zeros(encoding: Lossy) -> None:
    numbers = torch.zeros(3, 2, 2, 16, 8)
    numbers[1, 0, 1] = 5.0
    assert torch.equal(through(numbers, "float32", encoding), numbers.double())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("encoding", ["int8", "fp8"])
def test_what_is_not_finite_harms_nothing_else(encoding: Lossy, dtype: Dtype) -> None:
    numbers = torch.ones(3, 2, 2, 16, 8)
    numbers[0, 0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -2.0])
    numbers[2, 1, 1] = float("nan")
    got = through(numbers, dtype, encoding)
    assert torch.isnan(got[0, 0, 0, 0, 0]) and torch.isnan(got[2, 1, 1]).all()
    torch.testing.assert_close(got[0, 0, 0, 0, 1:4], torch.tensor([2.0, -2.0, -2.0]).double(), rtol=0.01, atol=0)
    others = got.flatten()[~torch.isnan(got.flatten())]
    assert torch.isfinite(others).all()
    torch.testing.assert_close(got[0, 0, 1], torch.ones(16, 8).double(), rtol=0.01, atol=0)


@pytest.mark.parametrize("largest", [1e-44, 1e-38, 3e38])
@pytest.mark.parametrize("encoding", ["int8", "fp8"])
def test_the_ends_of_the_range(encoding: Lossy, largest: float) -> None:
    numbers = torch.full((3, 2, 2, 16, 8), largest)
    got = through(numbers, "float32", encoding)
    assert torch.isfinite(got).all()
    assert ((got - numbers.double()).abs() <= max(2e-38, 1e-6 * largest)).all()


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
def test_any_bytes_can_be_decoded(encoding: Lossy) -> None:
    """A damaged block must not stop the thread that meets it: its checksum tells."""
    layout = layout_of("bfloat16")
    size = WireFormat(layout, encoding).block_bytes
    data = np.random.default_rng(3).integers(0, 256, size, dtype=np.uint8)
    assert decode(data, layout, encoding).shape == layout.block_shape


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
def test_encoding_again_gives_the_same_bytes(encoding: Lossy) -> None:
    """A block that is shipped again after a cut link must have the checksum that the Commit names."""
    layout = layout_of("float32")
    block = np.random.default_rng(4).standard_normal(layout.block_bytes // 4).astype(np.float32).view(np.uint8)
    out = [np.empty(WireFormat(layout, encoding).block_bytes, dtype=np.uint8) for _ in range(2)]
    for buffer in out:
        encode(block, layout, encoding, buffer)
    assert np.array_equal(*out)
