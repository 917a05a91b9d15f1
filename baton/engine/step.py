"""How one engine step is put together: who advances by how many tokens, who is admitted, who loses its blocks.

Works on the engine core's queues and block tables. Must not know hand-overs, sampled tokens or the ends of requests.
"""

from __future__ import annotations

from heapq import merge
from typing import NamedTuple

from baton.engine.block_tables import BlockTables
from baton.engine.decode_batch import DecodeBatch
from baton.engine.fair_queue import FairQueue, order
from baton.engine.request import NOBODY, EngineRequest, RequestState, StepItem
from baton.engine.step_time import StepTimes
from baton.protocol import RequestKey
from baton.timeline import Mark


class StepLimits(NamedTuple):
    """What a step may hold."""

    max_batch_tokens: int
    max_batch_requests: int
    target_s: float | None = None
    """Seconds that a step with decodes should take at most; None: any."""


class Step:
    """One step under construction: the token budget, and the items chosen so far (`policy.StepOrder`).

    Moves requests between `running` (in order of admission) and `waiting`, which are the engine core's. `prompts`: of
    the running ones those that have more than one token to compute; `batch`: most of the others.
    """

    def __init__(
        self,
        tables: BlockTables,
        running: dict[RequestKey, EngineRequest],
        prompts: dict[RequestKey, EngineRequest],
        batch: DecodeBatch,
        waiting: FairQueue,
        limits: StepLimits,
        times: StepTimes,
        now: float,
    ):
        self.items: list[StepItem] = []
        self.copies: list[tuple[int, int]] = []
        self.skipped: list[tuple[EngineRequest, str]] = []
        """Requests that could have advanced, and why they do not; of those beyond a spent budget or a full batch only
        the first."""
        self.chunk_tokens = 0
        self.in_batch = NOBODY
        """Items of the batch."""
        self._tables = tables
        self._running = running
        self._prompts = prompts
        self._batch = batch
        self._waiting = waiting
        self._limits = limits
        self._times = times
        self._budget = limits.max_batch_tokens
        self._now = now
        self.num_preempted = 0
        """Requests that gave their blocks up for others."""

    def decode(self) -> None:
        batch, num_members = self._batch, len(self._batch)
        if num_members:
            num_decodes = len(self._running) - len(self._prompts)
            # Where not all may go on, the order in which they come to budget and blocks counts.
            if num_decodes <= min(self._budget, self._tables.pool.num_free):
                batch.grow(self._tables.grow)
                start = len(self.items)
                self.items += batch.start()
                self.in_batch = slice(start, start + num_members)
                self._budget -= num_members
                if num_decodes == num_members:
                    return
            else:
                batch.dissolve()
        block_size, items, budget = self._tables.block_size, self.items, self._budget
        for request in list(self._running.values()):
            num_tokens = len(request.tokens)
            if num_tokens - request.num_computed != 1 or request.in_step:
                continue
            if budget == 0:
                break
            if request.state is not RequestState.RUNNING:
                continue  # preempted by `_grow` a moment ago
            if num_tokens > len(request.blocks) * block_size and not self._grow(request):
                self.skipped.append((request, "no block is free, and nobody may be preempted for it"))
                continue
            if num_tokens - request.num_context == 1:
                request.marks.setdefault(Mark.DECODE_START, self._now)
            request.in_step = True
            budget -= 1
            items.append(StepItem(request, 1))
        self._budget = budget

    def prompts(self) -> None:
        prompts = [r for r in self._prompts.values() if not r.in_step]
        if not prompts and not self._waiting:
            return
        prompts.sort(key=order)
        # Whoever was just preempted must not take back the blocks it lost, or both would starve.
        waiting = [] if self.num_preempted else list(self._waiting)
        num_decodes = len(self.items)
        chunk_budget = self._chunk_budget(num_decodes)
        full = self._full(num_decodes)
        if full is not None and waiting:  # the usual state of a busy worker: do not go through all that wait
            self.skipped.append((waiting[0], full))
            waiting = []
        must_hold_blocks = False
        for request in merge(prompts, waiting, key=order) if prompts and waiting else prompts or waiting:
            if self._budget == 0:
                self.skipped.append((request, f"the budget of {self._limits.max_batch_tokens} tokens is spent"))
                return
            remaining = len(request.tokens) - request.num_computed
            if remaining > 1 and self.chunk_tokens >= chunk_budget:
                self.skipped.append((request, f"the step-time target leaves {chunk_budget} prompt tokens"))
                continue
            if request.state is RequestState.RUNNING:
                self._add(request, min(remaining, chunk_budget - self.chunk_tokens))
                continue
            reason = full or self._obstacle(request, must_hold_blocks)
            if reason is not None:
                self.skipped.append((request, reason))
                must_hold_blocks = must_hold_blocks or reason is _NO_BLOCKS
                continue
            self._admit(request, chunk_budget - self.chunk_tokens)
            full = self._full(num_decodes)

    @property
    def total_tokens(self) -> int:
        """That its items compute."""
        return self._limits.max_batch_tokens - self._budget

    def has_chunk(self) -> bool:
        return any(item.num_tokens > 1 for item in self.items)

    # --- prompts and newcomers --------------------------------------------------------------------

    def _chunk_budget(self, num_decodes: int) -> int:
        """Prompt tokens that this step may compute: at least a block, or prompts would starve."""
        target, most = self._limits.target_s, self._limits.max_batch_tokens
        if target is None or num_decodes == 0:
            return most
        return min(most, max(self._tables.block_size, self._times.chunk_tokens(num_decodes, target)))

    def _full(self, num_decodes: int) -> str | None:
        """Why nobody may be admitted now."""
        limits, num_running = self._limits, len(self._running)
        if num_running >= limits.max_batch_requests:
            return f"the batch is full ({limits.max_batch_requests} requests)"
        if limits.target_s is not None and num_decodes and self._times.decode_s(num_running + 1) > limits.target_s:
            return f"one more than {num_running} requests would miss the step-time target"
        return None

    def _obstacle(self, request: EngineRequest, must_hold_blocks: bool) -> str | None:
        """Why this request cannot be admitted; None: it holds its blocks now."""
        tables = self._tables
        if tables.num_missing(request) <= 0:  # less than 0: it was adopted with blocks for its growth
            return None
        # First come, first served; but who holds blocks already may pass, because only by running it can give
        # them back.
        if must_hold_blocks and not request.blocks:
            return "an earlier request waits for blocks"
        if tables.waits(request):
            return "its next block is just being computed for another request"
        # One free block per running request, so that a newcomer is not preempted in its first steps.
        return None if tables.take(request, spare=len(self._running)) else _NO_BLOCKS

    def _admit(self, request: EngineRequest, chunk_budget: int) -> None:
        if (copy := self._tables.copy_of(request)) is not None:
            self.copies.append(copy)
        self._waiting.remove(request)
        request.state = RequestState.RUNNING
        self._running[request.key] = request
        num_new = len(request.tokens) - request.num_context
        request.marks.setdefault(Mark.DECODE_START if num_new else Mark.PREFILL_START, self._now)
        # What the prefix cache holds is no part of it, so it may be only one token by now.
        remaining = len(request.tokens) - request.num_computed
        if remaining > 1:
            self._prompts[request.key] = request
        self._add(request, min(remaining, max(1, chunk_budget)))

    def _add(self, request: EngineRequest, num_tokens: int) -> None:
        num_tokens = min(num_tokens, self._budget)
        self._tables.assert_writable(request, num_tokens)
        request.in_step = True
        self._budget -= num_tokens
        if num_tokens > 1:
            self.chunk_tokens += num_tokens
        self.items.append(StepItem(request, num_tokens))

    # --- preemption -------------------------------------------------------------------------------

    def _grow(self, request: EngineRequest) -> bool:
        """One more block, taken from another request if none is free; False if there is none to take."""
        while not self._tables.grow(request):
            victim = self._victim(request)
            if victim is None:
                return False  # older requests or transfers hold the rest; they will end
            self._preempt(victim)
        return True

    def _victim(self, request: EngineRequest) -> EngineRequest | None:
        """The least important request whose KV can be computed again, of those the youngest; none that is more so.

        Younger than a running request is who was adopted and waits, then who was admitted later.
        """
        victim: EngineRequest | None = None
        younger = True
        for candidate in (*reversed(self._waiting), *reversed(self._running.values())):
            if candidate is request:
                younger = False
            elif candidate.blocks and not candidate.transfer_holds and not candidate.in_step:
                least = request.priority if victim is None else victim.priority + 1
                if candidate.priority >= least + (victim is None and not younger):
                    victim = candidate
        return victim

    def give_way(self) -> bool:
        """Nobody advances: the least important holder of blocks gives them up, if the others may go on then.

        All may lack one block more, or lack a place in the batch that a less important one keeps without advancing.
        """
        holders = (*reversed(self._waiting), *reversed(self._running.values()))
        holders = tuple(r for r in holders if r.blocks and not r.transfer_holds)
        if len(holders) < 2:
            return False  # what it lacks is held by transfers; they will end
        self._preempt(max(holders, key=lambda r: r.priority))  # of several the first, which is the youngest
        return True

    def _preempt(self, victim: EngineRequest) -> None:
        self._tables.free(victim)
        victim.num_computed = victim.plain_until = 0
        self.num_preempted += 1
        if victim.state is RequestState.RUNNING:
            del self._running[victim.key]
            self._prompts.pop(victim.key, None)
            self._batch.leave(victim)
            victim.state = RequestState.WAITING
            self._waiting.push_back(victim)


_NO_BLOCKS = "too few blocks are free"
