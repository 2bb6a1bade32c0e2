"""Events: what a processor reads from one partition, and what it produces.

A record is acknowledged when the next one is asked for, and when the processor returns. Its outputs and changes of
state are committed in the same step as that, or not at all.
"""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, Unpack, overload

import msgspec

from celery5.errors import Misconfigured
from celery5.events.event import Event, get_event_declaration
from celery5.protocol.job.annotations import adapt_annotation
from celery5.protocol.job.arguments import encode_value
from celery5.protocol.job.job import Job
from celery5.protocol.job.json_values import from_json
from celery5.protocol.masking import get_type_name
from celery5.protocol.streams.windows import WindowKey, WindowShape
from celery5.streams.codec import RecordCodec
from celery5.streams.entry import StreamEntry
from celery5.streams.feed import RecordFeed
from celery5.streams.stream import Stream, surround_sending
from celery5.streams.windows import WindowOptions, Windows, WindowSettings

R = TypeVar("R")
A = TypeVar("A")
K = TypeVar("K", bound=WindowKey)

MAX_BATCH = 10_000
"""The most records of one batch."""


class JobSource(Protocol):
    """What makes a job: a signature, `task.s(...)`."""

    def job(self) -> Job:
        """Return the job."""
        ...


class Outputs:
    """What a processor produces: committed together with the records that it has taken."""

    def __init__(self, feed: RecordFeed, into: Stream[Any] | None) -> None:
        self._feed = feed
        self._into = into

    @property
    def partition(self) -> int:
        """The partition."""
        return self._feed.partition

    @property
    def group(self) -> str:
        """The name of the processor."""
        return self._feed.group

    def send(self, *records: Any, to: Stream[Any] | None = None) -> None:
        """Append records to a stream, by default the one that the processor declares with `into`.

        Raises:
            BadRecord: A value does not fit its field.
            Misconfigured: No stream is given.
        """
        stream = to or self._into
        if stream is None:
            raise Misconfigured(
                f"processor {self._feed.group} declares no stream to send to: give into=... there, or to=... here"
            )
        with surround_sending(stream, [stream.encode(record) for record in records]) as encoded:
            for record in encoded:
                self._feed.add_output(
                    msgspec.msgpack.encode({"stream": stream.name, "key": record.key, "words": record.words})
                )

    def job(self, *sources: JobSource) -> None:
        """Send jobs: `task.s(...)`. Each is published once. Raises BadArguments."""
        for source in sources:
            self._feed.add_output(msgspec.msgpack.encode({"job": source.job().to_bytes()}))

    def event(self, *events: Event) -> None:
        """Send events, instances of classes of `@app.event`. Each is sent once. Raises BadArguments."""
        for event in events:
            job = get_event_declaration(type(event)).make_job(event)
            self._feed.add_output(msgspec.msgpack.encode({"job": job.to_bytes()}))


class KeyedState:
    """State of a processor by key, in Redis. A key belongs to the records of one key, and so to one partition."""

    def __init__(self, feed: RecordFeed) -> None:
        self._feed = feed

    async def get(self, key: str, default: Any = None, *, type: Any = Any) -> Any:  # noqa: A002  as msgspec has it
        """Return the value of a key, as it is with all changes so far; `default` when there is none.

        Raises:
            msgspec.ValidationError: The value is not of the type.
        """
        raw = await self._feed.get_state(_check_key(key))
        return (
            default
            if raw is None
            else msgspec.json.decode(raw, type=adapt_annotation(type), dec_hook=from_json)
        )

    def set(self, key: str, value: Any) -> None:
        """Set the value of a key: anything that has a JSON form. Raises TypeError, also for a key that is no text."""
        self._feed.set_state(_check_key(key), encode_value(value, "a state"))

    def delete(self, key: str) -> None:
        """Remove a key. Raises TypeError for a key that is no text."""
        self._feed.set_state(_check_key(key), None)


def _check_key(key: Any) -> Any:
    """Return a key of the state. Raises TypeError for one that the commit could not send to Redis."""
    if isinstance(key, str):
        try:
            str.encode(key)
        except UnicodeEncodeError:
            raise TypeError(f"a key of the state is {key!r}, which has half of a surrogate pair") from None
    elif isinstance(key, bool) or not isinstance(key, int | float | bytes):
        raise TypeError(f"a key of the state is a text, not {get_type_name(key)}")
    return key


