"""Leaking: tests that leave a key behind which nobody owns. No run finds them by itself; the tests of the check do."""

from collections.abc import Iterator

import pytest
import redis

from celery5.broker.servers.embedded import EmbeddedServer
from tests.watched import watched


@pytest.fixture(scope="module")
def shared(server: EmbeddedServer) -> Iterator["redis.Redis"]:
    """What several tests have in common: it outlives each of them."""
    with watched(server), redis.Redis.from_url(server.url) as client:
        client.set("celery5:{leaking:mail}:before", 1, px=60_000)
        yield client


def test_a_test_that_leaks(redis_client: "redis.Redis") -> None:
    redis_client.set("celery5:{leaking:a}:other", 1)


def test_that_leaks_into_what_several_tests_have_in_common(shared: "redis.Redis") -> None:
    shared.set("celery5:{leaking:mail}:other", 1)
