"""The ASGI application of one path of OpenAI's API: from the body to the answer, whole or as a stream.

Knows how an answer is sent; must not know what is asked or answered.

    body ─► Answer.begin ─► requests, one per prompt ─► news ─► Piece per choice ─┬─► chunks, one write per turn
                                                                                   └─► the whole answer

A stream's head is sent with its first chunk, so what goes wrong before there is a token is an HTTP status; after it,
an event with the error. Chunks of one turn of the router go out as one write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from baton.protocol import Delta
from router.http.call import Gone, TooSlow
from router.http.errors import ApiError, too_deep
from router.http.exchange import Exchange
from router.http.parameters import refuse_unsupported
from router.http.schema import Body
from router.http.serving import Answer, Piece, Service, encode, event, read_json

log = logging.getLogger("baton.router")

DONE = b"data: [DONE]\n\n"
B = TypeVar("B", bound=Body)


class Endpoint(Generic[B]):
    """The ASGI application of one path."""

    def __init__(self, service: Service, body: type[B], answer: Callable[[Service, Exchange, B], Answer[B]]):
        self._service = service
        self._decode = msgspec.json.Decoder(body).decode
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._service.desk)
        try:
            await self._serve(exchange)
        except Gone:
            pass
        except Exception as e:  # noqa: BLE001  (whatever it is, the client is told)
            error = _told(e)
            if exchange.streaming:
                await exchange.stream(b"data: " + error.body + b"\n\n" + DONE, more=False)
            else:
                await exchange.refuse(error)
        finally:
            exchange.close()

    async def _serve(self, exchange: Exchange) -> None:
        body = read_json(self._decode, await exchange.body())
        refuse_unsupported(body)
        answer = self._answer(self._service, exchange, body)
        answer.check_streaming()
        await answer.begin()
        if answer.streams:
            await self._stream(exchange, answer)
        else:
            await exchange.answer(encode(await self._whole(exchange, answer)))

    async def _whole(self, exchange: Exchange, answer: Answer[B]) -> msgspec.Struct:
        call, pieces = exchange.call, dict[int, Piece]()
        while True:
            error = answer.take(await call.news(), pieces)
            if error is not None:
                raise error
            if not call.num_open:
                return answer.whole(pieces)

    async def _stream(self, exchange: Exchange, answer: Answer[B]) -> None:
        call = exchange.call

        def tell(deltas: list[Delta]) -> bool:
            data = answer.text_event(deltas)
            return data is not None and exchange.stream_now(data)

        call.at_once = tell
        while True:
            news = await call.news()
            data = answer.text_event(news)
            if data is not None:
                await exchange.stream(data)
                continue
            pieces: dict[int, Piece] = {}
            error = answer.take(news, pieces)
            if error is not None and not exchange.streaming:
                raise error
            ended = not call.num_open and error is None
            events = [event(chunk) for chunk in answer.chunks(pieces, ended=ended)]
            if ended:
                if answer.tells_usage:
                    events.append(event(answer.usage_chunk()))
                events.append(DONE)
            if events:
                await exchange.stream(b"".join(events), more=not ended)
            if error is not None:
                raise error
            if ended:
                return


def _told(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RecursionError):
        return too_deep()
    if isinstance(error, TooSlow):
        return ApiError(408, "the answer was not read fast enough, so the rest of it was given up", code="too_slow")
    log.error("a request could not be served", exc_info=error)
    return ApiError(500, "the router failed to answer; its log says why", code="internal_error")
