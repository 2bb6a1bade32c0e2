"""Read the last hours of the history of many queues in three trips, and remember what does not change any more."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from celery5.broker.call import Call
from celery5.broker.calls import observability as calls
from celery5.broker.colour import sleep
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.protocol.observability.recent import (
    Durations,
    RecentHistory,
    RecentPoint,
    add_up_durations,
    pack_durations,
    read_durations,
    read_point,
    unpack_durations,
)
from celery5.protocol.observability.report import Measurements
from celery5.protocol.observability.rollup import (
    HOUR,
    HOURS,
    MINUTE,
    MINUTES,
    MetricsGroup,
    Tier,
    name_point,
    read_index,
    unpack_chunk,
    unpack_point,
)

FIELDS_AT_ONCE = 60
"""Fields of the history in one call."""


class HistoryChunk(NamedTuple):
    """A packed chunk of the history of a queue."""

    tier: Tier
    queue: str
    # When it begins, in seconds since 1970.
    at: int

    @property
    def key(self) -> str:
        """Under which it is remembered. No field of the history has this name."""
        return f"{self.tier.name}:chunk:{self.at}:{self.queue}"


class HistoryPlan(NamedTuple):
    """Which points of a queue are needed: fields that wait to be packed, and chunks that are packed."""

    queue: str
    # When the first hour begins, in seconds since 1970.
    first_hour: int
    fields: Sequence[str]
    chunks: Sequence[HistoryChunk]

    @property
    def sources(self) -> list[str]:
        """Under which all of them are remembered."""
        return [*self.fields, *(chunk.key for chunk in self.chunks)]


class DurationsOfQueue(NamedTuple):
    """The distributions of points that are over, added up."""

    first_hour: int
    sources: frozenset[str]
    durations: Durations


class KnownPoint(NamedTuple):
    """A point that is over, and its durations, packed."""

    point: RecentPoint
    durations: bytes


class RecentHistoryReader:
    """Reads the recent history of queues."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        # Points that are over, by what they are read from.
        self._points: dict[str, list[KnownPoint]] = {}
        # By queue.
        self._durations: dict[str, DurationsOfQueue] = {}

    async def read(
        self, redis: AsyncDriver, queues: Iterable[str], *, most: int, begin: float, now: float
    ) -> dict[str, RecentHistory]:
        """Return the history of those of the queues that have one, the first `most` of them."""
        found = await redis.perform(calls.read_state(self._keys, ["index"]))
        index = read_index(found.get("index", b""))
        names = [queue for queue in queues if queue in index][:most]
        groups = await self._read_groups(redis, names)
        plans = [plan_history(name, groups[name].waiting, begin, now) for name in names]
        fields = [field for plan in plans for field in plan.fields if field not in self._points]
        chunks = [chunk for plan in plans for chunk in plan.chunks if chunk.key not in self._points]
        reads: list[Call[Any]] = [
            calls.read_state(self._keys, fields[start : start + FIELDS_AT_ONCE])
            for start in range(0, len(fields), FIELDS_AT_ONCE)
        ]
        states = len(reads)
        reads += map(self._read_chunk, chunks)
        replies = await redis.perform_all(reads) if reads else []
        stored: dict[str, bytes] = {
            name: field for reply in replies[:states] for name, field in reply.items()
        }
        packed = dict(zip((chunk.key for chunk in chunks), replies[states:], strict=True))
        histories: dict[str, RecentHistory] = {}
        points: dict[str, list[KnownPoint]] = {}
        durations: dict[str, DurationsOfQueue] = {}
        for plan in plans:
            own = {
                source: known
                for source in plan.sources
                if (known := self._points.get(source) or _unpack(source, stored, packed))
            }
            durations[plan.queue] = added_up = _add_up(plan, own, self._durations.get(plan.queue))
            histories[plan.queue] = _make_history(plan, own, added_up.durations, groups[plan.queue], begin)
            points |= own
            await sleep(0)  # unpacking many queues takes time
        self._points, self._durations = points, durations
        return histories

    async def _read_groups(self, redis: AsyncDriver, names: Sequence[str]) -> dict[str, MetricsGroup]:
        reads = [calls.read_state(self._keys, [f"group:{name}"]) for name in names]
        states = await redis.perform_all(reads) if reads else []
        groups: dict[str, MetricsGroup] = {}
        for name, state in zip(names, states, strict=True):
            groups[name] = MetricsGroup.unpack(state.get(f"group:{name}"))
            await sleep(0)
        return groups

    def _read_chunk(self, chunk: HistoryChunk) -> Call[list[tuple[int, bytes]]]:
        is_minutes = chunk.tier is MINUTES
        prefix = self._keys.metrics_minutes_prefix if is_minutes else self._keys.metrics_hours_prefix
        return calls.read_points(prefix, chunk.queue, chunk.at, chunk.at + chunk.tier.chunk - 1)


