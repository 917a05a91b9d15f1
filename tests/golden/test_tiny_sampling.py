"""Row 25 of the scenarios, and every sampling feature: the same split, colocated and preempted, element by element.

A tiny random model that speaks bytes: real arithmetic, and texts that can be held to a form. Log probabilities are
compared with Hugging Face's.
"""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.config import parse_config
from baton.engine.step import Step
from baton.errors import InvalidRequestError, RequestFailedError
from baton.sampling_params import StructuredOutput, TokenLogprobs
from baton_cluster.local import LocalCluster
from router.completion import Completion
from tests.byte_model import VOCAB, make_byte_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TOLERANCE = 2e-4
"""Natural logarithms; the order of sums differs with the batch."""
POOLS: dict[str, tuple[dict[str, Any], str]] = {
    "colocated": ({"both": {"kv_memory_mib": 8}}, "inproc"),
    "split": ({"prefill": {"kv_memory_mib": 8}, "decode": {"kv_memory_mib": 8}}, "zmq+tcp"),
    "preempted": ({"both": {"kv_blocks": 14}}, "inproc"),
    "split, preempted": ({"prefill": {"kv_blocks": 24}, "decode": {"kv_blocks": 14}}, "inproc"),
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
CHOICES = ("yes", "no", "perhaps")
FEATURES: dict[str, dict[str, Any]] = {
    "logprobs and prompt_logprobs": {"logprobs": 5, "prompt_logprobs": 5},
    "logprobs of a drawn token": {"logprobs": 0, "prompt_logprobs": 0, "temperature": 1.2},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "logprobs": 1},
    "penalties, drawn": {"frequency_penalty": 2.0, "repetition_penalty": 0.8, "temperature": 0.9, "top_p": 0.9},
    "logit_bias": {"logit_bias": {7: 30.0, 9: -100.0}, "temperature": 1.0, "top_k": 20},
    "allowed_token_ids": {"allowed_token_ids": [5, 6, 7], "temperature": 1.0},
    "bad_token_ids": {"allowed_token_ids": [5, 6], "bad_token_ids": [[5, 5], [6, 6, 6]], "temperature": 2.0},
    "min_tokens": {"min_tokens": 20, "logit_bias": {256: 100.0}, "ignore_eos": False},
    "json": {"structured": StructuredOutput("json", json.dumps(SCHEMA)), "temperature": 1.0, "logprobs": 2},
    "regex": {"structured": StructuredOutput("regex", "[a-f]{3,18}"), "temperature": 1.0, "min_tokens": 6},
    "choice": {"structured": StructuredOutput("choice", choices=CHOICES), "temperature": 1.5},
    "grammar": {"structured": StructuredOutput("grammar", 'start: "x" start "y" | "z"'), "temperature": 1.0},
}
FORMS = {"json": r'\{\s*"a"\s*:\s*(1|22)\s*\}', "regex": "[a-f]{6,18}", "choice": "|".join(CHOICES)}
FORMS["grammar"] = "x*zy*"
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("bytes"))


def start(model: Path, placement: str) -> LocalCluster:
    pools, transport = POOLS[placement]
    tree = {
        "launcher": "local",
        "model": {"source": str(model), "dtype": "float32"},
        "pools": pools,
        "engine": {"max_batch_tokens": 32},
        "transfer": {"transport": transport, "expected_growth": 0},
        "liveness": {"heartbeat_s": 1.0, "timeout_s": 30.0},
    }
    return LocalCluster(parse_config(tree))


def runs() -> list[tuple[str, list[int], dict[str, Any]]]:
    """Each feature with prompts of one token, of whole blocks and of several chunks, one answer and four."""
    draw = random.Random(25)
    found = []
    for name, options in FEATURES.items():
        for length, n in ((1, 1), (16, 4), (75, 1), (100, 2)):
            prompt = [draw.randrange(VOCAB) for _ in range(length)]
            own: dict[str, Any] = {"max_tokens": MAX_TOKENS, "seed": length, "n": n, "ignore_eos": "min_tokens" in name}
            found.append((name, prompt, own | {"ignore_eos": "structured" not in options} | options))
    return found


