"""What a receive costs the decode step that runs meanwhile.

The decode worker's two threads as they are in a worker, on one core: one runs a decode step of the demo model, the
other drives the transport. Steps alone and steps during which the blocks of one prompt arrive take turns.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from baton.config import parse_config
from baton.engine.build import build_runner
from baton.engine.core import EngineCore
from baton.engine.policy import POLICIES
from baton.engine.request import EngineRequest
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams
from benchmarks.machine import spread
from benchmarks.transfer_ends import TARGET_CORE, Target, block_ids, pin

CONTEXT = 128
"""Tokens; grows by one each step."""
MAX_STEPS = 4000


class DecodeSteps:
    """A thread that runs a decode step of the demo model, batch 1, whenever it is asked."""

    def __init__(self) -> None:
        config = parse_config({"launcher": "local", "pools": {"both": {"kv_blocks": 512}}})
        self._built = build_runner(config, config.pools["both"])
        self._core = EngineCore(
            num_blocks=512,
            block_size=config.engine.block_size,
            max_batch_tokens=CONTEXT,
            max_batch_requests=1,
            max_model_len=self._built.max_model_len,
            policy=POLICIES["mixed"](),
        )
        sampling = SamplingParams(max_tokens=MAX_STEPS, ignore_eos=True)
        self._core.submit(EngineRequest(RequestKey("0" * 32, 0), list(range(CONTEXT)), sampling), 0.0)
        self._go, self._done = threading.Event(), threading.Event()
        self._seconds = 0.0
        threading.Thread(target=self._run, daemon=True).start()
        self.begin()
        self.end()  # the prompt

    def _run(self) -> None:
        pin(TARGET_CORE)
        self._built.runner.set_num_threads(1)
        while True:
            self._go.wait()
            self._go.clear()
            started = time.perf_counter()
            plan = self._core.schedule(0.0)
            assert plan is not None, f"more than {MAX_STEPS} steps"
            self._core.complete(plan, self._built.runner.run(plan), 0.0)
            self._seconds = time.perf_counter() - started
            self._done.set()

    def begin(self) -> None:
        self._done.clear()
        self._go.set()

    def end(self) -> float:
        """Seconds that the step took."""
        self._done.wait()
        return self._seconds


def measure_interference(target: Target, steps: DecodeSteps, tokens: int, repeats: int) -> dict[str, Any]:
    """An entry of `interference`."""
    count = target.layout.num_blocks_for(tokens)
    order = np.arange(target.end.pool.num_blocks)
    alone: list[float] = []
    during: list[float] = []
    for repeat in range(-2, repeats):
        steps.begin()
        seconds_alone = steps.end()
        blocks = block_ids(repeat, count, order)
        steps.begin()
        target.transfer(blocks, blocks)
        seconds_during = steps.end()
        if repeat >= 0:
            alone.append(seconds_alone)
            during.append(seconds_during)
    return {
        "transport": target.scheme,
        "tokens": tokens,
        "bytes": count * target.layout.block_bytes,
        "step_ms_alone": spread(alone)["median_ms"],
        "step_ms_during": spread(during)["median_ms"],
        "alone": spread(alone),
        "during": spread(during),
    }
