"""The formats in which models write calls.

Each says where it is documented. All of JSON's are read with `arguments` and with `parameters`, which models mix up.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Generator

from router.tool_calls.parser import (
    MAX_DEPTH,
    SPACE,
    Malformed,
    Rule,
    ToolParser,
    expect,
    read_json,
    read_literal,
    skip_space,
)


class TaggedParser(ToolParser):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>` for each call: Hermes 2 Pro, Qwen 2.5 and 3, and more.

    In place of the object there may be an array of them, as SmolLM2 writes it. Sources: "Prompt format for function
    calling" in NousResearch/Hermes-Function-Calling, the chat template of Qwen/Qwen2.5-7B-Instruct, "Function
    calling" in the model card of HuggingFaceTB/SmolLM2-1.7B-Instruct.
    """

    starts = "<"

    def call(self) -> Rule:
        character = yield from read_literal((yield), "<tool_call>")
        character = yield from self._calls_json((yield from skip_space(character)))
        return (yield from self._closing(character, "</tool_call>"))


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": "f", "arguments": {...}}]`; since tokenizer version 11 `[TOOL_CALLS]f[ARGS]{...}` a call.

    Version 11 also has `[CALL_ID]...` before `[ARGS]`. Source: `encode_tool_calls` of the versions in mistral-common
    (mistral_common/tokens/tokenizers/instruct.py).
    """

    starts = "["

    def call(self) -> Rule:
        character = yield from skip_space((yield from read_literal((yield), "[TOOL_CALLS]")))
        if character and character in "[{":
            return (yield from self._calls_json(character))
        name = ""
        while character and character not in "[{" + SPACE:
            name += character
            character = yield
        character = yield from skip_space(character)
        if character == "[":
            character = yield
            if character == "C":
                character = yield from read_literal(character, "CALL_ID]")
                while character and character != "[":
                    character = yield
                expect(character, "[")
                character = yield
            character = yield from skip_space((yield from read_literal(character, "ARGS]")))
        expect(character, "{")
        if not name:
            raise Malformed
        self._start(name, lookahead=1)
        character = yield from read_json(character, self._argue)
        self._recognized(1)
        return character

    def _call_id(self, index: int) -> str:
        """Nine letters and digits: the chat templates of earlier versions refuse others in the next turn."""
        return super()._call_id(index)[-9:]


class LlamaParser(ToolParser):
    """`{"name": "f", "parameters": {...}}` in place of a text, or after `<|python_tag|>`; `;` between several.

    Without the tag only the names of the request's tools make a call of an object. Sources: "JSON based tool calling"
    in Meta's prompt format of Llama 3.1, and its chat template.
    """

    starts = "<"
    starts_first = "{"

    def call(self) -> Rule:
        character = yield
        tagged = character == "<"
        if tagged:
            character = yield from skip_space((yield from read_literal(character, "<|python_tag|>")))
        while True:
            character = yield from skip_space((yield from self._call_json(character, any_name=tagged)))
            if character != ";":
                return character
            character = yield from skip_space((yield))


class JsonParser(ToolParser):
    """A call, or an array of calls, in place of a text: what `forced_calls` asks for, whatever the model's format."""

    starts_first = "{["

    def call(self) -> Rule:
        return (yield from self._calls_json((yield), any_name=False))


class PythonicParser(ToolParser):
    """`[f(a=1, b="x"), g()]` in place of a text: Llama 3.2 and 4, ToolACE and others.

    Arguments are literals of Python and are told as JSON, each when it is complete. Source: "Zero-shot function
    calling" in Meta's prompt format of Llama 3.2.
    """

    starts_first = "["

    def call(self) -> Rule:
        yield  # the bracket
        while True:
            name = ""
            character = yield from skip_space((yield))
            while character and character not in "(" + SPACE:
                name += character
                character = yield
            expect(character, "(")
            if name not in self._names:
                raise Malformed
            yield from self._arguments(name)
            character = yield from skip_space((yield))
            if character != ",":
                break
        return (yield from self._closing(character, "]"))

    def _arguments(self, function: str) -> Rule:
        """From behind the parenthesis to the one that closes it. The call is told of with its first argument."""
        names: set[str] = set()
        character = yield from skip_space((yield))
        while character != ")":
            name = ""
            while character and (character.isalnum() or character == "_"):
                name += character
                character = yield
            expect((yield from skip_space(character)), "=")
            if not name or name in names:
                raise Malformed
            literal, character = yield from _read_python()
            value = _as_json(literal)
            if not names:
                self._start(function, lookahead=1)
            self._argue(f"{', ' if names else '{'}{json.dumps(name)}: {value}", 1)
            names.add(name)
            if character == ",":
                character = yield from skip_space((yield))
        if not names:
            self._start(function, lookahead=0)
        self._argue("}" if names else "{}")
        return ""


def _read_python() -> Generator[None, str, tuple[str, str]]:
    """A value's text, up to the comma or parenthesis after it, and that."""
    text, depth, quote = "", 0, ""
    while True:
        character = yield
        if not character:
            raise Malformed
        if quote:
            if character == "\\":
                text += character
                character = yield
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif depth == 0 and character in ",)":
            return text, character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if depth > MAX_DEPTH:
            raise Malformed
        text += character


def _as_json(literal: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # escapes that Python does not know
            text = json.dumps(ast.literal_eval(literal.strip()), ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise Malformed from None
    return text
