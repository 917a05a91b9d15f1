"""The few functions of CUDA's driver that torch does not have: memory of another process by an IPC handle, and copies.

torch shares tensors between processes as well, but counts their users in files of `/dev/shm`, which stay there when a
process is killed, and its handles expect whoever made them to answer. A handle of the driver is 64 bytes; the mapping
that it gives goes with the process.

Knows addresses on a device; must not know pools or blocks.
"""

from __future__ import annotations

import ctypes
from typing import Any

from baton.errors import ConfigError

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: memory of another GPU of the machine is reached over NVLink or PCIe."""


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


_int, _address, _size, _pointer = ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuGetErrorString": [_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGet": [ctypes.POINTER(_int), _int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_pointer), _int],
    "cuCtxSetCurrent": [_pointer],
    "cuMemGetAddressRange_v2": [ctypes.POINTER(_address), ctypes.POINTER(_size), _address],
    "cuIpcGetMemHandle": [ctypes.POINTER(_IpcHandle), _address],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_address), _IpcHandle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [_address],
    "cuMemcpyAsync": [_address, _address, _size, _pointer],
}


class CudaDriver:
    """One device, by its number in this process, in the context that torch uses too (the device's primary one).

    Its methods raise OSError with the driver's own words. `library` is what to load.
    """

    def __init__(self, device: int, library: str = LIBRARY):
        """Raises ConfigError where there is no driver or no such device."""
        try:
            self._library = ctypes.CDLL(library)
        except OSError as e:
            raise ConfigError("transfer.transport", f"needs CUDA: {e}", value="cuda-ipc", allowed="auto, shm") from e
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, _int
        number, context = _int(), _pointer()
        try:
            self._call("cuInit", 0)
            self._call("cuDeviceGet", ctypes.byref(number), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        except OSError as e:
            raise ConfigError("transfer.transport", f"needs CUDA: {e}", value="cuda-ipc", allowed="auto, shm") from e
        self._context = context

    def export(self, address: int) -> tuple[bytes, int]:
        """A handle of the allocation that holds `address`, and how far behind its start that is."""
        self._enter()
        base, size, handle = _address(), _size(), _IpcHandle()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.reserved), address - base.value

    def open(self, handle: bytes) -> int:
        """The start of another process's allocation, mapped here; opened twice, it must be closed twice."""
        if len(handle) != HANDLE_BYTES:
            raise OSError(f"a handle of {len(handle)} bytes")
        self._enter()
        base = _address()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), _IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return base.value

    def close(self, base: int) -> None:
        """What `open` gave is not used any more."""
        self._enter()
        self._call("cuIpcCloseMemHandle", base)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy on a stream of CUDA's; either end may lie on another GPU."""
        self._enter()
        self._call("cuMemcpyAsync", target, source, num_bytes, stream)

    def _enter(self) -> None:
        """The context is the thread's own setting, and torch makes it only where it needs it."""
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(error, ctypes.byref(text))
            raise OSError(f"{name}: {(text.value or b'unknown error').decode()} ({error})")
