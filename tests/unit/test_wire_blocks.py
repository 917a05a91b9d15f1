"""Blocks of another format between two workers' links: what comes into the pool, what does not, what is held."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import zmq

from baton.engine.kv_cache import KVCache
from baton.engine.staging import StagedBlocks
from baton.layout import KVLayout
from baton.ports import BlocksReceived, BlocksSent, CancelTransfer, ConnectPeer, PeerEvent, ReceiveBlocks
from kv_transfer.links import ZmqPeerLinks
from kv_transfer.registry import open_transport
from kv_transfer.wire_blocks import WireBlocks
from kv_transfer.wire_format import LANDS, Encoding, Landing, WireFormat
from tests.fakes_transfer import ship_and_hash, transfer_of, worker_info
from tests.stub_cluster import wait_until

WIDTH = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "dtype": "bfloat16"}
THERE, HERE = KVLayout(block_size=8, **WIDTH), KVLayout(block_size=24, **WIDTH)  # type: ignore[arg-type]
T1, T2 = transfer_of(1), transfer_of(2)
NUM_CONTEXT, FIRST = 61, 24
"""Wire blocks 0 to 7, the last with 5 tokens; local blocks 0 to 2, the first of which is here already."""
SOURCES = tuple((index, 9 - index) for index in range(3, 8))
LOCAL = (4, 0, 3)


def pool(layout: KVLayout, seed: int) -> KVCache:
    cache = KVCache(layout, 10)
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


class Pair:
    """P, whose blocks hold 8 tokens, and D, whose blocks hold 24."""

    def __init__(self, scheme: str, encoding: Encoding, staged: bool):
        self.format = WireFormat(THERE, encoding)
        self.landing = Landing(self.format, LOCAL, NUM_CONTEXT, FIRST)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.source, self.target = pool(THERE, 1), pool(HERE, 2)
        self.before = self.target.tensor.clone()
        self.heard: list[PeerEvent] = []
        self.memories = [StagedBlocks(cache) if staged else cache for cache in (self.source, self.target)]
        self.p, self.d = (
            ZmqPeerLinks(
                incarnation=name,
                pool=memory,
                transport=open_transport(scheme),
                context=self.context,
                layout=layout,
                encoding=encoding,
            )
            for name, memory, layout in zip(("P1", "D1"), self.memories, (THERE, HERE), strict=True)
        )
        info = worker_info("D1", control_address=self.d.control_address, data_address=self.d.data_address)
        self.p.execute(ConnectPeer(info))

    def announce(self, number: int = 1) -> None:
        blocks = tuple((index, LANDS) for index, _ in SOURCES)
        self.d.execute(ReceiveBlocks("P1", transfer_of(number), (), blocks, self.landing))

    def ship(self, number: int = 1) -> dict[int, int]:
        return ship_and_hash(self.p, "D1", transfer_of(number), SOURCES)[1].checksums

    def until(self, sent: int, received: int) -> dict[int, int]:
        """Checksums by index of all that came."""

        def check() -> bool:
            self.heard += self.p.events() + self.d.events()
            num_sent = sum(len(event.indices) for event in self.heard if isinstance(event, BlocksSent))
            return num_sent >= sent and len(self.came()) >= received

        wait_until(check, "blocks to move")
        return self.came()

    def came(self) -> dict[int, int]:
        return {i: c for e in self.heard if isinstance(e, BlocksReceived) for i, c in e.checksums.items()}

    def check_nothing_is_held(self) -> None:
        assert self.p._wire is not None and self.d._wire is not None
        assert self.p._wire.num_open == self.d._wire.num_open == 0
        assert not (self.p._encoded or self.d._receiving or self.d._landings)
        for memory in self.memories:
            if isinstance(memory, StagedBlocks):
                assert len(memory._free) == memory.num_slots and memory._open == {}

    def close(self) -> None:
        self.p.close()
        self.d.close()
        self.context.term()


CASES = [("inproc", "plain", False), ("zmq+tcp", "plain", True), ("zmq+tcp", "int8", False), ("zmq+ipc", "fp8", True)]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]} {case[1]}{' staged' if case[2] else ''}")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(*request.param)
    yield pair
    pair.close()


def test_blocks_are_taken_apart_where_they_arrive(pair: Pair) -> None:
    pair.announce()
    checksums = pair.ship()
    assert pair.until(5, 5) == checksums, "of the bytes on the wire"
    wire = torch.cat([pair.source.tensor[9 - index] for index in range(8)], dim=-2)  # [layers, 2, heads, tokens, ...]
    local = torch.cat([pair.target.tensor[block] for block in LOCAL], dim=-2)
    here = torch.cat([pair.before[block] for block in LOCAL], dim=-2)
    assert torch.equal(local[..., :FIRST, :], here[..., :FIRST, :]), "what was here already is not written"
    assert not local[..., NUM_CONTEXT:, :].any(), "the rest of the last block is zeros"
    exact, got = wire[..., FIRST:NUM_CONTEXT, :], local[..., FIRST:NUM_CONTEXT, :]
    if pair.format.encoding == "plain":
        assert torch.equal(got, exact)
    else:
        assert not torch.equal(got, exact)
        torch.testing.assert_close(got, exact, rtol=0.08, atol=0.02)
    others = [block for block in range(10) if block not in LOCAL]
    assert torch.equal(pair.target.tensor[others], pair.before[others])
    assert pair.p.bytes_sent == pair.d.bytes_received == 5 * pair.format.block_bytes
    pair.check_nothing_is_held()


def test_after_a_cancel_the_pool_is_not_written(pair: Pair) -> None:
    """I5, also where some blocks of the transfer have come."""
    pair.announce()
    pair.ship()
    pair.d.execute(CancelTransfer(T1))
    pair.until(5, 0)
    pair.announce(2)
    pair.d.execute(CancelTransfer(T2))
    pair.announce(3)
    assert pair.target.tensor.equal(pair.before)
    pair.ship(3)
    pair.until(10, 5)
    pair.check_nothing_is_held()


def test_a_block_of_the_wrong_size_is_not_written() -> None:
    """P of another format than it said."""
    pair = Pair("zmq+tcp", "plain", staged=False)
    lying = Landing(WireFormat(KVLayout(block_size=16, **WIDTH)), LOCAL, NUM_CONTEXT, FIRST)  # type: ignore[arg-type]
    blocks = tuple((index, LANDS) for index, _ in SOURCES)
    pair.d.execute(ReceiveBlocks("P1", T1, (), blocks, lying))
    pair.ship()
    transport = pair.d._transport

    def is_dropped() -> bool:
        pair.until(0, 0)
        return bool(transport.stats.num_malformed)  # type: ignore[attr-defined]

    wait_until(is_dropped, "the message to be dropped")
    assert pair.came() == {} and pair.target.tensor.equal(pair.before)
    pair.close()


def test_buffers_exist_while_they_hold_something() -> None:
    wire = WireBlocks(pool(HERE, 1), HERE)
    ids = wire.open(1000, 4096)
    assert wire.num_open == 1000 and not wire._buffers
    first = wire.block(ids[7])
    assert first.nbytes == 4096 and first is wire.block(ids[7])
    wire.close(ids)
    assert wire.num_open == 0
    (again,) = wire.open(1, 4096)
    assert wire.block(again) is first, "memory is used again"
    with pytest.raises(KeyError):
        wire.block(ids[7])
    assert np.shares_memory(wire.block(3), wire._pool.block(3)), "blocks of the pool are passed through"
