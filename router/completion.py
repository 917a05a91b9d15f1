"""What a client gets for a request: deltas while it runs, a Completion at its end.

Plain data and arithmetic; must not know sockets. Times of the client are `time.monotonic()` seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from baton.errors import InvalidRequestError
from baton.protocol import ChatMessage, Done, FinishReason, Generate, SamplingParams, Usage
from baton.timeline import RequestTimeline

Prompt = str | list[int] | tuple[int, ...] | list[dict[str, str]]


class StreamDelta(msgspec.Struct, frozen=True):
    """New tokens of a stream. `text` may be empty, or lag behind the tokens by an incomplete character."""

    text: str
    token_ids: tuple[int, ...]
    at: float
    """When it arrived."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended: what came out, where it ran, and where its time went."""

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
        }
        plain["ttft_s"], plain["residual_s"] = self.ttft_s, self.residual_s
        return plain


class Collector:
    """Adds up the deltas of one request."""

    __slots__ = ("started_at", "text", "times", "tokens")

    def __init__(self, started_at: float):
        self.started_at = started_at
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.times: list[float] = []

    def add(self, token_ids: tuple[int, ...], text: str, at: float) -> StreamDelta:
        self.text.append(text)
        self.tokens.extend(token_ids)
        self.times.extend([at] * len(token_ids))
        return StreamDelta(text, token_ids, at)

    def complete(self, done: Done, at: float) -> Completion:
        return Completion(
            text="".join(self.text) + done.text,
            token_ids=tuple(self.tokens),
            finish_reason=done.finish_reason,
            usage=done.usage,
            request_id=done.request_id,
            prefill_worker=done.prefill_worker,
            decode_worker=done.decode_worker,
            attempts=done.attempts,
            kv_bytes=done.kv_bytes,
            timeline=RequestTimeline(marks=dict(done.marks)),
            started_at=self.started_at,
            token_times=tuple(self.times),
            latency_s=at - self.started_at,
        )


def build_generate(
    label: str,
    prompt: Prompt,
    *,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    ignore_eos: bool,
    stop_token_ids: Iterable[int],
) -> Generate:
    """The message for these arguments, checked here so that a wrong one fails at the call (InvalidRequestError)."""
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": float(temperature) if isinstance(temperature, int) else temperature,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "stop_token_ids": tuple(stop_token_ids),
    }
    types = {f.name: f.type for f in msgspec.structs.fields(SamplingParams)}
    for name, value in fields.items():
        _check(name, value, types[name])
    sampling = SamplingParams(**fields)
    if isinstance(prompt, str):
        return Generate(label=label, sampling=sampling, text=prompt)
    if not isinstance(prompt, (list, tuple)):
        raise InvalidRequestError("prompt must be text, a list of token ids or a list of messages", field="prompt")
    if prompt and isinstance(prompt[0], dict):
        messages = []
        for i, message in enumerate(prompt):
            _check(f"prompt[{i}]", message, dict[str, str])
            assert isinstance(message, dict)
            if set(message) != {"role", "content"}:
                raise InvalidRequestError(f"prompt[{i}] must have role and content, nothing else", field="prompt")
            messages.append(ChatMessage(message["role"], message["content"]))
        return Generate(label=label, sampling=sampling, messages=tuple(messages))
    _check("prompt", prompt, {f.name: f.type for f in msgspec.structs.fields(Generate)}["token_ids"])
    return Generate(label=label, sampling=sampling, token_ids=tuple(prompt))  # type: ignore[arg-type]


def _check(name: str, value: Any, kind: Any) -> None:
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as e:
        raise InvalidRequestError(f"{name}: {e}", field=name.partition("[")[0]) from None
