"""Degraded start: processes that begin while the default broker cannot be reached do what the others need of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from celery5 import App, BrokerUnavailable, agather, every
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.processes.foreground import WORKER
from celery5.processes.lifecycle.incarnations import ProcessKind
from celery5.processes.router import ROUTER
from celery5.processes.scheduler import SCHEDULER
from celery5.services.health.vitals import ProcessStatus
from tests.redis.connections.two_brokers import app_on
from tests.redis.events.sinking import Kept
from tests.redis.worker.workers import LEASE, Lines, start, until, until_async, working


@pytest.fixture
def app(url: str, own_server: EmbeddedServer, app_name: str) -> Iterator[App]:
    """An application whose default broker is the test's own server."""
    one = app_on(app_name, own_server.url, url, lease=LEASE, concurrency=4, cpu_slots=4)
    yield one
    one.close()


async def test_a_scheduler_fires_what_is_on_the_brokers_that_it_reaches(
    app: App, own_server: EmbeddedServer
) -> None:
    got = list[str]()

    @app.task(name="here", queue="near", schedule=every(0.5))
    async def here() -> None:
        got.append("here")

    @app.task(name="there", queue="post", schedule=every(0.5))
    async def there() -> None:
        got.append("there")

    async def both_are_known() -> bool:
        return {schedule.name for schedule in await app.schedule.alist()} == {"here", "there"}

    async with working(app, page=SCHEDULER):  # a new one waits until it is known to be on no other broker
        await until_async(both_are_known)
    await trio.to_thread.run_sync(own_server.kill)
    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            worker = await start(nursery, app)
            scheduler = await start(nursery, app, page=SCHEDULER)
            await until(lambda: got.count("there") >= 3, within=40)
            assert "here" not in got
            await trio.to_thread.run_sync(own_server.revive)
            await until(lambda: got.count("here") >= 2, within=60)
            before = got.count("there")
            await until(lambda: got.count("there") > before + 1, within=40)
            await scheduler.stop()
            await worker.stop()
    assert {line["broker"] for line in lines.of("broker:connect-failed")} == {"default"}
    assert lines.of("scheduler:started")
    del here, there


async def test_a_router_delivers_the_documents_of_the_brokers_that_it_reaches(
    app: App, own_server: EmbeddedServer
) -> None:
    kept = Kept()

    @app.task(name="here", queue="near", sinks=[kept])
    async def here(number: int) -> int:
        return number

    @app.task(name="there", queue="post", sinks=[kept])
    async def there(number: int) -> int:
        return number

    await trio.to_thread.run_sync(own_server.kill)
    async with trio.open_nursery() as nursery:
        router = await start(nursery, app, page=ROUTER)
        worker = await start(nursery, app)
        assert await (await there.adelay(1)).aget(timeout=30) == 1
        await until(lambda: kept.values == [1], within=40)
        await trio.to_thread.run_sync(own_server.revive)
        await agather(await app.asend_many([here.s(2), there.s(3)]), timeout=60)
        await until(lambda: len(kept.documents) == 3, within=60)
        await router.stop()
        await worker.stop()
    assert sorted(kept.values) == [1, 2, 3]


@pytest.mark.parametrize("kind", [SCHEDULER, ROUTER], ids=lambda kind: kind.name)
async def test_where_no_broker_is_reached_the_start_fails_as_with_one(
    app_name: str, own_server: EmbeddedServer, kind: ProcessKind
) -> None:
    app = app_on(app_name, own_server.url, own_server.url.replace("?db=0", "?db=1"), lease=LEASE)
    await trio.to_thread.run_sync(own_server.kill)
    with pytest.RaisesGroup(BrokerUnavailable, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await start(nursery, app, page=kind)


async def test_systemd_hears_ready_once_and_of_a_stop_when_it_is_one(
    app: App, own_server: EmbeddedServer, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trio.to_thread.run_sync(own_server.kill)
    monkeypatch.setenv("NOTIFY_SOCKET", str(short_path / "notify"))
    heard = list[str]()
    for kind in (SCHEDULER, ROUTER, WORKER):
        heard.clear()
        with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_DGRAM) as systemd:
            await systemd.bind(str(short_path / "notify"))
            with Lines() as lines:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_hear, systemd, heard)
                    status = ProcessStatus(app=app.name)
                    process = await start(nursery, app, page=kind, process_status=status)
                    await until(lambda: "READY=1" in heard)
                    await trio.to_thread.run_sync(own_server.revive)
                    await until(lambda name=f"{kind.name}:boot-started": len(lines.of(name)) > 1)  # type: ignore[misc]
                    await until(lambda: heard.count("READY=1") > 1)
                    assert "STOPPING=1" not in heard
                    status.mark_stopping()
                    await process.stop()
                    await until(lambda: "STOPPING=1" in heard)
                    nursery.cancel_scope.cancel()
        (short_path / "notify").unlink()
        await trio.to_thread.run_sync(own_server.kill)


async def _hear(systemd: Any, heard: list[str]) -> None:
    while True:
        heard.extend((await systemd.recv(4096)).decode().split("\n"))


async def test_a_stop_ends_a_degraded_process_at_once(app: App, own_server: EmbeddedServer) -> None:
    await trio.to_thread.run_sync(own_server.kill)
    for kind in (SCHEDULER, ROUTER, WORKER):
        async with trio.open_nursery() as nursery:
            process: Any = await start(nursery, app, page=kind)
            with trio.fail_after(10):
                await process.stop()
