"""The interface of a KV transport: moves blocks of one worker's pool into another worker's pool.

A transport knows pools, peers and block ids. It must not know requests, leases or checksums: the
session (`kv_transfer.session`) decides what moves and when memory may be reused.

Rules every transport keeps, and `tests/unit/test_transport_contract.py` checks:

* Only the receiving side writes its pool. After `cancel(transfer)` on the receiving side returns,
  nothing is written for that transfer any more.
* A source block may be read until its `Sent` comes out of `completions()`, however the transfer ends. What a peer
  reads of it later does not count as received.
* Blocks that are shipped over a link which cannot be made, or are queued on one that fails before it is up, are not
  `Sent` without a word: its `LinkLost` comes before. Only a transport that tries again by itself keeps them.
* A link is lost once. None is that was never up and over which nothing was shipped, nor one that `disconnect` has torn
  down, even if it was lost before and that was not told yet.
* No order is promised between blocks, transfers, or data and control messages.
* All methods are called from one thread (the worker's I/O thread), except where a class says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from baton.protocol import TransferId
from kv_transfer.expected import TransportStats

if TYPE_CHECKING:
    import torch


MAX_BYTES_PER_CALL = 32 << 20
"""That `completions` writes in one call, one message or block more at most: control messages must get their turn."""


class BlockMemory(Protocol):
    """A KV pool as bytes: what transports see of `baton.engine.kv_cache.KVCache`."""

    num_blocks: int
    block_bytes: int

    def block(self, block_id: int) -> npt.NDArray[np.uint8]:
        """The block's bytes, writable, without a copy; shape `[block_bytes]`.

        Ids from `num_blocks` on may be buffers of any size (`kv_transfer.wire_blocks`), for transports without
        `fixed_blocks`.
        """
        ...


@runtime_checkable
class StagedMemory(BlockMemory, Protocol):
    """A pool whose memory transports cannot reach: `block` shows host copies, which `baton.engine.staging` moves.

    The links call these around what they ask of a transport; a transport knows `BlockMemory` only.
    """

    def fetch(self, block_ids: Sequence[int]) -> list[Any]:
        """Copy blocks to the host, complete on return; `block` shows these copies until `close_views`.

        Returns one handle for each, whose copy lives until it is given to `release`.
        """
        ...

    def release(self, copies: Iterable[Any]) -> None:
        """Nothing reads these copies any more."""
        ...

    def store(self, block_ids: Sequence[int]) -> None:
        """Copy what a transport has written to these blocks' `block` into the pool, complete on return."""
        ...

    def writing(self) -> AbstractContextManager[torch.Tensor]:
        """The pool itself, `[blocks, layers, 2, kv_heads, block_size, head_dim]`, to be written in the context.

        Behind the last step that ended; complete at the end of the context.
        """
        ...

    def close_views(self) -> None:
        """Arrays that `block` gave are used no more, but for reading fetched copies. What was not stored is dropped."""
        ...


@runtime_checkable
class DeviceMemory(BlockMemory, Protocol):
    """A pool on a GPU as it is, for transports that reach it there; `block` has nothing to show."""

    device: torch.device
    written: torch.cuda.Event | None
    """Reached when all that the last step wrote is in the pool: who reads blocks on another stream waits for it."""

    def block_tensor(self, block_id: int) -> torch.Tensor:
        """The block's bytes on its device, without a copy; shape `[block_bytes]`."""
        ...


Write = Callable[[int, npt.NDArray[np.uint8]], None]
"""Copies the bytes of a block, wherever they are, into the block of this id; may look at them on the way."""


def nowhere(block_id: int, source: npt.NDArray[np.uint8]) -> None:
    """The `Write` of a transport without a pool."""
    raise AssertionError("receive before register")


class Sent(msgspec.Struct, frozen=True):
    """Nothing reads these source blocks any more. Says nothing about arrival."""

    transfer: TransferId
    indices: tuple[int, ...]


class Received(msgspec.Struct, frozen=True):
    """These blocks were written into the pool, completely."""

    transfer: TransferId
    indices: tuple[int, ...]


class LinkLost(msgspec.Struct, frozen=True):
    """The data link to `peer`, or from it, is gone; transfers on it will not complete."""

    peer: str
    reason: str
    incoming: bool = False
    """True: `peer` shipped over it."""


Completion = Sent | Received | LinkLost


class KVTransport(Protocol):
    """One worker's end of its data links to all peers."""

    pulls: bool
    """True: the receiver fetches, by the refs `ship` returned, sent to it in a `Data` message."""
    address: str
    """URL under which peers reach this end, with the real host and port."""
    reaches_gpu: bool
    """True: a pool on a GPU (`DeviceMemory`) may be registered as it is; else it is staged through host memory."""
    fixed_blocks: bool
    """True: moves blocks of the registered pool only, into blocks of the same size; no other format can travel."""

    @property
    def reach(self) -> str:
        """Two ends can be linked if these are equal: the kind of transport and, if it stays in a machine, which one.

        Known once a pool is registered.
        """
        ...

    @property
    def stats(self) -> TransportStats: ...

    def register(self, pool: BlockMemory, write: Write | None = None, *, incarnation: str = "") -> None:
        """Use this pool for everything that follows. Called once, before `connect`, `ship` and `receive`.

        `write`: how arrived bytes get into a block of host memory; None: they are copied.
        `incarnation`: this worker's, by which peers know it; empty at an end that only receives.
        """
        ...

    def connect(self, peer: str, address: str) -> None:
        """Make the link to `peer` (its worker's incarnation), or replace it after a loss."""
        ...

    def ship(self, peer: str, transfer: TransferId, blocks: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Send blocks, each `(index in the transfer, local block id)`, without blocking or copying.

        Returns the refs for `Data` (empty unless `pulls`). `Sent` follows for each block, in any case.
        """
        ...

    def receive(self, peer: str, transfer: TransferId, refs: Sequence[int], blocks: Sequence[tuple[int, int]]) -> None:
        """Let blocks of this transfer be written: each `(index in the transfer, local block id)`.

        Data that comes for a transfer or an index not announced here is dropped and counted.
        """
        ...

    def completions(self) -> list[Completion]:
        """What has happened since the last call; never blocks. Reads arrived data into the pool.

        About `MAX_BYTES_PER_CALL` at once; what is left keeps `pollables` readable.
        """
        ...

    def cancel(self, transfer: TransferId) -> None:
        """Forget the transfer on this side, at once. Its shipped blocks still get their `Sent`."""
        ...

    def disconnect(self, peer: str) -> None:
        """Tear the link to `peer` down, dropping what was not sent; the `Sent` of dropped blocks follows."""
        ...

    def close(self) -> None:
        """Tear everything down and release sockets and memory."""
        ...

    def pollables(self) -> Sequence[Any]:
        """ZeroMQ sockets (or file descriptors) that become readable when `completions` has news."""
        ...

    def next_deadline(self, now: float) -> float | None:
        """When `completions` must be called even if nothing became readable (an unfinished `Sent`)."""
        ...
