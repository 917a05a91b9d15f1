"""Sampling, stop strings and several samples: equal wherever a request runs. Real sampler, made-up logits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from typer.testing import CliRunner

from baton.engine.logit_processors import process
from baton.engine.logprobs import token_logprobs
from baton.engine.request import EngineRequest, StepPlan
from baton.engine.sampler import Row, choose
from baton.engine.step_sampler import prompt_places
from baton.errors import InvalidRequestError, OverloadedError
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams, TokenLogprobs
from baton_cli.main import app
from router.client import Completion, RouterClient
from tests.fakes import VOCAB
from tests.stub_cluster import LAYOUT, StubCluster, wait_until

EOS = ord("e")
ENGINE = {"max_batch_tokens": 48, "max_batch_requests": 8}
SPLIT = {"prefill": {"workers": 2}, "decode": {"workers": 2}}
CASES = {
    "colocated": ({"both": {"workers": 2}}, "inproc"),
    "split inproc": (SPLIT, "inproc"),
    "split shm": (SPLIT, "shm://"),
    "split zmq+tcp": (SPLIT, "zmq+tcp://127.0.0.1"),
}


def logits_after(tokens: list[int]) -> Row:
    """Made up, of all tokens so far; letters are likely."""
    digest = xxhash.xxh3_64_intdigest(b"".join(t.to_bytes(4, "little") for t in tokens))
    logits = np.random.Generator(np.random.Philox(key=digest)).normal(size=VOCAB).astype(np.float32) * np.float32(1.5)
    logits[ord("a") : ord("h")] += 5
    return logits


def logprobs_of(tokens: list[int], position: int, num_top: int) -> TokenLogprobs:
    return token_logprobs(torch.from_numpy(logits_after(tokens[:position])[None]), [tokens[position]], [num_top])[0]


class Reporting:
    """A stub cluster's runner that also tells what its requests ask about their tokens."""

    def __init__(self, run: Any):
        self._run = run

    def __call__(self, plan: StepPlan) -> list[int | None]:
        tokens: list[int | None] = self._run(plan)
        for item, token in zip(plan.items, tokens, strict=True):
            request, sampling = item.request, item.request.sampling
            known, num_top = request.tokens, sampling.prompt_logprobs
            if request.wants_prompt_logprobs and num_top is not None:
                item.prompt_logprobs = [logprobs_of(known, i + 1, num_top) for i in prompt_places(item)]
            if token is not None and sampling.logprobs is not None:
                item.logprobs = logprobs_of([*known, token], len(known), sampling.logprobs)
        return tokens


def sampled_token(request: EngineRequest) -> int:
    """The real sampler on these logits."""
    logits = logits_after(request.tokens)
    process(logits, request.sampling, request.tokens, request.num_prompt, forbidden=request.forbidden)
    return choose(logits, request.sampling, request.sample, request.num_tokens)


def first_letter_then_made_up(first: int) -> Any:
    return lambda request: first if request.num_outputs == 0 else sampled_token(request)


def start(case: str, *, next_token: Any = sampled_token, eos: int | None = EOS, **sections: Any) -> StubCluster:
    pools, transport = CASES[case]
    cluster = StubCluster(pools, transport=transport, engine=ENGINE, **sections)
    for name, worker in cluster.workers.items():
        cluster.runners[name].next_token = next_token
        cluster.runners[name].run = Reporting(cluster.runners[name].run)  # type: ignore[method-assign]
        worker.core.engine._eos = frozenset(() if eos is None else (eos,))
    return cluster


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def cluster(case: str) -> Iterator[StubCluster]:
    with start(case) as cluster:
        yield cluster
        cluster.wait_ledger_zero()
        assert cluster.step_failures() == []
        for worker in cluster.workers.values():
            assert worker.core.engine.live() == []


