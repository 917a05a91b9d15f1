"""A router process under load: its memory does not grow, and a client that does not read slows nobody."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.router import Bench
from benchmarks.router_ends import RouterProcess, StubProcess
from benchmarks.router_load import (
    Load,
    StuckHttpClient,
    StuckNativeClient,
    chat_request,
    http_load,
    model_of,
    native_load,
)
from router.records import MAX_RECORDS
from tests.stub_cluster import wait_until

REQUESTS = 2000
MAX_GROWTH = 3 << 20
"""Bytes over twice `REQUESTS`. Nothing is kept, but these are the process' pages, of which the allocator keeps some."""


@pytest.fixture(scope="module")
def bench(demo_model: Path) -> Bench:
    return Bench(1.0)


@pytest.fixture(scope="module")
def cluster(bench: Bench) -> Iterator[tuple[RouterProcess, StubProcess]]:
    with bench.cluster(64) as ends:
        yield ends


@pytest.fixture
def ends(cluster: tuple[RouterProcess, StubProcess]) -> tuple[RouterProcess, StubProcess]:
    cluster[1].pace(0.0)
    return cluster


def requests(router: RouterProcess, count: int) -> None:
    """So many over each API."""
    for load_of, address in ((http_load, router.url), (native_load, router.address)):
        load_of(address, Load(32, 4, 0.0, warm_s=0.0, exact=True, requests=count), lambda: None)


def test_memory_is_flat(ends: tuple[RouterProcess, StubProcess]) -> None:
    router, _ = ends
    assert REQUESTS > MAX_RECORDS
    requests(router, REQUESTS)  # what is remembered of requests that ended is full now
    before = router.usage()[1]
    requests(router, REQUESTS)
    assert router.usage()[1] - before < MAX_GROWTH


@pytest.mark.parametrize("stuck_api", ["http", "native"])
def test_a_client_that_never_reads_slows_nobody(ends: tuple[RouterProcess, StubProcess], stuck_api: str) -> None:
    router, stub = ends
    before = stub.counts()[1]
    stub.pace(0.001)
    stuck = StuckHttpClient(router.url, 1 << 16) if stuck_api == "http" else StuckNativeClient(router.address, 1 << 16)
    try:
        wait_until(lambda: stub.counts()[1] > before + 3000, "far more tokens than anybody buffers for a client")
        requests(router, 300)
    finally:
        stuck.close()
    wait_until(lambda: not stub.is_decoding(), "what the client had open has ended")


def test_an_answer_that_is_read_late_is_whole_and_in_order(
    bench: Bench, ends: tuple[RouterProcess, StubProcess]
) -> None:
    router, stub = ends
    tokens, address = 3000, urlsplit(router.url)
    before = stub.counts()[1]
    stub.pace(0.001)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect((address.hostname, address.port))
        client.sendall(chat_request(router.url, model_of(router.url), tokens))
        wait_until(lambda: stub.counts()[1] >= before + tokens, "all tokens have been sent to the router", within_s=60)
        data = b""
        while not data.endswith(b"\r\n0\r\n\r\n"):
            part = client.recv(1 << 16)
            assert part, data[-200:]
            data += part
    events = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: {")]
    assert len(events) > 100
    said = [choice["delta"].get("content") or "" for event in events for choice in json.loads(event)["choices"]]
    assert "".join(said) == bench.said(tokens)
