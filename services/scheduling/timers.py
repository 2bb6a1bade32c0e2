"""Run the timers of a worker process: functions that it runs by the clock, and that are no jobs.

Two steps do this. `Timers` has the clocks, and stops first. `TimerRuns` has what runs, and stops after the step that
runs jobs: so jobs and timers have the same grace period, and not one after the other.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import trio

from celery5.errors import Misconfigured
from celery5.logs.log import Log
from celery5.protocol.job.verdict import BrokerLost, JobRejected, Outcome, Raised, RetryRequested
from celery5.protocol.scheduling.timers import (
    MAX_RUNS_AT_ONCE,
    TimerCounts,
    decide_run,
    get_next_tick,
)
from celery5.protocol.scheduling.triggers import AnyTrigger, Trigger
from celery5.protocol.task_kinds import FunctionKind
from celery5.runners.in_thread import ThreadRunner
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.on_trio import TrioRunner
from celery5.runners.outcome import get_error_outcome
from celery5.runners.running_job import Runner, RunningJob
from celery5.runners.user_errors import call_user_code, reraise_cancellation
from celery5.scheduling.fire_times import get_next_fire_time, validate_trigger
from celery5.scheduling.timers import Timer
from celery5.services.scheduling.timer_leadership import TimerLeadership

LONGEST_SLEEP = 30.0
"""Seconds after which a timer by wall-clock time looks at the clock again, which may have been set."""


class TimerRuns:
    """The runs of all timers. When stopped it lets running ones finish for `grace_period` seconds.

    `timer_counts` counts them by name, and is kept over incarnations.
    """

    def __init__(
        self,
        *,
        declared_timers: Sequence[Timer],
        timer_counts: dict[str, TimerCounts],
        asyncio_runner: AsyncioRunner,
        timer_leadership: TimerLeadership,
        grace_period: float,
        log: Log,
    ) -> None:
        self._leadership = timer_leadership
        self._runners: Mapping[FunctionKind, Runner] = {
            "trio": TrioRunner(),
            "asyncio": asyncio_runner,
            # Threads of their own: timers take no slots from jobs.
            "thread": ThreadRunner(get_slots=lambda: max(1, len(declared_timers) * MAX_RUNS_AT_ONCE)),
        }
        self._grace_period = grace_period
        self._log = log
        self._counts = timer_counts
        for timer in declared_timers:
            timer_counts.setdefault(timer.name, TimerCounts())
        self._waiting: set[str] = set()
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope()
        self._idle_scope = trio.CancelScope()
        self._is_stopping = False

    def get_status(self) -> dict[str, dict[str, int]]:
        """Return the counts of each timer, for `worker stats`."""
        return {name: msgspec.structs.asdict(counts) for name, counts in self._counts.items()}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run what `fire` begins, until cancelled; then until all has ended or the grace period is over."""
        self._is_stopping = False
        self._waiting.clear()
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(self._hold)
                task_status.started()
                await trio.sleep_forever()
            finally:
                self.stop()
                self._idle_scope.cancel()

    async def _hold(self, *, task_status: trio.TaskStatus[None]) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self._idle_scope = trio.CancelScope()
        with trio.CancelScope(shield=True) as self._scope:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                with self._idle_scope:
                    await trio.sleep_forever()
        self._nursery = None

    def stop(self) -> None:
        """Begin no more runs, and cancel those that go on after the grace period. Repeated calls do nothing."""
        if not self._is_stopping:
            self._is_stopping = True
            self._scope.deadline = trio.current_time() + self._grace_period

    def fire(self, timer: Timer) -> None:
        """Run a timer that is due, have it wait, or leave it out, as its policy says.

        Where another process leads, one for the leader is not due.
        """
        if self._is_stopping or self._nursery is None or not self._may_run(timer):
            return
        counts = self._counts[timer.name]
        if timer.interval is None and counts.runs:  # in an earlier incarnation of this process
            return
        match decide_run(timer.overlap, running=counts.running, is_waiting=timer.name in self._waiting):
            case "run":
                counts.change_running(1)
                self._nursery.start_soon(self._run_timer, timer, counts, name=f"timer:{timer.name}")
            case "wait":
                self._waiting.add(timer.name)
            case "skip":
                self.skip(timer, 1)

    def _may_run(self, timer: Timer) -> bool:
        return not timer.on_leader or self._leadership.is_leader

    def skip(self, timer: Timer, count: int) -> None:
        """Count runs that are left out."""
        if not self._may_run(timer):
            return
        self._counts[timer.name].add_skipped(count)
        self._log.event("timer:skipped", "debug", timer=timer.name, count=count)

    async def _run_timer(self, timer: Timer, counts: TimerCounts) -> None:
        """Run it once, and once more for a run that came to wait, and so on."""
        try:
            while self._may_run(timer):
                counts.add_run()
                if timer.on_leader:
                    await self._run_as_leader(timer, counts)
                else:
                    await self._run_once(timer, counts, RunningJob(), self._scope)
                if timer.name not in self._waiting or self._is_stopping:
                    break
                self._waiting.discard(timer.name)
        finally:
            counts.change_running(-1)

    async def _run_as_leader(self, timer: Timer, counts: TimerCounts) -> None:
        """Run it once, and cancel it when this process does not lead any more.

        A thread cannot be cancelled: until it ends, it counts as running here.
        """
        running_job = RunningJob()
        with self._leadership.cancel_when_lost() as scope:
            await self._run_once(timer, counts, running_job, scope)
        if running_job.thread_ended is not None:
            await running_job.thread_ended.wait()

    async def _run_once(
        self, timer: Timer, counts: TimerCounts, running_job: RunningJob, scope: trio.CancelScope
    ) -> None:
        start = trio.current_time()
        try:
            execute = self._runners[timer.kind].execute
            outcome = await call_user_code(execute, _drop_result(timer), (), {}, running_job)
        except trio.Cancelled:
            self._report_cancelled(timer, start)
            raise
        except BaseException as error:
            reraise_cancellation(error)
            outcome = get_error_outcome(error)
        if self._scope.cancel_called or scope.cancel_called:
            # An error after the cancellation is how it ended, not a failure.
            self._report_cancelled(timer, start)
            return
        why, traceback = _describe_failure(outcome)
        if why:
            counts.add_failure()
            self._log.event("timer:failed", "error", timer=timer.name, why=why, traceback=traceback)

    def _report_cancelled(self, timer: Timer, start: float) -> None:
        seconds = round(trio.current_time() - start, 3)
        self._log.event("timer:cancelled", "warning", timer=timer.name, after=seconds)


