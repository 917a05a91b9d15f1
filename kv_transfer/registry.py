"""Transports by URL: `inproc://`, `zmq+tcp://HOST[:PORT]`, `zmq+ipc://`.

Knows names only; a transport's module is imported when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.errors import ConfigError
from kv_transfer.base import KVTransport, WakeUp

Factory = Callable[[str, WakeUp | None], KVTransport]
"""Takes what follows `scheme://` in the URL (perhaps nothing), and the owner's wake-up."""


def _open_inproc(rest: str, wake: WakeUp | None) -> KVTransport:
    from kv_transfer.inproc import InprocTransport

    return InprocTransport(wake)


def _open_zmq_tcp(rest: str, wake: WakeUp | None) -> KVTransport:
    from kv_transfer.zmq_transport import ZmqTransport

    return ZmqTransport.tcp(rest)


def _open_zmq_ipc(rest: str, wake: WakeUp | None) -> KVTransport:
    from kv_transfer.zmq_transport import ZmqTransport

    return ZmqTransport.ipc()


_FACTORIES: dict[str, Factory] = {
    "inproc": _open_inproc,
    "zmq+tcp": _open_zmq_tcp,
    "zmq+ipc": _open_zmq_ipc,
}


def register_scheme(scheme: str, factory: Factory) -> None:
    """Make `scheme://` known; replaces what was registered under it."""
    _FACTORIES[scheme] = factory


def schemes() -> list[str]:
    return sorted(_FACTORIES)


def open_transport(url: str, wake: WakeUp | None = None) -> KVTransport:
    """Open this worker's end. `url` is a scheme (`zmq+tcp`) or a URL (`zmq+tcp://10.0.0.2`, where to listen).

    `wake` is called from any thread when there is news; a transport whose pollables show all news ignores it.
    Raises ConfigError for an unknown scheme or an address that cannot be listened on.
    """
    scheme, _, rest = url.partition("://")
    factory = _FACTORIES.get(scheme)
    if factory is None:
        raise ConfigError("transfer.transport", "unknown transport", value=url, allowed=f"auto, {', '.join(schemes())}")
    return factory(rest, wake)


def resolve_transport(name: str, *, one_process: bool, host: str = "127.0.0.1") -> str:
    """The URL to open for `transfer.transport`: `auto` takes the fastest that all workers reach.

    `one_process`: all workers are threads of this process. `host`: the address at which peers reach this machine.
    """
    if name == "auto":
        name = "inproc" if one_process else "zmq+tcp"
    if name not in _FACTORIES:
        raise ConfigError(
            "transfer.transport", "unknown transport", value=name, allowed=f"auto, {', '.join(schemes())}"
        )
    return f"{name}://{host}" if name == "zmq+tcp" else f"{name}://"
