"""Move a schedule to the queue that its code declares, without ever firing it on two queues.

Each queue has its own record for a schedule of this name, and only a record in the stage `settled` fires. To move
a schedule, a Scheduler

1. writes a record in the stage `arriving` on the wanted queue;
2. reads the records on all queues, and puts each other one in the stage `resting`, in which it does not fire;
3. copies what a newer resting record has fired into its own, and deletes the resting one;
4. settles its own record, once it is the only one.

Each step is applied only if the record is still the one that was read. Of two Schedulers that move a schedule at once,
at least one reads the other's record, and the newer one wins. A Scheduler that dies between two steps leaves no record
that fires, and the next one continues from there.
"""

from collections.abc import Mapping, Sequence
from math import inf

import msgspec
import trio
from msgspec.structs import replace

from celery5.app import App
from celery5.broker.calls import scheduling as scheduling_calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerError
from celery5.protocol.scheduling import periodic
from celery5.protocol.scheduling.periodic import Schedule
from celery5.scheduling.fire_times import get_next_fire_time
from celery5.scheduling.schedules import replace_schedule

MAX_ATTEMPTS = 20
"""Attempts at a change that others make at the same time."""
UNREACHABLE_RETRY_DELAY = 5.0
"""Seconds in which no call is made to a broker that was unreachable.

A call may last until its timeout, and hundreds of schedules may need one.
"""


class ScheduleMoveBlocked(Exception):
    """The schedule cannot be settled yet, so it does not fire on this queue.

    A broker that may have a record is unreachable, other Schedulers keep changing it, or newer code has written it.
    """


class ScheduleNotOwned(Exception):
    """The schedule is not this Scheduler's: it was added by hand, or declared by newer code."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        super().__init__(schedule.name)


class _StoredSchedule(msgspec.Struct, frozen=True):
    """A schedule as it was read: decoded, as the bytes that a change must replace, and its broker's driver."""

    redis: AsyncDriver
    schedule: Schedule
    record: bytes


class _StoredRecords(msgspec.Struct):
    """The records of one schedule name on all queues."""

    # The one on the wanted queue; None while there is none.
    wanted: _StoredSchedule | None = None
    # Those on other queues.
    others: list[_StoredSchedule] = msgspec.field(default_factory=list[_StoredSchedule])
    # Brokers that did not reply.
    unreachable: list[str] = msgspec.field(default_factory=list[str])


