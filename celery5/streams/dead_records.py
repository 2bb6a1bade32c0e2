"""Read, replay and purge the dead records of a group: `app.streams.dead_records`.

A record is dead when a processor has given it up. It is kept with its error until it is replayed or purged.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from celery5.application import Application
from celery5.audit.recording import AuditedAction
from celery5.broker.calls import streams as calls
from celery5.broker.colour import blocking
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import StreamKeys
from celery5.connections.batches import Batches, ReadBatch
from celery5.connections.long_operations import persist
from celery5.errors import Misconfigured
from celery5.protocol.bounded_decoding import decode_msgpack
from celery5.protocol.streams.groups import split_id
from celery5.streams.browsing import make_unknown_group_error
from celery5.streams.codec import RecordCodec
from celery5.streams.encodings import learn_encodings
from celery5.streams.entry import decode_document
from celery5.streams.stream import EncodedRecord, Stream

BATCH_SIZE = 200
"""Dead records in one call."""


class DeclaredStreams(Protocol):
    """The streams that are declared here, by name."""

    def __getitem__(self, name: str, /) -> Stream[Any]:
        """Return one. Raises Misconfigured."""
        ...


class StoredDeadRecord(msgspec.Struct, frozen=True):
    """A record that a group has given up."""

    stream: str
    group: str
    # Its id among the dead records of the group.
    entry: str
    # Its partition and its id in the stream.
    partition: int
    id: str
    attempts: int
    error: str
    traceback: str
    # Its Document, without the class of its records.
    record: Any
    # Its fields and values, in turns.
    fields: tuple[bytes, ...] = ()

    @property
    def died(self) -> float:
        """When it was given up, in seconds since 1970."""
        return split_id(self.entry)[0] / 1000


class DeadRecordTally(msgspec.Struct):
    """The counts of a replay or a purge."""

    # Records that were selected.
    matched: int = 0
    # Records that were replayed or purged.
    done: int = 0
    # Records that cannot be replayed, as the class of the stream's records does not read them: by their entry, why.
    left: dict[str, str] = msgspec.field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadRecordQuery:
    """Which dead records of a group are meant. Raises Misconfigured.

    Args:
        entries: The ids of these alone, as `entry` of a StoredDeadRecord.
        older_than: Dead for more seconds than these.
        newer_than: Dead for less.
        error: A text that their error contains.
        limit: How many at most, the oldest first.
    """

    entries: Sequence[str] = ()
    older_than: float | None = None
    newer_than: float | None = None
    error: str = ""
    limit: int | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        if self.limit is not None and self.limit < 1:
            raise Misconfigured(f"limit is {self.limit!r}: give 1 or more")
        for entry in self.entries:
            ms, dash, number = entry.partition("-")
            if not (dash and ms.isdigit() and number.isdigit()):
                raise Misconfigured(f"{entry!r} is no id of a dead record: they look like 1700000000000-0")


ALL = DeadRecordQuery()


class DeadRecords:
    """The dead records of groups: `app.streams.dead_records`. All methods take a `DeadRecordQuery`, which selects some.

    Raises:
        Misconfigured: There is no such stream or group.
        BrokerError: The broker cannot be reached, or refuses.
    """

    REACHED_AS: ClassVar[str] = "app.streams.dead_records."

    def __init__(
        self, app: Application, streams: DeclaredStreams, find_codec: Callable[[str], RecordCodec[Any]]
    ) -> None:
        self._app = app
        self._streams = streams
        # Returns what decodes the entries of a stream as they are stored.
        self._find_codec = find_codec

    def read(self, stream: str, group: str, query: DeadRecordQuery = ALL) -> Iterator[StoredDeadRecord]:
        """Return dead records, the oldest first. For plain Python."""
        return self._read(stream, group, query).iterate("app.streams.dead_records.aread")

    def aread(self, stream: str, group: str, query: DeadRecordQuery = ALL) -> AsyncIterator[StoredDeadRecord]:
        """`read`, from Trio or asyncio: `async for dead in app.streams.dead_records.aread(...)`."""
        return self._read(stream, group, query)

    def _read(self, stream: str, group: str, query: DeadRecordQuery) -> Batches[StoredDeadRecord]:
        codec = self._find_codec(stream)

        async def open_reader() -> ReadBatch[StoredDeadRecord]:
            redis = await self._app.connections.get_async_driver()
            return _DeadRecordReader(self._app, redis, stream, group, query, codec).read_batch

        return Batches(open_reader)

    async def areplay(
        self, stream: str, group: str, query: DeadRecordQuery = ALL, *, dry_run: bool = False
    ) -> DeadRecordTally:
        """Send dead records again.

        Each is appended to the end of its stream, in the partition of its key: all groups get it, behind the later
        records of its key. An interrupted replay may be repeated: within a minute no record is appended twice.

        Args:
            stream: The name of the stream, which is declared here: its code finds the key.
            group: The name of the processor.
            query: Which records; all by default.
            dry_run: Count them and do nothing else.

        Raises:
            StreamFull: A group has not read as many records as are kept. The records before were replayed.
        """
        redis = await self._app.connections.get_async_driver()
        return await _replay(self._app, redis, self._streams[stream], group, query, dry_run)

    @blocking(areplay)
    def replay(self) -> None: ...

    async def apurge(
        self, stream: str, group: str, query: DeadRecordQuery = ALL, *, dry_run: bool = False
    ) -> DeadRecordTally:
        """Remove dead records for good."""
        codec = self._find_codec(stream)
        redis = await self._app.connections.get_async_driver()
        return await _purge(self._app, redis, stream, group, query, dry_run, codec)

    @blocking(apurge)
    def purge(self) -> None: ...


class _DeadRecordReader:
    """Reads dead records in batches. Those that die later are left out."""

    def __init__(
        self,
        app: Application,
        redis: AsyncDriver,
        stream: str,
        group: str,
        query: DeadRecordQuery,
        codec: RecordCodec[Any],
    ) -> None:
        self._app = app
        self._codec = codec
        self._redis = redis
        self._stream = stream
        self._group = group
        self._query = query
        self._keys: StreamKeys = app.keys.for_stream(stream)
        now = time.time()
        self._first = "-" if query.newer_than is None else _id_at(now - query.newer_than)
        self._last = _id_at(now if query.older_than is None else now - query.older_than)
        self._entries = list(query.entries)
        self._left = query.limit
        self._is_checked = False

    async def read_batch(self) -> list[StoredDeadRecord]:
        """Return the next ones, none when there are no more."""
        if not self._is_checked:
            self._is_checked = True
            await self._check_group()
        while self._left is None or self._left > 0:
            entries = await self._read_entries()
            if not entries:
                return []
            unpacked = [(entry, *_unpack(entry)) for entry in entries]
            await learn_encodings(self._redis, self._keys, self._codec, [fields for _, _, fields in unpacked])
            batch = [self._decode(*dead) for dead in unpacked]
            batch = [dead for dead in batch if self._query.error in dead.error][: self._left]
            if batch:
                self._left = None if self._left is None else self._left - len(batch)
                return batch
        return []

    async def _read_entries(self) -> list[Any]:
        if self._query.entries:
            while self._entries:
                portion, self._entries = self._entries[:BATCH_SIZE], self._entries[BATCH_SIZE:]
                replies = await self._redis.perform_all(
                    [
                        calls.read_dead_records(self._keys, self._group, first=entry, last=entry, count=1)
                        for entry in portion
                    ]
                )
                if found := [entry for reply in replies for entry in reply]:
                    return found
            return []
        if self._first == "":
            return []
        call = calls.read_dead_records(
            self._keys, self._group, first=self._first, last=self._last, count=BATCH_SIZE
        )
        entries = await self._redis.perform(call)
        self._first = f"({entries[-1][0].decode()}" if len(entries) == BATCH_SIZE else ""
        return entries

    async def _check_group(self) -> None:
        if self._group not in await self._redis.perform(calls.list_groups(self._keys)):
            raise await make_unknown_group_error(self._app, self._redis, self._stream, self._group)

    def _decode(self, entry: Any, words: dict[bytes, bytes], fields: tuple[bytes, ...]) -> StoredDeadRecord:
        # Whatever another program has written is shown.
        def text(name: bytes) -> str:
            return words.get(name, b"").decode(errors="backslashreplace")

        def number(name: bytes) -> int:
            found = words.get(name, b"")
            return int(found) if found.isdigit() and len(found) < 20 else 0

        return StoredDeadRecord(
            stream=self._stream,
            group=self._group,
            entry=entry[0].decode(),
            partition=number(b"partition"),
            id=text(b"id"),
            attempts=number(b"attempts"),
            error=text(b"error"),
            traceback=text(b"traceback"),
            record=decode_document(fields, self._codec),
            fields=fields,
        )


async def _replay(
    app: Application,
    redis: AsyncDriver,
    stream: Stream[Any],
    group: str,
    query: DeadRecordQuery,
    dry_run: bool,
) -> DeadRecordTally:
    redis = persist(redis, "dlq:replay")
    tally, codec = DeadRecordTally(), stream.codec.without_class()
    reader = _DeadRecordReader(app, redis, stream.name, group, query, codec)
    async with _audited(app, redis, "dlq:replay", stream.name, group, query, dry_run) as action:
        while batch := await reader.read_batch():
            for dead in batch:
                tally.matched += 1
                try:
                    key = stream.codec.key(stream.codec.decode(dead.fields))
                except Exception as error:  # the class of the user's, or a function of theirs
                    tally.left[dead.entry] = f"{type(error).__name__}: {error}"
                    continue
                if not dry_run:
                    # Its own nonce, so that a repeated replay, or one of somebody else, does not append it again.
                    record, nonce = EncodedRecord(key, dead.fields), f"replay:{group}:{dead.entry}"
                    await stream.append(redis, [record], nonce=nonce)
                    remove = calls.remove_dead_records(stream.keys, group, [dead.entry])
                    tally.done += await redis.perform(remove)
                action.set_count(tally.done)
    return tally


def _audited(
    app: Application,
    redis: AsyncDriver,
    name: str,
    stream: str,
    group: str,
    query: DeadRecordQuery,
    dry_run: bool,
) -> AuditedAction:
    target = f"{stream} {group}"
    action = AuditedAction(app, redis, name, target, asdict(query), dry_run=dry_run)
    action.set_count(0)
    return action


async def _purge(
    app: Application,
    redis: AsyncDriver,
    stream: str,
    group: str,
    query: DeadRecordQuery,
    dry_run: bool,
    codec: RecordCodec[Any],
) -> DeadRecordTally:
    redis = persist(redis, "dlq:purge")
    tally, reader = DeadRecordTally(), _DeadRecordReader(app, redis, stream, group, query, codec)
    async with _audited(app, redis, "dlq:purge", stream, group, query, dry_run) as action:
        while batch := await reader.read_batch():
            tally.matched += len(batch)
            if not dry_run:
                entries = [dead.entry for dead in batch]
                remove = calls.remove_dead_records(app.keys.for_stream(stream), group, entries)
                tally.done += await redis.perform(remove)
            action.set_count(tally.done)
    return tally


def _unpack(entry: Any) -> tuple[dict[bytes, bytes], tuple[bytes, ...]]:
    """Return the fields of a dead record, and those of the record itself."""
    words: dict[bytes, bytes] = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
    try:
        return words, decode_msgpack(words.get(b"fields", b""), tuple[bytes, ...])
    except ValueError:
        return words, ()


def _id_at(moment: float) -> str:
    return f"{max(0, int(moment * 1000))}"
