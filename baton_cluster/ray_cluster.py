"""RayCluster: one actor process per worker and one for the router, placed and pinned by Ray.

    connect ─► placement group (one bundle a worker) ─► actors ─► cores per node
      ─► router starts, workers load ─► workers join ─► ready ─► watched (`supervisor`) ─► stop

Whatever fails, or Ctrl-C, undoes what was done so far.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from typing import Any

import msgspec

from baton.config import ClusterConfig, PoolConfig, dump_config
from baton.engine.weights import resolve_model
from baton.errors import BatonError, ClusterError, ConfigError
from baton.protocol import WorkerInfo
from baton.step_log import StepRecord
from baton_cluster.actors import RouterActor, WorkerActor
from baton_cluster.cluster import Cluster, Progress, exposures, no_progress
from baton_cluster.cores import assign_cores
from baton_cluster.ray_session import RaySession
from baton_cluster.role_watch import RoleWatch
from baton_cluster.specs import WorkerSpec, worker_specs
from baton_cluster.supervisor import Supervisor
from kv_transfer.registry import resolve_transport, shares_memory
from router.http.server import check_address
from router.http.tls import check_tls
from router.roles import RoleOrder

STOP_TIMEOUT_S = 10.0
"""A worker ends after the step it is in; one that takes longer is killed."""

LEAVE_TIMEOUT_S = 60.0
"""A worker that changes its role has nothing left to finish; one that takes longer is killed."""

LOOPBACK = "127.0.0.1"


def bundle(pool: PoolConfig) -> dict[str, float]:
    """What Ray reserves for one worker of a pool."""
    resources: dict[str, float] = {"CPU": float(pool.cores), **pool.resources}
    if pool.gpus:
        resources["GPU"] = pool.gpus
    return resources


class _Slot(msgspec.Struct):
    """A worker's place, which outlives the processes that fill it."""

    spec: WorkerSpec
    bundle_index: int
    actor: Any = None
    host: str = LOOPBACK
    cores: tuple[int, ...] = ()
    transport: str = ""
    """The URL that its KV transport opens."""
    info: dict[str, Any] = {}


