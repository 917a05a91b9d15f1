"""NVIDIA's NIXL library as `kv_transfer.nixl_transport` uses it: one agent with the UCX backend, one-sided reads.

The agent is made by NIXL's bindings, not by its `nixl_agent`: that one lets the thread which serves peers spin on a
core of its own. Given a delay of its rounds, the thread sleeps until UCX has something for it.

What the library promises, and what not (tried with 1.5 over TCP, and read in its UCX plugin):
* A peer's reads are served by that thread (or the network card), whatever this process is doing.
* A read cannot be taken back: after its handle was released while it was under way, data was still written. So memory
  that is read into is used for nothing else until its read has ended, well or not.
* Reads are in no order with each other.

Knows addresses and agents; must not know blocks or transfers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from baton.errors import ConfigError

log = logging.getLogger(__name__)

HOW_TO_INSTALL = (
    "needs NVIDIA's NIXL: `pip install 'baton-serve[nixl]'` on a machine with CUDA, "
    "`pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1` without"
)
SERVE_EVERY_US = 100_000
"""The serving thread's rounds where UCX forgets to wake it (NIXL's advice); it wakes at once else."""

Region = tuple[int, int, int]
"""Address, bytes, device: the GPU's number, 0 for host memory."""


class NixlAgent:
    """Raises ConfigError where NIXL or its UCX backend is missing."""

    def __init__(self, name: str):
        bindings = _bindings()
        self._nixl = bindings
        self._errors: tuple[type[Exception], ...] = tuple(
            e for e in vars(bindings).values() if isinstance(e, type) and issubclass(e, Exception)
        )
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = SERVE_EVERY_US
        config.useListenThread = False
        config.captureTelemetry = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
        try:
            self._agent: Any = bindings.nixlAgent(name, config)
            self._ucx = [self._agent.createBackend("UCX", {})]
            _, kinds = self._agent.getBackendParams(self._ucx[0])
        except self._errors as e:
            raise ConfigError("transfer.transport", f"NIXL's UCX backend does not start: {e}", value="nixl") from e
        self.reaches_gpu = "VRAM_SEG" in kinds

    def register(self, region: Region, *, on_gpu: bool) -> Any:
        """Let this memory be read into, and by whom has the metadata made later. Raises OSError."""
        memory = self._nixl.nixlRegDList(self._kind(on_gpu), [(*region, "")])
        try:
            self._agent.registerMem(memory, self._ucx)
        except self._errors as e:
            raise OSError(f"NIXL cannot register {region[1]} bytes: {e}") from e
        return memory

    def deregister(self, memory: Any) -> None:
        """What `register` returned; nothing may be on its way there."""
        try:
            self._agent.deregisterMem(memory, self._ucx)
        except self._errors as e:  # nobody is told of this memory any more: no harm but what it costs
            log.warning("NIXL did not let go of memory: %s", e)

    def metadata(self) -> bytes:
        """By what other agents reach this one and all that is registered."""
        data: bytes = self._agent.getLocalMD()
        return data

    def add_peer(self, metadata: bytes) -> str:
        """The peer's name. Takes milliseconds. Raises OSError for what is no metadata, or of a peer out of reach."""
        try:
            name: bytes | str = self._agent.loadRemoteMD(metadata)
        except self._errors as e:
            raise OSError(f"NIXL cannot reach the peer: {e}") from e
        return name.decode() if isinstance(name, bytes) else name

    def remove_peer(self, name: str) -> None:
        """Cuts the connection; reads under way fail."""
        with contextlib.suppress(*self._errors):  # it is gone already
            self._agent.invalidateRemoteMD(name)

    def read(
        self, peer: str, there: Sequence[Region], there_on_gpu: bool, here: Sequence[Region], here_on_gpu: bool
    ) -> int:
        """Start to read; a handle. Between processes of a machine it may be over on return. Raises OSError."""
        try:
            local = self._nixl.nixlXferDList(self._kind(here_on_gpu), list(here))
            remote = self._nixl.nixlXferDList(self._kind(there_on_gpu), list(there))
            handle: int = self._agent.createXferReq(self._nixl.NIXL_READ, local, remote, peer, b"", self._ucx)
        except self._errors as e:
            raise OSError(f"NIXL cannot read from the peer: {e}") from e
        try:
            status = self._agent.postXferReq(handle, b"")
        except self._errors as e:
            self.release(handle)
            raise OSError(f"NIXL cannot read from the peer: {e}") from e
        try:
            self._check(status)
        except OSError:
            self.release(handle)
            raise
        return handle

    def is_done(self, handle: int) -> bool:
        """Raises OSError if the read has failed."""
        try:
            return self._check(self._agent.getXferStatus(handle))
        except self._errors as e:
            raise OSError(f"a read failed: {e}") from e

    def _check(self, status: Any) -> bool:
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise OSError(f"a read failed: {status}")

    def release(self, handle: int) -> None:
        """Of a read that has ended."""
        with contextlib.suppress(*self._errors):  # it failed with its connection
            self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """Ends the serving thread and all connections; after that nothing is read or written."""
        self._agent = None

    def _kind(self, on_gpu: bool) -> Any:
        return self._nixl.VRAM_SEG if on_gpu else self._nixl.DRAM_SEG


def _bindings() -> Any:
    try:
        from nixl import _bindings
    except ImportError as e:
        raise ConfigError("transfer.transport", f"{HOW_TO_INSTALL} ({e})", value="nixl") from e
    return _bindings


def is_installed() -> bool:
    try:
        _bindings()
    except ConfigError:
        return False
    return True
