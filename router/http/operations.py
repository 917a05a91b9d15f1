"""What operators ask: health, readiness, state."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.config import ClusterConfig
from router.desk import Desk


def routes(config: ClusterConfig, desk: Desk) -> list[Route]:
    """`/health` and so on."""

    async def health(request: Request) -> Response:
        return Response()

    return [Route("/health", health)]
