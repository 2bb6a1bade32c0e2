"""Schedules: what is known of a periodic task, and what is to be done about it now.

A schedule is one value, kept in Redis. `due` is the whole decision: given the schedule, the time by Redis and whether
its last job is still there, it gives the fire times to publish and the schedule as it is after that. Whoever gets to
put that in the place of the former, atomically, has fired: any number may try. Times are ms since 1970.
"""

from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Literal

import msgspec
from msgspec.structs import replace

from celery5.errors import Misconfigured
from celery5.protocol.job.envelope import refuse_oversized
from celery5.protocol.scheduling.triggers import AnyTrigger

MAX_FIRES_PER_STEP = 100
"""Jobs of one schedule that are published in one step at most; others follow at once."""
MAX_COUNTED_MISSES = 1000
"""Missed fire times that are counted one by one before the count is given up, and only said to be more."""
MAX_CAUGHT_UP = 1000
"""The highest cap of a misfire policy."""
RECHECK_MS = 250
"""Ms after which a fire that waits for the job before it is looked at again."""
RETIRED_TTL_MS = 7 * 24 * 3600 * 1000
"""Ms for which a retired schedule is kept, in case that it is declared again."""

MisfirePolicy = Literal["skip", "once", "catch-up"]
OverlapPolicy = Literal["allow", "skip", "queue"]
ScheduleOrigin = Literal["code", "configuration", "runtime"]
MoveStage = Literal["settled", "arriving", "resting"]
"""How far a record is with moving to another queue. `settled`: it is where it should be. `arriving`: it is, and others
may still be elsewhere. `resting`: it is one of those others. Only a settled one fires."""
FindNextFireTime = Callable[[AnyTrigger, int], int | None]
"""Gives the first fire time of a trigger after another."""


class Misfire(msgspec.Struct, frozen=True, omit_defaults=True):
    """What becomes of fire times that nobody published in time, since no Scheduler was there or Redis was away.

    One is late `after` so many seconds; up to then it is published as if nothing had been. Late ones are not made up
    for (`skip`), by the latest of them alone, unless another one is due anyway (`once`), or by each (`catch-up`), but
    for those older than `limit` seconds (None: however old), and by the `most` latest of them.
    """

    policy: MisfirePolicy = "once"
    after: float = 60.0
    limit: float | None = 86400.0
    most: int = 100

    def validate(self) -> "Misfire":
        """Itself. Raises Misconfigured."""
        if self.policy not in ("skip", "once", "catch-up"):
            raise Misconfigured(f"misfire policy {self.policy!r} is not known: skip, once or catch-up")
        if not self.after >= 0 or (self.limit is not None and not self.limit >= 0):
            raise Misconfigured("misfire times are seconds, 0 or more")
        if not 1 <= self.most <= MAX_CAUGHT_UP:
            raise Misconfigured(
                f"a misfire policy makes up for 1 to {MAX_CAUGHT_UP} fire times, not for {self.most}"
            )
        return self


class ScheduleDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    """What somebody said of a schedule: what is sent, to which queue, and when. The `message` is a job's, but for its
    id and its times. A job `expires` so many seconds after it was sent. Each fire is put off by up to `jitter`
    seconds."""

    task: str
    queue: str
    trigger: AnyTrigger
    message: str
    expires: float | None = None
    lane: str = ""
    lock: str = ""
    unique_for: float | None = None
    jitter: float = 0.0
    misfire: Misfire = Misfire()
    overlap: OverlapPolicy = "allow"


class Schedule(msgspec.Struct, frozen=True, omit_defaults=True):
    """A schedule as it is kept. `stamp` says who declared it last: the version of their code, and when they began.
    `next` is the next fire time, `last` the last one that was published, as the job `job`; `waiting` is one that waits
    for that job to end. `retired` is when the last code that declared it was gone; `stage` says how far it is
    with moving to another queue, `by` who wrote this, so that no two write the same."""

    name: str
    of: ScheduleDefinition
    origin: ScheduleOrigin = "runtime"
    stamp: tuple[int, int] = (0, 0)
    rev: int = 0
    next: int | None = None
    last: int | None = None
    job: str = ""
    waiting: int | None = None
    paused: bool = False
    retired: int | None = None
    fired: int = 0
    missed: int = 0
    skipped: int = 0
    triggered: int = 0
    stage: MoveStage = "settled"
    by: str = ""

    @property
    def is_active(self) -> bool:
        """Whether it fires at all."""
        return not self.paused and self.retired is None and self.stage == "settled"

    def get_next_look(self, now: int) -> int | None:
        """When to look at it next; None for never."""
        if not self.is_active:
            return None
        times = [] if self.next is None else [self.next + get_jitter(self, self.next)]
        return min([*times, *([] if self.waiting is None else [now + RECHECK_MS])], default=None)


