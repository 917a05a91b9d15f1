"""What operators do over HTTP: take a worker out of service, and put it back.

Knows JSON; must not know what draining means to requests.
"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.config import ClusterConfig
from baton.errors import InvalidRequestError
from router.desk import Desk
from router.http.errors import ApiError


def routes(config: ClusterConfig, desk: Desk) -> list[Route]:
    """`/baton/workers/...`."""

    async def drain(request: Request) -> Response:
        """Places nothing more on the worker, or again with `?undo=true`. It is drained when nothing is outstanding."""
        worker_id = request.path_params["worker_id"]
        undo = request.query_params.get("undo", "false").lower()
        if undo not in ("true", "false", "1", "0"):
            raise ApiError(400, f"undo is {undo!r}, it must be true or false", param="undo")
        try:
            desk.drain(worker_id, undo in ("true", "1"))
        except InvalidRequestError as e:
            raise ApiError(404, str(e), param="worker_id") from e
        worker = next(w for w in desk.core.worker_statuses(time.monotonic()) if w.info.worker_id == worker_id)
        return JSONResponse(
            {
                "worker_id": worker_id,
                "pool": worker.info.pool,
                "state": worker.state,
                "breaker": worker.breaker,
                "outstanding": worker.num_outstanding,
            }
        )

    return [Route("/baton/workers/{worker_id}/drain", drain, methods=["POST"])]
