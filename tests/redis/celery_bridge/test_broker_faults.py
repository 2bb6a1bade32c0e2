"""Broker faults: the bridge waits until Celery's broker, or ours, is back, and a stop is not held up by either."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from celery5 import App, BrokerUnavailable, current_job
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.contrib.celery import CeleryBridge
from tests.redis.events.test_sources import sourcing
from tests.redis.worker.workers import until, working

celery: Any = pytest.importorskip("celery", reason="needs Celery: uv pip install --group celery")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery5.services.events.source_ingestion.FIRST_DELAY", 0.05)
    monkeypatch.setattr("celery5.services.events.source_ingestion.MAX_DELAY", 0.1)


@pytest.fixture
def far(own_server: EmbeddedServer) -> Any:
    """An application of Celery's whose broker the test stops."""
    path = own_server.url.removeprefix("unix://").partition("?")[0]
    return celery.Celery("far", broker=f"redis+socket://{path}", set_as_current=False)


def note_ids(app: App) -> list[str]:
    """Declare a task that notes the ids of its jobs."""
    ran: list[str] = []

    @app.task(name="shop.charge")
    async def charge(order: int) -> None:
        job = current_job()
        assert job is not None
        ran.append(job.id)

    return ran


async def test_a_bridge_goes_on_when_the_broker_of_celery_is_back(
    app: App, far: Any, own_server: EmbeddedServer
) -> None:
    ran = note_ids(app)
    CeleryBridge(app, far)
    sent = [far.send_task("shop.charge", (1,)).id]
    async with working(app), sourcing(app):
        await until(lambda: ran == sent)
        await trio.to_thread.run_sync(own_server.kill)
        await trio.to_thread.run_sync(own_server.revive)
        sent.append(far.send_task("shop.charge", (2,), retry=True).id)
        await until(lambda: ran == sent)


@pytest.mark.parametrize("broker", ["redis", "filesystem"])
async def test_messages_stay_in_the_broker_of_celery_until_ours_is_back(
    app: App, old: Any, tmp_path: Path, broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = old
    if broker == "filesystem":  # which is read by kombu
        far = celery.Celery("far", broker="filesystem://", set_as_current=False)
        folders = dict.fromkeys(("data_folder_in", "data_folder_out", "control_folder"), str(tmp_path))
        far.conf.broker_transport_options = folders
    ran = note_ids(app)
    CeleryBridge(app, far)
    failures: list[int] = []
    send = app.asend_jobs

    async def fail_twice(jobs: Any) -> Any:
        if len(failures) < 2:
            failures.append(len(jobs))
            raise BrokerUnavailable("gone")
        return await send(jobs)

    monkeypatch.setattr(app, "asend_jobs", fail_twice)
    sent = [far.send_task("shop.charge", (number,)).id for number in range(5)]
    async with working(app), sourcing(app):
        await until(lambda: len(ran) == 5)
    assert sorted(ran) == sorted(sent)
    assert failures


async def test_a_frozen_broker_of_celery_does_not_hold_up_a_stop(
    app: App, far: Any, own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery5.contrib.celery.bridge.STOP_LIMIT", 0.2)
    ran = note_ids(app)
    CeleryBridge(app, far)
    far.send_task("shop.charge", (1,))
    async with working(app):
        try:
            async with sourcing(app) as stop:
                await until(lambda: bool(ran))
                os.kill(own_server.pid, signal.SIGSTOP)
                began = trio.current_time()
                stop.cancel()
            took = trio.current_time() - began
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
    assert took < 3
