"""The Cluster handle: what a user holds after a cluster has started, however it was started."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from baton.config import ClusterConfig
from baton.protocol import Status
from baton.security import exposure, http_exposure
from baton.step_log import StepRecord
from router.client import AsyncRouterClient, RouterClient

Progress = Callable[[str], None]
"""Called with one line of text at each stage of a long start."""


def no_progress(text: str) -> None:
    """Progress that nobody watches."""


def exposures(config: ClusterConfig, hosts: list[str]) -> list[str]:
    """Warnings of what others than the cluster's own could reach. `hosts`: where its ZeroMQ sockets listen."""
    found = [exposure(hosts, config.security.secret)]
    if config.http.enabled:
        found.append(http_exposure(config.http.host, config.http.api_keys))
    return [warning for warning in found if warning is not None]


class Cluster:
    """A running cluster. Leaving its `with` block ends it and everything that it started."""

    config: ClusterConfig
    address: str
    """Where native clients connect (the router's ZeroMQ front)."""
    url: str | None
    """Where HTTP is served (OpenAI's API under `/v1`); None: nowhere."""
    warnings: list[str]
    """What works but deserves a word, such as workers that share a core."""

    def client(self) -> RouterClient:
        """A client of this cluster's router; close it, or use it in a `with` block."""
        return RouterClient(self.address, secret=self.config.security.secret)

    def async_client(self) -> AsyncRouterClient:
        return AsyncRouterClient(self.address, secret=self.config.security.secret)

    def status(self) -> Status:
        with self.client() as client:
            return client.status()

    def stop(self) -> None:
        """End it. Idempotent."""
        raise NotImplementedError

    def take_steps(self) -> list[StepRecord]:
        """Steps of all workers that ended since the last call, by their start; none without `engine.record_steps`.

        A worker that died, or changed its role, takes what it had recorded and nobody took with it.
        """
        raise NotImplementedError

    def details(self) -> dict[str, Any]:
        """What a launcher knows beyond the router's status (Ray address, process ids)."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
