"""A call's news: told at once where nothing waits to be told before, else by the task that asks for them."""

from __future__ import annotations

import asyncio
from typing import Any

from baton.protocol import Delta
from router.http.call import Call


def delta(text: str) -> Delta:
    return Delta("x", (1,), text)


class Teller:
    """Takes deltas while it is `ready`."""

    def __init__(self) -> None:
        self.ready = True
        self.told: list[str] = []
        self.asked = 0

    def __call__(self, deltas: list[Delta]) -> bool:
        self.asked += 1
        if self.ready:
            self.told += [d.text for d in deltas]
        return self.ready


async def waiting(call: Call) -> asyncio.Task[list[Any]]:
    """`news`, at the point where there are none."""
    task = asyncio.create_task(call.news())
    await asyncio.sleep(0)
    assert not task.done()
    return task


def texts(news: list[Any]) -> list[str]:
    return [d.text for d in news]


def call_and_teller() -> tuple[Call, Teller]:
    desk: Any = None  # nothing is started
    call, teller = Call(desk), Teller()
    call.at_once = teller
    return call, teller


async def _test_deltas_are_told_at_once_while_news_waits() -> None:
    call, teller = call_and_teller()
    task = await waiting(call)
    call.on_deltas([delta("a")])
    call.on_deltas([delta("b")])
    await asyncio.sleep(0)
    assert teller.told == ["a", "b"] and not task.done()
    teller.ready = False
    call.on_deltas([delta("c")])
    assert texts(await task) == ["c"]


async def _test_what_comes_while_the_task_tells_waits_its_turn() -> None:
    call, teller = call_and_teller()
    call.on_deltas([delta("a")])
    assert teller.asked == 0  # the task is telling what came before
    assert texts(await call.news()) == ["a"]
    task = await waiting(call)
    teller.ready = False
    call.on_deltas([delta("b")])
    teller.ready = True  # but b has not been told yet: the task has only been woken
    call.on_deltas([delta("c")])
    assert teller.told == [] and texts(await task) == ["b", "c"]


async def _test_who_has_left_is_told_nothing() -> None:
    call, teller = call_and_teller()
    task = await waiting(call)
    call.leave()
    call.on_deltas([delta("a")])
    assert teller.asked == 0
    assert type((await asyncio.gather(task, return_exceptions=True))[0]).__name__ == "Gone"


def test_deltas_are_told_at_once_while_news_waits() -> None:
    asyncio.run(_test_deltas_are_told_at_once_while_news_waits())


def test_what_comes_while_the_task_tells_waits_its_turn() -> None:
    asyncio.run(_test_what_comes_while_the_task_tells_waits_its_turn())


def test_who_has_left_is_told_nothing() -> None:
    asyncio.run(_test_who_has_left_is_told_nothing())
