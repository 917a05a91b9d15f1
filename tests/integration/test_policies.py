"""Placement policies over whole clusters: what workers tell of their caches, and what comes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from baton.engine.request import StepPlan
from baton.prefix_hash import hashes_of_keys, unpack_hashes
from router.client import RouterClient
from tests.stub_cluster import LAYOUT, WAIT_S, StubCluster, expected_tokens, wait_until

B = LAYOUT.block_size
POOLS = {"prefill": {"workers": 2}, "decode": {"workers": 2}}
KV_AWARE = {"prefill_policy": "kv_aware", "decode_policy": "kv_aware"}
DOCUMENT = 10 * B
"""Tokens that several prompts begin with."""


def step_s(worker_id: str, plan: StepPlan) -> float:
    """1 ms a step and 0.05 ms a prompt token, so that there is something to measure."""
    return 0.001 + 0.00005 * plan.total_tokens


def prompt_of(document: int, question: int) -> list[int]:
    return [*((document * 37 + i) % 1000 for i in range(DOCUMENT)), *((question * 11 + i) % 1000 for i in range(5))]


def cluster_of(router: dict[str, Any], pools: dict[str, Any] = POOLS, **sections: Any) -> StubCluster:
    return StubCluster(pools, router=router, step_s=step_s, **sections)


@pytest.fixture
def kv_aware() -> Iterator[StubCluster]:
    with cluster_of(KV_AWARE) as cluster:
        yield cluster
        cluster.wait_ledger_zero()
        assert cluster.step_failures() == []


def ask_all(client: RouterClient, num_documents: int, num_questions: int) -> tuple[int, list[set[str]]]:
    """Each question about each document in turn: cached tokens in all, and the prefill workers of each document."""
    cached, workers = 0, [set[str]() for _ in range(num_documents)]
    for question in range(num_questions):
        for document in range(num_documents):
            prompt = prompt_of(document, question)
            done = client.generate(prompt, max_tokens=4, seed=0)
            assert list(done.token_ids) == expected_tokens(prompt, 4)
            cached += done.usage.cached_tokens
            workers[document].add(done.prefill_worker)
    return cached, workers


def in_router(cluster: StubCluster, look: Callable[[Any], Any]) -> Any:
    """What `look(view)` finds, in the router's thread."""
    return cluster.router._call(lambda: look(cluster.router._core.view))


def known(cluster: StubCluster, worker_id: str) -> set[int]:
    """What the router thinks that the worker has."""
    found: set[int] = in_router(cluster, lambda view: set(view.workers[worker_id].prefixes.known))
    return found


def cached_there(cluster: StubCluster, worker_id: str) -> set[int]:
    """Prefix hashes of the full blocks that the worker's own cache would find."""
    worker = cluster.workers[worker_id]
    with worker._condition:
        keys = list(worker.core.engine.pool.all_keys())
    return set(unpack_hashes(hashes_of_keys(key for key in keys if len(key) == 16 + 4 * B)))


def check_index(cluster: StubCluster) -> None:
    """The router knows just what every worker has; nothing is expected any more."""
    for worker_id in cluster.workers:
        wait_until(
            lambda worker_id=worker_id: known(cluster, worker_id) == cached_there(cluster, worker_id),  # type: ignore[misc]
            f"the router knows what {worker_id} has cached",
        )

    def settled(view: Any) -> bool:
        view.prefixes.check_integrity([w.prefixes for w in view.workers.values()])
        return not any(w.prefixes.expected for w in view.workers.values())

    wait_until(lambda: bool(in_router(cluster, settled)), "nothing is expected of ended requests")


def test_prompts_that_begin_alike_find_their_worker(kv_aware: StubCluster) -> None:
    documents, questions = 5, 3
    with kv_aware.client() as client:
        cached, workers = ask_all(client, documents, questions)
    assert all(len(homes) == 1 for homes in workers), "each document was computed once"
    assert set().union(*workers) == {"prefill-0", "prefill-1"}, "and they are spread"
    assert cached >= documents * (questions - 1) * DOCUMENT
    check_index(kv_aware)
    with (
        cluster_of({"prefill_policy": "round_robin", "decode_policy": "round_robin"}) as other,
        other.client() as client,
    ):
        cached_in_turns, _ = ask_all(client, documents, questions)
        assert known(other, "prefill-0") == set(), "where nobody wants to know, nobody tells"
    assert cached_in_turns <= documents * (questions - 2) * DOCUMENT < cached


def test_a_burst_of_equal_beginnings_is_computed_once() -> None:
    prompts = [prompt_of(0, question) for question in range(8)]
    go_on = threading.Event()
    go_on.set()

    def gated(worker_id: str, plan: StepPlan) -> float:
        assert go_on.wait(WAIT_S)
        return step_s(worker_id, plan)

    with (
        StubCluster(POOLS, router=KV_AWARE, step_s=gated) as cluster,
        cluster.client() as client,
        ThreadPoolExecutor(8) as pool,
    ):
        go_on.clear()
        try:
            answers = [pool.submit(client.generate, prompt, max_tokens=4, seed=0) for prompt in prompts]
            wait_until(
                lambda: sum(in_router(cluster, lambda v: [w.prefill_requests for w in v.workers.values()])) == 8,
                "all are placed, before any of them was computed",
            )
        finally:
            go_on.set()
        done = [answer.result() for answer in answers]
        for prompt, completion in zip(prompts, done, strict=True):
            assert list(completion.token_ids) == expected_tokens(prompt, 4)
        assert len({completion.prefill_worker for completion in done}) == 1
        assert sum(completion.usage.cached_tokens >= DOCUMENT for completion in done) == 7
        check_index(cluster)


