"""A cluster with everything real but the model: threads, sockets, sessions, router and client.

Its runners make tokens up and keep a trace of every computed position in the KV pool, which they check
before each token: blocks that are lost, mixed up or reused too early fail the step (`step_failures`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import msgspec
import zmq

import baton_cluster.build
from baton.config import ClusterConfig, parse_config
from baton.engine.request import EngineRequest, StepPlan
from baton.layout import KVLayout
from baton.ports import PeerLinks
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams
from baton.worker import EngineWorker
from baton_cluster.build import build_worker
from baton_cluster.specs import WorkerSpec, worker_specs
from kv_transfer.base import KVTransport
from kv_transfer.links import ZmqPeerLinks
from kv_transfer.registry import open_transport
from router.client import RouterClient
from router.server import RouterServer
from tests.fakes import VOCAB, StubRunner, made_up_token
from tests.fakes_router import LetterText
from tests.fakes_transfer import FakePool

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, block_size=16, head_dim=2, dtype="float32")
"""A position's 8 bytes of `StubRunner` are its key, so they go where it goes if blocks are re-sliced."""
MAX_MODEL_LEN = 512
WAIT_S = 20.0


def expected_tokens(prompt: Sequence[int], num_tokens: int, seed: int = 0, sample: int = 0) -> list[int]:
    """What an undisturbed run answers."""
    sampling = SamplingParams(max_tokens=num_tokens, seed=seed)
    request = EngineRequest(RequestKey("", 0, sample), list(prompt), sampling)
    for _ in range(num_tokens):
        request.tokens.append(made_up_token(request))
    return request.tokens[len(prompt) :]


def wait_until(condition: Callable[[], bool], what: str, *, within_s: float = WAIT_S) -> None:
    """Return once `condition` holds; fail after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.005)


class RecordingRunner(StubRunner):
    """A StubRunner that remembers what went wrong, and takes `step_s(plan)` seconds for a step."""

    def __init__(self, memory: FakePool, step_s: Callable[[StepPlan], float], block_size: int = LAYOUT.block_size):
        super().__init__(memory=memory, block_size=block_size)
        self.failures: list[BaseException] = []
        self._step_s = step_s

    def run(self, plan: StepPlan) -> list[int | None]:
        time.sleep(self._step_s(plan))
        try:
            return super().run(plan)
        except BaseException as e:
            self.failures.append(e)
            raise

    def set_num_threads(self, num_threads: int) -> None:
        """Nothing to compute with."""


def stub_worker(
    config: ClusterConfig,
    spec: WorkerSpec,
    *,
    router_address: str,
    context: zmq.Context[Any],
    transport: str,
    step_s: Callable[[StepPlan], float],
    wrap: Callable[[KVTransport], KVTransport] = lambda transport: transport,
    wrap_links: Callable[[PeerLinks], PeerLinks] = lambda links: links,
) -> tuple[EngineWorker, RecordingRunner, FakePool]:
    """A worker without a model, not started yet, with its runner and its KV pool."""
    layout = msgspec.structs.replace(LAYOUT, block_size=config.block_size_of(config.pools[spec.pool]))
    pool: Any = FakePool(config.pools[spec.pool].kv_blocks or 256, layout.block_bytes)
    pool.layout = layout
    runner = RecordingRunner(pool, step_s, layout.block_size)
    built: Any = SimpleNamespace(
        runner=runner,
        kv_cache=pool,
        spec=SimpleNamespace(eos_token_ids=()),
        fingerprint="stub",
        engine="stub",
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
    )
    originals = {name: getattr(baton_cluster.build, name) for name in ("open_transport", "ZmqPeerLinks")}
    baton_cluster.build.open_transport = lambda *url: wrap(open_transport(*url))
    baton_cluster.build.ZmqPeerLinks = lambda **parts: wrap_links(ZmqPeerLinks(**parts))
    try:
        worker = build_worker(
            config, spec, built, router_address=router_address, context=context, transport=transport, pid=os.getpid()
        )
    finally:
        for name, original in originals.items():
            setattr(baton_cluster.build, name, original)
    return worker, runner, pool


class StubCluster:
    """`pools` as in cluster.yaml.

    `wrap(worker_id, transport)` may put a faulty transport in between, `wrap_links(worker_id, links)` faulty links.
    `text`: the router's; None: a letter is a token.
    """

    def __init__(
        self,
        pools: dict[str, Any],
        *,
        transport: str = "inproc",
        step_s: Callable[[str, StepPlan], float] = lambda worker_id, plan: 0.0,
        wrap: Callable[[str, KVTransport], KVTransport] = lambda worker_id, transport: transport,
        wrap_links: Callable[[str, PeerLinks], PeerLinks] = lambda worker_id, links: links,
        text: Any = None,
        **sections: Any,
    ):
        tree = {"launcher": "local", "pools": pools, "liveness": {"heartbeat_s": 0.2, "timeout_s": 10}, **sections}
        tree["router"] = {"shutdown_grace_s": 0, **sections.get("router", {})}  # tests leave requests open
        self.config: ClusterConfig = parse_config(tree)
        self.context: zmq.Context[Any] = zmq.Context()
        if text is None:
            text = LetterText()
            text.vocab_size = VOCAB
        self.router = RouterServer(self.config, text=text)
        self.address, self.back = self.router.start()
        self.workers: dict[str, EngineWorker] = {}
        self.runners: dict[str, RecordingRunner] = {}
        self.pools: dict[str, FakePool] = {}
        self.transports: dict[str, KVTransport] = {}
        self._wrap_links = wrap_links
        self._add_again = lambda spec: self._add(spec, transport, step_s, wrap)
        try:
            for spec in worker_specs(self.config):
                self._add(spec, transport, step_s, wrap)
            self.router.wait_ready(len(self.workers), WAIT_S)
        except BaseException:
            self.stop()
            raise

    def _add(self, spec: Any, transport: str, step_s: Any, wrap: Any) -> None:
        name = spec.worker_id
        worker, runner, pool = stub_worker(
            self.config,
            spec,
            router_address=self.back,
            context=self.context,
            transport=transport,
            step_s=lambda plan: step_s(name, plan),
            wrap=lambda opened: self.transports.setdefault(name, wrap(name, opened)),
            wrap_links=lambda links: self._wrap_links(name, links),
        )
        self.workers[name], self.runners[name], self.pools[name] = worker, runner, pool
        worker.start(WAIT_S)

    def add(self, worker_id: str) -> None:
        """Start this worker, which has been stopped, as a new life."""
        self.transports.pop(worker_id)
        self._add_again(next(spec for spec in worker_specs(self.config) if spec.worker_id == worker_id))

    def client(self) -> RouterClient:
        return RouterClient(self.address, secret=self.config.security.secret)

    def num_held_blocks(self) -> int:
        return sum(worker.num_held_blocks() for worker in self.workers.values())

    def step_failures(self) -> list[BaseException]:
        return [failure for runner in self.runners.values() for failure in runner.failures]

    def wait_ledger_zero(self) -> None:
        """All requests have ended: no block may be held, on any worker."""
        wait_until(
            lambda: self.num_held_blocks() == 0,
            f"no block held ({ {name: worker.core.engine.holders() for name, worker in self.workers.items()} })",
        )

    def stop(self) -> None:
        self.router.stop()
        for worker in self.workers.values():
            worker.stop()
        self.context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
