"""The arithmetic of a request, asked of this machine's engine: real steps of the real model, the machine's own peaks.

utilization          share of the arithmetic peak and of the memory's bandwidth that prefill and decode steps reach
kv_share_of_bytes    of what a decode step reads, the share that is cache, by batch size; and of its time, what goes
                     when the context does
work_without_cache   an answer token by token with all that is known computed anew, against
work_with_cache      the same with the cache: operations and seconds by generated length
kv_useful_share      of a live run's KV blocks, the share that holds tokens, over the time of its steps
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np

from baton.config import ClusterConfig
from baton.step_log import StepRecord
from baton_cluster.cores import assign_cores
from baton_experiments.anatomy.arithmetic import Sizes, element_bytes, step_work
from baton_experiments.anatomy.report import growth
from baton_experiments.anatomy.shape import ModelShape
from baton_experiments.peaks import Peaks, measure_peaks
from baton_experiments.step_engine import StepEngine, pinned

PREFILLS = (16, 64, 256)
BATCHES = (1, 2, 4, 8, 16, 32)
GENERATED = (4, 8, 16, 32, 64)
PROMPT = 8
"""Of the answers of growing length: short, so that the growth is the answer's."""
REPEATS = 3
LIVE_REQUESTS = 24
LIVE_PROMPT, LIVE_OUTPUT = (16, 160), (8, 48)

Progress = Callable[[str, float], None]
"""Told what is measured, and which share of all is done."""


def measure(
    config: ClusterConfig,
    shape: ModelShape,
    *,
    context: int = 512,
    progress: Progress = lambda text, share: None,
    live: bool = True,
) -> dict[str, Any]:
    """All of it, on the cores that one worker has; takes a minute or two. Raises ModelError, ConfigError.

    `live`: also serve some requests, for `kv_useful_share`; else that is None.
    """
    pool = next(iter(config.pools))
    cores, _ = assign_cores([config.pools[pool].cores], sorted(os.sched_getaffinity(0)))
    with pinned(cores[0]):
        progress("loading the model", 0.0)
        engine = StepEngine(config, pool)
        progress("measuring the machine", 0.05)
        peaks = measure_peaks(engine.built.dtype, len(cores[0]))
        found = _measure_steps(engine, shape, peaks, context, progress)
    progress("serving requests", 0.75)
    return found | {"kv_useful_share": measure_live(config, shape.vocab) if live else None}


def _measure_steps(
    engine: StepEngine, shape: ModelShape, peaks: Peaks, context: int, progress: Progress
) -> dict[str, Any]:
    element = element_bytes(engine.built.dtype)
    sizes = Sizes(element, element)
    limits = engine.limits
    context = min(context, limits.max_context)

    def timed(items: Sequence[tuple[int, int]], repeats: int = REPEATS) -> float:
        """Median seconds, by the engine's clock."""
        return float(np.median([engine.seconds(engine.plan(items)) for _ in range(repeats)]))

    def entry(items: Sequence[tuple[int, int]], **what: int) -> dict[str, Any]:
        work, seconds = step_work(shape, items, sizes), timed(items)
        return {
            **what,
            "ms": seconds * 1e3,
            "operations": work.operations,
            "bytes": work.bytes,
            "intensity": work.intensity,
            "of_peak": work.operations / seconds / peaks.operations_per_s,
            "of_bandwidth": work.bytes / seconds / peaks.bytes_per_s,
        }

    timed([(0, 2)], 2)
    prefills = []
    for tokens in (n for n in PREFILLS if n <= min(limits.max_batch_tokens, limits.max_context)):
        progress(f"prefill of {tokens} tokens", 0.1)
        prefills.append(entry([(0, tokens)], tokens=tokens))
    decodes, shares = [], []
    room = limits.num_blocks // -(-context // limits.block_size)
    for batch in (n for n in BATCHES if n <= min(limits.max_batch_requests, room)):
        progress(f"decode of {batch} at {context} tokens", 0.25)
        items = [(context - 1, 1)] * batch
        decodes.append(entry(items, batch=batch, context=context))
        short = timed([(0, 1)] * batch)
        work = step_work(shape, items, sizes)
        shares.append(
            {
                "batch": batch,
                "context": context,
                "share": work.kv_share,
                "kv_bytes": work.kv_bytes,
                "weight_bytes": work.weight_bytes,
                "share_of_time": max(0.0, 1 - short * 1e3 / decodes[-1]["ms"]),
            }
        )
    longest = max(n for n in GENERATED if PROMPT + n <= limits.max_context)
    progress("an answer with the cache", 0.45)
    with_cache = _answers([(0, PROMPT)] + [(PROMPT + i, 1) for i in range(longest - 1)], engine, shape, sizes)
    progress("the same without it", 0.5)
    without_cache = _answers([(0, PROMPT + i) for i in range(longest)], engine, shape, sizes)
    return {
        "engine": engine.built.engine,
        "clock": engine.clock,
        "utilization": {
            "peaks": peaks._asdict() | {"ridge": peaks.operations_per_s / peaks.bytes_per_s},
            "prefill": prefills,
            "decode": decodes,
        },
        "kv_share_of_bytes": shares,
        "work_with_cache": with_cache,
        "work_without_cache": without_cache,
        "growth": {
            name: {key: growth(entries, work=key) for key in ("tokens", "operations", "seconds")}
            for name, entries in (("with_cache", with_cache), ("without_cache", without_cache))
        },
    }


