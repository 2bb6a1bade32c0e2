"""Decide when periodic tasks fire, from the state of their schedules.

A schedule is one value, kept in Redis. `plan_fires` decides: from the schedule, the time by Redis
and whether its last job still exists, it returns the fire times to publish and the next state of the schedule.
The Scheduler that replaces the former state atomically fires, so any number of Schedulers may try. Times are ms since
1970.
"""

from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from typing import Literal

import msgspec
from msgspec.structs import replace

from celery5.errors import Misconfigured
from celery5.protocol.job.messages import refuse_oversized
from celery5.protocol.scheduling.triggers import AnyTrigger, describe_trigger

MAX_FIRES_PER_STEP = 100
"""The most jobs of one schedule that are published in one step; others follow at once."""
MAX_COUNTED_MISSES = 1000
"""Missed fire times that are counted one by one. Beyond that the count is only a lower bound."""
MAX_CAUGHT_UP = 1000
"""The highest cap of a misfire policy."""
RECHECK_MS = 250
"""Ms after which a fire that waits for the previous job is checked again."""
RETIRED_TTL_MS = 7 * 24 * 3600 * 1000
"""Ms for which a retired schedule is kept, in case it is declared again."""

MisfirePolicy = Literal["skip", "once", "catch-up"]
OverlapPolicy = Literal["allow", "skip", "queue"]
ScheduleOrigin = Literal["code", "configuration", "runtime"]
MoveStage = Literal["settled", "arriving", "resting"]
"""The progress of a record in a move to another queue. Only a settled record fires.

`settled`: it is on the right queue. `arriving`: it is on the right queue, but older records may remain on other
queues. `resting`: it is one of those older records.
"""
FindNextFireTime = Callable[[AnyTrigger, int], int | None]
"""Returns the first fire time of a trigger after a given time; None when there is none."""


