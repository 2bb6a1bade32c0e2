"""What jobs and tasks can do, on a sharded queue: each promise holds on all of its shards."""

import time
from pathlib import Path
from typing import Any

import pytest
import trio

from celery5 import App, RetryPolicy, agather
from celery5.protocol.job.states import JobState
from tests.redis.boxes import boxing
from tests.redis.commands.staff import wait_until
from tests.redis.events.sinking import Kept, delivering
from tests.redis.publisher.publishing import publishing
from tests.redis.sharding.declaring import QUEUE, SHARDS, declare
from tests.redis.worker.workers import until, until_async, working


@pytest.fixture
def sharded(app: App) -> App:
    """The application, with a queue of four shards."""
    app.configure(shards={QUEUE: 4})
    return app


async def same(n: int) -> int:
    return n


async def test_jobs_of_all_shards_expire_and_delayed_ones_wait(sharded: App) -> None:
    begun: dict[int, float] = {}

    async def note(n: int) -> None:
        begun[n] = time.time()

    task = declare(sharded, note)
    expired = await sharded.asend_many(
        [task.options(expires=0.01, id=f"expired-{n}").s(n) for n in range(16)]
    )
    before = time.time()
    delayed = await sharded.asend_many(
        [task.options(countdown=0.3, id=f"delayed-{n}").s(100 + n) for n in range(16)]
    )
    assert {result.queue for result in expired} == {result.queue for result in delayed} == set(SHARDS)
    async with working(sharded):
        await agather(delayed, timeout=30)

        async def have_expired() -> bool:
            return {await result.astatus() for result in expired} == {JobState.EXPIRED}

        await until_async(have_expired)
    assert sorted(begun) == list(range(100, 116))
    assert min(begun.values()) >= before + 0.3


async def test_a_job_with_the_same_arguments_is_sent_once_whatever_its_shard(sharded: App) -> None:
    task = declare(sharded, same, unique_for=60)
    sent = await sharded.asend_many([task.s(n) for n in range(20)] * 3)
    assert len({result.id for result in sent}) == 20
    assert [result.duplicate for result in sent] == [False] * 20 + [True] * 40
    assert {result.queue for result in sent} == set(SHARDS)
    async with working(sharded):
        assert await agather(sent, timeout=30) == list(range(20)) * 3


async def test_a_sink_has_the_results_of_all_shards_once(sharded: App) -> None:
    kept = Kept()
    task = declare(sharded, same, sinks=[kept])
    sent = await sharded.asend_many([task.s(n) for n in range(60)])
    async with working(sharded), delivering(sharded):
        await agather(sent, timeout=30)
        await until(lambda: len(kept.documents) == 60)
    assert sorted(kept.values) == list(range(60))


async def test_an_outbox_sends_jobs_that_were_made_for_another_number_of_shards(sharded: App) -> None:
    task = declare(sharded, same)
    jobs = [task.options(id=f"job-{n}").job(n) for n in range(20)]
    sharded.configure(shards={QUEUE: 2})
    assert {job.queue for job in jobs} == set(SHARDS)
    sent = await sharded.asend_jobs(jobs)
    sent += await sharded.asend_jobs(jobs)  # again, as after a crash
    async with working(sharded):
        assert await agather(sent, timeout=30) == list(range(20)) * 2
        assert [await sharded.result(job.id, queue=QUEUE).aget() for job in jobs] == list(range(20))


def test_the_publisher_daemon_sends_to_all_shards(url: str, app_name: str, short_path: Path) -> None:
    shards = {"default": 4}
    with publishing(app_name, url, short_path) as daemon:
        daemon.start(shards="default=4")
        app = daemon.app(shards=shards)
        app.send_many([app.signature("number", n) for n in range(40)])

        def count_waiting() -> list[int]:
            return [state.waiting for state in app.info(shards=True).queues.values()]

        wait_until(lambda: sum(count_waiting()) == 40)
        assert len(list(filter(None, count_waiting()))) == 4
        app.empty("default")
        app.close()


async def test_boxed_jobs_of_all_shards_run(url: str, app_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOXING_APP", app_name)
    policy = RetryPolicy(max_retries=0)
    app = boxing.make(app_name, url, lease=1.0, box_slots=2, retry_policy=policy, shards={"default": 3})
    results: list[Any] = await app.asend_many(
        [app.tasks["seen"].options(id=f"seen-{n}").s() for n in range(12)]
    )
    async with working(app):
        with trio.fail_after(60):
            seen = [await result.aget(60) for result in results]
    assert [job.queue for job in seen] == [result.queue for result in results]
    assert len({job.queue for job in seen}) == 3
    app.close()
