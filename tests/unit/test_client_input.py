"""What a client is asked for and cannot be sent: an InvalidRequestError at the call, before anything travels."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from baton.codec import Codec
from baton.errors import InvalidRequestError
from baton.protocol import MAX_TEXT, ChatMessage, Generate, ToolCall
from baton.sampling_params import StructuredOutput
from router.completion import build_generate

HALF_A_PAIR = "a\ud800b"
"""JSON can carry it, UTF-8 cannot."""


def user(content: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (None, "prompt"),
        (b"bytes", "prompt"),
        ([1.0], "prompt"),
        ([True], "prompt"),
        ([-1], "prompt"),
        ([1 << 31], "prompt"),
        ([1 << 70], "prompt"),
        ([0] * ((1 << 20) + 1), "prompt"),
        ([1, user("x")], "prompt"),
        ([user("x"), 1], "prompt"),
        ([{"role": "user"}], "prompt"),
        ([{"role": "user", "content": "x", "colour": "red"}], "prompt"),
        ([{"role": "user", "content": ["x"]}], "prompt"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "prompt"),
        ([{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f", "arguments": ""}}]}], "prompt"),
        ([{"role": "tool", "content": "x", "tool_call_id": ""}], "prompt"),
        ([user("x", role="")], "prompt"),
        ([user("x", role="r" * 201)], "prompt"),
        ([user(HALF_A_PAIR)], "prompt"),
        ([user("x", role=HALF_A_PAIR)], "prompt"),
        ([user("x" * (MAX_TEXT // 2)), user("y" * (MAX_TEXT // 2))], "prompt"),
        (HALF_A_PAIR, "prompt"),
        ("x" * (MAX_TEXT + 1), "prompt"),
    ],
    ids=range(23),
)
def test_prompts(prompt: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_generate("1", prompt)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


def test_a_conversation_with_tools() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    prompt = [user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    prompt.append({"role": "tool", "content": "a wall", "tool_call_id": "c1", "name": "look"})
    tools = [{"type": "function", "function": {"name": "look"}}]
    made = build_generate("1", prompt, tools=tools, template_options={"deep": True}, session="s", continue_final=False)
    assert made.messages == (
        ChatMessage("user", "x"),
        ChatMessage("assistant", "", (ToolCall("c1", "look", '{"at": 1}'),)),
        ChatMessage("tool", "a wall", tool_call_id="c1", name="look"),
    )
    assert json.loads(made.tools) == tools
    assert (json.loads(made.template_options), made.session) == ({"deep": True}, "s")
    assert build_generate("1", prompt, tools=[]).tools == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", value) for value in (0, -1, 1 << 21, 1 << 70, True, None, "5", 1.5)),
        *(("temperature", value) for value in (math.nan, math.inf, -1, 101, 10**400, True, None, "1")),
        *(("top_p", value) for value in (math.nan, 0, 2, 10**400)),
        *(("seed", value) for value in (-1, 1 << 63, 1 << 64, 1.5, True)),
        *(("stop_token_ids", value) for value in (None, 5, "ab", [-1], [1 << 31], range(2000))),
        *(("stop", value) for value in (5, [1], HALF_A_PAIR, [HALF_A_PAIR])),
        *(("n", value) for value in (0, -1, 1 << 40)),
        *(("presence_penalty", value) for value in (math.nan, 2.1, -3, True, None)),
        *(("repetition_penalty", value) for value in (math.nan, math.inf, 0, -1)),
        *(("logit_bias", value) for value in ({1: 101}, {-1: 1}, {"a": 1}, {1: math.nan}, {1: None}, [1], 5)),
        *(("allowed_token_ids", value) for value in ([], [-1], "ab", 5)),
        *(("bad_token_ids", value) for value in ([[]], [5], ["ab"], [[-1]], None, 5)),
        *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, 21, True, 1.5)),
        *(("structured", value) for value in ("json", {"kind": "json"}, 5)),
        ("structured", StructuredOutput("xml")),  # type: ignore[arg-type]
        ("structured", StructuredOutput("regex", 5)),  # type: ignore[arg-type]
        ("structured", StructuredOutput("choice", choices=("",))),
        ("ignore_eos", 1),
    ],
)
def test_options(name: str, value: Any) -> None:
    options: Any = {name: value}
    with pytest.raises(InvalidRequestError) as caught:
        build_generate("1", [1, 2], **options)
    assert caught.value.field == name


@pytest.mark.parametrize(
    "prompt", ["é🙂\0\u202e", "x" * MAX_TEXT, [0], [(1 << 31) - 1], [user("🙂" * (MAX_TEXT // 2))]]
)
def test_what_can_be_sent_arrives_as_it_was(prompt: Any) -> None:
    codec: Codec[Any] = Codec(Generate)
    message = build_generate("1", prompt, temperature=1, seed=(1 << 63) - 1)
    assert codec.decode(codec.encode(message)) == message


def test_what_is_asked_of_sampling_arrives_as_it_was() -> None:
    codec: Codec[Any] = Codec(Generate)
    options: Any = {"logit_bias": {5: 1}, "allowed_token_ids": [1, 2], "bad_token_ids": [[1, 2], [3]], "logprobs": 0}
    message = build_generate("1", [1], presence_penalty=1, structured=StructuredOutput("regex", "a"), **options)
    assert codec.decode(codec.encode(message)) == message
    assert (message.sampling.bad_token_ids, message.sampling.logit_bias) == (((1, 2), (3,)), {5: 1.0})


def test_structured_output_needs_the_end_of_text() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_generate("1", [1], structured=StructuredOutput("json_object"), ignore_eos=True)
    assert caught.value.field == "ignore_eos"
