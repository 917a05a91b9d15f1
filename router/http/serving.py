"""What completions and chat have in common: how a body becomes requests, and what they answer becomes choices.

Must not know either's fields or shapes (`completions.py`, `chat.py`), or how an answer is sent (`endpoint.py`).
"""

from __future__ import annotations

import asyncio
import gc
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from baton.config import ClusterConfig
from baton.errors import BatonError, OverloadedError
from baton.protocol import Delta, Done, Failed, FinishReason, Generate, ToClient
from baton.protocol import Usage as BatonUsage
from baton.sampling_params import StructuredOutput, TokenLogprobs
from router.desk import Desk
from router.http.answers import PromptTokensDetails, Usage
from router.http.errors import TOO_LONG, ApiError, from_baton, from_decoding, from_exception, from_failed, invalid
from router.http.exchange import Exchange
from router.http.logprobs import LogprobsWriter, TokenNames
from router.http.models import Models
from router.http.parameters import sampling_of, stop_of
from router.http.schema import Body
from router.overview import why_not_ready
from router.text import LONG_TEXT

START_S = 0.001
"""So long the requests of many prompts hold the loop at a time."""
_TEXT = "\x00text"
"""Stands for the text where a frame is made; no name or id contains it."""
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")

encode = msgspec.json.Encoder().encode
T = TypeVar("T")
B = TypeVar("B", bound=Body)


def event(data: msgspec.Struct) -> bytes:
    """As a server-sent event."""
    return b"data: " + encode(data) + b"\n\n"


def read_json(decode: Callable[[bytes], T], data: bytes) -> T:
    """Raises ApiError for what is no JSON, or not what is expected."""
    # None of what is made is garbage yet; to look for some takes several times as long as all else.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return decode(data)
    except msgspec.DecodeError as e:
        raise from_decoding(e) from e
    finally:
        if was_enabled:
            gc.enable()


class Service:
    """What all requests of one router share."""

    def __init__(self, config: ClusterConfig, desk: Desk):
        self.desk = desk
        self.models = Models(config, desk)
        self.names = TokenNames(desk.text)
        self.max_requests = config.router.max_requests
        self._tokenizing = ThreadPoolExecutor(2, "baton-tokenizing")

    async def tokenize(self, size: int, function: Callable[[], T], names: Mapping[str, str]) -> T:
        """What `function` returns, which reads `size` bytes or characters of what a client sent. Raises ApiError.

        Of many it is asked in another thread, so it must not look at what changes in the router's.
        """
        try:
            if size <= LONG_TEXT:
                return function()
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function)
        except BatonError as e:
            raise from_exception(e, names) from e

    async def check_form(self, form: StructuredOutput, names: Mapping[str, str]) -> None:
        """Raises ApiError for one that cannot be followed. Whoever asks again soon is answered at once."""
        try:
            await self.desk.forms.check(form)
        except BatonError as e:
            raise from_exception(e, names) from e

    def room_for(self, num_prompt: int, names: Mapping[str, str]) -> int:
        """The most tokens that an answer to a prompt of so many can have. Raises ApiError if that is none."""
        limit = self.desk.core.max_model_len
        if not limit:
            raise from_baton(
                OverloadedError.code, "", None, names, not_ready=self.not_ready() or "no worker has joined"
            )
        if num_prompt >= limit:
            raise ApiError(
                400,
                f"{TOO_LONG}: the prompt has {num_prompt} tokens, and with its answer has room for {limit}; shorten it",
                param=names["text"],
                code="context_length_exceeded",
            )
        return limit - num_prompt

    def not_ready(self) -> str | None:
        """Why no request could be run now; None: one could."""
        return why_not_ready(self.desk.core)


