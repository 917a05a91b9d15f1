"""Fakes for hand-over tests: a pool of plain memory, an engine that only keeps its books, and message makers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from baton.engine.request import ChunkDone, Effect, Ended, EngineRequest, PromptDone
from baton.host_memory import HostMemory
from baton.layout import KVLayout
from baton.ports import HashBlocks, Hashed, PeerLinks, ShipBlocks, Shipped
from baton.protocol import RequestKey, Submit, TransferId, WorkerInfo
from baton.sampling_params import SamplingParams
from kv_transfer.base import Completion, KVTransport

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, block_size=4, head_dim=2, dtype="float32")


class FakePool:
    """`BlockMemory` over one array, which every transport can reach."""

    def __init__(self, num_blocks: int, block_bytes: int):
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self.host_memory = HostMemory(num_blocks * block_bytes, shared=True)
        self.memory = self.host_memory.array.reshape(num_blocks, block_bytes)

    def block(self, block_id: int) -> npt.NDArray[np.uint8]:
        return self.memory[block_id]

    def copy(self, source: int, target: int) -> None:
        self.memory[target] = self.memory[source]

    def fill(self, seed: int) -> None:
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.shape, dtype=np.uint8)


def drive(transports: Iterable[KVTransport], until: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Do what drivers do, until the condition holds: wait for pollables and deadlines, collect completions.

    `transports` collect what comes out in a list attribute `seen`, see `watched`.
    """
    transports = list(transports)
    give_up = time.monotonic() + timeout_s
    while True:
        for transport in transports:
            transport.seen.extend(transport.completions())  # type: ignore[attr-defined]
        if until():
            return
        now = time.monotonic()
        assert now < give_up, [transport.seen for transport in transports]  # type: ignore[attr-defined]
        deadlines = [d for t in transports if (d := t.next_deadline(now)) is not None]
        poller = zmq.Poller()
        for transport in transports:
            for pollable in transport.pollables():
                poller.register(pollable, zmq.POLLIN)
        poller.poll(max(0.0, min([give_up, *deadlines]) - now) * 1000 + 1)


def watched(transport: KVTransport) -> KVTransport:
    seen: list[Completion] = []
    transport.seen = seen  # type: ignore[attr-defined]
    return transport


