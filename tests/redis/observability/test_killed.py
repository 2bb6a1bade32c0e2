"""Whoever is killed: what was reported counts once, and of the rest no more is lost than since the last report."""

import signal
from functools import partial

import redis

from tests.redis.commands.staff import Employee, Staff, wait_until

INTERVAL = 0.3
"""Seconds between reports."""


def count_history(staff: Staff) -> int:
    """How many jobs the history has."""
    return sum(
        count
        for point in staff.app.metrics.history("default")
        for task in point.tasks
        for state, count in task.counts.items()
        if state == "SUCCESS"
    )


def test_a_killed_worker_takes_no_more_with_it_than_it_has_not_reported(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    workers = [staff.start(metrics_interval=INTERVAL) for _ in range(3)]

    def find_turn() -> list[Employee]:
        """Return the worker whose turn it is to roll reports up."""
        turn = redis_client.get(staff.app.keys.metrics_turn)
        assert not isinstance(turn, str)
        return [worker for worker in workers if f":{worker.process.pid}" in (turn or b"").decode()]

    for turn in range(1, 4):
        staff.app.send_many([staff.app.tasks["quiet"].s(number) for number in range(200)])
        wait_until(partial(has_counted, staff, 200 * turn))
        wait_until(lambda: bool(find_turn()))
        (killed,) = find_turn()
        killed.signal(signal.SIGKILL)
        workers.remove(killed)
        workers.append(staff.start(metrics_interval=INTERVAL))
    assert count_history(staff) == 600


def has_counted(staff: Staff, count: int) -> bool:
    """Whether the history has so many jobs."""
    return count_history(staff) == count
