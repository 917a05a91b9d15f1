"""Transports by URL: `inproc://`, `shm://`, `zmq+tcp://HOST[:PORT]`, `zmq+ipc://`, `gloo://HOST`, `nccl://HOST`,
`nixl://HOST`, `cuda-ipc://`.

Knows names only; a transport's module is imported when it is opened.
"""

from __future__ import annotations

from baton.errors import ConfigError
from kv_transfer.base import KVTransport

SCHEMES = ("inproc", "shm", "zmq+tcp", "zmq+ipc", "gloo", "nccl", "nixl", "cuda-ipc")
_LISTEN_ON_A_HOST = ("zmq+tcp", "gloo", "nccl", "nixl")


def open_transport(url: str) -> KVTransport:
    """Open this worker's end. `url` is a scheme (`zmq+tcp`) or a URL (`zmq+tcp://10.0.0.2`, where to listen).

    Raises ConfigError for an unknown scheme, an address that cannot be listened on, or what this machine lacks.
    """
    scheme, _, host_port = url.partition("://")
    match scheme:
        case "inproc":
            from kv_transfer.inproc import InprocTransport

            return InprocTransport()
        case "shm":
            from kv_transfer.shm_transport import ShmTransport

            return ShmTransport()
        case "zmq+tcp":
            from kv_transfer.zmq_transport import ZmqTransport

            return ZmqTransport.tcp(host_port)
        case "zmq+ipc":
            from kv_transfer.zmq_transport import ZmqTransport

            return ZmqTransport.ipc()
        case "gloo" | "nccl":
            from kv_transfer.group_transport import GroupTransport

            return GroupTransport(scheme, host_port)
        case "nixl":
            from kv_transfer.nixl_transport import NixlTransport

            return NixlTransport(host_port)
        case "cuda-ipc":
            from kv_transfer.cuda_ipc_transport import CudaIpcTransport

            return CudaIpcTransport()
    raise ConfigError("transfer.transport", "unknown transport", value=url, allowed=f"auto, {', '.join(SCHEMES)}")


def resolve_transport(name: str, *, one_process: bool, can_share: bool = False, host: str = "127.0.0.1") -> str:
    """The URL to open for `transfer.transport`.

    `auto` is `inproc` within one process, `shm` where all workers can share memory, else `zmq+tcp`.

    `one_process`: all workers are threads of this process. `can_share`: they can map each other's KV pools. `host`: the
    address at which peers reach this machine.
    """
    if name == "auto":
        name = "inproc" if one_process else "shm" if can_share else "zmq+tcp"
    return f"{name}://{host}" if name in _LISTEN_ON_A_HOST else f"{name}://"


def shares_memory(url: str) -> bool:
    """Whether this transport needs KV pools in shared memory (`baton.host_memory`)."""
    return url.startswith("shm:")