def expected(prompt: list[int], number: int = 0, **options: Any) -> tuple[str, list[int], str]:
    """Text, tokens and finish reason of an undisturbed run, by the rules as the documentation has them."""
    options.pop("n", None)
    stops, include = options.pop("stop", ()), options.pop("include_stop_str_in_output", False)
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    params = SamplingParams(**{**options, "stop_token_ids": tuple(options.get("stop_token_ids", ()))})
    request = EngineRequest(RequestKey("", 0, number), prompt, params)
    request.stop_ids |= frozenset() if params.ignore_eos else {EOS}
    tokens, text = [], ""
    while True:
        token = sampled_token(request)
        request.tokens.append(token)
        tokens.append(token)
        text += chr(token)
        enough = len(tokens) > params.min_tokens
        ending = [s for s in stops if text.endswith(s)] if enough else []
        if ending:
            return text if include else text[: -len(max(ending, key=len))], tokens, "stop"
        if enough and token in request.stop_ids:
            return text, tokens, "stop"
        if len(tokens) == params.max_tokens:
            return text, tokens, "length"


def prompt_of(number: int) -> list[int]:
    return [(number * 131 + i * 7) % VOCAB for i in range(1 + number * 5 % 90)]


TABLE: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "ignore_eos": True},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "ignore_eos": True},
    {"min_tokens": 12},
    {"temperature": 1.0, "min_tokens": 12, "stop_token_ids": [ord("a"), ord("b"), 5000]},
    {"temperature": 1.0, "stop_token_ids": [ord("c")], "ignore_eos": True},
    {"temperature": 1.0, "stop": "a", "ignore_eos": True},
    {"temperature": 1.0, "stop": ["ab", "ba", "ccc"], "ignore_eos": True},
    {"temperature": 1.0, "stop": ["ab", "ba"], "include_stop_str_in_output": True, "ignore_eos": True},
    {"temperature": 1.0, "stop": ["a", "bc"], "min_tokens": 10},
    {"temperature": 1.0, "stop": ["nothing like this"], "max_tokens": 1},
    {"temperature": 1.0, "min_tokens": 24, "max_tokens": 24},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "ignore_eos": True},
    {"repetition_penalty": 1.4, "temperature": 1.0, "ignore_eos": True},
    {"logit_bias": {ord("z"): 6.0}, "temperature": 1.0},
    {"allowed_token_ids": (1, 2, 3), "bad_token_ids": ((1, 1), (2, 3)), "temperature": 2.0},
]


def test_a_table_of_parameters_gives_what_an_undisturbed_run_gives(cluster: StubCluster) -> None:
    """Rows 23 and 26: many prompts at once, each token, text, finish reason and count."""
    runs = [
        (prompt_of(3 * i + j), {"max_tokens": 24, "seed": 7 + i, **row})
        for i, row in enumerate(TABLE)
        for j in range(3)
    ]
    with cluster.client() as client, ThreadPoolExecutor(16) as pool:
        done = list(pool.map(lambda run: client.generate(run[0], **run[1]), runs))
    for (prompt, options), completion in zip(runs, done, strict=True):
        text, tokens, reason = expected(prompt, **options)
        assert (completion.text, list(completion.token_ids), completion.finish_reason) == (text, tokens, reason), (
            options
        )
        assert completion.usage.completion_tokens == len(tokens)
        assert completion.attempts == 1
    assert len({c.finish_reason for c in done}) == 2


def assert_reported(prompt: list[int], options: dict[str, Any], done: Completion) -> None:
    """To the bit: these logits do not depend on a batch."""
    for choice in done.choices:
        tokens = [*prompt, *choice.token_ids]
        wanted = [logprobs_of(tokens, i, options["logprobs"]) for i in range(len(prompt), len(tokens))]
        assert list(choice.logprobs or ()) == wanted
    about_prompt = [None, *(logprobs_of(prompt, i, options["prompt_logprobs"]) for i in range(1, len(prompt)))]
    assert list(done.prompt_logprobs or ()) == about_prompt


def test_row_25_log_probabilities_are_those_of_an_undisturbed_run(cluster: StubCluster) -> None:
    rows: list[dict[str, Any]] = [{}, {"stop": ["ab", "cc"]}, {"n": 3}, {"frequency_penalty": 1.0, "n": 2}]
    runs = [
        (prompt_of(i), {"max_tokens": 14, "temperature": 1.0, "seed": i, "logprobs": 3, "prompt_logprobs": 1, **row})
        for i, row in enumerate(rows * 3)
    ]
    with cluster.client() as client, ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda run: client.generate(run[0], **run[1]), runs))
    for (prompt, options), completion in zip(runs, done, strict=True):
        assert_reported(prompt, options, completion)


