"""OpenAI's API: which path is answered by whom."""

from __future__ import annotations

from starlette.routing import Route

from baton.config import ClusterConfig
from router.desk import Desk
from router.http import tokenization
from router.http.chat import ChatAnswer
from router.http.completions import CompletionAnswer
from router.http.endpoint import Endpoint
from router.http.schema import ChatCompletionRequest, CompletionRequest
from router.http.serving import Service


def routes(config: ClusterConfig, desk: Desk) -> list[Route]:
    """`/v1/...`."""
    service = Service(config, desk)
    return [
        Route("/v1/chat/completions", Endpoint(service, ChatCompletionRequest, ChatAnswer), methods=["POST"]),
        Route("/v1/completions", Endpoint(service, CompletionRequest, CompletionAnswer), methods=["POST"]),
        *service.models.routes(),
        *tokenization.routes(service),
    ]
