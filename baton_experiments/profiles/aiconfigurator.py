"""Tables of NVIDIA's AIConfigurator: single operations timed on one GPU, as CSV files in one folder (milliseconds).

    context attention      batch_size, isl: prompts of one length, nothing before them
    generation attention   batch_size, step: one token each behind so many
    gemm                   m, n, k
    nccl                   num_gpus, message_size in elements: see `links`

Of a model there are attention and two of its matrix products; a step of the whole model is put together here. What the
tables lack is derived: other products from the roofline, by the share of it that the nearest measured product reaches
with as many rows; what only reads and writes memory by its bytes. Must not know clusters.
"""

from __future__ import annotations

from collections import defaultdict
from math import sqrt
from pathlib import Path

import msgspec

from baton.engine.request import StepPlan
from baton.errors import ConfigError
from baton.step_log import StepShape
from baton_cluster.latency import LinkModel
from baton_experiments.anatomy.devices import DEVICES, Device
from baton_experiments.profiles.choice import ProfileChoice
from baton_experiments.profiles.links import is_nccl, read_link
from baton_experiments.profiles.memory import kv_note, kv_tokens_that_fit
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.profiles.shapes import DECODERS, Decoder
from baton_experiments.profiles.tables import Curve, Plane, header_of, read_rows

FORMAT = "aiconfigurator"
ENGINE = "vllm"
SOURCE = "AIConfigurator (ai-dynamo/aiconfigurator), Apache-2.0"
MODEL = "meta-llama/Llama-3.1-8B"
"""The one whose attention and products the tables are looked through for."""
COMMON = ("version", "device", "op_name", "latency")
GEMM = ("gemm_dtype", "m", "n", "k")
ATTENTION = (
    "batch_size",
    "isl",
    "num_heads",
    "num_key_value_heads",
    "head_dim",
    "attn_dtype",
    "kv_cache_dtype",
    "step",
)
DTYPE = "bfloat16"
MILLI = 1e-3


class OperationLatency(msgspec.Struct, frozen=True):
    """Seconds."""

    rows: Curve
    """All that follows the rows of a step: products, norms, activations, embedding."""
    sampled: Curve
    """By requests in the step: the output matrix."""
    context: Plane
    """Attention of all layers for prompts, by their number and length."""
    generation: Plane
    """For decodes, by their number and context."""
    kv_token_s: float
    """Reading the KV of one token, all layers, at the memory's full bandwidth: decodes take no less."""

    def step_s(self, plan: StepPlan) -> float:
        shape = StepShape.of(plan)
        seconds = self.rows(shape.chunk_tokens + shape.decodes) + self.sampled(len(plan.items))
        if shape.chunks:
            # As long as a prompt that attends to as many positions as a chunk does on average.
            length = (sqrt(8 * shape.chunk_attended / shape.chunks + 1) - 1) / 2
            seconds += self.context(shape.chunks, length)
        if shape.decodes:
            attention = self.generation(shape.decodes, shape.decode_context / shape.decodes)
            seconds += max(attention, shape.decode_context * self.kv_token_s)
        return seconds


def is_table(path: Path) -> bool:
    return header_of(path).issuperset(COMMON) and not is_nccl(path)


def choices(folder: Path) -> list[ProfileChoice]:
    """Of a folder that holds all three tables; none otherwise."""
    tables = _tables(folder)
    if not {"context_attention", "generation_attention", "gemm"} <= tables.keys():
        return []
    return [ProfileChoice(FORMAT, MODEL, read_rows(tables["gemm"], COMMON)[0].text("device"), 1, ENGINE, folder)]


