"""/tokenize, /detokenize, /version and /ping as vLLM's clients ask for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from baton.protocol import MAX_TEXT
from router.text import TokenizerText
from tests.stub_cluster import MAX_MODEL_LEN, StubCluster

TEMPLATE = (
    "{% for message in messages %}w3 {{ message.role }} {{ message.content }} {% endfor %}"
    "{% if tools %}w4 {{ tools[0].function.name }} {% endif %}{{ extra }}{% if add_generation_prompt %}w5{% endif %}"
)


@pytest.fixture(scope="module")
def web() -> Iterator[httpx.Client]:
    with StubCluster({"both": {"workers": 1}}) as cluster, httpx.Client(base_url=cluster.router.url or "") as client:
        yield client


@pytest.fixture(scope="module")
def worded(tiny_model: Path) -> Iterator[httpx.Client]:
    """A cluster with a tokenizer and a chat template of transformers; its words are w0, w1, ..."""
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    text = TokenizerText.from_tokenizer(tokenizer)
    with (
        StubCluster({"both": {"workers": 1}}, text=text) as cluster,
        httpx.Client(base_url=cluster.router.url or "") as client,
    ):
        yield client


def ask(web: httpx.Client, path: str, **body: Any) -> Any:
    answer = web.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(web: httpx.Client, path: str, **body: Any) -> tuple[str, str]:
    """The field at fault, and what is said of it."""
    answer = web.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def test_a_prompt(web: httpx.Client) -> None:
    tokens = [ord(c) for c in "hello"]
    assert ask(web, "/tokenize", prompt="hello") == {"count": 5, "max_model_len": MAX_MODEL_LEN, "tokens": tokens}
    told = ask(web, "/tokenize", prompt="hi", return_token_strs=True, model=None, unheard_of=1)
    assert told["token_strs"] == ["h", "i"]
    assert ask(web, "/tokenize", prompt="")["tokens"] == []


def test_there_and_back(web: httpx.Client) -> None:
    tokens = ask(web, "/tokenize", prompt="there and back")["tokens"]
    assert ask(web, "/detokenize", tokens=tokens) == {"prompt": "there and back"}
    assert ask(web, "/detokenize", tokens=[]) == {"prompt": ""}


def test_messages_go_through_the_chat_template(worded: httpx.Client) -> None:
    turns = [{"role": "user", "content": "w7 w8"}]
    tool = {"type": "function", "function": {"name": "w9"}}
    for options, words in (
        ({}, "w3 w0 w7 w8 w5"),  # the role is no word of this vocabulary: w0
        ({"add_generation_prompt": False}, "w3 w0 w7 w8"),
        ({"tools": [tool]}, "w3 w0 w7 w8 w4 w9 w5"),
        ({"chat_template_kwargs": {"extra": "w6 "}}, "w3 w0 w7 w8 w6 w5"),
        ({"continue_final_message": True}, "w3 w0 w7 w8"),
    ):
        told = ask(worded, "/tokenize", messages=turns, return_token_strs=True, **options)
        assert told["token_strs"] == words.split(), options
        assert told["count"] == len(told["tokens"])


def test_special_tokens_are_text_again(worded: httpx.Client) -> None:
    told = ask(worded, "/tokenize", prompt="w1 <end>")
    assert ask(worded, "/detokenize", tokens=told["tokens"])["prompt"] == "w1 <end>"


def test_what_is_wrong_is_named(web: httpx.Client) -> None:
    hello = [{"role": "user", "content": "hello"}]
    assert refused(web, "/tokenize") == ("prompt", "set either prompt or messages")
    assert refused(web, "/tokenize", prompt="x", messages=hello)[0] == "prompt"
    assert refused(web, "/tokenize", prompt=7)[0] == "prompt"
    assert refused(web, "/tokenize", prompt="é")[0] == "prompt"
    assert refused(web, "/tokenize", messages=[])[0] == "messages"
    assert refused(web, "/tokenize", messages=[{"role": "user"}])[0] == "messages[0].content"
    assert refused(web, "/tokenize", messages=hello, chat_template="{{ 1 }}")[0] == "chat_template"
    assert (
        refused(web, "/tokenize", messages=hello, add_generation_prompt=True, continue_final_message=True)[0]
        == "continue_final_message"
    )
    assert refused(web, "/tokenize", messages=hello, chat_template_kwargs={"tokenize": True})[0] == (
        "chat_template_kwargs.tokenize"
    )
    assert refused(web, "/detokenize")[0] == "tokens"
    assert refused(web, "/detokenize", tokens=[1, -1])[0] == "tokens[1]"
    field, message = refused(web, "/detokenize", tokens=[97, 5000])
    assert field == "tokens[1]" and "5000" in message
    assert web.post("/tokenize", content=b"{").status_code == 400
    for path, body in ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [97]}):
        answer = web.post(path, json={**body, "model": "another"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_long_prompt(web: httpx.Client) -> None:
    """It is tokenized in a thread, and the answer is the same."""
    prompt = "a long story " * 20_000
    told = ask(web, "/tokenize", prompt=prompt)
    assert told["count"] == len(prompt)
    assert ask(web, "/detokenize", tokens=told["tokens"])["prompt"] == prompt
    answer = web.post("/tokenize", content=json.dumps({"prompt": "x" * (MAX_TEXT + 1)}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_version_and_ping(web: httpx.Client) -> None:
    assert web.get("/version").json() == {"version": version("baton-serve")}
    assert web.get("/ping").status_code == web.post("/ping").status_code == 200
    assert web.delete("/ping").status_code == 405
