"""Fakes of the engine's parts: fast, deterministic, and strict about how they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import xxhash

from baton.engine.request import EngineRequest, StepItem, StepPlan
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams
from kv_transfer.base import BlockMemory

VOCAB = 1000


def plan_of(*sizes: tuple[int, int]) -> StepPlan:
    """Items of (computed before, tokens to compute)."""
    items = []
    for number, (start, count) in enumerate(sizes):
        request = EngineRequest(RequestKey(f"{number:032x}", 0, 0), [1] * (start + count), SamplingParams())
        request.num_computed = start
        items.append(StepItem(request, count))
    return StepPlan(items)


def made_up_token(request: EngineRequest) -> int:
    """The token after `request.tokens`: depends on all of them, on the seed and the sample, on nothing else."""
    *_, digest = _digests(request.tokens)
    return xxhash.xxh3_64_intdigest(digest + f"{request.sampling.seed}/{request.sample}".encode()) % VOCAB


class StubRunner:
    """A `Runner` without a model.

    With a `memory` it also plays the KV cache: each computed position gets 8 bytes that depend on the
    tokens up to it, and before a token is "sampled" those of all positions are checked. So blocks that
    were mixed up, lost, reused too early or not handed over end in an AssertionError. A block must have
    room for 8 bytes per position.
    """

    def __init__(
        self,
        next_token: Callable[[EngineRequest], int] = made_up_token,
        *,
        memory: BlockMemory | None = None,
        block_size: int = 16,
    ):
        self.next_token = next_token
        self.memory = memory
        self.block_size = block_size
        self.num_steps = 0

    def run(self, plan: StepPlan) -> list[int | None]:
        self.num_steps += 1
        seen = set()
        if self.memory is not None:
            for source, target in plan.copies:
                self.memory.block(target)[:] = self.memory.block(source)
        for item in plan.items:
            request, end = item.request, item.start + item.num_tokens
            assert item.num_tokens > 0, f"{request!r} computes nothing"
            assert end <= len(request.tokens), f"{request!r} computes tokens it does not have"
            assert len(request.blocks) * self.block_size >= end, f"{request!r} has no block for position {end - 1}"
            assert request.key not in seen, f"{request!r} is twice in a step"
            seen.add(request.key)
            if self.memory is not None:
                self._compute(self.memory, request, item.start, end)
        return [self.next_token(item.request) if item.samples else None for item in plan.items]

    def _compute(self, memory: BlockMemory, request: EngineRequest, start: int, end: int) -> None:
        for position, digest in enumerate(_digests(request.tokens[:end])):
            block, offset = divmod(position, self.block_size)
            slot = memory.block(request.blocks[block])[offset * 8 : offset * 8 + 8]
            if position >= start:
                slot[:] = np.frombuffer(digest, dtype=np.uint8)
            else:
                assert slot.tobytes() == digest, f"{request!r}: wrong KV at position {position}"


def _digests(tokens: list[int]) -> Iterator[bytes]:
    """For each position 8 bytes that depend on the tokens up to and including it."""
    digest = b""
    for token in tokens:
        digest = xxhash.xxh3_64_digest(digest + token.to_bytes(4, "little"))
        yield digest
