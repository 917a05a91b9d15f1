"""Notices that an actor has died, or is alive and does not work any more, and has it replaced.

Knows actors by name; how one is replaced is its owner's business. One thread per actor, so that a slow
restart holds up no other; it sleeps in Ray until its actor ends or the next look at its health is due.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from baton_cluster.cluster import Progress

log = logging.getLogger(__name__)

HEALTH_EVERY_S = 2.0
HEALTH_TIMEOUT_S = 5.0
MAX_SILENT = 3
"""Looks in a row that an actor may leave unanswered: it may be busy, and only a repetition proves that it is stuck."""
BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Before the first, second, ... restart in a row of one actor."""
STEADY_AFTER_S = 60.0
"""An actor that lived this long starts again without delay."""


class Supervisor:
    """`restart(name)` returns the new actor, or None if there shall be none; what it raises, it is asked again.

    A watched actor has the methods `ended()`, which returns only when it stops, and `health()`.
    """

    def __init__(self, ray: Any, restart: Callable[[str], Any], progress: Progress):
        self._ray = ray
        self._restart = restart
        self._progress = progress
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def watch(self, name: str, actor: Any) -> None:
        """Watch `actor`, and whatever replaces it, until `stop`."""
        thread = threading.Thread(target=self._run, args=(name, actor), name=f"baton-watch-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """Restart nothing any more. Returns at once; the threads end when their actors do."""
        self._stopping.set()

    def join(self) -> None:
        """Wait for the threads' ends, after `stop` and after the actors were killed."""
        for thread in self._threads:
            thread.join()

    def _run(self, name: str, actor: Any) -> None:
        failures = 0
        while actor is not None and not self._stopping.is_set():
            started = time.monotonic()
            try:
                why = self._wait_end(name, actor)
            except Exception as e:
                if not self._ray.is_initialized():
                    return  # Ray was shut down under us
                log.exception("watching %s failed; it counts as ended", name)
                why = f"{type(e).__name__}: {e}"
            if time.monotonic() - started > STEADY_AFTER_S:
                failures = 0
            while not self._stopping.is_set():
                delay = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
                failures += 1
                self._progress(f"{name} ended ({why}); starting it again" + (f" in {delay:g} s" if delay else ""))
                if self._stopping.wait(delay):
                    return
                self._kill(actor)  # if only its threads ended, its process still holds its place
                try:
                    actor = self._restart(name)
                except Exception as e:
                    log.warning("%s could not be started again", name, exc_info=True)
                    why = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
                    continue
                if actor is not None:
                    self._progress(f"{name} is back")
                break

    def _wait_end(self, name: str, actor: Any) -> str:
        """Return when `actor` has ended, by itself or killed here because it does not work; why."""
        end = actor.ended.remote()
        silent = 0
        while True:
            ended, _ = self._ray.wait([end], timeout=HEALTH_EVERY_S)
            if ended:
                return self._why(end)
            if self._stopping.is_set():
                return "stopped"
            try:
                health = self._ray.get(actor.health.remote(), timeout=HEALTH_TIMEOUT_S)
            except self._ray.exceptions.GetTimeoutError:
                silent += 1
                problem = f"no answer {silent} times in a row" if silent == MAX_SILENT else None
            except self._ray.exceptions.RayActorError:
                continue  # dead: `end` says so
            else:
                silent, problem = 0, health["problem"]
            if problem is not None:
                self._kill(actor)
                return f"not healthy: {problem}"

    def _why(self, end: Any) -> str:
        try:
            self._ray.get(end)
        except self._ray.exceptions.RayActorError:
            return "its process died"
        except self._ray.exceptions.RayError as e:
            return str(e).strip().splitlines()[-1]
        return "its threads ended"

    def _kill(self, actor: Any) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(actor)
