"""EngineCore under whatever order of events its driver and its ports may produce, on pools that are too small.

Prompts begin alike, so that blocks are shared; a model of the KV cache's content says at each step and hand-over
whether every position that is read holds the KV of exactly the tokens up to it, and nothing is written that another
reads. After every event each block is free, cached or held as often as tables name it (I3); the blocks of the step
under way and of every transfer are still their requests' (I5, I4); plans keep the budget and compute only what is
known. Each accepted request ends once (I1), with token indices without gap or repetition (I2). And from wherever an
example stops: once transfers answer, everything ends within a bound of steps, and no block is held.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.core import EngineCore
from baton.engine.policy import POLICIES
from baton.engine.request import ChunkDone, Effect, Emit, Ended, EngineRequest, PromptDone, RequestState, StepPlan
from baton.errors import InvalidRequestError, RequestTooLargeError
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams

B = 4
EOS = 99
PROMPT = st.integers(1, 20)
MAX_MODEL_LEN = 48
PICK = st.integers(0, 1 << 16)


def prompt_of(family: int, length: int) -> list[int]:
    """Three families: two begin alike for a block and a half, the third shares nothing."""
    start = 1000 * (family if family != 1 else 0)
    return [start + i + (500 if family == 1 and i >= 6 else 0) for i in range(length)]


class Life:
    """What the outside knows of one request: a second, independent account of it."""

    def __init__(self, request: EngineRequest, kind: str):
        self.request = request
        self.kind = kind
        """`plain`, `handoff` (prefill side) or `adopted` (decode side)."""
        self.credit = kind != "handoff"
        self.transfer = kind == "adopted"
        """A transfer reads or writes its blocks, until `release` or its answer."""
        self.known = list(request.tokens)
        self.emitted = request.num_context - request.num_prompt
        """Index of the next token that it may emit."""
        self.shipped: list[int] = []
        """Blocks that became final, by index."""
        self.ends: list[str] = []
        self.gone = False
        """`Ended`, or its hand-over was released: nothing may come of it any more."""
        self.held_for_transfer: list[int] = []
        """Blocks seen while the transfer holds them."""


class Engine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 10),
        max_batch_tokens=st.integers(1, 12),
        max_batch_requests=st.integers(1, 5),
        policy=st.sampled_from(sorted(POLICIES)),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        num_blocks: int,
        max_batch_tokens: int,
        max_batch_requests: int,
        policy: str,
        prefix_cache: bool = True,
    ) -> None:
        self.now = 0.0
        self.core = EngineCore(
            num_blocks=num_blocks,
            block_size=B,
            max_batch_tokens=max_batch_tokens,
            max_batch_requests=max_batch_requests,
            max_model_len=MAX_MODEL_LEN,
            policy=POLICIES[policy](),
            eos_token_ids=[EOS],
            prefix_cache=prefix_cache,
        )
        self.lives: dict[RequestKey, Life] = {}
        self.number = self.num_preemptions = self.num_copies = self.num_waits = 0
        self.plan: StepPlan | None = None
        self.in_step: dict[RequestKey, list[int]] = {}
        """Blocks of the requests in the step under way."""
        self.memory: dict[tuple[int, int], Any] = {}
        """What the KV cache holds at (block, offset): the salt and the tokens that it was computed from."""

    # --- what the machine knows -------------------------------------------------------------------

    def new(
        self, prompt: int | list[int], max_tokens: int, prior: int, kind: str, deadline: float | None = None
    ) -> EngineRequest:
        self.number += 1
        if isinstance(prompt, int):
            prompt = prompt_of(self.number % 3, prompt)
        return EngineRequest(
            RequestKey(f"{self.number:x}", 0),
            prompt,
            SamplingParams(max_tokens=max_tokens, ignore_eos=self.number % 4 == 0),
            prior=[50] * prior,
            handoff=kind == "handoff",
            deadline=None if deadline is None else self.now + deadline,
            cache_salt="other" if self.number % 7 == 0 else "",
        )

    def fits(self, request: EngineRequest) -> bool:
        """An independent account of what can ever run here."""
        needed = request.num_context if request.handoff else request.max_len - 1
        return request.max_len <= MAX_MODEL_LEN and -(-needed // B) <= self.core.pool.num_blocks

    def of(self, condition: Callable[[Life], bool]) -> list[Life]:
        return [life for life in self.lives.values() if condition(life)]

    def pick(self, lives: list[Life], pick: int) -> RequestKey:
        return lives[pick % len(lives)].request.key

    def waits_for_credit(self, life: Life) -> bool:
        return life.kind == "handoff" and not life.credit and not life.gone

    def is_reserved(self, life: Life) -> bool:
        return life.request.state is RequestState.RESERVED and life.transfer

    def kv(self, request: EngineRequest, position: int) -> Any:
        return request.cache_salt, tuple(request.tokens[: position + 1])

    def write(self, life: Life, start: int, end: int, *, garbage: bool = False) -> None:
        """The KV of these positions, or nonsense, is written into the request's blocks."""
        request = life.request
        for index in range(start // B, -(-end // B)):
            block = request.blocks[index]
            readers = [other for other in self.lives.values() if block in other.request.blocks]
            assert readers == [life], f"{request!r} writes block {block}, which others read: {readers}"
        for position in range(start, end):
            at = request.blocks[position // B], position % B
            self.memory[at] = "garbage" if garbage else self.kv(request, position)

    def read(self, life: Life, end: int) -> None:
        """All KV before position `end` is where it should be."""
        request = life.request
        blocks = list(request.blocks)
        if request.copy_source is not None:
            blocks[request.num_computed // B] = request.copy_source
        for position in range(end):
            found = self.memory.get((blocks[position // B], position % B))
            assert found == self.kv(request, position), f"{request!r}: at {position} is the KV of {found}"

    def compute(self, plan: StepPlan) -> None:
        """What the runner does, also for requests that have ended meanwhile."""
        for source, target in plan.copies:
            self.num_copies += 1
            for offset in range(B):
                self.memory[target, offset] = self.memory.get((source, offset))
        for item in plan.items:
            self.write(self.lives[item.request.key], item.start, item.start + item.num_tokens)
        for item in plan.items:
            blocks = item.request.blocks
            for position in range(item.start + item.num_tokens):
                found = self.memory.get((blocks[position // B], position % B))
                assert found == self.kv(item.request, position), f"{item.request!r}: at {position} is {found}"

    def compute_nonsense(self, plan: StepPlan) -> None:
        """What a failing step leaves behind, at worst."""
        for _, target in plan.copies:
            for offset in range(B):
                self.memory[target, offset] = "garbage"
        for item in plan.items:
            self.write(self.lives[item.request.key], item.start, item.start + item.num_tokens, garbage=True)

    def receive_nonsense(self, life: Life) -> None:
        """What a transfer that goes wrong leaves behind: anything, in the blocks that were to be sent."""
        first = life.request.num_prefix_blocks * B
        if life.kind == "adopted" and first < life.request.num_context:
            self.write(life, first, life.request.num_context, garbage=True)

    def may_adopt(self, life: Life) -> bool:
        return self.is_reserved(life) and not life.gone

    def hear(self, effects: list[Effect]) -> None:
        """What the ports and the router would do with effects."""
        for effect in effects:
            life = self.lives[effect.request.key]
            request = life.request
            assert not life.gone, f"{effect} after the end"
            match effect:
                case Emit(index=index, token=token, finish=finish):
                    assert index == life.emitted, f"{request!r}: token {index} after {life.emitted - 1} (I2)"
                    life.emitted += 1
                    life.known.append(token)
                    assert request.tokens == life.known
                    stops = token == EOS and not request.sampling.ignore_eos
                    assert finish == (
                        "stop" if stops else "length" if life.emitted == request.sampling.max_tokens else None
                    )
                case ChunkDone(blocks=blocks):
                    assert life.kind == "handoff" and life.transfer
                    indices = [index for index, _ in blocks]
                    assert indices == list(range(len(life.shipped), len(life.shipped) + len(blocks)))
                    life.shipped += [block for _, block in blocks]
                    assert request.blocks[: len(life.shipped)] == life.shipped
                    whole = -(-request.num_computed // B)
                    assert whole - 1 <= len(life.shipped) <= whole
                case PromptDone():
                    assert life.kind == "handoff" and life.transfer
                    assert len(life.shipped) == -(-request.num_context // B), "every block of the context is shipped"
                    assert life.emitted == request.num_outputs
                case Ended(reason=reason):
                    life.ends.append(reason)
                    life.gone = True

    # --- requests come in -------------------------------------------------------------------------

    @rule(
        prompt=PROMPT,
        max_tokens=st.integers(1, 14),
        prior=st.integers(0, 3),
        kind=st.sampled_from(["plain", "plain", "handoff"]),
        deadline=st.none() | st.floats(0.5, 20),
        granted=st.booleans(),
    )
    def submit(
        self, prompt: int | list[int], max_tokens: int, prior: int, kind: str, deadline: float | None, granted: bool
    ) -> None:
        prior = min(prior, max_tokens - 1)
        if kind == "handoff" and max_tokens - prior == 1:
            kind = "plain"  # WorkerCore hands over only what has more than its first token left
        request = self.new(prompt, max_tokens, prior, kind, deadline)
        if not self.fits(request):
            with pytest.raises(RequestTooLargeError):
                self.core.submit(request, self.now)
            return
        self.core.submit(request, self.now)
        self.lives[request.key] = Life(request, kind)
        if kind == "handoff" and granted:
            self.grant(len(self.of(self.waits_for_credit)) - 1)

    @precondition(lambda self: self.of(self.waits_for_credit))
    @rule(pick=PICK)
    def grant(self, pick: int) -> None:
        key = self.pick(self.of(self.waits_for_credit), pick)
        self.core.grant(key, self.now)
        self.lives[key].credit = self.lives[key].transfer = True

    @precondition(lambda self: self.of(self.waits_for_credit))
    @rule(pick=PICK)
    def keep(self, pick: int) -> None:
        key = self.pick(self.of(self.waits_for_credit), pick)
        life = self.lives[key]
        if -(-(life.request.max_len - 1) // B) > self.core.pool.num_blocks:
            with pytest.raises(RequestTooLargeError):
                self.core.keep(key, self.now)
            self.hear(self.core.abort(key, self.now))
            return
        self.core.keep(key, self.now)
        life.kind, life.credit = "plain", True

    @rule(
        prompt=PROMPT,
        max_tokens=st.integers(2, 14),
        prior=st.integers(0, 3),
        growth=st.integers(0, 14),
        deadline=st.none() | st.floats(0.5, 20),
    )
    def reserve(
        self, prompt: int | list[int], max_tokens: int, prior: int, growth: int, deadline: float | None
    ) -> None:
        request = self.new(prompt, max_tokens, min(prior, max_tokens - 2), "adopted", deadline)
        if not self.fits(request):
            with pytest.raises(RequestTooLargeError):
                self.core.reserve(request, request.num_context, self.now)
            return
        num_tokens = min(request.num_context + growth, request.max_len - 1)
        free = self.core.pool.num_free
        cache = self.core.tables.cache
        overtakes = any(
            -(-waiting.num_tokens // B) > len(waiting.blocks)
            and (cache is None or waiting.blocks or not cache.waits(waiting))
            for waiting in self.core._waiting
        )
        if self.core.is_coming(request):
            self.num_waits += 1
            sender = cache._receiving[cache._context_key(request)]  # type: ignore[union-attr]
            assert self.lives[sender.key].transfer and sender.tokens[: sender.num_context] == request.tokens
            return
        blocks = self.core.reserve(request, num_tokens, self.now)
        if blocks is None:
            assert self.core.pool.num_free == free
            assert overtakes or -(-num_tokens // B) > free, "refused though there is room"
            return
        assert not overtakes, "who came earlier waits for blocks"
        assert len(blocks) == -(-num_tokens // B)
        self.lives[request.key] = life = Life(request, "adopted")
        prefix = min(request.num_prefix_blocks * B, request.num_context)
        assert prefix == request.num_computed
        self.read(life, prefix)

    @precondition(lambda self: self.lives)
    @rule(
        pick=PICK,
        keep=st.integers(1, 40),
        more=st.integers(0, 6),
        kind=st.sampled_from(["plain", "handoff", "adopted"]),
    )
    def follow_up(self, pick: int, keep: int, more: int, kind: str) -> None:
        """A prompt that begins with what a former request was asked and answered, or with a part of it."""
        prompt = list(self.lives[self.pick(list(self.lives.values()), pick)].request.tokens[:keep])
        prompt += range(200, 200 + more)
        if kind == "adopted":
            self.reserve(prompt, 6, 0, 6, None)
        else:
            self.submit(prompt, 6, 0, kind, None, True)

    @rule(prompt=PROMPT, n=st.integers(2, 4), adopted=st.booleans())
    def samples(self, prompt: int, n: int, adopted: bool) -> None:
        """The same prompt several times."""
        tokens = prompt_of(0, prompt)
        for _ in range(n):
            if adopted:
                self.reserve(tokens, 6, 0, 6, None)
            else:
                self.submit(tokens, 6, 0, "plain", None, True)

    @precondition(lambda self: self.of(self.may_adopt))
    @rule(pick=PICK, token=st.integers(0, 9), trusted=st.booleans())
    def adopt_or_recompute(self, pick: int, token: int, trusted: bool) -> None:
        self.take_over(self.pick(self.of(self.may_adopt), pick), token, trusted)

    def take_over(self, key: RequestKey, token: int, trusted: bool) -> None:
        life = self.lives[key]
        self.receive_nonsense(life)
        if trusted:  # all of it has come
            first = min(life.request.num_prefix_blocks * B, life.request.num_context)
            self.write(life, first, life.request.num_context)
            self.read(life, life.request.num_context)
        (self.core.adopt if trusted else self.core.recompute)(key, token, self.now)
        life.transfer = False
        life.known.append(token)
        life.emitted += 1  # prefill has emitted this one

    # --- requests go out --------------------------------------------------------------------------

    def may_release(self, life: Life) -> bool:
        """The send port releases a request it handed over, or one that has ended; the receive port a reservation."""
        handed = life.request.state is RequestState.HANDED
        return life.transfer and (life.gone or handed or life.kind == "adopted")

    @precondition(lambda self: self.of(self.may_release))
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        key = self.pick(self.of(self.may_release), pick)
        life = self.lives[key]
        self.receive_nonsense(life)
        self.core.release(key, self.now)
        life.transfer = False
        life.gone = True
        life.ends = life.ends or ["released"]
        self.core.release(key, self.now)  # again: a no-op

    @precondition(lambda self: self.lives)
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        """Of any request, ended ones too."""
        key = self.pick(list(self.lives.values()), pick)
        gone = self.lives[key].gone
        effects = self.core.abort(key, self.now)
        assert [type(effect) for effect in effects] == ([] if gone else [Ended])
        self.hear(effects)
        assert self.core.abort(key, self.now) == []

    @rule(seconds=st.floats(0.1, 8))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = {
            life.request.key
            for life in self.of(lambda life: not life.gone and not self.is_reserved(life))
            if life.request.deadline is not None and life.request.deadline <= self.now
        }
        effects = self.core.on_deadline(self.now)
        assert {effect.request.key for effect in effects} == late
        self.hear(effects)
        deadline = self.core.next_deadline()
        assert deadline is None or deadline > self.now

    @precondition(lambda self: self.lives)
    @rule(pick=PICK)
    def submit_again(self, pick: int) -> None:
        """A key that is here already is refused; what is here does not notice."""
        life = self.lives[self.pick(list(self.lives.values()), pick)]
        if not life.gone or life.transfer:
            with pytest.raises(InvalidRequestError, match="already"):
                self.core.submit(EngineRequest(life.request.key, [1], SamplingParams(max_tokens=1)), self.now)

    # --- steps ------------------------------------------------------------------------------------

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        transfers = {life.request.key: list(life.request.blocks) for life in self.of(lambda life: life.transfer)}
        holders = {request: request.num_computed for request in self.core.holders()}
        running = {request: len(request.blocks) for request in self.core._running.values()}
        queue = [request for request in self.core._waiting if not request.blocks]
        self.plan = plan = self.core.schedule(self.now)
        if any(not request.blocks for request in holders):
            self.num_preemptions += 1
            victims = [request for request in running if not request.blocks]
            waiting = list(self.core._waiting)
            front = [request for request in waiting if request.order[1] == -1]
            assert waiting[: len(front)] == front and set(victims) <= set(front), "who was preempted goes on first"
            younger = list(running)[list(running).index(victims[0]) :] if victims else []
            assert all(len(request.blocks) <= running[request] for request in younger), "an older one gave way"
        for key, blocks in transfers.items():
            held = self.lives[key].request.blocks
            assert held[: len(blocks)] == blocks, "a step took blocks that a transfer holds (I4, I5)"
        if plan is None:
            return
        assert plan.items
        assert plan.total_tokens == sum(item.num_tokens for item in plan.items) <= self.core.limits.max_batch_tokens
        assert len({item.request.key for item in plan.items}) == len(plan.items)
        for item in plan.items:
            request, life = item.request, self.lives[item.request.key]
            assert not life.gone and life.credit and not self.is_reserved(life), f"{request!r} must not run"
            assert item.start == request.num_computed and 0 < item.num_tokens <= len(request.tokens) - item.start
            assert item.samples == (item.start + item.num_tokens == len(request.tokens))
            assert len(request.blocks) * B >= item.start + item.num_tokens, "computed into no block"
            self.in_step[request.key] = list(request.blocks)
            assert item.start >= holders.get(request, 0), f"{request!r} lost its blocks and took them back at once"
        assert len(self.core._running) <= self.core.limits.max_batch_requests
        followers = [r for r in queue if r.state is RequestState.WAITING and r.awaited_key is not None]
        self.num_waits += len(followers)
        served = [request.state is RequestState.RUNNING for request in queue if request not in followers]
        assert served == sorted(served, reverse=True), "who needs blocks gets them first come, first served"

    @precondition(lambda self: self.plan is not None)
    @rule(tokens=st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 7, EOS]), min_size=1, max_size=5))
    def complete(self, tokens: list[int]) -> None:
        plan = self.plan
        assert plan is not None
        self.plan = None
        self.in_step.clear()
        self.compute(plan)
        sampled = [tokens[i % len(tokens)] if item.samples else None for i, item in enumerate(plan.items)]
        self.hear(self.core.complete(plan, sampled, self.now))

    @precondition(lambda self: self.plan is not None)
    @rule()
    def fail_step(self) -> None:
        plan = self.plan
        assert plan is not None
        self.plan = None
        self.in_step.clear()
        self.compute_nonsense(plan)
        lost = {item.request.key for item in plan.items if not self.lives[item.request.key].gone}
        effects = self.core.fail_step(plan, self.now)
        assert {effect.request.key for effect in effects} == lost
        self.hear(effects)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        """Several steps in a row: requests grow, and where the pool is small they take each other's blocks."""
        for i in range(count):
            if self.plan is None:
                self.schedule()
            if self.plan is None:
                return
            self.check()
            self.complete([1 + i % 7])
            self.check()

    @rule(
        what=st.lists(
            st.tuples(st.sampled_from(["plain", "handoff", "adopted", "steps"]), st.integers(1, 8), st.integers(1, 14)),
            min_size=2,
            max_size=12,
        )
    )
    def crowd(self, what: list[tuple[str, int, int]]) -> None:
        """Requests and steps by turns, more than fits: prompts that do, answers that do not."""
        for kind, prompt, number in what:
            if kind == "steps":
                self.steps(prompt)
            elif kind == "adopted":
                self.reserve(prompt, 14, 0, number, None)
                if lives := self.of(self.may_adopt):
                    self.take_over(lives[-1].request.key, 1, trusted=True)
            else:
                self.submit(prompt, number, 0, kind, None, True)

    @precondition(lambda self: 0 < self.core.pool.num_free * B < MAX_MODEL_LEN)
    @rule()
    def take_the_rest(self) -> None:
        """A hand-over that fits exactly into what is free, and may run in the next step."""
        self.reserve(self.core.pool.num_free * B - 1, 2, 0, 1, None)
        if lives := self.of(self.may_adopt):
            self.take_over(lives[-1].request.key, 1, trusted=True)

    # --- what always holds ------------------------------------------------------------------------

    @invariant()
    def blocks_are_conserved(self) -> None:  # I3
        self.core.check_integrity()
        requests = [life.request for life in self.lives.values()]
        held = {block for request in requests for block in request.blocks}
        held |= {request.copy_source for request in requests if request.copy_source is not None}
        assert len(held) + self.core.pool.num_free == self.core.pool.num_blocks

    @invariant()
    def the_step_keeps_its_blocks(self) -> None:  # I5
        for key, blocks in self.in_step.items():
            assert self.lives[key].request.blocks == blocks, f"{key} is in a step, its blocks are not its own any more"

    @invariant()
    def transfers_keep_their_blocks(self) -> None:  # I4, I5
        for life in self.lives.values():
            blocks = life.request.blocks
            if life.transfer:
                assert blocks[: len(life.held_for_transfer)] == life.held_for_transfer, f"{life.request!r} lost blocks"
                life.held_for_transfer = list(blocks)
                if life.kind == "handoff":
                    self.read(life, min(len(life.shipped) * B, life.request.num_context))
            else:
                life.held_for_transfer = []

    @invariant()
    def every_request_ends_once(self) -> None:  # I1
        live = set(self.core.live())
        for key, life in self.lives.items():
            assert len(life.ends) == life.gone, life.ends
            assert (key in live) != life.gone, f"{life.request!r} is neither live nor has it ended"
            if life.gone and not life.transfer and key not in self.in_step:
                assert life.request.blocks == [], f"{life.request!r} has ended and keeps blocks"

    @invariant()
    def the_load_adds_up(self) -> None:
        load = self.core.load()
        queued = self.of(lambda life: not life.gone and life.request.state is RequestState.WAITING)
        running = self.of(lambda life: not life.gone and life.request.state is RequestState.RUNNING)
        assert (load.num_waiting, load.num_running) == (len(queued), len(running))
        assert load.blocks_free == self.core.pool.num_free

    def teardown(self) -> None:
        """From here on transfers answer at once: everything must end, within a bound of steps."""
        if not hasattr(self, "core"):
            return
        for life in self.of(self.waits_for_credit):
            self.core.grant(life.request.key, self.now)
            life.credit = life.transfer = True
        tokens = sum(len(life.request.tokens) + life.request.max_len for life in self.lives.values())
        bound = 10 + 4 * tokens  # one step may compute one token, and preemption computes some of them again
        for _ in range(bound):
            for life in self.of(self.may_adopt):
                self.take_over(life.request.key, 1, trusted=True)
            while lives := self.of(self.may_release):
                self.release(self.lives_index(lives[0]))
            if self.plan is None:
                self.schedule()
            if self.plan is None:
                break
            self.complete([1])
            self.check()
        assert self.plan is None, f"still at work after {bound} steps: {self.core.holders()}"
        assert self.core.live() == [], f"stuck: {[self.lives[key].request for key in self.core.live()]}"
        assert self.core.pool.num_free == self.core.pool.num_blocks
        self.check()

    def lives_index(self, life: Life) -> int:
        return self.of(self.may_release).index(life)

    def check(self) -> None:
        self.blocks_are_conserved()
        self.the_step_keeps_its_blocks()
        self.transfers_keep_their_blocks()
        self.every_request_ends_once()


TestEngine = Engine.TestCase
TestEngine.settings = settings(
    max_examples=int(os.environ.get("BATON_EXAMPLES", "150")), stateful_step_count=60, deadline=None
)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_long_random_traffic(policy: str) -> None:
    """The same machine, driven long and evenly: pools as crowded as Hypothesis' small examples seldom are."""
    seen: Counter[str] = Counter()
    for seed in range(int(os.environ.get("BATON_EXAMPLES", "150"))):
        draw = random.Random(seed)
        machine = Engine()
        machine.start(draw.randint(4, 10), draw.randint(4, 12), draw.randint(2, 5), policy)
        for _ in range(60):
            if draw.random() < 0.3:
                machine.submit(
                    draw.randint(1, 8), draw.randint(2, 14), 0, draw.choice(["plain", "handoff"]), None, True
                )
            if draw.random() < 0.3:
                machine.reserve(draw.randint(1, 8), 14, 0, draw.randint(0, 14), None)
            if draw.random() < 0.4 and machine.of(machine.may_adopt):
                machine.adopt_or_recompute(draw.randint(0, 9), 1, draw.random() < 0.8)
            if draw.random() < 0.2 and machine.of(machine.may_release):
                machine.release(draw.randint(0, 9))
            if draw.random() < 0.1 and machine.lives:
                machine.abort(draw.randint(0, 99))
            if draw.random() < 0.1 and machine.lives:
                machine.follow_up(
                    draw.randint(0, 99), draw.randint(1, 20), draw.randint(0, 3), draw.choice(["plain", "adopted"])
                )
            if draw.random() < 0.05:
                machine.samples(draw.randint(1, 10), 3, draw.random() < 0.5)
            machine.steps(draw.randint(0, 2))
            machine.check()
        machine.teardown()
        cache = machine.core.tables.cache
        assert cache is not None
        seen["preemptions"] += machine.num_preemptions
        seen["copies"] += machine.num_copies
        seen["waits"] += machine.num_waits
        seen["hits"] += cache.num_hit_tokens
    assert min(seen[what] for what in ("preemptions", "copies", "waits", "hits")) > 100, seen
