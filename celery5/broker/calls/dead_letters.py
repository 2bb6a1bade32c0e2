"""Build the calls that read dead-letter queues, replay jobs from them, and purge them."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from celery5.broker.call import Call, Script, Word, decode_text, script_call
from celery5.broker.keys import QueueKeys
from celery5.protocol.job.dead_letters import get_death_time
from celery5.protocol.job.error_text import parse_cause
from celery5.protocol.job.failure_groups import DeathCause
from celery5.protocol.job.states import Place

REPLAY = Script.load("job/replay", "sending", "causes")
PURGE = Script.load("job/purge", "ending", "member", "causes")

DONE, GONE, KEY_TAKEN, ALIVE = 1, 0, -1, -2
"""What the scripts return for each job."""


class DeadLetterEntry(msgspec.Struct, frozen=True):
    """One entry of a dead-letter queue: the job's message and its document, as bytes; empty when it has none. With a
    `sink` it is a document alone, which that sink would not take, and its `failure`."""

    entry: str
    message: bytes
    document: bytes
    sink: str = ""
    failure: bytes = b""


def list_entries(keys: QueueKeys, *, first: str, last: str, count: int) -> Call[list[DeadLetterEntry]]:
    """Return the oldest `count` entries from `first` to `last`, as XRANGE takes them."""
    return Call(("XRANGE", keys.dead, first, last, "COUNT", count), _dead_entries, repeatable=True)


def list_entries_backwards(
    keys: QueueKeys, *, first: str, last: str, count: int
) -> Call[list[DeadLetterEntry]]:
    """Return the newest `count` entries from `last` down to `first`, as XREVRANGE takes them."""
    return Call(("XREVRANGE", keys.dead, last, first, "COUNT", count), _dead_entries, repeatable=True)


def get_newest_entry(keys: QueueKeys) -> Call[str]:
    """Return the newest entry, '' when there is none."""
    return Call(("XREVRANGE", keys.dead, "+", "-", "COUNT", 1), _get_first_id, repeatable=True)


def get_oldest_entry(keys: QueueKeys) -> Call[str]:
    """Return the oldest entry, '' when there is none."""
    return Call(("XRANGE", keys.dead, "-", "+", "COUNT", 1), _get_first_id, repeatable=True)


def count_entries(keys: QueueKeys) -> Call[int]:
    """Return how many dead letters a queue has."""
    return Call(("XLEN", keys.dead), int, repeatable=True)


def read_causes(keys: QueueKeys) -> Call[dict[str, DeathCause]]:
    """Return how many dead jobs of a queue each cause has, by the id of its group, and since when."""
    return Call(("HGETALL", keys.dead_causes), _causes, repeatable=True)


def find_entries(keys: QueueKeys, ids: Sequence[str]) -> Call[list[str]]:
    """Return the entry of each job that is dead, '' for one that is not."""
    return Call(("HMGET", keys.jobs, *ids), _dead_places, repeatable=True)


def queue_exists(keys: QueueKeys) -> Call[bool]:
    """Return whether anything was ever sent to this queue, or read from it."""
    return Call(("EXISTS", *keys.streams, keys.jobs, keys.dead, keys.due), bool, repeatable=True)


def replay_jobs(keys: QueueKeys, jobs: Sequence[tuple[str, str, bytes, str]]) -> Call[list[int]]:
    """Put dead jobs (entry, id, fresh message, lock) back on a lane. Return DONE, GONE, KEY_TAKEN or ALIVE for each."""
    results = tuple([keys.result(job_id) for _, job_id, *_ in jobs])
    args: tuple[Word, ...] = tuple([word for job in jobs for word in job])
    named = (keys.stream, keys.jobs, keys.dead, keys.unique, *results)
    return script_call(REPLAY, named, (keys.wake, keys.lane, *args), _as_it_is, repeatable=True)


def purge_jobs(keys: QueueKeys, jobs: Sequence[tuple[str, str]]) -> Call[list[int]]:
    """Remove dead jobs (entry, id). Return DONE or GONE for each."""
    args: tuple[Word, ...] = tuple([word for job in jobs for word in job])
    return script_call(PURGE, (keys.dead, keys.jobs), (keys.wake, *args), _as_it_is, repeatable=True)


def _causes(raw: Any) -> dict[str, DeathCause]:
    # RESP3 has maps.
    words = [word for pair in raw.items() for word in pair] if hasattr(raw, "items") else raw
    fields = {
        decode_text(name): decode_text(value) for name, value in zip(words[::2], words[1::2], strict=True)
    }
    causes: dict[str, DeathCause] = {}
    for name, value in fields.items():
        what, _, cause = name.partition(" ")
        first, last = (get_death_time(fields.get(f"{word} {cause}", "")) for word in ("first", "last"))
        group = parse_cause(cause)
        if what == "count" and value.isdecimal() and group and first and last:
            causes[group] = DeathCause(
                int(value), first, last, (fields[f"last {cause}"], fields[f"first {cause}"])
            )
    return causes


def _dead_entries(raw: Iterable[tuple[bytes, list[bytes]]]) -> list[DeadLetterEntry]:
    entries = [(decode_text(entry), dict(zip(flat[::2], flat[1::2], strict=True))) for entry, flat in raw]
    return [
        DeadLetterEntry(
            entry,
            fields.get(b"job", b""),
            fields.get(b"document", b""),
            decode_text(fields.get(b"sink", b"")),
            fields.get(b"failure", b""),
        )
        for entry, fields in entries
    ]


def _get_first_id(raw: Any) -> str:
    return decode_text(raw[0][0]) if raw else ""


_DEAD = Place.DEAD.encode()


def _dead_places(raw: Iterable[bytes | None]) -> list[str]:
    return [decode_text(place[1:]) if place and place[:1] == _DEAD else "" for place in raw]


def _as_it_is(raw: Any) -> list[int]:
    return msgspec.convert(raw, list[int])
