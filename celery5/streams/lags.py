"""How far the groups of streams are behind: what `app.streams.info` returns."""

from collections.abc import Iterable, Mapping

import msgspec

from celery5.application import Application
from celery5.broker.calls import streams as calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import StreamKeys
from celery5.protocol.masking import mask_lines
from celery5.protocol.streams.groups import PartitionState
from celery5.streams.browsing import make_unknown_error

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


async def get_states(
    app: Application, redis: AsyncDriver, declared: Iterable[str], stream: str | None
) -> list[StreamState]:
    """Return the state of all streams that are declared or known to Redis, or of one. Raises Misconfigured."""
    names = sorted({*declared, *await redis.perform(calls.list_streams(app.keys))})
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
        counts += await redis.perform_all(
            [calls.count_waiting_for_archive(keys, partition) for partition in portion]
        )
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
        mask_lines(state.why),
        state.since,
        archived,
        state.open_windows,
        state.late,
    )
