"""`/openapi.json`: the HTTP API as OpenAPI 3.1 describes it, made from the routes and from what they read and answer.

The shapes are those of the Structs, with the texts beside their fields. What no code says (a summary, which errors
there are) is in `OPERATIONS`, by path and method; a test holds it against the routes.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Iterable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.config import HttpConfig
from router.http.answers import ChatCompletion, ChatCompletionChunk, Completion, Model, ModelList
from router.http.errors import ErrorAnswer
from router.http.guard import OPEN_PATHS
from router.http.operations import VERSION
from router.http.schema import Body, ChatCompletionRequest, CompletionRequest
from router.http.tokenization import DetokenizeBody, Detokenized, TokenizeBody, Tokenized
from router.records import MAX_RECORDS

PATH = "/openapi.json"
Schema = dict[str, Any]

NOT_SUPPORTED = "Not supported."
"""Stands beside fields that a client must not use; others of that kind have no text at all."""
OBJECT: Schema = {"type": "object"}
TEXT: Schema = {"type": "string"}
WORDS_OF_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong (`invalid_api_key`).",
    403: "A web page of an origin that `http.cors_origins` does not name.",
    404: "There is no such model, request or path.",
    408: "The request did not arrive in time.",
    413: "The body is larger than `http.max_body_mib`.",
    429: "There is no room now (`overloaded`); Retry-After says when to try again.",
    500: "The request was accepted and then lost to a fault on the server's side.",
    503: "No worker is there that could run it (`not_ready`).",
}
GENERATION_ERRORS = (404, 429, 500, 503)


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked with one method at one path, and what comes back."""

    summary: str
    tag: str
    body: type[msgspec.Struct] | None = None
    example: dict[str, Any] = {}
    """Of the body."""
    answer: type[msgspec.Struct] | Schema | None = None
    """Of 200; a schema without `media` is JSON, None: no body."""
    media: str = "application/json"
    event: type[msgspec.Struct] | None = None
    """With `stream: true` the answer is server-sent events with this in each, and `[DONE]` in the last."""
    errors: tuple[int, ...] = ()
    """Beside those that all operations have."""
    parameters: tuple[Schema, ...] = ()
    other: dict[int, Schema] = {}
    """Answers that are neither 200 nor an error in OpenAI's shape."""


def _parameter(name: str, where: str, schema: Schema, description: str) -> Schema:
    return {
        "name": name,
        "in": where,
        "required": where == "path",
        "description": description,
        "schema": schema,
    }


