"""Workers that run ahead of the virtual clock: whole clusters come out as they do step by step, to the last digit.

A simulated worker runs ahead where all tokens are the same number, and not where a function makes them. So each
cluster here is run twice, and everything that anybody could see of the two is compared.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest

from baton.config import parse_config
from baton.layout import KVLayout
from baton.sampling_params import SamplingParams
from baton.step_log import StepRecord
from baton_cluster.latency import LinearLatency, LinkModel
from baton_cluster.simulated import SimulatedCluster, SimulatedRequest
from baton_cluster.simulated_worker import NextToken
from tests.property.test_shared_prompts import LAYOUT, POOLS, B

TOKEN = 3


POLICIES = ["least_loaded", "round_robin", "slo_aware", "kv_aware"]


def run(name: str, seed: int, next_token: NextToken) -> tuple[dict[str, Any], SimulatedCluster]:
    """What came out, and the cluster."""
    draw = random.Random(f"{name}/{seed}")
    ample = draw.random() < 0.6
    config = parse_config(
        {
            "launcher": "local",
            "pools": {
                pool: {**size, "kv_blocks": 300 if ample else draw.randint(12, 24)}
                for pool, size in POOLS[name].items()
            },
            "engine": {
                "block_size": B,
                "max_batch_tokens": draw.choice([8, 32]),
                "max_batch_requests": draw.randint(2, 12),
                "policy": draw.choice(["mixed", "prefill_first"]),
                "prefix_cache": draw.random() < 0.5,
            },
            "transfer": {"lease_s": 4.0, "expected_growth": draw.choice([0, 2, 16])},
            "router": {
                "max_attempts": 50,
                "prefill_policy": draw.choice(POLICIES),
                "decode_policy": draw.choice(POLICIES),
                "conditional_split": draw.random() < 0.3,
            },
        }
    )
    steps: list[StepRecord] = []
    cluster = SimulatedCluster(
        config,
        LinearLatency(0.01, 0.001, 1e-5),
        LinkModel(draw.choice([0.001, 0.015, 0.0]), LAYOUT.block_bytes / 0.004, draw.choice([None, 1e5])),
        layout=LAYOUT,
        max_model_len=64,
        next_token=next_token,
        eos_token_ids=[TOKEN] if draw.random() < 0.1 else (),
        is_damaged=(lambda transfer, index: draw.random() < 0.02) if draw.random() < 0.2 else None,
        on_step=steps.append,
    )
    families = [[draw.randrange(1000) for _ in range(30)] for _ in range(2)]
    requests = []
    at, gap = 0.0, draw.choice([0.02, 0.1, 0.4])
    for _ in range(25):
        at += draw.expovariate(1 / gap)
        prompt = draw.choice(families)[: draw.randint(1, 24)]
        stops = {"stop_token_ids": [TOKEN], "min_tokens": 5} if draw.random() < 0.1 else {}
        sampling = SamplingParams(max_tokens=draw.randint(1, 40), seed=0, ignore_eos=draw.random() < 0.5, **stops)
        leave = draw.randint(1, 8) if draw.random() < 0.05 else None
        requests.append(cluster.submit(at, prompt, sampling, leave_after=leave))
        if draw.random() < 0.1:
            cluster.cancel(requests[-1], at + draw.random() * 0.6)
    if draw.random() < 0.3:
        victim = draw.choice(sorted(cluster.workers))
        cluster.kill(victim, at / 2, silently=draw.random() < 0.3)
        cluster.restart(victim, at / 2 + 0.5)
    looks: list[Any] = []
    for share in (0.3, 0.6):  # what can be seen in the middle
        cluster.run(until=share * at)
        looks.append([state_of(cluster), [seen_of(request) for request in requests]])
    cluster.run()
    cluster.check_ledger()
    out = {"looks": looks, "requests": [seen_of(request) for request in requests], "steps": steps}
    return {**out, "workers": state_of(cluster), "now": cluster.clock.now}, cluster


def seen_of(request: SimulatedRequest) -> tuple[Any, ...]:
    names = set(SimulatedRequest.__slots__) - {"timeline", "on_end", "sampling", "prompt"}
    return (*(getattr(request, name) for name in sorted(names)), request.timeline.marks)


def state_of(cluster: SimulatedCluster) -> list[Any]:
    """Of the workers, and of what the router thinks of them."""
    state: list[Any] = []
    for worker in cluster.workers.values():
        state.append((worker.core.load(), worker.busy_s, worker.bytes_sent, worker.alive))
    for view in cluster.router.view.workers.values():
        state.append((view.load, view.seen, view.load_ms, view.queue_ms, view.tbt_ms, view.token_ms))
    return [*state, cluster.router.recent(50)]


@pytest.mark.parametrize("name", POOLS)
def test_everything_comes_out_as_step_by_step(name: str) -> None:
    spared: Counter[str] = Counter()
    for seed in range(int(os.environ.get("BATON_EXAMPLES", "150")) // 5):
        ahead, cluster = run(name, seed, TOKEN)
        one_by_one, slow = run(name, seed, lambda request: TOKEN)
        for what in one_by_one:
            assert ahead[what] == one_by_one[what], f"seed {seed}: {what}"
        spared["events"] += slow.clock.num_events - cluster.clock.num_events
        spared["all"] += slow.clock.num_events
    assert spared["events"] > 0.05 * spared["all"], spared


def test_nobody_runs_ahead_past_the_end_of_a_run() -> None:
    seen = []
    for next_token in (TOKEN, lambda request: TOKEN):
        cluster = SimulatedCluster(
            parse_config({"launcher": "local", "pools": {"both": {"kv_blocks": 64}}}),
            LinearLatency(0.01),
            LinkModel(latency_s=0.001),
            layout=KVLayout(1, 1, 16, 4, "float32"),
            max_model_len=512,
            next_token=next_token,
        )
        request = cluster.submit(0.0, range(10), SamplingParams(max_tokens=200))
        cluster.run(until=0.5)
        assert len(request.tokens) == 49  # they come at 0.012, 0.022, ... to the router, and nothing later is told
        cluster.cancel(request, 0.5)
        cluster.run()
        assert request.finish_reason == "abort"
        seen.append(seen_of(request))
    assert seen[0] == seen[1]
