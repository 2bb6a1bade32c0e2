"""Short jobs on asyncio and in threads: their runner goes on from one to the next, and each is a job of its own."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import pytest
import trio

from celery5 import App, AsyncResult, JobState, TaskFailed, agather, current_job
from celery5.errors import TaskRevoked
from celery5.processes.watch.event_loop import find_job
from celery5.services.job.outcome_handler import OutcomeHandler
from celery5.services.process.lease import Lease, now
from celery5.services.worker import task_execution
from celery5.services.worker.task_execution import TaskExecution
from celery5.tasks.task import Task
from tests.redis.worker.workers import Lines, until, working


async def until_status(job: AsyncResult[Any], state: JobState) -> None:
    """Wait until a job is in a state."""
    with trio.fail_after(30):
        while await job.astatus() is not state:
            await trio.sleep(0.02)


class Series:
    """A worker with two slots for jobs of a kind, and whether each end of a job went on to another one."""

    def __init__(self, app: App, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.app = app
        self.kind = kind
        self.went_on = list[bool]()
        go_on = TaskExecution._go_on

        def observe(execution: TaskExecution, executor: Any, outcome: Any) -> Any:
            following = go_on(execution, executor, outcome)
            self.went_on.append(following is not outcome)
            return following

        monkeypatch.setattr(TaskExecution, "_go_on", observe)

    def task(self, **options: Any) -> Callable[[Callable[..., Coroutine[Any, Any, Any]]], Task[..., Any]]:
        """Declare a task of the kind. In a thread its coroutine never waits but in calls that block."""

        def declare(function: Callable[..., Coroutine[Any, Any, Any]]) -> Task[..., Any]:
            declare_task: Any = self.app.task
            if self.kind == "asyncio":
                return cast("Task[..., Any]", declare_task(loop="asyncio", **options)(function))
            return cast("Task[..., Any]", declare_task(**options)(make_plain(function)))

        return declare

    async def nap(self, seconds: float) -> None:
        """Wait in a job, which may be cancelled meanwhile."""
        if self.kind == "asyncio":
            await asyncio.sleep(seconds)
            return
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            trio.from_thread.check_cancelled()
            time.sleep(0.001)  # noqa: ASYNC251  in a thread

    def run_one_by_one(self) -> None:
        """Give the worker one slot."""
        self.app.configure(concurrency=1, cpu_slots=1)


def make_plain(function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Return a plain function that runs a coroutine which never waits."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            function(*args, **kwargs).send(None)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("it has waited")

    return call


@pytest.fixture(params=["asyncio", "thread"])
def series(
    request: pytest.FixtureRequest, url: str, app_name: str, monkeypatch: pytest.MonkeyPatch
) -> Series:
    """A worker whose runner's decisions are seen."""
    return Series(App(app_name, broker=url, concurrency=2, cpu_slots=2), request.param, monkeypatch)


async def test_each_job_to_which_the_runner_goes_on_is_one_of_its_own(series: Series) -> None:
    @series.task(max_retries=1, cap=0.01)
    async def step(number: int) -> list[object]:
        job = current_job()
        assert job is not None
        if number % 5 == 3:
            await series.nap(0)
        if number % 7 == 4 and job.attempt == 1:
            raise ValueError(number)
        return [number, job.id, job.attempt]

    with Lines() as lines:
        async with working(series.app):
            jobs = await series.app.asend_many([step.s(number) for number in range(300)])
            got = await agather(jobs, timeout=60)
            await until(lambda: len(lines.of("job")) == 300 + 43)
        ended = lines.of("job")
    assert got == [[number, jobs[number].id, 1 + (number % 7 == 4)] for number in range(300)]
    assert sum(series.went_on) > 200
    assert sorted(line["job"] for line in ended if line["state"] == "SUCCESS") == sorted(
        job.id for job in jobs
    )
    assert {line["job"] for line in ended if line["state"] == "RETRY"} == {
        jobs[number].id for number in range(300) if number % 7 == 4
    }


