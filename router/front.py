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
from typing import Any

import msgpack

from baton.codec import Codec
from baton.errors import BatonError, CodecError, VersionError
from baton.protocol import Alive, Cancel, Delta, Done, Failed, Generate, StatusRequest, ToClient, ToRouterFromClient
from router.actions import NewTokens, RequestDone, RequestFailed, RouterAction
from router.admission import check_source, check_token_ids
from router.core import RouterCore
from router.sockets import RouterSocket, Unreachable
from router.text import Detokenizer, Text

log = logging.getLogger("baton.router")


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
        self._detokenizers: dict[str, Detokenizer] = {}
        self._waiting: dict[str, NewTokens] = {}
        """Tokens not sent yet, by request."""
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
            return self._core.on_cancel(peer, message.label, received_at)
        assert type(message) is StatusRequest
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
        except BatonError as e:
            self._send(peer, Failed(message.label, e.code, str(e), getattr(e, "field", None), request_id))
            return []
        now = time.monotonic()
        self.alive_at = min(self.alive_at, now + self._alive_s)
        seed = secrets.randbits(63)
        return self._core.on_generate(
            peer, message.label, request_id, seed, prompt, message.sampling, now, received_at=received_at
        )

    # --- out --------------------------------------------------------------------------------------

    def on_action(self, action: NewTokens | RequestDone | RequestFailed) -> None:
        """Tell the client. `action.client` is its routing id."""
        if type(action) is NewTokens:
            waiting = self._waiting.get(action.request_id)
            if waiting is not None:
                action = NewTokens(action.client, action.label, action.request_id, waiting.tokens + action.tokens)
            self._waiting[action.request_id] = action
            return
        text = self._last_text(action.request_id)
        if type(action) is RequestDone:
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
            failed = Failed(action.label, action.code, action.message, action.field, action.request_id)
            self._send(action.client, failed)

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
        detokenizer = self._detokenizers.get(action.request_id)
        if detokenizer is None:
            detokenizer = self._detokenizers[action.request_id] = self._text.detokenizer()
        self._send(action.client, Delta(action.label, action.tokens, detokenizer.push(action.tokens)))

    def _last_text(self, request_id: str) -> str:
        """Sends the request's waiting tokens; returns the text that was held back."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._send_delta(waiting)
        detokenizer = self._detokenizers.pop(request_id, None)
        return "" if detokenizer is None else detokenizer.flush()

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
        _, body = msgpack.unpackb(frames[0], raw=False, strict_map_key=False)
        label = body[1]
    except Exception:  # noqa: BLE001  (whatever the bytes are, they name no request)
        return ""
    return label if isinstance(label, str) and len(label) <= 200 else ""
