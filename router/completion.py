"""What a client gets for a request: deltas while it runs, a Completion at its end.

Plain data and arithmetic; must not know sockets. Times of the client are `time.monotonic()` seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, Unpack

import msgspec

from baton.errors import InvalidRequestError
from baton.protocol import MAX_TEXT, ChatMessage, Delta, Done, FinishReason, Generate, ToolCall, Usage
from baton.sampling_params import PromptLogprobs, SamplingParams, StructuredOutput, TokenLogprobs
from baton.timeline import RequestTimeline
from router.admission import check_sampling

Prompt = str | list[int] | tuple[int, ...] | list[dict[str, Any]]
"""Text, token ids, or messages: `role` and `content`, and where there are some `tool_calls` (as OpenAI's API has them),
`tool_call_id`, `name`."""


class GenerateOptions(TypedDict, total=False):
    """What a request may ask for beside its prompt; defaults and ranges are those of `SamplingParams`.

    Names, meanings and order are vLLM's (`baton.engine.sampler`). Same seed, same tokens, wherever they are computed.
    """

    max_tokens: int
    temperature: float
    """0 (the default) takes the most probable token."""
    seed: int | None
    """None: a new one each time."""
    top_k: int
    """Only the k most probable tokens; 0: off."""
    top_p: float
    """Only the fewest most probable tokens that together have this probability; 1: off."""
    min_p: float
    """Only tokens at least this share as probable as the most probable one; 0: off."""
    min_tokens: int
    """No EOS, stop token or stop string before so many tokens."""
    ignore_eos: bool
    stop_token_ids: Iterable[int]
    presence_penalty: float
    """Less probable, -2 to 2: tokens that are in the output."""
    frequency_penalty: float
    """The same for each time that they are."""
    repetition_penalty: float
    """Above 1: tokens that are in prompt or output become less probable; below: more."""
    logit_bias: Mapping[int, float]
    """By token id, -100 to 100: added to its logit."""
    allowed_token_ids: Iterable[int] | None
    """No other tokens."""
    bad_token_ids: Iterable[Iterable[int]]
    """Sequences of token ids that the output must not contain."""
    structured: StructuredOutput | None
    """The form that the output's text must have: a JSON schema, any JSON object, an expression, a choice, a grammar."""
    logprobs: int | None
    """Report each output token's log probability, and those of so many most probable ones (`Choice.logprobs`)."""
    prompt_logprobs: int | None
    """The same about the prompt (`Completion.prompt_logprobs`)."""
    stop: str | Iterable[str]
    """The text ends before the first of these strings; the tokens end with the one that completed it."""
    include_stop_str_in_output: bool
    """The text ends after the stop string instead."""
    priority: int
    """Requests of a lower one are served earlier where they wait; 0 is usual."""
    timeout_s: float | None
    """The cluster itself ends the request as failed after so long, wherever it is by then. (A call's `timeout` is
    what its caller waits.)"""
    session: str
    """Requests of one session go to the same workers, where the cluster's policy heeds it."""
    skip_special_tokens: bool
    """Leave tokens that are no text out of the text (the default)."""
    tools: Iterable[Mapping[str, Any]]
    """Of messages: the tools that the chat template shows to the model, as OpenAI's API has them."""
    template_options: Mapping[str, Any]
    """Of messages: further variables for the chat template."""
    continue_final: bool
    """Of messages: the answer goes on where the last one ends."""
    n: int
    """So many answers to the prompt, drawn independently (`Completion.choices`)."""


class StreamDelta(msgspec.Struct, frozen=True):
    """New tokens of a stream. `text` may be empty, or lag behind the tokens: by an incomplete character, or by
    what may be the start of a stop string. The last one may have only text.
    """

    text: str
    token_ids: tuple[int, ...]
    at: float
    """When it arrived."""
    sample: int = 0
    """Which of the request's `n` answers it continues."""
    finish_reason: FinishReason | None = None
    """With `n` > 1: this answer ends here. (A single answer's end is the Completion.)"""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One per token, if they were asked for; None for one that its worker did not tell."""
    prompt_logprobs: PromptLogprobs | None = None
    """With the first token of sample 0, if they were asked for."""


class Choice(msgspec.Struct, frozen=True):
    """One of the answers to a request. `index` is also the sample number that its random numbers depend on."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One per token, if they were asked for: of the model's distribution, before sampling parameters change it."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended: what came out, where it ran, and where its time went.

    Of several answers, text, tokens, finish reason, workers and times are those of `choices[0]`; usage and
    `kv_bytes` count all of them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    request_id: str
    prefill_worker: str
    decode_worker: str
    """Equal to `prefill_worker`: colocated, nothing was handed off."""
    attempts: int
    kv_bytes: int
    """KV cache handed from prefill to decode, in bytes."""
    timeline: RequestTimeline
    """Marks on the router's clock."""
    started_at: float
    """When the call was made."""
    token_times: tuple[float, ...]
    """Arrival of each token; tokens of one delta share it."""
    latency_s: float
    """From the call to the end of the request."""
    choices: tuple[Choice, ...]
    """All `n` answers, in order."""
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Those of `choices[0]`."""
    prompt_logprobs: PromptLogprobs | None = None
    """One per prompt token, the first None, if they were asked for and sample 0 got as far as its first token."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the call to the first token; None if there was none."""
        return self.token_times[0] - self.started_at if self.token_times else None

    @property
    def residual_s(self) -> float | None:
        """Seconds the client waited for the last token beyond what the timeline's stages explain."""
        return self.timeline.residual(self.token_times[-1] - self.started_at) if self.token_times else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: all of it, with the derived times and the stages in seconds."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        plain["timeline"] = {
            "marks": {str(mark): at for mark, at in sorted(self.timeline.marks.items())},
            "stages": {str(stage): seconds for stage, seconds in self.timeline.stages().items()},
        }
        plain["usage"] = {
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "cached_tokens": self.usage.cached_tokens,
        }
        plain["ttft_s"], plain["residual_s"] = self.ttft_s, self.residual_s
        plain["logprobs"], plain["prompt_logprobs"] = logprobs_data(self.logprobs), logprobs_data(self.prompt_logprobs)
        for choice, data in zip(self.choices, plain["choices"], strict=True):
            data["logprobs"] = logprobs_data(choice.logprobs)
        return plain


