"""Queue moves: move a schedule to the queue that its code declares, without ever firing on both.

Only a settled record fires. A Scheduler that wants the schedule on another queue first writes an arriving
record there. Then it reads all queues, makes each other record rest, takes over what that has fired, and
removes it. Only then does it settle its own record. Each step applies only to the very record that was read. Of
two Schedulers that do this at once, at least one sees the other, and the newer one wins. One that dies in
between leaves no record that fires, and the next one continues from there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

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

TRIES = 20
"""Attempts at a change that others make at the same time."""
UNREACHABLE_RETRY_DELAY = 5.0
"""Seconds for which an unreachable broker is not asked again.

An attempt may last until its time limit, and hundreds of schedules may ask.
"""


class ScheduleMoveBlocked(Exception):
    """The schedule cannot be settled yet, so it does not fire here.

    A broker that may have it is unreachable, others change it all the time, or a newer version has it.
    """


class ScheduleNotOwned(Exception):
    """The schedule is not this Scheduler's: it was added by hand, or declared by newer code."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        super().__init__(schedule.name)


@dataclass(slots=True)
class _Seen:
    """The record on the wanted queue, the records on other queues, and the brokers that did not answer."""

    here: tuple[Schedule, bytes] | None = None
    others: list[tuple[AsyncDriver, Schedule, bytes]] = field(
        default_factory=list[tuple[AsyncDriver, Schedule, bytes]]
    )
    away: list[str] = field(default_factory=list[str])


class ScheduleMover:
    """Settles schedules on one broker, `redis`. `other_brokers` are the drivers of the others, by name."""

    def __init__(
        self, *, redis: AsyncDriver, other_brokers: Mapping[str, AsyncDriver], app: App, keys: Keys
    ) -> None:
        self._redis = redis
        self._others = other_brokers
        self._app = app
        self._keys = keys
        self._away: dict[str, float] = {}

    async def apply(self, new: Schedule, now: int) -> Schedule | None:
        """Make a schedule what the code declares; return what it was before.

        Raises ScheduleNotOwned, ScheduleMoveBlocked and BrokerError.
        """
        await self._redis.perform(scheduling_calls.register_schedule_queue(self._keys, new.of.queue))
        for _ in range(TRIES):
            seen = await self._look(new)
            for _redis, other, _record in seen.others:
                if (
                    other.stage != "resting"
                    and periodic.merge_declaration(other, new, now, get_next_fire_time) is None
                ):
                    raise ScheduleNotOwned(other)
            old, record = seen.here or (None, b"")
            if (old is None or old.stage != "settled") and seen.away:
                raise ScheduleMoveBlocked(f"it may still be on broker {', '.join(seen.away)}, which is away")
            if old is not None and seen.others:
                await self._take_over(seen, old, record, now)
            elif old is None or old.stage == "resting":
                found = old or (seen.others[0][1] if seen.others else new)
                await self._redis.perform(
                    replace_schedule(self._app, new, record, _arriving(found, new), now)
                )
            elif (after := _settled(old, new, now)) is None:
                raise ScheduleNotOwned(old)
            elif await self._redis.perform(replace_schedule(self._app, new, record, after, now)):
                return old
        raise ScheduleMoveBlocked(f"others have changed it {TRIES} times meanwhile")

    async def _take_over(self, seen: _Seen, here: Schedule, record: bytes, now: int) -> None:
        """Make one step towards having the only record.

        What a newer record has fired is taken over before its removal.
        """
        for redis, other, there in seen.others:
            rests = other.stage == "resting"
            if rests and here.stage != "settled" and other.rev > here.rev:
                await self._redis.perform(
                    replace_schedule(self._app, here, record, _arriving(other, here), now)
                )
                continue
            try:
                after = None if rests else _resting(other)
                await redis.perform(replace_schedule(self._app, other, there, after, now))
            except BrokerError as error:
                if redis is self._redis:
                    raise
                raise ScheduleMoveBlocked(f"the broker that it was on is away: {error}") from None

    async def _look(self, new: Schedule) -> _Seen:
        """Read the records of this name on all queues of all brokers."""
        seen = _Seen()
        for schedule, record in await self._records(self._redis, new.name):
            if schedule.of.queue == new.of.queue:
                seen.here = schedule, record
            else:
                seen.others.append((self._redis, schedule, record))
        for broker, redis in self._others.items():
            try:
                if trio.current_time() < self._away.get(broker, -inf):
                    seen.away.append(broker)
                else:
                    seen.others += [(redis, *each) for each in await self._records(redis, new.name)]
            except BrokerError:
                self._away[broker] = trio.current_time() + UNREACHABLE_RETRY_DELAY
                seen.away.append(broker)
        return seen

    async def _records(self, redis: AsyncDriver, name: str) -> list[tuple[Schedule, bytes]]:
        queues = await redis.perform(scheduling_calls.list_schedule_queues(self._keys))
        asked = [scheduling_calls.get_schedule(self._keys, each, name) for each in queues]
        found: list[bytes] = await redis.perform_all(asked) if asked else []
        read = list[tuple[Schedule, bytes]]()
        for record in filter(None, found):
            schedule = periodic.decode_schedule(record, self._app.settings.message_limit)
            if schedule is None:
                raise ScheduleMoveBlocked(
                    "its record was written by a newer version, or is larger than message_limit allows"
                )
            read.append((schedule, record))
        return read


def _settled(old: Schedule, new: Schedule, now: int) -> Schedule | None:
    """Return what the only record becomes; None when it stays.

    A record that was written here as arriving has arrived.
    """
    after = periodic.merge_declaration(old, new, now, get_next_fire_time)
    if after is None and old.stage == "arriving" and old.origin != "runtime" and old.stamp == new.stamp:
        return replace(old, rev=old.rev + 1, stage="settled")
    return after


def _resting(found: Schedule) -> Schedule:
    """Return the record as resting: it does not fire any more."""
    return replace(found, rev=found.rev + 1, stage="resting")


def _arriving(found: Schedule, wanted: Schedule) -> Schedule:
    """Return the record as arriving at the wanted queue."""
    of, queue = found.of, wanted.of.queue
    stays = of.queue == queue
    return replace(
        found,
        of=replace(of, queue=queue),
        rev=found.rev + 1,
        stage="arriving",
        waiting=found.waiting if stays else None,
        job=found.job if stays else "",
    )
