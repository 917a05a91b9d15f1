"""The HTTP server's door: keys, origins, sizes, patience, HTTPS. Over real sockets, as a stranger would try it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from baton.config import parse_config
from router.http.errors import ApiError
from router.http.guard import OPEN_PATHS, Guard
from tests.certificates import Certificate
from tests.stub_cluster import StubCluster, wait_until

POOLS = {"both": {"workers": 1}}
KEY, KEY_2 = "sk-0123456789abcdef", "sk-another-key-of-mine"
LATE_S = 1.0
PATIENCE_S = 30.0
WEB = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0))
"""Leaves no connection behind."""


def cluster(**http: Any) -> StubCluster:
    return StubCluster(POOLS, http=http)


@pytest.fixture(scope="module")
def keyed() -> Iterator[StubCluster]:
    with cluster(api_keys=[KEY, KEY_2], max_body_mib=1, cors_origins=["https://app.example"]) as running:
        yield running


@pytest.fixture(scope="module")
def hasty() -> Iterator[StubCluster]:
    """One that waits for nobody."""
    with cluster(read_timeout_s=LATE_S, write_timeout_s=LATE_S) as running:
        yield running


def url_of(running: StubCluster) -> str:
    assert running.router.url is not None
    return running.router.url


def server_of(running: StubCluster) -> Any:
    """uvicorn's."""
    http: Any = running.router._http
    return http._server


class Raw:
    """A connection without a client library."""

    def __init__(self, running: StubCluster):
        parts = urlsplit(url_of(running))
        self.socket = socket.create_connection((parts.hostname, parts.port or 0), timeout=PATIENCE_S)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def rest(self) -> bytes:
        """All until the server hangs up."""
        received = b""
        while True:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return received
            if not data:
                return received
            received += data

    def answer(self) -> tuple[int, dict[str, Any]]:
        """Status and error of what the server says before it hangs up."""
        head, _, body = self.rest().partition(b"\r\n\r\n")
        assert b"connection: close" in head
        return int(head.split()[1]), json.loads(body)["error"]

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


# --- keys ---------------------------------------------------------------------------------------------


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        (bearer(KEY), 200),
        (bearer(KEY_2), 200),
        ({"Authorization": f"bearer  {KEY}"}, 200),
        (bearer(KEY[:-1]), 401),
        (bearer(KEY + "0"), 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"X-Api-Key": KEY}, 401),
    ],
)
def test_a_key_is_needed(keyed: StubCluster, headers: dict[str, str], status: int) -> None:
    answer = WEB.get(f"{url_of(keyed)}/v1/models", headers=headers)
    assert answer.status_code == status
    if status == 401:
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert KEY not in answer.text and KEY_2 not in answer.text


def test_all_paths_but_a_few_need_a_key(keyed: StubCluster) -> None:
    for path in ("/health", "/ready", "/ping", "/version", "/ui"):
        assert WEB.get(url_of(keyed) + path, follow_redirects=True).status_code == 200, path
    routes = [route.path for route in server_of(keyed).config.app.routes]
    closed = [path for path in routes if path not in OPEN_PATHS]
    assert {"/v1/models", "/v1/completions", "/metrics", "/baton/overview", "/tokenize"} <= set(closed)
    for path in [*closed, "/nowhere", "//health", "/health/", "/HEALTH", "/ui/../v1/models"]:
        for method in ("GET", "POST", "DELETE"):
            assert WEB.request(method, url_of(keyed) + path).status_code == 401, (method, path)


