"""Short `def` jobs: a thread runs them one after the other, and what waits there has not begun."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
import trio

from celery5 import App, JobState, agather, group
from celery5.boot_step import BootStep
from celery5.errors import TaskRevoked
from celery5.middleware.jobs import SendingBatch
from celery5.middleware.middleware import Middleware
from celery5.protocol.job.delivery import Delivery
from celery5.runners import thread_pool
from celery5.services.job.internal_queues import InternalTasksQueue
from celery5.services.job.thread_load import ThreadLoad
from celery5.tasks.task import Task
from tests.redis.worker.workers import Lines, until, until_async, working


class Steps:
    """A short task on one thread, of which the job `blocks` takes long."""

    def __init__(self, url: str, name: str, **settings: Any) -> None:
        self.app = App(name, broker=url, cpu_slots=1, lease=2.0, **settings)
        self.ran = list[int]()
        self.blocks, self.may_go_on, self.is_blocked = -1, threading.Event(), threading.Event()

        @self.app.task(name="step", max_retries=0)
        def step(number: int) -> int:
            self.ran.append(number)
            if number == self.blocks:
                self.is_blocked.set()
                self.may_go_on.wait(30)
            return number

        self.task: Task[..., Any] = step

    async def learn(self) -> None:
        """Let the worker learn that the task is short."""
        jobs = await self.app.asend_many([self.task.s(number) for number in range(300)])
        assert await agather(jobs, timeout=60) == list(range(300))
        self.ran.clear()

    async def block(self) -> list[Any]:
        """Send 101 jobs of which the first one takes long, and wait until it runs."""
        self.blocks = 1000
        jobs = await self.app.asend_many([self.task.s(number) for number in range(1000, 1101)])
        await until(self.is_blocked.is_set)
        return list(jobs)

    async def get_stats(self) -> Any:
        (reply,) = await self.app.control.asend("stats", to="w")
        return reply.answer


async def test_jobs_that_wait_for_a_thread_have_not_begun(url: str, app_name: str) -> None:
    steps = Steps(url, app_name)
    async with working(steps.app, name="w"):
        await steps.learn()
        jobs = await steps.block()
        for _ in range(5):
            stats = await steps.get_stats()
            assert (stats["running"], stats["slots"]["thread"]["executing"]) == (1, 1)
            (reply,) = await steps.app.control.asend("active", to="w")
            assert [job["id"] for job in reply.answer] == [jobs[0].id]
            await trio.sleep(0.01)
        assert steps.ran == [1000]
        steps.may_go_on.set()
        assert await agather(jobs, timeout=30) == list(range(1000, 1101))
    assert sorted(steps.ran) == list(range(1000, 1101))  # each once
    steps.app.close()


async def test_jobs_that_wait_behind_a_long_one_go_to_another_worker(url: str, app_name: str) -> None:
    steps = Steps(url, app_name)
    async with working(steps.app, name="w"):
        await steps.learn()
        jobs = await steps.block()
        async with working(steps.app, name="other"):
            assert await agather(jobs[1:], timeout=30) == list(range(1001, 1101))
        steps.may_go_on.set()
        assert await jobs[0].aget(30) == 1000
    steps.app.close()


async def test_a_worker_that_stops_releases_what_waits_for_a_thread(url: str, app_name: str) -> None:
    steps = Steps(url, app_name, grace_period=0.2)
    async with working(steps.app, name="w") as worker:
        await steps.learn()
        jobs = await steps.block()

        async def go_on_late() -> None:
            await trio.sleep(1.0)
            steps.may_go_on.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_on_late)
            await worker.stop()
    begun = time.monotonic()
    async with working(steps.app, name="other"):
        assert await agather(jobs, timeout=30) == list(range(1000, 1101))
    assert time.monotonic() - begun < 10
    assert sorted(steps.ran)[2:] == list(range(1001, 1101)) or sorted(steps.ran)[1:] == list(
        range(1001, 1101)
    )
    steps.app.close()


async def test_a_revoked_job_that_waits_for_a_thread_never_begins(url: str, app_name: str) -> None:
    steps = Steps(url, app_name)
    async with working(steps.app, name="w"):
        await steps.learn()
        jobs = await steps.block()
        assert await jobs[1].arevoke()
        await until_async(lambda: has_status(jobs[1], JobState.REVOKED))
        steps.may_go_on.set()
        assert await agather(jobs[2:], timeout=30) == list(range(1002, 1101))
        with pytest.raises(TaskRevoked):
            await jobs[1].aget(30)
    assert 1001 not in steps.ran
    steps.app.close()


async def has_status(job: Any, state: JobState) -> bool:
    return await job.astatus() is state


async def test_short_jobs_keep_their_time_limits(url: str, app_name: str) -> None:
    app, blocks = App(app_name, broker=url, cpu_slots=1, time_limit=0.5), False

    @app.task(name="limited", max_retries=0)
    def limited() -> float:
        begun = time.monotonic()
        while blocks:
            time.sleep(0.001)
        return begun

    async with working(app, name="w"):
        await agather(await app.asend_many([limited.s() for _ in range(300)]), timeout=60)
        blocks = True
        jobs = await app.asend_many([limited.s() for _ in range(2)])
        for job in jobs:
            status = "EXECUTING"
            with trio.fail_after(30):
                while (status := await job.astatus()) != "DEAD":
                    await trio.sleep(0.01)
            assert status == "DEAD"
        blocks = False
        assert await (await limited.adelay()).aget(30)
    app.close()


async def test_short_jobs_wait_in_the_worker_also_on_a_queue_of_several_kinds(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    app = App(app_name, broker=url, cpu_slots=2)

    @app.task(name="short")
    def short() -> None:
        pass

    @app.task(name="other")
    async def other() -> str:
        return "other"

    keys, waited_in_redis = app.queue("default"), True
    async with working(app):
        for _ in range(5):  # on a machine that is busy with other things, a worker may be slow for a while
            sent = [job for _ in range(4) for job in await app.asend_many([short.s()] * 1000)]
            last = await other.adelay()
            waited_in_redis = False
            while redis_client.hlen(keys.jobs):
                waited_in_redis = waited_in_redis or bool(redis_client.hgetall(keys.limited_counts))
                await trio.sleep(0.01)
            assert await last.aget(30) == "other"
            await agather(sent[-10:], timeout=30)
            if not waited_in_redis:
                break
    assert not waited_in_redis
    app.close()


async def test_a_job_in_a_thread_takes_no_longer_because_the_loop_is_busy(url: str, app_name: str) -> None:
    app = App(app_name, broker=url, cpu_slots=1)
    has_begun, is_blocked, has_ended = threading.Event(), threading.Event(), threading.Event()

    @app.task(name="in-a-thread")
    def in_a_thread() -> float:
        begun = time.perf_counter()
        has_begun.set()
        is_blocked.wait(30)
        has_ended.set()
        return time.perf_counter() - begun

    @app.task(name="blocking")
    async def blocking() -> None:
        is_blocked.set()
        has_ended.wait(30)
        time.sleep(0.5)  # noqa: ASYNC251  the loop is busy

    with Lines() as lines:
        async with working(app):
            job = await in_a_thread.adelay()
            await until(has_begun.is_set)
            await agather([await blocking.adelay()], timeout=30)
            seconds = await job.aget(30)
    (line,) = [line for line in lines.of("job") if line["task"] == "in-a-thread"]
    assert line["seconds"] < seconds + 0.3
    app.close()


WAITING_OPTIONS: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({}, {}, True),
    ({}, {"expires": 300.0}, False),
    ({"limit": 1000}, {}, False),
    ({"deduplicate": lambda: None}, {}, False),
]
"""Options of a task and of its jobs, and whether these may wait for a thread behind others."""


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class AheadJobs(list[Delivery]):
    """The jobs that were taken to wait for a thread behind others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        take = ThreadLoad.take

        def note_taken(load: ThreadLoad, executor: trio.lowlevel.Task, delivery: Delivery) -> None:
            take(load, executor, delivery)
            self.extend([delivery] if load.is_ahead(delivery) else [])

        monkeypatch.setattr(ThreadLoad, "take", note_taken)


