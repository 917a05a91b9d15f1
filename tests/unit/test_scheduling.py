"""Who is served when: fair order, priorities, the step-time target, and a plan that says why."""

from __future__ import annotations

import random

import pytest

from baton.engine.core import EngineCore
from baton.engine.fair_queue import FairQueue
from baton.engine.policy import POLICIES
from baton.engine.request import EngineRequest, StepPlan
from baton.engine.step_time import CAUTIOUS_TOKENS, STALE_STEPS, StepTimes
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams

BUDGET = 64


def make_core(*, num_blocks: int = 512, policy: str = "mixed", target_s: float | None = None) -> EngineCore:
    return EngineCore(
        num_blocks=num_blocks,
        block_size=16,
        max_batch_tokens=BUDGET,
        max_batch_requests=8,
        max_model_len=20_000,
        policy=POLICIES[policy](),
        prefix_cache=False,
        step_target_s=target_s,
    )


def request(name: str, prompt: int, max_tokens: int = 4, priority: int = 0) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(RequestKey(name, 0), [1] * prompt, params, priority=priority)


def advance(core: EngineCore, plan: StepPlan, now: float = 0.0) -> None:
    core.complete(plan, [7 if item.samples else None for item in plan.items], now)
    core.check_integrity()


def step(core: EngineCore) -> dict[str, int]:
    """Name -> tokens, of one step."""
    plan = core.schedule(0.0)
    assert plan is not None
    tokens = {key.request_id: n for key, n in plan.num_tokens.items()}
    advance(core, plan)
    return tokens


def test_a_short_prompt_passes_a_long_one_that_came_just_before() -> None:
    core = make_core()
    core.submit(request("long", 1000), 0.0)
    assert step(core) == {"long": BUDGET}
    core.submit(request("short", 20), 0.0)
    assert step(core) == {"short": 20, "long": BUDGET - 20}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_waits_for_no_more_later_work_than_it_is_itself(policy: str) -> None:
    core = make_core(policy=policy)
    core.submit(request("long", 640, max_tokens=1), 0.0)
    computed_for_others = 0
    for i in range(1000):
        core.submit(request(f"short{i}", 60, max_tokens=1), 0.0)
        tokens = step(core)
        computed_for_others += sum(n for name, n in tokens.items() if name != "long")
        if core._requests.get(RequestKey("long", 0)) is None:
            break
    else:
        pytest.fail("the long prompt starved")
    assert computed_for_others <= 640 + 60 + BUDGET


