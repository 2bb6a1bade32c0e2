"""Overview: what is known of a job in every state, and of queues and workers, before and after there are any."""

import asyncio
import time
from typing import Any

import pytest
import redis
import trio

from celery5 import App, AsyncResult, JobState, ResultTimeout, TaskFailed, agather, gather, wait, wait_async
from celery5.broker.calls import cluster, jobs, leases, queues
from celery5.errors import BlockingInEventLoop, UnknownQueue
from celery5.protocol.job.messages import Command, encode
from celery5.results import JobDetails
from tests.redis.dead_letters.many_dead_letters import add_dead_letters
from tests.redis.worker.workers import LEASE, working


async def found(app: App, job_id: str) -> JobDetails:
    """What is known of a job of which something is."""
    story = await app.afind(job_id)
    assert story is not None
    assert story == await app.afind(job_id, queue=story.queue) or story.taken
    return story


async def test_how_often_a_job_may_be_tried_again_is_told_whoever_says_it(app: App) -> None:
    @app.task(name="plain")
    async def plain() -> None: ...

    @app.task(name="often", max_retries=7)
    async def often() -> None: ...

    by_default, declared = await plain.adelay(), await often.adelay()
    of_the_call = await plain.options(max_retries=1).adelay()
    stories = [await found(app, job.id) for job in (by_default, declared, of_the_call)]
    assert [story.max_retries for story in stories] == [app.retry_policy.max_retries, 7, 1]
    dict.pop(app.tasks, "plain")
    assert (await found(app, by_default.id)).max_retries is None  # only whoever declares it can know


async def test_a_job_is_found_in_every_state_wherever_it_is(app: App) -> None:
    gate = trio.Event()

    @app.task(name="t", queue="slow", max_retries=1, backoff=30, jitter=False)
    async def task(how: str) -> str:
        if how == "wait":
            await gate.wait()
        if how == "fail":
            raise ValueError("no")
        return how

    assert await app.afind("nobody") is None
    first = await task.options(key="1").adelay("fine")
    sent = await found(app, first.id)
    assert (sent.state, sent.queue, sent.task, sent.args, sent.key) == (
        JobState.SENT,
        "slow",
        "t",
        ["fine"],
        "1",
    )
    assert abs(sent.sent - time.time()) < 10
    later = await task.options(key="2", countdown=60).adelay("fine")
    scheduled = await found(app, later.id)
    assert scheduled.state is JobState.SCHEDULED
    assert 50 < scheduled.due - time.time() < 61
    async with working(app, name="w"):
        assert await first.aget() == "fine"
        done = await found(app, first.id)
        assert (done.state, done.value, done.worker[:1], done.args) == (JobState.SUCCESS, "fine", "w", None)
        assert done.sent <= done.started <= done.finished
        running = await task.options(key="3").adelay("wait")
        failing = await task.options(key="4").adelay("fail")
        with trio.fail_after(30):
            while (
                await running.astatus() is not JobState.EXECUTING
                or await failing.astatus() is not JobState.RETRY
            ):
                await trio.sleep(0.01)
        executing, retry = await found(app, running.id), await found(app, failing.id)
        assert executing.worker.startswith("w")
        assert abs(executing.taken - time.time()) < 10
        assert (retry.attempt, retry.failures[0].type) == (2, "ValueError")
        assert 20 < retry.due - time.time() < 31
        gate.set()
        await running.aget()


def test_a_dead_job_tells_its_failure_when_its_document_has_expired(app: App, redis_client: Any) -> None:
    (dead_entry,) = add_dead_letters(app, redis_client, "a")
    redis_client.delete(app.queue("default").result("a"))
    dead = app.find("a")
    assert dead is not None
    assert (dead.state, dead.reason, dead.dead_entry) == (JobState.DEAD, "exhausted", dead_entry)
    assert dead.failure is not None
    assert dead.failure.type == "ValueError"


