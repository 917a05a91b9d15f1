"""Row 32 of docs/scenarios.md: a planner that moves workers between prefill and decode must not swing with the load.

The real router, workers and hand-over under a virtual clock (`SimulatedCluster`): minutes of traffic take seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import pytest

from baton.config import parse_config
from baton.layout import KVLayout
from baton.sampling_params import SamplingParams
from baton_cluster.latency import LinearLatency, LinkModel
from baton_cluster.simulated import Arrival, SimulatedCluster, SimulatedRequest
from router.role_planner import MINUTE_S, RoleChange, RolePlanner
from tests.fakes import made_up_token
from tests.stub_cluster import expected_tokens

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, block_size=16, head_dim=4, dtype="float32")
LATENCY = LinearLatency(0.4, 0.02)
"""A prompt of 120 tokens takes 2.8 s, a token beside seven others 0.56 s."""
START_S = 10.0
TTFT_S, TPOT_S = 10.0, 0.8


class Traffic(NamedTuple):
    seconds: float
    per_s: float
    prompt: int
    output: int


DAY = Traffic(400, 0.9, 120, 4)
"""2.4 prefill workers, a fifth of a decode worker."""
NIGHT = Traffic(400, 1.0, 10, 40)
"""0.6 prefill workers, 2.5 decode workers."""
EVEN = Traffic(300, 0.4, 60, 10)
"""Fits two workers of each role."""
HASTY = {"interval_s": 1.0, "smoothing_s": 4.0, "dwell_s": 10.0, "cooldown_s": 0.0, "max_changes_per_minute": 1}
"""Nothing holds the planner back but the cap, and what a change must bring."""


def arrivals(phases: Sequence[Traffic], seed: int = 0) -> Iterator[Arrival]:
    rng, now, end = random.Random(seed), 0.0, 0.0
    for phase in phases:
        end += phase.seconds
        while (now := now + rng.expovariate(phase.per_s)) < end:
            length = max(1, round(rng.gauss(phase.prompt, phase.prompt / 5)))
            sampling = SamplingParams(max_tokens=max(2, round(rng.gauss(phase.output, phase.output / 5))), seed=0)
            yield now, [rng.randrange(1000) for _ in range(length)], sampling
        now = end


def cluster_of(**planner: Any) -> SimulatedCluster:
    """Two workers of each role."""
    tree = {
        "launcher": "local",
        "pools": {name: {"workers": 2, "kv_blocks": 400} for name in ("prefill", "decode")},
        "engine": {"max_batch_requests": 8, "prefix_cache": False},
        "liveness": {"heartbeat_s": 1.0, "timeout_s": 5.0},
        "planner": planner,
    }
    return SimulatedCluster(
        parse_config(tree),
        LATENCY,
        LinkModel(latency_s=0.001, bytes_per_s=1e9),
        layout=LAYOUT,
        max_model_len=512,
        next_token=made_up_token,
        start_s=START_S,
    )


def run(phases: Sequence[Traffic], *, seed: int = 0, **planner: Any) -> tuple[SimulatedCluster, list[SimulatedRequest]]:
    """Play it to the end. All that started must end, once, and leave nothing held."""
    cluster = cluster_of(**planner)
    ended: list[SimulatedRequest] = []
    cluster.play(arrivals(phases, seed), ended.append)
    assert [len(ended), 0] == [sum(1 for _ in arrivals(phases, seed)), cluster.num_held_blocks()]
    for request in ended:
        assert request.tokens == expected_tokens(request.prompt, request.sampling.max_tokens)
        assert (request.finish_reason, request.attempts) == ("length", 1), "a change of roles takes nothing back"
    cluster.check_ledger()
    return cluster, ended


def planner_of(cluster: SimulatedCluster) -> RolePlanner:
    assert cluster.router.roles is not None
    return cluster.router.roles.planner


def is_good(request: SimulatedRequest) -> bool:
    assert request.ttft_s is not None
    first, *others = request.token_times
    return request.ttft_s <= TTFT_S and (not others or (others[-1] - first) / len(others) <= TPOT_S)


def check_changes(planner: RolePlanner, cap: int) -> None:
    begun = [change.began_at for change in planner.history]
    for first, last in zip(begun, begun[cap:], strict=False):
        assert last >= first + MINUTE_S
    for one, other in pairwise(planner.history):
        assert one.ended_at is not None
        assert one.ended_at <= other.began_at
    assert all(change.state == "done" for change in planner.history)


@pytest.mark.parametrize("every_s", [15.0, 45.0])
def test_a_load_that_steps_up_and_down_around_the_threshold(every_s: float) -> None:
    """Row 32: role changes a minute are bounded whatever the load does, all requests end, nothing is held."""
    steps = [phase._replace(seconds=every_s) for _ in range(round(600 / every_s / 2)) for phase in (DAY, NIGHT)]
    cluster, _ = run(steps, enabled=True, **HASTY)
    planner = planner_of(cluster)
    assert len(planner.history) >= 3, "the load is such that it would like to"
    assert planner.num_refused["cap"] > 0
    check_changes(planner, cap=1)


def test_a_flutter_faster_than_the_smoothing_moves_hardly_anybody() -> None:
    """Row 32: with the defaults."""
    steps = [phase._replace(seconds=15.0) for _ in range(20) for phase in (DAY, NIGHT)]
    cluster, _ = run(steps, enabled=True)
    planner = planner_of(cluster)
    assert len(planner.history) <= 1
    assert planner.num_refused.total() > 0, "a phase was full now and then"


def test_a_shift_from_prompts_to_answers_is_served_better() -> None:
    """Day, then night: twice the requests within their targets, at least, with the workers where the work is."""
    good = {}
    for enabled in (False, True):
        cluster, ended = run([DAY, NIGHT], enabled=enabled)
        good[enabled] = sum(map(is_good, ended)) / len(ended)
    planner = planner_of(cluster)
    check_changes(planner, cap=2)
    assert [change.to_role for change in planner.history] == ["prefill", "decode", "decode"]
    assert planner.num_abandoned == 0
    roles = [worker.info.role for worker in cluster.workers.values()]
    assert sorted(roles) == ["decode", "decode", "decode", "prefill"]
    assert good[True] >= 2 * good[False]


def test_a_load_that_fits_is_left_alone() -> None:
    """The planner looks, and every token comes when it comes without one."""
    (_, without), (cluster, ended) = (run([EVEN], enabled=enabled) for enabled in (False, True))
    assert not planner_of(cluster).history
    assert [r.token_times for r in ended] == [r.token_times for r in without]


def test_a_run_with_changes_repeats_exactly() -> None:
    def once() -> list[Any]:
        cluster, ended = run([DAY._replace(seconds=150), NIGHT._replace(seconds=100)], enabled=True, **HASTY)
        assert planner_of(cluster).history
        told = [msgspec.structs.asdict(change) for change in planner_of(cluster).history]
        return [told, [(r.number, r.token_times, r.prefill_worker, r.decode_worker) for r in ended]]

    assert once() == once()


def until_a_change_begins() -> tuple[SimulatedCluster, list[SimulatedRequest], RoleChange]:
    """By day, a decode worker's."""
    cluster = cluster_of(enabled=True, **HASTY)
    planner = planner_of(cluster)
    requests = [cluster.submit(at, prompt, sampling) for at, prompt, sampling in arrivals([DAY])]
    while planner.change is None:
        cluster.run(until=cluster.clock.now + 1.0)
    return cluster, requests, planner.change


