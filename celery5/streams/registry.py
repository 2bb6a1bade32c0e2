"""The streams and processors of an application: `app.streams`."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from celery5.application import Application
from celery5.broker.calls import streams as calls
from celery5.broker.colour import run_in_event_loop, run_in_plain_python
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import StreamKeys
from celery5.errors import CeleryError, Misconfigured
from celery5.protocol.similar_names import did_you_mean
from celery5.protocol.streams.groups import PartitionState, StreamMap
from celery5.streams.browsing import (
    AwaitedRecords,
    RecordQuery,
    make_unknown_error,
    make_unknown_group_error,
    read_records,
)
from celery5.streams.codec import PrimitiveCodec, make_codec
from celery5.streams.dead_records import DeadRecords
from celery5.streams.parked_keys import ParkedKeyRegistry
from celery5.streams.processor import Processor, make_processor, parse_start
from celery5.streams.stored_record import StoredRecord
from celery5.streams.stream import Keep, Stream
from celery5.streams.subscriptions import subscribe, subscribe_check

R = TypeVar("R")

PARTITIONS_PER_CALL = 64
"""How many partitions are looked at in one call: Redis does nothing else in that time."""


class PartitionLag(msgspec.Struct, frozen=True):
    """How far one partition of a group is behind."""

    partition: int
    # Records that are not done.
    lag: int
    # Seconds since the first of them was sent.
    age: float
    cursor: str
    last_id: str
    # How many of them were dropped before the group has read them.
    lost: int
    # The incarnation that owns it; '' for none.
    owner: str
    # How many owners have died since the cursor last moved.
    deaths: int
    # '' or `quarantined`, and why.
    condition: str
    why: str
    # Since when, in seconds since 1970; 0 for no condition.
    since: float = 0.0
    # How many of the records that are not done were archived: the group will pass over them.
    archived: int = 0
    # How many windows by the key of the stream are open, and how many records were late for a window, ever.
    open_windows: int = 0
    late: int = 0


class GroupLag(msgspec.Struct, frozen=True):
    """How far a group is behind."""

    stream: str
    group: str
    members: tuple[str, ...]
    # Records that are not done, in all partitions.
    lag: int
    # Seconds since the oldest of them was sent.
    age: float
    partitions: tuple[PartitionLag, ...]
    # Records that it has given up.
    dead: int = 0
    # Keys that it has parked, and how many records they have.
    parked_keys: int = 0
    parked_records: int = 0


class StreamState(msgspec.Struct, frozen=True):
    """A stream and its groups."""

    stream: str
    partitions: int
    # How many records its logs have.
    records: int
    groups: tuple[GroupLag, ...]
    # How many records were dropped before all groups had read them, ever, and how many were archived.
    dropped: int = 0
    archived: int = 0
    # How many of those the archive has not taken yet, by partition.
    waiting_for_archive: Mapping[int, int] = {}


class GroupIsLive(CeleryError):
    """Members of the group run: its cursors are not moved under them."""


class GroupNotEmpty(CeleryError):
    """A group has outputs that are not delivered, or dead or parked records: it is not forgotten."""


class WindowsAreOpen(CeleryError):
    """A group has open windows: the number of partitions is not changed, as keys would move away from theirs."""


class Streams(Mapping[str, Stream[Any]]):
    """The streams of an application by name, and its processors."""

    REACHED_AS = "app.streams."

    def __init__(self, app: Application) -> None:
        self._app = app
        self._streams: dict[str, Stream[Any]] = {}
        self._processors: dict[tuple[str, str], Processor[Any]] = {}

    def __getitem__(self, name: str) -> Stream[Any]:
        try:
            return self._streams[name]
        except KeyError:
            raise Misconfigured(
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
        codec: Any = "json",
    ) -> Stream[Any]:
        """Declare a stream: `app.stream(...)`. Raises Misconfigured."""
        if name in self._streams:
            raise Misconfigured(f"two streams are named {name!r}: give one another name")
        stream: Stream[Any] = Stream(
            self._app, name, make_codec(kind, codec=codec, by=by), partitions=partitions, keep=keep
        )
        self._streams[name] = stream
        return stream

    def declare_processor(self, stream: Stream[R], options: dict[str, Any]) -> Callable[[Any], Any]:
        """Return the decorator of a processor: `app.processor(...)`. Raises Misconfigured."""

        def declare(function: Any) -> Any:
            processor = make_processor(stream, function, options)
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
        return DeadRecords(self._app, self)

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

    def info(self, stream: str | None = None) -> list[StreamState]:
        """Return the state of all streams of the application that are declared or known to Redis. For plain Python.

        Args:
            stream: This one alone.

        Raises:
            Misconfigured: There is no such stream.
        """
        return run_in_plain_python(_get_all, self._app, self, stream)

    async def ainfo(self, stream: str | None = None) -> list[StreamState]:
        """`info`, from Trio or asyncio."""
        return await run_in_event_loop(_get_all, self._app, self, stream)

    def read(
        self,
        stream: str,
        start: str | datetime | None = None,
        *,
        partition: int | None = None,
        count: int | None = None,
        follow: bool = False,
    ) -> Iterator[StoredRecord]:
        """Return records as they are stored, without a group: nothing is acknowledged. For plain Python.

        Those of a partition come in their order, and all of them by their time. The class of the records is not
        needed, but for the types of native fields, which are text without it.

        Args:
            stream: The name of the stream.
            start: `earliest`, `latest`, an id, or a time; None for the last `count` records.
            partition: Only this one.
            count: At most so many.
            follow: Wait for the records that come later, without end.

        Raises:
            Misconfigured: There is no such stream or partition, or a value makes no sense.
        """
        return read_records(
            self._app, RecordQuery(stream, start, partition, count, follow, self._find_native_codec(stream))
        )

    def aread(
        self,
        stream: str,
        start: str | datetime | None = None,
        *,
        partition: int | None = None,
        count: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[StoredRecord]:
        """`read`, from Trio or asyncio: `async for stored in app.streams.aread(...)`."""
        return AwaitedRecords(
            self._app, RecordQuery(stream, start, partition, count, follow, self._find_native_codec(stream))
        )

    def _find_native_codec(self, stream: str) -> PrimitiveCodec[Any] | None:
        codec = self._streams[stream].codec if stream in self._streams else None
        return codec if isinstance(codec, PrimitiveCodec) else None

    def seek(
        self,
        stream: str,
        group: str,
        start: str | datetime,
        *,
        partition: int | None = None,
        force: bool = False,
    ) -> dict[int, str]:
        """Have a group continue elsewhere. For plain Python.

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
        return run_in_plain_python(_seek, self._app, stream, group, start, partition, force)

    async def aseek(
        self,
        stream: str,
        group: str,
        start: str | datetime,
        *,
        partition: int | None = None,
        force: bool = False,
    ) -> dict[int, str]:
        """`seek`, from Trio or asyncio."""
        return await run_in_event_loop(_seek, self._app, stream, group, start, partition, force)

    def reset(
        self,
        stream: str,
        group: str,
        start: str | datetime = "earliest",
        *,
        force: bool = False,
        state: bool = False,
    ) -> dict[int, str]:
        """Have a group begin anew: all partitions, and no quarantine is left. For plain Python.

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
        return run_in_plain_python(_reset, self._app, stream, group, start, force, state)

    async def areset(
        self,
        stream: str,
        group: str,
        start: str | datetime = "earliest",
        *,
        force: bool = False,
        state: bool = False,
    ) -> dict[int, str]:
        """`reset`, from Trio or asyncio."""
        return await run_in_event_loop(_reset, self._app, stream, group, start, force, state)

    def forget(self, stream: str, group: str, *, force: bool = False) -> None:
        """Remove a group with its cursors, state and dead records: it holds back trimming no longer. For plain Python.

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
        return run_in_plain_python(_forget, self._app, stream, group, force)

    async def aforget(self, stream: str, group: str, *, force: bool = False) -> None:
        """`forget`, from Trio or asyncio."""
        return await run_in_event_loop(_forget, self._app, stream, group, force)

    def set_quarantine(self, stream: str, group: str, partition: int, why: str = "") -> bool:
        """Quarantine a partition of a group, or with no `why` end its quarantine. For plain Python.

        Returns:
            Whether the group has this partition.
        """
        return run_in_plain_python(_set_quarantine, self._app, stream, group, partition, why)

    async def aset_quarantine(self, stream: str, group: str, partition: int, why: str = "") -> bool:
        """`set_quarantine`, from Trio or asyncio."""
        return await run_in_event_loop(_set_quarantine, self._app, stream, group, partition, why)

    def reshard(self, stream: str, partitions: int, *, force: bool = False) -> StreamMap:
        """Change the number of partitions of a stream; each key keeps its order. For plain Python.

        Args:
            stream: The name of the stream.
            partitions: The new number.
            force: Do it while a group has open windows. These stay where they are; the further records of a key that
                moves are in another window of the same time.

        Raises:
            WindowsAreOpen: A group has open windows, and `force` is not given.
            Misconfigured: There is no such stream, or too many earlier changes are not read past.
        """
        return run_in_plain_python(_reshard, self._app, stream, partitions, force)

    async def areshard(self, stream: str, partitions: int, *, force: bool = False) -> StreamMap:
        """`reshard`, from Trio or asyncio."""
        return await run_in_event_loop(_reshard, self._app, stream, partitions, force)


