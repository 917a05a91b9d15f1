"""Requests' block tables: who holds which block, what is shared, what must be copied before a step.

A table lists a request's blocks by position. Full blocks may be in several tables, and then nobody writes them any
more. Of a partial block each request has its own: where one begins as a copy of another's, the source is held
(`EngineRequest.copy_source`) until the step has copied it. So the references of a block are the tables it is in,
and the copies that are still to be made from it.

Knows requests, the pool and the prefix cache. Must not know queues, budgets or transfers: `baton.engine.core`
decides who gets blocks and who loses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from baton.engine.blocks import BlockPool
from baton.engine.prefix_cache import NOTHING, Match, PrefixCache
from baton.engine.prefix_log import PrefixLog
from baton.engine.request import EngineRequest, StepPlan
from baton.protocol import RequestKey
from baton.timeline import Mark


class BlockTables:
    """See the module. `prefix_cache` False: nothing is shared and nothing kept."""

    def __init__(self, num_blocks: int, block_size: int, *, fingerprint: str = "", prefix_cache: bool = False):
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.cache = PrefixCache(self.pool, block_size, fingerprint) if prefix_cache else None
        self.last_owner: list[RequestKey | None] = [None] * num_blocks
        """Who each block was last allocated for; for the audit, which may find one that nobody names any more."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_missing(self, request: EngineRequest) -> int:
        """Blocks that it lacks to compute all tokens it has, before any sharing; below 0: it has more, to grow into."""
        return self.blocks_for(len(request.tokens)) - len(request.blocks)

    def log_prefixes(self, wanted: bool) -> PrefixLog | None:
        """Start anew to note what the prefix cache can find, or stop it; None where there is no prefix cache."""
        if self.cache is None:
            return None
        if wanted:
            return self.cache.start_log()
        self.cache.stop_log()
        return None

    # --- taking ---------------------------------------------------------------------------------

    def waits(self, request: EngineRequest) -> bool:
        """Whether it had better wait for a block that a running request is just computing."""
        return self.cache is not None and not request.blocks and _may_skip(request) and self.cache.waits(request)

    def take(self, request: EngineRequest, spare: int) -> bool:
        """All blocks that it lacks, if `spare` free ones are left then: all or nothing.

        One that holds none yet begins with its longest cached prefix; its last token is computed in any case, for
        its logits.
        """
        num_tokens = len(request.tokens)
        if request.blocks:
            return self._extend(request, self.num_missing(request), spare)
        match = NOTHING
        if self.cache is not None and _may_skip(request):
            match = self.cache.match(request, num_tokens, num_tokens - 1)
        if not self._hold(request, match, self.blocks_for(num_tokens), spare):
            return False
        if self.cache is not None:
            if Mark.PREFILL_START not in request.marks and Mark.ADOPTED not in request.marks:
                request.num_cached_tokens = min(request.num_computed, request.num_prompt)
                self.cache.count(num_tokens, request.num_computed)
            self.cache.announce_next(request)
        return True

    def reserve(self, request: EngineRequest, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens of a request whose KV another worker sends, as far as it is not here already.

        Sets `num_prefix_blocks` to how many blocks of the context are here.
        """
        context = request.num_context
        match = NOTHING if self.cache is None else self.cache.match(request, context, context)
        if not self._hold(request, match, self.blocks_for(num_tokens), 0):
            return False
        if self.cache is not None:
            self.cache.count(context, request.num_computed)
            request.num_prefix_blocks = self.blocks_for(request.num_computed)
            if request.num_computed < context:
                self.cache.announce_context(request)
        return True

    def is_coming(self, request: EngineRequest) -> bool:
        """Whether all KV of its context is just being received for another request."""
        return self.cache is not None and self.cache.is_coming(request)

    def grow(self, request: EngineRequest) -> bool:
        """One more block; False if none is free."""
        blocks = self._allocate(request, 1)
        if blocks is None:
            return False
        request.blocks = [*request.blocks, *blocks]
        return True

    def _extend(self, request: EngineRequest, num_blocks: int, spare: int) -> bool:
        if self.pool.num_free - num_blocks < spare:
            return False
        # A new list: a step under way may be reading the old one.
        request.blocks = [*request.blocks, *(self._allocate(request, num_blocks) or ())]
        return True

    def _hold(self, request: EngineRequest, match: Match, num_blocks: int, spare: int) -> bool:
        """Share what `match` found and allocate the rest of `num_blocks`."""
        pool, source = self.pool, match.source
        num_new = num_blocks - len(match.blocks)
        room = pool.num_free - num_new - pool.num_unheld(match.blocks) - spare
        if room < 0:
            return False
        if source is not None and room == 0 and pool.num_unheld([source]):
            source = None  # it would be one block more than the request needs without it
        for block in match.blocks:
            pool.share(block)
        if source is not None:
            pool.share(source)
        request.blocks = [*match.blocks, *(self._allocate(request, num_new) or ())]
        request.copy_source = source
        request.num_computed = match.num_tokens if source is match.source else len(match.blocks) * self.block_size
        if self.cache is not None:
            self.cache.begin(request, match)
        return True

    def _allocate(self, request: EngineRequest, num_blocks: int) -> list[int] | None:
        blocks = self.pool.allocate(num_blocks)
        last_owner, key = self.last_owner, request.key
        for block in blocks or ():
            last_owner[block] = key
        return blocks

    # --- giving back ----------------------------------------------------------------------------

    def free(self, request: EngineRequest) -> None:
        """The request lets go of all its blocks."""
        self.copied(request)
        self.pool.free(request.blocks)
        request.blocks = []
        self.withdraw(request)

    def withdraw(self, request: EngineRequest) -> None:
        """Nobody need wait for what this request was to compute or receive."""
        if self.cache is not None:
            self.cache.withdraw(request)

    # --- steps ----------------------------------------------------------------------------------

    def copy_of(self, request: EngineRequest) -> tuple[int, int] | None:
        """`(source, target)` block to be copied before its first step."""
        if request.copy_source is None:
            return None
        return request.copy_source, request.blocks[request.num_computed // self.block_size]

    def end_copies(self, plan: StepPlan) -> None:
        """The step has made its copies."""
        if plan.copies:
            for item in plan.items:
                self.copied(item.request)

    def copied(self, request: EngineRequest) -> None:
        """The source of its copy is not read any more."""
        if request.copy_source is not None:
            self.pool.free([request.copy_source])
            request.copy_source = None

    def computed(self, request: EngineRequest) -> None:
        """A step, complete and without failure, has computed the first `num_computed` tokens: others may use them."""
        cache = self.cache
        if cache is not None:
            cache.register(request)
            if request.announced_key is not None or request.num_computed < len(request.tokens):
                cache.announce_next(request)

    def received(self, request: EngineRequest) -> None:
        """The KV of the whole context has come and is right."""
        if self.cache is not None:
            self.cache.withdraw(request)
            self.cache.register(request)

    def distrust(self, request: EngineRequest) -> None:
        """A step that wrote its blocks has failed: nobody new may use any of them."""
        for block in request.blocks:
            self.pool.forget(block)

    def assert_writable(self, request: EngineRequest, num_tokens: int) -> None:
        """Assert that computing its next `num_tokens` tokens writes nothing that another request reads or may find."""
        if self.cache is None:
            return
        start, block_size = request.num_computed, self.block_size
        for index in range(start // block_size, self.blocks_for(start + num_tokens)):
            block = request.blocks[index]
            covered = self.cache.num_covered(block)
            assert covered <= max(0, start - index * block_size), f"{request!r} would write registered block {block}"

    # --- audit ----------------------------------------------------------------------------------

    def check_integrity(self, requests: Collection[EngineRequest]) -> None:
        """Assert that each block is free, cached, or held exactly as often as tables and copies say (I3)."""
        self.pool.check_integrity()
        holders = Counter(block for request in requests for block in request.blocks)
        sources = Counter(request.copy_source for request in requests if request.copy_source is not None)
        for block, refs in enumerate(self.pool.refs):
            assert refs == holders[block] + sources[block], (
                f"block {block} has {refs} references: {holders[block]} tables, {sources[block]} copies"
            )
        for request in requests:
            assert len(set(request.blocks)) == len(request.blocks), f"{request!r} has a block twice"
            assert len(request.blocks) <= self.blocks_for(request.max_len), f"{request!r} has blocks beyond its end"
            if not request.blocks:
                assert request.copy_source is None and request.announced_key is None, request
            for index in range(request.num_computed // self.block_size, len(request.blocks)):
                assert holders[request.blocks[index]] == 1, f"{request!r} may write a block that others hold"


def _may_skip(request: EngineRequest) -> bool:
    """Whether cached positions need not be computed: log probabilities of the prompt need all logits."""
    return not request.wants_prompt_logprobs
