"""Limits and deaths: workers are killed at random while limited jobs run; no more run than may, ever, and all end
(I8)."""

import random
import signal
import time

import pytest
import redis

from celery5 import AsyncResult, gather
from tests.redis.commands.staff import Employee, Staff, wait_until
from tests.redis.limits.test_limits import assert_in_time

MOST = 2
"""How many `narrow` jobs may run at once."""
RATE = 20
"""How many `paced` jobs may begin in a second."""


def send(staff: Staff, task: str, seconds: float, count: int) -> list[AsyncResult[int]]:
    """Send jobs."""
    return staff.app.send_many([staff.app.signature(task, seconds) for _ in range(count)])


def crowd(staff: Staff, deaths: dict[int, float]) -> int:
    """How many jobs ran at once, at most. One whose worker was killed ended with that."""
    ends = {(end.job, end.pid, end.attempt): end.at for end in staff.notes("end")}
    changes: list[tuple[float, int]] = []
    for note in staff.notes("begin"):
        end = ends.get((note.job, note.pid, note.attempt), deaths.get(note.pid))
        assert end is not None, note
        changes += [(note.at, 1), (end, -1)]
    most = now = 0
    for _at, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize("seed", range(2))
def test_no_more_run_than_may_while_workers_are_killed_and_all_are_run(
    staff: Staff, redis_client: "redis.Redis", seed: int
) -> None:
    dice, deaths = random.Random(seed), dict[int, float]()
    crew = [staff.start(lease=1.0, concurrency=4) for _ in range(3)]
    sent = send(staff, "narrow", 0.05, 120)
    for _ in range(5):
        time.sleep(dice.uniform(0.1, 0.5))
        victim: Employee = crew.pop(dice.randrange(len(crew)))
        # Before it: its sidecar frees the slots as soon as it is dead, which may be long before we hear of that.
        deaths[victim.process.pid] = time.time()
        victim.signal(signal.SIGKILL)
        victim.wait()
        crew.append(staff.start(lease=1.0, concurrency=4))
    gather(sent, timeout=40)
    assert crowd(staff, deaths) <= MOST
    keys = staff.app.queue("default")
    wait_until(lambda: not redis_client.exists(keys.slots, keys.slot_counts, keys.limited_counts))


def test_a_death_frees_the_slots_of_the_dead_at_once(staff: Staff, redis_client: "redis.Redis") -> None:
    first = staff.start(lease=1.0, concurrency=4)
    held = send(staff, "narrow", 60, 2)
    wait_until(lambda: len(staff.notes()) == 2)
    second = staff.start(lease=1.0, concurrency=4)
    sent = send(staff, "narrow", 0.01, 4)
    wait_until(lambda: redis_client.hget(staff.app.queue("default").limited_counts, "narrow") == b"4")
    assert len(staff.notes()) == 2
    first.signal(signal.SIGKILL)
    # The two that it had are put back behind the four that waited; these take the slots.
    gather(sent, timeout=30)
    for job in held:
        job.revoke()
    second.signal(signal.SIGTERM)


def test_a_rate_is_never_exceeded_while_workers_are_killed(staff: Staff, redis_client: "redis.Redis") -> None:
    crew = [staff.start(lease=1.0, concurrency=8) for _ in range(2)]
    since, sent = time.time(), send(staff, "paced", 0.1, 90)
    wait_until(lambda: len(staff.notes()) > 25)
    crew[0].signal(signal.SIGKILL)
    staff.start(lease=1.0, concurrency=8)
    gather(sent, timeout=30)
    assert_in_time([note.at for note in staff.notes("begin")], most=RATE, since=since)