def test_openai_calls_a_wrong_key_by_its_name(keyed: StubCluster) -> None:
    with openai.OpenAI(base_url=f"{url_of(keyed)}/v1", api_key="sk-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
    with openai.OpenAI(base_url=f"{url_of(keyed)}/v1", api_key=KEY, max_retries=0) as client:
        assert client.models.list().data


def test_without_keys_anyone_may_ask(hasty: StubCluster) -> None:
    assert WEB.get(f"{url_of(hasty)}/v1/models").status_code == 200
    assert WEB.get(f"{url_of(hasty)}/v1/models", headers=bearer("whatever")).status_code == 200


# --- bodies -------------------------------------------------------------------------------------------


def test_a_body_that_is_announced_too_large_is_refused_unread(keyed: StubCluster) -> None:
    with Raw(keyed) as raw:
        raw.send(f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode())
        raw.send(b"Content-Length: 1048577\r\n\r\n")
        status, error = raw.answer()
    assert status == 413
    assert error["code"] == "request_too_large" and "1 MiB" in error["message"]


def test_a_body_of_unknown_length_is_read_to_the_limit(keyed: StubCluster) -> None:
    def chunks(num_bytes: int) -> Iterator[bytes]:
        text = json.dumps({"prompt": ""}).encode().replace(b'""', b'"' + b"x" * num_bytes + b'"')
        for start in range(0, len(text), 50_000):
            yield text[start : start + 50_000]

    for num_bytes, status in ((1 << 20) - 100, 200), (1 << 20, 413), (5 << 20, 413):
        answer = WEB.post(f"{url_of(keyed)}/tokenize", content=chunks(num_bytes), headers=bearer(KEY))
        assert answer.status_code == status, num_bytes
        if status == 413:
            assert answer.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_clients_that_send_too_much_get_to_read_why(keyed: StubCluster, path: str) -> None:
    answer = WEB.post(url_of(keyed) + path, content=b"x" * (12 << 20), headers=bearer(KEY))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_the_largest_body_passes(keyed: StubCluster) -> None:
    prompt = "x" * ((1 << 20) - len('{"prompt":""}'))
    answer = WEB.post(f"{url_of(keyed)}/tokenize", content=f'{{"prompt":"{prompt}"}}', headers=bearer(KEY))
    assert answer.status_code == 200 and answer.json()["count"] == len(prompt)


async def read_body(receive: Any) -> None:
    """Reads a body as applications do."""
    while (await receive()).get("more_body"):
        pass


def test_the_guard_reads_no_more_than_the_limit() -> None:
    """However the body is sent, and however much there would be."""
    http = parse_config({"http": {"max_body_mib": 1}}).http
    size = 1 << 16

    async def run(*headers: tuple[bytes, bytes]) -> tuple[int, int]:
        taken, status = 0, 0

        async def receive() -> Message:
            nonlocal taken
            taken += size
            return {"type": "http.request", "body": bytes(size), "more_body": True}

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            try:
                await read_body(receive)
            except ApiError as e:
                await e.response()(scope, receive, send)

        scope = {"type": "http", "method": "POST", "path": "/", "headers": list(headers)}
        await Guard(app, http)(scope, receive, send)
        return status, taken

    assert asyncio.run(run((b"transfer-encoding", b"chunked"))) == (413, (1 << 20) + size)
    assert asyncio.run(run((b"content-length", b"%d" % (1 << 40)))) == (413, 1 << 20)


# --- patience -----------------------------------------------------------------------------------------


def test_who_says_nothing_is_hung_up_on(hasty: StubCluster) -> None:
    with Raw(hasty) as raw:
        assert raw.rest() == b""


@pytest.mark.parametrize(
    "part",
    [
        b"GET /hea",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{    \r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHo",
    ],
)
def test_a_request_that_does_not_arrive_is_ended(hasty: StubCluster, part: bytes) -> None:
    with Raw(hasty) as raw:
        raw.send(part)
        answer = raw.rest()
    last = answer[answer.rindex(b"HTTP/1.1 ") :]
    assert last.startswith(b"HTTP/1.1 408 Request Timeout\r\n"), answer
    error = json.loads(last.partition(b"\r\n\r\n")[2])["error"]
    assert "did not arrive within 1 s" in error["message"]
    assert WEB.get(f"{url_of(hasty)}/health").status_code == 200


def test_a_byte_now_and_then_buys_no_time(hasty: StubCluster) -> None:
    """Slow loris: each byte in time, the request never."""
    with Raw(hasty) as raw:
        raw.send(b"GET /health HTTP/1.1\r\nX: ")
        raw.socket.settimeout(LATE_S / 8)
        received = b""
        for _ in range(int(PATIENCE_S / LATE_S * 8)):
            try:
                raw.send(b"x")
                received = raw.socket.recv(4096)
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("the connection is still there")
    assert received == b"" or received.startswith(b"HTTP/1.1 408")


def test_time_starts_anew_with_each_request(hasty: StubCluster) -> None:
    """A connection may live longer than a request may take to arrive."""
    with httpx.Client(base_url=url_of(hasty)) as client:
        for _ in range(4):
            assert client.get("/health").status_code == 200
            with Raw(hasty) as other:
                other.rest()  # until its time is over
        pool = client._transport._pool.connections  # type: ignore[attr-defined]
        assert len(pool) == 1 and pool[0]._connection._request_count == 4, "one connection"


def test_an_endless_head_is_refused(hasty: StubCluster) -> None:
    with Raw(hasty) as raw:
        raw.send(b"GET /health HTTP/1.1\r\n")
        try:
            for i in range(100_000):
                raw.send(b"X-%d: %s\r\n" % (i, b"y" * 1000))
        except OSError:
            pass
        else:
            pytest.fail("100 MB of headers were taken")
        assert b"431 Request Header Fields Too Large" in raw.rest()


def test_who_does_not_read_is_disconnected(hasty: StubCluster) -> None:
    """The answer is larger than all buffers on its way."""
    prompt = "x" * 1_000_000
    body = json.dumps({"prompt": prompt, "return_token_strs": True}).encode()
    parts = urlsplit(url_of(hasty))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.settimeout(PATIENCE_S)
        client.connect((parts.hostname, parts.port))
        client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        connections = server_of(hasty).server_state.connections
        wait_until(lambda: bool(connections), "connected")
        wait_until(lambda: not connections, "disconnected")
        received = 0
        try:
            while data := client.recv(1 << 20):
                received += len(data)
        except ConnectionResetError:
            pass
    assert 0 < received < len(prompt) * len('"x",120,'), "the answer was cut"


HTTP_PARTS = st.sampled_from(
    [
        b"GET /health HTTP/1.1\r\n",
        b"POST /tokenize HTTP/1.1\r\n",
        b"OPTIONS * HTTP/1.1\r\n",
        b"GET //%00/.. HTTP/1.0\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n",
        b"Host: x\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: -1\r\n",
        b"Origin: \xff\r\n",
        b"Content-Length: 99999999999999999999\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Expect: 100-continue\r\n",
        b"Connection: close\r\n",
        b"Connection: upgrade\r\nUpgrade: websocket\r\n",
        b"Authorization: Bearer \x80\r\n",
        b"\r\n",
        b"{",
        b"}",
        b'{"prompt": "x"}',
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"\x00",
        b"\n",
        b"PRI * HTTP/2.0\r\n",
    ]
)


@given(st.binary(max_size=300) | st.lists(HTTP_PARTS, max_size=12).map(b"".join))
@settings(max_examples=60)
def test_whatever_bytes_come_the_server_serves_on(hasty: StubCluster, data: bytes) -> None:
    """Answered or hung up on, within the time that a request has to arrive."""
    with Raw(hasty) as raw:
        try:
            raw.send(data)
            raw.socket.shutdown(socket.SHUT_WR)
        except OSError:
            return
        for answer in raw.rest().split(b"HTTP/1.1 ")[1:]:
            assert answer[:1] in b"1234", (data, answer)
    assert WEB.get(f"{url_of(hasty)}/health").status_code == 200


# --- web pages ----------------------------------------------------------------------------------------


def test_a_preflight_needs_no_key(keyed: StubCluster) -> None:
    asked = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    answer = WEB.options(f"{url_of(keyed)}/v1/chat/completions", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    refused = WEB.options(f"{url_of(keyed)}/v1/models", headers={**asked, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in refused.headers


def test_a_page_reads_answers_and_refusals(keyed: StubCluster) -> None:
    origin = {"Origin": "https://app.example"}
    for headers, status in (bearer(KEY), 200), ({}, 401):
        answer = WEB.get(f"{url_of(keyed)}/v1/models", headers=headers | origin)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, origin["Origin"])
    answer = WEB.get(f"{url_of(keyed)}/v1/models", headers=bearer(KEY) | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_pages_of_other_servers_can_do_nothing(hasty: StubCluster) -> None:
    """Browsers send a simple POST of any page anywhere; here that is not enough, also where there are no keys."""
    url, own = url_of(hasty), urlsplit(url_of(hasty)).netloc
    for origin, status in (
        ("https://evil.example", 403),
        ("null", 403),
        (f"http://{own}.evil.example", 403),
        (f"http://{own}", 200),
    ):
        answer = WEB.post(f"{url}/tokenize", content='{"prompt":"x"}', headers={"Origin": origin})
        assert answer.status_code == status, origin
        assert WEB.get(f"{url}/v1/models", headers={"Origin": origin}).status_code == 200, "the page cannot read it"
    assert answer.status_code == 200
    refused = WEB.post(f"{url}/tokenize", content="{}", headers={"Origin": "https://evil.example"}).json()["error"]
    assert refused["code"] == "origin_not_allowed" and "http.cors_origins" in refused["message"]


def test_any_page_may_ask_where_that_is_wanted() -> None:
    with cluster(cors_origins=["*"]) as running:
        answer = WEB.post(
            f"{url_of(running)}/tokenize", content='{"prompt":"x"}', headers={"Origin": "https://any.example"}
        )
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


# --- HTTPS --------------------------------------------------------------------------------------------


def test_https(certificate: Certificate) -> None:
    with cluster(tls_certificate=certificate.chain, tls_key=certificate.key, api_keys=[KEY]) as running:
        url = url_of(running)
        assert url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=certificate.chain)
        with (
            httpx.Client(verify=trusted) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, http_client=http) as ai,
        ):
            model = ai.models.list().data[0].id
            stream = ai.completions.create(model=model, prompt="over https", max_tokens=5, stream=True, seed=1)
            assert sum(len(chunk.choices[0].text) for chunk in stream) > 0
        with pytest.raises(httpx.ConnectError, match="certificate"):
            WEB.get(f"{url}/health")
        with pytest.raises(httpx.RemoteProtocolError):
            WEB.get(f"{url.replace('https', 'http', 1)}/health")
