"""Patience: who waits for a result waits through an outage that is over in time, also in the first second of
waiting."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
import trio

from celery5 import App, AsyncResult, BrokerUnavailable, ResultTimeout, gather
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.job.messages import Document, encode


@contextmanager
def told_after_an_outage(server: EmbeddedServer, result: AsyncResult[int]) -> Iterator[None]:
    """Meanwhile the server dies, comes back after more than a second, and the job ends."""

    def happen() -> None:
        time.sleep(0.2)
        server.kill()
        time.sleep(1.2)
        server.revive()
        document = encode(Document(v=1, id=result.id, task="t", state="SUCCESS"))
        with redis.Redis.from_url(server.url) as client:
            client.set(result.key, document, px=60_000)
            client.publish(result.key, document)

    thread = threading.Thread(target=happen)
    thread.start()
    yield
    thread.join(30)


@pytest.mark.parametrize("colour", ["plain", "trio"])
def test_who_waits_waits_through_an_outage(colour: str, own_server: EmbeddedServer, app_name: str) -> None:
    app = App(app_name, broker=own_server.url)
    result: AsyncResult[int] = app.result("a")
    with told_after_an_outage(own_server, result):
        assert (result.get(timeout=30) if colour == "plain" else trio.run(result.aget, 15.0)) is None
    app.close()


def test_who_has_no_more_time_hears_that_the_broker_is_away(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url)
    result: AsyncResult[int] = app.result("a")
    with pytest.raises(ResultTimeout):
        result.get(timeout=0.1)
    own_server.kill()
    with pytest.raises(BrokerUnavailable):
        result.get(timeout=0.1)
    with pytest.raises(BrokerUnavailable):
        gather([result], timeout=1.3)
    app.close()
