"""What strangers can do to the HTTP server: JSON, heads, connections and forms that nobody sends by mistake.

Whatever it is, it gets an answer that names the mistake or a hang-up, costs nobody else anything, and leaves nothing.
"""

from __future__ import annotations

import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from router.http import connection as connection_module
from router.http.connection import MAX_PIPELINED
from tests.integration.test_openai_http import POOLS, Gate, open_requests, raw
from tests.stub_cluster import WAIT_S, StubCluster, wait_until

MAX_REQUESTS = 64
ASK = {"prompt": "abc", "max_tokens": 3}
DEEP = "[" * 100_000 + "]" * 100_000
"""Further than any parser of JSON here goes."""
DEEPER = "[" * 700 + "]" * 700
"""Read, and then too deep for what follows it step by step."""


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def cluster(gate: Gate) -> Iterator[StubCluster]:
    with StubCluster(POOLS, step_s=gate, router={"max_requests": MAX_REQUESTS}) as cluster:
        yield cluster
        assert cluster.router.counters["internal_errors"] == 0
        assert cluster.router.counters["thread_failed"] == 0


@pytest.fixture(scope="module")
def http(cluster: StubCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.router.url or "", timeout=WAIT_S) as client:
        yield client


def connect(cluster: StubCluster, data: bytes = b"") -> socket.socket:
    url = urlsplit(cluster.router.url or "")
    connection = socket.create_connection((url.hostname, url.port or 0), WAIT_S)
    connection.sendall(data)
    return connection