async def test_a_following_job_with_wrong_arguments_fails_and_the_others_run(series: Series) -> None:
    is_sent = False

    @dataclass
    class Checked:
        number: int

        def __post_init__(self) -> None:
            if is_sent and self.number == 50:
                raise ValueError("never fifty")

    async def step(checked: Checked) -> int:
        return checked.number

    step.__annotations__["checked"] = Checked
    task = series.task(name="step")(step)
    jobs = await series.app.asend_many([task.s(Checked(number)) for number in range(100)])
    is_sent = True
    async with working(series.app):
        assert await agather([*jobs[:50], *jobs[51:]], timeout=30) == [*range(50), *range(51, 100)]
        # Kept for a worker with other code, for as long as there may be one.
        await until_status(jobs[50], JobState.HELD)
    assert any(series.went_on)


async def test_a_following_job_is_revoked_and_the_next_ones_run(series: Series) -> None:
    begun = threading.Event()

    @series.task()
    async def step(number: int) -> int:
        if number == 50:
            begun.set()
            await series.nap(60)
        return number

    async with working(series.app):
        jobs = await series.app.asend_many([step.s(number) for number in range(100)])
        await until(begun.is_set)
        assert any(series.went_on)
        await jobs[50].arevoke()
        with pytest.raises(TaskRevoked):
            await jobs[50].aget(30)
        rest = [*jobs[:50], *jobs[51:]]
        assert await agather(rest, timeout=30) == [*range(50), *range(51, 100)]


async def test_a_following_job_has_its_time_limit(series: Series) -> None:
    @series.task(max_retries=0)
    async def step(number: int) -> int:
        if number == 50:
            await series.nap(60)
        return number

    async with working(series.app):
        plain = [step.s(number) for number in range(100)]
        plain[50] = step.options(time_limit=0.2).s(50)
        jobs = await series.app.asend_many(plain)
        with pytest.raises(TaskFailed, match="time_limit"):
            await jobs[50].aget(30)
        assert await agather([*jobs[:50], *jobs[51:]], timeout=30) == [*range(50), *range(51, 100)]
    assert any(series.went_on)


async def test_a_following_job_that_has_expired_meanwhile_does_not_run(series: Series) -> None:
    ran = list[int]()
    series.run_one_by_one()

    @series.task()
    async def step(number: int) -> None:
        ran.append(number)
        if number == 50:
            await series.nap(1.2)

    plain = [step.s(number) for number in range(100)]
    plain[51] = step.options(expires=1).s(51)
    async with working(series.app):
        jobs = await series.app.asend_many(plain)
        await agather([*jobs[:51], *jobs[52:]], timeout=30)
        await until_status(jobs[51], JobState.EXPIRED)
    assert any(series.went_on)
    assert 51 not in ran


async def test_what_answers_whether_a_job_is_a_duplicate_does_not_end_it(series: Series) -> None:
    series.run_one_by_one()

    async def find_duplicate(number: int) -> bool:
        return number == 50

    is_duplicate = find_duplicate if series.kind == "asyncio" else make_plain(find_duplicate)

    @series.task(deduplicate=is_duplicate, max_retries=0)
    async def checked(number: int) -> int:
        return number

    @series.task()
    async def plain(number: int) -> int:
        return number

    mixed = [task.s(number) for number in range(60) for task in (checked, plain)]
    async with working(series.app):
        jobs = await series.app.asend_many(mixed)
        await until_status(jobs[100], JobState.REJECTED)
        wanted = [number for number in range(60) for _ in range(2)]
        del jobs[100], wanted[100]
        assert await agather(jobs, timeout=30) == wanted


async def test_a_following_job_has_a_start_and_a_duration_of_its_own(series: Series) -> None:
    series.run_one_by_one()

    @series.task()
    async def step(number: int) -> None:
        await series.nap(0.002 * (number % 3))

    with Lines() as lines:
        async with working(series.app):
            jobs = await series.app.asend_many([step.s(number) for number in range(90)])
            await agather(jobs, timeout=30)
            await until(lambda: len(lines.of("job")) == 90)
        seconds = {line["job"]: line["seconds"] for line in lines.of("job")}
    assert any(series.went_on)
    for number, job in enumerate(jobs):
        assert 0.002 * (number % 3) <= seconds[job.id] < 5
        assert seconds[job.id] > 0


