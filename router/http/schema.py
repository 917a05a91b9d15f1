"""What OpenAI's clients send: the bodies of `/v1/completions` and `/v1/chat/completions`, with vLLM's extra fields.

Plain data with types and ranges; unknown fields are ignored, as OpenAI-compatible servers do, and null means the
default. What several fields mean together is checked where they are read (`router.http.parameters`). Must not know
HTTP or the router.

Defaults are OpenAI's (temperature 1, top_p 1, 16 tokens of a completion), whatever the model's
`generation_config.json` says: what a request asks for is in the request.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from baton.protocol import MAX_TEXT, Priority
from baton.sampling_params import MAX_LOGPROBS, MAX_PROMPT_TOKENS, LogitBias, Penalty, TokenId

MAX_PROMPTS = 1024
"""Prompts of one request."""
MAX_MESSAGES = 10_000
MAX_TOOLS = 128

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
ShortText = Annotated[str, msgspec.Meta(max_length=200)]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
PromptItem = str | TokenId | list[TokenId]
MaxTokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
NumLogprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
Session = Annotated[str, msgspec.Meta(max_length=1024)]


class StreamOptions(msgspec.Struct, frozen=True):
    """How a stream is told."""

    include_usage: bool | None = None
    """A last chunk with the usage of all, and no choices."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk (vLLM's)."""


class JsonSchema(msgspec.Struct, frozen=True):
    """Of `response_format`."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's way to say the form; exactly one of them."""

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    """Not supported."""


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of request have. Null: the default."""

    model: str | None = None
    """One of the names in `/v1/models`; missing: the only model that there is."""
    # OpenAI's
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, LogitBias], msgspec.Meta(max_length=1024)] | None = None
    """By token id."""
    max_tokens: MaxTokens | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopString | Annotated[list[StopString], msgspec.Meta(max_length=64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    user: Session | None = None
    """Names the session, for policies that keep one together, where neither the header `x-session-id` nor `session_id`
    does."""
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] | None = None
    """-1 and 0: off."""
    min_p: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=1000)] | None = None
    min_tokens: MaxTokens | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Of no consequence to the tokenizers that there are."""
    prompt_logprobs: NumLogprobs | None = None
    allowed_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=1 << 18)] | None = None
    bad_words: Annotated[list[StopString], msgspec.Meta(max_length=512)] | None = None
    priority: Priority | None = None
    """The lower one is served first."""
    request_id: ShortText | None = None
    """The client's own name for it; echoed (as is the header `x-request-id`), and never an identity."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """In log probabilities tokens are called `token_id:7`."""
    add_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Baton's
    session_id: Session | None = None
    """As `user`, and before it."""
    # Known, and refused where they ask for something (`router.http.parameters.UNSUPPORTED`).
    use_beam_search: Any = None
    length_penalty: Any = None
    truncate_prompt_tokens: Any = None
    logprob_token_ids: Any = None
    logits_processors: Any = None
    guided_decoding_backend: Any = None
    cache_salt: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    watermarking: Any = None


class CompletionRequest(Body, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Text | Annotated[list[PromptItem], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]
    """A text, several, token ids, or several lists of them."""
    max_tokens: MaxTokens | None = 16
    """Null: as many as fit. 0 with `echo`: only the prompt."""
    best_of: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    """Only as much as `n`."""
    echo: bool | None = None
    """The prompt before the answer."""
    logprobs: NumLogprobs | None = None
    """Of each token, and so many most probable ones at its place."""
    # Known, and refused where they ask for something.
    suffix: Any = None
    prompt_embeds: Any = None


class ContentPart(msgspec.Struct, frozen=True):
    """Of a message; only text is supported."""

    type: str
    text: Text | None = None
    refusal: Text | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    arguments: Text
    """JSON."""


class MessageToolCall(msgspec.Struct, frozen=True):
    """A call that the assistant asked for, in an earlier turn."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    function: CalledFunction
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[ContentPart] | None = None
    name: ShortText | None = None
    tool_calls: Annotated[list[MessageToolCall], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: ShortText | None = None
    refusal: Text | None = None
    """Of an assistant's turn without content."""
    # Known, and refused where they ask for something.
    audio: Any = None
    function_call: Any = None


class FunctionDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments."""


class Tool(msgspec.Struct, frozen=True):
    """What the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(msgspec.Struct, frozen=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True):
    """This tool, and no other."""

    type: Literal["function"]
    function: FunctionName


class ChatCompletionRequest(Body, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: MaxTokens | None = None
    """Before `max_tokens`; neither: as many as fit."""
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    """Null: `auto` with tools, else `none`."""
    parallel_tool_calls: bool | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    """False: the conversation ends where its last message does."""
    continue_final_message: bool | None = None
    """The answer goes on where the last message ends."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the model's chat template."""
    reasoning_effort: Any = None
    """A variable of the chat template; of no consequence where it does not read it."""
    # Known, and refused where they ask for something.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    echo: Any = None
    documents: Any = None
    chat_template: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