def logprobs_data(logprobs: tuple[TokenLogprobs | None, ...] | None) -> list[dict[str, Any] | None] | None:
    """For JSON: each entry by field name."""
    return None if logprobs is None else [None if entry is None else entry._asdict() for entry in logprobs]


class _Answer:
    __slots__ = ("finish_reason", "logprobs", "text", "times", "tokens")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.finish_reason: FinishReason = "abort"


class Collector:
    """Adds up the deltas of one request."""

    __slots__ = ("answers", "prompt_logprobs", "started_at", "wants_logprobs")

    def __init__(self, started_at: float, n: int = 1, *, wants_logprobs: bool = False):
        self.started_at = started_at
        self.wants_logprobs = wants_logprobs
        self.prompt_logprobs: PromptLogprobs | None = None
        self.answers = {sample: _Answer() for sample in range(n)}

    def add(self, delta: Delta, at: float) -> StreamDelta:
        answer = self.answers.setdefault(delta.sample, _Answer())
        answer.text.append(delta.text)
        answer.tokens.extend(delta.token_ids)
        answer.times.extend([at] * len(delta.token_ids))
        if delta.finish_reason is not None:
            answer.finish_reason = delta.finish_reason
        if delta.logprobs:
            answer.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        return StreamDelta(
            delta.text,
            delta.token_ids,
            at,
            delta.sample,
            delta.finish_reason,
            delta.logprobs,
            delta.prompt_logprobs,
        )

    def complete(self, done: Done, at: float) -> Completion:
        """`done.text` was added before, as a delta."""
        first = self.answers[0]
        first.finish_reason = done.finish_reason
        choices = tuple(
            Choice(
                index,
                "".join(answer.text),
                tuple(answer.tokens),
                answer.finish_reason,
                tuple(answer.logprobs) if self.wants_logprobs else None,
            )
            for index, answer in sorted(self.answers.items())
        )
        return Completion(
            text=choices[0].text,
            token_ids=choices[0].token_ids,
            finish_reason=done.finish_reason,
            usage=done.usage,
            request_id=done.request_id,
            prefill_worker=done.prefill_worker,
            decode_worker=done.decode_worker,
            attempts=done.attempts,
            kv_bytes=done.kv_bytes,
            timeline=RequestTimeline(marks=dict(done.marks)),
            started_at=self.started_at,
            token_times=tuple(first.times),
            latency_s=at - self.started_at,
            choices=choices,
            logprobs=choices[0].logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


def build_generate(label: str, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generate:
    """The message for these arguments, checked here so that a wrong one fails at the call (InvalidRequestError)."""
    given: dict[str, Any] = dict(options)
    for name in given.keys() - GenerateOptions.__annotations__.keys():
        raise TypeError(f"there is no option {name!r}; there are {', '.join(GenerateOptions.__annotations__)}")
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    for name in ("stop", "stop_token_ids", "allowed_token_ids"):
        if isinstance(given.get(name), Iterable):
            given[name] = tuple(given[name])
    if isinstance(given.get("bad_token_ids"), Iterable):
        given["bad_token_ids"] = tuple(
            tuple(ids) if isinstance(ids, Iterable) else ids for ids in given["bad_token_ids"]
        )
    if isinstance(given.get("logit_bias"), Mapping):
        given["logit_bias"] = dict(given["logit_bias"])
    for name, kind in (("tools", list), ("template_options", dict)):
        if name in given:
            given[name] = _json(name, kind(given[name])) if given[name] else ""
    for name, value in given.items():
        _check(name, value, _TYPES[name])
        if isinstance(value, int) and name in _FLOATS:
            given[name] = float(value)
    request = {name: given.pop(name) for name in _REQUEST_OPTIONS & given.keys()}
    sampling = SamplingParams(**given)
    check_sampling(sampling)
    message = _with_prompt(label, prompt, sampling)
    return msgspec.structs.replace(message, **request) if request else message


_REQUEST_OPTIONS = GenerateOptions.__annotations__.keys() - set(SamplingParams.__struct_fields__)
"""Options that are no `SamplingParams`."""
_FLOATS = {"timeout_s", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}
_TYPES = {field.name: field.type for kind in (SamplingParams, Generate) for field in msgspec.structs.fields(kind)}


def _with_prompt(label: str, prompt: Prompt, sampling: SamplingParams) -> Generate:
    if isinstance(prompt, str):
        _check("prompt", prompt, _TYPES["text"])
        return Generate(label=label, sampling=sampling, text=prompt)
    if not isinstance(prompt, (list, tuple)):
        raise InvalidRequestError("prompt must be text, a list of token ids or a list of messages", field="prompt")
    if prompt and isinstance(prompt[0], dict):
        messages = []
        for i, message in enumerate(prompt):
            messages.append(_message(f"prompt[{i}]", message))
        size = sum(len(m.role) + len(m.content) for m in messages)
        if size > MAX_TEXT:
            raise InvalidRequestError(
                f"messages of {size} characters in all, at most {MAX_TEXT} travel", field="prompt"
            )
        return Generate(label=label, sampling=sampling, messages=tuple(messages))
    _check("prompt", prompt, _TYPES["token_ids"])
    return Generate(label=label, sampling=sampling, token_ids=tuple(prompt))  # type: ignore[arg-type]


def _message(name: str, message: Any) -> ChatMessage:
    _check(name, message, dict[str, Any])
    missing = [key for key in ("role", "content") if message.get(key) is None and not message.get("tool_calls")]
    unknown = message.keys() - {"role", "content", "tool_calls", "tool_call_id", "name"}
    if missing or unknown:
        wrong = f"lacks {' and '.join(missing)}" if missing else f"has {', '.join(sorted(unknown))}"
        allowed = "role and content, and may have tool_calls, tool_call_id and name"
        raise InvalidRequestError(f"{name} {wrong}; a message has {allowed}", field="prompt")
    calls = []
    for i, call in enumerate(message.get("tool_calls") or ()):
        try:
            calls.append(ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]))
        except (KeyError, TypeError) as e:
            shape = '{"id": ..., "function": {"name": ..., "arguments": ...}}'
            raise InvalidRequestError(f"{name}.tool_calls[{i}] must be {shape}", field="prompt") from e
    fields = {key: value for key in ("tool_call_id", "name") if (value := message.get(key)) is not None}
    made = ChatMessage(message.get("role"), message.get("content") or "", tuple(calls), **fields)
    _check(name, made, ChatMessage)
    return made


def _json(name: str, value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError) as e:
        raise InvalidRequestError(f"{name} must be JSON: {e}", field=name) from None


def _check(name: str, value: Any, kind: Any) -> None:
    """That `value` is a `kind`, and that it can be encoded: text may hold half of a surrogate pair."""
    try:
        if isinstance(value, msgspec.Struct):  # which may have been built of anything
            value = msgspec.to_builtins(value)
        msgspec.msgpack.encode(msgspec.convert(value, kind, strict=True))
    except (msgspec.ValidationError, UnicodeEncodeError, OverflowError) as e:
        raise InvalidRequestError(f"{name}: {e}", field=name.partition("[")[0]) from None
