"""Backlog: what producers send while Redis is away is kept, bounded and in order, and published when it is back."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import trio
from msgspec import UNSET

from celery5 import App, BrokerUnavailable, JobState
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.timing import Timing
from celery5.errors import BacklogFull, Misconfigured, NotReplicated
from celery5.protocol.job.messages import read_command
from tests.redis.commands.staff import wait_until
from tests.redis.sending.test_producers import COLOURS, Api, in_every_colour, tell


@pytest.fixture
def shop(own_server: EmbeddedServer, app_name: str) -> Iterator[App]:
    """An application with a small backlog."""
    app = App(app_name, broker=own_server.url, backlog=5)

    @app.task(name="number")
    async def number(n: int) -> int:
        return n

    yield app
    app.close()


def numbers(app: App, queue: str = "default") -> list[int]:
    """What lies on a queue, in its order."""
    with redis.Redis.from_url(app.settings.broker) as client:
        found: Any = client.xrange(app.queue(queue).stream)
    return [int(bytes(read_command(fields[b"job"]).args).strip(b"[]")) for _, fields in found]


@in_every_colour
def test_jobs_are_kept_while_redis_is_away_and_published_once_and_in_order(
    shop: App, own_server: EmbeddedServer, colour: str
) -> None:
    task: Any = shop.tasks["number"]

    async def before(api: Api) -> list[Any]:
        sent = [await api.delay(task, 0)]
        own_server.kill()
        sent.append(await api.delay(task, 1))
        sent += await api.send_many(shop, [task.s(2), task.options(queue="other").s(3)])
        assert (shop.backlog.size, shop.backlog.draining) == (3, False)
        with pytest.raises(BrokerUnavailable):
            await api.status(sent[1])
        sent.append(await api.delay(task.options(countdown=60), 4))
        assert "cannot be reached" in shop.backlog.why
        with pytest.raises(BacklogFull, match=r"2 jobs were not sent: 4 of at most 5"):
            await api.send_many(shop, [task.s(8), task.s(9)])
        assert shop.backlog.size == 4  # all of them or none
        return sent

    sent = tell(colour, before)
    own_server.revive()
    assert shop.backlog.flush(30)
    assert (shop.backlog.size, shop.backlog.why, shop.backlog.draining) == (0, "", False)
    wait_until(lambda: "celery5-backlog" not in [thread.name for thread in threading.enumerate()])
    assert (numbers(shop), numbers(shop, "other")) == ([0, 1, 2], [3])
    states = [job.status() for job in sent]
    assert states == [JobState.SENT] * 4 + [JobState.SCHEDULED]


def test_failing_to_start_a_thread_does_not_stop_the_next_job(shop: App, own_server: EmbeddedServer) -> None:
    task: Any = shop.tasks["number"]
    task.delay(0)
    own_server.kill()
    before = threading.stack_size(1 << 47)  # more than there is
    try:
        with pytest.raises(RuntimeError, match="start new thread"):
            task.delay(1)
    finally:
        threading.stack_size(before)
    assert shop.backlog.size == 0, "what raises is not kept"
    task.delay(2)
    own_server.revive()
    assert shop.backlog.flush(30)
    assert numbers(shop) == [0, 2]


def test_without_a_backlog_an_outage_is_told_at_once(own_server: EmbeddedServer, app_name: str) -> None:
    app = App(app_name, broker=own_server.url, backlog=0)

    @app.task
    async def number(n: int) -> int:
        return n

    own_server.kill()
    with pytest.raises(BrokerUnavailable, match="cannot be reached"):
        number.delay(1)
    assert app.backlog.size == 0


def test_threads_share_a_backlog_and_each_finds_its_own_order_kept(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url, backlog=100)

    @app.task(name="number")
    async def number(n: int) -> int:
        return n

    def send(first: int) -> None:
        for n in range(first, first + 25):
            number.delay(n)

    own_server.kill()
    threads = [threading.Thread(target=send, args=(first,)) for first in (0, 100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert app.backlog.size == 100
    own_server.revive()
    assert app.backlog.flush(30)
    found = numbers(app)
    assert len(found) == 100
    for first in (0, 100, 200, 300):
        assert [n for n in found if n // 100 * 100 == first] == list(range(first, first + 25))
    app.close()


def test_a_countdown_runs_on_while_its_job_waits(shop: App, own_server: EmbeddedServer) -> None:
    task: Any = shop.tasks["number"]
    own_server.kill()
    sent = task.options(countdown=1).delay(1)
    time.sleep(0.3)
    own_server.revive()
    assert shop.backlog.flush(30)
    with redis.Redis.from_url(own_server.url) as client:
        due: Any = client.zscore(shop.queue("default").due, sent.id)
        seconds, micros = client.time()
    assert due / 1000 - (seconds + micros / 1e6) <= 0.75


def test_a_job_that_may_have_arrived_is_there_once(shop: App, own_server: EmbeddedServer) -> None:
    """A server that is frozen takes what it was sent when it goes on, and then what the backlog sends again."""
    task: Any = shop.tasks["number"]
    task.delay(0)
    broker: Any = shop.connections.get_blocking_driver()
    broker.driver.timing = broker.driver.dialer.timing = Timing(connect=0.2, reply=0.2)
    os.kill(own_server.pid, 19)
    try:
        task.delay(1)
        task.delay(2)
        assert shop.backlog.size == 2
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    assert shop.backlog.flush(30)
    wait_until(lambda: numbers(shop) == [0, 1, 2])


def test_what_redis_refuses_holds_up_no_other_queue(shop: App, own_server: EmbeddedServer) -> None:
    task: Any = shop.tasks["number"]
    own_server.kill()
    task.options(queue="broken").delay(1)
    task.delay(2)
    own_server.revive()
    with redis.Redis.from_url(own_server.url) as client:
        client.set(shop.queue("broken").stream, "not a stream")
        shop.backlog.flush(0.1)
        wait_until(lambda: numbers(shop) == [2])
        wait_until(lambda: "WRONGTYPE" in shop.backlog.why)
        wait_until(lambda: shop.backlog.size == 1)  # it forgets a job after Redis has it
        task.options(queue="broken").delay(3)  # behind the one that waits
        task.delay(4)
        assert (shop.backlog.size, numbers(shop)) == (2, [2, 4])
        client.delete(shop.queue("broken").stream)
    assert shop.backlog.flush(30)
    assert numbers(shop, "broken") == [1, 3]


def test_a_forked_child_starts_with_nothing(shop: App, own_server: EmbeddedServer) -> None:
    task: Any = shop.tasks["number"]
    own_server.kill()
    task.delay(1)
    child = os.fork()
    if not child:
        os._exit(shop.backlog.size)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    own_server.revive()
    assert shop.backlog.flush(30)
    assert numbers(shop) == [1]


SCRIPT = """
import sys
from celery5 import App
from celery5.sending import memory_backlog
memory_backlog.EXIT_TIMEOUT = float(sys.argv[3])
app = App(sys.argv[2], broker=sys.argv[1], backlog=10)
@app.task(name="number")
async def number(n: int) -> int:
    return n
