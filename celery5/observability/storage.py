"""Read what Redis holds for an application: each server, and what the queues, the streams and the history take."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from celery5.application import Application
from celery5.broker.call import Call
from celery5.broker.calls import health as health_calls
from celery5.broker.calls import observability as calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls import streams as stream_calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.broker.routing.unreachable import UNREACHABLE
from celery5.errors import BrokerDenied, BrokerError, BrokerReplied
from celery5.protocol.health.server_memory import ServerMemory, read_server_memory
from celery5.protocol.masking import get_error_text
from celery5.protocol.observability.rollup import CLUSTER
from celery5.protocol.observability.storage import (
    QueueStorage,
    ServerStorage,
    Storage,
    StreamStorage,
    describe_storage,
    estimate_bytes,
    merge_shards,
)
from celery5.protocol.shards import get_queue_of_shard, group_shards, take_queues

MAX_COUNTED = 2000
"""Queues whose entries are counted, to find those that have the most."""
MAX_QUEUES = 200
"""Queues whose bytes are measured."""
MAX_STREAMS = 50
"""Streams that are measured."""
MAX_PARTITIONS = 16
"""Partitions of a stream whose bytes are measured; the others are taken to be alike."""
MAX_SCANS = 10
"""Round trips in which keys are looked at, to find results; with more keys the others are taken to be alike."""
KEYS_PER_SCAN = 1000
"""Keys that the server looks at in one of them."""
MAX_RESULTS = 200
"""Results whose bytes are measured; the others are taken to be alike."""
CALLS_AT_ONCE = 500
"""Calls in one trip: other clients are served between two."""

T = TypeVar("T")
GetDriver = Callable[[str], Awaitable[AsyncDriver]]
"""Returns the driver of one broker, by its name."""


class BrokerStorage(NamedTuple):
    """What one broker holds."""

    server: ServerStorage
    queues: Sequence[QueueStorage] = ()
    streams: Sequence[StreamStorage] = ()
    queues_left_out: int = 0
    streams_left_out: int = 0


async def read_storage(app: Application, get_driver: GetDriver) -> Storage:
    """Return what all brokers hold. A broker that is unreachable is named, and the others are shown.

    Results are estimated from at most 10,000 keys, of which the bytes of 200 are measured. What else single jobs and
    runs store (progress, windows) is in the counts of servers alone.

    Raises:
        BrokerError: No broker can be reached.
    """
    found: list[BrokerStorage] = []
    error: BrokerError | None = None
    others: dict[str, int | None] = {}
    results: dict[str, int | None] = {}
    for name in app.brokers.names:  # bound: the brokers of the settings
        try:
            redis = await get_driver(name)
            found.append(await _read_broker(app, redis, name))
            results[name] = await _estimate_results(app, redis, found[-1].server.keys)
            if not others:  # what belongs to no queue is on the default broker, the first one
                others = await _measure_others(
                    app, redis, [row.queue for row in merge_shards(found[0].queues)]
                )
        except UNREACHABLE as reason:
            error = reason
            found.append(BrokerStorage(ServerStorage(broker=name, unreachable=get_error_text(reason))))
    if error is not None and all(broker.server.unreachable for broker in found):
        raise error
    queues = sorted(merge_shards(row for broker in found for row in broker.queues), key=_weigh)
    return Storage(
        servers=tuple(broker.server for broker in found),
        queues=tuple(queues[:MAX_QUEUES]),
        streams=tuple(row for broker in found for row in broker.streams),
        others=others | ({"results": _add_known(results.values())} if others else {}),
        results=results,
        queues_left_out=sum(broker.queues_left_out for broker in found) + max(len(queues) - MAX_QUEUES, 0),
        streams_left_out=sum(broker.streams_left_out for broker in found),
    )


async def _read_broker(app: Application, redis: AsyncDriver, broker: str) -> BrokerStorage:
    info: dict[str, str] = await _perform_if_permitted(redis, health_calls.get_server_info()) or {}
    config: dict[str, str] = {}
    for name in health_calls.PARAMETERS:
        value = await _perform_if_permitted(redis, health_calls.get_parameter(name))
        if value is not None:
            config[name] = value
    database = app.brokers.get(broker).endpoint.db
    names = await redis.perform(queue_calls.list_queues(app.keys))
    streams = await redis.perform(stream_calls.list_streams(app.keys))
    queues = await _measure_queues(app, redis, broker, take_queues(names, MAX_COUNTED))
    return BrokerStorage(
        describe_storage(broker, info, config or None, database=database),
        queues,
        [await _measure_stream(app, redis, broker, stream) for stream in streams[:MAX_STREAMS]],
        len(set(map(get_queue_of_shard, names))) - len(merge_shards(queues)),
        max(len(streams) - MAX_STREAMS, 0),
    )


async def _measure_queues(
    app: Application, redis: AsyncDriver, broker: str, names: Sequence[str]
) -> list[QueueStorage]:
    """Return what queues and shards take: those of the queues with the most entries, when there are many."""
    counts = [queue_calls.get_queue_depth(app.queue(name)) for name in names]
    depths = await _perform_in_parts(redis, counts)
    rows = [
        QueueStorage(
            queue=name,
            broker=broker,
            jobs=depth.waiting + depth.running,
            scheduled=depth.scheduled,
            held=depth.held,
            dead=depth.dead,
        )
        for name, depth in zip(names, depths, strict=True)
    ]
    shards = group_shards({row.queue: row for row in rows})
    most = sorted(merge_shards(rows), key=_weigh)[:MAX_QUEUES]
    rows = [row for queue in most for row in shards[queue.queue]]
    parts = [_get_parts(app.queue(row.queue)) for row in rows]
    measured = await _measure_keys(redis, [key for part in parts for keys in part for key in keys])
    if measured is None:
        return rows
    sums: list[QueueStorage] = []
    remaining = iter(measured)
    for row, part in zip(rows, parts, strict=True):
        streams, waiting, dead, index = [sum(next(remaining) for _ in keys) for keys in part]
        sums.append(
            QueueStorage(
                queue=row.queue,
                broker=broker,
                jobs=row.jobs,
                scheduled=row.scheduled,
                held=row.held,
                dead=row.dead,
                total_bytes=streams + waiting + dead + index,
                stream_bytes=streams,
                waiting_bytes=waiting,
                dead_bytes=dead,
                index_bytes=index,
            )
        )
    return sums


def _get_parts(keys: QueueKeys) -> tuple[tuple[str, ...], ...]:
    """Return the keys of a queue: its streams, what waits, its dead letters, and everything else."""
    return (
        keys.streams,
        (keys.waiting, keys.due),
        (keys.dead,),
        (
            keys.jobs,
            keys.leases,
            keys.unique,
            keys.slots,
            keys.slot_counts,
            keys.limited_counts,
            keys.run_records,
            keys.run_outbox,
            keys.live_runs,
            keys.past_runs,
            keys.undoing_runs,
            keys.revoked_jobs,
            keys.revoked_documents,
            keys.idle_runs,
            keys.dead_causes,
            keys.worker_deaths,
            keys.lost_workers,
            keys.lost_work,
        ),
    )


async def _measure_stream(app: Application, redis: AsyncDriver, broker: str, stream: str) -> StreamStorage:
    keys = app.keys.for_stream(stream)
    partitions = await redis.perform(stream_calls.count_partitions(keys))
    counts = await _perform_in_parts(
        redis, [stream_calls.count_records(keys, partition) for partition in range(partitions)]
    )
    first = range(min(partitions, MAX_PARTITIONS))
    measured = await _measure_keys(redis, [keys.log(partition) for partition in first])
    records = sum(counts)
    total = None if measured is None else estimate_bytes(sum(measured), sum(counts[: len(first)]), records)
    return StreamStorage(
        stream=stream, broker=broker, partitions=partitions, records=records, total_bytes=total
    )


async def _measure_others(
    app: Application, redis: AsyncDriver, queues: Sequence[str]
) -> dict[str, int | None]:
    """Return the bytes of what belongs to no queue."""
    keys = app.keys
    groups = [CLUSTER, *queues]
    history = [
        f"{prefix}{group}"
        for prefix in (keys.metrics_minutes_prefix, keys.metrics_hours_prefix)
        for group in groups
    ]
    named = {
        "metrics": [keys.metrics_state, keys.metrics_reports, *history],
        "jobs": [keys.failed_jobs, keys.other_jobs],
        "audit": [keys.audit],
        "subscriptions": [keys.subscriptions, keys.subscription_deadlines, keys.unclaimed_events],
    }
    measured = {name: await _measure_keys(redis, wanted) for name, wanted in named.items()}
    return {name: None if sizes is None else sum(sizes) for name, sizes in measured.items()}


async def _estimate_results(app: Application, redis: AsyncDriver, key_count: int) -> int | None:
    """Return the bytes of all results on a server with this many keys; None where it does not say."""
    found, cursor, looked_at = set[str](), 0, 0
    try:
        for _ in range(MAX_SCANS):
            cursor, names = await redis.perform(
                health_calls.scan_keys(cursor, f"{app.keys.pattern}:result:*", count=KEYS_PER_SCAN)
            )
            found.update(name for name in names if app.keys.owns(name))
            looked_at += KEYS_PER_SCAN
            if not cursor:
                break
    except (BrokerDenied, BrokerReplied):
        return None
    measured = await _measure_keys(redis, sorted(found)[:MAX_RESULTS])
    if measured is None:
        return None
    # The order of SCAN is that of hashes, so the first keys are like all others.
    count = len(found) * max(key_count, looked_at) // looked_at if cursor else len(found)
    return sum(measured) * count // len(measured) if measured else 0


def _add_known(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


async def read_memory(app: Application, get_driver: GetDriver) -> list[ServerMemory]:
    """Return how full the server of each broker is; one that is unreachable, or does not say, is missing."""
    found: list[ServerMemory] = []
    for name in app.brokers.names:
        try:
            memory = await read_broker_memory(name, await get_driver(name))
        except UNREACHABLE:
            continue
        if memory is not None:
            found.append(memory)
    return found


async def read_broker_memory(broker: str, redis: AsyncDriver) -> ServerMemory | None:
    """Return how full the server of one broker is; None where it does not say, or not to this user."""
    info = await _perform_if_permitted(redis, health_calls.get_memory_info())
    return read_server_memory(broker, info or {})


async def _measure_keys(redis: AsyncDriver, keys: Sequence[str]) -> list[int] | None:
    """Return the bytes of keys; None where the server does not say."""
    try:
        return await _perform_in_parts(redis, [calls.measure_memory(key) for key in keys])
    except (BrokerDenied, BrokerReplied):
        return None


async def _perform_in_parts(redis: AsyncDriver, wanted: Sequence[Call[T]]) -> list[T]:
    replies: list[T] = []
    for start in range(0, len(wanted), CALLS_AT_ONCE):
        replies += await redis.perform_all(wanted[start : start + CALLS_AT_ONCE])
    return replies


async def _perform_if_permitted(redis: AsyncDriver, call: Call[Any]) -> Any:
    try:
        return await redis.perform(call)
    except (BrokerDenied, BrokerReplied):
        return None


def _weigh(row: QueueStorage) -> tuple[int, str]:
    """Return what queues are sorted by: those with the most bytes or entries first."""
    weight = row.jobs + row.scheduled + row.held + row.dead if row.total_bytes is None else row.total_bytes
    return -weight, row.queue
