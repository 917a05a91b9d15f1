"""The receive port: events in, actions out, and the books of a fake engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton.errors import ProtocolError, RequestTooLargeError
from baton.ports import Action, CancelTransfer, ReceiveBlocks, ToPeer, ToRouter
from baton.protocol import PROTOCOL_VERSION, AttemptFailed, TransferId
from baton.sampling_params import SamplingParams
from decode_worker.receive_port import ReceivePort
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
from kv_transfer.session import MAX_RELINKS, RELINK_S
from kv_transfer.wire_format import LANDS, Landing, WireFormat
from tests.fakes_transfer import LAYOUT, FakeEngine, key_of, transfer_of

LEASE = 30.0
T1 = transfer_of(1)
HELLO = Hello(PROTOCOL_VERSION, "prefill-0", "P1", "f", LAYOUT)


class Rig:
    def __init__(self, num_blocks: int = 32, *, sharing: bool = False, **options: Any):
        self.engine = FakeEngine(num_blocks, sharing=sharing)
        self.port = ReceivePort(
            worker_id="decode-0",
            incarnation="D1",
            fingerprint="f",
            layout=LAYOUT,
            engine=self.engine,
            lease_s=LEASE,
            expected_growth=4,
            **options,
        )
        self.now = 0.0
        self.hear(msgspec.structs.replace(HELLO, reach=options.get("reach", "")))

    def hear(self, message: Any, peer: str = "P1") -> list[Action]:
        return self.port.on_message(peer, message, self.now)

    def offer(self, number: int = 1, num_tokens: int = 10, max_tokens: int = 8, prior: int = 0) -> list[Action]:
        sampling = SamplingParams(max_tokens=max_tokens)
        return self.hear(Offer(transfer_of(number), tuple(range(num_tokens)), tuple(range(prior)), sampling))

    def received(self, *indices: int, transfer: TransferId = T1) -> list[Action]:
        return self.port.on_received(transfer, {i: 100 + i for i in indices}, self.now)

    def commit(self, number: int = 1, checksums: tuple[int, ...] = (100, 101, 102)) -> list[Action]:
        return self.hear(Commit(transfer_of(number), 7, checksums, True))


def said(actions: list[Action], kind: type) -> list[Any]:
    return [a.message for a in actions if isinstance(a, ToPeer | ToRouter) and isinstance(a.message, kind)]


def test_hello() -> None:
    rig = Rig()
    assert rig.hear(HELLO) == [ToPeer("P1", Welcome("decode-0", "D1"))]
    with pytest.raises(ProtocolError, match="introduces itself"):
        rig.hear(HELLO, peer="P7")


@pytest.mark.parametrize(
    ("changes", "both"),
    [
        ({"version": 9}, ("9", str(PROTOCOL_VERSION))),
        ({"fingerprint": "g"}, ("has g", "has f")),
        ({"layout": msgspec.structs.replace(LAYOUT, num_kv_heads=8)}, ("prefill-0 has 8", "decode-0 has 1")),
        ({"reach": "shm (machine B)"}, ("has shm (machine B)", "has shm (machine A)")),
    ],
)
def test_an_unfit_peer_is_refused_naming_both_values(changes: dict[str, Any], both: tuple[str, str]) -> None:
    rig = Rig(reach="shm (machine A)")
    hello = msgspec.structs.replace(HELLO, reach="shm (machine A)")
    assert said(rig.hear(hello), Welcome)
    (refused,) = said(rig.hear(msgspec.structs.replace(hello, **changes)), HelloRefused)
    assert all(value in refused.reason for value in both)


def test_blocks_that_no_frame_holds_are_refused_naming_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.receive_port.MAX_WIRE_BLOCK_BYTES", 64 * LAYOUT.token_bytes)
    wide = lambda size: msgspec.structs.replace(HELLO, layout=msgspec.structs.replace(LAYOUT, block_size=size))
    rig = Rig()
    assert said(rig.hear(wide(64)), Welcome)
    (refused,) = said(rig.hear(wide(65)), HelloRefused)
    assert "prefill-0 has blocks of 65 tokens in 1040 bytes, decode-0 takes at most 1024 bytes" in refused.reason
    assert rig.port._formats["P1"].layout.block_size == 64, "what was welcomed before stands"


def test_accept_comes_after_the_receive_is_posted() -> None:
    rig = Rig()
    post, accept = rig.offer()
    blocks = rig.engine.reserved[key_of(1)].blocks
    assert len(blocks) == 4, "10 prompt tokens and 4 of expected growth, in blocks of 4"
    assert post == ReceiveBlocks("P1", T1, (), tuple(enumerate(blocks[:3])))
    assert accept == ToPeer("P1", Accept(T1, 0))
    assert rig.port.num_open() == 1


@pytest.mark.parametrize(("max_tokens", "prior", "num_blocks"), [(1, 0, 3), (2, 0, 3), (8, 0, 4), (8, 5, 5), (8, 7, 5)])
def test_reservation(max_tokens: int, prior: int, num_blocks: int) -> None:
    rig = Rig()
    rig.offer(max_tokens=max_tokens, prior=prior)
    assert len(rig.engine.reserved[key_of(1)].blocks) == num_blocks


@pytest.mark.parametrize("order", ["data first", "commit first", "mixed"])
def test_adopted_when_all_is_here_in_any_order(order: str) -> None:
    rig = Rig()
    rig.offer()
    actions: list[Action] = []
    if order == "data first":
        actions = rig.received(0, 1, 2) + rig.commit()
    elif order == "commit first":
        actions = rig.commit() + rig.received(2) + rig.received(0, 1)
    else:
        actions = rig.received(1) + rig.commit() + rig.received(0, 2)
    assert actions == [ToPeer("P1", Ack(T1))]
    assert rig.engine.calls == [("adopt", key_of(1))]
    assert rig.engine.releases == []
    assert (rig.port.num_open(), rig.port.next_deadline()) == (0, None)


def test_questions_that_come_again_get_the_same_answer() -> None:
    rig = Rig()
    rig.offer()
    assert said(rig.offer(), Accept)
    rig.received(0, 1, 2)
    rig.commit()
    assert said(rig.commit(), Ack)
    assert said(rig.offer(), Ack)
    assert rig.received(0) == []
    assert rig.engine.calls == [("adopt", key_of(1))]
    assert rig.port.counters["done"] == 1


def test_a_wrong_block_is_recomputed_never_used() -> None:
    rig = Rig()
    rig.offer()
    rig.received(0, 1, 2)
    actions = rig.commit(checksums=(100, 999, 102))
    (nack,) = said(actions, Nack)
    assert nack.recomputing
    assert "block 1" in nack.reason
    assert rig.engine.calls == [("recompute", key_of(1))]
    assert (rig.port.counters["failed"], rig.port.counters["expired"]) == (1, 0)
    assert said(rig.commit(), Nack)


def test_a_commit_of_another_size_is_recomputed_and_late_data_kept_out() -> None:
    rig = Rig()
    rig.offer()
    actions = rig.commit(checksums=(100,))
    assert isinstance(actions[0], CancelTransfer), "before the engine's next step can be overwritten"
    assert said(actions, Nack)


def test_commit_without_data_for_a_lease_is_recomputed() -> None:
    rig = Rig()
    rig.offer()
    rig.received(0)
    rig.now = 10
    rig.commit()
    assert rig.port.on_deadline(LEASE) == []
    assert rig.port.next_deadline() == 10 + LEASE
    actions = rig.port.on_deadline(10 + LEASE)
    assert CancelTransfer(T1) in actions
    assert said(actions, Nack)[0].recomputing
    assert not said(actions, AttemptFailed)


def test_lease_before_the_commit_ends_the_attempt() -> None:
    rig = Rig()
    rig.offer()
    rig.now = 5
    rig.received(0)
    assert rig.port.on_deadline(LEASE) == []
    actions = rig.port.on_deadline(5 + LEASE)
    assert CancelTransfer(T1) in actions
    assert said(actions, AbortTransfer)
    assert said(actions, AttemptFailed)[0].code == "transfer"
    assert rig.engine.releases == [key_of(1)]
    assert said(rig.hear(Data(T1, (), ())), AbortTransfer), "P is told again"


def test_empty_data_renews_the_lease() -> None:
    rig = Rig()
    rig.offer()
    rig.now = 20
    assert rig.hear(Data(T1, (), ())) == []
    assert rig.port.on_deadline(LEASE) == []
    assert rig.port.on_deadline(20 + LEASE)


def test_first_come_first_served() -> None:
    rig = Rig(num_blocks=10)
    rig.offer(1, num_tokens=16)  # 5 blocks
    assert rig.offer(2, num_tokens=24) == []  # 7 blocks: waits
    assert rig.offer(3, num_tokens=4) == [], "would fit, but must not overtake"
    assert (rig.port.num_open(), rig.port.num_waiting()) == (1, 2)
    assert rig.port.next_deadline() == LEASE, "who waits for credit has no lease"
    assert said(rig.offer(2, num_tokens=24), Accept) == []
    assert rig.port.on_blocks_free(0.0) == []
    rig.received(0, 1, 2, 3)
    rig.commit(checksums=(100, 101, 102, 103))
    rig.engine.finish(key_of(1))
    actions = rig.port.on_blocks_free(1.0)
    assert [m.transfer for m in said(actions, Accept)] == [transfer_of(2), transfer_of(3)]


def test_the_end_of_one_lets_the_next_in() -> None:
    rig = Rig(num_blocks=6)
    rig.offer(1, num_tokens=16)
    rig.offer(2, num_tokens=16)
    actions = rig.port.on_abort(key_of(1), 1.0)
    kinds = [type(a.message if isinstance(a, ToPeer) else a) for a in actions]
    assert kinds == [CancelTransfer, AbortTransfer, ReceiveBlocks, Accept]


def test_an_aborted_head_no_longer_blocks_the_line() -> None:
    rig = Rig(num_blocks=8)
    rig.offer(1, num_tokens=16)
    rig.offer(2, num_tokens=24)
    rig.offer(3, num_tokens=4)
    assert [m.transfer for m in said(rig.port.on_abort(key_of(2), 1.0), Accept)] == [transfer_of(3)]


def test_what_can_never_fit_is_refused() -> None:
    rig = Rig(num_blocks=4)
    (refuse,) = said(rig.offer(1, num_tokens=10, max_tokens=8), Refuse)  # 17 tokens need KV, 16 fit
    assert "17 tokens" in refuse.reason
    assert said(rig.offer(1), Refuse), "and again"
    assert said(rig.offer(2, num_tokens=9, max_tokens=8), Accept), "a later small one is unaffected"
    assert rig.port.counters["refused"] == 1


def test_the_largest_that_fits_is_not_starved_by_expected_growth() -> None:
    rig = Rig(num_blocks=4)
    assert said(rig.offer(1, num_tokens=14, max_tokens=3), Accept)


def test_an_engine_that_will_not_have_it_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def reserve(*_: object) -> list[int]:
        raise RequestTooLargeError("longer than the model's 5")

    monkeypatch.setattr(rig.engine, "reserve", reserve)
    (refuse,) = said(rig.offer(), Refuse)
    assert refuse.reason == "longer than the model's 5"
    assert rig.port.num_waiting() == 0


def test_an_empty_prompt_and_a_second_transfer_of_an_attempt_are_refused() -> None:
    rig = Rig()
    assert said(rig.offer(num_tokens=0), Refuse)
    rig.offer(2)
    rig.hear(msgspec.structs.replace(HELLO, worker_id="prefill-1", incarnation="P2"), peer="P2")
    other = Offer(transfer_of(2, source="P2"), (1, 2), (), SamplingParams())
    assert "already" in said(rig.hear(other, peer="P2"), Refuse)[0].reason


@pytest.mark.parametrize("when", ["waiting", "reserved", "partial", "committed", "adopted", "unknown"])
def test_router_aborts_in_every_state(when: str) -> None:
    rig = Rig(num_blocks=5)
    if when == "waiting":
        rig.engine.free, taken = [], rig.engine.free
    if when != "unknown":
        rig.offer()
    if when == "waiting":
        rig.engine.free = taken
    if when in ("partial", "committed"):
        rig.received(0)
    if when == "committed":
        rig.commit()
    if when == "adopted":
        rig.received(0, 1, 2)
        rig.commit()
    actions = rig.port.on_abort(key_of(1), 1.0)
    assert bool(said(actions, AbortTransfer)) == (when not in ("adopted", "unknown"))
    assert (CancelTransfer(T1) in actions) == (when in ("reserved", "partial", "committed"))
    assert bool(rig.engine.releases) == (when in ("reserved", "partial", "committed"))
    assert (rig.port.num_open(), rig.port.num_waiting(), rig.port.next_deadline()) == (0, 0, None)
    assert rig.received(1) == []
    rig.engine.check()


def test_prefill_aborts() -> None:
    rig = Rig()
    rig.offer()
    actions = rig.hear(AbortTransfer(T1, "first token was the last"))
    assert actions == [CancelTransfer(T1)]
    assert rig.engine.releases == [key_of(1)]
    assert rig.hear(AbortTransfer(T1, "again")) == []
    assert said(rig.offer(), AbortTransfer), "a late repetition of the Offer opens nothing"


def test_abort_that_overtakes_its_offer() -> None:
    rig = Rig()
    assert rig.hear(AbortTransfer(T1, "gone")) == []
    assert said(rig.offer(), AbortTransfer)
    assert not rig.engine.reserved


def test_a_cut_link_without_a_word_of_prefill() -> None:
    rig = Rig(num_blocks=9)
    rig.offer(1)
    rig.commit(1)  # overtook its blocks: D can finish alone
    rig.offer(2)
    rig.offer(3)  # waits
    asked = rig.port.on_link_lost("P1", "reset", 1.0)
    assert [m.transfer for m in said(asked, Accept)] == [T1, transfer_of(2)]
    assert rig.port.on_deadline(1.0 + RELINK_S / 2) == []
    actions = rig.port.on_deadline(1.0 + RELINK_S)
    assert [m.key for m in said(actions, AttemptFailed)] == [key_of(2)]
    actions += rig.port.on_deadline(1.0 + LEASE)
    assert [m.key for m in said(actions, AttemptFailed)] == [key_of(2), key_of(3)], (
        "an offer is repeated within a lease"
    )
    assert {m.code for m in said(actions, AttemptFailed)} == {"peer_lost"}
    assert rig.engine.decoding[key_of(1)][1] == "recomputed"
    assert not rig.engine.reserved
    assert rig.port.on_link_lost("P7", "reset", 1.0) == []


@pytest.mark.parametrize("word", ["offer", "data", "commit", "blocks"])
def test_a_cut_link_after_which_prefill_is_heard_of(word: str) -> None:
    rig = Rig()
    rig.offer()
    if word == "commit":
        rig.commit()
    rig.port.on_link_lost("P1", "reset", 1.0)
    rig.now = 1.5
    match word:
        case "offer":
            rig.offer()
        case "data":
            rig.hear(Data(T1, (), ()))
        case "commit":
            rig.commit()
        case "blocks":
            rig.received(0)
    assert rig.port.on_deadline(1.0 + RELINK_S) == []
    assert rig.port.next_deadline() == (LEASE if word in ("offer", "commit") else 1.5 + LEASE), word
    rig.received(0, 1, 2)
    rig.commit()
    assert rig.engine.decoding[key_of(1)][1] == "adopted"


def test_blocks_that_are_lent_anew_are_fetched_anew() -> None:
    rig = Rig(pulls=True)
    rig.offer()
    blocks = rig.engine.reserved[key_of(1)].blocks
    first = Data(T1, (0, 1, 2), (10, 11, 12))
    assert rig.hear(first) == [ReceiveBlocks("P1", T1, (10, 11, 12), tuple(enumerate(blocks[:3])))]
    assert rig.hear(first) == []
    rig.received(0)
    rig.port.on_link_lost("P1", "reset", 1.0)
    again = rig.hear(Data(T1, (0, 1, 2), (20, 21, 22)))
    assert again == [ReceiveBlocks("P1", T1, (20, 21, 22), tuple(enumerate(blocks[:3])))], "prefill waits for each"
    rig.commit()
    rig.received(1, 2)
    assert not rig.engine.decoding, "a block that is fetched again may be torn"
    rig.received(0)
    assert rig.engine.decoding[key_of(1)][1] == "adopted"


def test_a_block_is_lent_anew_only_as_often_as_links_are_made() -> None:
    rig = Rig(pulls=True)
    rig.offer()
    for link in range(MAX_RELINKS + 1):
        assert rig.hear(Data(T1, (0, 1, 2), (link * 10, link * 10 + 1, link * 10 + 2)))
    with pytest.raises(ProtocolError, match="more often"):
        rig.hear(Data(T1, (0,), (99,)))
    assert rig.hear(Data(T1, (0,), (0,))), "what was said before may come again, late"


def test_what_is_still_fetched_by_another_ref_is_cancelled_at_adoption() -> None:
    rig = Rig(pulls=True)
    rig.offer()
    rig.hear(Data(T1, (0, 1, 2), (10, 11, 12)))
    rig.hear(Data(T1, (0, 1, 2), (20, 21, 22)))
    rig.received(0, 1, 2)  # by either
    assert CancelTransfer(T1) in rig.commit()
    assert rig.engine.decoding[key_of(1)][1] == "adopted"


def test_a_cut_that_is_heard_of_after_prefills_word_is_asked_about() -> None:
    rig = Rig()
    rig.offer(1)
    rig.hear(Data(T1, (), ()))  # of the new link already
    asked = rig.port.on_link_lost("P1", "reset", 1.0)
    assert said(asked, Accept) == [Accept(T1)]
    rig.now = 1.5
    rig.hear(Data(T1, (), ()))  # the answer
    assert rig.port.on_deadline(1.0 + RELINK_S) == []


def test_link_lost_while_the_engine_refuses_what_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(num_blocks=6)
    rig.offer(1)
    rig.offer(2)  # waits; the end of the first makes room for it

    def reserve(*_: object) -> list[int]:
        raise RequestTooLargeError("longer than the model's 5")

    monkeypatch.setattr(rig.engine, "reserve", reserve)
    rig.port.on_link_lost("P1", "reset", 1.0)
    actions = rig.port.on_deadline(1.0 + RELINK_S)
    assert [m.key for m in said(actions, AttemptFailed)] == [key_of(1)]
    assert [m.transfer for m in said(actions, Refuse)] == [transfer_of(2)]


def test_a_restarted_peer_ends_its_former_life() -> None:
    rig = Rig()
    rig.offer()
    actions = rig.hear(msgspec.structs.replace(HELLO, incarnation="P2"), peer="P2")
    assert said(actions, AttemptFailed)[0].code == "peer_lost"
    assert rig.engine.releases == [key_of(1)]
    rig.hear(Offer(transfer_of(6, source="P2"), (1, 2), (), SamplingParams(max_tokens=8)), peer="P2")
    assert [type(a) for a in rig.hear(HELLO)] == [ToPeer], "said by the former life, late: ends nothing"
    assert rig.port.num_open() == 1


def test_a_hello_of_a_former_life_that_comes_after_the_new_ones_shuts_nobody_out() -> None:
    rig = Rig()
    rig.hear(msgspec.structs.replace(HELLO, incarnation="P0"), peer="P0")
    assert said(rig.offer(), Accept)


def test_messages_for_a_former_life_of_this_worker() -> None:
    rig = Rig()
    old = transfer_of(1, target="D0")
    (refuse,) = said(rig.hear(Offer(old, (1,), (), SamplingParams())), Refuse)
    assert "D0" in refuse.reason
    assert "D1" in refuse.reason
    assert rig.hear(Commit(old, 7, (), True)) == []
    assert rig.port.counters["stale"] == 2


def test_protocol_errors_change_nothing() -> None:
    rig = Rig(num_blocks=5)
    rig.offer(1)
    rig.offer(2)  # waits
    for message, peer, problem in [
        (Commit(transfer_of(2), 7, (1, 2, 3), True), "P1", "commit"),
        (Data(T1, (7,), (1,)), "P1", "outside"),
        (Data(T1, (1, 1), (1, 1)), "P1", "outside"),
        (Data(T1, (1, 1), (1,)), "P1", "outside"),
        (Commit(T1, 7, (), True), "P8", "P1's"),
        (Offer(transfer_of(3, source="P8"), (1,), (), SamplingParams()), "P8", "before its Hello"),
        (Accept(T1), "P1", "not for a decode worker"),
    ]:
        with pytest.raises(ProtocolError, match=problem):
            rig.hear(message, peer=peer)
    assert (rig.port.num_open(), rig.port.num_waiting()) == (1, 1)


def test_commit_for_a_transfer_never_heard_of() -> None:
    assert said(Rig().commit(), AbortTransfer)


def test_pulling_transport() -> None:
    rig = Rig(pulls=True)
    assert [type(a) for a in rig.offer()] == [ToPeer]
    blocks = rig.engine.reserved[key_of(1)].blocks
    (pull,) = rig.hear(Data(T1, (0, 2), (50, 52)))
    assert pull == ReceiveBlocks("P1", T1, (50, 52), ((0, blocks[0]), (2, blocks[2])))
    assert rig.hear(Data(T1, (0, 2), (50, 52))) == []
    rig.hear(Data(T1, (1,), (51,)))
    rig.received(0, 1, 2)
    assert said(rig.commit(), Ack)


# --- what is here already ---------------------------------------------------------------------------


def awaited(actions: list[Action]) -> list[tuple[int, ...]]:
    return [tuple(index for index, _ in a.blocks) for a in actions if isinstance(a, ReceiveBlocks)]


def test_an_offer_waits_for_the_same_prompt_on_its_way_and_holds_up_nobody() -> None:
    rig = Rig(sharing=True)
    assert awaited(rig.offer(1, num_tokens=8)) == [(0, 1)]
    assert rig.offer(2, num_tokens=8) == []
    assert said(rig.offer(3, num_tokens=9), Accept) == [Accept(transfer_of(3), 0)]
    assert rig.port.num_waiting() == 1
    rig.received(0, 1)
    actions = rig.commit(1, (100, 101))
    assert said(actions, Ack) == [Ack(T1)]
    assert said(actions, Accept) == [Accept(transfer_of(2), 2)]
    assert awaited(actions) == [], "nothing is to come"
    assert said(rig.commit(2, ()), Ack) == [Ack(transfer_of(2))]
    assert rig.engine.decoding[key_of(2)][1] == "adopted"
    rig.engine.check()


@pytest.mark.parametrize("how", ["aborted", "wrong", "lost", "lease"])
def test_whoever_waited_goes_on_when_the_other_transfer_ends_in_any_way(how: str) -> None:
    rig = Rig(sharing=True)
    rig.offer(1, num_tokens=8)
    rig.offer(2, num_tokens=8)
    if how == "aborted":
        actions = rig.port.on_abort(key_of(1), 0.0)
    elif how == "wrong":
        rig.received(0, 1)
        actions = rig.commit(1, (100, 999))
    elif how == "lost":
        actions = rig.hear(AbortTransfer(T1, "gone"))
    else:
        rig.now = LEASE
        actions = rig.port.on_deadline(rig.now)
    assert said(actions, Accept) == [Accept(transfer_of(2), 0)]
    assert awaited(actions) == [(0, 1)]


def test_only_what_is_missing_is_awaited_and_verified() -> None:
    rig = Rig(sharing=True)
    rig.offer(1, num_tokens=8)
    rig.received(0, 1)
    rig.commit(1, (100, 101))
    actions = rig.offer(2, num_tokens=14)
    assert said(actions, Accept) == [Accept(transfer_of(2), 2)]
    assert awaited(actions) == [(2, 3)]
    with pytest.raises(ProtocolError, match="outside"):
        rig.hear(Data(transfer_of(2), (1,), (5,)))
    rig.received(2, 3, transfer=transfer_of(2))
    assert said(rig.commit(2, (102, 103)), Ack) == [Ack(transfer_of(2))]
    rig.offer(3, num_tokens=14)
    rig.received(3, transfer=transfer_of(3))
    (nack,) = said(rig.commit(3, (0, 0, 102, 103)), Nack)
    assert "names 4 blocks, 1 were to be sent" in nack.reason


def test_a_waiter_that_is_aborted_is_gone() -> None:
    rig = Rig(sharing=True)
    rig.offer(1, num_tokens=8)
    rig.offer(2, num_tokens=8)
    rig.port.on_abort(key_of(2), 0.0)
    assert rig.port.num_waiting() == 0
    rig.received(0, 1)
    assert said(rig.commit(1, (100, 101)), Accept) == []


# --- other formats ----------------------------------------------------------------------------------


def hello_of(block_size: int, encoding: str = "plain") -> Hello:
    layout = msgspec.structs.replace(LAYOUT, block_size=block_size)
    return msgspec.structs.replace(HELLO, incarnation="P2", worker_id="prefill-1", layout=layout, encoding=encoding)


def offer_of_p2(number: int, num_tokens: int) -> Offer:
    return Offer(transfer_of(number, source="P2"), tuple(range(num_tokens)), (), SamplingParams(max_tokens=8))


@pytest.mark.parametrize(("size", "num_blocks"), [(3, 4), (4, 3), (5, 2), (16, 1)])
@pytest.mark.parametrize("encoding", ["plain", "int8"])
def test_blocks_of_another_format_land(size: int, num_blocks: int, encoding: str) -> None:
    """Indices count blocks of the wire; what is reserved are blocks of the pool."""
    rig = Rig()
    assert said(rig.hear(hello_of(size, encoding), peer="P2"), Welcome)
    receive, accept = rig.hear(offer_of_p2(1, 10), peer="P2")
    assert isinstance(receive, ReceiveBlocks)
    assert accept == ToPeer("P2", Accept(transfer_of(1, source="P2"), 0))
    (request,) = rig.engine.reserved.values()
    if (size, encoding) == (4, "plain"):
        assert receive.landing is None and [block for _, block in receive.blocks] == request.blocks[:3]
    else:
        assert receive.blocks == tuple((index, LANDS) for index in range(num_blocks))
        format = WireFormat(hello_of(size).layout, encoding)  # type: ignore[arg-type]
        assert receive.landing == Landing(format, tuple(request.blocks[:3]), 10, 0)
    indices = range(num_blocks)
    rig.received(*indices, transfer=receive.transfer)
    commit = Commit(receive.transfer, 7, tuple(100 + i for i in indices), True)
    assert said(rig.hear(commit, peer="P2"), Ack)


@pytest.mark.parametrize(
    ("size", "context", "prefix_blocks", "first"),
    [(3, 15, 4, 12), (3, 14, 4, 12), (5, 15, 2, 12), (8, 15, 1, 12), (16, 15, 0, 12), (3, 12, 4, 12), (5, 12, 3, 12)],
)
def test_what_is_here_is_counted_in_whole_wire_blocks(size: int, context: int, prefix_blocks: int, first: int) -> None:
    """The first 12 tokens, three blocks of this pool, are here already."""
    rig = Rig(sharing=True)
    rig.offer(1, num_tokens=12)
    rig.received(0, 1, 2)
    assert said(rig.commit(1), Ack)
    rig.hear(hello_of(size), peer="P2")
    actions = rig.hear(offer_of_p2(2, context), peer="P2")
    assert said(actions, Accept) == [Accept(transfer_of(2, source="P2"), prefix_blocks)]
    landings = [action.landing for action in actions if isinstance(action, ReceiveBlocks)]
    if context == 12:
        assert landings == [], "all of it is here: nothing moves"
    else:
        assert [landing.first_token for landing in landings] == [first]
        assert len(landings[0].blocks) == -(-context // 4)


@pytest.mark.parametrize(
    ("hello", "both"),
    [
        (hello_of(32), ("block_size", "prefill-1 has 32", "decode-0 has 4")),
        (hello_of(4, "fp8"), ("encoding", "prefill-1 has fp8", "decode-0 has plain")),
        (hello_of(32, "fp8"), ("block_size", "prefill-1 has 32", "decode-0 has 4")),
    ],
)
def test_a_transport_that_moves_blocks_as_they_are_needs_one_format(hello: Hello, both: tuple[str, ...]) -> None:
    rig = Rig(fixed_blocks=True)
    (refused,) = said(rig.hear(hello, peer="P2"), HelloRefused)
    assert all(value in refused.reason for value in (*both, "zmq+tcp"))


def test_a_transfer_keeps_the_format_of_its_offer() -> None:
    """What P says of itself later counts for later transfers."""
    rig = Rig(num_blocks=5)
    rig.hear(hello_of(8), peer="P2")
    rig.hear(offer_of_p2(1, 10), peer="P2")
    assert rig.hear(offer_of_p2(2, 10), peer="P2") == [], "it waits for blocks"
    rig.hear(hello_of(2), peer="P2")
    actions = rig.hear(AbortTransfer(transfer_of(1, source="P2"), "x"), peer="P2")
    (receive,) = [action for action in actions if isinstance(action, ReceiveBlocks)]
    assert len(receive.blocks) == 2 and receive.landing.format.layout.block_size == 8
