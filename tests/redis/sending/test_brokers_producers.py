"""Several brokers, as producers and operators see them: each door of the App goes to the broker of its queue."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
import trio

from celery5 import (
    App,
    AsyncResult,
    BrokerUnavailable,
    JobState,
    ResultTimeout,
    TaskFailed,
    TaskRevoked,
    agather,
    gather,
    wait,
    wait_async,
)
from celery5.broker.calls import commands
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.results.async_result import revoke
from tests.redis.commands.staff import wait_until
from tests.redis.connections.two_brokers import COLOURS, asked, far_end
from tests.redis.worker.workers import until_async, working


@pytest.fixture
def app(paired: App) -> App:
    """An application on two servers."""
    return paired


def streams(client: "redis.Redis", app: App) -> dict[str, int]:
    """How many jobs are on a server, by queue."""
    found = {queue: client.xlen(app.queue(queue).stream) for queue in ("near", "post", "mails", "default")}
    return {queue: int(length) for queue, length in found.items() if length}


@pytest.mark.parametrize("colour", COLOURS)
async def test_each_job_goes_to_its_queues_broker_one_by_one_and_in_bulk(
    app: App, redis_client: "redis.Redis", second: "redis.Redis", colour: str
) -> None:
    near, post = app.tasks["near"], app.tasks["post"]
    await asked(colour, post.delay, post.adelay, 1)
    await asked(colour, near.delay, near.adelay, 1)
    many = [task.s(n) for n in range(20) for task in (near, post)] + [app.tasks["mailed"].s("x")]
    handles = await asked(colour, app.send_many, app.asend_many, many)
    assert [handle.queue for handle in handles[:2]] == ["near", "post"]
    made = [near.job(1), post.job(2)]
    await asked(colour, app.send_jobs, app.asend_jobs, made)
    assert streams(redis_client, app) == {"near": 22}
    assert streams(second, app) == {"post": 22, "mails": 1}
    assert redis_client.smembers(app.keys.queues) == {b"near"}
    assert second.smembers(app.keys.queues) == {b"post", b"mails"}


def test_keys_countdowns_and_priorities_go_there_too(app: App, second: "redis.Redis") -> None:
    post = app.tasks["post"]
    first = post.options(key="one").delay(1)
    assert post.options(key="one").delay(2) == first
    post.options(countdown=60).delay(3)
    post.options(priority="high").delay(4)
    keys = app.queue("post")
    assert second.xlen(keys.stream) == 1
    assert second.zcard(keys.due) == 1
    assert second.xlen(keys.high) == 1


@pytest.fixture
async def both(app: App, own_server: EmbeddedServer, app_name: str) -> AsyncIterator[App]:
    """The application, with a worker on each server."""
    far = far_end(app_name, own_server.url)
    async with working(app, queues=("near",)), working(far, queues=("post", "mails")):
        yield app
    far.close()


def sent(app: App, count: int) -> list[AsyncResult[Any]]:
    """Jobs for either broker in turn, whose results are 0, 0, 1, -1, ..."""
    near, post = app.tasks["near"], app.tasks["post"]
    return app.send_many([task.s(number) for number in range(count) for task in (near, post)])


@pytest.mark.parametrize("colour", COLOURS)
async def test_results_of_jobs_on_several_brokers_are_gathered_together(both: App, colour: str) -> None:
    handles = await trio.to_thread.run_sync(sent, both, 10)
    found = await asked(colour, gather, agather, handles, timeout=30)
    assert found == [sign * number for number in range(10) for sign in (1, -1)]
    by_id: list[AsyncResult[Any]] = [
        both.result(job.id) for job in await trio.to_thread.run_sync(sent, both, 2)
    ]
    assert await asked(colour, gather, agather, by_id, timeout=30) == [0, 0, 1, -1]


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("last", ["near", "post"])
async def test_the_first_that_ends_is_enough_on_whichever_broker(
    app: App, app_name: str, own_server: EmbeddedServer, colour: str, last: str
) -> None:
    far = far_end(app_name, own_server.url)
    ends = "post" if last == "near" else "near"
    handles = [await app.tasks[name].adelay(7) for name in ("near", "post")]
    async with working(app if ends == "near" else far, queues=(ends,)):
        done, rest = await asked(colour, wait, wait_async, handles, timeout=30, return_when="FIRST_COMPLETED")
    assert [job.queue for job in done] == [ends]
    assert [job.queue for job in rest] == [last]
    late = await asked(colour, gather, agather, handles, timeout=0.2)
    assert [type(error) is ResultTimeout for error in late] == [last == "near", last == "post"]


@pytest.mark.parametrize("colour", COLOURS)
async def test_the_first_that_ends_is_enough_while_another_broker_is_left_out(
    app: App, own_server: EmbeddedServer, colour: str
) -> None:
    handles = [await app.tasks[name].adelay(7) for name in ("post", "near")]
    async with working(app, queues=("near",)):
        await trio.to_thread.run_sync(own_server.kill)
        with app.brokers.reachable() as unreachable:
            done, rest = await asked(
                colour, wait, wait_async, handles, timeout=30, return_when="FIRST_COMPLETED"
            )
    assert [handle.queue for handle in done] == ["near"]
    assert [handle.queue for handle in rest] == ["post"]
    assert set(unreachable) <= {"mails"}  # in a loop the other broker may be enough before this one fails


@pytest.mark.parametrize("colour", COLOURS)
async def test_a_handle_knows_its_broker_and_an_id_alone_is_looked_for_on_all(
    app: App, second: "redis.Redis", colour: str
) -> None:
    there = await app.tasks["post"].adelay(1)
    for handle in (there, app.result(there.id)):
        assert await asked(colour, handle.status, handle.astatus) is JobState.SENT
    story = await asked(colour, app.find, app.afind, there.id)
    assert story.queue == "post"
    again: AsyncResult[Any] = app.result(there.id)
    assert await asked(colour, again.revoke, again.arevoke)
    assert await asked(colour, there.status, there.astatus) is JobState.REVOKED
    assert second.exists(there.key)
    await asked(colour, there.forget, there.aforget)
    assert not second.exists(there.key)


async def test_jobs_on_both_brokers_are_revoked_in_one_go(both: App) -> None:
    handles = [await both.tasks[name].options(countdown=60).adelay(1) for name in ("near", "post")]
    assert await trio.to_thread.run_sync(revoke, handles) == [True, True]
    found = await agather(handles, timeout=30)
    assert [type(outcome) for outcome in found] == [TaskRevoked, TaskRevoked]


async def test_a_job_sends_to_another_broker_and_waits_for_its_result(both: App) -> None:
    assert await (await both.tasks["across"].adelay(5)).aget(timeout=30) == -5


async def test_operators_see_all_queues_and_pause_each_where_it_is(
    app: App, redis_client: "redis.Redis", second: "redis.Redis"
) -> None:
    for name in ("near", "post"):
        await app.tasks[name].adelay(1)
    state = await app.ainfo()
    assert {name: queue.waiting for name, queue in state.queues.items()} == {"near": 1, "post": 1}
    assert state.unfinished == 2
    await app.aperform(commands.pause_queue(app.keys, "post"))
    assert second.smembers(app.keys.paused) == {b"post"}
    assert not redis_client.exists(app.keys.paused)
    assert (await app.ainfo()).queues["post"].paused
    assert (await app.ainfo("post")).queues.keys() == {"post"}
    await app.aperform(commands.resume_queue(app.keys, "post"))


async def test_dead_letters_on_all_brokers_are_listed_replayed_and_purged(both: App) -> None:
    lost = await both.tasks["fails"].adelay()
    with pytest.raises(TaskFailed):
        await lost.aget(timeout=30)
    assert [dead_job.queue async for dead_job in both.dlq.aread()] == ["post"]
    assert (await both.dlq.areplay()).done == 1
    await until_async(lambda: _dead(both, 1), within=30)
    assert (await both.dlq.apurge()).done == 1
    assert await _dead(both, 0)


async def _dead(app: App, count: int) -> bool:
    return (await app.ainfo()).dead == count


async def test_what_is_imposed_on_a_task_is_imposed_on_all_brokers(
    app: App, redis_client: "redis.Redis", second: "redis.Redis"
) -> None:
    assert await app.limits.asuspend("post")
    assert redis_client.hkeys(app.keys.suspended) == second.hkeys(app.keys.suspended) == [b"post"]
    assert (await app.limits.alist())["post"].suspended
    assert await app.limits.aresume("post")
    assert not second.exists(app.keys.suspended)


def test_a_broker_that_is_away_holds_up_no_job_to_another_one(
    app: App, own_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    app.configure(backlog=0)
    near, post = app.tasks["near"], app.tasks["post"]
    own_server.kill()
    with pytest.raises(BrokerUnavailable):
        app.send_many([post.s(1), near.s(1), post.s(2)])
    assert streams(redis_client, app) == {"near": 1}
    near.delay(2)
    assert streams(redis_client, app) == {"near": 2}


def test_a_broker_that_is_away_keeps_nobody_from_commanding_by_name(
    app: App, own_server: EmbeddedServer
) -> None:
    own_server.kill()
    (reply,) = app.control.send("members", to=["vm:1:abc"], timeout=0.2)
    assert (reply.worker, reply.ok, reply.reason) == ("vm:1:abc", False, "no-answer")


def test_the_backlog_keeps_what_is_for_the_broker_that_is_away_and_nothing_else(
    app: App, own_server: EmbeddedServer, redis_client: "redis.Redis", second: "redis.Redis"
) -> None:
    app.configure(backlog=100)
    near, post = app.tasks["near"], app.tasks["post"]
    own_server.kill()
    app.send_many([post.s(1), near.s(1), post.s(2)])
    app.tasks["mailed"].delay("x")
    near.delay(2)
    assert app.backlog.size == 3
    assert streams(redis_client, app) == {"near": 2}
    own_server.revive()
    assert app.backlog.flush(30)
    assert streams(second, app) == {"post": 2, "mails": 1}


def test_backlog_empties_for_each_broker_that_is_back(
    app: App, own_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    app.configure(backlog=100)
    own_server.kill()
    app.tasks["post"].delay(1)
    kept = app.tasks["near"].job(1)
    app.backlog.keep([kept], BrokerUnavailable("it was away, too"), limit=100)
    wait_until(lambda: streams(redis_client, app) == {"near": 1}, within=30)
    wait_until(lambda: app.backlog.size == 1, within=30)
    own_server.revive()
    assert app.backlog.flush(30)
