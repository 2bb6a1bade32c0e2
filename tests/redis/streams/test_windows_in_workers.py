"""Windows in a worker, and commits that move no cursor: each is made once, though its call is repeated."""

from typing import Any

import msgspec
import pytest
import trio

from celery5 import App
from celery5.broker.call import Call
from celery5.broker.calls import streams as calls
from celery5.protocol.streams.groups import Commit
from celery5.streams import StreamEvents, Tumbling, WindowsAreOpen
from tests.redis.worker.workers import start, until, until_async, working


class Reading(msgspec.Struct):
    sensor: str
    at: float


async def test_windows_continue_in_another_worker_and_close_by_the_clock(app: App) -> None:
    readings = app.stream("readings", Reading, by="sensor", partitions=2)
    minutes = app.stream("minutes", dict, partitions=1)
    seen = list[dict[str, Any]]()

    @app.processor(readings, into=minutes)
    async def count(events: StreamEvents[Reading]) -> None:
        async for window in events.windows(
            Tumbling(60), initial=0, add=lambda n, _: n + 1, time=lambda reading: reading.at, idle=0.2
        ):
            events.send({"sensor": window.key, "start": window.start, "count": window.value})

    @app.processor(minutes)
    async def collect(events: StreamEvents[dict[str, Any]]) -> None:
        async for minute in events.records():
            seen.append(minute)

    async def is_done(records: int) -> bool:
        lags = [
            group for stream in await app.streams.ainfo() for group in stream.groups if group.group == "count"
        ]
        return sum(lag.lag for lag in lags) == 0 and len(lags) == 1 and records > 0

    sensors = ("a", "b", "c")
    async with trio.open_nursery() as nursery:
        first = await start(nursery, app, name="first")
        await readings.asend(*(Reading(sensor, at) for at in (0, 30) for sensor in sensors))
        await until_async(lambda: is_done(6))
        await first.stop()
    async with working(app):
        await readings.asend(*(Reading(sensor, at) for at in (59.95, 119.9) for sensor in sensors))
        await until(lambda: len(seen) >= 6)
        await readings.asend(*(Reading(sensor, 500) for sensor in sensors))
        await until_async(lambda: is_done(15))
    found = sorted((minute["sensor"], minute["start"], minute["count"]) for minute in seen)
    # What is left are the open windows, and where each partition is, with the number of its open windows.
    partitions = {readings.find_partition(Reading(sensor, 0)) for sensor in sensors}
    size = Call(("HLEN", app.keys.for_stream("readings").state("count")), int)
    assert await app.aperform(size) == len(sensors) + 2 * len(partitions)
    assert found == sorted((sensor, at, n) for sensor in sensors for at, n in ((0.0, 3), (60.0, 1)))


async def look(app: App, group: str) -> tuple[int, int, int]:
    """Return the lag of a group, how many windows are open, and how many records were late."""
    (stream,) = await app.streams.ainfo()
    found = [
        partition
        for candidate in stream.groups
        if candidate.group == group
        for partition in candidate.partitions
    ]
    return (
        sum(partition.lag for partition in found),
        sum(partition.open_windows for partition in found),
        sum(partition.late for partition in found),
    )


async def test_late_records_and_open_windows_are_counted(
    app: App,
) -> None:
    readings = app.stream("readings", Reading, by="sensor", partitions=4)
    seen = list[tuple[str | int, float, int]]()

    @app.processor(readings)
    async def count(events: StreamEvents[Reading]) -> None:
        async for window in events.windows(
            Tumbling(60), initial=0, add=lambda n, _: n + 1, time=lambda reading: reading.at, idle=0.2
        ):
            seen.append((window.key, window.start, window.value))

    @app.processor(readings)
    async def count_all(events: StreamEvents[Reading]) -> None:
        windows = events.windows(
            Tumbling(1e9),
            initial=0,
            add=lambda n, _: n + 1,
            time=lambda reading: reading.at,
            by=lambda _: "all",
        )
        async for _ in windows:
            pass

    async def is_at(*numbers: int) -> bool:
        return await look(app, "count") == numbers

    sensors = ("a", "b", "c")
    await readings.asend(*(Reading(sensor, at) for at in (70, 130, 10, 179.9) for sensor in sensors))
    async with working(app):
        await until_async(lambda: is_at(0, 0, 3))  # the clock has closed all, and 10 was late
        assert sorted(seen) == sorted((sensor, at, n) for sensor in sensors for at, n in ((60, 1), (120, 2)))
        # Windows by another key are of their partition anyway.
        assert await look(app, "count_all") == (0, 0, 0)
        await app.streams.areshard("readings", 5)
        await readings.asend(*(Reading(sensor, 999_999_959.9) for sensor in sensors))
        await until_async(lambda: is_at(0, 0, 3))
    seen.clear()
    await readings.asend(Reading("a", 2e9))
    async with working(app):
        await until_async(lambda: is_at(0, 1, 3))
    with pytest.raises(
        WindowsAreOpen, match=r"group count of stream readings has open windows in partition \d"
    ):
        await app.streams.areshard("readings", 8)
    (stream,) = await app.streams.ainfo()
    assert stream.partitions == 5
    assert (await app.streams.areshard("readings", 8, force=True)).partitions == 8


async def test_a_commit_that_moves_no_cursor_is_made_once_however_often_it_is_sent(app: App) -> None:
    keys = app.keys.for_stream("readings")
    membership = await app.aperform(
        calls.renew_membership(
            *(keys, "count"),
            member="one",
            incarnation="one",
            lease=60,
            is_joining=True,
            start="0-0",
            partitions=1,
        )
    )
    assert membership is not None
    (assigned,) = membership.assigned
    cursor = assigned.cursor
    commit = Commit(0, assigned.epoch, cursor, cursor, [b"output"], {"key": b"1"}, name="abc", number=1)

    async def send(*commits: Commit, incarnation: str = "one") -> list[bool]:
        return list(await app.aperform(calls.commit(keys, "count", incarnation, commits)))

    async def count_outputs() -> int:
        return len(await app.aperform(calls.read_outbox(keys, "count", 0, count=10)))

    assert await send(commit) == [True]
    assert await send(commit) == [True]
    assert await count_outputs() == 1
    second = replace_commit(commit, number=2, state={"key": None})
    assert await send(second, second) == [True, True]
    assert await count_outputs() == 2
    assert await app.aperform(calls.get_state(keys, "count", ["key"])) == [None]
    # What comes late of an earlier one, or of an owner that was replaced, changes nothing.
    assert await send(commit, replace_commit(commit, number=4)) == [False, False]
    assert await send(replace_commit(commit, number=3), incarnation="other") == [False]
    assert await send(replace_commit(commit, number=3, epoch=assigned.epoch - 1)) == [False]
    assert await count_outputs() == 2
    # The same owner may begin again.
    assert await send(replace_commit(commit, name="def")) == [True]
    assert await count_outputs() == 3


def replace_commit(commit: Commit, **changes: Any) -> Commit:
    return msgspec.structs.replace(commit, **changes)
