"""The `nccl` transport between two pools on GPUs: on two of them, or on one where NCCL can have two ranks there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kv_transfer.base import LinkLost, Received, Sent
from kv_transfer.group_transport import GroupTransport
from tests.fakes_transfer import drive, transfer_of, watched

BLOCK = 1 << 20
TWO_RANKS_ON_A_GPU = (2, 30)
"""From this NCCL on."""


def missing() -> str | None:
    """Why `nccl` cannot run here."""
    if not torch.cuda.is_available():
        return "torch sees no GPU here"
    if not dist.is_nccl_available():
        return "this torch has no NCCL"
    version = tuple(torch.cuda.nccl.version())
    if torch.cuda.device_count() < 2 and version < TWO_RANKS_ON_A_GPU:
        return f"one GPU, and NCCL {version} cannot have two ranks there"
    return None


pytestmark = pytest.mark.skipif((reason := missing()) is not None, reason=reason or "")


class CudaPool:
    """`DeviceMemory` over one tensor."""

    def __init__(self, num_blocks: int, device: torch.device):
        self.num_blocks, self.block_bytes, self.device = num_blocks, BLOCK, device
        self.memory = torch.zeros(num_blocks, BLOCK, dtype=torch.uint8, device=device)
        self.written: torch.cuda.Event | None = None
        torch.cuda.synchronize(device)

    def block(self, block_id: int) -> Any:
        raise AssertionError("a pool on a GPU has no host view")

    def block_tensor(self, block_id: int) -> torch.Tensor:
        return self.memory[block_id]


class Pair:
    """P ships to D, on the last GPU."""

    def __init__(self) -> None:
        self.source = CudaPool(32, torch.device("cuda", 0))
        self.target = CudaPool(32, torch.device("cuda", torch.cuda.device_count() - 1))
        self.p, self.d = self.open(self.source), self.open(self.target)
        self.p.connect("D1", self.d.address)

    def open(self, pool: CudaPool) -> Any:
        transport = watched(GroupTransport("nccl"))
        transport.register(pool)
        return transport

    def indices(self, transport: Any, kind: type[Sent] | type[Received]) -> list[int]:
        return [i for e in transport.seen if isinstance(e, kind) for i in e.indices]

    def move(self, number: int) -> None:
        blocks = [(i, i) for i in range(32)]
        self.d.receive("P1", transfer_of(number), (), blocks)
        self.p.ship("D1", transfer_of(number), blocks)

    def arrived(self) -> bool:
        return len(self.indices(self.p, Sent)) >= 32 and len(self.indices(self.d, Received)) >= 32


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "0")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    pair = Pair()
    yield pair
    pair.p.close()
    pair.d.close()


def test_blocks_arrive_as_the_last_step_wrote_them(pair: Pair) -> None:
    """The step is still running on another stream when they are shipped."""
    torch.cuda.set_device(pair.source.device)
    step = torch.cuda.Stream(pair.source.device)
    expected = torch.randint(0, 256, (32, BLOCK), dtype=torch.uint8, device=pair.source.device)
    step.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(step):
        torch.cuda._sleep(50_000_000)
        pair.source.memory.copy_(expected)
        pair.source.written = torch.cuda.Event()
        pair.source.written.record(step)
    pair.move(1)
    drive([pair.p, pair.d], pair.arrived, timeout_s=60)
    assert torch.equal(pair.target.memory.cpu(), expected.cpu())


def test_after_cancel_nothing_is_written(pair: Pair) -> None:
    pair.source.memory.fill_(1)
    torch.cuda.synchronize(pair.source.device)
    pair.move(1)
    pair.d.cancel(transfer_of(1))
    drive([pair.p, pair.d], lambda: pair.d.stats.num_dropped == 32, timeout_s=60)
    assert not pair.target.memory.any()


@pytest.mark.parametrize("act", ["disconnect", "lost"])
def test_a_link_that_ends_lets_every_block_go(pair: Pair, act: str) -> None:
    pair.move(1)
    drive([pair.p, pair.d], pair.arrived, timeout_s=60)
    for number in range(2, 8):
        pair.move(number)
    if act == "disconnect":
        pair.p.disconnect("D1")
    else:
        pair.d.close()
    drive([pair.p], lambda: len(pair.indices(pair.p, Sent)) == 7 * 32, timeout_s=60)
    lost = [e.peer for e in pair.p.seen if isinstance(e, LinkLost)]
    assert lost == ([] if act == "disconnect" else ["D1"])
    torch.cuda.synchronize(pair.source.device)  # nothing is left running that waits for the peer
