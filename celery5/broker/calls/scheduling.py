"""Build the calls that read schedules, change them, and publish their jobs.

A schedule is stored in the slot of its queue, so that it fires in one script.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from celery5.broker.call import Call, Script, Word, decode_text, merge_name_tuples, script_call, to_ms
from celery5.broker.keys import Keys, QueueKeys

GET_DUE_SCHEDULES = Script.load("scheduling/get_due_schedules", "clock")
FIRE_SCHEDULE = Script.load("scheduling/fire_schedule", "sending")


class DueSchedules(msgspec.Struct, frozen=True):
    """The time by Redis in ms since 1970, seconds until the next schedule is due that is not among these (None: there
    is none), and the records of those that are due, each with whether its last job has not ended."""

    now: int
    next_due_in: float | None
    due: tuple[tuple[bytes, bool], ...]


JobToSend = tuple[str, bytes, str, float | None]
"""A job: its id, its Command, what its key is remembered under, its `unique_for` in seconds."""


def get_due_schedules(keys: Keys, queue: QueueKeys, *, limit: int, offset: int = 0) -> Call[DueSchedules]:
    """Return which schedules of a queue are due, without the first ones by `offset`."""
    named = (keys.schedules(queue.queue), keys.schedule_times(queue.queue), queue.jobs)
    return script_call(GET_DUE_SCHEDULES, named, (limit, offset), _upcoming, repeatable=True)


def fire_schedule(
    keys: Keys,
    queue: QueueKeys,
    name: str,
    *,
    expected_state: bytes,
    new_state: bytes,
    next_look: int | None,
    jobs: Sequence[JobToSend] = (),
    notify: bool = False,
) -> Call[bool]:
    """Put a schedule from one state into another, b"" for none, and publish these jobs. Return False, and do nothing,
    when it was in another state. They go on the lane of `queue`. `next_look` is when it is due next, in ms since 1970;
    `notify` the Schedulers. Safe to repeat."""
    places = tuple(
        key for job_id, _, lock, _ in jobs for key in (queue.result(job_id), queue.unique_window(lock))
    )
    words: tuple[Word, ...] = tuple(
        [
            word
            for job_id, command, lock, unique_for in jobs
            for word in (job_id, command, lock, to_ms(unique_for or 0))
        ]
    )
    schedules, times = keys.schedules(queue.queue), keys.schedule_times(queue.queue)
    named = (schedules, times, queue.stream, queue.jobs, queue.unique, *places)
    channel, due = keys.schedule_changes if notify else "", "" if next_look is None else next_look
    args = (name, expected_state, new_state, due, channel, queue.wake, queue.lane, *words)
    return script_call(FIRE_SCHEDULE, named, args, bool, repeatable=True)


def list_schedules(keys: Keys, queue: str) -> Call[dict[str, bytes]]:
    """Return all schedules of a queue, by name."""
    return Call(("HGETALL", keys.schedules(queue)), _records, repeatable=True)


def get_schedule(keys: Keys, queue: str, name: str) -> Call[bytes]:
    """Return one schedule, b"" when it is not there."""
    return Call(("HGET", keys.schedules(queue), name), _bytes, repeatable=True)


def list_schedule_queues(keys: Keys) -> Call[tuple[str, ...]]:
    """Return the queues that have, or have had, schedules."""
    return Call(("SMEMBERS", keys.schedule_queues), _names, repeatable=True, merge=merge_name_tuples)


def register_schedule_queue(keys: Keys, queue: str) -> Call[int]:
    """Add the queue to those that have schedules."""
    return Call(("SADD", keys.schedule_queues, queue), int, repeatable=True)


def declare_schedules(keys: Keys, scheduler: str, names: bytes, *, lease: float) -> Call[bool]:
    """Declare the schedules of a Scheduler's code, for `lease` seconds."""
    return Call(("SET", keys.declared_schedules(scheduler), names, "PX", to_ms(lease)), bool, repeatable=True)


def withdraw_declaration(keys: Keys, scheduler: str) -> Call[int]:
    """Withdraw the declaration of a Scheduler that has ended."""
    return Call(("DEL", keys.declared_schedules(scheduler)), int, repeatable=True)


def get_declarations(keys: Keys, schedulers: Sequence[str]) -> Call[tuple[bytes | None, ...]]:
    """Return what the code of these Schedulers declares; None for one without a declaration."""
    return Call(
        ("MGET", *[keys.declared_schedules(scheduler) for scheduler in schedulers]), _values, repeatable=True
    )


def _upcoming(raw: Any) -> DueSchedules:
    now, rest, found = raw
    return DueSchedules(
        msgspec.convert(now, int),
        None if rest < 0 else rest / 1000,
        tuple((state, busy == 1) for state, busy in found),
    )


def _records(raw: Any) -> dict[str, bytes]:
    flat: Sequence[bytes] = [word for pair in raw.items() for word in pair] if hasattr(raw, "items") else raw
    states = msgspec.convert(flat[1::2], list[bytes])
    return dict(zip(map(decode_text, flat[::2]), states, strict=True))


def _bytes(raw: Any) -> bytes:
    return msgspec.convert(raw, bytes | None) or b""


def _values(raw: Any) -> tuple[bytes | None, ...]:
    return msgspec.convert(raw, tuple[bytes | None, ...])


def _names(raw: Iterable[bytes]) -> tuple[str, ...]:
    """Return the names of queues. Invalid text is left out: celery5 did not write it."""
    found = [decode_text(word) for word in raw]
    return tuple(sorted(name for name in found if "\ufffd" not in name))
