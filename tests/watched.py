"""Watched: a server that is looked at before and after, so that whatever is left behind in between is told of (I11)."""

from collections.abc import Iterator
from contextlib import contextmanager

import redis

from celery5.broker.servers.embedded import EmbeddedServer
from tests.leaks import Look


@contextmanager
def watched(server: EmbeddedServer, *, planted: bool = False) -> Iterator[None]:
    """While this lasts others use the server. Raises AssertionError when they leave a key behind which nobody owns,
    unless it was `planted` on purpose.

    For a fixture that outlives a test, too: what belongs to it was there before the test, and is nothing of the test's.
    """
    with redis.Redis.from_url(server.url, socket_timeout=5) as client:
        look = Look(client, forgiving=server.save)
        yield
        left = look.last(moment=0.0 if planted else 1.0)
    assert planted or not left, "\n".join(left)
