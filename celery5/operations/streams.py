"""See streams and how far their groups are behind; move groups, and handle what they could not process."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from celery5.errors import Misconfigured
from celery5.operations.columns import ResultColumn
from celery5.operations.operation import Changed, Effect, Operation
from celery5.operations.parameters import Limit, Names, Nothing, Pattern, Span, Text, about
from celery5.protocol.counts import format_count

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.streams.dead_records import DeadRecordQuery, DeadRecordTally
    from celery5.streams.entry import StoredRecord
    from celery5.streams.lags import StreamState
    from celery5.streams.parked_keys import ParkedKeyState

PLACE = "earliest|latest|ID|TIME"
"""What stands for a place in a stream."""
Partition = Annotated[Annotated[int, Meta(ge=0)] | None, about("This partition alone.", metavar="N")]


async def list_streams(app: "App", _: Nothing) -> "list[StreamState]":
    """Show each stream, and how far each group of it is behind."""
    return await app.streams.ainfo()


class OneStream(msgspec.Struct, frozen=True):
    """A stream."""

    stream: Annotated[Text, about("The stream.")]


async def show_stream(app: "App", asked: OneStream) -> "StreamState":
    """Show the groups of a stream, and of each partition its owner, cursor, lag and condition."""
    (state,) = await app.streams.ainfo(asked.stream)
    return state


class Tail(msgspec.Struct, frozen=True):
    """Which records of a stream."""

    stream: Annotated[Text, about("The stream.")]
    start: Annotated[
        str,
        Meta(max_length=100),
        about("Where to begin: earliest, latest, an id or a time; default: with the last records."),
    ] = ""
    partition: Partition = None
    limit: Annotated[Limit, about("Records at most.")] = 10


async def tail_stream(app: "App", asked: Tail) -> "list[StoredRecord]":
    """Show records of a stream: the last ones, or those from a place on."""
    from celery5.observability.shown_values import mask_value

    reading = app.streams.aread(
        asked.stream, asked.start or None, partition=asked.partition, limit=asked.limit
    )
    return [
        msgspec.structs.replace(stored, record=mask_value(app, stored.record)) async for stored in reading
    ]


class NewRecords(msgspec.Struct, frozen=True):
    """Records to send."""

    stream: Annotated[Text, about("The stream.")]
    records: Annotated[list[str], Meta(min_length=1, max_length=500), about("One JSON text for each record.")]


async def send_records(app: "App", asked: NewRecords) -> Changed:
    """Send records to a stream that is declared here."""
    stream = app.streams[asked.stream]
    records: list[Any] = [stream.codec.parse(text.encode()) for text in asked.records]
    places = await stream.asend(*records)
    await app.audit.arecord_sending("stream:send", asked.stream, count=len(places))
    return Changed(summary=f"{format_count(len(places), 'record is', 'records are')} sent", count=len(places))


class Seek(msgspec.Struct, frozen=True):
    """Where a group is to continue."""

    stream: Annotated[Text, about("The stream.")]
    group: Annotated[Text, about("The group.")]
    to: Annotated[
        Text,
        about(
            "The record that comes next: earliest, latest, an id or a time.", metavar=PLACE, is_option=True
        ),
    ]
    partition: Partition = None
    force: Annotated[bool, about("Also while workers run the group: they go on at the new place.")] = False


async def seek(app: "App", asked: Seek) -> Changed:
    """Have a group continue elsewhere in a stream."""
    cursors = await app.streams.aseek(
        asked.stream, asked.group, asked.to, partition=asked.partition, force=asked.force
    )
    return Changed(
        summary=f"group {asked.group} continues at {asked.to}",
        count=1,
        value={"stream": asked.stream, "group": asked.group, "cursors": cursors},
    )


class Reset(msgspec.Struct, frozen=True):
    """A group to begin again."""

    stream: Annotated[Text, about("The stream.")]
    group: Annotated[Text, about("The group.")]
    to: Annotated[
        str, Meta(max_length=500), about("The record that comes first; default: earliest.", metavar=PLACE)
    ] = ""
    state: Annotated[bool, about("Forget its keyed state, too.")] = False
    forget: Annotated[bool, about("Remove the group: it holds back trimming no longer.")] = False
    force: Annotated[
        bool,
        about(
            "Also while workers run the group. To remove it: also with dead records and outputs that wait."
        ),
    ] = False


async def reset(app: "App", asked: Reset) -> Changed:
    """Have a group begin again, in all partitions, or forget it."""
    name = {"stream": asked.stream, "group": asked.group}
    if asked.forget:
        if asked.to or asked.state:
            raise Misconfigured("`forget` removes the group wholly: give it without `to` and `state`")
        await app.streams.aforget(asked.stream, asked.group, force=asked.force)
        return Changed(
            summary=f"group {asked.group} is forgotten", count=1, value={**name, "forgotten": True}
        )
    cursors = await app.streams.areset(
        asked.stream, asked.group, asked.to or "earliest", force=asked.force, state=asked.state
    )
    return Changed(summary=f"group {asked.group} begins again", count=1, value={**name, "cursors": cursors})


class Reshard(msgspec.Struct, frozen=True):
    """A new number of partitions."""

    stream: Annotated[Text, about("The stream.")]
    partitions: Annotated[int, Meta(ge=1, le=4096), about("The new number of partitions.")]
    force: Annotated[bool, about("Also with open windows: a key that moves gets two of the same time.")] = (
        False
    )


async def reshard(app: "App", asked: Reshard) -> Changed:
    """Change the number of partitions of a stream, while all runs."""
    before = await show_stream(app, OneStream(asked.stream))
    new = await app.streams.areshard(asked.stream, asked.partitions, force=asked.force)
    return Changed(
        summary=f"stream {asked.stream} has {format_count(new.partitions, 'partition')}",
        count=new.partitions,
        value={"stream": asked.stream, "before": before.partitions, "partitions": new.partitions},
    )


class Quarantine(msgspec.Struct, frozen=True):
    """A partition to quarantine, or to process again."""

    stream: Annotated[Text, about("The stream.")]
    group: Annotated[Text, about("The group.")]
    partition: Annotated[int, Meta(ge=0), about("The partition.")]
    why: Annotated[str, Meta(max_length=500), about("Why; without a reason its quarantine is ended.")] = ""


async def quarantine(app: "App", asked: Quarantine) -> Changed:
    """Have no worker process a partition of a group until that is ended."""
    done = await app.streams.aset_quarantine(asked.stream, asked.group, asked.partition, asked.why)
    state = "quarantined" if asked.why else "processed again"
    return Changed(summary=f"partition {asked.partition} of {asked.group} is {state}", count=int(done))


class OneGroup(msgspec.Struct, frozen=True):
    """A group of a stream."""

    stream: Annotated[Text, about("The stream.")]
    group: Annotated[Text, about("The group.")]


async def list_parked(app: "App", asked: OneGroup) -> "list[ParkedKeyState]":
    """Show the keys that a group has parked: how many records of each wait, since when and why."""
    return await app.streams.parked_keys.aread(asked.stream, asked.group)


class ParkedRelease(msgspec.Struct, frozen=True):
    """Parked keys to release."""

    stream: Annotated[Text, about("The stream.")]
    group: Annotated[Text, about("The group.")]
    keys: Annotated[Names, about("The keys; default: all.", metavar="KEY", is_argument=True)] = []
    discard: Annotated[bool, about("Make their records dead records instead.")] = False


async def release(app: "App", asked: ParkedRelease) -> Changed:
    """Have parked records processed, in their order, or made dead records."""
    keys = app.streams.parked_keys
    act = keys.adiscard if asked.discard else keys.arelease
    count = await act(asked.stream, asked.group, *asked.keys)
    done = "discarded" if asked.discard else "released"
    return Changed(
        summary=f"{format_count(count, 'key is', 'keys are')} {done}", count=count, value={done: count}
    )


class DeadRecordFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead records of a group."""

    stream: Annotated[Text, about("The stream.")]
    group: Annotated[Text, about("The group that has given them up.")]
    ids: Annotated[Names, about("These entries.")] = []
    message: Annotated[Pattern, about("Whose error has this text.")] = ""
    older_than: Annotated[Span | None, about("Dead for longer.")] = None
    newer_than: Annotated[Span | None, about("Dead for less.")] = None
    limit: Annotated[Annotated[int, Meta(ge=1, le=100_000)] | None, about("Records at most.")] = None

    def to_query(self, limit: int | None) -> "DeadRecordQuery":
        """Return the query that the API takes."""
        from celery5.streams.dead_records import DeadRecordQuery

        return DeadRecordQuery(
            entries=tuple(self.ids),
            older_than=self.older_than,
            newer_than=self.newer_than,
            error=self.message,
            limit=limit,
        )


