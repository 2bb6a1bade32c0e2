"""A primary that is cut off from its sentinels and replicas, and that clients still reach. It accepts writes, which are
lost when it is joined again. Those who wait for a replica learn that at once, and all go to the new primary.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import pytest
import trio

from celery5 import App
from celery5.broker.connection import link
from celery5.errors import BrokerReplied, NotReplicated
from tests.night import with_clusters
from tests.redis.worker.workers import LEASE, until, working
from tests.sentinel_servers import WatchedServers, wait_until, watched_servers

pytestmark = with_clusters("ten seconds")


@pytest.fixture
def servers(server_binary: str | None) -> Iterator[WatchedServers]:
    """A primary with two replicas, and three sentinels."""
    with watched_servers(server_binary, replicas=2, password="secret") as servers:
        yield servers


async def test_processes_leave_a_primary_that_only_they_reach(
    servers: WatchedServers, app_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "PRIMARY_CHECK_INTERVAL", 1.0)
    app = App(app_name, broker=servers.url, lease=LEASE)
    ran: list[int] = []

    async def note(number: int) -> int:
        ran.append(number)
        return number

    task = app.task(note)
    replicated = task.options(replicas=1)
    async with working(app):
        assert await (await replicated.adelay(1)).aget(timeout=30) == 1
        old = servers.primary
        await trio.to_thread.run_sync(servers.cut_off, old)
        with pytest.raises(NotReplicated) as raised:
            await replicated.adelay(2)
        await until(lambda: ran == [1, 2])  # the old primary has it, and so has the worker
        await trio.to_thread.run_sync(servers.wait_for_another, old)
        # The sender has asked the sentinels, and the worker does so although the old primary answers.
        assert await (await replicated.adelay(3)).aget(timeout=30) == 3
        assert old.role == "master"
        await trio.to_thread.run_sync(servers.revive)
        (lost,) = raised.value.ids
        assert str(await app.result(lost, task=task).astatus()) == "UNKNOWN"
        assert await (await replicated.adelay(4)).aget(timeout=30) == 4
    app.close()


def test_senders_leave_a_primary_that_refuses_writes_without_its_replicas(
    servers: WatchedServers, app_name: str
) -> None:
    """With `min-replicas-to-write`. There is one loop, so that the connections of asyncio are kept."""
    app = App(app_name, broker=servers.url, backlog=0)
    task = app.task(_accept)
    with asyncio.Runner() as loop, closing(app):

        def is_accepted(send: Callable[[], object]) -> bool:
            try:
                send()
            except BrokerReplied as error:
                return error.code != "NOREPLICAS"
            return True

        senders: list[Callable[[], object]] = [task.delay, lambda: loop.run(task.adelay())]
        old = servers.primary
        for server in servers.servers:
            server.client.config_set("min-replicas-to-write", 1)
        assert all(map(is_accepted, senders))
        servers.cut_off(old)
        assert not any(map(is_accepted, senders))
        servers.wait_for_another(old)
        for send in senders:
            wait_until(partial(is_accepted, send), "the new primary accepts it")
        assert old.role == "master"


async def _accept() -> None:
    """Nothing runs it."""
