"""Build the calls by which a test lets time pass on its server: see `celery5.testing.virtual_time`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from celery5.broker.call import Call, Script, decode_text, script_call
from celery5.broker.keys import VIRTUAL_TIME, Keys, QueueKeys
from celery5.protocol.limits import unescape_word

FIND_REMAINING_WORK = Script.load("diagnosis/find_remaining_work")
REDUCE_TTLS = Script.load("diagnosis/reduce_ttls")

WAITS_AT_LIMIT = "jobs that wait at a limit"
_PARTS = (
    "jobs on it or running",
    "jobs of high priority on it or running",
    "jobs of low priority on it or running",
    "jobs that a limit has admitted",
    "ends of jobs that are not counted in their run",
    "jobs of runs that are not sent",
    WAITS_AT_LIMIT,
    "scheduled jobs that are due",
    "schedules that are due",
    "runs that are due",
    "",  # no key: what the keys of runs begin with
)
"""What it means that there is something at each key of a queue, in the order of the script."""


class RemainingWork(NamedTuple):
    """What is left to do at a time, and when more falls due."""

    # The first queue that has something to do now, and what; '' when nothing is left.
    queue: str
    what: str
    # The message of a job that is on the queue or runs; b"" for none.
    message: bytes
    # When the next thing falls due, in ms since 1970; None when nothing waits.
    next_due: int | None


def set_virtual_time(now: int) -> Call[bool]:
    """Set the time by which the virtual scripts go on this server, in ms since 1970. Safe to repeat."""
    return Call(("SET", VIRTUAL_TIME, now), bool, repeatable=True)


def end_virtual_time() -> Call[int]:
    """Let the virtual scripts go by the server's own time again. Safe to repeat."""
    return Call(("DEL", VIRTUAL_TIME), int, repeatable=True)


def find_remaining_work(
    keys: Keys, queues: Sequence[QueueKeys], now: int, *, with_schedules: bool = True
) -> Call[RemainingWork]:
    """Return what is left to do at a time, and when the next thing falls due: with those of schedules, or without."""
    named = tuple(
        [key for queue in queues for key in _list_parts(keys, queue, with_schedules=with_schedules)]
    )

    def read(raw: Any) -> RemainingWork:
        busy, message, next_due = int(raw[0]), msgspec.convert(raw[1], bytes), decode_text(raw[2])
        at, part = divmod(busy - 1, len(_PARTS))
        return RemainingWork(
            queues[at].queue if busy else "",
            _PARTS[part] if busy else "",
            message,
            int(next_due) if next_due else None,
        )

    return script_call(FIND_REMAINING_WORK, named, (now,), read, repeatable=True)


def _list_parts(keys: Keys, queue: QueueKeys, *, with_schedules: bool) -> tuple[str, ...]:
    return (
        *queue.streams,
        queue.run_records,
        queue.run_outbox,
        queue.limited_counts,
        queue.due,
        keys.schedule_times(queue.queue if with_schedules else ""),
        queue.live_runs,
        queue.run_prefix,
    )


def reduce_ttls(names: Sequence[str], passed: int, *, are_starts: bool = False) -> Call[int]:
    """Let `passed` ms pass for keys with a time to live. Return how many have expired.

    `are_starts`: the keys hold the starts of rates, which are moved back by `passed` ms.
    """
    named = tuple(names)
    return script_call(REDUCE_TTLS, named, (passed, int(are_starts)), int)


def list_expiring_prefixes(keys: Keys, queues: Sequence[QueueKeys]) -> tuple[str, ...]:
    """Return what the keys begin with whose time to live passes with the time of jobs and runs."""
    return (
        keys.run_home(""),
        keys.event_waits(""),
        *[
            prefix
            for queue in queues
            for prefix in (
                queue.result_prefix,
                queue.window_prefix,
                queue.run_prefix,
                queue.plan_prefix,
                queue.past_runs,
                queue.revoked_jobs,
                queue.revoked_documents,
                queue.progress_prefix,
            )
        ],
    )


def get_starts_key(queue: QueueKeys, task: str) -> str:
    """Return the key of the last starts that the rate of a task counts: see admission.lua."""
    return f"{queue.waiting_list_prefix}starts {task}"


def list_starts(key: str) -> Call[list[int]]:
    """Return the last starts that a rate counts, in ms since 1970."""
    return Call(("LRANGE", key, 0, -1), lambda raw: [int(start) for start in raw], repeatable=True)


def list_limited_tasks(queue: QueueKeys) -> Call[list[str]]:
    """Return the tasks of a queue that have jobs which wait at a limit."""

    def read(raw: Any) -> list[str]:
        return [unescape_word(word) for word in map(decode_text, raw) if not word.startswith(" ")]

    return Call(("HKEYS", queue.limited_counts), read, repeatable=True)


def list_start_prefixes(keys: Keys, queues: Sequence[QueueKeys]) -> tuple[str, ...]:
    """Return the prefixes of the keys of the last starts that rates count."""
    return (keys.kind_starts(""), *[get_starts_key(queue, "") for queue in queues])


def wake(channel: str, message: str = "") -> Call[int]:
    """Have the listeners of a channel look at what is due."""
    return Call(("PUBLISH", channel, message), int, repeatable=True)
