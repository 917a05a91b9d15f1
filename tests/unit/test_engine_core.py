"""EngineCore: plans, effects, blocks. No tensor anywhere: tokens are made up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from baton.engine.core import EngineCore
from baton.engine.policy import POLICIES
from baton.engine.request import ChunkDone, Effect, Emit, Ended, EngineRequest, PromptDone, RequestState
from baton.errors import InvalidRequestError, RequestTooLargeError
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams
from baton.timeline import Mark

B = 4
EOS = 99


def make_core(
    *, num_blocks: int = 64, policy: str = "mixed", max_batch_tokens: int = 16, max_batch_requests: int = 8
) -> EngineCore:
    return EngineCore(
        num_blocks=num_blocks,
        block_size=B,
        max_batch_tokens=max_batch_tokens,
        max_batch_requests=max_batch_requests,
        max_model_len=128,
        policy=POLICIES[policy](),
        eos_token_ids=[EOS],
    )


def request(name: str, prompt: int, max_tokens: int = 5, *, handoff: bool = False, **sampling: object) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    start = 1000 * (1 + sum(name.encode()))  # nothing is shared between names
    return EngineRequest(RequestKey(name, 0), list(range(start, start + prompt)), params, handoff=handoff)


def step(core: EngineCore, token: Callable[[EngineRequest], int] = lambda r: 7) -> list[Effect] | None:
    plan = core.schedule(0.0)
    core.check_integrity()
    if plan is None:
        return None
    effects = core.complete(plan, [token(i.request) if i.samples else None for i in plan.items], 1.0)
    core.check_integrity()
    return effects


def run(core: EngineCore, token: Callable[[EngineRequest], int] = lambda r: 7) -> list[Effect]:
    effects: list[Effect] = []
    while (more := step(core, token)) is not None:
        effects += more
    return effects


def emitted(effects: list[Effect], name: str) -> list[tuple[int, int, str | None]]:
    return [(e.index, e.token, e.finish) for e in effects if isinstance(e, Emit) and e.request.key.request_id == name]


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
@pytest.mark.parametrize("prompt", [1, B - 1, B, B + 1, 15, 16, 17, 33])
def test_a_request_runs_to_its_length(policy: str, prompt: int) -> None:
    core = make_core(policy=policy)
    core.submit(request("a", prompt), 0.0)
    effects = run(core)
    assert emitted(effects, "a") == [(0, 7, None), (1, 7, None), (2, 7, None), (3, 7, None), (4, 7, "length")]
    assert [type(e) for e in effects[-2:]] == [Emit, Ended]
    assert core.pool.num_free == core.pool.num_blocks


def test_a_long_prompt_is_chunked_under_the_token_budget() -> None:
    core = make_core(max_batch_tokens=16)
    core.submit(request("a", 40), 0.0)
    sizes = []
    while True:
        plan = core.schedule(0.0)
        if plan is None:
            break
        sizes.append(plan.num_tokens[RequestKey("a", 0)])
        core.complete(plan, [7 if i.samples else None for i in plan.items], 0.0)
    assert sizes == [16, 16, 8, 1, 1, 1, 1]


def test_mixed_serves_decodes_beside_a_prompt_and_prefill_first_does_not() -> None:
    for policy, expected in (("mixed", {"a": 1, "b": 15}), ("prefill_first", {"b": 16})):
        core = make_core(policy=policy)
        core.submit(request("a", 2), 0.0)
        step(core)
        core.submit(request("b", 40), 0.0)
        plan = core.schedule(0.0)
        assert plan is not None
        assert {key.request_id: n for key, n in plan.num_tokens.items()} == expected


def test_stop_tokens_end_a_request_and_ignore_eos_only_ignores_eos() -> None:
    core = make_core()
    core.submit(request("eos", 3), 0.0)
    core.submit(request("ignore", 3, ignore_eos=True), 0.0)
    core.submit(request("stop", 3, ignore_eos=True, stop_token_ids=(EOS,)), 0.0)
    effects = run(core, lambda r: EOS)
    assert emitted(effects, "eos") == [(0, EOS, "stop")]
    assert emitted(effects, "ignore")[-1] == (4, EOS, "length")
    assert emitted(effects, "stop") == [(0, EOS, "stop")]


def test_tokens_of_earlier_attempts_are_context_and_keep_their_indices() -> None:
    core = make_core()
    core.submit(EngineRequest(RequestKey("a", 1), [1, 2, 3], SamplingParams(max_tokens=5), prior=[7, 7]), 0.0)
    assert emitted(run(core), "a") == [(2, 7, None), (3, 7, None), (4, 7, "length")]


@pytest.mark.parametrize("num_blocks", [7, 9, 20])
@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_a_small_pool_preempts_and_every_request_still_ends(num_blocks: int, policy: str) -> None:
    core = make_core(num_blocks=num_blocks, policy=policy)
    for i in range(10):
        core.submit(request(str(i), 1 + i, 18), 0.0)
    effects = run(core, lambda r: r.num_tokens)
    for i in range(10):
        assert [e[1] for e in emitted(effects, str(i))] == list(range(1 + i, 19 + i)), "preemption changed the tokens"
    assert core.pool.num_free == num_blocks


def test_what_can_never_run_is_refused_and_leaves_nothing() -> None:
    core = make_core(num_blocks=4)
    with pytest.raises(InvalidRequestError, match="empty"):
        core.submit(request("a", 0), 0.0)
    with pytest.raises(RequestTooLargeError, match="KV blocks"):
        core.submit(request("a", 14, 4), 0.0)
    with pytest.raises(RequestTooLargeError, match="model"):
        core.submit(request("a", 100, 29), 0.0)
    core.submit(request("a", 13, 4), 0.0)  # 16 tokens to compute: exactly the pool
    assert emitted(run(core), "a")[-1] == (3, 7, "length")


def test_a_handoff_waits_for_credit_without_blocks_and_is_overtaken() -> None:
    core = make_core()
    core.submit(request("waits", 9, handoff=True), 0.0)
    core.submit(request("passes", 9), 0.0)
    load = core.load()
    assert (load.num_waiting, load.num_pending_tokens) == (2, 18)
    assert (load.num_uncredited, load.num_uncredited_tokens) == (1, 9)
    assert emitted(run(core), "passes")[-1][2] == "length"
    assert core.pool.num_free == core.pool.num_blocks
    core.grant(RequestKey("waits", 0), 0.0)
    assert emitted(run(core), "waits") == [(0, 7, None)]


def test_a_handoff_ships_full_blocks_chunk_by_chunk_and_the_rest_at_the_end() -> None:
    core = make_core(max_batch_tokens=6)
    core.submit(request("a", 15, handoff=True), 0.0)
    core.grant(RequestKey("a", 0), 0.0)
    chunks: list[list[int]] = []
    while (effects := step(core)) is not None:
        chunks.append([index for e in effects if isinstance(e, ChunkDone) for index, _ in e.blocks])
        last = effects
    assert chunks == [[0], [1, 2], [3]]
    assert [type(e) for e in last] == [Emit, ChunkDone, PromptDone]
    assert core.num_steps == 3
    assert core.pool.num_free == core.pool.num_blocks - 4, "blocks are held until the transfer releases them"
    core.release(RequestKey("a", 0), 0.0)
    assert core.pool.num_free == core.pool.num_blocks


def test_a_handoff_that_ends_with_its_first_token_ships_nothing_more() -> None:
    core = make_core()
    core.submit(request("a", 9, handoff=True), 0.0)
    core.grant(RequestKey("a", 0), 0.0)
    effects = run(core, lambda r: EOS)
    assert [type(e) for e in effects] == [Emit, Ended]
    core.release(RequestKey("a", 0), 0.0)
    assert core.pool.num_free == core.pool.num_blocks


def test_decode_adopts_what_it_reserved() -> None:
    core = make_core()
    incoming = request("a", 9)
    blocks = core.reserve(incoming, 9 + 5, 0.0)
    assert blocks is not None
    assert len(blocks) == 4
    assert core.schedule(0.0) is None
    core.adopt(RequestKey("a", 0), 5, 1.0)
    plan = core.schedule(2.0)
    assert plan is not None
    assert plan.num_tokens == {RequestKey("a", 0): 1}, "only the first token itself is left to compute"
    effects = core.complete(plan, [6], 3.0)
    assert emitted(effects, "a") == [(1, 6, None)]
    assert incoming.marks == {Mark.ADOPTED: 1.0, Mark.DECODE_START: 2.0, Mark.SECOND_TOKEN: 3.0}


def test_blocks_reserved_for_growth_are_enough() -> None:
    """Fewer are needed than are held when it is admitted: it takes none, and gives none back before its end."""
    core = make_core()
    incoming = request("a", 9, max_tokens=20)
    blocks = core.reserve(incoming, 9 + 19, 0.0)
    assert blocks is not None
    core.adopt(RequestKey("a", 0), 5, 0.0)
    for _ in range(10):
        step(core)
        assert incoming.blocks == blocks
        assert core.pool.num_free == core.pool.num_blocks - len(blocks)


def test_decode_recomputes_what_it_cannot_trust() -> None:
    core = make_core()
    core.reserve(request("a", 9), 14, 0.0)
    core.recompute(RequestKey("a", 0), 5, 0.0)
    plan = core.schedule(0.0)
    assert plan is not None
    assert plan.num_tokens == {RequestKey("a", 0): 10}, "prompt and first token"
    assert emitted(core.complete(plan, [6], 0.0), "a") == [(1, 6, None)]


def test_a_reservation_is_all_or_nothing_and_does_not_overtake_a_waiting_request() -> None:
    core = make_core(num_blocks=8)
    assert core.reserve(request("a", 20), 25, 0.0) is not None
    assert core.reserve(request("b", 5), 10, 0.0) is None
    core.release(RequestKey("a", 0), 0.0)
    assert core.reserve(request("c", 10), 15, 0.0) is not None
    core.submit(request("waiting", 21), 0.0)
    assert core.schedule(0.0) is None
    assert core.reserve(request("d", 1), 4, 0.0) is None


@pytest.mark.parametrize("moment", ["uncredited", "waiting", "in step", "running", "handed", "reserved", "adopted"])
def test_abort_in_every_state_leaves_no_block_held(moment: str) -> None:
    core = make_core()
    key = RequestKey("a", 0)
    handoff = moment in ("uncredited", "handed")
    if moment in ("reserved", "adopted"):
        core.reserve(request("a", 9), 14, 0.0)
        if moment == "adopted":
            core.adopt(key, 5, 0.0)
    else:
        core.submit(request("a", 9, handoff=handoff), 0.0)
    if moment == "handed":
        core.grant(key, 0.0)
    if moment in ("running", "handed"):
        step(core)
    plan = core.schedule(0.0) if moment == "in step" else None
    assert [type(e) for e in core.abort(key, 0.0)] == [Ended]
    assert core.abort(key, 0.0) == []
    if plan is not None:
        assert core.pool.num_free < core.pool.num_blocks, "the step still writes these blocks"
        assert core.complete(plan, [7], 0.0) == []
    if moment in ("handed", "reserved"):
        assert core.pool.num_free < core.pool.num_blocks, "the transfer still uses these blocks"
    core.release(key, 0.0)
    assert core.pool.num_free == core.pool.num_blocks
    assert core.live() == []
    assert step(core) is None


def test_a_failed_step_ends_its_requests_only() -> None:
    core = make_core(max_batch_requests=2)
    for name in "abc":
        core.submit(request(name, 3), 0.0)
    plan = core.schedule(0.0)
    assert plan is not None
    effects = core.fail_step(plan, 0.0)
    assert [(type(e), e.request.key.request_id) for e in effects] == [(Ended, "a"), (Ended, "b")]
    assert emitted(run(core), "c")[-1][2] == "length"
    assert core.pool.num_free == core.pool.num_blocks


def test_deadlines_end_requests_and_say_when_to_be_woken() -> None:
    core = make_core()
    late = EngineRequest(RequestKey("a", 0), [1], SamplingParams(max_tokens=5), deadline=10.0)
    core.submit(late, 0.0)
    assert core.next_deadline() == 10.0
    assert core.on_deadline(9.0) == []
    assert [type(e) for e in core.on_deadline(10.0)] == [Ended]
    assert core.next_deadline() is None


@pytest.mark.parametrize("seed", range(30))
def test_random_lives_conserve_blocks(seed: int) -> None:
    """I3: after every event each block is free or held exactly once; at the end all are free."""
    draw = random.Random(seed)
    core = make_core(num_blocks=draw.randint(10, 24), policy=draw.choice(["mixed", "prefill_first"]))
    handed: set[RequestKey] = set()
    reserved: set[RequestKey] = set()
    plan = None
    for n in range(200):
        key = RequestKey(str(n), 0)
        match draw.randrange(8):
            case 0:
                core.submit(request(str(n), draw.randint(1, 20), draw.randint(1, 12)), n)
            case 1:
                core.submit(request(str(n), draw.randint(1, 20), 6, handoff=True), n)
                if draw.random() < 0.8:
                    core.grant(key, n)
                    handed.add(key)
            case 2 if core.reserve(request(str(n), 9, 12), 14, n) is not None:
                reserved.add(key)
            case 3 if reserved:
                other = reserved.pop()
                if draw.random() < 0.5:
                    core.adopt(other, 3, n)
                else:
                    core.release(other, n)
            case 4 if handed:
                core.release(handed.pop(), n)
            case 5 if core.live():
                victim = draw.choice(core.live())
                core.abort(victim, n)
                if victim in reserved:
                    reserved.discard(victim)
                    core.release(victim, n)
            case _:
                if plan is None:
                    plan = core.schedule(n)
                else:
                    core.complete(plan, [draw.randrange(90) if i.samples else None for i in plan.items], n)
                    plan = None
        core.check_integrity()
    if plan is not None:
        core.complete(plan, [1 if i.samples else None for i in plan.items], 0)
    for key in core.live():
        core.abort(key, 0)
    for key in handed | reserved:
        core.release(key, 0)
    core.check_integrity()
    assert core.pool.num_free == core.pool.num_blocks


def test_states_are_shown_in_messages() -> None:
    core = make_core()
    core.submit(request("a", 9), 0.0)
    plan = core.schedule(0.0)
    assert plan is not None
    assert plan.items[0].request.state is RequestState.RUNNING
    assert "running" in repr(core.holders()[0])


# --- min_tokens -------------------------------------------------------------------------------------


def test_min_tokens_forbids_what_would_end_the_request_and_then_no_more() -> None:
    core = make_core()
    r = request("a", 5, 9, min_tokens=3, stop_token_ids=(8,))
    core.submit(r, 0.0)
    seen = []

    def token(request: EngineRequest) -> int:
        seen.append((request.num_outputs, request.forbidden))
        return 8 if request.num_outputs >= 3 else 7

    assert emitted(run(core, token), "a") == [(0, 7, None), (1, 7, None), (2, 7, None), (3, 8, "stop")]
    assert seen == [(0, {8, EOS}), (1, {8, EOS}), (2, {8, EOS}), (3, frozenset())]


def test_a_stop_id_before_min_tokens_does_not_end_the_request() -> None:
    """It can only be sampled where the vocabulary has nothing else."""
    core = make_core()
    core.submit(request("a", 5, 9, min_tokens=2), 0.0)
    assert emitted(run(core, lambda r: EOS), "a") == [(0, EOS, None), (1, EOS, None), (2, EOS, "stop")]


def test_ignored_eos_may_be_sampled_before_min_tokens() -> None:
    core = make_core()
    r = request("a", 5, 4, min_tokens=3, ignore_eos=True)
    core.submit(r, 0.0)
    assert r.forbidden == frozenset()
    assert emitted(run(core, lambda r: EOS), "a")[-1] == (3, EOS, "length")


@pytest.mark.parametrize("handoff", [False, True])
def test_tokens_of_earlier_attempts_count_for_min_and_max_tokens(handoff: bool) -> None:
    core = make_core()
    params = SamplingParams(max_tokens=4, min_tokens=3)
    r = EngineRequest(RequestKey("a", 1), [1, 2], params, prior=[7, 7], handoff=handoff)
    core.submit(r, 0.0)
    core.grant(r.key, 0.0)
    assert r.forbidden == {EOS}
    effects = run(core)
    assert emitted(effects, "a")[0] == (2, 7, None)
    assert r.forbidden == frozenset()
    if not handoff:
        assert emitted(effects, "a")[1:] == [(3, 7, "length")]
    core.release(r.key, 0.0)
    assert core.pool.num_free == core.pool.num_blocks


def test_min_tokens_holds_over_a_hand_over() -> None:
    core = make_core()
    params = SamplingParams(max_tokens=5, min_tokens=2)
    r = EngineRequest(RequestKey("a", 0), [1, 2, 3], params)
    assert core.reserve(r, 5, 0.0) is not None
    core.adopt(r.key, 7, 0.0)
    assert r.forbidden == {EOS}
    assert emitted(run(core, lambda r: 7 if r.forbidden else EOS), "a") == [(1, 7, None), (2, EOS, "stop")]


def test_samples_of_a_request_are_requests_of_their_own() -> None:
    core = make_core()
    samples = [EngineRequest(RequestKey("a", 0, i), [1, 2, 3], SamplingParams(max_tokens=3)) for i in range(3)]
    for r in samples:
        core.submit(r, 0.0)
    step(core)
    assert core.abort(samples[1].key, 0.0) == [Ended(samples[1], "abort")]
    ended = [e.request.sample for e in run(core) if isinstance(e, Ended)]
    assert ended == [0, 2]
    assert core.pool.num_free == core.pool.num_blocks


def test_adopted_requests_that_all_lack_one_block_go_on() -> None:
    core = make_core(num_blocks=4)
    requests = [request(name, 2 * B) for name in "ab"]
    for r in requests:
        assert core.reserve(r, 2 * B, 0.0) is not None
    for r in requests:
        core.adopt(r.key, 7, 0.0)
    effects = run(core)
    assert [len(emitted(effects, name)) for name in "ab"] == [4, 4]
    assert core.pool.num_free == core.pool.num_blocks


def test_an_adopted_request_passes_one_that_waits_for_what_it_holds() -> None:
    core = make_core(num_blocks=4)
    held = request("held", 2 * B)
    assert core.reserve(held, 2 * B, 0.0) is not None
    core.submit(first := request("first", 3 * B), 0.0)
    first.order = (-1, *first.order[1:])
    core.adopt(held.key, 7, 0.0)
    effects = run(core)
    assert [len(emitted(effects, name)) for name in ("held", "first")] == [4, 5]
    assert core.pool.num_free == core.pool.num_blocks


def test_a_less_important_request_that_cannot_advance_makes_room_in_the_batch() -> None:
    """The more important ones hold all other blocks, so it cannot preempt them, and they cannot get into the batch."""
    core = make_core(num_blocks=5, max_batch_requests=1)
    low, high = request("low", B - 1), request("high", 2 * B)
    low.priority = 1
    core.submit(low, 0.0)
    step(core)
    assert core.reserve(high, 4 * B, 0.0) is not None
    core.adopt(high.key, 7, 0.0)
    assert core.pool.num_free == 0
    effects = run(core)
    assert [len(emitted(effects, name)) for name in ("low", "high")] == [4, 4]
    assert core.pool.num_free == core.pool.num_blocks


def test_a_request_whose_blocks_only_transfers_hold_waits_for_them() -> None:
    core = make_core(num_blocks=2)
    core.submit(request("a", B - 1), 0.0)
    step(core)
    core.reserve(coming := request("b", B - 1), B, 0.0)
    step(core)
    assert core.schedule(0.0) is None
    core.release(coming.key, 0.0)
    assert len(emitted(run(core), "a")) == 3
