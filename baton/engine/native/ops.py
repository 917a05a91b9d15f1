"""The native kernels one by one, as torch operators `torch.ops.baton.*`, on CPU tensors.

The decoder (`baton.engine.native.decoder`) runs them fused, without torch in between; these are for models that torch
computes and for tests. Inputs and results are float32 unless said otherwise; weights and KV are float32 or bfloat16.
Kernels see addresses only, so a wrong dtype is a TypeError here, a wrong size a ValueError. Block tables are not
looked at: they must be long enough, and their blocks in the pool.
Importing this module registers them; it needs the library (`library.kernels()` is not None).
"""

from __future__ import annotations

from ctypes import byref
from typing import Any

import torch

from baton.engine.native.library import AttentionStruct, LinearStruct, SequencesStruct, kernels

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def pack(weight: torch.Tensor, table: Any = None) -> torch.Tensor:
    """A weight `[outs, ins]` in the order in which `linear` reads it, as bytes. `table`: other kernels than usual."""
    table, dtype = table or kernels(), _DTYPES[weight.dtype]
    weight = weight.contiguous()
    outs, ins = weight.shape
    packed = aligned_bytes(table.packed_bytes(dtype, outs, ins))
    table.pack(dtype, weight.data_ptr(), outs, ins, packed.data_ptr())
    return packed


def aligned_bytes(size: int) -> torch.Tensor:
    """Uninitialized bytes that begin at a cache line."""
    raw = torch.empty(size + 64, dtype=torch.uint8)
    return raw[-raw.data_ptr() % 64 :][:size]


@torch.library.custom_op("baton::linear", mutates_args=(), device_types="cpu")
def linear(x: torch.Tensor, packed: torch.Tensor, outs: int, bfloat16: bool, bias: torch.Tensor | None) -> torch.Tensor:
    """`x` `[rows, ins]` times a packed weight of `outs` outputs, plus `bias` `[outs]`."""
    (x,) = _floats(x)
    rows, ins = x.shape
    if bias is not None:
        (bias,) = _floats(bias)
    if packed.numel() != kernels().packed_bytes(int(bfloat16), outs, ins) or (bias is not None and len(bias) != outs):
        raise ValueError(f"the packed weight or the bias is not that of {outs} outputs and {ins} inputs")
    out = torch.empty(rows, outs)
    struct = LinearStruct(packed.data_ptr(), None if bias is None else bias.data_ptr(), outs, ins)
    kernels().linear(int(bfloat16), byref(struct), x.data_ptr(), rows, out.data_ptr())
    return out


@linear.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, outs: int, bfloat16: bool, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], outs)


