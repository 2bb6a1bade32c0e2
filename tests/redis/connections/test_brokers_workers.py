"""Workers of several brokers: one process, a life on each, which share its slots and nothing else."""

import signal
from pathlib import Path

import pytest
import redis
import trio

from celery5 import App, BootStep, BrokerUnavailable, Misconfigured, agather, current_job
from celery5.broker.keys import GROUP
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.processes.lifecycle.multi_broker import check_worker_name
from celery5.services.health.vitals import ProcessStatus
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.connections.two_brokers import app_on
from tests.redis.worker.workers import LEASE, Lines, start, until, until_async, working

BOTH = ("near", "post", "mails", "default")


@pytest.fixture
def app(paired: App) -> App:
    """An application on two servers."""
    return paired


async def test_one_worker_runs_the_jobs_of_all_brokers(app: App) -> None:
    async with working(app):
        near, post = app.tasks["near"], app.tasks["post"]
        handles = await app.asend_many([task.s(number) for number in range(50) for task in (near, post)])
        assert await agather(handles, timeout=30) == [sign * n for n in range(50) for sign in (1, -1)]
        assert await (await app.tasks["mailed"].adelay("x")).aget(timeout=30) == "x"
        assert await (await app.tasks["across"].adelay(3)).aget(timeout=30) == -3


async def test_each_life_has_a_name_of_its_own_and_takes_commands_on_its_broker(app: App) -> None:
    async with working(app, name="web1"):
        await until_async(lambda: _answers(app, {"web1", "web1@mails"}), within=30)
        (one,) = await app.control.aping(to="web1@mails", timeout=30)
        assert one.ok
        assert one.answer["pong"].startswith("web1@mails:")


async def _answers(app: App, names: set[str]) -> bool:
    return {reply.worker for reply in await app.control.aping(timeout=30) if reply.ok} == names


async def test_a_shutdown_of_one_life_ends_the_process(app: App) -> None:
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app, name="web1")
        (reply,) = await app.control.asend("shutdown", to="web1@mails", timeout=30)
        assert reply.ok
        with trio.fail_after(30):
            await one.done.wait()
        await one.stop()


async def test_a_worker_of_one_broker_has_one_life_and_its_usual_name(
    app: App, second: "redis.Redis"
) -> None:
    async with working(app, queues=("near",), name="web1"):
        assert app.control.keyring is not None
        assert await app.control.aworkers() == ("web1",)
        assert not second.keys()
    async with working(app, queues=("post",), name="web2"):
        assert await app.control.aworkers() == ("web2@mails",)
        assert await (await app.tasks["post"].adelay(1)).aget(timeout=30) == -1


async def test_all_lives_together_run_no_more_jobs_than_the_process_may(app: App) -> None:
    running, most = set[str](), list[int]()

    async def body(number: int) -> int:
        job = current_job()
        assert job is not None
        running.add(job.id)
        most.append(len(running))
        await trio.sleep(0.005)
        running.discard(job.id)
        return number

    here, there = app.task(name="here", queue="near")(body), app.task(name="there", queue="post")(body)
    async with working(app):
        handles = await app.asend_many([task.s(n) for n in range(60) for task in (here, there)])
        found = await agather(handles, timeout=60)
    assert found == [n for n in range(60) for _ in range(2)]
    assert max(most) == 4


async def test_a_broker_that_is_full_of_jobs_does_not_keep_anothers_waiting(app: App) -> None:
    ended = list[str]()

    full = True

    async def body(name: str) -> None:
        await trio.sleep(0.005)
        ended.append(name)
        if name == "here" and full:
            await here.adelay("here")  # it is never without jobs

    here, there = app.task(name="here", queue="near")(body), app.task(name="there", queue="post")(body)
    await app.asend_many([here.s("here") for _ in range(400)])
    async with working(app):
        await until(lambda: len(ended) > 20, within=30)
        handles = await app.asend_many([there.s("there") for _ in range(20)])
        await agather(handles, timeout=60)
        full = False


async def test_broker_outage_does_not_stop_the_jobs_of_the_others(
    app: App, own_server: EmbeddedServer
) -> None:
    app.configure(backlog=0)  # else what cannot be sent is kept
    near, post = app.tasks["near"], app.tasks["post"]
    async with working(app):
        assert await (await post.adelay(1)).aget(timeout=30) == -1
        waiting = await app.asend_many([post.options(countdown=2).s(n) for n in range(5)])
        await trio.to_thread.run_sync(own_server.kill)
        handles = await app.asend_many([near.s(n) for n in range(100)])
        assert await agather(handles, timeout=30) == list(range(100))
        with pytest.raises(BrokerUnavailable):
            await post.adelay(2)
        await trio.to_thread.run_sync(own_server.revive)
        assert await agather(waiting, timeout=40) == [-n for n in range(5)]
        assert await agather(await app.asend_many([near.s(7)]), timeout=30) == [7]


