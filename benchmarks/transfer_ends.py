"""The two ends of a measured link: processes with a transport and a pool each, and the floor beside it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from baton.host_memory import HostMemory
from baton.layout import KVLayout
from baton.protocol import TransferId
from kv_transfer.base import KVTransport, Received, Sent
from kv_transfer.checksum import block_checksum, copy_block
from kv_transfer.registry import open_transport

NOISE_BLOCKS = 64
SOURCE_CORE, TARGET_CORE = 0, 1
MESSAGE_BYTES = 4 << 20
"""Of the floor over a socket: faster than one large message, whose memory libzmq would take anew."""
PATIENCE_S = 60.0
COPIES = ("inproc", "shm", "cuda-ipc")
"""Transports whose floor is a memory copy."""


class Pool:
    """`BlockMemory` without a model, all pages touched: noise, and in each block its number."""

    def __init__(self, num_blocks: int, block_bytes: int, seed: int, *, shared: bool = True):
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self.host_memory = HostMemory(num_blocks * block_bytes, shared=shared)
        self.memory = self.host_memory.array.reshape(num_blocks, block_bytes)
        noise = np.random.default_rng(seed).integers(0, 256, (NOISE_BLOCKS, block_bytes), dtype=np.uint8)
        for start in range(0, num_blocks, NOISE_BLOCKS):
            part = self.memory[start : start + NOISE_BLOCKS]
            part[:] = noise[: len(part)]
        self.memory[:, 8:16] = np.arange(num_blocks, dtype=np.uint64).view(np.uint8).reshape(-1, 8)

    def block(self, block_id: int) -> Any:
        return self.memory[block_id]


class End:
    """One end of a link: drives its transport as a worker's I/O thread does. `hashes`: what is written, on the way."""

    def __init__(self, scheme: str, num_blocks: int, block_bytes: int, seed: int, pipe: Connection, *, hashes: bool):
        self.pool = Pool(num_blocks, block_bytes, seed, shared=scheme == "shm")
        self.transport: KVTransport = open_transport(scheme)
        self.hashes = hashes
        self.transport.register(self.pool, self._write if hashes else None, incarnation="P")
        self.written: dict[int, int] = {}
        """Checksum by block."""
        self.pipe = pipe
        self.clock: Callable[[], float] = time.thread_time if scheme == "inproc" else time.process_time

    def drive(self, on_event: Callable[[Any], None], is_done: Callable[[], bool], on_pipe: Callable[[], None]) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while True:
            for event in self.transport.completions():
                on_event(event)
            if is_done():
                return
            now = time.monotonic()
            assert now < give_up, "the transfer hangs"
            poller = zmq.Poller()
            for pollable in (*self.transport.pollables(), self.pipe.fileno()):
                poller.register(pollable, zmq.POLLIN)
            deadline = self.transport.next_deadline(now)
            ready = dict(poller.poll(1000 if deadline is None else max(0.0, deadline - now) * 1000 + 1))
            if self.pipe.fileno() in ready:
                on_pipe()

    def _write(self, block: int, source: Any) -> None:
        """As `kv_transfer.links` has its transport write."""
        self.written[block] = copy_block(self.pool.block(block), source)

    def checksums(self, blocks: list[int]) -> list[int]:
        return [block_checksum(self.pool.block(block)) for block in blocks]


def transfer_id(number: int) -> TransferId:
    return TransferId(f"{number:032x}", 0, 0, "P", "D")


def serve_source(scheme: str, num_blocks: int, block_bytes: int, hashes: bool, pipe: Connection) -> None:
    """Ship what the target asks for, until it says None."""
    end = End(scheme, num_blocks, block_bytes, 1, pipe, hashes=hashes)
    context = zmq.Context()
    pipe.send("ready")
    end.transport.connect("D", pipe.recv())
    bare = bare_socket(context, zmq.PUSH, pipe.recv())
    pin(SOURCE_CORE)
    while (order := pipe.recv()) is not None:
        kind, number, blocks = order
        if kind == "floor":
            memory = end.pool.host_memory.array[blocks[0] * block_bytes :][: len(blocks) * block_bytes]
            pipe.send(time.perf_counter())
            for start in range(0, len(memory), MESSAGE_BYTES):
                tracker = bare.send(memory[start : start + MESSAGE_BYTES], copy=False, track=True)
            tracker.wait(PATIENCE_S)
            continue
        end.pool.memory[blocks, :8] = np.frombuffer(number.to_bytes(8, "little"), dtype=np.uint8)
        started, cpu = time.perf_counter(), end.clock()
        refs = end.transport.ship("D", transfer_id(number), list(enumerate(blocks)))
        pipe.send((started, refs))
        pipe.send(end.checksums(blocks) if hashes else [])
        unsent = set(range(len(blocks)))

        def on_event(event: Any, unsent: set[int] = unsent) -> None:
            if isinstance(event, Sent):
                unsent.difference_update(event.indices)

        end.drive(on_event, lambda unsent=unsent: not unsent, lambda: None)  # type: ignore[misc]
        pipe.send(end.clock() - cpu)
    end.transport.close()
    bare.close(linger=0)
    context.term()