PING = Operation(summary="As SageMaker asks whether the server lives", tag="operations")
POOLS: Schema = {
    "type": "object",
    "properties": {"status": TEXT, "pools": {"type": "object", "additionalProperties": TEXT}},
    "required": ["status", "pools"],
}
READY: Schema = {"type": "object", "properties": {"ready": {"type": "boolean"}, "reason": TEXT}, "required": ["ready"]}
TOLD_VERSION: Schema = {"type": "object", "properties": {"version": TEXT}, "required": ["version"]}
LIST: Schema = {"type": "object", "properties": {"data": {"type": "array", "items": OBJECT}}, "required": ["data"]}
DRAINED: Schema = {
    "type": "object",
    "properties": {
        "worker_id": TEXT,
        "pool": TEXT,
        "state": {"type": "string", "enum": ["ready", "draining", "lost"]},
        "breaker": {"type": "string", "enum": ["closed", "open", "half_open"]},
        "outstanding": {"type": "integer", "minimum": 0},
    },
    "required": ["worker_id", "pool", "state", "breaker", "outstanding"],
}

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("/v1/chat/completions", "POST"): Operation(
        summary="An answer to a conversation",
        tag="openai",
        body=ChatCompletionRequest,
        example={"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 16},
        answer=ChatCompletion,
        event=ChatCompletionChunk,
        errors=GENERATION_ERRORS,
    ),
    ("/v1/completions", "POST"): Operation(
        summary="How texts or token ids go on",
        tag="openai",
        body=CompletionRequest,
        example={"prompt": "Once upon a time", "max_tokens": 16},
        answer=Completion,
        event=Completion,
        errors=GENERATION_ERRORS,
    ),
    ("/v1/models", "GET"): Operation(summary="The model, under each of its names", tag="openai", answer=ModelList),
    ("/v1/models/{model}", "GET"): Operation(
        summary="One name of the model",
        tag="openai",
        answer=Model,
        errors=(404,),
        parameters=(_parameter("model", "path", TEXT, "A name that /v1/models lists."),),
    ),
    ("/tokenize", "POST"): Operation(
        summary="The tokens of a text or a conversation",
        tag="tokens",
        body=TokenizeBody,
        example={"prompt": "Once upon a time", "return_token_strs": True},
        answer=Tokenized,
        errors=(404,),
    ),
    ("/detokenize", "POST"): Operation(
        summary="The text of tokens",
        tag="tokens",
        body=DetokenizeBody,
        example={"tokens": [79, 110, 99, 101]},
        answer=Detokenized,
        errors=(404,),
    ),
    ("/version", "GET"): Operation(summary="Baton's version", tag="operations", answer=TOLD_VERSION),
    ("/ping", "GET"): PING,
    ("/ping", "POST"): PING,
    ("/health", "GET"): Operation(
        summary="Answers as long as the router lives; the body tells of its workers", tag="operations", answer=POOLS
    ),
    ("/ready", "GET"): Operation(
        summary="Whether a new request could be placed now",
        tag="operations",
        answer=READY,
        other={503: {"description": "It could not.", "content": {"application/json": {"schema": READY}}}},
    ),
    ("/metrics", "GET"): Operation(
        summary="Metrics as Prometheus reads them", tag="operations", answer=TEXT, media="text/plain"
    ),
    ("/baton/overview", "GET"): Operation(
        summary="Pools, workers and latencies, as the page shows them", tag="operations", answer=OBJECT
    ),
    ("/baton/requests", "GET"): Operation(
        summary="The latest requests, and where their time went",
        tag="operations",
        answer=LIST,
        errors=(400,),
        parameters=(
            _parameter(
                "limit",
                "query",
                {"type": "integer", "minimum": 1, "maximum": MAX_RECORDS, "default": 50},
                "At most so many.",
            ),
        ),
    ),
    ("/baton/requests/{request_id}", "GET"): Operation(
        summary="What became of a request, and why it was placed so",
        tag="operations",
        answer=OBJECT,
        errors=(404,),
        parameters=(_parameter("request_id", "path", TEXT, "Its id, or the start of it."),),
    ),
    ("/baton/workers/{worker_id}/drain", "POST"): Operation(
        summary="Place nothing more on a worker; what it has it finishes",
        tag="operations",
        answer=DRAINED,
        errors=(400, 404),
        parameters=(
            _parameter("worker_id", "path", TEXT, "As /baton/overview names it."),
            _parameter("undo", "query", {"type": "boolean", "default": False}, "Place requests on it again."),
        ),
    ),
    ("/", "GET"): Operation(
        summary="The way to the page",
        tag="page",
        other={307: {"description": "To /ui."}},
    ),
    ("/ui", "GET"): Operation(
        summary="The page",
        tag="page",
        answer=TEXT,
        media="text/html",
        other={304: {"description": "The browser has it already."}},
    ),
    (PATH, "GET"): Operation(summary="This document", tag="operations", answer=OBJECT),
}


def route(http: HttpConfig, routes: Sequence[Route]) -> Route:
    """`/openapi.json`, which describes `routes` and itself. Made when it is first asked for."""

    @cache
    def document() -> bytes:
        return msgspec.json.encode(describe(http, [*routes, own]))

    async def openapi(request: Request) -> Response:
        # The first time it takes a hundred milliseconds, in which the loop has others to serve.
        return Response(await asyncio.to_thread(document), media_type="application/json")

    own = Route(PATH, openapi)
    return own