def _answers(
    steps: Sequence[tuple[int, int]], engine: StepEngine, shape: ModelShape, sizes: Sizes
) -> list[dict[str, Any]]:
    """One run of all steps, each of which yields a token: what it had taken as each of `GENERATED` was there."""
    tokens, operations, seconds, entries = 0, 0.0, 0.0, []
    for generated, step in enumerate(steps, 1):
        budget = engine.limits.max_batch_tokens
        start, count = step
        for part in range(start, start + count, budget):  # a longer prompt takes several steps, as it does in a worker
            seconds += engine.seconds(engine.plan([(part, min(budget, start + count - part))]))
        tokens += count
        operations += step_work(shape, [step], sizes).operations
        if generated in GENERATED:
            entries.append({"generated": generated, "tokens": tokens, "operations": operations, "seconds": seconds})
    return entries


def measure_live(config: ClusterConfig, vocab: int) -> dict[str, Any]:
    """Serve requests of mixed lengths, all at once, by one worker, and look at its blocks in each step."""
    from baton_cluster.local import LocalCluster
    from baton_experiments.placement import with_placement

    config = with_placement(config, "colocated:1")
    engine = msgspec.structs.replace(config.engine, record_steps=True)
    http = msgspec.structs.replace(config.http, enabled=False)
    transfer = msgspec.structs.replace(config.transfer, transport="auto")
    config = msgspec.structs.replace(config, engine=engine, http=http, transfer=transfer, launcher="local")
    draw = Random("live")
    with LocalCluster(config) as cluster, cluster.client() as client:
        streams = []
        for _ in range(LIVE_REQUESTS):
            prompt = [draw.randrange(vocab) for _ in range(draw.randint(*LIVE_PROMPT))]
            streams.append(client.stream(prompt, max_tokens=draw.randint(*LIVE_OUTPUT), ignore_eos=True))
        for stream in streams:
            stream.result()
        steps = cluster.take_steps()
        status = cluster.status().workers[0].info
    return useful_share(steps, status.layout.block_size) | {
        "requests": LIVE_REQUESTS,
        "blocks": status.num_blocks,
        "block_size": status.layout.block_size,
    }


def useful_share(steps: Sequence[StepRecord], block_size: int) -> dict[str, Any]:
    """Of the slots that requests hold, those with a token's KV when the step ends; each step counts by its seconds.

    Only of steps in which every request that holds blocks advances: else there are tokens that a step does not show.
    """
    held = tokens = seconds = batch = 0.0
    counted = 0
    for step in steps:
        shape = step.shape
        if shape.chunks + shape.decodes < step.num_running:
            continue
        counted += 1
        seconds += step.seconds
        held += step.kv_blocks * block_size * step.seconds
        tokens += (shape.decode_context + shape.chunk_context + shape.chunk_tokens) * step.seconds
        batch += step.num_running * step.seconds
    return {
        "share": tokens / held if held else None,
        "steps": counted,
        "steps_left_out": len(steps) - counted,
        "mean_batch": batch / seconds if seconds else None,
        "mean_blocks": held / block_size / seconds if seconds else None,
    }
