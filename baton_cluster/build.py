"""From a ClusterConfig to the parts of a running worker: the same way for every launcher."""

from __future__ import annotations

import secrets
from typing import Any

import zmq

from baton.config import FAULTY, ClusterConfig
from baton.engine.build import BuiltRunner
from baton.engine.staging import StagedBlocks
from baton.errors import ConfigError
from baton.protocol import WorkerInfo
from baton.security import Security
from baton.worker import EngineWorker
from baton_cluster.assemble import worker_core
from baton_cluster.specs import WorkerSpec
from kv_transfer.base import BlockMemory, KVTransport
from kv_transfer.links import ZmqPeerLinks
from kv_transfer.registry import open_transport
from kv_transfer.wire_format import wire_encoding


def build_worker(
    config: ClusterConfig,
    spec: WorkerSpec,
    built: BuiltRunner,
    *,
    router_address: str,
    context: zmq.Context[Any],
    transport: str,
    host: str = "127.0.0.1",
    cores: tuple[int, ...] | None = None,
    node: str = "",
    gpu_ids: tuple[int, ...] = (),
    pid: int = 0,
) -> EngineWorker:
    """A worker, ready to `start()`. Binds its sockets on `host` at once.

    `transport` is the URL to open (`inproc://`, `shm://`, `zmq+tcp://10.0.0.2`), `cores` the CPU cores it is pinned to,
    `gpu_ids` the GPUs that Ray reserved for it. Raises ConfigError for a transport that cannot be used here.
    """
    role = config.role_of(spec.pool)
    cache = built.kv_cache
    incarnation = secrets.token_hex(8)
    security = Security(config.security.secret)
    opened = open_transport(transport, security)
    try:
        pool = _reachable_pool(built, opened, transport)
    except ConfigError:
        opened.close()
        raise
    links = ZmqPeerLinks(
        incarnation=incarnation,
        pool=pool,
        transport=opened,
        context=context,
        host=host,
        checksums=config.transfer.checksum != "none",
        layout=cache.layout,
        encoding=wire_encoding(config.transfer),
        security=security,
    )
    info = WorkerInfo(
        worker_id=spec.worker_id,
        incarnation=incarnation,
        pool=spec.pool,
        role=role,
        fingerprint=built.fingerprint,
        layout=cache.layout,
        num_blocks=cache.num_blocks,
        max_model_len=built.max_model_len,
        max_batch_requests=config.engine.max_batch_requests,
        control_address=links.control_address,
        data_address=links.data_address,
        node=node,
        device=built.device,
        cores=cores or (),
        gpu_ids=gpu_ids,
        pid=pid,
        engine=built.engine,
    )
    return EngineWorker(
        worker_core(
            config,
            info,
            eos_token_ids=built.spec.eos_token_ids,
            pulls=opened.pulls,
            reach=opened.reach,
            fixed_blocks=opened.fixed_blocks,
        ),
        built.runner,
        links,
        router_address=router_address,
        context=context,
        heartbeat_s=config.liveness.heartbeat_s,
        timeout_s=config.liveness.timeout_s,
        log_steps=config.engine.log_steps,
        record_steps=config.engine.record_steps,
        cores=cores,
        security=security,
    )


def _reachable_pool(built: BuiltRunner, opened: KVTransport, url: str) -> BlockMemory:
    """The worker's KV pool as this transport reaches it."""
    if built.device == "cpu" or opened.reaches_gpu:
        return built.kv_cache
    if url.startswith(FAULTY):
        raise ConfigError(
            "transfer.transport",
            "cannot delay blocks of a GPU's pool that pass through host memory: their copies there would be gone",
            value=url,
            allowed=f"{FAULTY}nccl, {FAULTY}nixl or {FAULTY}cuda-ipc, which reach the pool on the GPU; or device: cpu",
        )
    return StagedBlocks(built.kv_cache)
