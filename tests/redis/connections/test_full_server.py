"""A server that is full: the driver reports when a write is refused, and when such a write is taken again."""

from typing import Any

import pytest
import redis
import trio

from celery5.broker.call import Call
from celery5.broker.connection.link import CallsAccepted, CallsRefused, LinkEvent
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BrokerReplied

WRITE = Call(("SET", "a", "1"), bool)
READ = Call(("GET", "a"), lambda reply: reply)
FREE = Call(("DEL", "a"), int)


async def test_full_server_is_writable_only_when_it_takes_what_it_has_refused(
    own_server: EmbeddedServer, nursery: trio.Nursery
) -> None:
    events = list[LinkEvent]()
    driver = TrioRedis(endpoint=Endpoint.from_url(own_server.url), watch=events.append)
    await nursery.start(driver.run)

    def reported() -> list[type]:
        return [type(event) for event in events if isinstance(event, CallsRefused | CallsAccepted)]

    async def refuse(*calls: Call[Any]) -> None:
        with pytest.raises(BrokerReplied) as refused:
            await driver.perform_all(calls)
        assert refused.value.code == "OOM"

    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", 1)
        await refuse(WRITE)
        assert reported() == [CallsRefused]
        await driver.perform(READ)
        await driver.perform_all([READ, FREE])
        assert reported() == [CallsRefused], "a full server reads and deletes, too"
        client.config_set("maxmemory", 0)
        await driver.perform_all([READ, WRITE])
        assert reported() == [CallsRefused, CallsAccepted]
        await driver.perform(WRITE)
        assert reported() == [CallsRefused, CallsAccepted]
        client.config_set("maxmemory", 1)
        await refuse(READ, WRITE)
        client.config_set("maxmemory", 0)
        await driver.perform(WRITE)
        assert reported() == [CallsRefused, CallsAccepted] * 2
