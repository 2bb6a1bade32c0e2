"""Outage: the server is away, or there and silent. Calls fail in time, and everything works again by itself."""

import os
import signal
import socket
from functools import partial

import pytest
import trio
import trio.testing

from celery5.broker.connection.link import (
    BreakerClosed,
    BreakerOpened,
    LinkConnected,
    LinkConnectFailed,
    LinkEnded,
    LinkEvent,
    LinkLost,
)
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.timing import Timing
from celery5.errors import BrokerUnavailable, CircuitOpen
from celery5.logs.log import Log
from celery5.processes.process_parts import ConnectionLog
from celery5.protocol.health.breaker import BreakerState
from tests.faults.conftest import BRISK, OpenLink
from tests.faults.connections.proxy import FaultyProxy
from tests.faults.worker.calls import get, incr, raw, until
from tests.redis.worker.workers import Lines

QUICK = Timing(
    connect=0.2, reply=0.15, idle_ping=0.1, backoff_start=0.005, backoff_cap=0.05, breaker_reset=0.05
)


async def test_run_gives_up_when_there_was_never_a_server() -> None:
    timing = Timing(first_connect=0.3, backoff_cap=0.1)
    start = trio.current_time()
    with pytest.raises(BrokerUnavailable, match="cannot be reached: Connection refused") as caught:
        await TrioRedis(endpoint=Endpoint.from_url("redis://127.0.0.1:1"), timing=timing).run()
    assert 0.1 < trio.current_time() - start < 5
    assert not caught.value.maybe_done


async def test_proxy_listens_from_the_moment_it_accepts_again(proxy: FaultyProxy) -> None:
    # No checkpoint anywhere, so no task of the proxy runs: the tests rely on it to dial at once.
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port), timeout=5)
    proxy.accept()
    socket.create_connection(("127.0.0.1", proxy.port), timeout=5).close()


async def test_run_gives_up_on_a_host_that_never_answers(proxy: FaultyProxy) -> None:
    proxy.stall()
    with pytest.raises(BrokerUnavailable, match="did not answer within"):
        await TrioRedis(
            endpoint=Endpoint.from_url(proxy.url), timing=Timing(connect=0.1, first_connect=0.3)
        ).run()


async def test_a_call_before_run_waits_for_it_and_says_so_in_the_end(
    proxy: FaultyProxy, app_name: str
) -> None:
    link = TrioRedis(endpoint=Endpoint.from_url(proxy.url), timing=QUICK)
    with pytest.raises(BrokerUnavailable, match="start its run"):
        await link.perform(get(app_name))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        assert await link.perform(incr(app_name)) == 1
        nursery.cancel_scope.cancel()
    with pytest.raises(BrokerUnavailable, match="closed"):
        await link.perform(get(app_name))


async def test_run_can_be_run_again(proxy: FaultyProxy, app_name: str) -> None:
    link = TrioRedis(endpoint=Endpoint.from_url(proxy.url), timing=QUICK)
    for times in (1, 2):
        async with trio.open_nursery() as nursery:
            await nursery.start(link.run)
            assert await link.perform(incr(app_name)) == times
            nursery.cancel_scope.cancel()
        assert not link.connected
    proxy.refuse()
    with pytest.raises(BrokerUnavailable):
        await link.run()
    proxy.accept()
    async with trio.open_nursery() as nursery:
        await nursery.start(link.run)
        assert await link.perform(incr(app_name)) == 3
        nursery.cancel_scope.cancel()


