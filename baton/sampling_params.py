"""What a request may ask of sampling, and what it may be told about tokens: SamplingParams and its parts.

Immutable plain data that travels within messages; like them it is encoded as `[tag, field, ...]`, so new fields go
last and have a default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from baton.wire import Count, Message

MAX_PROMPT_TOKENS = 1 << 20
"""More than any model here reads; bounds what a peer can make us allocate."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
TokenIds = Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]

MAX_CONSTRAINT = 1 << 16
"""Characters of a schema, expression or grammar."""
MAX_CHOICES = 1024
MAX_LOGPROBS = 20
"""Most probable tokens that are reported for one place."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""Log probabilities of a whole prompt, which travel in one message."""
Choice = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
LogitBias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
BadSequence = Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=64)]
NumLogprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]


class StructuredOutput(Message, frozen=True, tag=2):
    """What form the output's text must have; see `baton.engine.structured`."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar"]
    """A JSON schema, any JSON object, a regular expression, one of several texts, a grammar in Lark's notation."""
    text: Annotated[str, msgspec.Meta(max_length=MAX_CONSTRAINT)] = ""
    """The schema, expression or grammar; a schema is the text of a JSON value."""
    choices: Annotated[tuple[Choice, ...], msgspec.Meta(max_length=MAX_CHOICES)] = ()

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str) -> StructuredOutput:
        """JSON that follows this schema, given as Python data or as text."""
        return cls("json", schema if isinstance(schema, str) else msgspec.json.encode(schema).decode())

    @classmethod
    def json_object(cls) -> StructuredOutput:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> StructuredOutput:
        """Text that this regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Iterable[str]) -> StructuredOutput:
        """One of these texts."""
        return cls("choice", choices=tuple(texts))

    @classmethod
    def grammar(cls, text: str) -> StructuredOutput:
        """Text of a grammar in Lark's notation."""
        return cls("grammar", text)


class SamplingParams(Message, frozen=True, tag=1):
    """How tokens are chosen. With `temperature` 0 the most probable token, else by the counter-based stream.

    What each does to the probabilities, and in which order, says `baton.engine.sampler`.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 256
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """The router mints one where it is missing, so a retried attempt samples the same tokens."""
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=1024)] = ()
    top_k: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    """Only the k most probable tokens, those as probable as the k-th included; 0: off."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Only the fewest most probable tokens that together have this probability."""
    min_p: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """Only tokens with at least this share of the most probable token's probability."""
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    """The first so many output tokens are none that would end the request (EOS unless ignored, `stop_token_ids`)."""
    presence_penalty: Penalty = 0.0
    """Taken from the logit of each token that is in the output."""
    frequency_penalty: Penalty = 0.0
    """Taken from a token's logit as often as the token is in the output."""
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    """Divides the positive logits of tokens that are in the prompt or the output, multiplies the negative ones."""
    logit_bias: Annotated[dict[TokenId, LogitBias], msgspec.Meta(max_length=1024)] = {}
    """Added to the logits of these tokens."""
    allowed_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=1 << 18)] | None = None
    """Only these tokens."""
    bad_token_ids: Annotated[tuple[BadSequence, ...], msgspec.Meta(max_length=1024)] = ()
    """Sequences that the output must not contain: the last id of one is forbidden after its other ids."""
    logprobs: NumLogprobs | None = None
    """Report the log probability of each output token, and of so many most probable ones at its place."""
    prompt_logprobs: NumLogprobs | None = None
    """The same of the prompt's tokens; its first one has none."""
    structured: StructuredOutput | None = None


class TokenLogprobs(NamedTuple):
    """How probable the model held a token: natural logarithms, before sampling parameters change anything."""

    token: TokenId
    logprob: float
    rank: Count
    """Tokens of the vocabulary at least as probable, itself included: 1 is the most probable one."""
    top_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_LOGPROBS)] = ()
    """The most probable tokens, as many as were asked for, best first; of equals the lower id."""
    top_logprobs: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_LOGPROBS)] = ()


PromptLogprobs = Annotated[tuple[TokenLogprobs | None, ...], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]
"""One entry per prompt token; the first is None, as nothing comes before it."""