number.delay(1)
number.delay(2)
print(app.backlog.size, flush=True)
sys.stdin.readline()
"""


def test_a_process_that_ends_publishes_what_it_can_and_tells_what_is_lost(
    shop: App, own_server: EmbeddedServer, tmp_path: Path
) -> None:
    def end(revived: bool) -> str:
        own_server.kill()
        limit = "5" if revived else "0.5"  # the breaker may be open for a second
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SCRIPT), own_server.url, shop.name, limit],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.readline() == "2\n"
            if revived:
                own_server.revive()
            _, said = process.communicate("\n", timeout=30)
        assert process.returncode == 0
        return said

    lost = end(False)
    assert (
        f"celery5: 2 jobs of application {shop.name!r} could not be published and are lost: number " in lost
    )
    assert re.search(r"lost: number \S+, number \S+: broker ", lost)
    assert end(True) == ""
    assert numbers(shop) == [1, 2]


def free_port() -> int:
    """A port that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_sending_returns_when_replicas_have_the_jobs(
    own_server: EmbeddedServer, server_binary: str | None, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url, replicas=1)

    @app.task(name="number")
    async def number(n: int) -> int:
        return n

    async def one(api: Api) -> Any:
        return await api.delay(number, 1)

    async def two(api: Api) -> Any:
        return await api.send_many(app, [number.s(2), number.s(3)])

    for colour in COLOURS:
        with pytest.raises(NotReplicated, match=r"2 jobs are published, but after 1 s 0 of 1 repl") as caught:
            tell(colour, two)
        assert (len(caught.value.ids), caught.value.replicas, caught.value.wanted) == (2, 0, 1)
        assert [app.result(job_id).status() for job_id in caught.value.ids] == [JobState.SENT] * 2
    with EmbeddedServer.start(server_binary) as other, redis.Redis.from_url(own_server.url) as client:
        port = free_port()
        client.config_set("port", port)
        client.config_set("repl-diskless-sync-delay", 0)
        with redis.Redis.from_url(other.url) as replica:
            replica.replicaof("127.0.0.1", port)
            wait_until(lambda: replica.info("replication")["master_link_status"] == "up")
            for n, colour in enumerate(COLOURS * 3, start=7):
                client.script_flush()  # what is unknown is sent again, which is to be waited for, too
                tell(colour, one)
                assert replica.xlen(app.queue("default").stream) == n
            # On Trio the waiting has its own connection, which has written nothing before.
            app.close()
            os.kill(other.pid, signal.SIGSTOP)
            try:
                with pytest.raises(NotReplicated, match="after 1 s 0 of 1 replica "):
                    tell("trio", one)
            finally:
                os.kill(other.pid, signal.SIGCONT)
            # A job may demand what the setting does not, and the other way round.
            quick, sure = (number.options(replicas=replicas) for replicas in (0, 2))
            with pytest.raises(NotReplicated, match="after 1 s 1 of 2 replicas"):
                app.send_many([quick.s(1), sure.s(1)])  # the most that one of them demands
            quick.delay(1)
            assert (number.job(1).replicas, sure.job(1).replicas) == (UNSET, 2)
    app.close()


