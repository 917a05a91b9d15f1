"""The router's figures of the last minute, and the overview that the page and `baton top` show."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import parse_config
from baton.protocol import LoadReport
from router.latencies import WINDOW_S, Histogram, Latencies, Window
from router.overview import latency_data, make_overview, why_not_ready
from tests.fakes_router import out, worker
from tests.observed import Observed

SHARES = (0.5, 0.9, 0.99)
POOLS: dict[str, Any] = {"prefill": {"workers": 2}, "decode": {}}


def overview(script: Observed) -> dict[str, Any]:
    made = make_overview(script.config, script.core, script.latencies, script.now)
    assert json.loads(json.dumps(made)) == made, "as JSON has it"
    return made


# --- percentiles ------------------------------------------------------------------------------------


@given(st.lists(st.floats(2e-5, 5e3), min_size=1, max_size=200), st.integers(1, 7))
def test_percentiles_are_within_two_and_a_half_percent(values: list[float], parts: int) -> None:
    window = Window()
    for first in range(0, len(values), parts):
        window.observe_all(values[first : first + parts], 100.0 + first * 0.2)
    now = 100.0 + len(values) * 0.2
    true = np.quantile(values, SHARES, method="inverted_cdf")
    found = window.percentiles(SHARES, now)
    assert found == pytest.approx(list(true), rel=0.0251)
    assert window.count(now) == len(values)


def test_a_window_forgets_after_a_minute() -> None:
    window = Window()
    window.observe_all([0.1] * 3, 100.5)
    window.observe_all([0.2], 130.0)
    assert window.count(100.5 + WINDOW_S) == 4
    assert window.count(102.0 + WINDOW_S) == 1
    assert window.percentiles(SHARES, 102.0 + WINDOW_S) == pytest.approx([0.2] * 3, rel=0.03)
    assert window.percentiles(SHARES, 200.0) == [None] * 3


def test_a_window_takes_the_same_memory_however_long_it_is_used() -> None:
    window = Window()
    for second in range(1000):
        window.observe_all([0.01, 0.02], float(second))
    assert len(window._past) <= WINDOW_S + 1
    assert window.count(999.0) == 2 * (WINDOW_S + 1)


def test_what_lies_outside_all_buckets_counts_at_the_ends() -> None:
    window = Window()
    window.observe_all([0.0, 1e9], 1.0)
    low, high = window.percentiles((0.5, 1.0), 1.0)
    assert low is not None
    assert high is not None
    assert low < 1.1e-5
    assert high > 9e3


@given(st.lists(st.floats(0, 1000), min_size=1), st.integers(1, 5))
def test_a_histogram_counts_alike_one_by_one_and_at_once(values: list[float], parts: int) -> None:
    single, many = Histogram((0.1, 1.0, 10.0)), Histogram((0.1, 1.0, 10.0))
    for value in values:
        single.observe(value)
    for first in range(0, len(values), parts):
        many.observe_all(values[first : first + parts])
    assert single.counts == many.counts
    assert single.sum == pytest.approx(many.sum)


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 0.10001, 1.0, 1.00001):
        histogram.observe(value)
    assert histogram.counts == [1, 2, 1]


# --- what is measured -------------------------------------------------------------------------------


def test_a_request_is_measured_as_it_is_delivered() -> None:
    s = Observed("p0", "d0")
    s.run(gap=0.5, tokens=4)
    latency = latency_data(s.latencies, s.now)
    assert latency["ttft_ms"]["p50"] == pytest.approx(1000.0, rel=0.03)
    assert latency["tbt_ms"]["p50"] == pytest.approx(500.0, rel=0.03)
    assert latency["e2e_ms"]["p50"] == pytest.approx(2500.0, rel=0.03)
    assert (latency["ttft_ms"]["count"], latency["tbt_ms"]["count"], latency["e2e_ms"]["count"]) == (1, 3, 1)
    assert (s.latencies.generated_tokens, s.latencies.prompt_tokens) == (4, 6)


def test_tokens_that_come_at_once_follow_each_other_after_nothing() -> None:
    s = Observed("p0", "d0")
    s.generate(max_tokens=4)
    key = s.key()
    s.tokens("d0", out(key, 1), out(key, 2))
    s.now += 0.3
    s.tokens("p0", out(key, 0))
    s.now += 0.4
    s.tokens("d0", out(key, 3, finish="length"))
    s.latencies.settle()
    assert s.latencies.ttft.ever.sum == pytest.approx(0.3)
    assert s.latencies.tbt.ever.count == 3
    assert s.latencies.tbt.ever.sum == pytest.approx(0.4)


def test_gaps_belong_to_the_second_in_which_they_ended() -> None:
    s = Observed("p0", "d0")
    s.now = 100.2
    s.generate(max_tokens=150)
    key = s.key()
    s.tokens("p0", out(key, 0))
    for index in range(1, 101):
        s.now += 0.05
        s.tokens("d0", out(key, index))
    assert latency_data(s.latencies, s.now)["tbt_ms"]["count"] == 100
    later = latency_data(s.latencies, 102.0 + WINDOW_S + 0.5)
    assert later["tbt_ms"]["count"] == pytest.approx(100 - 36, abs=1)


def test_samples_are_measured_one_by_one_and_nothing_is_kept_of_the_ended() -> None:
    s = Observed("p0", "d0")
    s.generate(n=2, max_tokens=1)
    for sample in (0, 1):
        s.now += 1.0
        s.tokens("p0", out(s.key(sample=sample), 0, finish="length"))
    s.generate("y")
    s.cancel("y")
    s.generate("z")
    s.lose("p0")
    s.wait(60)
    assert s.latencies._open == {}
    assert (s.latencies.ttft.ever.count, s.latencies.ttft.ever.sum) == (2, pytest.approx(3.0))
    assert s.latencies.e2e.ever.count == 1, "neither what was aborted nor what failed"
    assert s.latencies.prompt_tokens == 6


def test_a_pause_for_a_retry_is_between_tokens() -> None:
    s = Observed("p0", "d0", "p1", "d1")
    s.generate(max_tokens=3)
    where = s.core.request(s.id("x"))
    assert where is not None
    assert where.prefill is not None
    s.tokens(where.prefill.worker_id, out(s.key(), 0))
    s.now += 2.0
    s.lose(where.prefill.worker_id)
    where = s.core.request(s.id("x"))
    assert where is not None
    assert where.prefill is not None
    s.tokens(where.prefill.worker_id, out(s.key(attempt=1), 1))
    s.latencies.settle()
    assert s.latencies.tbt.ever.sum == pytest.approx(2.0)
    assert s.latencies.ttft.ever.count == 1


# --- the overview -----------------------------------------------------------------------------------

SHAPE = {
    "": "cluster health latency model now planner pools recent requests router_incarnation stopping uptime_s url "
    "workers",
    "latency": "e2e_ms requests_per_s tbt_ms tokens_per_s ttft_ms window_s",
    "ttft_ms": "count p50 p90 p99",
    "pool": "draining lost name ready role state workers",
    "worker": "blocks_cached blocks_free blocks_total breaker bytes_received bytes_sent cache_hit_share device node "
    "outstanding pending_tokens pool role running seen_s_ago state stranded_blocks waiting worker_id",
    "recent": "attempts cached_tokens completion_tokens decode error finish_reason label prefill prompt_tokens "
    "request_id stages started_s_ago total_ms",
}


def test_the_shape_is_what_its_readers_expect() -> None:
    s = Observed("p0", "d0")
    s.run()
    made = overview(s)
    parts = {
        "": made,
        "latency": made["latency"],
        "ttft_ms": made["latency"]["ttft_ms"],
        "pool": made["pools"][0],
        "worker": made["workers"][0],
        "recent": made["recent"][0],
    }
    assert {name: " ".join(sorted(part)) for name, part in parts.items()} == SHAPE
    assert set(made["requests"]) == {"open", "queued"}
    assert set(made["recent"][0]["stages"][0]) == {"name", "ms"}


def test_recent_requests_come_latest_first_and_their_stages_add_up() -> None:
    s = Observed("p0", "d0")
    for i in range(60):
        s.run(f"r{i}", gap=0.01)
    recent = overview(s)["recent"]
    assert [r["label"] for r in recent] == [f"r{i}" for i in range(59, 9, -1)]
    first = recent[0]
    assert sum(stage["ms"] for stage in first["stages"]) == pytest.approx(first["total_ms"])
    assert [stage["name"] for stage in first["stages"]][:2] == ["router_queue", "placement"]
    assert (first["prefill"], first["decode"], first["attempts"], first["cached_tokens"]) == ("p0", "d0", 1, 2)


def test_rates_are_per_second_of_what_there_was() -> None:
    s = Observed("p0", "d0")
    start = s.now
    s.run(gap=0.5, tokens=5)
    assert overview(s)["latency"]["tokens_per_s"] == pytest.approx(5 / (s.now - start))
    s.now = start + 20.0
    assert overview(s)["latency"]["requests_per_s"] == pytest.approx(1 / 20)


def states(script: Observed) -> dict[str, str]:
    return {pool["name"]: pool["state"] for pool in overview(script)["pools"]}


def test_health_says_whether_requests_can_be_served() -> None:
    s = Observed(config=parse_config({"pools": POOLS}))
    assert overview(s)["health"] == "down"
    assert states(s) == {"prefill": "empty", "decode": "empty"}
    s.join(worker("p0"))
    assert states(s) == {"prefill": "degraded", "decode": "empty"}, "one of two has joined"
    assert overview(s)["health"] == "down"
    s.join(worker("d0"))
    assert overview(s)["health"] == "degraded"
    assert why_not_ready(s.core) is None
    s.join(worker("p1"))
    assert overview(s)["health"] == "ok"
    s.core.on_drain("d0", False, s.now)
    made = overview(s)
    assert made["health"] == "down"
    assert made["pools"][1] == {
        "name": "decode",
        "role": "decode",
        "workers": 1,
        "ready": 0,
        "draining": 1,
        "lost": 0,
        "state": "empty",
    }
    assert why_not_ready(s.core) == "no worker that can decode takes requests (d0 is draining)"


def test_a_router_that_stops_is_down() -> None:
    s = Observed("p0", "d0")
    assert not overview(s)["stopping"]
    s.core.on_stopping(s.now)
    assert overview(s)["stopping"]
    assert overview(s)["health"] == "down"
    assert why_not_ready(s.core) == "the router is stopping"


def test_a_worker_that_does_both_is_enough() -> None:
    s = Observed("b0", config=parse_config({"pools": {"both": {}}}))
    assert why_not_ready(s.core) is None
    assert overview(s)["health"] == "ok"


def test_workers_are_told_as_they_report() -> None:
    s = Observed("p0", "d0")
    s.beat("p0", LoadReport(3, 2, 50, 40, 64, 7, 1000, 0, 5, 80, 20, 1))
    s.now += 0.25
    p0, d0 = overview(s)["workers"]
    assert (p0["waiting"], p0["running"], p0["pending_tokens"], p0["blocks_free"]) == (3, 2, 50, 40)
    assert (p0["bytes_sent"], p0["cache_hit_share"], p0["stranded_blocks"], p0["breaker"]) == (1000, 0.25, 1, "closed")
    assert p0["seen_s_ago"] == pytest.approx(0.25)
    assert d0["cache_hit_share"] is None, "nothing was asked for"


def test_it_starts_with_nothing() -> None:
    s = Observed()
    latencies = Latencies(s.core, s.now)
    assert latency_data(latencies, s.now)["ttft_ms"] == {"count": 0, "p50": None, "p90": None, "p99": None}
    assert overview(s)["recent"] == []
