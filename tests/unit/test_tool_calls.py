"""Tool calls in a model's text: each format as it is documented, cut anywhere, broken anywhere, and forced."""

from __future__ import annotations

import ast
import json
import keyword
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from baton.engine.structured import check_structured
from baton.errors import InvalidRequestError
from baton.sampling_params import MAX_CONSTRAINT
from router.text import TokenizerText
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

TEMPLATES = {
    # How each shows a call of an earlier turn, or tells of the format; from the templates themselves.
    "tagged": """{{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}""",
    "mistral": """{{ "[TOOL_CALLS] [" }}{% for tool_call in message["tool_calls"] %}""",
    "llama": """{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{{- '"parameters": ' }}""",
    "pythonic": """{{- 'Respond in the format [func_name1(params_name1=params_value1...), func_name2(params)] ' }}""",
}
NAMES = ["f", "get_weather", "a-b.c"]
TOOLS = json.dumps([{"type": "function", "function": {"name": name, "parameters": {}}} for name in NAMES])


def parser(kind: str, tools: str = TOOLS) -> ToolParser:
    found = parser_for(TEMPLATES[kind], tools, ids="answer") if kind != "json" else forced_calls(tools)[1]
    assert found is not None
    return found


def parsed(kind: str, *pieces: str) -> list[ToolEvent]:
    """All events, joined where one goes on with the other."""
    reader = parser(kind)
    events = [event for piece in pieces for event in reader.push(piece)] + reader.flush()
    return joined(events)


def joined(events: list[ToolEvent]) -> list[ToolEvent]:
    whole: list[ToolEvent] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, Content) and isinstance(last, Content):
            whole[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.index == last.index:
            whole[-1] = CallArguments(event.index, last.fragment + event.fragment)
        else:
            whole.append(event)
    return whole


def short(events: list[ToolEvent]) -> list[Any]:
    """Texts, and `(name, arguments)` of calls; a call without arguments yet: `(name,)`."""
    out: list[Any] = []
    for event in joined(events):
        if isinstance(event, Content):
            out.append(event.text)
        elif isinstance(event, CallStart):
            assert event.index == sum(isinstance(o, tuple) for o in out), "calls are numbered"
            out.append((event.name,))
        else:
            out[-1] = (*out[-1], event.fragment)
    return out


# --- the formats ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("tagged", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", '{"a": 1}')]),
        (
            "tagged",
            'Two.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n'
            '{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n',
            ["Two.\n", ("f", "{}"), ("get_weather", '{"city": "Zürich"}')],
        ),
        # SmolLM2's array
        (
            "tagged",
            '<tool_call>[{"name": "f", "arguments": {"x": [1, 2]}}, {"name": "f", "arguments": {}}]</tool_call>',
            [("f", '{"x": [1, 2]}'), ("f", "{}")],
        ),
        ("tagged", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a": 1}')]),
        ("tagged", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        ("tagged", '<tool_call>{"name": "unheard_of", "arguments": {}}</tool_call>', [("unheard_of", "{}")]),
        ("tagged", '<tool_call>{"name": "f", "arguments": {"s": "a\nb"}}</tool_call>', [("f", '{"s": "a\\nb"}')]),
        ("tagged", '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}', [("f", '{"s": "</tool_call>"}')]),
        ("tagged", '<tool_call>{"name": "f", "arguments": {}} <tool_call>{"name": "f"}', [("f", "{}"), ("f", "{}")]),
        ("tagged", '<tool_call>{"name": "f", "arguments": {}}</tool_call> Done.', [("f", "{}"), " Done."]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "123456789"}]', [("f", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]a-b.c[ARGS]{}', [("f", '{"a": 1}'), ("a-b.c", "{}")]),
        ("mistral", 'Wait.[TOOL_CALLS]f[CALL_ID]x1[ARGS]{"a": 1}', ["Wait.", ("f", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', [("f", '{"a": 1}')]),
        ("llama", '{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
        ("llama", '<|python_tag|>{"type": "function", "name": "other", "parameters": {}}', [("other", "{}")]),
        ("llama", '{"name": "f", "parameters": {}}; {"name": "f", "arguments": {}}', [("f", "{}"), ("f", "{}")]),
        ("llama", '{"name": "f", "parameters": {}}\n{"name": "f"}', [("f", "{}"), ("f", "{}")]),
        (
            "pythonic",
            "[f(a=1, b='it\\'s', c=[True, None, {'k': -1.5}])]",
            [("f", '{"a": 1, "b": "it\'s", "c": [true, null, {"k": -1.5}]}')],
        ),
        ("pythonic", "[f(), get_weather(city=\"a, b)]\")]", [("f", "{}"), ("get_weather", '{"city": "a, b)]"}')]),
        ("json", '[{"name": "f", "arguments": {"a": 1}}]', [("f", '{"a": 1}')]),
        ("json", '{"name":"f","arguments":{}}', [("f", "{}")]),
    ],
)  # fmt: skip
def test_formats(kind: str, text: str, expected: list[Any]) -> None:
    assert short(parsed(kind, text)) == expected


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("tagged", "<tool_call>[]</tool_call>"),
        ("tagged", '<tool_call>{"name": 5}</tool_call>'),
        ("tagged", '<tool_call>{"name": ""}</tool_call>'),
        ("tagged", '<tool_call>{"title": "f"}</tool_call>'),
        ("tagged", '<tool_call>{"name": "f'),
        ("tagged", '<tool_call>{"arguments": {"a": 1}}'),
        ("tagged", "a < b and <tool_calls>, or <tool_call"),
        ("mistral", "[1] and [TOOL_CALLS] maybe"),
        ("mistral", "[TOOL_CALLS][ARGS]{}"),
        ("llama", '{"name": "Ada", "parameters": {}}'),
        ("llama", 'Here: {"name": "f", "parameters": {}}'),
        ("llama", "<|python_tag|>print(1)"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[f(x) for x in y]"),
        ("pythonic", "[f(a=b)]"),
        ("pythonic", "[f(a={1, 2})]"),
        ("pythonic", "[f(a=1e999)]"),
        ("pythonic", "[f(a='\\ud800')]"),
        ("pythonic", "[f(a=" + "(" * 500),
        ("pythonic", "[unheard_of(a=1)]"),
        ("json", "plain words"),
        ("tagged", " \n "),
        ("tagged", ""),
    ],
)
def test_what_is_no_call_is_content(kind: str, text: str) -> None:
    assert parsed(kind, text) == ([Content(text)] if text else [])


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("tagged", '<tool_call>{"name": "f", "arguments": {"a": oops}}', [("f", '{"a": '), "oops}}"]),
        ("tagged", '<tool_call>{"name": "f", "arguments": {"a": 1', [("f", '{"a": 1')]),
        (
            "tagged",
            '<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call><tool_call>{"name": "f"}',
            [("f", '{"a" '), "1}}</tool_call>", ("f", "{}")],
        ),
        ("tagged", "<tool_call> <tool_call>" + '{"name": "f"}', ["<tool_call> ", ("f", "{}")]),
        ("pythonic", "[f(a=1, b=c)]", [("f", '{"a": 1'), ", b=c)]"]),
        ("tagged", '<tool_call>{"name": "f", "arguments": ' + "[" * 300, [("f", "[" * 128), "[" * 172]),
    ],
)
def test_what_breaks_within_a_call_goes_on_as_content(kind: str, text: str, expected: list[Any]) -> None:
    assert short(parsed(kind, text)) == expected


