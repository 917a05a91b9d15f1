"""OpenAI's API over real sockets: clients that hang up, do not read, or come too many; a router that stops."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.stub_cluster import WAIT_S, StubCluster, expected_tokens, wait_until

POOLS = {"prefill": {"workers": 1}, "decode": {"workers": 1}}
LONG_NAME = "m" * 65536
"""Of a model: every chunk carries it, so a hundred of them fill all buffers of a connection."""


class Gate:
    """Workers' steps pass while it is open."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def __call__(self, worker_id: str, plan: Any) -> float:
        assert self._open.wait(WAIT_S)
        return 0.0

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def cluster(gate: Gate) -> Iterator[StubCluster]:
    with StubCluster(POOLS, step_s=gate, router={"max_requests": 64}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def http(cluster: StubCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.router.url or "", timeout=WAIT_S) as client:
        yield client


def text_of(prompt: str, num_tokens: int, **other: int) -> str:
    return "".join(chr(token) for token in expected_tokens([ord(c) for c in prompt], num_tokens, **other))


def raw(cluster: StubCluster, body: dict[str, Any], *, receive_buffer: int | None = None) -> socket.socket:
    """A connection on which this completion has been asked for."""
    url = urlsplit(cluster.router.url or "")
    connection = socket.socket()
    connection.settimeout(WAIT_S)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((url.hostname, url.port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def events(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def open_requests(cluster: StubCluster) -> int:
    return cluster.router.status().num_requests


def test_an_answer_and_its_stream(http: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 9, "seed": 4, "n": 2}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    expected = [text_of("hello", 9, seed=4, sample=i) for i in range(2)]
    assert [choice["text"] for choice in answer.json()["choices"]] == expected
    texts = ["", ""]
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        chunks = list(events(stream.iter_lines()))
    assert chunks.pop() == "[DONE]"
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == expected


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405)],
)
def test_what_there_is_not_is_told_in_openais_shape(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert path in answer.json()["error"]["message"]


def test_a_connection_serves_on_after_errors_and_streams(cluster: StubCluster) -> None:
    """Whatever the content type says: what is sent is read as JSON."""
    url = urlsplit(cluster.router.url or "")
    bodies = [b"{", b'{"prompt": "a", "max_tokens": 2, "stream": true}', b'{"prompt": "a", "model": "x"}']
    connection = socket.create_connection((url.hostname, url.port), WAIT_S)
    with connection, connection.makefile("rb") as answers:
        for body, status in zip(bodies, (400, 200, 404), strict=True):
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: text/x\r\ncontent-length: {len(body)}\r\n"
            )
            connection.sendall(head.encode() + b"\r\n" + body)
            assert answers.readline().split()[1] == str(status).encode()
            headers = dict(line.split(": ", 1) for line in _lines_to(answers, b"\r\n"))
            if status == 200:
                assert _lines_to(answers, b"0\r\n")
                assert answers.readline() == b"\r\n"
            else:
                assert b"error" in answers.read(int(headers["content-length"]))


def _lines_to(file: Any, end: bytes) -> list[str]:
    lines = []
    while (line := file.readline()) != end:
        assert line, "the connection ended"
        lines.append(line.decode().strip())
    return lines


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_ends_his_requests(cluster: StubCluster, gate: Gate, stream: bool) -> None:
    gate.close()
    try:
        connection = raw(cluster, {"prompt": ["ab", "cd"], "max_tokens": 400, "n": 2, "stream": stream})
        wait_until(lambda: open_requests(cluster) == 4, "all samples open")
        connection.close()
        wait_until(lambda: open_requests(cluster) == 0, "the router has ended them")
    finally:
        gate.open()
    cluster.wait_ledger_zero()


def test_who_hangs_up_while_tokens_come_ends_his_requests(cluster: StubCluster, gate: Gate) -> None:
    connection = raw(cluster, {"prompt": "ab", "max_tokens": 480, "stream": True})
    assert connection.recv(1) == b"H"
    gate.close()  # it cannot come to its end before
    connection.close()
    try:
        wait_until(lambda: open_requests(cluster) == 0, "the router has ended it")
    finally:
        gate.open()
    cluster.wait_ledger_zero()


def test_too_many_are_told_to_come_again(cluster: StubCluster, gate: Gate, http: httpx.Client) -> None:
    gate.close()
    try:
        connection = raw(cluster, {"prompt": "ab", "n": 64})
        wait_until(lambda: open_requests(cluster) == 64, "as many as may be")
        for stream in (False, True):
            answer = http.post("/v1/completions", json={"prompt": "x", "stream": stream})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "overloaded"
        connection.close()
        wait_until(lambda: open_requests(cluster) == 0, "room again")
    finally:
        gate.open()
    assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_the_id_in_the_header_is_the_one_to_ask_about(cluster: StubCluster, http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    request_id = answer.headers["x-request-id"]
    assert answer.json()["id"] == f"cmpl-{request_id}"
    with cluster.client() as client:
        assert client.explain(request_id).request_id == request_id


def test_who_does_not_read_is_dropped_and_slows_nobody() -> None:
    http_section = {"model_names": [LONG_NAME], "write_timeout_s": 1.0}
    with StubCluster(
        POOLS, step_s=lambda worker_id, plan: 0.005, http=http_section
    ) as cluster:  # tokens of one moment share a chunk
        body = {"prompt": "ab", "max_tokens": 400, "stream": True, "n": 4}
        with raw(cluster, body, receive_buffer=4096) as stuck, httpx.Client(base_url=cluster.router.url or "") as other:
            done = 0
            while open_requests(cluster) or not done:
                answer = other.post(
                    "/v1/completions", json={"prompt": "xy", "max_tokens": 8, "seed": 0}, timeout=WAIT_S
                )
                assert answer.json()["choices"][0]["text"] == text_of("xy", 8)
                done += 1
            cluster.wait_ledger_zero()
            data = b""
            with suppress(ConnectionResetError):  # what is on its way still is not waited for
                while piece := stuck.recv(1 << 20):
                    data += piece
                pytest.fail("the connection was closed as if its answer were whole")
            assert data.startswith(b"HTTP/1.1 200")
            assert b"[DONE]" not in data


def test_a_router_that_stops_says_so_in_the_stream() -> None:
    gate = Gate()
    cluster = StubCluster(POOLS, step_s=gate)
    try:
        with raw(cluster, {"prompt": "ab", "max_tokens": 480, "stream": True}) as connection:
            assert connection.recv(1) == b"H"
            gate.close()
            stopping = threading.Thread(target=cluster.router.stop)
            stopping.start()
            data = b""
            while piece := connection.recv(1 << 16):
                data += piece
            stopping.join(WAIT_S)
        *_, error, end = (part for part in data.decode().split("\n\n") if "data: " in part)
        assert json.loads(error.partition("data: ")[2])["error"]["type"] == "server_error"
        assert end.endswith("[DONE]")
        assert data.endswith(b"0\r\n\r\n")
    finally:
        gate.open()
        cluster.stop()