class RayCluster(Cluster):
    """Starts in its constructor. With `session` it uses that connection to Ray and leaves it open at the end.

    A worker or a router that dies is started again, in its place and on its cores, as a new incarnation;
    requests go on elsewhere meanwhile, or wait. `progress` then gets a line too, from another thread.
    A worker that changes its role (`planner.enabled`) keeps its id, its place and its cores, and is started again in
    the other pool.
    """

    def __init__(self, config: ClusterConfig, *, session: RaySession | None = None, progress: Progress = no_progress):
        self.config = config
        self.warnings: list[str] = []
        self._progress = progress
        self._slots = {spec.worker_id: _Slot(spec, i) for i, spec in enumerate(worker_specs(config))}
        self._router: Any = None
        self._router_host = LOOPBACK
        self._router_node = ""
        self._back = ""
        self._ready_by = time.monotonic() + config.start_timeout_s
        self._group: Any = None
        self._owns_session = session is None
        self._lock = threading.Lock()
        self._stopping = False
        self._role_watch: RoleWatch | None = None
        if config.ray.address is None:  # else the router may be on a node that has other files
            check_tls(config.http)
            check_address(config)
        # Converted here, once, with a message; on other nodes each worker finds or converts its own.
        self._model_path = str(resolve_model(config.model.source, progress=progress))
        bundles = [bundle(config.pools[slot.spec.pool]) for slot in self._slots.values()]
        progress("starting Ray" if config.ray.address is None else f"connecting to Ray at {config.ray.address}")
        self._session = session or RaySession(
            config.ray, num_cpus=sum(int(b["CPU"]) for b in bundles), namespace=f"baton-{config.name}"
        )
        self._ray = self._session.ray
        self._supervisor = Supervisor(self._session.ray, self._restart, progress)
        try:
            self._place(bundles)
            self._start()
        except BaseException:
            self.stop()
            raise

    # --- start --------------------------------------------------------------------------------------

    def _place(self, bundles: list[dict[str, float]]) -> None:
        from ray.util.placement_group import placement_group

        self._progress(f"placing {len(bundles)} workers")
        total = defaultdict(float, self._ray.cluster_resources())
        for kind in sorted({kind for b in bundles for kind in b}):
            wanted = sum(b.get(kind, 0) for b in bundles)
            if wanted > total[kind]:
                key = {"CPU": "cores", "GPU": "gpus"}.get(kind, "resources")
                raise ClusterError(
                    f"{len(bundles)} workers want {wanted:g} {kind} in all, the Ray cluster has {total[kind]:g}; "
                    f"lower `workers` or `{key}` of the pools"
                )
        self._group = placement_group(bundles, strategy=self.config.ray.strategy)
        if not self._group.wait(max(0.0, self._ready_by - time.monotonic())):
            raise ClusterError(
                f"Ray cannot place the workers ({self.config.ray.strategy}, bundles {bundles}) within "
                f"{self.config.start_timeout_s:g} s: the resources exist, but are in use or spread over other nodes"
            )

    def _start(self) -> None:
        slots = list(self._slots.values())
        self._router = self._new_router()
        for slot in slots:
            slot.actor = self._new_worker(slot)
        self._progress("starting processes")
        places = self._get([slot.actor.where.remote() for slot in slots])
        self._assign(slots, places)
        single_node = self._session.owned and len({place["node_id"] for place in places}) == 1
        if not single_node:
            self._router_host = self._get(self._router.where.remote())["node_ip"]
            for slot, place in zip(slots, places, strict=True):
                slot.host = place["node_ip"]
        hosts = [self.config.router.host, self._router_host, *(slot.host for slot in slots)]
        self.warnings += exposures(self.config, hosts)
        self._choose_transport(slots, places)
        self._progress("loading the model")
        start_router = self._router.start.remote(self._model_path, self._router_host)
        (self.address, self._back, self.url), *memory = self._get([start_router, *map(self._load, slots)])
        for slot, plan in zip(slots, memory, strict=True):
            self._progress(f"{slot.spec.worker_id}: {plan}")
        self._progress("joining")
        infos = self._get([self._join(slot) for slot in slots])
        for slot, info in zip(slots, infos, strict=True):
            slot.info = info
        self._get(self._router.wait_ready.remote(len(slots), self._ready_by - time.monotonic()))
        self._router_node = self._get(self._router.where.remote())["node_id"]
        self._supervisor.watch("router", self._router)
        for slot in slots:
            self._supervisor.watch(slot.spec.worker_id, slot.actor)
        if self.config.planner.enabled:
            self._role_watch = RoleWatch(
                self._role_order, self._change_role, self.config.planner.interval_s, self._progress
            )

    def _new_router(self, config: ClusterConfig | None = None) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # A few calls at once: it answers for itself while another call waits for workers to be ready.
        # A restarted one must come back at its addresses, so on its node.
        place = NodeAffinitySchedulingStrategy(self._router_node, soft=False) if self._router_node else "DEFAULT"
        return (
            self._ray.remote(RouterActor)
            .options(num_cpus=0, max_concurrency=4, scheduling_strategy=place)
            .remote(dump_config(config or self.config, with_secret=True))
        )

    def _new_worker(self, slot: _Slot) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        pool = self.config.pools[slot.spec.pool]
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=slot.bundle_index)
        options = {
            "num_cpus": pool.cores,
            "num_gpus": pool.gpus,
            "resources": pool.resources or None,
            "max_concurrency": 4,  # health is asked while it loads, and while somebody waits for its end
            "scheduling_strategy": place,
        }
        return (
            self._ray.remote(WorkerActor)
            .options(**options)
            .remote(dump_config(self.config, with_secret=True), slot.spec.worker_id, slot.spec.pool)
        )

    def _choose_transport(self, slots: list[_Slot], places: list[dict[str, Any]]) -> None:
        """`auto` takes `shm` if all workers are on one node, compute on its CPUs, and can map each other's memory.

        And if blocks travel as they are.
        """
        name = self.config.transfer.transport
        reaches = {place["memory"] for place in places}
        one_memory = len(reaches) == 1 and "" not in reaches
        if self.config.transfer.transport_kind == "shm" and not one_memory:
            where = sorted({f"{place['hostname']} ({place['node_ip']}, {place['memory']})" for place in places})
            problem = f"workers cannot map each other's memory; they are on {' and on '.join(where)}"
            raise ConfigError("transfer.transport", problem, value=name, allowed="auto, zmq+tcp")
        one_node = len({place["node_id"] for place in places}) == 1
        can_share = one_memory and one_node and not any(self.config.pools[s.spec.pool].may_use_gpu for s in slots)
        can_share = can_share and not self.config.mixes_block_sizes
        encodes = self.config.transfer.wire_encoding != "none"
        for slot in slots:
            slot.transport = resolve_transport(
                name, one_process=False, can_share=can_share, encodes=encodes, host=slot.host
            )

    def _load(self, slot: _Slot) -> Any:
        return slot.actor.load.remote(slot.cores, shares_memory(slot.transport))

    def _join(self, slot: _Slot) -> Any:
        return slot.actor.start.remote(self._back, slot.host, slot.cores, slot.transport)

    def _assign(self, slots: list[_Slot], places: list[dict[str, Any]]) -> None:
        """Cores per worker, node by node."""
        by_node: dict[str, list[int]] = defaultdict(list)
        for index, place in enumerate(places):
            by_node[place["node_id"]].append(index)
        for indices in by_node.values():
            wanted = [self.config.pools[slots[i].spec.pool].cores for i in indices]
            assigned, warning = assign_cores(wanted, places[indices[0]]["cores"])
            if warning:
                self.warnings.append(f"{places[indices[0]]['hostname']}: {warning}")
            for index, cores in zip(indices, assigned, strict=True):
                slots[index].cores = cores

    def _get(self, refs: Any) -> Any:
        """The actors' answers by `_ready_by`, as what they raised where they raised."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(refs, timeout=max(0.0, self._ready_by - time.monotonic()))
        except errors.GetTimeoutError:
            limit = f"start_timeout_s={self.config.start_timeout_s:g}"
            raise ClusterError(f"the cluster was not ready within {limit}") from None
        except errors.RayTaskError as e:
            if isinstance(e.cause, BatonError):
                raise e.cause from None
            raise
        except errors.RayActorError as e:
            raise ClusterError(f"an actor died while the cluster started: {e}") from e

    # --- run ----------------------------------------------------------------------------------------

    def _restart(self, name: str) -> Any:
        """Replace a dead actor, in its place; the supervisor's thread. None if the cluster is stopping."""
        with self._lock:
            if self._stopping:
                return None
            if name == "router":
                # At the same addresses: clients and workers reconnect by themselves.
                router = msgspec.structs.replace(self.config.router, port=_port(self.address))
                http = msgspec.structs.replace(self.config.http, port=_port(self.url) if self.url else 0)
                config = msgspec.structs.replace(self.config, router=router, http=http)
                self._router = actor = self._new_router(config)
            else:
                slot = self._slots[name]
                slot.actor = actor = self._new_worker(slot)
        self._ready_by = time.monotonic() + self.config.start_timeout_s
        if name == "router":
            self._get(actor.start.remote(self._model_path, self._router_host, _port(self._back)))
        else:
            self._get(self._load(slot))
            slot.info = self._get(self._join(slot))
        return actor

    def _role_order(self) -> RoleOrder | None:
        with self._lock:
            router = self._router
        order: RoleOrder | None = None
        if router is not None:
            order = self._ray.get(router.role_order.remote(), timeout=STOP_TIMEOUT_S)
        return order

    def _change_role(self, order: RoleOrder) -> bool:
        """It leaves in order; then the supervisor starts what its slot says by now."""
        with self._lock:
            slot = self._slots[order.worker_id]
            actor = slot.actor
            if self._stopping or msgspec.convert(slot.info, WorkerInfo).incarnation != order.incarnation:
                return False
            slot.spec = WorkerSpec(order.worker_id, order.pool)
        errors = self._ray.exceptions
        with contextlib.suppress(errors.RayError, TimeoutError):
            self._ray.get(actor.leave.remote(), timeout=LEAVE_TIMEOUT_S)
        with contextlib.suppress(errors.RayError, ValueError):
            self._ray.kill(actor)  # its successor waits for its resources
        return True

    def health(self) -> dict[str, dict[str, Any]]:
        """Health of each worker, as it says itself; a dead one is unhealthy too."""
        health: dict[str, dict[str, Any]] = {}
        for worker_id, slot in self._slots.items():
            try:
                health[worker_id] = self._ray.get(slot.actor.health.remote(), timeout=STOP_TIMEOUT_S)
            except (self._ray.exceptions.RayError, TimeoutError) as e:
                health[worker_id] = {"healthy": False, "problem": str(e).splitlines()[0]}
        return health

    def num_held_blocks(self) -> dict[str, int]:
        """Blocks not free, by worker."""
        calls = [slot.actor.num_held_blocks.remote() for slot in self._slots.values()]
        counts = self._ray.get(calls, timeout=STOP_TIMEOUT_S)
        return dict(zip(self._slots, counts, strict=True))

    def take_steps(self) -> list[StepRecord]:
        steps: list[StepRecord] = []
        for slot in self._slots.values():
            with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):  # it died
                found = self._ray.get(slot.actor.take_steps.remote(), timeout=STOP_TIMEOUT_S)
                steps += msgspec.msgpack.decode(found, type=list[StepRecord])
        return sorted(steps, key=lambda step: step.start_s)

    def details(self) -> dict[str, Any]:
        return {
            "ray_address": self._session.address,
            "logs": self._session.logs,
            "router_pid": self._ray.get(self._router.where.remote(), timeout=STOP_TIMEOUT_S)["pid"],
            "workers": [slot.info for slot in self._slots.values()],
        }

    # --- end ----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the actors, give their resources back, and end Ray if it was started here. Idempotent.

        The router first: it gives what is open `router.shutdown_grace_s` to end, which Ctrl-C cuts short.
        """
        with self._lock:
            self._stopping = True
            router, actors = self._router, [a for s in self._slots.values() if (a := s.actor) is not None]
            self._router = None
            for slot in self._slots.values():
                slot.actor = None
        self._supervisor.stop()
        try:
            if self._role_watch is not None:
                self._role_watch.stop()
            if router is not None and self._router_node and self._ray.is_initialized():  # else it never was ready
                self._stop_router(router)
        finally:
            self._end_actors(actors if router is None else [router, *actors])
            self._supervisor.join()
            if self._owns_session:
                self._session.close()

    def _stop_router(self, router: Any) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            stopped = router.stop.remote()
            self._ray.wait([stopped], timeout=self.config.router.shutdown_grace_s + STOP_TIMEOUT_S)

    def _end_actors(self, actors: list[Any]) -> None:
        if self._ray.is_initialized():
            errors = self._ray.exceptions
            if actors:
                with contextlib.suppress(errors.RayError, TimeoutError):
                    stops = [actor.stop.remote() for actor in actors]
                    self._ray.wait(stops, num_returns=len(stops), timeout=STOP_TIMEOUT_S)
            for actor in actors:
                with contextlib.suppress(errors.RayError, ValueError):
                    self._ray.kill(actor)
            group, self._group = self._group, None
            if group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(group)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
