"""LangChain's ChatOpenAI against a split cluster with a real, tiny model.

It reads the API in ways of its own: usage from the last chunk, tool calls put together from chunks, schemas that
pydantic makes, errors by class. The model's output is random letters, so what it says is held to a form.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from baton.config import parse_config
from baton_cluster.local import LocalCluster
from tests.byte_model import make_byte_model

KEY = "sk-0123456789abcdef"
NAME = "bytes"
TEMPLATE = (
    "{% if tools %}Call {{ tools | map(attribute='function.name') | join(', ') }} with <tool_call>\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = [SystemMessage("Be brief."), HumanMessage("Say something.")]


@tool
def weather(city: Literal["Oslo", "Rome"], days: int = 1) -> str:
    """The weather in a city."""
    return f"{city}: rain for {days} days"


@tool
def clock() -> str:
    """What time it is."""
    return "noon"


class Verdict(BaseModel):
    """A verdict on a text."""

    good: bool
    stars: int = Field(ge=1, le=5)
    kind: Literal["poem", "story"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = make_byte_model(tmp_path_factory.mktemp("bytes"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tree = {
        "launcher": "local",
        "model": {"source": str(folder), "dtype": "float32"},
        "pools": {"prefill": {"kv_memory_mib": 8}, "decode": {"kv_memory_mib": 8}},
        "http": {"model_names": [NAME], "api_keys": [KEY]},
        "liveness": {"heartbeat_s": 1.0, "timeout_s": 30.0},
    }
    with LocalCluster(parse_config(tree)) as cluster:
        yield cluster


def chat(cluster: LocalCluster, **options: Any) -> ChatOpenAI:
    settings: dict[str, Any] = {
        "base_url": f"{cluster.url}/v1",
        "api_key": SecretStr(KEY),
        "model": NAME,
        "max_retries": 0,
        "timeout": 60,
        "temperature": 0,
        "max_completion_tokens": 24,
    }
    return ChatOpenAI(**settings | options)


def test_invoke(cluster: LocalCluster) -> None:
    answer = chat(cluster).invoke(ASKED)
    assert isinstance(answer, AIMessage) and answer.content
    assert answer.usage_metadata is not None
    usage = answer.usage_metadata
    assert usage["output_tokens"] == 24
    assert usage["total_tokens"] == usage["input_tokens"] + 24
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == NAME
    assert answer.id is not None


def test_a_stream_adds_up_to_the_answer(cluster: LocalCluster) -> None:
    model = chat(cluster)
    model.invoke(ASKED)  # both find the prompt in the cache
    whole = model.invoke(ASKED)
    chunks = list(model.stream(ASKED, stream_usage=True))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk  # type: ignore[assignment]
    assert isinstance(total, AIMessageChunk)
    assert (total.content, total.usage_metadata) == (whole.content, whole.usage_metadata)
    assert total.response_metadata["finish_reason"] == "length"
    assert len(chunks) > 3, "it comes in pieces"


def test_without_usage_none_is_told(cluster: LocalCluster) -> None:
    chunks = list(chat(cluster, stream_usage=False).stream(ASKED))
    assert "".join(str(chunk.content) for chunk in chunks) == chat(cluster).invoke(ASKED).content
    assert not any(chunk.usage_metadata for chunk in chunks)


def test_many_at_once(cluster: LocalCluster) -> None:
    model = chat(cluster, temperature=1, seed=7)
    prompts: list[Any] = [[HumanMessage(f"number {i}")] for i in range(6)]
    alone = [model.invoke(prompt).content for prompt in prompts]
    assert [answer.content for answer in model.batch(prompts)] == alone

    async def run() -> list[str]:
        async def one(prompt: Any) -> str:
            return "".join([str(chunk.content) async for chunk in model.astream(prompt)])

        return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(run()) == alone


@pytest.mark.parametrize("streamed", [False, True])
def test_a_round_trip_of_tool_calls(cluster: LocalCluster, streamed: bool) -> None:
    """The model calls, the tool answers, the model goes on: what agents do in a loop."""
    model = chat(cluster, max_completion_tokens=200)
    caller = model.bind_tools([weather, clock], tool_choice="weather")
    message: Any
    if streamed:
        chunks = list(caller.stream(ASKED, stream_usage=True))
        assert sum(len(chunk.tool_call_chunks) for chunk in chunks) > 3, "arguments come in pieces"  # type: ignore[attr-defined]
        message = chunks[0]
        for chunk in chunks[1:]:
            message += chunk
    else:
        message = caller.invoke(ASKED)
    assert message.response_metadata["finish_reason"] in ("tool_calls", "stop")
    assert not message.invalid_tool_calls and not message.content
    [call] = message.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Oslo", "Rome")
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage) and result.content.startswith(call["args"]["city"])  # type: ignore[union-attr]
    assert result.tool_call_id == call["id"]
    last = model.bind_tools([weather, clock]).invoke([*ASKED, message, result])
    assert last.content and not last.tool_calls
    assert last.usage_metadata["input_tokens"] > message.usage_metadata["input_tokens"]  # type: ignore[attr-defined]


def test_some_call_is_made_where_one_is_required(cluster: LocalCluster) -> None:
    model = chat(cluster, max_completion_tokens=400, temperature=1)
    for parallel in (False, True):
        caller = model.bind_tools([weather, clock], tool_choice="any", parallel_tool_calls=parallel)
        answer = caller.invoke(ASKED, seed=3)
        calls = answer.tool_calls
        if answer.response_metadata["finish_reason"] == "length":  # a random model need not come to an end
            calls = calls[:-1] or calls
        assert calls and {call["name"] for call in calls} <= {"weather", "clock"}
        assert parallel or len(answer.tool_calls) == 1
        assert len({call["id"] for call in calls}) == len(calls)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(cluster: LocalCluster, method: Literal["json_schema", "function_calling"]) -> None:
    model = chat(cluster, max_completion_tokens=200, logit_bias=dict.fromkeys(spaces(cluster), -100))
    verdict = model.with_structured_output(Verdict, method=method).invoke(ASKED)
    assert isinstance(verdict, Verdict)
    assert 1 <= verdict.stars <= 5


def spaces(cluster: LocalCluster) -> list[int]:
    """Tokens of space: JSON may hold any amount of it, which a random model would make use of."""
    client = openai.OpenAI(base_url=cluster.url, api_key=KEY)
    with client:
        tokens: list[int] = client.post("/tokenize", cast_to=object, body={"prompt": " \n\r\t"})["tokens"]  # type: ignore[index]
    return tokens


def test_errors_are_of_the_classes_that_agents_catch(cluster: LocalCluster) -> None:
    with pytest.raises(openai.AuthenticationError):
        chat(cluster, api_key=SecretStr("sk-wrong")).invoke(ASKED)
    with pytest.raises(openai.NotFoundError):
        chat(cluster, model="gpt-4").invoke(ASKED)
    with pytest.raises(openai.BadRequestError) as caught:
        chat(cluster).invoke([HumanMessage("x" * 2000)])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        list(chat(cluster, temperature=-1).stream(ASKED))
    assert caught.value.param == "temperature"