async def test_a_stalled_server_fails_the_call_in_time_and_is_used_again_when_it_answers(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    events: list[LinkEvent] = []
    link = await open_link(QUICK, watch=events.append)
    proxy.stall()
    start = trio.current_time()
    with pytest.raises(BrokerUnavailable, match=r"gave no answer within 0\.15 s") as caught:
        await link.perform(incr(app_name))
    assert caught.value.maybe_done
    assert 0.14 < trio.current_time() - start < 5
    proxy.resume()
    await until(lambda: link.connected)
    await until(lambda: proxy.seen[b"INCR"] == 1)
    assert await link.perform(get(app_name)) in {None, b"1"}
    (lost,) = [event for event in events if isinstance(event, LinkLost)]
    assert lost.failed == 1
    assert lost.silence >= 0.14, "from when the call was sent"


async def test_a_silent_dead_connection_is_noticed_although_nobody_calls(
    proxy: FaultyProxy, open_link: OpenLink
) -> None:
    link = await open_link(QUICK)
    await until(lambda: proxy.seen[b"PING"] >= 1)
    assert link.statistics().connects == 1
    proxy.stall()
    await until(lambda: not link.connected)


async def test_an_idle_connection_costs_next_to_nothing(proxy: FaultyProxy, open_link: OpenLink) -> None:
    link = await open_link(Timing(idle_ping=0.1))
    await trio.sleep(0.35)
    assert 2 <= proxy.seen[b"PING"] <= 4
    assert link.statistics().connects == 1


async def test_failures_open_the_breaker_and_calls_fail_at_once_until_the_server_is_back(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    events: list[LinkEvent] = []
    link = await open_link(BRISK, watch=events.append)
    proxy.refuse()
    await until(lambda: link.breaker is not BreakerState.CLOSED)
    start = trio.current_time()
    for _ in range(1000):
        with pytest.raises(CircuitOpen, match="circuit breaker open") as caught:
            await link.perform(incr(app_name))
        assert not caught.value.maybe_done
    assert trio.current_time() - start < 5
    proxy.accept()
    await until(lambda: link.connected)
    assert link.breaker is BreakerState.CLOSED
    assert await link.perform(incr(app_name)) == 1
    kinds = [type(event) for event in events]
    assert kinds[:3] == [LinkConnected, LinkLost, LinkConnectFailed]
    assert (kinds.count(BreakerOpened), kinds.count(BreakerClosed)) == (1, 1)


async def test_a_connection_that_breaks_again_soon_is_an_error_in_the_log(
    proxy: FaultyProxy, open_link: OpenLink
) -> None:
    events: list[LinkEvent] = []
    with Lines() as lines:
        log = ConnectionLog(log=Log(worker="w", app="a"))

        def watch(event: LinkEvent) -> None:
            events.append(event)
            log(event)

        link = await open_link(BRISK, watch=watch)
        for failures in (BRISK.breaker_failures + 4, 0):
            proxy.refuse()
            # Its probes fail, too, and each of them trips it again.
            await until(partial(_so_many, events, LinkConnectFailed, failures))
            await until(lambda: link.breaker is not BreakerState.CLOSED)
            proxy.accept()
            await until(lambda: link.connected)
        opened = lines.of("redis:breaker-opened")
    outages = lines.of("broker:disconnected"), lines.of("broker:reconnected")
    assert [line["level"] for line in opened] == ["debug", "error"]
    assert list(map(len, outages)) == [2, 2]
    assert all("is_error" not in line for line in opened)


def _so_many(events: list[LinkEvent], kind: type, count: int) -> bool:
    return [type(event) for event in events].count(kind) >= count


async def test_calls_that_wait_when_the_breaker_opens_are_told_at_once(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link(BRISK)
    proxy.lose_reply()
    caught: list[bool] = []

    async def call(*, repeatable: bool) -> None:
        with pytest.raises(CircuitOpen) as error:
            await link.perform(raw("GET", app_name, repeatable=repeatable))
        caught.append(error.value.maybe_done)

    async with trio.open_nursery() as nursery:
        # Sent, then cut off, and kept to be sent again: it may have run. The other one was never sent.
        nursery.start_soon(partial(call, repeatable=True))
        await until(lambda: not link.connected)
        nursery.start_soon(partial(call, repeatable=False))
    assert proxy.seen[b"GET"] == 1
    assert sorted(caught) == [False, True]


async def test_a_call_that_is_not_sent_in_time_fails_as_not_done(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    patient = Timing(reply=0.1, breaker_failures=1000, backoff_cap=0.05)
    link = await open_link(patient)
    proxy.refuse()
    await until(lambda: not link.connected)
    start = trio.current_time()
    with pytest.raises(BrokerUnavailable, match=r"not sent within 0\.1 s") as caught:
        await link.perform(incr(app_name))
    assert 0.09 < trio.current_time() - start < 5
    assert not caught.value.maybe_done


async def test_more_than_the_limit_does_not_wait_to_be_sent(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link(Timing(reply=0.5, breaker_failures=1000, max_unsent_bytes=100_000))
    proxy.refuse()
    await until(lambda: not link.connected)

    async def fill() -> None:
        with pytest.raises(BrokerUnavailable, match="not sent within"):
            await link.perform(raw("SET", app_name, b"x" * 90_000))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fill)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(BrokerUnavailable, match="wait to be sent already"):
            await link.perform(raw("SET", app_name, b"x" * 20_000))


async def test_a_killed_connection_comes_back_with_another_identity(
    open_link: OpenLink, app_name: str
) -> None:
    link, other = await open_link(), await open_link()
    first = link.client_id
    await other.perform(raw("CLIENT", "KILL", "ID", str(first)))
    await until(lambda: link.statistics().connects == 2)
    assert await link.perform(get(app_name)) is None
    assert link.client_id not in {first, other.client_id}


async def test_a_frozen_server_is_noticed_and_used_again_when_it_thaws(
    own_server: EmbeddedServer, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link(QUICK, url=own_server.url)
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        start = trio.current_time()
        with pytest.raises(BrokerUnavailable) as caught:
            await link.perform(incr(app_name))
        assert caught.value.maybe_done
        assert trio.current_time() - start < 5
        await until(lambda: link.breaker is not BreakerState.CLOSED)
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    thawed = trio.current_time()
    await until(lambda: link.connected, within=30)
    assert await link.perform(incr(f"{app_name}:after")) == 1
    assert trio.current_time() - thawed < 10


async def test_restarted_server_is_used_again_within_two_seconds(
    own_server: EmbeddedServer, open_link: OpenLink, app_name: str
) -> None:
    links = [await open_link(Timing(), url=own_server.url) for _ in range(5)]

    async def restarted() -> float:
        own_server.kill()
        await until(lambda: all(link.breaker is not BreakerState.CLOSED for link in links))
        await trio.to_thread.run_sync(own_server.revive)
        back = trio.current_time()
        for link in links:
            await until(lambda link=link: link.connected)  # type: ignore[misc]
            await link.perform(incr(app_name))
        return trio.current_time() - back

    took = [await restarted()]
    while took[-1] >= 2 and len(took) < 5:  # the machine stood still, which it does not do each time
        took.append(await restarted())
    assert took[-1] < 2, took


async def test_lost_connection_that_is_closed_reports_its_end_once(
    proxy: FaultyProxy,
) -> None:
    kinds: list[type[LinkEvent]] = []
    redis = TrioRedis(
        endpoint=Endpoint.from_url(proxy.url), timing=BRISK, watch=lambda event: kinds.append(type(event))
    )
    for ends_while_lost in (True, False):
        kinds.clear()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as around:
                await around.start(redis.run)
                if ends_while_lost:
                    proxy.refuse()
                    await until(lambda: LinkLost in kinds)
                scope.cancel()
        proxy.accept()
        assert kinds.count(LinkEnded) == ends_while_lost
