"""The web application: which path is answered by whom.

Knows the modules of this package; must not know what they answer.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware

from baton.config import ClusterConfig
from router.desk import Desk
from router.http import control, guard, openai, openapi, operations, page
from router.http.errors import HANDLERS
from router.http.models import names_of
from router.metrics import Metrics


def build_app(config: ClusterConfig, desk: Desk) -> Starlette:
    """All routes of one router."""
    metrics = Metrics(config, names_of(config)[0], desk.core, desk.latencies, desk.counters)
    desk.request_observers.append(metrics)
    routes = [
        *openai.routes(config, desk),
        *operations.routes(config, desk, metrics),
        *control.routes(config, desk),
        *page.routes(config),
    ]
    return Starlette(
        routes=[*routes, openapi.route(config.http, routes)],
        middleware=[Middleware(operations.CountAnswers, counts=metrics.http_answers), *guard.middleware(config.http)],
        exception_handlers=HANDLERS,
    )
