"""Notices that an actor has died, or that it is alive and does not work any more, and has it replaced.

Knows actors by name; how one is replaced is its owner's business. One thread, which sleeps in Ray until
an actor ends or the next look at their health is due.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from baton.errors import BatonError
from baton_cluster.cluster import Progress

log = logging.getLogger(__name__)

HEALTH_EVERY_S = 2.0
HEALTH_TIMEOUT_S = 5.0
BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Before the first, second, ... restart in a row of one actor."""
STEADY_AFTER_S = 60.0
"""An actor that lived this long starts again without delay."""


class Supervisor:
    """`restart(name)` returns the new actor, or None if there shall be none; it may raise and is then tried again.

    A watched actor has the methods `ended()`, which returns only when it stops, and `health()`.
    """

    def __init__(self, ray: Any, restart: Callable[[str], Any], progress: Progress):
        self._ray = ray
        self._restart = restart
        self._progress = progress
        self._actors: dict[str, Any] = {}
        self._ends: dict[Any, str] = {}
        """Ray's promise of each actor's end -> its name."""
        self._since: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="baton-supervisor", daemon=True)

    def watch(self, name: str, actor: Any) -> None:
        """From the owner's thread before `start`, afterwards only from the supervisor's own."""
        self._actors[name] = actor
        self._ends[actor.ended.remote()] = name
        self._since[name] = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Watch no more; returns when nothing will be restarted any more. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        next_look = time.monotonic() + HEALTH_EVERY_S
        while not self._stop.is_set():
            try:
                ended, _ = self._ray.wait(list(self._ends), timeout=max(0.0, next_look - time.monotonic()))
                for end in ended:
                    name = self._ends.pop(end)
                    if not self._stop.is_set():
                        self._replace(name, self._why(end))
                if time.monotonic() >= next_look:
                    self._look()
                    next_look = time.monotonic() + HEALTH_EVERY_S
            except Exception:
                if self._stop.is_set() or not self._ray.is_initialized():
                    return  # Ray was shut down under us
                log.exception("the supervisor met an error and goes on")
                self._stop.wait(1.0)

    def _why(self, end: Any) -> str:
        try:
            self._ray.get(end)
        except self._ray.exceptions.RayActorError:
            return "its process died"
        except self._ray.exceptions.RayError as e:
            return str(e).strip().splitlines()[-1]
        return "its threads ended"

    def _look(self) -> None:
        """Ask every actor for its health; one that does not work is killed, which ends it for `_run`."""
        asked = {name: actor.health.remote() for name, actor in self._actors.items() if name in self._ends.values()}
        self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=HEALTH_TIMEOUT_S) if asked else None
        for name, answer in asked.items():
            try:
                health = self._ray.get(answer, timeout=0)
            except (self._ray.exceptions.RayError, TimeoutError):
                continue  # dead: its end says so; or too busy to answer, which is no proof
            if not health["healthy"]:
                self._progress(f"{name} is not healthy: {health['problem']}")
                with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                    self._ray.kill(self._actors[name])

    def _replace(self, name: str, why: str) -> None:
        if time.monotonic() - self._since[name] > STEADY_AFTER_S:
            self._failures[name] = 0
        while not self._stop.is_set():
            failures = self._failures.get(name, 0)
            self._failures[name] = failures + 1
            delay = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            self._progress(f"{name} ended ({why}); starting it again" + (f" in {delay:g} s" if delay else ""))
            if self._stop.wait(delay):
                return
            old = self._actors[name]
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.kill(old)  # if only its threads ended, the process still holds its place
            try:
                actor = self._restart(name)
            except (BatonError, self._ray.exceptions.RayError) as e:
                why = str(e).strip().splitlines()[0]
                continue
            if actor is not None:
                self.watch(name, actor)
                self._progress(f"{name} is back")
            return
