"""The Ray actors: control only. Tokens and KV blocks never pass through Ray.

One class for workers of all kinds, one for the router. An actor starts its part, answers for its
health, and stops it; the part's own threads do the work.
"""

from __future__ import annotations

import os
import platform
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from baton.config import parse_config
from baton.errors import ClusterError
from baton.host_memory import can_share
from baton_cluster.logs import configure_logging
from baton_cluster.specs import WorkerSpec
from kv_transfer.link_memory import gpu_link_bytes
from kv_transfer.shm_link import reach
from router.roles import RoleOrder


def _where() -> dict[str, Any]:
    import ray

    context = ray.get_runtime_context()
    return {
        "node_id": context.get_node_id(),
        "node_ip": ray.util.get_node_ip_address(),
        "hostname": platform.node(),
        "cores": sorted(os.sched_getaffinity(0)),
        "pid": os.getpid(),
        # Processes for which this is equal can map each other's memory; empty: this one nobody's.
        "memory": reach() if can_share() else "",
    }


class WorkerActor:
    """Holds one EngineWorker in a process of its own."""

    def __init__(self, config_tree: dict[str, Any], worker_id: str, pool: str):
        self._config = parse_config(config_tree)
        configure_logging(self._config)
        self._spec = WorkerSpec(worker_id, pool)
        self._built: Any = None
        self._worker: Any = None
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_terminate)

    def _on_terminate(self, signum: int, frame: object) -> None:
        """SIGTERM: finish what is here, then end. In a thread, since the main one belongs to Ray."""
        threading.Thread(target=self._leave_and_exit, daemon=True).start()

    def leave(self) -> None:
        """Finish what is here, tell the router, and end the worker's threads. The process goes on."""
        if self._worker is not None:
            self._worker.leave()

    def _leave_and_exit(self) -> None:
        if self._worker is not None:
            self._worker.leave()
        os._exit(0)

    def where(self) -> dict[str, Any]:
        """The node and what this process may use there: before `load`, for the assignment of cores."""
        return _where()

    def load(self, cores: tuple[int, ...], shared_pool: bool) -> str:
        """Load the model, while the router still starts; how the memory is shared out, in words.

        `shared_pool`: the transport to come reads the KV pools of other processes.
        Raises what is wrong: ModelError, ConfigError.
        """
        os.sched_setaffinity(0, cores)  # loading, too, stays off the other workers' cores
        from baton.engine.build import build_runner

        self._built = build_runner(
            self._config,
            self._config.pools[self._spec.pool],
            shared_pool=shared_pool,
            link_bytes=partial(gpu_link_bytes, self._config, self._spec.pool),
        )
        return f"{self._built.engine}; memory: {self._built.memory}"

    def start(self, router_address: str, host: str, cores: tuple[int, ...], transport: str) -> dict[str, Any]:
        """Build the worker and join the router, after `load`. Returns the worker's description.

        Raises JoinRefusedError, or ClusterError where the router does not answer.
        """
        import ray

        from baton_cluster.build import build_worker

        gpu_ids = tuple(int(gpu) for gpu in ray.get_gpu_ids())
        self._worker = build_worker(
            self._config,
            self._spec,
            self._built,
            router_address=router_address,
            context=zmq.Context(),
            transport=transport,
            host=host,
            cores=cores,
            node=platform.node(),
            gpu_ids=gpu_ids,
            pid=os.getpid(),
        )
        self._worker.start(self._config.start_timeout_s)
        description: dict[str, Any] = msgspec.to_builtins(self._worker.info)
        return description

    def health(self) -> dict[str, Any]:
        """See `EngineWorker.health`."""
        if self._worker is None:
            return {"healthy": False, "problem": "not started"}
        health: dict[str, Any] = self._worker.health()
        return {**health, "load": msgspec.to_builtins(health["load"])}

    def ended(self) -> None:
        """Return when the worker's threads have ended, whatever ended them."""
        self._worker.wait_ended()

    def num_held_blocks(self) -> int:
        """Blocks that are not free now; zero when every request and transfer has ended."""
        return int(self._worker.num_held_blocks()) if self._worker else 0

    def take_steps(self) -> bytes:
        """See `EngineWorker.take_steps`; in msgpack, as pickle would name the class of each."""
        return msgspec.msgpack.encode(self._worker.take_steps() if self._worker is not None else [])

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()


class RouterActor:
    """Holds the RouterServer in a process of its own."""

    def __init__(self, config_tree: dict[str, Any]):
        self._config = parse_config(config_tree)
        configure_logging(self._config)
        self._server: Any = None

    def where(self) -> dict[str, Any]:
        return _where()

    def start(self, model_path: str, host: str, back_port: int = 0) -> tuple[str, str, str | None]:
        """Returns the addresses for clients and for workers, and the URL. `host`: where workers reach the router."""
        from router.server import RouterServer

        self._server = RouterServer(self._config, Path(model_path), back_host=host, back_port=back_port)
        front, back = self._server.start()
        return front, back, self._server.url

    def wait_ready(self, num_workers: int, timeout_s: float) -> None:
        """Until so many workers have joined. Raises ClusterError after `timeout_s`."""
        self._server.wait_ready(num_workers, timeout_s)

    def role_order(self) -> RoleOrder | None:
        """See `RouterServer.role_order`."""
        order: RoleOrder | None = self._server.role_order()
        return order

    def health(self) -> dict[str, Any]:
        """Whether the router's thread answers."""
        if self._server is None:
            return {"healthy": False, "problem": "not started"}
        try:
            self._server.status()
        except ClusterError as e:
            return {"healthy": False, "problem": str(e)}
        return {"healthy": True, "problem": None}

    def ended(self) -> None:
        """Return when the router's thread has ended."""
        self._server.wait_ended()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
