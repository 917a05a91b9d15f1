"""Log probabilities and single failures on their way through engine and worker core: what a runner wrote to items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton.engine.core import EngineCore
from baton.engine.policy import POLICIES
from baton.engine.request import Effect, Emit, Ended, EngineRequest, StepItem, is_plain
from baton.ports import ToRouter
from baton.protocol import AttemptFailed, RequestKey, Submit, Tokens
from baton.sampling_params import SamplingParams, StructuredOutput, TokenLogprobs
from baton.worker_core import WorkerCore
from tests.fakes_transfer import worker_info

EOS = 99


def about(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -float(token), 1)


def make_core(num_blocks: int = 64, max_batch_tokens: int = 8) -> EngineCore:
    return EngineCore(
        num_blocks=num_blocks,
        block_size=4,
        max_batch_tokens=max_batch_tokens,
        max_batch_requests=8,
        max_model_len=128,
        policy=POLICIES["mixed"](),
        eos_token_ids=[EOS],
    )


def request(name: str, prompt: int, **sampling: Any) -> EngineRequest:
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    start = 100 * (1 + sum(name.encode()))
    return EngineRequest(RequestKey(name, 0), list(range(start, start + prompt)), params)


def report(item: StepItem, token: int | None) -> None:
    """What a runner writes to the item."""
    r = item.request
    if r.wants_prompt_logprobs:
        end = min(item.start + item.num_tokens, r.num_prompt - 1)
        item.prompt_logprobs = [about(r.tokens[i + 1]) for i in range(item.start, end)]
    if token is not None and r.sampling.logprobs is not None:
        item.logprobs = about(token)


def step(core: EngineCore, next_token: Callable[[EngineRequest], int]) -> list[Effect] | None:
    plan = core.schedule(0.0)
    if plan is None:
        return None
    tokens = [next_token(i.request) if i.samples else None for i in plan.items]
    for item, token in zip(plan.items, tokens, strict=True):
        report(item, token)
    effects = core.complete(plan, tokens, 1.0)
    core.check_integrity()
    return effects


def run(core: EngineCore, next_token: Callable[[EngineRequest], int] = lambda r: 7) -> list[Effect]:
    effects: list[Effect] = []
    while (more := step(core, next_token)) is not None:
        effects += more
    return effects


def emits(effects: list[Effect], name: str) -> list[Emit]:
    return [e for e in effects if isinstance(e, Emit) and e.request.key.request_id == name]


@pytest.mark.parametrize("prompt", [1, 2, 7, 8, 9, 30])
def test_of_a_chunked_prompt_all_goes_out_once_with_the_first_token(prompt: int) -> None:
    core = make_core()
    r = request("a", prompt, prompt_logprobs=0, logprobs=0)
    core.submit(r, 0.0)
    found = emits(run(core), "a")
    assert found[0].prompt_logprobs == (None, *(about(t) for t in r.tokens[1:prompt]))
    assert [e.prompt_logprobs for e in found[1:]] == [None] * 3
    assert [e.logprobs for e in found] == [about(7)] * 4


def test_a_preempted_request_tells_about_its_prompt_once() -> None:
    """Both before its first token, when it starts over, and after it, when only its own blocks are computed again."""
    core = make_core(num_blocks=8)
    requests = [request(name, 9, prompt_logprobs=0, max_tokens=12) for name in ("a", "b", "c")]
    for r in requests:
        core.submit(r, 0.0)
    computed: dict[str, int] = {}
    effects: list[Effect] = []
    preempted = 0
    while (more := step(core, lambda r: 7)) is not None:
        effects += more
        for r in requests:
            name = r.key.request_id
            preempted += r.num_computed < computed.get(name, 0) and not r.ended
            computed[name] = r.num_computed
    assert preempted, "the pool was large enough for all"
    for r in requests:
        first, *later = emits(effects, r.key.request_id)
        assert first.prompt_logprobs == (None, *(about(t) for t in r.tokens[1:9]))
        assert all(e.prompt_logprobs is None for e in later)


def test_what_is_computed_again_replaces_what_was_known() -> None:
    r = request("a", 6)
    r.keep_prompt_logprobs(0, [about(1), about(2), about(3)])
    r.keep_prompt_logprobs(0, [about(4)])
    r.keep_prompt_logprobs(1, [about(5), about(6)])
    assert r.prompt_logprobs == [None, about(4), about(5), about(6)]
    with pytest.raises(AssertionError, match="before 9"):
        r.keep_prompt_logprobs(9, [])


def test_prior_tokens_mean_that_the_prompt_was_told_about() -> None:
    key, params = RequestKey("a", 1), SamplingParams(prompt_logprobs=0)
    assert EngineRequest(key, [1, 2], params).wants_prompt_logprobs
    assert not EngineRequest(key, [1, 2], params, prior=[3]).wants_prompt_logprobs


def test_one_request_that_cannot_go_on_ends_alone() -> None:
    core = make_core()
    worker = WorkerCore(worker_info(), core, None, None)
    for name, prompt in (("a", (1, 2, 3)), ("b", (4, 5, 6))):
        worker.on_router_message(Submit(RequestKey(name, 0), prompt, SamplingParams(max_tokens=4, logprobs=0)), 0.0)
    plan = core.schedule(0.0)
    assert plan is not None
    bad, good = plan.items
    bad.problem = "no tokenizer"
    good.logprobs = about(7)
    actions = worker.finish_step(plan, [0, 7], 1.0)
    messages = [a.message for a in actions if isinstance(a, ToRouter)]
    tokens, failed = messages
    assert isinstance(tokens, Tokens)
    assert isinstance(failed, AttemptFailed)
    assert [t.request_id for t in tokens.tokens] == ["b"]
    assert [(entry.request_id, entry.index, entry.token) for entry in tokens.logprobs] == [("b", 0, about(7))]
    assert (failed.key.request_id, failed.code, failed.message) == ("a", "refused", "no tokenizer")
    assert [key.request_id for key in core.live()] == ["b"]
    core.abort(RequestKey("b", 0), 2.0)
    assert worker.num_held_blocks() == 0


def test_structured_output_ends_with_its_end_token_even_before_min_tokens() -> None:
    """It is sampled there only because nothing else can follow."""
    core = make_core()
    form = StructuredOutput("choice", choices=("x",))
    core.submit(request("a", 3, min_tokens=4, structured=form), 0.0)
    effects = run(core, lambda r: EOS if r.num_outputs else 7)
    assert [(e.token, e.finish) for e in emits(effects, "a")] == [(7, None), (EOS, "stop")]
    assert isinstance(effects[-1], Ended)


@pytest.mark.parametrize(
    ("sampling", "plain"),
    [
        ({}, True),
        ({"stop_token_ids": (1,), "ignore_eos": True, "seed": 3, "top_k": 5, "top_p": 0.5}, True),
        ({"temperature": 0.1}, False),
        ({"min_tokens": 1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"repetition_penalty": 0.9}, False),
        ({"logit_bias": {1: 0.0}}, False),
        ({"allowed_token_ids": (1,)}, False),
        ({"bad_token_ids": ((1,),)}, False),
        ({"structured": StructuredOutput("json_object")}, False),
        ({"logprobs": 0}, False),
        ({"prompt_logprobs": 0}, False),
    ],
)
def test_what_takes_the_short_way_through_the_sampler(sampling: dict[str, Any], plain: bool) -> None:
    assert is_plain(SamplingParams(**sampling)) is plain
