"""Transports that reach pools on a GPU as they are: `cuda-ipc` and `nixl`, within a process and between two."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baton.engine.kv_cache import KVCache
from baton.layout import KVLayout
from kv_transfer import nixl_agent
from kv_transfer.base import LinkLost, Received, Sent
from kv_transfer.checksum import device_checksum
from kv_transfer.device_pool import DeviceStream, is_on_device
from kv_transfer.registry import open_transport
from tests.fakes_transfer import drive, transfer_of, watched
from tests.gpu.test_gpu_clusters import GPU, answers, check, hugging_face  # noqa: F401  # a fixture

LAYOUT = KVLayout(num_layers=4, num_kv_heads=4, block_size=16, head_dim=64, dtype="float32")
NUM_BLOCKS = 32
SCHEMES = [
    "cuda-ipc",
    pytest.param("nixl", marks=pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")),
]


def opened(scheme: str, value: float) -> tuple[Any, KVCache]:
    cache = KVCache(LAYOUT, NUM_BLOCKS, "cuda")
    cache.tensor.copy_(torch.arange(NUM_BLOCKS, device="cuda").view(-1, 1, 1, 1, 1, 1) + value)
    cache.mark_written()
    transport: Any = watched(open_transport(scheme))
    transport.register(cache, incarnation="P1")
    return transport, cache


def serve_source(pipe: Connection, scheme: str, target: str) -> None:
    """Ship all blocks, whose last kernels are still queued; after that wait for the other end to hang up."""
    transport, cache = opened(scheme, 100.0)
    transport.connect("D1", target)
    slow = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        slow = (slow @ slow).clamp(-1, 1)
    cache.tensor.add_(1.0)
    cache.mark_written()
    refs = transport.ship("D1", transfer_of(1), [(i, i) for i in range(NUM_BLOCKS)])
    checksums = [DeviceStream(cache).checksum(block) for block in range(NUM_BLOCKS)]
    pipe.send((refs, checksums))
    drive([transport], lambda: sum(len(e.indices) for e in transport.seen if isinstance(e, Sent)) == NUM_BLOCKS)
    pipe.send("sent")
    pipe.recv()


@contextlib.contextmanager
def source(scheme: str, target: str) -> Iterator[tuple[Any, Connection]]:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=serve_source, args=(theirs, scheme, target), daemon=True
    )
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()
        ours.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_between_processes(scheme: str) -> None:
    transport, cache = opened(scheme, 0.0)
    with contextlib.closing(transport), source(scheme, transport.address) as (child, pipe):
        refs, checksums = pipe.recv()
        transport.receive("P1", transfer_of(1), refs, [(i, NUM_BLOCKS - 1 - i) for i in range(NUM_BLOCKS)])
        drive([transport], lambda: sum(len(e.indices) for e in transport.seen if isinstance(e, Received)) == NUM_BLOCKS)
        assert pipe.recv() == "sent"
        for block in range(NUM_BLOCKS):
            assert bool((cache.tensor[NUM_BLOCKS - 1 - block] == 101.0 + block).all())
        stream = DeviceStream(cache)
        assert [stream.checksum(NUM_BLOCKS - 1 - block) for block in range(NUM_BLOCKS)] == checksums
        child.kill()
        drive([transport], lambda: any(isinstance(e, LinkLost) for e in transport.seen))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_within_a_process(scheme: str) -> None:
    (p, theirs), (d, ours) = opened(scheme, 50.0), opened(scheme, 0.0)
    assert is_on_device(theirs)
    assert p.reach == d.reach
    with contextlib.closing(p), contextlib.closing(d):
        p.connect("D1", d.address)
        pairs = [(0, 3), (1, 4), (2, 9)]
        d.receive("P1", transfer_of(1), p.ship("D1", transfer_of(1), pairs), pairs)
        drive([p, d], lambda: sum(len(e.indices) for e in d.seen if isinstance(e, Received)) == 3)
        drive([p, d], lambda: sum(len(e.indices) for e in p.seen if isinstance(e, Sent)) == 3)
        assert bool((ours.tensor[[3, 4, 9]] == theirs.tensor[[3, 4, 9]]).all())
        before = ours.tensor.clone()
        d.receive("P1", transfer_of(2), p.ship("D1", transfer_of(2), [(0, 7)]), [(0, 8)])
        d.cancel(transfer_of(2))
        drive([p, d], lambda: any(isinstance(e, Sent) and e.transfer == transfer_of(2) for e in p.seen))
        assert bool((ours.tensor == before).all())


def test_checksums_are_those_of_the_cpu() -> None:
    for size in (1, 100, 4096, 720 << 10):
        block = torch.randint(0, 256, (size,), dtype=torch.uint8)
        assert device_checksum(block.cuda()) == device_checksum(block)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_split_on_one_gpu_without_staging(
    tiny_model: Path,
    hugging_face: PreTrainedModel,  # noqa: F811
    scheme: str,
) -> None:
    check(hugging_face, answers(tiny_model, {"prefill": GPU, "decode": GPU}, scheme, True))
