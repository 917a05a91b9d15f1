"""RouterCore against fake workers that answer, refuse, fail, die, fall silent, duplicate and reorder.

I1: every accepted request ends exactly once, when its samples have. I2: every token index of every sample
reaches the client exactly once, in order. Each token's value is a function of request, sample and index, so that
a token of a wrong place shows. Some samples are ended by a watch, which the workers do not know.
Few hand-overs may be under way and few requests wait, so that many are queued, displaced and refused; some have
little time; workers that fail trip their breakers; at some point the router may stop. At the end everything comes
back to life and runs dry: nothing may be left, in the core or on a worker.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.protocol import (
    Abort,
    AttemptFailed,
    FinishReason,
    HandoffDone,
    HandoffRefused,
    Heartbeat,
    Replace,
    RequestKey,
    Submit,
    TokenOut,
    Tokens,
)
from baton.sampling_params import SamplingParams
from router.actions import NewTokens, RequestDone, RequestFailed, RouterAction, SampleDone, SendWorker
from router.core import RouterCore
from tests.fakes_router import config_of, join, worker

MAX_HANDOFFS = 2
MAX_QUEUE = 4
CONFIG = config_of(
    router__max_attempts=4,
    router__max_requests=12,
    router__max_handoffs=MAX_HANDOFFS,
    router__max_queue=MAX_QUEUE,
    router__breaker_failures=2,
    router__request_timeout_s=600.0,
)
SHAPES = (("p0", "d0"), ("p0", "p1", "d0", "d1"), ("b0",), ("b0", "b1"), ("p0", "d0", "b0"))


class Sample:
    """What the client must get of one sample, and has got. Also its watch, which ends it at index `watch_at`."""

    def __init__(self, number: int, max_tokens: int, stop_at: int, watch_at: int):
        self.number = number
        self.at_worker = min(max_tokens, stop_at + 1)
        self.of_worker: FinishReason = "stop" if stop_at < max_tokens else "length"
        self.watch_at = watch_at
        self.total = min(self.at_worker, watch_at + 1)
        self.last: FinishReason = "stop" if watch_at < self.at_worker else self.of_worker
        self.got: list[int] = []
        self.watched = 0
        self.ended: str | None = None

    def token(self, index: int) -> int:
        return self.number * 100 + index

    def finish(self, index: int) -> FinishReason | None:
        return self.of_worker if index == self.at_worker - 1 else None

    def watch(self, token: int, last: bool) -> bool:
        index, self.watched = self.watched, self.watched + 1
        assert token == self.token(index), "the watch sees each token once and in order"
        assert last == (index == self.at_worker - 1)
        return index == self.watch_at

    def end(self, reason: str) -> None:
        assert self.ended is None, "a sample ended twice"
        self.ended = reason
        if reason in ("stop", "length"):
            assert (reason, len(self.got)) == (self.last, self.total)


class Expected:
    """What the client must get for one request."""

    def __init__(self, samples: list[Sample]):
        self.samples = samples
        self.ended: str | None = None


class FakeWorker:
    """A worker's part of the protocol without an engine: what it holds, what it was told, what it will say."""

    def __init__(self, worker_id: str):
        self.worker_id = worker_id
        self.life = 0
        self.alive = False
        self.inbox: deque[Any] = deque()
        self.outbox: deque[Any] = deque()
        self.said: list[Any] = []
        self.prefills: dict[RequestKey, Submit] = {}
        """Attempts whose first token is not sampled yet."""
        self.handing: dict[RequestKey, Submit] = {}
        """First token sampled, decode has not acknowledged."""
        self.decodes: dict[RequestKey, int] = {}
        """Attempts and the index of their next token; -1: only reserved."""

    @property
    def incarnation(self) -> str:
        return f"{self.worker_id}#{self.life}"

    def clear(self) -> None:
        for part in (self.inbox, self.outbox, self.said, self.prefills, self.handing, self.decodes):
            part.clear()


