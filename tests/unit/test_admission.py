"""What is refused before any worker hears of it, and what the refusal says."""

from __future__ import annotations

import pytest

from baton.errors import InvalidRequestError, RequestError, RequestTooLargeError
from baton.protocol import ChatMessage, Generate, LoadReport, WorkerInfo
from baton.sampling_params import SamplingParams
from router.admission import check_request, check_source, check_token_ids, predict_prefill_s
from router.policy import Demand, PlacementPolicy
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


def check(num_prompt: int, max_tokens: int, view: ClusterView, n: int = 1) -> None:
    check_request(num_prompt, max_tokens, view=view, policy=POLICY, max_requests=10, n=n)


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
        check(0, 5, view_of(worker("b0")))


def test_a_prompt_that_only_the_prefill_pool_is_too_small_for_says_so() -> None:
    small = worker("p0", num_blocks=2)
    with pytest.raises(RequestTooLargeError, match="fits no prefill worker's KV pool") as e:
        check(100, 20, view_of(small, worker("d0")))
    assert e.value.field == "prompt"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"), [(190, 11, "max_tokens"), (200, 1, "prompt"), (500, 1, "prompt")]
)
def test_longer_than_the_model_reads(prompt: int, max_tokens: int, field: str) -> None:
    with pytest.raises(RequestTooLargeError, match="max_model_len 200") as e:
        check(prompt, max_tokens, view_of(worker("p0"), worker("d0")))
    assert isinstance(e.value, RequestError)
    assert e.value.field == field


def test_exactly_as_long_as_the_model_reads() -> None:
    check(190, 10, view_of(worker("p0"), worker("d0")))


def test_more_blocks_than_any_pool_has_names_both_numbers() -> None:
    view = view_of(worker("p0"), worker("d0", num_blocks=10), worker("d1", num_blocks=12))
    check(20, 28, view)
    with pytest.raises(RequestTooLargeError, match="need 13 KV blocks of 4 tokens; the largest pool has 12"):
        check(20, 29, view)


def test_lost_workers_count_for_what_could_ever_fit() -> None:
    view = view_of(worker("p0"), worker("d0"))
    view.workers["d0"].state = "lost"
    check(20, 28, view)  # it will be told that no decode worker lives, which is another error
    with pytest.raises(RequestTooLargeError):
        check(190, 28, view)


def test_nothing_is_too_large_while_no_worker_is_known() -> None:
    check(10_000, 10_000, view_of())


def test_more_samples_than_are_ever_let_in() -> None:
    check(5, 5, view_of(worker("b0")), n=10)
    with pytest.raises(InvalidRequestError, match=r"n is 11, .* router.max_requests, which counts samples, is 10") as e:
        check(5, 5, view_of(worker("b0")), n=11)
    assert e.value.field == "n"


def test_prefill_is_predicted_from_what_waits_and_what_a_token_takes() -> None:
    view = view_of(worker("p0"), worker("p1"), worker("p2"))
    p0, p1, p2 = view.workers.values()
    demand = Demand(100, 120)
    assert predict_prefill_s(demand, [p0, p1, p2]) is None, "nobody has measured"
    p0.load = LoadReport(prefill_token_s=0.001, num_pending_tokens=50)
    assert predict_prefill_s(demand, [p0, p1]) == pytest.approx(0.150)
    view.charge_prefill(p0, 300)  # the router knows of more than the worker had told
    assert predict_prefill_s(demand, [p0]) == pytest.approx(0.400)
    p1.load = LoadReport(prefill_token_s=0.002)
    assert predict_prefill_s(demand, [p0, p1, p2]) == pytest.approx(0.200), "the one that is the first to have it"
