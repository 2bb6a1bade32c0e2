"""Failovers under load: senders of three colours, a worker with a workflow and a processor of a stream.

By day the primary is killed once. `nox -s nemesis` also stops it without an end, has the sentinels change it, and does
all of that several times.
"""

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import trio

from celery5 import App, chain
from celery5.errors import BrokerError, BrokerUnavailable, NotReplicated
from celery5.streams import StreamEvents
from tests.night import NIGHTLY
from tests.redis.worker.workers import LEASE, until, working
from tests.sentinel_servers import DOWN_AFTER_MS, WatchedServers, watched_servers

HOW = ["killed", "frozen", "changed"] if NIGHTLY else ["killed"]
ROUNDS = 4 if NIGHTLY else 1
PAUSE = 0.02
"""Seconds between two jobs of a sender."""
CONSUMING_AGAIN = DOWN_AFTER_MS / 1000 + 8.0
"""Seconds from the end of the primary within which jobs run again: the vote of the sentinels takes the most of it."""
REPLY_LIMIT = 10.0
"""Seconds more where the primary hangs: so long does a sender wait for its reply."""


@pytest.fixture(scope="module")
def servers(server_binary: str | None) -> Iterator[WatchedServers]:
    """A primary with two replicas, and three sentinels."""
    with watched_servers(server_binary, replicas=2) as servers:
        yield servers


class Sent:
    """What senders have sent: the jobs whose sending returned when a replica had them."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.errors = Counter[str]()
        self.stopped = threading.Event()

    def record(self, error: BrokerError) -> None:
        """Record that sending failed. Only what the failover explains is expected."""
        self.errors[type(error).__name__] += 1
        if not isinstance(error, BrokerUnavailable | NotReplicated):
            raise error


async def send_on_trio(task: Any, sent: Sent) -> None:
    number = 0
    while not sent.stopped.is_set():
        number += 1
        try:
            await task.adelay(f"trio-{number}")
            sent.ids.append(f"trio-{number}")
        except BrokerError as error:
            sent.record(error)
        await trio.sleep(PAUSE)


async def send_on_asyncio(task: Any, sent: Sent) -> None:
    number = 0
    while not sent.stopped.is_set():
        number += 1
        try:
            await task.adelay(f"asyncio-{number}")
            sent.ids.append(f"asyncio-{number}")
        except BrokerError as error:
            sent.record(error)
        await asyncio.sleep(PAUSE)


def send_blocking(task: Any, sent: Sent) -> None:
    number = 0
    while not sent.stopped.is_set():
        number += 1
        try:
            task.delay(f"blocking-{number}")
            sent.ids.append(f"blocking-{number}")
        except BrokerError as error:
            sent.record(error)
        time.sleep(PAUSE)


def fail(servers: WatchedServers, how: str) -> None:
    """Have another server become the primary."""
    before = servers.primary
    if how == "changed":
        servers.fail_over()
        return
    if how == "killed":
        before.kill()
    else:
        before.send_signal(signal.SIGSTOP)
    servers.wait_for_another(before)


class Shop:
    """An application, and what its jobs and its processor have done."""

    def __init__(self, name: str, url: str) -> None:
        self.app = app = App(name, broker=url, lease=LEASE, replicas=1, cpu_slots=4, concurrency=20)
        self.runs, self.billed, self.times = Counter[str](), Counter[str](), list[float]()
        self.orders = app.stream("orders", dict, by=lambda order: order["customer"], partitions=2)
        self.job = app.task(self._run)
        self.step = app.task(_add_one)
        app.processor(self.orders, name="bill")(self._bill)

    async def _run(self, name: str) -> str:
        self.runs[name] += 1
        self.times.append(time.monotonic())
        return name

    async def _bill(self, events: StreamEvents[dict[str, str]]) -> None:
        async for order in events.records():
            spent = await events.state.get(order["customer"], 0)
            events.state.set(order["customer"], spent + 1)
            self.billed[order["customer"]] = spent + 1


async def _add_one(number: int) -> int:
    await trio.sleep(0.05)
    return number + 1


@pytest.mark.parametrize("how", HOW)
async def test_a_failover_loses_no_job_that_a_replica_had(
    servers: WatchedServers, app_name: str, how: str
) -> None:
    shop = Shop(app_name, servers.url)
    sent, workflows, times, step = Sent(), list[Any](), shop.times, shop.step
    async with working(shop.app), sending(shop.job, sent):
        await until(lambda: len(shop.runs) > 30)
        for _ in range(ROUNDS):
            workflows.append(await chain(step.s(0), step.s(), step.s(), step.s()).astart())
            await shop.orders.asend(*({"customer": str(number % 5)} for number in range(50)))
            began = time.monotonic()
            await trio.to_thread.run_sync(fail, servers, how)
            await until(lambda began=began: times[-1] > max(began + 1, time.monotonic() - 0.5))  # type: ignore[misc]
            assert first_after_gap(times, began) < CONSUMING_AGAIN + (REPLY_LIMIT if how == "frozen" else 0)
            await trio.to_thread.run_sync(servers.revive)
        sent.stopped.set()
        await until(lambda: not set(sent.ids) - set(shop.runs))
        assert [await run.aget(timeout=30) for run in workflows] == [4] * ROUNDS
        await until(lambda: sum(shop.billed.values()) == 50 * ROUNDS)
    shop.app.close()


@asynccontextmanager
async def sending(task: Any, sent: Sent) -> AsyncGenerator[None]:
    """Send jobs in three colours during the block."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_on_trio, task, sent)
        nursery.start_soon(trio.to_thread.run_sync, send_blocking, task, sent)
        nursery.start_soon(trio.to_thread.run_sync, lambda: asyncio.run(send_on_asyncio(task, sent)))
        try:
            yield
        finally:
            sent.stopped.set()


def first_after_gap(times: list[float], began: float) -> float:
    """Return how long after `began` the longest time without a job was over."""
    later = [began, *(at for at in times if at > began)]
    gaps = [(after - before, after) for before, after in pairwise(later)]
    return max(gaps)[1] - began
