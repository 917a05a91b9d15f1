"""What the router's tests share: workers' descriptions, a script for a core, a text of one token per letter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.config import ClusterConfig, parse_config
from baton.errors import InvalidRequestError
from baton.layout import KVLayout
from baton.protocol import (
    PROTOCOL_VERSION,
    AttemptFailed,
    ChatMessage,
    FinishReason,
    HandoffDone,
    HandoffRefused,
    Heartbeat,
    Join,
    LoadReport,
    MarksOut,
    RequestKey,
    TokenOut,
    Tokens,
    WorkerInfo,
)
from baton.sampling_params import SamplingParams
from router.actions import LedgerDone, NewTokens, RequestDone, RequestFailed, RouterAction, SampleDone, SendWorker
from router.core import RouterCore
from router.request import TokenWatch

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, block_size=4, head_dim=8, dtype="float32")
VOCAB = 128


def config_of(**dotted: Any) -> ClusterConfig:
    """`config_of(router__max_attempts=2)`; everything else as by default."""
    tree: dict[str, Any] = {}
    for name, value in dotted.items():
        section, _, key = name.partition("__")
        tree.setdefault(section, {})[key] = value
    return parse_config(tree)


def worker(worker_id: str, role: str | None = None, life: int = 1, **other: Any) -> WorkerInfo:
    """`worker("p0")` is a prefill worker, `d0` decode, `b0` both; its incarnation is `p0#1`."""
    roles: dict[str, Any] = {"p": "prefill", "d": "decode", "b": "both"}
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": f"{worker_id}#{life}",
        "pool": roles[worker_id[0]],
        "role": role or roles[worker_id[0]],
        "fingerprint": "model-a",
        "layout": LAYOUT,
        "num_blocks": 64,
        "max_model_len": 200,
        "max_batch_requests": 8,
        "control_address": f"tcp://control/{worker_id}",
        "data_address": f"tcp://data/{worker_id}",
    }
    return WorkerInfo(**{**fields, **other})


def join(info: WorkerInfo, version: int = PROTOCOL_VERSION) -> Join:
    return Join(version, info, 5.0)


def out(key: RequestKey, index: int, token: int | None = None, finish: FinishReason | None = None) -> TokenOut:
    """A token whose value tells its index, unless said otherwise."""
    return TokenOut(key.request_id, key.attempt, key.sample, index, 10 + index if token is None else token, finish)


def told(actions: Sequence[RouterAction]) -> list[Any]:
    """Actions as short tuples: `("d0", Abort(..))`, `("tokens", label, (1, 2))`, `("done", ..)`, `("failed", ..)`.

    Of another sample than 0, the label is such as `x.1`.
    """
    short: list[Any] = []
    for action in actions:
        match action:
            case SendWorker():
                short.append((action.worker_id, action.message))
            case NewTokens():
                label = f"{action.label}.{action.sample}" if action.sample else action.label
                short.append(("tokens", label, action.tokens))
            case SampleDone():
                short.append(("sample", f"{action.label}.{action.sample}", action.finish_reason))
            case RequestDone():
                short.append(("done", action.label, action.finish_reason))
            case RequestFailed():
                short.append(("failed", action.label, action.code))
            case LedgerDone():
                short.append(("ledger", action.message))
    return short


class Script:
    """A RouterCore, its clock, and short ways to tell it what happens. Checks integrity after every event."""

    def __init__(self, *worker_ids: str, config: ClusterConfig | None = None, fingerprint: str | None = None):
        self.core = RouterCore(config or config_of(), router_incarnation="router#1", fingerprint=fingerprint)
        self.now = 100.0
        self.lives: dict[str, int] = {}
        self.num_requests = 0
        for worker_id in worker_ids:
            self.join(worker(worker_id))

    def done(self, actions: list[RouterAction]) -> list[Any]:
        self.core.check_integrity()
        return told(actions)

    def join(self, info: WorkerInfo) -> list[Any]:
        self.lives[info.worker_id] = int(info.incarnation.partition("#")[2])
        return self.done(self.core.on_join(join(info), self.now))

    def generate(
        self,
        label: str = "x",
        prompt: int = 6,
        client: bytes = b"c",
        n: int = 1,
        watches: Sequence[TokenWatch] = (),
        priority: int = 0,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> list[Any]:
        """A request with a prompt of so many tokens; its id is the client's name and the label."""
        params = SamplingParams(**{"max_tokens": 5, **sampling})
        self.num_requests += 1
        request_id, tokens = self.id(label, client), tuple(range(prompt))
        return self.done(
            self.core.on_generate(
                client,
                label,
                request_id,
                77,
                tokens,
                params,
                self.now,
                n=n,
                watches=watches,
                priority=priority,
                timeout_s=timeout_s,
            )
        )

    @staticmethod
    def id(label: str, client: bytes = b"c") -> str:
        return f"{client.decode()}-{label}"

    def key(self, label: str = "x", attempt: int = 0, sample: int = 0) -> RequestKey:
        return RequestKey(self.id(label), attempt, sample)

    def life(self, worker_id: str) -> str:
        return f"{worker_id}#{self.lives[worker_id]}"

    def send(self, worker_id: str, message: Any, life: str | None = None) -> list[Any]:
        return self.done(self.core.on_worker_message(life or self.life(worker_id), message, self.now))

    def tokens(
        self, worker_id: str, *tokens: TokenOut, marks: tuple[MarksOut, ...] = (), load: LoadReport | None = None
    ) -> list[Any]:
        return self.send(worker_id, Tokens(worker_id, self.life(worker_id), tokens, marks, load))

    def beat(self, worker_id: str, load: LoadReport | None = None) -> list[Any]:
        return self.send(worker_id, Heartbeat(self.life(worker_id), load))

    def failed(self, worker_id: str, key: RequestKey, code: str = "transfer") -> list[Any]:
        return self.send(worker_id, AttemptFailed(worker_id, key, code, "it broke"))

    def refused(self, worker_id: str, key: RequestKey, decode: str) -> list[Any]:
        return self.send(worker_id, HandoffRefused(worker_id, key, decode, "no room"))

    def handed(self, worker_id: str, key: RequestKey, num_bytes: int = 512) -> list[Any]:
        return self.send(worker_id, HandoffDone(worker_id, key, 2, num_bytes))

    def lose(self, worker_id: str) -> list[Any]:
        return self.done(self.core.on_worker_lost(self.life(worker_id), "killed", self.now))

    def cancel(self, label: str = "x", client: bytes = b"c", sample: int | None = None) -> list[Any]:
        return self.done(self.core.on_cancel(client, label, self.now, sample))

    def wait(self, seconds: float, beating: Sequence[str] = ()) -> list[Any]:
        """Let time pass, deadline by deadline, while `beating` workers send heartbeats. Leaves the router's out."""
        end, seen = self.now + seconds, []
        while True:
            deadline = self.core.next_deadline()
            self.now = end if deadline is None else min(end, max(deadline, self.now))
            for worker_id in beating:
                seen += self.beat(worker_id)
            actions = self.done(self.core.on_deadline(self.now))
            seen += [a for a in actions if not isinstance(a[1], Heartbeat)]
            if self.now >= end:
                return seen


class LetterText:
    """A text for tests: each token is the character with its number, prompts of more than one letter fit."""

    vocab_size = VOCAB
    chat_template = ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if not text.isascii():
            raise InvalidRequestError("only ASCII", field="text")
        return [ord(c) for c in text]

    def encode_messages(
        self, messages: Sequence[ChatMessage], *, tools: str = "", options: str = "", continue_final: bool = False
    ) -> list[int]:
        return self.encode("".join(f"{m.role}:{m.content}\n" for m in messages))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.push(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> LetterText:
        return self

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(t) for t in token_ids)

    def flush(self) -> str:
        return ""
