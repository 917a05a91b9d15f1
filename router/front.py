"""The clients' side of the router's thread: their socket, the text of their requests, who cannot be reached.

Turns messages of clients into events of `router.core` and its answers into messages, tokens into text.
Must not know workers. Used by the router's thread only.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from baton.codec import Codec
from baton.engine.structured import check_structured
from baton.errors import BatonError, CodecError, VersionError
from baton.ledger import LedgerRequest
from baton.protocol import (
    Alive,
    Cancel,
    Delta,
    Done,
    Drain,
    Explain,
    Explained,
    Failed,
    Generate,
    ToClient,
    ToRouterFromClient,
)
from router.actions import LedgerDone, NewTokens, RequestDone, RequestFailed, RouterAction, SampleDone
from router.admission import check_sampling_ids, check_source, check_token_ids
from router.core import RouterCore
from router.request import SampleId
from router.sockets import RouterSocket, Unreachable
from router.stop import StopStrings
from router.text import Detokenizer, Text, WatchedText

log = logging.getLogger("baton.router")

_SKETCH = msgspec.msgpack.Decoder(tuple[int, Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=64)]])
"""A message without its fields' contents."""


class Front:
    """Deltas wait until `flush`, so that what a request gets while the thread is busy travels as one."""

    def __init__(self, socket: RouterSocket, core: RouterCore, text: Text, counters: Counter[str], alive_s: float):
        self.socket = socket
        self.alive_at = math.inf
        """When `say_alive` is due."""
        self._core = core
        self._text = text
        self._counters = counters
        self._alive_s = alive_s
        self._in: Codec[Any] = Codec(ToRouterFromClient)
        self._out: Codec[Any] = Codec(ToClient)
        self._detokenizers: dict[SampleId, Detokenizer] = {}
        self._waiting: dict[SampleId, NewTokens] = {}
        """Tokens not sent yet."""
        self._gone: dict[bytes, str] = {}
        """Clients found unreachable, whose requests have not been ended yet, and why."""

    # --- in ---------------------------------------------------------------------------------------

    def on_frames(self, peer: bytes, frames: list[bytes]) -> list[RouterAction]:
        """One message of a client. Whatever the bytes are, the answer is an event's actions or a Failed."""
        received_at = time.monotonic()
        try:
            if len(frames) != 1:
                raise CodecError(f"{len(frames)} frames, expected 1")
            message = self._in.decode(frames[0])
        except (CodecError, VersionError) as e:
            self._counters["malformed_from_clients"] += 1
            self._send(peer, Failed(label=_label_of(frames), code=e.code, message=str(e)))
            return []
        if type(message) is Generate:
            return self._on_generate(peer, message, received_at)
        if type(message) is Cancel:
            return self._core.on_cancel(peer, message.label, received_at, message.sample)
        try:
            if type(message) is Drain:
                self._core.on_drain(message.worker_id, message.undo)
            elif type(message) is LedgerRequest:
                return self._core.on_ledger(peer, message, received_at)
            elif type(message) is Explain:
                record = self._core.explain(message.request_id)
                self._send(peer, Explained(message.label, msgspec.to_builtins(record)))
                return []
        except BatonError as e:
            self._send(peer, Failed(message.label, e.code, str(e), getattr(e, "field", None)))
            return []
        self._send(peer, self._core.status(message.label, received_at))
        return []

    def _on_generate(self, peer: bytes, message: Generate, received_at: float) -> list[RouterAction]:
        request_id = secrets.token_hex(16)
        try:
            check_source(message)
            if message.text is not None:
                prompt = tuple(self._text.encode(message.text))
            elif message.messages is not None:
                prompt = tuple(self._text.encode_messages(message.messages))
            else:
                prompt = message.token_ids or ()
                check_token_ids(prompt, self._text.vocab_size)
            check_sampling_ids(message.sampling, self._text.vocab_size)
            if message.sampling.structured is not None:
                check_structured(message.sampling.structured)
        except BatonError as e:
            self._send(peer, Failed(message.label, e.code, str(e), getattr(e, "field", None), request_id))
            return []
        now = time.monotonic()
        self.alive_at = min(self.alive_at, now + self._alive_s)
        seed = secrets.randbits(63)
        watches = self._watch(message, request_id) if message.stop else ()
        return self._core.on_generate(
            peer,
            message.label,
            request_id,
            seed,
            prompt,
            message.sampling,
            now,
            received_at=received_at,
            n=message.n,
            priority=message.priority,
            watches=watches,
        )

    def _watch(self, message: Generate, request_id: str) -> list[WatchedText]:
        """Texts in which stop strings are looked for, one per sample."""
        stops, watches = StopStrings(message.stop), []
        for sample in range(message.n):
            text = WatchedText(
                self._text.detokenizer(),
                stops,
                include=message.include_stop_str_in_output,
                min_tokens=message.sampling.min_tokens,
            )
            self._detokenizers[request_id, sample] = text
            watches.append(text)
        return watches

    # --- out --------------------------------------------------------------------------------------

    def on_action(self, action: NewTokens | SampleDone | RequestDone | RequestFailed | LedgerDone) -> None:
        """Tell the client. `action.client` is its routing id."""
        if type(action) is NewTokens:
            sample = (action.request_id, action.sample)
            waiting = self._waiting.get(sample)
            if waiting is not None:
                action = msgspec.structs.replace(
                    waiting, tokens=waiting.tokens + action.tokens, logprobs=waiting.logprobs + action.logprobs
                )
            self._waiting[sample] = action
        elif type(action) is SampleDone:
            self._send(action.client, self._last_delta(action))
        elif type(action) is RequestDone:
            text = self._last_text((action.request_id, 0))
            done = Done(
                label=action.label,
                request_id=action.request_id,
                finish_reason=action.finish_reason,
                usage=action.usage,
                marks=action.marks,
                prefill_worker=action.prefill_worker,
                decode_worker=action.decode_worker,
                attempts=action.attempts,
                kv_bytes=action.kv_bytes,
                text=text,
            )
            self._send(action.client, done)
        elif type(action) is RequestFailed:
            for i in range(action.n):
                self._last_text((action.request_id, i))
            failed = Failed(action.label, action.code, action.message, action.field, action.request_id)
            self._send(action.client, failed)
        elif type(action) is LedgerDone:
            self._send(action.client, action.message)

    def flush(self) -> None:
        """Send the tokens that wait."""
        for action in self._waiting.values():
            self._send_delta(action)
        self._waiting.clear()

    def say_alive(self, now: float) -> None:
        """To every client with open requests. It is also how one that left while it waited is found."""
        clients = self._core.clients()
        for client in clients:
            self._send(client, Alive())
        self.alive_at = now + self._alive_s if clients else math.inf

    def gone(self, now: float) -> Iterator[list[RouterAction]]:
        """End what unreachable clients have open; do each list of actions before asking for the next.

        A client stays known as gone until its requests have ended, so that nothing is sent to it in between.
        """
        while self._gone:
            peer, problem = next(iter(self._gone.items()))
            log.info("a client %s; its requests are aborted", problem)
            yield self._core.on_client_gone(peer, now)
            del self._gone[peer]

    def _send_delta(self, action: NewTokens) -> None:
        self._send(action.client, self._delta(action))

    def _delta(self, action: NewTokens) -> Delta:
        return Delta(
            action.label,
            action.tokens,
            self._read((action.request_id, action.sample), action.tokens),
            action.sample,
            logprobs=action.logprobs,
            prompt_logprobs=action.prompt_logprobs,
        )

    def _read(self, sample: SampleId, tokens: tuple[int, ...]) -> str:
        detokenizer = self._detokenizers.get(sample)
        if detokenizer is None:
            detokenizer = self._detokenizers[sample] = self._text.detokenizer()
        return detokenizer.push(tokens)

    def _last_text(self, sample: SampleId) -> str:
        """Sends the sample's waiting tokens; returns the text that was held back."""
        waiting = self._waiting.pop(sample, None)
        if waiting is not None:
            self._send_delta(waiting)
        detokenizer = self._detokenizers.pop(sample, None)
        return "" if detokenizer is None else detokenizer.flush()

    def _last_delta(self, done: SampleDone) -> Delta:
        """The sample's waiting tokens, all text that has not been sent, and how it ended."""
        sample = (done.request_id, done.sample)
        waiting = self._waiting.pop(sample, None)
        delta = self._delta(waiting or NewTokens(done.client, done.label, done.request_id, (), done.sample))
        rest = self._detokenizers.pop(sample).flush()
        return msgspec.structs.replace(delta, text=delta.text + rest, finish_reason=done.finish_reason)

    def _send(self, peer: Any, message: ToClient) -> None:
        if peer in self._gone:
            return
        try:
            self.socket.send(peer, self._out.encode(message))
        except Unreachable as e:
            self._counters["stuck_clients" if e.stuck else "gone_clients"] += 1
            self._gone[peer] = str(e)


def _label_of(frames: list[bytes]) -> str:
    """The label of a message that is malformed elsewhere, so that its sender learns which request it was."""
    try:
        _, (_, field, *_) = _SKETCH.decode(frames[0])
        label = msgspec.msgpack.decode(field, type=str)
    except Exception:  # noqa: BLE001  (whatever the bytes are, they name no request)
        return ""
    return label if len(label) <= 200 else ""