def test_streams_add_up_and_hold_back_only_what_may_stop(cluster: StubCluster) -> None:
    for i, stop in enumerate((["ab", "ba"], ["zzzz"], [chr(c) * 2 for c in range(97, 105)])):
        options: dict[str, Any] = {"temperature": 1.0, "seed": i, "max_tokens": 40, "stop": stop, "ignore_eos": True}
        text, tokens, reason = expected(prompt_of(i), **options)
        with cluster.client() as client, client.stream(prompt_of(i), **options) as stream:
            deltas = list(stream)
            done = stream.result()
        assert "".join(d.text for d in deltas) == done.text == text
        assert [t for d in deltas for t in d.token_ids] == list(done.token_ids) == tokens
        assert done.finish_reason == reason


@pytest.mark.parametrize("streamed", [False, True])
def test_row_21_one_token_first_token_and_boundary(cluster: StubCluster, streamed: bool) -> None:
    prompt = prompt_of(9)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
    letters = expected(prompt, max_tokens=3, **options)[0]

    def run(**more: Any) -> tuple[str, int, str]:
        with cluster.client() as client:
            if not streamed:
                done = client.generate(prompt, **options, **more)
                return done.text, len(done.token_ids), done.finish_reason
            with client.stream(prompt, **options, **more) as stream:
                deltas = list(stream)
                return (
                    "".join(d.text for d in deltas),
                    sum(len(d.token_ids) for d in deltas),
                    stream.result().finish_reason,
                )

    assert run(max_tokens=1) == (letters[0], 1, "length")
    assert run(max_tokens=30, stop=letters[0]) == ("", 1, "stop")
    assert run(max_tokens=1, stop=letters[0]) == ("", 1, "stop")
    assert run(max_tokens=30, stop=letters[:2]) == ("", 2, "stop")
    assert run(max_tokens=30, stop=letters[1:3]) == (letters[0], 3, "stop")
    assert run(max_tokens=2, stop=letters[1:3]) == (letters[:2], 2, "length")


@pytest.mark.parametrize("case", CASES)
def test_row_22_eos_first(case: str) -> None:
    with start(case, next_token=first_letter_then_made_up(EOS)) as cluster, cluster.client() as client:
        done = client.generate(prompt_of(9), max_tokens=20, temperature=1.0, seed=1)
        assert (len(done.token_ids), done.finish_reason, done.kv_bytes) == (1, "stop", 0)
        cluster.wait_ledger_zero()
        steps = sum(w.core.engine.num_steps for name, w in cluster.workers.items() if name.startswith("decode"))
        assert steps == 0
        on = client.generate(prompt_of(9), max_tokens=20, temperature=1.0, seed=1, ignore_eos=True)
        assert (len(on.token_ids), on.finish_reason) == (20, "length")
        cluster.wait_ledger_zero()


@pytest.mark.parametrize("case", CASES)
def test_a_stop_string_frees_the_workers_at_once(case: str) -> None:
    with start(case, eos=None) as cluster:
        for runner in cluster.runners.values():
            runner._step_s = lambda plan: 0.01
        with cluster.client() as client:
            options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 400}
            first_two = expected(prompt_of(40), **{**options, "max_tokens": 2, "ignore_eos": True})[0]
            for stop in (first_two[0], first_two):
                done = client.generate(prompt_of(40), stop=stop, **options)
                assert (done.text, len(done.token_ids), done.finish_reason) == ("", len(stop), "stop")
                wait_until(lambda: cluster.num_held_blocks() == 0, "blocks are freed", within_s=2)
        cluster.wait_ledger_zero()


def choices_of(done: Completion) -> list[tuple[str, list[int], str]]:
    return [(c.text, list(c.token_ids), c.finish_reason) for c in done.choices]