@pytest.mark.parametrize("colour", ["plain", "trio", "asyncio"])
def test_waiter_of_a_dead_job_is_told_when_its_document_expired(
    colour: str, app: App, redis_client: Any
) -> None:
    add_dead_letters(app, redis_client, "a", "b")
    redis_client.delete(app.queue("default").result("a"), app.queue("default").result("b"))
    handles: list[AsyncResult[Any]] = [app.result(job_id) for job_id in ("a", "b", "nobody")]
    one, other, nobody = handles
    began = time.monotonic()

    async def awaited() -> None:
        with pytest.raises(TaskFailed, match=r"exhausted\): ValueError: ValueError of shop.t"):
            await one.aget(timeout=None)
        assert [type(error) for error in await agather([one, nobody], timeout=1.5)] == [
            TaskFailed,
            ResultTimeout,
        ]
        assert await wait_async([nobody, other], return_when="FIRST_EXCEPTION") == ({other}, {nobody})

    if colour == "trio":
        trio.run(awaited)
    elif colour == "asyncio":
        asyncio.run(awaited())
    else:
        with pytest.raises(TaskFailed, match=r"exhausted\): ValueError: ValueError of shop.t"):
            one.get(timeout=None)
        assert [type(error) for error in gather([one, nobody], timeout=0.2)] == [TaskFailed, ResultTimeout]
        assert wait([nobody, other], return_when="FIRST_EXCEPTION") == ({other}, {nobody})
    assert time.monotonic() - began < 30


async def test_an_application_is_seen_before_and_after_it_has_workers(
    app: App, redis_client: "redis.Redis"
) -> None:
    @app.task(name="t", queue="slow")
    async def task() -> None: ...

    empty = await app.ainfo()
    assert (empty.app, empty.queues, empty.unfinished, empty.dead, empty.workers) == (app.name, {}, 0, 0, ())
    await app.asend_many([task.s(), task.s(), task.options(countdown=90).s()])
    await trio.to_thread.run_sync(lambda: add_dead_letters(app, redis_client, "d", queue="other"))
    before = (await app.ainfo()).queues
    slow, other = before["slow"], before["other"]
    assert (slow.waiting, slow.running, slow.scheduled, slow.dead, slow.workers) == (2, 0, 1, 0, ())
    assert slow.next_due is not None
    assert 80 < slow.next_due <= 90
    assert (other.dead, other.waiting, other.next_due) == (1, 0, None)
    assert other.oldest_dead is not None
    assert 0 <= other.oldest_dead < 10
    async with working(app, name="w"):
        with trio.fail_after(30):
            while (await app.ainfo("slow")).unfinished > 1:
                await trio.sleep(0.01)
        after = await app.ainfo()
        (worker,) = after.queues["slow"].workers
        assert (after.workers, after.dead, after.unfinished) == ((worker.name,), 1, 1)
        assert worker.alive
        assert (worker.running, 0 < worker.lease <= LEASE + 0.1) == (0, True)
    redis_client.zadd(app.queue("slow").leases, {"gone": 1})
    (gone,) = (await app.ainfo("slow")).queues["slow"].workers
    assert (gone.name, gone.alive, gone.running) == ("gone", False, 0)
    with pytest.raises(UnknownQueue):
        await app.ainfo("nowhere")
    with pytest.raises(BlockingInEventLoop, match="await ainfo"):
        app.info()
    with pytest.raises(BlockingInEventLoop, match="await afind"):
        app.find("a")


def test_jobs_of_nobody_are_seen(app: App, redis_client: Any) -> None:
    keys = app.queue("default")
    app.perform(queues.register_queue(app.keys, "default"))
    app.perform(jobs.publish(keys, [("a", encode(Command(v=1, id="a", task="t")))]))
    app.perform(leases.join_queue(keys, "w", lease=60))
    app.perform(jobs.read_jobs([keys], "w", count=1, block_seconds=0.01))
    (worker,) = app.info().queues["default"].workers
    assert (worker.name, worker.running, worker.alive) == ("w", 1, True)
    redis_client.zrem(keys.leases, "w")
    (nobody,) = app.info().queues["default"].workers
    assert (nobody.name, nobody.running, nobody.alive) == ("w", 1, False)


def test_controllers_with_who_leads_and_publishers_that_live_are_seen(app: App) -> None:
    for kind, name in (("controller", "c:1:x"), ("controller", "c:2:x"), ("publisher", "p:1:x")):
        app.perform(cluster.renew_presence(app.keys, kind, name, lease=30))
    assert app.info().leader == ""
    app.perform(cluster.claim_leadership(app.keys, "c:2:x", replaces="0 0", epoch=0))
    state = app.info()
    assert (state.controllers, state.publishers, state.schedulers) == (("c:1:x", "c:2:x"), ("p:1:x",), ())
    assert state.leader == "c:2:x"
    app.perform(cluster.end_presence(app.keys, "controller", "c:2:x"))
    assert app.info().leader == ""  # it is remembered who led, and does not live