def post(body: Any, *, path: str = "/v1/completions", headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def get(path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode()


def answers(connection: socket.socket, num: int) -> list[tuple[int, bytes]]:
    """Status and body of as many answers, none of them chunked."""
    found = []
    with connection.makefile("rb") as lines:
        for _ in range(num):
            status = int(lines.readline().split()[1])
            length = 0
            while (line := lines.readline().strip()) != b"":
                name, _, value = line.partition(b":")
                length = int(value) if name == b"content-length" else length
            found.append((status, lines.read(length)))
    return found


def rest(connection: socket.socket) -> bytes:
    """All until the server hangs up."""
    received = b""
    while True:
        try:
            data = connection.recv(1 << 16)
        except ConnectionResetError:
            return received
        if not data:
            return received
        received += data


# --- JSON, and numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_json_that_is_too_deep_is_the_clients_mistake(http: httpx.Client, path: str) -> None:
    answer = http.post(path, content=f'{{"prompt": "a", "of_nobody": {DEEP}}}')
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the body is nested too deeply")


def test_so_are_schemas_that_only_what_follows_them_finds_too_deep(http: httpx.Client) -> None:
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"a": {DEEPER}}}}}}}'
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "tool_choice": "required", "tools": [{tool}]}}'
    answer = http.post("/v1/chat/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("limit", ["9" * 5000, "00001", "\u0663\u0663\u0663\u0663\u0663", "\u00b2", "-1", "1e2", "NaN"])
def test_numbers_that_are_none(http: httpx.Client, limit: str) -> None:
    answer = http.get("/baton/requests", params={"limit": limit})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


def test_more_requests_in_one_than_are_ever_let_in(cluster: StubCluster, http: httpx.Client) -> None:
    """It is refused before it takes everybody's room."""
    before = len(http.get("/baton/requests", params={"limit": 1024}).json()["data"])
    answer = http.post("/v1/completions", json={**ASK, "prompt": ["a"] * 20, "n": 4})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert len(http.get("/baton/requests", params={"limit": 1024}).json()["data"]) == before
    assert http.post("/v1/completions", json={**ASK, "prompt": ["a"] * 16, "n": 4}).status_code == 200


# --- connections ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [0, 5], ids=["whole", "in part"])
def test_who_hangs_up_with_a_request_waiting_ends_the_one_before_it(
    cluster: StubCluster, gate: Gate, stream: bool, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    gate.close()
    try:
        ask = post({**ASK, "max_tokens": 400, "stream": stream})
        with closing(connect(cluster, ask + ask[: len(ask) - cut])):
            wait_until(lambda: open_requests(cluster) == 1, "the first one is open")
            wait_until(lambda: any(c.pipeline for c in server(cluster).connections), "the second one waits")
        wait_until(lambda: open_requests(cluster) == 0, "nothing is open")  # while no step has ended
    finally:
        gate.open()
    cluster.wait_ledger_zero()
    assert [r for r in caplog.records if r.name == "uvicorn.error"] == []


def server(cluster: StubCluster) -> Any:
    """uvicorn's state."""
    http: Any = cluster.router._http
    return http._server.server_state


def test_who_asks_for_another_protocol_is_answered_in_this_one(cluster: StubCluster) -> None:
    """As Java's HttpClient does with each first request; its body must neither be lost nor read as a request."""
    upgrade = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    data = json.dumps(ASK).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (data[:4], data[4:], b""))
    whole = post(ASK, headers=upgrade)
    chunked = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{upgrade}transfer-encoding: chunked\r\n\r\n".encode()
    for head, body in ((whole[: -len(data)], data), (chunked, chunks)):
        for parts in (
            [head + body + get("/version")],
            [head, body, get("/version")],
            [head + body[:9], body[9:] + get("/version")],
        ):
            with closing(connect(cluster)) as connection:
                for part in parts:
                    connection.sendall(part)
                (status, answer), (after, version) = answers(connection, 2)
                assert (status, after) == (200, 200), answer
                assert json.loads(answer)["usage"]["completion_tokens"] == 3
                assert "version" in json.loads(version)
    with closing(connect(cluster, get("/ping", f"{upgrade}content-length: 00\r\n") + get("/ping"))) as connection:
        assert [status for status, _ in answers(connection, 2)] == [200, 200]
    smuggled = get("/version", "x-y: z\r\n")
    with closing(connect(cluster, post(smuggled, headers=upgrade)[: -len(smuggled)])) as connection:
        connection.sendall(smuggled)
        connection.sendall(get("/ping"))
        (status, answer), (after, _) = answers(connection, 2)
        assert (status, after) == (400, 200)
        assert b"not valid JSON" in answer
    with closing(connect(cluster, get("/version", upgrade) + get("/version", upgrade) + get("/ping"))) as connection:
        assert [status for status, _ in answers(connection, 3)] == [200, 200, 200]


def test_requests_that_end_in_the_packet_where_the_next_begins_are_no_endless_head(
    cluster: StubCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "MAX_HEAD", 1000)
    ask = post({**ASK, "of_nobody": "x" * 1000})
    with closing(connect(cluster, ask[:20])) as connection:
        wait_until(lambda: any(c._in_head for c in server(cluster).connections), "it reads a head")
        connection.sendall(ask[20:] + ask[:20])
        connection.sendall(ask[20:] + get("/ping"))
        assert [status for status, _ in answers(connection, 3)] == [200, 200, 200]


def test_a_connection_has_room_for_so_many_requests_behind_another(cluster: StubCluster, http: httpx.Client) -> None:
    with closing(connect(cluster)) as connection:
        connection.sendall(get("/ping") * MAX_PIPELINED)
        assert [status for status, _ in answers(connection, MAX_PIPELINED)] == [200] * MAX_PIPELINED
    with closing(connect(cluster)) as connection:
        asked = 100 * MAX_PIPELINED
        with suppress(OSError):  # it may have hung up already
            connection.sendall(get("/ping") * asked)
        assert rest(connection).count(b"HTTP/1.1 200") < asked
    assert http.get("/ping").status_code == 200


def test_what_is_no_http_is_told_so_and_not_in_the_middle_of_an_answer(
    cluster: StubCluster, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    for junk in (
        b"\x16\x03\x01\x02\x00\x01",
        b"GET /ping HTTP/1.1\r\nhost : x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\n\r\n",
    ):
        with closing(connect(cluster, junk)) as connection:
            [(status, body)] = answers(connection, 1)
            assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")
            assert rest(connection) == b""
    with closing(raw(cluster, {**ASK, "max_tokens": 400, "stream": True, "n": 2})) as connection:
        received = b""
        while b"data: " not in received:
            received += connection.recv(1 << 16)
        gate.close()
        try:
            connection.sendall(b"junk\r\n\r\n")
            received += rest(connection)
        finally:
            gate.open()
    assert received.count(b"HTTP/1.1 ") == 1
    wait_until(lambda: open_requests(cluster) == 0, "nothing is open")
    for _ in range(20):
        with closing(connect(cluster, b"\0\r\n\r\n")) as connection:
            answers(connection, 1)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= 10  # others may ask for as many


# --- forms ---------------------------------------------------------------------------------------------

CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4500)) + '\nr4500: "a"'
"""Overflows the stack of who compiles it."""
DOUBLING = "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60)) + '\nA60: "a"'
"""Takes longer to compile than the world is old."""


@pytest.mark.parametrize("grammar", [CHAIN, DOUBLING], ids=["too deep", "endless"])
def test_a_form_that_kills_who_looks_at_it_harms_nobody(cluster: StubCluster, http: httpx.Client, grammar: str) -> None:
    told: list[httpx.Response] = []

    def ask() -> None:
        told.append(httpx.post(f"{cluster.router.url}/v1/completions", json=body, timeout=60.0))

    body = {**ASK, "guided_grammar": grammar}
    asking = threading.Thread(target=ask)
    asking.start()
    times = [time.monotonic()]
    while asking.is_alive():
        assert http.get("/ping").status_code == 200
        times.append(time.monotonic())
    if grammar == DOUBLING:  # it took seconds, in which others were served
        assert max(b - a for a, b in itertools.pairwise(times)) < (times[-1] - times[0]) / 2
    assert (told[0].status_code, told[0].json()["error"]["param"]) == (400, "guided_grammar")
    assert http.post("/v1/completions", json={**ASK, "guided_choice": ["a"]}).status_code == 200
