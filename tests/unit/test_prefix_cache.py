"""Shared prefixes in the engine core: what is found, what is computed, what is copied, who waits for whom."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.core import EngineCore
from baton.engine.policy import POLICIES
from baton.engine.request import ChunkDone, Effect, EngineRequest, StepPlan
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams

B = 4


def make_core(*, num_blocks: int = 64, max_batch_tokens: int = 64, **options: Any) -> EngineCore:
    return EngineCore(
        num_blocks=num_blocks,
        block_size=B,
        max_batch_tokens=max_batch_tokens,
        max_batch_requests=8,
        max_model_len=256,
        policy=POLICIES["mixed"](),
        **options,
    )


def request(name: str, prompt: list[int] | int, max_tokens: int = 1, sample: int = 0, **options: Any) -> EngineRequest:
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    sampling = SamplingParams(max_tokens=max_tokens, **options.pop("sampling", {}))
    return EngineRequest(RequestKey(name, 0, sample), tokens, sampling, **options)


def step(core: EngineCore) -> tuple[dict[tuple[str, int], tuple[int, int]], StepPlan, list[Effect]]:
    """One step: what it computes by request, `(start, num_tokens)`."""
    plan = core.schedule(0.0)
    assert plan is not None
    core.check_integrity()
    what = {(i.request.key.request_id, i.request.sample): (i.start, i.num_tokens) for i in plan.items}
    effects = core.complete(plan, [7 if i.samples else None for i in plan.items], 0.0)
    core.check_integrity()
    return what, plan, effects


def run(core: EngineCore) -> dict[str, int]:
    """To the end; how many tokens were computed by request."""
    computed: dict[str, int] = {}
    while (plan := core.schedule(0.0)) is not None:
        core.check_integrity()
        for item in plan.items:
            computed[item.request.key.request_id] = computed.get(item.request.key.request_id, 0) + item.num_tokens
        core.complete(plan, [7 if i.samples else None for i in plan.items], 0.0)
        core.check_integrity()
    assert core.pool.num_free == core.pool.num_blocks
    return computed


def computed(core: EngineCore, *requests: EngineRequest) -> list[int]:
    """Tokens computed for each of these, one after the other."""
    counts = []
    for r in requests:
        core.submit(r, 0.0)
        counts.append(run(core)[r.key.request_id])
    return counts


@pytest.mark.parametrize("length", [1, 2, B - 1, B, B + 1, B + 2, 3 * B - 1, 3 * B, 3 * B + 1, 3 * B + 2])
def test_the_same_prompt_again_computes_its_last_token_only(length: int) -> None:
    core = make_core()
    a, b = request("a", length), request("b", length)
    assert computed(core, a, b) == [length, 1]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, length - 1)
    load = core.load()
    assert (load.cache_queried_tokens, load.cache_hit_tokens) == (2 * length, length - 1)
    assert load.blocks_cached == -(-length // B)
    assert load.blocks_free == load.blocks_total


def test_what_differs_is_computed_from_the_first_block_on_that_differs() -> None:
    core = make_core()
    prompt = list(range(20))
    other = [*prompt[:10], 99, *prompt[11:]]
    assert computed(core, request("a", prompt), request("b", other), request("c", other[:9])) == [20, 12, 1]


def test_a_block_is_found_only_behind_the_tokens_it_was_computed_behind() -> None:
    core = make_core()
    a, b, x = ([n] * B for n in (1, 2, 3))
    assert computed(core, request("a", [*a, *x, 9]), request("b", [*b, *a, 9]), request("c", [*b, *x, 9])) == [9, 9, 5]


def test_the_next_turn_finds_prompt_and_answer() -> None:
    core = make_core()
    first = request("a", 10, max_tokens=8)
    core.submit(first, 0.0)
    run(core)
    follow_up = [*first.tokens, 50, 51, 52]
    assert computed(core, request("b", follow_up)) == [len(follow_up) - 16], "17 tokens have KV, 16 in full blocks"


@pytest.mark.parametrize("what", ["fingerprint", "salt", "off"])
def test_nothing_is_found_where_the_kv_would_differ(what: str) -> None:
    if what == "salt":
        core = make_core(fingerprint="m")
        requests = [request(str(i), 10, cache_salt=salt) for i, salt in enumerate(["", "a", "b", "a"])]
        assert computed(core, *requests) == [10, 10, 10, 1]
    elif what == "off":
        assert computed(make_core(prefix_cache=False), request("a", 10), request("b", 10)) == [10, 10]
        assert make_core(prefix_cache=False).load().cache_queried_tokens == 0
    else:
        one, two = make_core(fingerprint="m"), make_core(fingerprint="n")
        for core in (one, two):
            core.submit(request("a", 10), 0.0)
            run(core)
        assert set(one.pool._by_key).isdisjoint(two.pool._by_key)


def test_a_tail_is_not_found_as_the_start_of_a_longer_prompt() -> None:
    core = make_core()
    assert computed(core, request("a", 6), request("b", 7)) == [6, 3]


def test_samples_of_a_prompt_wait_for_the_first_and_copy_its_tail() -> None:
    core = make_core()
    for i in range(4):
        core.submit(request("a", 10, max_tokens=3, sample=i), 0.0)
    what, plan, _ = step(core)
    assert what == {("a", 0): (0, 10)}
    assert plan.copies == []
    what, plan, _ = step(core)
    assert what == {("a", 0): (10, 1), ("a", 1): (9, 1), ("a", 2): (9, 1), ("a", 3): (9, 1)}
    tables = [i.request.blocks for i in plan.items]
    assert all(table[:2] == tables[0][:2] for table in tables), "full blocks are shared"
    assert len({table[2] for table in tables}) == 4, "the partial one is each one's own"
    assert list(plan.copies) == [(tables[0][2], table[2]) for table in tables[1:]]
    assert core.pool.refs[tables[0][2]] == 1, "once it is copied nobody holds the source any more"
    run(core)


def test_samples_of_a_prompt_that_fills_its_blocks_copy_the_last_one() -> None:
    core = make_core()
    for i in range(2):
        core.submit(request("a", 2 * B, max_tokens=3, sample=i), 0.0)
    step(core)
    what, plan, _ = step(core)
    assert what["a", 1] == (2 * B - 1, 1)
    assert len(plan.copies) == 1
    run(core)


def test_who_shares_only_a_beginning_waits_for_that_and_blocks_nobody() -> None:
    core = make_core(max_batch_tokens=8)
    core.submit(request("a", 24), 0.0)
    core.submit(request("b", [*range(12), *range(100, 120)]), 0.0)
    core.submit(request("c", list(range(200, 240))), 0.0)
    assert step(core)[0] == {("a", 0): (0, 8)}
    core.check_integrity()
    assert step(core)[0] == {("a", 0): (8, 8)}, "the third block is the shared one"
    assert step(core)[0] == {("a", 0): (16, 8)}
    what = step(core)[0]
    assert what["b", 0] == (12, 8)
    run(core)


def test_a_follower_goes_on_alone_when_its_leader_ends() -> None:
    core = make_core(max_batch_tokens=8)
    core.submit(request("a", 30), 0.0)
    core.submit(request("b", 30), 0.0)
    step(core)
    assert core.schedule(0.0) is not None
    core.abort(RequestKey("a", 0), 0.0)
    plan = core._plan
    assert plan is not None
    core.complete(plan, [None], 0.0)
    assert step(core)[0] == {("b", 0): (8, 8)}, "what the leader's complete steps left is found"
    run(core)


def test_an_ended_leader_in_a_transfer_keeps_nobody_waiting() -> None:
    core = make_core(max_batch_tokens=8)
    core.submit(request("a", 30, handoff=True, max_tokens=2), 0.0)
    core.grant(RequestKey("a", 0), 0.0)
    core.submit(request("b", 30), 0.0)
    step(core)
    core.abort(RequestKey("a", 0), 0.0)
    assert step(core)[0] == {("b", 0): (8, 8)}
    core.release(RequestKey("a", 0), 0.0)
    run(core)


def test_blocks_of_a_failed_step_are_not_found() -> None:
    core = make_core(max_batch_tokens=8)
    core.submit(request("a", 20), 0.0)
    step(core)
    plan = core.schedule(0.0)
    assert plan is not None
    core.fail_step(plan, 0.0)
    core.check_integrity()
    assert computed(core, request("b", 20)) == [20]


def test_a_preempted_request_finds_its_own_blocks() -> None:
    core = make_core(num_blocks=7)
    core.submit(request("a", list(range(9)), max_tokens=12), 0.0)
    core.submit(request("b", list(range(100, 109)), max_tokens=12), 0.0)
    counts = run(core)
    needed = 9 + 11
    assert counts["a"] == needed
    assert needed < counts["b"] < needed + B + 1, "preempted, and not from the start again"


def test_cached_blocks_give_way_to_requests_the_oldest_first() -> None:
    core = make_core(num_blocks=10)
    prompts = [list(range(100 * i, 100 * i + 12)) for i in range(4)]
    assert computed(core, *(request(f"first {i}", p) for i, p in enumerate(prompts))) == [12] * 4
    again = computed(core, request("last again", prompts[3]), request("first again", prompts[0]))
    assert again == [1, 12]


def test_prompt_logprobs_are_computed_from_the_start() -> None:
    core = make_core()
    requests = [request("a", 10), request("b", 10, sampling={"prompt_logprobs": 0}), request("c", 10)]
    assert computed(core, *requests) == [10, 10, 1]


def test_a_handoff_ships_the_blocks_it_found_too() -> None:
    core = make_core()
    core.submit(request("a", 10), 0.0)
    run(core)
    core.submit(request("b", 10, handoff=True, max_tokens=2), 0.0)
    core.grant(RequestKey("b", 0), 0.0)
    what, plan, effects = step(core)
    assert what == {("b", 0): (9, 1)}
    assert len(plan.copies) == 1
    (chunk,) = [e for e in effects if isinstance(e, ChunkDone)]
    assert [index for index, _ in chunk.blocks] == [0, 1, 2]
    core.release(RequestKey("b", 0), 0.0)
    assert core.pool.num_free == core.pool.num_blocks


# --- the decode side ----------------------------------------------------------------------------


def reserved(core: EngineCore, name: str, prompt: list[int] | int, max_tokens: int = 4) -> EngineRequest:
    r = request(name, prompt, max_tokens)
    assert core.reserve(r, r.max_len - 1, 0.0) is not None
    core.check_integrity()
    return r


def test_decode_shares_what_it_received_and_registers_nothing_before() -> None:
    core = make_core()
    a = reserved(core, "a", 10)
    follower = request("b", 10, 4)
    assert core.is_coming(follower), "all it needs is on its way"
    assert not core.is_coming(request("c", 9, 4))
    assert not core.is_coming(request("d", 10, 4, cache_salt="x"))
    core.adopt(a.key, 7, 0.0)
    assert not core.is_coming(follower)
    b = reserved(core, "b", 10)
    assert b.num_prefix_blocks == 3
    assert b.blocks[:2] == a.blocks[:2]
    assert b.copy_source == a.blocks[2]
    step(core)  # the first one writes on behind the tail
    core.adopt(b.key, 7, 0.0)
    what, plan, _ = step(core)
    assert what["b", 0] == (10, 1)
    assert list(plan.copies) == [(a.blocks[2], b.blocks[2])]
    run(core)


def test_decode_holds_the_source_of_a_copy_until_it_is_made() -> None:
    core = make_core(num_blocks=7)
    a = reserved(core, "a", 6, max_tokens=2)
    core.adopt(a.key, 7, 0.0)
    b = reserved(core, "b", 6, max_tokens=2)
    step(core)
    assert core.live() == [b.key]
    assert core.pool.refs[b.copy_source or 0] == 1
    assert core.pool.allocate(5) is None
    others = core.pool.allocate(4)
    assert others is not None
    assert b.copy_source not in others
    core.pool.free(others)
    core.release(b.key, 0.0)
    assert core.pool.num_free == 7


def test_a_pool_without_room_for_the_source_of_a_copy_takes_the_tail_over_the_wire() -> None:
    core = make_core(num_blocks=2)
    a = reserved(core, "a", 6, max_tokens=2)
    core.adopt(a.key, 7, 0.0)
    run(core)
    b = reserved(core, "b", 6, max_tokens=2)
    assert (b.num_prefix_blocks, b.copy_source) == (1, None)
    core.adopt(b.key, 7, 0.0)
    run(core)


@pytest.mark.parametrize("how", ["release", "recompute"])
def test_a_transfer_that_fails_leaves_nothing_to_be_found_and_nobody_waiting(how: str) -> None:
    core = make_core()
    a = reserved(core, "a", 10)
    if how == "release":
        core.release(a.key, 0.0)
    else:
        core.recompute(a.key, 7, 0.0)
    b = request("b", 10, 4)
    assert not core.is_coming(b)
    assert core.reserve(b, 13, 0.0) is not None
    assert b.num_prefix_blocks == 0
    core.release(b.key, 0.0)
    run(core)
    c = reserved(core, "c", 10)
    assert c.num_prefix_blocks == (0 if how == "release" else 3)
    core.release(c.key, 0.0)


def test_recompute_leaves_the_shared_blocks_alone() -> None:
    core = make_core()
    a = reserved(core, "a", 10)
    core.adopt(a.key, 7, 0.0)
    b = reserved(core, "b", [*range(8), 50, 51])
    assert b.num_prefix_blocks == 2
    core.recompute(b.key, 7, 0.0)
    what, _, _ = step(core)
    assert what["b", 0] == (8, 3)
    run(core)


def test_a_full_hit_of_whole_blocks_shares_them_all() -> None:
    core = make_core()
    a = reserved(core, "a", 2 * B)
    core.adopt(a.key, 7, 0.0)
    b = reserved(core, "b", 2 * B)
    assert (b.num_prefix_blocks, b.copy_source, b.blocks[:2]) == (2, None, a.blocks[:2])
    core.adopt(b.key, 7, 0.0)
    what, plan, _ = step(core)
    assert what == {("a", 0): (8, 1), ("b", 0): (8, 1)}
    assert not plan.copies
    run(core)
