"""Timetable: fire the schedules that are due.

Any number of Schedulers may do this at the same time. Each reads what is due, decides what to do, and has a
script do it if the schedule is unchanged: one of them succeeds. The time is that of Redis.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import trio

from celery5.app import App
from celery5.broker.call import Call
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls import scheduling as scheduling_calls
from celery5.broker.calls.scheduling import DueSchedules, JobToSend
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.broker.transient_errors import is_outage
from celery5.errors import BrokerDenied, BrokerReplied, Corrupt, Misconfigured
from celery5.logs.log import Log
from celery5.protocol.job.messages import read_command
from celery5.protocol.observability.families import MetricFamily, make_counter
from celery5.protocol.scheduling import periodic
from celery5.protocol.scheduling.periodic import Schedule, ScheduleStep
from celery5.scheduling.fire_times import get_next_fire_time
from celery5.scheduling.schedules import make_fired_job, sending_fired
from celery5.services.process.broker_outages import OutageLog, retry_until_available

SCHEDULES_PER_CALL = 100
"""Schedules of one queue that are read in one trip."""
LOOK_AGAIN = 5.0
"""Seconds after which all schedules are read again in any case."""
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
        self._changed = trio.Event()
        self._outages = OutageLog(log, "timetable:interrupted")
        self._logged: set[tuple[str, str]] = set()
        self._registered: set[str] = set()
        # How many due schedules, the first ones of each queue, are passed over: nothing can be done about them.
        self._stuck: dict[str, int] = {}
        self._counts = {"fired": 0, "missed": 0, "skipped": 0}

    # ---- notifications, health and metrics

    @property
    def channels(self) -> list[str]:
        """Return the channels to subscribe to."""
        return [self._keys.schedule_changes]

    def on_message(self, _channel: bytes, _payload: bytes) -> None:
        """Handle a message: a schedule was added or changed."""
        self._changed.set()

    def recheck(self) -> None:
        """Check all schedules now: the listening connection is new, and messages may have been missed."""
        self._changed.set()

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
            wait = await retry_until_available(self.fire_due, self._outages, even_refused=True)
            with trio.move_on_after(wait):
                await self._changed.wait()
            self._changed = trio.Event()

    async def fire_due(self) -> float:
        """Make one pass over all queues; return the seconds until the next schedule is due."""
        wait = LOOK_AGAIN
        queues = await self._redis.perform(scheduling_calls.list_schedule_queues(self._keys))
        calls = [
            scheduling_calls.get_due_schedules(
                self._keys,
                self._app.queue(queue),
                limit=SCHEDULES_PER_CALL,
                offset=self._stuck.get(queue, 0),
            )
            for queue in queues
        ]
        replies: list[DueSchedules | str] = await self._perform(calls)
        for queue, reply in zip(queues, replies, strict=True):
            if isinstance(reply, str):
                self._log_stuck(queue, "all", reply)
                continue
            if reply.next_due_in is not None:
                wait = min(wait, reply.next_due_in)
            wait = min(wait, await self._fire(queue, reply))
        return wait

    async def _perform(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Perform all calls in one trip, and return their results.

        When the server refuses any, perform them one by one, so that a refused one does not hold up others. The
        result of a refused call is a text with the reason.
        """
        try:
            return await self._redis.perform_all(calls) if calls else []
        except (BrokerDenied, BrokerReplied) as error:
            if isinstance(error, BrokerReplied) and is_outage(error):
                raise
        return [await self._perform_alone(call) for call in calls]

    async def _perform_alone(self, call: Call[Any]) -> Any:
        try:
            return await self._redis.perform(call)
        except (BrokerDenied, BrokerReplied) as error:
            if isinstance(error, BrokerReplied) and is_outage(error):
                raise
            return str(error)

    async def _fire(self, queue: str, due_schedules: DueSchedules) -> float:
        """Process the due schedules of one queue; return when the next one is due."""
        with ExitStack() as sending:
            return await self._fire_inside(queue, due_schedules, sending)

    async def _fire_inside(self, queue: str, due_schedules: DueSchedules, sending: ExitStack) -> float:
        """Process the due schedules of one queue; enter the middleware around their jobs in `sending`."""
        wait, stuck = LOOK_AGAIN, 0
        steps: list[tuple[Schedule, ScheduleStep | None, int | None]] = []
        calls: list[Call[bool]] = []
        for record, is_busy in due_schedules.due:
            schedule = periodic.decode_schedule(record, self._app.settings.message_limit)
            step = self._plan(schedule, due_schedules.now, is_busy=is_busy)
            if schedule is None or isinstance(step, str):
                wait, stuck = min(wait, STUCK), stuck + 1
                self._log_stuck(queue, record if schedule is None else schedule.name, str(step))
                continue
            after = schedule if step is None else step.new_state
            look = after.get_next_look(due_schedules.now)
            steps.append((schedule, step, look))
            fired = self._make_jobs(schedule, step, due_schedules.now)
            jobs = sending.enter_context(sending_fired(self._app, schedule.of, fired))
            calls.append(self._make_call(queue, schedule, record, step, look, jobs))
        results = await self._perform_fires(queue, calls)
        for (schedule, step, look), result in zip(steps, results, strict=True):
            if isinstance(result, str):
                wait, stuck = min(wait, STUCK), stuck + 1
                self._log_stuck(queue, schedule.name, result)
                continue
            if look is not None:
                wait = min(wait, max(0.0, (look - due_schedules.now) / 1000))
            if step is not None and result:
                self._log_step(schedule, step, due_schedules.now)
        self._pass_over(queue, stuck, len(due_schedules.due))
        return wait

    def _pass_over(self, queue: str, stuck: int, seen: int) -> None:
        """Let the next pass begin behind the schedules that are stuck, and at the first one again after the last.

        They stay due, before those that are due later: a hundred of them would hold up all others.
        """
        is_last = seen < SCHEDULES_PER_CALL
        self._stuck[queue] = 0 if is_last else self._stuck.get(queue, 0) + stuck

    async def _perform_fires(self, queue: str, calls: Sequence[Call[bool]]) -> list[Any]:
        """Perform the calls that fire.

        The first one also registers the queue, since nobody else may publish to it.
        """
        if not calls or queue in self._registered:
            return await self._perform(calls)
        registration, *results = await self._perform([queue_calls.register_queue(self._keys, queue), *calls])
        if not isinstance(registration, str):
            self._registered.add(queue)
        return results

    def _plan(self, schedule: Schedule | None, now: int, *, is_busy: bool) -> ScheduleStep | str | None:
        """Return what to do; a text says why that cannot be decided."""
        if schedule is None:
            return "it was written by a newer version, or is larger than message_limit allows"
        try:
            step = periodic.plan_fires(
                schedule,
                now,
                is_busy=is_busy,
                find_next=get_next_fire_time,
                app=self._app.name,
                by=self._name,
            )
            if step is not None and step.fires:
                read_command(schedule.of.message.encode())  # raises when there is nothing valid to send
        except (Misconfigured, Corrupt, ValueError, OverflowError) as error:
            return str(error)
        return step

    def _make_jobs(self, schedule: Schedule, step: ScheduleStep | None, now: int) -> list[JobToSend]:
        return (
            [] if step is None else [make_fired_job(schedule.of, fire.job, now / 1000) for fire in step.fires]
        )

    def _make_call(
        self,
        queue: str,
        schedule: Schedule,
        record: bytes,
        step: ScheduleStep | None,
        look: int | None,
        jobs: Sequence[JobToSend],
    ) -> Call[bool]:
        """Return the call that fires a schedule if its record is unchanged, and stores when to read it next."""
        after = record if step is None else periodic.encode_schedule(step.new_state)
        if step is not None and schedule.origin == "runtime" and look is None:
            after = b""  # it will never fire again, and no code declares it
        keys = self._app.queue(queue).on_lane(schedule.of.lane)
        return scheduling_calls.fire_schedule(
            self._keys, keys, schedule.name, expected_state=record, new_state=after, next_look=look, jobs=jobs
        )

    # ---- logging

    def _log_step(self, schedule: Schedule, step: ScheduleStep, now: int) -> None:
        for what, count in (("fired", len(step.fires)), ("missed", step.missed), ("skipped", step.skipped)):
            self._counts[what] += count
        if step.fires:
            jobs = [fire.job for fire in step.fires]
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

    def _log_stuck(self, queue: str, what: str | bytes, why: str) -> None:
        name = what if isinstance(what, str) else _read_name(what)
        if (name, why) not in self._logged and len(self._logged) < 1000:
            self._logged.add((name, why))
            self._log.event("schedule:stuck", "error", schedule=name, queue=queue, why=why, hint=_STUCK)


def _read_name(record: bytes) -> str:
    try:
        return str(msgspec.json.decode(record)["name"])
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return "?"


_SKIPPED = 'the job before has not ended: give it more time between, or overlap="allow"'
_STUCK = "this Scheduler does nothing about it; another one may"
