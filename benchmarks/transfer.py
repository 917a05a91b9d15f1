"""How fast KV blocks get from one worker's pool into another's, by transport, against what the machine can do.

python -m benchmarks.transfer --transports inproc,zmq+tcp,zmq+ipc,shm --tokens 16,128,1024 --json results/transfer.json

Source and target are two processes (inproc: two threads) with a `KVTransport` and a pool of the demo model's blocks
each, whose refs and checksums go through a pipe, as they do through control sockets. A transfer lasts from before its
first block is hashed until its last one is in the target's pool, hashed and compared. Its bytes are verified after the
clock has stopped. Transfers move through pools that are far larger than any cache.

floor     of the same bytes, in the same run, in turn with the transfers: inproc and shm, one memcpy between two large
          buffers; zmq, messages of 4 MiB over a bare socket and the copy out of each
cpu_ms    of both ends, their ZeroMQ threads included
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from baton.host_memory import HostMemory
from baton.layout import KVLayout
from baton.protocol import TransferId
from baton_experiments.report import environment
from benchmarks.machine import spread
from kv_transfer.base import KVTransport, Received, Sent
from kv_transfer.checksum import block_checksum
from kv_transfer.registry import open_transport

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, block_size=16, head_dim=64, dtype="float32")
"""Of the demo model: 720 KiB a block."""
STRIDES = 4
"""A pool holds so many of the largest transfer, which take turns."""
MESSAGE_BYTES = 4 << 20
"""Of the floor over a socket: faster than one large message, whose memory libzmq would take anew."""
WARM_UPS = 5
PATIENCE_S = 60.0


class Pool:
    """`BlockMemory` without a model, all pages touched."""

    def __init__(self, num_blocks: int, seed: int, *, shared: bool = True):
        self.num_blocks, self.block_bytes = num_blocks, LAYOUT.block_bytes
        self.host_memory = HostMemory(num_blocks * self.block_bytes, shared=shared)
        self.memory = self.host_memory.array.reshape(num_blocks, self.block_bytes)
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.shape, dtype=np.uint8)

    def block(self, block_id: int) -> Any:
        return self.memory[block_id]


class End:
    """One end of the link: drives its transport as a worker's I/O thread does."""

    def __init__(self, scheme: str, num_blocks: int, seed: int, pipe: Connection):
        self.pool = Pool(num_blocks, seed, shared=scheme == "shm")
        self.transport: KVTransport = open_transport(scheme)
        self.transport.register(self.pool)
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

    def checksums(self, blocks: list[int]) -> list[int]:
        return [block_checksum(self.pool.block(block)) for block in blocks]


def transfer_id(number: int) -> TransferId:
    return TransferId(f"{number:032x}", 0, 0, "P", "D")


def serve_source(scheme: str, num_blocks: int, pipe: Connection) -> None:
    """Ship what the target asks for, until it says None."""
    end = End(scheme, num_blocks, 1, pipe)
    context = zmq.Context()
    pipe.send("ready")
    end.transport.connect("D", pipe.recv())
    bare = bare_socket(context, zmq.PUSH, pipe.recv())
    while (order := pipe.recv()) is not None:
        kind, number, blocks, checksums = order
        if kind == "floor":
            memory = end.pool.host_memory.array[blocks[0] * LAYOUT.block_bytes :][: len(blocks) * LAYOUT.block_bytes]
            pipe.send(time.perf_counter())
            for start in range(0, len(memory), MESSAGE_BYTES):
                tracker = bare.send(memory[start : start + MESSAGE_BYTES], copy=False, track=True)
            tracker.wait(PATIENCE_S)
            continue
        end.pool.memory[blocks, :8] = np.frombuffer(number.to_bytes(8, "little"), dtype=np.uint8)
        started, cpu = time.perf_counter(), end.clock()
        sums = end.checksums(blocks) if checksums else []
        refs = end.transport.ship("D", transfer_id(number), list(enumerate(blocks)))
        pipe.send((started, refs, sums))
        unsent = set(range(len(blocks)))

        def on_event(event: Any, unsent: set[int] = unsent) -> None:
            if isinstance(event, Sent):
                unsent.difference_update(event.indices)

        end.drive(on_event, lambda unsent=unsent: not unsent, lambda: None)  # type: ignore[misc]
        pipe.send(end.clock() - cpu)
    end.transport.close()
    bare.close(linger=0)
    context.term()


def bare_socket(context: zmq.Context[Any], kind: int, address: str) -> Any:
    """A socket for the floor: PULL listens at `address`, PUSH connects to it; empty: to nothing."""
    sock = context.socket(kind)
    sock.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    if address:
        (sock.bind if kind == zmq.PULL else sock.connect)(address)
    return sock


