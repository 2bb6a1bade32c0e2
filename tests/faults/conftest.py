"""Fixtures: a faulty proxy in front of the server, and connections through it."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
import trio

from celery5.broker.connection.link import LinkEvent
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.timing import Timing
from tests.faults.connections.proxy import FaultyProxy
from tests.redis.commands.staff import Staff, staffed

# Everything happens ten times as fast as in production, in the same proportions.
BRISK = Timing(
    connect=0.5,
    reply=1.0,
    idle_ping=0.2,
    first_connect=1.0,
    backoff_start=0.005,
    backoff_cap=0.1,
    breaker_failures=3,
    breaker_reset=0.1,
)


class OpenLink(Protocol):
    """Opens a TrioRedis through the proxy, or to another URL."""

    async def __call__(
        self, timing: Timing = ..., *, url: str = ..., watch: Callable[[LinkEvent], None] = ...
    ) -> TrioRedis: ...


@pytest.fixture
def staff(url: str, app_name: str, tmp_path: Path) -> Iterator[Staff]:
    """Worker processes over the shared server; all of them end with the test."""
    with staffed(url, app_name, tmp_path) as staff:
        yield staff


@pytest.fixture
async def proxy(server: EmbeddedServer, nursery: trio.Nursery) -> AsyncIterator[FaultyProxy]:
    """A faulty proxy in front of the shared server."""
    one = FaultyProxy(str(server.socket))
    await nursery.start(one.run)
    yield one
    one.resume()


@pytest.fixture
async def open_link(proxy: FaultyProxy, nursery: trio.Nursery) -> OpenLink:
    """Opens connections that last until the end of the test."""

    async def opened(
        timing: Timing = BRISK, *, url: str = "", watch: Callable[[LinkEvent], None] = lambda _event: None
    ) -> TrioRedis:
        redis = TrioRedis(endpoint=Endpoint.from_url(url or proxy.url), timing=timing, watch=watch)
        await nursery.start(redis.run)
        return redis

    return opened
