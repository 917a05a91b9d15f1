"""WorkerCore: all that one worker decides, without its threads, sockets and tensors.

Joins the engine core with the send and receive port: messages and completions come in, actions go
out. The wall-clock driver (`baton.worker`) and a virtual-clock one run this same class.
Pure: no clock, no I/O. Not thread-safe; its driver holds a lock around every call.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.audit import Audit, Holding, StrandedBlocks, take_stock
from baton.engine.core import EngineCore
from baton.engine.prefix_log import PrefixLog
from baton.engine.request import ChunkDone, Effect, Emit, Ended, EngineRequest, PromptDone, StepPlan
from baton.errors import RequestError
from baton.ledger import MAX_BLOCK_IDS, MAX_ENTRIES, MAX_FINDINGS, AskLedger, Finding, LedgerEntry, LedgerReport
from baton.plain_steps import PlainSteps
from baton.ports import (
    Action,
    BlocksReceived,
    BlocksSent,
    ControlRestored,
    DataLinkLost,
    FromDecode,
    FromPrefill,
    Hashed,
    PeerEvent,
    ReceivePort,
    SendPort,
    Shipped,
    ToRouter,
)
from baton.protocol import (
    Abort,
    AskPrefixes,
    AttemptFailed,
    Heartbeat,
    LoadReport,
    LogprobsOut,
    MarksOut,
    Peers,
    PrefixNews,
    Replace,
    RequestKey,
    Submit,
    TokenOut,
    Tokens,
    WorkerInfo,
)


class WorkerCore:
    """A prefill worker is this with a send port, a decode worker with a receive port, `both` has the two."""

    def __init__(self, info: WorkerInfo, engine: EngineCore, send: SendPort | None, receive: ReceivePort | None):
        self.info = info
        self.engine = engine
        self.send = send
        self.receive = receive
        self.stranded = StrandedBlocks()
        self._new_findings: list[Finding] = []
        self._prefix_log: PrefixLog | None = None
        """None: the router does not want to know, or nothing is kept here that could be found."""
        self._num_prefix_news = 0
        self._prefix_reset = False
        """The next news tell of everything."""

    # --- events ---------------------------------------------------------------------------------

    def on_router_message(self, message: Submit | Replace | Abort | Peers | AskPrefixes, now: float) -> list[Action]:
        """Raises nothing: what cannot be served is answered with AttemptFailed."""
        match message:
            case Submit():
                actions = self._submit(message, now)
            case Abort():
                actions = self._abort(message.key, now)
            case Replace():
                actions = self._replace(message, now)
            case Peers():
                actions = self.send.on_peers(message.workers, now) if self.send else []
            case AskPrefixes():
                actions = self._start_prefix_log()
        return self._after(actions, now)

    def on_peer_event(self, event: PeerEvent, now: float) -> list[Action]:
        """A session message of another worker, or news of the blocks that move between the two."""
        send, receive = self.send, self.receive
        actions: list[Action] = []
        match event:
            case FromDecode(peer, message) if send:
                actions = send.on_message(peer, message, now)
            case FromPrefill(peer, message) if receive:
                actions = receive.on_message(peer, message, now)
            case Shipped(transfer, indices, refs) if send:
                actions = send.on_shipped(transfer, indices, refs, now)
            case Hashed(transfer, checksums) if send:
                actions = send.on_hashed(transfer, checksums, now)
            case BlocksSent(transfer, indices) if send:
                actions = send.on_sent(transfer, indices, now)
            case BlocksReceived(transfer, checksums) if receive:
                actions = receive.on_received(transfer, checksums, now)
            case ControlRestored(peer) if send:
                actions = send.on_control_restored(peer, now)
            case DataLinkLost(peer, reason, incoming):
                port = receive if incoming else send
                actions = port.on_link_lost(peer, reason, now) if port else []
        return self._after(actions, now)

    def on_router_lost(self, now: float) -> list[Action]:
        """Nobody waits for these requests any more: end them all."""
        actions: list[Action] = []
        for key in self.engine.live():
            actions += self._abort(key, now)
        if self._prefix_log is not None:
            self._prefix_log = None
            self.engine.tables.log_prefixes(False)
        return self._after(actions, now)

    # --- steps ----------------------------------------------------------------------------------

    def next_step(self, now: float) -> StepPlan | None:
        return self.engine.schedule(now)

    def finish_step(
        self, plan: StepPlan, tokens: Sequence[int | None], now: float, plain: PlainSteps | None = None
    ) -> list[Action]:
        """Take in a step's tokens. The first action is the one `Tokens` message of the step, if it has any.

        `plain`: that is the message, if there are tokens that it can tell; for drivers of which all tokens are its.
        """
        rows: list[TokenOut] = []
        effects = self.engine.complete(plan, tokens, now, rows, plain)
        return self._after(self._apply(effects, now, rows, plain), now)

    def is_plain(self, plan: StepPlan, token: int) -> bool:
        """Whether `finish_step`, if all get `token`, would answer with a message of one token each and nothing else."""
        return self.engine.is_plain(plan, token) and not (self.receive and self.receive.is_waiting)

    def finish_plain_step(self, plan: StepPlan, token: int, now: float) -> LoadReport:
        """`finish_step` where `is_plain`: what to report beside the tokens (`baton.plain_steps`)."""
        self.engine.complete_plain(plan, token, now)
        return self.load()

    def fail_step(self, plan: StepPlan, problem: str, now: float) -> list[Action]:
        """The step raised: its requests end here and the router may place them elsewhere."""
        actions: list[Action] = [
            ToRouter(AttemptFailed(self.info.worker_id, item.request.key, "engine_error", problem))
            for item in plan.items
            if not item.request.ended
        ]
        return self._after(actions + self._apply(self.engine.fail_step(plan, now), now), now)

    # --- time -----------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `on_deadline` is due, or None."""
        first = self.engine.next_deadline()
        for port in (self.send, self.receive):
            at = port.next_deadline() if port is not None else None
            if at is not None and (first is None or at < first):
                first = at
        return first

    def on_deadline(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for effect in self.engine.on_deadline(now):
            assert isinstance(effect, Ended)
            actions.append(
                ToRouter(AttemptFailed(self.info.worker_id, effect.request.key, "timeout", "the request took too long"))
            )
            actions += self._apply([effect], now)
        for port in (self.send, self.receive):
            if port is not None:
                actions += port.on_deadline(now)
        return self._after(actions, now)

    def load(self) -> LoadReport:
        load, stranded = self.engine.load(), self.stranded
        if not stranded.num_blocks and not stranded.block_seconds:
            return load
        return msgspec.structs.replace(
            load, stranded_blocks=stranded.num_blocks, stranded_block_seconds=stranded.block_seconds
        )

    def take_prefix_news(self) -> PrefixNews | None:
        """What the router has not been told yet of the prefixes that are cached here; None: nothing."""
        log = self._prefix_log
        if log is None or not (log or self._prefix_reset):
            return None
        self._num_prefix_news += 1
        news = PrefixNews(self._num_prefix_news, *log.take(), self._prefix_reset)
        self._prefix_reset = False
        return news

    def num_held_blocks(self) -> int:
        """Blocks that are not free; zero once every request and transfer has ended (principle 4)."""
        return self.engine.pool.num_blocks - self.engine.pool.num_free

    # --- audit ----------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """No request can advance and no transfer is open, so no block may be held."""
        return not self.engine.is_busy and not self._holdings()

    def ledger(self, now: float, *, block_ids: bool = False) -> list[LedgerEntry]:
        """Who holds blocks, or waits for some, and why; stranded ones first, then by blocks."""
        return self.audit(now, block_ids=block_ids).entries

    def audit(self, now: float, *, block_ids: bool = False) -> Audit:
        """Account for every block (`baton.audit`). Right at any moment; takes time in proportion to the pool."""
        audit = take_stock(self.engine, self._holdings(), now, block_ids=block_ids)
        self._new_findings += self.stranded.observe(audit, now)
        return audit

    def audit_if_idle(self, now: float) -> None:
        """To be called now and then: audits if nothing is going on, and yet a block is held."""
        if not self.is_idle:
            self.stranded.advance(now)
        elif self.num_held_blocks():
            self.audit(now)
        else:
            self.stranded.observe(None, now)

    def take_findings(self) -> list[Finding]:
        """What audits have found since the last call; each finding is told once."""
        findings, self._new_findings = self._new_findings, []
        return findings

    def ledger_report(self, ask: AskLedger, now: float, problem: str | None = None) -> LedgerReport:
        """The answer to the router. `problem`: why the worker is not healthy."""
        audit, load = self.audit(now, block_ids=ask.block_ids), self.load()
        room = MAX_BLOCK_IDS
        entries: list[LedgerEntry] = []
        for entry in audit.entries[:MAX_ENTRIES]:
            if len(entry.block_ids) > room:
                entry = msgspec.structs.replace(entry, block_ids=entry.block_ids[:room])
            room -= len(entry.block_ids)
            entries.append(entry)
        return LedgerReport(
            worker_id=self.info.worker_id,
            number=ask.number,
            blocks_total=load.blocks_total,
            blocks_free=load.blocks_free,
            blocks_cached=load.blocks_cached,
            entries=tuple(entries),
            num_entries=len(audit.entries),
            findings=tuple(audit.findings[:MAX_FINDINGS]),
            stranded_blocks=len(audit.stranded),
            phantom_blocks=audit.num_phantom,
            stranded_block_seconds=load.stranded_block_seconds,
            problem=problem,
        )

    def _holdings(self) -> list[Holding]:
        return [holding for port in (self.send, self.receive) if port is not None for holding in port.holdings()]

    # --- inside ---------------------------------------------------------------------------------

    def _submit(self, submit: Submit, now: float) -> list[Action]:
        remaining = submit.sampling.max_tokens - len(submit.prior)
        # A request of which one token is left ends at prefill: nothing to hand over.
        handoff = submit.decode not in (None, self.info.worker_id) and remaining > 1
        if handoff and self.send is None:
            return [self._refused(submit.key, f"{self.info.worker_id} ({self.info.role}) has no send port")]
        request = EngineRequest(
            submit.key,
            submit.prompt,
            submit.sampling,
            prior=submit.prior,
            handoff=handoff,
            deadline=None if submit.timeout_s is None else now + submit.timeout_s,
            priority=submit.priority,
        )
        try:
            self.engine.submit(request, now)
        except RequestError as e:
            return [self._refused(submit.key, str(e))]
        return self.send.offer(submit, now) if handoff and self.send else []

    def _start_prefix_log(self) -> list[Action]:
        self._prefix_log = self.engine.tables.log_prefixes(True)
        self._prefix_reset = self._prefix_log is not None
        news = self.take_prefix_news()
        return [] if news is None else [ToRouter(Heartbeat(self.info.incarnation, None, news))]

    def _replace(self, message: Replace, now: float) -> list[Action]:
        try:
            return self.send.replace(message, now) if self.send else []
        except RequestError as e:
            return [self._refused(message.key, str(e)), *self._abort(message.key, now)]

    def _refused(self, key: RequestKey, reason: str) -> Action:
        return ToRouter(AttemptFailed(self.info.worker_id, key, "refused", reason))

    def _abort(self, key: RequestKey, now: float) -> list[Action]:
        actions = self.receive.on_abort(key, now) if self.receive else []
        return actions + self._apply(self.engine.abort(key, now), now)

    def _apply(
        self,
        effects: list[Effect],
        now: float,
        tokens: Sequence[TokenOut] = (),
        plain: PlainSteps | None = None,
    ) -> list[Action]:
        """What follows from effects; `tokens` and `plain` are the step's."""
        marks: list[MarksOut] = []
        logprobs: list[LogprobsOut] = []
        actions: list[Action] = []
        for effect in effects:
            request = effect.request
            match effect:
                case Emit():
                    if effect.finish or request.num_tokens - request.num_context == 1:
                        marks.append(MarksOut(*request.key, dict(request.marks), request.num_cached_tokens))
                    if effect.logprobs is not None or effect.prompt_logprobs is not None:
                        logprobs.append(
                            LogprobsOut(*request.key, effect.index, effect.logprobs, effect.prompt_logprobs)
                        )
                case ChunkDone():
                    assert self.send is not None
                    actions += self.send.on_chunk(effect, now)
                case PromptDone():
                    assert self.send is not None
                    actions += self.send.on_prompt_done(effect, now)
                case Ended():
                    if effect.problem is not None:
                        actions.append(self._refused(request.key, effect.problem))
                    if request.handoff and self.send is not None:
                        actions += self.send.on_ended(effect, now)
        load = self.load() if tokens or (plain and plain.keys) else None
        message: Tokens | PlainSteps
        if tokens:
            worker = self.info
            message = Tokens(
                worker.worker_id,
                worker.incarnation,
                tuple(tokens),
                tuple(marks),
                load,
                tuple(logprobs),
                # Where a prompt is done, or a request: what became findable with a block in between can wait.
                self.take_prefix_news() if marks else None,
            )
            if plain and plain.keys:
                plain.rest = message
        if load is not None:
            if plain and plain.keys:
                plain.loads.append(load)
                message = plain
            actions.insert(0, ToRouter(message))
        return actions

    def _after(self, actions: list[Action], now: float) -> list[Action]:
        """Blocks may have come free, or a request that waited for some may have got them: serve waiting offers."""
        if self.receive is not None:
            actions += self.receive.on_blocks_free(now)
        return actions