async def test_worker_serves_other_brokers_while_one_is_down_at_start(
    app: App, own_server: EmbeddedServer
) -> None:
    await trio.to_thread.run_sync(own_server.kill)
    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            with trio.fail_after(60):
                one = await start(nursery, app)
            assert await (await app.tasks["near"].adelay(1)).aget(timeout=30) == 1
            await trio.to_thread.run_sync(own_server.revive)
            with trio.fail_after(60):
                while True:
                    try:
                        handle = await app.tasks["post"].adelay(1)
                        break
                    except BrokerUnavailable:
                        await trio.sleep(0.1)
            assert await handle.aget(timeout=30) == -1
            await one.stop()
        assert [line["broker"] for line in lines.of("broker:connect-failed")] == ["mails"]


async def test_a_burst_ends_when_the_queues_of_all_brokers_are_empty(app: App) -> None:
    near, post = app.tasks["near"], app.tasks["post"]
    handles = await app.asend_many([task.s(number) for number in range(20) for task in (near, post)])
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app, burst=True)
        with trio.fail_after(30):
            await one.done.wait()
        await one.stop()
    assert await agather(handles, timeout=30) == [sign * n for n in range(20) for sign in (1, -1)]


def test_a_worker_that_is_killed_is_stood_in_for_on_each_of_its_brokers(
    staff: Staff, own_server: EmbeddedServer, second: "redis.Redis"
) -> None:
    one = staff.start(
        "--queues", "default,mails", brokers=f'{{"mails": "{own_server.url}"}}', lease=60, log_level="debug"
    )
    far = App(staff.app.name, broker=own_server.url)
    nap = staff.app.tasks["nap"]
    there = far.task(name="nap")(nap.function)
    nap.delay(60)
    there.options(queue="mails").delay(60)
    wait_until(lambda: len(staff.notes()) == 2, within=30)
    one.signal(signal.SIGKILL)
    one.wait()
    wait_until(lambda: second.xpending(far.queue("mails").stream, GROUP)["pending"] == 0, within=30)
    with redis.Redis.from_url(staff.app.settings.broker) as first:
        wait_until(lambda: first.xpending(nap.app.queue("default").stream, GROUP)["pending"] == 0, within=30)
    assert second.xlen(far.queue("mails").stream) == 1
    far.close()


def test_a_name_that_looks_like_one_on_another_broker_is_refused(app: App) -> None:
    with pytest.raises(Misconfigured, match="'web@mails' ends like those on broker 'mails'"):
        check_worker_name(app, "web@mails")
    check_worker_name(app, "celery@web1")


def test_brokers_and_routes_do_not_change_by_a_reload(app_name: str, tmp_path: Path) -> None:
    file = tmp_path / "shop.toml"
    file.write_text("concurrency = 1")
    app = App(app_name, config=str(file))
    assert app.settings.concurrency == 1
    file.write_text('concurrency = 2\n[brokers]\nmails = "redis://127.0.0.1:1/0"')
    with pytest.raises(Misconfigured, match="with a restart of all processes"):
        app.reload_configuration()


async def test_a_process_tells_of_each_broker_whether_it_is_there(
    app: App, own_server: EmbeddedServer
) -> None:
    vitals = ProcessStatus(app=app.name)
    async with working(app, process_status=vitals):
        assert vitals.get_readiness().ok
        assert await (await app.tasks["post"].adelay(1)).aget(timeout=30) == -1
        await until(lambda: sum(vitals.jobs.count_jobs().values()) == 1, within=30)
        await trio.to_thread.run_sync(own_server.kill)
        await until(lambda: bool(vitals.get_readiness().conditions["mails:redis"]), within=30)
        assert not any(why for name, why in vitals.get_readiness().conditions.items() if ":" not in name)
        await trio.to_thread.run_sync(own_server.revive)
        await until(lambda: vitals.get_readiness().ok, within=40)


async def test_own_steps_run_once_and_the_others_begin_when_they_are_up(
    url: str, own_server: EmbeddedServer, app_name: str
) -> None:
    happened = list[str]()

    async def prepare() -> None:
        await trio.sleep(0.2)
        happened.append("prepared")

    steps = [BootStep("prepare", prepare)]
    app = app_on(app_name, url, own_server.url, lease=LEASE, bootsteps=steps)

    @app.task(name="noted", queue="post")
    async def noted() -> None:
        happened.append("ran")

    sent = await noted.adelay()
    async with working(app):
        await sent.aget(timeout=30)
    assert happened == ["prepared", "ran"]
    app.close()
