"""The processes around the load of `benchmarks.router`: the router on a core of its own, and workers without an engine.

Run as a module it is such a process: `python -m benchmarks.router_ends`. Its orders come on stdin, one JSON document a
line, and each is answered on stdout. It ends with its stdin, so that none outlives the benchmark.

The stub workers are one for prefill and some for decode, and answer at once: the first token when the request has been
read, the others in steps of `step_s` seconds (0: one after the other), each step one `Tokens` message of all requests
of its worker, with the marks and load reports that real workers send. Must not know clients.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from baton.clock import clock_id
from baton.codec import Codec
from baton.config import parse_config
from baton.layout import KVLayout
from baton.protocol import (
    PROTOCOL_VERSION,
    Abort,
    FinishReason,
    HandoffDone,
    Heartbeat,
    Join,
    Joined,
    LoadReport,
    MarksOut,
    RequestKey,
    Submit,
    TokenOut,
    Tokens,
    ToRouterFromWorker,
    ToWorker,
    WorkerInfo,
)
from baton.timeline import Mark

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, block_size=16, head_dim=64, dtype="bfloat16")
NUM_BLOCKS = 1 << 20
MAX_MODEL_LEN = 1 << 17
HEARTBEAT_S = 0.5
BATCH = 256
"""Messages that a stub reads from a socket before it answers."""


class Process:
    """One process of this module, pinned to `cores`."""

    def __init__(self, role: str, cores: Sequence[int], **orders: Any):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.router_ends"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        )
        self.started: dict[str, Any] = self.ask(role=role, cores=list(cores), **orders)

    def ask(self, **orders: Any) -> dict[str, Any]:
        """Send orders, return the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(orders).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the benchmark's {orders.get('role', 'process')} ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class RouterProcess(Process):
    """A router with HTTP and the tokenizer of `model` (a folder)."""

    def __init__(self, cores: Sequence[int], model: str, config: dict[str, Any]):
        super().__init__("router", cores, model=model, config=config)
        self.address: str = self.started["address"]
        self.back: str = self.started["back"]
        self.url: str = self.started["url"]

    def usage(self) -> tuple[float, int]:
        """CPU seconds of all its threads so far, and its resident memory in bytes."""
        answer = self.ask(usage=True)
        return answer["cpu_s"], answer["rss"]

    def wait_ready(self, num_workers: int) -> None:
        self.ask(wait_ready=num_workers)


class StubProcess(Process):
    """Stub workers of a router that listens for workers at `back`. `ids`: the tokens that answers are made of."""

    def __init__(self, cores: Sequence[int], back: str, ids: list[int], num_decode: int):
        super().__init__("stub", cores, back=back, ids=ids, num_decode=num_decode)

    def pace(self, step_s: float | None) -> None:
        """Steps of so many seconds from now on; None: no step."""
        self.ask(step_s=step_s)

    def counts(self) -> tuple[int, int]:
        """Requests that have come and tokens that were sent so far."""
        answer = self.ask(counts=True)
        return answer["requests"], answer["tokens"]

    def is_decoding(self) -> bool:
        """Whether any request has tokens to come."""
        return bool(self.ask(counts=True)["decoding"])


@contextmanager
def cluster(
    router_cores: Sequence[int],
    stub_cores: Sequence[int],
    *,
    model: str,
    ids: list[int],
    num_decode: int = 1,
    config: dict[str, Any] | None = None,
) -> Iterator[tuple[RouterProcess, StubProcess]]:
    """A router and stub workers that have joined it."""
    router = RouterProcess(router_cores, model, {"name": "baton-bench", **(config or {})})
    try:
        stub = StubProcess(stub_cores, router.back, ids, num_decode)
        try:
            router.wait_ready(1 + num_decode)
            yield router, stub
        finally:
            stub.close()
    finally:
        router.close()


# --- within the processes ----------------------------------------------------------------------------


def _orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def serve_router(orders: dict[str, Any]) -> None:
    """Until stdin ends."""
    from router.server import RouterServer

    liveness = {"heartbeat_s": HEARTBEAT_S, "timeout_s": 20.0}  # a stub that waits for its core is not lost
    config = parse_config({"launcher": "local", "liveness": liveness, **orders["config"]})
    router = RouterServer(config, orders["model"])
    address, back = router.start()
    _answer(address=address, back=back, url=router.url)
    page = resource.getpagesize()
    for order in _orders():
        if "wait_ready" in order:
            router.wait_ready(order["wait_ready"], 60.0)
            _answer()
        elif "usage" in order:
            rss = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * page
            _answer(cpu_s=time.process_time(), rss=rss)
    router.stop()


