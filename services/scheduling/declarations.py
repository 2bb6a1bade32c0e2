"""Declarations: bring the schedules in Redis in line with what the code of this Scheduler declares.

During a deployment old and new code run side by side. The newer one counts: the higher `schedules_version`, and of
equal ones the Scheduler that began later. A schedule is retired when the code of no live Scheduler has declared it for
a while, by a Scheduler that is newer than the one that declared it last.
"""

from collections.abc import Mapping

import msgspec
import trio

from celery5.app import App
from celery5.broker.calls import scheduling as scheduling_calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.process.liveness import Heartbeats
from celery5.protocol.scheduling import periodic
from celery5.protocol.scheduling.periodic import RETIRED_TTL_MS, Schedule, ScheduleDefinition
from celery5.protocol.scheduling.triggers import describe_trigger
from celery5.scheduling.fire_times import get_next_fire_time
from celery5.scheduling.schedules import (
    DeclaredSchedule,
    get_broker_time,
    make_definition,
    read_schedules,
    replace_schedule,
)
from celery5.services.process.broker_outages import RETRY_INTERVAL, OutageLog, last_try
from celery5.services.scheduling.queue_moves import ScheduleMoveBlocked, ScheduleMover, ScheduleNotOwned
from celery5.services.scheduling.timetable import Timetable

DECLARATION_LEASES = 3
"""Leases for which a Scheduler's declaration is kept."""
RETIREMENT_GRACE_LEASES = 2.0
"""Leases without a declaration after which a schedule is retired: its Scheduler may be restarting."""
RETIREMENT_CHECK_INTERVAL = 30.0
"""Seconds between checks for undeclared schedules, while the set of live Schedulers is unchanged."""


