"""What a workload is like, in numbers: for the result that an experiment on it yields.

Pure. One pass; holds two lengths per request (16 bytes) and one entry per distinct block.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from baton_experiments.workloads.request import PlannedRequest, RequestShape

PERCENTILES = (50, 90, 99)


def describe(requests: Iterable[RequestShape | PlannedRequest]) -> dict[str, Any]:
    """Counts, lengths in tokens, arrivals and shared prefixes of `requests`, as plain data.

    `rate` is gaps over their sum, in requests per second; `interval_cv` the gaps' standard deviation over their
    mean: 1 for a Poisson process, more for bursts. Both None where there are no two arrivals apart.
    `shared_prefix_share` is the share of prompt tokens that an earlier request of the workload began with too:
    what a prefix cache without limits, filled on arrival, would hit.
    """
    prompts, outputs = array("q"), array("q")
    seen: dict[int, int] = {}  # tokens of each block that some prompt held
    shared = 0
    first = last = None
    gaps, mean, squares = 0, 0.0, 0.0  # Welford's running variance
    for request in requests:
        shape = request.shape if isinstance(request, PlannedRequest) else request
        prompts.append(shape.prompt_tokens)
        outputs.append(shape.output_tokens)
        shared += _note_blocks(shape, seen)
        if last is None:
            first = shape.at_s
        else:
            gaps += 1
            gap = shape.at_s - last
            delta = gap - mean
            mean += delta / gaps
            squares += delta * (gap - mean)
        last = shape.at_s
    span = 0.0 if first is None or last is None else last - first
    total = sum(prompts)
    return {
        "requests": len(prompts),
        "span_s": span,
        "rate": gaps / span if span > 0 else None,
        "interval_cv": math.sqrt(squares / gaps) / mean if span > 0 else None,
        "prompt_tokens": _lengths(prompts),
        "output_tokens": _lengths(outputs),
        "shared_prefix_share": shared / total if total else 0.0,
    }


def _note_blocks(shape: RequestShape, seen: dict[int, int]) -> int:
    """Tokens that the prompt shares with earlier ones; its blocks are seen from now on."""
    shared, left, leading = 0, shape.prompt_tokens, True
    for block in shape.blocks:
        tokens = min(shape.block_size, left)
        if tokens <= 0:
            break
        left -= tokens
        known = min(seen.get(block, 0), tokens)
        if leading:
            shared += known
            leading = known == tokens
        if known < tokens:
            seen[block] = tokens
    return shared


def _lengths(values: array[int]) -> dict[str, float] | None:
    if not values:
        return None
    lengths = np.frombuffer(values, dtype=np.int64)
    points = np.percentile(lengths, PERCENTILES)
    return {
        "mean": float(lengths.mean()),
        **{f"p{p}": float(v) for p, v in zip(PERCENTILES, points, strict=True)},
        "max": float(lengths.max()),
    }
