"""How a worker meets the layers above it: the ports it serves, and the actions it hands to its driver.

`baton` lies below `kv_transfer`, so the worker knows its send and receive port only by these
protocols. Ports are pure: events and `now` in, actions out. They call the engine core directly,
which is pure too; all of a worker's pure state changes under one lock, held for microseconds and
never while a step executes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from baton.audit import Holding
from baton.engine.request import ChunkDone, Ended, PromptDone
from baton.plain_steps import PlainSteps
from baton.protocol import (
    AttemptFailed,
    HandoffDone,
    HandoffRefused,
    Heartbeat,
    Replace,
    RequestKey,
    Submit,
    Tokens,
    TransferId,
    WorkerInfo,
)


class ToRouter(msgspec.Struct, frozen=True):
    """Send this to the router."""

    message: Tokens | PlainSteps | HandoffRefused | HandoffDone | AttemptFailed | Heartbeat
    """PlainSteps: only of drivers that ask for it (`WorkerCore.finish_step`)."""


class ToPeer(msgspec.Struct, frozen=True):
    """Send this session message (`kv_transfer.messages`) to the worker with this incarnation."""

    peer: str
    message: Any


class ShipBlocks(msgspec.Struct, frozen=True):
    """Ship these blocks, each `(index, local block id)`; then call `SendPort.on_shipped`."""

    peer: str
    transfer: TransferId
    blocks: tuple[tuple[int, int], ...]


class HashBlocks(msgspec.Struct, frozen=True):
    """Hash these blocks, which were shipped: the wire need not wait for it. Then call `SendPort.on_hashed`."""

    transfer: TransferId
    blocks: tuple[tuple[int, int], ...]
    lives: tuple[int, ...]
    """Of each block: `BlockPool.lives`. A block of the same life has the same content, so it is hashed once."""


class ReceiveBlocks(msgspec.Struct, frozen=True):
    """Tell the transport to write these blocks, each `(index, local block id)`."""

    peer: str
    transfer: TransferId
    refs: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    landing: Any = None
    """`kv_transfer.wire_format.Landing`, of blocks in another format than the pool's: where they go once they are here.
    `blocks` then has no local ids."""


class CancelTransfer(msgspec.Struct, frozen=True):
    """Tell the transport to forget this transfer now."""

    transfer: TransferId


class DropLink(msgspec.Struct, frozen=True):
    """Tear the data link to this peer down: it was lost, or a lease ran out while frames were unsent."""

    peer: str
    forget: bool = False
    """The peer is lost: nothing will be said to it either."""


class ConnectPeer(msgspec.Struct, frozen=True):
    """Connect control and data to this worker, as far as they are not."""

    worker: WorkerInfo


Action = ToRouter | ToPeer | ShipBlocks | HashBlocks | ReceiveBlocks | CancelTransfer | DropLink | ConnectPeer


# --- what the links to peers report ---------------------------------------------------------------


class FromDecode(msgspec.Struct, frozen=True):
    """A session message from a decode worker, about a hand-over that leaves here."""

    peer: str
    message: Any


class FromPrefill(msgspec.Struct, frozen=True):
    """A session message from a prefill worker, about a hand-over that comes here."""

    peer: str
    message: Any


class Shipped(msgspec.Struct, frozen=True):
    """`ShipBlocks` is done as far as this side goes."""

    transfer: TransferId
    indices: tuple[int, ...]
    refs: tuple[int, ...]
    """Of each block by what a transport that pulls fetches it; else empty."""


class Hashed(msgspec.Struct, frozen=True):
    """Checksum by index of what was shipped."""

    transfer: TransferId
    checksums: dict[int, int]


class BlocksSent(msgspec.Struct, frozen=True):
    """Nothing reads these source blocks any more."""

    transfer: TransferId
    indices: tuple[int, ...]


class BlocksReceived(msgspec.Struct, frozen=True):
    """These blocks are in the pool; checksum of what is there now, by index."""

    transfer: TransferId
    checksums: dict[int, int]


class DataLinkLost(msgspec.Struct, frozen=True):
    """The data link to or from this peer is gone: what `LinkLost` of the transport says."""

    peer: str
    reason: str
    incoming: bool
    """True: `peer` shipped over it; False: this worker did."""


class ControlRestored(msgspec.Struct, frozen=True):
    """The control connection to this decode worker was lost and is back: messages of both sides may be lost."""

    peer: str


PeerEvent = FromDecode | FromPrefill | Shipped | Hashed | BlocksSent | BlocksReceived | DataLinkLost | ControlRestored


class PeerLinks(Protocol):
    """A worker's sockets and transport towards other workers (`kv_transfer.links`). Used by one thread."""

    control_address: str
    data_address: str
    bytes_sent: int
    bytes_received: int

    def execute(self, action: Action) -> list[PeerEvent]:
        """Do what a port asked for. Never blocks."""
        ...

    def events(self) -> list[PeerEvent]:
        """What arrived or completed since the last call. Never blocks."""
        ...

    def pollables(self) -> Sequence[Any]:
        """ZeroMQ sockets or file descriptors that show news for `events`."""
        ...

    def next_deadline(self, now: float) -> float | None:
        """When `events` must be asked even if nothing became readable; `now` is `time.monotonic()`."""
        ...

    def close(self) -> None: ...