class ScheduledFire(msgspec.Struct, frozen=True):
    """A fire time to publish, and the id of its job."""

    at: int
    job: str


class ScheduleStep(msgspec.Struct, frozen=True):
    """What is to be done: publish `fires`, and keep `after`. `missed` and `skipped` are fire times that are not
    published: too late, or because of the job before. With `more` there were more that were missed than were
    counted."""

    fires: tuple[ScheduledFire, ...]
    new_state: Schedule
    missed: int = 0
    skipped: int = 0
    has_more_missed: bool = False


def plan_fires(
    schedule: Schedule, now: int, *, is_busy: bool, find_next: FindNextFireTime, app: str = "", by: str = ""
) -> ScheduleStep | None:
    """What is to be done about a schedule now; None when there is nothing. `busy`: its last job has not ended."""
    if not schedule.is_active:
        return None
    seen = _seen(schedule, now, find_next)
    made_up = _made_up(schedule.of.misfire, now, seen)
    chosen = [*made_up, *seen.on_time]
    publish, waiting, skipped = _without_overlap(schedule, chosen, busy=is_busy)
    if not publish and seen.next == schedule.next and waiting == schedule.waiting:
        return None
    fires = tuple(ScheduledFire(at, make_fire_job_id(app, schedule.name, at)) for at in publish)
    missed = seen.late_count - len(made_up)
    after = replace(
        schedule,
        rev=schedule.rev + 1,
        next=seen.next,
        last=publish[-1] if publish else schedule.last,
        job=fires[-1].job if fires else schedule.job,
        waiting=waiting,
        fired=schedule.fired + len(fires),
        missed=schedule.missed + missed,
        skipped=schedule.skipped + skipped,
        by=by,
    )
    return ScheduleStep(fires, after, missed, skipped, seen.more)


class _Seen(msgspec.Struct):
    """The fire times that have come: those in time, the latest of the late ones, how many of those there were, whether
    there were more, and the next one that has not come, or not been looked at."""

    on_time: list[int]
    late: deque[int]
    late_count: int
    more: bool
    next: int | None


def _seen(schedule: Schedule, now: int, following: FindNextFireTime) -> _Seen:
    trigger, misfire = schedule.of.trigger, schedule.of.misfire
    patience = int(misfire.after * 1000)
    seen = _Seen([], deque(maxlen=misfire.most), 0, False, schedule.next)
    counted = 0
    while (at := seen.next) is not None and len(seen.on_time) < MAX_FIRES_PER_STEP:
        put = at + get_jitter(schedule, at)
        if put > now:
            break
        if now - put > patience:
            seen.late.append(at)
            seen.late_count += 1
        else:
            seen.on_time.append(at)
        counted += 1
        if (
            counted % MAX_COUNTED_MISSES == 0 and now - put > patience
        ):  # so many: nobody needs to have seen each of them
            seen.more = True
            at += (now - patience - put) // 2
        seen.next = following(trigger, at)
    return seen


def _made_up(misfire: Misfire, now: int, seen: _Seen) -> list[int]:
    """Which of the late ones are published after all."""
    if misfire.policy == "skip":
        return []
    late = [at for at in seen.late if misfire.limit is None or now - at <= misfire.limit * 1000]
    if misfire.policy == "once":
        return [] if seen.on_time else late[-1:]
    return late


def _without_overlap(
    schedule: Schedule, chosen: list[int], *, busy: bool
) -> tuple[list[int], int | None, int]:
    """Which of the `chosen` are published, which one waits, and how many are left out."""
    match schedule.of.overlap:
        case "allow":
            return chosen, None, 0
        case "skip":
            publish = [] if busy else chosen[:1]
            return publish, None, len(chosen) - len(publish)
        case "queue":
            line = [*([] if schedule.waiting is None else [schedule.waiting]), *chosen]
            publish = [] if busy else line[:1]
            left = line[len(publish) :]
            return publish, left[0] if left else None, max(0, len(left) - 1)


