"""Scheduled: jobs that wait for their time wait in Redis, cost a worker nothing, and start when it comes."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import redis
import trio

from celery5 import App, JobState, Misconfigured, agather
from tests.redis.commands.staff import Staff
from tests.redis.worker.workers import working

LATE = 10.0
"""Seconds after its time by which a job has started, on an idle worker whose heart beats every 40 s."""


def server_time(client: "redis.Redis") -> float:
    """What time it is by Redis."""
    seconds, micros = client.time()
    return float(seconds + micros / 1e6)


async def test_jobs_start_at_their_time_and_not_at_a_beat(app: App, redis_client: "redis.Redis") -> None:
    """By countdown and by eta. The machine of a test may stand still at any moment, so the better half counts."""
    app.configure(lease=120.0)

    @app.task
    async def when() -> float:
        return server_time(redis_client)

    async with working(app):
        now = server_time(redis_client)
        due = [now + 0.3 + 0.12 * n for n in range(10)]
        sent = []
        for n, at in enumerate(due):
            moment = datetime.fromtimestamp(at, UTC)
            left = at - server_time(redis_client)
            sent.append(await when.options(**({"eta": moment} if n % 2 else {"countdown": left})).adelay())
        began: Any = await agather(sent, timeout=30)
        late = [begin - at for begin, at in zip(began, due, strict=True)]
    assert min(late) >= -0.002  # times are kept in ms
    assert sorted(late)[len(late) // 2] < LATE


async def test_one_that_is_sent_later_and_due_sooner_is_not_held_up(
    app: App, redis_client: "redis.Redis"
) -> None:
    @app.task
    async def when() -> float:
        return server_time(redis_client)

    app.configure(lease=120.0)
    async with working(app):
        await when.options(countdown=3600).adelay()
        late = list[float]()
        for _ in range(5):
            at = server_time(redis_client) + 0.1
            sent = await when.options(countdown=0.1).adelay()
            late.append(await sent.aget(timeout=30) - at)
    assert min(late) < LATE


async def test_an_eta_that_has_passed_is_now_and_expires_is_looked_at_before_the_start(app: App) -> None:
    @app.task
    async def nothing() -> str:
        return "ran"

    async with working(app):
        past = await nothing.options(eta=datetime.now(UTC) - timedelta(days=1)).adelay()
        late = await nothing.options(countdown=0.3, expires=0.1).adelay()
        good = await nothing.options(countdown=0.1, expires=60).adelay()
        assert [await past.aget(timeout=30), await good.aget(timeout=30)] == ["ran", "ran"]
        with trio.fail_after(30):
            while await late.astatus() is JobState.SCHEDULED:
                await trio.sleep(0.01)
            while await late.astatus() is not JobState.EXPIRED:
                await trio.sleep(0.01)


@pytest.mark.parametrize("option", ["eta", "expires"])
def test_a_time_without_a_zone_is_refused(app: App, option: str) -> None:
    @app.task
    async def nothing() -> None:
        pass

    with pytest.raises(Misconfigured, match=r"has no time zone: use datetime.now\(UTC\)"):
        nothing.options(**cast("Any", {option: datetime(2040, 1, 1)}))


def rss(pid: int) -> int:
    """Bytes of memory that a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def test_twenty_thousand_scheduled_jobs_cost_a_worker_no_memory(staff: Staff) -> None:
    worker = staff.start()
    app, quiet = staff.app, staff.app.tasks["quiet"]
    for result in app.send_many([quiet.s(n) for n in range(500)]):
        result.get(timeout=30)
    time.sleep(0.2)
    before = rss(worker.process.pid)
    app.send_many([quiet.options(countdown=3600).s(n) for n in range(20_000)])
    quiet.delay(1).get(timeout=30)
    grown: Any = rss(worker.process.pid) - before
    assert grown < 1_000_000  # they are 6 MB of messages
