"""Unforeseen ends: a worker that any error ends has died; what had begun is counted, and becomes a dead letter."""

import sys
from typing import Any

import pytest
import redis
import trio

from celery5 import App, AsyncResult, JobState, TaskFailed
from celery5.services.job.outcome_handler import OutcomeHandler
from celery5.services.streams.serial_executor import SerialExecutor
from tests.redis.commands.staff import Employee, Staff, wait_until
from tests.redis.worker.workers import entries, working

COMMAND = [sys.executable, "-m", "celery5", "-A", "tests.redis.events.historian", "worker", "start"]


def send(staff: Staff, task: str, *args: object) -> AsyncResult[int]:
    """Send one job."""
    return staff.app.send_many([staff.app.signature(task, *args)])[0]


def launch(staff: Staff) -> Employee:
    """Start a worker that may end soon."""
    return staff.launch(COMMAND, grace_period=0.2, concurrency=1, cpu_slots=1, max_deliveries=2)


@pytest.mark.parametrize("task", ["crash_executors", "crash_loop"])
def test_a_job_that_ends_its_workers_by_errors_becomes_a_dead_letter(
    staff: Staff, redis_client: "redis.Redis", task: str
) -> None:
    bad = send(staff, task)
    innocents = [send(staff, "nap", 0.0) for _ in range(5)]
    first = launch(staff)
    assert first.wait(60) != 0
    # By its sidecar. It may have left its queues before it failed.
    wait_until(lambda: bool(first.lines("worker:died") or first.lines("worker:jobs-requeued")))
    stream = staff.app.queue("default").stream
    deaths = [int(entry.get(b"deliveries", 0)) for entry in entries(redis_client, stream)]
    assert sorted(deaths) == [0, 0, 0, 0, 0, 1]
    for _ in range(2):
        assert launch(staff).wait(60) != 0
    wait_until(lambda: bad.status() is JobState.DEAD)
    with pytest.raises(TaskFailed, match="took its worker down 3 times"):
        bad.get(timeout=1)
    launch(staff)
    assert len({job.get(timeout=60) for job in innocents}) == 1


async def run_until_it_fails(app: App) -> None:
    """Run a worker that ends by an error of ours."""
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with working(app):
            await trio.sleep_forever()


async def test_without_a_sidecar_a_worker_counts_its_own_death(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object, **_more: object) -> None:
        raise ZeroDivisionError("a fault of our own")

    app.configure(concurrency=1, cpu_slots=1)
    started = trio.Event()

    @app.task
    async def unlucky() -> None:
        started.set()

    @app.task
    async def never() -> None: ...

    monkeypatch.setattr(OutcomeHandler, "decide", broken)
    await unlucky.adelay()
    await never.adelay()
    await run_until_it_fails(app)
    left = entries(redis_client, app.queue("default").stream)
    assert started.is_set()
    assert max(int(entry.get(b"deliveries", 0)) for entry in left) == 1


async def test_a_record_whose_worker_ends_by_an_error_counts_a_death(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    declare_stream: Any = app.stream
    readings = declare_stream("readings", dict, by=str, partitions=1)

    @app.processor(readings, name="read")
    async def read(events: object) -> None:
        raise ValueError

    async def fail(*_args: object, **_more: object) -> None:
        raise ZeroDivisionError("a fault of our own")

    monkeypatch.setattr(SerialExecutor, "_handle_failure", fail)
    await readings.asend({"n": 1})
    await run_until_it_fails(app)
    keys = readings.keys
    assert redis_client.hget(f"{keys.partition_prefix}read:0", "deaths") == b"1"