@pytest.mark.parametrize("silently", [False, True])
def test_a_worker_that_dies_while_it_drains_changes_when_it_is_back(silently: bool) -> None:
    cluster, requests, change = until_a_change_begins()
    assert (change.to_role, change.state) == ("prefill", "draining")
    assert cluster.workers[change.worker_id].num_held_blocks() > 0
    cluster.kill(change.worker_id, cluster.clock.now, silently=silently)
    cluster.restart(change.worker_id, cluster.clock.now + 8.0)
    assert cluster.run() == requests
    assert change.state == "done"
    assert change.incarnation == f"{change.worker_id}#2"
    assert {r.finish_reason for r in requests} == {"length"}
    assert max(r.attempts for r in requests) == 2
    for request in requests:
        assert request.tokens == expected_tokens(request.prompt, request.sampling.max_tokens)
    cluster.check_ledger()
    check_changes(planner_of(cluster), cap=1)


@pytest.mark.parametrize("drained", [False, True], ids=["dies", "is drained by an operator"])
def test_a_change_is_given_up_when_its_phase_loses_the_others(drained: bool) -> None:
    """Else nobody would decode, though a worker that can is there."""
    cluster, requests, change = until_a_change_begins()
    (other,) = {"decode-0", "decode-1"} - {change.worker_id}
    if drained:
        cluster.router.on_drain(other, False, cluster.clock.now)
    else:
        cluster.kill(other, cluster.clock.now)
    cluster.run()
    assert (change.state, change.outcome) == ("abandoned", "decode would have 0 workers left, planner.min_decode is 1")
    assert {r.finish_reason for r in requests} == {"length"}, "none is refused"
    assert cluster.workers[change.worker_id].info.role == "decode"
    cluster.check_ledger()


def test_a_phase_that_has_nobody_left_gets_a_worker() -> None:
    """Both decode workers die for good: requests are refused until a prefill worker has taken over, and no longer."""
    cluster = cluster_of(enabled=True, **HASTY)
    requests = [cluster.submit(at, prompt, sampling) for at, prompt, sampling in arrivals([EVEN])]
    cluster.run(until=50.0)
    for worker_id in ("decode-0", "decode-1"):
        cluster.kill(worker_id, 50.0)
    cluster.run()
    *_, change = planner_of(cluster).history
    assert (change.to_role, change.state) == ("decode", "done")
    assert change.ended_at is not None
    assert change.ended_at < 50.0 + 60.0
    assert "there being nobody" in change.reason
    late = [r for r in requests if r.submitted_at > change.ended_at]
    assert len(late) > 50
    assert {r.finish_reason for r in late} == {"length"}
    cluster.check_ledger()
