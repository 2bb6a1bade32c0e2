"""Bulk commands: actions listed, shown and stopped by a person at a terminal."""

import json
import sys

from celery5.broker.calls import bulk as calls
from tests.story.cli.commands import celery5, until
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


def test_waiting_jobs_are_revoked_and_counted_before(desk: Desk) -> None:
    shop = sys.modules["shop"]
    jobs = shop.app.send_many([*[shop.multiply.s(1, 2)] * 3, shop.add.s(1, 2)])
    queue = jobs[0].queue
    preview = desk("bulk", "revoke", queue, "--task", shop.multiply.name, "--dry-run")
    assert preview == "nothing is done; this would be: 3 jobs revoked\n"
    one = desk("bulk", "revoke", jobs[3].queue, "--task", shop.add.name, "--dry-run")
    assert one == "nothing is done; this would be: 1 job revoked\n"
    asked = celery5("-A", "shop", "bulk", "revoke", queue, cwd=desk.folder)
    assert (asked.code, "add --yes" in asked.error) == (2, True)
    done = json.loads(desk("bulk", "revoke", queue, "--task", shop.multiply.name, "--yes", "--json"))
    assert (done["state"], done["progress"]["done"], done["source"]) == ("done", 3, "cli")
    assert [job.status() for job in jobs[:3]] == ["REVOKED"] * 3
    assert jobs[3].status() != "REVOKED"


def test_an_interrupted_action_is_resumed_in_the_foreground(desk: Desk) -> None:
    fields = {
        "action": '{"verb":"dlq:replay","filter":{"task":"shop.*"}}',
        "who": "anna",
        "source": "dashboard",
        "progress": '{"total":0}',
    }
    desk.app.perform(calls.claim_action(desk.app.keys, "a1", "dashboard-1", fields, lease=0.001))
    until(lambda: json.loads(desk("bulk", "show", "a1", "--json"))["state"] == "interrupted")
    assert "state          done" in desk("bulk", "resume", "a1")
    (entry,) = [entry for entry in desk.app.audit.list() if entry.action == "bulk:resume"]
    assert (entry.source, entry.outcome) == ("cli", "done")
    ended = celery5("-A", "shop", "bulk", "resume", "a1", cwd=desk.folder)
    assert (ended.code, "has ended" in ended.err) == (1, True)


def test_a_purge_of_a_queue_is_tried_first_without_a_question(desk: Desk) -> None:
    shop = sys.modules["shop"]
    shop.app.send_many([shop.multiply.s(1, 2)] * 2)
    assert (
        desk("queue", "purge", "slow", "--dry-run")
        == "nothing is done; this would be: slow: 2 jobs revoked\n"
    )
    assert json.loads(desk("queue", "show", "slow", "--json"))["waiting"] == 2
