"""`/tokenize` and `/detokenize`, in vLLM's shapes.

Knows the tokenizer; must not know how requests are run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from baton.sampling_params import MAX_PROMPT_TOKENS, TokenId
from router.http.conversation import conversation_of, tools_json
from router.http.errors import ApiError, invalid
from router.http.parameters import CHAT_NAMES, COMPLETION_NAMES
from router.http.schema import MAX_MESSAGES, MAX_TOOLS, ChatCompletionRequest, Message, Text, Tool
from router.http.serving import Service, read_json

B = TypeVar("B", bound=msgspec.Struct)


class TokenizeBody(msgspec.Struct, frozen=True):
    """POST /tokenize. Either `prompt`, or `messages` and what goes with them."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    """Those that the model expects around a plain text; null: yes. Of messages the template adds them."""
    return_token_strs: bool | None = None
    """How each token reads, too."""
    add_generation_prompt: bool | None = None
    """Null: yes."""
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    chat_template: Any = None
    """Not supported."""


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int | None
    """Tokens of prompt plus output; null: no worker has joined yet."""
    tokens: list[int]
    token_strs: list[str] | UnsetType | None = UNSET


class DetokenizeBody(msgspec.Struct, frozen=True):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]
    model: str | None = None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str
    """Special tokens included."""


def routes(service: Service) -> list[Route]:
    """Both."""
    text = service.desk.text

    async def tokenize(request: Request) -> Response:
        body = await _read(request, TokenizeBody)
        service.models.known(body.model)
        if body.chat_template is not None:
            raise invalid("chat_template is not supported", "chat_template")
        encode, names = _source(service, body)
        max_model_len = service.desk.core.max_model_len or None

        def answer() -> bytes:
            tokens = list(encode())
            return msgspec.json.encode(
                Tokenized(
                    count=len(tokens),
                    max_model_len=max_model_len,
                    tokens=tokens,
                    token_strs=[service.names.of(token)[0] for token in tokens] if body.return_token_strs else UNSET,
                )
            )

        return _json(await service.tokenize(len(await request.body()), answer, names))

    async def detokenize(request: Request) -> Response:
        body = await _read(request, DetokenizeBody)
        service.models.known(body.model)

        def answer() -> bytes:
            for i, token in enumerate(body.tokens):
                if token >= text.vocab_size:
                    raise invalid(
                        f"tokens[{i}] is {token}, and the model's tokens are those below {text.vocab_size}",
                        f"tokens[{i}]",
                    )
            return msgspec.json.encode(Detokenized(text.decode(body.tokens, skip_special_tokens=False)))

        return _json(await service.tokenize(4 * len(body.tokens), answer, {}))

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


def _source(service: Service, body: TokenizeBody) -> tuple[Callable[[], Iterable[int]], Mapping[str, str]]:
    """What makes tokens of it, and what the client calls Baton's fields."""
    text, prompt = service.desk.text, body.prompt
    if (prompt is None) == (body.messages is None):
        raise invalid("set either prompt or messages", "prompt")
    if prompt is not None:
        add = body.add_special_tokens is not False
        return lambda: text.encode(prompt, add_special_tokens=add), COMPLETION_NAMES
    chat = ChatCompletionRequest(
        messages=body.messages or [],
        tools=body.tools,
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    source = conversation_of(chat, text.chat_template, tools_json(chat))
    return lambda: service.desk.translator.encode(source), CHAT_NAMES


async def _read(request: Request, kind: type[B]) -> B:
    try:
        return read_json(msgspec.json.Decoder(kind).decode, await request.body())
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request had arrived") from None


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
