"""KV blocks in one byte a number: `int8` and `fp8` (e4m3), the lossy encodings of `kv_transfer.wire_format`.

    encoded block   float32 scales [layers, 2, kv_heads] ║ codes [layers, 2, kv_heads, block_size, head_dim]
    number          code * scale

A scale is the largest finite magnitude of its (layer, key or value, head) in this block, over the largest code: keys of
some heads are many times larger than others', so one scale for all would lose the small ones. What is not a number
stays so; infinities become the largest finite magnitude.

By NumPy, in the thread that asks and without the GIL: torch would start threads of its own beside those of the engine.
Knows shapes; must not know pools or transfers.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from baton.layout import KVLayout
from kv_transfer.wire_format import SCALE_BYTES, Encoding

MAX_CODE: Final = {"int8": 127.0, "fp8": 448.0}
NAN_CODE: Final = -128
"""Of int8; fp8 has its own."""
TINY: Final = np.finfo(np.float32).tiny
"""The least scale, of numbers that are all zero, say: so that nothing is divided by zero."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def encode(block: Bytes, layout: KVLayout, encoding: Encoding, out: Bytes) -> None:
    """Encode one block, `layout.block_bytes` bytes, into `out`, `WireFormat.block_bytes` bytes."""
    most = MAX_CODE[encoding]
    with np.errstate(all="ignore"):
        rows = _to_floats(block, layout).reshape(*layout.block_shape[:3], -1)
        magnitudes = np.abs(rows)
        largest = magnitudes.max(-1)
        if not np.isfinite(largest).all():
            largest = np.where(np.isfinite(magnitudes), magnitudes, np.float32(0)).max(-1)
        scales = np.maximum(largest / np.float32(most), TINY)
        numbers = np.divide(rows, scales[..., None], out=magnitudes)
        np.clip(numbers, -most, most, out=numbers)
        num_scales = scales.size * SCALE_BYTES
        out[:num_scales] = scales.reshape(-1).view(np.uint8)
        if encoding == "int8":
            np.rint(numbers, out=numbers)
            np.nan_to_num(numbers, copy=False, nan=NAN_CODE)
            out[num_scales:].view(np.int8)[:] = numbers.reshape(-1)
        else:
            np.take(_fp8_of_halves(), numbers.astype(np.float16).view(np.uint16).reshape(-1), out=out[num_scales:])


def decode(encoded: Bytes, layout: KVLayout, encoding: Encoding) -> npt.NDArray[Any]:
    """What was encoded, as numbers of `layout.dtype` seen as integers of its size (NumPy has no bfloat16).

    Shape `[layers, 2, kv_heads, block_size, head_dim]`. Whatever the bytes are, an array comes out.
    """
    layers, two, heads, *_ = layout.block_shape
    num_scales = layers * two * heads * SCALE_BYTES
    scales = encoded[:num_scales].view(np.float32).reshape(layers, two, heads, 1, 1)
    with np.errstate(all="ignore"):
        numbers = _values(encoding)[encoded[num_scales:]].reshape(layout.block_shape)
        numbers *= scales
        return _from_floats(numbers, layout)


def _to_floats(block: Bytes, layout: KVLayout) -> Floats:
    """Without a copy if they are float32."""
    if layout.dtype == "float32":
        return block.view(np.float32)
    if layout.dtype == "float16":
        return block.view(np.float16).astype(np.float32)
    return np.left_shift(block.view(np.uint16), 16, dtype=np.uint32).view(np.float32)


def _from_floats(numbers: Floats, layout: KVLayout) -> npt.NDArray[Any]:
    if layout.dtype == "float32":
        return numbers.view(np.int32)
    if layout.dtype == "float16":
        return numbers.astype(np.float16).view(np.int16)
    bits = numbers.view(np.uint32)
    even = (bits >> 16) & np.uint32(1)  # half way between two goes to the even one
    even += np.uint32(0x7FFF)
    even += bits
    return (even >> 16).astype(np.uint16).view(np.int16)


@cache
def _values(encoding: Encoding) -> Floats:
    """The number that each of the 256 codes stands for."""
    codes = torch.arange(256, dtype=torch.uint8)
    if encoding == "fp8":
        return codes.view(torch.float8_e4m3fn).to(torch.float32).numpy()
    values: Floats = codes.numpy().view(np.int8).astype(np.float32)
    values[NAN_CODE] = np.nan  # index -128 of 256: code 0x80
    return values


@cache
def _fp8_of_halves() -> Bytes:
    """The code of each float16, by its bits. It has more than twice as many, so that rounding twice hardly matters."""
    halves = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.float16))
    codes: Bytes = halves.to(torch.float32).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return codes
