"""What `/metrics` says of a router, and the dashboard that is made for it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton.protocol import LoadReport
from baton.timeline import Stage
from router.latencies import REQUEST_BUCKETS, TOKEN_BUCKETS, TTFT_BUCKETS
from tests.fakes_router import config_of, out, worker
from tests.observed import Observed

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "baton.json"


def scrape(script: Observed) -> str:
    return asyncio.run(script.metrics.scrape()).decode()


def samples(script: Observed) -> Samples:
    """By name and labels, the model's left out, which is the same everywhere."""
    found: Samples = {}
    for family in text_string_to_metric_families(scrape(script)):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))
            assert sample.labels.get("model_name", "model-a") == "model-a"
            assert (sample.name, labels) not in found, "told once"
            found[sample.name, labels] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    return found[f"baton:{name}", tuple(sorted(labels.items()))]


def served(**sections: Any) -> Observed:
    """Two requests have ended: one was handed over, the other was decoded where it was prefilled."""
    s = Observed("p0", "d0", config=config_of(**sections))
    s.run("x", gap=0.5, tokens=5)
    s.join(worker("b0"))
    s.core.on_drain("p0", False, s.now)
    s.core.on_drain("d0", False, s.now)
    s.run("y", gap=0.5, tokens=5, colocated=True)
    return s


def test_the_text_is_what_the_library_would_write() -> None:
    s = served()
    s.counters['a "kind"\n\\'] = 3
    theirs = generate_latest(s.metrics.registry).decode()
    ours = scrape(s)

    def parsed(text: str) -> dict[str, Any]:
        return {f.name: (f.type, f.documentation, f.samples) for f in text_string_to_metric_families(text)}

    drift = re.compile("process_|worker_silence")  # they go on between the two
    one, two = parsed(theirs), parsed(ours)
    assert one.keys() == two.keys()
    assert {k: v for k, v in one.items() if not drift.search(k)} == {
        k: v for k, v in two.items() if not drift.search(k)
    }


def test_two_routers_of_one_process_do_not_meet() -> None:
    one, two = served(), Observed("p0", "d0")
    assert value(samples(one), "request_success_total", finished_reason="length") == 2
    assert value(samples(two), "request_success_total", finished_reason="length") == 0
    assert ("process_cpu_seconds_total", ()) in samples(two)


VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "cache_config_info": "gauge",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_params_n": "histogram",
    "request_params_max_tokens": "histogram",
}


def test_vllms_names_under_a_prefix_of_ones_own() -> None:
    s = served(http__metrics_prefix="vllm:")
    families = {f.name: f.type for f in text_string_to_metric_families(scrape(s))}
    assert {name: families.get(f"vllm:{name}") for name in VLLM} == VLLM
    assert not [name for name in families if name.startswith("baton:")]


def test_vllms_buckets() -> None:
    found = samples(served())
    for name, bounds in (
        ("time_to_first_token_seconds", TTFT_BUCKETS),
        ("inter_token_latency_seconds", TOKEN_BUCKETS),
        ("e2e_request_latency_seconds", REQUEST_BUCKETS),
    ):
        told = [dict(labels)["le"] for metric, labels in found if metric == f"baton:{name}_bucket"]
        assert told == [*map(repr, bounds), "+Inf"]


def test_requests_are_counted_once_with_their_times() -> None:
    s = served()
    found = samples(s)
    assert value(found, "request_success_total", finished_reason="length") == 2
    assert value(found, "prompt_tokens_total") == 12
    assert value(found, "generation_tokens_total") == 10
    assert value(found, "time_to_first_token_seconds_sum") == pytest.approx(2.0)
    assert value(found, "inter_token_latency_seconds_count") == 8
    assert value(found, "inter_token_latency_seconds_sum") == pytest.approx(4.0)
    assert value(found, "e2e_request_latency_seconds_count") == 2
    # Marks lie 0.25 s apart: PREFILL_START is the third after RECEIVED; the last token comes 3 s after it.
    assert value(found, "request_queue_time_seconds_sum") == pytest.approx(2 * 0.75)
    assert value(found, "request_prefill_time_seconds_sum") == pytest.approx(2 * 0.25)
    assert value(found, "request_decode_time_seconds_sum") == pytest.approx(2 * 2.0)
    assert value(found, "request_inference_time_seconds_sum") == pytest.approx(2 * 2.25)
    assert value(found, "request_time_per_output_token_seconds_sum") == pytest.approx(2 * 2.0 / 4)
    assert value(found, "request_prompt_tokens_sum") == 12
    assert value(found, "request_generation_tokens_sum") == 10
    assert value(found, "request_params_max_tokens_sum") == 10
    assert value(found, "request_params_n_sum") == 2
    stages = {stage: value(found, "request_stage_seconds_count", stage=str(stage)) for stage in Stage}
    assert stages[Stage.WIRE] == stages[Stage.HANDOFF_WAIT] == 1
    assert stages[Stage.PREFILL] == stages[Stage.DECODE_STEPS] == 2
    placements = {"prefill_policy": "least_loaded", "decode_policy": "least_loaded"}
    assert value(found, "router_placements_total", **placements, colocated="false") == 1
    assert value(found, "router_placements_total", **placements, colocated="true") == 1
    assert value(found, "handoffs_total", outcome="done") == 1
    assert value(found, "handoff_blocks_total") == 2
    assert value(found, "handoff_bytes_total") == 512


