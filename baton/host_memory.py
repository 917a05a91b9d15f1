"""Host memory for KV pools: private to the process, or shared, which processes of this machine may map read-only.

Shared memory is a memfd, a file that exists in no file system. It has no name that could be left behind and goes with
the last process that uses it, however that ends; the size of `/dev/shm` does not limit it, the machine's (or the
container's) memory does. It is sealed: its size never changes, so a mapping cannot be cut off under its reader
(SIGBUS), and on Linux 5.1 or later nobody can map it writable but the process that made it.

Either kind is zeros, and pages that nobody has touched take no memory. Knows bytes; must not know blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
"""Bytes; a cache line, and what vector instructions like best. Shared memory begins on a page."""
HUGE_FROM = 4 << 20
"""Bytes; from here on huge pages are asked for, as numpy does for its own arrays."""

_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which `fcntl` names from Python 3.13 on


class HostMemory:
    """`size` bytes of zeros. Lives as long as any array over it; the file as long as this object or a mapping.

    Raises MemoryError if the memory cannot be had, OSError where `shared` is not possible (no Linux).
    """

    def __init__(self, size: int, *, shared: bool = False):
        self.fd: int | None = None
        """Of shared memory: the file, to be given to who may map it. It is closed with this object."""
        self.array = self._shared(size) if shared else _private(size)
        """All of it, writable; shape `[size]`."""

    def _shared(self, size: int) -> npt.NDArray[np.uint8]:
        if not can_share():
            raise OSError("shared memory needs Linux (memfd_create)")
        fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        try:
            os.ftruncate(fd, size)
            mapping = mmap.mmap(fd, size)
        except (OSError, OverflowError, ValueError) as e:
            raise MemoryError(f"{size} bytes of shared memory cannot be had: {e}") from e
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | _FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except OSError:  # an older kernel: peers are trusted to keep to reading
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
        _prefer_huge_pages(mapping, size)
        return np.frombuffer(mapping, dtype=np.uint8)


def _private(size: int) -> npt.NDArray[np.uint8]:
    # numpy's zeros are pages that nothing has touched, torch's are written: memory is used as blocks are.
    raw = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    aligned: npt.NDArray[np.uint8] = raw[-raw.ctypes.data % ALIGNMENT :][:size]
    return aligned


def can_share() -> bool:
    """Whether this platform has memory files."""
    return hasattr(os, "memfd_create")


def map_read_only(fd: int, size: int) -> npt.NDArray[np.uint8]:
    """The first `size` bytes of another process's shared memory; unmapped with the last array over it.

    `fd` may be closed afterwards. Raises ValueError for a file that is too short, or that could be cut off later.
    """
    seals = 0
    with contextlib.suppress(OSError):  # a file that cannot be sealed
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    length = os.fstat(fd).st_size
    if not seals & fcntl.F_SEAL_SHRINK or length < size:
        raise ValueError(f"not {size} bytes of sealed memory: {length} bytes, seals {seals:#x}")
    mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    _prefer_huge_pages(mapping, size)
    return np.frombuffer(mapping, dtype=np.uint8)


def _prefer_huge_pages(mapping: mmap.mmap, size: int) -> None:
    if size >= HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
