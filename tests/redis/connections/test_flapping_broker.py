"""Flapping: a server that freezes and goes on, again and again, under workers with long jobs, of which nobody dies."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from celery5 import gather
from celery5.broker.servers.embedded import EmbeddedServer
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.connections.test_outages import send

LEASE = 1.5


@contextmanager
def frozen(server: EmbeddedServer) -> Iterator[None]:
    """The server's process is stopped while the block lasts; what is sent to it runs when it goes on."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def flaps(seed: int) -> list[tuple[float, float]]:
    """Seconds up, and seconds frozen, in leases: first the pattern by which healthy workers were once judged dead, then
    at random."""
    chance = random.Random(seed)
    at_random = [(chance.uniform(0.1, 2.0), chance.uniform(0.4, 1.8)) for _ in range(3)]
    return [(0.87, 1.35)] * 2 + at_random


@pytest.mark.parametrize("seed", [20261122])
def test_however_the_server_flaps_no_job_runs_twice_while_nobody_died(
    own_staff: Staff, own_server: EmbeddedServer, tmp_path: Path, seed: int
) -> None:
    """About 15 s."""
    gate = tmp_path / "gate"
    workers = [own_staff.start(lease=LEASE, concurrency=4) for _ in range(3)]
    sent = send(own_staff, "gate", str(gate), count=12)
    wait_until(lambda: len(own_staff.notes()) == 12)
    for up, down in flaps(seed):
        time.sleep(up * LEASE)
        with frozen(own_server):
            time.sleep(down * LEASE)
    time.sleep(LEASE)  # whoever was to be recovered by now has been
    gate.touch()
    gather(sent, timeout=60, return_exceptions=False)
    assert Counter(note.job for note in own_staff.notes()) == dict.fromkeys([job.id for job in sent], 1)
    assert [worker.lines("recoverer:recovered") for worker in workers] == [[], [], []]
    assert [worker.lines("worker:restarted") for worker in workers] == [[], [], []]


def test_a_worker_that_died_in_an_outage_is_recovered_after_it(
    own_staff: Staff, own_server: EmbeddedServer, tmp_path: Path
) -> None:
    """With its machine, so that nobody but the others can tell, and by no lease but its own."""
    gate = tmp_path / "gate"
    victim = own_staff.start("--log-level", "debug", lease=LEASE, concurrency=4)
    sent = send(own_staff, "gate", str(gate), count=4)
    wait_until(lambda: len(own_staff.notes()) == 4)
    others = [own_staff.start(lease=LEASE, concurrency=4) for _ in range(2)]
    names = {worker.lines("worker:boot-started")[0]["name"] for worker in others}
    with frozen(own_server):
        victim.lose_its_machine()
        time.sleep(2 * LEASE)
    gate.touch()
    gather(sent, timeout=30, return_exceptions=False)
    assert Counter(note.job for note in own_staff.notes()) == dict.fromkeys([job.id for job in sent], 2)
    assert [worker.lines("worker:restarted") for worker in others] == [[], []]
    with redis.Redis.from_url(own_server.url, decode_responses=True) as client:
        left = own_staff.app.queue("default").leases
        wait_until(lambda: set(client.zrange(left, 0, -1)) == names)
