"""EngineCore: which request computes how many tokens in the next step, and who holds which block.

Pure: events and `now` in, a plan and effects out. It never sees a tensor, a socket or a clock. Its
driver calls `schedule`, runs the plan, calls `complete`, and may call everything else in between:
what an in-flight step still writes is not given away before that step completes.

Prefill and decode are not phases here: a request has `num_tokens` known and `num_computed` of them
in the cache, and a step moves the second towards the first. Whoever catches up yields a new token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from baton.engine.block_tables import BlockTables
from baton.engine.decode_batch import DecodeBatch
from baton.engine.fair_queue import FairQueue
from baton.engine.policy import BatchPolicy
from baton.engine.request import (
    ChunkDone,
    Effect,
    Emit,
    Ended,
    EngineRequest,
    PromptDone,
    RequestState,
    StepItem,
    StepPlan,
)
from baton.engine.step import Step, StepLimits
from baton.engine.step_time import StepTimes
from baton.errors import InvalidRequestError, RequestTooLargeError
from baton.plain_steps import PlainSteps
from baton.protocol import FinishReason, LoadReport, RequestKey, TokenOut
from baton.timeline import Mark


class EngineCore:
    """The scheduler of one worker. `block_size` in tokens, `max_model_len` counts prompt and output.

    `fingerprint` names the model whose KV the pool holds: a prefix is found only under the same one. `step_target_s`:
    how long a step with decodes should take at most; None: as long as the budget of tokens makes it.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_batch_tokens: int,
        max_batch_requests: int,
        max_model_len: int,
        policy: BatchPolicy,
        eos_token_ids: Iterable[int] = (),
        prefix_cache: bool = True,
        fingerprint: str = "",
        step_target_s: float | None = None,
    ):
        self.tables = BlockTables(num_blocks, block_size, fingerprint=fingerprint, prefix_cache=prefix_cache)
        self.pool = self.tables.pool
        self.block_size = block_size
        self.limits = StepLimits(max_batch_tokens, max_batch_requests, step_target_s)
        self.times = StepTimes()
        self.max_model_len = max_model_len
        self.num_steps = 0
        self.num_preemptions = 0
        """Times a request gave its blocks up for another, to compute them again later."""
        self._policy = policy
        self._eos = frozenset(eos_token_ids)
        self._requests: dict[RequestKey, EngineRequest] = {}
        """Every request that has not ended or still holds blocks."""
        self._waiting = FairQueue()
        self._uncredited: dict[RequestKey, EngineRequest] = {}
        """Hand-offs that decode has not accepted yet: they hold no blocks and block nobody."""
        self._uncredited_tokens = 0
        """That they have to compute."""
        self._running: dict[RequestKey, EngineRequest] = {}
        """In order of admission: the last one is the first to be preempted."""
        self._prompts: dict[RequestKey, EngineRequest] = {}
        """Of the running ones those that have more than one token to compute."""
        self._batch = DecodeBatch(block_size)
        """Most of the others."""
        self._deadlines: list[tuple[float, RequestKey]] = []
        self._plan: StepPlan | None = None
        self._scheduled_at = 0.0
        self._chunk_tokens = 0
        """Of the plan."""

    # --- requests come in ---------------------------------------------------------------------

    def submit(self, request: EngineRequest, now: float) -> None:
        """Queue a request. Raises RequestError where it can never run here; nothing is kept then."""
        self._validate(request)
        request.marks[Mark.SUBMITTED] = now
        if not request.sampling.ignore_eos:
            request.stop_ids |= self._eos
        self._requests[request.key] = request
        self._watch_deadline(request)
        self._waiting.stamp(request)
        if request.has_credit:
            self._waiting.push(request)
        else:
            self._uncredited[request.key] = request
            self._uncredited_tokens += len(request.tokens)

    def _validate(self, request: EngineRequest) -> None:
        if request.key in self._requests:
            raise InvalidRequestError(f"request {request.key} is already here")
        if request.num_prompt == 0:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        if request.num_outputs >= request.sampling.max_tokens:
            raise InvalidRequestError(
                f"{request.num_outputs} tokens were already delivered of max_tokens={request.sampling.max_tokens}"
            )
        if request.max_len > self.max_model_len:
            raise RequestTooLargeError(
                f"prompt ({request.num_prompt}) plus max_tokens ({request.sampling.max_tokens}) is {request.max_len} "
                f"tokens, more than the model's {self.max_model_len}"
            )
        # The last token is never computed, so it needs no KV.
        needed = request.num_context if request.handoff else request.max_len - 1
        if not self.can_ever_hold(needed):
            raise RequestTooLargeError(
                f"{needed} tokens need {self.tables.blocks_for(needed)} KV blocks, "
                f"this worker has {self.pool.num_blocks}"
            )

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether an empty pool has room for the KV of `num_tokens` tokens."""
        return self.tables.blocks_for(num_tokens) <= self.pool.num_blocks

    # --- hand-over, prefill side ----------------------------------------------------------------

    def grant(self, key: RequestKey, now: float) -> None:
        """Decode has reserved blocks: the request may start. From here on only `release` frees its blocks."""
        request = self._pop_uncredited(key)
        if request is not None:
            request.has_credit = True
            request.transfer_holds = True
            self._waiting.push(request)

    def keep(self, key: RequestKey, now: float) -> None:
        """No hand-over any more: run the request here to its end. Raises RequestTooLargeError if it cannot."""
        request = self._uncredited.get(key)
        if request is None:
            return
        if not self.can_ever_hold(request.max_len - 1):
            raise RequestTooLargeError(f"{request.max_len} tokens do not fit into this worker's pool")
        self._pop_uncredited(key)
        request.handoff = False
        request.has_credit = True
        self._waiting.push(request)

    def _pop_uncredited(self, key: RequestKey) -> EngineRequest | None:
        request = self._uncredited.pop(key, None)
        if request is not None:
            self._uncredited_tokens -= len(request.tokens)
        return request

    # --- hand-over, decode side -----------------------------------------------------------------

    def reserve(self, request: EngineRequest, num_tokens: int, now: float) -> list[int] | None:
        """Hold blocks for `num_tokens` tokens of a request whose KV another worker will send.

        The first `request.num_prefix_blocks` are in the pool already, and need not be sent. All or nothing; None if
        they are not free now, or if a request that came earlier waits for blocks. Raises RequestError where it can
        never run here.
        """
        self._validate(request)
        tables = self.tables
        if self._waiting and any(tables.num_missing(w) > 0 and not tables.waits(w) for w in self._waiting):
            return None
        if not tables.reserve(request, num_tokens):
            return None
        if not request.sampling.ignore_eos:
            request.stop_ids |= self._eos
        request.state = RequestState.RESERVED
        request.transfer_holds = True
        self._requests[request.key] = request
        return request.blocks

    def is_coming(self, request: EngineRequest) -> bool:
        """Whether what `reserve` would hold blocks for is just being received for another request."""
        return self.tables.is_coming(request)

    def adopt(self, key: RequestKey, first_token: int, now: float) -> None:
        """The KV of all context tokens is in the request's blocks and right: decode from `first_token` on."""
        request = self._reserved(key)
        request.num_computed = request.num_context
        self.tables.received(request)
        self._take_over(request, first_token, now)

    def recompute(self, key: RequestKey, first_token: int, now: float) -> None:
        """What was sent cannot be used: compute it here. The reserved blocks stay and are overwritten."""
        request = self._reserved(key)
        self.tables.withdraw(request)
        self._take_over(request, first_token, now)

    def _take_over(self, request: EngineRequest, first_token: int, now: float) -> None:
        request.tokens.append(first_token)
        request.transfer_holds = False
        request.state = RequestState.WAITING
        request.marks[Mark.ADOPTED] = now
        self._watch_deadline(request)
        self._waiting.stamp(request)
        self._waiting.push(request)

    def _reserved(self, key: RequestKey) -> EngineRequest:
        request = self._requests[key]
        assert request.state is RequestState.RESERVED and not request.ended, f"{request!r} is not reserved"
        return request

    # --- requests go out ------------------------------------------------------------------------

    def lives_of(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """`BlockPool.lives` of each block."""
        lives = self.pool.lives
        return tuple([lives[block] for block in blocks])

    def release(self, key: RequestKey, now: float) -> None:
        """The transfer neither reads nor writes the request's blocks any more. Unknown keys are a no-op."""
        request = self._requests.get(key)
        if request is None:
            return
        request.transfer_holds = False
        if request.state in (RequestState.HANDED, RequestState.RESERVED):
            request.ended = True
        self._free_if_done(request)

    def abort(self, key: RequestKey, now: float, reason: FinishReason = "abort") -> list[Effect]:
        """End a request in whatever state. Unknown and ended keys are a no-op, so aborts may repeat."""
        request = self._requests.get(key)
        if request is None or request.ended:
            return []
        return [self._end(request, reason)]

    def _end(self, request: EngineRequest, reason: FinishReason, problem: str | None = None) -> Ended:
        request.ended = True
        request.plain_until = 0
        if request.state is RequestState.RUNNING:
            del self._running[request.key]
            self._prompts.pop(request.key, None)
            self._batch.leave(request)
        elif request.state is RequestState.WAITING and self._pop_uncredited(request.key) is None:
            self._waiting.remove(request)
        self.tables.withdraw(request)
        self._free_if_done(request)
        return Ended(request, reason, problem)

    def _free_if_done(self, request: EngineRequest) -> None:
        if request.ended and not request.in_step and not request.transfer_holds:
            self.tables.free(request)
            del self._requests[request.key]

    # --- steps ----------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or None if there is nothing to do. `complete` must follow before the next call."""
        assert self._plan is None, "the last step is not complete"
        batch, waiting = self._batch, self._waiting
        if not self._running and not waiting:
            return None
        batch.begin(self._running.values())
        num_members = len(batch)
        all_decode = 0 < num_members == len(self._running) and not waiting
        if all_decode and num_members <= min(self.limits.max_batch_tokens, self.pool.num_free):
            # Nobody to choose from: what a policy and a `Step` would come to.
            batch.grow(self.tables.grow)
            self._plan = StepPlan(batch.start(), (), (), num_members, slice(0, num_members), batch.context)
            self._scheduled_at = now
            self._chunk_tokens = 0
            return self._plan
        step = self._plan_step(now)
        while not step.items:
            gave_way = step.give_way()
            self.num_preemptions += step.num_preempted
            if not gave_way:
                return None
            batch.begin(self._running.values())
            step = self._plan_step(now)
        self.num_preemptions += step.num_preempted
        self._waiting.advance(step.chunk_tokens)
        context = batch.context if step.in_batch.stop else 0
        self._plan = StepPlan(step.items, step.copies, step.skipped, step.total_tokens, step.in_batch, context)
        self._scheduled_at = now
        self._chunk_tokens = step.chunk_tokens
        return self._plan

    def _plan_step(self, now: float) -> Step:
        step = Step(self.tables, self._running, self._prompts, self._batch, self._waiting, self.limits, self.times, now)
        self._policy.plan(step)
        return step

    def complete(
        self,
        plan: StepPlan,
        tokens: Sequence[int | None],
        now: float,
        rows: list[TokenOut] | None = None,
        plain: PlainSteps | None = None,
    ) -> list[Effect]:
        """Take in what a step sampled, aligned with `plan.items`: a token where `item.samples`, else None.

        `rows`: gets what the router is told of each token. Then a token of which nothing else is to be told, as of
        nearly all, is no effect. `plain`: gets those instead, as far as they are its `token`.
        """
        assert plan is self._plan, "complete() without its schedule()"
        self._plan = None
        self.num_steps += 1
        self.tables.end_copies(plan)
        chunk_tokens = self._chunk_tokens
        self.times.observe(plan.total_tokens - chunk_tokens, chunk_tokens, now - self._scheduled_at)
        assert len(tokens) == len(plan.items), "a token, or None, for each item"
        effects: list[Effect] = []
        batch, members = self._batch, plan.in_batch
        if members.start:
            self._complete_items(plan.items[: members.start], tokens[: members.start], now, rows, effects)
        if members.stop:
            size = members.stop - members.start
            of_batch = tokens[members] if len(tokens) > size else tokens
            looks = batch.looks(of_batch)
            start = 0
            for place in looks:
                if place > start:
                    batch.advance(start, place, of_batch, rows, effects, plain)
                self._complete_items([batch.items[place]], [of_batch[place]], now, rows, effects)
                start = place + 1
            if start < size:
                batch.advance(start, size, of_batch, rows, effects, plain)
            batch.end(looks)
        if members.stop < len(tokens):
            self._complete_items(plan.items[members.stop :], tokens[members.stop :], now, rows, effects)
        return effects

    def is_plain(self, plan: StepPlan, token: int) -> bool:
        """Whether nothing is to be done or told at the end of `plan` but one token of each, if each gets `token`."""
        return plan.in_batch.stop == len(plan.items) == len(self._batch) and self._batch.is_plain(token)

    def plain_steps(self, token: int) -> PlainSteps:
        """Of the step under way, which `is_plain`, and of those to come: who gets tokens, and from which index on."""
        return self._batch.plain_steps(token)

    def complete_plain(self, plan: StepPlan, token: int, now: float) -> None:
        """What `complete` would do where `is_plain`; the caller tells the tokens."""
        assert plan is self._plan, "complete_plain() without its schedule()"
        self._plan = None
        self.num_steps += 1
        self.times.observe(plan.total_tokens, 0, now - self._scheduled_at)
        self._batch.advance_all(token, self.tables.computed)

    def _complete_items(
        self,
        items: Sequence[StepItem],
        tokens: Sequence[int | None],
        now: float,
        rows: list[TokenOut] | None,
        effects: list[Effect],
    ) -> None:
        for item, token in zip(items, tokens, strict=True):
            request = item.request
            request.in_step = False
            known = request.tokens
            num_known = len(known) + 1
            if num_known < request.plain_until and token is not None and token not in request.stop_ids:
                # The same as below, for nearly every token there is.
                request.num_computed = num_known - 1
                known.append(token)
                if rows is not None:
                    rows.append(request.row(num_known - request.num_prompt - 1, token, None))
                else:
                    effects.append(Emit(request, num_known - request.num_prompt - 1, token, None))
                continue
            if request.ended:
                self._free_if_done(request)
                continue
            if item.problem is not None:
                effects.append(self._end(request, "error", item.problem))
                continue
            request.num_computed = computed = item.start + item.num_tokens
            if computed >= request.register_at:
                self.tables.computed(request)
            if item.prompt_logprobs is not None:
                request.keep_prompt_logprobs(item.start, item.prompt_logprobs)
            if num_known - computed <= 2:
                self._prompts.pop(request.key, None)
            if token is None:
                if request.handoff:
                    self._chunk_done(request, effects)
                continue
            known.append(token)
            num_new = num_known - request.num_context
            if num_new <= 2:
                request.marks.setdefault(Mark.FIRST_TOKEN if num_new == 1 else Mark.SECOND_TOKEN, now)
            finish: FinishReason | None = None
            if token in request.stop_ids and request.may_stop:
                finish = "stop"
            elif num_known >= request.max_len:
                finish = "length"
            elif num_new > 1 and request.told_little:
                request.plain_until = min(request.max_len, request.register_at + 1)
                self._batch.join(request)
            index = num_known - request.num_prompt - 1
            if rows is not None:
                rows.append(request.row(index, token, finish))
                if finish is None and num_new > 1 and request.told_little:
                    continue
            if item.logprobs is None and not request.prompt_logprobs:
                effects.append(Emit(request, index, token, finish))
            else:
                prompt_logprobs = tuple(request.prompt_logprobs) or None
                effects.append(Emit(request, index, token, finish, item.logprobs, prompt_logprobs))
                request.prompt_logprobs = []
            if finish is not None:
                request.marks[Mark.FINISHED] = now
                effects.append(self._end(request, finish))
            elif request.handoff:
                self._chunk_done(request, effects, last=True)
                del self._running[request.key]
                request.state = RequestState.HANDED
                effects.append(PromptDone(request, token))

    def fail_step(self, plan: StepPlan, now: float) -> list[Effect]:
        """The step could not be computed: end every request in it, as their KV is not to be trusted."""
        assert plan is self._plan, "fail_step() without its schedule()"
        self._plan = None
        effects: list[Effect] = []
        for item in plan.items:
            item.request.in_step = False
            self.tables.distrust(item.request)
            if item.request.ended:
                self._free_if_done(item.request)
            else:
                effects.append(self._end(item.request, "error"))
        return effects

    def _chunk_done(self, request: EngineRequest, effects: list[Effect], *, last: bool = False) -> None:
        """Full blocks are final as soon as they are computed, the partial one when the prompt is done."""
        end = self.tables.blocks_for(request.num_computed) if last else request.num_computed // self.block_size
        start = request.num_shipped_blocks
        if end > start:
            request.num_shipped_blocks = end
            effects.append(ChunkDone(request, tuple(enumerate(request.blocks[start:end], start))))

    # --- time, load, audit ------------------------------------------------------------------------

    def _watch_deadline(self, request: EngineRequest) -> None:
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.key))

    def next_deadline(self) -> float | None:
        """When `on_deadline` is due, or None."""
        while self._deadlines:
            deadline, key = self._deadlines[0]
            request = self._requests.get(key)
            if request is not None and not request.ended:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def on_deadline(self, now: float) -> list[Effect]:
        """End requests whose time is over."""
        effects: list[Effect] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            effects += self.abort(heapq.heappop(self._deadlines)[1], now)
        return effects

    def load(self) -> LoadReport:
        """How full this engine is."""
        pending, uncredited = 0, self._uncredited_tokens
        if self._waiting or self._prompts:
            pending = sum([len(r.tokens) - r.num_computed for r in (*self._waiting, *self._prompts.values())])
        cache, num_running = self.tables.cache, len(self._running)
        times = self.times.summary(num_running or 1)
        return LoadReport(
            num_waiting=len(self._waiting) + len(self._uncredited),
            num_running=num_running,
            num_pending_tokens=pending + uncredited,
            blocks_free=self.pool.num_free,
            blocks_total=self.pool.num_blocks,
            num_steps=self.num_steps,
            blocks_cached=self.pool.num_cached,
            cache_queried_tokens=cache.num_queried_tokens if cache is not None else 0,
            cache_hit_tokens=cache.num_hit_tokens if cache is not None else 0,
            decode_step_s=times.decode_s,
            decode_slope_s=times.slope_s,
            prefill_token_s=times.token_s,
            num_preemptions=self.num_preemptions,
            num_uncredited=len(self._uncredited),
            num_uncredited_tokens=uncredited,
        )

    def occupancy(self) -> tuple[int, int, int]:
        """Blocks that are not free, requests that run, requests that wait: cheap, for a record of each step."""
        num_waiting = len(self._waiting) + len(self._uncredited)
        return self.pool.num_blocks - self.pool.num_free, len(self._running), num_waiting

    def live(self) -> list[RequestKey]:
        """Every request that has not ended."""
        return [key for key, request in self._requests.items() if not request.ended]

    def requests(self) -> Iterable[EngineRequest]:
        """Every request that has not ended or still holds blocks."""
        return self._requests.values()

    def scheduled(self) -> set[RequestKey]:
        """Requests that `schedule` will come to: they run, or wait for blocks or for credit."""
        return {*self._running, *self._uncredited, *(request.key for request in self._waiting)}

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way, or `schedule` has somebody to come to."""
        return self._plan is not None or bool(self._running or self._waiting or self._uncredited)

    def holders(self) -> list[EngineRequest]:
        """Every request that holds blocks."""
        return [request for request in self._requests.values() if request.blocks]

    def check_integrity(self) -> None:
        """Assert the invariants of the queues and of the block tables (I3)."""
        self.tables.check_integrity(self._requests.values())
        for request in self._running.values():
            assert request.state is RequestState.RUNNING and not request.ended, request
        prompts = {key for key, r in self._running.items() if len(r.tokens) - r.num_computed > 1}
        assert prompts == self._prompts.keys(), "running prompts that nobody, or no prompts that somebody, knows of"
        for request in self._waiting:
            assert request.state is RequestState.WAITING and not request.ended and request.has_credit, request
        for request in self._uncredited.values():
            assert not request.blocks and not request.has_credit and not request.num_computed, request
        assert self._uncredited_tokens == sum(len(request.tokens) for request in self._uncredited.values())
