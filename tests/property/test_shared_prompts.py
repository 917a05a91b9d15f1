"""Whole clusters whose requests share prompts, on pools that are too small, with cancels, faults and deaths.

Requests wait for each other here: on prefill for blocks that another computes, on decode for blocks that another
receives, and for room. Whatever happens, nobody waits for ever (the simulator says so when nothing is heard any more),
each ends with the tokens of an undisturbed run, and then no block is held.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest

from baton.config import parse_config
from baton.engine.request import EngineRequest
from baton.layout import KVLayout
from baton.sampling_params import SamplingParams
from baton_cluster.latency import LinearLatency, LinkModel, StepFailed
from baton_cluster.simulated import SimulatedCluster
from tests.fakes import made_up_token
from tests.stub_cluster import expected_tokens

B = 4
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, block_size=B, head_dim=4, dtype="float32")
POOLS: dict[str, dict[str, Any]] = {
    "colocated": {"both": {"workers": 2}},
    "split": {"prefill": {}, "decode": {}},
    "split 2+2": {"prefill": {"workers": 2}, "decode": {"workers": 2}},
    "all roles": {"prefill": {}, "decode": {}, "both": {}},
}


def run(name: str, seed: int, seen: Counter[str]) -> None:
    draw = random.Random(f"{name}/{seed}")
    troubled = draw.random() < 0.5

    def next_token(request: EngineRequest) -> int:
        if troubled and draw.random() < 0.003:
            raise StepFailed("made up")
        return made_up_token(request)

    config = parse_config(
        {
            "launcher": "local",
            "pools": {pool: {**size, "kv_blocks": draw.randint(12, 24)} for pool, size in POOLS[name].items()},
            "engine": {
                "block_size": B,
                "max_batch_tokens": draw.choice([3, 8, 32]),
                "max_batch_requests": draw.randint(2, 6),
                "policy": draw.choice(["mixed", "prefill_first"]),
            },
            "transfer": {"lease_s": 4.0, "expected_growth": draw.choice([0, 2, 16])},
            "router": {"max_attempts": 50},
        }
    )
    cluster = SimulatedCluster(
        config,
        LinearLatency(0.01, 0.001, 0.0),
        LinkModel(latency_s=0.001, bytes_per_s=LAYOUT.block_bytes / 0.004),
        layout=LAYOUT,
        max_model_len=64,
        next_token=next_token,
        is_damaged=(lambda transfer, index: draw.random() < 0.02) if troubled else None,
    )
    families = [[draw.randrange(1000) for _ in range(30)] for _ in range(2)]
    requests = []
    at = 0.0
    for _ in range(25):
        at += draw.expovariate(20)
        prompt = draw.choice(families)[: draw.randint(1, 24)]
        for _ in range(draw.choice([1, 1, 2, 4])):  # the same one several times at once
            sampling = SamplingParams(max_tokens=draw.randint(1, 16), seed=0)
            leave = draw.randint(1, 8) if draw.random() < 0.15 else None
            requests.append(cluster.submit(at, prompt, sampling, leave_after=leave))
            if draw.random() < 0.05:
                cluster.cancel(requests[-1], at + draw.random() * 0.3)
    if troubled and draw.random() < 0.5:
        victim = draw.choice(sorted(cluster.workers))
        cluster.kill(victim, at / 2)
        cluster.restart(victim, at / 2 + 0.5)
    cluster.run()
    cluster.check_ledger()
    assert cluster.num_held_blocks() == 0
    for request in requests:
        undisturbed = expected_tokens(request.prompt, request.sampling.max_tokens)
        assert request.tokens == undisturbed[: len(request.tokens)]
        # Who comes while the only worker is away is refused.
        refused = request.error is not None and request.error[0] == "overloaded"
        assert request.finish_reason == "abort" or refused or request.tokens == undisturbed, (request, request.error)
        seen["moved nothing"] += request.kv_bytes == 0 and request.decode_worker != request.prefill_worker
    for worker in cluster.workers.values():
        load = worker.core.load()
        seen["hits"] += load.cache_hit_tokens
        port: Any = worker.core.receive
        seen["corrupt"] += 0 if port is None else port.counters["corrupt"]


@pytest.mark.parametrize("name", POOLS)
def test_nobody_waits_for_ever(name: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(int(os.environ.get("BATON_EXAMPLES", "150")) // 5):
        try:
            run(name, seed, seen)
        except Exception as e:
            e.add_note(f"seed {seed}")
            raise
    assert seen["hits"] > 1000, seen
    if name != "colocated":
        assert seen["corrupt"] > 0, seen
        assert seen["moved nothing"] > 50, seen
