"""Clients of `benchmarks.router`: streams over HTTP and by the native protocol, as lean as Python allows.

They read what they must know (when the first token came, where an answer ends) and parse no more, so that on a machine
of two cores the router's figures are not theirs. `check_http` and `check_native` read an answer whole, once, so that
what is measured is known to be right. Must not know workers.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any
from urllib.parse import urlsplit

import uvloop
import zmq

from baton.codec import Codec
from baton.protocol import ChatMessage, Delta, Deltas, Done, Failed, Generate, ToClient, ToRouterFromClient
from baton.sampling_params import SamplingParams

MESSAGES = (
    ("system", "You are a helpful assistant. Answer briefly, and say so where you do not know."),
    ("user", "What is a relay race, and why do the runners hand a baton over? Give me two sentences, please."),
)
END_OF_BODY = b"0\r\n\r\n"
START_S = 60.0
"""For the streams of a load to be under way."""


@dataclass(frozen=True)
class Load:
    """So many streams, each a request after the other."""

    streams: int
    tokens: int
    """Of an answer: on average, drawn evenly from half of it to one and a half, or with `exact` always."""
    seconds: float
    """What is measured, after `warm_s`."""
    warm_s: float = 1.0
    think_s: float = 0.0
    """At most, between an answer and the next request: else requests would come when a step's tokens are sent."""
    exact: bool = False
    hold: bool = False
    """Nothing is measured before each stream has its first token."""
    requests: int | None = None
    """End after so many answers instead."""
    connections: int = 1
    """Of the native protocol; HTTP needs one per stream."""
    seed: int = 0


@dataclass
class Run:
    """What came of a load, within its measured seconds."""

    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    """Between what a stream got and what it got next."""
    answers: int = 0
    seconds: float = 0.0


