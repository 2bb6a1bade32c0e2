"""A broker that says it is part of a cluster: a call that may have run is not repeated, and silence proves nothing."""

import pytest

from celery5 import App
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.drivers.opening_on_asyncio import AsyncioBroker
from celery5.broker.endpoint import Endpoint
from celery5.broker.topologies import ClusterFound, find_endpoint

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