def test_each_demanded_number_of_replicas_is_checked(app_name: str) -> None:
    for replicas in (-1, 101, True, "1"):
        with pytest.raises(Misconfigured, match="whole number from 0 to 100"):
            App(app_name).task(number_of).options(replicas=replicas)  # type: ignore[arg-type]


async def number_of(n: int) -> int:
    """Return the number."""
    return n


async def test_a_coroutine_publishes_in_place_of_the_thread(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url, backlog=10)

    @app.task(name="number")
    async def number(n: int) -> int:
        return n

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "celery5-backlog"]

    await number.adelay(0)
    own_server.kill()
    await number.adelay(1)  # by the thread, so far
    async with trio.open_nursery() as nursery:
        await nursery.start(app.backlog.run)
        for n in range(2, 5):
            await number.adelay(n)
        with trio.fail_after(30):
            while threads():
                await trio.sleep(0.01)
        await trio.to_thread.run_sync(own_server.revive)
        assert await app.backlog.aflush(30)
        assert numbers(app) == [0, 1, 2, 3, 4]
        await trio.to_thread.run_sync(own_server.kill)
        await number.adelay(5)
        assert not threads()
        nursery.cancel_scope.cancel()
    assert threads()  # what waits is left to it
    own_server.revive()
    assert await app.backlog.aflush(30)
    assert numbers(app)[-1] == 5
    app.close()
