"""Sharing: real workers under load take the priorities of a queue, and their queues, strictly or by weights."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.call import Call
from celery5.broker.calls import jobs, leases
from celery5.broker.calls.jobs import Entry
from celery5.errors import CommandRefused
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import PREFER
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.messages import Command, read_command
from celery5.protocol.job.states import Priority
from celery5.protocol.scaling import prefetch
from celery5.services.job.internal_queues import InternalTasksQueue, SharedSlots, SharedTasksQueue
from celery5.services.job.reading_state import ReadingState
from celery5.services.scaling.preferences import Preferences
from celery5.services.worker.reading import PassCapacity, QueueLanes, ReadOrder
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.worker.workers import held, until, working

LEVELS: tuple[Priority, ...] = ("high", "normal", "low")


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


class Reader:
    """Reads as a worker does, with room for ten jobs at a time; it runs nothing, so that no duration is in play."""

    def __init__(self, app: App, queues: Sequence[str]) -> None:
        self._app = app
        self._queues = [app.queue(name) for name in queues]
        self._lanes = QueueLanes(consumed=self._queues, reading=ReadingState())
        self._reading = ReadOrder(
            consumed=self._queues,
            lanes=self._lanes,
            preferences=Preferences(log=Log(worker="reader", app=app.name)),
            worker="reader",
            priorities=app.settings.priorities,
            queue_order=app.settings.queue_order,
        )
        self.came: list[str] = []

    async def join(self) -> None:
        """Join the queues, as a worker does before it reads."""
        for keys in self._queues:
            await self._app.aperform(leases.join_queue(keys, "reader", lease=60))

    async def leave(self) -> None:
        """Leave the queues."""
        for keys in self._queues:
            await self._app.aperform(leases.leave_queue(keys, "reader"))

    async def read(self, count: int) -> int:
        """Read until there are `count` jobs, or no more; gives how many there were."""
        for keys in self._queues:  # which lanes there are
            self._lanes.on_heartbeat(
                keys, await self._app.aperform(leases.renew_lease(keys, "reader", lease=60))
            )
        found = 0
        while found < count:
            rooms = {keys.queue: 10 for keys in self._queues}
            room = PassCapacity(rooms, {queue: {"async"} for queue in rooms})
            got = await self._reading.read_nonblocking(self._queues, room, self._receive)
            if not got:  # a share of nothing but empty queues: then the Consumer waits for all, too
                all_ = jobs.read_jobs(
                    self._reading.get_lanes(self._queues), "reader", count=1, block_seconds=0
                )
                got = len(await self._receive(all_))
            if not got:
                break
            found += got
        return found

    async def _receive(self, call: Call[list[Entry]]) -> Sequence[Entry]:
        entries = await self._app.aperform(call)
        self.came += [json.loads(bytes(read_command(entry.message).args))[0] for entry in entries]
        return entries


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
    ("setting", "options", "share"),
    [  # what an empty level leaves is for the most urgent one; what an empty queue leaves is dealt out again
        ({"priorities": "1:1:1"}, ({"priority": "low"}, {"priority": "high"}), 2 / 3),
        ({"queue_order": "a=2 b=2"}, ({"queue": "a"}, {"queue": "b"}), 1 / 2),
        ({"queue_order": "a=6 b=2 default=2"}, ({"queue": "a"}, {"queue": "b"}), 1 / 4),
    ],
)
async def test_what_there_was_none_of_for_a_while_has_saved_nothing_up(
    url: str,
    app_name: str,
    setting: dict[str, str],
    options: tuple[dict[str, Any], dict[str, Any]],
    share: float,
) -> None:
    app, _ = app_of(url, app_name, **setting)
    there, away = (app.tasks["note"].options(**option) for option in options)
    reader = Reader(app, ("default", "a", "b"))
    await reader.join()
    await app.asend_many([task.s("first") for task in (there, away)])
    assert await reader.read(2) == 2
    await app.asend_many([there.s("there") for _ in range(170)])
    assert await reader.read(80) >= 80  # nobody else has a use for it
    await app.asend_many([away.s("away") for _ in range(80)])
    reader.came.clear()
    read = await reader.read(80)
    assert abs(reader.came.count("away") - share * read) <= 4
    await reader.leave()


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
                    await until(partial(_more, ran, before), within=30)


def _more(ran: list[str], than: int) -> bool:
    return len(ran) > than


def test_two_worker_processes_under_load_keep_the_order_of_priorities(
    staff: Staff, tmp_path: Path, redis_client: "redis.Redis"
) -> None:
    nap = staff.app.tasks["nap"]
    sent: dict[str, str] = {}
    for level in reversed(LEVELS):
        handles = staff.app.send_many([nap.options(priority=level).s(0.01) for _ in range(60)])
        sent |= {handle.id: level for handle in handles}
    for _ in range(2):
        staff.start(concurrency=2)
    wait_until(lambda: len(staff.notes("end")) == len(sent), within=30)
    order = [sent[begun.job] for begun in sorted(staff.notes("begin"), key=lambda note: note.at)]
    # Each may hold some twenty of what comes first while the other one reads on.
    assert first(order, 56)["high"] >= 36
    assert "low" not in order[:92]


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


async def test_preferred_tasks_of_a_worker_begin_before_the_others(
    url: str, app_name: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "HORIZON", 60.0)  # the worker holds all jobs, however long they take here
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
        await app.tasks["note"].adelay("warm")  # so that the worker knows how short they are, and holds them
        await until(lambda: len(ran) == 1)
        ran.clear()
        await hold.adelay()
        await app.asend_many([task.s(task.name) for _ in range(20) for task in (other, app.tasks["note"])])
        await until(lambda: sum(held(redis_client, app).values()) == 41)
        open_.set()
        await until(lambda: len(ran) == 40, within=30)
        turns = {name: [n for n, task in enumerate(ran) if task == name] for name in ("note", "other")}
        assert sum(turns["note"]) < sum(turns["other"])
        assert ran != sorted(ran)  # the other ones have had a turn before all these were done


def job(task: str, queue: str = "q") -> Delivery:
    """A job as a worker holds it."""
    return Delivery(queue=queue, entry=b"1-0", message=b"", command=Command(v=1, id="x", task=task))


async def test_held_jobs_are_put_into_the_order_of_their_weights() -> None:
    queue = InternalTasksQueue()
    preferences = Preferences(log=Log(worker="w", app="shop"))
    await preferences.handle_command(PREFER.parse({"tasks": {"other": 0.1}, "seconds": 60}))
    for _ in range(40):
        queue.put(job("other"))
        queue.put(job("note"))
    preferences.sort_queue(queue)
    order = [item.command.task for item in queue.items if item.command]
    assert order[:9] == ["note"] * 9
    assert order[:44].count("note") == 40  # one in ten is another one
    assert order.index("other") < 12
    queue.drain(20)
    queue.put(job("note"))
    preferences.sort_queue(queue)  # who comes later takes its turn behind those that were there
    assert [item.command.task for item in queue.items if item.command][:5].count("note") >= 4


async def test_job_weighs_as_its_task_or_queue_among_incarnations() -> None:
    preferences = Preferences(log=Log(worker="w", app="shop"))
    queue = SharedSlots(["trio"]).make_queues(preferences.get_weight)["trio"]
    assert isinstance(queue, SharedTasksQueue)
    queue.put(job("note", "a"))
    assert queue.get_next_weight() == 1.0
    await preferences.handle_command(
        PREFER.parse({"tasks": {"note": 0.5}, "queues": {"a": 0.25}, "seconds": 60})
    )
    assert queue.get_next_weight() == 0.25
    await preferences.handle_command(
        PREFER.parse({"tasks": {"other": 0.1}, "queues": {"b": 0.1}, "seconds": 60})
    )
    assert queue.get_next_weight() == 1.0