class Target:
    """The measuring end."""

    def __init__(self, scheme: str, num_blocks: int, pipe: Connection, folder: str):
        self.scheme = scheme
        self.end = End(scheme, num_blocks, 2, pipe)
        self.pipe = pipe
        self.expected = Pool(num_blocks, 1, shared=False).memory
        self.buffer = Pool(num_blocks, 3, shared=False).memory.reshape(-1)
        self.number = 0
        assert pipe.recv() == "ready"
        pipe.send(self.end.transport.address)
        self.context = zmq.Context()
        address = {"zmq+tcp": "tcp://127.0.0.1:*", "zmq+ipc": f"ipc://{folder}/floor"}.get(scheme, "")
        self.bare = bare_socket(self.context, zmq.PULL, address)
        pipe.send(self.bare.getsockopt_string(zmq.LAST_ENDPOINT) if address else "")

    def transfer(self, sources: list[int], targets: list[int], checksums: bool) -> tuple[float, float]:
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
                    sums[index] = block_checksum(end.pool.block(targets[index])) if checksums else 0

        cpu = end.clock()
        self.pipe.send(("transfer", self.number, sources, checksums))
        end.drive(on_event, lambda: bool(answer) and len(sums) == len(pairs), on_pipe)
        if checksums:
            assert [sums[index] for index, _ in pairs] == answer[0][2]
        seconds, cpu = time.perf_counter() - answer[0][0], end.clock() - cpu
        while len(answer) < 2:
            answer.append(self.pipe.recv())
        self.verify(sources, targets)
        return seconds, cpu + answer[1]

    def verify(self, sources: list[int], targets: list[int]) -> None:
        self.expected[sources, :8] = np.frombuffer(self.number.to_bytes(8, "little"), dtype=np.uint8)
        for source, target in zip(sources, targets, strict=True):
            assert np.array_equal(self.end.pool.memory[target], self.expected[source]), "not the bytes that were sent"

    def floor(self, sources: list[int], targets: list[int]) -> float:
        """Seconds for as many bytes by the least that this kind of transport could do."""
        size, block = len(sources) * LAYOUT.block_bytes, LAYOUT.block_bytes
        target = self.end.pool.host_memory.array[targets[0] * block :][:size]
        if self.scheme in ("inproc", "shm"):
            source = self.buffer[sources[0] * block :][:size]
            started = time.perf_counter()
            np.copyto(target, source)
            return time.perf_counter() - started
        self.pipe.send(("floor", 0, sources, False))
        for start in range(0, size, MESSAGE_BYTES):
            frame = self.bare.recv(copy=False)
            np.copyto(target[start : start + MESSAGE_BYTES], np.frombuffer(frame.buffer, dtype=np.uint8))
        ended = time.perf_counter()
        started = self.pipe.recv()
        return float(ended - started)

    def close(self) -> None:
        self.pipe.send(None)
        self.end.transport.close()
        self.bare.close(linger=0)
        self.context.term()


@contextmanager
def linked(scheme: str, num_blocks: int) -> Iterator[Target]:
    """A target whose source runs in another process; for inproc in a thread."""
    ours, theirs = multiprocessing.Pipe()
    kind: Any = threading.Thread if scheme == "inproc" else multiprocessing.get_context("spawn").Process
    source = kind(target=serve_source, args=(scheme, num_blocks, theirs), daemon=True)
    source.start()
    with tempfile.TemporaryDirectory() as folder:
        target = Target(scheme, num_blocks, ours, folder)
        try:
            yield target
        finally:
            target.close()
            source.join()


def block_ids(repeat: int, count: int, order: np.ndarray[Any, Any]) -> list[int]:
    """The blocks of a pool that this repetition uses."""
    start = repeat % (len(order) // count) * count
    return [int(block) for block in order[start : start + count]]


def measure(target: Target, tokens: int, checksums: bool, repeats: int, scattered: bool) -> dict[str, Any]:
    count = LAYOUT.num_blocks_for(tokens)
    num_blocks = target.end.pool.num_blocks
    plain = np.arange(num_blocks)
    orders = [np.random.default_rng(seed).permutation(num_blocks) if scattered else plain for seed in (1, 2)]
    samples: list[tuple[float, float]] = []
    floors: list[float] = []
    for repeat in range(-WARM_UPS, repeats):
        # The floor uses other blocks than the transfer beside it, so that neither warms the cache for the other.
        floor = target.floor(*(block_ids(2 * repeat + 1, count, plain) for _ in range(2)))
        sample = target.transfer(*(block_ids(2 * repeat, count, order) for order in orders), checksums=checksums)
        if repeat >= 0:
            samples.append(sample)
            floors.append(floor)
    seconds = [s for s, _ in samples]
    entry = {
        "transport": target.scheme,
        "checksums": checksums,
        "tokens": tokens,
        "bytes": count * LAYOUT.block_bytes,
        **spread(seconds),
        "cpu_ms": float(np.median([cpu for _, cpu in samples])) * 1e3,
        "floor_ms": spread(floors)["median_ms"],
    }
    entry["gb_per_s"] = entry["bytes"] / entry["median_ms"] / 1e6
    entry["floor_gb_per_s"] = entry["bytes"] / entry["floor_ms"] / 1e6
    entry["of_floor"] = entry["gb_per_s"] / entry["floor_gb_per_s"]
    entry["samples_ms"] = [s * 1e3 for s in seconds]
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="inproc,zmq+tcp,zmq+ipc,shm")
    parser.add_argument("--tokens", default="16,128,1024")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--scattered", action="store_true", help="blocks in random order; default: neighbours")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    lengths = [int(part) for part in arguments.tokens.split(",")]
    num_blocks = STRIDES * LAYOUT.num_blocks_for(max(lengths))
    transfers = []
    for scheme in arguments.transports.split(","):
        with linked(scheme, num_blocks) as target:
            for tokens in lengths:
                for checksums in (False, True):
                    entry = measure(target, tokens, checksums, arguments.repeats, arguments.scattered)
                    transfers.append(entry)
                    print(
                        f"{scheme:8} {tokens:5} tokens {'xxh3' if checksums else 'none'}: {entry['median_ms']:8.3f} ms "
                        f"(p10 {entry['p10_ms']:.3f}, p90 {entry['p90_ms']:.3f})  {entry['gb_per_s']:6.2f} GB/s, "
                        f"{entry['of_floor']:.2f} of the floor's {entry['floor_gb_per_s']:.2f}; "
                        f"cpu {entry['cpu_ms']:.3f} ms",
                        flush=True,
                    )
    load, scattered = os.getloadavg()[0], arguments.scattered
    result = {"environment": environment(), "load": load, "scattered": scattered, "transfers": transfers}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
