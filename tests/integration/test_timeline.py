"""I10: a delay put into one stage shows up in that stage of the timeline, and in the client's latency."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from baton.engine.request import StepPlan
from baton.timeline import Stage
from kv_transfer.base import Completion as TransportEvent
from kv_transfer.base import KVTransport
from tests.stub_cluster import StubCluster

DELAY_S = 0.2
SLACK_S = 0.1
"""What the machine may add by itself; half of what is looked for."""
SPLIT: dict[str, Any] = {"prefill": {}, "decode": {}}


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


def decode_steps(plan: StepPlan) -> list[int]:
    """How many tokens each decoding request of a step has made already."""
    return [item.request.num_outputs for item in plan.items if item.request.num_outputs]


STEPS = {
    Stage.PREFILL: lambda name, plan: DELAY_S if name == "prefill-0" else 0.0,
    Stage.FIRST_DECODE_STEP: lambda name, plan: DELAY_S if decode_steps(plan) == [1] else 0.0,
    Stage.DECODE_STEPS: lambda name, plan: DELAY_S if decode_steps(plan) == [3] else 0.0,
}


@pytest.mark.parametrize("stage", [*STEPS, Stage.WIRE], ids=str)
def test_a_delay_shows_in_its_stage_and_at_the_client(stage: Stage) -> None:
    def wrap(name: str, transport: KVTransport) -> KVTransport:
        return SlowTransport(transport) if stage is Stage.WIRE and name == "decode-0" else transport  # type: ignore[return-value]

    step_s = STEPS.get(stage, lambda name, plan: 0.0)
    with StubCluster(SPLIT, step_s=step_s, wrap=wrap) as cluster, cluster.client() as client:
        done = client.generate(list(range(30)), max_tokens=6, seed=0)
    stages = done.timeline.stages()
    assert list(stages) == list(Stage), "every stage of a split request is there"
    assert stages[stage] >= DELAY_S
    assert sum(seconds for other, seconds in stages.items() if other is not stage) < SLACK_S
    assert min(stages.values()) >= 0.0
    assert sum(stages.values()) == pytest.approx(done.timeline.total())
    assert done.residual_s is not None
    assert 0 <= done.residual_s < SLACK_S
    assert done.latency_s >= DELAY_S
    if stage is Stage.PREFILL:
        assert done.ttft_s is not None
        assert done.ttft_s >= DELAY_S


def test_waiting_behind_another_prompt_is_prefill_queue() -> None:
    cluster = StubCluster(
        SPLIT,
        engine={"max_batch_requests": 1},
        step_s=lambda name, plan: DELAY_S if name == "prefill-0" else 0.0,
    )
    with cluster, cluster.client() as client, ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda i: client.generate([i] * 20, max_tokens=3, seed=0), range(2)))
    queues = sorted(d.timeline.stages()[Stage.PREFILL_QUEUE] for d in done)
    assert queues[0] < SLACK_S
    assert DELAY_S - SLACK_S < queues[1] < DELAY_S + SLACK_S
