"""Long operations wait while Redis is full, a replica, or away: they go on where they were, and say that they wait."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.bulk import BulkRequest
from celery5.connections import long_operations
from celery5.errors import BrokerReadOnly, BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.bulk import INTERRUPTED
from celery5.runners.context import LOG_EVENT
from celery5.services.bulk import bulk_performer
from celery5.services.bulk.bulk_performer import BulkPerformer
from celery5.streams import StreamEvents
from tests.redis.dead_letters.many_dead_letters import add_dead_letters, numbered, sent
from tests.redis.worker.workers import Lines, until, until_async, working

JOBS = 300


@pytest.fixture
def app(own_server: EmbeddedServer, app_name: str) -> Iterator[App]:
    """An application on the server that is made unavailable."""
    one = App(app_name, broker=own_server.url, lease=1.0)
    yield one
    one.close()


@pytest.fixture
def client(own_server: EmbeddedServer) -> Iterator["redis.Redis"]:
    """What looks at that server."""
    with redis.Redis.from_url(own_server.url) as one:
        yield one


@asynccontextmanager
async def outage(kind: str, server: EmbeddedServer, client: Any) -> AsyncGenerator[None, None]:
    """Redis refuses writes while the block lasts, or is away."""
    if kind == "away":
        client.save()
        await trio.to_thread.run_sync(server.kill)
        yield
        await trio.to_thread.run_sync(server.revive)
    elif kind == "replica":
        client.replicaof("127.0.0.1", 1)
        yield
        client.replicaof("NO", "ONE")
    else:
        setting = {"full": "maxmemory", "unreplicated": "min-replicas-to-write"}[kind]
        client.config_set(setting, "1")
        yield
        client.config_set(setting, "0")


@asynccontextmanager
async def performing(app: App) -> AsyncGenerator[BulkPerformer, None]:
    """A service that performs bulk actions while the block lasts."""
    performer = BulkPerformer(app=app, worker="one", log=Log(worker="one", app=app.name), bulk_lease=1.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(performer.run)
        yield performer
        nursery.cancel_scope.cancel()


async def get_status(app: App, action_id: str) -> Any:
    """Return what is known of an action, as soon as Redis can be asked."""
    with trio.fail_after(30):
        while True:
            try:
                status = await app.bulk.aget(action_id)
            except BrokerUnavailable:
                await trio.sleep(0.05)
            else:
                assert status is not None
                return status


async def until_done(app: App, action_id: str, count: int) -> None:
    """Wait until an action has done so many."""

    async def has_done() -> bool:
        return bool((await get_status(app, action_id)).progress.done >= count)

    await until_async(has_done)


async def send_or_dead_letter(app: App, client: "redis.Redis", verb: str) -> None:
    """What an action is done to."""
    if verb == "task:revoke":

        @app.task(name="shop.t")
        async def job() -> None: ...

        await app.asend_many([job.s() for _ in range(JOBS)])
    else:
        await trio.to_thread.run_sync(lambda: add_dead_letters(app, client, *numbered(JOBS)))


@pytest.mark.parametrize("kind", ["full", "replica", "unreplicated", "away"])
@pytest.mark.parametrize("verb", ["dlq:replay", "dlq:purge", "task:revoke"])
async def test_a_bulk_action_waits_for_an_outage_and_goes_on(
    verb: Any, kind: str, app: App, own_server: EmbeddedServer, client: "redis.Redis"
) -> None:
    await send_or_dead_letter(app, client, verb)
    selection = {"queue": "default"} if verb == "task:revoke" else {}
    with Lines() as lines:
        async with performing(app) as performer:
            action_id = await performer.submit(BulkRequest(verb=verb, filter=selection, rate="200/s"))
            await until_done(app, action_id, 20)
            async with outage(kind, own_server, client):
                await until(lambda: bool(lines.of("bulk:interrupted")))
            await until_done(app, action_id, JOBS - 20)  # a portion may be missing in the count

            async def has_ended() -> bool:
                return bool((await get_status(app, action_id)).has_ended)

            await until_async(has_ended)
            status = await get_status(app, action_id)
            assert (status.state, status.progress.error, status.progress.failed) == ("done", "", 0)
            assert status.changed >= status.created
        assert len(lines.of("bulk:resumed")) >= 1
    if verb == "dlq:replay":
        assert sorted(sent(client, app)) == sorted(numbered(JOBS))
    assert await app.dlq.acount() == {}
    if verb == "task:revoke":
        assert client.xlen(app.queue("default").stream) == 0


async def test_a_bulk_action_keeps_its_lease_while_memory_is_full(
    app: App, own_server: EmbeddedServer, client: "redis.Redis"
) -> None:
    await send_or_dead_letter(app, client, "dlq:purge")
    async with performing(app) as performer:
        action_id = await performer.submit(BulkRequest(verb="dlq:purge", rate="100/s"))
        await until_done(app, action_id, 10)
        async with outage("full", own_server, client):
            before = (await get_status(app, action_id)).changed
            began = trio.current_time()

            async def has_a_later_lease() -> bool:
                status = await get_status(app, action_id)
                assert (status.state, status.changed) == ("running", before)
                return trio.current_time() > began + 1.5  # longer than the lease

            await until_async(has_a_later_lease)


async def test_a_bulk_action_of_a_long_outage_is_interrupted_and_can_be_resumed(
    app: App, own_server: EmbeddedServer, client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    await send_or_dead_letter(app, client, "dlq:replay")
    with Lines() as lines:
        async with performing(app) as performer:
            monkeypatch.setattr(bulk_performer, "MAX_OUTAGE", 0.1)
            action_id = await performer.submit(BulkRequest(verb="dlq:replay", rate="200/s"))
            await until_done(app, action_id, 20)
            async with outage("full", own_server, client):
                await until(lambda: bool(lines.of("bulk:failed")))

            async def is_interrupted() -> bool:
                return bool((await get_status(app, action_id)).state == INTERRUPTED)

            await until_async(is_interrupted)
            await performer.resume(action_id)
            await until_async(lambda: _is_empty(app))
    assert sorted(sent(client, app)) == sorted(numbered(JOBS))


async def _is_empty(app: App) -> bool:
    return await app.dlq.acount() == {}


@pytest.mark.parametrize("kind", ["unreplicated", "away"])
@pytest.mark.parametrize("operation", ["replay", "purge", "empty", "replay records", "purge records"])
async def test_an_operation_whose_caller_waits_goes_on_after_an_outage(
    operation: str, kind: str, app: App, own_server: EmbeddedServer, client: "redis.Redis"
) -> None:
    perform = await prepare(operation, app, client)
    await app.dlq.acount()  # the connection is there: an operation does not begin without one
    logged: list[tuple[str, dict[str, Any]]] = []

    def note(event: str, _level: Any = "info", /, **fields: Any) -> None:
        if event.startswith("operation:"):
            logged.append((event, fields))

    token = LOG_EVENT.set(note)
    try:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery, outage(kind, own_server, client):
                nursery.start_soon(perform)
                await until(lambda: bool(logged))
        assert [event for event, _ in logged][:2] == ["operation:interrupted", "operation:resumed"]
        assert ":" in logged[0][1]["operation"]
    finally:
        LOG_EVENT.reset(token)


async def prepare(operation: str, app: App, client: "redis.Redis") -> Callable[[], Awaitable[None]]:
    """Make what an operation needs; return what performs it and checks what it has done."""
    if operation == "empty":
        await send_or_dead_letter(app, client, "task:revoke")

        async def empty() -> None:
            assert await app.aempty("default") == JOBS

        return empty
    if operation in ("replay", "purge"):
        await send_or_dead_letter(app, client, "dlq:replay")

        async def handle() -> None:
            tally = await (app.dlq.areplay if operation == "replay" else app.dlq.apurge)()
            assert (tally.matched, tally.done) == (JOBS, JOBS)

        return handle
    numbers = app.stream("numbers", int, by=str, partitions=1)

    @app.processor(numbers, name="refuse", then="ignore")
    async def refuse(events: StreamEvents[int]) -> None:
        async for number in events.records():
            raise ValueError(number)

    await numbers.asend(*range(20))
    async with working(app):
        await until(lambda: client.xlen(numbers.keys.dead("refuse")) == 20)
    dead_records = app.streams.dead_records

    async def handle_records() -> None:
        act = dead_records.areplay if operation == "replay records" else dead_records.apurge
        assert (await act("numbers", "refuse")).done == 20

    return handle_records


async def test_an_operation_gives_up_when_an_outage_lasts(
    app: App, own_server: EmbeddedServer, client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    await send_or_dead_letter(app, client, "dlq:replay")
    monkeypatch.setattr(long_operations, "MAX_OUTAGE", 0.1)
    async with outage("replica", own_server, client):
        with pytest.raises(BrokerReadOnly):
            await app.dlq.areplay()
    assert (await app.dlq.areplay()).done == JOBS