def test_several_samples_are_each_an_undisturbed_run(cluster: StubCluster) -> None:
    """Row 24, without shared prompts: a batch of prompts times n."""
    rows: list[dict[str, Any]] = [{}, {"stop": ["ab", "cc"], "ignore_eos": True}, {"min_tokens": 5, "top_k": 20}]
    runs = [
        (prompt_of(i), {"max_tokens": 20, "temperature": 1.0, "seed": i, "n": n, **row})
        for i, (row, n) in enumerate(itertools.product(rows, (1, 2, 4)))
    ]
    with cluster.client() as client, ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda run: client.generate(run[0], **run[1]), runs))
    for (prompt, options), completion in zip(runs, done, strict=True):
        wanted = [expected(prompt, i, **options) for i in range(options["n"])]
        assert choices_of(completion) == wanted
        assert [c.index for c in completion.choices] == list(range(options["n"]))
        assert completion.text == completion.choices[0].text
        assert completion.usage.prompt_tokens == len(prompt)
        assert completion.usage.completion_tokens == sum(len(tokens) for _, tokens, _ in wanted)
        if options["n"] == 4:
            assert len({c.text for c in completion.choices}) > 1


def test_deltas_of_samples_are_told_apart_and_say_when_they_end(cluster: StubCluster) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "seed": 4, "n": 3, "stop": ["ab", "ba", "cd"]}
    with cluster.client() as client, client.stream(prompt_of(20), **options) as stream:
        deltas = list(stream)
        done = stream.result()
    for choice in done.choices:
        mine = [d for d in deltas if d.sample == choice.index]
        assert "".join(d.text for d in mine) == choice.text
        assert tuple(t for d in mine for t in d.token_ids) == choice.token_ids
        assert [d.finish_reason for d in mine if d.finish_reason] == [choice.finish_reason] == [mine[-1].finish_reason]


@pytest.mark.parametrize("case", CASES)
def test_one_sample_cancelled_leaves_the_others(case: str) -> None:
    with start(case, eos=None) as cluster, cluster.client() as client:
        for runner in cluster.runners.values():
            runner._step_s = lambda plan: 0.002
        options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 4, "n": 4}
        with client.stream(prompt_of(20), **options) as stream:
            seen: set[int] = set()
            for delta in stream:
                if delta.sample == 2 and 2 not in seen:
                    stream.cancel(2)
                seen.add(delta.sample)
            done = stream.result()
        wanted = [expected(prompt_of(20), i, ignore_eos=True, **options) for i in range(4)]
        assert [choice for i, choice in enumerate(choices_of(done)) if i != 2] == [wanted[i] for i in (0, 1, 3)]
        _, tokens, reason = choices_of(done)[2]
        assert reason == "abort"
        assert 0 < len(tokens) < 60
        assert tokens == wanted[2][1][: len(tokens)]
        assert done.usage.completion_tokens == 180 + len(tokens)
        cluster.wait_ledger_zero()


@pytest.mark.parametrize("case", CASES)
def test_leaving_a_stream_ends_all_samples(case: str) -> None:
    with start(case, eos=None) as cluster, cluster.client() as client:
        for runner in cluster.runners.values():
            runner._step_s = lambda plan: 0.005
        with client.stream(prompt_of(30), max_tokens=400, temperature=1.0, n=5) as stream:
            deltas = iter(stream)
            next(deltas)
            assert client.status().num_requests == 5
        wait_until(lambda: client.status().num_requests == 0, "all samples ended")
        cluster.wait_ledger_zero()


def test_max_requests_counts_samples() -> None:
    with start("colocated", router={"max_requests": 4}) as cluster, cluster.client() as client:
        with pytest.raises(InvalidRequestError, match="max_requests"):
            client.generate([1], n=5)
        for runner in cluster.runners.values():
            runner._step_s = lambda plan: 0.005
        with client.stream([1], n=3, max_tokens=300, ignore_eos=True) as stream:
            deltas = iter(stream)
            next(deltas)
            with pytest.raises(OverloadedError):
                client.generate([1], n=2)
            assert client.generate([1], max_tokens=2, ignore_eos=True).finish_reason == "length"
        cluster.wait_ledger_zero()


