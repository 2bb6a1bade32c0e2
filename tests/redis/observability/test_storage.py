"""What Redis holds for an application: servers, queues, streams and history, in bytes and entries."""

import json
from collections.abc import Iterator

import pytest
import redis

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BrokerUnavailable
from celery5.observability import Storage, storage
from celery5.protocol.observability.storage import QueueStorage
from tests.redis.connections.two_brokers import COLOURS, asked


def declare(app: App) -> None:
    """Two tasks on queues of their own."""

    @app.task(name="pay", queue="money")
    async def pay(note: str) -> None: ...

    @app.task(name="mail", queue="letters")
    async def mail() -> None: ...


def get_queues(found: Storage) -> dict[str, QueueStorage]:
    return {row.queue: row for row in found.queues}


@pytest.mark.parametrize("colour", COLOURS)
async def test_each_queue_is_measured_and_the_largest_comes_first(app: App, colour: str) -> None:
    declare(app)
    await app.asend_many([app.tasks["pay"].s("x" * 1000) for _ in range(200)])
    await app.asend_many([app.tasks["pay"].options(countdown=3600).s("y" * 1000) for _ in range(50)])
    await app.tasks["mail"].adelay()
    found = await asked(colour, app.metrics.storage, app.metrics.astorage)
    assert [row.queue for row in found.queues] == ["money", "letters"]
    money = get_queues(found)["money"]
    assert (money.jobs, money.scheduled, money.held, money.dead, money.broker) == (200, 50, 0, 0, "default")
    assert money.stream_bytes is not None
    assert 200_000 < money.stream_bytes < 1_000_000
    assert money.waiting_bytes is not None
    assert 50_000 < money.waiting_bytes < 500_000
    assert money.dead_bytes == 0
    assert money.total_bytes == money.stream_bytes + money.waiting_bytes + (money.index_bytes or 0)
    (server,) = found.servers
    assert server.used > money.total_bytes
    assert server.keys > 0
    assert server.version.startswith(("valkey ", "redis "))
    assert server.memory is not None
    assert set(found.others) == {"metrics", "jobs", "audit", "subscriptions", "results"}


async def test_streams_of_many_partitions_are_estimated(app: App) -> None:
    orders = app.stream("orders", dict, by=lambda order: order["id"], partitions=64)
    records = [{"id": number, "text": "z" * 500} for number in range(1000)]
    await orders.asend(*records)
    (found,) = (await app.metrics.astorage()).streams
    assert (found.stream, found.partitions, found.records) == ("orders", 64, 1000)
    assert found.total_bytes is not None
    assert 500_000 < found.total_bytes < 1_500_000


async def test_of_many_queues_those_with_the_most_entries_are_measured(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_QUEUES", 2)
    declare(app)
    for name, count in {"a": 1, "b": 5, "c": 3, "d": 0}.items():
        await app.asend_many([app.tasks["mail"].options(queue=name).s() for _ in range(count)])
    found = await app.metrics.astorage()
    assert {row.queue for row in found.queues} == {"b", "c"}
    assert found.queues_left_out == 1


async def test_storage_counts_held_jobs_and_scheduled_ones_as_every_surface_does(
    app: App, redis_client: "redis.Redis"
) -> None:
    declare(app)
    await app.asend_many([app.tasks["mail"].options(queue="a", countdown=3600).s() for _ in range(2)])
    redis_client.hset(app.queue("a").limited_counts, mapping={"mail": 3})
    (row,) = (await app.metrics.astorage()).queues
    (shown,) = (await app.metrics.aoverview()).queues
    assert (row.scheduled, row.held) == (shown.scheduled, shown.held) == (2, 3)
    redis_client.delete(app.queue("a").limited_counts)


def test_an_application_without_anything_holds_nothing(app: App) -> None:
    found = app.metrics.storage()
    assert (found.queues, found.streams, found.queues_left_out) == ((), (), 0)
    assert found.others == {"metrics": 0, "jobs": 0, "audit": 0, "subscriptions": 0, "results": 0}


@pytest.fixture
def clerk(own_server: EmbeddedServer, app_name: str) -> Iterator[App]:
    """An application whose user may neither measure keys nor read what the server says of itself."""
    admin = redis.Redis.from_url(own_server.url)
    rules = ("on", ">secret", "~*", "&*", "+@all", "-memory", "-info", "-config")
    admin.execute_command("ACL", "SETUSER", "clerk", *rules)  # type: ignore[no-untyped-call]
    scheme, _, rest = own_server.url.partition("://")
    app = App(app_name, broker=f"{scheme}://clerk:secret@{rest}")
    yield app
    app.close()
    admin.close()


def test_counts_are_shown_where_bytes_are_not_permitted(clerk: App) -> None:
    declare(clerk)
    clerk.send_many([clerk.tasks["pay"].s("x") for _ in range(3)])
    found = clerk.metrics.storage()
    money = get_queues(found)["money"]
    assert (money.jobs, money.total_bytes, money.stream_bytes) == (3, None, None)
    assert found.others["metrics"] is None
    (server,) = found.servers
    assert server.memory is not None
    assert server.memory.remedy


async def test_each_queue_is_measured_on_its_broker(paired: App, own_server: EmbeddedServer) -> None:
    await paired.asend_many([paired.tasks[name].s(1) for name in ("near", "post")])
    found = await paired.metrics.astorage()
    assert [server.broker for server in found.servers] == ["default", "mails"]
    assert {row.queue: row.broker for row in found.queues} == {"near": "default", "post": "mails"}
    assert all(row.total_bytes for row in found.queues)
    own_server.stop()
    found = await paired.metrics.astorage()
    assert [bool(server.unreachable) for server in found.servers] == [False, True]
    assert [row.queue for row in found.queues] == ["near"]
    assert json.dumps(found.others)


def test_without_any_broker_the_error_is_raised(app_name: str) -> None:
    app = App(app_name, broker="redis://127.0.0.1:1/0")
    with pytest.raises(BrokerUnavailable):
        app.metrics.storage()
