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
from baton.engine.weights import resolve_model
from baton.worker import EngineWorker
from baton_cluster.build import build_worker
from baton_cluster.cluster import Cluster, Progress, exposures, no_progress
from baton_cluster.specs import worker_specs
from kv_transfer.link_memory import gpu_link_bytes
from kv_transfer.registry import resolve_transport, shares_memory
from router.http.tls import check_tls
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
        transport = resolve_transport(config.transfer.transport, one_process=True, encodes=encodes)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router: RouterServer | None = None
        try:
            check_tls(config.http)
            model_path = resolve_model(config.model.source, progress=progress)
            self._router = RouterServer(config, model_path)
            self.address, back = self._router.start()
            self.url = self._router.url
            model = None
            for spec in worker_specs(config):
                progress(f"starting {spec.worker_id}")
                shared = shares_memory(transport)
                built = build_runner(
                    config,
                    config.pools[spec.pool],
                    model=model,
                    shared_pool=shared,
                    link_bytes=partial(gpu_link_bytes, config, spec.pool),
                )
                model = built.runner.model
                progress(f"{spec.worker_id}: {built.engine}; memory: {built.memory}")
                self.workers[spec.worker_id] = build_worker(
                    config,
                    spec,
                    built,
                    router_address=back,
                    context=self._context,
                    transport=transport,
                    cores=(cores or {}).get(spec.worker_id),
                    node=platform.node(),
                    pid=os.getpid(),
                )
                self.workers[spec.worker_id].start(config.start_timeout_s)
            self._router.wait_ready(len(self.workers), config.start_timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all threads and close all sockets, open requests after `router.shutdown_grace_s`. Idempotent."""
        router, self._router = self._router, None
        try:
            if router is not None:
                router.stop()  # first: what is open may still end
        finally:
            for worker in self.workers.values():
                worker.stop()
            self._context.term()
