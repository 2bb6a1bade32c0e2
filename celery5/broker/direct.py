"""Direct: the trip that puts a job into the hands of one worker (C7).

Floor: broker. Reads and writes: what `direct.lua` says; all keys come from `keys.py`.
"""

from functools import partial
from typing import Any

from celery5.broker.call import Call, Script, script_call
from celery5.broker.calls import Entry, parse_entry
from celery5.broker.keys import GROUP, QueueKeys

DIRECT = Script.load("job/direct")


def deliver_to_worker(
    keys: QueueKeys, job_id: str, message: bytes, *, worker: str, max_before: int
) -> Call[list[Entry] | None]:
    """Put a job on its queue, on the lane of `keys`, and into `worker`'s hands, with all that waited before it; None,
    and nothing done, when that is more than `before`. Not repeatable: what a lost answer carried is found in the
    worker's pending list."""
    named = (keys.stream, keys.jobs, keys.result(job_id))
    words = (GROUP, worker, job_id, message, max_before, keys.lane, keys.wake)
    return script_call(DIRECT, named, words, partial(_entries, keys))


def _entries(keys: QueueKeys, raw: Any) -> list[Entry] | None:
    return None if raw is None else [parse_entry(keys, entry, flat) for entry, flat in raw]
