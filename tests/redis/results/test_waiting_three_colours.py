"""Waiting in three colours: the same documents in time, whatever happens to the connection, and nothing left behind."""

import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import pytest
import redis

from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.timing import Timing
from celery5.errors import BrokerDenied, BrokerUnavailable
from tests.redis.connections.colours import COLOURS, Here, live
from tests.redis.process.onlookers import clients, listeners, meanwhile, settle, until

QUICK = Timing(connect=1.0, reply=2.0, backoff_start=0.01, backoff_cap=0.05, breaker_reset=0.1)
NOBODY = msgspec.structs.replace(QUICK, first_connect=0.3)
"""Where a server is, the first connection may take its time: a machine can stand still for seconds."""

in_every_colour = pytest.mark.parametrize("colour", COLOURS)


@in_every_colour
def test_a_document_that_is_there_already_is_found(
    colour: str, url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    async def story(here: Here) -> dict[str, bytes]:
        return await here.results.wait([app_name], timeout=30)

    settle(redis_client, app_name, b"\x00document\xff")
    assert live(colour, url, story) == {app_name: b"\x00document\xff"}
    until(lambda: not listeners(redis_client, app_name))


@in_every_colour
def test_documents_that_come_later_are_found_as_they_come(
    colour: str, url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    # On one node of a cluster: plain Python waits for one node after the other.
    keys = [f"{{{app_name}}}:{number}" for number in range(3)]

    def settle_one_by_one() -> None:
        for key in reversed(keys):
            until(lambda key=key: listeners(redis_client, key))  # type: ignore[misc]
            settle(redis_client, key, key.encode())

    async def story(here: Here) -> dict[str, bytes]:
        return await here.results.wait(keys, timeout=30)

    with meanwhile(settle_one_by_one):
        assert live(colour, url, story) == {key: key.encode() for key in keys}


@pytest.mark.one_server("it counts the connections to one server")
@in_every_colour
def test_one_wait_after_the_other_uses_the_same_connection(
    colour: str, url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    keys = [f"{app_name}:{number}" for number in range(20)]
    ids: set[str] = set()

    def settle_one_by_one() -> None:
        for key in keys:
            until(lambda key=key: listeners(redis_client, key))  # type: ignore[misc]
            ids.update(client["id"] for client in clients(redis_client) if client["sub"] != "0")
            settle(redis_client, key)

    async def story(here: Here) -> None:
        for key in keys:
            assert await here.results.wait([key], timeout=30) == {key: b"done"}

    with meanwhile(settle_one_by_one):
        live(colour, url, story)
    assert len(ids) == 1


@in_every_colour
def test_enough_is_enough(colour: str, url: str, app_name: str, redis_client: "redis.Redis") -> None:
    keys = [f"{app_name}:{number}" for number in range(5)]

    def settle_two() -> None:
        for key in keys[1:3]:
            until(lambda key=key: listeners(redis_client, key))  # type: ignore[misc]
            settle(redis_client, key)

    def two(found: Mapping[str, bytes]) -> bool:
        return len(found) >= 2

    async def story(here: Here) -> dict[str, bytes]:
        return await here.results.wait(keys, timeout=30, enough=two)

    with meanwhile(settle_two):
        assert set(live(colour, url, story)) == set(keys[1:3])


@in_every_colour
def test_a_fault_in_enough_is_raised_to_its_caller(
    colour: str, url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    settle(redis_client, app_name)

    async def story(here: Here) -> None:
        with pytest.raises(ZeroDivisionError):
            await here.results.wait([app_name, "none"], timeout=30, enough=lambda found: bool(1 / 0))
        assert await here.results.wait([app_name], timeout=30) == {app_name: b"done"}

    live(colour, url, story)


@in_every_colour
def test_at_the_time_out_there_is_what_there_is(
    colour: str, url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    there, never = f"{app_name}:there", f"{app_name}:never"
    settle(redis_client, there)

    async def story(here: Here) -> None:
        assert await here.results.wait([], timeout=None) == {}
        assert await here.results.wait([never, there], timeout=0.1) == {there: b"done"}
        assert await here.results.wait([never, there], timeout=0) == {there: b"done"}
        assert await here.results.wait([never], timeout=0.05) == {}

    live(colour, url, story)
    until(lambda: not listeners(redis_client, never))


@in_every_colour
def test_ten_thousand_documents_cost_one_connection_and_leave_no_subscription(
    colour: str, own_server: EmbeddedServer
) -> None:
    keys = [f"result:{number}" for number in range(10_000)]
    with redis.Redis.from_url(own_server.url) as client:
        # The first half before anybody waits, the rest when all are listened to.
        with client.pipeline(transaction=False) as pipe:
            for key in keys[:5000]:
                pipe.set(key, "1", px=60_000)
            pipe.execute()

        def settle_the_rest() -> None:
            until(lambda: listeners(client, keys[-1]))
            assert len([connection for connection in clients(client) if connection["sub"] != "0"]) == 1
            with client.pipeline(transaction=False) as pipe:
                for key in keys[5000:]:
                    pipe.set(key, "2", px=60_000)
                    pipe.publish(key, "2")
                pipe.execute()

        async def story(here: Here) -> dict[str, bytes]:
            found = await here.results.wait(keys, timeout=30)
            for _ in range(100):
                if not client.pubsub_channels():
                    return found
                await here.sleep(0.02)
            raise AssertionError("there are subscriptions left")

        with meanwhile(settle_the_rest):
            found = live(colour, own_server.url, story)
        assert len(found) == 10_000


@in_every_colour
def test_a_connection_that_is_cut_is_made_again_and_nothing_is_missed(
    colour: str, own_server: EmbeddedServer
) -> None:
    with redis.Redis.from_url(own_server.url) as client:

        def cut_and_settle() -> None:
            until(lambda: listeners(client, "k1"))
            client.client_kill_filter(_type="pubsub")
            settle(client, "k1")
            until(lambda: listeners(client, "k2"))
            settle(client, "k2")

        async def story(here: Here) -> dict[str, bytes]:
            return await here.results.wait(["k1", "k2"], timeout=30)

        with meanwhile(cut_and_settle):
            assert live(colour, own_server.url, story, timing=QUICK) == {"k1": b"done", "k2": b"done"}


@in_every_colour
def test_a_server_may_restart_while_its_results_are_waited_for(
    colour: str, own_server: EmbeddedServer
) -> None:
    def restart_and_settle() -> None:
        with redis.Redis.from_url(own_server.url) as client:
            until(lambda: listeners(client, "k"))
        own_server.kill()
        own_server.revive()
        with redis.Redis.from_url(own_server.url) as client:
            settle(client, "k")

    async def story(here: Here) -> dict[str, bytes]:
        return await here.results.wait(["k"], timeout=30)

    with meanwhile(restart_and_settle):
        assert live(colour, own_server.url, story, timing=QUICK) == {"k": b"done"}


@in_every_colour
def test_what_was_not_announced_is_found_all_the_same(
    colour: str, url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    def settle_silently() -> None:
        until(lambda: listeners(redis_client, app_name))
        redis_client.set(app_name, "document", px=60_000)

    async def story(here: Here) -> dict[str, bytes]:
        return await here.results.wait([app_name], timeout=30)

    with meanwhile(settle_silently):
        assert live(colour, url, story, timing=Timing(idle_ping=0.1)) == {app_name: b"document"}


@in_every_colour
def test_a_server_that_stalls_is_left_and_found_again(colour: str, own_server: EmbeddedServer) -> None:
    brisk = Timing(
        connect=0.2, reply=0.2, idle_ping=0.1, backoff_start=0.01, backoff_cap=0.05, breaker_reset=0.05
    )

    def stall_and_settle() -> None:
        with redis.Redis.from_url(own_server.url) as client:
            until(lambda: listeners(client, "k"))
            os.kill(own_server.pid, signal.SIGSTOP)
            time.sleep(0.8)  # longer than all the limits together
            os.kill(own_server.pid, signal.SIGCONT)
            settle(client, "k")

    async def story(here: Here) -> dict[str, bytes]:
        return await here.results.wait(["k"], timeout=30)

    with meanwhile(stall_and_settle):
        assert live(colour, own_server.url, story, timing=brisk) == {"k": b"done"}


@in_every_colour
def test_a_broker_that_went_away_is_told_at_the_time_out(colour: str, own_server: EmbeddedServer) -> None:
    def away() -> None:
        with redis.Redis.from_url(own_server.url) as client:
            until(lambda: listeners(client, "k"))
        own_server.kill()

    async def story(here: Here) -> None:
        with pytest.raises(BrokerUnavailable):
            await here.results.wait(["k"], timeout=1)

    with meanwhile(away):
        live(colour, own_server.url, story, timing=QUICK)


@in_every_colour
def test_a_broker_that_was_never_there_is_unavailable(colour: str) -> None:
    async def story(here: Here) -> None:
        await here.results.wait(["k"], timeout=0.3)

    with pytest.raises(BrokerUnavailable):
        live(colour, "unix:///nonexistent/none.sock", story, timing=NOBODY)


@in_every_colour
def test_one_who_may_not_listen_is_told_at_once(
    colour: str, url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    words = ("on", ">secret", f"~{app_name}*", "resetchannels", "+@all")
    client: Any = redis_client
    everywhere = {"target_nodes": "all"} if isinstance(client, redis.RedisCluster) else {}
    execute = partial(client.execute_command, **everywhere)
    execute("ACL", "SETUSER", app_name, *words)
    endpoint = Endpoint.from_url(url, username=app_name, password="secret")

    async def story(here: Here) -> None:
        await here.results.wait([app_name], timeout=30)

    try:
        with pytest.raises(BrokerDenied):
            live(colour, endpoint, story)
    finally:
        execute("ACL", "DELUSER", app_name)
