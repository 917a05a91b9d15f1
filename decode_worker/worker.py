"""How a decode worker differs from any other: its receive port, made from the configuration. Wires, decides nothing."""

from __future__ import annotations

from baton.config import TransferConfig
from baton.layout import KVLayout
from decode_worker.receive_port import ReceiveEngine, ReceivePort


def receive_port_for(
    config: TransferConfig,
    *,
    worker_id: str,
    incarnation: str,
    fingerprint: str,
    layout: KVLayout,
    engine: ReceiveEngine,
    pulls: bool = False,
    reach: str = "",
    fixed_blocks: bool = False,
) -> ReceivePort:
    """`pulls`, `reach`, `fixed_blocks`: the transport's (`kv_transfer.base.KVTransport`)."""
    return ReceivePort(
        worker_id=worker_id,
        incarnation=incarnation,
        fingerprint=fingerprint,
        layout=layout,
        engine=engine,
        lease_s=config.lease_s,
        expected_growth=config.expected_growth,
        verify=config.checksum != "none",
        pulls=pulls,
        reach=reach,
        fixed_blocks=fixed_blocks,
    )
