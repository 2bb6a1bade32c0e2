"""Recovery: whatever happens to an owner, its partitions go on in order, and it commits nothing more."""

import signal
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.streams.routing import find_partition
from tests.faults.connections.proxy import FaultyProxy
from tests.faults.streams.application import PARTITIONS
from tests.faults.streams.history import (
    Producer,
    count_outputs,
    find_faults,
    get_owners,
    get_partitions,
    is_shared,
    read_begun,
    read_outputs,
    read_state,
)
from tests.redis.commands.staff import Employee, Staff, staffed, wait_until
from tests.redis.worker.workers import until

TARGET = ("-m", "celery5", "-A", "tests.faults.streams.application:app")


@pytest.fixture
def own_staff(own_server: EmbeddedServer, app_name: str, tmp_path: Path) -> Iterator[Staff]:
    """Worker processes over a server of the test's own."""
    with staffed(own_server.url, app_name, tmp_path) as staff:
        yield staff


def launch(staff: Staff, name: str, **settings: Any) -> Employee:
    """Start a worker of the application."""
    command = [sys.executable, *TARGET, "worker", "start", "--name", name, "--log-level", "debug"]
    return staff.launch(command, **settings)


def start(staff: Staff, name: str, **settings: Any) -> Employee:
    """Start a worker of the application, and wait until it works."""
    one = launch(staff, name, **settings)
    wait_until(lambda: bool(one.lines("worker:started")) or one.process.poll() is not None)
    assert one.process.poll() is None, one.output.read_text()
    return one


def wait_processed(client: "redis.Redis", app: App, producer: Producer) -> None:
    """Wait until all that was sent has an output, and that nothing is wrong with them."""
    wait_until(lambda: count_outputs(client, app) >= sum(producer.sent.values()), within=15)
    assert find_faults(producer.sent, read_outputs(client, app), read_state(client, app)) == []


def find_customer(partition: int) -> str:
    """Return a customer whose records are in a partition."""
    return next(f"c{n}" for n in count() if find_partition(f"c{n}".encode(), PARTITIONS) == partition)


@pytest.mark.parametrize(("supervised", "lease", "within"), [(True, 10.0, 1.0), (False, 1.0, 3.0)])
def test_the_partitions_of_a_killed_worker_go_on_in_time_and_in_order(
    staff: Staff, redis_client: "redis.Redis", supervised: bool, lease: float, within: float
) -> None:
    app, producer = staff.app, Producer(staff.app)
    one, two = (start(staff, name, lease=lease) for name in ("one", "two"))
    wait_until(lambda: is_shared(redis_client, app, "one", "two"))
    producer.payments.send(*producer.make(rounds=200))
    orphaned = get_partitions(redis_client, app, "one")
    wait_until(lambda: {begun.partition for begun in read_begun(staff)} == set(range(8)))
    killed_at = time.time()
    if supervised:
        one.signal(signal.SIGKILL)
    else:
        one.lose_its_machine()
    taken = dict[int, float]()

    def has_taken_all() -> bool:
        for begun in read_begun(staff):
            if begun.pid == two.process.pid and begun.partition in orphaned:
                taken.setdefault(begun.partition, begun.at - killed_at)
        return taken.keys() == orphaned

    wait_until(has_taken_all)
    assert max(taken.values()) < within
    wait_processed(redis_client, app, producer)
    again = len(read_begun(staff)) - sum(producer.sent.values())
    assert 0 <= again <= 20 * len(orphaned)  # as many as were done and not committed yet


