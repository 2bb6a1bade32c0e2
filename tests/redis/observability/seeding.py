"""A history of minutes and hours, written as if it had been measured."""

from collections.abc import Mapping

import redis

from celery5 import App
from celery5.protocol.observability.report import Measurements, compress
from celery5.protocol.observability.rollup import (
    DAY,
    HOUR,
    HOURS,
    MINUTES,
    MINUTES_KEPT,
    MetricsGroup,
    name_point,
    pack_chunk,
    pack_point,
    sum_points,
)

Ended = Mapping[str, tuple[int, int]]
"""How many attempts succeeded and failed, by task."""


def make_point(ended: Ended) -> Measurements:
    """A point in which so many attempts ended."""
    point = Measurements()
    for task, counts in ended.items():
        for state, count in zip(("SUCCESS", "RETRY"), counts, strict=True):
            if count:
                point.counters["celery5_jobs_total", "state", state, "task", task] = count
    return point


def seed_history(
    client: "redis.Redis",
    app: App,
    queue: str,
    minutes: Mapping[int, Ended],
    now: float,
) -> None:
    """Write the minutes of a queue, by when they began: packed where their hour, and their day, are over.

    Of hours that ended longer ago than minutes are kept, only the hour is there.

    Args:
        client: What writes.
        app: The application.
        queue: The queue.
        minutes: What ended in each minute.
        now: The time, in seconds since 1970.
    """
    stream = app.queue(queue).stream
    client.xdel(stream, client.xadd(stream, {"job": ""}))  # a queue that never had a job is not shown
    waiting: dict[str, list[int]] = {MINUTES.name: [], HOURS.name: []}
    state: dict[str, bytes] = {}
    hours: dict[int, dict[int, Measurements]] = {}
    for at, ended in sorted(minutes.items()):
        hours.setdefault(at // HOUR * HOUR, {})[at] = make_point(ended)
    days: dict[int, dict[int, Measurements]] = {}
    for hour, points in hours.items():
        if hour + HOUR > now:
            waiting[MINUTES.name] += list(points)
            state |= {name_point(MINUTES, at, queue): pack_point(point) for at, point in points.items()}
            continue
        if hour + HOUR > now - MINUTES_KEPT:
            _add_chunk(
                client, app.keys.metrics_minutes_prefix + queue, hour, pack_chunk(MINUTES, points.items())
            )
        days.setdefault(hour // DAY * DAY, {})[hour] = sum_points(points.values())
    for day, found in days.items():
        if day + DAY > now:
            waiting[HOURS.name] += list(found)
            state |= {name_point(HOURS, at, queue): pack_point(point) for at, point in found.items()}
        else:
            _add_chunk(client, app.keys.metrics_hours_prefix + queue, day, pack_chunk(HOURS, found.items()))
    state |= {"index": compress(["", queue]), f"group:{queue}": MetricsGroup(waiting=waiting).pack()}
    client.hset(app.keys.metrics_state, mapping=state)  # type: ignore[arg-type]
    client.expire(app.keys.metrics_state, 600)
    client.sadd(app.keys.queues, queue)


def _add_chunk(client: "redis.Redis", stream: str, at: int, packed: bytes) -> None:
    client.xadd(stream, {"at": at * 1000, "points": packed}, id=f"{at * 1000}-0")
    client.expire(stream, 600)
