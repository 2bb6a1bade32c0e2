"""Read the records of a stream without a group, as `celery5 stream tail` does: nothing is acknowledged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery5.application import Application
from celery5.broker.calls import streams as calls
from celery5.broker.colour import sleep
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import StreamKeys
from celery5.connections.batches import Batches, ReadBatch
from celery5.errors import Misconfigured, UnknownName
from celery5.protocol.streams.groups import split_id
from celery5.similar_names import did_you_mean
from celery5.streams.codec import PrimitiveCodec, RecordCodec
from celery5.streams.encodings import learn_encodings
from celery5.streams.entry import StoredRecord, decode_as_class, decode_document
from celery5.streams.processor import parse_start

PARTITIONS_PER_CALL = 64
RECORDS_PER_CALL = 512
"""About how many records are read in one call."""
POLL_INTERVAL = 0.2
"""Seconds between two looks at a stream that is followed."""
MAX_LAST = 10_000
"""The most records that are counted back from the end."""


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """Which records are read. Raises Misconfigured."""

    stream: str
    # `earliest`, `latest`, an id or a time; None for the last `limit` records.
    start: str | datetime | None
    partition: int | None
    limit: int | None
    follow: bool
    # That of the stream, which knows its encodings and the types of native fields; without another class.
    codec: RecordCodec[Any]

    def __post_init__(self) -> None:
        """Check the values."""
        if self.limit is not None and (isinstance(self.limit, bool) or self.limit < 1):
            raise Misconfigured(f"limit is {self.limit!r}: give 1 or more")
        if self.start is None and (self.limit is None or self.limit > MAX_LAST):
            raise Misconfigured(f"the last records: give a limit of 1 to {MAX_LAST:,}, or where to start")
        if self.start is not None:
            parse_start(self.start, f"stream {self.stream}")


def read_records(app: Application, query: RecordQuery) -> Batches[StoredRecord]:
    """Return the records of a query."""

    async def open_reader() -> ReadBatch[StoredRecord]:
        return _RecordReader(app, await app.connections.get_async_driver(), query).read_portion

    return Batches(open_reader)


class _RecordReader:
    """Reads the records of a query in portions: those of a partition in their order, and all of them by their time."""

    def __init__(self, app: Application, redis: AsyncDriver, query: RecordQuery) -> None:
        self._redis = redis
        self._query = query
        self._app = app
        self._keys: StreamKeys = app.keys.for_stream(query.stream)
        self._positions: dict[int, str] = {}
        # Where each partition ended at the beginning; nothing when records that come later are read, too.
        self._ends: Mapping[int, str] = {}
        self._left = query.limit
        self._has_begun = False

    async def read_portion(self) -> list[StoredRecord]:
        """Return the next records, none when there are no more. Waits for them when the stream is followed."""
        if not self._has_begun:
            self._has_begun = True
            if self._query.start is None:
                last = await self._begin_with_last(self._query.limit or 1)
                self._left = None if self._query.follow else 0
                if last:
                    return last
            else:
                await self._begin_at(parse_start(self._query.start, f"stream {self._query.stream}"))
        while self._left is None or self._left > 0:
            records = await self._read_more()
            if records:
                if self._left is not None:
                    records = records[: self._left]
                    self._left -= len(records)
                return records
            if not self._query.follow:
                break
            await sleep(POLL_INTERVAL)
        return []

    async def _find_partitions(self) -> Sequence[int]:
        totals = await self._redis.perform(calls.get_totals(self._keys))
        if not totals.partitions:
            raise await make_unknown_error(self._app, self._redis, self._query.stream)
        wanted = self._query.partition
        if wanted is None:
            return range(totals.most)
        if not 0 <= wanted < totals.most:
            raise Misconfigured(
                f"stream {self._query.stream} has no partition {wanted}: it has 0 to {totals.most - 1}"
            )
        return [wanted]

    async def _begin_with_last(self, count: int) -> list[StoredRecord]:
        """Return the last records of all partitions, and continue behind them."""
        found = await self._read_ends(await self._find_partitions(), count)
        self._positions = {
            partition: entries[0][0].decode() if entries else "0-0" for partition, entries in found.items()
        }
        records = _merge({partition: list(reversed(entries)) for partition, entries in found.items()})
        await self._learn_encodings(found)
        return [self._decode(partition, entry) for partition, entry in records[-count:]]

    async def _begin_at(self, first: str) -> None:
        found = await self._read_ends(await self._find_partitions(), 1)
        ends = {
            partition: entries[0][0].decode() if entries else "0-0" for partition, entries in found.items()
        }
        if not self._query.follow:
            self._ends = ends
        self._positions = ends if first == "$" else dict.fromkeys(ends, _id_before(first))

    async def _read_ends(self, partitions: Sequence[int], count: int) -> dict[int, list[Any]]:
        """Return the last entries of each partition, the last one first."""
        found: dict[int, list[Any]] = {}
        for at in range(0, len(partitions), PARTITIONS_PER_CALL):
            portion = partitions[at : at + PARTITIONS_PER_CALL]
            replies = await self._redis.perform_all(
                [
                    calls.read_range(self._keys, partition, first="-", count=count, backwards=True)
                    for partition in portion
                ]
            )
            found.update(zip(portion, replies, strict=True))
        return found

    async def _read_more(self) -> list[StoredRecord]:
        """Return the next records behind the positions. A partition that has more than were read ends the portion."""
        count = max(8, RECORDS_PER_CALL // max(1, len(self._positions)))
        found: dict[int, list[Any]] = {}
        names = list(self._positions)
        for at in range(0, len(names), PARTITIONS_PER_CALL):
            positions = {name: self._positions[name] for name in names[at : at + PARTITIONS_PER_CALL]}
            found.update(await self._redis.perform(calls.read_now(self._keys, positions, count=count)))
        await self._learn_encodings(found)
        last = min(
            (split_id(entries[-1][0].decode())[0] for entries in found.values() if len(entries) >= count),
            default=None,
        )
        records: list[StoredRecord] = []
        for partition, entry in _merge(found):
            record_id = entry[0].decode()
            if last is not None and split_id(record_id)[0] > last:
                break
            self._positions[partition] = record_id
            if not self._ends or split_id(record_id) <= split_id(self._ends[partition]):
                records.append(self._decode(partition, entry))
        return records

    async def _learn_encodings(self, found: Mapping[int, Sequence[Any]]) -> None:
        fields = [entry[1] for entries in found.values() for entry in entries]
        await learn_encodings(self._redis, self._keys, self._query.codec, fields)

    def _decode(self, partition: int, entry: Any) -> StoredRecord:
        codec, fields = self._query.codec, entry[1]
        decode = decode_as_class if isinstance(codec, PrimitiveCodec) else decode_document
        record = decode(fields, codec)
        return StoredRecord(partition, entry[0].decode(), record)


def _merge(found: Mapping[int, Sequence[Any]]) -> list[tuple[int, Any]]:
    """Return the entries of all partitions by their time."""
    entries = [(partition, entry) for partition, portion in found.items() for entry in portion]
    return sorted(
        entries,
        key=lambda pair: (split_id(pair[1][0].decode())[0], pair[0], split_id(pair[1][0].decode())[1]),
    )


def _id_before(first: str) -> str:
    ms, number = split_id(first)
    if number:
        return f"{ms}-{number - 1}"
    return f"{ms - 1}-18446744073709551615" if ms else "0-0"


async def make_unknown_error(app: Application, redis: AsyncDriver, stream: str) -> UnknownName:
    """Return the error for a stream to which nothing was ever sent."""
    known = await redis.perform(calls.list_streams(app.keys))
    others = f"there are {', '.join(known)}" if known else "there is no stream yet"
    return UnknownName(
        f"no stream {stream!r}: nothing was ever sent to it; {did_you_mean(stream, known, otherwise=others)}"
    )


async def make_unknown_group_error(
    app: Application, redis: AsyncDriver, stream: str, group: str
) -> UnknownName:
    """Return the error for a group that a stream does not have."""
    keys = app.keys.for_stream(stream)
    if not (await redis.perform(calls.get_totals(keys))).partitions:
        return await make_unknown_error(app, redis, stream)
    known = await redis.perform(calls.list_groups(keys))
    others = f"it has {', '.join(known)}" if known else "it has none"
    return UnknownName(
        f"stream {stream} has no group {group!r}; {did_you_mean(group, known, otherwise=others)}"
    )
