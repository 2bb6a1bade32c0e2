"""The runner of boxed tasks goes on from job to job: in the same box, unless another one is needed."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from msgspec import Raw

from celery5.errors import BadArguments
from celery5.protocol.boxes.frames import BoxHome
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.messages import Command
from celery5.protocol.job.verdict import Outcome, Raised, Returned
from celery5.runners.boxes.boxed import BoxedRunner, BoxLimits
from celery5.runners.context import CURRENT_JOB, CurrentJob
from celery5.runners.running_job import JobCall, RunningJob
from tests.redis.boxes import boxing


class Executor:
    """An executor that has many jobs: `(task, argument)`."""

    def __init__(self, runner: BoxedRunner, jobs: Sequence[tuple[str, str]]) -> None:
        self._runner = runner
        self._jobs = [*enumerate(jobs)]
        self.running_job = RunningJob()
        self.outcomes = list[Outcome]()
        self.series = 0

    def _take(self) -> JobCall:
        number, (task, argument) = self._jobs.pop(0)
        args = msgspec.json.encode([argument] if argument else [])
        command = Command(v=1, id=f"job-{number}", task=task, args=Raw(args))
        delivery = Delivery("default", b"1-0", b"", 1, read=0.0)
        delivery.set_command(command)
        self.running_job.set_delivery(delivery)
        CURRENT_JOB.set(CurrentJob(command.id, task, "default", 1, "worker"))
        return JobCall(len, [argument], {})

    def _go_on(self, outcome: Outcome) -> JobCall | Outcome:
        if not self._jobs:
            return outcome
        self.outcomes.append(outcome)
        return self._take()

    async def run(self) -> None:
        """Run the jobs: `series` counts how often the executor itself had to go on."""
        self.running_job.go_on = self._go_on
        while self._jobs:
            self.series += 1
            self.outcomes.append(await self._runner.execute(*self._take(), self.running_job))

    def read(self) -> list[Any]:
        """Return the results of the jobs; for one that has failed the type of its error."""
        return [
            msgspec.json.decode(outcome.value)
            if isinstance(outcome, Returned)
            else outcome.failure.type
            if isinstance(outcome, Raised)
            else outcome
            for outcome in self.outcomes
        ]


@asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch, *, max_jobs: int = 1000, events: list[str] | None = None
) -> AsyncIterator[BoxedRunner]:
    """A runner of one box."""
    monkeypatch.setenv("BOXING_APP", "boxing")
    runner = BoxedRunner(
        tasks=boxing.make("boxing").tasks,
        get_slots=lambda: 1,
        get_home=lambda: BoxHome(boxing.__name__, "boxing", tuple(sys.path), {}),
        log_event=lambda name, _level, /, **_: None if events is None else events.append(name),
        worker="worker",
        limits=BoxLimits(100_000, max_jobs, 60.0),
    )
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(runner.run)
            yield runner
            nursery.cancel_scope.cancel()


async def test_a_box_goes_on_from_job_to_job_while_its_executor_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch) as runner:
        executor = Executor(runner, [("seen", "")] * 20)
        await executor.run()
    assert executor.series == 1
    results = executor.read()
    assert [seen["job"] for seen in results] == [f"job-{number}" for number in range(20)]
    assert len({seen["pid"] for seen in results}) == 1


async def test_a_job_that_needs_another_box_runs_in_that(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [("seen", ""), ("seen", ""), ("limited", "print 0"), ("limited", "print 0"), ("seen", "")]
    async with running(monkeypatch) as runner:
        executor = Executor(runner, jobs)
        await executor.run()
    assert executor.series == 1
    first, second, *limited, last = executor.read()
    assert limited == [0, 0]
    assert first["pid"] == second["pid"] != last["pid"]
    assert [seen["job"] for seen in (first, second, last)] == ["job-0", "job-1", "job-4"]


async def test_a_box_that_ends_fails_the_job_that_ran_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as runner:
        executor = Executor(runner, [("seen", ""), ("seen", ""), ("act", "exit 3"), ("seen", "")])
        await executor.run()
    first, second, crash, last = executor.read()
    assert crash == "BoxCrashed"
    assert first["pid"] == second["pid"] != last["pid"]


async def test_a_box_that_lacks_memory_gets_no_further_job(monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[str]()
    async with running(monkeypatch, events=events) as runner:
        executor = Executor(runner, [("limited", what) for what in ("print 0", "grab", "print 0")])
        await executor.run()
    assert executor.read() == [0, "MemoryError", 0]
    assert events.count("box:started") == 2


async def test_a_box_goes_on_to_no_more_jobs_than_it_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, max_jobs=3) as runner:
        executor = Executor(runner, [("seen", "")] * 7)
        await executor.run()
    pids = [seen["pid"] for seen in executor.read()]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]


async def test_a_job_whose_frame_cannot_be_made_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    make_run = BoxedRunner.make_run

    def fail(runner: BoxedRunner, call: JobCall, running_job: RunningJob) -> Any:
        if call.args == ["fail"]:
            raise BadArguments("no form for a box")
        return make_run(runner, call, running_job)

    monkeypatch.setattr(BoxedRunner, "make_run", fail)
    async with running(monkeypatch) as runner:
        executor = Executor(runner, [("seen", ""), ("act", "fail"), ("seen", "")])
        await executor.run()
    first, error, last = executor.read()
    assert error == "BadArguments"
    assert first["pid"] == last["pid"]
