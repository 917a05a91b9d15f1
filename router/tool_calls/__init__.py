"""Tool calls: which format a model writes them in, finding them in its text, making it write them.

`parser_for` knows the format from the model's chat template, `forced_calls` needs none. A parser is fed an answer's
text and tells of content and calls (`events.py`). The formats are in `formats.py`, what they share in `parser.py`.

Pure. Must not know HTTP or tokens; text keeps special tokens that are `MARKERS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.errors import InvalidRequestError
from baton.sampling_params import MAX_CONSTRAINT, StructuredOutput
from router.tool_calls.events import CallArguments, CallStart, Content, ToolEvent
from router.tool_calls.formats import JsonParser, LlamaParser, MistralParser, PythonicParser, TaggedParser
from router.tool_calls.parser import ToolParser

__all__ = [
    "MARKERS",
    "CallArguments",
    "CallStart",
    "Content",
    "ToolEvent",
    "ToolParser",
    "forced_calls",
    "parser_for",
    "shows_tools",
]

MARKERS = frozenset({"<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>"})
"""Tokens that some tokenizers call special, and that calls are found by: they must not be left out of the text."""

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""For llguidance: forced calls are spaced as models see them in training. A small model may else write space only."""
MAX_CALLS = 16
"""In one forced answer."""


def parser_for(chat_template: str, tools_json: str, ids: str = "") -> ToolParser | None:
    """A parser for one answer of a model with this template; None if its format is not known, or without tools.

    `tools_json`: the request's tools, as OpenAI's API has them. `ids`: unique to the answer; calls' ids are made of it.
    """
    names = frozenset(_functions(tools_json))
    kind = _format(chat_template)
    return kind(names, ids) if kind is not None and names else None


def _format(chat_template: str) -> type[ToolParser] | None:
    """By how the template writes the calls of earlier turns, or tells the model to write its own."""
    template = chat_template.replace("\\", "")
    if "[TOOL_CALLS]" in template:
        return MistralParser
    if "<tool_call>" in template:
        # The same tag around other languages: Qwen3-Coder's, GLM 4.5's.
        return None if "<function=" in template or "<arg_key>" in template else TaggedParser
    if "[func_name1(" in template:
        return PythonicParser
    if '"parameters": ' in template and ("<|start_header_id|>" in template or "<|header_start|>" in template):
        return LlamaParser
    return None


def shows_tools(chat_template: str) -> bool:
    """Whether the model is told which tools there are; a template that does not name them leaves them out silently."""
    return "tools" in chat_template


def forced_calls(
    tools_json: str, name: str | None = None, *, parallel: bool = True, ids: str = ""
) -> tuple[StructuredOutput, ToolParser]:
    """For an answer that must call one of the tools (`name`: this one): the form of its text, and who reads that.

    The form is JSON, one call or, with `parallel`, an array of 1 to `MAX_CALLS`; it needs no format of the model's.
    Raises InvalidRequestError if there is no such tool, or the schemas are too long.
    """
    functions = _functions(tools_json)
    if name is not None and name not in functions:
        raise InvalidRequestError(
            f"tool_choice names {name!r}, which is not among the tools: {', '.join(functions) or 'there are none'}",
            field="tool_choice",
        )
    if not functions:
        raise InvalidRequestError("tool_choice asks for a call, and there are no tools", field="tool_choice")
    chosen = [name] if name is not None else list(functions)
    many = parallel and name is None
    path = "#/items/anyOf" if many else "#/anyOf"
    choice: dict[str, Any] = {"anyOf": [_call_schema(n, functions[n], f"{path}/{i}") for i, n in enumerate(chosen)]}
    schema = {"type": "array", "minItems": 1, "maxItems": MAX_CALLS, "items": choice} if many else choice
    schema["x-guidance"] = SPACING
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    if len(text) > MAX_CONSTRAINT:
        raise InvalidRequestError(
            f"the tools' schemas are too long to force a call: {len(text)} characters, at most {MAX_CONSTRAINT}",
            field="tools",
        )
    return StructuredOutput.json(text), JsonParser(frozenset(chosen), ids)


def _call_schema(name: str, parameters: Any, path: str) -> dict[str, Any]:
    """Of one call. `path`: where this schema will lie, as local references are from the document's root."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": name},
            "arguments": _moved(parameters, f"{path}/properties/arguments"),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, path: str) -> Any:
    """The same schema as a part of another one."""
    if isinstance(schema, Mapping):
        return {
            key: value
            if key in ("const", "enum", "default", "examples")
            else f"{path}{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, path)
            for key, value in schema.items()
        }
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [_moved(part, path) for part in schema]
    return schema


class _Function(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | bool | None = None


class _Tool(msgspec.Struct):
    function: _Function


def _functions(tools_json: str) -> dict[str, Any]:
    """Names of the functions, and the schemas of their parameters. Raises InvalidRequestError for what is no tool."""
    if not tools_json:
        return {}
    try:
        tools = msgspec.json.decode(tools_json, type=list[_Tool])
    except (msgspec.DecodeError, RecursionError) as e:
        raise InvalidRequestError(f"tools: {e}", field="tools") from None
    return {
        tool.function.name: {"type": "object"} if tool.function.parameters is None else tool.function.parameters
        for tool in tools
    }
