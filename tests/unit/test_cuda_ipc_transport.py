"""`cuda-ipc` where there is no GPU: memory of the host stands in for a GPU's, and a small library for CUDA's driver."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from baton.config import parse_config
from baton.errors import ConfigError
from baton.ports import BlocksReceived, CancelTransfer, ConnectPeer, ReceiveBlocks
from kv_transfer import cuda_ipc_transport
from kv_transfer.base import DeviceMemory, LinkLost
from kv_transfer.checksum import device_checksum
from kv_transfer.cuda_driver import CudaDriver
from kv_transfer.cuda_ipc_transport import CudaIpcTransport, CudaMapper
from kv_transfer.device_pool import is_on_device
from kv_transfer.links import ZmqPeerLinks
from kv_transfer.registry import open_transport
from tests.fakes_device import DeviceStandIn, MapperStandIn
from tests.fakes_transfer import FakePool, drive, ship_and_hash, transfer_of, watched, worker_info

BLOCK = 8 << 10


def linked(*mappers: Any) -> tuple[Any, Any, FakePool, FakePool]:
    pools = [FakePool(8, BLOCK), FakePool(8, BLOCK)]
    pools[0].fill(1)
    ends: list[Any] = [watched(CudaIpcTransport(mapper)) for mapper in mappers]
    for end, pool in zip(ends, pools, strict=True):
        end.register(DeviceStandIn(pool), incarnation="P1")
    ends[0].connect("D1", ends[1].address)
    return ends[0], ends[1], pools[0], pools[1]


def test_the_source_waits_for_the_last_step_before_it_lends() -> None:
    p, d, source, _ = linked(MapperStandIn, MapperStandIn)
    with contextlib.closing(p), contextlib.closing(d):
        calls: list[str] = []

        def synchronize() -> None:
            assert p._lent_pool.num_lent() == 0
            source.block(1)[:] = 7  # what the step writes last
            calls.append("synchronize")

        p._pool.written = SimpleNamespace(synchronize=synchronize)
        d.receive("P1", transfer_of(1), p.ship("D1", transfer_of(1), [(0, 1)]), [(0, 2)])
        drive([p, d], lambda: len(d.seen) == 1)
        assert calls == ["synchronize"]
        assert (d._pool.block_tensor(2) == 7).all()


def test_neighbours_are_one_copy_and_all_are_complete_before_they_are_reported() -> None:
    copies: list[list[int]] = []

    class Counting(MapperStandIn):
        def wait(self) -> None:
            copies.append([size for _, _, size in self.queued])
            super().wait()

    p, d, source, target = linked(MapperStandIn, Counting)
    with contextlib.closing(p), contextlib.closing(d):
        pairs = [(0, 4), (1, 5), (2, 0)]
        d.receive("P1", transfer_of(1), p.ship("D1", transfer_of(1), pairs), pairs)
        drive([p, d], lambda: len(d.seen) == 1)
    assert copies == [[2 * BLOCK, BLOCK]]
    np.testing.assert_array_equal(target.memory[[4, 5, 0]], source.memory[[4, 5, 0]])


def test_a_copy_that_fails_ends_the_link_after_what_was_queued_is_complete() -> None:
    class Failing(MapperStandIn):
        def copy(self, target: int, source: int, num_bytes: int) -> None:
            if self.queued:
                raise OSError("cuMemcpyAsync: unspecified launch failure (719)")
            super().copy(target, source, num_bytes)

    p, d, *_ = linked(MapperStandIn, Failing)
    with contextlib.closing(p), contextlib.closing(d):
        pairs = [(0, 4), (1, 1)]
        d.receive("P1", transfer_of(1), p.ship("D1", transfer_of(1), pairs), pairs)
        drive([p, d], lambda: len(p.seen) == 2 and len(d.seen) == 1)
        assert isinstance(d.seen[0], LinkLost)
        assert not d._mapper.queued
        assert not d._mapper.mapped
        assert p._lent_pool.num_lent() == 0


def test_a_pool_is_unmapped_with_its_link() -> None:
    p, d, *_ = linked(MapperStandIn, MapperStandIn)
    with contextlib.closing(d):
        d.receive("P1", transfer_of(1), p.ship("D1", transfer_of(1), [(0, 0)]), [(0, 0)])
        drive([p, d], lambda: len(d.seen) == 1)
        assert len(d._mapper.mapped) == 1
        p.close()
        drive([d], lambda: len(d.seen) == 2)
        assert not d._mapper.mapped


def test_pools_that_are_not_on_a_gpu_are_refused() -> None:
    with contextlib.closing(CudaIpcTransport(MapperStandIn)) as transport, pytest.raises(ConfigError, match="on GPUs"):
        transport.register(FakePool(2, BLOCK))


def test_memory_that_cuda_does_not_share_is_refused() -> None:
    class Refusing(MapperStandIn):
        def export(self) -> bytes:
            raise OSError("cuIpcGetMemHandle: invalid argument (1)")

    with (
        contextlib.closing(CudaIpcTransport(Refusing)) as transport,
        pytest.raises(ConfigError, match=r"invalid argument.*expandable_segments"),
    ):
        transport.register(DeviceStandIn(FakePool(2, BLOCK)))


def test_a_machine_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc_transport.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="a GPU that torch sees"):
        open_transport("cuda-ipc")


def test_the_configuration_needs_gpus() -> None:
    tree: dict[str, Any] = {"transfer": {"transport": "cuda-ipc"}}
    with pytest.raises(ConfigError, match=r"pools\.prefill\.device: must be cuda with transfer\.transport: cuda-ipc"):
        parse_config(tree)
    on_gpus = {"prefill": {"device": "cuda"}, "decode": {"gpus": 1}}
    assert parse_config(tree | {"pools": on_gpus}).transfer.transport == "cuda-ipc"


# --- the driver -------------------------------------------------------------------------------------

STAND_IN = r"""
#include <stdint.h>
#include <stddef.h>
#include <string.h>
/* One allocation a process, which `give` names; a handle holds its address, and what is mapped lies `SHIFT` behind. */
typedef struct { unsigned char reserved[64]; } Handle;
static uint64_t allocation, size; static void *current; static int open_count;
#define ENTERED if (current != (void *)0x77) return 201
void give(uint64_t a, uint64_t n) { allocation = a; size = n; current = 0; }
int opened(void) { return open_count; }
int cuInit(unsigned flags) { return flags; }
int cuGetErrorString(int e, const char **t) { *t = e == 201 ? "invalid device context" : "invalid argument"; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return ordinal > 3; }
int cuDevicePrimaryCtxRetain(void **c, int device) { *c = device == 42 ? (void *)0x77 : 0; return 0; }
int cuCtxSetCurrent(void *c) { current = c; return 0; }
int cuMemGetAddressRange_v2(uint64_t *base, size_t *n, uint64_t a) {
    ENTERED; if (a < allocation || a >= allocation + size) return 1; *base = allocation; *n = size; return 0; }