class StreamEvents(Outputs, Generic[R]):
    """The records of one partition, for a processor.

    Iterate over it for entries, over `records()` for records, over `take(...)` for batches.
    """

    def __init__(self, feed: RecordFeed, codec: RecordCodec[R], into: Stream[Any] | None = None) -> None:
        super().__init__(feed, into)
        self._codec = codec
        self.state: KeyedState = KeyedState(feed)

    def __aiter__(self) -> "StreamEvents[R]":
        return self

    async def __anext__(self) -> StreamEntry[R]:
        raw = self._feed.take_next()
        if raw is None:
            raw = await self._feed.wait_next()
            if raw is None:
                raise StopAsyncIteration
        return StreamEntry(self._feed.partition, self._feed.group, raw, self._codec)

    def records(self) -> "Records[R]":
        """Return the records themselves, to iterate over."""
        return Records(self._feed, self._codec)

    @overload
    def windows(
        self,
        shape: WindowShape,
        *,
        initial: A,
        add: Callable[[A, R], A],
        by: None = None,
        **options: Unpack[WindowSettings[R]],
    ) -> Windows[R, str, A]: ...
    @overload
    def windows(
        self,
        shape: WindowShape,
        *,
        initial: A,
        add: Callable[[A, R], A],
        by: Callable[[R], K],
        **options: Unpack[WindowSettings[R]],
    ) -> Windows[R, K, A]: ...
    def windows(
        self,
        shape: WindowShape,
        *,
        initial: Any,
        add: Callable[[Any, R], Any],
        by: Callable[[R], Any] | None = None,
        **options: Unpack[WindowSettings[R]],
    ) -> Windows[R, Any, Any]:
        """Gather records in windows of event time; return the windows as they close, to iterate over.

        Only the value of a window is kept, not its records. It is keyed state, committed with the records; what is
        sent for a closed window is committed together with its closing.

        Args:
            shape: How windows lie: `Tumbling(60)` or `Hopping(300, every=60)`.
            initial: The value of a window without records: anything that JSON can hold.
            add: Returns the value with one more record.
            by: Returns the key of a record: each key has windows of its own. By default the key of the stream.
            options: `time`, `lateness`, `idle`, `on_late`, `max_open`, `name`: `WindowSettings` explains them.

        Raises:
            Misconfigured: An option makes no sense, or the processor has a concurrency within its partitions.
        """
        return Windows(self._feed, self._codec, WindowOptions(shape, initial, add, by, **options))

    def take(self, count: int, *, within: float) -> "EntryBatches[R]":
        """Return batches of entries, to iterate over.

        Args:
            count: The most entries of one batch.
            within: Seconds to wait for more, once the first one is there.

        Raises:
            Misconfigured: A number makes no sense; or `within` is more than the grace period.
        """
        return EntryBatches(
            self._feed, self._codec, _check_batch(self._feed, count), _check_within(self._feed, within)
        )


class Records(Generic[R]):
    """The records of a partition."""

    def __init__(self, feed: RecordFeed, codec: RecordCodec[R]) -> None:
        self._feed = feed
        self._codec = codec
        self._decode = codec.decode
        self._take_next = feed.take_next

    def __aiter__(self) -> "Records[R]":
        return self

    async def __anext__(self) -> R:
        raw = self._take_next()
        if raw is None:
            raw = await self._feed.wait_next()
            if raw is None:
                raise StopAsyncIteration
        return self._decode(raw[1])

    def take(self, count: int, *, within: float) -> "RecordBatches[R]":
        """Return batches of records: `events.take(...)` explains it."""
        return RecordBatches(
            self._feed, self._codec, _check_batch(self._feed, count), _check_within(self._feed, within)
        )


class EntryBatches(Generic[R]):
    """Batches of entries."""

    def __init__(self, feed: RecordFeed, codec: RecordCodec[R], count: int, within: float) -> None:
        self._feed = feed
        self._codec = codec
        self._count = count
        self._within = within

    def __aiter__(self) -> "EntryBatches[R]":
        return self

    async def __anext__(self) -> list[StreamEntry[R]]:
        batch = await self._feed.wait_batch(self._count, self._within)
        if not batch:
            raise StopAsyncIteration
        return [StreamEntry(self._feed.partition, self._feed.group, raw, self._codec) for raw in batch]

    def records(self) -> "RecordBatches[R]":
        """Return the same batches as lists of records."""
        return RecordBatches(self._feed, self._codec, self._count, self._within)


class RecordBatches(Generic[R]):
    """Batches of records."""

    def __init__(self, feed: RecordFeed, codec: RecordCodec[R], count: int, within: float) -> None:
        self._feed = feed
        self._decode = codec.decode
        self._count = count
        self._within = within

    def __aiter__(self) -> "RecordBatches[R]":
        return self

    async def __anext__(self) -> list[R]:
        batch = await self._feed.wait_batch(self._count, self._within)
        if not batch:
            raise StopAsyncIteration
        decode = self._decode
        return [decode(raw[1]) for raw in batch]


def _check_batch(feed: RecordFeed, count: int) -> int:
    if isinstance(count, bool) or not 1 <= count <= MAX_BATCH:
        raise Misconfigured(f"processor {feed.group}: take({count!r}): give 1 to {MAX_BATCH:,} records")
    return count


def _check_within(feed: RecordFeed, within: float) -> float:
    if not 0 <= within <= feed.grace_period:
        raise Misconfigured(
            f"processor {feed.group}: take(within={within!r}): give 0 to {feed.grace_period:g} s, its grace period: "
            "a batch that is collected for longer could not end in time"
        )
    return within
