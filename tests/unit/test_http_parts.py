"""The parts of OpenAI's API that are plain functions: fields to sampling, conversations, names, errors, token names."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from baton.sampling_params import StructuredOutput, TokenLogprobs
from router.http.conversation import conversation_of, tools_json
from router.http.errors import ApiError, from_baton, from_decoding
from router.http.logprobs import LogprobsWriter, Place, TokenNames, join
from router.http.models import DEMO_NAME, name_of
from router.http.operations import CountAnswers
from router.http.parameters import (
    COMPLETION_NAMES,
    UNSUPPORTED,
    refuse_unsupported,
    sampling_of,
    stop_of,
    structured_of,
)
from router.http.schema import ChatCompletionRequest, CompletionRequest
from router.http.serving import read_json
from router.text import LONG_TEXT, TokenizerText
from tests.fakes_router import LetterText


def completion(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"prompt": "x", **fields}, CompletionRequest)


def chat(*messages: dict[str, Any], **fields: Any) -> ChatCompletionRequest:
    turns = messages or ({"role": "user", "content": "hi"},)
    return msgspec.convert({"messages": list(turns), **fields}, ChatCompletionRequest)


def sampling(body: Any, text: Any = None) -> Any:
    return sampling_of(body, text or LetterText(), max_tokens=5, logprobs=None, prompt_logprobs=None, structured=None)


# --- sampling ----------------------------------------------------------------------------------------


def test_every_field_of_vllm_reaches_sampling() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "min_tokens": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "seed": 3,
    }
    found = sampling(completion(**fields, logit_bias={5: 1}, stop_token_ids=[4], allowed_token_ids=[5, 6]))
    assert {name: getattr(found, name) for name in fields} == fields
    assert (found.logit_bias, found.stop_token_ids, found.allowed_token_ids) == ({5: 1.0}, (4,), (5, 6))


def test_defaults_are_openais() -> None:
    found = sampling(completion())
    assert (found.temperature, found.top_p, found.top_k, found.seed) == (1.0, 1.0, 0, None)
    assert completion().max_tokens == 16
    assert chat().max_tokens is None


def test_token_ids_come_as_keys_of_json() -> None:
    body = msgspec.json.decode('{"prompt": "x", "logit_bias": {"12": -100}}', type=CompletionRequest)
    assert body.logit_bias == {12: -100.0}


def test_bad_words_are_banned_at_the_start_and_after_a_space() -> None:
    class Words(LetterText):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens
            return {"cat": [1], " cat": [2], "catnip": [1, 9], " catnip": [5]}[text]

    assert sampling(completion(bad_words=["cat", " catnip"]), Words()).bad_token_ids == ((1,), (2,), (1, 9))


def test_stop_is_one_or_several() -> None:
    assert [stop_of(completion(stop=stop)) for stop in (None, "a", ["a", "b"], [])] == [(), ("a",), ("a", "b"), ()]


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_not_supported_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    kind: Any = chat if name in ChatCompletionRequest.__struct_fields__ else completion
    for nothing in (None, *UNSUPPORTED[name]):
        refuse_unsupported(kind(**{name: nothing}))
    with pytest.raises(ApiError, match=f"^{name} is not supported") as caught:
        refuse_unsupported(kind(**{name: "something"}))
    assert caught.value.detail.param == name
    assert caught.value.status == 400


# --- structured output -------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "form", "name"),
    [
        ({}, None, ""),
        ({"response_format": {"type": "text"}}, None, ""),
        ({"response_format": {"type": "json_object"}}, StructuredOutput.json_object(), "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            StructuredOutput.json(SCHEMA),
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput.json(SCHEMA), "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput.regex("a+"), "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, StructuredOutput.choice(["a"]), "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "g"}}, StructuredOutput.grammar("g"), "structured_outputs.grammar"),
        (
            {"structured_outputs": {"json_object": True}},
            StructuredOutput.json_object(),
            "structured_outputs.json_object",
        ),
        ({"guided_json": json.dumps(SCHEMA)}, StructuredOutput.json(json.dumps(SCHEMA)), "guided_json"),
        ({"guided_regex": "a"}, StructuredOutput.regex("a"), "guided_regex"),
        ({"guided_choice": ["a", "b"]}, StructuredOutput.choice(["a", "b"]), "guided_choice"),
        ({"guided_grammar": "g"}, StructuredOutput.grammar("g"), "guided_grammar"),
    ],
)
def test_forms(fields: dict[str, Any], form: StructuredOutput | None, name: str) -> None:
    assert structured_of(completion(**fields)) == (form, name)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a" * 70000}, "guided_regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ],
)
def test_forms_that_are_none(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        structured_of(completion(**fields))
    assert caught.value.detail.param == param


# --- conversations -----------------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_a_conversation_with_all_roles() -> None:
    source = conversation_of(
        chat(
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "tool_calls": [CALL], "content": None},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "assistant", "content": "The answer"},
            continue_final_message=True,
            chat_template_kwargs={"enable_thinking": False},
            reasoning_effort="low",
        ),
        "",
        "",
    )
    messages = source.messages or ()
    assert [m.role for m in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [m.content for m in messages] == ["be brief", "a\nb", "", "42", "The answer"]
    assert (messages[1].name, messages[3].tool_call_id) == ("Ann", "c1")
    assert [(c.id, c.name, c.arguments) for c in messages[2].tool_calls] == [("c1", "f", "{}")]
    assert source.continue_final
    assert json.loads(source.template_options) == {"enable_thinking": False, "reasoning_effort": "low"}


def test_developers_are_named_to_templates_that_know_them() -> None:
    source = conversation_of(chat({"role": "developer", "content": "x"}), "if role == 'developer'", "")
    assert [m.role for m in source.messages or ()] == ["developer"]


def test_no_turn_is_begun_where_none_is_wanted() -> None:
    source = conversation_of(chat(add_generation_prompt=False), "", "")
    assert json.loads(source.template_options) == {"add_generation_prompt": False}


def test_tools_are_shown_without_what_models_do_not_know() -> None:
    function = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
    body = chat(tools=[{"type": "function", "function": function}, {"type": "function", "function": {"name": "g"}}])
    assert json.loads(tools_json(body)) == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "g"}},
    ]
    assert tools_json(chat()) == ""


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "system"}, "messages[0].content"),
    ],
)
def test_turns_that_are_none(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        conversation_of(chat(message), "", "")
    assert caught.value.detail.param == param


# --- names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("demo", DEMO_NAME),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/models/Llama-3.2-1B", "Llama-3.2-1B"),
        ("/models/Llama-3.2-1B/", "Llama-3.2-1B"),
        ("./here/tiny", "tiny"),
        ("~/tiny.Q4_0.gguf", "tiny.Q4_0"),
    ],
)
def test_a_model_without_a_name_is_called_after_its_source(source: str, name: str) -> None:
    assert name_of(source) == name


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("{}", "prompt"),
        ('{"prompt": 5}', "prompt"),
        ('{"prompt": "x", "stream_options": {"include_usage": 1}}', "stream_options.include_usage"),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias"),
        ("[]", None),
        ("{", None),
    ],
)
def test_a_body_that_cannot_be_read_names_its_field(body: str, param: str | None) -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(body, type=CompletionRequest)
    error = from_decoding(caught.value)
    assert (error.status, error.detail.param) == (400, param)
    assert "$" not in error.detail.message
    assert "`" not in error.detail.message


def test_an_error_speaks_of_the_clients_fields() -> None:
    error = from_baton("invalid_request", "token_ids[3] is 9, my_token_ids too", "token_ids", COMPLETION_NAMES)
    assert error.detail.param == "prompt"
    assert error.detail.message == "prompt[3] is 9, my_token_ids too"
    assert json.loads(error.body) == {
        "error": {
            "message": "prompt[3] is 9, my_token_ids too",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "invalid_value",
        }
    }


def test_what_does_not_fit_is_told_in_words_that_clients_look_for() -> None:
    names = {"max_tokens": "max_completion_tokens"}
    error = from_baton("request_too_large", "prompt + max_tokens 9: lower max_tokens", "max_tokens", names)
    assert (error.detail.param, error.detail.code) == ("max_completion_tokens", "context_length_exceeded")
    assert "maximum context length" in error.detail.message
    assert error.detail.message.endswith("prompt + max_completion_tokens 9: lower max_completion_tokens")
    other = from_baton("request_too_large", "too many", "prompt_logprobs", names)
    assert (other.status, other.detail.code) == (400, "invalid_value")


def test_when_to_try_again_is_whole_seconds_and_never_at_once() -> None:
    for after, header in ((None, "1"), (0.0, "1"), (2.3, "3")):
        error = from_baton("overloaded", "full", None, {}, retry_after_s=after)
        assert (error.status, error.headers["retry-after"]) == (429, header)


# --- what is counted ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("sends", "fails", "status"), [(200, False, 200), (None, False, 499), (None, True, 500)])
def test_an_answer_is_counted_and_so_is_who_left_before_it(sends: int | None, fails: bool, status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if sends is not None:
            await send({"type": "http.response.start", "status": sends, "headers": []})
        if fails:
            raise RuntimeError("a bug")

    async def ask() -> None:
        async def nobody(*_: Any) -> Any: ...

        await CountAnswers(app, counts)({"type": "http", "method": "BREW"}, nobody, nobody)

    counts: Counter[tuple[str, str, int]] = Counter()
    try:
        asyncio.run(ask())
    except RuntimeError:
        assert fails
    assert counts == {("none", "other", status): 1}


# --- tokens ------------------------------------------------------------------------------------------


def test_parts_of_characters_are_bytes_and_stand_where_their_character_begins() -> None:
    class Bytes(LetterText):
        def token_bytes(self, token_id: int) -> bytes:
            return [b"a", b"\xe2\x82", b"\xac", b"b"][token_id]

    writer = LogprobsWriter(TokenNames(Bytes()), 0, as_ids=False)
    entries = [TokenLogprobs(i, -1.0, 1) for i in range(4)]
    place = Place()
    logprobs = writer.completion(range(4), entries, place)
    assert (logprobs.text_offset, place.offset) == ([0, 1, 1, 2], 3)
    assert logprobs.tokens[1] == "\ufffd"
    assert [entry.bytes for entry in writer.chat(range(4), entries).content] == [[97], [226, 130], [172], [98]]


@pytest.mark.parametrize(
    ("pieces", "offsets"),
    [
        ([b"\xe2", b"b", b"c"], [0, 1, 2]),
        ([b"\xe2\x82", b"\xe2\x82\xac", b"b"], [0, 1, 2]),
        ([b"\xe2", b"\xe2", b"\x82", b"\xac", b"b"], [0, 1, 1, 1, 2]),
        ([b"\xe0", b"\x80", b"b"], [0, 1, 2]),
        ([b"\xef\xbf", b"\xbd", b"b"], [0, 0, 1]),
        ([b"\xff", b"\xf0\x9f", b"", b"\x98\x80b", b"c"], [0, 1, 1, 1, 3]),
    ],
)
def test_what_does_not_go_on_with_a_character_begins_behind_it(pieces: list[bytes], offsets: list[int]) -> None:
    place, text = Place(), b"".join(pieces).decode("utf-8", "replace")
    assert [place.pass_by(data) for data in pieces] == offsets
    place.end_text()
    assert place.offset == len(text)


def test_offsets_are_those_in_the_text_that_is_shown() -> None:
    class Words(LetterText):
        words = ("<s>", "a", "<e>", "b")

        def token_bytes(self, token_id: int) -> bytes:
            return self.words[token_id].encode()

        def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
            return "".join(self.words[i] for i in token_ids if i % 2 or not skip_special_tokens)

    names, entries = TokenNames(Words()), [None] * 4
    hides = LogprobsWriter(names, 0, as_ids=False)
    shows = LogprobsWriter(names, 0, as_ids=False, shows_special=True)
    assert hides.completion(range(4), entries, Place()).text_offset == [0, 0, 1, 1]  # ab
    assert shows.completion(range(4), entries, Place()).text_offset == [0, 3, 4, 7]  # <s>a<e>b
    # A prompt's text is the client's: what the tokenizer put before it is no part of it, what it wrote itself is.
    assert hides.completion(range(4), entries, Place(), "a<e>b").text_offset == [0, 0, 1, 4]
    assert shows.completion(range(4), entries, Place(), "<s>ab").text_offset == [0, 3, 4, 4]


def test_a_prompt_that_ends_in_a_character_is_not_gone_on_with() -> None:
    class Bytes(LetterText):
        def token_bytes(self, token_id: int) -> bytes:
            return bytes([token_id])

    writer, place = LogprobsWriter(TokenNames(Bytes()), 0, as_ids=False), Place()
    prompt = writer.completion([0x61, 0xE2, 0x82], [None] * 3, place, "a\ufffd")
    place.end_text()
    answer = writer.completion([0xAC, 0x62], [None] * 2, place)
    assert join([prompt, answer]).text_offset == [0, 1, 1, 2, 3]  # a U+FFFD, U+FFFD b
    assert join([prompt, answer]).tokens == ["a", *["\ufffd"] * 3, "b"]


def test_nobody_looks_for_garbage_while_json_is_read() -> None:
    looked: list[str] = []
    gc.callbacks.append(lambda phase, info: looked.append(phase))
    try:
        assert len(read_json(msgspec.json.decode, b"[" + b"[]," * 50_000 + b"[]]")) == 50_001
        assert looked == []
        with pytest.raises(ApiError):
            read_json(msgspec.json.decode, b"[")
        assert gc.isenabled()
    finally:
        gc.callbacks.pop()


def test_a_long_text_is_encoded_beside_what_other_threads_do() -> None:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = TokenizerText.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    prompt = "of the people " * 10_000
    assert len(prompt) > LONG_TEXT
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(text.encode, prompt)
        turns = 0
        while not encoding.done():
            turns += 1  # each takes the interpreter's lock, which a thread that does not let go of it has for 5 ms
            time.sleep(0)
        ids = encoding.result()
    assert text.decode(ids) == prompt
    assert turns > 200
