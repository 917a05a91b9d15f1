"""InOrder: lets the parts of a real cluster hear what is said in the order in which it is said.

With real threads and sockets, two messages from two senders may arrive in either order, and a step may
end before or after a message that is under way. Each order is right, and each is another life. So that
two drivers can be given the same events, this fixes one: the order that equal link times give.

* A message is sent only when its receiver has heard everything that anybody said to it before.
* A step ends only when nothing is under way (`quiet`): steps outlast messages.

It only delays. For one request at a time: it does not tell requests apart.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from baton.ports import Action, BlocksReceived, BlocksSent, FromDecode, FromPrefill, ShipBlocks, ToPeer, ToRouter
from baton.protocol import Abort, AskPrefixes, Heartbeat, Join, Peers, Replace, Submit
from baton_cluster.history import ROUTER, ROUTER_EVENTS, WORKER_EVENTS
from router.actions import SendWorker
from tests.stub_cluster import StubCluster

PATIENCE_S = 20.0


class InOrder:
    """Watches the cores of a cluster that is idle, and from then on holds back what would overtake."""

    def __init__(self, cluster: StubCluster):
        self._changed = threading.Condition(threading.RLock())
        self._said: dict[str, list[str]] = {}
        """By receiver: who said something to it, in order."""
        self._heard: Counter[str] = Counter()
        self._sending: Counter[tuple[str, str]] = Counter()
        """Messages that (sender, receiver) has begun to send."""
        self._on_wire = 0
        """Blocks shipped and neither sent nor received yet count one each for both."""
        self._names = {worker.info.incarnation: name for name, worker in cluster.workers.items()}
        for name, worker in cluster.workers.items():
            for event in WORKER_EVENTS:
                self._watch(worker.core, event, name)
            self._gate(worker._links, "execute", name)
        core = cluster.router._core
        for event in ROUTER_EVENTS:
            self._watch(core, event, ROUTER)
        self._gate(cluster.router._back, "on_action", ROUTER)

    def wait_quiet(self) -> None:
        """Return when all that was said has been heard and all blocks have arrived."""
        self._wait(lambda: not self._on_wire and all(self._heard[to] >= len(said) for to, said in self._said.items()))

    # --- inside -----------------------------------------------------------------------------------

    def _watch(self, core: Any, name: str, place: str) -> None:
        inner = getattr(core, name)

        def watched(*event: Any, **options: Any) -> list[Any]:
            with self._changed:  # said and heard are one act, or something could look quiet in between
                actions: list[Any] = inner(*event, **options)
                for action in actions:
                    self._note_said(place, action)
                self._note_heard(place, name, event)
                self._changed.notify_all()
            return actions

        setattr(core, name, watched)

    def _note_said(self, place: str, action: Any) -> None:
        to = self._receiver(action)
        if to is not None:
            self._said.setdefault(to, []).append(place)
        if isinstance(action, ShipBlocks):
            self._on_wire += 2 * len(action.blocks)

    def _receiver(self, action: Action | SendWorker | Any) -> str | None:
        match action:
            case ToPeer(peer):
                return self._names[peer]
            case ToRouter(Heartbeat()):
                return None
            case ToRouter():
                return ROUTER
            case SendWorker(worker_id, _, Submit() | Replace() | Abort()):
                return worker_id
        return None

    def _note_heard(self, place: str, name: str, event: tuple[Any, ...]) -> None:
        match name, event:
            case "on_router_message", (message, _) if not isinstance(message, Peers | AskPrefixes):
                self._heard[place] += 1
            case "on_worker_message", (_, message, _) if not isinstance(message, Join | Heartbeat):
                self._heard[place] += 1
            case "on_peer_event", (FromDecode() | FromPrefill(), _):
                self._heard[place] += 1
            case "on_peer_event", (BlocksSent(_, indices), _):
                self._on_wire -= len(indices)
            case "on_peer_event", (BlocksReceived(_, checksums), _):
                self._on_wire -= len(checksums)

    def _gate(self, owner: Any, name: str, sender: str) -> None:
        inner = getattr(owner, name)

        def gated(action: Any, *rest: Any) -> Any:
            receiver = self._receiver(action)
            if receiver is not None:
                self._let_pass(sender, receiver)
            return inner(action, *rest)

        setattr(owner, name, gated)

    def _let_pass(self, sender: str, receiver: str) -> None:
        """Wait until all that was said to the receiver before this sender's next message has been heard."""
        mine = self._sending[sender, receiver]
        self._sending[sender, receiver] += 1
        ordinal = [i for i, who in enumerate(self._said[receiver]) if who == sender][mine]
        self._wait(lambda: self._heard[receiver] >= ordinal)

    def _wait(self, condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + PATIENCE_S
        with self._changed:
            while not condition():
                left = give_up - time.monotonic()
                assert left > 0, f"said {self._said}, heard {self._heard}, {self._on_wire} on the wire"
                self._changed.wait(left)
