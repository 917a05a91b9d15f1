"""What clients of OpenAI's API are told, turn by turn: the endpoints over ASGI, and a desk that tests speak through."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from baton.protocol import Delta, Done, Failed, Generate, Usage
from baton.sampling_params import TokenLogprobs
from router.forms import Forms
from router.http import call as call_module
from router.http import serving
from router.http.chat import ChatAnswer
from router.http.completions import CompletionAnswer
from router.http.endpoint import Endpoint
from router.http.schema import ChatCompletionRequest, CompletionRequest
from router.http.serving import Service
from router.text import LONG_TEXT
from router.translator import Translator
from tests.fakes_router import LetterText, Script, config_of

WAIT_S = 20.0
CHAT = [{"role": "user", "content": "hi"}]
QWEN_TEMPLATE = "{{ tools }} <tool_call>"
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
LONG_CALL = {"id": "c", "function": {"name": "f", "arguments": "a" * LONG_TEXT}}


class Desk:
    """Remembers what clients want; what they are told is up to the test."""

    def __init__(self, *worker_ids: str):
        self.text = LetterText()
        self.core = Script(*worker_ids).core
        self.translator = Translator(self.core, self.text)
        self.forms = Forms(lambda call: call())
        self.requests: list[Generate] = []
        self.prompts: list[tuple[int, ...]] = []
        self.request_ids: list[str] = []
        self.sinks: list[Any] = []
        self.left: list[Any] = []
        self.refusal: Failed | None = None

    def generate(
        self, sink: Any, message: Generate, received_at: float, *, prompt: tuple[int, ...], request_id: str
    ) -> None:
        self.requests.append(message)
        self.prompts.append(prompt)
        self.request_ids.append(request_id)
        self.sinks.append(sink)
        if self.refusal is not None:
            sink.on_message(self.refusal)

    def leave(self, sink: Any) -> None:
        self.left.append(sink)


class Exchange:
    """One request over ASGI. `told`: waits until the server has nothing more to do at once, and parses what it sent."""

    def __init__(self, desk: Desk, app: Endpoint[Any], body: Any, headers: dict[str, str]):
        self.desk = desk
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.ended = False
        self.sent: list[bytes] = []
        self.reads = asyncio.Event()
        """The client reads; else writes wait."""
        self.reads.set()
        self._gone = asyncio.Event()
        self._body: bytes | None = body if isinstance(body, bytes) else json.dumps(body).encode()
        scope = {"type": "http", "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}
        self.task = asyncio.get_running_loop().create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            assert self.status is None
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            return
        assert self.status is not None
        assert not self.ended
        self.sent.append(message["body"])
        self.ended = not message.get("more_body", False)

    def hang_up(self) -> None:
        self._gone.set()

    async def settle(self) -> None:
        for _ in range(20):  # every step that is ready has been taken by then: nothing here waits for another thread
            await asyncio.sleep(0)

    async def begun(self, num_requests: int = 1) -> Any:
        """The sink, once the requests are at the desk."""
        async with asyncio.timeout(WAIT_S):
            while len(self.desk.sinks) < num_requests:
                assert not self.task.done(), self.sent
                await asyncio.sleep(0)
        return self.desk.sinks[0]

    async def writes(self) -> list[list[Any]]:
        """The chunks of each write since the last call."""
        await self.settle()
        sent, self.sent = self.sent, []
        return [[_event(e) for e in data.decode().split("\n\n")[:-1]] for data in sent if data]

    async def chunks(self) -> list[Any]:
        return [chunk for write in await self.writes() for chunk in write]

    async def answer(self) -> Any:
        """The whole answer."""
        async with asyncio.timeout(WAIT_S):
            await self.task
        assert self.ended
        return json.loads(b"".join(self.sent))


def _event(text: str) -> Any:
    assert text.startswith("data: ")
    data = text.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


class Rig:
    def __init__(self, *worker_ids: str, template: str = ""):
        self.desk = Desk(*(worker_ids or ("p0", "d0")))
        self.desk.text.chat_template = template
        desk: Any = self.desk
        service = Service(config_of(http__model_names=["m", "alias"]), desk)
        self._apps: dict[str, Endpoint[Any]] = {
            "chat": Endpoint(service, ChatCompletionRequest, ChatAnswer),
            "completions": Endpoint(service, CompletionRequest, CompletionAnswer),
        }

    def post(self, path: str, *, headers: dict[str, str] | None = None, **body: Any) -> Exchange:
        return Exchange(self.desk, self._apps[path], body, headers or {})

    def post_bytes(self, path: str, body: bytes) -> Exchange:
        return Exchange(self.desk, self._apps[path], body, {})


def drive(test: Callable[[Rig], Awaitable[None]], *worker_ids: str, template: str = "") -> None:
    async def run() -> None:
        await test(Rig(*worker_ids, template=template))

    asyncio.run(run())


def delta(text: str, *, label: str = "0", sample: int = 0, **other: Any) -> Delta:
    return Delta(label, tuple(ord(c) for c in text), text, sample, **other)


def done(label: str = "0", reason: Any = "stop", usage: Usage | None = None, text: str = "") -> Done:
    return Done(label, "r", reason, usage or Usage(3, 2), {}, "p0", "d0", 1, text=text)


def contents(chunks: list[Any], index: int = 0) -> list[str | None]:
    return [
        choice["delta"].get("content")
        for chunk in chunks
        if chunk != "[DONE]"
        for choice in chunk["choices"]
        if choice["index"] == index
    ]


# --- a stream's order ------------------------------------------------------------------------------


def test_nothing_is_sent_before_the_first_token_and_that_one_comes_with_the_role() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, stream=True)
        sink = await exchange.begun()
        await exchange.settle()
        assert exchange.status is None
        sink.on_deltas([delta("a")])
        [first] = await exchange.chunks()
        assert exchange.status == 200
        assert exchange.headers["content-type"].startswith("text/event-stream")
        [choice] = first["choices"]
        assert choice == {
            "index": 0,
            "delta": {"role": "assistant", "content": "a"},
            "logprobs": None,
            "finish_reason": None,
        }
        sink.on_deltas([delta("b")])
        [second] = await exchange.chunks()
        assert second["choices"][0]["delta"] == {"content": "b"}
        sink.on_message(done())
        [last, end] = await exchange.chunks()
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"], end) == ({}, "stop", "[DONE]")
        assert exchange.ended
        assert {chunk["id"] for chunk in (first, second, last)} == {"chatcmpl-" + rig.desk.request_ids[0]}
        assert {chunk["object"] for chunk in (first, second, last)} == {"chat.completion.chunk"}

    drive(test)


def test_a_turn_is_one_write_and_one_chunk_per_choice() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, stream=True, n=2)
        sink = await exchange.begun()
        sink.on_deltas([delta("a"), delta("x", sample=1)])
        [write] = await exchange.writes()
        assert [chunk["choices"][0]["index"] for chunk in write] == [0, 1]
        sink.on_deltas([delta("b")])
        sink.on_message(delta("c", finish_reason="length"))
        [[chunk]] = await exchange.writes()
        assert (chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) == ({"content": "bc"}, "length")
        sink.on_message(delta("", sample=1, finish_reason="stop"))
        sink.on_message(done(usage=Usage(4, 5, 3)))
        [write] = await exchange.writes()
        assert write[0]["choices"][0] == {"index": 1, "delta": {}, "logprobs": None, "finish_reason": "stop"}
        assert write[1:] == ["[DONE]"]

    drive(test)


def test_tokens_without_text_make_no_chunk_unless_tokens_are_asked_for() -> None:
    """A character may take three of them; a chunk that shows nothing would be early, and for nothing."""

    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, stream=True)
        sink = await exchange.begun()
        sink.on_deltas([Delta("0", (200,), "")])
        assert await exchange.chunks() == []
        sink.on_deltas([Delta("0", (201,), "é")])
        [chunk] = await exchange.chunks()
        assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": "é"}
        sink.on_message(done(text="�"))
        [last, _] = await exchange.chunks()
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({"content": "�"}, "stop")

    drive(test)

    async def test_ids(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, stream=True, return_token_ids=True)
        sink = await exchange.begun()
        sink.on_deltas([Delta("0", (120,), "")])
        [chunk] = await exchange.chunks()
        assert chunk["choices"][0]["token_ids"] == [120]
        assert chunk["prompt_token_ids"] == list(rig.desk.prompts[0])
        sink.on_deltas([Delta("0", (121,), "é")])
        sink.on_message(done())
        chunks = await exchange.chunks()
        assert chunks[0]["choices"][0]["token_ids"] == [121]
        assert "prompt_token_ids" not in chunks[0]

    drive(test_ids)


@pytest.mark.parametrize("path", ["chat", "completions"])
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_the_short_way_to_a_chunk_of_text_leads_to_the_same_chunk(path: str, options: dict[str, Any]) -> None:
    """A turn of one choice's text takes it, a turn of two choices' does not."""

    async def test(rig: Rig) -> None:
        exchange = rig.post(path, messages=CHAT, prompt="x", stream=True, n=2, **options)
        sink = await exchange.begun()
        sink.on_deltas([delta("a"), delta("b", sample=1)])
        await exchange.writes()
        for text in ("plain", '"\\\n\x00', "é\u2028🎉"):
            sink.on_deltas([delta(text, sample=1)])
            [short] = await exchange.chunks()
            sink.on_deltas([delta(text, sample=1), delta("c")])
            long, _ = await exchange.chunks()
            assert short == long
            assert list(short) == list(long)
            assert text in (short["choices"][0].get("text"), short["choices"][0].get("delta", {}).get("content"))
        exchange.hang_up()
        await exchange.task

    drive(test)


def test_an_answer_of_no_text_at_all_still_has_a_role() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, stream=True)
        sink = await exchange.begun()
        sink.on_deltas([Delta("0", (2,), "")])
        sink.on_message(done())
        [chunk, _] = await exchange.chunks()
        assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunk["choices"][0]["finish_reason"] == "stop"

    drive(test)


def test_usage_comes_last_without_choices_and_so_far_where_that_is_wanted() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, stream=True, n=2, stream_options={"include_usage": True})
        sink = await exchange.begun()
        sink.on_deltas([delta("a"), delta("b", sample=1)])
        assert [chunk["usage"] for chunk in await exchange.chunks()] == [None, None]
        sink.on_message(delta("c", finish_reason="stop"))
        sink.on_message(delta("d", sample=1, finish_reason="stop"))
        sink.on_message(done(usage=Usage(8, 4, 7)))
        *_, usage, end = await exchange.chunks()
        assert end == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"] == {
            "prompt_tokens": 8,
            "completion_tokens": 4,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},  # the second sample's are the first one's
        }

    drive(test)

    async def test_continuous(rig: Rig) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        exchange = rig.post("completions", prompt="abc", stream=True, stream_options=options)
        sink = await exchange.begun()
        for text in ("x", "yz"):
            sink.on_deltas([delta(text)])
            await exchange.settle()
        usages = [chunk["usage"] for chunk in await exchange.chunks()]
        assert [(u["prompt_tokens"], u["completion_tokens"], u["total_tokens"]) for u in usages] == [
            (3, 1, 4),
            (3, 3, 6),
        ]
        exchange.hang_up()
        await exchange.task

    drive(test_continuous)


def test_what_was_cached_before_the_request_is_told_apart_from_what_its_samples_share() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, n=3)
        sink = await exchange.begun()
        for sample in range(3):
            sink.on_message(delta("a", sample=sample, finish_reason="stop"))
        sink.on_message(done(usage=Usage(8, 3, 4 + 7 + 7)))
        assert (await exchange.answer())["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}

    drive(test)


# --- prompts and choices -----------------------------------------------------------------------------


def test_prompts_are_requests_of_their_own_and_choices_are_counted_through() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("completions", prompt=["ab", "cde"], n=2, max_tokens=3, headers={"x-session-id": "s"})
        sink = await exchange.begun(2)
        assert rig.desk.prompts == [(97, 98), (99, 100, 101)]
        assert [(m.n, m.session, m.sampling.max_tokens) for m in rig.desk.requests] == [(2, "s", 3)] * 2
        assert len(set(rig.desk.request_ids)) == 2
        sink.on_deltas([delta("1", label="1", sample=1)])
        for label in ("1", "0"):
            for sample in range(2):
                sink.on_message(delta(f"{label}{sample}", label=label, sample=sample, finish_reason="length"))
            sink.on_message(done(label, "length", Usage(2 + int(label), 4)))
        answer = await exchange.answer()
        assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "00"), (1, "01"), (2, "10"), (3, "111")]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 8)
        assert answer["id"] == "cmpl-" + rig.desk.request_ids[0]
        assert answer["object"] == "text_completion"

    drive(test)


def test_others_are_served_while_many_prompts_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "START_S", -1.0)

    async def test(rig: Rig) -> None:
        exchange = rig.post("completions", prompt=["a"] * 5)
        seen = set()
        while len(rig.desk.requests) < 5:
            assert not exchange.task.done(), exchange.sent
            seen.add(len(rig.desk.requests))
            await asyncio.sleep(0)
        assert seen >= {1, 2, 3, 4}
        exchange.hang_up()
        await exchange.task

    drive(test)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("ab", [(97, 98)]), ([1, 2], [(1, 2)]), ([[1], [2, 3]], [(1,), (2, 3)]), (["a", "b"], [(97,), (98,)])],
)
def test_kinds_of_prompts(prompt: Any, prompts: list[tuple[int, ...]]) -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("completions", prompt=prompt)
        await exchange.begun(len(prompts))
        assert rig.desk.prompts == prompts
        exchange.hang_up()
        await exchange.task

    drive(test)


def test_a_session_is_named_by_the_header_the_field_or_the_user() -> None:
    async def test(rig: Rig) -> None:
        named = {"user": "u", "session_id": "s"}
        exchanges = [
            rig.post("completions", prompt="x", headers={"x-session-id": "h"}, **named),
            rig.post("completions", prompt="x", **named),
            rig.post("completions", prompt="x", user="u"),
            rig.post("completions", prompt="x"),
        ]
        await exchanges[-1].begun(4)
        assert [m.session for m in rig.desk.requests] == ["h", "s", "u", ""]
        for exchange in exchanges:
            exchange.hang_up()
            await exchange.task

    drive(test)


def test_how_many_tokens_where_nothing_says_so() -> None:
    async def test(rig: Rig) -> None:
        exchanges = [
            rig.post("completions", prompt="ab"),
            rig.post("completions", prompt="ab", max_tokens=None),
            rig.post("chat", messages=CHAT),
            rig.post("chat", messages=CHAT, max_tokens=7),
            rig.post("chat", messages=CHAT, max_tokens=7, max_completion_tokens=9),
        ]
        await exchanges[-1].begun(5)
        limit = rig.desk.core.max_model_len
        asked = [m.sampling.max_tokens for m in rig.desk.requests]
        assert asked == [16, limit - 2, limit - len(rig.desk.prompts[2]), 7, 9]
        for exchange in exchanges:
            exchange.hang_up()
            await exchange.task

    drive(test)


def test_ids_that_fit_nowhere_are_refused_before_each_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rig: Rig) -> None:
        monkeypatch.setattr(rig.desk.text, "decode", None)
        answer = await rig.post("completions", prompt=[[1], [65] * (LONG_TEXT + 1)], echo=True).answer()
        assert answer["error"]["code"] == "context_length_exceeded"
        assert rig.desk.requests == []

    drive(test)


@pytest.mark.parametrize(
    "large",
    [
        {"messages": [{**CHAT[0], "name": "n" * 20}] * 1000},
        {"chat_template_kwargs": {"a": "a" * LONG_TEXT}},
        {"messages": [*CHAT, {"role": "assistant", "tool_calls": [LONG_CALL]}]},
        {"tools": [{**TOOL, "function": {**TOOL["function"], "description": "a" * LONG_TEXT}}]},
    ],
    ids=["messages", "kwargs", "calls", "tools"],
)
def test_a_large_body_is_read_in_another_thread_whatever_makes_it_large(large: dict[str, Any]) -> None:
    async def test(rig: Rig) -> None:
        threads: list[int] = []
        encode = rig.desk.text.encode_messages

        def noting(*args: Any, **parts: Any) -> list[int]:
            threads.append(threading.get_ident())
            return encode(*args, **parts)[:9]

        rig.desk.text.encode_messages = noting  # type: ignore[method-assign]
        for body in ({"messages": CHAT}, {"messages": CHAT, **large}):
            exchange = rig.post("chat", **body)
            sink = await exchange.begun(len(threads) + 1)
            sink.on_message(done(text="a"))
            exchange.hang_up()
            await exchange.task
        here = threading.get_ident()
        assert [thread == here for thread in threads] == [True, False]

    drive(test, template=QWEN_TEMPLATE)


def test_echo_gives_the_prompt_before_the_answer() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("completions", prompt=[104, 105], echo=True, stream=True)
        sink = await exchange.begun()
        sink.on_deltas([delta("a")])
        sink.on_message(done())
        chunks = await exchange.chunks()
        assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["hia"]

    drive(test)

    async def test_alone(rig: Rig) -> None:
        exchange = rig.post("completions", prompt="hi", echo=True, max_tokens=0, logprobs=1)
        sink = await exchange.begun()
        assert rig.desk.requests[0].sampling.max_tokens == 1
        assert rig.desk.requests[0].sampling.prompt_logprobs == 1
        about_prompt = (None, TokenLogprobs(105, -1.5, 2, (106,), (-0.5,)))
        sink.on_deltas(
            [delta("a", logprobs=(TokenLogprobs(97, -1.0, 1, (97,), (-1.0,)),), prompt_logprobs=about_prompt)]
        )
        sink.on_message(done(reason="length"))
        answer = await exchange.answer()
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
        assert choice["logprobs"] == {
            "tokens": ["h", "i"],
            "token_logprobs": [None, -1.5],
            "top_logprobs": [None, {"j": -0.5, "i": -1.5}],
            "text_offset": [0, 1],
        }
        assert answer["usage"]["completion_tokens"] == 0

    drive(test_alone)


def test_a_choice_waits_for_what_is_told_about_its_prompt() -> None:
    """It comes with the first token of sample 0; sample 1 may have one before, and its echo begins with the prompt."""

    async def test(rig: Rig) -> None:
        exchange = rig.post("completions", prompt="hi", echo=True, logprobs=0, n=2, stream=True)
        sink = await exchange.begun()
        entry = TokenLogprobs(97, -1.0, 1)
        sink.on_deltas([delta("a", sample=1, logprobs=(entry,))])
        assert await exchange.chunks() == []
        sink.on_deltas([delta("a", logprobs=(entry,), prompt_logprobs=(None, TokenLogprobs(105, -2.0, 3)))])
        chunks = await exchange.chunks()
        assert sorted(chunk["choices"][0]["index"] for chunk in chunks) == [0, 1]
        for chunk in chunks:
            [choice] = chunk["choices"]
            assert choice["text"] == "hia"
            assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -1.0]
        sink.on_deltas([delta("b", sample=1, logprobs=(entry,))])
        [chunk] = await exchange.chunks()
        assert chunk["choices"][0]["logprobs"]["text_offset"] == [3]
        exchange.hang_up()
        await exchange.task

    drive(test)


# --- log probabilities -------------------------------------------------------------------------------


def test_log_probabilities_of_a_chat() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, logprobs=True, top_logprobs=1, stream=True)
        sink = await exchange.begun()
        assert rig.desk.requests[0].sampling.logprobs == 1
        entries = (TokenLogprobs(97, -1.0, 2, (98,), (-0.25,)), TokenLogprobs(233, float("-inf"), 9, (98,), (-0.5,)))
        sink.on_deltas([Delta("0", (97, 233), "aé", logprobs=entries)])
        sink.on_message(done())
        chunks = await exchange.chunks()
        top = {"token": "b", "bytes": [98]}
        assert chunks[0]["choices"][0]["logprobs"]["content"] == [
            {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": [{**top, "logprob": -0.25}]},
            {"token": "é", "logprob": -9999.0, "bytes": [195, 169], "top_logprobs": [{**top, "logprob": -0.5}]},
        ]

    drive(test)


def test_tokens_can_be_named_by_their_ids_and_places_nobody_told_of_are_kept() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("completions", prompt="x", logprobs=1, return_tokens_as_token_ids=True)
        sink = await exchange.begun()
        sink.on_deltas([delta("ab", logprobs=(None, TokenLogprobs(98, -1.0, 1, (98,), (-1.0,))))])
        sink.on_message(done())
        logprobs = (await exchange.answer())["choices"][0]["logprobs"]
        assert logprobs == {
            "tokens": ["token_id:97", "token_id:98"],
            "token_logprobs": [None, -1.0],
            "top_logprobs": [None, {"token_id:98": -1.0}],
            "text_offset": [0, 1],
        }

    drive(test)


def test_prompt_log_probabilities_are_vllms() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, prompt_logprobs=1)
        sink = await exchange.begun()
        about_prompt = (None, TokenLogprobs(105, -2.0, 3, (106,), (-0.5,)))
        sink.on_deltas([delta("a", prompt_logprobs=about_prompt)])
        sink.on_message(done())
        assert (await exchange.answer())["prompt_logprobs"] == [
            None,
            {
                "105": {"logprob": -2.0, "rank": 3, "decoded_token": "i"},
                "106": {"logprob": -0.5, "rank": 1, "decoded_token": "j"},
            },
        ]

    drive(test)


# --- tools -------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Jena"}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_tool_calls_are_found_in_a_stream(size: int) -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, tools=[TOOL], stream=True)
        sink = await exchange.begun()
        assert json.loads(rig.desk.requests[0].tools or "[]") == []  # the prompt is made of them by now
        chunks = []
        text = "Let me look.\n" + CALL
        for at in range(0, len(text), size):
            sink.on_deltas([delta(text[at : at + size])])
            chunks += await exchange.chunks()
        sink.on_message(done())
        chunks += await exchange.chunks()
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        assert "".join(d.get("content") or "" for d in deltas).strip() == "Let me look."
        calls = [call for d in deltas for call in d.get("tool_calls", ())]
        assert {call["index"] for call in calls} == {0}
        assert calls[0]["function"]["name"] == "weather"
        assert calls[0]["type"] == "function"
        assert calls[0]["id"]
        assert not any("id" in call or "name" in call["function"] for call in calls[1:])
        assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Jena"}
        assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"

    drive(test, template=QWEN_TEMPLATE)


def test_tool_calls_are_found_in_a_whole_answer() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, tools=[TOOL], n=2)
        sink = await exchange.begun()
        sink.on_deltas([delta(CALL + CALL), delta("no call", sample=1)])
        for sample in range(2):
            sink.on_message(delta("", sample=sample, finish_reason="stop"))
        sink.on_message(done())
        first, second = (await exchange.answer())["choices"]
        assert (first["finish_reason"], first["message"]["content"]) == ("tool_calls", None)
        assert [call["function"] for call in first["message"]["tool_calls"]] == [
            {"name": "weather", "arguments": '{"city": "Jena"}'}
        ] * 2
        assert len({call["id"] for call in first["message"]["tool_calls"]}) == 2
        assert (second["finish_reason"], second["message"]["content"]) == ("stop", "no call")
        assert "tool_calls" not in second["message"]

    drive(test, template=QWEN_TEMPLATE)

    async def test_one(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, tools=[TOOL], parallel_tool_calls=False)
        sink = await exchange.begun()
        sink.on_deltas([delta(CALL + CALL)])
        sink.on_message(done())
        [choice] = (await exchange.answer())["choices"]
        assert len(choice["message"]["tool_calls"]) == 1

    drive(test_one, template=QWEN_TEMPLATE)


def test_a_call_can_be_forced_whatever_the_template() -> None:
    async def test(rig: Rig) -> None:
        choice = {"type": "function", "function": {"name": "weather"}}
        exchange = rig.post("chat", messages=CHAT, tools=[TOOL], tool_choice=choice)
        sink = await exchange.begun()
        structured = rig.desk.requests[0].sampling.structured
        assert structured is not None
        assert structured.kind == "json"
        sink.on_deltas([delta('{"name": "weather", "arguments": {"city": "Ulm"}}')])
        sink.on_message(done())
        [choice] = (await exchange.answer())["choices"]
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
        assert choice["finish_reason"] == "tool_calls"

    drive(test)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOL]}, "tools"),
        (
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
    ],
)
def test_tools_that_cannot_be_called_are_refused(body: dict[str, Any], param: str) -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, **body)
        answer = await exchange.answer()
        assert (exchange.status, answer["error"]["param"]) == (400, param)
        assert not rig.desk.requests

    drive(test)


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failed", "status", "code"),
    [
        (Failed("0", "request_too_large", "too long", "max_tokens"), 400, "context_length_exceeded"),
        (Failed("0", "invalid_request", "wrong", "text"), 400, "invalid_value"),
        (Failed("0", "overloaded", "full"), 429, "overloaded"),
        (Failed("0", "request_failed", "lost"), 500, "request_failed"),
    ],
)
def test_a_refusal_before_the_first_token_is_a_status(failed: Failed, status: int, code: str, stream: bool) -> None:
    async def test(rig: Rig) -> None:
        rig.desk.refusal = failed
        exchange = rig.post("completions", prompt="x", stream=stream)
        error = (await exchange.answer())["error"]
        assert (exchange.status, error["code"]) == (status, code)
        assert error["message"].endswith(failed.message)
        assert ("retry-after" in exchange.headers) == (status == 429)
        assert error["param"] == {"text": "prompt"}.get(failed.field or "", failed.field)
        assert exchange.headers["content-type"] == "application/json"

    drive(test)


def test_of_several_prompts_one_that_fails_ends_the_others() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("completions", prompt=["a", "b"], stream=True)
        sink = await exchange.begun(2)
        sink.on_deltas([delta("x")])
        sink.on_message(Failed("1", "request_failed", "lost"))
        assert (await exchange.answer())["error"]["message"] == "lost"
        assert exchange.status == 500
        assert rig.desk.left == [sink]

    drive(test)


def test_of_several_prompts_none_begins_after_one_that_is_refused() -> None:
    async def test(rig: Rig) -> None:
        rig.desk.refusal = Failed("0", "overloaded", "full")
        exchange = rig.post("completions", prompt=["a", "b", "c"])
        assert (await exchange.answer())["error"]["code"] == "overloaded"
        assert exchange.status == 429
        assert rig.desk.prompts == [(97,)]

    drive(test)


def test_an_error_after_the_first_token_is_an_event_and_what_came_before_it_is_told() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, stream=True)
        sink = await exchange.begun()
        sink.on_deltas([delta("a")])
        await exchange.chunks()
        sink.on_message(delta("b"))
        sink.on_message(Failed("0", "request_failed", "lost"))
        [text, error, end] = await exchange.chunks()
        assert text["choices"][0]["delta"] == {"content": "b"}
        assert error == {"error": {"message": "lost", "type": "server_error", "param": None, "code": "request_failed"}}
        assert end == "[DONE]"
        assert (exchange.status, exchange.ended, exchange.task.done()) == (200, True, True)

    drive(test)


def test_an_end_that_is_none_is_an_error() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("completions", prompt="x")
        sink = await exchange.begun()
        sink.on_message(done(reason="abort"))
        assert (await exchange.answer())["error"]["code"] == "request_failed"
        assert exchange.status == 500

    drive(test)


def test_a_bug_is_told_as_one(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rig: Rig) -> None:
        monkeypatch.setattr(CompletionAnswer, "whole", lambda *args: 1 / 0)
        exchange = rig.post("completions", prompt="x")
        sink = await exchange.begun()
        sink.on_message(done())
        assert (await exchange.answer())["error"]["code"] == "internal_error"
        assert exchange.status == 500

    drive(test)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("workers", [("p0",), ()])
def test_without_workers_it_is_not_ready(workers: tuple[str, ...]) -> None:
    async def test(rig: Rig) -> None:
        if not workers:
            rig.desk.core.view.workers.clear()
        rig.desk.refusal = Failed("0", "overloaded", "no live decode worker")
        for exchange in (rig.post("completions", prompt="x"), rig.post("chat", messages=CHAT)):
            error = (await exchange.answer())["error"]
            assert (exchange.status, error["code"]) == (503, "not_ready")
            assert "decode" in error["message"]
            assert exchange.headers["retry-after"]

    drive(test, "p0")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [1, "a"]}, "prompt"),
        ("completions", {"prompt": [128]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt[0]"),
        ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("completions", {"prompt": "x", "best_of": 2}, "best_of"),
        ("completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
        ("completions", {"prompt": "x", "temperature": -0.5}, "temperature"),
        ("completions", {"prompt": "x", "top_p": 0}, "top_p"),
        ("completions", {"prompt": "x", "n": 0}, "n"),
        ("completions", {"prompt": "x", "stop": ["a", ""]}, "stop[1]"),
        ("completions", {"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
        ("completions", {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("completions", {"prompt": "x", "use_beam_search": True}, "use_beam_search"),
        ("completions", {"prompt": "x", "echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ("completions", {"prompt": "x", "bad_words": [" "]}, "bad_words[0]"),
        ("completions", {"prompt": "x", "guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ("chat", {}, "messages"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat", {"messages": [*CHAT, {"role": "user", "content": 5}]}, "messages[1].content"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
            "messages[0].content[1].type",
        ),
        ("chat", {"messages": CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat", {"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ("chat", {"messages": CHAT, "functions": [{"name": "f"}]}, "functions"),
        ("chat", {"messages": CHAT, "modalities": ["audio"]}, "modalities"),
        ("chat", {"messages": CHAT, "response_format": {"type": "xml"}}, "response_format.type"),
        ("chat", {"messages": CHAT, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ("chat", {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
        ("chat", {"messages": CHAT, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ("chat", {"messages": CHAT, "tools": [{"type": "custom"}]}, "tools[0].type"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(path: str, body: dict[str, Any], param: str) -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post(path, **body)
        answer = await exchange.answer()
        assert (exchange.status, answer["error"]["param"]) == (400, param), answer
        assert answer["error"]["type"] == "invalid_request_error"
        assert param.partition("[")[0] in answer["error"]["message"]
        assert not rig.desk.requests

    drive(test)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b"\xff"])
def test_bodies_that_are_none(body: bytes) -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post_bytes("completions", body)
        answer = await exchange.answer()
        assert (exchange.status, answer["error"]["param"]) == (400, None)

    drive(test)


def test_fields_that_ask_for_nothing_are_no_error() -> None:
    async def test(rig: Rig) -> None:
        nothing = {
            "suffix": None,
            "best_of": 1,
            "use_beam_search": False,
            "length_penalty": 1.0,
            "logit_bias": None,
            "top_k": -1,
            "seed": -5,
            "stop": None,
            "stream": None,
            "n": None,
            "temperature": None,
            "nobody_knows": {"this": 1},
            "metadata": {},
        }
        exchange = rig.post("completions", prompt="x", **nothing)
        await exchange.begun()
        sampling = rig.desk.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
        assert sampling.seed is not None
        assert 0 <= sampling.seed < 1 << 63
        exchange.hang_up()
        await exchange.task

    drive(test)


def test_models_have_names() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("completions", prompt="x", model="other")
        error = (await exchange.answer())["error"]
        assert (exchange.status, error["code"], error["param"]) == (404, "model_not_found", "model")
        exchange = rig.post("completions", prompt="x", model="alias")
        sink = await exchange.begun()
        sink.on_message(done())
        answer = await exchange.answer()
        assert answer["model"] == "alias"
        assert answer["system_fingerprint"] == "fp_model-a"

    drive(test)


def test_the_clients_own_id_is_echoed_and_no_identity() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("completions", prompt="x", headers={"x-request-id": "mine-1"})
        sink = await exchange.begun()
        assert rig.desk.requests[0].label == "mine-1/0"
        sink.on_message(done("mine-1/0"))
        answer = await exchange.answer()
        assert exchange.headers["x-request-id"] == "mine-1"
        assert exchange.headers["x-baton-request-id"] == rig.desk.request_ids[0]
        assert answer["id"] == "cmpl-" + rig.desk.request_ids[0]

    drive(test)

    async def test_none(rig: Rig) -> None:
        for name in (None, "a\r\nb: c", "x" * 300):
            exchange = rig.post("completions", prompt="x", headers={"x-request-id": name} if name else {})
            sink = await exchange.begun(len(rig.desk.sinks) + 1)
            rig.desk.sinks[-1].on_message(done())
            await exchange.answer()
            assert exchange.headers["x-request-id"] == rig.desk.request_ids[-1], sink

    drive(test_none)


# --- clients that leave, or do not read --------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_requests_at_once(stream: bool) -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, stream=stream)
        sink = await exchange.begun()
        sink.on_deltas([delta("a")])
        await exchange.settle()
        exchange.hang_up()
        await exchange.settle()
        assert exchange.task.done()
        assert rig.desk.left == [sink]
        sink.on_deltas([delta("b")])  # which the router may still tell in this turn
        sink.on_message(done(reason="abort"))
        assert await sink_is_empty(sink)

    drive(test)


async def sink_is_empty(sink: Any) -> bool:
    with pytest.raises(call_module.Gone):
        await sink.news()
    return True


def test_a_client_that_leaves_while_its_prompt_is_read_starts_nothing() -> None:
    async def test(rig: Rig) -> None:
        text = rig.desk.text
        started, go_on = asyncio.Event(), asyncio.Event()
        loop, encode = asyncio.get_running_loop(), text.encode

        def slow(prompt: str, **options: Any) -> list[int]:
            loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(WAIT_S)  # it is another thread: the loop runs
            return encode(prompt, **options)

        text.encode = slow  # type: ignore[method-assign]
        exchange = rig.post("completions", prompt="x" * (LONG_TEXT + 1))
        async with asyncio.timeout(WAIT_S):
            await started.wait()
            exchange.hang_up()
            await exchange.settle()
            go_on.set()
            await exchange.task
        assert not rig.desk.requests
        assert exchange.status is None

    drive(test)


def test_a_client_that_does_not_read_is_written_to_once_and_then_gets_all_that_came() -> None:
    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, stream=True)
        sink = await exchange.begun()
        sink.on_deltas([delta("a")])
        await exchange.chunks()
        exchange.reads.clear()
        for text in "bcdef":
            sink.on_deltas([delta(text)])
            await exchange.settle()
        assert exchange.sent == []
        exchange.reads.set()
        assert contents(await exchange.chunks()) == ["b", "cdef"]
        sink.on_message(done())
        await exchange.task

    drive(test)


def test_what_waits_for_a_client_that_does_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "MAX_WAITING", 100)

    async def test(rig: Rig) -> None:
        exchange = rig.post("chat", messages=CHAT, stream=True)
        sink = await exchange.begun()
        sink.on_deltas([delta("a")])
        await exchange.chunks()
        exchange.reads.clear()
        sink.on_deltas([delta("b")])
        await exchange.settle()  # this one is being written
        for _ in range(100):
            sink.on_deltas([delta("b")])
        assert not rig.desk.left
        sink.on_deltas([delta("b")])
        await exchange.settle()
        assert rig.desk.left == [sink]
        assert not sink._news
        exchange.reads.set()
        *_, error, end = await exchange.chunks()
        assert (error["error"]["code"], end) == ("too_slow", "[DONE]")
        assert exchange.ended

    drive(test)