def test_arguments_are_told_as_they_come() -> None:
    reader = parser("tagged")
    pieces = ["<tool_call>", '{"name": "get_', 'weather", "argu', 'ments": {"city": "Par', 'is", "days": 1', "2}", "}"]
    told = [reader.push(piece) for piece in pieces]
    assert told[:2] == [[], []]
    assert [type(event) for event in told[2]] == [CallStart]
    assert told[3:] == [
        [CallArguments(0, '{"city": "Par')],
        [CallArguments(0, 'is", "days": ')],  # whether more digits follow is not known
        [CallArguments(0, "12}")],
        [],
    ]


def test_content_waits_only_while_it_may_start_a_call() -> None:
    reader = parser("tagged")
    assert reader.push("one ") == [Content("one ")]
    assert reader.push("a <tool") == [Content("a ")]
    assert reader.push("box> b") == [Content("<toolbox> b")]


def test_ids_depend_on_the_answer_and_the_call_only() -> None:
    def ids(kind: str, answer: str) -> list[str]:
        text = {"tagged": '<tool_call>{"name": "f"}' * 2, "mistral": "[TOOL_CALLS]f[ARGS]{}" * 2}[kind]
        reader = parser_for(TEMPLATES[kind], TOOLS, answer)
        assert reader is not None
        return [event.id for event in reader.push(text) + reader.flush() if isinstance(event, CallStart)]

    assert ids("tagged", "x") == ids("tagged", "x")
    assert len({*ids("tagged", "x"), *ids("tagged", "y")}) == 4
    assert all(call.startswith("call_") and len(call) == 29 for call in ids("tagged", "x"))
    # Mistral's templates refuse ids of another form in the next turn.
    assert all(len(call) == 9 and call.isalnum() for call in ids("mistral", "x"))
    assert len({*ids("mistral", "x"), *ids("mistral", "y")}) == 4


# --- any text, cut anywhere -------------------------------------------------------------------------

