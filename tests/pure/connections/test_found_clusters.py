"""A broker that says it is part of a cluster: a call that may have run is not repeated, and silence proves nothing."""

from collections.abc import Iterator
from typing import Any

import pytest

from celery5 import App
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.drivers.opening_on_asyncio import AsyncioBroker
from celery5.broker.endpoint import Endpoint
from celery5.broker.topologies import (
    ClusterFound,
    ServerFound,
    find_endpoint,
    forget_clusters,
    remember_cluster,
)

NOBODY = "redis://127.0.0.1:1/0"


@pytest.fixture
def found() -> ClusterFound:
    """The error of a call that may have run before."""
    error = ClusterFound("it is part of a cluster", Endpoint.from_url(NOBODY))
    error.mark_maybe_done()
    return error


def test_a_call_that_may_have_run_before_a_cluster_was_found_raises(found: ClusterFound) -> None:
    broker = open_blocking(found.endpoint)
    with pytest.raises(ClusterFound):
        broker.follow(found)
    assert broker.endpoint == find_endpoint(found.endpoint) == found.endpoint


async def test_and_on_asyncio(found: ClusterFound) -> None:
    broker = AsyncioBroker(found.endpoint)
    with pytest.raises(ClusterFound):
        await broker.follow(found)
    assert broker.driver.endpoint == found.endpoint


def test_a_broker_that_does_not_answer_may_be_a_cluster() -> None:
    app = App("shop", broker=NOBODY)
    assert not app.connections.is_known_as_server()
    app.close()


class ServerInPlace:
    """A driver of a cluster whose node was replaced by a single server after some of its calls had run."""

    def __init__(self, found: ServerFound) -> None:
        self.endpoint, self._found = found.endpoint.as_cluster(), found

    def perform_all(self, _calls: object) -> list[object]:
        """Meet the server."""
        raise self._found

    def close(self) -> None:
        """There is no connection."""


class ServerInPlaceOnAsyncio(ServerInPlace):
    """The same on asyncio."""

    async def perform_all(self, _calls: object) -> list[object]:  # type: ignore[override]
        """Meet the server."""
        raise self._found

    async def aclose(self) -> None:
        """There is no connection."""


@pytest.fixture
def server_found() -> Iterator[ServerFound]:
    """A single server stands in the place of a cluster that was found at its address."""
    endpoint = Endpoint.from_url(NOBODY)
    remember_cluster(ClusterFound("it is part of a cluster", endpoint))
    yield ServerFound("it is a single server by now", endpoint)
    forget_clusters()


def test_several_calls_are_not_repeated_on_a_server_in_the_place_of_a_cluster(
    server_found: ServerFound,
) -> None:
    broker: Any = open_blocking(server_found.endpoint)
    broker.driver = ServerInPlace(server_found)
    with pytest.raises(ServerFound):
        broker.perform_all([])
    assert broker.endpoint == server_found.endpoint


async def test_nor_on_asyncio(server_found: ServerFound) -> None:
    broker: Any = AsyncioBroker(server_found.endpoint)
    broker.driver = ServerInPlaceOnAsyncio(server_found)
    with pytest.raises(ServerFound):
        await broker.perform_all([])
    assert broker.driver.endpoint == server_found.endpoint
