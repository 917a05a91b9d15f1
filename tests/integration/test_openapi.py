"""The OpenAPI document: it describes what there is, and what there is does as it says (schemathesis)."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from schemathesis.engine import events, from_schema

from baton.config import parse_config
from baton.protocol import ChatMessage
from router.http.openapi import OPERATIONS, describe, path_of
from tests.stub_cluster import StubCluster

KEY = "sk-0123456789abcdef"


class ByteText:
    """A token is a byte of UTF-8, so any text can be asked for, and answers hold characters that are cut."""

    vocab_size = 1000
    chat_template = "{% if tools %}<tool_call>{% endif %}"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def encode_messages(
        self, messages: Sequence[ChatMessage], *, tools: str = "", options: str = "", continue_final: bool = False
    ) -> list[int]:
        return self.encode("".join(f"{m.role}:{m.content}\n" for m in messages) + tools + options)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(t % 256 for t in token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id % 256])

    def detokenizer(self, *, skip_special_tokens: bool = True) -> ByteText:
        return self

    def push(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids)

    def flush(self) -> str:
        return ""


@pytest.fixture(scope="module")
def cluster() -> Iterator[StubCluster]:
    with StubCluster({"both": {"workers": 1}}, text=ByteText()) as running:
        yield running


@pytest.fixture(scope="module")
def document(cluster: StubCluster) -> dict[str, Any]:
    answer = httpx.get(f"{cluster.router.url}/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    described: dict[str, Any] = answer.json()
    return described


def routes_of(running: StubCluster) -> list[Any]:
    http: Any = running.router._http
    return list(http._server.config.app.routes)


# --- the document -------------------------------------------------------------------------------------


def test_every_route_is_described_and_nothing_else(cluster: StubCluster, document: dict[str, Any]) -> None:
    there = {(path_of(route), method) for route in routes_of(cluster) for method in route.methods - {"HEAD"}}
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert there == described == set(OPERATIONS)


def test_the_document_follows_the_specification(document: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(document).validate()
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object", name
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


def test_all_references_lead_somewhere(document: dict[str, Any]) -> None:
    def check(part: Any) -> None:
        if isinstance(part, dict):
            if isinstance(reference := part.get("$ref"), str):
                assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]
            for value in part.values():
                check(value)
        elif isinstance(part, list):
            for value in part:
                check(value)

    check(document)


def test_fields_have_their_words(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    chat = schemas["ChatCompletionRequest"]["properties"]
    assert chat["logit_bias"]["description"] == "By token id.", "of a base class"
    assert "Before `max_tokens`" in chat["max_completion_tokens"]["description"]
    assert schemas["ChatCompletionRequest"]["description"] == "POST /v1/chat/completions."
    assert not {"functions", "echo", "audio"} & chat.keys(), "what is refused is not offered"
    assert "reasoning_effort" in chat
    assert "structural_tag" not in schemas["StructuredOutputs"]["properties"]


def test_keys_are_asked_for_where_there_are_some(cluster: StubCluster, document: dict[str, Any]) -> None:
    assert all(operation["security"] == [] for methods in document["paths"].values() for operation in methods.values())
    keyed = describe(parse_config({"http": {"api_keys": [KEY]}}).http, routes_of(cluster))
    for path, methods in keyed["paths"].items():
        is_open = path in ("/health", "/ready", "/ping", "/version", "/", "/ui")
        for operation in methods.values():
            assert operation["security"] == ([] if is_open else [{"key": []}])
            assert ("401" in operation["responses"]) != is_open


# --- what is asked at random --------------------------------------------------------------------------

CHECKS = {
    # Which fields go together is more than a schema says, so what it allows may be refused: by name, with 400.
    "positive_data_acceptance": {"enabled": False},
}


def run(document: dict[str, Any], url: str | None, *, seed: int, **settings: Any) -> tuple[list[str], Counter[Any]]:
    """What schemathesis finds wrong, and how often each operation was answered with which status."""
    config = schemathesis.Config.from_dict({
        "seed": seed,
        "base-url": url,
        "request-timeout": 60,
        "checks": CHECKS,
        **settings,
    })  # fmt: skip
    config.output.sanitization.update(enabled=False)
    wrong: list[str] = []
    statuses: Counter[Any] = Counter()
    for event in from_schema(schemathesis.openapi.from_dict(document, config=config)).execute():
        if isinstance(event, events.ScenarioFinished):
            for interaction in event.recorder.interactions.values():
                assert interaction.response is not None, "the server answers everything"
                statuses[event.label, interaction.response.status_code] += 1
            for checks in event.recorder.checks.values():
                wrong += [
                    f"{check.name}: {check.failure_info.failure}\n{check.failure_info.code_sample}"
                    for check in checks
                    if check.failure_info is not None
                ]
        elif isinstance(event, events.NonFatalError):
            wrong.append(f"{event.label}: {event.value}")
        elif isinstance(event, events.FatalError):
            raise event.exception
    return wrong, statuses


def test_whatever_is_asked_is_answered_as_described(cluster: StubCluster, document: dict[str, Any]) -> None:
    """Each field at its limits and beyond, of the wrong type, left out; other methods. Made up from a seed."""
    described = copy.deepcopy(document)
    schemas = described["components"]["schemas"]
    for body, names in {
        # What both have is tried with one of them; what excludes something else would be all that is tried.
        "ChatCompletionRequest": schemas["CompletionRequest"]["properties"].keys() - {"model", "stream", "logprobs"},
        "CompletionRequest": {"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"},
        "TokenizeBody": {"messages", "tools", "continue_final_message", "chat_template_kwargs"},
    }.items():
        for name in names & schemas[body]["properties"].keys():
            del schemas[body]["properties"][name]
    wrong, statuses = run(
        described,
        cluster.router.url,
        seed=1,
        generation={"max-examples": 2, "database": "none", "no-shrink": True},
        phases={
            "stateful": {"enabled": False},
            "coverage": {"unexpected-methods": ["DELETE", "TRACE"]},
        },
    )
    assert not wrong, "\n\n".join(wrong[:5])
    assert {label for label, _ in statuses} == {f"{method} {path}" for path, method in OPERATIONS}
    assert sum(n for (_, status), n in statuses.items() if status >= 500) == 0
    cluster.wait_ledger_zero()
    assert not cluster.step_failures()


def numbers(first: int, last: int) -> dict[str, Any]:
    """Whole ones written as such: to a schema 5.0 is an integer, too, and the server takes it for none."""
    return {"enum": list(range(first, last + 1))}


SMALL = numbers(0, 255)


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The same with ranges in which the stub's model says yes, so that the answers are tested and not the refusals."""
    narrow = copy.deepcopy(document)
    narrow["paths"] = {
        path: methods
        for path, methods in narrow["paths"].items()
        if path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
    }
    schemas = narrow["components"]["schemas"]
    word = {"type": "string", "minLength": 1, "maxLength": 8, "pattern": "^[a-zé€]*$"}
    turn = {
        "type": "object",
        "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": word},
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    shared = {
        "n": numbers(1, 3),
        "max_tokens": numbers(1, 6),
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "seed": numbers(-5, 5),
        "stop": {"anyOf": [word, {"type": "array", "items": word, "maxItems": 3}]},
        "stream": {"type": "boolean"},
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,2}$"},
            "additionalProperties": numbers(-5, 5),
        },
        "stop_token_ids": {"type": "array", "items": SMALL, "maxItems": 3},
        "bad_words": {"type": "array", "items": word, "maxItems": 2},
        "return_token_ids": {"type": "boolean"},
        "return_tokens_as_token_ids": {"type": "boolean"},
        "ignore_eos": {"type": "boolean"},
        "top_k": numbers(-1, 5),
    }  # fmt: skip
    for name, own in {
        "CompletionRequest": {
            **shared,
            "prompt": {"anyOf": [word, {"type": "array", "items": SMALL, "minItems": 1, "maxItems": 5}]},
            "logprobs": numbers(0, 5),
            "echo": {"type": "boolean"},
        },
        "ChatCompletionRequest": {
            **shared,
            "messages": {"type": "array", "items": turn, "minItems": 1, "maxItems": 3},
            "logprobs": {"type": "boolean"},
        },
        "TokenizeBody": {"prompt": word, "return_token_strs": {"type": "boolean"}},
        "DetokenizeBody": {"tokens": {"type": "array", "items": SMALL, "maxItems": 5}},
    }.items():
        schemas[name]["properties"] = own
        schemas[name]["required"] = [key for key in ("prompt", "messages", "tokens") if key in own]
        schemas[name]["additionalProperties"] = False
    return narrow


def test_answers_are_as_described(cluster: StubCluster, document: dict[str, Any]) -> None:
    wrong, statuses = run(
        narrowed(document),
        cluster.router.url,
        seed=2,
        generation={"max-examples": 12, "mode": "positive", "database": "none", "no-shrink": True},
        phases={"examples": {"enabled": False}, "coverage": {"enabled": False}, "stateful": {"enabled": False}},
    )
    assert not wrong, "\n\n".join(wrong[:5])
    for operation in ("POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize", "POST /detokenize"):
        assert statuses[operation, 200] >= 8, statuses
    cluster.wait_ledger_zero()
