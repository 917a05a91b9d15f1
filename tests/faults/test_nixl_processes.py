"""`nixl` when a process is killed or stopped in the middle of traffic, as `test_shm_processes` for `shm`.

`cuda-ipc` has the links and the table of `shm`, and unmaps a pool with its link (`tests.unit.test_cuda_ipc_transport`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from kv_transfer import nixl_agent
from kv_transfer.base import LinkLost, Received, Sent
from kv_transfer.nixl_transport import NixlTransport
from tests.fakes_transfer import FakePool, drive, transfer_of, watched

NUM_BLOCKS, BLOCK = 16, 1 << 20

pytestmark = pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")


def opened(seed: int) -> tuple[Any, FakePool]:
    pool = FakePool(NUM_BLOCKS, BLOCK)
    pool.fill(seed)
    transport: Any = watched(NixlTransport())
    transport.register(pool, incarnation="P1")
    return transport, pool


def serve_source(pipe: Connection, target: str) -> None:
    """Ship all blocks again and again, under transfers 0, 1, ..., as soon as the former one has been read."""
    transport, _ = opened(7)
    transport.connect("D1", target)
    pipe.send(transport.address)
    for number in range(1 << 30):
        transfer = transfer_of(number)
        pipe.send((transfer, transport.ship("D1", transfer, [(i, i) for i in range(NUM_BLOCKS)])))
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
        deadline = transport.next_deadline(0.0)
        if pipe.fileno() in dict(poller.poll(100 if deadline is None else deadline * 1000)):
            transfer, refs = pipe.recv()
            transport.receive("P1", transfer, refs, [(i, i) for i in range(NUM_BLOCKS)])
        transport.completions()


@contextlib.contextmanager
def process(target: Any, *arguments: Any) -> Iterator[tuple[Any, Connection, str]]:
    """The process, the pipe to it, and its transport's address."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, ours, ours.recv()
    finally:
        child.kill()
        child.join()
        ours.close()


def left() -> tuple[int, set[str]]:
    """Mappings of KV memory in this process, and files in shared memory."""
    return Path("/proc/self/maps").read_text().count("memfd:baton-kv"), set(os.listdir("/dev/shm"))


def test_a_source_killed_in_the_middle_of_traffic() -> None:
    """The target hears of it, lets go of all that it read from, and whatever it copied until then is right."""
    transport, pool = opened(1)
    expected = FakePool(NUM_BLOCKS, BLOCK)
    expected.fill(7)
    with contextlib.closing(transport):
        num_maps, files = left()
        with process(serve_source, transport.address) as (child, pipe, _):
            num_received = 0
            while not any(isinstance(event, LinkLost) for event in transport.seen):
                with contextlib.suppress(EOFError, ConnectionResetError):
                    while pipe.poll():
                        transfer, refs = pipe.recv()
                        pairs = [(i, NUM_BLOCKS - 1 - i) for i in range(NUM_BLOCKS)]
                        transport.receive("P1", transfer, refs, pairs)
                events = transport.completions()
                transport.seen += events
                num_received += sum(len(event.indices) for event in events if isinstance(event, Received))
                if num_received >= 5 * NUM_BLOCKS:
                    child.kill()
        assert [event.peer for event in transport.seen if isinstance(event, LinkLost)] == ["P1"]
        assert not transport._sources
        drive([transport], lambda: not transport._closing)
        np.testing.assert_array_equal(pool.memory[::-1], expected.memory)
        now_maps, now_files = left()
        assert now_maps <= num_maps
        assert not {name for name in now_files - files if name.startswith(("baton", "ucx"))}
        assert transport.next_deadline(0.0) is None


def test_a_target_stopped_and_then_killed_holds_no_block() -> None:
    """A source that gives a stopped peer up has its blocks at once; one that does not, when the peer is dead."""
    transport, pool = opened(1)
    with contextlib.closing(transport), process(serve_target) as (child, pipe, address):
        pairs = [(i, i) for i in range(NUM_BLOCKS)]
        everything = tuple(range(NUM_BLOCKS))

        def ship(number: int) -> None:
            transfer = transfer_of(number)
            pipe.send((transfer, transport.ship("D1", transfer, pairs)))

        def sent(number: int) -> list[int]:
            found = [e for e in transport.seen if isinstance(e, Sent) and e.transfer == transfer_of(number)]
            return sorted(i for event in found for i in event.indices)

        transport.connect("D1", address)
        ship(1)
        drive([transport], lambda: sent(1) == list(everything))
        os.kill(child.pid, signal.SIGSTOP)
        ship(2)
        assert transport.completions() == []
        transport.cancel(transfer_of(2))
        assert transport.completions() == [Sent(transfer_of(2), everything)]
        pool.memory[:] = 0  # somebody else's
        ship(3)
        started = time.monotonic()
        child.kill()
        drive([transport], lambda: sent(3) == list(everything))
        assert time.monotonic() - started < 5
        assert any(isinstance(event, LinkLost) and event.peer == "D1" for event in transport.seen)
        assert transport._lent_pool.num_lent() == 0
        assert not transport._lent
