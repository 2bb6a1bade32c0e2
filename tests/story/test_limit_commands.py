"""Limit commands: what is imposed from the terminal, and how queues and jobs are told of then.

Floor: tests. Reads: what the commands print. Writes: jobs of the application `shop`, what is imposed on its tasks.
"""

import json
import sys
from collections.abc import Iterator

import pytest

from celery5 import JobState
from celery5.broker.call import Call
from tests.story.commands import Serving, until
from tests.story.conftest import Desk


@pytest.fixture(autouse=True)
def nothing_stays(desk: Desk) -> Iterator[None]:
    """What is imposed outlives workers: it goes with the test."""
    yield
    keys = desk.app.keys
    desk.app.perform(Call(("DEL", keys.limits, keys.suspended), int), instead="")


def test_running_and_held_mean_the_same_wherever_queues_are_told_of(desk: Desk) -> None:
    shop = sys.modules["shop"]
    desk.app.limits.suspend(shop.add, why="the bank is down", by="ann")
    with Serving("-A", "shop", "worker", "start", cwd=desk.folder).ready():
        running, *held = shop.stuck.delay(), shop.add.delay(1, 2), shop.add.delay(3, 4)
        until(lambda: running.status() is JobState.EXECUTING)
        until(lambda: all(each.status() is JobState.HELD for each in held))
        told = desk("info", "--json"), desk("info"), desk("queue", "list", "--json"), desk("queue", "list")
        assert running.revoke()
    queue = json.loads(told[0])["queues"]["default"]
    assert (queue["running"], queue["held"], queue["waiting"]) == (1, 2, 0)
    assert [each["running"] for each in queue["workers"]] == [1]
    assert "gated" not in told[0]
    row, *_ = json.loads(told[2])
    assert (row["running"], row["held"], row["waiting"]) == (1, 2, 0)
    for shown in (told[1], told[3]):
        rows = [line.split()[:4] for line in shown.splitlines()]
        assert rows[rows.index(["queue", "waiting", "running", "held"]) + 1] == ["default", "0", "1", "2"]
