"""From a ClusterConfig to the parts of a running worker: the same way for every launcher."""

from __future__ import annotations

import secrets
from typing import Any

import zmq

from baton.config import ClusterConfig
from baton.engine.core import EngineCore
from baton.engine.policy import POLICIES
from baton.engine.runner import BuiltRunner
from baton.protocol import WorkerInfo
from baton.worker import EngineWorker
from baton.worker_core import WorkerCore
from baton_cluster.specs import WorkerSpec
from decode_worker.worker import receive_port_for
from kv_transfer.links import ZmqPeerLinks
from kv_transfer.registry import open_transport
from prefill_worker.worker import send_port_for


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
    device_ids: tuple[int, ...] = (),
    pid: int = 0,
) -> EngineWorker:
    """A worker, ready to `start()`. Binds its sockets on `host` at once.

    `transport` is the URL to open (`inproc://`, `zmq+tcp://10.0.0.2`), `cores` the CPU cores it is pinned to,
    `device_ids` what the status shows: cores on CPU, GPU ids on CUDA.
    """
    role = config.role_of(spec.pool)
    cache = built.kv_cache
    incarnation = secrets.token_hex(8)
    opened = open_transport(transport)
    links = ZmqPeerLinks(
        incarnation=incarnation,
        pool=cache,
        transport=opened,
        context=context,
        host=host,
        checksums=config.transfer.checksum != "none",
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
        device_ids=device_ids or cores or (),
        pid=pid,
    )
    engine = EngineCore(
        num_blocks=cache.num_blocks,
        block_size=config.engine.block_size,
        max_batch_tokens=config.engine.max_batch_tokens,
        max_batch_requests=config.engine.max_batch_requests,
        max_model_len=built.max_model_len,
        policy=POLICIES[config.engine.policy](),
        eos_token_ids=built.spec.eos_token_ids,
    )
    identity: dict[str, Any] = {
        "worker_id": spec.worker_id,
        "incarnation": incarnation,
        "fingerprint": built.fingerprint,
        "layout": cache.layout,
        "engine": engine,
    }
    send = send_port_for(config.transfer, **identity) if role in ("prefill", "both") else None
    receive = None
    if role in ("decode", "both"):
        receive = receive_port_for(config.transfer, **identity, pulls=opened.pulls)
    return EngineWorker(
        WorkerCore(info, engine, send, receive),
        built.runner,
        links,
        router_address=router_address,
        context=context,
        heartbeat_s=config.liveness.heartbeat_s,
        timeout_s=config.liveness.timeout_s,
        cores=cores,
    )
