"""How requests, workers and routers end: cancelled, timed out, drained, broken, stopped. All real but the model."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from baton.engine.request import StepPlan
from baton.errors import InvalidRequestError, OverloadedError, RequestFailedError
from baton.protocol import Submit
from router.actions import RouterAction, SendWorker
from tests.release import STATES, WAYS, Rig, StateName
from tests.stub_cluster import StubCluster, expected_tokens, wait_until

SPLIT: dict[str, Any] = {"prefill": {}, "decode": {}}
PROMPT = list(range(1, 41))


def slow_decode(worker_id: str, plan: StepPlan) -> float:
    return 0.02 if worker_id.startswith("decode") else 0.0


# --- requests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_an_end_from_outside_reaches_everybody_and_frees_everything(state: StateName) -> None:
    """Within 100 ms on an idle machine (`python -m benchmarks.release`); here others may be running."""
    rig = Rig(state)
    try:
        for way in WAYS:
            seconds = min(rig.measure(way) for _ in range(2))
            assert seconds < 1.0, f"{way} in {state}: {seconds:.3f} s"
    finally:
        rig.close()


def test_a_request_may_ask_for_less_time_than_the_router_gives() -> None:
    with (
        StubCluster(SPLIT, step_s=slow_decode, router={"request_timeout_s": 60}) as cluster,
        cluster.client() as client,
    ):
        stream = client.stream(PROMPT, max_tokens=400, timeout_s=0.3)
        got: list[int] = []
        with pytest.raises(RequestFailedError, match=r"took too long: not complete within 0.3 s \(its timeout_s\)"):
            got.extend(token for delta in stream for token in delta.token_ids)
        with pytest.raises(InvalidRequestError, match="timeout_s"):
            client.stream(PROMPT, timeout_s=-1.0)
        cluster.wait_ledger_zero()


def test_open_requests_can_be_explained() -> None:
    cluster = StubCluster(SPLIT, step_s=slow_decode, router={"max_handoffs": 1}, engine={"max_batch_requests": 1})
    with cluster, cluster.client() as client:
        first = client.stream(PROMPT, max_tokens=100)
        core: Any = cluster.router._core
        wait_until(lambda: any(r.decode_spoke for r in list(core._book.by_id.values())), "the first one decodes")
        others = [client.stream([i, *PROMPT], max_tokens=100) for i in (1, 2)]
        wait_until(lambda: core.num_queued == 1, "the third one waits")
        ids = [request_id for request_id, _ in list(core._book.by_id)]
        records = [client.explain(request_id) for request_id in ids]
        assert [record.state for record in records] == ["running", "running", "queued"]
        assert records[0].placements[0].decode == "decode-0"
        assert records[2].queued_s > 0
        assert [record.finish_reason for record in records] == ["", "", ""]
        assert client.status().num_queued == 1
        for stream in (first, *others):
            stream.cancel()
        assert first.result().finish_reason == "abort"
        wait_until(lambda: client.explain(ids[0]).state == "ended", "it has ended")


NUM_BURST = 10_000


def test_a_burst_of_submissions_loses_none_and_keeps_their_order() -> None:
    placed: list[int] = []

    class Watcher:
        def on_action(self, action: RouterAction, now: float) -> None:
            if type(action) is SendWorker and type(action.message) is Submit:
                prompt = action.message.prompt
                placed.append(prompt[0] * 128 + prompt[1])

    cluster = StubCluster(
        {"both": {"kv_blocks": 1024}},
        engine={"max_batch_requests": 512, "max_batch_tokens": 2048, "prefix_cache": False},
        router={"max_requests": 2 * NUM_BURST},
        liveness={"heartbeat_s": 0.5, "timeout_s": 60},
        step_s=lambda worker_id, plan: 0.03,
    )
    with cluster, cluster.client() as client:
        cluster.router._desk.observers.append(Watcher())
        began, cpu = time.monotonic(), time.process_time()
        streams = [client.stream([i // 128, i % 128, 1], max_tokens=1, seed=0) for i in range(NUM_BURST)]
        done = [stream.result() for stream in streams]
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        assert placed == list(range(NUM_BURST))
        assert [list(d.token_ids) for d in done] == [
            expected_tokens([i // 128, i % 128, 1], 1) for i in range(NUM_BURST)
        ]
        cluster.wait_ledger_zero()
        print(f"{NUM_BURST} requests in {seconds:.1f} s, {cpu:.1f} s of CPU time in all threads")


# --- workers ------------------------------------------------------------------------------------------


def test_drain_over_http() -> None:
    pools = {"prefill": {}, "decode": {"workers": 2}}
    with StubCluster(pools) as cluster, httpx.Client(base_url=str(cluster.router.url), timeout=20) as http:
        answer = http.post("/baton/workers/decode-0/drain")
        assert answer.status_code == 200
        assert answer.json() == {
            "worker_id": "decode-0",
            "pool": "decode",
            "state": "draining",
            "breaker": "closed",
            "outstanding": 0,
        }
        with cluster.client() as client:
            assert {client.generate(PROMPT, max_tokens=3).decode_worker for _ in range(4)} == {"decode-1"}
            assert http.post("/baton/workers/decode-0/drain?undo=true").json()["state"] == "ready"
            assert {client.generate(PROMPT, max_tokens=3).decode_worker for _ in range(4)} == {"decode-0", "decode-1"}
        unknown = http.post("/baton/workers/nobody/drain")
        assert unknown.status_code == 404
        error = unknown.json()["error"]
        assert error["message"].startswith("there is no worker nobody; known: decode-0, decode-1, prefill-0")
        assert (error["type"], error["param"]) == ("invalid_request_error", "worker_id")
        assert http.post("/baton/workers/decode-0/drain?undo=perhaps").status_code == 400
        assert http.get("/baton/workers/decode-0/drain").status_code == 405


def test_a_decode_worker_whose_steps_fail_is_left_alone_until_it_works_again() -> None:
    broken = threading.Event()
    broken.set()

    def step_s(worker_id: str, plan: StepPlan) -> float:
        if worker_id == "decode-0" and broken.is_set():
            raise RuntimeError("made up: the step fails")
        return 0.0

    cluster = StubCluster(
        {"prefill": {}, "decode": {"workers": 2}},
        step_s=step_s,
        router={"breaker_failures": 3, "breaker_cooldown_s": 0.2, "decode_policy": "round_robin", "max_attempts": 4},
    )

    def breaker() -> str:
        workers = cluster.router.status().workers
        return next(w.breaker for w in workers if w.info.worker_id == "decode-0")

    with cluster, cluster.client() as client:
        for i in range(20):
            done = client.generate([i, *PROMPT], max_tokens=5, seed=0)
            assert list(done.token_ids) == expected_tokens([i, *PROMPT], 5)
            assert done.decode_worker == "decode-1"
            if breaker() == "open":
                break
            time.sleep(0.06)  # failures of one moment count as one
        assert breaker() == "open"
        core: Any = cluster.router._core
        retries = core.num_retries
        assert {client.generate([i, *PROMPT], max_tokens=5).attempts for i in range(5)} <= {1, 2}
        assert core.num_retries <= retries + 3, "only a trial once its cooldown is over"
        broken.clear()
        wait_until(
            lambda: client.generate(PROMPT, max_tokens=5).decode_worker == "decode-0", "a trial has brought it back"
        )
        assert breaker() == "closed"
        cluster.wait_ledger_zero()


# --- the router ---------------------------------------------------------------------------------------


def test_a_router_that_stops_lets_open_requests_end_and_nothing_new_in() -> None:
    cluster = StubCluster(SPLIT, step_s=slow_decode, router={"shutdown_grace_s": 30})
    url = str(cluster.router.url)
    with cluster, cluster.client() as client, ThreadPoolExecutor(2) as pool:
        stream = client.stream(PROMPT, max_tokens=100, seed=0)
        deltas = iter(stream)
        body = {"prompt": PROMPT, "max_tokens": 100, "stream": True, "seed": 0, "temperature": 0}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if line)  # both have begun
            next(deltas)
            stopping = pool.submit(cluster.router.stop)
            core: Any = cluster.router._core
            wait_until(lambda: core.stopping, "the router is stopping")
            with pytest.raises(OverloadedError, match="the router is stopping") as refused:
                client.generate(PROMPT, max_tokens=1)
            assert refused.value.retry_after_s == 31.0
            late = httpx.post(f"{url}/v1/completions", json={**body, "stream": False}, timeout=60)
            assert late.status_code == 503
            assert int(late.headers["retry-after"]) >= 1
            assert httpx.get(f"{url}/ready", timeout=60).status_code == 503
            assert not stopping.done()
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        for _ in deltas:
            pass
        done = stream.completion
        assert done is not None
        assert (list(done.token_ids), done.finish_reason) == (expected_tokens(PROMPT, 100), "length")
        stopping.result(30)
        cluster.wait_ledger_zero()


def test_a_second_stop_cuts_the_first_one_short() -> None:
    cluster = StubCluster(SPLIT, step_s=slow_decode, router={"shutdown_grace_s": 600})
    with cluster, cluster.client() as client, ThreadPoolExecutor(1) as pool:
        deltas = iter(client.stream(PROMPT, max_tokens=400))
        next(deltas)
        stopping = pool.submit(cluster.router.stop)
        core: Any = cluster.router._core
        wait_until(lambda: core.stopping, "the router is stopping")
        cluster.router.stop()
        stopping.result(20)
        with pytest.raises(RequestFailedError, match="the router was stopped"):
            list(deltas)


def test_what_is_open_after_the_grace_fails() -> None:
    cluster = StubCluster(SPLIT, step_s=slow_decode, router={"shutdown_grace_s": 0.3})
    with cluster, cluster.client() as client:
        deltas = iter(client.stream(PROMPT, max_tokens=400))
        next(deltas)
        began = time.monotonic()
        cluster.router.stop()
        assert time.monotonic() - began >= 0.3
        with pytest.raises(RequestFailedError, match="the router was stopped"):
            list(deltas)


def test_an_idle_router_stops_at_once() -> None:
    cluster = StubCluster(SPLIT, router={"shutdown_grace_s": 600})
    with cluster, cluster.client() as client:
        client.generate(PROMPT, max_tokens=3)
        began = time.monotonic()
        cluster.router.stop()
        assert time.monotonic() - began < 8
