"""Fixtures of the tests with a real server: an application, its worker processes, and one queue for the scripts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from celery5 import App, RetryPolicy
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys
from celery5.broker.servers.embedded import EmbeddedServer
from tests.declared_keys import only_declared_keys
from tests.redis.commands.staff import Staff, staffed
from tests.redis.connections.two_brokers import app_on
from tests.redis.worker.one_queue import Queue
from tests.redis.worker.workers import LEASE

SCRIPTED = {
    "dead_letters",
    "events",
    "limits",
    "recovery",
    "results",
    "scaling",
    "scheduling",
    "scripts",
    "streams",
    "workflows",
}
"""The folders whose tests call nearly every script."""


@pytest.fixture(autouse=True)
def _declared_keys(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which a script touched a key that it does not declare."""
    server = request.getfixturevalue("server") if "server" in request.fixturenames else None
    # The one in memory has no MONITOR.
    if request.path.parent.name in SCRIPTED and isinstance(server, EmbeddedServer):
        with only_declared_keys(server.url):
            yield
    else:
        yield


@pytest.fixture
def staff(url: str, app_name: str, tmp_path: Path) -> Iterator[Staff]:
    """Worker processes over the shared server; all of them end with the test."""
    with staffed(url, app_name, tmp_path) as staff:
        yield staff


@pytest.fixture
def own_staff(own_server: EmbeddedServer, app_name: str, tmp_path: Path) -> Iterator[Staff]:
    """Worker processes over a server of the test's own."""
    with staffed(own_server.url, app_name, tmp_path) as staff:
        yield staff


@pytest.fixture
def app(url: str, app_name: str) -> Iterator[App]:
    """An application with a short lease and quick retries, for workers in the test's own Trio run."""
    policy = RetryPolicy(max_retries=2, backoff=0.01, jitter=False)
    one = App(
        app_name,
        broker=url,
        lease=LEASE,
        cpu_slots=4,
        concurrency=20,
        retry_policy=policy,
        unknown_task_grace=0.0,
    )
    yield one
    one.close()


@pytest.fixture
def queue(url: str, app_name: str, redis_client: "redis.Redis") -> Iterator[Queue]:
    """One queue of an application that has no workers but those that the test makes up."""
    driver = open_blocking(Endpoint.from_url(url))
    yield Queue(driver, Keys(app_name).for_queue("mail"), redis_client)
    driver.close()


@pytest.fixture
def paired(url: str, own_server: EmbeddedServer, app_name: str) -> Iterator[App]:
    """An application on two servers, of which the second one is the test's own."""
    one = app_on(app_name, url, own_server.url, lease=LEASE, concurrency=4, cpu_slots=4)
    yield one
    one.close()


@pytest.fixture
def second(own_server: EmbeddedServer) -> Iterator["redis.Redis"]:
    """What looks at that server."""
    with redis.Redis.from_url(own_server.url) as client:
        yield client