int cuIpcGetMemHandle(Handle *h, uint64_t base) {
    ENTERED; if (base != allocation) return 1; memset(h, 0xA5, 64); memcpy(h->reserved + 56, &base, 8); return 0; }
int cuIpcOpenMemHandle_v2(uint64_t *base, Handle h, unsigned flags) {
    ENTERED; if (flags != 1 || h.reserved[0] != 0xA5) return 1;
    memcpy(base, h.reserved + 56, 8); ++open_count; return 0; }
int cuIpcCloseMemHandle(uint64_t base) { ENTERED; if (base != allocation) return 1; --open_count; return 0; }
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t n, void *stream) {
    ENTERED; if (stream) return 1; memcpy((void *)to, (void *)from, n); return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler, which makes the stand-in for CUDA's driver")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(STAND_IN)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "cuda.so", folder / "cuda.c"], check=True)
    return str(folder / "cuda.so")


def test_the_drivers_functions_are_called_as_they_are_declared(library: str) -> None:
    memory = np.arange(4096, dtype=np.uint8)
    start = memory.ctypes.data
    stand_in = ctypes.CDLL(library)
    stand_in.give.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    driver = CudaDriver(2, library)
    stand_in.give(start, 4096)  # and no context is current: each call sets it
    handle, offset = driver.export(start + 100)
    assert (len(handle), offset) == (64, 100)
    assert driver.open(handle) == driver.open(handle) == start
    assert stand_in.opened() == 2
    target = np.zeros(16, dtype=np.uint8)
    driver.copy(target.ctypes.data, start + 100, 16, 0)
    np.testing.assert_array_equal(target, memory[100:116])
    driver.close(start)
    driver.close(start)
    assert stand_in.opened() == 0
    with pytest.raises(OSError, match=r"cuMemGetAddressRange_v2: invalid argument \(1\)"):
        driver.export(start + 4096)
    with pytest.raises(OSError, match="a handle of 3 bytes"):
        driver.open(b"abc")


def test_no_driver_and_no_device_are_told(library: str) -> None:
    with pytest.raises(ConfigError, match="needs CUDA"):
        CudaDriver(0, "libcuda-that-nobody-has.so")
    with pytest.raises(ConfigError, match="needs CUDA: cuDeviceGet"):
        CudaDriver(9, library)


def test_a_pool_by_the_driver(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process would map it, and as this one, where CUDA opens no handle of its own."""
    stand_in = ctypes.CDLL(library)
    stand_in.give.argtypes = [ctypes.c_uint64, ctypes.c_uint64]

    def mapper(pool: DeviceMemory) -> CudaMapper:
        return CudaMapper(pool, CudaDriver(2, library))

    for own in (True, False):
        pool = FakePool(8, BLOCK)
        stand_in.give(pool.memory.ctypes.data, pool.memory.nbytes)
        exported = CudaMapper(DeviceStandIn(pool), CudaDriver(2, library)).export()
        if not own:
            monkeypatch.setattr(cuda_ipc_transport, "_PROCESS", b"another")
        reader = mapper(DeviceStandIn(FakePool(8, BLOCK)))
        address = reader.open(exported)
        assert address == pool.memory.ctypes.data
        assert stand_in.opened() == (not own)
        pool.block(3)[:] = 5
        reader.copy(reader._address + BLOCK, address + 3 * BLOCK, BLOCK)
        reader.wait()
        reader.close(address)
        assert stand_in.opened() == 0
        assert not reader._mapped


# --- checksums --------------------------------------------------------------------------------------


def reference(data: bytes) -> int:
    """splitmix64 over words and positions, by the book."""
    mask = (1 << 64) - 1

    def mix(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask
        return word ^ (word >> 31)

    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    total = sum(mix((word + i * 0x9E3779B97F4A7C15) & mask) for i, word in enumerate(words, 1)) & mask
    return mix(total ^ len(data))


@pytest.mark.parametrize("size", [1, 7, 8, 24, 100, 4096])
def test_device_checksums_are_the_ones_defined(size: int) -> None:
    data = torch.randint(0, 256, (3, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    for block in data:
        assert device_checksum(block) == reference(block.numpy().tobytes())
        assert 0 <= device_checksum(block) < 1 << 64


def test_device_checksums_see_what_happens_to_blocks() -> None:
    block = torch.randn(64, 64)
    seen = {device_checksum(block)}

    def differs(other: torch.Tensor) -> None:
        checksum = device_checksum(other)
        assert checksum not in seen
        seen.add(checksum)

    differs(block.roll(2))
    differs(block[torch.randperm(64)])
    swapped = block.clone()
    swapped.view(-1)[[0, 1, 2, 3]] = block.view(-1)[[2, 3, 0, 1]]  # two words
    differs(swapped)
    signs = block.clone()
    signs.view(-1)[[1, 3]] *= -1  # the top bits of two words, which a sum of odd multiples would not see
    differs(signs)
    for bit in range(0, 64, 7):
        flipped = block.clone().view(torch.int64)
        flipped.view(-1)[5] ^= 1 << bit
        differs(flipped)
    differs(torch.zeros(8))
    differs(torch.zeros(10))


def test_links_hash_a_gpus_blocks_where_they_lie() -> None:
    pools = [FakePool(4, BLOCK), FakePool(4, BLOCK)]
    pools[0].fill(3)
    assert not is_on_device(pools[0])
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        ends = [
            ZmqPeerLinks(
                incarnation=name, pool=DeviceStandIn(pool), transport=CudaIpcTransport(MapperStandIn), context=context
            )
            for name, pool in zip(("P1", "D1"), pools, strict=True)
        ]
        for end in ends:
            stack.callback(end.close)
        p, d = ends
        info = worker_info("D1", control_address=d.control_address, data_address=d.data_address)
        p.execute(ConnectPeer(info))
        shipped, hashed = ship_and_hash(p, "D1", transfer_of(1), ((0, 2), (1, 3)))
        assert hashed.checksums == {0: device_checksum(torch.from_numpy(pools[0].memory[2])), 1: hashed.checksums[1]}
        d.execute(ReceiveBlocks("P1", transfer_of(1), shipped.refs, ((0, 0), (1, 1))))
        (received,) = d.events()
        assert received == BlocksReceived(transfer_of(1), hashed.checksums)
        d.execute(CancelTransfer(transfer_of(1)))
    np.testing.assert_array_equal(pools[1].memory[:2], pools[0].memory[2:])