HARD = st.sampled_from(["</tool_call>", "[ARGS]", '"}', "\\", "')]", "\n"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | HARD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc_", min_size=1), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_][a-z_0-9]{0,5}", fullmatch=True), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


def written(kind: str, calls: list[tuple[str, dict[str, Any]]], *, indent: int | None, ascii_only: bool) -> str:
    """As a model of this format writes them."""
    key = "parameters" if kind == "llama" else "arguments"
    objects = [
        json.dumps({"name": name, key: arguments}, indent=indent, ensure_ascii=ascii_only) for name, arguments in calls
    ]
    match kind:
        case "tagged":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        case "llama":
            return "; ".join(objects)
        case "pythonic":
            shown = (f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls)
            return f"[{', '.join(shown)}]"
    return f"[{','.join(objects)}]"


@st.composite
def cut(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[str]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


@given(
    st.sampled_from(["tagged", "mistral", "llama", "pythonic", "json"]),
    CALLS,
    st.sampled_from([None, 2]),
    st.booleans(),
    st.data(),
)
def test_what_a_model_writes_is_read_however_it_is_cut(
    kind: str, calls: list[tuple[str, dict[str, Any]]], indent: int | None, ascii_only: bool, data: st.DataObject
) -> None:
    text = written(kind, calls, indent=indent, ascii_only=ascii_only)
    pieces = data.draw(cut(st.just(text)))
    found = [(name, json.loads(arguments)) for name, arguments in short(parsed(kind, *pieces))]
    assert found == calls


FRAGMENTS = st.lists(
    st.sampled_from([
        "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "{", "}", "[",
        "]", '{"name": "f"', '{"name": "f", "arguments": ', '"arguments": ', '"name": ', '"f"', ": ", ", ", '{"a": 1}',
        "[f(", "a=1", "a='", "get_weather(", ")", "'", '"', "\\", " ", "\n", "; ", "1", "-", "true", "word",
        "[f(a=[",
    ])
    | st.text(max_size=3),
    max_size=14,
).map("".join)  # fmt: skip


@given(st.sampled_from([*TEMPLATES, "json"]), cut(FRAGMENTS))
@example("tagged", ['<tool_call>{"name": "f", "arguments": 12', ""])
@example("mistral", ["[TOOL_CALLS]f[CALL_ID]", "[ARGS]{}"])
def test_any_text_reads_the_same_however_it_is_cut(kind: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    events = parsed(kind, *pieces)
    assert events == parsed(kind, text)
    assert events == parsed(kind, *text)


@given(st.sampled_from([*TEMPLATES, "json"]), FRAGMENTS)
def test_nothing_is_lost(kind: str, text: str) -> None:
    """Without a call all of the text is content; with one, words still show up as often as they were written."""
    events = parsed(kind, text)
    told = "".join(
        event.text if isinstance(event, Content) else event.name if isinstance(event, CallStart) else event.fragment
        for event in events
    )
    if not any(isinstance(event, CallStart) for event in events):
        assert told == text
    left_out = "[CALL_ID]" in text or any(text.count(key) > 1 for key in ('"name"', '"arguments"'))
    if not left_out:  # a call's own id, and keys that it has already
        assert told.count("word") == text.count("word")


@given(ARGUMENTS.filter(lambda arguments: not any(map(keyword.iskeyword, arguments))))
def test_arguments_of_python_are_told_as_json(arguments: dict[str, Any]) -> None:
    text = written("pythonic", [("f", arguments)], indent=None, ascii_only=False)
    call = ast.parse(text, mode="eval").body.elts[0]  # type: ignore[attr-defined]
    expected = {given.arg: ast.literal_eval(given.value) for given in call.keywords}
    assert json.loads(short(parsed("pythonic", text))[0][1]) == expected


# --- which format -----------------------------------------------------------------------------------


def test_the_template_tells_the_format() -> None:
    kinds = {kind: type(parser_for(template, TOOLS)).__name__ for kind, template in TEMPLATES.items()}
    assert kinds == {
        "tagged": "TaggedParser",
        "mistral": "MistralParser",
        "llama": "LlamaParser",
        "pythonic": "PythonicParser",
    }


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{% for message in messages %}{{ message.content }}{% endfor %}",
        "<tool_call>\\n<function=example_function_name>\\n<parameter=example>",  # Qwen3-Coder
        "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>",  # GLM 4.5
    ],
)
def test_other_templates_have_no_parser(template: str) -> None:
    assert parser_for(template, TOOLS) is None


def test_without_tools_nothing_is_looked_for() -> None:
    assert parser_for(TEMPLATES["tagged"], "") is None
    assert parser_for(TEMPLATES["tagged"], "[]") is None
    with pytest.raises(InvalidRequestError, match="tools"):
        parser_for(TEMPLATES["tagged"], '[{"type": "function"}]')


def test_a_template_without_tools_is_known() -> None:
    assert shows_tools("{%- if tools %}...{% endif %}")
    assert not shows_tools("{% for message in messages %}{{ message.content }}{% endfor %}")


# --- special tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("byte_level", [True, False])
def test_special_tokens_that_mark_calls_stay_in_the_text(byte_level: bool) -> None:
    """Hermes 2 Pro's tokenizer calls its tags special, Mistral's and Llama's are; the end of a turn is left out."""
    alphabet = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(alphabet, []))
    if byte_level:
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = ByteLevelDecoder()
    marks = ["<tool_call>", "</tool_call>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    text = TokenizerText.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>"))
    ids = text.encode("<tool_call>{}</tool_call><|im_end|>")
    assert len(ids) == 5
    assert text.decode(ids).replace(" ", "") == "<tool_call>{}</tool_call>"
    streamed = text.detokenizer()
    assert (streamed.push(ids) + streamed.flush()).replace(" ", "") == "<tool_call>{}</tool_call>"
    assert text.decode(ids, skip_special_tokens=False).replace(" ", "").endswith("<|im_end|>")