async def _get_all(
    app: Application, redis: AsyncDriver, streams: Streams, stream: str | None
) -> list[StreamState]:
    names = sorted({*streams, *await redis.perform(calls.list_streams(app.keys))})
    if stream is not None:
        if stream not in names:
            raise await make_unknown_error(app, redis, stream)
        names = [stream]
    return [await _get_info(app, redis, name) for name in names]


async def _get_info(app: Application, redis: AsyncDriver, name: str) -> StreamState:
    keys = app.keys.for_stream(name)
    totals = await redis.perform(calls.get_totals(keys))
    lengths: list[int] = []
    for first in range(0, totals.most, PARTITIONS_PER_CALL):
        last = min(totals.most, first + PARTITIONS_PER_CALL)
        lengths += await redis.perform_all(
            [calls.count_records(keys, partition) for partition in range(first, last)]
        )
    groups = [
        await measure_group(keys, redis, group) for group in await redis.perform(calls.list_groups(keys))
    ]
    waiting = await _count_waiting_for_archive(keys, redis) if totals.archived else {}
    return StreamState(
        name, totals.partitions, sum(lengths), tuple(groups), totals.dropped, totals.archived, waiting
    )


async def _count_waiting_for_archive(keys: StreamKeys, redis: AsyncDriver) -> dict[int, int]:
    """Return how many records of each partition the archive has not taken yet, where there are any."""
    partitions = await redis.perform(calls.list_archived_partitions(keys))
    counts: list[int] = []
    for first in range(0, len(partitions), PARTITIONS_PER_CALL):
        portion = partitions[first : first + PARTITIONS_PER_CALL]
        counts += await redis.perform_all([calls.count_waiting_for_archive(keys, one) for one in portion])
    return {partition: count for partition, count in zip(partitions, counts, strict=True) if count}