async def test_members_of_a_workflow_and_traced_jobs_wait_for_a_thread_too(
    url: str, app_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tracing(Middleware):
        @contextmanager
        def sending(self, batch: SendingBatch) -> Generator[None]:
            for job in batch.jobs:
                job.headers["traceparent"] = TRACE
            yield

    app, ahead = App(app_name, broker=url, cpu_slots=1), AheadJobs(monkeypatch)
    tracing = App(app_name, broker=url, middleware=[Tracing()])

    def return_one() -> int:
        return 1

    short, traced = app.task(name="short")(return_one), tracing.task(name="short")(return_one)

    async with working(app):
        for _ in range(2):
            run = await app.workflows.astart(group(short.s() for _ in range(300)))
            assert await run.aget(60) == [1] * 300
        assert any("~" in delivery.command.id for delivery in ahead if delivery.command)
        ahead.clear()
        await agather(await tracing.asend_many([traced.s() for _ in range(300)]), timeout=60)
        assert {delivery.command.trace for delivery in ahead if delivery.command} == {TRACE}
    app.close()
    tracing.close()


@pytest.mark.parametrize(("options", "sending", "expected"), WAITING_OPTIONS)
async def test_jobs_that_something_must_be_decided_for_do_not_wait_for_a_thread(
    url: str,
    app_name: str,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    sending: dict[str, Any],
    expected: bool,
) -> None:
    app, ahead = App(app_name, broker=url, cpu_slots=1), AheadJobs(monkeypatch)

    def do_nothing() -> None:
        pass

    short: Task[..., Any] = app.task(name="short", **options)(do_nothing)
    async with working(app):
        for _ in range(3):
            await agather(
                await app.asend_many([short.options(**sending).s() for _ in range(300)]), timeout=60
            )
    assert bool(ahead) is expected
    app.close()


async def test_jobs_put_back_after_the_last_read_of_a_worker_go_to_another(
    url: str, app_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_pool, "STALL_INTERVAL", 1.0)
    returned, put_back = list[Delivery](), InternalTasksQueue.put_back

    def note_returned(queue: InternalTasksQueue, delivery: Delivery) -> None:
        put_back(queue, delivery)
        returned.append(delivery)

    monkeypatch.setattr(InternalTasksQueue, "put_back", note_returned)

    async def stay() -> None:
        await trio.sleep_forever()

    async def wait_returned() -> None:
        await until(lambda: bool(returned))

    # While this stops, the worker does not read any more, and TaskExecution has not been told to stop.
    late = BootStep(name="late", run=stay, stays=True, undo=wait_returned, requires=["execution"])
    steps = Steps(url, app_name, bootsteps=[late])
    async with working(steps.app, name="w") as worker:
        await steps.learn()
        jobs = await steps.block()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.stop)
            await until(lambda: bool(returned))
            job = {job.id: job for job in jobs}[returned[0].command.id]  # type: ignore[union-attr]
            await until_async(lambda: has_status(job, JobState.SENT))
            steps.may_go_on.set()
    steps.app.close()
