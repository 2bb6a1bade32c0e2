"""Waiting, blocking: many threads share one connection, and the one that reads may leave at any time."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.waiting.blocking import BlockingResultWaiter
from celery5.errors import BrokerUnavailable
from tests.redis.process.onlookers import clients, listeners, settle, until


@pytest.fixture
def results(url: str) -> Iterator[BlockingResultWaiter]:
    """Waiting on the shared server."""
    endpoint = Endpoint.from_url(url)
    one = BlockingResultWaiter(BlockingRedis(endpoint), endpoint)
    yield one
    one.close()


@pytest.mark.parametrize("seed", range(3))
def test_threads_share_one_connection_and_each_gets_its_own(own_server: EmbeddedServer, seed: int) -> None:
    endpoint = Endpoint.from_url(own_server.url)
    results = BlockingResultWaiter(BlockingRedis(endpoint), endpoint)
    keys = [f"key:{number}" for number in range(30)]
    with redis.Redis.from_url(own_server.url) as client, ThreadPoolExecutor(30) as threads:
        futures = {key: threads.submit(results.wait, [key], timeout=30) for key in keys}
        until(lambda: all(listeners(client, key) for key in keys))
        assert len([connection for connection in clients(client) if connection["sub"] != "0"]) == 1
        random.Random(seed).shuffle(keys)
        for key in keys:
            settle(client, key, key.encode())
        for key, future in futures.items():
            assert future.result(5) == {key: key.encode()}
        until(lambda: not client.pubsub_channels())
    results.close()


@pytest.mark.one_server("it looks into the waiter of one server")
def test_when_the_reading_thread_runs_out_of_time_another_reads_on(
    results: BlockingResultWaiter, app_name: str, redis_client: "redis.Redis"
) -> None:
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(results.wait, [f"{app_name}:never"], timeout=0.3)
        until(lambda: results._leader)
        second = threads.submit(results.wait, [app_name], timeout=30)
        assert first.result(5) == {}
        settle(redis_client, app_name)
        assert second.result(30) == {app_name: b"done"}


@pytest.mark.one_server("it looks into the waiter of one server")
def test_a_thread_that_only_follows_runs_out_of_time_too(
    results: BlockingResultWaiter, app_name: str, redis_client: "redis.Redis"
) -> None:
    with ThreadPoolExecutor(2) as threads:
        leading = threads.submit(results.wait, [app_name], timeout=30)
        until(lambda: results._leader)
        assert threads.submit(results.wait, [f"{app_name}:never"], timeout=0.1).result(30) == {}
        settle(redis_client, app_name)
        assert leading.result(30) == {app_name: b"done"}
    until(lambda: not listeners(redis_client, f"{app_name}:never"))
    assert results._leader is None
    assert not results._followers


@pytest.mark.one_server("it looks into the waiter of one server")
def test_two_who_wait_for_the_same_both_get_it(
    results: BlockingResultWaiter, app_name: str, redis_client: "redis.Redis"
) -> None:
    with ThreadPoolExecutor(5) as threads:
        futures = [threads.submit(results.wait, [app_name], timeout=30) for _ in range(5)]
        until(lambda: len(results._followers) == 5)
        settle(redis_client, app_name)
        assert [future.result(30) for future in futures] == [{app_name: b"done"}] * 5


def test_threads_wait_on_through_cuts_of_their_connection(own_server: EmbeddedServer) -> None:
    endpoint = Endpoint.from_url(own_server.url)
    results = BlockingResultWaiter(BlockingRedis(endpoint), endpoint)
    keys = [f"key:{number}" for number in range(12)]
    with redis.Redis.from_url(own_server.url) as client, ThreadPoolExecutor(12) as threads:
        futures = [threads.submit(results.wait, [key], timeout=30) for key in keys]
        for key in keys:
            until(
                lambda: all(
                    listeners(client, result_key) for result_key in keys if not client.exists(result_key)
                )
            )
            client.client_kill_filter(_type="pubsub")
            settle(client, key)
        assert [future.result(5) for future in futures] == [{key: b"done"} for key in keys]
    results.close()


@pytest.mark.one_server("it uses the waiter of one server")
def test_nobody_waits_without_a_limit_for_a_broker_that_refuses(url: str, app_name: str) -> None:
    endpoint = Endpoint.from_url(url, username=app_name, password="wrong")
    results = BlockingResultWaiter(BlockingRedis(endpoint), endpoint)
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(results.wait, [app_name], timeout=None) for _ in range(3)]
        for future in futures:
            assert "refuses" in str(future.exception(5))


def test_an_old_outage_is_not_held_against_a_new_wait(own_server: EmbeddedServer) -> None:
    endpoint = Endpoint.from_url(own_server.url)
    results = BlockingResultWaiter(BlockingRedis(endpoint), endpoint)
    own_server.kill()
    with pytest.raises(BrokerUnavailable):
        results.wait(["k"], timeout=0.1)
    own_server.revive()
    with redis.Redis.from_url(own_server.url) as client:
        settle(client, "k")
    assert results.wait(["k"], timeout=30) == {"k": b"done"}
    assert results.wait(["none"], timeout=0.05) == {}
    results.close()


@pytest.mark.one_server("it uses the waiter of one server")
def test_waiting_starts_no_thread(results: BlockingResultWaiter, app_name: str) -> None:
    before = threading.active_count()
    results.wait([app_name], timeout=0.05)
    assert threading.active_count() == before
