"""Hostile runners' tasks: one that ends the loop it runs in, or leaves its context behind, harms no other."""

import asyncio
import decimal
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import trio

from celery5.protocol.job.verdict import Raised, Returned
from celery5.runners.in_thread import ThreadRunner
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.on_trio import TrioRunner
from celery5.runners.running_job import RunningJob

LIMIT = 5.0
"""Seconds for one task."""


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
        await begun.wait()
        kept.append(HARM[how](loops))
        await asyncio.sleep(0.02)
        over.set()
        return 1

    async def other() -> int:
        begun.set()
        await over.wait()
        return 2

    begun, over = asyncio.Event(), asyncio.Event()
    kept: list[Any] = []
    found: list[Any] = []

    async def ask(function: Any) -> None:
        found.append(await loop.execute(function, [], {}, RunningJob()))

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, other)
            nursery.start_soon(ask, hostile)
        assert sorted(error.value for error in found) == [b"1", b"2"]
        assert await loop.execute(other, [], {}, RunningJob()) == Returned(b"2")
    for left in kept:
        if isinstance(left, asyncio.Task):
            assert isinstance(left.exception(), SystemExit)


@pytest.mark.parametrize("loop", ["asyncio"], indirect=True)
async def test_jobs_of_a_lost_asyncio_loop_fail_and_the_next_get_a_new_one(
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
        outcome = await loop.execute(hostile, [], {}, RunningJob())
        assert isinstance(outcome, Raised)
        assert "event loop ended under the job: OSError: a broken selector" in outcome.failure.message
        assert await loop.execute(fine, [], {}, RunningJob()) == Returned(b"1")


async def test_a_task_factory_that_breaks_is_not_used_for_other_jobs(loop: AsyncioRunner) -> None:
    def factory(_loop: Any, _coroutine: Any, **_more: Any) -> Any:
        raise ZeroDivisionError

    async def hostile() -> None:
        asyncio.get_running_loop().set_task_factory(factory)
        coroutine = asyncio.sleep(0)
        try:
            await asyncio.create_task(coroutine)
        finally:
            coroutine.close()  # nobody has awaited it

    async def innocent() -> int:
        return await asyncio.create_task(asyncio.sleep(0, 1))

    with trio.fail_after(LIMIT):
        outcome = await loop.execute(hostile, [], {}, RunningJob())
        assert await loop.execute(innocent, [], {}, RunningJob()) == Returned(b"1")
    assert isinstance(outcome, Raised)
    assert outcome.failure.type == "ZeroDivisionError"


WHO: ContextVar[str] = ContextVar("who", default="nobody")

WAITS = {"at once": False, "after a while": True}


@pytest.mark.parametrize("waits", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_what_a_job_sets_in_its_context_the_next_one_does_not_see(
    loop: AsyncioRunner, kind: str, waits: bool
) -> None:
    async def wait() -> None:
        if waits and kind == "asyncio":
            await asyncio.sleep(0.001)
        elif waits:
            await trio.sleep(0.001)

    def work(who: str) -> list[Any]:
        seen = [WHO.get(), decimal.getcontext().prec]
        WHO.set(who)
        decimal.getcontext().prec = 5
        return seen

    async def coroutine(who: str) -> list[Any]:
        await wait()
        seen = work(who)
        await wait()
        assert (WHO.get(), decimal.getcontext().prec) == (who, 5)
        return seen

    runners: dict[str, Any] = {
        "trio": TrioRunner(),
        "asyncio": loop,
        "thread": ThreadRunner(get_slots=lambda: 1),
    }
    precision = decimal.getcontext().prec
    for who in ("one", "two"):
        outcome = await runners[kind].execute(
            work if kind == "thread" else coroutine, [who], {}, RunningJob()
        )
        assert outcome == Returned(b'["nobody",%d]' % precision)
    assert (WHO.get(), decimal.getcontext().prec) == ("nobody", precision)


async def test_a_trio_job_hands_its_context_on_to_what_it_starts() -> None:
    async def child() -> None:
        await trio.lowlevel.checkpoint()
        seen.append(WHO.get())
        WHO.set("the child")

    async def job() -> str:
        WHO.set("the job")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
        seen.append(await trio.to_thread.run_sync(WHO.get))
        return WHO.get()

    seen: list[str] = []
    assert await TrioRunner().execute(job, [], {}, RunningJob()) == Returned(b'"the job"')
    assert seen == ["the job", "the job"]


async def test_a_trio_job_that_asks_the_loop_for_nonsense_has_failed() -> None:
    class Nonsense:
        def __await__(self) -> Any:
            try:
                yield "nonsense"
            except TypeError:
                heard.append("told so")
                raise

    async def job() -> None:
        await Nonsense()

    heard: list[str] = []
    outcome = await TrioRunner().execute(job, [], {}, RunningJob())
    assert isinstance(outcome, Raised)
    assert (outcome.failure.type, heard) == ("TypeError", ["told so"])
