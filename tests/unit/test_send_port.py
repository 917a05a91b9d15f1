"""The send port: events in, actions out, and the books of a fake engine."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.request import Ended
from baton.errors import ProtocolError
from baton.ports import Action, CancelTransfer, ConnectPeer, DropLink, HashBlocks, ShipBlocks, ToPeer, ToRouter
from baton.protocol import PROTOCOL_VERSION, AttemptFailed, HandoffDone, HandoffRefused, Replace, TransferId
from kv_transfer.messages import (
    AbortTransfer,
    Accept,
    Ack,
    Commit,
    Data,
    Hello,
    HelloRefused,
    Nack,
    Offer,
    Refuse,
    Welcome,
)
from kv_transfer.session import MAX_RELINKS
from prefill_worker.send_port import SendPort
from tests.fakes_transfer import LAYOUT, FakeEngine, key_of, submit_of, transfer_of, worker_info

LEASE = 30.0
T1 = transfer_of(1)


class Rig:
    def __init__(self, max_unacked_blocks: int = 64, num_blocks: int = 32, welcome: bool = True, pulls: bool = False):
        self.engine = FakeEngine(num_blocks)
        self.port = SendPort(
            worker_id="prefill-0",
            incarnation="P1",
            fingerprint="f",
            layout=LAYOUT,
            engine=self.engine,
            lease_s=LEASE,
            max_unacked_blocks=max_unacked_blocks,
            pulls=pulls,
        )
        self.pulls = pulls
        self.num_refs = 0
        self.now = 0.0
        self.port.on_peers((worker_info(),), 0.0)
        if welcome:
            self.hear(Welcome("decode-0", "D1"))

    def hear(self, message: Any, peer: str = "D1") -> list[Action]:
        return self.port.on_message(peer, message, self.now)

    def offer(self, number: int = 1, **changes: Any) -> list[Action]:
        submit = submit_of(number, **changes)
        self.engine.submit(submit)
        return self.port.offer(submit, self.now)

    def compute(self, number: int = 1, num_tokens: int = 100) -> list[Action]:
        actions: list[Action] = []
        for effect in self.engine.compute(key_of(number), num_tokens):
            hook = self.port.on_chunk if type(effect).__name__ == "ChunkDone" else self.port.on_prompt_done
            actions += hook(effect, self.now)  # type: ignore[arg-type]
        return actions

    def shipped(self, actions: list[Action]) -> list[Action]:
        """Hash (checksum = 100 + index) and ship what was asked for."""
        following: list[Action] = []
        for action in actions:
            if isinstance(action, ShipBlocks):
                refs = tuple(range(self.num_refs, self.num_refs + len(action.blocks))) if self.pulls else ()
                self.num_refs += len(refs)
                checksums = {i: 100 + i for i, _ in action.blocks}
                indices = tuple(checksums)
                told = self.port.on_shipped(action.transfer, indices, refs, self.now)
                following += [a for a in told if not isinstance(a, HashBlocks)]
                following += self.port.on_hashed(action.transfer, checksums, self.now)
        return following

    def sent(self, *indices: int, transfer: TransferId = T1) -> list[Action]:
        return self.port.on_sent(transfer, indices, self.now)

    def committed(self, number: int = 1) -> None:
        """A transfer of three blocks, all shipped, none reported sent."""
        self.offer(number)
        self.hear(Accept(transfer_of(number)))
        self.shipped(self.compute(number))

    def at(self, now: float) -> list[Action]:
        self.now = now
        return self.port.on_deadline(now)


def said(actions: list[Action], kind: type) -> list[Any]:
    return [a.message for a in actions if isinstance(a, ToPeer | ToRouter) and isinstance(a.message, kind)]


def test_handshake_comes_before_offers() -> None:
    rig = Rig(welcome=False)
    assert rig.offer() == []
    actions = rig.hear(Welcome("decode-0", "D1"))
    (offer,) = said(actions, Offer)
    assert (offer.transfer, offer.prompt) == (T1, tuple(range(10)))
    assert rig.hear(Welcome("decode-0", "D1")) == []


def test_peers_are_greeted_once_and_again_after_a_silence() -> None:
    rig = Rig(welcome=False)
    assert rig.port.on_peers((worker_info(),), 1.0) == []
    actions = rig.port.on_peers((worker_info(), worker_info("D2", "decode-1"), worker_info("P1", "prefill-0")), 1.0)
    hello = Hello(PROTOCOL_VERSION, "prefill-0", "P1", "f", LAYOUT)
    assert actions == [ConnectPeer(worker_info("D2", "decode-1")), ToPeer("D2", hello)]
    assert rig.at(LEASE / 4) == [ToPeer("D1", hello)]


@pytest.mark.parametrize(
    "answer", [HelloRefused("decode-0", "block_size differs: 16 and 32"), Welcome("decode-0", "D2")]
)
def test_an_unfit_peer_refuses_all_offers(answer: Any) -> None:
    rig = Rig(welcome=False)
    rig.offer(1)
    (refused,) = said(rig.hear(answer), HandoffRefused)
    assert (refused.key, refused.decode) == (key_of(1), "decode-0")
    assert "32" in refused.reason or "D2" in refused.reason
    assert said(rig.offer(2), HandoffRefused)
    assert rig.port.num_open() == 0
    assert said(rig.port.replace(Replace(key_of(1), None), 1.0), Offer) == []
    assert rig.engine.kept == [key_of(1)]


def test_unknown_decode_worker_is_a_refusal() -> None:
    (refused,) = said(Rig().offer(1, decode="decode-7"), HandoffRefused)
    assert "decode-7" in refused.reason


def test_the_whole_way() -> None:
    rig = Rig()
    rig.offer()
    assert rig.hear(Accept(T1)) == []
    assert list(rig.engine.granted) == [key_of(1)]
    first = rig.compute(num_tokens=5)  # one full block of 4
    assert [[i for i, _ in a.blocks] for a in first if isinstance(a, ShipBlocks)] == [[0]]
    assert rig.shipped(first) == []
    rest = rig.compute()
    (commit,) = said(rig.shipped(rest), Commit)
    assert commit == Commit(T1, 7, (100, 101, 102), True)
    (done,) = said(rig.hear(Ack(T1)), HandoffDone)
    assert (done.blocks, done.bytes) == (3, 3 * LAYOUT.block_bytes)
    assert rig.engine.releases == [], "acked, but the transport may still read"
    rig.sent(0, 1)
    assert rig.engine.releases == []
    rig.sent(2)
    assert rig.engine.releases == [key_of(1)]
    assert rig.port.num_open() == 0
    assert rig.port.next_deadline() is None
    assert rig.hear(Ack(T1)) == []
    assert rig.sent(2) == []
    rig.engine.check()


def test_sent_before_ack_releases_at_the_ack() -> None:
    rig = Rig()
    rig.committed()
    rig.sent(0, 1, 2)
    assert rig.engine.releases == []
    rig.hear(Ack(T1))
    assert rig.engine.releases == [key_of(1)]


def test_full_prefix_moves_nothing() -> None:
    rig = Rig()
    rig.offer()
    rig.hear(Accept(T1, prefix_blocks=3))
    actions = rig.compute()
    assert said(actions, Commit) == [Commit(T1, 7, (), True)]
    (done,) = said(rig.hear(Ack(T1)), HandoffDone)
    assert done.bytes == 0
    assert rig.engine.releases == [key_of(1)]


def test_pulling_transport_names_its_refs() -> None:
    rig = Rig()
    rig.offer()
    rig.hear(Accept(T1))
    (ship,) = [a for a in rig.compute() if isinstance(a, ShipBlocks)]
    tell, hash_them = rig.port.on_shipped(ship.transfer, (0, 1, 2), (7, 8, 9), 0.0)
    assert said([tell], Data) == [Data(T1, (0, 1, 2), (7, 8, 9))]
    assert hash_them == HashBlocks(T1, ship.blocks, (0, 0, 0)), "while decode fetches"
    assert said(rig.port.on_hashed(T1, {0: 1, 1: 1, 2: 1}, 0.0), Commit)


def test_a_pulling_transports_refs_are_named_again_until_they_were_used() -> None:
    """The Data may have been lost; what was fetched needs no second one, and after all was the Commit is enough."""
    rig = Rig()
    rig.offer()
    rig.hear(Accept(T1))
    (ship,) = [a for a in rig.compute() if isinstance(a, ShipBlocks)]
    rig.port.on_shipped(ship.transfer, (0, 1, 2), (7, 8, 9), 0.0)
    (commit,) = said(rig.port.on_hashed(T1, {0: 1, 1: 1, 2: 1}, 0.0), Commit)
    rig.port.on_sent(T1, (1,), 1.0)
    actions = rig.at(LEASE / 4)
    assert said(actions, Data) == [Data(T1, (0, 2), (7, 9))]
    assert said(actions, Commit) == [commit]
    rig.port.on_sent(T1, (0, 2), rig.now)
    actions = rig.at(LEASE / 2)
    assert said(actions, Data) == []
    assert said(actions, Commit) == [commit]


def test_refused_is_held_and_replaced() -> None:
    rig = Rig()
    rig.port.on_peers((worker_info(), worker_info("D2", "decode-1")), 0.0)
    rig.hear(Welcome("decode-1", "D2"), peer="D2")
    rig.offer()
    (refused,) = said(rig.hear(Refuse(T1, "too large")), HandoffRefused)
    assert refused.reason == "too large"
    assert rig.port.next_deadline() is None, "the router's turn, and no blocks"
    assert rig.hear(Refuse(T1, "too large")) == []
    (offer,) = said(rig.port.replace(Replace(key_of(1), "decode-1"), 1.0), Offer)
    assert offer.transfer.target == "D2"


def test_replace_while_offered_withdraws_the_offer() -> None:
    rig = Rig()
    rig.offer()
    assert rig.port.replace(Replace(key_of(1), "decode-0"), 0.0) == []
    actions = rig.port.replace(Replace(key_of(1), None), 0.0)
    assert said(actions, AbortTransfer)
    assert rig.engine.kept == [key_of(1)]
    # D's Accept crossed the withdrawal: it must not wait for its lease.
    assert said(rig.hear(Accept(T1)), AbortTransfer)


def test_replace_comes_too_late() -> None:
    rig = Rig()
    rig.offer()
    rig.hear(Accept(T1))
    assert rig.port.replace(Replace(key_of(1), None), 0.0) == []
    assert rig.engine.kept == []


@pytest.mark.parametrize("when", ["held", "greeting", "offered", "open", "shipping", "committed"])
def test_engine_ends_the_request_in_every_state(when: str) -> None:
    rig = Rig(welcome=when != "greeting")
    rig.offer()
    ships: list[Action] = []
    if when == "held":
        rig.hear(Refuse(T1, "no"))
    if when in ("open", "shipping", "committed"):
        rig.hear(Accept(T1))
    if when in ("shipping", "committed"):
        ships = rig.compute(num_tokens=5 if when == "shipping" else 100)
        rig.shipped(ships)
    (ended,) = rig.engine.abort(key_of(1), 0.0)
    assert isinstance(ended, Ended)
    actions = rig.port.on_ended(ended, 0.0)
    assert bool(said(actions, AbortTransfer)) == (when != "held")
    unsent = [i for a in ships if isinstance(a, ShipBlocks) for i, _ in a.blocks]
    assert (CancelTransfer(T1) in actions) == bool(unsent)
    assert bool(rig.engine.releases) == (when == "open")
    rig.sent(*unsent)
    assert rig.engine.releases == ([key_of(1)] if when in ("open", "shipping", "committed") else [])
    assert rig.port.on_ended(ended, 0.0) == []
    assert (rig.port.num_open(), rig.port.next_deadline()) == (0, None if when != "greeting" else LEASE / 4)
    rig.engine.check()


def test_decode_aborts_before_the_prompt_is_done() -> None:
    rig = Rig()
    rig.offer()
    rig.hear(Accept(T1))
    rig.shipped(rig.compute(num_tokens=5))
    actions = rig.hear(AbortTransfer(T1, "aborted by the router"))
    assert said(actions, AttemptFailed)[0].code == "transfer"
    assert key_of(1) in rig.engine.ended
    rig.sent(0)
    assert rig.engine.releases == [key_of(1)]


@pytest.mark.parametrize("recomputing", [True, False])
def test_nack(recomputing: bool) -> None:
    rig = Rig()
    rig.committed()
    rig.sent(0, 1, 2)
    actions = rig.hear(Nack(T1, "checksum of block 0 differs", recomputing))
    assert bool(said(actions, HandoffDone)) == recomputing
    assert bool(said(actions, AttemptFailed)) != recomputing
    assert rig.engine.releases == [key_of(1)]
    assert rig.port.counters["failed"] == 1


def test_cap_of_blocks_in_flight() -> None:
    rig = Rig(max_unacked_blocks=4)
    for number in (1, 2):
        rig.offer(number)
        rig.hear(Accept(transfer_of(number)))
    first, second = rig.compute(1), rig.compute(2)
    ship1, ship2 = ([a for a in actions if isinstance(a, ShipBlocks)] for actions in (first, second))
    assert [len(s.blocks) for s in (*ship1, *ship2)] == [3, 1]
    rig.shipped([*first, *second])
    more = rig.sent(0)
    assert [(a.transfer, [i for i, _ in a.blocks]) for a in more if isinstance(a, ShipBlocks)] == [
        (transfer_of(2), [1])
    ]
    rig.shipped(more)
    more = rig.sent(1, 2)
    assert said(rig.shipped(more), Commit)


def test_a_transfer_larger_than_the_cap_completes() -> None:
    rig = Rig(max_unacked_blocks=1)
    rig.offer()
    rig.hear(Accept(T1))
    actions = rig.compute()
    for index in range(3):
        following = rig.shipped(actions)
        actions = rig.sent(index)
    assert said(following, Commit)


def test_silence_repeats_the_question() -> None:
    rig = Rig()
    rig.offer()
    assert said(rig.at(LEASE / 4), Offer)
    rig.hear(Accept(T1))
    assert said(rig.at(LEASE / 2), Data) == [Data(T1, (), ())]
    rig.shipped(rig.compute())
    rig.sent(0, 1, 2)
    assert said(rig.at(rig.now + LEASE / 4), Commit)
    assert rig.port.counters["expired"] == 0


def test_waiting_for_credit_and_for_ones_own_engine_has_no_lease() -> None:
    rig = Rig()
    rig.offer()
    for tick in range(1, 40):
        assert not said(rig.at(tick * LEASE / 4), AttemptFailed)
    rig.hear(Accept(T1))
    for tick in range(40, 80):
        assert not said(rig.at(tick * LEASE / 4), AttemptFailed)


def run_out(rig: Rig, until: float) -> list[Action]:
    actions: list[Action] = []
    while (deadline := rig.port.next_deadline()) is not None and deadline <= until:
        actions += rig.at(deadline)
    return actions


def test_lease_with_unsent_blocks_drops_the_link_first() -> None:
    rig = Rig()
    rig.committed()
    actions = run_out(rig, LEASE)
    kinds = [type(a) for a in actions if not (isinstance(a, ToPeer) and isinstance(a.message, Commit))]
    assert kinds == [ToPeer, CancelTransfer, ToRouter, DropLink]
    assert run_out(rig, LEASE + 1) == [ConnectPeer(worker_info())], "nobody needs a link now"
    assert said(actions, AttemptFailed)[0].code == "transfer"
    assert rig.engine.releases == []
    rig.sent(0, 1, 2)
    assert rig.engine.releases == [key_of(1)]
    assert rig.port.counters["expired"] == 1


def test_lease_without_an_answer_to_the_commit() -> None:
    rig = Rig()
    rig.committed()
    rig.sent(0, 1, 2)
    assert not said(run_out(rig, LEASE), AttemptFailed), "decode may still go on alone"
    actions = run_out(rig, 2 * LEASE)
    assert not [a for a in actions if isinstance(a, DropLink)]
    assert said(actions, AttemptFailed)
    assert rig.engine.releases == [key_of(1)]


def test_ended_but_never_sent_drops_the_link_after_a_lease() -> None:
    rig = Rig()
    rig.committed()
    rig.hear(Ack(T1))
    assert [type(a) for a in run_out(rig, LEASE + 1)] == [DropLink, ConnectPeer]
    assert rig.port.next_deadline() is None
    rig.sent(0, 1, 2)
    assert rig.engine.releases == [key_of(1)]


def test_a_lease_that_takes_the_link_along_has_other_transfers_shipped_again() -> None:
    rig = Rig()
    rig.committed(1)
    rig.now = LEASE / 2
    rig.committed(2)
    rig.offer(3)
    actions = run_out(rig, LEASE)
    assert [m.key for m in said(actions, AttemptFailed)] == [key_of(1)]
    assert (rig.port.counters["expired"], rig.port.counters["failed"]) == (1, 0)
    assert [m.transfer for m in said(actions, Commit)][-1] == transfer_of(2)
    assert ships(rig.sent(0, 1, 2, transfer=transfer_of(2))) == [(transfer_of(2), [0, 1, 2])]


@pytest.mark.parametrize("when", ["greeting", "offered", "open", "shipping", "committed"])
def test_peer_lost_in_every_state(when: str) -> None:
    rig = Rig(welcome=when != "greeting")
    rig.offer()
    if when not in ("greeting", "offered"):
        rig.hear(Accept(T1))
    unsent: tuple[int, ...] = ()
    if when == "shipping":
        rig.shipped(rig.compute(num_tokens=5))
        unsent = (0,)
    if when == "committed":
        rig.shipped(rig.compute())
        unsent = (0, 1, 2)
    actions = rig.port.on_peers((), 1.0)
    assert actions[0] == DropLink("D1", forget=True)
    assert [m.code for m in said(actions, AttemptFailed)] == ["peer_lost"]
    assert (key_of(1) in rig.engine.ended) == (when != "committed")
    rig.sent(*unsent)
    assert bool(rig.engine.releases) == (when not in ("greeting", "offered"))
    assert (rig.port.num_open(), rig.port.next_deadline()) == (0, None)
    assert said(rig.offer(2), HandoffRefused)


def ships(actions: list[Action]) -> list[tuple[TransferId, list[int]]]:
    return [(a.transfer, [i for i, _ in a.blocks]) for a in actions if isinstance(a, ShipBlocks)]


def test_a_cut_link_is_made_anew_and_what_may_be_lost_is_shipped_again() -> None:
    rig = Rig()
    rig.committed(1)
    rig.sent(0, 1)  # left, which does not mean arrived
    rig.committed(2)
    rig.sent(0, 1, 2, transfer=transfer_of(2))
    rig.offer(3)
    rig.hear(Accept(transfer_of(3)))  # nothing shipped yet
    rig.offer(4)  # no credit yet
    actions = rig.port.on_link_lost("D1", "reset", 1.0)
    assert actions[:2] == [DropLink("D1"), ConnectPeer(worker_info())]
    assert [m.transfer for m in said(actions, Commit)] == [T1, transfer_of(2)]
    assert [m.transfer for m in said(actions, Data)] == [transfer_of(3)], "decode must hear that it goes on"
    assert [m.transfer for m in said(actions, Offer)] == [transfer_of(4)]
    assert ships(actions) == [(transfer_of(2), [0, 1, 2])], "the transport still reads a block of the first"
    assert ships(rig.sent(2)) == [(T1, [0, 1, 2])]
    assert not said(actions, AttemptFailed)
    assert rig.engine.releases == []
    assert said(rig.hear(Ack(T1)), HandoffDone)
    assert rig.engine.releases == [], "the second shipment is still being read"
    rig.sent(0, 1, 2)
    assert rig.engine.releases == [key_of(1)]


def test_of_a_pulling_transport_only_what_was_not_fetched_is_shipped_again() -> None:
    rig = Rig(pulls=True)
    rig.offer()
    rig.hear(Accept(T1))
    assert said(rig.shipped(rig.compute()), Data) == [Data(T1, (0, 1, 2), (0, 1, 2))]
    rig.sent(0)
    actions = rig.port.on_link_lost("D1", "reset", 1.0)
    assert not ships(actions)
    assert all(not m.refs for m in said(actions, Data)), "what was lent over the old link is void"
    again = rig.sent(1, 2)
    assert ships(again) == [(T1, [1, 2])]
    assert said(rig.shipped(again), Data) == [Data(T1, (1, 2), (3, 4))]


def test_chunks_that_end_after_the_cut_wait_for_what_went_with_it() -> None:
    rig = Rig()
    rig.offer()
    rig.hear(Accept(T1))
    rig.shipped(rig.compute(num_tokens=5))
    rig.port.on_link_lost("D1", "reset", 1.0)
    assert not ships(rig.compute()), "an index is on its way once at most"
    assert ships(rig.sent(0)) == [(T1, [0, 1, 2])]


def test_what_still_waits_for_credit_at_the_next_cut_is_shipped_once() -> None:
    rig = Rig(max_unacked_blocks=1)
    rig.committed()  # of three blocks one is under way
    rig.sent(0)
    rig.sent(1)
    rig.sent(2)
    assert ships(rig.port.on_link_lost("D1", "reset", 1.0)) == [(T1, [0])], "two wait"
    rig.port.on_link_lost("D1", "reset", 1.0)
    assert ships(rig.sent(0)) == [(T1, [0])]
    assert ships(rig.sent(0)) == [(T1, [1])]
    assert ships(rig.sent(1)) == [(T1, [2])]
    assert ships(rig.sent(2)) == []


def test_a_link_that_is_cut_again_and_again_fails_the_attempt() -> None:
    rig = Rig()
    rig.committed()
    for _ in range(MAX_RELINKS):
        assert not said(rig.port.on_link_lost("D1", "reset", 1.0), AttemptFailed)
        rig.sent(0, 1, 2)
    actions = rig.port.on_link_lost("D1", "reset", 1.0)
    assert said(actions, AbortTransfer)
    assert [m.code for m in said(actions, AttemptFailed)] == ["transfer"]
    rig.sent(0, 1, 2)
    assert rig.engine.releases == [key_of(1)]


def test_a_link_that_is_lost_after_its_peer_gets_no_new_one() -> None:
    rig = Rig()
    rig.committed()
    rig.port.on_peers((), 1.0)
    assert rig.port.on_link_lost("D1", "reset", 1.0) == []


def reconnected_after(rig: Rig) -> float:
    """Lose the link, let time pass until it is made anew; how many seconds that took."""
    lost_at = rig.now
    actions = rig.port.on_link_lost("D1", "reset", lost_at)
    assert actions[0] == DropLink("D1")
    while ConnectPeer(worker_info()) not in actions:
        deadline = rig.port.next_deadline()
        assert deadline is not None and deadline > rig.now, "a link that nobody needs must not spin"
        actions += rig.at(deadline)
    return rig.now - lost_at


@pytest.mark.parametrize("is_waiting", [False, True], ids=["idle", "an offer waits"])
def test_a_link_that_nobody_needs_is_made_anew_after_growing_waits(is_waiting: bool) -> None:
    """Else a peer that accepts and closes, again and again, would keep this worker busy."""
    rig = Rig()
    if is_waiting:
        rig.offer(2)
    waits = [reconnected_after(rig) for _ in range(9)]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    rig.committed(1)
    assert said(rig.hear(Ack(T1)), HandoffDone)
    rig.sent(0, 1, 2)
    assert reconnected_after(rig) == pytest.approx(0.1), "a hand-over went well"


def test_a_link_that_is_needed_is_made_before_blocks_are_shipped() -> None:
    rig = Rig()
    rig.offer()
    actions = rig.port.on_link_lost("D1", "reset", 0.0)
    assert [m.transfer for m in said(actions, Offer)] == [T1], "decode must hear that it goes on"
    rig.hear(Accept(T1))
    actions = rig.compute()
    assert [type(a) for a in actions] == [ConnectPeer, ShipBlocks]
    assert not [a for a in run_out(rig, 1.0) if isinstance(a, ConnectPeer)], "it has been made"


def test_a_peer_that_is_lost_while_its_link_is_down_is_not_connected_again() -> None:
    rig = Rig()
    rig.port.on_link_lost("D1", "reset", 0.0)
    rig.port.on_peers((), 0.05)
    assert rig.port.next_deadline() is None


def test_a_restored_control_connection_asks_again() -> None:
    rig = Rig(welcome=False)
    rig.offer(1)
    assert [type(m) for m in said(rig.port.on_control_restored("D1", 1.0), Hello)] == [Hello]
    rig.hear(Welcome("decode-0", "D1"))
    rig.committed(2)
    actions = rig.port.on_control_restored("D1", 1.0)
    assert [type(a.message) for a in actions if isinstance(a, ToPeer)] == [Offer, Commit]
    assert rig.port.on_control_restored("D7", 1.0) == []


def test_a_peer_that_comes_back_still_has_what_was_in_flight() -> None:
    rig = Rig(max_unacked_blocks=4)
    rig.committed()
    rig.port.on_peers((), 1.0)
    rig.port.on_peers((worker_info(),), 2.0)
    rig.hear(Welcome("decode-0", "D1"))
    rig.offer(2)
    rig.hear(Accept(transfer_of(2)))
    assert [len(a.blocks) for a in rig.compute(2) if isinstance(a, ShipBlocks)] == [1]
    assert [len(a.blocks) for a in rig.sent(0, 1, 2) if isinstance(a, ShipBlocks)] == [2]


def test_former_lives_and_foreign_peers() -> None:
    rig = Rig()
    rig.offer()
    assert rig.hear(Accept(transfer_of(1, source="P0"))) == []
    assert rig.port.counters["stale"] == 1
    with pytest.raises(ProtocolError, match="D1's"):
        rig.hear(Accept(T1), peer="D9")
    with pytest.raises(ProtocolError, match="ack"):
        rig.hear(Ack(T1))
    with pytest.raises(ProtocolError, match="not for a prefill worker"):
        rig.hear(Commit(T1, 0, (), True))
    assert not rig.engine.granted


def test_duplicates_are_counted() -> None:
    rig = Rig()
    rig.offer()
    rig.hear(Accept(T1))
    again = rig.hear(Accept(T1))
    assert said(again, Data) == [Data(T1, (), ())], "decode asks whether the transfer goes on"
    assert rig.engine.calls == [("grant", key_of(1))]
    assert rig.port.counters["ignored"] == 1


def test_refusal_of_decodes_next_life_to_a_late_offer() -> None:
    rig = Rig()
    rig.offer()
    rig.hear(Accept(T1))
    assert rig.hear(Refuse(T1, "offer is for incarnation D1, decode-0 is now D2")) == []
    rig.compute()
    assert rig.hear(Refuse(T1, "again")) == []


def test_prompt_done_after_the_transfer_ended_releases() -> None:
    rig = Rig()
    rig.offer()
    rig.hear(Accept(T1))
    effects = rig.engine.compute(key_of(1), 100)
    rig.hear(AbortTransfer(T1, "no"))
    assert rig.engine.releases == [key_of(1)]
    for effect in effects:
        hook = rig.port.on_chunk if type(effect).__name__ == "ChunkDone" else rig.port.on_prompt_done
        assert hook(effect, 0.0) == []  # type: ignore[arg-type]
    assert rig.engine.releases == [key_of(1)]
