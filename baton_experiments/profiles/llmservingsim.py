"""Profiles of LLMServingSim: kernels of one decoder layer, timed inside vLLM, as a folder of tables (microseconds).

    meta.yaml          model, hardware, how it was measured
    dense.csv          layer, tokens: what follows the tokens of a step
    per_sequence.csv   layer, sequences: what follows its requests
    attention.csv      prefill_chunk, kv_prefill, n_decode, kv_decode: tokens of prompts and KV before them, decodes
                       and KV of each

The tables lie beside `meta.yaml` or in `tp1`, `tp2`, ... below it. A step is the embedding, every layer, and the head,
one after the other; the host's time between kernels and steps is not in it. Must not know clusters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from baton.engine.request import StepPlan
from baton.errors import ConfigError
from baton_experiments.profiles.choice import ProfileChoice
from baton_experiments.profiles.memory import kv_note, kv_tokens_that_fit, memory_gib
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.profiles.shapes import decoder
from baton_experiments.profiles.tables import Curve, Plane, common_axes, place, read_rows

FORMAT = "llmservingsim"
ENGINE = "vllm"
SOURCE = "LLMServingSim (casys-kaist/LLMServingSim), MIT"
TABLES = ("attention.csv", "dense.csv", "per_sequence.csv")
ONCE = ("embedding", "final_layernorm")
TWICE = ("layernorm",)
"""Before attention and before the MLP."""
EACH = ("qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
PER_SEQUENCE = ("lm_head", "sampler")
MICRO = 1e-6


class AttentionGrid(msgspec.Struct, frozen=True):
    """Seconds of attention in all layers, by four numbers; linear in each between the points."""

    chunk: tuple[float, ...]
    kv_prefill: tuple[float, ...]
    decodes: tuple[float, ...]
    kv_decode: tuple[float, ...]
    seconds: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]
    """By chunk, decodes, kv_prefill, kv_decode."""

    def __call__(self, chunk: float, kv_prefill: float, decodes: float, kv_decode: float) -> float:
        c, c_share = place(self.chunk, chunk)
        d, d_share = place(self.decodes, decodes)
        p, p_share = place(self.kv_prefill, kv_prefill)
        k, k_share = place(self.kv_decode, kv_decode)
        total = 0.0
        for plane, c_part in ((self.seconds[c], 1 - c_share), (self.seconds[c + 1], c_share)):
            for table, d_part in ((plane[d], 1 - d_share), (plane[d + 1], d_share)):
                part = c_part * d_part
                if part:
                    low, high = table[p], table[p + 1]
                    at_low = low[k] + k_share * (low[k + 1] - low[k])
                    at_high = high[k] + k_share * (high[k + 1] - high[k])
                    total += part * (at_low + p_share * (at_high - at_low))
        return total


class LayeredLatency(msgspec.Struct, frozen=True):
    """Seconds."""

    dense: Curve
    """Everything that follows the tokens of a step."""
    per_sequence: Curve
    """By requests in the step."""
    decode: Plane
    """Attention of decodes alone, by their number and their mean context."""
    prefill: Plane
    """Of chunks alone, by their tokens and the mean KV before them."""
    mixed: AttentionGrid
    skew: float = 0.0
    """Of a batch of unequal decodes: the share of the way from their mean context to the longest."""

    def step_s(self, plan: StepPlan) -> float:
        tokens = attended = decodes = context = longest = 0
        for item in plan.items:
            n, start = item.num_tokens, item.start
            if n == 1:
                decodes += 1
                context += start + 1
                if start >= longest:
                    longest = start + 1
            else:
                tokens += n
                attended += n * start + n * (n + 1) // 2
        seconds = self.dense(tokens + decodes) + self.per_sequence(len(plan.items))
        # Several chunks attend as one chunk of their tokens does behind so much KV; less than none for short prompts.
        before = max(0.0, attended / tokens - (tokens + 1) / 2) if tokens else 0.0
        if not decodes:
            return seconds + self.prefill(tokens, before)
        mean = context / decodes
        at_mean = self._attention(tokens, before, decodes, mean)
        if self.skew and longest > mean:
            at_longest = self._attention(tokens, before, decodes, longest)
            at_mean += self.skew * max(0.0, at_longest - at_mean)
        return seconds + at_mean

    def _attention(self, tokens: int, before: float, decodes: int, context: float) -> float:
        if not tokens:
            return self.decode(decodes, context)
        return self.mixed(tokens, before, decodes, context)


def is_folder(path: Path) -> bool:
    """Whether it holds the tables, or one folder for each tensor parallel degree that does."""
    return bool(_folders(path))


def choices(path: Path) -> list[ProfileChoice]:
    found = []
    for tp, folder in _folders(path).items():
        meta = _meta(folder)
        degree = tp or _effective_tp(meta)
        found.append(ProfileChoice(FORMAT, str(meta["model"]), str(meta["hardware"]), degree, ENGINE, folder))
    return found


def read(choice: ProfileChoice, *, gpu_memory_gib: float | None = None) -> EngineProfile:
    """Raises ConfigError that names file and line."""
    folder = choice.path
    meta = _meta(folder)
    shape = decoder(choice.model, str(folder / "meta.yaml"))
    dense = _curves(folder / "dense.csv", "tokens", (*ONCE, *TWICE, *EACH))
    total = dense[ONCE[0]].plus(dense[ONCE[1]])
    for names, times in ((TWICE, 2), (EACH, 1)):
        for name in names:
            total = total.plus(dense[name], times * shape.layers)
    heads = _curves(folder / "per_sequence.csv", "sequences", PER_SEQUENCE)
    decode, prefill, mixed = _attention(folder / "attention.csv", shape.layers * MICRO)
    skew = _skew(meta, choice.tp)
    latency = LayeredLatency(
        total.scaled(MICRO), heads["lm_head"].plus(heads["sampler"]).scaled(MICRO), decode, prefill, mixed, skew
    )
    gib = memory_gib(choice.hardware) if gpu_memory_gib is None else gpu_memory_gib
    return EngineProfile(
        name=f"{choice.model} {choice.hardware} tp{choice.tp}",
        model=choice.model,
        hardware=choice.hardware,
        latency=latency,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        kv_tokens=kv_tokens_that_fit(shape, gib * choice.tp, shape.kv_bytes_per_token),
        gpus=choice.tp,
        source=f"{SOURCE}: {folder.name}, vLLM {meta.get('vllm_version', 'of unknown version')}",
        notes=(
            f"{shape.layers} layers one after the other, the kernels' own time; nothing for the host between steps",
            f"steps of up to {total.xs[-1]:g} tokens and {heads['lm_head'].xs[-1]:g} requests, attention to "
            f"{decode.curves[0].xs[-1]:g} tokens were measured; beyond, the tables go on as a line",
            f"decodes of unequal context: {skew:g} of the way from the mean to the longest, as the profile's fit says",
            kv_note(gib),
        ),
    )


def _folders(path: Path) -> dict[int, Path]:
    """By tensor parallel degree; 0: only `meta.yaml` can tell."""
    if all((path / name).is_file() for name in TABLES):
        return {0: path}
    found = {}
    for folder in sorted(path.glob("tp*")):
        degree = folder.name[2:]
        if degree.isdecimal() and all((folder / name).is_file() for name in TABLES):
            found[int(degree)] = folder
    return found


def _meta(folder: Path) -> dict[str, Any]:
    for path in (folder / "meta.yaml", folder.parent / "meta.yaml"):
        if path.is_file():
            try:
                meta = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
                raise ConfigError(str(path), f"cannot be read: {' '.join(str(e).split())}") from None
            missing = [name for name in ("model", "hardware") if not isinstance(meta, dict) or name not in meta]
            if missing:
                raise ConfigError(str(path), f"does not say {missing[0]}")
            return dict(meta)
    raise ConfigError(str(folder / "meta.yaml"), "is missing; it says which model and hardware the tables are of")


def _effective_tp(meta: dict[str, Any]) -> int:
    effective = meta.get("engine_effective")
    return int(effective.get("tensor_parallel_size", 1)) if isinstance(effective, dict) else 1


def _skew(meta: dict[str, Any], tp: int) -> float:
    """The profile's pooled coefficient; 0 where none was fitted."""
    fit = meta.get("skew_fit")
    if not isinstance(fit, dict) or not fit.get("enabled"):
        return 0.0
    by_tp = fit.get("per_tp") or {}
    entry = by_tp.get(tp) or by_tp.get(str(tp)) or {}
    return float(entry.get("alpha_default", 0.0))