async def test_no_following_job_begins_when_the_lease_of_its_worker_has_ended(
    series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, begun_late = list[bool](), list[Any]()
    series.run_one_by_one()
    begin = TaskExecution._begin

    def observe(running_job: Any) -> None:
        if ended:
            begun_late.append(running_job)
        begin(running_job)

    @series.task()
    async def step(number: int) -> int:
        # Too long to wait for a thread behind others, also on a busy machine: such a job is taken before it begins.
        await series.nap(0.02)
        if number == 50:
            ended.append(True)
        return number

    monkeypatch.setattr(TaskExecution, "_begin", staticmethod(observe))
    waited = Lease.wait_until_valid

    async def wait_until_valid(lease: Lease) -> None:
        ended.clear()
        await waited(lease)

    monkeypatch.setattr(Lease, "wait_until_valid", wait_until_valid)
    monkeypatch.setattr(task_execution, "now", lambda: now() + 1e6 * bool(ended))
    async with working(series.app):
        jobs = await series.app.asend_many([step.s(number) for number in range(100)])
        assert await agather(jobs, timeout=30) == [*range(100)]
    assert begun_late == []
    assert any(series.went_on)


async def test_a_worker_ends_by_an_error_of_its_own_at_the_end_of_a_job_in_a_series(
    series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    series.run_one_by_one()
    decide, decided, failures = OutcomeHandler.decide, list[object](), list[str]()

    def break_down(handler: OutcomeHandler, *args: Any) -> Any:
        decided.append(args)
        if len(decided) > 50:
            raise ZeroDivisionError("a fault of our own")
        return decide(handler, *args)

    @series.task()
    async def step() -> None: ...

    monkeypatch.setattr(OutcomeHandler, "decide", break_down)
    with trio.fail_after(30):
        try:
            async with working(series.app):
                await series.app.asend_many([step.s() for _ in range(100)])
                await trio.sleep_forever()
        except* ZeroDivisionError:  # of each job that has ended
            failures.append("ended")
    assert failures == ["ended"]
    assert any(series.went_on)


async def test_a_job_in_a_series_is_found_on_the_stack_that_reads_its_arguments(series: Series) -> None:
    """So that a warning of a blocked loop names it."""
    found = dict[int, tuple[str, str]]()

    @dataclass
    class Argument:
        number: int

        def __post_init__(self) -> None:
            if threading.current_thread() is threading.main_thread():
                found[self.number] = find_job(sys._getframe())

    async def step(argument: Argument) -> None: ...

    step.__annotations__["argument"] = Argument
    task = series.task(name="step")(step)
    jobs = await series.app.asend_many([task.s(Argument(number)) for number in range(100)])
    found.clear()
    async with working(series.app):
        await agather(jobs, timeout=30)
    assert any(series.went_on)
    assert found == {number: ("step", job.id) for number, job in enumerate(jobs)}


async def test_a_job_in_a_series_that_cannot_reach_another_broker_has_failed(
    series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether Redis is unreachable for this worker too is asked before it counts."""
    monkeypatch.setattr(task_execution, "STABLE_CONNECTION", 0.0)
    elsewhere = App("elsewhere", broker="unix:///nonexistent/nobody.sock")
    series.run_one_by_one()
    tried = list[int]()

    @elsewhere.task
    async def far() -> None: ...

    @series.task(max_retries=0)
    async def step(number: int) -> int:
        if number == 50:
            tried.append(number)
            await far.adelay()
        return number

    async with working(series.app):
        jobs = await series.app.asend_many([step.s(number) for number in range(100)])
        with pytest.raises(TaskFailed):
            await jobs[50].aget(30)
        assert await agather([*jobs[:50], *jobs[51:]], timeout=30) == [*range(50), *range(51, 100)]
    assert any(series.went_on)
    assert tried == [50], "it was not put back as if this worker had lost Redis"
    elsewhere.close()
