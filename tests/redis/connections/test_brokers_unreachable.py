"""One broker of several is away: whoever asks all of them is told so, or is given what the others say."""

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
import redis
import trio

from celery5 import App, AsyncResult, BrokerUnavailable, JobState, Misconfigured, every
from celery5.broker.routing.broker_router import run_all, run_all_async
from celery5.broker.routing.unreachable import get_unreachable, retry_without_unreachable, skip_unreachable
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.connections import long_operations
from celery5.errors import BrokerDenied, UnknownQueue
from tests.redis.connections.two_brokers import COLOURS, asked, far_end
from tests.redis.dead_letters.many_dead_letters import add_dead_letters
from tests.redis.worker.workers import working


@pytest.fixture
def app(paired: App) -> App:
    """An application on two servers."""
    return paired


@pytest.mark.parametrize("colour", COLOURS)
async def test_call_to_all_brokers_names_the_unreachable_or_omits_it(
    app: App, own_server: EmbeddedServer, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_operations, "MAX_OUTAGE", 0.5)
    for name in ("near", "post"):
        await app.tasks[name].adelay(1)
    await trio.to_thread.run_sync(own_server.kill)
    for plain, awaited in _all_of(app):
        with pytest.raises(BrokerUnavailable):
            await asked(colour, plain, awaited)
        with app.brokers.reachable() as away:
            await asked(colour, plain, awaited)
        assert list(away) == ["mails"]
    with app.brokers.reachable() as away:
        state = await asked(colour, app.info, app.ainfo)
        with app.brokers.reachable() as inner:
            assert inner is away
    assert {name: queue.waiting for name, queue in state.queues.items()} == {"near": 1}


def _all_of(app: App) -> list[tuple[Any, Any]]:
    """What asks all brokers, in plain Python and awaited."""
    return [
        (app.info, app.ainfo),
        (app.control.workers, app.control.aworkers),
        (partial(app.control.send, "ping"), partial(app.control.asend, "ping")),
        (app.schedule.list, app.schedule.alist),
        (app.limits.list, app.limits.alist),
        (app.dlq.count, app.dlq.acount),
        (app.dlq.purge, app.dlq.apurge),
    ]


def test_what_is_looked_for_and_found_needs_no_broker_that_is_away(
    app: App, own_server: EmbeddedServer
) -> None:
    here, there = app.tasks["near"].delay(1), app.tasks["post"].delay(1)
    app.schedule.add(app.tasks["near"].s(1), every(3600), name="here")
    app.schedule.add(app.tasks["post"].s(1), every(3600), name="there")
    own_server.kill()
    story = app.find(here.id)
    assert story is not None
    assert story.queue == "near"
    by_id: AsyncResult[Any] = app.result(here.id)
    assert by_id.status() is JobState.SENT
    assert app.schedule.pause("here").state == "paused"
    for look in (
        lambda: app.find(there.id),
        app.result(there.id).status,
        lambda: app.schedule.show("there"),
    ):
        with pytest.raises(BrokerUnavailable):
            look()
    with pytest.raises(BrokerUnavailable, match=r"on none of the brokers .* broker mails cannot be asked: "):
        app.find("nobody")
    assert app.find("nobody", queue="near") is None
    with pytest.raises(BrokerUnavailable):
        app.schedule.add(app.tasks["near"].s(1), every(3600), name="third")


