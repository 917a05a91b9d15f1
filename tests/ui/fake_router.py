"""A router that shows and says what a test wants: names nobody would give, many workers, hostile text."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from baton.config import parse_config
from router.http import page
from tests.stub_cluster import wait_until

REQUEST_ID = "0123456789abcdef0123456789abcdef"


def worker(worker_id: str, pool: str, **other: Any) -> dict[str, Any]:
    fields = {
        "worker_id": worker_id,
        "pool": pool,
        "role": pool,
        "state": "ready",
        "breaker": "closed",
        "device": "cpu",
        "node": "node-1",
        "blocks_total": 200,
        "blocks_free": 150,
        "blocks_cached": 40,
        "stranded_blocks": 0,
        "running": 2,
        "waiting": 1,
        "pending_tokens": 300,
        "outstanding": 4,
        "bytes_sent": 5 * 2**20,
        "bytes_received": 0,
        "cache_hit_share": 0.25,
        "seen_s_ago": 0.2,
    }
    return {**fields, **other}


def recent(**other: Any) -> dict[str, Any]:
    """A split request that ended."""
    fields = {
        "request_id": REQUEST_ID,
        "label": "a-label",
        "finish_reason": "stop",
        "error": "",
        "prompt_tokens": 30,
        "completion_tokens": 4,
        "cached_tokens": 16,
        "prefill": "prefill-0",
        "decode": "decode-0",
        "attempts": 1,
        "started_s_ago": 2.0,
        "total_ms": 100.0,
        "stages": [{"name": "router_queue", "ms": 10.0}, {"name": "prefill", "ms": 30.0}, {"name": "wire", "ms": 60.0}],
    }
    return {**fields, **other}


def overview(workers: list[dict[str, Any]], requests: list[dict[str, Any]], **other: Any) -> dict[str, Any]:
    pools = []
    for name in dict.fromkeys(w["pool"] for w in workers):
        states = [w["state"] for w in workers if w["pool"] == name]
        counts = {"ready": states.count("ready"), "draining": states.count("draining"), "lost": states.count("lost")}
        state = "ok" if counts["ready"] == len(states) else "degraded"
        pools.append({"name": name, "role": name, "workers": len(states), **counts, "state": state})
    percentiles = {"count": 10, "p50": 12.5, "p90": 250.0, "p99": 4000.0}
    fields = {
        "cluster": "fake",
        "model": "a-model",
        "url": "http://127.0.0.1:1",
        "router_incarnation": "0011223344556677",
        "now": 1000.0,
        "uptime_s": 60.0,
        "health": "ok" if all(pool["state"] == "ok" for pool in pools) else "degraded",
        "stopping": False,
        "pools": pools,
        "workers": workers,
        "requests": {"open": 3, "queued": 1},
        "latency": {
            "window_s": 60,
            "ttft_ms": percentiles,
            "tbt_ms": percentiles,
            "e2e_ms": percentiles,
            "tokens_per_s": 123.4,
            "requests_per_s": 5.6,
        },
        "recent": requests,
        "planner": None,
    }
    return {**fields, **other}


class FakeRouter:
    """`answer`: the pieces of every answer. `refusal`: status and body instead of one, once."""

    def __init__(self, shown: dict[str, Any], answer: tuple[str, ...] = ("Hello",)):
        self.shown, self.answer = shown, answer
        self.refusal: tuple[int, dict[str, Any]] | None = None
        self.bodies: list[dict[str, Any]] = []
        """What was asked."""
        self.num_polls = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        routes = [
            *page.routes(parse_config({})),
            Route("/baton/overview", self._overview),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), ws="none", lifespan="off", log_config=None)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    async def _overview(self, request: Request) -> Response:
        self.num_polls += 1
        return JSONResponse(self.shown)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "a-model", "object": "model"}]})

    async def _chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        if self.refusal is not None:
            status, body = self.refusal
            self.refusal = None
            return JSONResponse(body, status)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        def event(**fields: Any) -> str:
            return f"data: {json.dumps({'id': f'chatcmpl-{REQUEST_ID}', **fields})}\n\n"

        for piece in self.answer:
            yield event(choices=[{"index": 0, "delta": {"content": piece}, "finish_reason": None}])
        yield event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        yield event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16})
        yield "data: [DONE]\n\n"

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self._server.started, "the fake router serves")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        self._socket.close()
