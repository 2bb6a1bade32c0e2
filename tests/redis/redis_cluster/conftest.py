"""Fixtures of the tests on a Redis Cluster: one of three primaries for all of them, started when a test asks for it."""

from collections.abc import Iterator

import pytest

from celery5 import App, RetryPolicy
from tests.cluster_servers import TestCluster
from tests.redis.worker.workers import LEASE


@pytest.fixture
def url(redis_cluster: TestCluster) -> str:
    """The URL of the cluster."""
    return redis_cluster.url


@pytest.fixture
def app(url: str, app_name: str) -> Iterator[App]:
    """An application with a short lease and quick retries, for workers in the test's own Trio run."""
    policy = RetryPolicy(max_retries=2, backoff=0.01, jitter=False)
    one = App(app_name, broker=url, lease=LEASE, cpu_slots=4, concurrency=20, retry_policy=policy)
    yield one
    one.close()