def test_decodes_go_on_in_every_step_beside_a_long_prompt() -> None:
    core = make_core()
    core.submit(request("decode", 10, max_tokens=200), 0.0)
    step(core)
    core.submit(request("long", 4096), 0.0)
    computed = []
    while sum(computed) < 4096:
        tokens = step(core)
        assert tokens["decode"] == 1 and sum(tokens.values()) <= BUDGET
        computed.append(tokens["long"])
    assert len(computed) == -(-4096 // (BUDGET - 1))


def test_priority_goes_first() -> None:
    core = make_core()
    core.submit(request("usual", 64), 0.0)
    core.submit(request("urgent", 640, priority=-1), 0.0)
    core.submit(request("later", 4, priority=5), 0.0)
    order = [name for _ in range(12) for name in step(core)]
    assert order.index("urgent") < order.index("usual") < order.index("later")


def test_the_least_important_is_preempted() -> None:
    core = make_core(num_blocks=6)
    core.submit(request("batch", 30, max_tokens=60, priority=9), 0.0)
    core.submit(request("usual", 30, max_tokens=60), 0.0)
    while True:
        step(core)
        running = {key.request_id for key in core._running}
        if len(running) == 1:
            break
    assert running == {"usual"}, "although it is the younger one"
    assert core.load().num_preemptions == 1


def test_a_more_important_one_is_never_preempted_for_a_lesser() -> None:
    core = make_core(num_blocks=6)
    core.submit(request("usual", 30, max_tokens=60, priority=3), 0.0)
    core.submit(request("urgent", 30, max_tokens=40, priority=-3), 0.0)
    ended = []
    for _ in range(400):
        plan = core.schedule(0.0)
        if plan is None:
            break
        advance(core, plan)
        if (gone := {"usual", "urgent"} - {key.request_id for key in core._requests}) and not ended:
            ended = sorted(gone)
    assert ended == ["urgent"]
    assert core.schedule(0.0) is None and core.pool.num_free == 6


def test_queue_order_is_priority_tag_arrival() -> None:
    queue, rng = FairQueue(), random.Random(1)
    requests = [request(str(i), rng.randrange(1, 100), priority=rng.randrange(-1, 2)) for i in range(50)]
    expected = []
    for i, r in enumerate(requests):
        queue.advance(rng.randrange(10))
        queue.stamp(r)
        queue.push(r)
        expected.append((r.order, i))
    assert [r.order for r in queue] == [order for order, _ in sorted(expected)]
    assert len(queue) == 50
    queue.remove(requests[3])
    queue.push_back(requests[3])
    ahead = [r for r in queue if r.priority <= requests[3].priority]
    assert next(r for r in ahead if r.priority == requests[3].priority) is requests[3]


def test_step_times_learn() -> None:
    times = StepTimes()
    assert times.decode_s(4) == 0 and times.chunk_tokens(4, 0.1) == CAUTIOUS_TOKENS
    for _ in range(50):
        times.observe(4, 0, 0.050)
        times.observe(4, 100, 0.150)
    assert times.decode_s(4) == pytest.approx(0.050) and times.decode_s(0) == 0
    assert times.chunk_tokens(4, 0.100) == pytest.approx(50, abs=1)
    assert times.chunk_tokens(4, 0.040) < 0
    assert times.decode_s(8) == times.decode_s(4), "one number of decodes says nothing of others"
    times.observe(8, 0, 0.090)
    assert [times.decode_s(n) for n in (2, 6, 8, 12)] == pytest.approx([0.030, 0.070, 0.090, 0.130])
    for _ in range(50):
        times.observe(4, 100, 0.250)
    assert times.chunk_tokens(4, 0.100) == pytest.approx(25, abs=1), "it follows"


def test_step_times_are_told_as_a_line_and_a_share() -> None:
    times = StepTimes()
    assert times.summary(4) == (0.0, 0.0, 0.0), "nothing is known"
    for _ in range(100):
        for decodes in (2, 4, 8):
            times.observe(decodes, 0, 0.010 + 0.002 * decodes)
        times.observe(4, 100, 0.018 + 0.1)
        times.observe(4, 10, 0.018 + 0.01)
    assert times.summary(4) == pytest.approx((0.018, 0.002, 0.001), rel=0.05)
    assert times.summary(6).decode_s == pytest.approx(0.022, rel=0.05)
    assert times.summary(16).decode_s == pytest.approx(0.042, rel=0.05)


def test_one_number_of_decodes_has_no_slope_and_no_step_costs_less_than_nothing() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(4, 0, 0.02)
    assert times.summary(4) == pytest.approx((0.02, 0.0, 0.0))
    assert times.summary(9) == pytest.approx((0.02, 0.0, 0.0))
    times = StepTimes()
    for _ in range(20):
        times.observe(4, 0, 0.01)
        times.observe(5, 0, 0.1)
    step_s, slope_s, _ = times.summary(5)
    assert step_s == pytest.approx(0.1, rel=0.05)
    assert 0 < slope_s <= step_s / 5
    assert times.summary(1).decode_s >= 0


def test_the_load_report_tells_what_steps_take() -> None:
    core = make_core()
    core.submit(request("prompt", 200, max_tokens=20), 0.0)
    run_timed(core, 5, token_s=0.001, decode_s=0.02)
    core.submit(request("more", 10, max_tokens=100), 10.0)
    now = 10.0
    for _ in range(10):
        plan = core.schedule(now)
        assert plan is not None
        now += 0.02 if plan.total_tokens == 1 else 0.01
        advance(core, plan, now)
    load = core.load()
    assert (load.num_running, load.decode_step_s) == (1, pytest.approx(0.02))
    assert load.prefill_token_s == pytest.approx(0.001, rel=0.1)


def run_timed(core: EngineCore, seconds: float, token_s: float, decode_s: float) -> list[tuple[int, float]]:
    """Steps until `seconds` of a clock that they drive; (prompt tokens, duration) of those that had decodes."""
    now, seen = 0.0, []
    while now < seconds and (plan := core.schedule(now)) is not None:
        decodes = sum(item.num_tokens == 1 for item in plan.items)
        took = decode_s * decodes + token_s * (plan.total_tokens - decodes)
        now += took
        advance(core, plan, now)
        if decodes:
            seen.append((plan.total_tokens - decodes, took))
    return seen


def test_steps_keep_the_target() -> None:
    core = make_core(target_s=0.05)
    core.submit(request("decode", 10, max_tokens=500), 0.0)
    run_timed(core, 0.5, token_s=0.001, decode_s=0.02)
    core.submit(request("long", 2000, max_tokens=1), 0.0)
    seen = run_timed(core, 30, token_s=0.001, decode_s=0.02)
    assert max(tokens for tokens, _ in seen[1:]) == 30
    late = [took for _, took in seen if took > 0.0501]
    assert len(late) <= 1, "only the first chunk, of unknown cost, may be late"


def test_a_target_that_cannot_be_met_still_lets_prompts_go_on() -> None:
    core = make_core(target_s=0.001)
    core.submit(request("decode", 10, max_tokens=500), 0.0)
    run_timed(core, 0.5, token_s=0.01, decode_s=0.02)
    core.submit(request("other", 100, max_tokens=1), 0.0)
    core.submit(request("third", 10, max_tokens=500), 0.0)
    seen = run_timed(core, 100, token_s=0.01, decode_s=0.02)
    assert max(tokens for tokens, _ in seen) == 16, "a block at a time"
    assert core.schedule(1000.0) is None


def test_no_more_are_admitted_than_decode_within_the_target() -> None:
    core = make_core(target_s=0.05)
    for i in range(8):
        core.submit(request(f"r{i}", 10, max_tokens=300), 0.0)
        run_timed(core, 0.3, token_s=0.0001, decode_s=0.02)
    assert len(core._running) == 2
    plan = core.schedule(0.0)
    assert plan is not None and "would miss the step-time target" in plan.describe()
    advance(core, plan, 0.04)


def test_a_step_that_was_slow_by_chance_keeps_nobody_out_for_ever() -> None:
    """Two decoded beside each other once, just when the machine was busy with something else."""
    core = make_core(target_s=0.05)
    core.submit(request("first", 1, max_tokens=7000), 0.0)
    core.submit(request("second", 1, max_tokens=2), 0.0)
    advance(core, core.schedule(0.0), 0.01)  # type: ignore[arg-type]
    now = 1.0
    for _ in range(20):  # the second one ends with the first of these
        plan = core.schedule(now)
        assert plan is not None
        advance(core, plan, now := now + (0.01 if len(plan.items) == 1 else 5.0))
    core.submit(request("third", 1), now)
    waited, together = 0, False
    while not together and waited < 3 * STALE_STEPS:
        waited += 1
        plan = core.schedule(now)
        assert plan is not None
        advance(core, plan, now := now + 0.01)
        together = len(plan.items) == 2
    assert 1 < waited < 2 * STALE_STEPS


def test_a_plan_says_what_and_why() -> None:
    core = make_core(num_blocks=12)
    core.submit(request("decode", 10, max_tokens=50), 0.0)
    step(core)
    core.submit(request("first", 150), 0.0)
    core.submit(request("second", 170), 0.0)
    plan = core.schedule(0.0)
    assert plan is not None
    assert plan.describe() == (
        "64 tokens: 1 decodes; first/0: tokens 0 to 62 of 150; second/0 not: the budget of 64 tokens is spent"
    )
    advance(core, plan)
    step(core)
    plan = core.schedule(0.0)
    assert plan is not None
    assert plan.describe().endswith("second/0 not: too few blocks are free")
    advance(core, plan)
