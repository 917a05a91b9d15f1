"""The anatomy of one model on one device, as plain data: what `baton anatomy` prints, plots and writes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from baton.engine.memory import GPU_SHARE
from baton.errors import ConfigError
from baton_experiments.anatomy import allocators, published
from baton_experiments.anatomy.arithmetic import (
    ELEMENT_BYTES,
    Sizes,
    Work,
    decode,
    decode_batch_at_ridge,
    element_bytes,
    kv_bytes_per_token,
    memory_fit,
    prefill,
    weight_bytes,
    work_with_cache,
    work_without_cache,
)
from baton_experiments.anatomy.devices import Device
from baton_experiments.anatomy.shape import ModelShape

BLOCK_SIZE = 16
PREFILLS = (16, 64, 256, 1024, 4096, 16_384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
GENERATED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PROMPT = 16
"""Of the answers of growing length."""
MAX_REQUESTS = 50_000
"""For the useful share of KV memory: more take minutes."""
CONTEXTS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


class Question(msgspec.Struct, frozen=True):
    """What is asked beside the model."""

    device: Device | None = None
    gpus: int = 1
    """That share the weights evenly (tensor parallel), each with its own memory and bandwidth."""
    context: int = 1024
    """Tokens of each sequence of a decode batch."""
    weight_dtype: str | None = None
    """None: as the model names it."""
    kv_dtype: str | None = None
    lengths: tuple[tuple[int, int], ...] = ()
    """Prompts and answers, for the useful share of KV memory; none: it is left out."""
    lengths_name: str = ""
    slots: int | None = None
    """Token slots of the KV memory; None: what the device leaves beside the weights."""
    max_len: int | None = None
    """Prompt plus output that are served; None: the model's limit."""


def anatomy(shape: ModelShape, question: Question) -> dict[str, Any]:
    """Everything. Sections that need a device are None without one.

    Raises ConfigError for a dtype or a workload that nothing can be said of.
    """
    dtype = question.weight_dtype or shape.dtype
    kv_dtype = question.kv_dtype or dtype
    sizes = _sizes(shape, question, dtype, kv_dtype)
    device = _together(question.device, question.gpus)
    fit = _memory(shape, device, sizes)
    return {
        "model": msgspec.to_builtins(shape),
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "kv_cache": _cache(shape, sizes),
        "weights": {
            "parameters": shape.parameters,
            "active_parameters": shape.active,
            "bytes": weight_bytes(shape, sizes),
            "quantization": None if question.weight_dtype else shape.quantization,
        },
        "device": None if device is None else msgspec.to_builtins(device) | {"ridge": device.ridge},
        "memory": fit,
        "prefill": [_entry(prefill(shape, n, 0, sizes), device, tokens=n) for n in PREFILLS if n <= shape.max_len],
        "decode": [
            _entry(decode(shape, batch, question.context, sizes), device, batch=batch, context=question.context)
            for batch in BATCHES
        ],
        "decode_compute_bound_from": None
        if device is None
        else decode_batch_at_ridge(shape, question.context, device.ridge, sizes),
        "work_with_cache": [g._asdict() for g in work_with_cache(shape, PROMPT, GENERATED, sizes)],
        "work_without_cache": [g._asdict() for g in work_without_cache(shape, PROMPT, GENERATED, sizes)],
        "kv_memory_use": _use(shape, question, fit),
    }


def _sizes(shape: ModelShape, question: Question, dtype: str, kv_dtype: str) -> Sizes:
    weight = element_bytes(dtype, "--dtype" if question.weight_dtype else f"{shape.name}: dtype")
    kv = element_bytes(kv_dtype, "--kv-dtype" if question.kv_dtype else "--dtype")
    if question.weight_dtype or shape.quantization is None:
        return Sizes(weight, kv)
    if shape.body_bits is None or shape.experts_bits is None:
        raise ConfigError(
            "--dtype",
            f"is needed: {shape.name} is quantised ({shape.quantization}), and its config.json does not say in how "
            "many bits",
            allowed=", ".join(ELEMENT_BYTES),
        )
    return Sizes(weight, kv, shape.body_bits / 8, shape.experts_bits / 8)


