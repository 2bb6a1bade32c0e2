"""Full memory: workers drain their queues while Redis refuses what adds work, and a script is refused as a whole."""

import signal
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from celery5 import App, RetryPolicy
from celery5.broker.calls import cluster, leases, queues
from celery5.broker.full_memory import FIRST_WRITES
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BrokerReplied, TaskRevoked
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.worker.workers import until, working

JOBS = 60
"""Jobs of each kind."""
BYTES = 20_000
"""Bytes of the argument of each job."""


@contextmanager
def full(client: Any) -> Generator[None, None, None]:
    """Have Redis refuse what takes memory while the block lasts."""
    client.config_set("maxmemory", 1)
    try:
        yield
    finally:
        client.config_set("maxmemory", 0)


@pytest.fixture
def client(own_server: EmbeddedServer) -> Iterator["redis.Redis"]:
    """What looks at that server."""
    with redis.Redis.from_url(own_server.url) as one:
        yield one


@pytest.fixture
def shop(own_server: EmbeddedServer, app_name: str) -> Iterator[App]:
    """An application with a task of each kind."""
    policy = RetryPolicy(max_retries=1, backoff=0.01, jitter=False)
    app = App(app_name, broker=own_server.url, backlog=0, lease=1.0, concurrency=20, retry_policy=policy)
    tried: Counter[int] = Counter()

    @app.task(name="plain")
    async def plain(number: int, note: str) -> int:
        return number

    @app.task(name="ignored", ignore_result=True)
    async def ignored(number: int, note: str) -> int:
        return number

    @app.task(name="limited", limit=2, rate_limit="1000/1s")
    async def limited(number: int, note: str) -> int:
        return number

    @app.task(name="retried")
    async def retried(number: int, note: str) -> int:
        tried[number] += 1
        if tried[number] == 1:
            raise ValueError("again")
        return number

    @app.task(name="failing")
    async def failing(number: int, note: str) -> None:
        raise ValueError("no")

    yield app
    app.close()


KINDS = ("plain", "ignored", "limited", "retried", "failing")


async def test_a_worker_that_starts_while_memory_is_full_drains_its_queue(
    shop: App, client: "redis.Redis"
) -> None:
    """Jobs of every kind end, those for later and of a workflow too; then there is room, and jobs are sent again."""
    keys = shop.queue("default")
    looks: Any = client
    sent = {
        kind: await shop.asend_many([shop.tasks[kind].s(n, "x" * BYTES) for n in range(JOBS)])
        for kind in KINDS
    }
    plain = shop.tasks["plain"]
    later = await plain.options(countdown=0.5).adelay(1, "x" * BYTES)
    run = await (plain.s(7, "y") >> plain.s(8, "z")).astart()
    before = int(looks.info("memory")["used_memory"])
    with full(client):
        with pytest.raises(BrokerReplied, match=r"memory is full.*send it again"):
            await plain.adelay(0, "")
        async with working(shop):
            await until(lambda: looks.hlen(keys.jobs) == JOBS)  # the dead letters
            for kind in KINDS:
                if kind not in ("ignored", "failing"):
                    assert [await job.aget() for job in sent[kind]] == list(range(JOBS))
            assert await later.aget(10) == 1
            assert await run.aget(10) == 8
        assert [looks.xlen(stream) for stream in keys.streams] == [0, 0, 0, 0]
        assert looks.xlen(keys.dead) == JOBS
        after = int(looks.info("memory")["used_memory"])
        assert after < before - 2 * JOBS * BYTES
        await shop.dlq.apurge()
        assert looks.xlen(keys.dead) == 0
        with pytest.raises(BrokerReplied, match="memory is full"):
            await plain.adelay(0, "")
    client.config_set("maxmemory", before)
    assert (await plain.adelay(0, "")).id
    client.config_set("maxmemory", 0)


def test_jobs_of_a_killed_worker_are_recovered_while_memory_is_full(
    own_staff: Staff, client: "redis.Redis"
) -> None:
    first = own_staff.start(lease=0.6, concurrency=4, log_level="debug")
    jobs = own_staff.app.send_many([own_staff.app.signature("nap", 0.2) for _ in range(12)])
    wait_until(lambda: len(own_staff.notes("begin")) == 4)
    with full(client):
        first.lose_its_machine()
        second = own_staff.start(lease=0.6, concurrency=4)
        assert {job.get(timeout=30) for job in jobs} == {second.process.pid}
        second.signal(signal.SIGTERM)
        assert second.wait() == 0
    runs = Counter(note.job for note in own_staff.notes("begin"))
    assert sum(runs.values()) <= len(jobs) + 4


def test_an_operator_reaches_workers_and_takes_jobs_back_while_memory_is_full(
    own_staff: Staff, client: "redis.Redis"
) -> None:
    app = own_staff.app
    own_staff.start(lease=0.6, concurrency=1)
    running, waiting = app.send_many([app.signature("nap", 30.0), app.signature("nap", 0.0)])
    wait_until(lambda: len(own_staff.notes("begin")) == 1)
    with full(client):
        assert [reply.ok for reply in app.control.send("ping")] == [True]
        waiting.revoke()
        running.revoke()
        for job in (running, waiting):
            with pytest.raises(TaskRevoked):
                job.get()
        wait_until(lambda: client.hlen(app.queue("default").jobs) == 0)


@pytest.mark.parametrize("line", sorted(set(FIRST_WRITES.values()) - {""}))
def test_a_script_that_begins_with_a_freeing_write_is_never_refused_and_changes_nothing(
    client: "redis.Redis", line: str
) -> None:
    looks: Any = client
    {
        "XDEL": lambda: looks.xadd("there", {"field": "value"}),
        "ZREM": lambda: looks.zadd("there", {"member": 1}),
        "HDEL": lambda: looks.hset("there", "field", "value"),
    }[line.split("'")[1]]()
    looks.pexpire("there", 600_000)
    before = looks.dump("there")
    with full(looks):
        for key in ("missing", "there"):
            with pytest.raises(redis.ResponseError, match="command not allowed"):
                looks.eval("redis.call('SET', KEYS[2], 'x', 'PX', 60000)", 2, key, "other")
            assert not looks.exists("other")
            looks.eval(f"{line}redis.call('SET', KEYS[2], 'x', 'PX', 60000)", 2, key, "other")
            assert looks.getdel("other") == b"x"
    assert looks.dump("there") == before
    assert looks.exists("missing") == 0


def test_a_lease_is_renewed_while_memory_is_full(shop: App, client: "redis.Redis") -> None:
    keys = shop.queue("default")
    with full(client):
        shop.perform(leases.join_queue(keys, "w", lease=1))
        assert shop.perform(leases.renew_lease(keys, "w", lease=500)).alive
        assert (client.zscore(keys.leases, "w") or 0) > 0
        shop.perform(leases.leave_queue(keys, "w"))
    assert client.zscore(keys.leases, "w") is None


def test_a_controller_takes_the_lead_and_what_has_ended_is_counted_while_memory_is_full(
    shop: App, client: "redis.Redis"
) -> None:
    with full(client):
        led = shop.perform(cluster.claim_leadership(shop.keys, "here", replaces="0 0", epoch=0))
        assert led.leader == "here"
        shop.perform(cluster.resign_leadership(shop.keys, "here", epoch=led.epoch))
        shop.perform(queues.count_ended(shop.queue("default"), 1))
