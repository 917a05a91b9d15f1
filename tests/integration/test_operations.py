"""What operators ask a running cluster: its health, figures and requests; over HTTP, natively, on the command line."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from baton.errors import InvalidRequestError
from baton.timeline import Stage
from baton_cli.main import app
from router.actions import RouterAction
from router.client import AsyncRouterClient
from tests.stub_cluster import StubCluster, wait_until
from tests.unit.test_trace import check_format

SPLIT: dict[str, Any] = {"prefill": {}, "decode": {}}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def cluster() -> Iterator[StubCluster]:
    with StubCluster(SPLIT) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def http(cluster: StubCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=str(cluster.router.url), timeout=60) as http:
        yield http


def complete(http: httpx.Client, prompt: str = "a" * 30, **headers: str) -> None:
    body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": 4}
    assert http.post("/v1/completions", json=body, headers=headers).status_code == 200


def metrics(http: httpx.Client) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k != "model_name")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


# --- over HTTP --------------------------------------------------------------------------------------


def test_health_and_readiness(http: httpx.Client) -> None:
    health, ready = http.get("/health"), http.get("/ready")
    assert (health.status_code, health.json()) == (200, {"status": "ok", "pools": {"prefill": "ok", "decode": "ok"}})
    assert (ready.status_code, ready.json()) == (200, {"ready": True})


def test_without_a_decode_worker_it_lives_and_is_not_ready() -> None:
    with (
        StubCluster(SPLIT) as cluster,
        cluster.client() as client,
        httpx.Client(base_url=str(cluster.router.url)) as http,
    ):
        client.drain("decode-0")
        assert http.get("/health").status_code == 200
        assert http.get("/health").json() == {"status": "down", "pools": {"prefill": "ok", "decode": "empty"}}
        ready = http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (
            503,
            "no worker that can decode takes requests (decode-0 is draining)",
        )
        client.drain("decode-0", undo=True)
        assert http.get("/ready").status_code == 200


def test_the_overview_over_http_and_natively(cluster: StubCluster, http: httpx.Client) -> None:
    with cluster.client() as client:
        done = client.generate(list(range(30)), max_tokens=4)
        over_http, native = http.get("/baton/overview").json(), client.overview()
    for told in (over_http, native):
        for name in ("now", "uptime_s", "workers", "recent"):
            told[f"its {name}"] = told.pop(name)
        for name in ("tokens_per_s", "requests_per_s"):
            assert told["latency"].pop(name) > 0
    same = [name for name in native if not name.startswith("its ")]
    assert {name: over_http[name] for name in same} == {name: native[name] for name in same}
    assert [w["worker_id"] for w in native["its workers"]] == ["prefill-0", "decode-0"]
    first = over_http["its recent"][0]
    assert (first["request_id"], first["completion_tokens"]) == (done.request_id, 4)
    assert [stage["name"] for stage in first["stages"]] == list(Stage)
    assert native["latency"]["ttft_ms"]["count"] >= 1
    assert 0 < native["latency"]["ttft_ms"]["p50"] <= native["latency"]["ttft_ms"]["p99"]


def test_requests_that_ended(cluster: StubCluster, http: httpx.Client) -> None:
    with cluster.client() as client:
        ids = [client.generate([i] * 20, max_tokens=2).request_id for i in range(3)]
        told = http.get("/baton/requests", params={"limit": 2}).json()["data"]
        assert [r["request_id"] for r in told] == ids[:0:-1]
        records = client.records(3)
        assert [r.request_id for r in records] == ids[::-1]
        assert [r.placements[0].rankings for r in records] == [()] * 3, "they are most of a record"
        one = http.get(f"/baton/requests/{ids[1][:20]}").json()
        explained = client.explain(ids[1])
    assert one["request_id"] == ids[1]
    assert [p["decode"] for p in one["placements"]] == ["decode-0"]
    assert {int(mark): at for mark, at in one["marks"].items()} == explained.marks
    assert explained.placements[0].rankings
    assert sum(stage["ms"] for stage in one["stages"]) == pytest.approx(one["total_ms"])


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/baton/requests/nobody", 404, "request_id"),
        ("/baton/requests?limit=0", 400, "limit"),
        ("/baton/requests?limit=many", 400, "limit"),
        ("/baton/requests?limit=1025", 400, "limit"),
    ],
)
def test_mistakes_have_openais_shape(http: httpx.Client, path: str, status: int, param: str) -> None:
    answer = http.get(path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]


def test_metrics_of_what_was_served(cluster: StubCluster, http: httpx.Client) -> None:
    before = metrics(http)
    complete(http)
    http.get("/no/such/path")
    http.request("BREW", "/v1/models")
    with cluster.client() as client:
        client.generate([9] * 20, max_tokens=3)
        with pytest.raises(InvalidRequestError):
            client.generate([99999], max_tokens=3)
    after = metrics(http)

    def grown(name: str, **labels: str) -> float:
        key = f"baton:{name}", frozenset(labels.items())
        return after[key] - before.get(key, 0.0)

    assert grown("request_success_total", finished_reason="length") == 2
    assert grown("prompt_tokens_total") == 50
    assert grown("generation_tokens_total") == 7
    assert grown("time_to_first_token_seconds_count") == 2
    assert grown("router_requests_refused_total", code="invalid_request") == 1
    assert grown("http_requests_total", path="/v1/completions", method="POST", status="200") == 1
    assert grown("http_requests_total", path="none", method="GET", status="404") == 1
    assert grown("http_requests_total", path="/metrics", method="GET", status="200") >= 1
    assert [key for key in after if ("method", "BREW") in key[1]] == []
    assert grown("router_open_requests") == 0
    assert ("process_resident_memory_bytes", frozenset()) in after


# --- what only watches ------------------------------------------------------------------------------


class Raises:
    """An observer with a bug."""

    def on_action(self, action: RouterAction, now: float) -> None:
        raise RuntimeError("a bug of an observer")


def test_an_observer_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with StubCluster(SPLIT) as cluster, cluster.client() as client:
        cluster.router._desk.observers.insert(0, Raises())
        done = client.generate(list(range(30)), max_tokens=20)
        assert len(done.token_ids) == 20
        assert client.overview()["latency"]["ttft_ms"]["count"] == 1, "the others still see all"
        assert cluster.router.counters["observers_failed"] > 20
    told = [record for record in caplog.records if "Raises failed" in record.getMessage()]
    assert 1 <= len(told) <= 10


def test_the_async_client_asks_the_same(cluster: StubCluster) -> None:
    async def ask() -> None:
        async with AsyncRouterClient(cluster.address) as client:
            done = await client.generate([5] * 20, max_tokens=2)
            assert (await client.overview())["recent"][0]["request_id"] == done.request_id
            assert (await client.records(1))[0].request_id == done.request_id

    asyncio.run(ask())


# --- traces -----------------------------------------------------------------------------------------


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP, as a collector does."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                message = ExportTraceServiceRequest()
                message.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                collector.requests.append((self.path, message))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    def spans(self) -> list[Any]:
        return [
            span
            for _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def __exit__(self, *arguments: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


def test_spans_reach_a_collector_in_the_trace_of_who_asked() -> None:
    with Collector() as collector:
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        with StubCluster(SPLIT, tracing={"endpoint": endpoint}) as cluster:
            with httpx.Client(base_url=str(cluster.router.url)) as http:
                complete(http, traceparent=f"00-{TRACE}-{PARENT}-01")
            with cluster.client() as client:
                done = client.generate([5] * 20, max_tokens=2)
        wait_until(lambda: len(collector.spans()) >= 2 * (1 + len(Stage)), "all spans have come")
    assert {path for path, _ in collector.requests} == {"/v1/traces"}
    spans = collector.spans()
    whole = {span.trace_id.hex() == TRACE: span for span in spans if span.name.startswith("text_completion")}
    assert whole[True].parent_span_id.hex() == PARENT
    assert whole[False].parent_span_id == b""
    attributes = {a.key: a.value for a in whole[False].attributes}
    assert attributes["gen_ai.response.id"].string_value == done.request_id
    for parent in whole.values():
        children = [span for span in spans if span.parent_span_id == parent.span_id]
        assert sorted(span.name for span in children) == sorted(Stage)
        assert all(parent.start_time_unix_nano <= s.start_time_unix_nano for s in children)
        assert all(s.end_time_unix_nano <= parent.end_time_unix_nano for s in children)
        assert abs(parent.end_time_unix_nano / 1e9 - time.time()) < 60


# --- the command line -------------------------------------------------------------------------------


def baton(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.output


def test_top_once_and_as_json(cluster: StubCluster, http: httpx.Client) -> None:
    complete(http)
    text = baton("top", "--once", "--address", cluster.address)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "time to first token" in text
    assert "decode-0" in text
    data = json.loads(baton("top", "--json", "--address", cluster.address))
    assert data["health"] == "ok"
    assert data["latency"]["ttft_ms"]["count"] >= 1


def test_top_on_a_terminal_goes_on_until_ctrl_c(cluster: StubCluster) -> None:
    shown, terminal = pty.openpty()
    command = [sys.executable, "-m", "baton_cli.main", "top", "--every", "0.1", "--address", cluster.address]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    try:
        output = b""
        deadline = time.monotonic() + 60
        while output.count(b"time to first token") < 3:  # it was shown anew
            assert time.monotonic() < deadline, output
            assert process.poll() is None, output
            if select.select([shown], [], [], 0.1)[0]:
                output += os.read(shown, 1 << 16)
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            assert time.monotonic() < deadline, output
            if select.select([shown], [], [], 0.05)[0]:
                try:
                    output += os.read(shown, 1 << 16)
                except OSError:
                    break  # the terminal's other end is closed
        assert process.wait(20) == 0
        assert b"Traceback" not in output
        assert b"\x1b[?25h" in output[-40:], "the cursor is back"
        assert b"\x1b[?1049l" in output[-40:], "and what was on the screen before"
    finally:
        process.kill()
        process.wait()
        os.close(shown)


def test_trace_of_the_last_requests_and_of_one(cluster: StubCluster, http: httpx.Client, tmp_path: Path) -> None:
    for letter in "abc":
        complete(http, letter * 30)
    last = http.get("/baton/requests?limit=1").json()["data"][0]["request_id"]
    path = tmp_path / "trace.json"
    for options, requests in ((("--last", "3"), 3), ((last,), 1)):
        printed = baton("trace", *options, "--out", str(path), "--address", cluster.address)
        assert "https://ui.perfetto.dev" in printed.replace("\n", "")
        events = json.loads(path.read_text())["traceEvents"]
        check_format(events)
        assert sum(event["ph"] == "X" for event in events) == requests * len(Stage)
        assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"router", "prefill-0", "decode-0"}


@pytest.mark.parametrize("command", ["top", "trace"])
def test_help_has_an_example(command: str) -> None:
    assert f"Example: baton {command}" in baton(command, "--help")
