"""Row 30 of docs/scenarios.md: twice what decode can serve, for long. Elsewhere hand-overs pile up until all are late.

Here few are under way and few wait; the rest is told at once, and when to come again. Those that are let in get their
tokens as fast as when there is little to do.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import httpx
import pytest

from baton.config import parse_config
from baton.errors import OverloadedError
from baton.layout import KVLayout
from baton.sampling_params import SamplingParams
from baton_cluster.latency import ConstantLatency, LinkModel
from baton_cluster.simulated import SimulatedCluster, SimulatedRequest
from router.actions import RouterAction
from router.async_client import AsyncRouterClient
from tests.fakes import made_up_token
from tests.stub_cluster import StubCluster, expected_tokens

MAX_HANDOFFS, MAX_QUEUE = 2, 2
ROUTER = {"max_handoffs": MAX_HANDOFFS, "max_queue": MAX_QUEUE}


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def arrivals(per_s: float, seconds: float, seed: int) -> list[float]:
    """Times of a Poisson process."""
    draw, times, at = random.Random(seed), [], 0.0
    while (at := at + draw.expovariate(per_s)) < seconds:
        times.append(at)
    return times


# --- a minute of it, in virtual time ------------------------------------------------------------------

STEP_S, SLOTS, NUM_TOKENS = 0.02, 8, 51
CAPACITY = SLOTS / ((NUM_TOKENS - 1) * STEP_S)
"""Requests per second that the decode worker can serve."""


class WatchedCluster(SimulatedCluster):
    """Sees after each event how many hand-overs are under way, and how many requests wait."""

    most_handoffs = most_queued = 0

    def _act(self, actions: list[RouterAction]) -> None:
        super()._act(actions)
        if self.router.num_queued <= MAX_QUEUE:  # it looks at each of them
            self.router.check_integrity()
        self.most_handoffs = max(self.most_handoffs, *(w.handoffs for w in self.router.view.workers.values()))
        self.most_queued = max(self.most_queued, self.router.num_queued)


def simulate(per_s: float, seconds: float, **router: Any) -> tuple[WatchedCluster, list[SimulatedRequest]]:
    tree = {
        "launcher": "local",
        "pools": {"prefill": {"kv_blocks": 512}, "decode": {"kv_blocks": 512}},
        "engine": {"max_batch_requests": SLOTS},
        "router": {**ROUTER, **router},
    }
    layout = KVLayout(num_layers=1, num_kv_heads=1, block_size=16, head_dim=4, dtype="float32")
    cluster = WatchedCluster(
        parse_config(tree),
        ConstantLatency(STEP_S),
        LinkModel(),
        layout=layout,
        max_model_len=512,
        next_token=made_up_token,
    )
    for at in arrivals(per_s, seconds, seed=1):
        cluster.submit(at, range(40), SamplingParams(max_tokens=NUM_TOKENS, seed=0))
    ended = cluster.run()
    cluster.check_ledger()
    assert cluster.num_held_blocks() == 0
    return cluster, ended


def test_a_minute_at_twice_the_capacity_keeps_the_latency_of_those_let_in() -> None:
    _, calm = simulate(CAPACITY / 2, 60.0)
    cluster, ended = simulate(2 * CAPACITY, 60.0)
    served = [r for r in ended if r.finish_reason == "length"]
    refused = [r for r in ended if r.error is not None]
    assert len(ended) == len(served) + len(refused) == len(cluster.requests), "none is lost"
    assert {r.error[0] for r in refused if r.error} == {"overloaded"}
    assert all(r.tokens == expected_tokens(range(40), NUM_TOKENS) for r in served)
    assert cluster.most_handoffs <= MAX_HANDOFFS
    assert cluster.most_queued <= MAX_QUEUE
    assert len(served) / 60 > 0.95 * CAPACITY, "no slot of decode is idle"
    before = [r.latency_s for r in calm if r.finish_reason == "length" and r.latency_s is not None]
    assert len(before) > 0.95 * len(calm)
    under_load = [r.latency_s for r in served if r.latency_s is not None]
    # Whoever is let in waits for (MAX_HANDOFFS + MAX_QUEUE) of SLOTS slots at most.
    assert p99(under_load) < 1.75 * p99(before)
    gaps = [b - a for r in served for a, b in zip(r.token_times[1:], r.token_times[2:], strict=False)]
    assert p99(gaps) < 1.1 * STEP_S, "and between its tokens nothing changes"
    assert all(r.latency_s is not None and r.latency_s < 0.01 for r in refused), "the others are told at once"


def test_without_a_limit_on_the_queue_latency_grows_without_end() -> None:
    """What the limits are for: the same load with room for everybody."""
    for seconds in (15.0, 30.0):
        _, ended = simulate(2 * CAPACITY, seconds, max_queue=None)
        latencies = [r.latency_s for r in ended if r.latency_s is not None]
        assert all(r.finish_reason == "length" for r in ended)
        assert p99(latencies) > 0.8 * seconds


# --- the same with threads and sockets ----------------------------------------------------------------

REAL_STEP_S, REAL_SLOTS, REAL_TOKENS = 0.02, 4, 11
REAL_CAPACITY = REAL_SLOTS / ((REAL_TOKENS - 1) * REAL_STEP_S)
PROMPT = list(range(1, 41))


class Watcher:
    """Sees each action of the router."""

    def __init__(self, cluster: StubCluster):
        self._core: Any = cluster.router._core
        self.most_handoffs = self.most_queued = 0

    def on_action(self, action: RouterAction, now: float) -> None:
        self.most_handoffs = max(self.most_handoffs, *(w.handoffs for w in self._core.view.workers.values()))
        self.most_queued = max(self.most_queued, self._core.num_queued)


class Load:
    """Requests on their way at times that are given, every other one over HTTP."""

    def __init__(self, cluster: StubCluster):
        self._cluster = cluster
        self.latencies: list[float] = []
        self.native_refusals: list[OverloadedError] = []
        self.http_refusals: list[httpx.Response] = []

    async def offer(self, times: list[float]) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            AsyncRouterClient(self._cluster.address) as native,
            httpx.AsyncClient(base_url=str(self._cluster.router.url), timeout=60, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            start = time.monotonic()
            for number, at in enumerate(times):
                await asyncio.sleep(max(0.0, start + at - time.monotonic()))
                group.create_task(self._over_http(http) if number % 2 else self._natively(native))

    async def _natively(self, client: AsyncRouterClient) -> None:
        began = time.monotonic()
        try:
            done = await client.generate(PROMPT, max_tokens=REAL_TOKENS, seed=0)
        except OverloadedError as e:
            self.native_refusals.append(e)
        else:
            assert list(done.token_ids) == expected_tokens(PROMPT, REAL_TOKENS)
            self.latencies.append(time.monotonic() - began)

    async def _over_http(self, client: httpx.AsyncClient) -> None:
        began = time.monotonic()
        body = {"prompt": PROMPT, "max_tokens": REAL_TOKENS, "seed": 0, "temperature": 0}
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code == 200:
            assert answer.json()["usage"]["completion_tokens"] == REAL_TOKENS
            self.latencies.append(time.monotonic() - began)
        else:
            self.http_refusals.append(answer)


@pytest.mark.parametrize("seconds", [10.0])
def test_twice_the_capacity_natively_and_over_http(seconds: float) -> None:
    cluster = StubCluster(
        {"prefill": {}, "decode": {}},
        engine={"max_batch_requests": REAL_SLOTS},
        router=ROUTER,
        step_s=lambda worker_id, plan: REAL_STEP_S if worker_id.startswith("decode") else 0.0,
    )
    with cluster:
        watcher = Watcher(cluster)
        cluster.router._desk.observers.append(watcher)
        calm, busy = Load(cluster), Load(cluster)
        asyncio.run(calm.offer(arrivals(REAL_CAPACITY / 2, seconds / 2, seed=2)))
        times = arrivals(2 * REAL_CAPACITY, seconds, seed=3)
        asyncio.run(busy.offer(times))
        assert len(busy.latencies) + len(busy.native_refusals) + len(busy.http_refusals) == len(times), "none is lost"
        assert watcher.most_handoffs == MAX_HANDOFFS
        assert watcher.most_queued == MAX_QUEUE
        assert len(busy.native_refusals) + len(busy.http_refusals) > len(times) / 4
        assert min(len(busy.native_refusals), len(busy.http_refusals)) > 5
        assert all(e.retry_after_s is not None and 0 < e.retry_after_s < seconds for e in busy.native_refusals)
        for answer in busy.http_refusals:
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["retry-after"]) < seconds
            assert answer.json()["error"]["code"] == "overloaded"
        # In virtual time it is not even twice as long; this machine may be busy with other things.
        assert p99(busy.latencies) < 8 * p99(calm.latencies)
        cluster.wait_ledger_zero()
        assert cluster.step_failures() == []
        cluster.router._call(cluster.router._core.check_integrity)
        refused = f"{len(busy.native_refusals)} + {len(busy.http_refusals)} of {len(times)} refused"
        print(f"p99 {p99(calm.latencies):.3f} s calm, {p99(busy.latencies):.3f} s busy, {refused}")
