"""The load of the threads: which jobs are measured, when, and what that costs."""

import threading
import time
from typing import Any, cast

import pytest
import trio

from celery5.protocol.scaling.cpu_shares import CoreWait
from celery5.runners.cpu_meters import CpuMeter, read_core_waits
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


def test_a_job_is_measured_with_its_pauses_and_with_how_long_its_thread_took_to_wake_up() -> None:
    meter, ahead = CpuMeter("task", is_handed_over=True), CpuMeter("task")
    time.sleep(0.01)
    for started in (meter, ahead):
        started.start()
    for _ in range(5):
        time.sleep(0.0001)
    meter.stop()
    assert meter.use is not None
    assert meter.use.pauses is not None
    assert meter.use.pauses >= 5
    assert meter.wake_up is not None
    assert meter.wake_up >= 0.01
    assert ahead.wake_up is None  # it has waited for others to end


def test_all_cpu_time_is_counted_once_and_learned_from_at_the_end_of_a_job() -> None:
    def compute() -> None:
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass

    meter = CpuMeter("task")
    meter.start()
    compute()
    counted = meter.count()
    assert meter.read(least=60.0) is None
    compute()
    meter.stop()
    assert meter.count() == 0.0
    assert meter.use is not None
    assert meter.use.cpu == pytest.approx(counted + meter.uncounted_cpu, abs=1e-6)
    assert meter.use.cpu >= 0.01
    assert counted >= 0.005 <= meter.uncounted_cpu


def test_a_job_that_was_read_while_it_ran_has_unknown_pauses_at_its_end() -> None:
    meter = CpuMeter("task")
    meter.start()
    use = meter.read()
    meter.stop()
    assert use is not None
    assert use.pauses is None
    assert meter.use is not None
    assert meter.use.pauses is None


async def test_a_job_of_a_known_task_is_learned_from_while_it_runs_when_it_takes_long() -> None:
    load, meters, begun = ThreadLoad(), list[CpuMeter](), time.perf_counter()
    load.limit(1)
    load.begin(trio.lowlevel.current_task(), "task")
    for _ in range(2):
        meter = load.meters.add("task")
        assert meter is not None
        meter.start()
        meters.append(meter)
        await load.wait_for_reading()
    share = load.shares.get_share("task")
    await load.wait_for_reading()
    assert load.shares.get_share("task") == share
    with trio.fail_after(LIMIT):
        while load.shares.get_share("task") == share:
            await load.wait_for_reading()
    assert time.perf_counter() - begun >= thread_load.LONG
    load.end(trio.lowlevel.current_task())


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
