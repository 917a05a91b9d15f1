"""FittedLatency: what a step takes, fitted to steps that ran; and the file that `baton profile` writes.

A step is matrix products over all its rows, attention of its chunks and of its decodes, and what the host does for
each of them. The first is a line through knots that may bend either way, since kernels work on tiles of rows; the
rest is linear in `StepShape`. No coefficient is negative: no work makes a step shorter.

Plain arithmetic in seconds. Must not know engines, clusters or clocks.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from baton.engine.request import StepPlan
from baton.errors import ConfigError
from baton.step_log import StepShape
from baton_cluster.latency import LinkModel
from baton_experiments.profiles.profile import EngineProfile

FORMAT = "baton-profile"
VERSION = 1
KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)
STEPS_PER_KNOT = 8
"""Fewer between two knots say nothing about the bend there; nor do less than one of `KNOTS_AT_MOST` parts of all."""
KNOTS_AT_MOST = 24
MIN_STEPS = 20
HELD_OUT = 0.25
"""Of the steps: they are not fitted, but predicted."""
GOLDEN = 0.6180339887498949
"""Its multiples fall evenly into [0, 1), in step with no order that steps may have."""
KINDS = ("prefill", "decode", "mixed")
SPREAD_LEVELS = 41

Times = Sequence[tuple[StepShape, float]]
"""Steps and the seconds they took."""


class FittedLatency(msgspec.Struct, frozen=True):
    """Seconds of a step; see `fit`."""

    rows: tuple[int, ...]
    """Knots: rows of the matrix products, rising. A decode is one row, a chunk as many as it has tokens."""
    rows_s: tuple[float, ...]
    """Seconds at each, without attention; between two it rises evenly, and beyond the last as before it."""
    chunk_s: float = 0.0
    """Of each chunk, however long."""
    chunk_attended_s: float = 0.0
    """Of each position that a chunk's token attends to."""
    chunk_context_s: float = 0.0
    """Of each token whose KV was there before the chunk."""
    decode_s: float = 0.0
    """Of each decode beyond its row: sampling, and the host."""
    decode_context_s: float = 0.0
    """Of each position that a decode attends to."""
    host_s: float = 0.0
    """Between a step's end and the start of the next: what a busy worker does besides."""
    spread: tuple[float, ...] = ()
    """Quantiles, evenly spaced, of measured over predicted seconds. Empty: a shape always takes the same time."""

    def step_s(self, plan: StepPlan) -> float:
        """See `LatencyModel`. Where there is a `spread`, requests and positions of the plan draw from it."""
        seconds = self.shape_s(StepShape.of(plan))
        if self.spread:
            first = plan.items[0]
            draw = zlib.crc32(f"{first.request.key}/{first.start}/{plan.total_tokens}".encode()) / 2**32
            at = draw * (len(self.spread) - 1)
            low = int(at)
            seconds *= self.spread[low] + (at - low) * (self.spread[low + 1] - self.spread[low])
        return seconds + self.host_s

    def shape_s(self, shape: StepShape) -> float:
        """The step itself, as predicted: without `host_s` and `spread`."""
        return (
            self._rows_s(shape.chunk_tokens + shape.decodes)
            + self.chunk_s * shape.chunks
            + self.chunk_attended_s * shape.chunk_attended
            + self.chunk_context_s * shape.chunk_context
            + self.decode_s * shape.decodes
            + self.decode_context_s * shape.decode_context
        )

    def _rows_s(self, rows: int) -> float:
        knots, seconds = self.rows, self.rows_s
        if len(knots) == 1:
            return seconds[0] * max(1.0, rows / knots[0])
        if rows <= knots[0]:
            return seconds[0]
        high = min(bisect_left(knots, rows), len(knots) - 1)
        low = high - 1
        share = (rows - knots[low]) / (knots[high] - knots[low])
        return seconds[low] + share * (seconds[high] - seconds[low])


class FitError(NamedTuple):
    """How far predictions are off, on steps that were not fitted."""

    steps: int
    median: float
    """Of |predicted - measured| / measured."""
    p90: float
    bias: float
    """All predicted seconds over all measured ones, less 1."""


class Fit(NamedTuple):
    latency: FittedLatency
    errors: dict[str, FitError]
    """By kind of step, and `all`."""


def kind_of(shape: StepShape) -> str:
    """One of `KINDS`."""
    if not shape.chunks:
        return "decode"
    return "mixed" if shape.decodes else "prefill"


def fit(steps: Times, *, host_s: float = 0.0, spread: bool = False) -> Fit:
    """Fit three of four steps by the least squares of relative errors, and predict the others.

    The model returned is fitted to all of them. `spread`: with the quantiles of what is left unexplained.
    Raises ConfigError for fewer than `MIN_STEPS` steps.
    """
    steps = [(shape, seconds) for shape, seconds in steps if seconds > 0 and shape.chunk_tokens + shape.decodes > 0]
    if len(steps) < MIN_STEPS:
        raise ConfigError("steps", "are too few for a fit", value=len(steps), allowed=f">= {MIN_STEPS}")
    kept: list[tuple[StepShape, float]] = []
    held_out: list[tuple[StepShape, float]] = []
    for index, step in enumerate(steps):
        (held_out if index * GOLDEN % 1 < HELD_OUT else kept).append(step)
    tried = _fitted(kept)
    latency = msgspec.structs.replace(_fitted(steps), host_s=host_s)
    if spread:
        ratios = [seconds / tried.shape_s(shape) for shape, seconds in held_out]
        levels = np.quantile(ratios, np.linspace(0, 1, SPREAD_LEVELS))
        latency = msgspec.structs.replace(latency, spread=tuple(float(level) for level in levels))
    return Fit(latency, fit_errors(tried, held_out))