async def measure_group(keys: StreamKeys, redis: AsyncDriver, group: str) -> GroupLag:
    """Return how far a group is behind: a call for every 64 partitions, and one more."""
    found: list[PartitionLag] = []
    members: tuple[str, ...] = ()
    dead = await redis.perform(calls.count_dead_records(keys, group))
    first, total = 0, 1
    parked_keys = parked_records = 0
    while first < total:
        state = await redis.perform(calls.get_group(keys, group, first=first, count=PARTITIONS_PER_CALL))
        total, members = state.total, state.members
        parked_keys, parked_records = state.parked_keys, state.parked_records
        found += [_measure(partition, state.get_age(partition)) for partition in state.partitions]
        first += PARTITIONS_PER_CALL
    return GroupLag(
        keys.stream,
        group,
        members,
        sum(partition.lag for partition in found),
        max((partition.age for partition in found), default=0.0),
        tuple(found),
        dead,
        parked_keys,
        parked_records,
    )


def _measure(state: PartitionState, age: float) -> PartitionLag:
    lost, archived = state.missing
    return PartitionLag(
        state.partition,
        state.lag,
        age,
        state.cursor,
        state.last_id,
        lost,
        state.owner,
        state.deaths,
        state.condition,
        state.why,
        state.since,
        archived,
        state.open_windows,
        state.late,
    )


