"""Shared KV pools when a process is killed in the middle of traffic: the other goes on, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from kv_transfer.base import LinkLost, Received, Sent
from kv_transfer.shared_pool import Fetch, OwnMemory
from kv_transfer.shm_transport import ShmTransport
from tests.fakes_transfer import FakePool, drive, transfer_of, watched

NUM_BLOCKS, BLOCK = 16, 1 << 20
ROUNDS = 4


addresses: list[str] = []
"""Of the transports of a test."""


def opened(seed: int, incarnation: str = "P1") -> tuple[Any, FakePool]:
    pool = FakePool(NUM_BLOCKS, BLOCK)
    pool.fill(seed)
    transport: Any = watched(ShmTransport())
    transport.register(pool, incarnation=incarnation)
    addresses.append(transport.address)
    return transport, pool


def serve_source(pipe: Connection, incarnation: str, target: str) -> None:
    """Ship all blocks again and again, under transfers 0, 1, ..., as soon as the former one has been read."""
    transport, _ = opened(7, incarnation)
    pipe.send(transport.address)
    transport.connect("D1", target)
    for number in range(1 << 30):
        transfer = transfer_of(number, source=incarnation)
        refs = transport.ship("D1", transfer, [(i, i) for i in range(NUM_BLOCKS)])
        pipe.send((transfer, refs))
        drive([transport], lambda: sum(len(e.indices) for e in transport.seen if isinstance(e, Sent)) == NUM_BLOCKS)
        transport.seen.clear()


def serve_target(pipe: Connection) -> None:
    """Fetch what the pipe names."""
    transport, _ = opened(8)
    pipe.send(transport.address)
    while True:
        poller = zmq.Poller()
        for source in (*transport.pollables(), pipe.fileno()):
            poller.register(source, zmq.POLLIN)
        if pipe.fileno() in dict(poller.poll(100)):
            transfer, refs = pipe.recv()
            transport.receive(transfer.source, transfer, refs, [(i, i) for i in range(NUM_BLOCKS)])
        transport.completions()


@contextlib.contextmanager
def process(target: Any, *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()
    addresses.append(ours.recv())
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()
        ours.close()


def maps() -> int:
    """Mappings of KV memory in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:baton-kv")


def left() -> tuple[int, list[str], list[str]]:
    """Mappings, files and sockets' names that are there now."""
    sockets = Path("/proc/net/unix").read_text()
    names = [address for address in addresses if address.removeprefix("shm://") in sockets]
    return maps(), [name for name in os.listdir("/dev/shm") if "baton" in name], names


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    addresses.clear()
    gc.collect()  # what earlier tests of this process have mapped and only not let go of yet
    num_maps, files, _ = left()
    yield
    assert addresses
    give_up = time.monotonic() + 10
    while (now := left())[0] > num_maps or set(now[1]) > set(files) or now[2]:
        assert time.monotonic() < give_up, now
        time.sleep(0.01)


def test_a_source_killed_in_the_middle_of_traffic() -> None:
    """The target hears of it, has unmapped the pool, and whatever it copied until then is right."""
    transport, pool = opened(1)
    expected = FakePool(NUM_BLOCKS, BLOCK)
    expected.fill(7)
    own = maps()
    with contextlib.closing(transport):
        for life in range(ROUNDS):
            peer = f"P{life}"
            with process(serve_source, peer, transport.address) as (child, pipe):
                kill_at = time.monotonic() + 60.0
                copied = 0
                while not any(isinstance(event, LinkLost) for event in transport.seen):
                    if time.monotonic() >= kill_at:
                        child.kill()
                    with contextlib.suppress(EOFError, ConnectionResetError):
                        while pipe.poll():
                            transfer, refs = pipe.recv()
                            pairs = [(i, NUM_BLOCKS - 1 - i) for i in range(NUM_BLOCKS)]
                            transport.receive(peer, transfer, refs, pairs)
                    events = transport.completions()
                    transport.seen += events
                    new = sum(len(event.indices) for event in events if isinstance(event, Received))
                    if new and not copied:
                        kill_at = time.monotonic() + random.uniform(0.0, 0.05)
                    copied += new
            assert [e.peer for e in transport.seen if isinstance(e, LinkLost)] == [peer]
            transport.seen.clear()
            assert copied > 0
            assert maps() <= own, "the dead one's pool is unmapped"
            np.testing.assert_array_equal(pool.memory[::-1], expected.memory)


def test_a_pool_stays_readable_while_it_is_mapped_though_its_owner_is_dead() -> None:
    """A copy that is under way when the owner is killed reads memory that is still there."""
    transport, pool = opened(1)
    with contextlib.closing(transport):
        with process(serve_source, "P1", transport.address) as (child, pipe):
            _, refs = pipe.recv()
            drive([transport], lambda: any(link.pool is not None for link in transport._sources))
            (link,) = transport._sources
            child.kill()
            child.join()
            fetches = [Fetch(i, ref, i) for i, ref in enumerate(refs)]
            assert link.pool.copy(fetches, OwnMemory(pool.host_memory.array, None)) == list(range(NUM_BLOCKS))
        expected = FakePool(NUM_BLOCKS, BLOCK)
        expected.fill(7)
        np.testing.assert_array_equal(pool.memory, expected.memory)
        del link
        drive(
            [transport], lambda: transport.seen == [LinkLost("P1", "its link was lost: it was closed", incoming=True)]
        )


def test_a_target_killed_in_the_middle_of_traffic() -> None:
    """The source hears of it, and every block is its own again; the next target serves."""
    transport, _ = opened(1)
    with contextlib.closing(transport):
        number = 0
        for life in range(ROUNDS):
            peer = f"D{life}"
            with process(serve_target) as (child, pipe):
                transport.connect(peer, addresses[-1])
                kill_after = random.randint(1, 40)
                while not any(isinstance(event, LinkLost) for event in transport.seen):
                    number += 1
                    transfer = transfer_of(number, source="P1", target=peer)
                    refs = transport.ship(peer, transfer, [(i, i) for i in range(NUM_BLOCKS)])
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        pipe.send((transfer, refs))
                    if (kill_after := kill_after - 1) == 0:
                        child.kill()
                    sent = lambda transfer=transfer: sum(
                        len(e.indices) for e in transport.seen if isinstance(e, Sent) and e.transfer == transfer
                    )
                    drive([transport], lambda sent=sent: sent() == NUM_BLOCKS)  # type: ignore[misc]
            assert [e.peer for e in transport.seen if isinstance(e, LinkLost)] == [peer]
            assert kill_after <= 0
            transport.seen.clear()
            assert transport._lent_pool.num_lent() == 0
            assert not transport._lent
            transport.disconnect(peer)


def test_a_target_that_is_stopped_holds_no_block_of_a_source_that_gives_it_up() -> None:
    """It may be in the middle of a copy: that copy will not count. Nobody waits for it."""
    transport, _ = opened(1)
    with contextlib.closing(transport), process(serve_target) as (child, pipe):
        transport.connect("D1", addresses[-1])
        transfer = transfer_of(1, source="P1")
        os.kill(child.pid, 19)  # SIGSTOP
        refs = transport.ship("D1", transfer, [(i, i) for i in range(NUM_BLOCKS)])
        pipe.send((transfer, refs))
        assert transport.completions() == []
        transport.disconnect("D1")
        assert transport.completions() == [Sent(transfer, tuple(range(NUM_BLOCKS)))]
        os.kill(child.pid, 18)  # SIGCONT
