"""SimulatedCluster: times that can be computed by hand, faults, and that a run repeats exactly."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from baton.config import parse_config
from baton.engine.request import EngineRequest
from baton.errors import ClusterError, ConfigError
from baton.layout import KVLayout
from baton.sampling_params import SamplingParams
from baton.step_log import StepRecord
from baton.timeline import Mark
from baton_cluster.latency import ConstantLatency, LatencyModel, LinearLatency, LinkModel
from baton_cluster.network import Network
from baton_cluster.simulated import Arrival, SimulatedCluster, SimulatedRequest
from baton_cluster.virtual_clock import VirtualClock
from router.request import RoutedRequest
from tests.fakes import made_up_token
from tests.stub_cluster import expected_tokens

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, block_size=16, head_dim=4, dtype="float32")
SPLIT = {"prefill": {"kv_blocks": 64}, "decode": {"kv_blocks": 64}}
SPLIT_2_2 = {name: {"workers": 2, **pool} for name, pool in SPLIT.items()}
COLOCATED = {"both": {"kv_blocks": 64}}
STEP_S, LINK = 0.01, LinkModel(latency_s=0.001, bytes_per_s=LAYOUT.block_bytes / 0.002)
"""A block takes 2 ms on the wire."""


def cluster_of(
    pools: dict[str, Any],
    latency: LatencyModel | None = None,
    *,
    history: bool = False,
    steps: list[StepRecord] | None = None,
    link: LinkModel = LINK,
    **sections: Any,
) -> SimulatedCluster:
    return SimulatedCluster(
        parse_config({"launcher": "local", "pools": pools, **sections}),
        latency or ConstantLatency(STEP_S),
        link,
        layout=LAYOUT,
        max_model_len=512,
        next_token=made_up_token,
        history=history,
        on_step=None if steps is None else steps.append,
    )


def sampling(max_tokens: int = 5) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0)


def test_colocated_times_are_steps_and_trips() -> None:
    cluster = cluster_of(COLOCATED)
    request = cluster.submit(2.0, range(40), sampling(3))
    assert cluster.run() == [request]
    # To the router and on to the worker, a step, and back the same way.
    assert request.token_times == pytest.approx([2.0 + 4e-3 + STEP_S * i for i in (1, 2, 3)])
    assert request.ended_at == request.token_times[-1]
    assert request.ttft_s == pytest.approx(4e-3 + STEP_S)
    assert (request.tokens, request.finish_reason) == (expected_tokens(range(40), 3), "length")
    cluster.check_ledger()


def test_split_times_add_the_offer_and_the_wire() -> None:
    cluster = cluster_of(SPLIT)
    request = cluster.submit(0.0, range(40), sampling(3))
    cluster.run()
    marks = request.timeline.marks
    prefill_start = 2e-3 + 2e-3  # client, router, prefill worker; Offer and Accept
    committed = prefill_start + STEP_S
    adopted = committed + 3 * 2e-3 + 1e-3  # three blocks one after the other, then the link's latency
    assert marks[Mark.PREFILL_START] == pytest.approx(prefill_start)
    assert marks[Mark.COMMITTED] == pytest.approx(committed)
    assert marks[Mark.ADOPTED] == pytest.approx(adopted)
    assert marks[Mark.FINISHED] == pytest.approx(adopted + 2 * STEP_S)
    assert request.kv_bytes == 3 * LAYOUT.block_bytes
    assert request.timeline.residual(request.latency_s or 0.0) == pytest.approx(3e-3)  # trips: one there, two back


def sent_at(transfers: list[tuple[float, str, str, float]], nic: float, pair: float) -> list[float]:
    """When each of these, `(start, source, target, bytes)`, has left."""
    clock, ends = VirtualClock(), dict[int, float]()
    network = Network(clock, nic, pair)
    for number, (at, source, target, num_bytes) in enumerate(transfers):

        def note(number: int = number) -> None:
            ends[number] = clock.now

        clock.at(at, network.send, source, target, num_bytes, note)
    while clock.next_at() is not None:
        clock.step()
    assert network.rates() == {}
    return [ends[number] for number in range(len(transfers))]


def test_transfers_share_the_interfaces_of_both_ends_and_leave_what_others_cannot_use() -> None:
    alone = [(0.0, "p0", "d0", 100.0)]
    assert sent_at(alone, 10.0, 100.0) == pytest.approx([10.0])
    assert sent_at(alone, 10.0, 4.0) == pytest.approx([25.0])
    # Two into one: half each, until the shorter one has left at 20; 50 bytes are left then.
    assert sent_at([*alone, (0.0, "p1", "d0", 150.0)], 10.0, 100.0) == pytest.approx([20.0, 25.0])
    # One into two, the second of which comes at 5: 50 bytes alone, then 50 at half the rate, and 50 of the other alone.
    assert sent_at([*alone, (5.0, "p0", "d1", 100.0)], 10.0, 100.0) == pytest.approx([15.0, 20.0])
    # The directions are apart, and a pair sends one after the other.
    assert sent_at([*alone, (0.0, "d0", "p0", 100.0)], 10.0, 100.0) == pytest.approx([10.0, 10.0])
    assert sent_at([*alone, (0.0, "p0", "d0", 100.0)], 10.0, 100.0) == pytest.approx([10.0, 20.0])
    # p0 shares d0 with two others (10/3 each); what that leaves of p0's interface goes to d1 (20/3).
    others = [(0.0, "p1", "d0", 100.0), (0.0, "p2", "d0", 100.0)]
    shared = sent_at([*alone, *others, (0.0, "p0", "d1", 100.0)], 10.0, 100.0)
    assert shared == pytest.approx([30.0, 30.0, 30.0, 15.0])


def test_a_dropped_transfer_leaves_the_interface_to_the_others() -> None:
    clock, ends = VirtualClock(), list[tuple[str, float]]()
    network = Network(clock, 10.0, 100.0)
    for source in ("p0", "p1"):
        for part in "ab":
            network.send(source, "d0", 100.0, lambda what=source + part: ends.append((what, clock.now)))  # type: ignore[misc]
    clock.at(4.0, network.drop, "p0", "d0")  # 20 bytes of each have left
    while clock.next_at() is not None:
        clock.step()
    assert ends == [("p1a", pytest.approx(12.0)), ("p1b", pytest.approx(22.0))]


def test_prompts_that_reach_a_decode_worker_at_once_take_twice_as_long_where_they_share_its_interface() -> None:
    wire_s = {}
    for nic in (None, LINK.bytes_per_s):
        pools = {"prefill": {"workers": 2, "kv_blocks": 64}, "decode": {"kv_blocks": 64}}
        cluster = cluster_of(pools, link=LinkModel(LINK.latency_s, LINK.bytes_per_s, nic))
        requests = [cluster.submit(0.0, range(i, i + 40), sampling(3)) for i in (0, 100)]
        cluster.run()
        cluster.check_ledger()
        assert {r.prefill_worker for r in requests} == {"prefill-0", "prefill-1"}
        wire_s[nic] = [r.timeline.marks[Mark.ADOPTED] - r.timeline.marks[Mark.COMMITTED] for r in requests]
    assert wire_s[None] == pytest.approx([3 * 2e-3 + 1e-3] * 2)
    assert wire_s[LINK.bytes_per_s] == pytest.approx([2 * 3 * 2e-3 + 1e-3] * 2)


@pytest.mark.parametrize("silently", [False, True])
def test_faults_on_a_shared_network_cost_no_token(silently: bool) -> None:
    cluster = cluster_of(SPLIT_2_2, transfer={"lease_s": 4.0}, link=LinkModel(1e-3, LINK.bytes_per_s, LINK.bytes_per_s))
    requests = [cluster.submit(0.02 * i, range(1 + 9 * i), sampling(40)) for i in range(12)]
    cluster.kill("decode-0", 0.15, silently=silently)
    cluster.restart("prefill-1", 0.3)
    cluster.run()
    cluster.check_ledger()
    assert [r.tokens for r in requests] == [expected_tokens(r.prompt, 40) for r in requests]


def test_a_linear_model_counts_tokens_and_context() -> None:
    cluster = cluster_of(COLOCATED, LinearLatency(0.01, 0.001, 1e-5))
    request = cluster.submit(0.0, range(40), sampling(2))
    cluster.run()
    first, second = request.token_times
    assert first == pytest.approx(4e-3 + 0.01 + 40 * 0.001 + 40 * 1e-5)
    assert second - first == pytest.approx(0.01 + 0.001 + 41 * 1e-5)


@pytest.mark.parametrize("pools", [COLOCATED, SPLIT, SPLIT_2_2])
def test_a_run_repeats_exactly_and_gives_the_undisturbed_tokens(pools: dict[str, Any]) -> None:
    def run() -> list[Any]:
        cluster = cluster_of(pools, history=True, transfer={"expected_growth": 8})
        requests = [
            cluster.submit(0.01 * (i // 3), range(1 + 7 * i % 90), sampling(1 + 5 * i % 40), leave_after=i % 7 or None)
            for i in range(60)
        ]
        cluster.run()
        cluster.check_ledger()
        for request in requests:
            undisturbed = expected_tokens(request.prompt, request.sampling.max_tokens)
            assert request.tokens == undisturbed[: len(request.tokens)]
            assert request.finish_reason == "abort" or request.tokens == undisturbed
        assert {r.finish_reason for r in requests} == {"length", "abort"}
        return [(r.tokens, r.token_times, r.decode_worker, cluster.life(r)) for r in requests]

    assert run() == run()


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_killed_worker_costs_a_pause_and_no_token(victim: str, silently: bool) -> None:
    cluster = cluster_of(SPLIT_2_2, transfer={"lease_s": 4.0})
    requests = [cluster.submit(0.02 * i, range(1 + 9 * i), sampling(40)) for i in range(12)]
    cluster.kill(victim, 0.15, silently=silently)
    cluster.run()
    cluster.check_ledger()
    for request in requests:
        assert (request.finish_reason, request.error) == ("length", None)
        assert request.tokens == expected_tokens(request.prompt, 40)
    moved = [r for r in requests if r.attempts == 2]
    assert moved
    waits = [b - a for r in moved for a, b in pairwise([r.submitted_at, *r.token_times])]
    # Noticed by its silence (liveness.timeout_s, counted from its last word), or by its closed connection.
    assert (1.7 if silently else 2 * STEP_S) < max(waits) < (2.5 if silently else 1.0)


def test_a_restarted_worker_takes_over_what_waited_for_it() -> None:
    cluster = cluster_of(SPLIT)
    requests = [cluster.submit(0.02 * i, range(20), sampling(40)) for i in range(5)]
    cluster.restart("decode-0", 0.2)
    cluster.run()
    cluster.check_ledger()
    assert [r.tokens for r in requests] == [expected_tokens(range(20), 40)] * 5
    assert cluster.workers["decode-0"].info.incarnation == "decode-0#2"
    assert max(r.attempts for r in requests) == 2


def test_without_any_worker_left_requests_fail_and_the_run_ends() -> None:
    cluster = cluster_of(COLOCATED)
    request = cluster.submit(0.0, range(20), sampling(40))
    cluster.kill("both-0", 0.1)
    cluster.run()
    assert request.error is not None
    assert request.error[0] == "request_failed"
    assert 0 < len(request.tokens) < 40


def test_a_transfer_whose_receiver_vanishes_frees_its_blocks_after_its_lease() -> None:
    cluster = cluster_of(SPLIT, transfer={"lease_s": 1.0}, liveness={"heartbeat_s": 1, "timeout_s": 60})
    request = cluster.submit(0.0, range(400), sampling(4))
    cluster.kill("decode-0", 0.03, silently=True)  # 25 blocks are on the wire until 0.06
    cluster.run(until=0.9)
    assert cluster.num_held_blocks() == 25
    cluster.run(until=1.5)
    assert cluster.num_held_blocks() == 0
    assert request.finish_reason is None


def test_a_run_that_strands_blocks_fails_and_says_whose_they_were() -> None:
    cluster = cluster_of(SPLIT)
    cluster.workers["decode-0"].core.engine.tables.free = lambda request: None  # type: ignore[method-assign]
    request = cluster.submit(0.0, range(40), sampling(3))
    with pytest.raises(AssertionError, match=f"decode-0: .*stranded.*{request.request_id[:8]}/0"):
        cluster.run()


def test_run_until_can_be_gone_on_with() -> None:
    cluster = cluster_of(SPLIT)
    request = cluster.submit(1.0, range(20), sampling(10))
    assert cluster.run(until=1.05) == []
    assert cluster.clock.now == 1.05
    assert 0 < len(request.tokens) < 10
    cluster.cancel(request, 1.06)
    assert cluster.run() == [request]
    assert request.finish_reason == "abort"


def trace_of(number: int, seen: list[int] | None = None) -> Iterator[Arrival]:
    """Three at a time, some of which end at once: nothing can hold them. `seen`: how many were asked for."""
    for i in range(number):
        if seen is not None:
            seen.append(i)
        prompt = range(600) if i % 11 == 5 else range(1 + 7 * i % 90)
        yield 0.013 * (i // 3), prompt, sampling(1 + 5 * i % 40)


@pytest.mark.parametrize("pools", [COLOCATED, SPLIT, SPLIT_2_2])
def test_a_played_trace_goes_as_the_same_requests_submitted(pools: dict[str, Any]) -> None:
    def outcome(request: SimulatedRequest) -> tuple[Any, ...]:
        places = request.prefill_worker, request.decode_worker
        return request.number, request.tokens, request.token_times, request.ended_at, request.finish_reason, *places

    submitted = cluster_of(pools)
    for at_s, prompt, params in trace_of(60):
        submitted.submit(at_s, prompt, params)
    expected = list(map(outcome, submitted.run()))
    played, ended = cluster_of(pools), list[SimulatedRequest]()
    played.play(trace_of(60), ended.append)
    played.check_ledger()
    ends = [request.ended_at or 0.0 for request in ended]
    assert ends == sorted(ends), "told in the order of their ends"
    assert sorted(map(outcome, ended)) == expected
    assert {r.error[0] if r.error else r.finish_reason for r in ended} == {"length", "request_too_large"}


def test_a_trace_is_read_one_request_ahead_and_what_has_ended_is_forgotten() -> None:
    kinds = (SimulatedRequest, RoutedRequest, EngineRequest)

    def num_alive() -> int:
        gc.collect()
        return sum(type(thing) in kinds for thing in gc.get_objects())

    before = num_alive()
    cluster, seen = cluster_of(SPLIT), list[int]()
    slow = ((at_s * 30, prompt, params) for at_s, prompt, params in trace_of(300, seen))
    last = -1

    def on_end(request: SimulatedRequest) -> None:
        nonlocal last
        last = max(last, request.number)
        assert len(seen) <= last + 12, "it reads ahead"
        if request.number == 250:
            assert num_alive() - before < 50, "ended requests are kept"

    cluster.play(slow, on_end)
    assert len(seen) == 300
    assert cluster.requests == []


def test_a_trace_may_follow_another_and_its_times_must_not_fall() -> None:
    cluster, ended = cluster_of(COLOCATED), list[SimulatedRequest]()
    cluster.play([], ended.append)
    cluster.play(trace_of(5), ended.append)
    start = cluster.clock.now
    cluster.play([(start + 1.0, range(20), sampling(3))], ended.append)
    assert [r.number for r in ended[-1:]] == [5]
    assert ended[-1].token_times[0] == pytest.approx(start + 1.0 + 4e-3 + STEP_S)
    with pytest.raises(ClusterError, match=r"request 6 arrives at 0\.5 s.*order of arrival"):
        cluster.play([(0.5, range(20), sampling(3))], ended.append)
    now = cluster.clock.now
    with pytest.raises(ClusterError, match=r"request 7 arrives.*order of arrival"):
        cluster.play([(now + 2, range(20), sampling(3)), (now + 1, range(20), sampling(3))], ended.append)


def test_each_step_is_told_as_it_ends() -> None:
    steps: list[StepRecord] = []
    cluster = cluster_of(SPLIT, steps=steps, engine={"max_batch_tokens": 32})
    request = cluster.submit(0.0, range(40), sampling(3))
    cluster.run()
    prefill = [s for s in steps if s.worker == "prefill-0"]
    assert [s.shape for s in prefill] == [(1, 32, 0, 528, 0, 0), (1, 8, 32, 292, 0, 0)]
    assert [s.start_s for s in prefill] == pytest.approx([4e-3, 4e-3 + STEP_S])
    assert [(s.kv_blocks, s.num_running, s.num_waiting) for s in prefill] == [(3, 1, 0)] * 2
    decode = [s for s in steps if s.worker == "decode-0"]
    assert [s.shape for s in decode] == [(0, 0, 0, 0, 1, 41), (0, 0, 0, 0, 1, 42)]
    assert decode[0].start_s == pytest.approx(request.timeline.marks[Mark.ADOPTED])
    assert {s.seconds for s in steps} == {STEP_S}


def test_what_can_never_end_is_reported() -> None:
    class Never:
        def step_s(self, plan: object) -> float:
            return 1e9

    cluster = cluster_of(COLOCATED, Never())
    cluster.submit(0.0, range(20), sampling(10))
    with pytest.raises(ClusterError, match="have not heard anything"):
        cluster.run()


def test_a_layout_of_another_block_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.block_size"):
        cluster_of(COLOCATED, engine={"block_size": 32})


def test_pools_of_other_block_sizes_and_encoded_blocks() -> None:
    """Prefill's blocks travel, in one byte a number and a scale for keys and one for values."""
    pools = {"prefill": {"block_size": 8}, "decode": {"block_size": 24, "kv_blocks": 7}}
    cluster = cluster_of(pools, transfer={"wire_encoding": "int8"})
    request = cluster.submit(0.0, range(40), sampling(3))
    cluster.run()
    assert request.tokens == expected_tokens(range(40), 3)
    assert request.kv_bytes == 5 * 2 * (8 * 4 + 4)
    assert [w.bytes_received for w in cluster.workers.values()] == [0, request.kv_bytes]
    assert cluster.workers["decode-0"].core.engine.tables.blocks_for(25) == 2
    cluster.check_ledger()


def test_stop_tokens_and_the_models_end_are_told_apart() -> None:
    def next_token(request: EngineRequest) -> int:
        return 9 if request.num_outputs == 2 else 1

    config = parse_config({"launcher": "local", "pools": COLOCATED})
    cluster = SimulatedCluster(
        config,
        ConstantLatency(STEP_S),
        LINK,
        layout=LAYOUT,
        max_model_len=512,
        next_token=next_token,
        eos_token_ids=[9],
    )
    ends = cluster.submit(0.0, [1], SamplingParams(max_tokens=5))
    goes_on = cluster.submit(0.0, [1], SamplingParams(max_tokens=5, ignore_eos=True))
    cluster.run()
    assert (ends.tokens, ends.finish_reason) == ([1, 1, 9], "stop")
    assert (goes_on.tokens, goes_on.finish_reason) == ([1, 1, 9, 1, 1], "length")
