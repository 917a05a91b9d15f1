"""How one engine step is put together: who advances by how many tokens, who is admitted, who loses its blocks.

Works on the engine core's queues and block tables. Must not know hand-overs, sampled tokens or the ends of requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from baton.engine.block_tables import BlockTables
from baton.engine.request import EngineRequest, RequestState, StepItem
from baton.protocol import RequestKey
from baton.timeline import Mark


class Step:
    """One step under construction: the token budget, and the items chosen so far (`policy.StepOrder`).

    Moves requests between `running` (in order of admission) and `waiting`, which are the engine core's.
    """

    def __init__(
        self,
        tables: BlockTables,
        running: dict[RequestKey, EngineRequest],
        waiting: deque[EngineRequest],
        *,
        max_batch_tokens: int,
        max_batch_requests: int,
        now: float,
    ):
        self.items: list[StepItem] = []
        self.copies: list[tuple[int, int]] = []
        self._tables = tables
        self._running = running
        self._waiting = waiting
        self._budget = max_batch_tokens
        self._max_batch_requests = max_batch_requests
        self._now = now
        self._preempted = False

    def decode(self) -> None:
        # This loop and the one in `complete` run for every token; they are written out rather than factored.
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
                continue
            if num_tokens - request.num_context == 1:
                request.marks.setdefault(Mark.DECODE_START, self._now)
            request.in_step = True
            budget -= 1
            items.append(StepItem(request, 1))
        self._budget = budget

    def prefill(self) -> None:
        for request in self._running.values():
            remaining = len(request.tokens) - request.num_computed
            if remaining > 1 and not request.in_step and self._budget > 0:
                self._add(request, min(remaining, self._budget))

    def admit(self) -> None:
        tables, running = self._tables, self._running
        # Whoever was just preempted must not take back the blocks it lost, or both would starve.
        waiting: Iterable[EngineRequest] = () if self._preempted else list(self._waiting)
        must_hold_blocks = False
        for request in waiting:
            if self._budget == 0 or len(running) >= self._max_batch_requests:
                return
            if tables.num_missing(request) > 0:
                # One free block per running request, so that a newcomer is not preempted in its first steps.
                if must_hold_blocks or tables.waits(request):
                    continue
                if not tables.take(request, spare=len(running)):
                    # First come, first served; but who holds its blocks already may pass, because only
                    # by running it can give them back.
                    must_hold_blocks = True
                    continue
            if (copy := tables.copy_of(request)) is not None:
                self.copies.append(copy)
            self._waiting.remove(request)
            request.state = RequestState.RUNNING
            running[request.key] = request
            num_new = len(request.tokens) - request.num_context
            request.marks.setdefault(Mark.DECODE_START if num_new else Mark.PREFILL_START, self._now)
            self._add(request, min(len(request.tokens) - request.num_computed, self._budget))

    def has_chunk(self) -> bool:
        return any(item.num_tokens > 1 for item in self.items)

    def _add(self, request: EngineRequest, num_tokens: int) -> None:
        self._tables.assert_writable(request, num_tokens)
        request.in_step = True
        self._budget -= num_tokens
        self.items.append(StepItem(request, num_tokens))

    def _grow(self, request: EngineRequest) -> bool:
        """One more block, taken from the youngest request if none is free; False if there is none to take."""
        while not self._tables.grow(request):
            victim = self._victim(request)
            if victim is None:
                return False  # older requests or transfers hold the rest; they will end
            self._preempt(victim)
        return True

    def _victim(self, request: EngineRequest) -> EngineRequest | None:
        """The youngest request whose KV can be computed again: adopted and waiting, else running after `request`."""
        for candidate in reversed(self._waiting):
            if candidate.blocks and not candidate.transfer_holds:
                return candidate
        for candidate in reversed(self._running.values()):
            if candidate is request:
                return None
            if not candidate.transfer_holds and not candidate.in_step:
                return candidate
        return None

    def _preempt(self, victim: EngineRequest) -> None:
        self._tables.free(victim)
        victim.num_computed = 0
        self._preempted = True
        if victim.state is RequestState.RUNNING:
            del self._running[victim.key]
            victim.state = RequestState.WAITING
            self._waiting.appendleft(victim)