def _curves(path: Path, column: str, layers: tuple[str, ...]) -> dict[str, Curve]:
    points: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in read_rows(path, ("layer", column, "time_us")):
        points[row.text("layer")].append((row.count(column), row.number("time_us")))
    missing = [layer for layer in layers if layer not in points]
    if missing:
        raise ConfigError(str(path), f"has no layer {missing[0]}", allowed=f"it has {', '.join(sorted(points))}")
    return {layer: Curve.of(points[layer]) for layer in layers}


Point = tuple[float, float, float, float]
"""Chunk, KV before it, decodes, context of each."""


def _attention(path: Path, scale: float) -> tuple[Plane, Plane, AttentionGrid]:
    """Of decodes alone, of chunks alone, of both."""
    table: dict[Point, float] = {}
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    for row in read_rows(path, (*columns, "time_us")):
        chunk, before, decodes, context = (row.count(column) for column in columns)
        table[chunk, before, decodes, context] = row.number("time_us", scale=scale)
    alone = [(d, k, s) for (c, _, d, k), s in table.items() if c == 0]
    chunks = [(c, b, s) for (c, b, d, _), s in table.items() if d == 0]
    if not alone or not chunks:
        raise ConfigError(str(path), f"has no rows of {'decodes' if not alone else 'chunks'} alone")
    decode, prefill = Plane.of(alone), Plane.of(chunks)
    return decode, prefill, _grid(path, table, decode, prefill)