@torch.library.custom_op("baton::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich 2019) over the last dimension of `x` `[rows, size]`."""
    x, weight = _floats(x, weight)
    if weight.shape != x.shape[1:]:
        raise ValueError(f"a weight of shape {list(weight.shape)} for rows of {x.shape[1]}")
    out = torch.empty_like(x)
    kernels().rms_norm(x.data_ptr(), x.shape[0], x.shape[1], weight.data_ptr(), eps, out.data_ptr())
    return out


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("baton::gated", mutates_args=(), device_types="cpu")
def gated(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    """`[rows, 2 * size]`, gates first -> `[rows, size]`: SiLU or GELU (tanh) of the gate, times up."""
    (gate_up,) = _floats(gate_up)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size)
    kernels().gated(int(gelu), gate_up.data_ptr(), rows, size, out.data_ptr())
    return out


@gated.register_fake
def _(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.custom_op("baton::rotate", mutates_args=(), device_types="cpu")
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the first 2 * half elements of each head: `x` `[rows, heads, size]`, `cos` `[rows, half]`."""
    x, cos, sin = _floats(x, cos, sin)
    out = torch.empty_like(x)
    rows, heads, size = x.shape
    half = cos.shape[1]
    if cos.shape != sin.shape or len(cos) != rows or 2 * half > size:
        raise ValueError(f"cosines {list(cos.shape)} and sines {list(sin.shape)} for {list(x.shape)}")
    kernels().rotate(x.data_ptr(), rows, heads, size, 2 * half, cos.data_ptr(), sin.data_ptr(), out.data_ptr())
    return out


@rotate.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("baton::write_kv", mutates_args=("keys", "values"), device_types="cpu")
def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    """Write `key` and `value` `[rows, kv_heads, head_dim]` to where the sequences' block tables say.

    keys, values: one layer of the pool, `[blocks, kv_heads, block_size, head_dim]`, blocks at any stride. starts,
    lengths `[n]` and tables `[n, width]`: int32, see `baton.engine.attention.AttentionBatch`.
    """
    key, value = _floats(key, value)
    if key.shape != value.shape or key.shape[1:] != (keys.shape[1], keys.shape[3]):
        raise ValueError(f"keys {list(key.shape)} and values {list(value.shape)} for a pool of {list(keys.shape)}")
    attention = _attention(keys, values, key.shape[1], None, None)
    sequences = _sequences(starts, lengths, tables, len(key))
    kernels().write_kv(_DTYPES[keys.dtype], byref(attention), byref(sequences), key.data_ptr(), value.data_ptr())


@torch.library.custom_op("baton::paged_attention", mutates_args=(), device_types="cpu")
def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of `query` `[rows, heads, head_dim]`, scaled already, over the pool; the same shape.

    The rest is as for `write_kv` and `baton.engine.attention.AttentionKind`.
    """
    (query,) = _floats(query)
    if query.shape[1] % keys.shape[1] or query.shape[2] != keys.shape[3]:
        raise ValueError(f"queries {list(query.shape)} for a pool of {list(keys.shape)}")
    out = torch.empty_like(query)
    attention = _attention(keys, values, query.shape[1], window, softcap)
    sequences = _sequences(starts, lengths, tables, len(query))
    kernels().attend(_DTYPES[keys.dtype], byref(attention), byref(sequences), query.data_ptr(), out.data_ptr())
    return out


@paged_attention.register_fake
def _(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    return torch.empty_like(query)


def _floats(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    for tensor in tensors:
        if tensor.dtype != torch.float32:
            raise TypeError(f"must be float32, not {tensor.dtype}")
    return tuple(tensor.contiguous() for tensor in tensors)


def _attention(
    keys: torch.Tensor, values: torch.Tensor, heads: int, window: int | None, softcap: float | None
) -> AttentionStruct:
    _, kv_heads, block_size, head_dim = keys.shape
    if keys.dtype not in _DTYPES or keys.dtype != values.dtype:
        raise TypeError(f"keys and values must be float32 or bfloat16, not {keys.dtype} and {values.dtype}")
    if head_dim % 2 and keys.dtype == torch.bfloat16:
        raise ValueError(f"heads of an odd size, {head_dim}, must be float32")
    dense = (block_size * head_dim, head_dim, 1)
    if keys.stride() != values.stride() or keys.stride()[1:] != dense:
        raise ValueError(f"the pool's heads must be dense: keys have strides {keys.stride()}, values {values.stride()}")
    return AttentionStruct(
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0),
        heads,
        kv_heads,
        head_dim,
        block_size,
        window or 0,
        softcap or 0.0,
    )


def _sequences(starts: torch.Tensor, lengths: torch.Tensor, tables: torch.Tensor, rows: int) -> SequencesStruct:
    for tensor in (starts, lengths, tables):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"starts, lengths and tables must be contiguous int32, not {tensor.dtype}")
    if not len(starts) == len(lengths) == len(tables) or int(lengths.sum()) != rows:
        raise ValueError(
            f"{len(starts)} starts, {len(lengths)} lengths of {int(lengths.sum())} rows in all and {len(tables)} "
            f"block tables for {rows} rows"
        )
    return SequencesStruct(*tables.shape, starts.data_ptr(), lengths.data_ptr(), tables.data_ptr())
