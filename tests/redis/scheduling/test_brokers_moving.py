"""A schedule that moves to another broker: it fires on one of them at any time, and no fire time on both."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import redis
import trio

from celery5 import App, every
from celery5.broker.call import Call
from celery5.broker.calls import scheduling as scheduling_calls
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.processes.lifecycle.multi_broker import RemoteRedis
from celery5.processes.scheduler import SCHEDULER
from celery5.protocol.job.messages import read_command
from celery5.protocol.scheduling import periodic
from celery5.protocol.scheduling.declaration import Periodic
from celery5.protocol.scheduling.periodic import Schedule
from celery5.scheduling.fire_times import get_next_fire_time
from celery5.scheduling.schedules import make_definition
from celery5.services.scheduling import queue_moves
from celery5.services.scheduling.queue_moves import ScheduleMoveBlocked, ScheduleMover, ScheduleNotOwned
from tests.redis.connections.two_brokers import with_tasks
from tests.redis.worker.workers import LEASE, start, until_async


class Code:
    """What one Scheduler's code says: the schedule `ticks` sends to `queue`, and was declared at `stamp`."""

    def __init__(self, app: App, broker: str, queue: str, stamp: int) -> None:
        self.app = app
        self.broker = broker
        self.stamp = stamp
        task = app.tasks["near"].options(queue=queue)
        self.of = make_definition(app, task.s(1), Periodic(every(3600), "ticks"))

    def moving(self, before: "Before | None" = None) -> ScheduleMover:
        """What settles it; `before` is asked before each trip."""
        broker_connections = {
            name: Way(RemoteRedis(self.app, name), name, before) for name in ("default", "mails")
        }
        redis = broker_connections.pop(self.broker)
        return ScheduleMover(redis=redis, other_brokers=broker_connections, app=self.app, keys=self.app.keys)

    async def settle(self, before: "Before | None" = None) -> None:
        """Declare it."""
        new = periodic.make_schedule(
            "ticks", self.of, 1000, get_next_fire_time, origin="code", stamp=(0, self.stamp)
        )
        await self.moving(before).apply(new, 1000)


class Died(Exception):
    """A Scheduler did, in the middle of it."""


class Before:
    """Does something else before the trip of a number."""

    def __init__(self, number: int, what: Any) -> None:
        self.left = number
        self._what = what

    async def trip(self) -> None:
        self.left -= 1
        if self.left == 0:
            await self._what()


class Way:
    """The way to one broker."""

    def __init__(self, redis: RemoteRedis, name: str, before: "Before | None") -> None:
        self._redis = redis
        self.before = before

    async def perform(self, call: Call[Any], /) -> Any:
        if self.before is not None:
            await self.before.trip()
        return await self._redis.perform(call)

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        if self.before is not None:
            await self.before.trip()
        return await self._redis.perform_all(calls)


@pytest.fixture
def app(paired: App) -> App:
    """An application on two servers."""
    return paired


def kept(app: App, first: "redis.Redis", second: "redis.Redis | None") -> dict[str, Schedule]:
    """The schedule's records, by queue."""
    found: dict[str, Schedule] = {}
    for client, queue in ((first, "near"), (second, "post")):
        record: Any = None if client is None else client.hget(app.keys.schedules(queue), "ticks")
        read = periodic.decode_schedule(record) if record else None
        if read is not None:
            found[queue] = read
    return found


def active(found: dict[str, Schedule]) -> list[str]:
    """Where it fires."""
    return [queue for queue, table in found.items() if table.is_active]


async def test_it_is_on_one_broker_at_a_time_and_takes_what_it_has_fired_along(
    app: App, redis_client: "redis.Redis", second: "redis.Redis"
) -> None:
    await Code(app, "default", "near", 1).settle()
    await Code(app, "mails", "post", 2).settle()
    found = kept(app, redis_client, second)
    assert (list(found), active(found)) == (["post"], ["post"])
    assert found["post"].next == 3_600_000
    with pytest.raises(ScheduleNotOwned):
        await Code(app, "default", "near", 1).settle()
    found = kept(app, redis_client, second)
    assert (list(found), active(found)) == (["post"], ["post"]), "older code leaves it where it is"
    await Code(app, "default", "near", 3).settle()
    found = kept(app, redis_client, second)
    assert (list(found), active(found)) == (["near"], ["near"])


