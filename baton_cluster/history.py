"""LifeHistory: what every worker and the router heard, did and said for each request, in order.

Watches the pure cores from outside, by wrapping their methods, so it records the same way whichever
driver runs them: the wall-clock one or the simulator (I8 compares the two). Decides and changes nothing.

The life history of a request at one place (a worker's id, or `router`) is an ordered list:

    hears X       a message of the router or of a peer reached the core
    computes s+n  a step was planned that computes tokens[s : s + n]
    awaits i..j   these KV blocks may be written by the transport from now on
    says X        a message left, to a peer or to the router;  token i=t (finish): one sampled token
    tells w X     (router) a message for worker w;  token t: one more for the client;  done, failed: the end

Each place is ordered. Between places there is no order but that of cause and effect, and what depends on
the data link's pace (blocks `shipped`, `sent`, `received`) has none to messages: it is counted, in `blocks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from baton.engine.request import StepPlan
from baton.ports import (
    Action,
    BlocksReceived,
    BlocksSent,
    CancelTransfer,
    FromDecode,
    FromPrefill,
    ReceiveBlocks,
    ShipBlocks,
    ToPeer,
    ToRouter,
)
from baton.protocol import (
    Abort,
    AskPrefixes,
    AttemptFailed,
    HandoffDone,
    HandoffRefused,
    Peers,
    Replace,
    Submit,
    Tokens,
)
from baton.worker_core import WorkerCore
from router.actions import NewTokens, RequestDone, RequestFailed, RouterAction, SendWorker
from router.core import RouterCore

ROUTER = "router"
WORKER_EVENTS = ("on_router_message", "on_peer_event", "on_router_lost", "finish_step", "fail_step", "on_deadline")
ROUTER_EVENTS = (
    "on_generate",
    "on_cancel",
    "on_client_gone",
    "on_shutdown",
    "on_join",
    "on_worker_lost",
    "on_worker_message",
    "on_deadline",
)
"""The methods of the cores that take an event and answer with actions."""


class LifeEvent(NamedTuple):
    at: float
    """Seconds on the clock of the cores that are watched."""
    place: str
    what: str


class LifeHistory:
    """Watch cores before they run; then read `events` and `blocks` by request id."""

    def __init__(self) -> None:
        self.events: dict[str, list[LifeEvent]] = {}
        """In the order of recording. Drivers with threads append from several; each place is in order."""
        self.blocks: dict[str, Counter[tuple[str, str]]] = {}
        """By request id: how many blocks were `(place, shipped | sent | received)`, how many transfers `cancelled`."""

    def at(self, request_id: str, place: str) -> list[str]:
        """The life history of a request at one place."""
        return [event.what for event in self.events.get(request_id, []) if event.place == place]

    def places(self, request_id: str) -> dict[str, list[str]]:
        """Its life history at each place that took part in it."""
        names = sorted({event.place for event in self.events.get(request_id, [])})
        return {place: self.at(request_id, place) for place in names}

    # --- workers ----------------------------------------------------------------------------------

    def watch_worker(self, core: WorkerCore) -> None:
        """From now on, record what this worker's core is told and answers."""
        hears = {"on_router_message": self._hears_router, "on_peer_event": self._hears_peer}
        for name in WORKER_EVENTS:
            self._wrap(core, name, hears.get(name))
        next_step = core.next_step

        def planned(now: float) -> StepPlan | None:
            plan = next_step(now)
            for item in plan.items if plan else ():
                self._add(
                    item.request.key.request_id, now, core.info.worker_id, f"computes {item.start}+{item.num_tokens}"
                )
            return plan

        setattr(core, "next_step", planned)  # noqa: B010  (mypy forbids the assignment)

    def _wrap(self, core: WorkerCore, name: str, hears: Callable[[str, Any, float], None] | None) -> None:
        inner: Callable[..., list[Action]] = getattr(core, name)
        place = core.info.worker_id

        def watched(*event: Any) -> list[Action]:
            now = event[-1]
            if hears is not None:
                hears(place, event[0], now)
            actions = inner(*event)
            for action in actions:
                self._does(place, action, now)
            return actions

        setattr(core, name, watched)

    def _hears_router(self, place: str, message: Submit | Replace | Abort | Peers | AskPrefixes, now: float) -> None:
        if not isinstance(message, Peers | AskPrefixes):
            self._add(message.key.request_id, now, place, f"hears {type(message).__name__}")

    def _hears_peer(self, place: str, event: Any, now: float) -> None:
        match event:
            case FromDecode(_, message) | FromPrefill(_, message):
                transfer = getattr(message, "transfer", None)
                if transfer is not None:
                    self._add(transfer.request_id, now, place, f"hears {type(message).__name__}")
            case BlocksSent(transfer, indices):
                self._count(transfer.request_id, place, "sent", len(indices))
            case BlocksReceived(transfer, checksums):
                self._count(transfer.request_id, place, "received", len(checksums))

    def _does(self, place: str, action: Action, now: float) -> None:
        match action:
            case ToRouter(Tokens(tokens=tokens)):
                for token in tokens:
                    end = f" ({token.finish})" if token.finish else ""
                    self._add(token.request_id, now, place, f"token {token.index}={token.token}{end}")
            case ToRouter(AttemptFailed(key=key, code=code)):
                self._add(key.request_id, now, place, f"says AttemptFailed {code}")
            case ToRouter(HandoffDone(key=key, blocks=blocks)):
                self._add(key.request_id, now, place, f"says HandoffDone {blocks}")
            case ToRouter(HandoffRefused(key=key, decode=decode)):
                self._add(key.request_id, now, place, f"says HandoffRefused {decode}")
            case ToPeer(_, message):
                transfer = getattr(message, "transfer", None)
                if transfer is not None:
                    self._add(transfer.request_id, now, place, f"says {type(message).__name__}")
            case ShipBlocks(_, transfer, pairs):
                self._count(transfer.request_id, place, "shipped", len(pairs))
            case ReceiveBlocks(_, transfer, _, pairs):
                self._add(transfer.request_id, now, place, f"awaits {_indices(pairs)}")
            case CancelTransfer(transfer):
                self._count(transfer.request_id, place, "cancelled", 1)

    # --- the router -------------------------------------------------------------------------------

    def watch_router(self, core: RouterCore) -> None:
        """From now on, record what the router's core does for each request."""
        for name in ROUTER_EVENTS:
            self._wrap_router(core, name)

    def _wrap_router(self, core: RouterCore, name: str) -> None:
        inner: Callable[..., list[RouterAction]] = getattr(core, name)

        def watched(*event: Any, **options: Any) -> list[RouterAction]:
            actions = inner(*event, **options)
            for action in actions:
                self._routes(action, event[-1])
            return actions

        setattr(core, name, watched)

    def _routes(self, action: RouterAction, now: float) -> None:
        match action:
            case SendWorker(worker_id, _, Submit() | Replace() | Abort() as message):
                self._add(message.key.request_id, now, ROUTER, f"tells {worker_id} {type(message).__name__}")
            case NewTokens(request_id=request_id, tokens=tokens):
                for token in tokens:
                    self._add(request_id, now, ROUTER, f"token {token}")
            case RequestDone(request_id=request_id, finish_reason=reason):
                self._add(request_id, now, ROUTER, f"done {reason}")
            case RequestFailed(request_id=request_id, code=code):
                self._add(request_id, now, ROUTER, f"failed {code}")

    # --- inside -----------------------------------------------------------------------------------

    def _add(self, request_id: str, now: float, place: str, what: str) -> None:
        self.events.setdefault(request_id, []).append(LifeEvent(now, place, what))

    def _count(self, request_id: str, place: str, what: str, number: int) -> None:
        self.blocks.setdefault(request_id, Counter())[place, what] += number


def _indices(pairs: Sequence[tuple[int, int]]) -> str:
    """Of blocks that follow one another."""
    return f"{pairs[0][0]}..{pairs[-1][0]}" if pairs else "nothing"
