"""I8: the simulator and the wall-clock driver give the same life history for the same events.

Each script of requests runs twice: through threads, sockets, a transport, the router's server and a client
(StubCluster), and through SimulatedCluster. Both run the same cores over the same made-up tokens. For
every request the two must agree on what the client saw (tokens, end, error, workers, attempts, bytes
handed over, marks passed) and on its life history: what each worker and the router heard, computed and
said for it, in order (`baton_cluster.history`).

Requests come one after the other, and what happens within one is tied to its progress, not to the time:
"while the step runs that starts at token `start`, with `outputs` tokens known". In both drivers a step
outlasts what is under way; the real one is held to that by `tests.in_order`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from baton.config import ClusterConfig, parse_config
from baton.engine.request import EngineRequest, StepPlan
from baton.errors import BatonError
from baton.protocol import TransferId
from baton.sampling_params import SamplingParams
from baton.timeline import Mark
from baton.worker_core import WorkerCore
from baton_cluster.history import LifeHistory
from baton_cluster.latency import LinkModel, StepFailed
from baton_cluster.simulated import SimulatedCluster
from kv_transfer.base import KVTransport
from tests import stub_cluster
from tests.fakes import made_up_token
from tests.in_order import InOrder
from tests.integration.test_workers import CorruptingTransport
from tests.stub_cluster import LAYOUT, MAX_MODEL_LEN, WAIT_S, StubCluster, expected_tokens, wait_until

B = LAYOUT.block_size
CHUNK = 3 * B
SECTIONS: dict[str, Any] = {
    "engine": {"max_batch_tokens": CHUNK, "max_batch_requests": 8},
    "liveness": {"heartbeat_s": 0.3, "timeout_s": 30},
}
STEP_S, LINK = 0.01, LinkModel(latency_s=0.0005, bytes_per_s=1e9)
DECODE_REFUSES = 4 * B
"""Tokens from which on the decode workers named by a scenario say that a request can never fit."""


class At(NamedTuple):
    """A moment in a request's first attempt: the step that starts at `start`, with `outputs` tokens known."""

    outputs: int
    start: int = -1
    """-1: where it starts does not matter."""

    def is_now(self, plan: StepPlan) -> bool:
        return any(self.matches(item.request, item.start) for item in plan.items)

    def matches(self, request: EngineRequest, start: int) -> bool:
        return request.key.attempt == 0 and request.num_outputs == self.outputs and self.start in (-1, start)


class Ask(NamedTuple):
    """One request, and what happens to it."""

    prompt: int
    max_tokens: int
    cancel: At | None = None
    fail: At | None = None
    stall: At | None = None
    """The step outlasts `router.request_timeout_s`."""
    stop_after: int | None = None
    """This token of the undisturbed answer is a stop token."""
    family: int | None = None
    """Prompts of one family begin alike; None: one of its own."""


class Scenario(NamedTuple):
    pools: dict[str, Any]
    asks: list[Ask]
    transport: str = "inproc"
    corrupt: bool = False
    refusing: tuple[str, ...] = ()
    sections: dict[str, Any] = {}
    max_model_len: int = MAX_MODEL_LEN
    """A real worker and a simulated one cap it by their pool; a StubCluster's does not."""


def plain(*cancelled: At) -> list[Ask]:
    lengths = [Ask(n, m) for n, m in ((1, 3), (B - 1, 2), (B, 5), (B + 1, 1), (CHUNK, 9), (2 * CHUNK + 1, 20))]
    return [
        *lengths,
        Ask(30, 12, stop_after=0),
        Ask(30, 12, stop_after=4),
        *(Ask(100, 10, cancel=at) for at in cancelled),
    ]


