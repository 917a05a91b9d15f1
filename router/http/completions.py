"""`/v1/completions`: prompts as text or token ids, `n` answers to each.

Choice `i * n + j` is the j-th answer to prompt i. Must not know HTTP or the router's core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from msgspec import UNSET, UnsetType

from baton.protocol import Generate
from baton.sampling_params import SamplingParams, TokenLogprobs
from router.http.answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from router.http.errors import invalid
from router.http.exchange import Exchange
from router.http.logprobs import Place, join
from router.http.parameters import COMPLETION_NAMES, structured_of
from router.http.schema import MAX_PROMPTS, CompletionRequest
from router.http.serving import Answer, Piece, Prompt, Service
from router.text import LONG_TEXT

_PROMPT_SIZE = 16
"""Reading an empty prompt takes as long as that of so many characters."""


class _Choice:
    """What has been told of a choice."""

    __slots__ = ("num_tokens", "place", "started")

    def __init__(self) -> None:
        self.started = False
        self.num_tokens = 0
        self.place = Place()
        """Of the next token."""


class CompletionAnswer(Answer[CompletionRequest]):
    prefix = "cmpl-"

    def __init__(self, service: Service, exchange: Exchange, body: CompletionRequest):
        super().__init__(service, exchange, body, COMPLETION_NAMES)
        self._echo = body.echo or False
        self._only_prompt = self._echo and body.max_tokens == 0
        self._is_plain = not (
            body.logprobs is not None or body.return_token_ids or self.tells_usage_always or self._only_prompt
        )
        """Chunks after a choice's first one are nothing but text."""
        self._writer = self.logprobs_writer(body.logprobs or 0)
        self._choices: list[_Choice] = []
        self._held: dict[int, Piece] = {}
        """Pieces that are to be told after the prompt's log probabilities, by choice."""
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs | None]] = {}
        """By prompt, once they are known."""

    async def begin(self) -> None:
        body = self.body
        if body.best_of is not None and body.best_of != self.n:
            raise invalid(f"best_of {body.best_of} is not supported unless it equals n, which is {self.n}", "best_of")
        if self._only_prompt and body.min_tokens:
            raise invalid("min_tokens must be 0 where max_tokens is 0", "min_tokens")
        structured, self.names["structured"] = structured_of(body)
        self.prompts = await self._tokenize()
        self._choices = [_Choice() for _ in range(len(self.prompts) * self.n)]
        # The router tells of the prompt once, as much as either field wants; what each shows is cut to its own number.
        about_prompt = [body.prompt_logprobs, body.logprobs if self._echo else None]
        await self.start_requests(
            max_tokens=1 if self._only_prompt else body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=max((wanted for wanted in about_prompt if wanted is not None), default=None),
            structured=structured,
        )

    async def _tokenize(self) -> list[Prompt]:
        prompt = self.body.prompt
        prompts: Sequence[str | int | list[int]]
        if isinstance(prompt, str):
            prompts = [prompt]
        elif len({type(item) for item in prompt}) > 1:
            raise invalid("prompt must be all texts, all token ids, or all lists of token ids", "prompt")
        else:
            prompts = [prompt] if prompt and type(prompt[0]) is int else prompt  # type: ignore[list-item]
        if not 0 < len(prompts) <= MAX_PROMPTS:
            raise invalid(f"prompt must be 1 to {MAX_PROMPTS} prompts; it is {len(prompts)}", "prompt")
        longest = max((len(item) for item in prompts if isinstance(item, list)), default=0)
        if longest > LONG_TEXT:  # it may be too many to look at each
            self.service.room_for(longest, self.names)
        size = self.exchange.body_size + len(prompts) * _PROMPT_SIZE
        return await self.service.tokenize(size, lambda: [self._read(item) for item in prompts], self.names)

    def _read(self, item: str | int | list[int]) -> Prompt:
        translator, text = self.service.desk.translator, self.service.desk.text
        if isinstance(item, str):
            if self.body.add_special_tokens is False and item:
                return Prompt(tuple(text.encode(item, add_special_tokens=False)), item)
            return Prompt(translator.encode(Generate("", SamplingParams(), text=item)), item)
        assert not isinstance(item, int)
        ids = translator.encode(Generate("", SamplingParams(), token_ids=tuple(item)))
        if not self._echo:
            return Prompt(ids)
        return Prompt(ids, text.decode(ids, skip_special_tokens=self.body.skip_special_tokens is not False))

    # --- out ------------------------------------------------------------------------------------------

    def chunks(self, pieces: dict[int, Piece], *, ended: bool) -> Iterator[Completion]:
        if self._echo and self.body.logprobs is not None:
            pieces = self._after_prompt(pieces, ended=ended)
        for index, piece in pieces.items():
            choice = self._choices[index]
            choice.num_tokens += len(piece.token_ids)
            first = not choice.started
            shown = self._shown(index, piece, choice)
            if shown is not None:
                yield self._completion([shown], self.usage_in_chunk(index, choice.num_tokens))
            if first and choice.started and self._is_plain:
                self.frame(index, partial(self._text_chunk, index))

    def _text_chunk(self, index: int, text: str) -> Completion:
        choice = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None)
        return self._completion([choice], self.usage_in_chunk(index, 0))

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=usage,
        )

    def _after_prompt(self, pieces: dict[int, Piece], *, ended: bool) -> dict[int, Piece]:
        """The pieces of which the prompt's log probabilities are known; the others are held until they are."""
        for index, piece in pieces.items():
            if piece.prompt_logprobs is not None:
                self._prompt_logprobs[index // self.n] = piece.prompt_logprobs
            if index in self._held:
                self._held[index].extend(piece)
            else:
                self._held[index] = piece
        ready = {i: piece for i, piece in self._held.items() if ended or i // self.n in self._prompt_logprobs}
        for index in ready:
            del self._held[index]
        return ready

    def usage_chunk(self) -> Completion:
        return self._completion([], self.usage())

    def whole(self, pieces: Mapping[int, Piece]) -> Completion:
        choices = []
        for index, choice in enumerate(self._choices):
            about_prompt = pieces[index - index % self.n].prompt_logprobs
            if about_prompt is not None:
                self._prompt_logprobs[index // self.n] = about_prompt
            shown = self._shown(index, pieces[index], choice)
            assert shown is not None, "a choice that has ended is always shown"
            choices.append(shown)
        return self._completion(choices, self.usage())

    def usage(self) -> Usage:
        usage = super().usage()
        if self._only_prompt:  # the token that the engine must make was asked for by nobody
            return Usage(usage.prompt_tokens, 0, usage.prompt_tokens, usage.prompt_tokens_details)
        return usage

    def _shown(self, index: int, piece: Piece, choice: _Choice) -> CompletionChoice | None:
        """The choice with what is new of it; None: nothing that a client could see."""
        body, prompt = self.body, self.prompts[index // self.n]
        text, ids = ("", []) if self._only_prompt else (piece.text, piece.token_ids)
        first, choice.started = not choice.started, True
        if first and self._echo:
            text = prompt.text + text
        elif not (text or piece.finish or body.logprobs is not None or body.return_token_ids):
            choice.started = not first
            return None
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=None if body.logprobs is None else self._logprobs(index, ids, piece, choice, with_prompt=first),
            finish_reason=piece.finish,  # type: ignore[arg-type]  # the others are errors (`take`)
            token_ids=ids if body.return_token_ids else UNSET,
            prompt_token_ids=list(prompt.token_ids) if first and body.return_token_ids else UNSET,
            prompt_logprobs=UNSET if body.prompt_logprobs is None else self._about_prompt(index // self.n),
        )

    def _logprobs(
        self, index: int, ids: list[int], piece: Piece, choice: _Choice, *, with_prompt: bool
    ) -> CompletionLogprobs | None:
        parts = []
        if with_prompt and self._echo:
            prompt = self.prompts[index // self.n]
            entries = self._prompt_logprobs.get(index // self.n) or [None] * len(prompt.token_ids)
            parts.append(self._writer.completion(prompt.token_ids, entries, choice.place, prompt.text))
            choice.place.end_text()
        if ids:
            parts.append(self._writer.completion(ids, piece.logprobs, choice.place))
        return join(parts) if parts else None

    def _about_prompt(self, prompt: int) -> list[dict[str, object] | None]:
        return self.logprobs_writer(self.body.prompt_logprobs or 0).prompt(self._prompt_logprobs.get(prompt, ()))
