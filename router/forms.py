"""Forms of output are looked at beside the router's thread, since one may take seconds (`baton.engine.form_check`).

For all fronts. One form at a time, in the order of asking. Must not know requests, sockets or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from baton.engine.structured import check_structured
from baton.sampling_params import StructuredOutput


class Forms:
    """`call_soon`: has the router's thread call something."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]):
        self._call_soon = call_soon
        self._thread = ThreadPoolExecutor(1, "baton-forms")

    async def check(self, form: StructuredOutput) -> None:
        """Raises InvalidRequestError for one that cannot be followed."""
        await asyncio.wrap_future(self._thread.submit(check_structured, form))

    def look(self, form: StructuredOutput, then: Callable[[], None]) -> None:
        """`then` is called by the router's thread once `check_structured(form)` knows its answer."""

        def done(_: Future[None]) -> None:
            self._call_soon(then)

        self._thread.submit(check_structured, form).add_done_callback(done)

    def close(self) -> None:
        """What has not been looked at yet never is."""
        self._thread.shutdown(wait=False, cancel_futures=True)
