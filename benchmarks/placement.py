"""What a placement decision costs, for every policy: a busy cluster, half prefill and half decode workers.

Each decision is of another prompt, half of which some workers have cached. What a prompt's hashing costs, which a
policy that asks for what is cached needs once per request, depends on the prompt and not on the workers: told apart.
Everything is the router's own code; only the workers are made up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, get_args

from baton.config import PolicyName, parse_config
from baton.layout import KVLayout
from baton.prefix_hash import prefix_hashes
from baton.protocol import LoadReport, WorkerInfo
from router.policy import Demand, PlacementPolicy
from router.prefix_index import PromptHashes
from router.view import ClusterView

WORKERS = (2, 64, 1000)
POLICIES: tuple[str, ...] = get_args(PolicyName)
SPLIT = "conditional_split"
"""Not a policy: `kv_aware` with `router.conditional_split`."""

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, block_size=16, head_dim=64, dtype="float32")
NUM_BLOCKS = 2048
PROMPT = 256
"""Tokens; half of them are the beginning of one of `NUM_PREFIXES` texts, the other half are its own."""
NUM_PREFIXES = 16
NUM_PROMPTS = 32
MAX_TOKENS = 128
REPEAT_S = 0.2


def placement_cost(workers: int, policy: str, repeats: int = 5) -> dict[str, Any]:
    """Microseconds per decision with `workers` workers; one of `POLICIES`, for prefill and decode, or `SPLIT`.

    `us_hashing`: of a prompt of `PROMPT` tokens, where the policy wants it.
    """
    split = policy == SPLIT
    name = "kv_aware" if split else policy
    router = {
        "prefill_policy": name,
        "decode_policy": name,
        "slo_ttft_ms": 500.0,
        "slo_tbt_ms": 60.0,
        "conditional_split": split,
    }
    place = PlacementPolicy(parse_config({"router": router}))
    view = _busy_view(workers)
    prompts = [_prompt(i % NUM_PREFIXES, i) for i in range(NUM_PROMPTS)]
    hashes = [PromptHashes(prompt) if place.uses_prefixes else None for prompt in prompts]

    def decide(number: int) -> None:
        place.place(Demand(PROMPT, PROMPT + MAX_TOKENS, hashes[number], "session"), view, 0.0)
        view.num_placed += 1  # another draw, another turn

    def hash_prompt(number: int) -> None:
        PromptHashes(prompts[number]).of("model", LAYOUT.block_size)

    samples = _measure(decide, repeats)
    return {
        "workers": workers,
        "policy": policy,
        "us_per_decision": statistics.median(samples),
        "us_hashing": statistics.median(_measure(hash_prompt, repeats)) if place.uses_prefixes else 0.0,
        "samples": samples,
    }


def _measure(function: Callable[[int], None], repeats: int) -> list[float]:
    """Microseconds per call, one sample a repeat; a call for each prompt, again and again."""
    samples = []
    for number in range(NUM_PROMPTS):
        function(number)
    for _ in range(repeats):
        count, start = 0, time.perf_counter()
        while (took := time.perf_counter() - start) < REPEAT_S:
            for number in range(NUM_PROMPTS):
                function(number)
            count += NUM_PROMPTS
        samples.append(took / count * 1e6)
    return samples


def all_placement_costs(repeats: int = 5) -> list[dict[str, Any]]:
    """Of every policy at 2, 64 and 1,000 workers."""
    return [placement_cost(workers, policy, repeats) for policy in (*POLICIES, SPLIT) for workers in WORKERS]


def _prompt(prefix: int, number: int) -> tuple[int, ...]:
    half = PROMPT // 2
    return (*(prefix * 7919 + i for i in range(half)), *(number * 104729 + i for i in range(half)))


def _busy_view(num_workers: int) -> ClusterView:
    view = ClusterView(max_handoffs=1 << 20)
    for i in range(num_workers):
        role = "prefill" if i < num_workers // 2 else "decode"
        info = WorkerInfo(
            worker_id=f"{role}-{i}",
            incarnation=f"{role}-{i}#1",
            pool=role,
            role=role,  # type: ignore[arg-type]
            fingerprint="model",
            layout=LAYOUT,
            num_blocks=NUM_BLOCKS,
            max_model_len=8192,
            max_batch_requests=32,
            control_address="tcp://c",
            data_address="zmq+tcp://d",
        )
        worker = view.join(info, 0.0)
        worker.load = LoadReport(
            num_running=i % 16,
            num_pending_tokens=i % 11 * 100,
            blocks_free=NUM_BLOCKS - i % 1000,
            blocks_total=NUM_BLOCKS,
            decode_step_s=0.02 + i % 7 * 1e-3,
            decode_slope_s=0.0005,
            prefill_token_s=0.0004 + i % 5 * 1e-5,
        )
        view.stamp()
        view.charge_prefill(worker, i % 13 * 50)
        view.charge_decode(worker, i % 17 * 100)
        for prefix in range(i % 3):
            text = _prompt((prefix + i) % NUM_PREFIXES, 0)[: PROMPT // 2]
            view.prefixes.expect(worker.prefixes, prefix_hashes(text, LAYOUT.block_size, "model"))
    return view


if __name__ == "__main__":
    for cost in all_placement_costs():
        hashing = f", and {cost['us_hashing']:.1f} us to hash the prompt" if cost["us_hashing"] else ""
        print(
            f"{cost['policy']:25} {cost['workers']:5} workers {cost['us_per_decision']:8.1f} us per decision{hashing}"
        )