def test_a_template_among_several_is_the_one_for_tools() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0}, [])))
    assert TokenizerText.from_tokenizer(tokenizer).chat_template == ""
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    assert TokenizerText.from_tokenizer(tokenizer).chat_template == "with tools"


# --- forced calls -----------------------------------------------------------------------------------

WEATHER = {
    "type": "object",
    "properties": {
        "place": {"$ref": "#/$defs/place"},
        "days": {"type": "integer", "default": {"$ref": "#/no"}, "minimum": 1},
    },
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}
TIME = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/place"}},
    "$defs": {"place": {"type": "string"}},
    "additionalProperties": False,
}
TWO_TOOLS = json.dumps([
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": TIME}},
])  # fmt: skip
GOOD = [
    ("weather", {"place": {"city": "Oslo"}, "days": 2}),
    ("time", {"place": "Oslo"}),
]
BAD = [("weather", {"place": "Oslo"}), ("time", {"place": {"city": "Oslo"}}), ("other", {}), ("weather", {})]


def allows(schema: str, text: str) -> bool:
    """Whether structured output lets the model write this, and then end."""
    matcher = LLMatcher(_byte_tokenizer(), LLMatcher.grammar_from_json_schema(schema))
    return all(matcher.try_consume_tokens([byte]) == 1 for byte in text.encode()) and matcher.is_accepting()


def _byte_tokenizer() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_are_calls_of_the_tools(parallel: bool) -> None:
    form, reader = forced_calls(TWO_TOOLS, parallel=parallel, ids="x")
    check_structured(form)
    for name, arguments in GOOD + BAD:
        call = {"name": name, "arguments": arguments}
        text = json.dumps([call] if parallel else call)
        good = (name, arguments) in GOOD
        assert jsonschema.Draft202012Validator(json.loads(form.text)).is_valid(json.loads(text)) == good, text
        assert allows(form.text, text) == good, text
    text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in GOOD])
    assert allows(form.text, text) == parallel
    assert not allows(form.text, "[]")
    assert [name for name, _ in short(reader.push(text) + reader.flush())] == ["weather", "time"]


def test_a_forced_call_of_one_tool() -> None:
    form, reader = forced_calls(TWO_TOOLS, "time")
    check_structured(form)
    text = '{"name": "time", "arguments": {"place": "Oslo"}}'
    assert allows(form.text, text)
    assert not allows(form.text, '{"name": "weather", "arguments": {"place": {"city": "Oslo"}}}')
    assert not allows(form.text, text.replace(": ", ":  ", 1)), "space is no way to go on for ever"
    assert short(reader.push(text) + reader.flush()) == [("time", '{"place": "Oslo"}')]


def test_forced_calls_without_parameters() -> None:
    form, _ = forced_calls('[{"type": "function", "function": {"name": "f"}}]', "f")
    check_structured(form)
    assert allows(form.text, '{"name": "f", "arguments": {}}')
    assert not allows(form.text, '{"name": "f", "arguments": 3}')


def test_what_cannot_be_forced_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'nobody', which is not among the tools: weather, time") as refused:
        forced_calls(TWO_TOOLS, "nobody")
    assert refused.value.field == "tool_choice"
    with pytest.raises(InvalidRequestError, match="there are no tools"):
        forced_calls("")
    long = {"type": "object", "description": "x" * MAX_CONSTRAINT}
    with pytest.raises(InvalidRequestError, match="too long") as refused:
        forced_calls(json.dumps([{"type": "function", "function": {"name": "f", "parameters": long}}]))
    assert refused.value.field == "tools"
