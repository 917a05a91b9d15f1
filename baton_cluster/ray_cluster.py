"""RayCluster: one actor process per worker and one for the router, placed and pinned by Ray.

    connect ─► placement group (one bundle a worker) ─► router and worker actors ─► cores per node
      ─► router starts ─► workers load, join ─► ready

Whatever fails, or Ctrl-C, undoes what was done so far.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any

from baton.config import ClusterConfig, PoolConfig, dump_config
from baton.engine.weights import resolve_model
from baton.errors import BatonError, ClusterError
from baton_cluster.actors import RouterActor, WorkerActor
from baton_cluster.cluster import ClusterBase, Progress, no_progress
from baton_cluster.cores import assign_cores
from baton_cluster.ray_session import RaySession
from baton_cluster.specs import worker_specs
from kv_transfer.registry import resolve_transport

STOP_TIMEOUT_S = 10.0
"""A worker ends after the step it is in; one that takes longer is killed."""

LOOPBACK = "127.0.0.1"


def bundle(pool: PoolConfig) -> dict[str, float]:
    """What Ray reserves for one worker of a pool."""
    resources: dict[str, float] = {"CPU": float(pool.cores), **pool.resources}
    if pool.gpus:
        resources["GPU"] = pool.gpus
    return resources


class RayCluster(ClusterBase):
    """Starts in its constructor. With `session` it uses that connection to Ray and leaves it open at the end."""

    def __init__(self, config: ClusterConfig, *, session: RaySession | None = None, progress: Progress = no_progress):
        self.config = config
        self.warnings: list[str] = []
        self.worker_infos: list[dict[str, Any]] = []
        self.workers: dict[str, Any] = {}
        self._router: Any = None
        self._group: Any = None
        self._owns_session = session is None
        self._specs = worker_specs(config)
        self._bundles = [bundle(config.pools[spec.pool]) for spec in self._specs]
        # Converted here, once, with a message; on other nodes each worker finds or converts its own.
        model_path = resolve_model(config.model.source, progress=progress)
        progress("starting Ray" if config.ray.address is None else f"connecting to Ray at {config.ray.address}")
        self._session = session or RaySession(
            config.ray, num_cpus=sum(int(b["CPU"]) for b in self._bundles), namespace=f"baton-{config.name}"
        )
        self._ray = self._session.ray
        try:
            self._place(progress)
            self._start(str(model_path), progress)
        except BaseException:
            self.stop()
            raise

    # --- start --------------------------------------------------------------------------------------

    def _place(self, progress: Progress) -> None:
        from ray.util.placement_group import placement_group

        progress(f"placing {len(self._specs)} workers")
        total = defaultdict(float, self._ray.cluster_resources())
        for kind in sorted({kind for b in self._bundles for kind in b}):
            wanted = sum(b.get(kind, 0) for b in self._bundles)
            if wanted > total[kind]:
                key = {"CPU": "cores", "GPU": "gpus"}.get(kind, "resources")
                raise ClusterError(
                    f"{len(self._specs)} workers want {wanted:g} {kind} in all, the Ray cluster has {total[kind]:g}; "
                    f"lower `workers` or `{key}` of the pools"
                )
        self._group = placement_group(self._bundles, strategy=self.config.ray.strategy)
        if not self._group.wait(self.config.start_timeout_s):
            raise ClusterError(
                f"Ray cannot place the workers ({self.config.ray.strategy}, bundles {self._bundles}) within "
                f"{self.config.start_timeout_s:g} s: the resources exist, but are in use or spread over other nodes"
            )

    def _start(self, model_path: str, progress: Progress) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, config = self._ray, self.config
        tree = dump_config(config)
        # Control only, so one call at a time suffices for the router; workers also answer health while they start.
        self._router = ray.remote(RouterActor).options(num_cpus=0, max_concurrency=4).remote(tree)
        for index, spec in enumerate(self._specs):
            pool = config.pools[spec.pool]
            self.workers[spec.worker_id] = (
                ray.remote(WorkerActor)
                .options(
                    num_cpus=pool.cores,
                    num_gpus=pool.gpus,
                    resources=pool.resources or None,
                    max_concurrency=4,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        self._group, placement_group_bundle_index=index
                    ),
                )
                .remote(tree, spec.worker_id, spec.pool)
            )
        progress("starting processes")
        places = self._get([worker.where.remote() for worker in self.workers.values()])
        cores = self._cores(places)
        single_node = self._session.owned and len({place["node_id"] for place in places}) == 1
        router_host = LOOPBACK if single_node else self._get(self._router.node_ip.remote())
        hosts = [LOOPBACK if single_node else place["node_ip"] for place in places]
        progress("loading the model")
        loads = [worker.load.remote(cores[i]) for i, worker in enumerate(self.workers.values())]
        (self.address, back), *_ = self._get([self._router.start.remote(model_path, router_host), *loads])
        progress("joining")
        self.worker_infos = self._get(
            [
                worker.start.remote(
                    back,
                    hosts[i],
                    cores[i],
                    resolve_transport(config.transfer.transport, one_process=False, host=hosts[i]),
                )
                for i, worker in enumerate(self.workers.values())
            ]
        )
        self._get(self._router.wait_ready.remote(len(self._specs), config.start_timeout_s))

    def _cores(self, places: list[dict[str, Any]]) -> list[tuple[int, ...]]:
        """Cores per worker, assigned node by node."""
        by_node: dict[str, list[int]] = defaultdict(list)
        for index, place in enumerate(places):
            by_node[place["node_id"]].append(index)
        result: list[tuple[int, ...]] = [()] * len(places)
        for indices in by_node.values():
            wanted = [self.config.pools[self._specs[i].pool].cores for i in indices]
            assigned, warning = assign_cores(wanted, places[indices[0]]["cores"])
            if warning:
                self.warnings.append(f"{places[indices[0]]['hostname']}: {warning}")
            for index, worker_cores in zip(indices, assigned, strict=True):
                result[index] = worker_cores
        return result

    def _get(self, refs: Any) -> Any:
        """The actors' answers, as what they raised where they raised."""
        try:
            return self._ray.get(refs, timeout=self.config.start_timeout_s)
        except self._ray.exceptions.GetTimeoutError:
            raise ClusterError(
                f"the cluster was not ready within start_timeout_s={self.config.start_timeout_s:g}"
            ) from None
        except self._ray.exceptions.RayTaskError as e:
            cause = e.cause if isinstance(e.cause, BatonError) else None
            if cause is None:
                raise
            raise cause from None
        except self._ray.exceptions.RayActorError as e:
            raise ClusterError(f"an actor died while the cluster started: {e}") from e

    # --- run and end ----------------------------------------------------------------------------------

    def health(self) -> dict[str, dict[str, Any]]:
        """Health of each worker, as it says itself; a dead one is unhealthy too."""
        health: dict[str, dict[str, Any]] = {}
        for worker_id, actor in self.workers.items():
            try:
                health[worker_id] = self._ray.get(actor.health.remote(), timeout=STOP_TIMEOUT_S)
            except (self._ray.exceptions.RayError, TimeoutError) as e:
                health[worker_id] = {"healthy": False, "problem": str(e).splitlines()[0]}
        return health

    def num_held_blocks(self) -> dict[str, int]:
        """Blocks not free, by worker."""
        counts = self._get([actor.num_held_blocks.remote() for actor in self.workers.values()])
        return dict(zip(self.workers, counts, strict=True))

    def details(self) -> dict[str, Any]:
        return {
            "ray_address": self._session.address,
            "router_pid": self._get(self._router.pid.remote()),
            "workers": self.worker_infos,
        }

    def stop(self) -> None:
        """End the actors, give their resources back, and end Ray if it was started here. Idempotent."""
        actors = [actor for actor in (self._router, *self.workers.values()) if actor is not None]
        self._router, self.workers = None, {}
        if self._ray.is_initialized():
            with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
                self._ray.wait(
                    [a.stop.remote() for a in actors], num_returns=max(1, len(actors)), timeout=STOP_TIMEOUT_S
                )
            for actor in actors:
                with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                    self._ray.kill(actor)
            group, self._group = self._group, None
            if group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(group)
        if self._owns_session:
            self._session.close()
