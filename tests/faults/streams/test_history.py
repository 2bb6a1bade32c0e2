"""History: random kills, freezes, cuts and rebalances with a seed; then each record has counted once, in its order.

The control sends its outputs by itself, apart from the commit. It must fail at the same judge.
"""

import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

from celery5.broker.servers.embedded import EmbeddedServer
from tests.faults.connections.proxy import FaultyProxy
from tests.faults.streams.application import PARTITIONS, Total
from tests.faults.streams.history import (
    GROUP,
    Producer,
    find_faults,
    read_outputs,
    read_state,
)
from tests.night import NIGHTLY
from tests.redis.commands.staff import Employee, Staff, staffed
from tests.redis.worker.workers import until

TARGET = ("-m", "celery5", "-A", "tests.faults.streams.application:app")
LEASE = 0.8
SECONDS = 12.0
"""For which faults strike, at most; half of them by day where nothing goes wrong before."""
SEEDS = (3, 17) if NIGHTLY else (3,)
GOOD = [Total("c", 1, 1), Total("c", 2, 3), Total("c", 3, 6)]
"""The outputs of a customer who has sent three records."""


@dataclass
class Post:
    """A place for a worker: the process that is there now, and its proxy."""

    proxy: FaultyProxy
    worker: Employee


class Strikes:
    """Three workers, each behind its own proxy, and what is done to them."""

    def __init__(self, staff: Staff, server: EmbeddedServer, seed: int) -> None:
        self._staff = staff
        self._server = server
        self._chance = random.Random(seed)
        self._names = (f"w{number}" for number in count())
        self._posts: list[Post] = []
        self.struck: list[str] = []

    async def run(self, nursery: trio.Nursery, seconds: float, is_enough: Callable[[], bool]) -> None:
        """Start the workers and strike them until the time is over, or that is enough; then all is well again."""
        for _ in range(3):
            proxy = FaultyProxy(str(self._server.socket))
            await nursery.start(proxy.run)
            self._posts.append(Post(proxy, self._hire(proxy)))
        await until(lambda: all(post.worker.lines("worker:started") for post in self._posts))
        with trio.move_on_after(seconds):
            while not is_enough():
                strike = self._chance.choice(
                    (self._kill, self._lose, self._freeze, self._cut, self._rebalance)
                )
                post = self._chance.choice(self._posts)
                self.struck.append(strike.__name__)
                with trio.CancelScope(shield=True):
                    await strike(post)
                await trio.sleep(self._chance.uniform(0.1, 0.5))

    def _hire(self, proxy: FaultyProxy) -> Employee:
        command = [sys.executable, *TARGET, "worker", "start", "--name", next(self._names)]
        return self._staff.launch(
            [*command, "--log-level", "debug"],
            lease=LEASE,
            grace_period=1.0,
            broker=proxy.url,
            max_deliveries=1000,
        )

    async def _kill(self, post: Post) -> None:
        post.worker.signal(signal.SIGKILL)
        await trio.to_thread.run_sync(post.worker.wait)
        post.worker = self._hire(post.proxy)

    async def _lose(self, post: Post) -> None:
        if post.worker.lines("sidecar:started"):
            await trio.to_thread.run_sync(post.worker.lose_its_machine)
            post.worker = self._hire(post.proxy)

    async def _freeze(self, post: Post) -> None:
        post.worker.signal(signal.SIGSTOP)
        await trio.sleep(self._chance.uniform(0.2, 3.0) * LEASE)
        post.worker.signal(signal.SIGCONT)

    async def _cut(self, post: Post) -> None:
        way, back = self._chance.choice(
            ((post.proxy.stall, post.proxy.resume), (post.proxy.refuse, post.proxy.accept))
        )
        way()
        await trio.sleep(self._chance.uniform(0.2, 3.0) * LEASE)
        back()

    async def _rebalance(self, post: Post) -> None:
        post.worker.signal(signal.SIGTERM)
        await trio.to_thread.run_sync(post.worker.wait)
        post.worker = self._hire(post.proxy)