async def _seek(
    app: Application,
    redis: AsyncDriver,
    stream: str,
    group: str,
    start: str | datetime,
    partition: int | None,
    force: bool,
) -> dict[int, str]:
    first = parse_start(start, "seek")
    reply = await redis.perform(
        calls.seek(app.keys.for_stream(stream), group, first, partition=partition, force=force)
    )
    cursors = await _check_sought(app, redis, stream, group, reply)
    if partition is not None and partition not in cursors:
        raise Misconfigured(f"stream {stream} has no partition {partition}")
    return cursors


async def _check_sought(
    app: Application, redis: AsyncDriver, stream: str, group: str, reply: int | dict[int, str]
) -> dict[int, str]:
    if reply == -1:
        raise await make_unknown_group_error(app, redis, stream, group)
    if isinstance(reply, int):
        raise GroupIsLive(
            f"{_name_members(reply, group)}: stop them first, or force it: they continue at the new place"
        )
    return reply


def _name_members(count: int, group: str) -> str:
    return f"1 member of group {group} runs" if count == 1 else f"{count} members of group {group} run"


async def _reset(
    app: Application,
    redis: AsyncDriver,
    stream: str,
    group: str,
    start: str | datetime,
    force: bool,
    state: bool,
) -> dict[int, str]:
    first = parse_start(start, "reset")
    call = calls.seek(
        app.keys.for_stream(stream), group, first, force=force, begins_anew=True, forgets_state=state
    )
    return await _check_sought(app, redis, stream, group, await redis.perform(call))


async def _forget(app: Application, redis: AsyncDriver, stream: str, group: str, force: bool) -> None:
    keys, first = app.keys.for_stream(stream), 0
    while True:
        call = calls.forget_group(keys, group, first=first, count=PARTITIONS_PER_CALL, force=force)
        reply = await redis.perform(call)
        if reply.outcome == "unknown":
            raise await make_unknown_group_error(app, redis, stream, group)
        if reply.outcome == "live":
            raise GroupIsLive(f"{_name_members(reply.number, group)}: stop them first")
        if reply.outcome == "kept":
            raise GroupNotEmpty(
                f"group {group} of stream {stream} has {reply.number} outputs that are not delivered and "
                f"{reply.dead} dead and {reply.parked} parked records: nothing was forgotten; with force they go, too"
            )
        first = reply.number
        if not first:
            return


async def _set_quarantine(
    app: Application, redis: AsyncDriver, stream: str, group: str, partition: int, why: str
) -> bool:
    condition = "quarantined" if why else ""
    call = calls.set_condition(app.keys.for_stream(stream), group, partition, condition, why=why)
    return await redis.perform(call)


async def _reshard(
    app: Application, redis: AsyncDriver, stream: str, partitions: int, force: bool
) -> StreamMap:
    if not 1 <= partitions <= 4096:
        raise Misconfigured(f"reshard to {partitions!r}: give 1 to 4096 partitions")
    reply = await redis.perform(calls.reshard(app.keys.for_stream(stream), partitions, force=force))
    if isinstance(reply, StreamMap):
        return reply
    if reply.outcome == "windows":
        raise WindowsAreOpen(
            f"group {reply.group} of stream {stream} has open windows in partition {reply.partition}, and keys would "
            "move away from theirs: send nothing until they are closed, or force it: such keys get two windows of "
            "the same time"
        )
    raise Misconfigured(
        f"stream {stream} is not there: nothing was ever sent to it"
        if reply.outcome == "unknown"
        else f"stream {stream} was resharded 16 times, and the records from before are still there"
    )
