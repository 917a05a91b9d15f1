"""From a configuration to a WorkerCore: the one way in which every launcher, and the simulator, puts it together.

Pure. Must not know threads, sockets, tensors or clocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.config import ClusterConfig
from baton.engine.core import EngineCore
from baton.engine.policy import POLICIES
from baton.protocol import WorkerInfo
from baton.worker_core import WorkerCore
from decode_worker.worker import receive_port_for
from prefill_worker.worker import send_port_for


def worker_core(
    config: ClusterConfig,
    info: WorkerInfo,
    *,
    eos_token_ids: Iterable[int] = (),
    pulls: bool = False,
    reach: str = "",
    fixed_blocks: bool = False,
) -> WorkerCore:
    """The worker that `info` describes, with the ports its role needs.

    `pulls`, `reach`, `fixed_blocks`: of its `KVTransport`.
    """
    engine = EngineCore(
        num_blocks=info.num_blocks,
        block_size=info.layout.block_size,
        max_batch_tokens=config.engine.max_batch_tokens,
        max_batch_requests=config.engine.max_batch_requests,
        max_model_len=info.max_model_len,
        step_target_s=None if (ms := config.engine.step_time_target_ms) is None else ms / 1e3,
        policy=POLICIES[config.engine.policy](),
        eos_token_ids=eos_token_ids,
        prefix_cache=config.engine.prefix_cache,
        fingerprint=info.fingerprint,
    )
    send = receive = None
    if info.role != "decode":
        send = send_port_for(
            config.transfer,
            worker_id=info.worker_id,
            incarnation=info.incarnation,
            fingerprint=info.fingerprint,
            layout=info.layout,
            engine=engine,
            pulls=pulls,
            reach=reach,
        )
    if info.role != "prefill":
        receive = receive_port_for(
            config.transfer,
            worker_id=info.worker_id,
            incarnation=info.incarnation,
            fingerprint=info.fingerprint,
            layout=info.layout,
            engine=engine,
            pulls=pulls,
            reach=reach,
            fixed_blocks=fixed_blocks,
        )
    return WorkerCore(info, engine, send, receive)