BOTH, SPLIT = {"both": {}}, {"prefill": {}, "decode": {}}
SPLIT_2_2 = {"prefill": {"workers": 2}, "decode": {"workers": 2}}
CANCELS = (At(0, 0), At(0, CHUNK), At(1), At(2), At(5))
TOO_LARGE = [Ask(MAX_MODEL_LEN, 1), Ask(8 * B, B), Ask(20, 4), Ask(8 * B, 1), Ask(7 * B + 1, B - 1)]
FAILING = [Ask(20, 6), Ask(100, 6, fail=At(0, 2 * CHUNK)), Ask(20, 6, fail=At(1)), Ask(20, 6, fail=At(3)), Ask(20, 6)]
LATE = [Ask(100, 6, stall=At(0, CHUNK)), Ask(20, 6), Ask(20, 6, stall=At(3)), Ask(20, 6)]
AGAIN = [
    *(Ask(n, 5, family=0) for n in (1, B - 1, B, B + 1, CHUNK, 2 * CHUNK + 1, 30, 30, 100, 100)),
    Ask(100, 40, family=1),
    Ask(120, 5, family=1),
    Ask(100, 10, cancel=At(1), family=1),
    Ask(120, 10, cancel=At(3), family=1),
]
SCENARIOS = {
    "the same beginning": Scenario(SPLIT, AGAIN),
    "the same beginning zmq+tcp": Scenario(SPLIT, AGAIN, "zmq+tcp://127.0.0.1"),
    "the same beginning colocated": Scenario(BOTH, AGAIN),
    "the same beginning corrupt": Scenario(SPLIT, AGAIN, corrupt=True),
    "no prefix cache": Scenario(SPLIT, AGAIN, sections={"engine": {**SECTIONS["engine"], "prefix_cache": False}}),
    "colocated": Scenario(BOTH, plain(*CANCELS)),
    "two colocated": Scenario({"both": {"workers": 2}}, plain(*CANCELS)),
    "split": Scenario(SPLIT, plain(*CANCELS)),
    "split zmq+tcp": Scenario(SPLIT, plain(*CANCELS), "zmq+tcp://127.0.0.1"),
    "split 2+2": Scenario(SPLIT_2_2, plain(*CANCELS)),
    "prefill, decode and both": Scenario({"prefill": {}, "decode": {}, "both": {}}, plain(*CANCELS)),
    "prefill first": Scenario(
        SPLIT, plain(*CANCELS), sections={"engine": {**SECTIONS["engine"], "policy": "prefill_first"}}
    ),
    "a narrow link": Scenario(SPLIT, plain(*CANCELS), sections={"transfer": {"max_unacked_blocks": 2}}),
    "the same beginning 16 to 24": Scenario({"prefill": {}, "decode": {"block_size": 24}}, AGAIN),
    "no checksums": Scenario(SPLIT, plain(), sections={"transfer": {"checksum": "none"}}),
    "too large": Scenario({"prefill": {"kv_blocks": 8}, "decode": {"kv_blocks": 8}}, TOO_LARGE, max_model_len=8 * B),
    "too large colocated": Scenario({"both": {"kv_blocks": 8}}, TOO_LARGE, max_model_len=8 * B),
    "corrupt": Scenario(SPLIT, [Ask(5, 4), Ask(B, 9), Ask(100, 9), Ask(100, 9, cancel=At(3))], corrupt=True),
    "one decode worker refuses": Scenario(
        SPLIT_2_2, [Ask(90, 5), Ask(20, 5), Ask(90, 5), Ask(90, 5)], refusing=("decode-0",)
    ),
    "nobody takes it": Scenario(SPLIT, [Ask(90, 5), Ask(20, 5), Ask(90, 1)], refusing=("decode-0",)),
    "kept at prefill": Scenario({"prefill": {}, "both": {}}, [Ask(90, 5), Ask(20, 5)], refusing=("both-0",)),
    "failing steps": Scenario(SPLIT_2_2, FAILING),
    "failing steps and nobody else": Scenario(SPLIT, FAILING),
    "failing steps colocated": Scenario({"both": {"workers": 2}}, FAILING),
    "one attempt": Scenario(SPLIT, FAILING, sections={"router": {"max_attempts": 1}}),
    "late": Scenario(SPLIT, LATE, sections={"router": {"request_timeout_s": 2.0}}),
    "late colocated": Scenario(BOTH, LATE, sections={"router": {"request_timeout_s": 2.0}}),
}


def pools_of(scenario: Scenario) -> dict[str, Any]:
    return {name: {"kv_blocks": 256, **pool} for name, pool in scenario.pools.items()}


class Seen(NamedTuple):
    """What is compared of one request."""

    outcome: tuple[Any, ...]
    places: dict[str, list[str]]
    blocks: dict[tuple[str, str], int]


def numbered(asks: list[Ask]) -> list[Ask]:
    """Each with a family."""
    return [ask if ask.family is not None else ask._replace(family=100 + i) for i, ask in enumerate(asks)]


def prompt_of(ask: Ask) -> list[int]:
    assert ask.family is not None
    return [(ask.family * 137 + i) % 1000 for i in range(ask.prompt)]


def sampling_of(ask: Ask) -> SamplingParams:
    stops: tuple[int, ...] = ()
    if ask.stop_after is not None:
        stops = (expected_tokens(prompt_of(ask), ask.stop_after + 1, seed=7)[-1],)
    return SamplingParams(max_tokens=ask.max_tokens, seed=7, stop_token_ids=stops)


