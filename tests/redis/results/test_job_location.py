"""Whereabouts: a handle that was made of an id alone tells what the sender's tells, whatever queue the job is on."""

import asyncio
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import redis
import trio
from msgspec import Raw

from celery5 import (
    App,
    AsyncResult,
    JobState,
    Reject,
    ResultTimeout,
    TaskFailed,
    TaskRevoked,
    agather,
    gather,
    wait,
    wait_async,
)
from celery5.broker.calls import queues
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import TaskExpired, TaskRejected
from celery5.protocol.job.messages import Document, encode
from celery5.results.async_result import arevoke, revoke
from tests.redis.worker.workers import until_async, working


@dataclass(frozen=True)
class Asked:
    """Handles asked in one colour, from beside the worker."""

    colour: str

    async def __call__(self, plain: Any, awaited: Any, *args: Any, **options: Any) -> Any:
        """What `plain` gives, or what is awaited of `awaited`."""
        if self.colour == "plain":
            return await trio.to_thread.run_sync(partial(plain, *args, **options))
        if self.colour == "trio":
            return await awaited(*args, **options)
        return await trio.to_thread.run_sync(lambda: asyncio.run(awaited(*args, **options)))

    async def status(self, one: AsyncResult[Any]) -> JobState:
        """Its status."""
        state = await self(one.status, one.astatus)
        assert isinstance(state, JobState)
        return state

    async def get(self, one: AsyncResult[Any], timeout: float | None = 5.0) -> Any:
        """Its result."""
        return await self(one.get, one.aget, timeout=timeout)


@pytest.fixture(params=["plain", "trio", "asyncio"])
def asked(request: pytest.FixtureRequest) -> Asked:
    """Each colour."""
    return Asked(request.param)


async def jobs_in_every_state(app: App, task: Any) -> dict[JobState, AsyncResult[Any]]:
    """A job in each state, as its sender has it: on the task's own queue, which is not the default one, or on another.
    A worker must be there."""
    sent = {
        JobState.EXECUTING: await task.adelay("wait"),
        JobState.RETRY: await task.adelay("fail"),
        JobState.DEAD: await task.options(max_retries=0).adelay("fail"),
        JobState.REJECTED: await task.adelay("reject"),
        JobState.SUCCESS: await task.adelay("fine"),
        JobState.EXPIRED: await task.options(expires=0).adelay("late"),
        JobState.SCHEDULED: await task.options(queue="idle", countdown=60).adelay("later"),
        JobState.REVOKED: await task.options(queue="idle", countdown=60).adelay("never"),
        JobState.SENT: await task.options(queue="idle").adelay("whenever"),
    }
    assert await sent[JobState.REVOKED].arevoke()
    for state, result in sent.items():

        async def reached(state: JobState = state, one: AsyncResult[Any] = result) -> bool:
            return await one.astatus() is state

        await until_async(reached)
    assert {job.queue for job in sent.values()} == {"slow", "idle"}
    return sent


def slow_task(app: App, gate: trio.Event) -> Any:
    """A task that is declared for another queue than the default one."""

    @app.task(name="t", queue="slow", max_retries=1, backoff=60, jitter=False)
    async def task(how: str) -> str:
        if how == "wait":
            await gate.wait()
        if how == "reject":
            raise Reject("no")
        if how == "fail":
            raise ValueError("no")
        return how

    return task


async def test_it_agrees_with_the_senders_in_every_state(app: App, asked: Asked) -> None:
    gate = trio.Event()
    task = slow_task(app, gate)
    async with working(app, queues=("slow",)):
        sent = await jobs_in_every_state(app, task)
        for state, job in sent.items():
            for again in (app.result(job.id), app.result(job.id, task=task)):
                assert await asked.status(again) is state
                assert (again.queue, again.is_located) == (job.queue, True)
            story = await app.afind(job.id)
            assert story is not None
            assert (story.state, story.queue) == (state, job.queue)
        nobody: AsyncResult[Any] = app.result("nobody")
        assert await asked.status(nobody) is JobState.UNKNOWN
        assert not nobody.is_located
        with pytest.raises(ResultTimeout, match="the job is UNKNOWN on any queue"):
            await asked.get(nobody, 0.02)
        gate.set()


ENDS = {
    JobState.DEAD: TaskFailed,
    JobState.REJECTED: TaskRejected,
    JobState.EXPIRED: TaskExpired,
    JobState.REVOKED: TaskRevoked,
}


