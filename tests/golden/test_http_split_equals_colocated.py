"""Every answer over HTTP is the same split and colocated, streamed and not.

Text, token ids, log probabilities, usage and finish reason, for a table of what clients ask for. A tiny random model
that speaks bytes, with a chat template: real arithmetic, and texts that can be held to a form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.config import parse_config
from baton_cluster.local import LocalCluster
from tests.byte_model import EOS, make_byte_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

POOLS: dict[str, tuple[dict[str, Any], str]] = {
    "colocated": ({"both": {"kv_memory_mib": 8}}, "inproc"),
    "split": ({"prefill": {"kv_memory_mib": 8}, "decode": {"kv_memory_mib": 8}}, "zmq+tcp"),
}
TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOLERANCE = 2e-4
"""Natural logarithms; the order of sums differs with the batch where torch computes."""
TEXT = "The quick brown fox jumps over the lazy dog, and then"
LONG = " ".join(f"{i} bottles of beer on the wall," for i in range(12))
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
DRAWN = {"temperature": 1.0, "seed": 11}
GREEDY = {"temperature": 0}

COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "one token": {**GREEDY, "max_tokens": 1},
    "two tokens": {**GREEDY, "max_tokens": 2},
    "default length": {"prompt": TEXT, "seed": 5, "max_tokens": 16},
    "long prompt": {**GREEDY, "prompt": LONG},
    "one-token prompt": {**GREEDY, "prompt": [7]},
    "token ids": {**DRAWN, "prompt": [5, 6, 7, 8, 9]},
    "block of token ids": {**GREEDY, "prompt": [*range(1, 17)]},
    "several texts": {**DRAWN, "prompt": ["one", "two and more", TEXT]},
    "several lists of ids": {**GREEDY, "prompt": [[1, 2, 3], [4] * 33]},
    "several texts, n": {**DRAWN, "prompt": ["one", "two"], "n": 2},
    "n": {**DRAWN, "n": 4},
    "n, greedy": {**GREEDY, "n": 3},
    "best_of": {**DRAWN, "n": 2, "best_of": 2},
    "drawn": DRAWN,
    "drawn, hot": {"temperature": 2.0, "seed": 3},
    "negative seed": {"temperature": 1.0, "seed": -3},
    "top_p": {**DRAWN, "top_p": 0.5},
    "top_k": {**DRAWN, "top_k": 5},
    "top_k off": {**DRAWN, "top_k": -1},
    "min_p": {**DRAWN, "min_p": 0.2},
    "all filters": {**DRAWN, "top_p": 0.9, "top_k": 40, "min_p": 0.05},
    "logprobs": {**GREEDY, "logprobs": 5},
    "logprobs of none but the token": {**DRAWN, "logprobs": 0},
    "logprobs, n": {**DRAWN, "logprobs": 2, "n": 2},
    "echo": {**GREEDY, "echo": True},
    "echo of ids": {**GREEDY, "echo": True, "prompt": [65, 66, 67]},
    "echo and logprobs": {**GREEDY, "echo": True, "logprobs": 3},
    "echo only": {**GREEDY, "echo": True, "logprobs": 1, "max_tokens": 0},
    "prompt_logprobs": {**GREEDY, "prompt_logprobs": 2},
    "stop": {**DRAWN, "stop": ["e", "a", " "]},
    "stop, included": {**DRAWN, "stop": "e", "include_stop_str_in_output": True},
    "stop of two letters": {"temperature": 1.5, "seed": 4, "stop": ["th", "zz", "\n\n"], "max_tokens": 64},
    "stop_token_ids": {**DRAWN, "stop_token_ids": [*range(30, 60)]},
    "min_tokens": {**DRAWN, "stop_token_ids": [*range(128)], "min_tokens": 9},
    "end of text": {**DRAWN, "logit_bias": {str(EOS): 4.0}, "max_tokens": 64},
    "end of text, ignored": {**DRAWN, "logit_bias": {str(EOS): 4.0}, "ignore_eos": True},
    "special tokens shown": {**DRAWN, "logit_bias": {str(EOS): 100.0}, "skip_special_tokens": False, "max_tokens": 4},
    "logit_bias": {**DRAWN, "logit_bias": {"65": 6.0, "66": -100.0}},
    "allowed_token_ids": {**DRAWN, "allowed_token_ids": [70, 71, 72]},
    "bad_words": {**DRAWN, "allowed_token_ids": [65, 66], "bad_words": ["AA", "BB"]},
    "penalties": {**GREEDY, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    "repetition_penalty": {**DRAWN, "repetition_penalty": 1.4},
    "return_token_ids": {**DRAWN, "return_token_ids": True},
    "priority and user": {**GREEDY, "priority": -1, "user": "somebody"},
    "json": {**DRAWN, "structured_outputs": {"json": SCHEMA}, "max_tokens": 48},
    "regex": {**DRAWN, "structured_outputs": {"regex": "[a-f]{3,18}"}},
    "choice": {**DRAWN, "guided_choice": ["yes", "no", "perhaps"]},
    "grammar": {**DRAWN, "guided_grammar": 'start: "x" start "y" | "z"'},
}
COMMON = {"max_tokens": 20, "return_token_ids": True}
QUESTION = [{"role": "user", "content": "Hello?"}]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two."}]},
    {"role": "assistant", "content": "Three."},
    {"role": "user", "content": "Four?"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CHATS: dict[str, dict[str, Any]] = {
    "chat": GREEDY,
    "chat, drawn": DRAWN,
    "chat, n": {**DRAWN, "n": 3},
    "conversation": {**GREEDY, "messages": CONVERSATION},
    "conversation, drawn": {**DRAWN, "messages": CONVERSATION, "top_p": 0.8},
    "max_completion_tokens": {**GREEDY, "max_completion_tokens": 5, "max_tokens": 20},
    "chat logprobs": {**GREEDY, "logprobs": True, "top_logprobs": 4},
    "chat logprobs of none but the token": {**DRAWN, "logprobs": True},
    "chat logprobs, n": {**DRAWN, "logprobs": True, "top_logprobs": 1, "n": 2},
    "chat stop": {**DRAWN, "stop": ["a", "e"]},
    "chat json_object": {**DRAWN, "response_format": {"type": "json_object"}, "max_tokens": 24},
    "chat json_schema": {
        **DRAWN,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        "max_tokens": 48,
    },
    "chat penalties": {**DRAWN, "presence_penalty": -1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.1},
    "continue_final_message": {
        **GREEDY,
        "messages": [*QUESTION, {"role": "assistant", "content": "Well, "}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "tools, none called": {**GREEDY, "tools": TOOLS, "tool_choice": "none"},
    "chat prompt_logprobs": {**GREEDY, "prompt_logprobs": 1},
    "chat min_tokens": {**DRAWN, "min_tokens": 12, "stop_token_ids": [*range(64)]},
    "chat return_token_ids": {**DRAWN, "return_token_ids": True},
}
TABLE: list[tuple[str, str, dict[str, Any]]] = [
    *((name, "/v1/completions", {"prompt": TEXT, **COMMON, **asked}) for name, asked in COMPLETIONS.items()),
    *((name, "/v1/chat/completions", {"messages": QUESTION, **COMMON, **asked}) for name, asked in CHATS.items()),
]


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, httpx.Client]]:
    """By placement."""
    model = make_byte_model(tmp_path_factory.mktemp("bytes"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with ExitStack() as stack:
        yield {placement: stack.enter_context(client_of(model, placement, stack)) for placement in POOLS}


def client_of(model: Path, placement: str, stack: ExitStack) -> httpx.Client:
    pools, transport = POOLS[placement]
    tree = {
        "launcher": "local",
        "model": {"source": str(model), "dtype": "float32"},
        "pools": pools,
        "engine": {"max_batch_tokens": 32},
        "transfer": {"transport": transport},
        "liveness": {"heartbeat_s": 1.0, "timeout_s": 30.0},
    }
    cluster = stack.enter_context(LocalCluster(parse_config(tree)))
    assert cluster.url is not None
    return httpx.Client(base_url=cluster.url, timeout=120)


def whole(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer at once, in the form that `streamed` gives."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    data = answer.json()
    choices = {}
    for choice in data["choices"]:
        logprobs = choice["logprobs"]
        choices[choice["index"]] = {
            "text": choice["text"] if "text" in choice else choice["message"]["content"] or "",
            "logprobs": logprobs,
            "token_ids": choice.get("token_ids"),
            "finish_reason": choice["finish_reason"],
        }
    whole = {"choices": choices, "usage": usage_of(data)}
    if "prompt_logprobs" in body:
        told = data["prompt_logprobs"] if "messages" in body else data["choices"][0]["prompt_logprobs"]
        assert len(told) == whole["usage"]["prompt_tokens"]
        whole["prompt_logprobs"] = told
    return whole


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same, put together of what came piece by piece."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, int] = {}
    with client.stream("POST", path, json=asked) as answer:
        assert answer.status_code == 200, answer.read()
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        data = json.loads(event)
        assert "error" not in data, data
        if not data["choices"]:
            usage = usage_of(data)
        for piece in data["choices"]:
            empty: dict[str, Any] = {"text": "", "logprobs": None, "token_ids": None, "finish_reason": None}
            choice = choices.setdefault(piece["index"], empty)
            choice["text"] += piece["text"] if "text" in piece else piece["delta"].get("content") or ""
            if piece.get("token_ids") is not None:
                choice["token_ids"] = [*(choice["token_ids"] or []), *piece["token_ids"]]
            if piece.get("logprobs"):
                choice["logprobs"] = joined(choice["logprobs"], piece["logprobs"])
            if piece["finish_reason"] is not None:
                assert choice["finish_reason"] is None, "ended twice"
                choice["finish_reason"] = piece["finish_reason"]
    return {"choices": dict(sorted(choices.items())), "usage": usage}


def joined(known: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    """Log probabilities of all tokens so far: lists, by field."""
    known = known or {}
    return {name: (known.get(name) or []) + value if value is not None else None for name, value in more.items()}


def usage_of(data: dict[str, Any]) -> dict[str, int]:
    """What was counted, save cached tokens: those depend on what the workers served before."""
    return {name: data["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two answers differ; log probabilities may by `TOLERANCE`."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return [f"{path}: {sorted(map(str, ours))} and {sorted(map(str, theirs))}"]
        return [d for key in ours for d in differences(ours[key], theirs[key], f"{path}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [f"{path}: {len(ours)} and {len(theirs)} entries"]
        pairs = zip(ours, theirs, strict=True)
        return [d for i, (a, b) in enumerate(pairs) for d in differences(a, b, f"{path}[{i}]")]
    if isinstance(ours, float) and isinstance(theirs, float):
        return [] if abs(ours - theirs) <= TOLERANCE else [f"{path}: {ours} and {theirs}"]
    return [] if ours == theirs else [f"{path}: {ours!r} and {theirs!r}"]


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) >= 60
    assert len({name for name, _, _ in TABLE}) == len(TABLE)


@pytest.mark.parametrize(("path", "body"), [pytest.param(path, body, id=name) for name, path, body in TABLE])
def test_split_equals_colocated(clients: dict[str, httpx.Client], path: str, body: dict[str, Any]) -> None:
    answers = {placement: whole(client, path, body) for placement, client in clients.items()}
    assert all(choice["finish_reason"] for choice in answers["split"]["choices"].values())
    assert not differences(answers["colocated"], answers["split"], "split")
    for placement, client in clients.items() if "prompt_logprobs" not in body else ():  # a stream has none
        assert not differences(answers["colocated"], streamed(client, path, body), f"{placement}, streamed")