def refuse(core: WorkerCore) -> None:
    """Its pool counts as too small for hand-overs of DECODE_REFUSES tokens."""
    receive: Any = core.receive
    inadmissible = receive._inadmissible

    def smaller(offer: Any) -> str | None:
        return "made up to be too small" if len(offer.prompt) >= DECODE_REFUSES else inadmissible(offer)

    receive._inadmissible = smaller


def seen(history: LifeHistory, request_ids: Iterable[str], outcome: tuple[Any, ...]) -> Seen:
    (request_id,) = request_ids
    blocks = {key: number for key, number in history.blocks.get(request_id, {}).items() if number}
    return Seen(outcome, history.places(request_id), blocks)


def failed(code: str, message: str) -> tuple[Any, ...]:
    return ("error", code, message)


# --- the wall-clock driver ------------------------------------------------------------------------


class Real:
    """The script on a StubCluster."""

    def __init__(self, scenario: Scenario):
        self.ask: Ask | None = None
        self.order: InOrder | None = None
        self.reached = threading.Event()
        self.history = LifeHistory()
        self.scenario = scenario

        def wrap(worker_id: str, transport: KVTransport) -> KVTransport:
            corrupt = scenario.corrupt and worker_id.startswith("decode")
            return CorruptingTransport(transport) if corrupt else transport  # type: ignore[return-value]

        self.cluster = StubCluster(
            pools_of(scenario),
            transport=scenario.transport,
            step_s=self.step,
            wrap=wrap,
            **{**SECTIONS, **scenario.sections},
        )

    def run(self) -> list[Seen]:
        with self.cluster as cluster:
            for worker in cluster.workers.values():
                self.history.watch_worker(worker.core)
            self.history.watch_router(cluster.router._core)
            for worker_id in self.scenario.refusing:
                refuse(cluster.workers[worker_id].core)
            wait_until(self.is_introduced, "all workers are acquainted")
            self.order = InOrder(cluster)
            with cluster.client() as client:
                return [self.one(client, ask) for ask in numbered(self.scenario.asks)]

    def is_introduced(self) -> bool:
        ports: list[Any] = [w.core.send for w in self.cluster.workers.values() if w.core.send is not None]
        decode = {w.info.incarnation for w in self.cluster.workers.values() if w.core.receive is not None}
        known = [{name for name, peer in port._peers.items() if peer.welcome} for port in ports]
        return all(decode - {port._incarnation} <= peers for port, peers in zip(ports, known, strict=True))

    def one(self, client: Any, ask: Ask) -> Seen:
        self.ask = ask
        self.reached.clear()
        known, sampling = set(self.history.events), sampling_of(ask)
        tokens: list[int] = []
        try:
            stream = client.stream(
                prompt_of(ask),
                max_tokens=ask.max_tokens,
                seed=7,
                stop_token_ids=sampling.stop_token_ids,
                timeout=WAIT_S,
            )
            if ask.cancel is not None and ask.cancel.outputs == 0:
                self.cancel(stream)
            for delta in stream:
                tokens += delta.token_ids
                if ask.cancel is not None and len(tokens) == ask.cancel.outputs:
                    self.cancel(stream)
            done = stream.completion
            outcome: tuple[Any, ...] = (
                done.finish_reason,
                tuple(tokens),
                done.prefill_worker,
                done.decode_worker,
                done.attempts,
                done.kv_bytes,
                [Mark(mark).name for mark in sorted(done.timeline.marks)],
            )
        except BatonError as e:
            outcome = failed(e.code, str(e))
        self.settle()
        self.ask = None
        return seen(self.history, set(self.history.events) - known, outcome)

    def cancel(self, stream: Any) -> None:
        assert self.reached.wait(WAIT_S), "the step in which to cancel never came"
        stream.cancel()

    def step(self, worker_id: str, plan: StepPlan) -> float:
        """In the engine's thread, before the step ends."""
        ask = self.ask
        if self.order is None or ask is None:
            return 0.0
        self.order.wait_quiet()
        for moment, sign in ((ask.cancel, "hears Abort"), (ask.stall, "says AttemptFailed timeout")):
            if moment is not None and moment.is_now(plan):
                self.reached.set()
                self.wait_for(sign, worker_id, plan.items[0].request.key.request_id)
                self.order.wait_quiet()
        if ask.fail is not None and ask.fail.is_now(plan):
            raise StepFailed("made up")
        return 0.0

    def wait_for(self, sign: str, worker_id: str, request_id: str) -> None:
        wait_until(lambda: sign in self.history.at(request_id, worker_id), f"{worker_id} {sign}")

    def settle(self) -> None:
        """Until nothing is left of it, and the router has heard so."""
        self.cluster.wait_ledger_zero()
        assert self.order is not None
        self.order.wait_quiet()
        wait_until(
            lambda: all(is_idle(w.load) for w in self.cluster.router.status().workers), "the reports of idleness"
        )
        assert not [e for e in self.cluster.step_failures() if not isinstance(e, StepFailed)]


