"""From a chat's fields to what the model's template is given.

Pure. Must not know HTTP, tokens or answers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.protocol import ChatMessage, Generate, ToolCall
from baton.sampling_params import SamplingParams
from router.http.errors import ApiError, invalid
from router.http.schema import ChatCompletionRequest, ContentPart, Message

OWN_VARIABLES = frozenset(
    {
        "add_special_tokens",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""What `chat_template_kwargs` cannot set: arguments of the tokenizer, and what other fields say."""


def conversation_of(body: ChatCompletionRequest, chat_template: str, tools: str) -> Generate:
    """A message with all that says what the prompt is, and nothing else. Raises ApiError.

    `tools`: their JSON; empty: the model is shown none.
    """
    continues = body.continue_final_message or False
    if continues and body.add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt cannot both be set: a turn either goes on or a new one "
            "begins",
            "continue_final_message",
        )
    if body.add_special_tokens:
        raise invalid("add_special_tokens: the chat template adds those that the model expects", "add_special_tokens")
    if body.echo:
        raise invalid("echo is not supported in a chat; use continue_final_message", "echo")
    knows_developer = "developer" in chat_template
    return Generate(
        label="",
        sampling=SamplingParams(),
        messages=tuple(_turn(message, i, knows_developer) for i, message in enumerate(body.messages)),
        tools=tools,
        template_options=_variables(body),
        continue_final=continues,
    )


def tools_json(body: ChatCompletionRequest) -> str:
    """As templates expect them: type, and name, description and parameters of the function; empty: no tools."""
    return msgspec.json.encode(body.tools).decode() if body.tools else ""


def _variables(body: ChatCompletionRequest) -> str:
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in OWN_VARIABLES:
            raise invalid(f"chat_template_kwargs.{name} cannot be set", f"chat_template_kwargs.{name}")
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.add_generation_prompt is False:
        variables["add_generation_prompt"] = False
    return msgspec.json.encode(variables).decode() if variables else ""


def _turn(message: Message, i: int, knows_developer: bool) -> ChatMessage:
    for field in ("audio", "function_call"):
        if getattr(message, field) is not None:
            raise invalid(f"messages[{i}].{field} is not supported", f"messages[{i}].{field}")
    role = message.role
    if role == "developer" and not knows_developer:
        role = "system"  # which it was called before
    if message.tool_calls and role != "assistant":
        raise invalid(f"messages[{i}].tool_calls: only an assistant calls", f"messages[{i}].tool_calls")
    return ChatMessage(
        role=role,
        content=_content(message, i),
        tool_calls=tuple(
            ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _content(message: Message, i: int) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role != "assistant":
            raise _required(f"messages[{i}].content")
        return message.refusal or ""
    return "\n".join(_part(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content))


def _part(part: ContentPart, path: str) -> str:
    if part.type not in ("text", "refusal"):
        raise invalid(f"{path}.type: {part.type!r} is not supported; this model reads text only", f"{path}.type")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise _required(f"{path}.{part.type}")
    return text


def _required(path: str) -> ApiError:
    return invalid(f"{path}: this field is required", path)
