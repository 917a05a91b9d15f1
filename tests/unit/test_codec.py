"""Messages to bytes and back, and what bytes of a stranger do."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.codec import Codec
from baton.errors import CodecError, VersionError
from baton.layout import KVLayout
from baton.ledger import (
    AskLedger,
    ClusterLedger,
    Finding,
    HoldReason,
    LedgerEntry,
    LedgerReport,
    LedgerRequest,
    OpenRequest,
    WorkerLedger,
)
from baton.protocol import (
    PROTOCOL_VERSION,
    Abort,
    AskPrefixes,
    AttemptFailed,
    Cancel,
    ChatMessage,
    Delta,
    Done,
    Drain,
    Explain,
    Explained,
    Failed,
    Generate,
    HandoffDone,
    HandoffRefused,
    Heartbeat,
    Join,
    Joined,
    JoinRefused,
    Leaving,
    LoadReport,
    LogprobsOut,
    MarksOut,
    Overview,
    OverviewRequest,
    Peers,
    PrefixNews,
    Records,
    RecordsRequest,
    Replace,
    RequestKey,
    Status,
    StatusRequest,
    Submit,
    ToClient,
    TokenOut,
    Tokens,
    ToRouterFromClient,
    ToRouterFromWorker,
    ToWorker,
    TransferId,
    Usage,
    WorkerInfo,
    WorkerStatus,
)
from baton.sampling_params import MAX_CONSTRAINT, SamplingParams, StructuredOutput, TokenLogprobs
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
    ToDecode,
    ToPrefill,
    Welcome,
)

KEY = RequestKey("ab" * 16, 1)
TRANSFER = TransferId("ab" * 16, 1, 0, "source", "target")
LAYOUT = KVLayout(2, 1, 16, 64, "float32")
SAMPLING = SamplingParams(max_tokens=9, temperature=0.5, seed=3, ignore_eos=True, stop_token_ids=(1, 2))
ASKING = SamplingParams(
    presence_penalty=-2.0,
    frequency_penalty=2.0,
    repetition_penalty=1.5,
    logit_bias={0: -100.0, 7: 1.5},
    allowed_token_ids=(1, 2),
    bad_token_ids=((1, 2), (3,)),
    logprobs=20,
    prompt_logprobs=0,
    structured=StructuredOutput("choice", choices=("a", "é")),
)
SAID = TokenLogprobs(5, -0.5, 2, (9, 5), (-0.25, -0.5))
FULL = SamplingParams(max_tokens=1 << 20, top_k=(1 << 31) - 1, top_p=1e-9, min_p=0.999, min_tokens=1 << 20)
WORKER = WorkerInfo(
    "w", "i", "p", "both", "f", LAYOUT, 10, 100, 8, "tcp://127.0.0.1:1", "zmq+tcp://127.0.0.1:2", cores=(0, 1)
)

ENTRY = LedgerEntry("ab" * 16, 1, 0, HoldReason.SHIPPING, 3, 0.5, -1.0, 1, "d", "i", (7, 8, 9))
FINDING = Finding("stranded", 2, "ab/1", "why", (1, 2))
REPORT = LedgerReport("w", 1, 10, 4, 2, (ENTRY,), 1, (FINDING,), 2, 0, 1.5, "slow")

MESSAGES: dict[Any, list[Any]] = {
    ToRouterFromWorker: [
        Join(1, WORKER, 0.5),
        Heartbeat("i", LoadReport(blocks_free=3, bytes_sent=1 << 50)),
        Leaving("i"),
        Tokens("w", "i", (TokenOut(*KEY, 4, 5, "stop"),), (MarksOut(*KEY, {0: 0.5}),), LoadReport()),
        Tokens("w", "i", (TokenOut(*KEY, 0, 5, None),), logprobs=(LogprobsOut(*KEY, 0, SAID, (None, SAID)),)),
        AttemptFailed("w", KEY, "refused", "because"),
        HandoffRefused("w", KEY, "d", "full"),
        HandoffDone("w", KEY, 3, 4096, {5: 1.5}),
        REPORT,
        Heartbeat("i", prefixes=PrefixNews(1, b"12345678" * 2, b"", True)),
        Tokens("w", "i", (TokenOut(*KEY, 0, 5, None),), prefixes=PrefixNews(2, b"", b"12345678")),
    ],
    ToWorker: [
        Joined("r", 0.5, 1.0, 1.5),
        JoinRefused("layouts differ"),
        Leaving("i"),
        Peers((WORKER,)),
        Submit(KEY, (1, 2, 3), SAMPLING, (4,), "d", 2.5),
        Submit(KEY, (1, 2, 3), ASKING),
        Replace(KEY, None),
        Abort(KEY),
        Abort(KEY._replace(sample=3)),
        AskLedger(3, True),
        AskPrefixes(),
    ],
    ToRouterFromClient: [
        Generate("l", SAMPLING, messages=(ChatMessage("user", "héllo 🎉"),)),
        Generate("l", SAMPLING, token_ids=(1, 2)),
        Generate("l", ASKING, token_ids=(1, 2)),
        Generate("l", FULL, text="x", stop=("a", "é"), include_stop_str_in_output=True, n=64),
        Cancel("l"),
        Cancel("l", 3),
        StatusRequest("l"),
        Drain("l", "w", True),
        Explain("l", "ab"),
        OverviewRequest("l"),
        RecordsRequest("l", 1024),
        LedgerRequest("l", "w", True),
    ],
    ToClient: [
        Delta("l", (1, 2), "ab"),
        Delta("l", (1, 2), "ab", 3, "stop"),
        Delta("l", (5, 6), "ab", logprobs=(SAID, None), prompt_logprobs=(None, SAID)),
        Done("l", "r", "length", Usage(1, 2), {0: 0.5}, "p", "d", 1, 10, "x"),
        Explained("l", {"request_id": "ab", "marks": {1: 0.5}}),
        Overview("l", {"health": "ok", "recent": [{"total_ms": None}]}),
        Records("l", ({"request_id": "ab", "marks": {1: 0.5}}, {})),
        Failed("l", "invalid_request", "empty", "prompt"),
        ClusterLedger(
            "l",
            "baton",
            (WorkerLedger("w", "both", "i", "ready", 0.5, REPORT, (0,)), WorkerLedger("v", "both", "j", "silent", 0.5)),
            (OpenRequest("ab", 1, 0, "running", "w", "", 0.5, 3),),
            1,
        ),
        Status("l", "baton", "i", 1, (WorkerStatus(WORKER, LoadReport(), "ready", 0.1),), "demo", 100),
    ],
    ToDecode: [
        Hello(1, "w", "i", "f", LAYOUT),
        Offer(TRANSFER, (1, 2), (3,), SAMPLING),
        Data(TRANSFER, (0, 1), (5, 6)),
        Commit(TRANSFER, 7, (1, 2**64 - 1), True),
        AbortTransfer(TRANSFER, "why"),
    ],
    ToPrefill: [
        Welcome("w", "i"),
        HelloRefused("w", "no"),
        Accept(TRANSFER, 2),
        Refuse(TRANSFER, "no"),
        Ack(TRANSFER),
        Nack(TRANSFER, "checksum", True),
        AbortTransfer(TRANSFER, "why"),
    ],
}
CASES = [(union, message) for union, messages in MESSAGES.items() for message in messages]


@pytest.mark.parametrize(("union", "message"), CASES, ids=[type(m).__name__ for _, m in CASES])
def test_every_message_survives_the_wire(union: Any, message: Any) -> None:
    codec = Codec(union)
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(("union", "message"), CASES)
def test_messages_that_there_are_often_are_written_alike(union: Any, message: Any) -> None:
    assert Codec(union, often=(type(message),)).encode(message) == Codec(union).encode(message)


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": -1},
        {"top_k": 1 << 31},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.0},
        {"min_p": -0.1},
        {"min_tokens": -1},
    ],
)
def test_sampling_out_of_range_does_not_get_in(wrong: dict[str, Any]) -> None:
    codec: Codec[Any] = Codec(ToRouterFromClient)
    with pytest.raises(CodecError):
        codec.decode(codec.encode(Generate("l", SamplingParams(**wrong), text="x")))


@pytest.mark.parametrize("wrong", [{"n": 0}, {"n": 65}, {"stop": ("",)}, {"stop": ("x" * 257,)}, {"stop": ("x",) * 65}])
def test_requests_out_of_range_do_not_get_in(wrong: dict[str, Any]) -> None:
    codec: Codec[Any] = Codec(ToRouterFromClient)
    with pytest.raises(CodecError):
        codec.decode(codec.encode(Generate("l", SAMPLING, text="x", **wrong)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"presence_penalty": 2.5},
        {"frequency_penalty": -3.0},
        {"repetition_penalty": 0.0},
        {"logit_bias": {1: 101.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"allowed_token_ids": ()},
        {"bad_token_ids": ((),)},
        {"bad_token_ids": ((1,) * 65,)},
        {"bad_token_ids": ((1,),) * 1025},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"structured": StructuredOutput("xml")},  # type: ignore[arg-type]
        {"structured": StructuredOutput("regex", "a" * (MAX_CONSTRAINT + 1))},
        {"structured": StructuredOutput("choice", choices=("",))},
        {"structured": StructuredOutput("choice", choices=("a",) * 1025)},
    ],
    ids=range(16),
)
def test_what_is_asked_of_sampling_is_bounded(wrong: dict[str, Any]) -> None:
    codec: Codec[Any] = Codec(ToRouterFromClient)
    with pytest.raises(CodecError):
        codec.decode(codec.encode(Generate("l", SamplingParams(**wrong), text="x")))


def test_identities_come_back_as_named_tuples() -> None:
    codec: Codec[Any] = Codec(ToDecode)
    assert codec.decode(codec.encode(AbortTransfer(TRANSFER, ""))).transfer.key == KEY


def test_another_version_is_told_apart_from_garbage() -> None:
    codec: Codec[Any] = Codec(ToWorker)
    with pytest.raises(VersionError, match="version 99"):
        codec.decode(msgpack.packb([99, [22, list(KEY)]]))


@pytest.mark.parametrize(
    "body",
    [
        [999, 1],
        [22],
        [22, ["a", 1], "one field too many"],
        [22, ["a", "not a number"]],
        [20, ["a", 0], [-1], [1]],
        [20, ["a", 0], [1], [1, 0]],
        {"tag": 22},
        None,
        22,
    ],
)
def test_a_malformed_message_is_a_codec_error(body: Any) -> None:
    with pytest.raises(CodecError):
        Codec[Any](ToWorker).decode(msgpack.packb([PROTOCOL_VERSION, body]))


def test_a_message_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(CodecError, match="more than the 10 allowed"):
        Codec[Any](ToWorker, max_bytes=10).decode(b"\x00" * 11)


@settings(deadline=None)  # the first example of a union builds its decoder
@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_raise_anything_else(data: bytes) -> None:
    for union in MESSAGES:
        with contextlib.suppress(CodecError, VersionError):
            Codec[Any](union).decode(data)


@settings(deadline=None)
@given(st.sampled_from(CASES), st.data())
def test_damaged_messages_never_raise_anything_else(case: tuple[Any, Any], data: st.DataObject) -> None:
    union, message = case
    codec: Codec[Any] = Codec(union)
    encoded = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError, VersionError):
        codec.decode(bytes(encoded))