def is_all_done(client: "redis.Redis", producer: Producer) -> bool:
    """Whether all that was sent is committed, and all outputs are delivered."""
    keys = producer.payments.keys
    for partition in range(PARTITIONS):
        tail: Any = client.xrevrange(keys.log(partition), count=1)
        cursor = client.hget(keys.partition(GROUP, partition), "cursor")
        if (tail and cursor != tail[0][0]) or client.xlen(keys.outbox(GROUP, partition)):
            return False
    return True


async def strike_while_sending(
    seed: int, server: EmbeddedServer, staff: Staff, *, until_doubled: bool = False
) -> list[str]:
    """Strike workers while records are sent. Return what is wrong with the outputs and the state in the end.

    Args:
        seed: What decides who is struck, when and how.
        server: Where the records are.
        staff: Who starts the workers.
        until_doubled: End when the first output is doubled, instead of when the time is over and all is done.
    """
    producer, strikes, is_over = Producer(staff.app, customers=30), Strikes(staff, server, seed), trio.Event()

    async def produce() -> None:
        while not is_over.is_set():
            await producer.payments.asend(*producer.make(rounds=4))
            with trio.move_on_after(0.1):
                await is_over.wait()

    with redis.Redis.from_url(server.url) as client:

        def is_doubled() -> bool:
            return until_doubled and any(
                fault.startswith("double: ")
                for fault in find_faults(producer.sent, read_outputs(client, staff.app), {})
            )

        async with trio.open_nursery() as proxies:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(produce)
                await strikes.run(proxies, SECONDS if NIGHTLY or until_doubled else SECONDS / 2, is_doubled)
                is_over.set()
            await until(lambda: is_doubled() or is_all_done(client, producer), within=60)
            proxies.cancel_scope.cancel()
        faults = find_faults(producer.sent, read_outputs(client, staff.app), read_state(client, staff.app))
    return faults and [*faults, f"after {sum(producer.sent.values())} records and {' '.join(strikes.struck)}"]


@pytest.fixture
def staff(own_server: EmbeddedServer, app_name: str, tmp_path: Path) -> Iterator[Staff]:
    """Worker processes over a server of the test's own."""
    with staffed(own_server.url, app_name, tmp_path) as staff:
        yield staff


@pytest.mark.nemesis
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", SEEDS)
async def test_random_faults_count_each_record_once_in_key_order(
    staff: Staff, own_server: EmbeddedServer, seed: int
) -> None:
    assert await strike_while_sending(seed, own_server, staff) == []


@pytest.mark.nemesis
@pytest.mark.timeout(180)
async def test_the_control_that_sends_apart_from_the_commit_is_found_out(
    staff: Staff, own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAM_CONTROL", "1")
    faults = await strike_while_sending(SEEDS[0], own_server, staff, until_doubled=True)
    assert any(fault.startswith("double: ") for fault in faults)


# ---- the judge: each fault in a history that has nothing else wrong


def test_a_history_with_nothing_wrong_is_found_to_be_so() -> None:
    assert find_faults({"c": 3}, GOOD, {"c": 6}) == []


@pytest.mark.parametrize(
    ("outputs", "state", "kinds"),
    [
        ([GOOD[0], GOOD[1], GOOD[1], GOOD[2]], 6, ["double"]),
        ([GOOD[0], GOOD[2]], 6, ["lost"]),
        ([GOOD[0], GOOD[2], GOOD[1]], 6, ["order"]),
        ([GOOD[0], GOOD[1], Total("c", 3, 5)], 6, ["total"]),
        (GOOD, 9, ["state"]),
    ],
)
def test_each_thing_that_is_wrong_is_found(outputs: list[Total], state: int, kinds: list[str]) -> None:
    assert [fault.partition(":")[0] for fault in find_faults({"c": 3}, outputs, {"c": state})] == kinds
