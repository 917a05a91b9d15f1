"""What operators ask: health, readiness, version, metrics, state, and what became of requests.

Knows JSON; must not know how anything is measured or decided.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from importlib.metadata import version
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.config import ClusterConfig
from baton.errors import InvalidRequestError
from router.desk import Desk
from router.http.errors import ApiError
from router.metrics import Metrics
from router.overview import health_of, make_overview, pool_states, record_data, why_not_ready
from router.records import MAX_RECORDS, RequestRecord, record_dict

VERSION = version("baton-serve")
METHODS = frozenset(("GET", "HEAD", "POST", "OPTIONS"))
CLIENT_LEFT = 499
"""Counted where there was nobody to answer any more; nginx's number for it."""


class CountAnswers:
    """ASGI middleware: counts answers by path of the route, method and status. No word of the client's is a label."""

    def __init__(self, app: ASGIApp, counts: Counter[tuple[str, str, int]]):
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            if status == CLIENT_LEFT:
                status = 500  # which is answered further out
            raise
        finally:
            path = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._counts[path, method, status] += 1


def routes(config: ClusterConfig, desk: Desk, metrics: Metrics) -> list[Route]:
    """`/health`, `/ready`, `/ping`, `/version`, `/metrics`, `/baton/...`."""
    core = desk.core

    async def health(request: Request) -> Response:
        """It answers as long as the router's loop turns; what its workers can do is in the body."""
        pools = pool_states(config, core.worker_statuses(time.monotonic()))
        states = {pool["name"]: pool["state"] for pool in pools}
        return JSONResponse({"status": health_of(core, pools), "pools": states})

    async def ready(request: Request) -> Response:
        """Whether a new request could be placed now."""
        reason = why_not_ready(core)
        if reason is None:
            return JSONResponse({"ready": True})
        return JSONResponse({"ready": False, "reason": reason}, 503)

    async def ping(request: Request) -> Response:
        """As SageMaker asks for it."""
        return Response()

    async def tell_version(request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def scrape(request: Request) -> Response:
        return Response(await metrics.scrape(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def overview(request: Request) -> Response:
        return JSONResponse(make_overview(config, core, desk.latencies, time.monotonic()))

    async def requests(request: Request) -> Response:
        text = request.query_params.get("limit", "50")
        if not text.isdecimal() or len(text) > len(str(MAX_RECORDS)) or not 1 <= int(text) <= MAX_RECORDS:
            raise ApiError(400, f"limit is {text!r}, it must be a number from 1 to {MAX_RECORDS}", param="limit")
        records, now = core.recent(int(text)), time.monotonic()
        # Many of them take tens of milliseconds, in which the loop has others to serve. Records do not change.
        return await asyncio.to_thread(lambda: JSONResponse({"data": [record_data(record, now) for record in records]}))

    async def one_request(request: Request) -> Response:
        try:
            record = core.explain(request.path_params["request_id"], time.monotonic())
        except InvalidRequestError as e:
            raise ApiError(404, str(e), param="request_id") from e
        return JSONResponse(_whole_record(record, time.monotonic()))

    return [
        Route("/health", health),
        Route("/ready", ready),
        Route("/ping", ping, methods=["GET", "POST"]),
        Route("/version", tell_version),
        Route("/metrics", scrape),
        Route("/baton/overview", overview),
        Route("/baton/requests", requests),
        Route("/baton/requests/{request_id}", one_request),
    ]


def _whole_record(record: RequestRecord, now: float) -> dict[str, Any]:
    """As `baton explain --json` shows it, with what `record_data` makes of it."""
    return {**record_dict(record), **record_data(record, now)}
