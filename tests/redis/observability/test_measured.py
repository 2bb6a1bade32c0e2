"""What a worker measures of its jobs: how they ended, how long they ran, and how long they waited by Redis' clock."""

import time
from typing import Literal

import pytest
import redis

from celery5 import App
from celery5.processes.foreground import WORKER
from celery5.processes.lifecycle.incarnations import ProcessKind
from celery5.processes.router import ROUTER
from celery5.processes.scheduler import SCHEDULER
from celery5.protocol.observability.job_tally import UNKNOWN_TASK, JobTally
from celery5.protocol.observability.report import MetricsReport
from celery5.services.health.vitals import ProcessStatus
from celery5.tasks import CurrentJob
from tests.redis.worker.workers import Lines, until, until_async, working


async def tally_of(app: App, count: int) -> JobTally:
    """Run a worker until so many attempts have ended; what it has counted."""
    status = ProcessStatus(app=app.name)
    async with working(app, process_status=status):
        await until(lambda: sum(status.jobs.count_by_state().values()) >= count)
    return status.jobs


async def test_a_job_has_waited_since_it_was_on_its_queue(app: App) -> None:
    @app.task(name="quick")
    async def quick() -> None: ...

    sent = time.monotonic()
    await quick.adelay()
    tally = await tally_of(app, 1)
    (wait,) = [
        task_tally.wait_times
        for queue, task, task_tally in tally.items()
        if (queue, task) == ("default", "quick")
    ]
    assert wait.count == 1
    assert 0 < wait.total < time.monotonic() - sent


async def test_a_countdown_is_no_waiting(app: App) -> None:
    @app.task(name="later")
    async def later() -> None: ...

    await later.options(countdown=2).adelay()
    tally = await tally_of(app, 1)
    assert 0 <= tally.tallies["default", "later"].wait_times.total < 2


@pytest.mark.parametrize("priority", ["high", "normal", "low"])
@pytest.mark.parametrize("fair_key", [None, "number"])
async def test_a_job_has_waited_at_its_limit_too(
    app: App, fair_key: str | None, priority: Literal["high", "normal", "low"]
) -> None:
    async def is_held() -> bool:
        return (await app.ainfo()).queues["default"].held == 1

    @app.task(name="berth", limit=1, fair_key=fair_key)
    async def berth(number: int) -> None:
        if number == 1:
            await until_async(is_held)
            over = time.monotonic() + 0.5
            await until(lambda: time.monotonic() > over)

    await berth.options(priority="high").adelay(1)
    await berth.options(priority=priority).adelay(2)
    sent = time.monotonic()
    tally = await tally_of(app, 2)
    assert 0.5 <= tally.tallies["default", "berth"].wait_times.total < 2 * (time.monotonic() - sent) + 1


async def test_a_job_that_nobody_moved_in_time_has_waited_since_its_time(app: App) -> None:
    @app.task(name="later")
    async def later() -> None: ...

    await later.options(countdown=0.01).adelay()
    over = time.monotonic() + 1.5
    await until(lambda: time.monotonic() > over)
    tally = await tally_of(app, 1)
    assert 1.4 < tally.tallies["default", "later"].wait_times.total < 60


@pytest.mark.parametrize("has_error", [False, True])
async def test_retry_that_a_task_asks_for_without_an_error_is_no_failure(app: App, has_error: bool) -> None:
    @app.task(name="alarm.wait_for_file", bind=True)
    async def wait_for_file(self: CurrentJob) -> None:
        if self.attempt == 1:
            self.retry(countdown=0.01, exc=FileNotFoundError("no file") if has_error else None)

    await wait_for_file.adelay()
    with Lines() as lines:
        tally = await tally_of(app, 2)
    counts = dict(tally.tallies["default", "alarm.wait_for_file"].counts)
    (retried, _) = lines.of("job")
    assert retried["state"] == "RETRY"
    if has_error:
        assert (counts, retried["level"]) == ({"RETRY": 1, "SUCCESS": 1}, "warning")
    else:
        assert (counts, retried["level"]) == ({"RETRY_REQUESTED": 1, "SUCCESS": 1}, "info")


async def test_each_attempt_counts_with_its_own_wait(app: App) -> None:
    @app.task(name="stubborn", max_retries=2, backoff=0.2)
    async def stubborn() -> None:
        raise ValueError("no")

    await stubborn.adelay()
    tally = await tally_of(app, 3)
    one = tally.tallies["default", "stubborn"]
    assert dict(one.counts) == {"RETRY": 2, "DEAD": 1}
    assert one.wait_times.count == one.run_times.count == 3


async def test_jobs_that_no_task_is_declared_for_count_as_one_unknown_task(
    app: App, redis_client: "redis.Redis"
) -> None:
    for number in range(3):
        message = f'{{"v":1,"id":"job-{number}","task":"made-up-{number}","args":[],"kwargs":{{}}}}'
        redis_client.xadd(app.queue("default").stream, {"job": message})
    redis_client.xadd(app.queue("default").stream, {"job": "{"})
    tally = await tally_of(app, 4)
    assert tally.count_jobs() == {(UNKNOWN_TASK, "DEAD"): 4}


async def test_a_clock_that_is_behind_makes_no_negative_waits(app: App, redis_client: "redis.Redis") -> None:
    @app.task(name="quick")
    async def quick() -> None: ...

    job = quick.s().job()
    ahead = int(time.time() * 1000) + 3_600_000  # as after a failover to a server whose clock is ahead
    redis_client.xadd(app.queue("default").stream, {"job": job.message}, id=f"{ahead}-0")
    tally = await tally_of(app, 1)
    assert tally.tallies["default", "quick"].wait_times.total == 0


@pytest.mark.parametrize(("kind", "page"), [("worker", WORKER), ("router", ROUTER), ("scheduler", SCHEDULER)])
async def test_each_kind_of_process_publishes_what_it_measures(
    app: App, kind: str, page: ProcessKind
) -> None:
    app.configure(metrics_interval=0.1)
    reports = list[MetricsReport]()

    class Outlet:
        async def send(self, report: MetricsReport) -> None:
            reports.append(report)

    app.metrics.add_outlet(Outlet())
    async with working(app, page=page, name="one"):
        await until(lambda: bool(reports))
    assert {report.kind for report in reports} == {kind}
    assert reports[0].measurements.gauges["process_resident_memory_bytes",] > 1_000_000