def test_an_owner_that_was_frozen_and_replaced_commits_nothing(
    staff: Staff, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    app, producer, gate = staff.app, Producer(staff.app, customers=1), tmp_path / "gate"
    one, two = (start(staff, name, lease=0.6) for name in ("one", "two"))
    wait_until(lambda: is_shared(redis_client, app, "one", "two"))
    owned = min(get_partitions(redis_client, app, "one"))
    producer.sent = {find_customer(owned): 0}
    producer.payments.send(*producer.make(rounds=5), *producer.make(gate=str(gate)))
    wait_until(lambda: len(read_begun(staff)) == 6)
    one.signal(signal.SIGSTOP)
    wait_until(lambda: get_owners(redis_client, app)[owned].startswith("two:"))
    wait_until(lambda: read_begun(staff)[-1].pid == two.process.pid)
    gate.touch()
    producer.payments.send(*producer.make(rounds=5))
    wait_processed(redis_client, app, producer)
    cursor = redis_client.hgetall(app.keys.for_stream("payments").partition("bill", owned))
    one.signal(signal.SIGCONT)  # and finishes what it had in hand
    wait_until(lambda: bool(one.lines("partition:lost") or one.lines("worker:restarted")))
    wait_until(lambda: is_shared(redis_client, app, "one", "two"))
    wait_processed(redis_client, app, producer)
    assert count_outputs(redis_client, app) == 11
    after: Any = redis_client.hgetall(app.keys.for_stream("payments").partition("bill", owned))
    assert after[b"cursor"] == cursor[b"cursor"]


@pytest.mark.parametrize("way", ["stalls", "refuses"])
async def test_an_owner_that_is_cut_off_from_redis_commits_nothing_when_it_is_back(
    staff: Staff, proxy: FaultyProxy, redis_client: "redis.Redis", way: str
) -> None:
    app, producer = staff.app, Producer(staff.app)
    one = launch(staff, "one", lease=0.8, broker=proxy.url)
    await until(lambda: bool(one.lines("worker:started")))
    two = launch(staff, "two", lease=0.8)
    await until(lambda: bool(two.lines("worker:started")))
    await until(lambda: is_shared(redis_client, app, "one", "two"))
    for _ in range(10):
        await producer.payments.asend(*producer.make(rounds=5))
    await until(lambda: len(read_begun(staff)) > 100)
    (proxy.stall if way == "stalls" else proxy.refuse)()
    await until(lambda: is_shared(redis_client, app, "two"))
    await until(lambda: {begun.partition for begun in read_begun(staff)[-20:]} != set())
    await producer.payments.asend(*producer.make(rounds=3))
    (proxy.resume if way == "stalls" else proxy.accept)()  # what it had sent arrives only now
    await until(lambda: is_shared(redis_client, app, "one", "two"))
    await producer.payments.asend(*producer.make(rounds=3))
    await trio.to_thread.run_sync(wait_processed, redis_client, app, producer)
    assert len(one.lines("worker:started")) + len(one.lines("partition:lost")) > 1


async def test_an_outage_while_state_is_read_is_no_failure_of_the_record(
    staff: Staff, proxy: FaultyProxy, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    app, producer, gate = staff.app, Producer(staff.app, customers=1), tmp_path / "gate"
    one = launch(staff, "one", broker=proxy.url)
    await until(lambda: bool(one.lines("worker:started")))
    await producer.payments.asend(*producer.make(gate=str(gate)))
    await until(lambda: len(read_begun(staff)) == 1)
    proxy.refuse()
    gate.touch()
    await until(lambda: bool(one.lines("processor:interrupted")))
    proxy.accept()
    await trio.to_thread.run_sync(wait_processed, redis_client, app, producer)
    assert one.lines("record:failed") == []
    assert len(read_begun(staff)) == 1


def test_after_a_restart_of_redis_all_go_on_where_they_were(
    own_staff: Staff, own_server: EmbeddedServer
) -> None:
    app, producer = own_staff.app, Producer(own_staff.app)
    with redis.Redis.from_url(own_server.url) as client:
        workers = [start(own_staff, name, lease=2.0) for name in ("one", "two")]
        wait_until(lambda: is_shared(client, app, "one", "two"))
        for _ in range(10):
            producer.payments.send(*producer.make(rounds=5))
        for number in range(2):
            wait_until(lambda number=number: len(read_begun(own_staff)) > 400 * (number + 1))  # type: ignore[misc]
            own_server.kill()
            own_server.revive()
        wait_processed(client, app, producer)
        assert [worker.process.poll() for worker in workers] == [None, None]


def test_a_record_that_blocks_the_loop_for_longer_than_the_lease_stays_where_it_is(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    app, producer = staff.app, Producer(staff.app)
    for name in ("one", "two"):
        start(staff, name, lease=0.6)
    wait_until(lambda: is_shared(redis_client, app, "one", "two"))
    before = get_owners(redis_client, app)
    producer.payments.send(producer.make_for("c1", block=3.0))
    producer.payments.send(*producer.make(rounds=2))
    wait_processed(redis_client, app, producer)
    assert get_owners(redis_client, app) == before
    assert len(read_begun(staff)) == sum(producer.sent.values())


def test_a_rolling_restart_of_named_workers_moves_no_partition(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    app, producer = staff.app, Producer(staff.app)
    names = ("one", "two", "three")
    workers = {name: start(staff, name) for name in names}
    wait_until(lambda: is_shared(redis_client, app, *names))
    shares = {name: get_partitions(redis_client, app, name) for name in names}
    for name in names:
        producer.payments.send(*producer.make(rounds=5))
        workers[name].signal(signal.SIGTERM)
        assert workers[name].wait() == 0
        for other in set(names) - {name}:
            assert get_partitions(redis_client, app, other) == shares[other]
        workers[name] = start(staff, name)
        wait_until(lambda: is_shared(redis_client, app, *names))
        assert {name: get_partitions(redis_client, app, name) for name in names} == shares
    wait_processed(redis_client, app, producer)
    assert len(read_begun(staff)) == sum(producer.sent.values())  # nothing was done twice
    for worker in workers.values():
        assert worker.lines("partition:lost") == []


def test_a_record_that_kills_its_workers_stops_its_own_partition_and_no_other(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    app, producer = staff.app, Producer(staff.app)
    poison = producer.make_for("c1", kills=True)
    bad = find_partition(b"c1", PARTITIONS)
    producer.payments.send(poison, *producer.make(rounds=200))
    for _ in range(3):
        launch(staff, "one", max_deliveries=3).wait()
    start(staff, "one", max_deliveries=3)
    fine = {
        name: last for name, last in producer.sent.items() if find_partition(name.encode(), PARTITIONS) != bad
    }
    wait_until(lambda: count_outputs(redis_client, app) >= sum(fine.values()))
    assert find_faults(fine, read_outputs(redis_client, app), read_state(redis_client, app)) == []
    (state,) = [stream for stream in app.streams.info() if stream.stream == "payments"]
    quarantined = {
        partition.partition: partition.why for partition in state.groups[0].partitions if partition.condition
    }
    assert quarantined.keys() == {bad}
    assert "3 workers have died at this record" in quarantined[bad]
    assert sum(begun.number == poison.number and begun.customer == "c1" for begun in read_begun(staff)) == 3


def test_a_second_worker_of_the_same_name_replaces_the_first(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    app, producer = staff.app, Producer(staff.app)
    one = start(staff, "one")
    wait_until(lambda: is_shared(redis_client, app, "one"))
    first = set(get_owners(redis_client, app).values())
    producer.payments.send(*producer.make(rounds=5))
    two = start(staff, "one")
    wait_until(lambda: len(one.lines("processor:replaced")) == 1)
    wait_until(lambda: is_shared(redis_client, app, "one"))
    assert first.isdisjoint(get_owners(redis_client, app).values())
    producer.payments.send(*producer.make(rounds=5))
    wait_processed(redis_client, app, producer)
    assert two.lines("processor:replaced") == []
    one.signal(signal.SIGTERM)
    assert one.wait() == 0
    assert is_shared(redis_client, app, "one")  # its end takes nothing from the second one
