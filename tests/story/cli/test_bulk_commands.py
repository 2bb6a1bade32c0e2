"""Bulk commands: actions listed, shown and stopped by a person at a terminal."""

import json

from celery5.broker.calls import bulk as calls
from tests.story.cli.commands import celery5
from tests.story.conftest import Desk


def test_bulk_actions_are_listed_shown_and_stopped(desk: Desk) -> None:
    assert desk("bulk", "list") == "no bulk actions\n"
    fields = {
        "action": '{"verb":"dlq:replay","filter":{"task":"shop.*"},"rate":5.0}',
        "who": "anna",
        "source": "dashboard",
        "progress": '{"total":9,"is_exact":false,"done":3}',
    }
    desk.app.perform(calls.claim_action(desk.app.keys, "a1", "dashboard-1", fields, lease=1000))
    row = desk("bulk", "list").splitlines()[1]
    assert row.split()[:8] == ["a1", "dlq:replay", "waiting", "3", "0", "0", "at", "least"]
    assert "task=shop.*" in row
    shown = json.loads(desk("bulk", "show", "a1", "--json"))
    assert (shown["state"], shown["progress"]["done"], shown["action"]["rate"]) == ("waiting", 3, 5.0)
    assert "rate" in desk("bulk", "show", "a1")
    assert desk("bulk", "stop", "a1") == "a1 is asked to stop\n"
    assert "stopping" in desk("bulk", "list")
    for words in (("show", "b2"), ("stop", "b2")):
        ended = celery5("-A", "shop", "bulk", *words, cwd=desk.folder)
        assert (ended.code, "no bulk action b2" in ended.err) == (1, True)
