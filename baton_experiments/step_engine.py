"""Single steps of this machine's engine, of any shape, without requests that lead there.

A `StepEngine` holds a worker's model and KV pool and computes plans that are made up: a decode batch at 2,000 tokens
of context costs a step, not 2,000 tokens of prefill for each. The pool holds noise, since memory that nobody wrote is
read faster than KV is. Its times are those of `Runner.run`: what a worker does between steps is not in them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

from baton.config import ClusterConfig
from baton.engine.build import build_runner
from baton.engine.request import EngineRequest, StepItem, StepPlan
from baton.errors import ConfigError
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams

Sizes = Sequence[tuple[int, int]]
"""A step's items: tokens whose KV is there already, tokens to compute."""


class Limits(NamedTuple):
    """What a step of this worker may hold."""

    max_batch_tokens: int
    max_batch_requests: int
    max_context: int
    num_blocks: int
    block_size: int

    def hold(self, sizes: Sizes) -> bool:
        """Whether the KV of all of them fits the pool at once."""
        return sum(-(-(start + count) // self.block_size) for start, count in sizes) <= self.num_blocks


class StepEngine:
    """A worker's engine in the calling thread. `cores`: to compute on; None: as the thread is."""

    def __init__(self, config: ClusterConfig, pool: str, *, cores: tuple[int, ...] | None = None, seed: int = 0):
        if cores is not None:
            os.sched_setaffinity(0, cores)
        self.built = build_runner(config, config.pools[pool])
        self.built.runner.set_num_threads(len(cores) if cores is not None else config.pools[pool].cores)
        # Small numbers of either sign, as keys and values are.
        self.built.kv_cache.tensor.normal_(0.0, 0.5)
        layout, blocks = self.built.kv_cache.layout, self.built.kv_cache.num_blocks
        self.limits = Limits(
            config.engine.max_batch_tokens,
            min(config.engine.max_batch_requests, config.engine.max_batch_tokens),
            min(self.built.max_model_len, blocks * layout.block_size),
            blocks,
            layout.block_size,
        )
        self._draw = Random(f"tokens/{seed}")
        self._count = 0

    def plan(self, sizes: Sizes) -> StepPlan:
        """A step of these items, each of which samples. Raises ConfigError where the pool is too small for it."""
        if not self.limits.hold(sizes):
            raise ConfigError("kv_blocks", "cannot hold the step", value=self.limits.num_blocks)
        free = list(range(self.limits.num_blocks))
        self._draw.shuffle(free)  # as after many requests: neighbours in a sequence are none in memory
        vocabulary = self.built.spec.vocab_size
        items = []
        for start, count in sizes:
            self._count += 1
            tokens = [self._draw.randrange(vocabulary) for _ in range(count)]
            request = EngineRequest(
                RequestKey(f"{self._count:032x}", 0, 0), [0] * start + tokens, SamplingParams(max_tokens=1)
            )
            request.num_computed = start
            blocks = -(-(start + count) // self.limits.block_size)
            request.blocks, free = free[:blocks], free[blocks:]
            items.append(StepItem(request, count))
        return StepPlan(items)

    @property
    def clock(self) -> str:
        """Which of `times` `seconds` tells: `cpu` where the engine computes on one, so that other work on the machine
        does not count; else `wall`."""
        return "cpu" if self.built.device == "cpu" else "wall"

    def seconds(self, plan: StepPlan) -> float:
        """Compute it once; by `clock`."""
        wall, cpu = self.times(plan)
        return cpu if self.clock == "cpu" else wall

    def times(self, plan: StepPlan) -> tuple[float, float]:
        """Compute it once; seconds, and the calling thread's seconds of CPU time."""
        start, cpu = time.perf_counter(), time.thread_time()
        self.built.runner.run(plan)
        return time.perf_counter() - start, time.thread_time() - cpu


@contextmanager
def pinned(cores: Sequence[int] | None) -> Iterator[None]:
    """The calling thread, and threads that it starts meanwhile, on these cores; afterwards where it was before."""
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def made_up_steps(limits: Limits, draw: Random) -> Iterator[Sizes]:
    """Steps of all kinds in turn, their sizes drawn evenly over orders of magnitude. Endless."""
    while True:
        for kind in ("decode", "prefill", "decode", "mixed"):
            sizes = _sizes(kind, limits, draw)
            if limits.hold(sizes):
                yield sizes


def _sizes(kind: str, limits: Limits, draw: Random) -> Sizes:
    sizes: list[tuple[int, int]] = []
    budget = limits.max_batch_tokens
    if kind != "prefill":
        most = limits.max_batch_requests if kind == "decode" else min(limits.max_batch_requests - 1, budget - 2)
        if most < 1:
            return _sizes("prefill", limits, draw)
        count = _log_uniform(draw, 1, most)
        room = min(limits.max_context, limits.num_blocks // (count + 4) * limits.block_size)
        context = _log_uniform(draw, 16, room) if room > 16 else room
        for _ in range(count):
            length = min(round(context * draw.uniform(0.5, 1.5)), room)
            sizes.append((max(length, 2) - 1, 1))
        budget -= count
    if kind != "decode" and budget >= 2:
        tokens = _log_uniform(draw, 2, min(budget, limits.max_context))
        for part in _parts(draw, tokens):
            context = 0
            if part < limits.max_context - 16 and draw.random() < 0.5:
                context = _log_uniform(draw, 16, limits.max_context - part)
            sizes.append((context, part))
    return sizes


def _parts(draw: Random, tokens: int) -> list[int]:
    """Mostly one prompt's chunk, sometimes several prompts'."""
    count = draw.choice((1, 1, 1, 2, 3))
    if tokens < 4 * count:
        return [tokens]
    return [tokens // count] * (count - 1) + [tokens - tokens // count * (count - 1)]


def _log_uniform(draw: Random, low: int, high: int) -> int:
    if high <= low:
        return high
    return min(high, max(low, round(math.exp(draw.uniform(math.log(low), math.log(high))))))
