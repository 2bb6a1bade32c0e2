"""Threads and limits in time: an error is raised inside one call in a thread, and a thread that cannot be reached is
waited for as long as its hand has patience.
"""

import gc
import math
import sys
import threading
import time
from ctypes import c_ulong, py_object, pythonapi

import pytest
import trio

from celery5.errors import SoftTimeLimitExceeded, TimeLimitExceeded
from celery5.protocol.job.verdict import JobRevoked, Outcome, Raised, Returned
from celery5.runners.in_thread import CallInterrupter, ThreadRunner
from celery5.runners.on_trio import TrioRunner
from celery5.runners.running_job import RunningJob, TimeLimits
from celery5.services.worker.time_limits import Deadlines
from tests.trio.worker.test_runners_limits import LIMIT, SOON, TOLD, softly, until_begun


async def test_a_soft_limit_is_raised_in_a_thread_between_two_steps() -> None:
    def job() -> str:
        try:
            while True:
                pass
        except SoftTimeLimitExceeded as error:
            return str(error)

    assert await softly(ThreadRunner(get_slots=lambda: 1), job) == TOLD


async def test_a_thread_whose_time_is_up_ends_where_it_is() -> None:
    def job() -> None:
        while True:
            time.sleep(0.001)

    hand = RunningJob(limits=TimeLimits(hard=1))
    with trio.fail_after(LIMIT), hand.scope:
        async with trio.open_nursery() as nursery:

            async def cut() -> None:
                await trio.sleep(0.02)
                hand.end_by_time_limit(TimeLimitExceeded("too long"))

            nursery.start_soon(cut)
            outcome = await ThreadRunner(get_slots=lambda: 1).execute(job, [], {}, hand)
            assert isinstance(outcome, Raised)
            assert hand.get_outcome(outcome) is outcome, "it knows where it was"
            assert "in job" in outcome.failure.traceback
    assert hand.thread_ended is None


async def test_unreachable_thread_is_abandoned_and_logs_its_end() -> None:
    hand, runner, lock = (
        RunningJob(limits=TimeLimits(hard=1)),
        ThreadRunner(get_slots=lambda: 1),
        threading.Lock(),
    )
    lock.acquire()

    async def run() -> None:
        with hand.scope:
            await runner.execute(lock.acquire, [], {}, hand)

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await until_begun(hand)
            hand.cancel(JobRevoked(), wait_seconds=math.inf)
            await trio.sleep(0.02)
            hand.end_by_time_limit(TimeLimitExceeded("too long"))
            await trio.sleep(0.02)
            hand.cancel(JobRevoked(), wait_seconds=math.inf)
    assert hand.cancel_outcome == JobRevoked(), "who said so first says why"
    assert hand.thread_ended is not None, "and whose patience is the least says how long"
    assert not hand.thread_ended.is_set()
    lock.release()
    with trio.fail_after(LIMIT):
        await hand.thread_ended.wait()


async def test_a_thread_of_a_trio_job_is_told_once_and_can_still_be_cancelled() -> None:
    def work() -> None:
        for _ in range(1000):
            time.sleep(0.002)
            heard.append("asked")
            try:
                trio.from_thread.check_cancelled()
            except (SoftTimeLimitExceeded, trio.Cancelled) as error:
                heard.append(type(error).__name__)
                if isinstance(error, trio.Cancelled):
                    raise

    async def job() -> None:
        await trio.to_thread.run_sync(work)

    heard: list[str] = []
    with trio.fail_after(LIMIT), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def cancel_later() -> None:
                while heard[-3:] != ["asked"] * 3 or "SoftTimeLimitExceeded" not in heard:
                    await trio.sleep(0.001)
                scope.cancel()

            nursery.start_soon(cancel_later)
            await softly(TrioRunner(), job)
    assert scope.cancelled_caught
    assert [word for word in heard if word != "asked"] == ["SoftTimeLimitExceeded", "Cancelled"]
    assert heard[-4:] == ["asked", "asked", "asked", "Cancelled"], "it went on in between"


async def test_abandoned_thread_sees_the_limit_whenever_it_asks() -> None:
    def work() -> None:
        for _ in range(50):
            time.sleep(0.002)
            try:
                trio.from_thread.check_cancelled()
            except SoftTimeLimitExceeded:
                heard.append(True)
        ended.set()

    async def job() -> str:
        try:
            await trio.to_thread.run_sync(work, abandon_on_cancel=True)
        except SoftTimeLimitExceeded as error:
            return str(error)
        return "in vain"

    heard, ended = list[bool](), threading.Event()
    assert await softly(TrioRunner(), job) == TOLD
    with trio.fail_after(LIMIT):
        await trio.to_thread.run_sync(ended.wait, LIMIT)
    assert len(heard) > 1


