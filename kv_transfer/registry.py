"""Transports by URL: `inproc://`, `shm://`, `zmq+tcp://HOST[:PORT]`, `zmq+ipc://`, `gloo://HOST`, `nccl://HOST`,
`nixl://HOST`, `cuda-ipc://`; and, for tests and rehearsals, any of them with faults: `faulty+zmq+tcp://HOST?drop=0.01`
(`kv_transfer.faulty_transport`).

Knows names only; a transport's module is imported when it is opened.
"""

from __future__ import annotations

from baton.config import FAULTY, TRANSPORTS, UNENCRYPTED_TRANSPORTS, is_loopback
from baton.errors import ConfigError
from baton.security import Security
from kv_transfer.base import KVTransport

SCHEMES = tuple(name for name in TRANSPORTS if name != "auto")
_LISTEN_ON_A_HOST = ("zmq+tcp", "gloo", "nccl", "nixl")


def open_transport(url: str, security: Security | None = None) -> KVTransport:
    """Open this worker's end. `url` is a scheme (`zmq+tcp`) or a URL (`zmq+tcp://10.0.0.2`, where to listen).

    `security`: who may connect; None: anyone. Transports within one machine have no use for it: `shm` and `cuda-ipc`
    let in processes of the same user only.
    Raises ConfigError for an unknown scheme, an address that cannot be listened on, what this machine lacks, or a
    transport that would send in clear to other machines what `security` is to protect.
    """
    if url.startswith(FAULTY):
        from kv_transfer.faulty_transport import FaultyTransport, read_plan

        inner, _, query = url.removeprefix(FAULTY).partition("?")
        plan = read_plan(query)
        return FaultyTransport(open_transport(inner, security), plan)
    scheme, _, host_port = url.partition("://")
    host = host_port.rstrip("/") if host_port.count(":") > 1 else host_port.rstrip("/").partition(":")[0]
    if security is not None and security.is_on and scheme in UNENCRYPTED_TRANSPORTS and host and not is_loopback(host):
        raise ConfigError(
            "transfer.transport",
            f"would send KV blocks in clear from {host}, while security.secret is set",
            value=scheme,
            allowed="auto, zmq+tcp, or a network of your own that you trust, without a secret",
        )
    match scheme:
        case "inproc":
            from kv_transfer.inproc import InprocTransport

            return InprocTransport()
        case "shm":
            from kv_transfer.shm_transport import ShmTransport

            return ShmTransport()
        case "zmq+tcp":
            from kv_transfer.zmq_transport import ZmqTransport

            return ZmqTransport.tcp(host_port, security=security)
        case "zmq+ipc":
            from kv_transfer.zmq_transport import ZmqTransport

            return ZmqTransport.ipc(security=security)
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


def resolve_transport(
    name: str, *, one_process: bool, can_share: bool = False, encodes: bool = False, host: str = "127.0.0.1"
) -> str:
    """The URL to open for `transfer.transport`.

    `auto` is `inproc` within one process, `shm` where all workers can share memory, else, or if blocks are encoded
    (`encodes`), `zmq+tcp`.

    `one_process`: all workers are threads of this process. `can_share`: they can map each other's KV pools. `host`: the
    address at which peers reach this machine.
    """
    if name.startswith(FAULTY):
        from kv_transfer.faulty_transport import read_plan

        inner, _, query = name.removeprefix(FAULTY).partition("?")
        read_plan(query)  # a mistake is told before any worker starts
        inner = resolve_transport(
            inner.removesuffix("://"), one_process=one_process, can_share=can_share, encodes=encodes, host=host
        )
        return f"{FAULTY}{inner}?{query}"
    if name == "auto":
        name = "zmq+tcp" if encodes else "inproc" if one_process else "shm" if can_share else "zmq+tcp"
    return f"{name}://{host}" if name in _LISTEN_ON_A_HOST else f"{name}://"


def shares_memory(url: str) -> bool:
    """Whether this transport needs KV pools in shared memory (`baton.host_memory`)."""
    return url.removeprefix(FAULTY).startswith("shm:")