class Misfire(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happens to fire times missed because no Scheduler ran or Redis was unreachable."""

    # Which late ones are published: none (`skip`), each (`catch-up`), or the latest unless another is due (`once`).
    policy: MisfirePolicy = "once"
    after: float = 60.0  # seconds from which a fire time is late
    limit: float | None = 86400.0  # seconds of age from which it is not caught up; None: any age
    most: int = 100  # the most that are caught up: the latest ones

    def validate(self) -> "Misfire":
        """Return itself. Raises Misconfigured."""
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
    """A schedule as declared: what is sent, to which queue, and when."""

    task: str
    queue: str
    trigger: AnyTrigger
    message: str  # of a job, without its id and times
    expires: float | None = None  # seconds after a job was sent
    lane: str = ""
    lock: str = ""
    unique_for: float | None = None
    jitter: float = 0.0  # the most seconds by which each fire is delayed
    misfire: Misfire = Misfire()
    overlap: OverlapPolicy = "allow"


class Schedule(msgspec.Struct, frozen=True, omit_defaults=True):
    """A schedule as it is stored."""

    name: str
    of: ScheduleDefinition
    origin: ScheduleOrigin = "runtime"
    # Of the process that declared it last: the version of its code, and its start time.
    stamp: tuple[int, int] = (0, 0)
    rev: int = 0
    next: int | None = None  # fire time
    last: int | None = None  # published fire time
    job: str = ""  # of the last fire time
    waiting: int | None = None  # a fire time that waits for that job to end
    paused: bool = False
    retired: int | None = None  # when no live code declared it any more
    fired: int = 0
    missed: int = 0
    skipped: int = 0
    triggered: int = 0
    stage: MoveStage = "settled"
    by: str = ""  # the process that wrote this record, so that no two write the same

    @property
    def is_active(self) -> bool:
        """Return whether it fires at all."""
        return not self.paused and self.retired is None and self.stage == "settled"

    def get_next_look(self, now: int) -> int | None:
        """Return when to check it next; None for never."""
        if not self.is_active:
            return None
        times = [] if self.next is None else [self.next + get_jitter(self, self.next)]
        return min([*times, *([] if self.waiting is None else [now + RECHECK_MS])], default=None)


class ScheduledFire(msgspec.Struct, frozen=True):
    """A fire time to publish, and the id of its job."""

    at: int
    job: str


class ScheduleStep(msgspec.Struct, frozen=True):
    """What to do: publish `fires`, and store `new_state`."""

    fires: tuple[ScheduledFire, ...]
    new_state: Schedule
    missed: int = 0  # fire times not published because they are late
    skipped: int = 0  # fire times not published because the previous job had not ended
    has_more_missed: bool = False  # more were missed than counted


def plan_fires(
    schedule: Schedule, now: int, *, is_busy: bool, find_next: FindNextFireTime, app: str = "", by: str = ""
) -> ScheduleStep | None:
    """Return what to do about a schedule now; None for nothing. `is_busy`: its last job has not ended."""
    if not schedule.is_active:
        return None
    passed = _collect_passed(schedule, now, find_next)
    caught_up = _select_caught_up(schedule.of.misfire, now, passed)
    candidates = [*caught_up, *passed.on_time]
    publish, waiting, skipped = _apply_overlap(schedule, candidates, busy=is_busy)
    if not publish and passed.next == schedule.next and waiting == schedule.waiting:
        return None
    fires = tuple(ScheduledFire(at, make_fire_job_id(app, schedule.name, at)) for at in publish)
    missed = passed.late_count - len(caught_up)
    new_state = replace(
        schedule,
        rev=schedule.rev + 1,
        next=passed.next,
        last=publish[-1] if publish else schedule.last,
        job=fires[-1].job if fires else schedule.job,
        waiting=waiting,
        fired=schedule.fired + len(fires),
        missed=schedule.missed + missed,
        skipped=schedule.skipped + skipped,
        by=by,
    )
    return ScheduleStep(fires, new_state, missed, skipped, passed.more)


class _PassedTimes(msgspec.Struct):
    """The fire times that have passed, up to the first that has not passed or was not examined."""

    on_time: list[int]
    late: deque[int]  # the latest of them only
    late_count: int
    more: bool
    next: int | None


def _collect_passed(schedule: Schedule, now: int, find_next: FindNextFireTime) -> _PassedTimes:
    trigger, misfire = schedule.of.trigger, schedule.of.misfire
    late_after = int(misfire.after * 1000)
    passed = _PassedTimes([], deque(maxlen=misfire.most), 0, False, schedule.next)
    counted = 0
    while (at := passed.next) is not None and len(passed.on_time) < MAX_FIRES_PER_STEP:
        fire_at = at + get_jitter(schedule, at)
        if fire_at > now:
            break
        if now - fire_at > late_after:
            passed.late.append(at)
            passed.late_count += 1
        else:
            passed.on_time.append(at)
        counted += 1
        # Skip half of the remaining late times: they are not counted one by one.
        if counted % MAX_COUNTED_MISSES == 0 and now - fire_at > late_after:
            passed.more = True
            at += (now - late_after - fire_at) // 2
        passed.next = find_next(trigger, at)
    return passed


def _select_caught_up(misfire: Misfire, now: int, passed: _PassedTimes) -> list[int]:
    """Return the late fire times that are published after all."""
    if misfire.policy == "skip":
        return []
    late = [at for at in passed.late if misfire.limit is None or now - at <= misfire.limit * 1000]
    if misfire.policy == "once":
        return [] if passed.on_time else late[-1:]
    return late


def _apply_overlap(
    schedule: Schedule, candidates: list[int], *, busy: bool
) -> tuple[list[int], int | None, int]:
    """Return the `candidates` to publish, the one that waits, and how many are skipped."""
    match schedule.of.overlap:
        case "allow":
            return candidates, None, 0
        case "skip":
            publish = [] if busy else candidates[:1]
            return publish, None, len(candidates) - len(publish)
        case "queue":
            pending = [*([] if schedule.waiting is None else [schedule.waiting]), *candidates]
            publish = [] if busy else pending[:1]
            remaining = pending[len(publish) :]
            return publish, remaining[0] if remaining else None, max(0, len(remaining) - 1)


def get_jitter(schedule: Schedule, at: int) -> int:
    """Return the ms by which a fire is delayed: the same for every caller."""
    max_jitter = int(schedule.of.jitter * 1000)
    if not max_jitter:
        return 0
    return int.from_bytes(sha256(f"{schedule.name}\0{at}".encode()).digest()[:8]) % (max_jitter + 1)


def make_fire_job_id(app: str, name: str, at: int) -> str:
    """Return the id of the job of one fire time. It is always the same, so that the job cannot run twice."""
    job_id = urlsafe_b64encode(sha256(f"{app}\0{name}\0{at}".encode()).digest()[:17]).decode()[:22]
    return job_id if job_id[0] != "-" else f"_{job_id[1:]}"


def make_schedule(
    name: str,
    definition: ScheduleDefinition,
    now: int,
    find_next: FindNextFireTime,
    *,
    origin: ScheduleOrigin,
    stamp: tuple[int, int] = (0, 0),
) -> Schedule:
    """Return a new schedule, which fires at the first of its future times."""
    return Schedule(name, definition, origin, stamp, next=find_next(definition.trigger, now))


def merge_declaration(
    old: Schedule | None, new: Schedule, now: int, find_next: FindNextFireTime
) -> Schedule | None:
    """Return a schedule after it was declared again as `new`; None when it stays as it is.

    A newer stamp wins. The history of fires is kept, and so is the next fire time unless the trigger has
    changed.
    """
    if old is None:
        return new
    if old.origin == "runtime" or old.stamp > new.stamp:
        return None  # it was added at run time, or declared by newer code
    is_same = (old.of, old.origin, old.retired) == (new.of, new.origin, None)
    if is_same and old.stamp == new.stamp:
        return None
    has_moved = old.of.trigger != new.of.trigger or old.retired is not None
    return replace(
        old,
        of=new.of,
        origin=new.origin,
        stamp=new.stamp,
        rev=old.rev + 1,
        retired=None,
        stage="settled",
        waiting=old.waiting if new.of.overlap == "queue" else None,
        next=find_next(new.of.trigger, max(now, old.last or 0)) if has_moved else old.next,
    )


def retire_schedule(schedule: Schedule, now: int, *, stamp: tuple[int, int]) -> Schedule | None:
    """Return a schedule as retired, since no live code declares it; None when it stays.

    It stays when it was not declared by code, or by code newer than the caller's `stamp`, which the caller
    cannot know.
    """
    if schedule.origin == "runtime" or schedule.retired is not None or schedule.stamp >= stamp:
        return None
    return replace(schedule, rev=schedule.rev + 1, retired=now, waiting=None)


def pause_schedule(schedule: Schedule) -> Schedule:
    """Return the schedule as paused. Fire times in a pause do not count as missed."""
    return schedule if schedule.paused else replace(schedule, rev=schedule.rev + 1, paused=True, waiting=None)


def resume_schedule(schedule: Schedule, now: int, find_next: FindNextFireTime) -> Schedule:
    """Return the schedule as resumed. It continues with the first future fire time."""
    if not schedule.paused:
        return schedule
    return replace(
        schedule,
        rev=schedule.rev + 1,
        paused=False,
        next=find_next(schedule.of.trigger, max(now, schedule.last or 0)),
    )


def change_trigger(
    schedule: Schedule, trigger: AnyTrigger, now: int, find_next: FindNextFireTime
) -> Schedule:
    """Return the schedule with another trigger, at its first future fire time. Counts and a waiting job are kept.

    Raises:
        Misconfigured: Code or a configuration declares it and would change it back, or it would never fire.
    """
    if schedule.origin != "runtime":
        where = "code" if schedule.origin == "code" else "the setting `schedules`"
        raise Misconfigured(
            f"schedule {schedule.name!r} is declared in {where}: change it there and restart the Schedulers"
        )
    following = find_next(trigger, max(now, schedule.last or 0))
    if following is None:
        raise Misconfigured(f"schedule {schedule.name!r} would never fire: {describe_trigger(trigger)}")
    return replace(schedule, of=replace(schedule.of, trigger=trigger), rev=schedule.rev + 1, next=following)


def record_trigger(schedule: Schedule, job: str) -> Schedule:
    """Return the schedule after a job was triggered by a command."""
    return replace(schedule, rev=schedule.rev + 1, job=job, triggered=schedule.triggered + 1)


_DECODER = msgspec.json.Decoder(Schedule)
_ENCODER = msgspec.json.Encoder()


def encode_schedule(schedule: Schedule) -> bytes:
    """Return a schedule as bytes for Redis."""
    return _ENCODER.encode(schedule)


def decode_schedule(record: bytes, limit: int | None = None) -> Schedule | None:
    """Return a stored schedule; None for one to leave unchanged.

    That is one that cannot be read, or is larger than `limit` (the setting `message_limit`) allows. The message
    in it is JSON within JSON, so it may take twice its size.
    """
    try:
        refuse_oversized(record, None if limit is None else 2 * limit, "a schedule")
        return _DECODER.decode(record)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
