"""Who may work in this cluster.

Pure. Knows what all workers of a cluster must have in common; must not know requests.
"""

from __future__ import annotations

from baton.errors import JoinRefusedError, LayoutError
from baton.layout import KVLayout
from baton.protocol import PROTOCOL_VERSION, Join


class Membership:
    """The model and the KV layout that the first worker (or the launcher) set, and every other one must share.

    Of the layout, block sizes may differ.
    """

    def __init__(self, fingerprint: str | None = None):
        self.fingerprint = fingerprint
        self._set_by = "this cluster" if fingerprint else ""
        self._layout: KVLayout | None = None
        self._layout_of = ""

    def admit(self, join: Join) -> None:
        """Raises JoinRefusedError naming both values of what differs; else remembers what the worker is."""
        info = join.worker
        if join.version != PROTOCOL_VERSION:
            raise JoinRefusedError(
                f"{info.worker_id} speaks protocol version {join.version}, the router {PROTOCOL_VERSION}; "
                f"run one release everywhere"
            )
        if self.fingerprint is not None and info.fingerprint != self.fingerprint:
            raise JoinRefusedError(
                f"{info.worker_id} serves model {info.fingerprint}, {self._set_by} {self.fingerprint}; "
                f"give all workers the same model and dtype"
            )
        if info.num_blocks < 1:
            raise JoinRefusedError(f"{info.worker_id} has a KV pool of {info.num_blocks} blocks; it needs at least 1")
        if self._layout is not None:
            try:
                self._layout.require_compatible(info.layout, ours=self._layout_of, theirs=info.worker_id)
            except LayoutError as e:
                raise JoinRefusedError(str(e)) from e
        if self.fingerprint is None:
            self.fingerprint, self._set_by = info.fingerprint, info.worker_id
        if self._layout is None:
            self._layout, self._layout_of = info.layout, info.worker_id