def pin(core: int) -> set[int]:
    """As Baton pins a worker's threads, but not those of ZeroMQ, which exist by now. Returns the cores before."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[core % len(before)]})
    return before


def bare_socket(context: zmq.Context[Any], kind: int, address: str) -> Any:
    """A socket for the floor: PULL listens at `address`, PUSH connects to it; empty: to nothing."""
    sock = context.socket(kind)
    sock.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    if address:
        (sock.bind if kind == zmq.PULL else sock.connect)(address)
    return sock


class Target:
    """The measuring end. `layout`: of the blocks."""

    def __init__(self, scheme: str, num_blocks: int, layout: KVLayout, hashes: bool, pipe: Connection, folder: str):
        self.scheme = scheme
        self.layout = layout
        self.end = End(scheme, num_blocks, layout.block_bytes, 2, pipe, hashes=hashes)
        self.pipe = pipe
        self.expected = Pool(num_blocks, layout.block_bytes, 1, shared=False).memory
        self.buffer = Pool(num_blocks, layout.block_bytes, 3, shared=False).memory.reshape(-1)
        self.number = 0
        assert pipe.recv() == "ready"
        pipe.send(self.end.transport.address)
        self.context = zmq.Context()
        listen = {"zmq+ipc": f"ipc://{folder}/floor"}
        address = "" if scheme in COPIES else listen.get(scheme, "tcp://127.0.0.1:*")
        self.bare = bare_socket(self.context, zmq.PULL, address)
        pipe.send(self.bare.getsockopt_string(zmq.LAST_ENDPOINT) if address else "")
        self.unpinned = pin(TARGET_CORE)

    def transfer(self, sources: list[int], targets: list[int]) -> tuple[float, float]:
        """Seconds, and seconds of CPU time on both ends."""
        end, transport, pairs = self.end, self.end.transport, list(enumerate(targets))
        self.number += 1
        transfer = transfer_id(self.number)
        if not transport.pulls:
            transport.receive("P", transfer, (), pairs)
        answer: list[Any] = []
        sums: dict[int, int] = {}

        def on_pipe() -> None:
            answer.append(self.pipe.recv())
            if len(answer) == 1 and transport.pulls:
                transport.receive("P", transfer, answer[0][1], pairs)

        def on_event(event: Any) -> None:
            if isinstance(event, Received):
                for index in event.indices:
                    sums[index] = self.checksum(targets[index])

        cpu = end.clock()
        self.pipe.send(("transfer", self.number, sources))
        end.drive(on_event, lambda: len(answer) > 1 and len(sums) == len(pairs), on_pipe)
        if end.hashes:
            assert [sums[index] for index, _ in pairs] == answer[1]
        seconds, cpu = time.perf_counter() - answer[0][0], end.clock() - cpu
        while len(answer) < 3:
            answer.append(self.pipe.recv())
        self.verify(sources, targets)
        return seconds, cpu + answer[2]

    def checksum(self, block: int) -> int:
        """Of what was written there."""
        if not self.end.hashes:
            return 0
        known = self.end.written.pop(block, None)
        return block_checksum(self.end.pool.block(block)) if known is None else known

    def verify(self, sources: list[int], targets: list[int]) -> None:
        self.expected[sources, :8] = np.frombuffer(self.number.to_bytes(8, "little"), dtype=np.uint8)
        for source, target in zip(sources, targets, strict=True):
            assert np.array_equal(self.end.pool.memory[target], self.expected[source]), "not the bytes that were sent"

    def floor(self, sources: list[int], targets: list[int]) -> float:
        """Seconds for as many bytes by the least that this kind of transport could do."""
        size, block = len(sources) * self.layout.block_bytes, self.layout.block_bytes
        target = self.end.pool.host_memory.array[targets[0] * block :][:size]
        if self.scheme in COPIES:
            source = self.buffer[sources[0] * block :][:size]
            started = time.perf_counter()
            np.copyto(target, source)
            return time.perf_counter() - started
        self.pipe.send(("floor", 0, sources))
        for start in range(0, size, MESSAGE_BYTES):
            frame = self.bare.recv(copy=False)
            np.copyto(target[start : start + MESSAGE_BYTES], np.frombuffer(frame.buffer, dtype=np.uint8))
        ended = time.perf_counter()
        started = self.pipe.recv()
        return float(ended - started)

    def close(self) -> None:
        os.sched_setaffinity(0, self.unpinned)
        self.pipe.send(None)
        self.end.transport.close()
        self.bare.close(linger=0)
        self.context.term()


@contextmanager
def linked(scheme: str, num_blocks: int, layout: KVLayout, *, hashes: bool) -> Iterator[Target]:
    """A target whose source runs in another process, each on a core of its own; for inproc in a thread.

    `hashes`: both ends hash what is moved.
    """
    ours, theirs = multiprocessing.Pipe()
    kind: Any = threading.Thread if scheme == "inproc" else multiprocessing.get_context("spawn").Process
    arguments = (scheme, num_blocks, layout.block_bytes, hashes, theirs)
    source = kind(target=serve_source, args=arguments, daemon=True)
    source.start()
    with tempfile.TemporaryDirectory() as folder:
        target = Target(scheme, num_blocks, layout, hashes, ours, folder)
        try:
            yield target
        finally:
            target.close()
            source.join()


def block_ids(repeat: int, count: int, order: np.ndarray[Any, Any]) -> list[int]:
    """The blocks of a pool that this repetition uses."""
    start = repeat % (len(order) // count) * count
    return [int(block) for block in order[start : start + count]]
