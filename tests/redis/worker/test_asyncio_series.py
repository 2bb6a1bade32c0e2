"""Short asyncio jobs: their runner goes on from one to the next, and each is still a job of its own."""

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from celery5 import App, JobState, TaskFailed, agather, current_job
from celery5.errors import TaskRevoked
from celery5.services.worker.task_execution import TaskExecution
from tests.redis.worker.workers import Lines, until, working


class Series:
    """A worker with two slots for coroutines, and whether each end of a job went on to another one."""

    def __init__(self, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
        self.app = app
        self.went_on = list[bool]()
        go_on = TaskExecution._go_on

        def observe(execution: TaskExecution, executor: Any, outcome: Any) -> Any:
            following = go_on(execution, executor, outcome)
            self.went_on.append(following is not outcome)
            return following

        monkeypatch.setattr(TaskExecution, "_go_on", observe)


@pytest.fixture
def series(url: str, app_name: str, monkeypatch: pytest.MonkeyPatch) -> Series:
    """A worker whose runner's decisions are seen."""
    return Series(App(app_name, broker=url, concurrency=2), monkeypatch)


async def test_each_job_to_which_the_runner_goes_on_is_one_of_its_own(series: Series) -> None:
    @series.app.task(loop="asyncio", max_retries=1, cap=0.01)
    async def step(number: int) -> list[object]:
        job = current_job()
        assert job is not None
        if number % 5 == 3:
            await asyncio.sleep(0)
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
    task = series.app.task(loop="asyncio", name="step")(step)
    jobs = await series.app.asend_many([task.s(Checked(number)) for number in range(100)])
    is_sent = True
    async with working(series.app):
        assert await agather([*jobs[:50], *jobs[51:]], timeout=30) == [*range(50), *range(51, 100)]
        # Kept for a worker with other code, for as long as there may be one.
        assert await jobs[50].astatus() is JobState.HELD
    assert any(series.went_on)


async def test_a_following_job_is_revoked_and_the_next_ones_run(series: Series) -> None:
    begun = threading.Event()

    @series.app.task(loop="asyncio")
    async def step(number: int) -> int:
        if number == 50:
            begun.set()
            await asyncio.sleep(60)
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
    @series.app.task(loop="asyncio", max_retries=0)
    async def step(number: int) -> int:
        if number == 50:
            await asyncio.sleep(60)
        return number

    async with working(series.app):
        plain = [step.s(number) for number in range(100)]
        plain[50] = step.options(time_limit=0.2).s(50)
        jobs = await series.app.asend_many(plain)
        with pytest.raises(TaskFailed, match="time_limit"):
            await jobs[50].aget(30)
        assert await agather([*jobs[:50], *jobs[51:]], timeout=30) == [*range(50), *range(51, 100)]
    assert any(series.went_on)