def _together(device: Device | None, gpus: int) -> Device | None:
    if device is None or gpus == 1:
        return device
    memory = None if device.memory_gib is None else device.memory_gib * gpus
    return Device(f"{gpus} x {device.name}", device.tflops * gpus, device.gb_per_s * gpus, memory, device.source)


def _cache(shape: ModelShape, sizes: Sizes) -> dict[str, Any]:
    each = kv_bytes_per_token(shape, sizes)
    return {
        "bytes_per_token": each,
        "bytes_per_token_multi_head": math.ceil(shape.kv_per_token_multi_head * sizes.kv),
        "bytes_per_block": each * BLOCK_SIZE,
        "block_size": BLOCK_SIZE,
        "by_context": [{"tokens": n, "bytes": n * each} for n in CONTEXTS if n <= shape.max_len],
    }


def _memory(shape: ModelShape, device: Device | None, sizes: Sizes) -> dict[str, Any] | None:
    if device is None or device.memory_gib is None:
        return None
    fit = memory_fit(shape, device.memory_gib * 2**30, GPU_SHARE, sizes)
    return fit._asdict() | {
        "share": GPU_SHARE,
        "requests": [
            {"tokens": n, "requests": fit.requests(n, BLOCK_SIZE)} for n in (128, 512, *CONTEXTS) if n <= shape.max_len
        ],
    }


def _entry(work: Work, device: Device | None, **what: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        **what,
        "operations": work.operations,
        "bytes": work.bytes,
        "kv_share_of_bytes": work.kv_share,
        "intensity": work.intensity,
    }
    if device is not None:
        entry |= {
            "side": device.side(work.operations, work.bytes),
            "floor_ms": device.seconds(work.operations, work.bytes) * 1e3,
        }
    return entry


def _use(shape: ModelShape, question: Question, fit: dict[str, Any] | None) -> dict[str, Any] | None:
    slots = question.slots if question.slots is not None else (fit or {}).get("kv_tokens")
    if not question.lengths or not slots:
        return None
    # A buddy's largest span is a power of two.
    max_len = min(question.max_len or shape.max_len, 1 << (slots.bit_length() - 1))
    lengths = [pair for pair in question.lengths if sum(pair) <= max_len]
    if not lengths:
        raise ConfigError(
            "--workload", "has no request that fits", value=question.lengths_name, allowed=f"<= {max_len}"
        )
    times = allocators.times_to_fill(lengths, slots)
    if times > (at_most := max(1, MAX_REQUESTS // len(lengths))):
        most = slots * at_most // times
        raise ConfigError(
            "--slots", "are more KV memory than is filled here with such requests", value=slots, allowed=f"<= {most}"
        )
    found = allocators.compare(list(lengths) * times, slots=slots, max_len=max_len, block_size=BLOCK_SIZE)
    return {
        "slots": slots,
        "max_len": max_len,
        "lengths": question.lengths_name,
        "requests": len(lengths),
        "times": times,
        "left_out": len(question.lengths) - len(lengths),
        "mean_prompt_tokens": sum(p for p, _ in lengths) / len(lengths),
        "mean_output_tokens": sum(a for _, a in lengths) / len(lengths),
        "usage": {name: usage._asdict() for name, usage in found.items()},
        "published": published.USAGE if question.lengths_name == published.NAME else None,
    }


def growth(entries: Sequence[dict[str, Any]], length: str = "generated", work: str = "operations") -> float | None:
    """By what power of the length the work grows over the last doubling or so: 1 is linear, 2 quadratic.

    None without two lengths.
    """
    if len(entries) < 2:
        return None
    one, two = entries[-2], entries[-1]
    return math.log(two[work] / one[work]) / math.log(two[length] / one[length])


def growth_text(growths: dict[str, Any]) -> str:
    """`growth` of measured answers in words."""
    one, two = (growths[name]["seconds"] for name in ("with_cache", "without_cache"))
    return f"over the last doubling time grows with the length's power {one:.2f}, without cache {two:.2f}"
