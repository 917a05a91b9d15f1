"""LocalCluster: a whole cluster as threads of one process, over the same cores, sockets and sessions.

For tests, notebooks and debugging: starts in a second once the model is loaded, and weights are
shared between its workers. They also share one Python interpreter, so it says little about speed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from functools import partial

import zmq

from baton.config import ClusterConfig
from baton.engine.build import build_runner
from baton.engine.model import Model
from baton.engine.weights import resolve_model
from baton.step_log import StepRecord
from baton.worker import EngineWorker
from baton_cluster.build import build_worker
from baton_cluster.cluster import Cluster, Progress, exposures, no_progress
from baton_cluster.role_watch import RoleWatch
from baton_cluster.specs import WorkerSpec, worker_specs
from kv_transfer.link_memory import gpu_link_bytes
from kv_transfer.registry import resolve_transport, shares_memory
from router.http.tls import check_tls
from router.roles import RoleOrder
from router.server import RouterServer


class LocalCluster(Cluster):
    """Starts in its constructor; raises what the first failing part raises, and leaves nothing behind.

    `cores`: worker id -> the CPU cores that its threads are pinned to, and as many compute threads; who is not named
    runs anywhere.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        cores: Mapping[str, tuple[int, ...]] | None = None,
        progress: Progress = no_progress,
    ):
        self.config = config
        self.warnings = exposures(config, [config.router.host])
        self.workers: dict[str, EngineWorker] = {}
        encodes = config.transfer.wire_encoding != "none"
        self._transport = resolve_transport(config.transfer.transport, one_process=True, encodes=encodes)
        self._cores = cores or {}
        self._progress = progress
        self._model: Model | None = None
        """Shared by all workers."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router: RouterServer | None = None
        self._role_watch: RoleWatch | None = None
        try:
            check_tls(config.http)
            model_path = resolve_model(config.model.source, progress=progress)
            self._router = RouterServer(config, model_path)
            self.address, self._back = self._router.start()
            self.url = self._router.url
            for spec in worker_specs(config):
                self._start_worker(spec)
            self._router.wait_ready(len(self.workers), config.start_timeout_s)
            if config.planner.enabled:
                ask = self._router.role_order
                self._role_watch = RoleWatch(ask, self._change_role, config.planner.interval_s, progress)
        except BaseException:
            self.stop()
            raise

    def _start_worker(self, spec: WorkerSpec) -> None:
        config = self.config
        self._progress(f"starting {spec.worker_id}")
        built = build_runner(
            config,
            config.pools[spec.pool],
            model=self._model,
            shared_pool=shares_memory(self._transport),
            link_bytes=partial(gpu_link_bytes, config, spec.pool),
        )
        self._model = built.runner.model
        self._progress(f"{spec.worker_id}: {built.engine}; memory: {built.memory}")
        worker = self.workers[spec.worker_id] = build_worker(
            config,
            spec,
            built,
            router_address=self._back,
            context=self._context,
            transport=self._transport,
            cores=self._cores.get(spec.worker_id),
            node=platform.node(),
            pid=os.getpid(),
        )
        worker.start(config.start_timeout_s)

    def _change_role(self, order: RoleOrder) -> bool:
        worker = self.workers[order.worker_id]
        if worker.info.incarnation != order.incarnation:
            return False
        worker.leave()
        self._start_worker(WorkerSpec(order.worker_id, order.pool))
        return True

    def take_steps(self) -> list[StepRecord]:
        steps = [step for worker in self.workers.values() for step in worker.take_steps()]
        return sorted(steps, key=lambda step: step.start_s)

    def stop(self) -> None:
        """End all threads and close all sockets, open requests after `router.shutdown_grace_s`. Idempotent."""
        router, self._router = self._router, None
        try:
            if self._role_watch is not None:
                self._role_watch.stop()
            if router is not None:
                router.stop()  # first: what is open may still end
        finally:
            for worker in self.workers.values():
                worker.stop()
            self._context.term()
