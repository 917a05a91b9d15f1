"""What `shm` promises beyond the contract that all transports keep: who may read what, and what is left behind."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.engine.kv_cache import KVCache
from baton.errors import ConfigError
from baton.host_memory import HostMemory, map_read_only
from baton.layout import KVLayout
from baton.wire import Count
from kv_transfer import shared_pool, shm_link
from kv_transfer.base import LinkLost, Received, Sent
from kv_transfer.pull_messages import EXPORT, FINISHED, Export, Finished
from kv_transfer.shared_pool import (
    EPOCHS,
    LENDINGS,
    MAX_SHARED_BLOCKS,
    BorrowedPool,
    Fetch,
    LentPool,
    OwnMemory,
    block_of,
    epoch_of,
)
from kv_transfer.shm_link import ToTarget
from kv_transfer.shm_transport import ShmTransport
from tests.fakes_transfer import FakePool, drive, transfer_of, watched

BLOCK = 8 << 10


class Pair:
    """P ships to D."""

    def __init__(self, num_blocks: int = 8):
        self.source, self.target = FakePool(num_blocks, BLOCK), FakePool(num_blocks, BLOCK)
        self.source.fill(1)
        self.p: Any = self.open(self.source)
        self.d: Any = self.open(self.target)
        self.p.connect("D1", self.d.address)

    def open(self, pool: FakePool) -> Any:
        transport = watched(ShmTransport())
        transport.register(pool, incarnation="P1")
        return transport

    def move(self, number: int, *blocks: int) -> None:
        """Each block to the one of the same id."""
        pairs = list(enumerate(blocks))
        self.d.receive("P1", transfer_of(number), self.p.ship("D1", transfer_of(number), pairs), pairs)

    def sent(self, number: int) -> list[int]:
        return [i for e in self.p.seen if isinstance(e, Sent) and e.transfer == transfer_of(number) for i in e.indices]

    def received(self, number: int) -> list[int]:
        events = [e for e in self.d.seen if isinstance(e, Received) and e.transfer == transfer_of(number)]
        return [i for e in events for i in e.indices]

    def wait(self, number: int, count: int) -> None:
        drive([self.p, self.d], lambda: len(self.sent(number)) == len(self.received(number)) == count)

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def maps() -> list[str]:
    """Mappings of shared KV memory in this process."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:baton-kv" in line]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- references -------------------------------------------------------------------------------------


def test_a_ref_reads_nothing_after_its_block_was_given_back() -> None:
    pool, target = FakePool(4, 64), FakePool(4, 64)
    pool.fill(1)
    lent = LentPool(pool)
    borrowed = BorrowedPool(lent.fds, 4, 64)
    first, second = lent.lend(2), lent.lend(2)
    lent.give_back(2)
    assert borrowed.copy([Fetch(0, first, 1)], OwnMemory(target.host_memory.array, None)) == [0], (
        "another transfer has it still"
    )
    np.testing.assert_array_equal(target.block(1), pool.block(2))
    lent.give_back(2)
    target.memory[:] = 0
    assert borrowed.copy([Fetch(0, first, 1), Fetch(1, second, 2)], OwnMemory(target.host_memory.array, None)) == []
    assert not target.memory.any()
    assert lent.lend(2) != first
    assert lent.num_lent() == 1


def test_no_two_lendings_have_the_same_ref() -> None:
    """Else a target takes a block that was lent anew over a new link for one that it has fetched, and says nothing."""
    lent = LentPool(FakePool(4, 64))
    elsewhere = lent.lend(2)
    refs = {elsewhere}
    for count in range(2, 100):
        refs.add(lent.lend(2))
        lent.give_back(2)
        assert len(refs) == count, "its epoch has not moved, as another transfer lends it still"
    assert {block_of(ref) for ref in refs} == {2}
    assert {epoch_of(ref) for ref in refs} == {0}


def test_refs_fit_a_message_however_often_blocks_were_lent() -> None:
    pool, target = FakePool(2, 64), FakePool(2, 64)
    pool.fill(1)
    lent = LentPool(pool)
    lent.table.array.view(np.uint64)[1] = EPOCHS - 1
    for _ in range(LENDINGS - 1):
        lent.lend(0)
        ref = lent.lend(1)
    assert ref == msgspec.convert(ref, Count) == (1 << 63) - MAX_SHARED_BLOCKS + 1
    assert (block_of(ref), epoch_of(ref)) == (1, EPOCHS - 1)
    memory = OwnMemory(target.host_memory.array, None)
    assert BorrowedPool(lent.fds, 2, 64).copy([Fetch(3, ref, 0), Fetch(4, lent.lend(1), 1)], memory) == [3, 4]
    np.testing.assert_array_equal(target.memory, pool.memory[[1, 1]])