class _Streams:
    """When streams begin, and what is noted of them; the clock is the caller's."""

    def __init__(self, load: Load, mark: Callable[[], None], every: Callable[[int], None] | None):
        self.load = load
        self.run = Run()
        self.recording = False
        self.ended = False
        self.num_answers = 0
        self._mark = mark
        self._every = every
        self._rng = random.Random(load.seed)
        self._num_begun = 0
        self._began_at = time.monotonic()
        self._window: tuple[float, float] | None = None
        if not load.hold:
            self._open_at(self._began_at + load.warm_s)

    def _open_at(self, at: float) -> None:
        self._window = (at, at + self.load.seconds)

    def length(self) -> int:
        """Of the next answer, in tokens."""
        tokens = self.load.tokens
        return tokens if self.load.exact else self._rng.randint((tokens + 1) // 2, tokens + tokens // 2)

    def first_pause(self) -> float:
        return self._rng.uniform(0.0, self.load.warm_s / 2)

    def pause(self) -> float:
        return self._rng.uniform(0.0, self.load.think_s)

    def on_first(self, sent_at: float, now: float) -> None:
        if self.recording:
            self.run.ttft_s.append(now - sent_at)
        self._num_begun += 1
        if self.load.hold and self._window is None and self._num_begun >= self.load.streams:
            self._open_at(now + self.load.warm_s)

    def on_end(self) -> None:
        self.num_answers += 1
        if self.recording:
            self.run.answers += 1
        if self._every is not None:
            self._every(self.num_answers)

    def look(self, now: float) -> None:
        """Begin or end what is measured, if it is time."""
        if self._window is None:
            if now - self._began_at > START_S:
                raise RuntimeError(f"{self._num_begun} of {self.load.streams} streams began within {START_S:g} s")
            return
        begin, end = self._window
        limit = self.load.requests
        if not self.recording and now >= begin:
            self._mark()
            self.recording = True
            self._recording_since = time.monotonic()
            self._window = (begin, self._recording_since + self.load.seconds)
        elif self.recording and ((now >= end) if limit is None else (self.num_answers >= limit)):
            self.recording = False
            self.run.seconds = time.monotonic() - self._recording_since
            self._mark()
            self.ended = True


# --- HTTP ---------------------------------------------------------------------------------------------


def model_of(url: str) -> str:
    """The name of the model that is served."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request("GET", "/v1/models")
        models: Any = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    name: str = models["data"][0]["id"]
    return name


def chat_request(url: str, model: str, tokens: int) -> bytes:
    """All bytes of a request for a streamed answer of so many tokens."""
    messages = [{"role": role, "content": content} for role, content in MESSAGES]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def check_http(url: str, model: str, tokens: int, text: str) -> None:
    """That the answer of so many tokens reads `text`, and that its first event has some of it."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(chat_request(url, model, tokens))
        response = http.client.HTTPResponse(connection)
        response.begin()
        data = response.read().decode()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {data}")
    events = [event.removeprefix("data: ") for event in data.split("\n\n") if event]
    if events[-1] != "[DONE]":
        raise RuntimeError(f"the stream ends with {events[-1]!r}")
    parts = [choice["delta"].get("content") for e in events[:-1] for choice in json.loads(e)["choices"]]
    if not parts[0] or "".join(part or "" for part in parts) != text:
        raise RuntimeError(f"the stream says {parts}, expected {text!r}")


class _HttpStream(asyncio.Protocol):
    """One connection, which is kept alive."""

    def __init__(self, streams: _Streams, request: Callable[[int], bytes]):
        self._streams = streams
        self._request = request
        self._tail = b""
        self._sent_at = 0.0
        self._last_at = 0.0
        self._begun = False
        self._other = b""
        """What came before the first event."""
        self.problem: str | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        asyncio.get_running_loop().call_later(self._streams.first_pause(), self._send)

    def _send(self) -> None:
        if self._transport.is_closing():
            return
        self._begun = False
        self._tail = self._other = b""
        self._sent_at = time.monotonic()
        self._transport.write(self._request(self._streams.length()))

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        streams = self._streams
        if not self._begun:
            at = data.find(b"data: ")
            if at < 0:
                self._other += data
                head, _, body = self._other.partition(b"\r\n\r\n")
                if body and not head.startswith(b"HTTP/1.1 200"):
                    self.problem = self._other.decode(errors="replace")
                    self._transport.close()
                return
            self._begun = True
            streams.on_first(self._sent_at, now)
        elif streams.recording:
            streams.run.gap_s.append(now - self._last_at)
        self._last_at = now
        self._tail = (self._tail + data)[-len(END_OF_BODY) :] if len(data) < len(END_OF_BODY) else data[-5:]
        if self._tail == END_OF_BODY:
            streams.on_end()
            if pause := streams.pause():
                asyncio.get_running_loop().call_later(pause, self._send)
            else:
                self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._streams.ended and self.problem is None:
            self.problem = f"the router closed the connection: {error}"


def http_load(url: str, load: Load, mark: Callable[[], None], every: Callable[[int], None] | None = None) -> Run:
    """`mark` is called where the measured seconds begin and end, `every` with the number of answers at each."""
    address, model = urlsplit(url), model_of(url)
    requests: dict[int, bytes] = {}

    def request(tokens: int) -> bytes:
        data = requests.get(tokens)
        if data is None:
            data = requests[tokens] = chat_request(url, model, tokens)
        return data

    async def run() -> Run:
        loop = asyncio.get_running_loop()
        streams = _Streams(load, mark, every)
        opened: list[_HttpStream] = []
        for _ in range(load.streams):
            _, stream = await loop.create_connection(
                lambda: _HttpStream(streams, request), address.hostname, address.port
            )
            opened.append(stream)
        while not streams.ended:
            await asyncio.sleep(0.02)
            streams.look(time.monotonic())
            for stream in opened:
                if stream.problem is not None:
                    raise RuntimeError(stream.problem)
        for stream in opened:
            stream._transport.abort()
        await asyncio.sleep(0.05)
        return streams.run

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


class StuckHttpClient:
    """Asks for a long answer and never reads it."""

    def __init__(self, url: str, tokens: int):
        address = urlsplit(url)
        request = chat_request(url, model_of(url), tokens)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect((address.hostname, address.port))
        self._socket.sendall(request)

    def close(self) -> None:
        self._socket.close()


# --- the native protocol ------------------------------------------------------------------------------

_IN: Codec[Any] = Codec(ToClient)
_OUT: Codec[Any] = Codec(ToRouterFromClient)


def _generate(label: str, tokens: int) -> bytes:
    messages = tuple(ChatMessage(role, content) for role, content in MESSAGES)
    return _OUT.encode(Generate(label=label, sampling=SamplingParams(max_tokens=tokens), messages=messages))


def _dealer(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.connect(address)
    return dealer


def check_native(address: str, tokens: int, text: str) -> None:
    """That the answer of so many tokens reads `text`."""
    with zmq.Context() as context, _dealer(context, address) as dealer:
        dealer.setsockopt(zmq.RCVTIMEO, 30_000)
        dealer.send(_generate("check", tokens))
        said = ""
        while True:
            message = _IN.decode(dealer.recv())
            for delta in message.deltas if type(message) is Deltas else (message,):
                if type(delta) is Failed:
                    raise RuntimeError(delta.message)
                if type(delta) is Delta or type(delta) is Done:
                    said += delta.text
            if type(message) is Done:
                break
        if said != text:
            raise RuntimeError(f"the stream says {said!r}, expected {text!r}")


class _NativeStream:
    __slots__ = ("begun", "dealer", "label", "last_at", "sent_at")

    def __init__(self, label: str, dealer: zmq.Socket[bytes]):
        self.label = label
        self.dealer = dealer
        self.begun = False
        self.sent_at = self.last_at = 0.0


def native_load(address: str, load: Load, mark: Callable[[], None], every: Callable[[int], None] | None = None) -> Run:
    """Like `http_load`, over `load.connections` connections that share the streams."""
    with zmq.Context() as context:
        dealers = [_dealer(context, address) for _ in range(load.connections)]
        try:
            return _native_load(dealers, load, mark, every)
        finally:
            for dealer in dealers:
                dealer.close()


def _native_load(
    dealers: list[zmq.Socket[bytes]], load: Load, mark: Callable[[], None], every: Callable[[int], None] | None
) -> Run:
    streams = _Streams(load, mark, every)
    open_streams = {str(i): _NativeStream(str(i), dealers[i % len(dealers)]) for i in range(load.streams)}
    due: list[tuple[float, str]] = []
    for label in open_streams:
        heappush(due, (time.monotonic() + streams.first_pause(), label))
    poller = zmq.Poller()
    for dealer in dealers:
        poller.register(dealer, zmq.POLLIN)
    look_at = 0.0

    def on_delta(delta: Delta, now: float) -> None:
        stream = open_streams[delta.label]
        if not stream.begun:
            stream.begun = True
            streams.on_first(stream.sent_at, now)
        elif streams.recording:
            streams.run.gap_s.append(now - stream.last_at)
        stream.last_at = now

    while not streams.ended:
        now = time.monotonic()
        if now >= look_at:
            streams.look(now)
            look_at = now + 0.02
        while due and due[0][0] <= now:
            _, label = heappop(due)
            stream = open_streams[label]
            stream.begun = False
            request = _generate(label, streams.length())
            stream.sent_at = time.monotonic()
            stream.dealer.send(request)
        wake_at = min(due[0][0], look_at) if due else look_at
        for dealer, _ in poller.poll(max(0, int((wake_at - now) * 1000 + 0.999))):
            while True:
                try:
                    data = dealer.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                message = _IN.decode(data)
                now = time.monotonic()
                if type(message) is Delta:
                    on_delta(message, now)
                elif type(message) is Deltas:
                    for delta in message.deltas:
                        on_delta(delta, now)
                elif type(message) is Done:
                    streams.on_end()
                    heappush(due, (now + streams.pause(), message.label))
                elif type(message) is Failed:
                    raise RuntimeError(message.message)
    return streams.run


class StuckNativeClient:
    """Asks for a long answer and never reads it."""

    def __init__(self, address: str, tokens: int):
        self._context: zmq.Context[Any] = zmq.Context()
        self._dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.RCVHWM, 1)
        self._dealer.setsockopt(zmq.RCVBUF, 4096)
        self._dealer.connect(address)
        self._dealer.send(_generate("stuck", tokens))

    def close(self) -> None:
        self._context.destroy(linger=0)
