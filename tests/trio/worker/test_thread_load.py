"""The load of the threads: which jobs are measured, when, and what that costs."""

import threading
import time
from typing import Any, cast

import pytest
import trio

from celery5.protocol.scaling.cpu_shares import CoreWait
from celery5.runners.cpu_meters import read_core_waits
from celery5.services.job import thread_load
from celery5.services.job.thread_load import MEASURING_INTERVAL, ThreadLoad

LIMIT = 20.0


class Job:
    """A job of the task `name`."""

    def __init__(self, name: str) -> None:
        self.command = self
        self.task = name


async def test_a_task_is_known_while_its_first_job_runs() -> None:
    load, may_end, runs = ThreadLoad(), threading.Event(), trio.Event()
    load.limit(1)
    load.begin(trio.lowlevel.current_task(), "waits")
    meter = load.meters.add("waits")
    assert meter is not None

    def run() -> None:
        meter.start()
        trio.from_thread.run_sync(runs.set)
        may_end.wait(LIMIT)
        meter.stop()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, run)
        await runs.wait()
        with trio.fail_after(LIMIT):
            while not load.shares.is_known("waits"):
                await load.wait_for_reading()
        assert load.shares.get_share("waits") < 0.5
        assert not may_end.is_set()
        may_end.set()
    load.meters.remove(meter)
    load.end(trio.lowlevel.current_task())
    assert load.count() == 0


def test_of_short_jobs_some_are_measured_and_of_others_all() -> None:
    load = ThreadLoad()
    assert all(load.meters.add("new") for _ in range(20))
    load.learn_duration("long", 0.01)
    load.learn_duration("short", 0.00001)
    assert all(load.meters.add("long") for _ in range(20))
    begun = time.perf_counter()
    measured = sum(load.meters.add("short") is not None for _ in range(1000))
    passed = time.perf_counter() - begun
    assert 1 <= measured <= 1 + passed / MEASURING_INTERVAL
    time.sleep(MEASURING_INTERVAL)
    assert load.meters.add("short") is not None


async def test_reading_how_long_threads_wait_for_cores_takes_a_bounded_part_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 0

    def read_slowly() -> dict[str, CoreWait]:
        nonlocal count
        count += 1
        time.sleep(0.005)
        return {"1": CoreWait(float(count), count)}

    monkeypatch.setattr(thread_load, "read_core_waits", read_slowly)
    load = ThreadLoad()
    load.limit(1)
    load.begin(trio.lowlevel.current_task(), "unknown")
    begun = time.perf_counter()
    for _ in range(30):
        await load.wait_for_reading()
    assert count * 0.005 <= (time.perf_counter() - begun) * thread_load.CORE_READING_COST + 0.01
    load.end(trio.lowlevel.current_task())


async def test_no_job_waits_for_a_thread_while_those_that_run_take_long() -> None:
    load, executor = ThreadLoad(), trio.lowlevel.current_task()
    load.set_slots(1)
    load.allow_waiting(lambda _job: True)
    load.learn_duration("short", 0.00001)
    job = cast("Any", Job("short"))
    load.take(executor, job)
    assert load.may_begin(job)
    other = cast("Any", object())
    load.take(other, job)
    assert load.is_ahead(job)
    assert load.finish_waiting(job) == 1
    load.note_stall(other)
    assert not load.may_begin(job)
    load.end(other)  # it has no job
    assert not load.may_begin(job)
    load.end(executor)
    assert load.may_begin(job)


@pytest.mark.skipif(
    read_core_waits() is None, reason="the system does not tell how long threads wait for cores"
)
def test_a_thread_that_wakes_up_often_is_read_with_its_number_of_runs() -> None:
    before = read_core_waits()
    for _ in range(50):
        time.sleep(0.0002)
    after = read_core_waits()
    assert before is not None
    assert after is not None
    number = str(threading.get_native_id())
    assert after[number].runs - before[number].runs >= 50
    assert after[number].seconds >= before[number].seconds