class StubWorker:
    """One worker's socket, and the requests it decodes."""

    def __init__(self, context: zmq.Context[Any], back: str, worker_id: str, role: Any, ids: list[int]):
        self.worker_id = worker_id
        self.incarnation = f"{worker_id}-{os.getpid()}"
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, self.incarnation.encode())
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(back)
        self.step_at = 0.0
        self.num_requests = 0
        self.num_tokens = 0
        self._ids = ids
        self._in: Codec[Any] = Codec(ToWorker)
        self._out: Codec[Any] = Codec(ToRouterFromWorker)
        self._decoding: dict[RequestKey, tuple[int, int]] = {}
        """Next index and number of tokens."""
        info = WorkerInfo(
            worker_id=worker_id,
            incarnation=self.incarnation,
            pool=role,
            role=role,
            fingerprint="stub",
            layout=LAYOUT,
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_batch_requests=256,
            control_address="tcp://127.0.0.1:1",
            data_address="zmq+tcp://127.0.0.1:1",
            pid=os.getpid(),
            engine="stub",
        )
        self.send(Join(PROTOCOL_VERSION, info, time.monotonic(), clock_id()))

    def send(self, message: Any) -> None:
        self.socket.send(self._out.encode(message))

    def beat(self) -> None:
        self.send(Heartbeat(self.incarnation, self.load()))

    def load(self) -> LoadReport:
        held = len(self._decoding)
        return LoadReport(num_running=held, blocks_free=NUM_BLOCKS - held, blocks_total=NUM_BLOCKS)

    def messages(self) -> Iterator[Any]:
        for _ in range(BATCH):
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._in.decode(data)
            if type(message) is Abort:
                self._decoding.pop(message.key, None)
            elif type(message) is Submit or type(message) is Joined:
                yield message

    def prefill(self, submits: list[Submit], decoders: dict[str, StubWorker]) -> None:
        """Their first tokens, and the account of their hand-overs."""
        now = time.monotonic()
        tokens, marks = [], []
        seen = {int(Mark.SUBMITTED): now, int(Mark.PREFILL_START): now, int(Mark.FIRST_TOKEN): now}
        for submit in submits:
            last = submit.sampling.max_tokens == 1
            tokens.append(TokenOut(*submit.key, 0, self._ids[0], "length" if last else None))
            marks.append(MarksOut(*submit.key, seen))
        self._tell(tokens, marks)
        self.num_requests += len(submits)
        for submit in submits:
            if submit.sampling.max_tokens > 1:
                decoder = decoders.get(submit.decode or "", self)
                decoder.adopt(submit)
                if decoder is not self:
                    self.send(HandoffDone(self.worker_id, submit.key, 8, 8 << 16, {int(Mark.COMMITTED): now}))

    def adopt(self, submit: Submit) -> None:
        self._decoding[submit.key] = (1, submit.sampling.max_tokens)

    def step(self) -> None:
        """A token of every request."""
        now = time.monotonic()
        tokens, marks = [], []
        ids, num_ids = self._ids, len(self._ids)
        for key, (index, end) in list(self._decoding.items()):
            finish: FinishReason | None = "length" if index + 1 == end else None
            tokens.append(TokenOut(*key, index, ids[index % num_ids], finish))
            if index == 1 or finish:
                seen = {int(Mark.ADOPTED): now, int(Mark.DECODE_START): now, int(Mark.SECOND_TOKEN): now}
                marks.append(MarksOut(*key, seen | {int(Mark.FINISHED): now} if finish else seen))
            if finish:
                del self._decoding[key]
            else:
                self._decoding[key] = (index + 1, end)
        self._tell(tokens, marks)

    def _tell(self, tokens: list[TokenOut], marks: list[MarksOut]) -> None:
        self.send(Tokens(self.worker_id, self.incarnation, tuple(tokens), tuple(marks), self.load()))
        self.num_tokens += len(tokens)

    @property
    def decodes(self) -> bool:
        return bool(self._decoding)


def serve_stub(orders: dict[str, Any]) -> None:
    """Until stdin ends."""
    context: zmq.Context[Any] = zmq.Context()
    back, ids = orders["back"], orders["ids"]
    prefill = StubWorker(context, back, "prefill-0", "prefill", ids)
    names = [f"decode-{i}" for i in range(orders["num_decode"])]
    decoders = {name: StubWorker(context, back, name, "decode", ids) for name in names}
    workers = [prefill, *decoders.values()]
    pace: dict[str, float | None] = {"step_s": 0.0}
    told, tell = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    told.bind("inproc://orders")
    tell.connect("inproc://orders")
    poller = zmq.Poller()
    for socket in (told, *(worker.socket for worker in workers)):
        poller.register(socket, zmq.POLLIN)

    def listen() -> None:
        for order in _orders():
            if "counts" in order:
                _answer(
                    requests=prefill.num_requests,
                    tokens=sum(worker.num_tokens for worker in workers),
                    decoding=any(worker.decodes for worker in workers),
                )
            else:
                tell.send(json.dumps(order["step_s"]).encode())
                _answer()
        tell.send(b"")

    threading.Thread(target=listen, daemon=True).start()
    _answer()
    beat_at = time.monotonic() + HEARTBEAT_S
    while True:
        step_s = pace["step_s"]
        waits = [beat_at]
        if step_s is not None:
            waits += [worker.step_at for worker in decoders.values() if worker.decodes]
        wait = min(waits) - time.monotonic()
        ready = dict(poller.poll(max(0, int(wait * 1000 + 0.999))))
        if told in ready:
            order = told.recv()
            if not order:
                return
            pace["step_s"] = json.loads(order)
        if prefill.socket in ready:
            submits = [message for message in prefill.messages() if type(message) is Submit]
            if submits:
                prefill.prefill(submits, decoders)
        now = time.monotonic()
        for i, worker in enumerate(decoders.values()):
            if worker.socket in ready:
                for _ in worker.messages():
                    pass
            if step_s is not None and worker.decodes and now >= worker.step_at:
                worker.step()
                # Steps of different workers are not at the same time, and none is made up for.
                period = max(step_s, 1e-9)
                phase = i * period / len(decoders)
                worker.step_at = ((now - phase) // period + 1) * period + phase
        if now >= beat_at:
            for worker in workers:
                worker.beat()
            beat_at = now + HEARTBEAT_S


def main() -> None:
    orders = next(_orders())
    os.sched_setaffinity(0, orders["cores"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    if orders["role"] == "router":
        serve_router(orders)
    else:
        serve_stub(orders)


if __name__ == "__main__":
    main()