class Piece:
    """What is new of a choice."""

    __slots__ = ("finish", "logprobs", "prompt_logprobs", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
        self.finish: FinishReason | None = None

    @property
    def text(self) -> str:
        return self.texts[0] if len(self.texts) == 1 else "".join(self.texts)

    def add(self, delta: Delta) -> None:
        if delta.text:
            self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish = delta.finish_reason

    def extend(self, later: Piece) -> None:
        self.texts += later.texts
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish = later.finish


class Prompt(msgspec.Struct, frozen=True):
    """`text`: as it was given, or empty."""

    token_ids: tuple[int, ...]
    text: str = ""


class Answer(Generic[B]):
    """One request and its answer. `begin`, and then `take` with all news until the call has no open request."""

    prefix: ClassVar[str]
    """Of its id."""

    def __init__(self, service: Service, exchange: Exchange, body: B, names: Mapping[str, str]):
        self.body = body
        self.n = body.n or 1
        self.streams = body.stream or False
        self.model = service.models.known(body.model)
        self.service = service
        self.exchange = exchange
        self.names = dict(names)
        """What the client calls Baton's fields."""
        self.prompts: list[Prompt] = []
        self.created = int(time.time())
        self.request_id = secrets.token_hex(16)
        self.id = self.prefix + self.request_id
        self.fingerprint = service.models.fingerprint()
        options = body.stream_options
        self.tells_usage = bool(options is not None and options.include_usage)
        self.tells_usage_always = bool(options is not None and options.continuous_usage_stats)
        self._first_choices: dict[str, int] = {}
        """By label, the index of the request's first choice."""
        self._usages: list[BatonUsage] = []
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """By choice: what is around the text in an event of nothing but text."""

    # --- what completions and chat do differently ---------------------------------------------------

    async def begin(self) -> None:
        """Check all, tokenize, and start the requests. Raises ApiError, or Gone."""
        raise NotImplementedError

    def chunks(self, pieces: dict[int, Piece], *, ended: bool) -> Iterable[msgspec.Struct]:
        """What a stream tells of these. `ended`: no more will come."""
        raise NotImplementedError

    def usage_chunk(self) -> msgspec.Struct:
        """A stream's last one, if usage is wanted."""
        raise NotImplementedError

    def whole(self, pieces: Mapping[int, Piece]) -> msgspec.Struct:
        """All at once, of all that was ever told."""
        raise NotImplementedError

    # --- what they share ----------------------------------------------------------------------------

    def check_streaming(self) -> None:
        """Raises ApiError for what streams cannot do, or only they can."""
        if not self.streams and self.body.stream_options is not None:
            raise invalid("stream_options can only be set together with stream", "stream_options")
        if self.streams and self.body.prompt_logprobs is not None:
            raise invalid("prompt_logprobs cannot be had from a stream", "prompt_logprobs")

    async def start_requests(
        self,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        structured: StructuredOutput | None,
    ) -> None:
        """Start a request for each of `prompts`, or up to one that is refused. `max_tokens`: None: as many as fit.

        Raises ApiError, or Gone.
        """
        body, text = self.body, self.service.desk.text
        num, limit = len(self.prompts) * self.n, self.service.max_requests
        if len(self.prompts) > 1 and num > limit:
            raise invalid(
                f"{len(self.prompts)} prompts with n {self.n} are {num} requests, and router.max_requests is {limit}",
                "prompt",
            )
        rooms = [
            self.service.room_for(len(prompt.token_ids), self.names) if max_tokens is None else max_tokens
            for prompt in self.prompts
        ]
        if max_tokens is not None and max_tokens < 1:
            name = self.names.get("max_tokens", "max_tokens")
            raise invalid(f"{name} must be at least 1", name)
        sampling = sampling_of(
            body,
            text,
            max_tokens=rooms[0],
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured=structured,
        )
        message = Generate(
            label="",
            sampling=sampling,
            stop=stop_of(body),
            include_stop_str_in_output=body.include_stop_str_in_output or False,
            n=self.n,
            priority=body.priority or 0,
            skip_special_tokens=body.skip_special_tokens is not False,
            session=(self.exchange.header(b"x-session-id") or body.session_id or body.user or "")[:1024],
        )
        if structured is not None:
            await self.service.check_form(structured, self.names)
        client_id = self._client_id()
        self.exchange.headers["x-request-id"] = client_id or self.request_id
        self.exchange.headers["x-baton-request-id"] = self.request_id
        since = time.perf_counter()
        for i, (prompt, room) in enumerate(zip(self.prompts, rooms, strict=True)):
            if time.perf_counter() - since > START_S:
                await asyncio.sleep(0)
                since = time.perf_counter()
            label = f"{client_id}/{i}" if client_id else str(i)
            self._first_choices[label] = i * self.n
            if room != sampling.max_tokens:
                sampling = msgspec.structs.replace(sampling, max_tokens=room)
            self.exchange.call.start(
                msgspec.structs.replace(message, label=label, sampling=sampling),
                self.exchange.received_at,
                prompt=prompt.token_ids,
                request_id=secrets.token_hex(16) if i else self.request_id,
            )
            if self.exchange.call.failed:
                return

    def _client_id(self) -> str | None:
        """The client's own name for the request, if it is one that logs and headers can hold."""
        name = self.body.request_id or self.exchange.header(b"x-request-id")
        return name if name is not None and _CLIENT_ID.fullmatch(name) else None

    def take(self, news: Sequence[ToClient], pieces: dict[int, Piece]) -> ApiError | None:
        """Add what has come to the pieces; returns what ended a request that failed."""
        for message in news:
            if type(message) is Delta:
                index = self._first_choices[message.label] + message.sample
                piece = pieces.get(index)
                if piece is None:
                    piece = pieces[index] = Piece()
                piece.add(message)
            elif type(message) is Done:
                if message.finish_reason not in ("stop", "length"):
                    return ApiError(500, f"the request ended early: {message.finish_reason}", code="request_failed")
                self._usages.append(message.usage)
                if self.n == 1:
                    piece = pieces.setdefault(self._first_choices[message.label], Piece())
                    if message.text:
                        piece.texts.append(message.text)
                    piece.finish = message.finish_reason
            elif type(message) is Failed:
                elsewhere = message.code == OverloadedError.code or self.service.desk.core.stopping
                return from_failed(message, self.names, self.service.not_ready() if elsewhere else None)
        return None

    def frame(self, index: int, chunk_of: Callable[[str], msgspec.Struct]) -> None:
        """From now on `text_event` may answer for this choice. `chunk_of(text)`: a chunk of nothing but that text."""
        head, _, tail = event(chunk_of(_TEXT)).partition(encode(_TEXT))
        self._frames[index] = head, tail

    def text_event(self, news: Sequence[ToClient]) -> bytes | None:
        """The event of news that are text of one choice and nothing else, as most are; None: they are not.

        Made without the chunk's objects, it takes a third of the time.
        """
        if len(news) != 1:
            return None
        delta = news[0]
        if type(delta) is not Delta or not delta.text or delta.finish_reason is not None:
            return None
        frame = self._frames.get(self._first_choices[delta.label] + delta.sample)
        return None if frame is None else frame[0] + encode(delta.text) + frame[1]

    def usage(self) -> Usage:
        """Of all that has ended."""
        cached = 0
        for usage in self._usages:
            # Samples after the first find the prompt in the cache because the first one computed it: not counted.
            cached += max(0, usage.cached_tokens - (self.n - 1) * max(0, usage.prompt_tokens - 1))
        prompt = sum(usage.prompt_tokens for usage in self._usages)
        completion = sum(usage.completion_tokens for usage in self._usages)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    def usage_in_chunk(self, index: int, num_tokens: int) -> Usage | UnsetType | None:
        """For a chunk of a choice of which so many tokens have come by now."""
        if not self.tells_usage_always:
            return None if self.tells_usage else UNSET
        num_prompt = len(self.prompts[index // self.n].token_ids)
        return Usage(num_prompt, num_tokens, num_prompt + num_tokens)

    def logprobs_writer(self, num_top: int) -> LogprobsWriter:
        return LogprobsWriter(
            self.service.names,
            num_top,
            as_ids=self.body.return_tokens_as_token_ids or False,
            shows_special=self.body.skip_special_tokens is False,
        )
