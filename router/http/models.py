"""The model's names, and `/v1/models`.

Knows the configuration; must not know requests.
"""

from __future__ import annotations

import time
from pathlib import Path, PurePath

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.config import ClusterConfig
from router.desk import Desk
from router.http.answers import Model, ModelList
from router.http.errors import ApiError

DEMO_NAME = "SmolLM2-135M-Instruct"


class Models:
    """The one model under all of its names."""

    def __init__(self, config: ClusterConfig, desk: Desk):
        self.names = names_of(config)
        self._source = config.model.source
        self._desk = desk
        self._created = int(time.time())

    def known(self, name: str | None) -> str:
        """The name under which the model answers: one of `names`, or the configuration's `model.source`.

        Raises ApiError if it has no such name; None: the first.
        """
        if name is None:
            return self.names[0]
        if name in self.names or name == self._source:
            return name
        raise ApiError(
            404,
            f"there is no model {name!r} here; there is {', '.join(self.names)}",
            param="model",
            code="model_not_found",
        )

    def fingerprint(self) -> str | None:
        """Of model, weights and dtype; None: no worker has joined yet."""
        for worker in self._desk.core.view.workers.values():
            return f"fp_{worker.info.fingerprint[:16]}"
        return None

    def describe(self, name: str) -> Model:
        return Model(
            id=self.known(name),
            created=self._created,
            root=self._source,
            max_model_len=self._desk.core.max_model_len or None,
        )

    def routes(self) -> list[Route]:
        async def listed(request: Request) -> Response:
            return _json(ModelList([self.describe(name) for name in self.names]))

        async def one(request: Request) -> Response:
            return _json(self.describe(request.path_params["model"]))

        return [Route("/v1/models", listed), Route("/v1/models/{model:path}", one)]


def names_of(config: ClusterConfig) -> tuple[str, ...]:
    """Under which clients ask for the model, the first one is shown."""
    return config.http.model_names or (name_of(config.model.source),)


def name_of(source: str) -> str:
    """What a model is called that has been given no name: an id on the hub is one, of a path it is the last part."""
    if source == "demo":
        return DEMO_NAME
    path = PurePath(source)
    if path.suffix == ".gguf":
        return path.stem
    is_path = path.is_absolute() or source.startswith((".", "~")) or Path(source).exists()
    return path.name or source if is_path else source


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
