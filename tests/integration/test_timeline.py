"""I10: a delay put into one stage shows up in that stage of the timeline, in the client's latency and in the metrics.

Over the native client and over HTTP. A loaded machine adds time of its own to any stage, so what a stage must not take
is asked of several requests, of which one has to be undisturbed; what it must take is asked of all.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.engine.request import StepPlan
from baton.ports import Action, PeerEvent, PeerLinks, ShipBlocks, ToPeer
from baton.protocol import Submit
from baton.timeline import Stage
from kv_transfer.base import Completion as TransportEvent
from kv_transfer.base import KVTransport
from kv_transfer.messages import Offer
from tests.stub_cluster import StubCluster, wait_until

DELAY_S = 0.2
SLACK_S = 0.1
"""What the machine may add by itself; half of what is looked for."""
TRIES = 5
SPLIT: dict[str, Any] = {"prefill": {}, "decode": {}}
TO_FIRST_TOKEN = tuple(Stage)[:4]


class SlowTransport:
    """Hands news over late."""

    def __init__(self, inner: KVTransport):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def completions(self) -> Sequence[TransportEvent]:
        events = self._inner.completions()
        if events:
            time.sleep(DELAY_S)
        return events


class SlowLinks:
    """Takes its time for some of what it is asked for."""

    def __init__(self, inner: PeerLinks, is_slow: Callable[[Action], bool]):
        self._inner = inner
        self._is_slow = is_slow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, action: Action) -> list[PeerEvent]:
        if self._is_slow(action):
            time.sleep(DELAY_S)
        return self._inner.execute(action)


def delay_text(cluster: StubCluster) -> None:
    """The router tokenizes slowly."""
    text, encode = cluster.router._text, cluster.router._text.encode

    def slow(prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        time.sleep(DELAY_S)
        return list(encode(prompt, add_special_tokens=add_special_tokens))

    text.encode = slow  # type: ignore[method-assign]


def delay_submit(cluster: StubCluster) -> None:
    """What was placed is sent late."""
    back, act = cluster.router._back, cluster.router._back.on_action

    def slow(action: Any, now: float) -> Any:
        if type(action.message) is Submit:
            time.sleep(DELAY_S)
        return act(action, now)

    back.on_action = slow  # type: ignore[method-assign]


def delay_decode(cluster: StubCluster) -> None:
    """The decode worker's engine takes its time before it looks at a request that was handed over."""
    worker = cluster.workers["decode-0"]
    core, next_step = worker.core, worker.core.next_step
    waits: dict[Any, float] = {}

    def notify() -> None:
        with worker._condition:
            worker._condition.notify_all()

    def late(now: float) -> StepPlan | None:
        for key in core.engine.live():
            if core.engine.is_busy and key not in waits:
                waits[key] = time.monotonic() + DELAY_S
                threading.Timer(DELAY_S, notify).start()
        return None if any(until > time.monotonic() for until in waits.values()) else next_step(now)

    core.next_step = late  # type: ignore[method-assign]


def decode_steps(plan: StepPlan) -> list[int]:
    """How many tokens each decoding request of a step has made already."""
    return [item.request.num_outputs for item in plan.items if item.request.num_outputs]


STEPS: dict[Stage, Callable[[str, StepPlan], float]] = {
    Stage.PREFILL: lambda name, plan: DELAY_S if name == "prefill-0" else 0.0,
    Stage.FIRST_DECODE_STEP: lambda name, plan: DELAY_S if decode_steps(plan) == [1] else 0.0,
    Stage.DECODE_STEPS: lambda name, plan: DELAY_S if decode_steps(plan) == [3] else 0.0,
}
SLOW_ACTIONS: dict[Stage, Callable[[Action], bool]] = {
    Stage.PREFILL_QUEUE: lambda action: type(action) is ToPeer and type(action.message) is Offer,
    Stage.HANDOFF_WAIT: lambda action: type(action) is ShipBlocks,
}
"""Of the prefill worker: it computes once its offer is accepted, and commits once all blocks are shipped."""
DELAYS: dict[Stage, Callable[[StubCluster], None]] = {
    Stage.ROUTER_QUEUE: delay_text,
    Stage.PLACEMENT: delay_submit,
    Stage.DECODE_QUEUE: delay_decode,
}


def delayed(stage: Stage) -> StubCluster:
    """A cluster in which this stage takes `DELAY_S` longer."""

    def wrap(name: str, transport: KVTransport) -> KVTransport:
        return SlowTransport(transport) if stage is Stage.WIRE and name == "decode-0" else transport  # type: ignore[return-value]

    def wrap_links(name: str, links: PeerLinks) -> PeerLinks:
        is_slow = SLOW_ACTIONS.get(stage)
        return SlowLinks(links, is_slow) if is_slow and name == "prefill-0" else links  # type: ignore[return-value]

    step_s = STEPS.get(stage, lambda name, plan: 0.0)
    cluster = StubCluster(SPLIT, step_s=step_s, wrap=wrap, wrap_links=wrap_links)
    DELAYS.get(stage, lambda cluster: None)(cluster)
    return cluster


