"""Commands that destroy: each asks at a terminal, and needs `--yes` where nobody can answer."""

import os
import pty
import subprocess
from typing import Any

import pytest

from celery5.operations.table import OPERATIONS
from celery5.streams import Record
from tests.house.commands_table import ELSEWHERE
from tests.redis.dead_letters.many_dead_letters import add_dead_letters
from tests.story.cli.commands import COMMAND, LIMIT, celery5, environment
from tests.story.conftest import Desk

DESTROYING = {
    "bulk:revoke": "bulk revoke slow",
    "dlq:purge": "dlq purge --task shop.*",
    "dlq:purge-records": "dlq purge --stream orders --group bill --older-than 7d",
    "event:unsubscribe": "event unsubscribe shop.Paid shop.add",
    "queue:purge": "queue purge slow",
    "schedule:remove": "schedule remove nightly",
    "stream:reset": "stream reset orders bill",
}
"""Each operation that destroys, with its command; what narrows the selection makes no difference."""


class Order(Record):
    """A record of the stream."""

    order_id: int


@pytest.fixture
def stocked(desk: Desk, redis_client: Any) -> Desk:
    """A shop that has something of each kind that a command destroys."""
    desk.app.stream("orders", Order, by="order_id").send(Order(order_id=1))
    redis_client.hset(desk.app.keys.for_stream("orders").groups, "bill", "")
    add_dead_letters(desk.app, redis_client, "a")
    desk.app.send_many([desk.app.tasks["shop.multiply"].s(2, 3)])
    desk.app.schedule.add(desk.app.tasks["shop.add"].s(1, 2), 3600.0, name="nightly")
    return desk


def count_left(desk: Desk, redis_client: Any) -> list[int]:
    queues = [desk.app.queue("default").dead, desk.app.queue("slow").stream]
    return [*(redis_client.xlen(key) for key in queues), len(desk.app.schedule.list())]


def test_each_operation_that_destroys_is_tried_here() -> None:
    assert DESTROYING.keys() == {name for name, operation in OPERATIONS.items() if operation.destroys}
    commands = {ELSEWHERE.get(name, name.replace(":", " ")) for name in DESTROYING}
    assert {" ".join(line.split()[:2]) for line in DESTROYING.values()} == commands


@pytest.mark.parametrize("name", DESTROYING)
def test_a_command_that_destroys_needs_yes_without_a_terminal(
    stocked: Desk, redis_client: Any, name: str
) -> None:
    words = DESTROYING[name].split()
    before = count_left(stocked, redis_client)
    refused = celery5("-A", "shop", *words, cwd=stocked.folder)
    assert (refused.code, refused.out) == (2, "")
    assert refused.error.startswith("Error: this would ")
    assert refused.error.endswith(": add --yes")
    assert count_left(stocked, redis_client) == before == [1, 1, 1]


@pytest.mark.parametrize("name", DESTROYING)
def test_a_command_that_destroys_asks_at_a_terminal(stocked: Desk, redis_client: Any, name: str) -> None:
    words = DESTROYING[name].split()
    before = count_left(stocked, redis_client)
    parent, child = pty.openpty()
    os.write(parent, b"n\n")
    ended = subprocess.run(
        [*COMMAND, "-A", "shop", *words],
        cwd=stocked.folder,
        env=environment(),
        stdin=child,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    os.close(parent)
    os.close(child)
    assert ended.returncode != 0
    assert "? [y/N]: " in ended.stderr
    assert count_left(stocked, redis_client) == before