def path_of(route: Route) -> str:
    """As OpenAPI writes it: `{model:path}` is `{model}`."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", route.path)


def describe(http: HttpConfig, routes: Iterable[Route]) -> Schema:
    """The document as plain data. KeyError for a route that `OPERATIONS` lacks."""
    operations = {
        (path_of(route), method): OPERATIONS[path_of(route), method]
        for route in routes
        for method in sorted((route.methods or set()) - {"HEAD"})
    }
    structs = {kind: None for operation in operations.values() for kind in _structs(operation)}
    references, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    _add_words(schemas)
    names = dict(zip(structs, references, strict=True))
    paths: dict[str, Schema] = {}
    for (path, method), operation in operations.items():
        keyed = bool(http.api_keys) and path not in OPEN_PATHS
        paths.setdefault(path, {})[method.lower()] = _operation(path, method, operation, names, keyed=keyed)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": VERSION,
            "description": "OpenAI's API and vLLM's additions to it, in front of separate prefill and decode workers.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "One of `http.api_keys`."}},
        },
    }


def _structs(operation: Operation) -> Iterable[Any]:
    yield ErrorAnswer
    for kind in (operation.body, operation.answer, operation.event):
        if isinstance(kind, type):
            yield kind


def _operation(path: str, method: str, operation: Operation, names: dict[Any, Schema], *, keyed: bool) -> Schema:
    described: Schema = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": operation.summary,
        "tags": [operation.tag],
        "security": [{"key": []}] if keyed else [],
        "responses": _answers(operation, names, keyed=keyed, writes=method != "GET"),
    }
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": names[operation.body], "example": operation.example}},
        }
    return described


def _answers(operation: Operation, names: dict[Any, Schema], *, keyed: bool, writes: bool) -> Schema:
    answers: Schema = {}
    if operation.answer is not None or not operation.other:
        answers["200"] = {"description": "The answer."}
    if operation.answer is not None:
        schema = names[operation.answer] if isinstance(operation.answer, type) else operation.answer
        answers["200"]["content"] = {operation.media: {"schema": schema}}
    if operation.event is not None:
        answers["200"]["content"]["text/event-stream"] = {"schema": _event(names[operation.event], names[ErrorAnswer])}
    statuses = {*operation.errors, 408}
    if keyed:
        statuses.add(401)
    if writes:
        statuses |= {403, 413}
    if operation.body is not None:
        statuses.add(400)
    for status in sorted(statuses):
        answers[str(status)] = {
            "description": WORDS_OF_ERRORS[status],
            "content": {"application/json": {"schema": names[ErrorAnswer]}},
        }
    for status, answer in operation.other.items():
        answers[str(status)] = answer
    return answers


def _event(chunk: Schema, error: Schema) -> Schema:
    """Of one event of a stream."""
    return {
        "type": "object",
        "description": "With `stream: true`: one event. The last one's data is `[DONE]`; what goes wrong after the "
        "first token is an event with the error.",
        "properties": {
            "data": {
                "anyOf": [
                    {"const": "[DONE]"},
                    {
                        "type": "string",
                        "contentMediaType": "application/json",
                        "contentSchema": {"anyOf": [chunk, error]},
                    },
                ]
            }
        },
        "required": ["data"],
    }


# --- the texts beside the fields ------------------------------------------------------------------------


def _add_words(schemas: Schema) -> None:
    """What the Structs' sources say of their fields. Fields that are known only to be refused are left out.

    Of an object's keys msgspec does not tell that they are numbers.
    """
    for kind in _all_structs(Body, TokenizeBody, Completion, ErrorAnswer):
        properties = schemas.get(kind.__name__, {}).get("properties", {})
        words = _words_of(kind)
        for name in list(properties):
            takes_anything = properties[name].keys() <= {"default"}
            if takes_anything and words.get(name, NOT_SUPPORTED) == NOT_SUPPORTED:
                del properties[name]
            elif name in words:
                properties[name].setdefault("description", words[name])
            if name == "logit_bias":
                properties[name]["propertyNames"] = {"pattern": "^[0-9]+$"}


def _all_structs(*examples: type[msgspec.Struct]) -> Iterable[type[msgspec.Struct]]:
    """All that are defined in these ones' modules."""
    for module in {inspect.getmodule(kind) for kind in examples}:
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__:  # type: ignore[union-attr]
                yield value


def _words_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    words: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        module = inspect.getmodule(base)
        if issubclass(base, msgspec.Struct) and module is not None and base is not msgspec.Struct:
            words |= _words_in(module).get(base.__name__, {})
    return words


@cache
def _words_in(module: ModuleType) -> dict[str, dict[str, str]]:
    """By class and field: the text below it in the source; none where there is no source."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except OSError:
        return {}
    return {
        node.name: {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in zip(node.body, node.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
