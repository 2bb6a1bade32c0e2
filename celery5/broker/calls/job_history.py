"""Build the calls that write the history of ended jobs, and read it and the jobs that live, page by page."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from celery5.broker.call import Call, Script, Word, decode_scores, decode_text, script_call, to_ms
from celery5.broker.keys import GROUP, Keys, QueueKeys
from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.observability.ended_jobs import HistoryBatch

ADD_HISTORY = Script.load("observability/add_history")

HISTORY_TTL = 90 * 86_400.0
"""Seconds that the history stays after the last entry."""
BATCH_TTL = 3600.0
"""Seconds for which a batch may be repeated."""


class HistoryEntry(NamedTuple):
    """An entry of the history: a packed record, or how many failures a process has not kept."""

    id: str
    packed: bytes
    lost: int

    @property
    def at(self) -> float:
        """When it came, by the clock of Redis, in seconds since 1970."""
        return int(self.id.partition("-")[0]) / 1000


class WaitingEntry(NamedTuple):
    """A job on a stream of a queue."""

    id: str
    message: bytes
    # How many workers died with it.
    deliveries: int


class HeldEntry(NamedTuple):
    """A job that a worker has."""

    id: str
    worker: str
    # Seconds for which it has it.
    held_for: float


def add_history(keys: Keys, batch: HistoryBatch, *, limit: int) -> Call[bool]:
    """Add a batch to the history, which keeps about `limit` failures and as many others. Safe to repeat.

    Returns:
        Whether it is new.
    """
    named = (keys.failed_jobs, keys.other_jobs, keys.history_sent(batch.process))
    ttls = to_ms(HISTORY_TTL), to_ms(BATCH_TTL)
    records: tuple[Word, ...] = (*batch.failures, *batch.others)
    return script_call(
        ADD_HISTORY,
        named,
        (batch.number, limit, ttls[0], ttls[1], batch.lost, len(batch.failures), *records),
        bool,
        repeatable=True,
    )


def read_history(stream: str, *, before: str, since_ms: int, count: int) -> Call[list[HistoryEntry]]:
    """Return entries of a stream of the history, the newest first.

    Args:
        stream: The key.
        before: The end, as XREVRANGE takes it: `+`, an id, or `(` and an id.
        since_ms: The time of the oldest one, in ms since 1970.
        count: How many at most.
    """
    return Call(("XREVRANGE", stream, before, since_ms, "COUNT", count), _history, repeatable=True)


def read_oldest(stream: str) -> Call[list[HistoryEntry]]:
    """Return the oldest entry of a stream of the history, if there is one."""
    return Call(("XRANGE", stream, "-", "+", "COUNT", 1), _history, repeatable=True)


def read_stream(stream: str, *, before: str, count: int) -> Call[list[WaitingEntry]]:
    """Return jobs on a stream of a queue, the newest first; `before` as for `read_history`."""
    return Call(("XREVRANGE", stream, before, "-", "COUNT", count), _waiting, repeatable=True)


def read_entry(stream: str, entry: str) -> Call[list[WaitingEntry]]:
    """Return the job with this id on a stream, if it is there."""
    return Call(("XRANGE", stream, entry, entry), _waiting, repeatable=True)


def read_held(stream: str, *, first: str, last: str, count: int) -> Call[list[HeldEntry]]:
    """Return which jobs of a stream workers have, from `first` to `last`, as XPENDING takes them.

    None on a stream that no worker has read yet.
    """
    return Call(("XPENDING", stream, GROUP, first, last, count), _held, repeatable=True)


def read_due(keys: QueueKeys, score: str, *, skip: int, count: int) -> Call[list[tuple[str, float]]]:
    """Return ids of jobs that wait for a time, with that in ms since 1970, the earliest first.

    Args:
        keys: The queue.
        score: The earliest time in ms, `-inf` for any.
        skip: How many jobs from there on are left out.
        count: How many at most.
    """
    words = ("ZRANGEBYSCORE", keys.due, score, "+inf", "WITHSCORES", "LIMIT", skip, count)
    return Call(words, decode_scores, repeatable=True)


def read_messages(keys: QueueKeys, job_ids: Sequence[str]) -> Call[list[bytes]]:
    """Return the messages of jobs that wait outside of the streams; b"" for one that is gone."""
    return Call(("HMGET", keys.waiting, *job_ids), _messages, repeatable=True)


def read_revoked(keys: QueueKeys, score: str, *, skip: int, count: int) -> Call[list[tuple[str, float]]]:
    """Return ids of jobs that were revoked while they waited, with when in ms since 1970, the newest first.

    Args:
        keys: The queue.
        score: The latest time in ms, `+inf` for any.
        skip: How many jobs from there on are left out.
        count: How many at most.
    """
    words = ("ZREVRANGEBYSCORE", keys.revoked_jobs, score, "-inf", "WITHSCORES", "LIMIT", skip, count)
    return Call(words, decode_scores, repeatable=True)


def read_revoked_documents(keys: QueueKeys, ids: Sequence[str]) -> Call[list[bytes]]:
    """Return the documents of such jobs; b"" for one that is not kept."""
    return Call(("HMGET", keys.revoked_documents, *ids), _messages, repeatable=True)


def count_revoked(keys: QueueKeys) -> Call[int]:
    """Return how many such jobs are kept."""
    return Call(("ZCARD", keys.revoked_jobs), int, repeatable=True)


def scan_limited(keys: QueueKeys, cursor: str, count: int) -> Call[tuple[str, list[tuple[str, bytes]]]]:
    """Return some jobs that wait outside of the streams, with their messages, and the next cursor, "0" at the end."""
    return Call(("HSCAN", keys.waiting, cursor, "COUNT", count), _scanned, repeatable=True)


def count_limited(keys: QueueKeys) -> Call[int]:
    """Return how many tasks of a queue have jobs that wait at limits."""
    return Call(("HLEN", keys.limited_counts), int, repeatable=True)


def list_unlimited(keys: QueueKeys) -> Call[set[str]]:
    """Return the tasks, as places have them, whose jobs wait for nothing but a worker with a slot."""
    return Call(("SMEMBERS", f"{keys.waiting_list_prefix}unlimited"), _texts, repeatable=True)


def count_stream(stream: str) -> Call[int]:
    """Return how many entries a stream has."""
    return Call(("XLEN", stream), int, repeatable=True)


def count_due(keys: QueueKeys) -> Call[int]:
    """Return how many jobs wait for a time."""
    return Call(("ZCARD", keys.due), int, repeatable=True)


def _fields(flat: Sequence[bytes] | None) -> dict[bytes, bytes]:
    return dict(zip((flat or ())[::2], (flat or ())[1::2], strict=False))


def _history(raw: Any) -> list[HistoryEntry]:
    entries: list[HistoryEntry] = []
    for entry_id, flat in raw or ():
        fields = _fields(flat)
        lost = fields.get(b"lost", b"")
        entries.append(HistoryEntry(decode_text(entry_id), fields.get(b"job", b""), read_whole(lost)))
    return entries


def _waiting(raw: Any) -> list[WaitingEntry]:
    entries: list[WaitingEntry] = []
    for entry_id, flat in raw or ():
        fields = _fields(flat)
        deaths = fields.get(b"deliveries", b"")
        entries.append(WaitingEntry(decode_text(entry_id), fields.get(b"job", b""), read_whole(deaths)))
    return entries


def _texts(raw: Any) -> set[str]:
    return {decode_text(item) for item in raw or ()}


def _held(raw: Any) -> list[HeldEntry]:
    return [
        HeldEntry(decode_text(entry), decode_text(worker), int(idle) / 1000)
        for entry, worker, idle, _ in raw or ()
    ]


def _messages(raw: Any) -> list[bytes]:
    return [message or b"" for message in msgspec.convert(raw, list[bytes | None])]


def _scanned(raw: Any) -> tuple[str, list[tuple[str, bytes]]]:
    pairs: Iterable[tuple[bytes, bytes]]
    if isinstance(raw[1], dict):  # RESP 3
        pairs = cast("dict[bytes, bytes]", raw[1]).items()
    else:
        flat: list[bytes] = list(raw[1])
        pairs = zip(flat[::2], flat[1::2], strict=True)
    return decode_text(raw[0]), [(decode_text(job_id), message) for job_id, message in pairs]