async def test_it_waits_and_revokes_as_the_senders_does(app: App, asked: Asked) -> None:
    gate = trio.Event()
    task = slow_task(app, gate)

    def again(state: JobState) -> AsyncResult[Any]:
        return app.result(sent[state].id)

    async with working(app, queues=("slow",)):
        sent = await jobs_in_every_state(app, task)
        assert await asked.get(again(JobState.SUCCESS)) == "fine"
        assert await asked.get(app.result(sent[JobState.SUCCESS].id, task=task), None) == "fine"
        for state, error in ENDS.items():
            with pytest.raises(error):
                await asked.get(again(state))
        with pytest.raises(ResultTimeout, match="the job is EXECUTING on queue 'slow'"):
            await asked.get(again(JobState.EXECUTING), 0.02)
        some = [
            again(JobState.SUCCESS),
            again(JobState.REVOKED),
            app.result("nobody"),
            sent[JobState.SUCCESS],
        ]
        for patience in (
            0.05,
            1.0,
            5.0,
            20.0,
        ):  # it always takes all of that: nobody is there for the third one
            told = await asked(gather, agather, some, timeout=patience)
            if not any(isinstance(told[number], ResultTimeout) for number in (0, 1, 3)):
                break
        assert [told[0], *map(type, told[1:3]), told[3]] == ["fine", TaskRevoked, ResultTimeout, "fine"]
        some = [again(JobState.EXECUTING), again(JobState.SUCCESS), app.result("nobody")]
        done, pending = await asked(wait, wait_async, some, return_when="FIRST_COMPLETED")
        assert (done, pending) == ({some[1]}, {some[0], some[2]})
        alive = (JobState.EXECUTING, JobState.RETRY, JobState.SCHEDULED, JobState.SENT)
        assert await asked(revoke, arevoke, [again(status) for status in alive]) == [True] * 4
        assert await asked(revoke, arevoke, [again(status) for status in ENDS]) == [False, False, False, True]
        for name in alive:
            with pytest.raises(TaskRevoked):
                await sent[name].aget(30)
        last = again(JobState.SUCCESS)
        await asked(last.forget, last.aforget)
        assert await sent[JobState.SUCCESS].astatus() is JobState.UNKNOWN


async def test_a_job_that_is_sent_only_later_is_waited_for_wherever_that_will_be(
    app: App, asked: Asked
) -> None:
    task = slow_task(app, trio.Event())
    got: list[Any] = []

    async def waiting(*ids: str) -> None:
        got.append(await asked(gather, agather, [app.result(job_id) for job_id in ids], timeout=30))

    async with working(app, queues=("slow", "other")):
        await task.adelay("so that the queue is known")
        await task.options(queue="other").adelay("and this one")
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(waiting, "b", "a")
                nursery.start_soon(waiting, "b")
                await trio.sleep(0.1)  # whoever waits has looked by now, most times
                twice = [
                    await task.options(id="a", queue=queue_name).adelay("fine")
                    for queue_name in ("slow", "other")
                ]
                assert await agather(twice) == ["fine", "fine"]
                await task.options(id="b").adelay("good")
    assert sorted(got) == [["good"], ["good", "fine"]]


@pytest.mark.one_server("it reads the statistics of one server")
def test_a_handle_that_knows_its_queue_costs_no_trip_more(app: App, redis_client: Any) -> None:
    task = slow_task(app, trio.Event())

    def trips(ask: Any) -> dict[str, int]:
        """How often each command ran while it was asked."""
        before = redis_client.info("commandstats")
        ask()
        after = redis_client.info("commandstats")
        times = {
            name.removeprefix("cmdstat_"): stat["calls"] - before.get(name, {"calls": 0})["calls"]
            for name, stat in after.items()
        }
        return {
            name: many for name, many in times.items() if many and name in ("evalsha", "smembers", "mget")
        }

    sent = task.delay("fine")
    assert app.result(sent.id).status() is JobState.SENT  # the server knows the script by now
    for handle in (sent, app.result(sent.id, task=task), app.result(sent.id, queue="slow")):
        assert trips(handle.status) == {"evalsha": 1}
    elsewhere: AsyncResult[Any] = app.result(sent.id)
    assert trips(elsewhere.status)["smembers"] == 1
    assert trips(elsewhere.status) == {"evalsha": 1}
    document = encode(Document(v=1, id=sent.id, task="t", state="SUCCESS", value=Raw(b'"fine"')))
    redis_client.set(sent.key, document, px=60_000)
    for handle in (sent, app.result(sent.id, queue="slow")):
        assert not trips(partial(handle.get, 5)).keys() & {"evalsha", "smembers"}
        assert trips(handle.forget) == {}
        again: AsyncResult[Any] = app.result(sent.id, queue="slow")
        redis_client.set(sent.key, document, px=60_000)
        assert not trips(lambda again=again: trio.run(again.aget, 5)).keys() & {"evalsha", "smembers"}
        redis_client.set(sent.key, document, px=60_000)


def test_queue_where_the_job_has_not_ended_counts(app: App, redis_client: "redis.Redis") -> None:
    task = slow_task(app, trio.Event())
    for queue in ("a", "b", "c"):
        task.options(queue=queue, id="j").delay("fine")
    assert app.result("j", queue="a").revoke()
    assert app.result("j", queue="c").revoke()
    again: AsyncResult[Any] = app.result("j")
    assert (again.status(), again.queue) == (JobState.SENT, "b")


@pytest.mark.parametrize("colour", ["plain", "trio"])
def test_it_is_looked_for_through_an_outage(colour: str, own_server: EmbeddedServer, app_name: str) -> None:
    app = App(app_name, broker=own_server.url)
    app.perform(queues.register_queue(app.keys, "slow"))
    with redis.Redis.from_url(own_server.url) as client:
        document = encode(Document(v=1, id="a", task="t", state="SUCCESS"))
        client.set(app.queue("slow").result("a"), document, px=60_000)
        client.save()
    own_server.kill()
    result: AsyncResult[Any] = app.result("a")
    back = threading.Timer(0.3, own_server.revive)
    back.start()
    assert (result.get(timeout=30) if colour == "plain" else trio.run(result.aget, 15.0)) is None
    assert result.queue == "slow"
    back.join(30)
    app.close()
