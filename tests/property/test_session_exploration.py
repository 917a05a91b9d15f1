"""All behaviours of small hand-over worlds, see `tests.property.exploration`; and bugs planted in the ports are found.

`BATON_EXPLORE_DEEP=1` adds the worlds in `DEEP`: two requests or two faults of any kind, which takes minutes. For the
figures of each world run with `-rP`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from baton.ports import CancelTransfer
from decode_worker.receive_port import ReceivePort
from kv_transfer import session as session_module
from kv_transfer.messages import AbortTransfer
from kv_transfer.session import Event, RecvSession, SendSession, State
from prefill_worker.send_port import SendPort
from tests.property.exploration import Bounds, Explorer, Violation, Wanted

LONG, SHORT, LIKE_LONG = Wanted(2, 0), Wanted(1, 1), Wanted(2, 0)
"""Two blocks in two chunks; one block; and a prompt that is at D already if the first one is adopted."""
ANY: dict[str, Any] = {
    "drops": 1,
    "duplicates": 1,
    "losses": 1,
    "corruptions": 1,
    "delays": 1,
    "cuts": 1,
    "half_cuts": True,
    "control_cuts": 1,
    "aborts": 1,
}
MILD: dict[str, Any] = {"drops": 1, "duplicates": 1, "losses": 1, "corruptions": 1, "control_cuts": 1}
"""What healthy peers survive, and so is a cut that both hear of: no attempt fails."""

WORLDS = {
    "two requests, room for one": Bounds((LONG, SHORT), max_in_flight=1),
    "two requests, pulling": Bounds((LONG, SHORT), max_in_flight=1, pulls=True),
    "a full prefix hit": Bounds((LONG, LIKE_LONG), blocks_p=4, blocks_d=4),
    "a full prefix hit, pulling": Bounds((LONG, LIKE_LONG), blocks_d=3, pulls=True),
    "one fault of any kind": Bounds((LONG,), faults=1, **ANY),
    "one fault of any kind, pulling": Bounds((SHORT,), faults=1, split_steps=True, pulls=True, **ANY),
    "two mild faults": Bounds((SHORT,), faults=2, **(MILD | {"drops": 2, "delays": 1, "aborts": 1})),
    "healthy peers": Bounds((LONG,), faults=1, cuts=1, no_failure=True, **MILD),
    "a cut that costs nothing": Bounds((LONG,), faults=1, cuts=1, no_failure=True, no_recompute=True),
    "healthy peers, pulling": Bounds((LONG,), faults=1, cuts=1, max_in_flight=1, no_failure=True, pulls=True, **MILD),
    "a killed worker": Bounds((SHORT,), faults=1, crashes_p=1, crashes_d=1),
    "a lossy handshake": Bounds((SHORT,), faults=2, drops=1, duplicates=1, aborts=1, control_cuts=1, handshake=True),
}
DEEP = {
    "two requests, one fault": Bounds((LONG, SHORT), faults=1, **ANY),
    "two alike, one fault": Bounds((SHORT, SHORT), faults=1, **MILD),
    "any two faults": Bounds((SHORT,), faults=2, **ANY),
    "any two faults, pulling": Bounds((SHORT,), faults=2, pulls=True, **ANY),
    "two cuts": Bounds((LONG,), faults=2, cuts=2, no_failure=True),
    "two cuts, pulling": Bounds((SHORT,), faults=2, cuts=2, no_failure=True, pulls=True),
    "a killed worker, pulling": Bounds((SHORT,), faults=1, crashes_p=1, crashes_d=1, pulls=True),
    "a killed P and one fault": Bounds((SHORT,), faults=2, crashes_p=1, drops=1, duplicates=1),
    "a killed D and one fault": Bounds((SHORT,), faults=2, crashes_d=1, drops=1, duplicates=1, split_steps=True),
}
DEEP_TOO = os.environ.get("BATON_EXPLORE_DEEP") == "1"


@pytest.mark.parametrize("bounds", WORLDS.values(), ids=WORLDS.keys())
def test_every_behaviour_within_the_bounds(bounds: Bounds) -> None:
    result = Explorer(bounds).explore()
    print(result, dict(result.ends), dict(result.outcomes))
    assert result.exhausted, "the whole space, not a part of it"
    assert result.num_terminal > 0
    assert result.ends["done", "done"] > 0, "no proof if nothing was ever handed over"


@pytest.mark.skipif(not DEEP_TOO, reason="takes minutes: BATON_EXPLORE_DEEP=1")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bounds", DEEP.values(), ids=DEEP.keys())
def test_every_behaviour_of_larger_worlds(bounds: Bounds) -> None:
    result = Explorer(bounds).explore()
    print(result, dict(result.ends), dict(result.outcomes))
    assert result.exhausted


def test_a_search_that_is_cut_off_says_so() -> None:
    result = Explorer(WORLDS["one fault of any kind"]).explore(max_states=100)
    assert not result.exhausted


# --- planted bugs -----------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def nothing_is_repeated(patch: pytest.MonkeyPatch) -> None:
    def ask(self: SendPort, session: SendSession, now: float) -> list[Any]:
        return self._say(session, None, now)[:0]

    patch.setattr(SendPort, "_ask_again", ask)


def answers_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    remember = ReceivePort._remember

    def forget(self: ReceivePort, transfer: Any, answer: Any) -> Any:
        action = remember(self, transfer, answer)
        self._answers.clear()
        return action

    patch.setattr(ReceivePort, "_remember", forget)


def credit_is_taken_twice(patch: pytest.MonkeyPatch) -> None:
    accept = SendSession.accept
    patch.setattr(SendSession, "accept", lambda self, *args: accept(self, *args) or self.state is State.OPEN)


def a_commit_is_taken_for_its_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecvSession, "verdict", lambda self, verify: None if self.committed is None else "")


def former_lives_are_heard(patch: pytest.MonkeyPatch) -> None:
    on_message = ReceivePort.on_message

    def hear(self: ReceivePort, peer: str, message: Any, now: float) -> Any:
        own = self._incarnation
        self._incarnation = message.transfer.target if hasattr(message, "transfer") else own
        try:
            return on_message(self, peer, message, now)
        finally:
            self._incarnation = own

    patch.setattr(ReceivePort, "on_message", hear)


def blocks_are_released_before_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SendSession, "releasable", property(lambda self: self.ended))


def the_transport_is_not_cancelled(patch: pytest.MonkeyPatch) -> None:
    close = ReceivePort._close

    def closed(self: ReceivePort, *args: Any, **kinds: Any) -> Any:
        return [action for action in close(self, *args, **kinds) if not isinstance(action, CancelTransfer)]

    patch.setattr(ReceivePort, "_close", closed)


def adopted_blocks_are_released(patch: pytest.MonkeyPatch) -> None:
    close = ReceivePort._close

    def closed(self: ReceivePort, *args: Any, **kinds: Any) -> Any:
        return close(self, *args, **(kinds | {"release": True}))

    patch.setattr(ReceivePort, "_close", closed)


def checksums_are_not_verified(patch: pytest.MonkeyPatch) -> None:
    verdict = RecvSession.verdict
    patch.setattr(RecvSession, "verdict", lambda self, verify: verdict(self, False))


def decodes_lease_never_fires(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecvSession, "lease_at", None)


def prefills_lease_never_fires(patch: pytest.MonkeyPatch) -> None:
    """Nor does decode answer a Commit that it has no transfer for."""
    patch.setattr(SendSession, "lease_at", None)
    patch.setattr(ReceivePort, "_on_late", lambda self, message: [])


def an_abort_frees_nothing(patch: pytest.MonkeyPatch) -> None:
    close = ReceivePort._close

    def closed(self: ReceivePort, session: Any, answer: Any, now: float, **kinds: Any) -> Any:
        return close(self, session, answer, now, **(kinds | {"release": not isinstance(answer, AbortTransfer)}))

    patch.setattr(ReceivePort, "_close", closed)


def who_waits_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReceivePort, "on_blocks_free", lambda self, now: [])


def blocks_are_shipped_again_at_once(patch: pytest.MonkeyPatch) -> None:
    requeue = SendSession.requeue

    def at_once(self: SendSession) -> None:
        unsent, self.unsent = self.unsent, set()
        requeue(self)
        self.unsent = unsent

    patch.setattr(SendSession, "requeue", at_once)


def what_waits_is_queued_again(patch: pytest.MonkeyPatch) -> None:
    requeue = SendSession.requeue

    def doubled(self: SendSession) -> None:
        waiting = [pair for pair in self.queued if pair[0] in self.resend and not self.unsent]
        requeue(self)
        self.queued.extend(waiting)

    patch.setattr(SendSession, "requeue", doubled)


def void_refs_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecvSession, "is_lent_anew", lambda self, index, ref: index not in self.announced)


def what_is_here_is_not_fetched_again(patch: pytest.MonkeyPatch) -> None:
    def is_lent_anew(self: RecvSession, index: int, ref: int) -> bool:
        return index not in self.received and self.refs.get(index) != ref

    patch.setattr(RecvSession, "is_lent_anew", is_lent_anew)


def a_late_commit_gets_no_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReceivePort, "_on_late", lambda self, message: [])


def the_links_credit_is_lost(patch: pytest.MonkeyPatch) -> None:
    sent = SendSession.sent
    patch.setattr(SendSession, "sent", lambda self, *args: sent(self, *args) * 0)


def decode_does_not_ask_after_a_cut(patch: pytest.MonkeyPatch) -> None:
    on_link_lost = ReceivePort.on_link_lost
    patch.setattr(ReceivePort, "on_link_lost", lambda self, *args: on_link_lost(self, *args)[:0])


def a_cut_is_told_to_nobody(patch: pytest.MonkeyPatch) -> None:
    """Nor does P ship again."""
    patch.setattr(SendPort, "on_link_lost", lambda self, *args: [])


def a_late_refusal_is_an_error(patch: pytest.MonkeyPatch) -> None:
    cells = session_module.TRANSITIONS[State.OPEN]
    patch.delitem(cells, Event.REFUSE)


ONE, TWO = Bounds((SHORT,)), Bounds((LONG,))


def with_faults(bounds: Bounds = ONE, **changes: Any) -> Bounds:
    faults = sum(
        value for name, value in changes.items() if name not in ("pulls", "no_failure", "no_recompute", "max_in_flight")
    )
    fields = {name: getattr(bounds, name) for name in bounds.__dataclass_fields__}
    return Bounds(**(fields | {"faults": faults} | changes))


PLANTED: list[tuple[Plant, Bounds]] = [
    (nothing_is_repeated, with_faults(drops=1, no_failure=True)),
    (answers_are_forgotten, with_faults(duplicates=1)),
    (credit_is_taken_twice, with_faults(duplicates=1)),
    (a_commit_is_taken_for_its_blocks, ONE),
    (former_lives_are_heard, with_faults(crashes_d=1)),
    (blocks_are_released_before_sent, with_faults(aborts=1)),
    (the_transport_is_not_cancelled, with_faults(aborts=1)),
    (adopted_blocks_are_released, ONE),
    (checksums_are_not_verified, with_faults(corruptions=1)),
    (decodes_lease_never_fires, with_faults(losses=1, no_failure=True)),
    (prefills_lease_never_fires, with_faults(drops=1)),
    (an_abort_frees_nothing, with_faults(aborts=1)),
    (who_waits_is_forgotten, Bounds((LONG, SHORT))),
    (blocks_are_shipped_again_at_once, with_faults(TWO, cuts=1)),
    (what_waits_is_queued_again, with_faults(TWO, cuts=2, max_in_flight=1)),
    (void_refs_are_kept, with_faults(cuts=1, pulls=True, no_failure=True)),
    (what_is_here_is_not_fetched_again, with_faults(TWO, cuts=1, pulls=True, no_failure=True, max_in_flight=1)),
    (a_late_commit_gets_no_answer, with_faults(drops=1, no_failure=True)),
    (the_links_credit_is_lost, with_faults(TWO, max_in_flight=1)),
    (decode_does_not_ask_after_a_cut, with_faults(cuts=1, no_failure=True)),
    (a_cut_is_told_to_nobody, with_faults(cuts=1, no_recompute=True)),
    (a_late_refusal_is_an_error, with_faults(duplicates=1, crashes_d=1)),
]


@pytest.mark.parametrize(("plant", "bounds"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_bug_is_found(plant: Plant, bounds: Bounds, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation) as caught:
        Explorer(bounds).explore()
    print(caught.value)
    assert 0 < len(caught.value.path) <= 40, "the path that leads there is told"


def test_ends_that_were_seen_together() -> None:
    """Every way to end is taken, so that the ends' table in the explorer is not vacuous."""
    seen: Counter[tuple[str, str]] = Counter()
    for bounds in (with_faults(losses=1, aborts=1), with_faults(drops=1, delays=2)):
        seen += Explorer(bounds).explore().ends
    for ends in (("done", "done"), ("recomputed", "recomputed"), ("aborted", "aborted"), ("aborted", "done")):
        assert seen[ends] > 0, seen
