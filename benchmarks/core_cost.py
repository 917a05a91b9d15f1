"""The pure core's cost per token: schedule and complete, with made-up tokens and no model."""

from __future__ import annotations

import time
from typing import Any

from baton.engine.core import EngineCore
from baton.engine.policy import POLICIES
from baton.engine.request import EngineRequest
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams

PROMPT = 128
STEPS = 300


def core_cost(batch: int, repeats: int = 5) -> dict[str, Any]:
    """Microseconds per token of `batch` decoding requests, one sample per repeat."""
    samples = []
    for _ in range(repeats):
        core = EngineCore(
            num_blocks=batch * 64,
            block_size=16,
            max_batch_tokens=batch * PROMPT,
            max_batch_requests=batch,
            max_model_len=4096,
            policy=POLICIES["mixed"](),
        )
        for i in range(batch):
            params = SamplingParams(max_tokens=STEPS + 2)
            prompt = list(range(i * PROMPT, (i + 1) * PROMPT))  # nothing is shared
            core.submit(EngineRequest(RequestKey(f"{i:032x}", 0), prompt, params), 0.0)
        tokens = [7] * batch
        _step(core, tokens)
        start = time.perf_counter()
        for _ in range(STEPS):
            _step(core, tokens)
        samples.append((time.perf_counter() - start) / (STEPS * batch) * 1e6)
    return {"batch": batch, "us_per_token": sorted(samples)[repeats // 2], "samples": samples}


def _step(core: EngineCore, tokens: list[int]) -> None:
    plan = core.schedule(0.0)
    assert plan is not None
    assert len(plan.items) == len(tokens)
    core.complete(plan, tokens, 0.0)