def _grid(path: Path, table: dict[Point, float], decode: Plane, prefill: Plane) -> AttentionGrid:
    """Of the points that make up a grid, with its borders: no chunk, no decode."""
    contexts: dict[tuple[float, float], dict[float, set[float]]] = {}
    for chunk, before, many, context in table:
        if chunk and many:
            contexts.setdefault((chunk, many), {}).setdefault(before, set()).add(context)
    # Each sweep is a grid. One whose contexts begin later than another's refines a part of it, and is left out.
    first = {pair: min(map(min, by_before.values())) for pair, by_before in contexts.items()}
    axes = [
        common_axes({before: frozenset(found) for before, found in by_before.items()})
        for pair, by_before in contexts.items()
        if first[pair] == min(first.values())
    ]
    befores = _common(rows for rows, _ in axes)
    kv = _common(columns for _, columns in axes)
    many_of: dict[float, set[float]] = {}
    for chunk, many in contexts:
        if all((chunk, before, many, context) in table for before in befores for context in kv):
            many_of.setdefault(chunk, set()).add(many)
    if len(befores) < 2 or len(kv) < 2 or not many_of:
        raise ConfigError(str(path), "has too few rows of chunks and decodes together to interpolate between")
    chunks, decodes = common_axes({chunk: frozenset(found) for chunk, found in many_of.items()})

    def value(chunk: float, before: float, many: float, context: float) -> float:
        if chunk and many:
            return table[chunk, before, many, context]
        if chunk:
            return prefill(chunk, before)
        return decode(many, context) if many else 0.0

    chunks, decodes = (0.0, *chunks), (0.0, *decodes)
    return AttentionGrid(
        chunks,
        befores,
        decodes,
        kv,
        tuple(tuple(tuple(tuple(value(c, b, d, k) for k in kv) for b in befores) for d in decodes) for c in chunks),
    )


def _common(axes: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    sets = [frozenset(axis) for axis in axes]
    return tuple(sorted(frozenset.intersection(*sets))) if sets else ()
