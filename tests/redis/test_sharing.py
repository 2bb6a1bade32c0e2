"""Sharing: real workers under load take the priorities of a queue, and their queues, strictly or by weights.

Floor: tests. Reads and writes: the keys of the test's application; the history.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.errors import CommandRefused
from tests.redis.staff import Staff, wait_until
from tests.redis.workers import until, working

LEVELS = ("high", "normal", "low")


def app_of(url: str, name: str, **settings: Any) -> tuple[App, list[str]]:
    """An application with a task that notes what it was given, and one slot; and its notes."""
    app, ran = App(name, broker=url, concurrency=1, lease=5.0, **settings), list[str]()

    @app.task(name="note", ignore_result=True)
    async def note(what: str) -> None:
        ran.append(what)
        await trio.sleep(0.002)

    return app, ran


def first(ran: list[str], count: int) -> dict[str, int]:
    """How many of the first jobs were of each sort."""
    return dict(Counter(ran[:count]))


async def test_a_strict_queue_runs_all_high_jobs_first_and_low_ones_last(url: str, app_name: str) -> None:
    app, ran = app_of(url, app_name)
    note = app.tasks["note"]
    for level in reversed(LEVELS):  # the worst order
        await app.asend_many([note.options(priority=level).s(level) for _ in range(100)])
    async with working(app, burst=True) as worker:
        await worker.done.wait()
    assert ran == [level for level in LEVELS for _ in range(100)]


async def test_with_weights_no_level_starves_and_each_has_its_share(url: str, app_name: str) -> None:
    app, ran = app_of(url, app_name, priorities="4:2:1")
    note = app.tasks["note"]
    for level in reversed(LEVELS):
        await app.asend_many([note.options(priority=level).s(level) for _ in range(420)])
    async with working(app, burst=True) as worker:
        await worker.done.wait()
    assert len(ran) == 3 * 420
    for count in (140, 350, 700):
        found = first(ran, count)
        for level, weight in zip(LEVELS, (4, 2, 1), strict=True):
            assert abs(found[level] - count * weight / 7) <= 30, (count, found)


async def test_a_level_that_is_empty_leaves_its_share_to_the_others(url: str, app_name: str) -> None:
    app, ran = app_of(url, app_name, priorities="100:1:1")
    note = app.tasks["note"]
    for level in ("low", "normal"):
        await app.asend_many([note.options(priority=level).s(level) for _ in range(100)])
    async with working(app, burst=True) as worker:
        await worker.done.wait()
    assert abs(first(ran, 100)["low"] - 50) <= 25


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ({"priorities": "1:1:1"}, ({"priority": "low"}, {"priority": "high"})),
        ({"queue_order": "a=2 b=2"}, ({"queue": "a"}, {"queue": "b"})),
    ],
)
async def test_what_there_was_none_of_for_a_while_has_saved_nothing_up(
    url: str, app_name: str, setting: dict[str, str], options: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    app, ran = app_of(url, app_name, **setting)
    open_, note = trio.Event(), app.tasks["note"]

    @app.task(name="hold")
    async def hold() -> None:
        await open_.wait()

    there, away = (note.options(**each) for each in options)
    async with working(app, queues=("default", "a", "b")):
        await away.adelay("away")
        await app.asend_many([there.s("there") for _ in range(200)])
        await until(lambda: len(ran) == 201, within=30)
        ran.clear()
        await hold.adelay()
        await app.asend_many([there.s("there") for _ in range(80)])
        await app.asend_many([away.s("away") for _ in range(80)])
        open_.set()
        await until(lambda: len(ran) == 160, within=30)
    assert 20 <= first(ran, 80)["away"] <= 60


async def test_queues_are_read_strictly_in_their_order(url: str, app_name: str) -> None:
    app, ran = app_of(url, app_name, queue_order="urgent > mail")
    note, queues = app.tasks["note"], ("urgent", "mail", "bulk")
    for queue in reversed(queues):
        await app.asend_many([note.options(queue=queue).s(queue) for _ in range(100)])
    async with working(app, burst=True, queues=("bulk", "mail", "urgent")) as worker:
        await worker.done.wait()
    assert ran == [queue for queue in queues for _ in range(100)]


async def test_queues_share_a_worker_by_their_weights_and_none_starves(url: str, app_name: str) -> None:
    app, ran = app_of(url, app_name, queue_order="urgent=4 mail=2")
    note, queues = app.tasks["note"], ("urgent", "mail", "bulk")
    for queue in reversed(queues):
        await app.asend_many([note.options(queue=queue).s(queue) for _ in range(420)])
    async with working(app, burst=True, queues=queues) as worker:
        await worker.done.wait()
    assert len(ran) == 3 * 420
    for count in (140, 350, 700):
        found = first(ran, count)
        for queue, weight in zip(queues, (4, 2, 1), strict=True):
            assert abs(found[queue] - count * weight / 7) <= 30, (count, found)


async def test_a_worker_that_waits_on_ordered_queues_runs_at_once_what_comes_on_any(
    url: str, app_name: str
) -> None:
    for order in ("urgent > mail", "urgent=4 mail=2"):
        app, ran = app_of(
            url, f"{app_name}{len(order)}", queue_order=order, priorities="4:2:1", read_block=30
        )
        note = app.tasks["note"]
        async with working(app, queues=("mail", "urgent")):
            for queue in ("mail", "urgent", "mail"):
                for level in LEVELS:
                    before = len(ran)
                    await note.options(queue=queue, priority=level).adelay(queue)
                    await until(partial(_more, ran, before), within=20)


def _more(ran: list[str], than: int) -> bool:
    return len(ran) > than


def test_two_worker_processes_under_load_keep_the_order_of_priorities(
    staff: Staff, tmp_path: Path, redis_client: "redis.Redis"
) -> None:
    nap = staff.app.tasks["nap"]
    sent: dict[str, str] = {}
    for level in reversed(LEVELS):
        handles = staff.app.send_many([nap.options(priority=level).s(0.01) for _ in range(60)])
        sent |= {each.id: level for each in handles}
    for _ in range(2):
        staff.start(concurrency=2)
    wait_until(lambda: len(staff.notes("end")) == len(sent), within=30)
    order = [sent[each.job] for each in sorted(staff.notes("begin"), key=lambda note: note.at)]
    # The first worker has begun before the second one; where two take turns, a few may pass each other.
    assert first(order, 56) == {"high": 56}
    assert "low" not in order[:112]


async def preferring(app: App, **said: object) -> Any:
    """Tell the only worker what to prefer; gives its answer."""
    (reply,) = await app.control.asend("prefer", said)
    if not reply.ok:
        raise CommandRefused(reply.why)
    return reply.answer


async def test_a_queue_is_preferred_for_as_long_as_somebody_says_so(url: str, app_name: str) -> None:
    app, ran = app_of(url, app_name, inbox_signatures=False)
    note, open_ = app.tasks["note"], trio.Event()

    @app.task(name="hold")
    async def hold() -> None:
        await open_.wait()

    async with working(app, queues=("default", "a", "b")):
        told = await preferring(app, queues={"a": 0.25}, seconds=60)
        assert told == {"tasks": {}, "queues": {"a": 0.25}}
        await hold.adelay()
        for queue in ("a", "b"):
            await app.asend_many([note.options(queue=queue).s(queue) for _ in range(300)])
        open_.set()
        await until(lambda: len(ran) > 200, within=30)
        assert abs(first(ran, 200)["a"] - 40) <= 25
        assert await preferring(app, seconds=60) == {"tasks": {}, "queues": {}}
        await until(lambda: len(ran) == 600, within=30)
        assert await preferring(app, queues={"a": 0.25}, seconds=0.01) == {"tasks": {}, "queues": {"a": 0.25}}
        await trio.sleep(0.02)
        (reply,) = await app.control.asend("stats")
        assert reply.answer["preferred"] == {"tasks": {}, "queues": {}}
        with pytest.raises(CommandRefused, match="give more than 0 and at most 1"):
            await preferring(app, queues={"a": 7})


async def test_of_what_a_worker_holds_preferred_tasks_begin_first_and_the_others_still_begin(
    url: str, app_name: str
) -> None:
    app, ran = app_of(url, app_name, inbox_signatures=False)
    open_ = trio.Event()

    @app.task(name="other", ignore_result=True)
    async def other(what: str) -> None:
        ran.append(what)
        await trio.sleep(0.002)

    @app.task(name="hold")
    async def hold() -> None:
        await open_.wait()

    async with working(app):
        await preferring(app, tasks={"other": 0.1}, seconds=60)
        for _ in range(40):  # so that the worker knows how short they are, and holds some
            await app.tasks["note"].adelay("warm")
        await until(lambda: len(ran) == 40)
        ran.clear()
        await hold.adelay()
        await app.asend_many([task.s(task.name) for _ in range(20) for task in (other, app.tasks["note"])])
        open_.set()
        await until(lambda: len(ran) == 40, within=30)
        assert ran[:10].count("note") >= 8
        assert ran != sorted(ran)  # the other ones have had a turn before all these were done
