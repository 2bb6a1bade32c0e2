"""The streams and processors of an application: `app.streams`."""

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar

from celery5.broker.colour import blocking
from celery5.errors import Misconfigured, UnknownName
from celery5.middleware.middleware import ObservedApplication
from celery5.protocol.streams.groups import StreamMap
from celery5.similar_names import did_you_mean
from celery5.streams import operations
from celery5.streams.browsing import (
    RecordQuery,
    read_records,
)
from celery5.streams.codec import PLAIN, PrimitiveCodec, RecordCodec, make_codec
from celery5.streams.dead_records import DeadRecords
from celery5.streams.entry import StoredRecord
from celery5.streams.lags import StreamState, get_states
from celery5.streams.parked_keys import ParkedKeyRegistry
from celery5.streams.processor import Processor, make_processor
from celery5.streams.stream import Keep, Stream
from celery5.streams.subscriptions import subscribe, subscribe_check

R = TypeVar("R")


class Streams(Mapping[str, Stream[Any]]):
    """The streams of an application by name, and its processors."""

    REACHED_AS = "app.streams."

    def __init__(self, app: ObservedApplication) -> None:
        self._app = app
        self._streams: dict[str, Stream[Any]] = {}
        self._processors: dict[tuple[str, str], Processor[Any]] = {}

    def __getitem__(self, name: str) -> Stream[Any]:
        try:
            return self._streams[name]
        except KeyError:
            raise UnknownName(
                f"no stream {name!r} here; "
                + did_you_mean(
                    name, self._streams, otherwise=f"declared: {', '.join(sorted(self._streams)) or 'none'}"
                )
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, name: object) -> bool:
        return name in self._streams

    def declare(
        self,
        name: str,
        kind: Any = None,
        *,
        by: Any = None,
        partitions: int = 16,
        keep: Keep | None = None,
        codec: Any = PLAIN,
        reads: Collection[str] = (),
    ) -> Stream[Any]:
        """Declare a stream: `app.stream(...)`. Raises Misconfigured."""
        if name in self._streams:
            raise Misconfigured(f"two streams are named {name!r}: give one another name")
        made = make_codec(
            kind, codec=codec, by=by, reads=reads, limit=lambda: self._app.settings.message_limit
        )
        stream: Stream[Any] = Stream(self._app, name, made, partitions=partitions, keep=keep)
        self._streams[name] = stream
        return stream

    def declare_processor(self, stream: Stream[R], options: dict[str, Any]) -> Callable[[Any], Any]:
        """Return the decorator of a processor: `app.processor(...)`. Raises Misconfigured."""

        def declare(function: Any) -> Any:
            processor = make_processor(stream, function, options, self._app.loop)
            key = (processor.stream.name, processor.name)
            if key in self._processors:
                raise Misconfigured(
                    f"two processors of stream {key[0]} are named {key[1]!r}: give one another name"
                )
            self._processors[key] = processor
            return function

        return declare

    def subscribe(self, stream: Stream[Any], subscriber: Any, **options: Any) -> None:
        """Have a task or a sink get each record: `Stream.subscribe` explains it. Raises Misconfigured."""
        subscribe(self, stream, subscriber, **options)

    def subscribe_check(self, stream: Stream[Any], check: Any, judge: Any, **options: Any) -> None:
        """Have a health check report what a function says of each record. Raises Misconfigured."""
        subscribe_check(self, stream, check, judge, **options)

    @property
    def processors(self) -> tuple[Processor[Any], ...]:
        """The processors."""
        return tuple(self._processors.values())

    @property
    def dead_records(self) -> DeadRecords:
        """The records that groups have given up: read, replay and purge them."""
        return DeadRecords(self._app, self, self._find_document_codec)

    @property
    def parked_keys(self) -> ParkedKeyRegistry:
        """The keys that groups have parked: see, release and discard them."""
        return ParkedKeyRegistry(self._app)

    def parse_processors(self, text: str) -> tuple[str, ...]:
        """Return the names of processors in a list with commas, or no name for `none`.

        Raises:
            Misconfigured: The application has no processor of that name.
        """
        if text.strip() == "none":
            return ()
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        known = sorted({processor.name for processor in self.processors})
        for name in names:
            if name not in known:
                hint = did_you_mean(name, known, otherwise=f"there are: {', '.join(known) or 'none'}")
                raise Misconfigured(f"no processor {name!r} here; {hint}; write none for no processor")
        return names

    async def ainfo(self, stream: str | None = None) -> list[StreamState]:
        """Return the state of all streams of the application that are declared or known to Redis.

        Args:
            stream: This one alone.

        Raises:
            Misconfigured: There is no such stream.
        """
        redis = await self._app.connections.get_async_driver()
        return await get_states(self._app, redis, self, stream)

    @blocking(ainfo)
    def info(self) -> None: ...

    def read(
        self,
        stream: str,
        start: str | datetime | None = None,
        *,
        partition: int | None = None,
        limit: int | None = None,
        follow: bool = False,
    ) -> Iterator[StoredRecord]:
        """Return records as they are stored, without a group: nothing is acknowledged. For plain Python.

        Those of a partition come in their order, and all of them by their time. The class of the records is not
        needed, but for the types of native fields, which are text without it, and an encoding of your own.

        Args:
            stream: The name of the stream.
            start: `earliest`, `latest`, an id, or a time; None for the last `limit` records.
            partition: Only this one.
            limit: How many at most.
            follow: Wait for the records that come later, without end.

        Raises:
            Misconfigured: There is no such stream or partition, or a value makes no sense.
        """
        query = RecordQuery(stream, start, partition, limit, follow, self._find_document_codec(stream))
        return read_records(self._app, query).iterate("app.streams.aread")

    def aread(
        self,
        stream: str,
        start: str | datetime | None = None,
        *,
        partition: int | None = None,
        limit: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[StoredRecord]:
        """`read`, from Trio or asyncio: `async for stored in app.streams.aread(...)`."""
        query = RecordQuery(stream, start, partition, limit, follow, self._find_document_codec(stream))
        return read_records(self._app, query)

    def _find_document_codec(self, stream: str) -> RecordCodec[Any]:
        """Return what decodes the entries of a stream as they are stored, whether it is declared here or not."""
        if stream not in self._streams:
            return make_codec(None, limit=lambda: self._app.settings.message_limit)
        codec = self._streams[stream].codec
        return codec if isinstance(codec, PrimitiveCodec) else codec.without_class()

    async def aseek(
        self,
        stream: str,
        group: str,
        start: str | datetime,
        *,
        partition: int | None = None,
        force: bool = False,
    ) -> dict[int, str]:
        """Have a group continue elsewhere.

        Args:
            stream: The name of the stream.
            group: The name of the processor.
            start: `earliest`, `latest`, the id of the next record, or a time.
            partition: Only this one.
            force: Do it while members of the group run: they continue at the new place.

        Returns:
            The new cursors, by partition.

        Raises:
            GroupIsLive: Members run, and `force` is not given.
            Misconfigured: There is no such group, or `start` makes no sense.
        """
        redis = await self._app.connections.get_async_driver()
        return await operations.seek(self._app, redis, stream, group, start, partition, force)

    @blocking(aseek)
    def seek(self) -> None: ...

    async def areset(
        self,
        stream: str,
        group: str,
        start: str | datetime = "earliest",
        *,
        force: bool = False,
        state: bool = False,
    ) -> dict[int, str]:
        """Have a group begin again: all partitions, and no quarantine is left.

        What it has sent stays sent, and its dead records stay.

        Args:
            stream: The name of the stream.
            group: The name of the processor.
            start: As in `seek`.
            force: Do it while members of the group run.
            state: Forget its keyed state, too.

        Returns:
            The new cursors, by partition.

        Raises:
            GroupIsLive: Members run, and `force` is not given.
            Misconfigured: There is no such group, or `start` makes no sense.
        """
        redis = await self._app.connections.get_async_driver()
        return await operations.reset(self._app, redis, stream, group, start, force, state)

    @blocking(areset)
    def reset(self) -> None: ...

    async def aforget(self, stream: str, group: str, *, force: bool = False) -> None:
        """Remove a group with its cursors, state and dead records: it holds back trimming no longer.

        A processor of this name that is started later begins as a new one.

        Args:
            stream: The name of the stream.
            group: The name of the processor.
            force: Also with outputs that are not delivered, and with dead records.

        Raises:
            GroupIsLive: Members run: they would bring it back.
            GroupNotEmpty: It has outputs that are not delivered, or dead or parked records.
            Misconfigured: There is no such group.
        """
        redis = await self._app.connections.get_async_driver()
        return await operations.forget(self._app, redis, stream, group, force)

    @blocking(aforget)
    def forget(self) -> None: ...

    async def aset_quarantine(self, stream: str, group: str, partition: int, why: str = "") -> bool:
        """Quarantine a partition of a group, or with no `why` end its quarantine.

        Returns:
            Whether the group has this partition.
        """
        redis = await self._app.connections.get_async_driver()
        return await operations.set_quarantine(self._app, redis, stream, group, partition, why)

    @blocking(aset_quarantine)
    def set_quarantine(self) -> None: ...

    async def areshard(self, stream: str, partitions: int, *, force: bool = False) -> StreamMap:
        """Change the number of partitions of a stream; each key keeps its order.

        Args:
            stream: The name of the stream.
            partitions: The new number.
            force: Do it while a group has open windows. These stay where they are; the further records of a key that
                moves are in another window of the same time.

        Raises:
            WindowsAreOpen: A group has open windows, and `force` is not given.
            Misconfigured: There is no such stream, or too many earlier changes are not read past.
        """
        redis = await self._app.connections.get_async_driver()
        return await operations.reshard(self._app, redis, stream, partitions, force)

    @blocking(areshard)
    def reshard(self) -> None: ...
