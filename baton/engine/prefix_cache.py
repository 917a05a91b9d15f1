"""Which tokens' KV a block holds: chained keys, the longest cached prefix, and what is just being made.

The KV of a position depends on all tokens up to it, and on the model (and, one day, an adapter). So a block is known
by a key: the digest of all that comes before it, then its own tokens. The digest is xxh3_128 over the key of the
block before; the first block's is over the model's fingerprint and the request's `cache_salt`. The tokens themselves
are part of the key, so what is found is compared, not only hashed.

    key[0] = H(fingerprint, salt) + tokens[0 : B]      key[i] = H(key[i - 1]) + tokens[i * B : (i + 1) * B]

A *tail* is the last block of a context that does not fill it. Its key has fewer tokens, and says that the first
positions of the block hold their KV: its owner may write the others. It is never shared, only copied.

Knows requests' tokens and the pool's keys; must not know queues, steps or transfers.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from xxhash import xxh3_128_digest

from baton.engine.blocks import BlockPool
from baton.engine.prefix_log import PrefixLog
from baton.engine.request import EngineRequest
from baton.prefix_hash import DIGEST_BYTES, TOKEN_BYTES, root_digest


class Match(NamedTuple):
    """What of a request's KV is in the pool."""

    blocks: list[int]
    """Full blocks from the start on, to be shared."""
    source: int | None
    """The block whose first positions hold the tokens that follow, to be copied."""
    num_tokens: int


NOTHING: Final = Match([], None, 0)


