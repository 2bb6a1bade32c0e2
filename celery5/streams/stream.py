"""Streams: ordered, partitioned logs of records.

Records with the same key are in the same partition, in the order in which they were sent. The design is that of Kafka's
topics on Redis Streams; see `docs/guide/streams.md`.
"""

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, islice
from secrets import token_hex
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    Never,
    Protocol,
    TypeVar,
    cast,
    overload,
)

import msgspec

from celery5.application import Application
from celery5.broker.call import Call
from celery5.broker.calls import streams as calls
from celery5.broker.calls.streams import MAX_PARTITIONS, RecordToAppend
from celery5.broker.colour import blocking
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import StreamKeys
from celery5.errors import Misconfigured, StreamFull
from celery5.hints import describe_option, make_attribute_error
from celery5.middleware.middleware import ObservedApplication
from celery5.protocol.counts import format_count
from celery5.protocol.streams.groups import RefusedAppend, StaleMap, StreamMap
from celery5.protocol.streams.routing import find_partition
from celery5.runners.operations import MessageOperation
from celery5.streams.archive import Archive, check_archive
from celery5.streams.codec import HEADERS_FIELD, MAX_DECOMPRESSED, PLAIN, RecordCodec

R = TypeVar("R")
S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])

SEND_BATCH = 200
"""Records in one call: Redis does nothing else in that time."""
MAX_MAP_CHANGES = 5
"""How often one call is made again because the number of partitions has changed."""
_NAME = re.compile(r"[^\s,{}:#]{1,200}")


class RecordId(NamedTuple):
    """Where a record is: its partition, and its id there, `<ms since 1970>-<number in the partition, from 1>`."""

    partition: int
    id: str


@dataclass(frozen=True, slots=True)
class Keep:
    """How long a stream keeps records that all of its groups have read, and what happens when a group is too slow.

    Raises:
        Misconfigured: A value makes no sense.
    """

    records: int = 50_000
    """The most records of one partition. A few more may be kept, as that is cheaper to trim."""
    age: float | timedelta | None = None
    """Seconds after which records that all groups have read may go, when the next ones come; None for no limit."""
    full: Literal["refuse", "drop", "archive"] = "refuse"
    """What happens when a group has not read this many records: `refuse` raises StreamFull at the sender; `drop` drops
    the oldest ones, `archive` gives them to the archive. The group passes over these, which is counted and logged."""
    archive: Archive | None = None
    """Where they go with `archive`: a FileArchive, or a function of the stream's name, the partition and the records.
    While as many as `records` of a partition wait for it, the sender gets StreamFull."""

    def __post_init__(self) -> None:
        """Check the values."""
        if isinstance(self.records, bool) or self.records < 1:
            raise Misconfigured(f"Keep(records={self.records!r}): give 1 or more")
        if self.full not in ("refuse", "drop", "archive"):
            raise Misconfigured(f"Keep(full={self.full!r}): give refuse, drop or archive")
        if (self.full == "archive") != (self.archive is not None):
            raise Misconfigured(
                "Keep(full='archive', archive=...) go together: without an archive give refuse or drop"
            )
        if self.archive is not None:
            check_archive(self.archive)
        if self.age is not None and self.max_age <= 0:
            raise Misconfigured(f"Keep(age={self.age!r}): give seconds above 0")

    @property
    def max_age(self) -> float:
        """The age in seconds, 0 for no limit."""
        return self.age.total_seconds() if isinstance(self.age, timedelta) else self.age or 0.0