async def test_a_cancelled_thread_is_waited_for_until_the_shortest_of_its_limits() -> None:
    go, runner = threading.Event(), ThreadRunner(get_slots=lambda: 1)

    def job() -> int:
        go.wait(LIMIT)
        return 1

    async def run(hand: RunningJob) -> None:
        with hand.scope:
            outcomes.append(await runner.execute(job, [], {}, hand))

    outcomes: list[Outcome] = []
    for second in (False, True):
        hand = RunningJob()
        go.clear()
        with trio.fail_after(LIMIT):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run, hand)
                await until_begun(hand)
                hand.cancel(TOLD, wait_seconds=LIMIT)
                await trio.sleep(0.02)
                assert hand.thread_ended is None
                if second:
                    hand.cancel(TOLD, wait_seconds=0)
                    while hand.thread_ended is None:
                        await trio.sleep(0.001)
                go.set()
        if hand.thread_ended is not None:
            await hand.thread_ended.wait()
    assert outcomes == [Returned(b"1")], "the first has ended with an outcome, the second was left behind"


def test_an_error_never_hits_what_a_thread_does_after_the_call() -> None:
    stray: list[BaseException] = []
    hits = 0

    def brief(until: float) -> None:
        while time.perf_counter() < until:
            pass

    def work() -> None:
        nonlocal hits
        for n in range(600):
            try:
                aim, after = CallInterrupter(), 0.0001 + n % 50 * 0.00001
                shots = threading.Thread(target=shoot, args=(aim, after))
                shots.start()
                try:
                    aim.call(brief, [time.perf_counter() + 0.0003], {})
                except TimeLimitExceeded:
                    hits += 1
                for _ in range(200):
                    pass
                shots.join()
            except BaseException as error:
                stray.append(error)

    def shoot(aim: CallInterrupter, after: float) -> None:
        brief(time.perf_counter() + after)
        aim.interrupt(SoftTimeLimitExceeded("soft"))
        aim.interrupt(TimeLimitExceeded("hard"))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.00001)
    gc.disable()  # an error that hits what hypothesis does at each collection is shown as one that nobody could raise
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
    finally:
        gc.enable()
        sys.setswitchinterval(interval)
    assert not thread.is_alive()
    assert stray == []
    assert hits > 0


def test_an_error_that_comes_before_the_call_is_raised_when_it_begins() -> None:
    aim, called = CallInterrupter(), list[int]()
    aim.interrupt(SoftTimeLimitExceeded(SOON))
    with pytest.raises(SoftTimeLimitExceeded, match=SOON):
        aim.call(called.append, [1], {})
    assert called == []


def test_a_call_that_is_over_waits_until_an_error_that_is_raised_in_it_has_come() -> None:
    aim, leave, ends = CallInterrupter(), threading.Event(), list[str]()

    def work() -> None:
        try:
            aim.call(leave.wait, [LIMIT], {})
            ends.append("returned")
        except TimeLimitExceeded:
            ends.append("hit")

    def waits_for_interrupt() -> bool:
        frame = sys._current_frames()[thread.ident or 0]
        return frame.f_code is CallInterrupter._wait_for_interrupt.__code__

    thread = threading.Thread(target=work)
    thread.start()
    until = time.monotonic() + LIMIT
    while aim._thread is None and time.monotonic() < until:
        time.sleep(0.001)
    with aim._lock:  # as `shoot` holds it
        leave.set()
        while not waits_for_interrupt() and time.monotonic() < until:
            time.sleep(0.001)
        assert waits_for_interrupt()
        assert thread.ident is not None
        pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread.ident), py_object(TimeLimitExceeded))
    thread.join(LIMIT)
    assert ends == ["hit"]


async def test_a_limit_in_time_counts_from_when_the_job_begins_in_its_thread() -> None:
    deadlines = Deadlines(tasks={}, time_limit=None, soft_time_limit=None)
    running_job = RunningJob(on_begin=lambda _job: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(deadlines.run)
        deadlines.start(running_job, TimeLimits(hard=0.2))
        await trio.sleep(0.15)
        assert not running_job.must_end
        running_job.begin_late()
        begun = trio.current_time()
        with trio.fail_after(LIMIT):
            while not running_job.must_end:
                await trio.sleep(0.001)
        assert trio.current_time() - begun >= 0.19
        waiting = RunningJob(on_begin=lambda _job: None)
        deadlines.start(waiting, TimeLimits(hard=0.01))
        await trio.sleep(0.1)
        assert not waiting.must_end
        nursery.cancel_scope.cancel()