class FakeEngine:
    """Keeps books on blocks as `EngineCore` does, for both sides; computes nothing.

    Asserts that nobody asks for what makes no sense, and that nothing is released twice. `sharing`: on the decode
    side, full blocks of adopted requests are shared as long as one of them lives.
    """

    def __init__(self, num_blocks: int, block_size: int = LAYOUT.block_size, *, sharing: bool = False):
        self.block_size = block_size
        self.sharing = sharing
        self.shared: dict[tuple[int, ...], int] = {}
        """Block by all tokens up to its end."""
        self.refs: Counter[int] = Counter()
        self.free = list(range(num_blocks))
        self.num_blocks = num_blocks
        self.waiting: dict[RequestKey, EngineRequest] = {}
        """Hand-offs without credit."""
        self.granted: dict[RequestKey, EngineRequest] = {}
        """Held for the transfer until `release`."""
        self.ended: set[RequestKey] = set()
        self.reserved: dict[RequestKey, EngineRequest] = {}
        self.decoding: dict[RequestKey, tuple[EngineRequest, str]] = {}
        self.kept: list[RequestKey] = []
        self.releases: list[RequestKey] = []
        self.calls: list[tuple[str, RequestKey]] = []

    # prefill side

    def submit(self, submit: Submit) -> EngineRequest:
        request = EngineRequest(submit.key, submit.prompt, submit.sampling, prior=submit.prior, handoff=True)
        self.waiting[submit.key] = request
        return request

    def grant(self, key: RequestKey, now: float) -> None:
        self.calls.append(("grant", key))
        request = self.waiting.pop(key)
        self.granted[key] = request

    def keep(self, key: RequestKey, now: float) -> None:
        del self.waiting[key]
        self.kept.append(key)

    def compute(self, key: RequestKey, num_tokens: int) -> list[Effect]:
        """Advance a granted request, allocating as it goes; its first token (7) ends the prompt."""
        request = self.granted[key]
        missing = -(-request.num_context // self.block_size) - len(request.blocks)
        if missing > len(self.free):
            return []
        request.blocks += [self.free.pop() for _ in range(missing)]  # all or none, so that no two wait for each other
        request.num_computed = min(request.num_computed + num_tokens, request.num_context)
        done = request.num_computed == request.num_context
        num_blocks = len(request.blocks)
        end = num_blocks if done else request.num_computed // self.block_size
        effects: list[Effect] = []
        if end > request.num_shipped_blocks:
            pairs = tuple((i, request.blocks[i]) for i in range(request.num_shipped_blocks, end))
            request.num_shipped_blocks = end
            effects.append(ChunkDone(request, pairs))
        if done:
            request.tokens.append(7)
            effects.append(PromptDone(request, 7))
        return effects

    # decode side

    def can_ever_hold(self, num_tokens: int) -> bool:
        return -(-num_tokens // self.block_size) <= self.num_blocks

    def reserve(self, request: EngineRequest, num_tokens: int, now: float) -> list[int] | None:
        count = -(-num_tokens // self.block_size)
        assert request.key not in self.reserved and request.key not in self.decoding
        prefix = []
        for end in range(self.block_size, request.num_context + 1, self.block_size):
            block = self.shared.get(tuple(request.tokens[:end]))
            if block is None:
                break
            prefix.append(block)
        if count - len(prefix) > len(self.free):
            return None
        request.blocks = prefix + [self.free.pop() for _ in range(count - len(prefix))]
        request.num_prefix_blocks = len(prefix)
        self.refs.update(request.blocks)
        self.reserved[request.key] = request
        return list(request.blocks)

    def is_coming(self, request: EngineRequest) -> bool:
        return self.sharing and any(
            r.tokens == request.tokens and r.num_prefix_blocks < -(-r.num_context // self.block_size)
            for r in self.reserved.values()
        )

    def adopt(self, key: RequestKey, first_token: int, now: float) -> None:
        self.calls.append(("adopt", key))
        request = self.reserved.pop(key)
        self.decoding[key] = (request, "adopted")
        if self.sharing:
            for end in range(self.block_size, request.num_context + 1, self.block_size):
                self.shared.setdefault(tuple(request.tokens[:end]), request.blocks[end // self.block_size - 1])

    def _let_go(self, blocks: list[int]) -> None:
        """Of the decode side's blocks."""
        self.refs.subtract(blocks)
        gone = [block for block in blocks if not self.refs[block]]
        self.shared = {tokens: block for tokens, block in self.shared.items() if block not in gone}
        self.free += gone

    def recompute(self, key: RequestKey, first_token: int, now: float) -> None:
        self.calls.append(("recompute", key))
        self.decoding[key] = (self.reserved.pop(key), "recomputed")

    def finish(self, key: RequestKey) -> None:
        request, _ = self.decoding.pop(key)
        self._let_go(request.blocks)

    # both

    def lives_of(self, blocks: Iterable[int]) -> tuple[int, ...]:
        return tuple(0 for _ in blocks)

    def release(self, key: RequestKey, now: float) -> None:
        self.calls.append(("release", key))
        received = self.reserved.pop(key, None)
        request = self.granted.pop(key, None) or received
        if request is not None:
            assert key not in self.releases, f"{key} released twice"
            self.releases.append(key)
            if received is not None:
                self._let_go(received.blocks)
            else:
                self.free += request.blocks

    def abort(self, key: RequestKey, now: float) -> list[Effect]:
        request = self.waiting.pop(key, None) or (None if key in self.ended else self.granted.get(key))
        if request is None:
            return []
        self.ended.add(key)
        return [Ended(request, "abort")]

    def check(self) -> None:
        """I3: each block is free or held, once on the prefill side and as often as it is counted on the decode side."""
        held = [b for r in self.granted.values() for b in r.blocks]
        received = [b for r in (*self.reserved.values(), *(r for r, _ in self.decoding.values())) for b in r.blocks]
        assert Counter(received) == +self.refs
        assert sorted([*held, *set(received), *self.free]) == list(range(self.num_blocks))


def ship_and_hash(
    links: PeerLinks, peer: str, transfer: TransferId, blocks: Sequence[tuple[int, int]], life: int = 1
) -> tuple[Shipped, Hashed]:
    """What a send port asks of its links for blocks that are final."""
    (shipped,) = links.execute(ShipBlocks(peer, transfer, tuple(blocks)))
    (hashed,) = links.execute(HashBlocks(transfer, tuple(blocks), (life,) * len(blocks)))
    assert isinstance(shipped, Shipped)
    assert isinstance(hashed, Hashed)
    return shipped, hashed


def key_of(number: int, attempt: int = 0) -> RequestKey:
    return RequestKey(f"{number:032x}", attempt)


def transfer_of(number: int, source: str = "P1", target: str = "D1") -> TransferId:
    return TransferId(*key_of(number), source, target)


def submit_of(number: int, num_tokens: int = 10, decode: str = "decode-0", max_tokens: int = 8) -> Submit:
    return Submit(key_of(number), tuple(range(num_tokens)), SamplingParams(max_tokens=max_tokens), decode=decode)


def worker_info(incarnation: str = "D1", worker_id: str = "decode-0", **changes: Any) -> WorkerInfo:
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": incarnation,
        "pool": "decode",
        "role": "decode",
        "fingerprint": "f",
        "layout": LAYOUT,
        "num_blocks": 64,
        "max_model_len": 1024,
        "max_batch_requests": 8,
        "control_address": f"tcp://{incarnation}",
        "data_address": f"inproc://{incarnation}",
    }
    return WorkerInfo(**(fields | changes))