NEXT_EPOCH = MAX_SHARED_BLOCKS * LENDINGS


@pytest.mark.parametrize("ref", [4, 7, NEXT_EPOCH, 2 * NEXT_EPOCH | 2, 1 << 62, (1 << 63) - 1])
def test_made_up_refs_read_nothing(ref: int) -> None:
    lent, target = LentPool(FakePool(4, 64)), FakePool(4, 64)
    target.fill(2)
    before = target.memory.copy()
    lent.lend(0)
    assert BorrowedPool(lent.fds, 4, 64).copy([Fetch(0, ref, 1)], OwnMemory(target.host_memory.array, None)) == []
    np.testing.assert_array_equal(target.memory, before)


def test_a_copy_during_which_the_block_was_given_back_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner need not wait for a reader that stalls in the middle of a copy."""
    pool, target = FakePool(4, 64), FakePool(4, 64)
    lent = LentPool(pool)
    fetches = [Fetch(i, lent.lend(i), i) for i in range(4)]

    def stalled(to: Any, source: Any) -> None:
        lent.give_back(1)
        to[:] = source

    monkeypatch.setattr(shared_pool, "copy_bytes", stalled)
    assert BorrowedPool(lent.fds, 4, 64).copy(fetches, OwnMemory(target.host_memory.array, None)) == [0, 2, 3]


def test_neighbours_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, target = FakePool(8, 64), FakePool(8, 64)
    pool.fill(1)
    lent = LentPool(pool)
    sizes: list[int] = []
    copy = shared_pool.copy_bytes

    def counted(to: Any, source: Any) -> None:
        sizes.append(source.nbytes)
        copy(to, source)

    monkeypatch.setattr(shared_pool, "copy_bytes", counted)
    pairs = [(0, 4), (1, 5), (2, 6), (5, 7), (3, 0), (4, 1), (7, 3)]
    fetches = [Fetch(i, lent.lend(source), block) for i, (source, block) in enumerate(pairs)]
    BorrowedPool(lent.fds, 8, 64).copy(fetches, OwnMemory(target.host_memory.array, None))
    assert sizes == [3 * 64, 64, 2 * 64, 64]
    for source, block in pairs:
        np.testing.assert_array_equal(pool.block(source), target.block(block))


def test_the_sources_own_block_ids_are_checked(pair: Pair) -> None:
    with pytest.raises(IndexError, match="block 8 is not in a pool of 8"):
        pair.p.ship("D1", transfer_of(1), [(0, 8)])


def test_refs_that_are_void_are_dropped_and_counted_and_end_no_lending(pair: Pair) -> None:
    pair.move(1, 0)
    pair.wait(1, 1)
    refs = pair.p.ship("D1", transfer_of(2), [(0, 1), (1, 2), (2, 3)])
    before = pair.target.memory.copy()
    pair.d.receive("P1", transfer_of(2), (refs[0] + NEXT_EPOCH, 8, refs[2]), [(0, 4), (1, 5), (2, 6)])
    drive([pair.p, pair.d], lambda: pair.sent(2) == [2] and pair.d.stats.num_dropped == 2)
    assert pair.received(2) == [2]
    pair.p.cancel(transfer_of(2))
    drive([pair.p], lambda: sorted(pair.sent(2)) == [0, 1, 2])
    np.testing.assert_array_equal(pair.target.memory[[4, 5]], before[[4, 5]])


def test_what_was_cancelled_disconnected_or_lost_is_void_for_a_data_that_comes_late(pair: Pair) -> None:
    """I4: the source reuses the blocks at once, whatever the target still knows of them."""
    pair.move(99, 0)
    pair.wait(99, 1)
    for number, end in enumerate((pair.p.cancel, lambda transfer: pair.p.disconnect("D1")), 1):
        refs = pair.p.ship("D1", transfer_of(number), [(0, 1)])
        end(transfer_of(number))
        drive([pair.p], lambda number=number: pair.sent(number) == [0])  # type: ignore[misc]
        pair.source.block(1)[:] = number  # somebody else's
        pair.d.receive("P1", transfer_of(number), refs, [(0, 5)])
        pair.p.connect("D1", pair.d.address)
        pair.move(10 + number, 2)
        pair.wait(10 + number, 1)
        assert pair.received(number) == []
        assert not pair.target.block(5).any()


def test_a_repeated_data_after_the_end_writes_nothing(pair: Pair) -> None:
    refs = pair.p.ship("D1", transfer_of(1), [(0, 1)])
    pair.d.receive("P1", transfer_of(1), refs, [(0, 1)])
    pair.wait(1, 1)
    pair.target.block(1)[:] = 0
    pair.d.receive("P1", transfer_of(1), refs, [(0, 1)])
    drive([pair.p, pair.d], lambda: pair.d.stats.num_dropped == 1)
    assert not pair.target.block(1).any()


# --- memory -----------------------------------------------------------------------------------------


def test_shared_memory_cannot_be_cut_off_or_mapped_writable_by_others() -> None:
    memory = HostMemory(10_000, shared=True)
    assert memory.fd is not None
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 100)
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, 10_000)
    view = map_read_only(memory.fd, 10_000)
    memory.array[5] = 7
    assert view[5] == 7
    with pytest.raises(ValueError, match="read-only"):
        view[5] = 8
    with pytest.raises(ValueError, match="not 20000 bytes of sealed memory"):
        map_read_only(memory.fd, 20_000)


def test_memory_that_could_be_cut_off_is_not_mapped(tmp_path: Path) -> None:
    (tmp_path / "pool").write_bytes(bytes(100))
    with (tmp_path / "pool").open("rb") as file, pytest.raises(ValueError, match="sealed"):
        map_read_only(file.fileno(), 100)


def test_a_shared_kv_cache_takes_memory_as_it_is_used() -> None:
    layout = KVLayout(2, 2, 16, 64, "float32")
    cache = KVCache(layout, 4096, shared=True)
    fd = cache.host_memory.fd
    assert fd is not None
    assert os.fstat(fd).st_size == 4096 * layout.block_bytes
    assert os.fstat(fd).st_blocks == 0
    cache.block(7)[:] = 1
    assert 0 < os.fstat(fd).st_blocks * 512 <= 4 << 20
    assert map_read_only(fd, 4096 * layout.block_bytes)[7 * layout.block_bytes] == 1
    before = open_files()
    del cache
    assert open_files() < before, "the file goes with the pool"


def test_a_pool_that_nobody_can_map_is_refused() -> None:
    layout = KVLayout(1, 1, 4, 8, "float32")
    with contextlib.closing(ShmTransport()) as transport, pytest.raises(ConfigError, match="in shared memory"):
        transport.register(KVCache(layout, 2))
    with pytest.raises(ConfigError, match="on the CPU"):
        KVCache(layout, 2, "cuda", shared=True)
    with pytest.raises(ConfigError, match="cannot be allocated"):
        KVCache(layout, 1 << 50, shared=True)


def test_nothing_is_left_of_a_link_that_has_ended(pair: Pair) -> None:
    pair.move(1, 0, 1)
    pair.wait(1, 2)
    with_link = len(maps())
    pair.p.close()
    drive([pair.d], lambda: any(isinstance(e, LinkLost) for e in pair.d.seen))
    assert len(maps()) < with_link
    del pair.d._sources[:]
    assert not [line for line in Path("/proc/net/unix").read_text().splitlines() if pair.p.address[6:] in line]


def test_memory_and_files_stay_flat() -> None:
    with contextlib.closing(Pair(num_blocks=64)) as pair:

        def transfers(first: int, count: int) -> tuple[int, int, int]:
            for number in range(first, first + count):
                pair.move(number, *range(number % 8 * 8, number % 8 * 8 + 8))
                if number % 7 == 0:
                    pair.d.cancel(transfer_of(number))
                if number % 11 == 0:
                    pair.p.cancel(transfer_of(number))
                drive([pair.p, pair.d], lambda number=number: len(pair.sent(number)) == 8)  # type: ignore[misc]
                pair.p.seen.clear()
                pair.d.seen.clear()
            return len(maps()), open_files(), rss_kib()

        before = transfers(1, 200)
        after = transfers(1000, 2000)
        assert after[:2] == before[:2]
        assert after[2] - before[2] < 2048
        assert pair.p._lent_pool.num_lent() == 0
        assert not (pair.p._lent or pair.d._wanted or pair.p._news or pair.d._news)


def rss_kib() -> int:
    return next(int(x.split()[1]) for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))


# --- links ------------------------------------------------------------------------------------------


def test_a_source_that_does_not_read_hears_of_everything_later(pair: Pair) -> None:
    count = 1500
    for number in range(count):
        pair.move(number, number % 8)
        pair.d.completions()
    assert pair.d.next_deadline(5.0) is not None
    drive([pair.p, pair.d], lambda: sum(isinstance(e, Sent) for e in pair.p.seen) == count)
    drive([pair.p, pair.d], lambda: pair.d.next_deadline(0.0) is None)
    assert pair.p._lent_pool.num_lent() == 0


def export_files(pool: Any) -> tuple[int, int]:
    return LentPool(pool).fds


@pytest.mark.parametrize("kind", ["garbage", "no files", "other blocks", "short", "unsealed", "twice", "long"])
def test_malformed_exports_close_their_link_only(pair: Pair, kind: str, tmp_path: Path) -> None:
    files = open_files()
    lent = LentPool(FakePool(2, BLOCK))
    export, fds = EXPORT.encode(Export("P9", 2, BLOCK)), list(lent.fds)
    link = ToTarget(pair.d.address.removeprefix("shm://"))
    with (tmp_path / "pool").open("w+b") as unsealed:
        unsealed.truncate(2 * BLOCK)
        match kind:
            case "garbage":
                export = b"\xc1"
            case "no files":
                fds = []
            case "other blocks":
                export = EXPORT.encode(Export("P9", 2, BLOCK // 2))
            case "short":
                export = EXPORT.encode(Export("P9", 3, BLOCK))
            case "unsealed":
                fds[0] = unsealed.fileno()
            case "long":
                export = bytes(100_000)
        for _ in range(2 if kind == "twice" else 1):
            socket.send_fds(link.sock, [export], fds)
        drive([pair.d], lambda: pair.d.stats.num_malformed == 1)
        assert link.receive() == b""
    link.sock.close()
    pair.move(1, 3)
    pair.wait(1, 1)
    pair.p.disconnect("D1")
    drive([pair.d], lambda: not pair.d._sources)
    del lent
    assert open_files() <= files, "every file that came along is closed"


def test_malformed_and_foreign_ends_of_reading_let_nothing_go(pair: Pair) -> None:
    pair.move(1, 0)
    pair.wait(1, 1)
    (ref,) = pair.p.ship("D1", transfer_of(2), [(0, 1)])
    (link,) = pair.d._sources
    for message in (
        b"\xc1",
        FINISHED.encode(Finished(transfer_of(3), (ref,))),
        FINISHED.encode(Finished(transfer_of(2), (ref + 1,))),
    ):
        link.sock.send(message)
    drive([pair.p], lambda: pair.p.stats.num_malformed == 1)
    pair.p.completions()
    assert pair.sent(2) == []
    link.sock.send(FINISHED.encode(Finished(transfer_of(2), (ref, ref))))
    drive([pair.p], lambda: pair.sent(2) == [0])


def test_the_end_of_a_former_lending_does_not_end_the_present_one(pair: Pair) -> None:
    pair.move(1, 0)
    pair.wait(1, 1)
    (void,) = pair.p.ship("D1", transfer_of(2), [(0, 1)])
    pair.p.disconnect("D1")  # cut, and made again: what was lent is void, and lent anew
    pair.p.connect("D1", pair.d.address)
    assert pair.sent(2) == []
    drive([pair.p], lambda: pair.sent(2) == [0])
    (ref,) = pair.p.ship("D1", transfer_of(2), [(0, 1)])
    pair.d.receive("P1", transfer_of(2), (void,), [(0, 4)])
    drive([pair.p, pair.d], lambda: pair.d.stats.num_dropped == 1)
    pair.d.receive("P1", transfer_of(2), (ref,), [(0, 4)])
    drive([pair.p, pair.d], lambda: pair.sent(2) == [0, 0])
    np.testing.assert_array_equal(pair.d._pool.block(4), pair.p._pool.block(1))


def test_another_users_process_is_not_linked(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid()
    monkeypatch.setattr(shm_link.os, "getuid", lambda: user + 1)
    pair.p.connect("D2", pair.d.address)
    assert "D2" not in pair.p._targets
    pair.p.ship("D1", transfer_of(1), [(0, 0)])  # connected before; it is hung up on
    drive([pair.p, pair.d], lambda: pair.sent(1) == [0])
    assert not pair.d._wanted and not pair.d._sources


def test_a_platform_without_memory_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.shm_transport.can_share", lambda: False)
    with pytest.raises(ConfigError, match="needs Linux"):
        ShmTransport()
