"""Timetable: fire the schedules that are due.

Any number of Schedulers may do this at the same time. Each reads what is due, decides what to do, and asks
Redis to do it if the schedule is unchanged: one of them succeeds. The time is that of Redis.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import trio

from celery5.app import App
from celery5.broker.call import Call
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls import scheduling as scheduling_calls
from celery5.broker.calls.scheduling import DueSchedules
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerReplied, Corrupt, Misconfigured
from celery5.logs.log import Log
from celery5.protocol.health.metrics import MetricFamily, make_counter
from celery5.protocol.job.messages import read_command
from celery5.protocol.scheduling import periodic
from celery5.protocol.scheduling.periodic import Schedule, ScheduleStep
from celery5.scheduling.fire_times import get_next_fire_time
from celery5.scheduling.schedules import make_fired_job
from celery5.services.process.broker_outages import OutageLog, is_outage, retry_until_available

SCHEDULES_PER_CALL = 100
"""Schedules of one queue that are read in one trip."""
LOOK_AGAIN = 5.0
"""Seconds after which all schedules are read again in any case."""
RETRY_DELAY = 0.5
"""Seconds between attempts while Redis is unreachable."""
STUCK = 1.0
"""Seconds until a schedule that cannot be processed is read again."""


class Timetable:
    """Fires the schedules of all queues of an application."""

    def __init__(self, *, redis: AsyncDriver, app: App, keys: Keys, worker: str, log: Log) -> None:
        self._redis = redis
        self._app = app
        self._keys = keys
        self._name = worker
        self._log = log
        self._news = trio.Event()
        self._outages = OutageLog(log, "timetable:interrupted")
        self._told: set[tuple[str, str]] = set()
        self._announced: set[str] = set()
        self._counts = {"fired": 0, "missed": 0, "skipped": 0}

    # ---- notifications, health and metrics

    @property
    def channels(self) -> list[str]:
        """Return the channels to subscribe to."""
        return [self._keys.schedule_changes]

    def on_message(self, _channel: bytes, _payload: bytes) -> None:
        """Handle a message: a schedule was added or changed."""
        self._news.set()

    def recheck(self) -> None:
        """Check all schedules now, since the listening connection was reconnected and messages may have been
        lost.
        """
        self._news.set()

    def conditions(self) -> Mapping[str, str]:
        """Return no problem: it is always ready."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the metrics of fire times."""
        for what, count in self._counts.items():
            yield make_counter(
                f"celery5_schedules_{what}_total",
                f"Fire times of schedules that this Scheduler has {what}.",
                count,
            )

    # ---- firing

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Fire what is due, until cancelled."""
        task_status.started()
        while True:
            wait = await retry_until_available(self.fire_due, self._outages, RETRY_DELAY, even_refused=True)
            with trio.move_on_after(wait):
                await self._news.wait()
            self._news = trio.Event()

    async def fire_due(self) -> float:
        """Make one pass over all queues; return the seconds until the next schedule is due."""
        wait = LOOK_AGAIN
        queues = await self._redis.perform(scheduling_calls.list_schedule_queues(self._keys))
        asked = [
            scheduling_calls.get_due_schedules(self._keys, self._app.queue(each), limit=SCHEDULES_PER_CALL)
            for each in queues
        ]
        found: list[DueSchedules | str] = await self._performed(asked)
        for queue, each in zip(queues, found, strict=True):
            if isinstance(each, str):
                self._tell_stuck(queue, "all", each)
                continue
            if each.next_due_in is not None:
                wait = min(wait, each.next_due_in)
            wait = min(wait, await self._fire(queue, each))
        return wait

    async def _performed(self, trips: Sequence[Call[Any]]) -> list[Any]:
        """Perform all calls in one trip.

        When the server refuses any, perform them one by one, so that a refused one does not hold up others. The
        result of a refused call is a text with the reason.
        """
        try:
            return await self._redis.perform_all(trips) if trips else []
        except BrokerReplied as error:
            if is_outage(error):
                raise
        return [await self._performed_alone(trip) for trip in trips]

    async def _performed_alone(self, trip: Call[Any]) -> Any:
        try:
            return await self._redis.perform(trip)
        except BrokerReplied as error:
            if is_outage(error):
                raise
            return str(error)

    async def _fire(self, queue: str, found: DueSchedules) -> float:
        """Process the due schedules of one queue; return when the next one is due."""
        wait, steps, trips = (
            LOOK_AGAIN,
            list[tuple[Schedule, ScheduleStep | None, int | None]](),
            list[Call[bool]](),
        )
        for record, busy in found.due:
            schedule = periodic.decode_schedule(record, self._app.settings.message_limit)
            step = self._step(schedule, found.now, busy=busy)
            if schedule is None or isinstance(step, str):
                wait = min(wait, STUCK)
                self._tell_stuck(queue, record if schedule is None else schedule.name, str(step))
                continue
            after = schedule if step is None else step.new_state
            look = after.get_next_look(found.now)
            steps.append((schedule, step, look))
            trips.append(self._trip(queue, schedule, record, step, look, found.now))
        done = await self._published(queue, trips)
        for (schedule, step, look), ours in zip(steps, done, strict=True):
            if isinstance(ours, str):
                wait = min(wait, STUCK)
                self._tell_stuck(queue, schedule.name, ours)
                continue
            if look is not None:
                wait = min(wait, max(0.0, (look - found.now) / 1000))
            if step is not None and ours:
                self._tell(schedule, step, found.now)
        return wait

    async def _published(self, queue: str, trips: Sequence[Call[bool]]) -> list[Any]:
        """Perform the calls that fire.

        The first one also registers the queue, since nobody else may publish to it.
        """
        if not trips or queue in self._announced:
            return await self._performed(trips)
        announced, *done = await self._performed([queue_calls.register_queue(self._keys, queue), *trips])
        if not isinstance(announced, str):
            self._announced.add(queue)
        return done

    def _step(self, schedule: Schedule | None, now: int, *, busy: bool) -> ScheduleStep | str | None:
        """Return what to do; a text says why that cannot be decided."""
        if schedule is None:
            return "it was written by a newer version, or is larger than message_limit allows"
        try:
            step = periodic.plan_fires(
                schedule, now, is_busy=busy, find_next=get_next_fire_time, app=self._app.name, by=self._name
            )
            if step is not None and step.fires:
                read_command(schedule.of.message.encode())  # raises when there is nothing valid to send
        except (Misconfigured, Corrupt, ValueError, OverflowError) as error:
            return str(error)
        return step

    def _trip(
        self,
        queue: str,
        schedule: Schedule,
        record: bytes,
        step: ScheduleStep | None,
        look: int | None,
        now: int,
    ) -> Call[bool]:
        jobs = (
            [] if step is None else [make_fired_job(schedule.of, each.job, now / 1000) for each in step.fires]
        )
        after = record if step is None else periodic.encode_schedule(step.new_state)
        if step is not None and schedule.origin == "runtime" and look is None:
            after = b""  # it will never fire again, and no code declares it
        keys = self._app.queue(queue).on_lane(schedule.of.lane)
        return scheduling_calls.fire_schedule(
            self._keys, keys, schedule.name, expected_state=record, new_state=after, next_look=look, jobs=jobs
        )

    # ---- logging

    def _tell(self, schedule: Schedule, step: ScheduleStep, now: int) -> None:
        for what, count in (
            ("fired", len(step.fires)),
            ("missed", step.missed),
            ("skipped", step.skipped),
        ):
            if count:
                self._counts[what] += count
        if step.fires:
            jobs = [each.job for each in step.fires]
            late = round((now - step.fires[-1].at) / 1000, 3)
            self._log.event(
                "schedule:fired", schedule=schedule.name, jobs=jobs[:10], count=len(jobs), late=late
            )
        if step.missed:
            self._log.event(
                "schedule:missed",
                "warning",
                schedule=schedule.name,
                count=step.missed,
                more=step.has_more_missed,
                policy=schedule.of.misfire.policy,
            )
        if step.skipped:
            self._log.event(
                "schedule:skipped", "warning", schedule=schedule.name, count=step.skipped, hint=_SKIPPED
            )

    def _tell_stuck(self, queue: str, what: str | bytes, why: str) -> None:
        name = what if isinstance(what, str) else _name_in(what)
        if (name, why) not in self._told and len(self._told) < 1000:
            self._told.add((name, why))
            self._log.event("schedule:stuck", "error", schedule=name, queue=queue, why=why, hint=_STUCK)


def _name_in(record: bytes) -> str:
    try:
        return str(msgspec.json.decode(record)["name"])
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return "?"


_SKIPPED = 'the job before has not ended: give it more time between, or overlap="allow"'
_STUCK = "this Scheduler does nothing about it; another one may"