def get_jitter(schedule: Schedule, at: int) -> int:
    """For how many ms a fire is put off: the same for everybody who asks."""
    most = int(schedule.of.jitter * 1000)
    if not most:
        return 0
    return int.from_bytes(sha256(f"{schedule.name}\0{at}".encode()).digest()[:8]) % (most + 1)


def make_fire_job_id(app: str, name: str, at: int) -> str:
    """The id of the job of one fire time: always the same, so that it cannot run twice."""
    made = urlsafe_b64encode(sha256(f"{app}\0{name}\0{at}".encode()).digest()[:17]).decode()[:22]
    return made if made[0] != "-" else f"_{made[1:]}"


def make_schedule(
    name: str,
    definition: ScheduleDefinition,
    now: int,
    find_next: FindNextFireTime,
    *,
    origin: ScheduleOrigin,
    stamp: tuple[int, int] = (0, 0),
) -> Schedule:
    """A new schedule: it fires at the first of its times that is still to come."""
    return Schedule(name, definition, origin, stamp, next=find_next(definition.trigger, now))


def merge_declaration(
    old: Schedule | None, new: Schedule, now: int, find_next: FindNextFireTime
) -> Schedule | None:
    """What becomes of a schedule that is declared again, by `new`; None when it stays as it is.

    A newer stamp wins. What it has fired is not forgotten; its next fire time stays, unless the trigger is another.
    """
    if old is None:
        return new
    if old.origin == "runtime" or old.stamp > new.stamp:
        return None  # whoever added it by hand, or declares it in newer code, has the last word
    same = (old.of, old.origin, old.retired) == (new.of, new.origin, None)
    if same and old.stamp == new.stamp:
        return None
    moves = old.of.trigger != new.of.trigger or old.retired is not None
    return replace(
        old,
        of=new.of,
        origin=new.origin,
        stamp=new.stamp,
        rev=old.rev + 1,
        retired=None,
        stage="settled",
        waiting=old.waiting if new.of.overlap == "queue" else None,
        next=find_next(new.of.trigger, max(now, old.last or 0)) if moves else old.next,
    )


def retire_schedule(schedule: Schedule, now: int, *, stamp: tuple[int, int]) -> Schedule | None:
    """A schedule that no live code declares any more, as somebody with that `stamp` finds; None when it stays: it was
    not declared by code, or by newer code than theirs, which they cannot know."""
    if schedule.origin == "runtime" or schedule.retired is not None or schedule.stamp >= stamp:
        return None
    return replace(schedule, rev=schedule.rev + 1, retired=now, waiting=None)


def pause_schedule(schedule: Schedule) -> Schedule:
    """The same, paused: no fire time counts as missed meanwhile."""
    return schedule if schedule.paused else replace(schedule, rev=schedule.rev + 1, paused=True, waiting=None)


def resume_schedule(schedule: Schedule, now: int, find_next: FindNextFireTime) -> Schedule:
    """The same, going on with the first fire time that is still to come."""
    if not schedule.paused:
        return schedule
    return replace(
        schedule,
        rev=schedule.rev + 1,
        paused=False,
        next=find_next(schedule.of.trigger, max(now, schedule.last or 0)),
    )


def record_trigger(schedule: Schedule, job: str) -> Schedule:
    """The same, after a job was sent by hand."""
    return replace(schedule, rev=schedule.rev + 1, job=job, triggered=schedule.triggered + 1)


def iterate_fire_times(trigger: AnyTrigger, after: int, find_next: FindNextFireTime) -> Iterator[int]:
    """The fire times of a trigger from a time on."""
    at = find_next(trigger, after)
    while at is not None:
        yield at
        at = find_next(trigger, at)


_DECODER = msgspec.json.Decoder(Schedule)
_ENCODER = msgspec.json.Encoder()


def encode_schedule(schedule: Schedule) -> bytes:
    """A schedule as it is kept."""
    return _ENCODER.encode(schedule)


def decode_schedule(record: bytes, limit: int | None = None) -> Schedule | None:
    """A schedule that was kept; None for one that newer code has written, which is to be left alone, and for one that
    is larger than `limit` (the setting `message_limit`) allows: its message is JSON within JSON, and may be doubled."""
    try:
        refuse_oversized(record, None if limit is None else 2 * limit, "a schedule")
        return _DECODER.decode(record)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
