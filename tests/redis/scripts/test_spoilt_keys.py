"""Spoilt keys: another program has written to the keys of an application, and no process of it ends."""

import asyncio
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import redis
import trio

from celery5.broker.call import Call
from celery5.broker.calls import cluster
from celery5.broker.drivers.on_asyncio import AsyncioRedis
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.drivers.parked import ParkedRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import EVENTS, Keys
from celery5.errors import UnreadableReply
from celery5.protocol.cluster.leadership import NO_RECORD
from tests.redis.commands.staff import _TARGET, Employee, Staff, wait_until
from tests.redis.worker.one_queue import Queue

KINDS = ("worker", "router", "scheduler")
ODD = b"\xff\xfe"


def _launched(staff: Staff, kind: str) -> Employee:
    command = [sys.executable, "-m", "celery5", *_TARGET, kind, "start"]
    return staff.launch(command, lease=1.0, log_level="debug")


def _is_ready(one: Employee, kind: str) -> bool:
    return bool(one.lines(f"{kind}:started"))


def _has_met_it(one: Employee, kind: str) -> bool:
    """Return whether it tries again and again to begin, or does without the keys."""
    return len(one.lines(f"{kind}:restarted")) >= 2 or bool(one.lines(f"{kind}:started"))


def _assert_alive(processes: Iterable[Employee]) -> None:
    for process in processes:
        assert process.process.poll() is None, process.output.read_text()[-3000:]


def _is_served(staff: Staff) -> None:
    (result,) = staff.app.send_many([staff.app.signature("nap", 0.0)])
    result.get(timeout=30)


def test_no_process_ends_for_spoilt_keys_and_all_continue_once_repaired(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    keys = staff.app.keys
    queue = keys.for_queue("default")
    running = [_launched(staff, kind) for kind in KINDS]
    for kind, running_process in zip(KINDS, running, strict=True):
        wait_until(partial(_is_ready, running_process, kind))
    _is_served(staff)

    # What can be passed over is: jobs run all the while.
    redis_client.zadd(queue.leases, {ODD: 1})
    redis_client.sadd(keys.queues, ODD)
    redis_client.sadd(keys.schedule_queues, ODD)
    redis_client.hset(keys.leader, "epoch", "nan")
    redis_client.hset(queue.limited_counts, ODD, ODD)
    wait_until(lambda: bool(running[0].lines("recoverer:recovered")))
    _is_served(staff)
    _assert_alive(running)

    # What cannot be used is waited for, by those that were there and by those that begin.
    spoilt = [
        queue.leases, queue.stream, keys.for_queue(EVENTS).leases, keys.paused, keys.limits, keys.queues,
        keys.schedule_queues, keys.leader, keys.subscriptions, keys.live_processes("scheduler"),
    ]  # fmt: skip
    with redis_client.pipeline() as pipe:
        for key in spoilt:
            pipe.delete(key)
            pipe.set(key, "x")
        pipe.execute()
    late = [_launched(staff, kind) for kind in KINDS]
    for kind, running_process in zip(KINDS, late, strict=True):
        wait_until(partial(_has_met_it, running_process, kind))
    wait_until(lambda: bool(running[0].lines("heartbeat:missed")))
    _assert_alive([*running, *late])
    assert not late[0].lines("worker:started")

    redis_client.delete(*spoilt)
    for kind, running_process in zip(KINDS, late, strict=True):
        wait_until(partial(_is_ready, running_process, kind))
    _is_served(staff)
    _assert_alive([*running, *late])
    redis_client.zrem(queue.leases, ODD)
    redis_client.hdel(queue.limited_counts, ODD)
    assert [process.output.read_text().count("Traceback") for process in [*running, *late]] == [0] * 6


def _refuse(_raw: object) -> object:
    raise ValueError("no number")


UNREADABLE: Call[object] = Call(("TIME",), _refuse)
READABLE: Call[object] = Call(("TIME",), len)


def test_a_reply_that_cannot_be_read_is_one_error_in_plain_python(url: str) -> None:
    driver = open_blocking(Endpoint.from_url(url), max_connections=1)
    with pytest.raises(UnreadableReply, match="the reply to TIME cannot be read"):
        driver.perform(UNREADABLE)
    with pytest.raises(UnreadableReply):
        driver.perform_all([READABLE, UNREADABLE])
    assert driver.perform(READABLE) == 2
    driver.close()


def test_a_reply_that_cannot_be_read_is_one_error_under_asyncio(url: str) -> None:
    async def main() -> object:
        driver = AsyncioRedis(Endpoint.from_url(url))
        with pytest.raises(UnreadableReply):
            await driver.perform(UNREADABLE)
        with pytest.raises(UnreadableReply):
            await driver.perform_all([READABLE, UNREADABLE])
        found = await driver.perform(READABLE)
        await driver.aclose()
        return found

    assert asyncio.run(main()) == 2


async def test_a_reply_that_cannot_be_read_is_one_error_under_trio_and_ends_no_connection(url: str) -> None:
    endpoint = Endpoint.from_url(url)
    driver = TrioRedis(endpoint=endpoint)
    parked = ParkedRedis(endpoint=endpoint, control=driver)
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        await nursery.start(parked.run)
        before = [driver.client_id, parked.client_id]
        for connection in (driver, parked):
            with pytest.raises(UnreadableReply):
                await connection.perform(UNREADABLE)
            assert await connection.perform(READABLE) == 2
        with pytest.raises(UnreadableReply):
            await driver.perform_all([READABLE, UNREADABLE])
        assert [driver.client_id, parked.client_id] == before
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("field", ["epoch", "beat", "since"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e400", "9" * 18, ODD, "", "x"])
def test_a_leader_whose_record_cannot_be_read_is_as_one_that_was_never_there(
    queue: Queue, app_name: str, redis_client: "redis.Redis", field: str, value: str | bytes
) -> None:
    keys = Keys(app_name)
    record: dict[Any, Any] = {"epoch": "0", "beat": "0", "leader": "", "since": "1", field: value}
    redis_client.hset(keys.leader, mapping=record)
    assert queue(cluster.get_leader(keys)).epoch == 0
    led = queue(cluster.claim_leadership(keys, "me", replaces=NO_RECORD, epoch=0))
    assert (led.leader, led.epoch > 0) == ("me", True)
    assert queue(cluster.get_leader(keys)) == led