class Stream(Generic[R]):
    """A stream of records. `app.stream(...)` declares one.

    Args:
        app: The application.
        name: Its name, part of its keys in Redis.
        codec: Encodes and decodes its records, and finds their keys.
        partitions: How many partitions a new stream gets. `celery5 stream reshard` changes it later.
        keep: What is kept of what was read.
    """

    def __init__(
        self,
        app: ObservedApplication,
        name: str,
        codec: RecordCodec[R],
        *,
        partitions: int = 16,
        keep: Keep | None = None,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise Misconfigured(
                f"stream {name!r}: a name is 1 to 200 characters without spaces, commas, colons, braces or #"
            )
        if isinstance(partitions, bool) or not 1 <= partitions <= MAX_PARTITIONS:
            raise Misconfigured(f"stream {name}: partitions is {partitions!r}: give 1 to {MAX_PARTITIONS}")
        self.app = app
        self.name = name
        self.codec = codec
        self.partitions = partitions
        self.keep: Keep = keep or Keep()
        self.keys: StreamKeys = app.keys.for_stream(name)
        self._map: StreamMap | None = None
        self._unkeyed = count()
        self._is_registered = False

    @overload
    def subscribe(self, subscriber: S, /, **options: Any) -> S: ...
    @overload
    def subscribe(self, /, **options: Any) -> Callable[[S], S]: ...
    def subscribe(self, subscriber: Any = None, /, **options: Any) -> Any:
        """Have a task or a Data Sink get each record. Also a decorator of a task, with and without options.

        A task is called with the record: each makes one job, with retries and dead letters of its own. A sink gets
        records as documents whose `id` names the record and whose `value` is it, in batches; each at least once.
        Workers do this, by a processor with the name of the subscriber.

        Args:
            subscriber: The task or the sink.
            options: Those of `app.processor`: `start`, `name` and so on. What cannot be read becomes a dead record.

        Raises:
            Misconfigured: It is neither, or an option makes no sense.
        """
        registry = cast("StreamApplication", self.app).streams

        def subscribe(subscriber: Any) -> Any:
            registry.subscribe(self, subscriber, **options)
            return subscriber

        return subscribe if subscriber is None else subscribe(subscriber)

    def subscribe_check(self, check: Any, /, **options: Any) -> Callable[[F], F]:
        """Return the decorator of a function of a record that says in which state a health check is.

        It returns what functions of a check return. From the start of the group on, `latest` by default, each record
        is reported in the worker that owns its partition: let the check have `scope="global"` to tell all workers.

        Args:
            check: The health check. The application's workers run it from then on, if they did not yet.
            options: Those of `app.processor`.

        Raises:
            Misconfigured: It is no health check, or an option makes no sense.
        """
        registry = cast("StreamApplication", self.app).streams

        def subscribe(judge: F) -> F:
            registry.subscribe_check(self, check, judge, **options)
            return judge

        return subscribe

    def __repr__(self) -> str:
        return f"<Stream {self.name!r} of {self.app.name!r}>"

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            raise make_attribute_error("stream", self, name)

    async def asend(
        self, *records: R, times: Sequence[int] | None = None, **unknown: Never
    ) -> list[RecordId]:
        """Append records, in this order; return where each of them is.

        Up to 200 records are appended all or none; more are sent in portions, which are smaller when the stream keeps
        fewer.

        Args:
            records: The records.
            times: The time of each record in ms since 1970, which is the first part of its id; by default now. In a
                partition it never decreases.

        Raises:
            BadRecord: A value does not fit its field. Nothing was sent.
            MessageTooLarge: A record is too large. Nothing was sent.
            StreamFull: A group has not read as many records as are kept, or there are more records of one partition
                than that. Nothing of this portion was sent.
            ValueError: A time is earlier than that of the last record of the partition, or `times` has another length.
            BrokerUnavailable: Redis cannot be reached. There is no backlog: it could not keep the order.
        """
        _refuse_options(unknown)
        encoded = self._encode(records, times)
        redis = await self.app.connections.get_async_driver()
        return await _send(self.app, redis, self, encoded)

    @blocking(asend)
    def send(self) -> None: ...

    def send_many(self, records: Iterable[R]) -> Iterator[RecordId]:
        """Append records from an iterable of any length in portions; yield where each of them is. For plain Python.

        Raises:
            BadRecord: As `send`; the portions before were sent.
        """
        iterator = iter(records)
        while portion := list(islice(iterator, self.portion)):
            yield from self.send(*portion)

    @property
    def portion(self) -> int:
        """How many records of many are sent at once: no more than a partition keeps, as they may all be of one."""
        return min(SEND_BATCH, self.keep.records)

    def _encode(self, records: Sequence[R], times: Sequence[int] | None) -> list["EncodedRecord"]:
        if times is not None and len(times) != len(records):
            raise ValueError(
                f"{format_count(len(records), 'record')} with {format_count(len(times), 'time')}: give one for each"
            )
        return [
            self.encode(record, None if times is None else times[index])
            for index, record in enumerate(records)
        ]

    def encode(self, record: R, time: int | None = None) -> "EncodedRecord":
        """Return a record as it is sent. Raises BadRecord and MessageTooLarge."""
        limit = self.app.settings.message_limit
        words = self.codec.encode(record, limit=max(MAX_DECOMPRESSED, limit))
        for word in words:
            if len(word) > limit:
                raw = word if isinstance(word, bytes) else word.encode()
                self.app.check_message_size(raw, f"a record of stream {self.name}")
        return EncodedRecord(self.codec.key(record), words, time)

    def find_partition(self, record: R) -> int:
        """Return the partition of a record by the number of partitions that is known here. Raises BadRecord."""
        key = self.codec.key(record)
        return (
            0 if key is None else find_partition(key, self._map.partitions if self._map else self.partitions)
        )

    def make_append(
        self, records: Sequence["EncodedRecord"], *, nonce: str = "", source: str = ""
    ) -> Call[calls.AppendReply]:
        """Return the call that appends records by the map that is known here."""
        version, partitions = (self._map.version, self._map.partitions) if self._map else (0, self.partitions)
        to_append = [
            RecordToAppend(
                next(self._unkeyed) % partitions
                if record.key is None
                else find_partition(record.key, partitions),
                record.words,
                record.time,
                record.origin,
            )
            for record in records
        ]
        return calls.append(
            self.keys,
            to_append,
            version=version,
            partitions=self.partitions,
            most=self.keep.records,
            full=self.keep.full,
            max_age=self.keep.max_age,
            nonce=nonce,
            source=source,
        )

    async def append(
        self, redis: AsyncDriver, records: Sequence["EncodedRecord"], *, source: str = "", nonce: str = ""
    ) -> list[RecordId]:
        """Append records in one call, by the current map. Raises as `send`.

        Args:
            redis: The driver of the broker.
            records: The records.
            source: The outbox that they come from.
            nonce: A text that only a repetition of this call has; by default a new one.
        """
        if not self._is_registered:
            await redis.perform(calls.register_stream(self.app.keys, self.name))
            if self.codec.encoding != PLAIN:
                await redis.perform(calls.declare_encoding(self.keys, self.codec.encoding))
            self._is_registered = True
        nonce = "" if source else nonce or token_hex(16)
        for _ in range(MAX_MAP_CHANGES):
            reply = await redis.perform(self.make_append(records, nonce=nonce, source=source))
            if isinstance(reply, RefusedAppend):
                raise StreamFull(reply.why) if reply.is_full else ValueError(reply.why)
            if not isinstance(reply, StaleMap):
                return [RecordId(partition, record_id) for partition, record_id in reply.ids]
            self._map = reply.map
        raise Misconfigured(f"the number of partitions of stream {self.name} changes all the time")


class StreamRegistry(Protocol):
    """The streams of an application, as a stream needs them: `app.streams`."""

    def subscribe(self, stream: Stream[Any], subscriber: Any, **options: Any) -> None:
        """Have a task or a sink get each record. Raises Misconfigured."""
        ...

    def subscribe_check(self, stream: Stream[Any], check: Any, judge: Any, **options: Any) -> None:
        """Have a health check report what a function says of each record. Raises Misconfigured."""
        ...


class StreamApplication(ObservedApplication, Protocol):
    """The application that a stream belongs to."""

    @property
    def streams(self) -> StreamRegistry:
        """Its streams."""
        ...


class EncodedRecord(NamedTuple):
    """A record as it is sent."""

    # Canonical key; None for any partition.
    key: bytes | None
    # Fields and values in turns.
    words: Sequence[str | bytes]
    # Its time in ms since 1970; None for now.
    time: int | None = None
    # Its id in the outbox that it comes from.
    origin: str = ""


def _refuse_options(unknown: Mapping[str, object]) -> None:
    for option in unknown:
        raise Misconfigured(f"send: {describe_option('send option', option, ['times'])}")


@contextmanager
def surround_sending(
    stream: Stream[Any], records: Sequence[EncodedRecord]
) -> Generator[Sequence[EncodedRecord], None, None]:
    """Surround the sending of records by the application's middleware; yield them with the headers that it adds."""
    middleware = stream.app.middleware
    if not middleware.operates:
        yield records
        return
    operation = MessageOperation("send", "stream", stream.name, len(records), [{} for _ in records])
    with middleware.operating(operation):
        yield [
            record._replace(words=(*record.words, HEADERS_FIELD, msgspec.json.encode(headers)))
            if headers
            else record
            for record, headers in zip(records, operation.headers, strict=True)
        ]


async def _send(
    _app: Application, redis: AsyncDriver, stream: Stream[Any], records: Sequence[EncodedRecord]
) -> list[RecordId]:
    with surround_sending(stream, records) as records:
        return await _append(redis, stream, records)


async def _append(
    redis: AsyncDriver, stream: Stream[Any], records: Sequence[EncodedRecord]
) -> list[RecordId]:
    ids: list[RecordId] = []
    portion = SEND_BATCH if len(records) <= SEND_BATCH else stream.portion
    for first in range(0, len(records), portion):
        ids += await stream.append(redis, records[first : first + portion])
    return ids