class DeadRecordRow(msgspec.Struct, frozen=True, kw_only=True):
    """A record that a group has given up."""

    entry: str
    partition: int
    id: str
    record: Any
    attempts: int
    error: str
    traceback: str
    died: float


async def read_dead_records(app: "App", asked: DeadRecordFilter) -> list[DeadRecordRow]:
    """Show the records that a group has given up, and why."""
    from celery5.observability.shown_values import mask_dead_record

    query = asked.to_query(min(asked.limit or 50, 1000))
    return [
        DeadRecordRow(
            **{field.name: getattr(dead, field.name) for field in msgspec.structs.fields(DeadRecordRow)}
        )
        async for read in app.streams.dead_records.aread(asked.stream, asked.group, query)
        for dead in [mask_dead_record(app, read)]
    ]


class DeadRecordChange(DeadRecordFilter, frozen=True, kw_only=True):
    """Which dead records to send again, or to delete."""

    dry_run: Annotated[bool, about("Say what would be done, and do nothing.")] = False


async def replay_dead_records(app: "App", asked: DeadRecordChange) -> Changed:
    """Send dead records again, to the end of their stream."""
    tally = await app.streams.dead_records.areplay(
        asked.stream, asked.group, asked.to_query(asked.limit), dry_run=asked.dry_run
    )
    return _summarize(tally, "sent again", is_dry=asked.dry_run)