class PrefixCache:
    """See the module. `fingerprint` is the model's; `block_size` in tokens."""

    def __init__(self, pool: BlockPool, block_size: int, fingerprint: str):
        self.num_queried_tokens = 0
        """Tokens of all requests that asked, once each."""
        self.num_hit_tokens = 0
        self._pool = pool
        self._block_size = block_size
        self._fingerprint = fingerprint
        self._pack_block = struct.Struct(f"<{block_size}I").pack
        self._computing: dict[bytes, EngineRequest] = {}
        """By the key of the block that a running request computes next."""
        self._receiving: dict[bytes, EngineRequest] = {}
        """By the key of its context's last block: requests whose KV another worker sends."""

    # --- keys -----------------------------------------------------------------------------------

    def key(self, request: EngineRequest, index: int, end: int) -> bytes:
        """Of the block at `index`, holding tokens up to `end`. Each full block is hashed once per request."""
        keys = request.block_keys
        if index < len(keys):
            start = index * self._block_size
            if end >= start + self._block_size:
                return keys[index]
            tokens = request.tokens[start:end]
        else:
            for i in range(len(keys), min(index + 1, end // self._block_size)):
                self._append_key(request, i)
            if index < len(keys):
                return keys[index]
            tokens = request.tokens[index * self._block_size : end]
        return self._parent(request, index) + struct.pack(f"<{len(tokens)}I", *tokens)

    def _append_key(self, request: EngineRequest, index: int) -> bytes:
        """Of the full block at `index`, the first whose key the request does not know yet."""
        start = index * self._block_size
        tokens = request.tokens[start : start + self._block_size]
        keys = request.block_keys
        digest = xxh3_128_digest(keys[-1]) if keys else self._parent(request, 0)
        key = digest + self._pack_block(*tokens)
        keys.append(key)
        return key

    def _parent(self, request: EngineRequest, index: int) -> bytes:
        """The digest of all before the block at `index`."""
        if index == 0:
            return root_digest(self._fingerprint, request.cache_salt)
        return xxh3_128_digest(request.block_keys[index - 1])

    def num_covered(self, block: int) -> int:
        """How many first positions of the block are promised to whoever finds it, and must not be written."""
        return max(((len(key) - DIGEST_BYTES) // TOKEN_BYTES for key in self._pool.keys_of(block)), default=0)

    def start_log(self) -> PrefixLog:
        """From now on, note which full blocks can be found; those that can be now come first."""
        self._pool.log = log = PrefixLog(DIGEST_BYTES + self._block_size * TOKEN_BYTES, self._pool.all_keys())
        return log

    def stop_log(self) -> None:
        self._pool.log = None

    # --- finding --------------------------------------------------------------------------------

    def match(self, request: EngineRequest, num_tokens: int, usable: int) -> Match:
        """The longest prefix of `tokens[:num_tokens]` that is cached; only the first `usable` tokens are wanted.

        Beyond the full blocks, a partial one counts only if it is the context's last.
        """
        block_size, find = self._block_size, self._pool.find
        num_full = usable // block_size
        blocks: list[int] = []
        for index in range(num_full):
            block = find(self.key(request, index, (index + 1) * block_size))
            if block is None:
                return Match(blocks, None, index * block_size)
            blocks.append(block)
        if usable == num_full * block_size:
            return Match(blocks, None, usable)
        source = find(self.key(request, num_full, min(num_tokens, (num_full + 1) * block_size)))
        return Match(blocks, source, num_full * block_size if source is None else usable)

    def count(self, queried: int, hit: int) -> None:
        self.num_queried_tokens += queried
        self.num_hit_tokens += hit

    # --- what is just being made ------------------------------------------------------------------

    def waits(self, request: EngineRequest) -> bool:
        """Whether a running request computes just the block that this one, which holds none, would compute next.

        It is worth waiting for. That request runs, so the wait ends: with the block, or without if it is preempted or
        ends before.
        """
        computing = self._computing
        if not computing:
            return False
        if request.awaited_key is not None and request.awaited_key in computing:
            return True
        num_tokens = len(request.tokens)
        match = self.match(request, num_tokens, num_tokens - 1)
        request.awaited_key = None
        if match.num_tokens < num_tokens - 1:
            index = len(match.blocks)
            key = self.key(request, index, min(num_tokens, (index + 1) * self._block_size))
            if key in computing:
                request.awaited_key = key
        return request.awaited_key is not None

    def is_coming(self, request: EngineRequest) -> bool:
        """Whether the whole KV of the request's context is just being received for another one."""
        if not self._receiving:
            return False
        key = self._context_key(request)
        return key in self._receiving and self._pool.find(key) is None

    def announce_next(self, request: EngineRequest) -> None:
        """The running request goes on to its next block."""
        self.withdraw(request)
        start = request.num_computed // self._block_size * self._block_size
        end = start + self._block_size
        if end > len(request.tokens):
            end = request.num_context
        if start < end and request.num_computed < len(request.tokens):
            key = self.key(request, start // self._block_size, end)
            if self._computing.setdefault(key, request) is request:
                request.announced_key = key

    def announce_context(self, request: EngineRequest) -> None:
        """Another worker sends the KV of the request's context."""
        key = self._context_key(request)
        if self._receiving.setdefault(key, request) is request:
            request.announced_key = key

    def withdraw(self, request: EngineRequest) -> None:
        """Nobody need wait for this request any more."""
        key = request.announced_key
        if key is not None:
            for announced in (self._computing, self._receiving):
                if announced.get(key) is request:
                    del announced[key]
            request.announced_key = None

    def _context_key(self, request: EngineRequest) -> bytes:
        if request.context_key is None:
            end = request.num_context
            request.context_key = self.key(request, (end - 1) // self._block_size, end)
        return request.context_key

    # --- registering ----------------------------------------------------------------------------

    def begin(self, request: EngineRequest, match: Match) -> None:
        """The request has taken `match`: what follows is its own to compute, and to be registered."""
        request.num_registered_blocks = len(match.blocks)
        following = (request.num_computed // self._block_size + 1) * self._block_size
        request.register_at = (
            request.num_context if request.num_computed < request.num_context < following else following
        )

    def register(self, request: EngineRequest) -> None:
        """The KV of the request's first `num_computed` tokens is in its blocks, final and right."""
        end, context, block_size = request.num_computed, request.num_context, self._block_size
        last, keys = end // block_size, request.block_keys
        for index in range(request.num_registered_blocks, last):
            key = keys[index] if index < len(keys) else self._append_key(request, index)
            self._pool.register(request.blocks[index], key)
        request.num_registered_blocks = last
        following = (last + 1) * block_size
        if end < context:
            request.register_at = min(context, following)
            return
        if request.register_at <= context and context % block_size:
            index = context // block_size
            self._pool.register(request.blocks[index], self.key(request, index, context))
        request.register_at = following