@pytest.mark.parametrize("where", ["near", "post"])
async def test_schedule_record_of_newer_code_is_kept_and_fires_once(
    app: App, redis_client: "redis.Redis", second: "redis.Redis", where: str
) -> None:
    await Code(app, "default", "near", 1).settle()
    await Code(app, "mails", "post", 2).settle()  # both queues are known to have schedules
    second.delete(app.keys.schedules("post"), app.keys.schedule_times("post"))
    client = redis_client if where == "near" else second
    client.hset(app.keys.schedules(where), "ticks", '{"name":"ticks","of":{"later":1}}')
    with pytest.raises(ScheduleMoveBlocked, match="a newer version"):
        await Code(app, "default", "near", 3).settle()
    assert kept(app, redis_client, second) == {}


async def test_a_queue_that_moves_to_another_broker_takes_its_schedules_along(
    app: App, redis_client: "redis.Redis", second: "redis.Redis"
) -> None:
    moved = with_tasks(App(app.name, broker=app.settings.broker, brokers=dict(app.settings.brokers)))

    def where() -> list[str]:
        records: list[Any] = [
            client.hget(app.keys.schedules("post"), "ticks") for client in (redis_client, second)
        ]
        read = [periodic.decode_schedule(record) if record else None for record in records]
        assert sum(table is not None and table.is_active for table in read) == 1, read
        return [name for name, table in zip(("default", "mails"), read, strict=True) if table is not None]

    await Code(app, "mails", "post", 1).settle()
    assert where() == ["mails"]
    await Code(moved, "default", "post", 2).settle()
    assert where() == ["default"]
    await Code(app, "mails", "post", 3).settle()
    assert where() == ["mails"]


@pytest.mark.parametrize("number", range(1, 30))
async def test_whatever_two_schedulers_do_at_once_it_never_fires_on_both(
    app: App, redis_client: "redis.Redis", second: "redis.Redis", number: int
) -> None:
    here, there = Code(app, "default", "near", 1), Code(app, "mails", "post", 2)
    seen = list[list[str]]()

    async def meanwhile() -> None:
        with suppress(ScheduleNotOwned):
            await here.settle(Watch())

    class Watch(Before):
        def __init__(self) -> None:
            super().__init__(0, None)

        async def trip(self) -> None:
            seen.append(active(kept(app, redis_client, second)))

    await there.settle(Before(number, meanwhile))
    found = kept(app, redis_client, second)
    assert active(found) == ["post"]
    assert list(found) == ["post"]
    assert all(len(table) <= 1 for table in seen), seen


@pytest.mark.parametrize("number", range(1, 20))
async def test_what_it_fires_while_it_is_moved_it_does_not_fire_again(
    app: App, redis_client: "redis.Redis", second: "redis.Redis", number: int
) -> None:
    fired = list[int]()

    async def fires() -> None:
        found = kept(app, redis_client, second)
        for queue, broker in (("near", "default"), ("post", "mails")):
            if queue not in active(found):
                continue
            step = periodic.plan_fires(found[queue], 3_600_000, is_busy=False, find_next=get_next_fire_time)
            if step is None:
                continue
            fired.extend(fire.at for fire in step.fires)
            before, after = periodic.encode_schedule(found[queue]), periodic.encode_schedule(step.new_state)
            trip = scheduling_calls.fire_schedule(
                app.keys, app.queue(queue), "ticks", expected_state=before, new_state=after, next_look=None
            )
            assert await RemoteRedis(app, broker).perform(trip)

    await Code(app, "default", "near", 1).settle()
    await Code(app, "mails", "post", 2).settle(Before(number, fires))
    await fires()
    found = kept(app, redis_client, second)
    assert (list(found), active(found)) == (["post"], ["post"])
    assert fired == [3_600_000]
    assert (found["post"].fired, found["post"].next) == (1, 7_200_000)


async def test_one_that_died_in_the_middle_is_gone_on_with(
    app: App, redis_client: "redis.Redis", second: "redis.Redis"
) -> None:
    async def dies() -> None:
        raise Died

    await Code(app, "default", "near", 1).settle()
    for number in range(2, 20):
        code = Code(app, "mails" if number % 2 else "default", "post" if number % 2 else "near", number)
        for trip in range(1, 25):
            try:
                await code.settle(Before(trip, dies))
            except Died:
                assert len(active(kept(app, redis_client, second))) <= 1
            except ScheduleNotOwned:
                break
        assert active(kept(app, redis_client, second)) == ["post" if number % 2 else "near"]