def test_a_worker_that_dies_costs_neither_samples_nor_stops() -> None:
    """Prior tokens count for min_tokens and max_tokens, and the text of stop strings goes on where it was."""
    with start("colocated", eos=None, router={"max_attempts": 5}) as cluster, cluster.client() as client:
        broken = cluster.runners["both-0"]
        good_run = broken.run

        def run_then_fail(plan: Any) -> list[int | None]:
            if broken.num_steps >= 8:
                raise MemoryError("no memory left")
            return good_run(plan)

        broken.run = run_then_fail  # type: ignore[method-assign]
        options: dict[str, Any] = {"max_tokens": 40, "min_tokens": 20, "temperature": 1.0, "seed": 2, "n": 4}
        options |= {"stop": ["aa", "bb", "ab"], "stop_token_ids": [ord("g")]}
        reports = {"logprobs": 2, "prompt_logprobs": 0}
        done = client.generate(prompt_of(20), **options, **reports)
        assert choices_of(done) == [expected(prompt_of(20), i, ignore_eos=True, **options) for i in range(4)]
        assert_reported(prompt_of(20), reports, done)
        assert done.attempts > 1
        cluster.wait_ledger_zero()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1 << 40}, "top_k"),
        ({"min_p": 1.0}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_wrong_options_fail_at_the_call(options: dict[str, Any], field: str) -> None:
    client = RouterClient("tcp://127.0.0.1:1")
    with pytest.raises(InvalidRequestError) as caught:
        client.stream("x", **options)
    assert caught.value.field == field
    client.close()


def test_an_unknown_option_is_named() -> None:
    client = RouterClient("tcp://127.0.0.1:1")
    with pytest.raises(TypeError, match="'top_q'"):
        client.stream("x", top_q=1)  # type: ignore[call-arg]
    client.close()


def test_the_command_line_passes_it_all_on() -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "top_k": 30, "top_p": 0.95, "min_p": 0.01}
    options |= {"min_tokens": 4, "max_tokens": 30, "stop": ["ab", "ba"], "n": 3}
    flags = ["--temperature", "1", "--seed", "3", "--top-k", "30", "--top-p", "0.95", "--min-p", "0.01"]
    flags += ["--min-tokens", "4", "--max-tokens", "30", "--stop", "ab", "--stop", "ba", "--n", "3", "--raw"]
    wanted = [expected([ord(c) for c in "hello"], i, **options) for i in range(3)]
    with start("split inproc") as cluster:
        submit = ["submit", "hello", "--address", cluster.address, *flags]
        answer = json.loads(CliRunner().invoke(app, [*submit, "--json"], catch_exceptions=False).stdout)
        shown = CliRunner().invoke(app, submit, catch_exceptions=False).stdout
    got = [(c["text"], c["token_ids"], c["finish_reason"]) for c in answer["choices"]]
    assert got == wanted
    assert answer["text"] == wanted[0][0]
    for i, (text, _, reason) in enumerate(wanted):
        assert f"[{i}] {reason}" in shown
        assert text in shown


def test_submit_takes_penalties_and_shows_log_probabilities(tmp_path: Path) -> None:
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    flags = [part for name, value in penalties.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    _, tokens, _ = expected([ord(c) for c in "hello"], max_tokens=6, **penalties)
    wanted = [logprobs_of([*map(ord, "hello"), *tokens], 5 + i, 2)._asdict() for i in range(len(tokens))]
    with start("split inproc") as cluster:
        submit = ["submit", "hello", "--raw", "--address", cluster.address]
        asking = [*submit, "--max-tokens", "6", "--logprobs", "2", *flags]
        answer = json.loads(CliRunner().invoke(app, [*asking, "--json"], catch_exceptions=False).stdout)
        shown = CliRunner().invoke(app, asking, catch_exceptions=False).stdout
        broken = tmp_path / "schema.json"
        broken.write_text("{")
        for form in (["--json-schema", str(broken)], ["--regex", "[a"], ["--regex", "a", "--choice", "b"]):
            with pytest.raises(InvalidRequestError):
                CliRunner().invoke(app, [*submit, *form], catch_exceptions=False)
    assert answer["token_ids"] == tokens
    assert answer["choices"][0]["logprobs"] == json.loads(json.dumps(wanted))
    assert "most probable" in shown
    assert f"{wanted[0]['logprob']:.3f}" in shown


def test_block_size_fits_the_table() -> None:
    lengths = {len(prompt_of(i)) % LAYOUT.block_size for i in range(45)}
    assert {0, 1, LAYOUT.block_size - 1} <= lengths
