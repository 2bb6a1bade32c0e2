"""Hostile runners' tasks: one that ends the loop it runs in, or leaves its context behind, harms no other.

Floor: tests. Reads: nothing. Writes: nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio

from celery5.protocol.verdict import Raised, Returned
from celery5.runners.on_asyncio import AsyncioRunner

LIMIT = 5.0
"""Seconds for one task."""


@pytest.fixture
async def loop(nursery: trio.Nursery) -> AsyncIterator[AsyncioRunner]:
    """An asyncio runner."""
    one = AsyncioRunner()
    await nursery.start(one.run)
    yield one
    nursery.cancel_scope.cancel()


def leave() -> None:
    """What a task of a job does."""
    raise SystemExit(3)


async def leaving() -> None:
    """The same in a task."""
    leave()


HARM: dict[str, Callable[[asyncio.AbstractEventLoop], Any]] = {
    "stop": lambda loop: loop.stop(),
    "exit in a callback": lambda loop: loop.call_soon(leave),
    "exit in a task": lambda loop: loop.create_task(leaving()),
}


@pytest.mark.parametrize("how", HARM)
async def test_an_asyncio_task_that_ends_its_loop_harms_no_other(loop: AsyncioRunner, how: str) -> None:
    async def hostile() -> int:
        loops = asyncio.get_running_loop()
        kept.append(HARM[how](loops))
        await asyncio.sleep(0.02)
        return 1

    async def other() -> int:
        await asyncio.sleep(0.04)
        return 2

    kept: list[Any] = []
    found: list[Any] = []

    async def ask(function: Any) -> None:
        found.append(await loop.execute(function, [], {}))

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, other)
            nursery.start_soon(ask, hostile)
        assert found == [Returned(b"1"), Returned(b"2")]
        assert await loop.execute(other, [], {}) == Returned(b"2")
    for each in kept:
        if isinstance(each, asyncio.Task):
            assert isinstance(each.exception(), SystemExit)


async def test_jobs_in_an_asyncio_loop_that_is_lost_have_failed_and_the_next_gets_a_new_one(
    loop: AsyncioRunner,
) -> None:
    async def hostile() -> None:
        def broken() -> None:
            raise OSError("a broken selector")

        asyncio.get_running_loop()._run_once = broken  # type: ignore[attr-defined]
        await asyncio.sleep(60)

    async def fine() -> int:
        return 1

    with trio.fail_after(LIMIT):
        outcome = await loop.execute(hostile, [], {})
        assert isinstance(outcome, Raised)
        assert "event loop ended under the job: OSError: a broken selector" in outcome.failure.message
        assert await loop.execute(fine, [], {}) == Returned(b"1")


async def test_a_task_factory_that_breaks_fails_the_next_job_and_not_the_worker(loop: AsyncioRunner) -> None:
    def factory(_loop: Any, _coroutine: Any, **_more: Any) -> Any:
        raise ZeroDivisionError

    async def hostile() -> None:
        asyncio.get_running_loop().set_task_factory(factory)

    with trio.fail_after(LIMIT):
        await loop.execute(hostile, [], {})
        outcome = await loop.execute(hostile, [], {})
    assert isinstance(outcome, Raised)
    assert outcome.failure.type == "ZeroDivisionError"
