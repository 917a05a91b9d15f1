"""The `openai` package against split clusters with a real, tiny model: what its users do, and what they catch.

Once with workers as threads of this process, once as processes on Ray.

The model's output is random letters; what it must be is what the native client gets for the same request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from pydantic import SecretStr

from baton.config import parse_config
from baton.protocol import WorkerStatus
from baton_cluster.cluster import Cluster
from baton_cluster.launch import launch
from router.client import RouterClient
from tests.byte_model import make_byte_model
from tests.stub_cluster import wait_until

NAME = "bytes"
TEMPLATE = (
    "{%- if tools %}Call with <tool_call>: {{ tools | tojson }}\n{% endif -%}"
    "{%- for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor -%}"
    "{%- if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something."}]
NATIVE = [{"role": m["role"], "content": m["content"]} for m in CHAT]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = make_byte_model(tmp_path_factory.mktemp("bytes"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tree = {
        "name": "baton-sdk",
        "launcher": request.param,
        "model": {"source": str(folder), "dtype": "float32"},
        "pools": {"prefill": {"kv_memory_mib": 8}, "decode": {"kv_memory_mib": 8}},
        "http": {"model_names": [NAME, "second-name"]},
        "liveness": {"heartbeat_s": 1.0, "timeout_s": 30.0},
    }
    with launch(parse_config(tree)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def native(cluster: Cluster) -> Iterator[RouterClient]:
    with cluster.client() as client:
        yield client


def async_client(cluster: Cluster) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0, timeout=60)


def wait_nothing_is_held(cluster: Cluster) -> None:
    def is_free(status: WorkerStatus) -> bool:
        return status.load.blocks_free == status.load.blocks_total

    wait_until(lambda: all(is_free(worker) for worker in cluster.status().workers), "no block held")


def test_models(client: OpenAI, cluster: Cluster) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == [NAME, "second-name"]
    model = client.models.retrieve("second-name")
    assert (model.id, model.object, model.owned_by) == ("second-name", "model", "baton")
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 512
    source = cluster.config.model.source
    assert client.completions.create(model=source, prompt="x", max_tokens=1).model == source, (
        "model.source names it, too"
    )
    with pytest.raises(NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_completions(client: OpenAI, native: RouterClient) -> None:
    for prompt in ("Once upon a time", list(b"Once")):
        expected = native.generate(prompt, max_tokens=12)
        answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=12, temperature=0)
        [choice] = answer.choices
        assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == len(expected.token_ids)
        assert (answer.object, answer.model) == ("text_completion", NAME)
        assert answer.id.startswith("cmpl-")


def test_several_prompts_and_answers(client: OpenAI, native: RouterClient) -> None:
    prompts = ["one", "two"]
    expected = [native.generate(p, max_tokens=6, temperature=1.0, seed=5, n=3) for p in prompts]
    answer = client.completions.create(model=NAME, prompt=prompts, max_tokens=6, seed=5, n=3)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [c.text for e in expected for c in e.choices]
    assert len({choice.text for choice in answer.choices}) > 3
    streamed = dict.fromkeys(range(6), "")
    with client.completions.create(model=NAME, prompt=prompts, max_tokens=6, seed=5, n=3, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
    assert list(streamed.values()) == [choice.text for choice in answer.choices]


def test_log_probabilities_of_completions(client: OpenAI, native: RouterClient) -> None:
    expected = native.generate("abc", max_tokens=5, logprobs=2, prompt_logprobs=2)
    ask: Any = {"model": NAME, "prompt": "abc", "max_tokens": 5, "temperature": 0, "logprobs": 2, "echo": True}
    answer = client.completions.create(**ask)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    entries = [*(expected.prompt_logprobs or ()), *(expected.logprobs or ())]
    assert logprobs.token_logprobs == [None if e is None else e.logprob for e in entries]
    assert answer.choices[0].text == "abc" + expected.text
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[:4] == [0, 1, 2, 3]
    assert logprobs.top_logprobs is not None
    assert logprobs.tokens is not None
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert (top is None and logprob is None) or (top[token] == logprob and len(top) <= 3)
    told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    with client.completions.create(**ask, stream=True) as stream:
        for chunk in stream:
            if chunk.choices[0].logprobs is not None:
                for name, values in told.items():
                    values += getattr(chunk.choices[0].logprobs, name)
    assert told == logprobs.model_dump()


def test_chat(client: OpenAI, native: RouterClient) -> None:
    expected = native.generate(NATIVE, max_tokens=10)
    answer = client.chat.completions.create(model=NAME, messages=CHAT, max_completion_tokens=10, temperature=0)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish_reason
    assert (answer.object, answer.id.startswith("chatcmpl-")) == ("chat.completion", True)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    parts: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say something."}]},
    ]
    again = client.chat.completions.create(model=NAME, messages=parts, max_completion_tokens=10, temperature=0)
    assert again.choices[0].message.content == expected.text


def test_a_streamed_chat_with_usage_and_log_probabilities(client: OpenAI) -> None:
    ask: Any = {
        "model": NAME,
        "messages": CHAT,
        "max_tokens": 24,
        "seed": 11,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"return_token_ids": True},
    }
    whole = client.chat.completions.create(**ask)
    texts, logprobs = dict.fromkeys(range(3), ""), {i: list[Any]() for i in range(3)}
    ids, finishes, roles, usages = {i: list[int]() for i in range(3)}, {}, {i: list[Any]() for i in range(3)}, []
    with client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            assert chunk.usage is None or not chunk.choices
            usages += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index].append(choice.delta.role)
                finishes[choice.index] = choice.finish_reason
                assert choice.model_extra is not None
                ids[choice.index] += choice.model_extra["token_ids"]
                if choice.logprobs is not None:
                    logprobs[choice.index] += choice.logprobs.content or []
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert texts[choice.index] == choice.message.content
        assert finishes[choice.index] == choice.finish_reason
        assert logprobs[choice.index] == choice.logprobs.content
        assert choice.model_extra is not None
        assert ids[choice.index] == choice.model_extra["token_ids"]
        assert len(ids[choice.index]) == len(logprobs[choice.index])
        assert roles[choice.index][0] == "assistant"
        assert not any(roles[choice.index][1:])
        shown = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content or [])
        assert shown.decode("utf-8", "replace").startswith(choice.message.content or "")
    assert len(usages) == 1
    assert whole.usage is not None
    assert usages[0].completion_tokens == whole.usage.completion_tokens


def test_stop_ends_the_text(client: OpenAI) -> None:
    text = client.completions.create(model=NAME, prompt="stop here", max_tokens=40, seed=2).choices[0].text
    stop = next(text[i : i + 2] for i in range(8, 30) if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i)
    ask: Any = {"model": NAME, "prompt": "stop here", "max_tokens": 40, "seed": 2, "stop": [stop]}
    answer = client.completions.create(**ask)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    with client.completions.create(**ask, stream=True) as stream:
        choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.text for choice in choices) == answer.choices[0].text
    assert choices[-1].finish_reason == "stop"
    included = client.completions.create(**ask, extra_body={"include_stop_str_in_output": True})
    assert included.choices[0].text == answer.choices[0].text + stop


def test_the_same_seed_gives_the_same_answer(client: OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=16, seed=seed)
        return answer.choices[0].message.content

    assert ask(1) == ask(1) != ask(2)


def test_an_answer_with_a_form(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=NAME,
        messages=CHAT,
        temperature=0.2,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        extra_body={"structured_outputs": None},
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"ok", "n"}
    choice = client.completions.create(
        model=NAME, prompt="x", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert choice.choices[0].text in ("yes", "no")
    assert choice.choices[0].finish_reason == "stop"


def test_a_round_trip_of_a_tool_call(client: OpenAI) -> None:
    ask: Any = {"model": NAME, "messages": CHAT, "tools": [TOOL], "max_tokens": 120, "seed": 3}
    # A random model calls nothing by itself: the form makes it write what a trained one would.
    form = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "[a-z]{3,6}"\}\}\n</tool_call>'
    called = {**ask, "extra_body": {"structured_outputs": {"regex": form}}}
    space = client.completions.create(
        model=NAME, prompt=" \n\r\t", max_tokens=1, extra_body={"return_token_ids": True}
    ).choices[0]
    assert space.model_extra is not None
    # JSON may have any amount of it, which a random model would make use of.
    compact = {**ask, "logit_bias": dict.fromkeys(space.model_extra["prompt_token_ids"], -100)}
    forced = {**compact, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    required = {**compact, "tool_choice": "required", "parallel_tool_calls": False}
    for request in (called, forced, required):
        answer = client.chat.completions.create(**request)
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls", repr(answer)
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        calls = choice.message.tool_calls
        assert all(call.type == "function" and call.function.name == "weather" for call in calls)
        with client.chat.completions.create(**request, stream=True) as stream:
            parts = [c.choices[0].delta.tool_calls[0] for c in stream if c.choices[0].delta.tool_calls]
        arguments = "".join(part.function.arguments or "" for part in parts if part.function and part.index == 0)
        assert arguments == calls[0].function.arguments
        city = json.loads(arguments)["city"]
        follow: Any = [*CHAT, choice.message, {"role": "tool", "tool_call_id": calls[0].id, "content": f"{city}: rain"}]
        last = client.chat.completions.create(model=NAME, messages=follow, tools=[TOOL], max_tokens=5)
        assert last.choices[0].finish_reason == "length"
        assert last.usage is not None
        assert answer.usage is not None
        assert last.usage.prompt_tokens > answer.usage.prompt_tokens


def test_the_answer_goes_on_where_the_last_message_ends(client: OpenAI, native: RouterClient) -> None:
    messages: Any = [*CHAT, {"role": "assistant", "content": "It is"}]
    answer = client.chat.completions.create(
        model=NAME,
        messages=messages,
        max_tokens=6,
        temperature=0,
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True},
    )
    assert answer.model_extra is not None
    prompt = answer.model_extra["prompt_token_ids"]
    shown = client.completions.create(model=NAME, prompt=prompt, max_tokens=0, echo=True)
    assert shown.choices[0].text.endswith("[assistant]It is")
    assert answer.choices[0].message.content == native.generate(prompt, max_tokens=6).text


def test_errors(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=CHAT)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(BadRequestError) as too_long:
        client.completions.create(model=NAME, prompt="x" * 600)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError) as too_many:
        client.chat.completions.create(model=NAME, messages=CHAT, max_completion_tokens=600)
    assert (too_many.value.code, too_many.value.param) == ("context_length_exceeded", "max_completion_tokens")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "bad"}}}},
         "response_format.json_schema.schema"),
    ]  # fmt: skip
    for fields, param in wrong:
        for stream in (False, True):
            with pytest.raises(BadRequestError) as caught:
                client.chat.completions.create(model=NAME, messages=CHAT, stream=stream, **fields)
            assert caught.value.param == param
            assert isinstance(caught.value, APIError)


def test_a_stream_that_is_closed_frees_everything(client: OpenAI, cluster: Cluster) -> None:
    with client.chat.completions.create(
        model=NAME, messages=CHAT, stream=True, n=2, extra_body={"ignore_eos": True}
    ) as stream:
        assert next(iter(stream)).choices
    wait_nothing_is_held(cluster)
    status = cluster.status()
    assert status.num_requests == 0


def test_the_async_client(cluster: Cluster, native: RouterClient) -> None:
    prompts = [f"Prompt number {i}" for i in range(8)]
    expected = [native.generate(p, max_tokens=10, temperature=0.8, seed=i) for i, p in enumerate(prompts)]

    async def one(client: AsyncOpenAI, i: int) -> str:
        ask: Any = {"model": NAME, "prompt": prompts[i], "max_tokens": 10, "temperature": 0.8, "seed": i}
        if i % 2:
            answer = await client.completions.create(**ask)
            return answer.choices[0].text
        async with await client.completions.create(**ask, stream=True) as stream:
            return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with async_client(cluster) as client:
            assert [m.id async for m in client.models.list()] == [NAME, "second-name"]
            with pytest.raises(NotFoundError):
                await client.completions.create(model="x", prompt="x")
            return await asyncio.gather(*(one(client, i) for i in range(len(prompts))))

    assert asyncio.run(run()) == [e.text for e in expected]


def test_langchain(cluster: Cluster, native: RouterClient) -> None:
    """A second client, with expectations of its own."""
    from langchain_openai import ChatOpenAI

    def model(**options: Any) -> ChatOpenAI:
        return ChatOpenAI(base_url=f"{cluster.url}/v1", api_key=SecretStr("any"), model=NAME, max_retries=0, **options)

    expected = native.generate(NATIVE, max_tokens=12)
    asked = [(m["role"], m["content"]) for m in NATIVE]
    greedy = model(temperature=0, max_completion_tokens=12)
    answer = greedy.invoke(asked)
    assert answer.content == expected.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 12
    assert answer.response_metadata["finish_reason"] == "length"
    streamed = list(greedy.stream(asked, stream_usage=True))
    assert "".join(str(chunk.content) for chunk in streamed) == expected.text
    usages = [chunk.usage_metadata for chunk in streamed if chunk.usage_metadata]
    assert [usage["output_tokens"] for usage in usages] == [12]
    caller = model(temperature=0, max_completion_tokens=150).bind_tools([TOOL], tool_choice="weather")
    [call] = caller.invoke(asked).tool_calls
    assert call["name"] == "weather"
    assert set(call["args"]) == {"city"}


def test_a_cancelled_task_frees_everything(cluster: Cluster) -> None:
    async def run() -> None:
        async with async_client(cluster) as client:
            begun = asyncio.Event()

            async def stream() -> None:
                async with await client.chat.completions.create(
                    model=NAME, messages=CHAT, stream=True, extra_body={"ignore_eos": True}
                ) as chunks:
                    async for _ in chunks:
                        begun.set()

            async def whole() -> None:
                await client.completions.create(model=NAME, prompt="x", max_tokens=400, extra_body={"ignore_eos": True})

            tasks = [asyncio.create_task(work()) for work in (stream, whole)]
            await asyncio.wait_for(begun.wait(), 60)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    wait_nothing_is_held(cluster)
