"""`baton drain`: asks for it and waits until the worker has nothing left."""

from __future__ import annotations

import time

from baton.config import Secret
from baton.errors import ClusterError
from baton.protocol import Status, WorkerStatus
from baton_cli.output import out, spinner
from router.client import RouterClient

LOOK_EVERY_S = 0.2


def run_drain(address: str, worker_id: str, *, undo: bool, timeout_s: float, secret: Secret | None = None) -> None:
    """Raises InvalidRequestError for an unknown worker, ClusterError if it is not drained in time."""
    with RouterClient(address, secret=secret) as client:
        worker = _find(client.drain(worker_id, undo=undo), worker_id)
        if undo:
            out.print(f"{worker_id} gets new requests again")
            return
        deadline = time.monotonic() + timeout_s
        with spinner(f"{worker_id} finishes what it has") as show:
            while not _drained(worker):
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"{worker_id} still has {worker.num_outstanding} parts of requests after {timeout_s:g} s; "
                        f"it stays out until `baton drain {worker_id} --undo`"
                    )
                show(f"{worker_id} finishes what it has: {worker.num_outstanding} left")
                time.sleep(LOOK_EVERY_S)
                worker = _find(client.status(), worker_id)
    out.print(f"{worker_id} is drained; `baton drain {worker_id} --undo` lets it get new requests again")


def _find(status: Status, worker_id: str) -> WorkerStatus:
    return next(w for w in status.workers if w.info.worker_id == worker_id)


def _drained(worker: WorkerStatus) -> bool:
    """Nothing placed there is open, and by its own word it holds no block (a hand-over may still be on its way).

    Stranded blocks come free only with the worker's end.
    """
    load = worker.load
    return worker.num_outstanding == 0 and load.blocks_free + load.stranded_blocks == load.blocks_total