def test_samples_count_as_one_request() -> None:
    s = Observed("p0", "d0")
    s.generate(n=2, max_tokens=1)
    for sample in (0, 1):
        s.tokens("p0", out(s.key(sample=sample), 0, finish="length"))
    found = samples(s)
    assert value(found, "request_params_n_count") == 1
    assert value(found, "request_params_n_sum") == 2
    assert value(found, "request_success_total", finished_reason="length") == 1
    assert value(found, "generation_tokens_total") == 2


def test_what_ended_otherwise() -> None:
    s = Observed("p0", "d0", config=config_of(router__max_attempts=1))
    s.generate("aborted")
    s.cancel("aborted")
    s.generate("lost")
    s.failed("p0", s.key("lost"))
    s.generate("refused", prompt=1000)
    found = samples(s)
    assert value(found, "request_success_total", finished_reason="abort") == 1
    assert value(found, "request_success_total", finished_reason="error") == 1
    assert value(found, "router_requests_failed_total", code="request_failed") == 1
    assert value(found, "router_requests_refused_total", code="request_too_large") == 1
    assert value(found, "handoffs_total", outcome="failed") == 1
    assert value(found, "e2e_request_latency_seconds_count") == 0
    assert value(found, "router_open_requests") == 0


def test_retries_and_refused_hand_overs() -> None:
    s = Observed("p0", "d0", "d1")
    s.generate("x")
    placed = s.core.request(s.id("x"))
    assert placed is not None
    assert placed.decode is not None
    s.refused("p0", s.key("x"), placed.decode.worker_id)
    s.failed("p0", s.key("x"), "engine_error")
    s.wait(1.0, ["p0", "d0", "d1"])
    found = samples(s)
    assert value(found, "handoffs_total", outcome="refused") == 1
    assert value(found, "handoffs_replaced_total") == 1
    assert value(found, "router_retries_total") == 1


def test_workers_by_what_they_report() -> None:
    s = Observed("p0", "d0")
    s.beat("p0", LoadReport(3, 2, 50, 40, 64, 7, 1000, 500, 30, 80, 20, 1, 2.5))
    found = samples(s)
    told = {
        name: value(found, name, engine="p0")
        for name in (
            *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "pending_tokens"),
            *("prefix_cache_queries_total", "prefix_cache_hits_total", "engine_steps_total"),
            *("transfer_sent_bytes_total", "transfer_received_bytes_total"),
            *("kv_blocks_stranded", "kv_blocks_stranded_seconds_total", "worker_breaker_state"),
        )
    }
    assert list(told.values()) == [2, 3, 0.375, 50, 80, 20, 7, 1000, 500, 1, 2.5, 0]
    blocks = {state: value(found, "kv_blocks", engine="p0", state=state) for state in ("held", "cached", "free")}
    assert blocks == {"held": 24, "cached": 30, "free": 10}
    assert value(found, "workers", pool="prefill", role="prefill", state="ready") == 1
    s.lose("p0")
    found = samples(s)
    assert value(found, "workers", pool="prefill", role="prefill", state="ready") == 0
    assert value(found, "workers", pool="prefill", role="prefill", state="lost") == 1


def test_labels_are_no_words_of_clients() -> None:
    s = Observed("p0", "d0")
    for i in range(20):
        s.run(f"a label {i}", gap=0.01)
        s.generate(f"too long {i}", prompt=1000)
    text = scrape(s)
    assert "label" not in text
    assert "too long" not in text
    assert s.id("a label 1") not in text
    before = len(text.splitlines())
    s.run("another", gap=0.01)
    assert len(scrape(s).splitlines()) == before, "as many series after more requests"


def test_a_scrape_lets_others_go_on() -> None:
    s = Observed(*(f"{kind}{i}" for kind in "pd" for i in range(32)))

    async def scraped() -> int:
        turns, done = 0, False

        async def other() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await s.metrics.scrape()
        done = True
        await task
        return turns

    assert asyncio.run(scraped()) >= 3


# --- the dashboard ----------------------------------------------------------------------------------


def expressions() -> list[str]:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_asks_only_for_what_is_exported() -> None:
    s = served()
    s.generate("refused", prompt=1000)
    s.failed("b0", s.key("nobody"))
    s.counters["malformed_from_clients"] += 1
    s.metrics.http_answers["/v1/completions", "POST", 200] += 1
    s.generate("lost")
    for _ in range(5):
        s.lose("b0")
    s.wait(60)
    exported = {name for name, _ in samples(s)}
    asked = {name for expr in expressions() for name in re.findall(r"(?:baton:|process_)\w+", expr)}
    assert len(asked) > 30
    assert asked <= exported, asked - exported


def test_the_dashboard_can_be_imported() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables == ["datasource", "model", "router"]
    assert board["schemaVersion"] >= 39
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [p["title"] for p in panels if p["type"] == "row"] == [
        *("Traffic", "Latency", "Stages", "Queue and admission", "KV cache", "Transfer", "Workers")
    ]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another panel"
        assert grid["x"] + grid["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["targets"]
            assert all("$model" in t["expr"] or "process_" in t["expr"] for t in panel["targets"])
