"""Columns: what a set of requests experienced, as arrays, so that tens of thousands are judged in milliseconds.

Pure arithmetic over records. Must not know placements, SLOs or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.timeline import Stage
from baton_experiments.records import RequestRecord

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

STAGES = tuple(str(stage) for stage in Stage)
PERCENTILES = (50, 90, 99)


def distribution(values: Sequence[float] | Floats) -> dict[str, float] | None:
    """p50, p90, p99 and max of `values` (linear interpolation), in their unit; None for no values."""
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        return None
    points = np.percentile(array, PERCENTILES)
    return {**{f"p{p}": float(v) for p, v in zip(PERCENTILES, points, strict=True)}, "max": float(array.max())}


class Columns(msgspec.Struct, frozen=True, eq=False):
    """Requests by seed and index. Milliseconds, unless the name says otherwise; NaN where there is no value."""

    seed: Ints
    index: Ints
    at_s: Floats
    """Planned arrival since the start of its run."""
    done: Bools
    """It got all its tokens. What failed meets no SLO."""
    ttft: Floats
    latency: Floats
    tpot: Floats
    """The mean gap; 0 for a request of one token, as there is nothing to wait for (so does vLLM's benchmark)."""
    prompt_tokens: Ints
    output_tokens: Ints
    gaps: Floats
    """Of all requests that are done, one after another."""
    gap_row: Ints
    """The request of each gap."""
    first_gap: Ints
    """Where the gaps of each request begin."""
    stages: dict[str, Floats]
    """By name; 0 where a request did not pass a stage. Empty where no request has any."""
    residual: Floats
    """0 where it is not known."""
    kv_bytes: Ints

    def __len__(self) -> int:
        return len(self.seed)

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> Columns:
        rows = sorted(records, key=lambda r: (r.seed, r.index))
        done = np.array([r.error is None and r.ttft_ms is not None for r in rows], dtype=bool)
        counts = np.array([len(r.tbt_ms) if ok else 0 for r, ok in zip(rows, done, strict=True)], dtype=np.int64)
        gaps = np.fromiter(
            chain.from_iterable(r.tbt_ms for r, ok in zip(rows, done, strict=True) if ok), np.float64, int(counts.sum())
        )
        gap_row = np.repeat(np.arange(len(rows)), counts)
        sums = np.bincount(gap_row, weights=gaps, minlength=len(rows))
        tpot = np.where(done, sums / np.maximum(counts, 1), np.nan)
        named = any(r.stages_ms for r in rows)
        return cls(
            seed=_ints([r.seed for r in rows]),
            index=_ints([r.index for r in rows]),
            at_s=_floats([r.at_s for r in rows]),
            done=done,
            ttft=np.where(done, _floats([r.ttft_ms for r in rows]), np.nan),
            latency=np.where(done, _floats([r.latency_ms for r in rows]), np.nan),
            tpot=tpot,
            prompt_tokens=_ints([r.prompt_tokens for r in rows]),
            output_tokens=_ints([r.output_tokens for r in rows]),
            gaps=gaps,
            gap_row=gap_row,
            first_gap=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)[:-1]]) if rows else _ints([]),
            stages={s: _floats([r.stages_ms.get(s, 0.0) for r in rows]) for s in STAGES} if named else {},
            residual=_floats([r.residual_ms or 0.0 for r in rows]),
            kv_bytes=_ints([r.kv_bytes for r in rows]),
        )

    def select(self, name: str) -> tuple[Floats, Ints]:
        """The values of `ttft`, `tbt`, `tpot` or `latency` there are, and the request of each.

        A request of one token has no `tpot` here: it is no mean gap of 0 ms.
        """
        if name == "tbt":
            return self.gaps, self.gap_row
        values: Floats = getattr(self, name)
        there = self.done & (self.num_gaps() > 0) if name == "tpot" else self.done & ~np.isnan(values)
        return values[there], np.flatnonzero(there)

    def num_gaps(self) -> Ints:
        """Of each request."""
        return np.bincount(self.gap_row, minlength=len(self)).astype(np.int64)

    def seconds(self) -> float:
        """From the first arrival to the last token, summed over seeds."""
        total = 0.0
        ends = self.at_s + np.nan_to_num(self.latency) / 1e3
        for seed in np.unique(self.seed):
            mine = self.seed == seed
            ended = ends[mine & self.done]
            if ended.size:
                total += float(ended.max() - self.at_s[mine].min())
        return total


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array(values, dtype=np.float64)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)
