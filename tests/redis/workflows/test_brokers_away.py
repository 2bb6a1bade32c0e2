"""A broker is unreachable: runs that do not need it go on, and those that do go on when it is back."""

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.calls import workflows as calls
from celery5.broker.keys import GROUP
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.services.workflows import run_progress
from celery5.workflows import RunState
from tests.redis.worker.workers import until, until_async, working


@pytest.fixture
def app(paired: App) -> App:
    """An application on two servers."""
    return paired


async def test_a_broker_that_is_unreachable_holds_up_only_the_runs_that_live_there(
    app: App, own_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    far = await app.tasks["post"].options(countdown=3600).s(1).astart()
    near = await app.tasks["near"].options(queue="other", countdown=3600).s(1).astart()
    keys = app.queue("near")
    for run, queue in (
        (far, "post"),
        (near, "other"),
    ):  # as if members of both had been settled on this queue in one trip
        record = calls.pack_record("cancel", run.id)
        redis_client.xadd(keys.run_outbox, {"record": record, "home": queue})
    await trio.to_thread.run_sync(own_server.kill)
    async with working(app, queues=["near", "other"]):

        async def is_cancelled() -> bool:
            return (await near.astatus()).state is RunState.CANCELLED

        await until_async(is_cancelled)
        assert redis_client.xlen(keys.run_outbox) == 1
        await trio.to_thread.run_sync(own_server.revive)
        await until(lambda: not redis_client.xlen(keys.run_outbox))
        assert (await far.astatus()).state is RunState.CANCELLING, "no worker reads its queue"


async def test_job_of_a_cancelled_run_is_not_sent_after_an_outage(
    app: App, own_server: EmbeddedServer, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_progress, "STALE_AFTER", 0.2)
    ran: list[int] = []

    @app.task(name="note", queue="post")
    async def note(number: int) -> None:
        ran.append(number)

    keys = app.queue("near")

    def count_attempts() -> int:
        try:
            pending = redis_client.xpending_range(keys.run_outbox, GROUP, "-", "+", 1)
        except redis.ResponseError:  # nobody has read it yet
            return 0
        return int(pending[0]["times_delivered"]) if pending else 0

    await trio.to_thread.run_sync(own_server.kill)
    async with working(app, queues=["near"]):
        run = await (app.tasks["near"].s(1) >> note.s(2)).astart()
        await until(lambda: count_attempts() >= 2)
        await run.acancel()
        before = count_attempts()
        await until(lambda: count_attempts() >= before + 2)
        await trio.to_thread.run_sync(own_server.revive)
        await until(lambda: not redis_client.xlen(keys.run_outbox))
    status = await run.astatus()
    assert (status.state, status.active) == (RunState.CANCELLED, 0)
    async with working(app, queues=["post"]):
        assert await (await app.tasks["post"].adelay(3)).aget(timeout=30) == -3
    assert ran == []
