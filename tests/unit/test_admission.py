"""What is refused before any worker hears of it, and what the refusal says."""

from __future__ import annotations

import pytest

from baton.errors import InvalidRequestError, OverloadedError, RequestError, RequestTooLargeError
from baton.protocol import ChatMessage, Generate, WorkerInfo
from baton.sampling_params import SamplingParams
from router.admission import admit, check_source, check_token_ids
from router.policy import PlacementPolicy
from router.view import ClusterView
from tests.fakes_router import config_of, worker

POLICY = PlacementPolicy(config_of())


def request(**source: object) -> Generate:
    return Generate(label="x", sampling=SamplingParams(), **source)  # type: ignore[arg-type]


def view_of(*workers: WorkerInfo) -> ClusterView:
    view = ClusterView()
    for w in workers:
        view.join(w, 0.0)
    return view


def try_admit(num_prompt: int, max_tokens: int, view: ClusterView, num_open: int = 0, max_requests: int = 10) -> None:
    admit(num_prompt, max_tokens, view=view, policy=POLICY, num_open=num_open, max_requests=max_requests)


@pytest.mark.parametrize(
    "source",
    [{"text": "a"}, {"messages": (ChatMessage("user", "a"),)}, {"token_ids": (1,)}],
    ids=lambda s: next(iter(s)),
)
def test_one_source_is_right(source: dict[str, object]) -> None:
    check_source(request(**source))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({}, "this one has none"),
        ({"text": "a", "token_ids": (1,)}, "text and token_ids"),
        ({"text": ""}, "text is empty"),
        ({"messages": ()}, "messages is empty"),
        ({"token_ids": ()}, "token_ids is empty"),
    ],
)
def test_none_two_or_empty_sources_are_wrong(source: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        check_source(request(**source))


def test_the_first_id_outside_the_vocabulary_is_named() -> None:
    check_token_ids((0, 127), 128)
    with pytest.raises(InvalidRequestError, match=r"token_ids\[2\] is 128, .* 0 to 127") as e:
        check_token_ids((0, 1, 128, 500), 128)
    assert e.value.field == "token_ids"


def test_an_empty_prompt_is_invalid() -> None:
    with pytest.raises(InvalidRequestError, match="no tokens"):
        try_admit(0, 5, view_of(worker("b0")))


def test_a_prompt_that_only_the_prefill_pool_is_too_small_for_says_so() -> None:
    small = worker("p0", num_blocks=2)
    with pytest.raises(RequestTooLargeError, match="fits no prefill worker's KV pool") as e:
        try_admit(100, 20, view_of(small, worker("d0")))
    assert e.value.field == "prompt"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"), [(190, 11, "max_tokens"), (200, 1, "prompt"), (500, 1, "prompt")]
)
def test_longer_than_the_model_reads(prompt: int, max_tokens: int, field: str) -> None:
    with pytest.raises(RequestTooLargeError, match="max_model_len 200") as e:
        try_admit(prompt, max_tokens, view_of(worker("p0"), worker("d0")))
    assert isinstance(e.value, RequestError)
    assert e.value.field == field


def test_exactly_as_long_as_the_model_reads() -> None:
    try_admit(190, 10, view_of(worker("p0"), worker("d0")))


def test_more_blocks_than_any_pool_has_names_both_numbers() -> None:
    view = view_of(worker("p0"), worker("d0", num_blocks=10), worker("d1", num_blocks=12))
    try_admit(20, 28, view)
    with pytest.raises(RequestTooLargeError, match="need 13 KV blocks of 4 tokens; the largest pool has 12"):
        try_admit(20, 29, view)


def test_lost_workers_count_for_what_could_ever_fit() -> None:
    view = view_of(worker("p0"), worker("d0"))
    view.workers["d0"].state = "lost"
    try_admit(20, 28, view)  # it will be told that no decode worker lives, which is another error
    with pytest.raises(RequestTooLargeError):
        try_admit(190, 28, view)


def test_nothing_is_too_large_while_no_worker_is_known() -> None:
    try_admit(10_000, 10_000, view_of())


def test_the_bound_on_open_requests() -> None:
    view = view_of(worker("b0"))
    try_admit(5, 5, view, num_open=9)
    with pytest.raises(OverloadedError, match=r"10 requests .* router.max_requests is 10"):
        try_admit(5, 5, view, num_open=10)


def test_too_large_is_told_even_when_the_router_is_full() -> None:
    with pytest.raises(RequestTooLargeError):
        try_admit(500, 5, view_of(worker("b0")), num_open=10)