def fit_errors(latency: FittedLatency, steps: Times) -> dict[str, FitError]:
    """How well the model predicts these, by kind of step and in all."""
    errors = {}
    for kind in (*KINDS, "all"):
        group = [(latency.shape_s(shape), s) for shape, s in steps if kind in ("all", kind_of(shape))]
        if group:
            predicted, measured = np.array(group).T
            off = np.abs(predicted / measured - 1)
            bias = float(predicted.sum() / measured.sum() - 1)
            errors[kind] = FitError(len(group), float(np.median(off)), float(np.quantile(off, 0.9)), bias)
    return errors


def _fitted(steps: Times) -> FittedLatency:
    knots = _knots([shape.chunk_tokens + shape.decodes for shape, _ in steps])
    seconds = np.array([s for _, s in steps])
    features = np.array([_features(shape, knots) for shape, _ in steps], dtype=np.float64)
    # Relative errors; and columns of one size, or the solver takes small coefficients for none.
    scaled = features / seconds[:, None]
    sizes = np.linalg.norm(scaled, axis=0)
    sizes[sizes == 0] = 1.0
    solution, _ = nnls(scaled / sizes, np.ones(len(steps)))
    found: npt.NDArray[np.float64] = solution / sizes
    rows_s = np.cumsum(found[: len(knots)])
    chunk, attended, context, decode, decode_context = (float(c) for c in found[len(knots) :])
    return FittedLatency(
        knots,
        tuple(float(s) for s in rows_s),
        chunk_s=chunk,
        chunk_attended_s=attended,
        chunk_context_s=context,
        decode_s=decode,
        decode_context_s=decode_context,
    )


def _features(shape: StepShape, knots: tuple[int, ...]) -> list[float]:
    """What each coefficient is multiplied by: the first knot's seconds, what each further knot adds, the rest."""
    rows = shape.chunk_tokens + shape.decodes
    shares = [1.0 if len(knots) > 1 else max(1.0, rows / knots[0])]
    for index, (low, high) in enumerate(pairwise(knots)):
        share = max(0.0, (rows - low) / (high - low))
        is_last = index == len(knots) - 2
        shares.append(share if is_last else min(1.0, share))
    return [
        *shares,
        shape.chunks,
        shape.chunk_attended,
        shape.chunk_context,
        shape.decodes,
        shape.decode_context,
    ]


def _knots(rows: Iterable[int]) -> tuple[int, ...]:
    """Of `KNOTS`, those between which there are steps enough; the smallest and the largest step's rows at the ends."""
    ordered = sorted(rows)
    enough = max(STEPS_PER_KNOT, len(ordered) // KNOTS_AT_MOST)
    knots, since = [ordered[0]], bisect_right(ordered, ordered[0])
    for knot in KNOTS:
        upto = bisect_right(ordered, knot)
        if knot > knots[-1] and upto - since >= enough:
            knots.append(knot)
            since = upto
    if ordered[-1] > knots[-1]:
        if len(ordered) - since < enough and len(knots) > 1:
            knots.pop()
        knots.append(ordered[-1])
    return tuple(knots)


# --- the file --------------------------------------------------------------------------------------


def profile_tree(profile: EngineProfile, measured: Mapping[str, Any]) -> dict[str, Any]:
    """What `baton profile` writes. `measured`: what is not needed to read it back (errors of the fit, machine)."""
    assert isinstance(profile.latency, FittedLatency)
    return {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(profile), "measured": dict(measured)}


class _File(msgspec.Struct):
    """`EngineProfile` with the one latency model that such a file holds."""

    name: str
    model: str
    hardware: str
    latency: FittedLatency
    kv_bytes_per_token: int
    kv_tokens: int | None
    gpus: int = 0
    link: LinkModel | None = None
    source: str = ""
    notes: tuple[str, ...] = ()


def profile_of(tree: Mapping[str, Any], source: str) -> EngineProfile:
    """The profile that such a file holds. Raises ConfigError that names `source` and the place."""
    if tree.get("format") != FORMAT or tree.get("version") != VERSION:
        found = f"{tree.get('format')} {tree.get('version')}"
        raise ConfigError(source, "is no profile of this version", value=found, allowed=f"{FORMAT} {VERSION}")
    try:
        file = msgspec.convert(dict(tree), _File)
    except msgspec.ValidationError as e:
        raise ConfigError(source, f"is no profile: {e}") from None
    latency = file.latency
    rises = all(a < b for a, b in pairwise(latency.rows))
    if not latency.rows or not rises or len(latency.rows) != len(latency.rows_s) or len(latency.spread) == 1:
        raise ConfigError(source, "latency.rows must rise, with one of rows_s each, and spread be empty or two or more")
    return EngineProfile(**{name: getattr(file, name) for name in file.__struct_fields__})
