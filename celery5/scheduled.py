"""Scheduled: what `app.schedule` does with the schedules that are in Redis.

Floor: domain. Reads: schedules. Writes: schedules; `triggered` sends a job, to a queue that it makes known.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from celery5.broker import calls, scheduling
from celery5.broker.absent import leaving_out, may_be_there, without_those_away
from celery5.broker.call import Call
from celery5.broker.scheduling import Sent
from celery5.connections import AwaitingRedis
from celery5.errors import Misconfigured
from celery5.fire_times import checked, following
from celery5.periodic import Declared, Periodic, declared_by, definition, parts_of
from celery5.protocol import schedules
from celery5.protocol.envelope import read_envelope
from celery5.protocol.job import new_id
from celery5.protocol.schedules import Definition, Misfire, Schedule
from celery5.protocol.triggers import shown

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.result import AsyncResult
    from celery5.task import Signature

TRIES = 20
"""Times that a change is tried which others are quicker with."""
Change = Callable[[Schedule, int], Schedule | None]
"""Gives a schedule as it is to be, None for not at all; given the time."""


class ScheduleState(msgspec.Struct, frozen=True):
    """A schedule, as `list` and `show` tell of it. Times are seconds since 1970; None where there is none.

    `state` is `active`, `paused`, `retired` (no code declares it any more) or `done` (it will not fire again). `fired`
    are fire times that were published, `missed` those that nobody published in time, `skipped` those left out because
    of the job before, `triggered` jobs sent by hand. `waiting` is a fire time that waits for the job before to end.
    """

    name: str
    task: str
    queue: str
    when: str
    state: str
    last: float | None
    next: float | None
    fired: int
    missed: int
    skipped: int
    triggered: int
    origin: str
    job: str
    waiting: float | None
    overlap: str
    misfire: Misfire
    jitter: float


def declaration(call: "Signature[Any]", how: Periodic) -> Declared:
    """A schedule that code declares. Raises Misconfigured."""
    _ = parts_of(how)
    return Declared(how.name or call.task.name, call, how)


def declarations(app: "App", by_call: "list[Declared]") -> dict[str, Declared]:
    """All that code and configuration declare, by name. Raises Misconfigured for a name that is there twice."""
    found: dict[str, Declared] = {}
    for each in declared_by(app, by_call):
        if found.setdefault(each.name, each) is not each:
            raise Misconfigured(f"two schedules are named {each.name!r}: give one of them another name")
    return found


def checked_definition(
    app: "App", call: "Signature[Any]", when: object, name: str, words: Mapping[str, Any]
) -> Definition:
    """What a call and its repetition come to. Raises Misconfigured also for a trigger that makes no sense."""
    try:
        how = Periodic(when, name, **words)
    except TypeError as error:
        raise Misconfigured(f"a schedule: {error}") from None
    of = definition(app, call, how)
    checked(of.trigger)
    return of


def job_of(of: Definition, job_id: str, now: float) -> Sent:
    """The job of one fire time, as it is sent at `now`, in seconds since 1970."""
    envelope = read_envelope(of.message.encode())
    expires = None if of.expires is None else now + of.expires
    made = msgspec.structs.replace(envelope, id=job_id, sent=now, expires=expires)
    return job_id, msgspec.json.encode(made), of.lock, of.unique_for


def told(schedule: Schedule) -> ScheduleState:
    """A schedule as people want to see it."""
    done = schedule.next is None and schedule.waiting is None
    state = "retired" if schedule.retired else "paused" if schedule.paused else "done" if done else "active"
    return ScheduleState(
        name=schedule.name,
        task=schedule.of.task,
        queue=schedule.of.queue,
        when=shown(schedule.of.trigger),
        state=state,
        last=_seconds(schedule.last),
        next=_seconds(schedule.next) if state == "active" else None,
        fired=schedule.fired,
        missed=schedule.missed,
        skipped=schedule.skipped,
        triggered=schedule.triggered,
        origin=schedule.origin,
        job=schedule.job,
        waiting=_seconds(schedule.waiting),
        overlap=schedule.of.overlap,
        misfire=schedule.of.misfire,
        jitter=schedule.of.jitter,
    )


async def all_of(app: "App", redis: AwaitingRedis) -> "list[tuple[Schedule, bytes]]":
    """All schedules in Redis that this version understands, each with its record."""
    return await without_those_away(lambda: _all_of(app, redis))


async def _all_of(app: "App", redis: AwaitingRedis) -> "list[tuple[Schedule, bytes]]":
    queues = await redis.perform(scheduling.queues(app.keys))
    found = await redis.perform_all([scheduling.records(app.keys, each) for each in queues]) if queues else []
    limit = app.settings.message_limit
    read = [(schedules.decode(record, limit), record) for each in found for record in each.values()]
    return [(schedule, record) for schedule, record in read if schedule is not None]


async def time_of(app: "App", redis: AwaitingRedis, queue: str) -> int:
    """The time by Redis, in ms since 1970."""
    return (await redis.perform(scheduling.upcoming(app.keys, app.queue(queue), limit=0))).now


async def listed(app: "App", redis: AwaitingRedis) -> "list[ScheduleState]":
    """All schedules, by name."""
    found = [told(schedule) for schedule, _ in await all_of(app, redis) if schedule.stage == "settled"]
    return sorted(found, key=lambda each: each.name)


async def found_one(app: "App", redis: AwaitingRedis, name: str) -> tuple[Schedule, bytes]:
    """One schedule and its record. Raises Misconfigured, and the error of a broker that is away when none of the others
    has it."""
    with leaving_out() as away:
        found = await without_those_away(lambda: _looked_up(app, redis, name))
        if found is not None:
            return found
        if away:
            raise may_be_there(f"schedule {name!r}", away)
        known = [each.name for each in await listed(app, redis)]
    raise Misconfigured(f"no schedule {name!r}; there are: {', '.join(known[:20]) or 'none'}")


async def _looked_up(app: "App", redis: AwaitingRedis, name: str) -> tuple[Schedule, bytes] | None:
    queues = await redis.perform(scheduling.queues(app.keys))
    asked = [scheduling.record(app.keys, each, name) for each in queues]
    for record in await redis.perform_all(asked) if asked else []:
        schedule = schedules.decode(record, app.settings.message_limit) if record else None
        if schedule is not None and schedule.stage == "settled":
            return schedule, record
    return None


async def shown_one(app: "App", redis: AwaitingRedis, name: str) -> ScheduleState:
    """One schedule. Raises Misconfigured."""
    return told((await found_one(app, redis, name))[0])


def put(
    app: "App",
    schedule: Schedule,
    record: bytes,
    after: Schedule | None,
    now: int,
    jobs: Sequence[Sent] = (),
) -> Call[bool]:
    """The trip that puts `after` (None: nothing) in the place of that very record of a schedule (b"": none), sends
    these jobs and tells the Schedulers. It gives False, and does nothing, when another record is there."""
    raw, look = (b"", None) if after is None else (schedules.encode(after), after.look(now))
    queue = app.queue(schedule.of.queue)
    if jobs:  # else its lane does not matter: one that this version does not know can be changed and removed
        queue = queue.on(schedule.of.lane)
    return scheduling.fire(
        app.keys, queue, schedule.name, before=record, after=raw, look=look, jobs=jobs, tell=True
    )


async def added(app: "App", redis: AwaitingRedis, name: str, of: Definition) -> ScheduleState:
    """Add a schedule. Raises Misconfigured for one that is there, or would never fire."""
    if any(each.name == name for each in await listed(app, redis)):
        raise Misconfigured(f"a schedule {name!r} is there already: remove it first, or give another name")
    now = await time_of(app, redis, of.queue)
    made = schedules.begun(name, of, now, following, origin="runtime")
    if made.next is None:
        raise Misconfigured(f"schedule {name!r} would never fire: {shown(of.trigger)}")
    await redis.perform(scheduling.remember(app.keys, of.queue))
    if not await redis.perform(put(app, made, b"", made, now)):
        raise Misconfigured(f"a schedule {name!r} was just added by somebody else")
    return told(made)


async def changed(app: "App", redis: AwaitingRedis, name: str, change: Change) -> ScheduleState:
    """Change a schedule, whatever others do with it meanwhile; gives it as it is then, or was. Raises Misconfigured."""
    for _ in range(TRIES):
        before, record = await found_one(app, redis, name)
        now = await time_of(app, redis, before.of.queue)
        after = change(before, now)
        if await redis.perform(put(app, before, record, after, now)):
            return told(before if after is None else after)
    raise Misconfigured(f"schedule {name!r} changes too quickly: try again")


async def triggered(app: "App", redis: AwaitingRedis, name: str) -> "AsyncResult[Any]":
    """Send a job of a schedule now. Raises Misconfigured."""
    job = new_id()
    for _ in range(TRIES):
        before, record = await found_one(app, redis, name)
        now = await time_of(app, redis, before.of.queue)
        after, sent = schedules.triggered(before, job), job_of(before.of, job, time.time())
        trips = [calls.announce(app.keys, before.of.queue), put(app, before, record, after, now, [sent])]
        _, done = await redis.perform_all(trips)
        if done:
            return app.result(job, queue=before.of.queue)
    raise Misconfigured(f"schedule {name!r} changes too quickly: try again")


def pause(schedule: Schedule, _now: int) -> Schedule:
    """The change that pauses."""
    return schedules.paused(schedule)


def resume(schedule: Schedule, now: int) -> Schedule:
    """The change that resumes."""
    return schedules.resumed(schedule, now, following)


def remove(_schedule: Schedule, _now: int) -> None:
    """The change that removes."""


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000
