"""Runners and limits in time: a soft limit is raised inside the job, whatever it waits for, once, and in nothing
else."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from celery5.errors import SoftTimeLimitExceeded
from celery5.protocol.job.verdict import JobRevoked, Outcome, Raised, Returned
from celery5.runners.in_thread import ThreadRunner
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.on_trio import TrioRunner
from celery5.runners.running_job import RunningJob, TimeLimits

LIMIT = 5.0
"""Seconds for one task."""
SOON = "soon"
TOLD = Returned(b'"soon"')


async def until_begun(hand: RunningJob) -> None:
    """Wait until a job in a thread has begun there."""
    while hand.job_thread is None or hand.job_thread.thread_id is None:
        await trio.sleep(0.001)


async def softly(runner: Any, function: Any, *, after: float = 0.02) -> Outcome:
    """The outcome of a job that is told that its time is nearly up."""
    hand = RunningJob(limits=TimeLimits(soft=after))
    outcome: Outcome | None = None
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:

            async def tell() -> None:
                if isinstance(runner, ThreadRunner):
                    await until_begun(hand)
                await trio.sleep(after)
                assert hand.raise_soft_limit is not None
                hand.raise_soft_limit(SoftTimeLimitExceeded(SOON))

            nursery.start_soon(tell)
            outcome = await runner.execute(function, [], {}, hand)
            nursery.cancel_scope.cancel()
    assert outcome is not None
    return outcome


async def shielded() -> None:
    """A wait that a cancellation would not reach."""
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()


async def receiving() -> None:
    """A wait for another task."""
    _send, receive = trio.open_memory_channel[int](0)
    await receive.receive()


async def asking_thread() -> None:
    """A thread that asks whether it should go on."""

    def work() -> None:
        while True:
            time.sleep(0.002)
            trio.from_thread.check_cancelled()

    await trio.to_thread.run_sync(work)


async def deaf_thread() -> None:
    """A thread that takes no notice, and then another wait."""
    await trio.to_thread.run_sync(time.sleep, 0.05)
    await trio.sleep_forever()


async def never_waiting() -> None:
    """A loop that waits for nothing, and lets others run."""
    while True:
        time.sleep(0.001)  # noqa: ASYNC251
        await trio.lowlevel.checkpoint()


async def at_last() -> None:
    """Work that blocks the loop until long after the limit, and then a wait."""
    await trio.sleep(0.01)
    time.sleep(0.05)  # noqa: ASYNC251
    await trio.sleep_forever()


async def generating() -> None:
    """A checkpoint below an asynchronous generator."""

    async def numbers() -> AsyncIterator[int]:
        while True:
            await trio.lowlevel.checkpoint()
            yield 1

    async for _ in numbers():
        time.sleep(0.001)  # noqa: ASYNC251


WAITS: dict[str, Callable[[], Awaitable[None]]] = {
    "sleeping": trio.sleep_forever,
    "in a shielded scope": shielded,
    "for a memory channel": receiving,
    "for a thread that asks": asking_thread,
    "for a thread that does not": deaf_thread,
    "never": never_waiting,
    "in a generator": generating,
    "after blocking": at_last,
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
async def test_a_soft_limit_is_raised_in_a_trio_job_at_whatever_it_waits_for(
    wait: Callable[[], Awaitable[None]],
) -> None:
    async def job() -> str:
        try:
            await wait()
        except SoftTimeLimitExceeded as error:
            await trio.sleep(0.001)  # it is raised once: there is time to clean up
            return str(error)
        return "not told"

    assert await softly(TrioRunner(), job) == TOLD


async def test_soft_limit_cancels_only_the_nursery_that_a_job_waits_for() -> None:
    async def child() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("child")

    async def job() -> list[str]:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child)
                nursery.start_soon(child)
        except* SoftTimeLimitExceeded as group:
            ended.extend(map(str, group.exceptions))
        await trio.sleep(0.001)
        return ended

    ended: list[str] = []
    assert await softly(TrioRunner(), job) == Returned(b'["child","child","soon"]')


async def test_a_soft_limit_disturbs_no_scope_and_no_channel_that_a_trio_job_goes_on_with() -> None:
    async def job() -> list[Any]:
        send, receive = trio.open_memory_channel[int](1)
        with trio.move_on_after(30) as scope:
            try:
                await receive.receive()
            except SoftTimeLimitExceeded:
                send.send_nowait(7)
            got = await receive.receive()
        return [got, scope.cancel_called, receive.statistics().tasks_waiting_receive]

    assert await softly(TrioRunner(), job) == Returned(b"[7,false,0]")


async def test_job_about_to_continue_gets_its_value_before_a_soft_limit() -> None:
    async def job() -> list[str]:
        heard: list[str] = []
        try:
            await event.wait()
            heard.append("event")
            await trio.sleep_forever()
        except SoftTimeLimitExceeded as error:
            heard.append(str(error))
        return heard

    event, hand = trio.Event(), RunningJob(limits=TimeLimits(soft=1))
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:

            async def both_at_once() -> None:
                await trio.testing.wait_all_tasks_blocked()
                assert hand.raise_soft_limit is not None
                event.set()
                hand.raise_soft_limit(SoftTimeLimitExceeded(SOON))

            nursery.start_soon(both_at_once)
            assert await TrioRunner().execute(job, [], {}, hand) == Returned(b'["event","soon"]')


async def test_a_trio_job_that_was_told_can_still_be_cancelled() -> None:
    async def job() -> None:
        try:
            await trio.sleep_forever()
        except SoftTimeLimitExceeded:
            heard.append("told")
        try:
            await trio.sleep_forever()
        finally:
            heard.append("cancelled")

    heard: list[str] = []
    with trio.move_on_after(0.1) as scope:
        await softly(TrioRunner(), job)
    assert scope.cancelled_caught
    assert heard == ["told", "cancelled"]


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_a_soft_limit_that_nobody_catches_is_the_jobs_failure(loop: AsyncioRunner, kind: str) -> None:
    async def coroutine() -> None:
        if kind == "asyncio":
            await asyncio.sleep(60)
        await trio.sleep(60)

    def function() -> None:
        while True:
            time.sleep(0.001)

    runners: dict[str, Any] = {
        "trio": TrioRunner(),
        "asyncio": loop,
        "thread": ThreadRunner(get_slots=lambda: 1),
    }
    outcome = await softly(runners[kind], function if kind == "thread" else coroutine)
    assert isinstance(outcome, Raised)
    assert (outcome.failure.type, outcome.failure.message) == ("SoftTimeLimitExceeded", SOON)
    assert "TimeLimitExceeded" in str(outcome.kinds)
    where = "in function" if kind == "thread" else "in coroutine"
    assert where in outcome.failure.traceback


async def awaiting_a_task() -> None:
    """Another task of the job's own."""
    await asyncio.create_task(asyncio.sleep(60))