def read(choice: ProfileChoice) -> EngineProfile:
    """Raises ConfigError that names file and line."""
    tables = _tables(choice.path)
    shape, device = DECODERS[MODEL], _device(choice.hardware, tables["gemm"])
    products = _products(tables["gemm"])
    needed = {
        "qkv": (shape.hidden + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
        "o": (shape.hidden, shape.hidden),
        "gate and up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
    nearest = max(products)
    curves = {n_k: products.get(n_k) or _derived(device, products[nearest], nearest, n_k) for n_k in needed.values()}
    rows = _elementwise(shape, device, products[nearest].xs)
    for n_k in needed.values():
        rows = rows.plus(curves[n_k], shape.layers)
    attention = {
        name: _attention(tables[name], shape, by)
        for name, by in (("context_attention", "isl"), ("generation_attention", "step"))
    }
    derived = [name for name, n_k in needed.items() if n_k not in products]
    version = read_rows(tables["gemm"], COMMON)[0].text("version")
    return EngineProfile(
        name=f"{MODEL} {device.name} tp1 aiconfigurator",
        model=MODEL,
        hardware=device.name,
        latency=OperationLatency(
            rows,
            _derived(device, products[nearest], nearest, (shape.vocab, shape.hidden)),
            attention["context_attention"],
            attention["generation_attention"],
            device.seconds(0, shape.kv_bytes_per_token),
        ),
        kv_bytes_per_token=shape.kv_bytes_per_token,
        kv_tokens=kv_tokens_that_fit(shape, device.memory_gib or 0, shape.kv_bytes_per_token),
        gpus=1,
        link=_link(choice.path),
        source=f"{SOURCE}: vLLM {version}, {choice.hardware}, {DTYPE}",
        notes=(
            f"not measured and derived from the roofline of {device.name}, by the share of it that "
            f"{nearest[0]} x {nearest[1]} reaches: {', '.join(derived)}, output matrix",
            "norms, rotary embedding, activation, embedding take what their bytes take; nothing for sampler and host",
            "a chunk behind other tokens attends as long as a prompt of as many positions does",
            kv_note(device.memory_gib or 0),
        ),
    )


def _tables(folder: Path) -> dict[str, Path]:
    """By operation; of several files of one the first."""
    found: dict[str, Path] = {}
    for path in sorted((*folder.glob("*.csv"), *folder.glob("*_perf.txt"))):
        if is_table(path):
            found.setdefault(read_rows(path, COMMON)[0].text("op_name"), path)
    return found


def _device(name: str, path: Path) -> Device:
    known = [device for device in DEVICES.values() if device.name in name.replace("NVIDIA ", "").split()]
    if not known:
        raise ConfigError(
            str(path), f"is of the device {name}, whose peaks are not known here", allowed=", ".join(DEVICES)
        )
    return known[0]


def _products(path: Path) -> dict[tuple[int, int], Curve]:
    """By n and k: seconds by rows."""
    points: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for row in read_rows(path, (*COMMON, *GEMM)):
        if row.text("gemm_dtype") == DTYPE:
            points[row.count("n"), row.count("k")].append((row.count("m"), row.number("latency", scale=MILLI)))
    if not points:
        raise ConfigError(str(path), f"has no products in {DTYPE}")
    return {n_k: Curve.of(measured) for n_k, measured in points.items()}


def _derived(device: Device, measured: Curve, of: tuple[int, int], wanted: tuple[int, int]) -> Curve:
    """Seconds of another product by rows, at the share of the roofline that a measured one reaches."""

    def least(m: float, n: int, k: int) -> float:
        return device.seconds(2 * m * n * k, 2 * (m * k + k * n + m * n))

    return Curve.of((m, s * least(m, *wanted) / least(m, *of)) for m, s in zip(measured.xs, measured.ys, strict=True))


def _elementwise(shape: Decoder, device: Device, rows: tuple[float, ...]) -> Curve:
    """What only moves bytes: norms with the residual, rotary embedding and activation of all layers, the embedding."""
    norms = 2 * 4 * shape.hidden  # hidden state and residual, read and written
    rotary = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    activation = 3 * shape.intermediate
    numbers = shape.layers * (norms + rotary + activation) + 4 * shape.hidden
    return Curve.of((m, device.seconds(0, 2 * m * numbers)) for m in rows)


def _attention(path: Path, shape: Decoder, by: str) -> Plane:
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    points = []
    for row in read_rows(path, (*COMMON, *ATTENTION)):
        same = (row.count("num_heads"), row.count("num_key_value_heads"), row.count("head_dim")) == heads
        full = "window_size" not in row or row.count("window_size") == 0
        if same and full and (row.text("attn_dtype"), row.text("kv_cache_dtype")) == (DTYPE, DTYPE):
            seconds = row.number("latency", scale=MILLI * shape.layers)
            points.append((row.count("batch_size"), row.count(by) + (by == "step"), seconds))
    if not points:
        raise ConfigError(str(path), f"has no rows of {heads[0]} heads, {heads[1]} of them with KV, in {DTYPE}")
    return Plane.of(points)


def _link(folder: Path) -> LinkModel | None:
    tables = [path for path in sorted((*folder.glob("*.csv"), *folder.glob("*_perf.txt"))) if is_nccl(path)]
    return read_link(tables[0]) if tables else None
