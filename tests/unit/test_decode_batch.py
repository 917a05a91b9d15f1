"""DecodeBatch: steps that go through it do what steps that deal with each request by itself do."""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton.engine.core import EngineCore
from baton.engine.decode_batch import GATHER_STEPS, DecodeBatch
from baton.engine.policy import POLICIES
from baton.engine.request import Emit, EngineRequest
from baton.protocol import RequestKey, TokenOut
from baton.sampling_params import SamplingParams
from baton.step_log import StepShape

B = 4
EOS = 99


class Alone(DecodeBatch):
    """Nobody joins."""

    def join(self, request: EngineRequest) -> None:
        pass


def make_core(batch: type[DecodeBatch], *, num_blocks: int, prefix_cache: bool, policy: str) -> EngineCore:
    core = EngineCore(
        num_blocks=num_blocks,
        block_size=B,
        max_batch_tokens=12,
        max_batch_requests=8,
        max_model_len=200,
        policy=POLICIES[policy](),
        eos_token_ids=[EOS],
        prefix_cache=prefix_cache,
    )
    core._batch = batch(B)
    return core


def run(core: EngineCore, seed: int, *, rows: bool) -> tuple[list[Any], int]:
    """What came out of a random life of some requests, and how many tokens went through the batch."""
    draw, seen, through_batch = random.Random(seed), list[Any](), 0
    for step in range(3000):
        if step >= 180 and not core.is_busy:
            break
        if step < 180 and draw.random() < 0.15:
            params = SamplingParams(
                max_tokens=draw.randrange(1, 60),
                ignore_eos=draw.random() < 0.5,
                logprobs=1 if draw.random() < 0.1 else None,
            )
            prompt = list(range(draw.randrange(1, 20)))
            core.submit(EngineRequest(RequestKey(f"{step:032x}", 0), prompt, params), float(step))
        plan = core.schedule(float(step))
        if draw.random() < 0.03 and core.live():  # also of a request in the step
            seen.append([(e.request.key, e.reason) for e in core.abort(draw.choice(core.live()), float(step))])
        if plan is None:
            continue
        members = plan.items[plan.in_batch]
        through_batch += len(members)
        assert plan.batch_context == sum(item.start + 1 for item in members)
        assert plan.total_tokens == sum(item.num_tokens for item in plan.items)
        tokens = {i.request.key: EOS if draw.random() < 0.02 else 7 for i in sorted(plan.items, key=_key) if i.samples}
        out: list[TokenOut] = []
        if draw.random() < 0.01:
            effects = core.fail_step(plan, step + 0.5)
        else:
            sampled = [tokens.get(item.request.key) for item in plan.items]
            effects = core.complete(plan, sampled, step + 0.5, out if rows else None)
        core.check_integrity()
        if not rows:
            told = [(*e.request.key, e.index, e.token, e.finish) for e in effects if isinstance(e, Emit)]
        else:
            told = [(t.request_id, t.attempt, t.sample, t.index, t.token, t.finish) for t in out]
        ends = [(e.request.key, type(e)) for e in effects if not isinstance(e, Emit)]
        computed = sorted((i.request.key, i.request.num_computed, dict(i.request.marks)) for i in plan.items)
        seen.append((StepShape.of(plan)[:4], sorted(told), sorted(ends, key=str), computed, core.pool.num_free))
    assert core.pool.num_free == core.pool.num_blocks
    return seen, through_batch


def _key(item: Any) -> RequestKey:
    key: RequestKey = item.request.key
    return key


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("num_blocks", [24, 60, 400])
def test_the_batch_changes_nothing_but_the_cost(num_blocks: int, prefix_cache: bool, policy: str) -> None:
    """With few blocks it is dissolved and gathered again and again."""
    settings: dict[str, Any] = {"num_blocks": num_blocks, "prefix_cache": prefix_cache, "policy": policy}
    for seed in range(2):
        alone, none = run(make_core(Alone, **settings), seed, rows=False)
        for rows in (False, True):
            together, some = run(make_core(DecodeBatch, **settings), seed, rows=rows)
            assert together == alone
            assert none == 0 < some


def test_where_the_budget_is_too_small_for_all_it_steps_aside_for_a_while() -> None:
    core = make_core(DecodeBatch, num_blocks=400, prefix_cache=False, policy="mixed")
    core.limits = core.limits._replace(max_batch_tokens=4)
    for number in range(4):
        params = SamplingParams(max_tokens=150, ignore_eos=True)
        core.submit(EngineRequest(RequestKey(f"{number:032x}", 0), [1, 2], params), 0.0)
    sizes = []
    for step in range(20 + 2 * GATHER_STEPS):
        if step == 20:
            core.limits = core.limits._replace(max_batch_tokens=3)
        if step == 21:
            core.limits = core.limits._replace(max_batch_tokens=4)
        plan = core.schedule(0.0)
        assert plan is not None
        sizes.append(plan.in_batch.stop - plan.in_batch.start)
        core.complete(plan, [7 if item.samples else None for item in plan.items], 0.0)
    assert sizes[19] == 4
    assert sizes[20 : 20 + GATHER_STEPS] == [0] * GATHER_STEPS
    assert sizes[-1] == 4