async def in_a_timeout() -> None:
    """A time-out of the job's own."""
    async with asyncio.timeout(60):
        await asyncio.sleep(60)


async def waiting_for() -> None:
    """The older time-out, which cancels what it waits for."""
    await asyncio.wait_for(asyncio.sleep(60), 60)


async def swallowing() -> None:
    """A task that takes no notice of being cancelled, and then another wait."""

    async def deaf() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return

    await asyncio.create_task(deaf())
    await asyncio.sleep(60)


async def asyncio_never_waiting() -> None:
    """A loop that waits for nothing, and lets others run."""
    while True:
        time.sleep(0.001)  # noqa: ASYNC251
        await asyncio.sleep(0)


ASYNCIO_WAITS: dict[str, Callable[[], Awaitable[None]]] = {
    "sleeping": partial(asyncio.sleep, 60),
    "for a task": awaiting_a_task,
    "in a timeout": in_a_timeout,
    "in wait_for": waiting_for,
    "for what takes no notice": swallowing,
    "never": asyncio_never_waiting,
}


@pytest.mark.parametrize("wait", ASYNCIO_WAITS.values(), ids=ASYNCIO_WAITS)
async def test_a_soft_limit_is_raised_in_an_asyncio_job_at_whatever_it_waits_for(
    loop: AsyncioRunner, wait: Callable[[], Awaitable[None]]
) -> None:
    async def job() -> str:
        try:
            await wait()
        except SoftTimeLimitExceeded as error:
            await asyncio.sleep(0.001)
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0, "the cancellation is taken back"
            return str(error)
        return "not told"

    assert await softly(loop, job) == TOLD


async def test_an_asyncio_job_that_could_not_begin_yet_is_told_when_it_does(loop: AsyncioRunner) -> None:
    async def blocking() -> None:
        began.set()
        time.sleep(0.1)  # noqa: ASYNC251

    async def job() -> str:
        try:
            await asyncio.sleep(60)
        except SoftTimeLimitExceeded as error:
            return str(error)
        return "not told"

    began = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop.execute, blocking, [], {}, RunningJob())
        while not began.is_set():
            await trio.sleep(0.001)
        assert await softly(loop, job) == TOLD


async def test_task_group_passes_the_soft_limit_on_to_the_job(
    loop: AsyncioRunner,
) -> None:
    async def child() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("child")

    async def job() -> list[str]:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
                group.create_task(child())
        except SoftTimeLimitExceeded as error:
            ended.append(str(error))
        await asyncio.sleep(0.001)
        return ended

    ended: list[str] = []
    assert await softly(loop, job) == Returned(b'["child","child","soon"]')


async def test_an_asyncio_job_that_was_told_can_still_be_cancelled(loop: AsyncioRunner) -> None:
    async def job() -> None:
        try:
            await asyncio.sleep(60)
        except SoftTimeLimitExceeded:
            heard.append("told")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            heard.append(type(error).__name__)
            raise

    heard: list[str] = []
    with trio.move_on_after(0.1) as scope:
        await softly(loop, job)
    assert scope.cancelled_caught
    assert heard == ["told", "CancelledError"]


async def test_an_asyncio_job_that_is_cancelled_before_it_was_told_is_cancelled(loop: AsyncioRunner) -> None:
    async def job() -> None:
        held.set()
        go.wait(LIMIT)  # the loop stands still, so that both arrive at once
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            heard.append(type(error).__name__)
            raise

    held, go, hand = threading.Event(), threading.Event(), RunningJob(limits=TimeLimits(soft=1))
    heard: list[str] = []

    async def run() -> None:
        with hand.scope:
            await loop.execute(job, [], {}, hand)

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.to_thread.run_sync(held.wait, LIMIT)
            assert hand.raise_soft_limit is not None
            hand.raise_soft_limit(SoftTimeLimitExceeded(SOON))
            hand.cancel(JobRevoked())
            go.set()
    assert hand.scope.cancelled_caught
    assert heard == ["CancelledError"]
