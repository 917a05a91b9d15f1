"""OpenAI's API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.config import ClusterConfig
from router.desk import Desk


def routes(config: ClusterConfig, desk: Desk) -> list[Route]:
    """`/v1/...`."""

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": config.model.source, "object": "model"}]})

    return [Route("/v1/models", models)]
