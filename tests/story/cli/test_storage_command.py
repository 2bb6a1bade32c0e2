"""What Redis holds, on the command line."""

import json
import re

from tests.story.conftest import Desk


def test_it_shows_the_server_and_each_queue(desk: Desk) -> None:
    desk.app.send_many([desk.app.tasks["shop.add"].s(1, n) for n in range(5)])
    shown = desk("queue", "storage")
    assert "noeviction" in shown
    assert re.search(r"(?m)^default .*  5 in \d+(\.\d+)? K?i?B  0 in 0 B ", shown)
    found = json.loads(desk("queue", "storage", "--json"))
    assert [row["jobs"] for row in found["queues"]] == [5]
    assert found["queues"][0]["total_bytes"] > 0


def test_it_says_that_there_is_nothing(desk: Desk) -> None:
    assert "no queues yet: nothing was sent" in desk("queue", "storage")
