"""How a prefill worker differs from any other: its send port, made from the configuration. Wires, decides nothing."""

from __future__ import annotations

from baton.config import TransferConfig
from baton.layout import KVLayout
from kv_transfer.wire_format import wire_encoding
from prefill_worker.send_port import SendEngine, SendPort


def send_port_for(
    config: TransferConfig,
    *,
    worker_id: str,
    incarnation: str,
    fingerprint: str,
    layout: KVLayout,
    engine: SendEngine,
    pulls: bool = False,
    reach: str = "",
) -> SendPort:
    """`pulls`, `reach`: the transport's (`kv_transfer.base.KVTransport`)."""
    return SendPort(
        worker_id=worker_id,
        incarnation=incarnation,
        fingerprint=fingerprint,
        layout=layout,
        engine=engine,
        lease_s=config.lease_s,
        max_unacked_blocks=config.max_unacked_blocks,
        checksummed=config.checksum != "none",
        pulls=pulls,
        reach=reach,
        encoding=wire_encoding(config),
    )