def completions(cluster: LocalCluster) -> list[Completion]:
    with cluster.client() as client, ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda run: client.generate(run[1], timeout=120, **run[2]), runs()))


@pytest.fixture(scope="module")
def colocated(model: Path) -> list[Completion]:
    with start(model, "colocated") as cluster:
        return completions(cluster)


def assert_close(ours: TokenLogprobs | None, theirs: TokenLogprobs | None, where: str) -> None:
    """Tokens that are equally probable but for rounding may change places."""
    assert ours is not None, where
    assert theirs is not None, where
    told = f"{where}: {ours} is not {theirs}"
    assert ours.token == theirs.token, told
    assert abs(ours.rank - theirs.rank) <= 2, told
    assert ours.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE), told
    assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=TOLERANCE), told
    by_id = dict(zip(theirs.top_ids, theirs.top_logprobs, strict=True))
    for token, value in zip(ours.top_ids, ours.top_logprobs, strict=True):
        assert value == pytest.approx(by_id.get(token, theirs.top_logprobs[-1]), abs=TOLERANCE), told


@pytest.mark.parametrize("placement", [name for name in POOLS if name != "colocated"])
def test_row_25_every_feature_is_the_same_element_by_element(
    model: Path, colocated: list[Completion], placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: list[int] = []
    preempt = Step._preempt
    monkeypatch.setattr(Step, "_preempt", lambda step, r: (preempted.append(r.num_outputs), preempt(step, r)))
    with start(model, placement) as cluster:
        found = completions(cluster)
        assert bool(preempted) == placement.endswith("preempted")
        assert all(worker.num_held_blocks() == 0 for worker in cluster.workers.values())
    for (name, prompt, _), expected, done in zip(runs(), colocated, found, strict=True):
        for choice, other in zip(expected.choices, done.choices, strict=True):
            assert other.token_ids == choice.token_ids, (name, len(prompt))
            assert (other.text, other.finish_reason) == (choice.text, choice.finish_reason)
            for i, (a, b) in enumerate(zip(other.logprobs or (), choice.logprobs or (), strict=True)):
                assert_close(a, b, f"{name}, {len(prompt)} tokens, sample {choice.index}: output {i}")
        assert (done.prompt_logprobs is None) == (expected.prompt_logprobs is None)
        about_prompts = zip((done.prompt_logprobs or ())[1:], (expected.prompt_logprobs or ())[1:], strict=True)
        for i, (a, b) in enumerate(about_prompts, start=1):
            assert_close(a, b, f"{name}, {len(prompt)} tokens: prompt {i}")


def test_row_25_lengths_match_token_counts_and_values_are_hugging_faces(
    model: Path, colocated: list[Completion]
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for (name, prompt, options), done in zip(runs(), colocated, strict=True):
        asked, about_prompt = options.get("logprobs"), options.get("prompt_logprobs")
        assert (done.prompt_logprobs is not None) == (about_prompt is not None), name
        for choice in done.choices:
            assert (choice.logprobs is not None) == (asked is not None)
            if choice.logprobs is None or asked is None:
                continue
            assert len(choice.logprobs) == len(choice.token_ids)
            tokens = [*prompt, *choice.token_ids]
            with torch.inference_mode():
                expected = torch.log_softmax(reference(torch.tensor([tokens])).logits[0].float(), dim=-1)
            for position, entry in enumerate(choice.logprobs, start=len(prompt)):
                assert_is(entry, expected[position - 1], tokens[position], asked)
            if done.prompt_logprobs is not None and about_prompt is not None:
                assert len(done.prompt_logprobs) == len(prompt) == done.usage.prompt_tokens
                assert done.prompt_logprobs[0] is None
                for position, entry in enumerate(done.prompt_logprobs[1:], start=1):
                    assert_is(entry, expected[position - 1], tokens[position], about_prompt)


def assert_is(entry: TokenLogprobs | None, logprobs: torch.Tensor, token: int, asked: int) -> None:
    """Of ranks that lie closer than the tolerance either may come first."""
    assert entry is not None
    assert entry.token == token
    assert entry.logprob == pytest.approx(float(logprobs[token]), abs=TOLERANCE)
    surely_above = int((logprobs > logprobs[token] + TOLERANCE).sum())
    assert surely_above < entry.rank <= int((logprobs >= logprobs[token] - TOLERANCE).sum())
    assert len(entry.top_ids) == asked
    assert list(entry.top_logprobs) == pytest.approx(logprobs.topk(asked).values.tolist(), abs=TOLERANCE)
    assert list(entry.top_logprobs) == pytest.approx(logprobs[list(entry.top_ids)].tolist(), abs=TOLERANCE)


def test_structured_output_has_its_form_and_ends_with_stop(colocated: list[Completion]) -> None:
    ended = 0
    for (name, _, options), done in zip(runs(), colocated, strict=True):
        for choice in done.choices if name in FORMS else ():
            if choice.finish_reason == "length":
                assert len(choice.token_ids) == MAX_TOKENS
                continue
            assert choice.finish_reason == "stop"
            assert re.fullmatch(FORMS[name], choice.text), (name, choice.text)
            assert len(choice.token_ids) > options.get("min_tokens", 0)
            ended += 1
    assert ended > 8


def test_what_the_others_ask_for_is_kept(colocated: list[Completion]) -> None:
    found: dict[str, list[tuple[int, ...]]] = {name: [] for name in FEATURES}
    for (name, _, _), done in zip(runs(), colocated, strict=True):
        found[name] += [choice.token_ids for choice in done.choices]
    assert all(set(tokens) <= {5, 6, 7} for tokens in found["allowed_token_ids"])
    assert all(9 not in tokens for tokens in found["logit_bias"])
    for tokens in found["bad_token_ids"]:
        text = "".join(map(str, tokens))
        assert "55" not in text
        assert "666" not in text
    assert all(len(tokens) == 21 and tokens[-1] == 256 for tokens in found["min_tokens"])
    assert len(set(found["logprobs of a drawn token"])) > 4


def test_streams_carry_them_with_their_tokens(model: Path) -> None:
    with start(model, "split") as cluster, cluster.client() as client:
        options: dict[str, Any] = {"max_tokens": 12, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True, "n": 2}
        with client.stream(list(range(40)), **options) as stream:
            deltas = list(stream)
            done = stream.result()
        for choice in done.choices:
            mine = [d for d in deltas if d.sample == choice.index]
            assert all(len(d.logprobs) == len(d.token_ids) for d in mine)
            assert tuple(entry for d in mine for entry in d.logprobs) == choice.logprobs
        about_prompt = [d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None]
        assert about_prompt == [done.prompt_logprobs]
        plain = done.to_dict()
        assert json.loads(json.dumps(plain))["logprobs"][0]["token"] == done.token_ids[0]
        assert plain["prompt_logprobs"][0] is None
        assert len(plain["choices"][1]["logprobs"]) == 12


def test_bad_requests_are_refused_and_a_form_no_tokenizer_can_follow_fails_alone(model: Path, tiny_model: Path) -> None:
    form = StructuredOutput("regex", "a+")
    with start(model, "split") as cluster, cluster.client() as client:
        for options, field in (
            ({"structured": StructuredOutput("json", "{")}, "structured"),
            ({"structured": StructuredOutput("choice")}, "structured"),
            ({"allowed_token_ids": [1, VOCAB]}, "allowed_token_ids"),
            ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
            ({"bad_token_ids": [[1], [2, VOCAB]]}, "bad_token_ids"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                client.generate([1, 2, 3], **options)
            assert caught.value.field == field
        assert set(client.generate([1, 2, 3], structured=form, max_tokens=4, n=2).text) == {"a"}
    with start(tiny_model, "split") as cluster, cluster.client() as client, ThreadPoolExecutor(4) as pool:
        good = [pool.submit(client.generate, [1, 2, i], max_tokens=20, ignore_eos=True) for i in range(3)]
        with pytest.raises(RequestFailedError, match=r"end-of-text|tokenizer"):
            client.generate([1, 2, 3], structured=form)
        assert [len(future.result().token_ids) for future in good] == [20] * 3