async def purge_dead_records(app: "App", asked: DeadRecordChange) -> Changed:
    """Delete dead records for good."""
    tally = await app.streams.dead_records.apurge(
        asked.stream, asked.group, asked.to_query(asked.limit), dry_run=asked.dry_run
    )
    return _summarize(tally, "deleted", is_dry=asked.dry_run)


def _summarize(tally: "DeadRecordTally", done: str, *, is_dry: bool) -> Changed:
    count = tally.matched if is_dry else tally.done
    return Changed(
        summary=f"{format_count(count, 'dead record')} {done}",
        count=count,
        dry_run=is_dry,
        failure=f"{len(tally.left)} cannot be sent" if tally.left else "",
    )


READ_DEAD_RECORDS = Operation(
    "dlq:read-records",
    read_dead_records,
    columns=(
        ResultColumn("entry", "entry"),
        ResultColumn("died", "died", "time"),
        ResultColumn("partition", "partition"),
        ResultColumn("id", "id"),
        ResultColumn("attempts", "attempts"),
        ResultColumn("error", "error"),
        ResultColumn("value", "record"),
    ),
)
STREAM_OPERATIONS = (
    Operation("stream:list", list_streams, result_module="celery5.streams.lags"),
    Operation("stream:show", show_stream, result_module="celery5.streams.lags"),
    Operation("stream:tail", tail_stream, Effect.SEE_CONFIDENTIAL, result_module="celery5.streams.entry"),
    Operation("stream:parked", list_parked, result_module="celery5.streams.parked_keys"),
    Operation("stream:send", send_records, Effect.SEND_RECORDS),
    Operation("stream:release", release, Effect.AT_ONCE),
    Operation("stream:quarantine", quarantine, Effect.QUARANTINE),
    Operation("stream:seek", seek, Effect.MOVE_GROUPS),
    Operation("stream:reset", reset, Effect.MOVE_GROUPS | Effect.DELETE),
    Operation("stream:reshard", reshard, Effect.MOVE_GROUPS),
    READ_DEAD_RECORDS,
    Operation("dlq:replay-records", replay_dead_records, Effect.SEND_RECORDS | Effect.AT_ONCE),
    Operation("dlq:purge-records", purge_dead_records, Effect.DELETE),
)
"""The operations on streams, and on the dead records of their groups."""
