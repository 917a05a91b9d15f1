"""What the workers of a point did: how busy they were, on what, and how full their KV pools. Arithmetic over steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from baton.step_log import StepRecord
from baton_experiments.records import Run, Setting
from baton_experiments.study import Study

FULL = 0.95
"""Of the blocks: some are always between two owners."""


class WorkerUse(msgspec.Struct, frozen=True):
    """What one worker did between the first and the last measured arrival, over all seeds."""

    prefills: bool
    decodes: bool
    busy: float
    """Share of the time in steps."""
    prompt_share: float
    """Of the time in steps: those with a chunk of a prompt."""
    step_ms: float | None
    """The median step without a chunk."""
    chunk_step_ms: float | None
    """The median step with one."""
    batch: float
    """Tokens that a step without a chunk decodes, on average."""
    kv_full: float | None
    """The most blocks held, of those there are; None: not known how many there are."""
    kv_full_share: float
    """Of the steps: those with less than 5 % of the blocks free."""
    waiting: float
    """Requests waiting in it, on average over steps."""


def worker_use(study: Study, setting: Setting, rate: float) -> dict[str, WorkerUse]:
    """By worker; empty where no steps were recorded."""
    chosen: dict[str, list[StepRecord]] = defaultdict(list)
    seconds = 0.0
    for run, steps in study.steps.items():
        if (run.setting, run.rate) != (setting, rate) or not steps:
            continue
        first, last = window(study, run, steps)
        seconds += last - first
        for step in steps:
            if first <= step.start_s < last:
                chosen[step.worker].append(step)
    records = study.records[setting, rate]
    prefills = {r.prefill_worker for r in records}
    decodes = {r.decode_worker for r in records}
    return {
        name: _use(chosen[name], seconds, name in prefills, name in decodes, study.kv_blocks.get(name))
        for name in sorted(chosen)
    }


def window(study: Study, run: Run, steps: Sequence[StepRecord]) -> tuple[float, float]:
    """Of a run, in which workers are judged: between its measured arrivals, else from the first step to the last."""
    first, last = study.windows.get(run, (0.0, 0.0))
    if last > first:
        return first, last
    return min(s.start_s for s in steps), max(s.start_s + s.seconds for s in steps)


def _use(steps: list[StepRecord], seconds: float, prefills: bool, decodes: bool, kv_blocks: int | None) -> WorkerUse:
    took = np.array([s.seconds for s in steps])
    chunks = np.array([s.shape.chunks > 0 for s in steps])
    held = np.array([s.kv_blocks for s in steps])
    total = float(took.sum())
    plain = took[~chunks]
    decoded = np.array([s.shape.decodes for s in steps])
    return WorkerUse(
        prefills=prefills,
        decodes=decodes,
        busy=min(1.0, total / seconds) if seconds > 0 else 0.0,
        prompt_share=float(took[chunks].sum()) / total if total > 0 else 0.0,
        step_ms=float(np.median(plain)) * 1e3 if plain.size else None,
        chunk_step_ms=float(np.median(took[chunks])) * 1e3 if chunks.any() else None,
        batch=float(decoded[~chunks].mean()) if plain.size else 0.0,
        kv_full=float(held.max()) / kv_blocks if kv_blocks else None,
        kv_full_share=float((held >= FULL * kv_blocks).mean()) if kv_blocks else 0.0,
        waiting=float(np.mean([s.num_waiting for s in steps])),
    )