class Cluster(RuleBasedStateMachine):
    @initialize(shape=st.sampled_from(SHAPES))
    def build(self, shape: tuple[str, ...]) -> None:
        self.core = RouterCore(CONFIG, router_incarnation="r")
        self.now = 0.0
        self.workers = {worker_id: FakeWorker(worker_id) for worker_id in shape}
        self.requests: dict[str, Expected] = {}
        self.refused = 0
        for fake in self.workers.values():
            self.start(fake)

    # --- what the router says ---------------------------------------------------------------------

    def do(self, actions: list[RouterAction]) -> None:
        for action in actions:
            match action:
                case SendWorker():
                    fake = self.workers[action.worker_id]
                    if fake.alive and fake.incarnation == action.incarnation:
                        fake.inbox.append(action.message)
                case NewTokens():
                    sample = self.requests[action.request_id].samples[action.sample]
                    assert self.requests[action.request_id].ended is None, "tokens after the end"
                    assert sample.ended is None, "tokens after the sample's end"
                    sample.got.extend(action.tokens)
                    assert sample.got == [sample.token(i) for i in range(len(sample.got))], "I2"
                case SampleDone():
                    expected = self.requests[action.request_id]
                    assert expected.ended is None
                    assert len(expected.samples) > 1
                    expected.samples[action.sample].end(action.finish_reason)
                case RequestDone():
                    expected = self.requests[action.request_id]
                    assert expected.ended is None, "I1: ended twice"
                    expected.ended = action.finish_reason
                    if len(expected.samples) == 1:
                        expected.samples[0].end(action.finish_reason)
                    assert action.finish_reason == expected.samples[0].ended
                    assert all(sample.ended for sample in expected.samples), "ended before its samples"
                    assert action.usage.completion_tokens == sum(len(sample.got) for sample in expected.samples)
                case RequestFailed():
                    expected = self.requests[action.request_id]
                    assert expected.ended is None, "I1: ended twice"
                    expected.ended = action.code
                    if action.code == "overloaded" and action.retry_after_s is not None:
                        self.refused += 1

    # --- workers ----------------------------------------------------------------------------------

    def start(self, fake: FakeWorker) -> None:
        fake.clear()
        fake.life += 1
        fake.alive = True
        self.do(self.core.on_join(join(worker(fake.worker_id, life=fake.life)), self.now))

    def listen(self, fake: FakeWorker) -> None:
        """Read all that the router sent."""
        while fake.inbox:
            message = fake.inbox.popleft()
            if isinstance(message, Submit):
                fake.prefills[message.key] = message
                self.reserve(message)
            elif isinstance(message, Replace) and message.key in fake.prefills:
                submit = fake.prefills[message.key]
                again = Submit(submit.key, submit.prompt, submit.sampling, submit.prior, message.decode)
                fake.prefills[message.key] = again
                self.reserve(again)
            elif isinstance(message, Abort):
                self.drop(fake, message.key)
                fake.decodes.pop(message.key, None)

    def reserve(self, submit: Submit) -> None:
        if submit.decode is not None and self.workers[submit.decode].alive and self.remaining(submit) > 1:
            self.workers[submit.decode].decodes.setdefault(submit.key, -1)

    def drop(self, fake: FakeWorker, key: RequestKey) -> None:
        """The prefill part ends without a hand-over; decode learns of it as from a peer."""
        submit = fake.prefills.pop(key, None) or fake.handing.pop(key, None)
        if submit is not None and submit.decode is not None and self.workers[submit.decode].decodes.get(key) == -1:
            del self.workers[submit.decode].decodes[key]

    def remaining(self, submit: Submit) -> int:
        return submit.sampling.max_tokens - len(submit.prior)

    def say(self, fake: FakeWorker, key: RequestKey, index: int) -> FinishReason | None:
        sample = self.requests[key.request_id].samples[key.sample]
        finish = sample.finish(index)
        token = TokenOut(*key, index, sample.token(index), finish)
        fake.outbox.append(Tokens(fake.worker_id, fake.incarnation, (token,)))
        return finish

    def prefill(self, fake: FakeWorker, key: RequestKey) -> None:
        submit = fake.prefills[key]
        assert len(submit.prior) < self.requests[key.request_id].samples[key.sample].total, "nothing is left to sample"
        finish = self.say(fake, key, len(submit.prior))
        if finish is not None or self.remaining(submit) == 1:
            self.drop(fake, key)
        elif submit.decode is None:
            del fake.prefills[key]
            fake.decodes[key] = len(submit.prior) + 1
        else:
            fake.handing[key] = fake.prefills.pop(key)

    def hand_over(self, fake: FakeWorker, key: RequestKey) -> None:
        submit = fake.handing.pop(key)
        assert submit.decode is not None
        decode = self.workers[submit.decode]
        if decode.alive and decode.decodes.get(key) == -1:
            decode.decodes[key] = len(submit.prior) + 1
            fake.outbox.append(HandoffDone(fake.worker_id, key, 1, 100))
        else:
            fake.outbox.append(AttemptFailed(fake.worker_id, key, "transfer", "decode does not know it"))

    def decode(self, fake: FakeWorker, key: RequestKey) -> None:
        index = fake.decodes[key]
        fake.decodes[key] = index + 1
        if self.say(fake, key, index) is not None:
            del fake.decodes[key]

    def kill(self, fake: FakeWorker) -> None:
        for key in [*fake.prefills, *fake.handing]:
            self.drop(fake, key)
        fake.clear()
        fake.alive = False

    # --- rules --------------------------------------------------------------------------------------

    def pick(self, data: st.DataObject, what: Any) -> Any:
        found = [(w, k) for w in self.workers.values() if w.alive for k in what(w)]
        return data.draw(st.sampled_from(found)) if found else (None, None)

    @rule(
        max_tokens=st.integers(1, 6),
        stops=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12)), min_size=1, max_size=3),
        watched=st.booleans(),
        client=st.sampled_from([b"c", b"e"]),
        priority=st.sampled_from([-1, 0, 0, 1]),
        timeout_s=st.sampled_from([None, None, 0.0, 1.0]),
    )
    def generate(
        self,
        max_tokens: int,
        stops: list[tuple[int, int]],
        watched: bool,
        client: bytes,
        priority: int,
        timeout_s: float | None,
    ) -> None:
        number, n = len(self.requests), len(stops)
        request_id = f"r{number}"
        samples = [
            Sample(number * 3 + i, max_tokens, stop_at, watch_at if watched else 99)
            for i, (stop_at, watch_at) in enumerate(stops)
        ]
        self.requests[request_id] = Expected(samples)
        sampling = SamplingParams(max_tokens=max_tokens)
        watches = samples if watched else ()
        queued = self.core.num_queued
        self.do(
            self.core.on_generate(
                client,
                str(number),
                request_id,
                1,
                (1, 2, 3),
                sampling,
                self.now,
                n=n,
                priority=priority,
                timeout_s=timeout_s,
                watches=watches,
            )
        )
        assert self.core.num_queued <= max(MAX_QUEUE, queued), "who comes new does not wait beyond the limit"
        assert not self.core.stopping or self.requests[request_id].ended == "overloaded"

    @rule(data=st.data())
    def hear_router(self, data: st.DataObject) -> None:
        self.listen(data.draw(st.sampled_from(list(self.workers.values()))))

    @rule(data=st.data(), times=st.integers(1, 3))
    def step(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            fake, key = self.pick(
                data, lambda w: [*w.prefills, *w.handing, *(k for k, i in w.decodes.items() if i >= 0)]
            )
            if fake is not None:
                self.advance(fake, key)

    def advance(self, fake: FakeWorker, key: RequestKey) -> None:
        if key in fake.prefills:
            self.prefill(fake, key)
        elif key in fake.handing:
            self.hand_over(fake, key)
        else:
            self.decode(fake, key)

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        fake, key = self.pick(data, lambda w: [k for k, s in w.prefills.items() if s.decode is not None])
        if fake is not None:
            submit = fake.prefills[key]
            self.workers[submit.decode].decodes.pop(key, None)
            fake.outbox.append(HandoffRefused(fake.worker_id, key, submit.decode, "full"))

    @rule(data=st.data(), code=st.sampled_from(["transfer", "peer_lost", "refused", "engine"]))
    def fail(self, data: st.DataObject, code: str) -> None:
        fake, key = self.pick(data, lambda w: [*w.prefills, *w.handing, *w.decodes])
        if fake is not None:
            self.drop(fake, key)
            fake.decodes.pop(key, None)
            fake.outbox.append(AttemptFailed(fake.worker_id, key, code, "made up"))

    @rule(data=st.data(), times=st.integers(1, 4))
    def deliver(self, data: st.DataObject, times: int) -> None:
        """From any worker: messages of one worker keep their order, those of several do not."""
        for _ in range(times):
            talking = [w for w in self.workers.values() if w.outbox]
            if talking:
                self.hand_in(data.draw(st.sampled_from(talking)))

    def hand_in(self, fake: FakeWorker) -> None:
        message = fake.outbox.popleft()
        fake.said.append(message)
        self.do(self.core.on_worker_message(fake.incarnation, message, self.now))

    @rule(data=st.data())
    def duplicate(self, data: st.DataObject) -> None:
        fake, message = self.pick(data, lambda w: [m for m in w.said if isinstance(m, Tokens)])
        if fake is not None:
            self.do(self.core.on_worker_message(fake.incarnation, message, self.now))

    @rule(data=st.data(), noticed=st.booleans())
    def die(self, data: st.DataObject, noticed: bool) -> None:
        fake = data.draw(st.sampled_from(list(self.workers.values())))
        self.kill(fake)
        if noticed:
            self.do(self.core.on_worker_lost(fake.incarnation, "killed", self.now))

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        fake = data.draw(st.sampled_from(list(self.workers.values())))
        self.kill(fake)
        self.start(fake)

    @rule(data=st.data(), seconds=st.sampled_from([0.1, 0.3, 1.0, 2.5, 40.0]))
    def time_passes(self, data: st.DataObject, seconds: float) -> None:
        silent = data.draw(st.sets(st.sampled_from(list(self.workers))))
        self.wait(seconds, silent)

    def wait(self, seconds: float, silent: set[str]) -> None:
        end = self.now + seconds
        while self.now < end:
            deadline = self.core.next_deadline()
            self.now = end if deadline is None else min(end, max(self.now, deadline))
            for fake in self.workers.values():
                if fake.alive and fake.worker_id not in silent:
                    self.do(self.core.on_worker_message(fake.incarnation, Heartbeat(fake.incarnation), self.now))
            before = self.now
            self.do(self.core.on_deadline(self.now))
            after = self.core.next_deadline()
            assert after is None or after > before, "a deadline that stays due would make the driver spin"

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), sample=st.sampled_from([None, 0, 1]))
    def cancel(self, data: st.DataObject, sample: int | None) -> None:
        label = str(data.draw(st.integers(0, len(self.requests) - 1)))
        for client in (b"c", b"e"):
            self.do(self.core.on_cancel(client, label, self.now, sample))

    @rule(client=st.sampled_from([b"c", b"e"]))
    def client_goes(self, client: bytes) -> None:
        self.do(self.core.on_client_gone(client, self.now))

    @rule(data=st.data(), undo=st.booleans())
    def drain(self, data: st.DataObject, undo: bool) -> None:
        worker_id = data.draw(st.sampled_from(list(self.workers)))
        self.do(self.core.on_drain(worker_id, undo, self.now))

    @precondition(lambda self: len(self.requests) > 6)
    @rule()
    def stop(self) -> None:
        self.do(self.core.on_stopping(self.now))

    @invariant()
    def books_are_right(self) -> None:
        self.core.check_integrity()
        most = MAX_HANDOFFS - 1 + 3  # the last slot may be taken by a request of three samples
        # Who is refused by a worker cannot wait, and may exceed it.
        refusals = sum(self.core.attempts.handoffs.values())
        assert refusals or all(w.handoffs <= most for w in self.core.view.workers.values())
        assert self.core.num_refused + self.core.num_displaced >= self.refused
        open_ones = sum(s.ended is None for e in self.requests.values() if e.ended is None for s in e.samples)
        assert open_ones == self.core.num_requests

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for fake in self.workers.values():
            if not fake.alive:
                self.start(fake)
            self.do(self.core.on_drain(fake.worker_id, True, self.now))
        for _ in range(300):
            for fake in self.workers.values():
                self.listen(fake)
                for key in [*fake.prefills, *fake.handing, *(k for k, i in fake.decodes.items() if i >= 0)]:
                    if key in fake.prefills or key in fake.handing or key in fake.decodes:
                        self.advance(fake, key)
                while fake.outbox:
                    self.hand_in(fake)
            if not self.core.num_requests and not any(self.held(w) for w in self.workers.values()):
                break
            self.wait(0.4, set())
            self.core.check_integrity()
        assert not self.core.num_requests, "requests that never end"
        assert all(e.ended for e in self.requests.values())
        assert {w.worker_id: self.held(w) for w in self.workers.values() if self.held(w)} == {}, "blocks are still held"
        assert all(w.num_outstanding == 0 for w in self.core.view.workers.values())

    def held(self, fake: FakeWorker) -> list[RequestKey]:
        return [*fake.prefills, *fake.handing, *fake.decodes]


TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
