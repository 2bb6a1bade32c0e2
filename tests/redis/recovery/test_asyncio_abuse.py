"""Asyncio abuse: whatever a job does to the loop that it shares with others, the others end with their values."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio

from celery5 import App, JobState, RetryPolicy
from tests.redis.boxes import boxing
from tests.redis.worker.workers import Lines, working

LIMIT = 60.0


@pytest.fixture
def app(url: str, app_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """An application whose jobs are not tried again, with innocent tasks of each runner."""
    monkeypatch.setenv("BOXING_APP", app_name)
    one = boxing.make(
        app_name, url, lease=1.0, cpu_slots=4, box_slots=1, retry_policy=RetryPolicy(max_retries=0)
    )

    @one.task(name="on-trio")
    async def on_trio(n: int) -> int:
        await trio.sleep(0.05)
        return n

    @one.task(name="on-asyncio", loop="asyncio")
    async def on_asyncio(n: int) -> int:
        await asyncio.sleep(0.1)
        async with asyncio.TaskGroup() as group:
            parts = [group.create_task(asyncio.sleep(0, number)) for number in (n, 1)]
        return parts[0].result() + await asyncio.to_thread(int, parts[1].result()) - 1

    @one.task(name="in-thread")
    def in_thread(n: int) -> int:
        time.sleep(0.02)
        return n

    yield one
    one.close()


LEFT: list[Any] = []
"""What is left behind; an asyncio task that is in no list may be collected."""
INNOCENT = ("on-trio", "on-asyncio", "in-thread", "add")


@asynccontextmanager
async def undisturbed(app: App) -> AsyncGenerator[None, None]:
    """Innocent jobs of each runner before, beside and after the block, which must end with their values."""
    sent: list[tuple[int, Any]] = []

    async def send() -> None:
        for name in INNOCENT:
            for _ in range(3):
                n = len(sent)
                sent.append((n, await app.tasks[name].adelay(*((n, 0) if name == "add" else (n,)))))

    with Lines() as lines:
        async with working(app) as worker:
            await send()
            yield
            await send()
            assert [await job.aget(LIMIT) for _, job in sent] == [n for n, _ in sent]
            assert not worker.ended.is_set()
    assert lines.of("worker:restarted") == []


async def stop_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)


async def close_loop() -> None:
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.close)
    loop.stop()
    await asyncio.to_thread(loop.close)


async def refuse_tasks() -> None:
    def factory(_loop: Any, coroutine: Any, **_options: Any) -> Any:
        coroutine.close()
        raise KeyboardInterrupt

    asyncio.get_running_loop().set_task_factory(factory)
    await asyncio.sleep(0.2)


async def make_no_tasks() -> None:
    def factory(_loop: Any, coroutine: Any, **_options: Any) -> Any:
        return coroutine

    asyncio.get_running_loop().set_task_factory(factory)
    await asyncio.sleep(0.2)


async def handle_errors_badly() -> None:
    def handler(_loop: Any, _context: Any) -> None:
        raise SystemExit(3)

    def fail() -> None:
        raise ValueError

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(handler)
    for _ in range(3):
        loop.call_soon(fail)
    await asyncio.sleep(0.1)


async def close_executor() -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    asyncio.get_running_loop().set_default_executor(executor)


async def shut_executor_down() -> None:
    await asyncio.get_running_loop().shutdown_default_executor()


async def occupy_executor() -> None:
    loop = asyncio.get_running_loop()
    LEFT.extend(loop.run_in_executor(None, time.sleep, 4) for _ in range(64))


async def cancel_all() -> None:
    for _ in range(50):
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel("all of you")
        await asyncio.sleep(0.01)


async def cancel_all_later() -> None:
    def cancel() -> None:
        for task in asyncio.all_tasks():
            task.cancel()

    asyncio.get_running_loop().call_later(0.02, cancel)
    await asyncio.sleep(0.1)


async def leave_raising_tasks() -> None:
    async def fail(error: BaseException) -> None:
        await asyncio.sleep(0.01)
        raise error

    errors = (
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
        ValueError(),
        asyncio.CancelledError(),
    )
    LEFT.extend(asyncio.ensure_future(fail(error)) for error in errors)


async def leave_endless_tasks() -> None:
    async def never() -> None:
        while True:
            with suppress(BaseException):
                await asyncio.sleep(3600)

    LEFT.append(asyncio.ensure_future(never()))


async def swallow_cancellation() -> None:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.5)


async def raise_in_callbacks() -> None:
    def fail(error: BaseException) -> None:
        raise error

    loop = asyncio.get_running_loop()
    for error in (
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
        ValueError(),
        asyncio.CancelledError(),
    ):
        loop.call_soon(fail, error)
        loop.call_later(0.02, fail, error)
    await asyncio.sleep(0.05)


async def block_loop() -> None:
    time.sleep(2)  # noqa: ASYNC251


HARM: list[Callable[[], Any]] = [
    stop_loop,
    close_loop,
    refuse_tasks,
    make_no_tasks,
    handle_errors_badly,
    close_executor,
    shut_executor_down,
    occupy_executor,
    cancel_all,
    cancel_all_later,
    leave_raising_tasks,
    leave_endless_tasks,
    swallow_cancellation,
    raise_in_callbacks,
    block_loop,
]


async def test_what_a_job_has_left_behind_another_one_may_close(app: App) -> None:
    kept = list[asyncio.Task[None]]()

    async def open_client() -> None:
        kept.append(asyncio.ensure_future(asyncio.sleep(3600)))

    async def close_client() -> bool:
        kept[0].cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(kept[0]), 10)
        return kept[0].cancelled()

    declare: Any = app.task
    opens = declare(name="opens", loop="asyncio")(open_client)
    closes = declare(name="closes", loop="asyncio")(close_client)
    async with working(app):
        await (await opens.adelay()).aget(LIMIT)
        assert await (await closes.adelay()).aget(LIMIT) is True


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
async def test_what_a_job_does_to_its_asyncio_loop_harms_no_other(app: App, harm: Callable[[], Any]) -> None:
    declare: Any = app.task
    hostile = declare(name="hostile", loop="asyncio", time_limit=1)(harm)
    async with undisturbed(app):
        bad = [await hostile.adelay() for _ in range(3)]
        beside = [await app.tasks["on-asyncio"].adelay(n) for n in range(10)]
        assert [await job.aget(LIMIT) for job in beside] == list(range(10))
        with trio.fail_after(LIMIT):
            for sent in bad:
                while await sent.astatus() not in (JobState.SUCCESS, JobState.DEAD):
                    await trio.sleep(0.02)