def _unpack(
    source: str, stored: Mapping[str, bytes], packed: Mapping[str, list[tuple[int, bytes]]]
) -> list[KnownPoint]:
    """Return the points that were read from a source; none when it is not there, or not packed yet."""
    if source in stored:
        return [_remember(int(source.split(":")[1]), unpack_point(stored[source]))]
    return [_remember(*point) for _, part in packed.get(source, ()) for point in unpack_chunk(part)]


def _remember(at: int, measurements: Measurements) -> KnownPoint:
    return KnownPoint(read_point(at, measurements), pack_durations(read_durations(measurements)))


def _add_up(
    plan: HistoryPlan, points: Mapping[str, Sequence[KnownPoint]], before: DurationsOfQueue | None
) -> DurationsOfQueue:
    """Add the distributions of points that are over to those that were added up before."""
    # Of minutes that are packed only some percentiles are left, which cannot be merged: the hours have them.
    merged = {*plan.fields, *(chunk.key for chunk in plan.chunks if chunk.tier is HOURS)}
    sources = frozenset(merged & points.keys())
    if before is None or before.first_hour != plan.first_hour or not before.sources <= sources:
        before = DurationsOfQueue(plan.first_hour, frozenset(), {})
    if before.sources == sources:
        return before
    new = [
        unpack_durations(known.durations)
        for source in sources - before.sources
        for known in points[source]
        if known.point.at >= plan.first_hour
    ]
    return DurationsOfQueue(plan.first_hour, sources, add_up_durations([before.durations, *new]))


def _make_history(
    plan: HistoryPlan,
    points: Mapping[str, Sequence[KnownPoint]],
    durations: Durations,
    group: MetricsGroup,
    begin: float,
) -> RecentHistory:
    minutes = [
        known.point
        for source in plan.sources
        if source.startswith(f"{MINUTES.name}:")
        for known in points.get(source, ())
        if known.point.at > begin - MINUTE
    ]
    if group.minute:
        minutes.append(read_point(group.minute, group.current))
        durations = add_up_durations([durations, read_durations(group.current)])
    return RecentHistory(sorted(minutes, key=lambda point: point.at), durations)


def plan_history(queue: str, waiting: Mapping[str, Sequence[int]], begin: float, now: float) -> HistoryPlan:
    """Return what to read of a queue: for each hour its minutes, and when these are packed the hour itself, too.

    Args:
        queue: Its name.
        waiting: When the points began that are not packed yet, by tier.
        begin: From when on it is needed.
        now: The time.
    """
    first_hour = int(begin) // HOUR * HOUR
    fields = [name_point(MINUTES, at, queue) for at in waiting[MINUTES.name] if at >= first_hour]
    fields += [name_point(HOURS, at, queue) for at in waiting[HOURS.name] if at >= first_hour]
    chunks: list[HistoryChunk] = []
    for hour in range(first_hour, int(now) // HOUR * HOUR, HOUR):
        if any(hour <= at < hour + HOUR for at in waiting[MINUTES.name]):
            continue
        chunks.append(HistoryChunk(MINUTES, queue, hour))
        if hour not in waiting[HOURS.name]:
            chunks.append(HistoryChunk(HOURS, queue, hour // HOURS.chunk * HOURS.chunk))
    return HistoryPlan(queue, first_hour, fields, tuple(dict.fromkeys(chunks)))
