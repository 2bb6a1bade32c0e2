"""Follow the failures of tasks back through the history, beyond what an overview looks at."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from celery5.broker.call import Call
from celery5.broker.calls import observability as calls
from celery5.broker.colour import sleep
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.protocol.observability.overview import TaskMinute, find_onset
from celery5.protocol.observability.recent import make_task_minute
from celery5.protocol.observability.rollup import (
    DAY,
    HOUR,
    HOURS,
    HOURS_KEPT,
    MINUTE,
    MINUTES,
    MINUTES_KEPT,
    MetricsGroup,
    Tier,
    count_jobs,
    name_point,
    unpack_job_counts,
)

MAX_FOLLOWED = 50
"""Tasks that are followed back at once."""
MAX_TASK_QUEUES = 10
"""Queues of a task that are read."""
FIELDS_AT_ONCE = 60
"""Fields of the history in one call."""

Minutes = dict[str, list[TaskMinute]]
"""What ended of each task, by task."""


class KnownOnset(NamedTuple):
    """When a task began to fail, and up to when that is known to hold."""

    at: int
    known_to: float


class FailureOnsetReader:
    """Finds when tasks began to fail that fail since before the time of an overview.

    What was found is remembered: while a task fails on, nothing is read again.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._known: dict[str, KnownOnset] = {}

    async def read(
        self, redis: AsyncDriver, failing: Mapping[str, tuple[Sequence[str], Sequence[TaskMinute]]],
        *, begin: float, now: float,
    ) -> dict[str, list[TaskMinute]]:  # fmt: skip
        """Return what came before the time of the overview, as far as that decides when each task began to fail.

        Args:
            redis: The default broker, which has the history.
            failing: The queues and the minutes of each task that fails since the first of its minutes.
            begin: When the time of the overview begins.
            now: The time.
        """
        found: dict[str, list[TaskMinute]] = {}
        unknown: dict[str, tuple[Sequence[str], Sequence[TaskMinute]]] = {}
        for task, (queues, minutes) in failing.items():
            known = self._known.get(task)
            if known is not None and minutes[0].at <= known.known_to + MINUTE:
                found[task] = [TaskMinute(known.at, 1, 1)]
            elif len(unknown) < MAX_FOLLOWED:
                unknown[task] = (queues[:MAX_TASK_QUEUES], minutes)
        if unknown:
            found |= await self._follow(redis, unknown, begin, now)
        self._known = {}
        for task, earlier in found.items():
            onset = find_onset([*earlier, *failing[task][1]])
            if onset is not None:
                self._known[task] = KnownOnset(onset.at, now)
        return found

    async def _follow(
        self,
        redis: AsyncDriver,
        tasks: Mapping[str, tuple[Sequence[str], Sequence[TaskMinute]]],
        begin: float,
        now: float,
    ) -> Minutes:
        """Read a day after the other, the last first, until it is certain when each task began to fail."""
        earlier: defaultdict[str, list[TaskMinute]] = defaultdict(list)
        queues = sorted({queue for names, _ in tasks.values() for queue in names})
        waiting = await self._read_waiting(redis, queues)
        end, open_tasks = begin, set(tasks)
        while open_tasks and end > now - HOURS_KEPT:
            has_minutes = end > now - MINUTES_KEPT
            # On a full hour, so that no hour is in two spans.
            first = (end - DAY if has_minutes else now - HOURS_KEPT) // HOUR * HOUR
            names = sorted({queue for task in open_tasks for queue in tasks[task][0]})
            span = _Span(first, end, begin, (MINUTES, HOURS) if has_minutes else (HOURS,))
            day = await self._read_span(redis, names, waiting, span)
            for task in sorted(open_tasks):
                earlier[task] += day.get(task, [])
                onset = find_onset([*earlier[task], *tasks[task][1]])
                if onset is None or onset.is_certain:
                    open_tasks.discard(task)
            end = first
        return dict(earlier)

    async def _read_waiting(
        self, redis: AsyncDriver, queues: Sequence[str]
    ) -> dict[tuple[str, str, int], bytes]:
        """Return the points of queues that are not packed yet, by tier, queue and time."""
        reads = [calls.read_state(self._keys, [f"group:{queue}"]) for queue in queues]
        states = await redis.perform_all(reads) if reads else []
        fields: dict[str, tuple[str, str, int]] = {}
        for queue, state in zip(queues, states, strict=True):
            group = MetricsGroup.unpack(state.get(f"group:{queue}"))
            for tier in (MINUTES, HOURS):
                fields |= {
                    name_point(tier, at, queue): (tier.name, queue, at) for at in group.waiting[tier.name]
                }
            await sleep(0)
        names = list(fields)
        parts = [names[start : start + FIELDS_AT_ONCE] for start in range(0, len(names), FIELDS_AT_ONCE)]
        replies = await redis.perform_all([calls.read_state(self._keys, part) for part in parts])
        return {fields[name]: content for reply in replies for name, content in reply.items()}

    async def _read_span(
        self,
        redis: AsyncDriver,
        queues: Sequence[str],
        waiting: Mapping[tuple[str, str, int], bytes],
        span: "_Span",
    ) -> Minutes:
        """Return what ended of each task in a span: by minutes, and by hours where minutes are not known."""
        reads: list[Call[list[tuple[int, bytes]]]] = [
            calls.read_points(self._get_prefix(tier), queue, span.first - tier.chunk, span.end)
            for queue in queues
            for tier in span.tiers
        ]
        replies = iter(await redis.perform_all(reads))
        total: _Counts = defaultdict(dict)
        for queue in queues:
            seen: set[int] = set()
            for tier in span.tiers:
                points = [point for _, chunk in next(replies) for point in unpack_job_counts(chunk)]
                points += [
                    (at, count_jobs(content))
                    for (name, of, at), content in waiting.items()
                    if (name, of) == (tier.name, queue)
                ]
                for at, counts in points:
                    if span.has(at, tier) and (tier is MINUTES or at not in seen):
                        seen.add(at // HOUR * HOUR)
                        _add(total, at, tier, counts)
                await sleep(0)
        return _by_task(total)

    def _get_prefix(self, tier: Tier) -> str:
        return self._keys.metrics_minutes_prefix if tier is MINUTES else self._keys.metrics_hours_prefix


class _Span(NamedTuple):
    """A part of the history that is read at once. Times are in seconds since 1970."""

    first: float
    end: float
    # When the time of the overview begins, which has its own minutes.
    begin: float
    tiers: tuple[Tier, ...]

    def has(self, at: int, tier: Tier) -> bool:
        """Return whether a point that began at a time belongs to it."""
        return self.first <= at < self.end and at + tier.step <= self.begin


_Counts = defaultdict[tuple[str, int, int], dict[str, int]]
"""How many attempts ended in each state, by task, time and length of the time."""


def _add(total: _Counts, at: int, tier: Tier, counts: Mapping[tuple[str, str], int]) -> None:
    for (task, state), count in counts.items():
        by_state = total[task, at, tier.step]
        by_state[state] = by_state.get(state, 0) + count


def _by_task(total: _Counts) -> Minutes:
    found: Minutes = {}
    for (task, at, span), by_state in total.items():
        found.setdefault(task, []).append(make_task_minute(at, by_state, span))
    return found