def test_a_queue_that_is_named_needs_no_broker_but_its_own(
    app: App, own_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    add_dead_letters(app, redis_client, "a", "b", queue="near")
    own_server.kill()
    assert [dead_job.id for dead_job in app.dlq.read(queue="near")] == ["a", "b"]
    with pytest.raises(BrokerUnavailable), app.brokers.reachable():
        list(app.dlq.read(queue="post"))
    with pytest.raises(UnknownQueue), app.brokers.reachable():
        app.info("nowhere")
    assert app.dlq.purge(queue="near").done == 2


def test_when_all_brokers_are_away_nobody_is_left_to_be_reached(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker="redis://127.0.0.1:1/0", brokers={"mails": own_server.url})
    app.task(name="post", broker="mails")(len).delay("x")
    with app.brokers.reachable() as away:
        assert app.info().queues.keys() == {"mails"}
        assert list(away) == ["default"]
        assert app.dlq.count(older_than=1) == {}
    own_server.kill()
    with pytest.raises(BrokerUnavailable), app.brokers.reachable():
        app.info()
    app.close()


def test_jobs_on_the_other_brokers_are_found_and_the_unreachable_one_is_named(
    app: App, own_server: EmbeddedServer
) -> None:
    near, post = app.tasks["near"].delay(1), app.tasks["post"].delay(2)
    page = app.jobs.search()
    assert {job.id for job in page.jobs} == {near.id, post.id}
    own_server.kill()
    for queue in ("", "near", "post"):
        page = app.jobs.search(queue=queue, task="*")
        assert [job.id for job in page.jobs] == ([] if queue == "post" else [near.id])
        assert "unreachable" in page.not_looked_at
    assert app.jobs.search(id=near.id).jobs


def test_while_the_default_broker_is_unreachable_only_the_history_is_left_out(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker="redis://127.0.0.1:1/0", brokers={"mails": own_server.url})
    sent = app.task(name="post", broker="mails")(len).delay("x")
    page = app.jobs.search()
    assert [job.id for job in page.jobs] == [sent.id]
    assert "the history, whose broker is unreachable" in page.not_looked_at
    app.close()


async def test_workers_on_the_other_brokers_are_commanded(
    app: App, app_name: str, own_server: EmbeddedServer
) -> None:
    far = far_end(app_name, own_server.url)
    async with working(app, queues=("near",), name="web1"):
        await trio.to_thread.run_sync(own_server.kill)
        with app.brokers.reachable() as away:
            replies = await app.control.aping(timeout=30)
        assert [(reply.worker, reply.ok) for reply in replies] == [("web1", True)]
        assert list(away) == ["mails"]
    far.close()


def test_a_name_that_no_schedule_has_is_told_when_all_are_there(app: App) -> None:
    with pytest.raises(Misconfigured, match="no schedule 'x'"):
        app.schedule.show("x")


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_all_are_asked_at_the_same_time(count: int) -> None:
    barrier = threading.Barrier(count)

    def meet(at: int) -> int:
        barrier.wait(30)
        return at

    assert run_all([partial(meet, at) for at in range(count)]) == list(range(count))
    met = list[int]()

    async def ameet(at: int) -> int:
        met.append(at)
        with trio.fail_after(30):
            while len(met) < count:
                await trio.lowlevel.checkpoint()
        return at

    assert await run_all_async([partial(ameet, at) for at in range(count)]) == list(range(count))


def test_all_are_asked_at_the_same_time_from_asyncio_too() -> None:
    barrier = asyncio.Barrier(3)

    async def meet(at: int) -> int:
        async with asyncio.timeout(30):
            await barrier.wait()
        return at

    assert asyncio.run(run_all_async([partial(meet, at) for at in range(3)])) == [0, 1, 2]


@pytest.mark.parametrize("colour", COLOURS)
async def test_a_broker_that_lets_nobody_in_is_left_out_like_one_that_is_away(
    app: App, own_server: EmbeddedServer, colour: str
) -> None:
    def shut() -> None:
        with redis.Redis.from_url(own_server.url) as client:
            client.config_set("requirepass", "hush")

    await trio.to_thread.run_sync(shut)
    app.close()  # who has a connection is in
    for plain, awaited in _all_of(app):
        with pytest.raises(BrokerDenied):
            await asked(colour, plain, awaited)
        with app.brokers.reachable() as away:
            await asked(colour, plain, awaited)
        assert [type(result) for result in away.values()] == [BrokerDenied]


async def test_running_call_begins_again_without_a_lost_broker() -> None:
    error = BrokerUnavailable("it has gone")

    async def work() -> list[str]:
        away = get_unreachable()
        if away is None or not away:
            if away is not None:
                away["mails"] = error
            raise error
        return list(away)

    with pytest.raises(BrokerUnavailable):
        await retry_without_unreachable(work)
    with skip_unreachable() as away:
        assert await retry_without_unreachable(work) == ["mails"]
        assert away == {"mails": error}

        async def fails() -> None:
            raise error  # by one that is known to be away, so another attempt would not help

        with pytest.raises(BrokerUnavailable):
            await retry_without_unreachable(fails)


def test_an_error_that_is_none_of_the_brokers_is_raised_when_all_have_ended() -> None:
    ended = list[str]()

    def fails() -> None:
        raise ValueError("broken")

    def away() -> None:
        ended.append("away")
        raise BrokerUnavailable("it is away")

    with pytest.raises(ValueError, match="broken"):
        run_all([fails, away])
    assert ended == ["away"]
    assert [type(result) for result in run_all([away])] == [BrokerUnavailable]