def check_triggers(timers: Sequence[Timer]) -> None:
    """Raise Misconfigured for a trigger that this machine cannot compute: it lacks the time zone, for example."""
    for timer in timers:
        if isinstance(timer.interval, Trigger):
            try:
                validate_trigger(timer.interval)
            except Misconfigured as error:
                raise Misconfigured(f"timer {timer.name}: {error}") from None


def _drop_result(timer: Timer) -> Callable[[], Any]:
    """Return the function without its result, which a runner would encode."""
    function: Callable[[], Any] = timer.function
    if timer.kind == "thread":

        def run() -> None:
            function()

        return run

    async def run_async() -> None:
        await function()

    return run_async


def _describe_failure(outcome: Outcome) -> tuple[str, str]:
    """Return what a run raised and its traceback; nothing if it returned."""
    match outcome:
        case Raised() | RetryRequested() | BrokerLost():
            failure = outcome.failure
            return f"{failure.type}: {failure.message}".rstrip(": "), failure.traceback
        case JobRejected():
            return f"Reject: {outcome.reason}", ""
        case _:
            return "", ""


class Timers:
    """The clocks of all timers of a worker process."""

    def __init__(
        self,
        *,
        declared_timers: Sequence[Timer],
        timer_runs: TimerRuns,
        timer_leadership: TimerLeadership,
        get_wall_time: Callable[[], float] = time.time,
    ) -> None:
        self._timers = declared_timers
        self._runs = timer_runs
        self._leadership = timer_leadership
        self._get_wall_time = get_wall_time

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Fire timers until cancelled."""
        async with trio.open_nursery() as nursery:
            try:
                for timer in self._timers:
                    if timer.interval is None:
                        nursery.start_soon(self._fire_at_start, timer)
                    elif isinstance(timer.interval, Trigger):
                        nursery.start_soon(self._fire_by_trigger, timer, timer.interval)
                    else:
                        nursery.start_soon(self._fire_regularly, timer, timer.interval)
                task_status.started()
                self._leadership.begin()
                await trio.sleep_forever()
            finally:
                self._runs.stop()

    async def _fire_at_start(self, timer: Timer) -> None:
        """Fire when this process starts, or when the cluster has started with it."""
        if timer.on_leader:
            await self._leadership.wait_cluster_started()
        self._runs.fire(timer)

    async def _fire_regularly(self, timer: Timer, interval: float) -> None:
        """Fire `interval` seconds after the start, and so on. How long a run takes delays nothing."""
        start, last = trio.current_time(), 0
        while True:
            elapsed = trio.current_time() - start
            # A jitter delays a run, and makes no later one miss its time.
            tick = get_next_tick(last, elapsed - timer.jitter, interval)
            if tick > last + 1:
                self._runs.skip(timer, tick - last - 1)
            await trio.sleep_until(start + tick * interval + random.uniform(0, timer.jitter))
            self._runs.fire(timer)
            last = tick

    async def _fire_by_trigger(self, timer: Timer, trigger: AnyTrigger) -> None:
        """Fire at the times of a trigger, by the wall clock, until there are no more."""
        after = self._get_wall_ms()
        while (due := get_next_fire_time(trigger, after)) is not None:
            delay = random.uniform(0, timer.jitter)
            await self._sleep_until(due / 1000 + delay)
            self._runs.fire(timer)
            # Times that passed while this process was suspended are left out.
            after = max(due, self._get_wall_ms() - round(timer.jitter * 1000))

    async def _sleep_until(self, wall_time: float) -> None:
        while (seconds := wall_time - self._get_wall_time()) > 0:  # noqa: ASYNC110  it waits for the time alone
            await trio.sleep(min(seconds, LONGEST_SLEEP))

    def _get_wall_ms(self) -> int:
        return int(self._get_wall_time() * 1000)