def is_idle(load: Any) -> bool:
    return load.blocks_free == load.blocks_total and not load.num_running + load.num_waiting + load.num_pending_tokens


# --- the virtual-clock driver ---------------------------------------------------------------------


class Simulated:
    """The script on a SimulatedCluster of the same configuration. Its latency model watches for the moments."""

    def __init__(self, scenario: Scenario, config: ClusterConfig):
        self.ask: Ask | None = None
        self.scenario = scenario
        self.config = config
        timeout_s = config.router.request_timeout_s
        self.stall_s = math.inf if timeout_s is None else 2 * timeout_s
        self.cluster = SimulatedCluster(
            config,
            self,
            LINK,
            layout=LAYOUT,
            max_model_len=scenario.max_model_len,
            next_token=self.next_token,
            is_damaged=self.is_damaged if scenario.corrupt else None,
            history=True,
        )
        for worker_id in scenario.refusing:
            refuse(self.cluster.workers[worker_id].core)

    def run(self) -> list[Seen]:
        return [self.one(ask) for ask in numbered(self.scenario.asks)]

    def one(self, ask: Ask) -> Seen:
        cluster, history = self.cluster, self.cluster.history
        assert history is not None
        self.ask = ask
        self.request = request = cluster.submit(cluster.clock.now, prompt_of(ask), sampling_of(ask))
        cluster.run()
        cluster.check_ledger()
        cluster.run(until=cluster.clock.now + 1.0)  # the reports of idleness
        if request.error is not None:
            outcome: tuple[Any, ...] = failed(*request.error)
        else:
            outcome = (
                request.finish_reason,
                tuple(request.tokens),
                request.prefill_worker,
                request.decode_worker,
                request.attempts,
                request.kv_bytes,
                [Mark(mark).name for mark in sorted(request.timeline.marks)],
            )
        return seen(history, {request.request_id}, outcome)

    def step_s(self, plan: StepPlan) -> float:
        ask = self.ask
        assert ask is not None, "a step while nothing is asked"
        if ask.cancel is not None and ask.cancel.is_now(plan):
            self.cluster.cancel(self.request, self.cluster.clock.now + STEP_S / 2)
        stalls = ask.stall is not None and ask.stall.is_now(plan)
        self.fails = ask.fail is not None and ask.fail.is_now(plan)
        return self.stall_s if stalls else STEP_S

    def next_token(self, request: EngineRequest) -> int:
        if self.fails:
            raise StepFailed("made up")
        return made_up_token(request)

    @staticmethod
    def is_damaged(transfer: TransferId, index: int) -> bool:
        return index == 0


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_drivers_give_the_same_life_history(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = SCENARIOS[name]
    monkeypatch.setattr(stub_cluster, "MAX_MODEL_LEN", scenario.max_model_len)
    real = Real(scenario)
    expected = real.run()
    got = Simulated(scenario, real.cluster.config).run()
    for ask, one, other in zip(scenario.asks, expected, got, strict=True):
        assert one == other, ask
        assert one.places, "nothing was recorded"


def test_the_scenarios_reach_what_they_are_for() -> None:
    """The simulator's side of all scenarios, so that a change of the cores cannot empty them silently."""
    what: set[str] = set()
    ends: set[Any] = set()
    for scenario in SCENARIOS.values():
        tree = {"launcher": "local", "pools": pools_of(scenario), **SECTIONS, **scenario.sections}
        for one in Simulated(scenario, parse_config(tree)).run():
            ends.add(one.outcome[0] if one.outcome[0] != "error" else one.outcome[1])
            what |= {event.partition(" (")[0] for events in one.places.values() for event in events}
    assert ends == {"stop", "length", "abort", "request_too_large", "request_failed", "overloaded"}
    for must in (
        "hears Nack",
        "hears Refuse",
        "hears Replace",
        "hears AbortTransfer",
        "hears Ack",
        "says HandoffDone 7",
        "says HandoffDone 0",
    ):
        assert must in what
    assert "says AttemptFailed engine_error" in what
