"""Records of requests that nobody sent, with known answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from baton.step_log import StepRecord, StepShape
from baton_experiments.records import RequestRecord, Run


def record(
    ttft_ms: float | None = 100.0,
    gaps: Sequence[float] = (10.0, 10.0),
    *,
    placement: str = "split:1+1",
    rate: float = 1.0,
    seed: int = 0,
    index: int = 0,
    stages: dict[str, float] | None = None,
    error: str | None = None,
    prompt_tokens: int = 100,
    **more: Any,
) -> RequestRecord:
    """As it comes from a placement of two workers. `stages` of None: its TTFT is prefill, its gaps are decode steps."""
    split = placement.startswith("split")
    failed = error is not None or ttft_ms is None
    found = {} if failed else {"prefill": float(ttft_ms or 0.0), "decode_steps": float(sum(gaps))}
    return RequestRecord(
        placement=placement,
        rate=rate,
        seed=seed,
        index=index,
        at_s=index / rate,
        received_s=100.0 + index / rate,
        prompt_tokens=prompt_tokens,
        output_tokens=0 if failed else len(gaps) + 1,
        ttft_ms=None if failed else ttft_ms,
        latency_ms=None if failed else (ttft_ms or 0.0) + float(sum(gaps)),
        tbt_ms=[] if failed else list(gaps),
        stages_ms=found if stages is None else stages,
        residual_ms=0.0,
        prefill_worker="prefill-0" if split else f"both-{index % 2}",
        decode_worker="decode-0" if split else f"both-{index % 2}",
        kv_bytes=10 if split else 0,
        error=error,
        **more,
    )


def point(
    placement: str,
    rate: float,
    *,
    good: float,
    num_requests: int = 40,
    seeds: Iterable[int] = (0, 1, 2),
    good_ttft: float = 100.0,
    bad_ttft: float = 900.0,
    gap: float = 20.0,
    noise: float = 1.0,
    **more: Any,
) -> list[RequestRecord]:
    """Requests of which a share of `good`, spread evenly, has a TTFT of about `good_ttft`, the others of `bad_ttft`."""
    records = []
    for seed in seeds:
        rng = np.random.default_rng((seed, round(rate * 1000)))  # of the work, not of the placement
        for index, (wait, *gaps) in enumerate(rng.uniform(-noise, noise, size=(num_requests, 6))):
            is_good = int((index + 1) * good + 1e-9) > int(index * good + 1e-9)
            records.append(
                record(
                    (good_ttft if is_good else bad_ttft) + wait,
                    [gap + g for g in gaps],
                    placement=placement,
                    rate=rate,
                    seed=seed,
                    index=index,
                    **more,
                )
            )
    return records


def steps(
    run: Run,
    worker: str,
    *,
    busy: float,
    chunk_share: float = 0.0,
    step_s: float = 0.02,
    chunk_step_s: float = 0.2,
    seconds: float = 40.0,
    kv_blocks: int = 10,
    waiting: int = 0,
) -> list[StepRecord]:
    """Of one worker from second 100 on, so that it is busy for a share of the time and a share of that with chunks."""
    plain, chunks = (
        round(seconds * busy * (1 - chunk_share) / step_s),
        round(seconds * busy * chunk_share / chunk_step_s),
    )
    kinds = np.zeros(plain + chunks, dtype=bool)
    kinds[np.linspace(0, plain + chunks - 1, chunks).round().astype(int)] = True
    at, found = 100.0, []
    for is_chunk in kinds:
        took = chunk_step_s if is_chunk else step_s
        decodes = 0 if worker.startswith("prefill") else 3
        shape = (
            StepShape(1, 64, 0, 2080, decodes, 30) if is_chunk else StepShape(decodes=decodes or 1, decode_context=30)
        )
        found.append(StepRecord(worker, at, took, shape, kv_blocks, 4, waiting))
        at += took / busy
    return found
