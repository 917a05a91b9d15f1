"""The HTTP server: its socket, and uvicorn on the router's own event loop.

Knows addresses and uvicorn; must not know routes.
"""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn

from baton.config import ClusterConfig
from baton.errors import ClusterError
from router.desk import Desk
from router.http.app import build_app
from router.http.connection import connection_class
from router.http.tls import check_tls
from router.sockets import reachable

log = logging.getLogger("baton.router")

BACKLOG = 4096
KEEP_ALIVE_S = 75
"""How long a connection may idle between two requests."""
GRACE_S = 1
"""For answers to get to their end once all requests have ended; uvicorn counts whole seconds."""


def check_address(config: ClusterConfig) -> None:
    """Raises ClusterError for a port that cannot be had, before anything that takes long is started."""
    if config.http.enabled:
        server = HttpServer(config)
        server.bind()
        server.close()


class HttpServer:
    """`bind` before `start`; `close` instead of both undoes `bind`."""

    def __init__(self, config: ClusterConfig):
        self._config = config
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def bind(self) -> str:
        """Listen; returns the URL. ClusterError if the port cannot be had, ConfigError for an unusable certificate."""
        http = self._config.http
        check_tls(http)
        family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((http.host, http.port))
            self._socket.listen(BACKLOG)  # whoever is told the URL may connect, and waits until it is served
        except OSError as e:
            self.close()
            raise ClusterError(
                f"http.port: cannot listen on {http.host}:{http.port} ({e.strerror}); set http.port to a free port, or "
                f"to 0 for any, and http.host to an address of this machine"
            ) from e
        self._socket.setblocking(False)
        scheme = "https" if http.tls_certificate else "http"
        return f"{scheme}://{reachable(http.host)}:{self._socket.getsockname()[1]}"

    async def start(self, desk: Desk) -> None:
        """Serve from now on, on the running loop."""
        assert self._socket is not None, "bind() first"
        config = uvicorn.Config(
            build_app(self._config, desk),
            loop="none",
            http=connection_class(self._config.http),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what strangers send makes it warn, any number of times
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            ssl_certfile=self._config.http.tls_certificate,
            ssl_keyfile=self._config.http.tls_key,
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        """Take no more connections; answers get `GRACE_S` to get to their end."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving], timeout=2 * GRACE_S)
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
