"""`/v1/chat/completions`: a conversation by the model's chat template, tools, `n` answers.

Must not know HTTP, the router's core, or how a model writes its tool calls (`router.tool_calls`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType

from baton.errors import BatonError
from baton.sampling_params import StructuredOutput
from router.http.answers import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatFinish,
    ChatLogprobs,
    ChunkChoice,
    FunctionCall,
    FunctionCallDelta,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from router.http.conversation import conversation_of, tools_json
from router.http.errors import from_exception, invalid
from router.http.exchange import Exchange
from router.http.parameters import CHAT_NAMES, structured_of
from router.http.schema import ChatCompletionRequest, NamedToolChoice
from router.http.serving import Answer, Piece, Prompt, Service
from router.tool_calls import (
    CallArguments,
    CallStart,
    Content,
    ToolEvent,
    ToolParser,
    forced_calls,
    parser_for,
    shows_tools,
)


class _Choice:
    """What has been told of a choice. `parser`: finds tool calls in its text; None: there are none to be found."""

    __slots__ = ("num_tokens", "parser", "started")

    def __init__(self, parser: ToolParser | None):
        self.parser = parser
        self.started = False
        self.num_tokens = 0


class ChatAnswer(Answer[ChatCompletionRequest]):
    prefix = "chatcmpl-"

    def __init__(self, service: Service, exchange: Exchange, body: ChatCompletionRequest):
        super().__init__(service, exchange, body, CHAT_NAMES)
        exchange.call.operation = "chat"
        self._writer = self.logprobs_writer(body.top_logprobs or 0)
        self._choices: list[_Choice] = []
        self._wants_tokens = bool(body.logprobs or body.return_token_ids)
        """Chunks tell of tokens even where they have no text yet."""
        if body.max_completion_tokens is not None:
            self.names["max_tokens"] = "max_completion_tokens"
        self.names["logprobs"] = "top_logprobs"

    async def begin(self) -> None:
        body = self.body
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs can only be set together with logprobs: true", "top_logprobs")
        prompt, structured = await self.service.tokenize(self.exchange.body_size, self._read_body, self.names)
        self.prompts = [prompt]
        await self.start_requests(
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            structured=structured,
        )

    def _read_body(self) -> tuple[Prompt, StructuredOutput | None]:
        """The prompt, and the form of the answer; the choices are made."""
        body, desk = self.body, self.service.desk
        structured, self.names["structured"] = structured_of(body)
        tools = tools_json(body) if body.tool_choice != "none" else ""
        structured = self._call_tools(tools, structured)
        source = conversation_of(body, desk.text.chat_template, tools)
        return Prompt(desk.translator.encode(source)), structured

    def _call_tools(self, tools: str, structured: StructuredOutput | None) -> StructuredOutput | None:
        """Make the choices, each with what finds tool calls in it; returns the form of the answer."""
        body, template, choice = self.body, self.service.desk.text.chat_template, self.body.tool_choice
        ids = [f"{self.request_id}{i}" for i in range(self.n)]
        if choice == "required" or isinstance(choice, NamedToolChoice):
            if structured is not None:
                field = self.names["structured"]
                raise invalid(f"tool_choice says the form of the answer already, so {field} cannot", field)
            name = choice.function.name if isinstance(choice, NamedToolChoice) else None
            parallel = body.parallel_tool_calls is not False
            try:
                form, forced = forced_calls(tools, name, parallel=parallel)
            except BatonError as e:
                raise from_exception(e, self.names) from e
            self._choices = [_Choice(forced.anew(i)) for i in ids]
            return form
        if choice == "auto" and not tools:
            raise invalid("tool_choice is auto, and there are no tools", "tool_choice")
        if tools and not shows_tools(template):
            raise invalid(
                "this model's chat template shows the model no tools, so it cannot choose one; set tool_choice to "
                "required or to a function to have one called",
                "tools",
            )
        parser = parser_for(template, tools) if tools else None
        self._choices = [_Choice(None if parser is None else parser.anew(i)) for i in ids]
        return structured

    # --- a stream -------------------------------------------------------------------------------------

    def chunks(self, pieces: dict[int, Piece], *, ended: bool) -> Iterator[ChatCompletionChunk]:
        body = self.body
        for index, piece in pieces.items():
            choice = self._choices[index]
            choice.num_tokens += len(piece.token_ids)
            content, calls = self._read(choice, piece)
            if not (content or calls or piece.finish or self._wants_tokens):
                continue
            first, choice.started = not choice.started, True
            role: Any = "assistant" if first else UNSET
            logprobs = None
            if body.logprobs and piece.token_ids:
                logprobs = self._writer.chat(piece.token_ids, piece.logprobs)
            yield self._chunk(
                ChunkChoice(
                    index,
                    MessageDelta(role, content or ("" if first and not calls else UNSET), calls or UNSET),
                    logprobs,
                    self._finish(choice, piece),
                    piece.token_ids if body.return_token_ids else UNSET,
                ),
                usage=self.usage_in_chunk(index, choice.num_tokens),
                prompt_token_ids=self._prompt_token_ids() if first else UNSET,
            )
            if first and choice.parser is None and not self._wants_tokens and not self.tells_usage_always:
                self.frame(index, partial(self._text_chunk, index))

    def _text_chunk(self, index: int, text: str) -> ChatCompletionChunk:
        choice = ChunkChoice(index, MessageDelta(content=text), None, None)
        return self._chunk(choice, usage=self.usage_in_chunk(index, 0))

    def _chunk(
        self,
        *choices: ChunkChoice,
        usage: Usage | UnsetType | None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=list(choices),
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )

    def usage_chunk(self) -> ChatCompletionChunk:
        return self._chunk(usage=self.usage())

    def _read(self, choice: _Choice, piece: Piece) -> tuple[str, list[ToolCallDelta]]:
        """The piece's text for the user, and what it says of calls."""
        if choice.parser is None:
            return piece.text, []
        return _told(self._events(choice, piece))

    def _events(self, choice: _Choice, piece: Piece) -> list[ToolEvent]:
        parser = choice.parser
        assert parser is not None
        events = parser.push(piece.text)
        if piece.finish is not None:
            events += parser.flush()
        if self.body.parallel_tool_calls is False:
            events = [e for e in events if isinstance(e, Content) or e.index == 0]
        return events

    def _finish(self, choice: _Choice, piece: Piece) -> ChatFinish | None:
        if piece.finish == "stop" and choice.parser is not None and choice.parser.num_calls:
            return "tool_calls"
        return piece.finish  # type: ignore[return-value]  # the others are errors (`take`)

    # --- a whole answer -------------------------------------------------------------------------------

    def whole(self, pieces: Mapping[int, Piece]) -> ChatCompletion:
        about_prompt = pieces[0].prompt_logprobs
        wants_prompt = self.body.prompt_logprobs
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=[self._whole_choice(index, choice, pieces[index]) for index, choice in enumerate(self._choices)],
            usage=self.usage(),
            prompt_token_ids=self._prompt_token_ids(),
            prompt_logprobs=UNSET
            if wants_prompt is None
            else self.logprobs_writer(wants_prompt).prompt(about_prompt or ()),
        )

    def _whole_choice(self, index: int, choice: _Choice, piece: Piece) -> ChatChoice:
        content: str | None = piece.text
        calls: list[ToolCall] = []
        if choice.parser is not None:
            content, told = _told(self._events(choice, piece))
            calls = [
                ToolCall(str(call.id), FunctionCall(str(call.function.name), call.function.arguments)) for call in told
            ]
        logprobs: ChatLogprobs | None = None
        if self.body.logprobs:
            logprobs = self._writer.chat(piece.token_ids, piece.logprobs)
        finish = self._finish(choice, piece)
        assert finish is not None, "only what has ended is whole"
        return ChatChoice(
            index=index,
            message=AssistantMessage(content=content or (None if calls else ""), tool_calls=calls or UNSET),
            logprobs=logprobs,
            finish_reason=finish,
            token_ids=piece.token_ids if self.body.return_token_ids else UNSET,
        )

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return list(self.prompts[0].token_ids) if self.body.return_token_ids else UNSET


def _told(events: Iterable[ToolEvent]) -> tuple[str, list[ToolCallDelta]]:
    """Content, and one delta for each call."""
    content: list[str] = []
    starts: dict[int, CallStart] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, CallStart):
            starts[event.index] = event
            arguments.setdefault(event.index, [])
        else:
            assert isinstance(event, CallArguments)
            arguments.setdefault(event.index, []).append(event.fragment)
    return "".join(content), [_delta(index, starts.get(index), parts) for index, parts in arguments.items()]


def _delta(index: int, start: CallStart | None, fragments: Sequence[str]) -> ToolCallDelta:
    if start is None:
        return ToolCallDelta(index, function=FunctionCallDelta(arguments="".join(fragments)))
    return ToolCallDelta(index, start.id, "function", FunctionCallDelta(start.name, "".join(fragments)))
