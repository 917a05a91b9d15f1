"""Pools that transports cannot reach: blocks pass through host copies. Here the device is a second piece of memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import zmq

from baton.config import parse_config
from baton.engine import staging
from baton.engine.kv_cache import KVCache
from baton.engine.staging import StagedBlocks
from baton.errors import ConfigError
from baton.layout import KVLayout
from baton.ports import (
    BlocksReceived,
    BlocksSent,
    CancelTransfer,
    ConnectPeer,
    PeerEvent,
    ReceiveBlocks,
    ShipBlocks,
)
from baton_cluster.build import build_worker
from baton_cluster.specs import worker_specs
from kv_transfer import links
from kv_transfer.base import BlockMemory, StagedMemory
from kv_transfer.checksum import block_checksum
from kv_transfer.links import ZmqPeerLinks
from kv_transfer.registry import open_transport
from tests.fakes_transfer import FakePool, ship_and_hash, transfer_of, worker_info
from tests.stub_cluster import wait_until

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, block_size=4, head_dim=8, dtype="float32")


def pool(seed: int | None = None) -> KVCache:
    cache = KVCache(LAYOUT, 12)
    if seed is not None:
        cache.tensor.normal_(generator=torch.Generator().manual_seed(seed))
    return cache


def test_only_staged_pools_are_staged() -> None:
    assert isinstance(StagedBlocks(pool()), StagedMemory)
    memories: list[BlockMemory] = [pool(), FakePool(1, 4)]
    assert not any(isinstance(memory, StagedMemory) for memory in memories)


def test_fetched_copies_keep_what_the_block_held() -> None:
    cache = pool(1)
    staged = StagedBlocks(cache)
    before = cache.block(3).copy()
    first = staged.fetch([3, 5])
    shown = staged.block(3)
    np.testing.assert_array_equal(shown, before)
    staged.close_views()
    cache.block(3)[:] = 1
    second = staged.fetch([3])
    assert (staged.block(3) == 1).all()
    staged.close_views()
    np.testing.assert_array_equal(shown, before, "a transport may still read it")
    staged.release([*first, *second])


def test_what_was_not_stored_does_not_reach_the_pool() -> None:
    cache = pool()
    staged = StagedBlocks(cache)
    staged.block(2)[:] = 7
    staged.block(4)[:] = 9
    assert not cache.tensor.any()
    staged.store([4])
    staged.close_views()
    assert not cache.block(2).any()
    assert (cache.block(4) == 9).all()


def test_host_copies_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = StagedBlocks(pool(2))
    monkeypatch.setattr(staging, "SLAB_BYTES", 50 * staged.block_bytes)
    staged.release(staged.fetch([0]))
    staged.close_views()
    slots = staged.num_slots
    assert slots == 50
    for _ in range(3 * slots):
        staged.block(1)
        copies = staged.fetch([0, 2])
        staged.close_views()
        staged.release(copies)
    assert staged.num_slots == slots
    assert len({copy.data_ptr() for copy in staged._free}) == len(staged._free) == slots


def test_a_block_outside_the_pool() -> None:
    with pytest.raises(IndexError, match="block 12 is not in a pool of 12"):
        StagedBlocks(pool()).block(12)


class Pair:
    """P ships to D, both over staged pools."""

    def __init__(self, scheme: str):
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.source, self.target = pool(3), pool()
        self.memories = {"P1": StagedBlocks(self.source), "D1": StagedBlocks(self.target)}
        self.p, self.d = (
            ZmqPeerLinks(incarnation=name, pool=memory, transport=open_transport(scheme), context=self.context)
            for name, memory in self.memories.items()
        )
        self.heard: dict[str, list[PeerEvent]] = {"P1": [], "D1": []}
        info = worker_info("D1", control_address=self.d.control_address, data_address=self.d.data_address)
        self.p.execute(ConnectPeer(info))

    def turn(self) -> None:
        self.heard["P1"] += self.p.events()
        self.heard["D1"] += self.d.events()

    def received(self) -> dict[int, int]:
        events = [event for event in self.heard["D1"] if isinstance(event, BlocksReceived)]
        return {index: checksum for event in events for index, checksum in event.checksums.items()}

    def sent(self) -> set[int]:
        return {i for event in self.heard["P1"] if isinstance(event, BlocksSent) for i in event.indices}

    def until(self, done: object) -> None:
        def check() -> bool:
            self.turn()
            return bool(done())  # type: ignore[operator]

        wait_until(check, "blocks to move")

    def close(self) -> None:
        self.p.close()
        self.d.close()
        self.context.term()


@pytest.fixture(params=["inproc", "zmq+tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()


def test_blocks_move_from_pool_to_pool(pair: Pair) -> None:
    transfer = transfer_of(1)
    pair.d.execute(ReceiveBlocks("P1", transfer, (), ((0, 6), (1, 5), (2, 4))))
    _, hashed = ship_and_hash(pair.p, "D1", transfer, ((0, 3), (1, 1), (2, 7)))
    pair.until(lambda: len(pair.received()) == 3 and len(pair.sent()) == 3)
    assert (
        pair.received()
        == hashed.checksums
        == {i: block_checksum(pair.source.block(b)) for i, b in ((0, 3), (1, 1), (2, 7))}
    )
    for a, b in ((3, 6), (1, 5), (7, 4)):
        np.testing.assert_array_equal(pair.source.block(a), pair.target.block(b))
    assert not pair.target.tensor[[0, 1, 2, 3, 7]].any()
    for memory in pair.memories.values():
        assert len(memory._free) == memory.num_slots, "no host copy is held once all is sent and received"


def test_a_damaged_transfer_is_noticed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared is the checksum of what arrived, before it goes to the device."""
    real, sources = links.copy_block, []

    def damaging(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> int:
        sources.append(source.copy())
        if len(sources) == 2:
            sources[1][17] ^= 0x40
        return real(target, sources[-1])

    monkeypatch.setattr(links, "copy_block", damaging)
    pair.d.execute(ReceiveBlocks("P1", transfer_of(1), (), ((0, 6), (1, 5))))
    _, hashed = ship_and_hash(pair.p, "D1", transfer_of(1), ((0, 3), (1, 1)))
    pair.until(lambda: len(pair.received()) == 2)
    assert pair.received()[0] == hashed.checksums[0]
    assert pair.received()[1] != hashed.checksums[1]


def test_after_a_cancel_the_pool_is_not_written(pair: Pair) -> None:
    """I5."""
    pair.d.execute(ReceiveBlocks("P1", transfer_of(1), (), ((0, 6),)))
    pair.p.execute(ShipBlocks("D1", transfer_of(1), ((0, 3),)))
    pair.d.execute(CancelTransfer(transfer_of(1)))
    pair.until(lambda: pair.sent() == {0})
    pair.d.execute(ReceiveBlocks("P1", transfer_of(2), (), ((0, 7),)))
    pair.p.execute(ShipBlocks("D1", transfer_of(2), ((0, 3),)))
    pair.until(lambda: len(pair.received()) == 1)
    assert not pair.target.block(6).any()
    assert pair.memories["D1"]._open == {}


def test_faults_over_a_staged_pool_are_refused() -> None:
    """A block that is told late would be stored when its host copy is gone."""
    config = parse_config({"transfer": {"transport": "faulty+zmq+tcp?delay=0.5"}})
    built: Any = SimpleNamespace(device="cuda", kv_cache=pool())
    with zmq.Context() as context, pytest.raises(ConfigError, match=r"transfer\.transport.*GPU"):
        build_worker(
            config,
            worker_specs(config)[0],
            built,
            router_address="tcp://127.0.0.1:1",
            context=context,
            transport="faulty+zmq+tcp://127.0.0.1?delay=0.5",
        )
