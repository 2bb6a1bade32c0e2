"""Trio driver, pushed messages: subscriptions are confirmed, survive lost connections, and can be refused."""

import pytest
import redis as blocking
import trio

from celery5.broker.connection.push import PushRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.timing import Timing
from celery5.errors import BrokerDenied, BrokerUnavailable
from tests.faults.connections.proxy import FaultyProxy
from tests.faults.worker.calls import until

QUICK = Timing(connect=0.5, reply=0.5, idle_ping=0.05, first_connect=1, backoff_start=0.005, backoff_cap=0.05)


class Listener:
    """A running push link and all that it heard."""

    def __init__(self, url: str) -> None:
        self.heard: list[tuple[bytes, bytes]] = []
        self.connections = 0
        self.push = PushRedis(
            endpoint=Endpoint.from_url(url),
            on_message=lambda channel, payload: self.heard.append((channel, payload)),
            on_connected=self.connected,
            timing=QUICK,
        )

    def connected(self) -> None:
        """Called when all subscriptions stand."""
        self.connections += 1


@pytest.fixture
async def proxy(server: EmbeddedServer, nursery: trio.Nursery) -> FaultyProxy:
    """A proxy that can cut the connection."""
    one = FaultyProxy(str(server.socket))
    await nursery.start(one.run)
    return one


@pytest.fixture
async def listener(proxy: FaultyProxy, nursery: trio.Nursery) -> Listener:
    """A listener through the proxy."""
    one = Listener(proxy.url)
    await nursery.start(one.push.run)
    return one


async def test_what_is_published_after_a_subscription_is_heard_in_order(
    listener: Listener, redis_client: blocking.Redis, app_name: str
) -> None:
    await listener.push.subscribe(f"{app_name}:a", f"{app_name}:b".encode())
    for n in range(100):
        assert redis_client.publish(f"{app_name}:{'ab'[n % 2]}", str(n)) == 1
    await until(lambda: len(listener.heard) == 100)
    expected = [(f"{app_name}:{'ab'[n % 2]}".encode(), str(n).encode()) for n in range(100)]
    assert listener.heard == expected


async def test_subscriptions_are_renewed_before_users_are_told_to_look_again(
    listener: Listener, proxy: FaultyProxy, redis_client: blocking.Redis, app_name: str
) -> None:
    await until(lambda: listener.connections == 1)
    await listener.push.subscribe(app_name, f"{app_name}:other")
    for times in range(2, 5):
        proxy.cut_all()
        await until(lambda times=times: listener.connections == times)  # type: ignore[misc]
        assert redis_client.publish(app_name, f"after {times}") == 1
        assert redis_client.publish(f"{app_name}:other", "") == 1
        await until(lambda times=times: len(listener.heard) == 2 * times - 2)  # type: ignore[misc]


async def test_a_subscription_made_while_the_connection_is_down_stands_when_it_is_back(
    listener: Listener, proxy: FaultyProxy, redis_client: blocking.Redis, app_name: str
) -> None:
    proxy.refuse()
    await until(lambda: not listener.push.connected)
    with pytest.raises(BrokerUnavailable):
        await listener.push.subscribe(app_name)
    assert listener.push.channels == {app_name.encode()}
    proxy.accept()
    await until(lambda: listener.connections == 2)
    assert redis_client.publish(app_name, "x") == 1


async def test_an_unsubscribed_channel_is_silent_and_stays_so(
    listener: Listener, proxy: FaultyProxy, redis_client: blocking.Redis, app_name: str
) -> None:
    await listener.push.subscribe(app_name)
    await listener.push.unsubscribe(app_name)
    assert redis_client.publish(app_name, "x") == 0
    proxy.cut_all()
    await until(lambda: listener.connections == 2)
    assert redis_client.publish(app_name, "x") == 0
    assert listener.heard == []


async def test_a_silent_push_connection_is_pinged_and_stays(listener: Listener, proxy: FaultyProxy) -> None:
    before = proxy.seen[b"PING"]
    await until(lambda: proxy.seen[b"PING"] >= before + 3)
    assert proxy.connections == 1
    assert listener.push.connected


async def test_a_channel_that_the_user_may_not_hear_is_refused_and_the_link_goes_on(
    server: EmbeddedServer, nursery: trio.Nursery, redis_client: blocking.Redis, app_name: str
) -> None:
    words = ("on", ">x", "resetchannels", f"&{app_name}:mine", "+@connection", "+@pubsub")
    redis_client.execute_command("ACL", "SETUSER", app_name, *words)  # type: ignore[no-untyped-call]
    listener = Listener(f"unix://{app_name}:x@{server.socket}")
    await nursery.start(listener.push.run)
    with pytest.raises(BrokerDenied, match="does not permit"):
        await listener.push.subscribe(f"{app_name}:theirs")
    await listener.push.subscribe(f"{app_name}:mine")
    assert redis_client.publish(f"{app_name}:mine", "x") == 1
    await until(lambda: listener.heard == [(f"{app_name}:mine".encode(), b"x")])
    assert listener.push.channels == {f"{app_name}:mine".encode()}
    redis_client.execute_command("ACL", "DELUSER", app_name)  # type: ignore[no-untyped-call]


async def test_channel_whose_permission_is_taken_away_is_heard_again_when_given_back(
    server: EmbeddedServer, nursery: trio.Nursery, redis_client: blocking.Redis, app_name: str
) -> None:
    words = ("on", ">x", "resetchannels", "+@connection", "+@pubsub")
    redis_client.execute_command("ACL", "SETUSER", app_name, *words, f"&{app_name}")  # type: ignore[no-untyped-call]
    listener = Listener(f"unix://{app_name}:x@{server.socket}")
    await nursery.start(listener.push.run)
    await listener.push.subscribe(app_name)
    redis_client.execute_command("ACL", "SETUSER", app_name, *words)  # type: ignore[no-untyped-call]
    await until(lambda: listener.push.statistics().connects >= 3)  # each refused renewal is tried again
    told = listener.connections
    redis_client.execute_command("ACL", "SETUSER", app_name, f"&{app_name}")  # type: ignore[no-untyped-call]
    await until(lambda: listener.connections > told)
    assert redis_client.publish(app_name, "x") == 1
    await until(lambda: listener.heard == [(app_name.encode(), b"x")])
    redis_client.execute_command("ACL", "DELUSER", app_name)  # type: ignore[no-untyped-call]
