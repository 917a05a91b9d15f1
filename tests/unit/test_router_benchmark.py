"""The benchmark of the router: its figures come from streams that say what they should."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.router import BARS, Bench, direct_round_trip, measure_streams, percentiles_ms, tables
from benchmarks.router_ends import RouterProcess, StubProcess
from benchmarks.router_load import Load, check_http, check_native, http_load, model_of, native_load

SECONDS = 1.0


@pytest.fixture(scope="module")
def bench(demo_model: Path) -> Bench:
    bench = Bench(SECONDS)
    bench.direct = direct_round_trip(bench)
    return bench


@pytest.fixture(scope="module")
def ends(bench: Bench) -> Iterator[tuple[RouterProcess, StubProcess]]:
    with bench.cluster(1) as ends:
        yield ends


@pytest.fixture(scope="module")
def entries(bench: Bench) -> dict[str, dict[str, Any]]:
    return {api: measure_streams(bench, api, 1, 1) for api in ("http", "native")}


def test_the_way_without_a_router_is_measured(bench: Bench) -> None:
    assert bench.direct["samples"] == int(SECONDS * 100)
    assert 0 < bench.direct["p50"] <= bench.direct["p99"]


def test_an_entry_is_made_of_its_runs(bench: Bench, entries: dict[str, dict[str, Any]]) -> None:
    for entry in entries.values():
        assert entry["streams"] == entry["connections"] == 1
        assert [run["tokens"] for run in entry["runs"]] == [16, 256]
        assert entry["saturated"]["answers"] > 0
        assert entry["requests_per_s"] == entry["saturated"]["answers"] / entry["saturated"]["seconds"]
        assert entry["runs"][0]["ttft_ms"]["samples"] > 0
        assert entry["added_ttft_ms_p50"] == entry["runs"][0]["ttft_ms"]["p50"] - bench.direct["p50"]
        for run in entry["runs"]:
            assert run["seconds"] >= SECONDS and run["tokens_sent"] > run["requests"]
            # The two figures say what both runs took.
            us = run["requests"] * entry["cpu_us_per_request"] + run["tokens_sent"] * entry["cpu_us_per_token"]
            assert us == pytest.approx(run["cpu_s"] * 1e6, rel=1e-6)


def test_answers_are_compared_before_any_is_counted(bench: Bench, ends: tuple[RouterProcess, StubProcess]) -> None:
    router, _ = ends
    bench.check(router)
    with pytest.raises(RuntimeError, match="expected 'no such text'"):
        check_native(router.address, 3, "no such text")
    with pytest.raises(RuntimeError, match="expected 'no such text'"):
        check_http(router.url, model_of(router.url), 3, "no such text")
    with pytest.raises(RuntimeError, match="HTTP 404"):
        check_http(router.url, "no-such-model", 3, "")


def test_a_load_counts_what_it_gets(ends: tuple[RouterProcess, StubProcess]) -> None:
    router, stub = ends
    for load_of, address in ((http_load, router.url), (native_load, router.address)):
        before, seen, counted = stub.counts(), [], []
        load = Load(5, 3, 0.0, warm_s=0.0, exact=True, requests=40)
        load_of(address, load, lambda seen=seen: seen.append(None), counted.append)
        assert len(seen) == 2
        assert counted == list(range(1, len(counted) + 1)) and len(counted) >= 40
        requests, tokens = (after - was for was, after in zip(before, stub.counts(), strict=True))
        assert len(counted) <= requests <= len(counted) + 5
        assert tokens >= 3 * len(counted)


def test_a_stream_that_fails_ends_the_load(ends: tuple[RouterProcess, StubProcess]) -> None:
    router, _ = ends
    for load_of, address in ((http_load, router.url), (native_load, router.address)):
        with pytest.raises(RuntimeError, match="max_tokens"):
            load_of(address, Load(2, 1 << 19, 1.0, exact=True), lambda: None)


def test_the_tables_show_figures_beside_their_bars(entries: dict[str, dict[str, Any]]) -> None:
    run = {"ttft_ms": percentiles_ms([0.001]), "gap_ms": percentiles_ms([0.002])}
    result = {
        "http": [entries["http"], entries["http"] | {"streams": 64, "cpu_us_per_token": 61.0}],
        "native": [entries["native"]],
        "idle_streams": {"streams": 1000, "http_cpu_percent": 1.5, "native_cpu_percent": 0.5},
        "stuck_client": {f"{api}_{which}": run for api in ("http", "native") for which in ("with", "without")},
        "memory": {"requests": 100, "bytes_per_request": 12.0, "checkpoints": [{"requests": 100, "rss": 1 << 28}]},
        "async_client": {"cpu_us_per_token": 12.5},
        "placement": [{"workers": n, "policy": "random", "us_per_decision": 7.0} for n in (2, 64, 1000)],
    }
    console = Console(width=200, file=StringIO())
    for table in tables(result):
        console.print(table)
    text = console.file.getvalue()
    assert f"61.0 >{BARS['http cpu_us_per_token']:g}" in text
    assert "1.50 ≤5 % of a core" in text and "12.5 us per token" in text
    assert "7.0 ≤50 us for random" in text
