"""Fixtures of the tests with Celery: its own application, on a database of the shared server that is emptied."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import redis

from celery5.broker.servers.embedded import EmbeddedServer

DATABASE = 9
"""The database for Celery's keys; celery5's are in 0."""


@pytest.fixture
def celery_url(server: EmbeddedServer) -> Iterator[str]:
    """The URL of Celery's broker and result backend."""
    path = server.url.removeprefix("unix://").partition("?")[0]
    with redis.Redis(unix_socket_path=path, db=DATABASE) as client:
        client.flushdb()
        yield f"redis+socket://{path}?virtual_host={DATABASE}"
        client.flushdb()


@pytest.fixture
def celery_redis(server: EmbeddedServer, celery_url: str) -> Iterator["redis.Redis"]:
    """What looks at Celery's keys."""
    path = server.url.removeprefix("unix://").partition("?")[0]
    with redis.Redis(unix_socket_path=path, db=DATABASE) as client:
        yield client


@pytest.fixture
def old(celery_url: str) -> Iterator[Any]:
    """An application of Celery, as a shop has it: what sends to the bridge."""
    one: Any = import_module("celery").Celery(
        "old", broker=celery_url, backend=celery_url, set_as_current=False
    )
    yield one
    one.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a stop not wait for messages."""
    monkeypatch.setattr("celery5.contrib.celery.receivers.WAIT", 0.05)
