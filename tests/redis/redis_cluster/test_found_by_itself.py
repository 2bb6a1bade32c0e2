"""A URL `redis://` that leads to a Redis Cluster: each process finds the cluster by itself at the handshake."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import trio

from celery5 import App, AsyncResult, gather
from celery5.broker.drivers.cluster_blocking import BlockingCluster
from celery5.broker.topologies import ServerFound, forget_clusters
from celery5.errors import BrokerUnavailable, BrokerUnsupported, NotReplicated
from celery5.protocol.job.states import JobState
from tests.cluster_servers import TestCluster, running_cluster
from tests.redis.dashboard.client import looking_at
from tests.redis.redis_cluster.test_jobs import QUEUES, declare
from tests.redis.redis_cluster.test_servers_shown import run_check
from tests.redis.worker.workers import start
from tests.sentinel_servers import Server
from tests.story.cli.commands import Serving, celery5, until

SHOP = """
import os, time
from celery5 import App

app = App({name!r}, lease=60)

@app.task
def add(one: int, other: int) -> int:
    return one + other

@app.task
def hang(path: str) -> None:
    with open(path, "x") as file:
        file.write(str(os.getpid()))
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Let each test find the cluster for the first time."""
    forget_clusters()
    yield
    forget_clusters()


@pytest.fixture
def url(redis_cluster: TestCluster) -> str:
    """The URL of one node, as that of a single server."""
    return f"redis://127.0.0.1:{redis_cluster.primaries[1].port}/0"


@pytest.fixture
def small_cluster(server_binary: str | None) -> Iterator[TestCluster]:
    """A cluster of one node, which a test may stop."""
    with running_cluster(server_binary, primaries=1) as cluster:
        yield cluster


def hang(path: str) -> None:
    """Stand in for the task of the worker."""


def make_url(cluster: TestCluster) -> str:
    return f"redis://127.0.0.1:{cluster.primaries[0].port}"


@pytest.fixture
def app_name() -> str:
    """A short name: it is part of the path of a socket."""
    return f"s{uuid4().hex[:8]}"


@pytest.fixture
def shop(tmp_path: Path, app_name: str) -> Path:
    """A folder with an application that names no broker."""
    (tmp_path / "shop.py").write_text(SHOP.format(name=app_name))
    return tmp_path


def send_plain(app: App) -> list[object]:
    results = [app.tasks[f"add-{queue}"].delay(3, 4) for queue in QUEUES]
    return list(gather(results, timeout=20))


def send_on_asyncio(app: App) -> list[object]:
    async def send() -> list[object]:
        tasks = [app.tasks[f"add-{queue}"] for queue in QUEUES for _ in range(25)]
        results = await asyncio.gather(
            *[task.adelay(3, 4) for task in tasks]
        )  # more than there are connections
        return list(await asyncio.gather(*[result.aget(timeout=20) for result in results]))

    return asyncio.run(send())


async def send_on_trio(app: App) -> list[object]:
    results = [await app.tasks[f"add-{queue}"].adelay(3, 4) for queue in QUEUES]
    return [await result.aget(timeout=20) for result in results]


SENDERS: dict[str, Callable[[App], Awaitable[list[object]]]] = {
    "plain": lambda app: trio.to_thread.run_sync(send_plain, app),
    "asyncio": lambda app: trio.to_thread.run_sync(send_on_asyncio, app),
    "trio": send_on_trio,
}


@pytest.mark.parametrize("colour", SENDERS)
async def test_jobs_run_and_results_come_in_every_colour(url: str, app: App, colour: str) -> None:
    declare(app)
    async with trio.open_nursery() as nursery:
        await start(nursery, app, queues=QUEUES)
        forget_clusters()  # so that the producer finds it, too
        with closing(App(app.name, broker=url)) as producer:
            declare(producer)
            assert set(await SENDERS[colour](producer)) == {7}
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("colour", SENDERS)
async def test_one_who_waits_before_anything_was_sent_gets_the_result(
    url: str, app: App, colour: str
) -> None:
    """The waiter for results meets the cluster first."""
    declare(app)
    async with trio.open_nursery() as nursery:
        await start(nursery, app, queues=QUEUES)
        sent = await app.tasks["add-mails"].adelay(3, 4)
        forget_clusters()
        with closing(App(app.name, broker=url)) as producer:
            result: AsyncResult[int] = producer.result(sent.id, queue="mails")
            if colour == "plain":
                value = await trio.to_thread.run_sync(lambda: result.get(timeout=20))
            elif colour == "asyncio":
                value = await trio.to_thread.run_sync(asyncio.run, result.aget(timeout=20))
            else:
                value = await result.aget(timeout=20)
            assert value == 7
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("colour", SENDERS)
async def test_a_producer_that_begins_while_the_cluster_is_down_goes_on_when_it_is_up(
    small_cluster: TestCluster, app_name: str, colour: str
) -> None:
    (node,) = small_cluster.primaries
    node.kill()
    with closing(App(app_name, broker=make_url(small_cluster), backlog=0)) as app:
        task = app.task(name="add")(lambda: 7)

        with pytest.raises(BrokerUnavailable):
            await _send_in(colour, task)
        node.start()
        small_cluster.wait_until_whole()
        await _send_in(colour, task)
        (queue,) = (await app.ainfo()).queues.values()
        assert queue.waiting == 1


async def _send_in(colour: str, task: Any) -> None:
    """Send a job by the driver of a colour."""

    async def send() -> None:
        await task.adelay()

    if colour == "plain":
        await trio.to_thread.run_sync(task.delay)
    elif colour == "asyncio":
        await trio.to_thread.run_sync(asyncio.run, send())
    else:
        await send()


@contextmanager
def single_server_in_place_of(cluster: TestCluster, folder: Path) -> Iterator[Server]:
    """Kill the one node of a cluster, and run a server without a cluster on its port during the block."""
    (node,) = cluster.primaries
    node.kill()
    server = Server(node.binary, folder / "single", node.port, [f"port {node.port}", 'save ""'], {})
    server.start()
    try:
        until(server.answers)
        yield server
    finally:
        server.kill()
        server.client.close()


@pytest.mark.parametrize("colour", SENDERS)
async def test_a_producer_follows_when_a_single_server_stands_in_the_place_of_the_cluster(
    small_cluster: TestCluster, app_name: str, colour: str, tmp_path: Path
) -> None:
    with closing(App(app_name, broker=make_url(small_cluster), backlog=0)) as app:
        task = app.task(name="add")(lambda: 7)

        async def send_until_it_arrives() -> None:
            """The first call may meet the end of its connection, and is not repeated."""
            for _ in range(10):
                try:
                    return await _send_in(colour, task)
                except (BrokerUnavailable, ServerFound):
                    await trio.sleep(0.2)
            raise AssertionError("no call arrives")

        await _send_in(colour, task)
        with single_server_in_place_of(small_cluster, tmp_path) as server:
            await send_until_it_arrives()
            assert server.client.xlen(app.queue("default").stream) == 1
        small_cluster.primaries[0].start()
        small_cluster.wait_until_whole()
        await send_until_it_arrives()


def test_a_worker_goes_on_when_a_single_server_stands_in_the_place_of_the_cluster(
    small_cluster: TestCluster, app_name: str, shop: Path, tmp_path: Path
) -> None:
    url = make_url(small_cluster)
    with Serving("-A", "shop", "worker", "start", cwd=shop, env={"CELERY5_BROKER": url}) as serving:
        serving.ready()
        with single_server_in_place_of(small_cluster, tmp_path):
            until(lambda: serving.logged("redis:server-found") or serving.process.poll() is not None)
            assert serving.process.poll() is None, serving.err
            forget_clusters()
            with closing(App(app_name, broker=url)) as app:
                add: Any = app.task(name="shop.add")(lambda one, other: one + other)
                assert add.delay(3, 4).get(timeout=20) == 7


def test_the_same_driver_is_used_before_and_after_the_cluster_is_found(url: str, app: App) -> None:
    redis: Any = app.connections.get_blocking_driver()
    app.task(name="add")(lambda: 7).delay()
    assert isinstance(redis.driver, BlockingCluster)
    assert app.connections.get_blocking_driver() is redis


def test_jobs_for_replicas_are_sent_by_queue_though_nobody_has_said_that_it_is_a_cluster(app: App) -> None:
    """WAIT counts the replicas of one node: sent together, the jobs of the other nodes would not be counted."""
    declare(app)
    signatures = [app.tasks[f"add-{queue}"].options(replicas=1).s(1, 2) for queue in QUEUES[:2]]
    with pytest.raises(NotReplicated) as caught:
        app.send_many(signatures)
    assert len(caught.value.ids) == 1


def test_a_user_who_may_not_ask_for_the_slots_is_refused_until_it_is_permitted(
    small_cluster: TestCluster, app_name: str
) -> None:
    client = small_cluster.primaries[0].client
    client.execute_command("ACL", "SETUSER", "few", "on", ">secret", "~*", "&*", "+@all", "-cluster")
    url = make_url(small_cluster).replace("redis://", "redis://few:secret@")
    with closing(App(app_name, broker=url)) as app:
        task = app.task(name="add")(lambda: 7)
        with pytest.raises(BrokerUnsupported, match=r"is part of a Redis Cluster, .* as `celery5 acl` says"):
            task.delay()
        with pytest.raises(BrokerUnsupported, match=r"is part of a Redis Cluster"):
            trio.run(task.adelay)
        client.execute_command("ACL", "SETUSER", "few", "+cluster")
        task.delay()
        trio.run(task.adelay)


def test_info_shows_the_primaries(redis_cluster: TestCluster, url: str, shop: Path) -> None:
    ended = celery5("-A", "shop", "info", cwd=shop, env={"CELERY5_BROKER": url})
    assert ended.code == 0, ended.err
    shown = {line.split()[0] for line in ended.out.splitlines() if line.startswith("127.0.0.1:")}
    assert shown == {f"127.0.0.1:{node.port}" for node in redis_cluster.primaries}


def test_the_doctor_checks_the_replicas_and_permissions_of_the_cluster(
    redis_cluster: TestCluster, url: str, app: App, shop: Path
) -> None:
    assert run_check(app, "permissions").state == "ok"
    forget_clusters()
    ended = celery5("-A", "shop", "doctor", cwd=shop, env={"CELERY5_BROKER": url})
    (line,) = [line for line in ended.out.splitlines() if "replication" in line.split()[:2]]
    for node in redis_cluster.primaries:
        assert f"127.0.0.1:{node.port} (slots " in line
    redis_cluster.wait_until_whole()


async def test_the_dashboard_shows_the_queues(app: App) -> None:
    declare(app)
    for queue in QUEUES:
        await app.tasks[f"add-{queue}"].adelay(3, 4)
    forget_clusters()
    async with looking_at(app) as client:
        page = await client.look("queues")
    assert all(queue in page for queue in QUEUES)


PROCESSES = {
    "worker start --processes 2": "worker:started",
    "scheduler start": "scheduler:started",
    "publisher start --backlog memory": "publisher:started",
    "controller start --development": "worker:started",
}


@pytest.mark.parametrize("words", PROCESSES)
def test_every_process_starts(url: str, shop: Path, words: str) -> None:
    with Serving("-A", "shop", *words.split(), cwd=shop, env={"CELERY5_BROKER": url}) as serving:
        until(lambda: serving.logged(PROCESSES[words]) or serving.process.poll() is not None)
        assert serving.process.poll() is None, serving.err


def test_a_publisher_that_begins_while_the_cluster_is_down_publishes_when_it_is_up(
    small_cluster: TestCluster, shop: Path, app_name: str
) -> None:
    (node,) = small_cluster.primaries
    node.kill()
    env = {"CELERY5_BROKER": make_url(small_cluster)}
    words = ("-A", "shop", "publisher", "start", "--backlog", "memory")
    with Serving(*words, cwd=shop, env=env) as serving:
        until(lambda: serving.logged("publisher:started") or serving.process.poll() is not None)
        assert serving.process.poll() is None, serving.err
        with closing(App(app_name, broker=make_url(small_cluster), publisher="unix://")) as producer:
            producer.task(name="shop.add")(lambda: 7).delay()
        node.start()
        small_cluster.wait_until_whole()
        with closing(App(app_name, broker=make_url(small_cluster))) as app:
            until(lambda: [queue.waiting for queue in app.info().queues.values()] == [1])


def test_the_sidecar_puts_back_the_job_of_a_killed_worker(
    url: str, shop: Path, app_name: str, tmp_path: Path
) -> None:
    file = tmp_path / "running"
    env = {"CELERY5_BROKER": url}
    with (
        closing(App(app_name, broker=url)) as app,
        Serving("-A", "shop", "worker", "start", cwd=shop, env=env) as serving,
    ):
        serving.ready()
        job = app.task(name="shop.hang")(hang).delay(str(file))
        until(lambda: file.exists() and job.status() is JobState.EXECUTING)
        os.kill(serving.process.pid, signal.SIGKILL)
        until(lambda: job.status() is JobState.SENT)
