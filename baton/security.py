"""Who may speak on Baton's sockets: CurveZMQ from one shared secret.

    secret ── scrypt ──► server keys   every socket that binds; nothing but their holder can read what is sent to it
                    └──► client keys   every socket that connects; a server lets nobody else in (ZAP)

Whoever has the secret has both pairs, so it makes members of a cluster and outsiders, not users. A server's public
key is never sent in clear, so an outsider does not even get an answer. Without a secret nothing here changes a socket.

Knows keys and socket options; must not know addresses, messages or the configuration's tree.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import threading
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from baton.config import ApiKey, Secret, is_loopback
from baton.errors import ConfigError

MAX_BROKEN_OFF = 3
"""Handshakes in a row that the other end broke off before that means refusal: one may just have met its end."""

HANDSHAKE_EVENTS = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""What a monitor must report for `Handshakes`."""

_lock = threading.Lock()
_handlers: dict[int, _Handler] = {}
"""By context: a context has one place where handlers can be bound. Guarded by `_lock`."""


class Security:
    """The keys of one secret; `Security(None)` leaves sockets as they are.

    Raises ConfigError where this build of ZeroMQ has no CURVE. Objects of equal secrets are interchangeable.
    """

    def __init__(self, secret: Secret | str | None):
        self.is_on = secret is not None
        if secret is None:
            return
        if not zmq.has("curve"):
            raise ConfigError("security.secret", "needs a libzmq built with CURVE, as in pyzmq's own wheels")
        text = Secret(secret).reveal() if isinstance(secret, str) else secret.reveal()
        self._server, self._client = _keys(text)
        self._domain = hashlib.sha256(self._client[0]).hexdigest()[:16]

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Before `connect`: only a server with the same secret can read what is sent, and it will let this end in."""
        if self.is_on:
            socket.curve_publickey, socket.curve_secretkey = self._client
            socket.curve_serverkey = self._server[0]

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """Before `bind`: let nobody in without the secret. The socket's context must be held by a `guard`."""
        if self.is_on:
            assert id(socket.context) in _handlers, "guard the context first"
            socket.curve_server = True
            socket.curve_secretkey = self._server[1]
            socket.zap_domain = self._domain.encode()
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # should the handler be gone, nobody gets in

    def guard(self, context: zmq.Context[Any]) -> Guard:
        """Check who connects to the servers of this context, until all its guards are closed."""
        return Guard(context, self if self.is_on else None)

    def callback(self, domain: str, key: bytes) -> bool:
        """For pyzmq's authenticator: whether a client's public key (Z85) is this secret's."""
        return hmac.compare_digest(key, self._client[0])

    def __repr__(self) -> str:
        return f"<Security {'on' if self.is_on else 'off'}>"


class Guard:
    """Holds a context's ZAP handler, a thread of pyzmq's. Close it after the sockets, before the context."""

    def __init__(self, context: zmq.Context[Any], security: Security | None):
        self._context = context
        self._is_open = security is not None
        if security is None:
            return
        with _lock:
            handler = _handlers.get(id(context))
            if handler is None:
                handler = _handlers[id(context)] = _Handler(context)
            handler.admit(security)
            handler.num_guards += 1

    def close(self) -> None:
        """Idempotent."""
        with _lock:
            if not self._is_open:
                return
            self._is_open = False
            handler = _handlers[id(self._context)]
            handler.num_guards -= 1
            if not handler.num_guards:
                del _handlers[id(self._context)]
                handler.authenticator.stop()


class _Handler:
    def __init__(self, context: zmq.Context[Any]):
        self.num_guards = 0
        self.authenticator = ThreadAuthenticator(context)
        self.authenticator.start()

    def admit(self, security: Security) -> None:
        """Sockets of the secret's domain admit its holders."""
        self.authenticator.configure_curve_callback(security._domain, credentials_provider=security)


class Handshakes:
    """Says from a connecting socket's monitor events why a server does not let it in."""

    def __init__(self, security: Security):
        self._is_on = security.is_on
        self._broken_off = 0

    def problem(self, event: int, value: int) -> str | None:
        """Why this handshake failed for good, in words that follow "the router at ..."; None: it did not."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._broken_off = 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "refused the secret; give both ends the same security.secret (or BATON_SECRET)"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            if self._is_on:
                return "has no secret, and this end has one; set security.secret on both ends or on neither"
            return "wants a secret, and this end has none; give it the cluster's security.secret (or BATON_SECRET)"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:  # ZeroMQ does not try again after one of these
            return "does not speak ZeroMQ as Baton's router does; look at the address"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._broken_off += 1
            if self._broken_off >= MAX_BROKEN_OFF:
                if self._is_on:
                    return "refused the secret: it has another one, or none; give both ends the same security.secret"
                return "refused the connection: it wants a secret (security.secret or BATON_SECRET), or is no router"
        return None


def worth_saying(count: int) -> bool:
    """Whether to log what a stranger can cause any number of times: the first few times, then now and then."""
    return count <= 10 or count % 1000 == 0


def exposure(hosts: list[str], secret: Secret | None) -> str | None:
    """A warning, if one of the hosts that Baton listens on can be reached from elsewhere and there is no secret."""
    open_hosts = sorted({host for host in hosts if not is_loopback(host)})
    if secret is not None or not open_hosts:
        return None
    return (
        f"listening on {', '.join(open_hosts)} without security.secret: whoever reaches these ports can read prompts "
        f"and answers, send requests and join as a worker; set security.secret or BATON_SECRET"
    )


def http_exposure(host: str, api_keys: Sequence[ApiKey]) -> str | None:
    """The same of the HTTP server, whose clients have keys instead."""
    if api_keys or is_loopback(host):
        return None
    return (
        f"serving HTTP on {host} without http.api_keys: whoever reaches the port can send requests, drain workers and "
        f"see what others' requests took; set http.api_keys or BATON_API_KEY"
    )


@functools.lru_cache(maxsize=8)
def _keys(secret: str) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
    """Key pairs (public, secret; Z85) of servers and of clients.

    scrypt makes each guess at a weak secret expensive; what is expanded from it is as HKDF does, one label per use.
    """
    root = hashlib.scrypt(secret.encode(), salt=b"baton curve v1", n=1 << 14, r=8, p=1, dklen=32)
    return _pair(root, b"baton server v1"), _pair(root, b"baton client v1")


def _pair(root: bytes, label: bytes) -> tuple[bytes, bytes]:
    secret = z85.encode(hmac.digest(root, label + b"\x01", "sha256"))
    return zmq.curve_public(secret), secret