class Seen(NamedTuple):
    """One request: where its time went, and what its client's clock says."""

    stages: dict[Stage, float]
    total: float
    ttft_s: float
    latency_s: float


def ask_natively(cluster: StubCluster, prompt: str) -> Seen:
    with cluster.client() as client:
        done = client.generate(prompt, max_tokens=6, seed=0)
    total = done.timeline.total()
    assert total is not None
    assert done.ttft_s is not None
    assert done.residual_s is not None
    assert done.residual_s >= 0
    return Seen(done.timeline.stages(), total, done.ttft_s, total + done.residual_s)


def ask_over_http(cluster: StubCluster, prompt: str) -> Seen:
    body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": 6, "seed": 0, "stream": True}
    url, times = str(cluster.router.url), []
    with httpx.Client(timeout=60) as client:
        client.get(f"{url}/health")  # makes the connection
        started = time.monotonic()
        with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    times.append(time.monotonic())
        record = client.get(f"{url}/baton/requests?limit=1").json()["data"][0]
    stages = {Stage(stage["name"]): stage["ms"] / 1e3 for stage in record["stages"]}
    return Seen(stages, record["total_ms"] / 1e3, times[0] - started, times[-1] - started)


def stage_metrics(cluster: StubCluster) -> dict[Stage, tuple[float, float]]:
    """Of each stage's histogram, the sum and the count."""
    text = httpx.get(f"{cluster.router.url}/metrics").text
    family = next(f for f in text_string_to_metric_families(text) if f.name == "baton:request_stage_seconds")
    found = {(s.name.rpartition("_")[2], s.labels["stage"]): s.value for s in family.samples if "le" not in s.labels}
    return {stage: (found["sum", str(stage)], found["count", str(stage)]) for stage in Stage}


def is_undisturbed(seen: Seen, stage: Stage) -> bool:
    """Nothing but the delay took long, and the client saw no more than the stages."""
    others = sum(seconds for other, seconds in seen.stages.items() if other is not stage)
    first = sum(seen.stages[part] for part in TO_FIRST_TOKEN)
    return others < SLACK_S and seen.ttft_s - first < SLACK_S and seen.latency_s - seen.total < SLACK_S


@pytest.mark.parametrize("ask", [ask_natively, ask_over_http], ids=["native", "http"])
@pytest.mark.parametrize("stage", list(Stage), ids=str)
def test_a_delay_shows_in_its_stage_at_the_client_and_in_the_metrics(
    stage: Stage, ask: Callable[[StubCluster, str], Seen]
) -> None:
    with delayed(stage) as cluster:
        every: list[Seen] = []
        while len(every) < TRIES and not (every and is_undisturbed(every[-1], stage)):
            seen = ask(cluster, chr(ord("a") + len(every)) * 30)
            assert list(seen.stages) == list(Stage), "every stage of a split request is there"
            assert seen.stages[stage] >= 0.95 * DELAY_S, "timers may ring a moment early"
            assert min(seen.stages.values()) >= 0.0
            assert sum(seen.stages.values()) == pytest.approx(seen.total), "they add up"
            assert seen.latency_s >= seen.total
            assert seen.ttft_s >= sum(seen.stages[part] for part in TO_FIRST_TOKEN)
            every.append(seen)
        assert is_undisturbed(every[-1], stage), every
        wait_until(lambda: stage_metrics(cluster)[stage][1] == len(every), "the metrics have them all")
        for other, (seconds, count) in stage_metrics(cluster).items():
            assert count == len(every)
            assert seconds == pytest.approx(sum(seen.stages[other] for seen in every), abs=1e-6)


def test_waiting_behind_another_prompt_is_prefill_queue() -> None:
    cluster = StubCluster(
        SPLIT,
        engine={"max_batch_requests": 1},
        step_s=lambda name, plan: DELAY_S if name == "prefill-0" else 0.0,
    )
    with cluster, cluster.client() as client, ThreadPoolExecutor(2) as pool:
        for _ in range(TRIES):
            done = list(pool.map(lambda i: client.generate([i] * 20, max_tokens=3, seed=0), range(2)))
            queues = sorted(d.timeline.stages()[Stage.PREFILL_QUEUE] for d in done)
            if queues[0] < SLACK_S and DELAY_S - SLACK_S < queues[1] < DELAY_S + SLACK_S:
                return
    pytest.fail(f"neither waited for the other: {queues}")