async def test_schedule_does_not_fire_elsewhere_while_its_broker_may_have_it(
    app: App, redis_client: "redis.Redis", second: "redis.Redis", own_server: EmbeddedServer
) -> None:
    await Code(app, "mails", "post", 1).settle()
    await trio.to_thread.run_sync(own_server.kill)
    with pytest.raises(ScheduleMoveBlocked, match="broker mails, which is unreachable"):
        await Code(app, "default", "near", 2).settle()
    assert not redis_client.hexists(app.keys.schedules("near"), "ticks")


async def test_one_that_is_away_is_not_asked_for_each_schedule(
    app: App, own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        queue_moves, "UNREACHABLE_RETRY_DELAY", 1000.0
    )  # however long this machine stands still
    await trio.to_thread.run_sync(own_server.kill)
    code, asked = Code(app, "default", "near", 1), Before(0, None)
    broker_connections = {"mails": Way(RemoteRedis(app, "mails"), "mails", asked)}
    settling = ScheduleMover(
        redis=RemoteRedis(app, "default"), other_brokers=broker_connections, app=app, keys=app.keys
    )
    for name in ("ticks", "tocks", "tacks"):
        new = periodic.make_schedule(name, code.of, 1000, get_next_fire_time, origin="code", stamp=(0, 1))
        with pytest.raises(ScheduleMoveBlocked):
            await settling.apply(new, 1000)
    assert asked.left == -1


@pytest.mark.parametrize("number", range(1, 4))
async def test_schedule_move_waits_for_a_broker_that_is_lost_in_the_middle(
    app: App,
    redis_client: "redis.Redis",
    second: "redis.Redis",
    own_server: EmbeddedServer,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_moves, "UNREACHABLE_RETRY_DELAY", -1.0)
    await Code(app, "mails", "post", 1).settle()
    code, far = Code(app, "default", "near", 2), Way(RemoteRedis(app, "mails"), "mails", None)
    settling = ScheduleMover(
        redis=RemoteRedis(app, "default"), other_brokers={"mails": far}, app=app, keys=app.keys
    )
    new = periodic.make_schedule("ticks", code.of, 1000, get_next_fire_time, origin="code", stamp=(0, 2))

    async def goes() -> None:
        await trio.to_thread.run_sync(own_server.kill)

    far.before = Before(2 * number + 1, goes)  # two trips tell what is there, and the third changes it
    with pytest.raises(ScheduleMoveBlocked):
        await settling.apply(new, 1000)
    assert not active(kept(app, redis_client, None))
    far.before = None
    await trio.to_thread.run_sync(own_server.revive)
    with trio.fail_after(30):
        while True:
            with suppress(ScheduleMoveBlocked):
                await settling.apply(new, 1000)
                break
            await trio.sleep(0.1)
    assert active(kept(app, redis_client, second)) == ["near"]


async def test_schedulers_of_old_and_new_code_fire_each_time_once(
    app: App, redis_client: "redis.Redis", second: "redis.Redis", own_server: EmbeddedServer
) -> None:
    def version(queue: str) -> App:
        code = App(
            app.name,
            broker=app.settings.broker,
            brokers=dict(app.settings.brokers),
            routes={"post": "mails"},
            lease=LEASE,
        )

        @code.task(name="ticks", queue=queue, schedule=every(0.2))
        async def ticks() -> None: ...

        del ticks
        return code

    def sent() -> list[str]:
        streams = ((redis_client, "near"), (second, "post"))
        found: list[Any] = []
        for client, queue in streams:
            entries: Any = client.xrange(app.queue(queue).stream)
            found += entries
        return [read_command(fields[b"job"]).id for _, fields in found]

    def there() -> int:
        return int(second.xlen(app.queue("post").stream))

    async with trio.open_nursery() as nursery:
        one = await start(nursery, version("near"), page=SCHEDULER)
        await until_async(lambda: _true(len(sent()) >= 3), within=30)
        await trio.to_thread.run_sync(own_server.kill)
        two = await start(nursery, version("post"), page=SCHEDULER)
        await trio.to_thread.run_sync(own_server.revive)
        await until_async(lambda: _true(there() >= 3), within=60)
        ids = sent()
        assert len(set(ids)) == len(ids)
        assert active(kept(app, redis_client, second)) == ["post"]
        await one.stop()
        await two.stop()


async def _true(what: bool) -> bool:
    return what
