"""A request in each state of its life, its end from outside, and how long it takes until nothing is left of it.

For `tests/integration/test_lifecycle.py` and `benchmarks.release`. A cluster with everything real but the model, whose
steps are slow enough to find the request where it is wanted.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any, Literal

import zmq

from baton.codec import Codec
from baton.protocol import Generate, RequestKey, ToRouterFromClient
from baton.sampling_params import SamplingParams
from router.request import RoutedRequest, State
from tests.stub_cluster import StubCluster, wait_until

STATES = ("queued", "prefill queue", "prefill", "waiting for decode", "hand-over", "decode")
WAYS = ("cancel", "client gone", "HTTP client gone", "timeout")
StateName = Literal["queued", "prefill queue", "prefill", "waiting for decode", "hand-over", "decode"]
Way = Literal["cancel", "client gone", "HTTP client gone", "timeout"]

STEP_S = 0.02
LONG, SHORT = 400, 16
"""Tokens of prompts: thirteen chunks, and one."""


class Rig:
    """Makes requests that stay in one of STATES for about half a second or more, and ends them."""

    def __init__(self, state: StateName):
        self.state = state
        slow_link = state == "hand-over"
        self.cluster = StubCluster(
            {"prefill": {"kv_blocks": 128}, "decode": {"kv_blocks": 32 if state == "waiting for decode" else 128}},
            # 25 blocks of 128 bytes: a second.
            transport="faulty+inproc://?bytes_per_s=3200" if slow_link else "inproc",
            engine={"max_batch_tokens": 32, "max_batch_requests": 4, "prefix_cache": False},
            router={"max_handoffs": 1 if state == "queued" else 8},
            step_s=lambda worker_id, plan: STEP_S,
        )
        self._helper = self.cluster.client()
        self._num = 0

    def close(self) -> None:
        self._helper.close()
        self.cluster.stop()

    def measure(self, way: Way) -> float:
        """Seconds from the end of one request, by `way`, until no worker and no table knows it any more."""
        blocker = self._block()
        if way == "timeout":
            seconds = self._time_out()
        else:
            known = self._known()
            end, close = self._start(way)
            wait_until(lambda: len(self._known() - known) == 1, "the router has the request")
            (request_id,) = self._known() - known
            wait_until(lambda: self._is_there(request_id), f"the request is in {self.state}")
            began = time.monotonic()
            end()
            wait_until(lambda: request_id not in self._left(), f"nothing is left of it ({self.state})")
            seconds = time.monotonic() - began
            close()
        if blocker is not None:
            blocker.cancel()
        wait_until(lambda: not self._known(), "the router has nothing open")
        self.cluster.wait_ledger_zero()
        assert self.cluster.step_failures() == []
        return seconds

    # --- where it is --------------------------------------------------------------------------------

    def _block(self) -> Any:
        """What makes the request wait where it shall."""
        if self.state in ("queued", "prefill queue"):
            stream = self._helper.stream(self._prompt(LONG), max_tokens=2)
            wait_until(lambda: bool(self._core_of("prefill").engine.live()), "the prefill worker is busy")
            return stream
        if self.state == "waiting for decode":
            stream = self._helper.stream(self._prompt(SHORT), max_tokens=300)
            wait_until(lambda: bool(self._core_of("decode").engine.live()), "the decode worker is busy")
            return stream
        return None

    def _prompt(self, length: int) -> list[int]:
        self._num += 1
        return [(self._num * 37 + i) % 1000 for i in range(length)]

    def _wanted(self) -> tuple[list[int], int]:
        """Prompt and max_tokens of the request."""
        return self._prompt(SHORT if self.state == "decode" else LONG), 90

    def _core_of(self, pool: str) -> Any:
        return self.cluster.workers[f"{pool}-0"].core

    def _in_router(self, look: Callable[[Any], Any]) -> Any:
        return self.cluster.router._call(lambda: look(self.cluster.router._core))

    def _known(self) -> set[str]:
        return self._in_router(lambda core: {request_id for request_id, _ in core._book.by_id})

    def _is_there(self, request_id: str) -> bool:
        request: RoutedRequest | None = self._in_router(lambda core: core.request(request_id))
        assert request is not None, f"it ended before it was in {self.state}"
        if self.state == "queued":
            return request.state is State.QUEUED
        if request.state is not State.RUNNING:
            return False
        if self.state == "hand-over":
            return len(request.tokens) == 1 and not request.decode_spoke
        if self.state == "decode":
            return len(request.tokens) > 3
        if self.state == "waiting for decode":
            return any(s.transfer.request_id == request_id for s, _ in self._core_of("decode").receive._waiting)
        computed = self._computed(request.key)
        return computed is not None and (computed > 0) == (self.state == "prefill")

    def _computed(self, key: RequestKey) -> int | None:
        return next((r.num_computed for r in list(self._core_of("prefill").engine.requests()) if r.key == key), None)

    def _left(self) -> set[str]:
        """Requests of which somebody still knows."""
        left = self._known()
        for worker in self.cluster.workers.values():
            core: Any = worker.core
            with worker._condition:
                left |= {request.key.request_id for request in core.engine.requests()}
                left |= {t.request_id for port in (core.send, core.receive) if port is not None for t in port._sessions}
        return left

    # --- how it ends --------------------------------------------------------------------------------

    def _start(self, way: Way) -> tuple[Callable[[], object], Callable[[], object]]:
        """Start the request; what ends it, and what is to be closed after that."""
        prompt, max_tokens = self._wanted()
        if way == "HTTP client gone":
            connection = self._post({"prompt": prompt, "max_tokens": max_tokens, "stream": True})
            return connection.close, connection.close
        if way == "client gone":  # without a word, as when its process is killed
            context: zmq.Context[Any] = zmq.Context()
            dealer = context.socket(zmq.DEALER)
            dealer.connect(self.cluster.address)
            message = Generate(label="x", sampling=SamplingParams(max_tokens=max_tokens), token_ids=tuple(prompt))
            dealer.send(Codec(ToRouterFromClient).encode(message))
            return (lambda: dealer.close(linger=0)), context.term
        client = self.cluster.client()
        return client.stream(prompt, max_tokens=max_tokens).cancel, client.close

    def _post(self, body: dict[str, Any]) -> socket.socket:
        host, _, port = str(self.cluster.router.url).rpartition("//")[2].partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        assert connection.sock is not None
        return connection.sock

    def _time_out(self) -> float:
        """A request that has as long as it takes to be where it shall."""
        known, num_timeouts = self._known(), self._in_router(lambda core: core.attempts.num_timeouts)
        prompt, max_tokens = self._wanted()
        within_s = 0.15 if self.state != "hand-over" else 0.6
        began = time.monotonic()
        self._helper.stream(prompt, max_tokens=max_tokens, timeout_s=within_s)
        wait_until(lambda: self._in_router(lambda core: core.attempts.num_timeouts) > num_timeouts, "its time is over")
        wait_until(lambda: not self._left() - known, f"nothing is left of it ({self.state})")
        return time.monotonic() - began - within_s