def test_after_a_restart_the_index_is_right(kv_aware: StubCluster) -> None:
    with kv_aware.client() as client:
        _, workers = ask_all(client, 4, 2)
        (home,) = workers[0]
        lost = known(kv_aware, home)
        assert lost
        kv_aware.workers[home].stop()
        kv_aware.add(home)
        wait_until(lambda: known(kv_aware, home) == set(), "what the former life had is forgotten")
        check_index(kv_aware)
        done = client.generate(prompt_of(0, 7), max_tokens=4, seed=0)
        assert done.usage.cached_tokens == 0
        again = client.generate(prompt_of(0, 8), max_tokens=4, seed=0)
        assert (again.prefill_worker, again.usage.cached_tokens) == (done.prefill_worker, DOCUMENT)
        check_index(kv_aware)


def test_what_is_evicted_is_forgotten() -> None:
    pools = {"prefill": {"workers": 1, "kv_blocks": 30}, "decode": {"workers": 1, "kv_blocks": 40}}
    with cluster_of(KV_AWARE, pools) as cluster, cluster.client() as client:
        ask_all(client, 6, 2)
        check_index(cluster)
        assert 0 < len(known(cluster, "prefill-0")) <= 30


def test_news_that_were_lost_are_asked_for_again(kv_aware: StubCluster) -> None:
    with kv_aware.client() as client:
        ask_all(client, 2, 1)
        check_index(kv_aware)
        for worker in kv_aware.workers.values():
            with worker._condition:
                worker.core._num_prefix_news += 1  # as if one had not come
        ask_all(client, 3, 1)
        check_index(kv_aware)


def test_explain_shows_what_a_score_is_made_of(kv_aware: StubCluster) -> None:
    with kv_aware.client() as client:
        client.generate(prompt_of(0, 0), max_tokens=4, seed=0)
        done = client.generate(prompt_of(0, 1), max_tokens=4, seed=0)
        record = client.explain(done.request_id)
    (placement,) = record.placements
    scores = {(s.worker_id, s.part): s for s in placement.scores}
    assert set(scores) == {
        ("prefill-0", "prefill"),
        ("prefill-1", "prefill"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
    }
    chosen = scores[done.prefill_worker, "prefill"]
    assert chosen.policy == "kv_aware"
    assert chosen.parts["cached_tokens"] == DOCUMENT
    assert chosen.value == min(s.value for (_, part), s in scores.items() if part == "prefill")
    assert scores[done.decode_worker, "decode"].parts["transfer_ms"] >= 0


def test_workers_tell_how_long_their_steps_take(kv_aware: StubCluster) -> None:
    with kv_aware.client() as client:
        ask_all(client, 4, 1)
    loads = {w.info.worker_id: w.load for w in kv_aware.router.status().workers}
    assert all(loads[f"prefill-{i}"].prefill_token_s > 0.00005 for i in (0, 1))
    assert any(loads[f"decode-{i}"].decode_step_s > 0.001 for i in (0, 1))


def test_short_prompts_are_prefilled_at_decode_while_prefill_is_busy() -> None:
    pools = {"prefill": {"workers": 1}, "decode": {"workers": 1}}
    go_on = threading.Event()
    go_on.set()

    def slow(worker_id: str, plan: StepPlan) -> float:
        if worker_id != "prefill-0":
            return 0.0005
        assert go_on.wait(WAIT_S)
        return 0.001 * plan.total_tokens

    with (
        StubCluster(
            pools, router={"conditional_split": True}, step_s=slow, engine={"max_batch_tokens": 256}
        ) as cluster,
        cluster.client() as client,
        ThreadPoolExecutor(4) as pool,
    ):
        first = client.generate(list(range(200)), max_tokens=4, seed=0)
        assert (first.prefill_worker, first.decode_worker) == ("prefill-0", "decode-0")
        go_on.clear()
        prompts = [list(range(i, i + 400)) for i in range(1, 4)]
        try:
            long = [pool.submit(client.generate, prompt, max_tokens=4, seed=0) for prompt in prompts]
            wait_until(
                lambda: bool(in_router(cluster, lambda view: view.workers["prefill-0"].prefill_requests == 3)),
                "the long prompts are placed",
            )
            done = client.generate(list(range(500, 512)), max_tokens=4, seed=0)
        finally:
            go_on.set()
        assert (done.prefill_worker, done.decode_worker, done.kv_bytes) == ("decode-0", "decode-0", 0)
        assert list(done.token_ids) == expected_tokens(range(500, 512), 4)
        record = client.explain(done.request_id)
        (local,) = [s for s in record.placements[0].scores if s.part == "local"]
        assert (local.worker_id, local.policy) == ("decode-0", "conditional_split")
        assert local.value < local.parts["split_ms"]
        for prompt, future in zip(prompts, long, strict=True):
            assert list(future.result().token_ids) == expected_tokens(prompt, 4)
        cluster.wait_ledger_zero()
        assert cluster.step_failures() == []


@pytest.mark.parametrize("name", ["random", "power_of_two", "least_outstanding_tokens", "session", "slo_aware"])
def test_every_policy_serves_a_burst(name: str) -> None:
    router = {"prefill_policy": name, "decode_policy": name, "conditional_split": True}
    prompts = [prompt_of(i % 3, i) for i in range(12)]
    with cluster_of(router) as cluster, cluster.client() as client, ThreadPoolExecutor(12) as pool:
        done = list(pool.map(lambda prompt: client.generate(prompt, max_tokens=6, seed=0), prompts))
        for prompt, completion in zip(prompts, done, strict=True):
            assert list(completion.token_ids) == expected_tokens(prompt, 6)
        cluster.wait_ledger_zero()
        assert cluster.step_failures() == []
