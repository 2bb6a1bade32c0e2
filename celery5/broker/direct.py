"""Direct: the trip that puts a job into the hands of one worker (C7).

Floor: broker. Reads and writes: what `direct.lua` says; all keys come from `keys.py`.
"""

from functools import partial
from typing import Any

from celery5.broker.call import Call, Script, scripted
from celery5.broker.calls import Entry
from celery5.broker.keys import GROUP, QueueKeys

DIRECT = Script.load("direct")


def run_here(
    keys: QueueKeys, job_id: str, message: bytes, *, worker: str, before: int
) -> Call[list[Entry] | None]:
    """Put a job on its queue and into `worker`'s hands, with all that waited before it; None, and nothing done, when
    that is more than `before`. Not repeatable: what a lost answer carried is found in the worker's pending list."""
    named = (keys.stream, keys.jobs, keys.result(job_id))
    reply = partial(_entries, keys.queue)
    return scripted(DIRECT, named, (GROUP, worker, job_id, message, before), reply)


def _entries(queue: str, raw: Any) -> list[Entry] | None:
    if raw is None:
        return None
    found: list[Entry] = []
    for entry, flat in raw:
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        deliveries = fields.get(b"deliveries", b"0")
        count = int(deliveries) if deliveries.isdigit() else 0
        found.append(Entry(queue, entry, fields.get(b"job", b""), count))
    return found
