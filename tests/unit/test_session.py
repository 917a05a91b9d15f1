"""The transition table cell by cell, the two sessions, and the helpers beside them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ProtocolError
from baton.sampling_params import SamplingParams
from kv_transfer.checksum import block_checksum
from kv_transfer.deadlines import Deadlines
from kv_transfer.messages import Commit, Offer
from kv_transfer.session import CAUSED_BY, ENDS, Event, RecvSession, SendSession, Session, Side, State
from tests.fakes_transfer import transfer_of

# One row per state, one column per event. `.` ignored, `!` no correct peer sends it, else the next state.
GRID = """
            offer accept refuse data commit ack  nack abort expire lost
OFFERED     .     OPEN   REFUSED !   !      !    !    ABORTED !     FAILED
OPEN        .     .      .      OPEN COMMITTED ! !    ABORTED EXPIRED FAILED
COMMITTED   .     .      .      COMMITTED . DONE FAILED ABORTED EXPIRED FAILED
DONE        .     .      .      .    .      .    .    .     .      .
REFUSED     .     .      .      .    .      .    .    .     .      .
FAILED      .     .      .      .    .      .    .    .     .      .
EXPIRED     .     .      .      .    .      .    .    .     .      .
ABORTED     .     .      .      .    .      .    .    .     .      .
"""
_HEAD, *_ROWS = [line.split() for line in GRID.strip().splitlines()]
CELLS = [(State[row[0]], Event(event), cell) for row in _ROWS for event, cell in zip(_HEAD, row[1:], strict=True)]
SESSIONS = {Side.PREFILL: SendSession, Side.DECODE: RecvSession}
OFFER = Offer(transfer_of(1), tuple(range(10)), (), SamplingParams())


def session_in(state: State, side: Side) -> Session:
    session = SESSIONS[side](OFFER, 3, lease_s=10, now=0, counters=Counter())
    session.state = state
    return session


def sender(**changes: float) -> SendSession:
    return SendSession(OFFER, 3, lease_s=10, now=0, counters=Counter())


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize(("state", "event", "cell"), CELLS)
def test_every_cell(state: State, event: Event, cell: str, side: Side) -> None:
    session = session_in(state, side)
    by = side if side in CAUSED_BY[event] else next(iter(CAUSED_BY[event]))
    if cell == "!":
        with pytest.raises(AssertionError if by is side else ProtocolError):
            session.happens(event, by)
        assert session.state is state
    elif cell == ".":
        assert session.happens(event, by) is False
        assert (session.state, session._counters) == (state, {"ignored": 1})
    else:
        assert session.happens(event, by) is True
        assert session.state is State[cell]
        assert session._counters == ({session.state.value: 1} if session.ended else {})


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", [e for e in Event if len(CAUSED_BY[e]) == 1])
def test_a_message_of_the_wrong_side_is_an_error(state: State, event: Event) -> None:
    """D must not commit, P must not acknowledge: whatever the state."""
    (cause,) = CAUSED_BY[event]
    other = Side.DECODE if cause is Side.PREFILL else Side.PREFILL
    session = session_in(state, cause)
    with pytest.raises(ProtocolError, match=event.value):
        session.happens(event, other)
    assert session.state is state


@pytest.mark.parametrize("side", Side)
@given(events=st.lists(st.sampled_from(Event)))
def test_at_most_one_end(side: Side, events: list[Event]) -> None:
    session = session_in(State.OFFERED, side)
    for event in events:
        peer = Side.DECODE if side is Side.PREFILL else Side.PREFILL
        try:
            session.happens(event, peer if peer in CAUSED_BY[event] else side)
        except (ProtocolError, AssertionError):
            continue
    assert sum(session._counters[end.value] for end in ENDS) == session.ended


def test_commit_waits_for_the_first_token_and_every_block() -> None:
    session = sender()
    assert session.accept(0, 1.0)
    session.add([(0, 10), (1, 11)])
    assert session.take(8, 1.0) == ((0, 10), (1, 11))
    session.hashed({0: 5, 1: 6})
    assert session.commit(True, 1.0) is None
    session.first_token = 7
    assert session.commit(True, 1.0) is None, "block 2 is missing"
    session.add([(2, 12)])
    assert session.take(8, 2.0) == ((2, 12),)
    assert session.commit(True, 2.0) is None, "not hashed yet"
    session.hashed({2: 0})
    assert session.commit(True, 3.0) == Commit(OFFER.transfer, 7, (5, 6, 0), True)
    assert session.commit(True, 3.0) is None, "once"
    assert session.commit_message(True).checksums == (5, 6, 0), "but it can be repeated"


def test_a_prefix_that_decode_holds_is_not_sent() -> None:
    session = sender()
    session.accept(2, 0)
    session.add([(0, 10), (1, 11), (2, 12)])
    assert session.take(8, 0) == ((2, 12),)
    session.hashed({2: 9})
    session.first_token = 7
    commit = session.commit(True, 0)
    assert commit is not None
    assert commit.checksums == (9,)


def test_a_transfer_of_no_blocks_commits_with_the_first_token() -> None:
    session = sender()
    session.accept(3, 0)
    session.add([(0, 10), (1, 11), (2, 12)])
    assert session.take(8, 0) == ()
    session.first_token = 7
    assert session.commit(True, 0) == Commit(OFFER.transfer, 7, (), True)


def test_more_prefix_than_blocks_is_an_error() -> None:
    session = sender()
    with pytest.raises(ProtocolError, match="4 prefix blocks of 3"):
        session.accept(4, 0)
    assert session.state is State.OFFERED


def test_senders_lease_runs_only_while_it_waits_for_others() -> None:
    session = sender()
    assert session.lease_at is None, "waiting for credit is nobody's lease"
    session.accept(0, 5)
    assert session.lease_at is None, "its own engine computes"
    session.add([(0, 10), (1, 11), (2, 12)])
    session.take(2, 20)
    assert session.lease_at == 30
    assert session.sent([0], 25) == 1
    assert session.sent([0], 27) == 0, "a repeated Sent is no progress"
    assert session.lease_at == 35
    session.sent([1], 26)
    assert session.lease_at is None
    session.take(1, 40)
    session.sent([2], 41)
    session.hashed({0: 0, 1: 0, 2: 0})
    session.first_token = 7
    session.commit(True, 50)
    assert session.lease_at == 70, "decode's lease began later, and it can still go on alone"
    session.happens(Event.ACK, Side.DECODE)
    assert session.lease_at is None
    assert session.releasable


def test_ended_with_unsent_blocks_is_not_releasable() -> None:
    session = sender()
    session.accept(0, 0)
    session.add([(0, 10)])
    session.take(1, 0)
    session.happens(Event.ABORT, Side.DECODE)
    assert not session.releasable
    assert session.lease_at == 10
    session.link_dropped = True
    assert session.lease_at is None
    session.sent([0], 3)
    assert session.releasable


def receiver() -> RecvSession:
    session = RecvSession(OFFER, 3, lease_s=10, now=0, counters=Counter())
    session.accept([4, 5, 6, 7], 0, 0)
    assert session.announce(session.sent_indices()) == ((0, 4), (1, 5), (2, 6))
    return session


@pytest.mark.parametrize(
    ("received", "checksums", "checksummed", "verify", "verdict"),
    [
        ({0: 1, 1: 2, 2: 3}, (1, 2, 3), True, True, ""),
        ({0: 1, 1: 2}, (1, 2, 3), True, True, None),
        ({0: 1, 1: 2, 2: 4}, (1, 2, 3), True, True, "block 2"),
        ({0: 1, 1: 2, 2: 4}, (1, 2, 3), False, True, ""),
        ({0: 1, 1: 2, 2: 4}, (1, 2, 3), True, False, ""),
        ({0: 1, 1: 2, 2: 3}, (1, 2), True, True, "names 2 blocks"),
        ({}, (1, 2, 3, 4), True, True, "names 4 blocks"),
    ],
)
def test_verdict(
    received: dict[int, int], checksums: tuple[int, ...], checksummed: bool, verify: bool, verdict: str | None
) -> None:
    session = receiver()
    session.receive(received, 1)
    assert session.verdict(verify) is None, "not before the Commit"
    assert session.commit(Commit(OFFER.transfer, 7, checksums, checksummed), 1)
    result = session.verdict(verify)
    assert (result is None) == (verdict is None)
    assert bool(result) == bool(verdict)
    assert (verdict or "") in (result or "")


def test_a_block_counts_once() -> None:
    session = receiver()
    session.receive({0: 1}, 1)
    session.receive({0: 2, 9: 1}, 2)
    assert session.received == {0: 1}
    assert session._counters["ignored"] == 2
    assert session.lease_at == 11, "what is ignored is no progress"


# --- helpers --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(0, 20)), st.booleans())))
def test_deadlines_like_a_plain_dict(steps: list[tuple[int, int | None, bool]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, int] = {}
    for key, when, collect in steps:
        if collect and when is not None:
            assert set(deadlines.due(when)) == {k for k, w in model.items() if w <= when}
            model = {k: w for k, w in model.items() if w > when}
        else:
            deadlines.set(key, when)
            model.pop(key, None)
            if when is not None:
                model[key] = when
        following = deadlines.next()
        assert (following is None) == (not model)
        assert following is None or following <= min(model.values())


def test_checksums() -> None:
    block = np.arange(64, dtype=np.uint8)
    assert block_checksum(block) == block_checksum(block.copy()) == block_checksum(block.view(np.float32))
    other = block.copy()
    other[63] ^= 1
    assert block_checksum(block) != block_checksum(other)
