"""Transports by URL: `inproc://`, `zmq+tcp://HOST[:PORT]`, `zmq+ipc://`.

Knows names only; a transport's module is imported when it is opened.
"""

from __future__ import annotations

from baton.errors import ConfigError
from kv_transfer.base import KVTransport

SCHEMES = ("inproc", "zmq+tcp", "zmq+ipc")


def open_transport(url: str) -> KVTransport:
    """Open this worker's end. `url` is a scheme (`zmq+tcp`) or a URL (`zmq+tcp://10.0.0.2`, where to listen).

    Raises ConfigError for an unknown scheme or an address that cannot be listened on.
    """
    scheme, _, host_port = url.partition("://")
    if scheme == "inproc":
        from kv_transfer.inproc import InprocTransport

        return InprocTransport()
    if scheme not in SCHEMES:
        raise ConfigError("transfer.transport", "unknown transport", value=url, allowed=f"auto, {', '.join(SCHEMES)}")
    from kv_transfer.zmq_transport import ZmqTransport

    return ZmqTransport.tcp(host_port) if scheme == "zmq+tcp" else ZmqTransport.ipc()


def resolve_transport(name: str, *, one_process: bool, host: str = "127.0.0.1") -> str:
    """The URL to open for `transfer.transport`: `auto` is `inproc` within one process, else `zmq+tcp`.

    `one_process`: all workers are threads of this process. `host`: the address at which peers reach this machine.
    """
    if name == "auto":
        name = "inproc" if one_process else "zmq+tcp"
    return f"{name}://{host}" if name == "zmq+tcp" else f"{name}://"
