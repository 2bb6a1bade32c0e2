"""Revocation: the trips to Redis that revoke jobs and find out which ones were."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from celery5.broker.call import Call, Script, Word, decode_text, script_call
from celery5.broker.calls.jobs import Entry, parse_entry
from celery5.broker.keys import GROUP, QueueKeys
from celery5.protocol.job.delivery import MIN_DOCUMENT_TTL

REVOKE = Script.load("job/revoke", "clock", "ending", "admission")

BATCH_SIZE = 200
"""Jobs in one trip: a script holds the server up while it runs."""


def revoke(keys: QueueKeys, job_ids: Sequence[str], *, ttl: float) -> Call[list[str]]:
    """Revoke jobs, PORTION at most; gives what was found of each, in order, as `revoke.lua` says. Safe to repeat.

    `ttl` is how long it is remembered that a job was revoked, in seconds, unless the job says otherwise.
    """
    named = (
        keys.normal,
        keys.jobs,
        keys.due,
        keys.waiting,
        keys.unique,
        keys.high,
        keys.low,
        keys.handed,
        keys.documents,
        keys.limited_counts,
        keys.waiting_list_prefix,
        *map(keys.result, job_ids),
    )
    ids: tuple[Word, ...] = tuple(job_ids)
    least = int(MIN_DOCUMENT_TTL * 1000)
    return script_call(
        REVOKE, named, (GROUP, keys.revoke, int(ttl * 1000), least, *ids), _states, repeatable=True
    )


def get_places(keys: QueueKeys, job_ids: Sequence[str]) -> Call[list[bytes]]:
    """Where jobs are, as the queue's hash says it: `b""` for one that has no place there."""
    return Call(("HMGET", keys.jobs, *job_ids), _places, repeatable=True)


def scan_jobs(keys: QueueKeys, cursor: str) -> Call[tuple[str, list[str]]]:
    """Return some of the jobs that have a place in a queue, and the cursor for the next ones; "0" at the end."""
    return Call(("HSCAN", keys.jobs, cursor, "COUNT", BATCH_SIZE), _some, repeatable=True)


def _some(raw: Sequence[Any]) -> tuple[str, list[str]]:
    cursor, flat = raw
    names: list[bytes] = list(cast("Any", flat)) if isinstance(flat, dict) else flat[::2]  # RESP3 has maps
    return cursor.decode(), [each.decode(errors="replace") for each in names]


def _states(raw: Iterable[bytes]) -> list[str]:
    return [decode_text(each) for each in raw]


def _places(raw: Any) -> list[bytes]:
    return [each or b"" for each in msgspec.convert(raw, list[bytes | None])]


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
