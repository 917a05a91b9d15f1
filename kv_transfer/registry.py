"""Transports by URL: `inproc://`, `shm://`, `zmq+tcp://HOST[:PORT]`, `zmq+ipc://`.

Knows names only; a transport's module is imported when it is opened.
"""

from __future__ import annotations

from baton.errors import ConfigError
from kv_transfer.base import KVTransport

SCHEMES = ("inproc", "shm", "zmq+tcp", "zmq+ipc")


def open_transport(url: str) -> KVTransport:
    """Open this worker's end. `url` is a scheme (`zmq+tcp`) or a URL (`zmq+tcp://10.0.0.2`, where to listen).

    Raises ConfigError for an unknown scheme or an address that cannot be listened on.
    """
    scheme, _, host_port = url.partition("://")
    if scheme == "inproc":
        from kv_transfer.inproc import InprocTransport

        return InprocTransport()
    if scheme == "shm":
        from kv_transfer.shm_transport import ShmTransport

        return ShmTransport()
    if scheme not in SCHEMES:
        raise ConfigError("transfer.transport", "unknown transport", value=url, allowed=f"auto, {', '.join(SCHEMES)}")
    from kv_transfer.zmq_transport import ZmqTransport

    return ZmqTransport.tcp(host_port) if scheme == "zmq+tcp" else ZmqTransport.ipc()


def resolve_transport(name: str, *, one_process: bool, can_share: bool = False, host: str = "127.0.0.1") -> str:
    """The URL to open for `transfer.transport`.

    `auto` is `inproc` within one process, `shm` where all workers can share memory, else `zmq+tcp`.

    `one_process`: all workers are threads of this process. `can_share`: they can map each other's KV pools. `host`: the
    address at which peers reach this machine.
    """
    if name == "auto":
        name = "inproc" if one_process else "shm" if can_share else "zmq+tcp"
    return f"{name}://{host}" if name == "zmq+tcp" else f"{name}://"


def shares_memory(url: str) -> bool:
    """Whether this transport needs KV pools in shared memory (`baton.host_memory`)."""
    return url.startswith("shm:")