class ScheduleMover:
    """Settles schedules on one broker, `redis`. `other_brokers` are the drivers of the others, by name."""

    def __init__(
        self, *, redis: AsyncDriver, other_brokers: Mapping[str, AsyncDriver], app: App, keys: Keys
    ) -> None:
        self._redis = redis
        self._other_brokers = other_brokers
        self._app = app
        self._keys = keys
        self._unreachable_until: dict[str, float] = {}

    async def apply(self, new: Schedule, now: int) -> Schedule | None:
        """Store a schedule as the code declares it, and return what it was before.

        Raises:
            ScheduleNotOwned: It is not this Scheduler's.
            ScheduleMoveBlocked: It cannot be settled yet.
            BrokerError: This broker is unreachable, or has refused a call.
        """
        await self._redis.perform(scheduling_calls.register_schedule_queue(self._keys, new.of.queue))
        # Again when another Scheduler has changed it in the meantime.
        for _ in range(MAX_ATTEMPTS):
            stored = await self._read_all(new)
            self._check_ownership(stored, new, now)
            wanted = stored.wanted
            if (wanted is None or wanted.schedule.stage != "settled") and stored.unreachable:
                names = ", ".join(stored.unreachable)
                raise ScheduleMoveBlocked(f"it may still be on broker {names}, which is unreachable")
            if wanted is not None and stored.others:
                await self._remove_others(stored.others, wanted, now)
            elif wanted is None:
                source = stored.others[0].schedule if stored.others else new
                await self._write_arriving(new, b"", source, now)
            elif wanted.schedule.stage == "resting":
                await self._write_arriving(new, wanted.record, wanted.schedule, now)
            elif (settled := _make_settled(wanted.schedule, new, now)) is None:
                raise ScheduleNotOwned(wanted.schedule)
            elif await self._redis.perform(replace_schedule(self._app, new, wanted.record, settled, now)):
                return wanted.schedule
        raise ScheduleMoveBlocked(f"others have changed it {MAX_ATTEMPTS} times meanwhile")

    def _check_ownership(self, stored: _StoredRecords, new: Schedule, now: int) -> None:
        """Raise ScheduleNotOwned if a record that may fire on another queue may not be replaced."""
        for other in stored.others:
            if (
                other.schedule.stage != "resting"
                and periodic.merge_declaration(other.schedule, new, now, get_next_fire_time) is None
            ):
                raise ScheduleNotOwned(other.schedule)

    async def _write_arriving(self, schedule: Schedule, record: bytes, source: Schedule, now: int) -> None:
        """Replace `record` on the queue of `schedule` by an arriving one that continues `source`."""
        arriving = _make_arriving(source, schedule.of.queue)
        await self._redis.perform(replace_schedule(self._app, schedule, record, arriving, now))

    async def _remove_others(
        self, others: Sequence[_StoredSchedule], wanted: _StoredSchedule, now: int
    ) -> None:
        """Make one step with each other record: put it to rest, take over what it has fired, or delete it."""
        for other in others:
            is_resting = other.schedule.stage == "resting"
            is_newer = wanted.schedule.stage != "settled" and other.schedule.rev > wanted.schedule.rev
            if is_resting and is_newer:
                await self._write_arriving(wanted.schedule, wanted.record, other.schedule, now)
                continue
            after = None if is_resting else _make_resting(other.schedule)
            try:
                await other.redis.perform(
                    replace_schedule(self._app, other.schedule, other.record, after, now)
                )
            except BrokerError as error:
                if other.redis is self._redis:
                    raise
                raise ScheduleMoveBlocked(f"the broker that it was on is unreachable: {error}") from None

    async def _read_all(self, new: Schedule) -> _StoredRecords:
        """Read the records of this name on all queues of all brokers."""
        stored = _StoredRecords()
        for record in await self._read_records(self._redis, new.name):
            if record.schedule.of.queue == new.of.queue:
                stored.wanted = record
            else:
                stored.others.append(record)
        for broker, redis in self._other_brokers.items():
            try:
                if trio.current_time() < self._unreachable_until.get(broker, -inf):
                    stored.unreachable.append(broker)
                else:
                    stored.others += await self._read_records(redis, new.name)
            except BrokerError:
                self._unreachable_until[broker] = trio.current_time() + UNREACHABLE_RETRY_DELAY
                stored.unreachable.append(broker)
        return stored

    async def _read_records(self, redis: AsyncDriver, name: str) -> list[_StoredSchedule]:
        """Read the records of this name on all queues of one broker."""
        queues = await redis.perform(scheduling_calls.list_schedule_queues(self._keys))
        calls = [scheduling_calls.get_schedule(self._keys, queue, name) for queue in queues]
        records: list[bytes] = await redis.perform_all(calls) if calls else []
        stored: list[_StoredSchedule] = []
        for record in filter(None, records):
            schedule = periodic.decode_schedule(record, self._app.settings.message_limit)
            if schedule is None:
                raise ScheduleMoveBlocked(
                    "its record was written by a newer version, or is larger than message_limit allows"
                )
            stored.append(_StoredSchedule(redis, schedule, record))
        return stored


def _make_settled(old: Schedule, new: Schedule, now: int) -> Schedule | None:
    """Return what the only record of a schedule becomes; None if it may not be replaced.

    An arriving record that this Scheduler has written itself already is as declared, and becomes settled.
    """
    settled = periodic.merge_declaration(old, new, now, get_next_fire_time)
    if settled is None and old.stage == "arriving" and old.origin != "runtime" and old.stamp == new.stamp:
        return replace(old, rev=old.rev + 1, stage="settled")
    return settled


def _make_resting(schedule: Schedule) -> Schedule:
    """Return the next revision of a schedule, in which it does not fire."""
    return replace(schedule, rev=schedule.rev + 1, stage="resting")


def _make_arriving(source: Schedule, queue: str) -> Schedule:
    """Return the next revision of a schedule on `queue`, in which it does not fire yet.

    From another queue it does not keep its last job, which stays on that queue, nor a fire time that waits for its end.
    """
    is_same_queue = source.of.queue == queue
    return replace(
        source,
        of=replace(source.of, queue=queue),
        rev=source.rev + 1,
        stage="arriving",
        waiting=source.waiting if is_same_queue else None,
        job=source.job if is_same_queue else "",
    )