class ScheduleDeclarations:
    """The schedules that the code of one Scheduler declares."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        app: App,
        keys: Keys,
        worker: str,
        lease_seconds: float,
        log: Log,
        other_brokers: Mapping[str, AsyncDriver],
        broker: str = DEFAULT_BROKER,
    ) -> None:
        self._redis = redis
        self._app = app
        self._keys = keys
        self._name = worker
        self._broker = broker
        self._lease = lease_seconds
        self._log = log
        self._names: tuple[str, ...] = ()
        self._stamp = (0, 0)
        self._live_schedulers: tuple[str, ...] = ()
        self._presence_renewed = trio.Event()
        self._due = 0.0
        self._heartbeats = Heartbeats(lease=lease_seconds)
        self._orphans: dict[str, float] = {}
        self._outages = OutageLog(log, "declarations:interrupted", level="debug", logs_repeats=True)
        self._mover = ScheduleMover(redis=redis, other_brokers=other_brokers, app=app, keys=keys)
        self._held: dict[str, Schedule] = {}

    def set_live_schedulers(self, schedulers: tuple[str, ...]) -> None:
        """Take the names of the Schedulers that are alive."""
        now = trio.current_time()
        self._heartbeats = self._heartbeats.with_answer(now, at=now)
        if schedulers != self._live_schedulers:
            self._live_schedulers, self._due = schedulers, 0.0
        self._presence_renewed.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Declare schedules, and retire undeclared ones, until cancelled."""
        await self.declare()
        task_status.started()
        try:
            while True:
                await self._presence_renewed.wait()
                self._presence_renewed = trio.Event()
                with self._outages.suppressing():
                    await self.renew_declaration()
                    await self._settle_held()
                    if trio.current_time() >= self._due or self._orphans:
                        await self.retire_undeclared()
        finally:
            with last_try(self._log, "declarations:leave-failed"):
                await self._redis.perform(scheduling_calls.withdraw_declaration(self._keys, self._name))

    async def declare(self) -> None:
        """Store every schedule that the code declares for queues on this broker."""
        declared: dict[str, tuple[DeclaredSchedule, ScheduleDefinition]] = {}
        for name, declaration in self._app.schedule.list_declared().items():
            definition = make_definition(self._app, declaration.call, declaration.periodic)
            if self._app.brokers.broker_of_queue(definition.queue) == self._broker:
                declared[name] = (declaration, definition)
        self._names = tuple(sorted(declared))
        await self.renew_declaration()
        now = await get_broker_time(self._app, self._redis, self._app.settings.default_queue)
        self._stamp = (self._app.settings.schedules_version, now)
        for name, (declaration, definition) in declared.items():
            new = periodic.make_schedule(
                name, definition, now, get_next_fire_time, origin=declaration.origin, stamp=self._stamp
            )
            if new.next is None and get_next_fire_time(definition.trigger, 0) is None:
                when = describe_trigger(definition.trigger)
                self._log.event(
                    "schedule:fire-time-not-found", "error", schedule=name, when=when, hint=_NEVER
                )
            await self._settle(new, now)

    async def renew_declaration(self) -> None:
        """Renew for some leases which schedules the code declares."""
        names = msgspec.json.encode(self._names)
        await self._redis.perform(
            scheduling_calls.declare_schedules(
                self._keys, self._name, names, lease=DECLARATION_LEASES * self._lease
            )
        )

    async def retire_undeclared(self) -> None:
        """Retire undeclared schedules, and delete those that were retired long ago."""
        # Read before the calls: their replies may come after an outage and describe the time before it.
        checked_at = trio.current_time()
        self._due = checked_at + RETIREMENT_CHECK_INTERVAL
        schedulers = self._live_schedulers or (self._name,)
        declarations = await self._redis.perform(scheduling_calls.get_declarations(self._keys, schedulers))
        if None in declarations:
            return  # one of them has not declared yet
        declared_names = {
            name
            for names in declarations
            if names is not None
            for name in msgspec.json.decode(names, type=list[str])
        }
        now = await get_broker_time(self._app, self._redis, self._app.settings.default_queue)
        orphans: dict[str, float] = {}
        for schedule, record in await read_schedules(self._app, self._redis):
            if schedule.retired is not None and now - schedule.retired > RETIRED_TTL_MS:
                await self._put(schedule, record, None, now)
            retired = periodic.retire_schedule(schedule, now, stamp=self._stamp)
            if schedule.name in declared_names or retired is None:
                continue
            # In an outage all leases lapse, so the time until then does not count as time without a declaration.
            since = max(self._orphans.get(schedule.name, checked_at), self._heartbeats.steady_since)
            orphans[schedule.name] = since
            if checked_at - since >= RETIREMENT_GRACE_LEASES * self._lease and await self._put(
                schedule, record, retired, now
            ):
                del orphans[schedule.name]
                self._log.event("schedule:removed", "info", schedule=schedule.name, hint=_RETIRED)
        self._orphans = orphans

    async def _settle(self, new: Schedule, now: int) -> None:
        """Settle one schedule as the code declares it, despite concurrent changes."""
        try:
            old = await self._mover.apply(new, now)
        except ScheduleNotOwned as error:
            self._log_overridden(error.schedule)
        except ScheduleMoveBlocked as error:
            if new.name not in self._held:
                self._log.event("schedule:delayed", "warning", schedule=new.name, why=str(error), hint=_HELD)
            self._held[new.name] = new
            return
        else:
            self._log_change(old, new)
        self._held.pop(new.name, None)

    async def _settle_held(self) -> None:
        """Settle the schedules that could not be settled while a broker was unreachable."""
        if self._held:
            now = await get_broker_time(self._app, self._redis, self._app.settings.default_queue)
            for new in list(self._held.values()):
                await self._settle(new, now)

    def _log_change(self, old: Schedule | None, new: Schedule) -> None:
        what = "added" if old is None else "changed" if old.of != new.of else "declared"
        self._log.event(f"schedule:{what}", "debug" if what == "declared" else "info", schedule=new.name)

    def _log_overridden(self, old: Schedule | None) -> None:
        if old is not None and old.origin == "runtime":
            self._log.event("schedule:overridden", "warning", schedule=old.name, hint=_SHADOWED)

    async def _put(self, schedule: Schedule, record: bytes, after: Schedule | None, now: int) -> bool:
        done: bool = await self._redis.perform(replace_schedule(self._app, schedule, record, after, now))
        return done


class RemoteBrokerSchedules:
    """Declares and fires the schedules whose queues are on one further broker, whenever that is reachable.

    A schedule is stored beside its queue, so that firing it is one atomic step on every broker. An unreachable broker
    holds up no schedule of another one.
    """

    def __init__(
        self, *, broker: str, declarations: ScheduleDeclarations, timetable: Timetable, log: Log
    ) -> None:
        self._declarations = declarations
        self._timetable = timetable
        self._outages = OutageLog(log, "schedules:interrupted", logs_repeats=True, broker=broker)

    def set_live_schedulers(self, schedulers: tuple[str, ...]) -> None:
        """Take the names of the Schedulers that are alive."""
        self._declarations.set_live_schedulers(schedulers)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Declare and fire until cancelled."""
        task_status.started()
        while True:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._timetable.run)
                    await nursery.start(self._declarations.run)
                    self._outages.record_recovery()
            except* (BrokerUnavailable, BrokerReplied) as errors:
                self._outages.record_error(errors.exceptions[0])
            await trio.sleep(RETRY_INTERVAL)


_HELD = "it fires when that is known, so that it does not on two brokers"
_NEVER = "there is no such time: it will never fire"
_RETIRED = "the code of no live Scheduler declares it; it comes back as it was when some does"
_SHADOWED = "a schedule of this name was added by hand: remove it, and the one in code counts"
