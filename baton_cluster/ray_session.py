"""Reaching Ray: a cluster of Baton's own on this machine, or an existing one.

Ends what it started and nothing else: `ray stop` would end every Ray process of the machine.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from types import TracebackType
from typing import Any, Self

from baton.config import RayConfig
from baton.errors import ClusterError

CONNECT_TIMEOUT_S = 5.0


def _require_reachable(address: str) -> None:
    """Raises ClusterError if nobody listens at `host:port`; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # `auto`, which Ray looks up by itself
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as e:
        raise ClusterError(
            f"ray.address {address}: nobody answers there ({e.strerror or e}); "
            f"`ray status` on its head node tells the address"
        ) from e


class RaySession:
    """A connection of this process to Ray; use it in a `with` block. One at a time per process.

    `num_cpus`: logical CPUs to declare where a cluster is started here. Workers are pinned by Baton,
    so it is a count for placement and may exceed the machine's cores.
    Raises ClusterError where the address cannot be reached.
    """

    def __init__(self, config: RayConfig, *, num_cpus: int, namespace: str):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's coming default; without it every actor without GPUs prints a warning about the change.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if config.address is not None:
            _require_reachable(config.address)
        import ray  # here, because Ray reads its environment at import and takes a second

        logging.getLogger("ray").setLevel(logging.ERROR)  # after the import, which sets a level of its own
        if ray.is_initialized():
            raise ClusterError("this process is connected to Ray already; Baton cannot share that connection")
        self.ray = ray
        self.owned = config.address is None
        options: dict[str, Any] = {
            "namespace": namespace,
            "log_to_driver": False,
            "configure_logging": False,
            "logging_level": logging.ERROR,
        }
        if self.owned:
            # Who ends the whole process group ends Ray's processes with it; then do not wait a minute for them.
            os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
            options |= {
                "address": "local",  # never someone else's cluster that RAY_ADDRESS happens to name
                "include_dashboard": False,
                "num_cpus": config.num_cpus or max(num_cpus, os.cpu_count() or 1),
                "num_gpus": config.num_gpus,
            }
        else:
            options["address"] = config.address
        # Ray's C++ side takes SIGTERM over and would print a stack and die where Baton ends in order.
        on_terminate = signal.getsignal(signal.SIGTERM)
        try:
            info = ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as e:
            where = config.address or "a new local cluster"
            first_line = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise ClusterError(f"ray.address {where}: Ray cannot be reached: {first_line}") from e
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_terminate)
        self.address: str = info.address_info["gcs_address"]
        self.logs = f"{info.address_info['session_dir']}/logs"
        """The folder of Ray's logs, this session's own, on each of its machines."""

    def close(self) -> None:
        """Disconnect; a cluster that was started here ends. Idempotent."""
        if self.ray.is_initialized():
            self.ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
