"""Connections to the nodes of a cluster: a node that refuses a login while others work ends none of them."""

import pytest
import redis as blocking
import trio

from celery5.broker.call import Call
from celery5.broker.drivers import cluster_on_trio
from celery5.broker.drivers.cluster_on_trio import RunningConnections
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BrokerDenied
from tests.faults.worker.calls import until

PING = Call(("PING",), bytes)


def connect(server: EmbeddedServer, user: str = "") -> TrioRedis:
    """Return a connection to a server, that of a user if one is named."""
    login = f"{user}:secret@" if user else ""
    return TrioRedis(endpoint=Endpoint.from_url(f"unix://{login}{server.socket}"))


async def test_node_that_refuses_its_first_login_is_tried_until_it_permits_it(
    server: EmbeddedServer, redis_client: blocking.Redis, app_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_on_trio, "REFUSED_RETRY", 0.01)
    running, works, refused = RunningConnections(), connect(server), connect(server, app_name)

    async def start() -> None:
        running.open(works)
        await until(lambda: works.connected)

    async with trio.open_nursery() as nursery:
        await nursery.start(running.run, start)
        running.open(refused)
        await until(lambda: any(entry["username"] == app_name for entry in redis_client.acl_log()))
        assert await works.perform(PING) == b"PONG"
        words = ("on", ">secret", "+@all")
        redis_client.execute_command("ACL", "SETUSER", app_name, *words)  # type: ignore[no-untyped-call]
        await until(lambda: refused.connected)
        assert await refused.perform(PING) == b"PONG"
        assert works.connected
        nursery.cancel_scope.cancel()
    redis_client.execute_command("ACL", "DELUSER", app_name)  # type: ignore[no-untyped-call]


async def test_node_that_refuses_its_login_at_the_start_ends_the_start(
    server: EmbeddedServer, app_name: str
) -> None:
    running, refused = RunningConnections(), connect(server, app_name)

    async def start() -> None:
        running.open(refused)
        await trio.sleep_forever()

    with pytest.RaisesGroup(BrokerDenied, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(running.run, start)