# --- the ports ------------------------------------------------------------------------------------


class SendPort(Protocol):
    """The prefill side of hand-overs. `peer` is always an incarnation."""

    def offer(self, submit: Submit, now: float) -> list[Action]:
        """The router wants `submit` handed to `submit.decode`; the engine holds it without credit."""
        ...

    def replace(self, message: Replace, now: float) -> list[Action]:
        """After a refusal: offer it to another worker, or (decode None) keep it here."""
        ...

    def on_peers(self, workers: tuple[WorkerInfo, ...], now: float) -> list[Action]:
        """The decode-capable workers as of now: connect to new ones, end what was with missing ones."""
        ...

    def on_message(self, peer: str, message: Any, now: float) -> list[Action]:
        """A session message (`kv_transfer.messages.ToPrefill`) from decode."""
        ...

    def on_chunk(self, effect: ChunkDone, now: float) -> list[Action]: ...

    def on_prompt_done(self, effect: PromptDone, now: float) -> list[Action]: ...

    def on_ended(self, effect: Ended, now: float) -> list[Action]:
        """The engine ended a hand-off request itself (first token was the last, or it was aborted)."""
        ...

    def on_shipped(
        self, transfer: TransferId, indices: tuple[int, ...], refs: tuple[int, ...], now: float
    ) -> list[Action]:
        """The driver shipped blocks; refs if the transport pulls."""
        ...

    def on_hashed(self, transfer: TransferId, checksums: dict[int, int], now: float) -> list[Action]:
        """The driver hashed blocks: checksum by index, zeros where checksums are off."""
        ...

    def on_sent(self, transfer: TransferId, indices: tuple[int, ...], now: float) -> list[Action]:
        """The transport no longer reads these source blocks."""
        ...

    def on_link_lost(self, peer: str, reason: str, now: float) -> list[Action]:
        """The data link to `peer` was lost: make a new one and ship again what may be lost."""
        ...

    def on_control_restored(self, peer: str, now: float) -> list[Action]:
        """Messages to and from `peer` may be lost: ask again what is unanswered."""
        ...

    def next_deadline(self) -> float | None: ...

    def on_deadline(self, now: float) -> list[Action]: ...

    def holdings(self) -> list[Holding]:
        """Every transfer, also one that has ended while the transport still reads its blocks."""
        ...


class ReceivePort(Protocol):
    """The decode side of hand-overs."""

    def on_message(self, peer: str, message: Any, now: float) -> list[Action]:
        """A session message (`kv_transfer.messages.ToDecode`) from prefill."""
        ...

    def on_received(self, transfer: TransferId, checksums: dict[int, int], now: float) -> list[Action]:
        """The transport wrote blocks; checksum of what is now in the pool, by index."""
        ...

    @property
    def is_waiting(self) -> bool:
        """Whether an offer waits for blocks."""
        ...

    def on_blocks_free(self, now: float) -> list[Action]:
        """The engine may have freed blocks: offers that waited for credit may be accepted now."""
        ...

    def on_abort(self, key: RequestKey, now: float) -> list[Action]:
        """The router aborts; unknown keys are a no-op."""
        ...

    def on_link_lost(self, peer: str, reason: str, now: float) -> list[Action]:
        """The data link from `peer` was lost: it may come back."""
        ...

    def next_deadline(self) -> float | None: ...

    def on_deadline(self, now: float) -> list[Action]: ...

    def holdings(self) -> list[Holding]:
        """Every transfer that has not ended; one without blocks waits for some."""
        ...
