"""Revoke command: jobs are revoked from a terminal, and what could not be is said."""

import json
import sys

from tests.story.cli.commands import celery5
from tests.story.conftest import Desk


def test_jobs_are_revoked_on_whatever_queue_they_are(desk: Desk) -> None:
    shop = sys.modules["shop"]
    one, two, three = (
        shop.add.delay(1, 2),
        shop.multiply.delay(2, 3),
        shop.add.options(countdown=60).delay(1, 2),
    )
    assert json.loads(desk("task", "revoke", one.id, two.id, "--json")) == [
        {"id": one.id, "queue": "default", "revoked": True, "state": "REVOKED"},
        {"id": two.id, "queue": "slow", "revoked": True, "state": "REVOKED"},
    ]
    assert desk("task", "revoke", three.id, one.id, "--queue", "default").split() == [
        *("id", "queue", "revoked", "state"),
        *(three.id, "default", "true", "REVOKED"),
        *(one.id, "default", "true", "REVOKED"),
    ]


def test_what_could_not_be_revoked_is_said_and_the_rest_is_revoked(desk: Desk) -> None:
    shop = sys.modules["shop"]
    done, waiting = shop.add.delay(1, 2), shop.multiply.delay(2, 3)
    desk("worker", "start", "--burst", "--queues", "default")
    ended = celery5("-A", "shop", "task", "revoke", "nobody", done.id, waiting.id, "--json", cwd=desk.folder)
    assert ended.code == 1
    assert ended.error == (
        f"Error: not revoked: nobody (UNKNOWN), {done.id} (SUCCESS): it had ended before, or nothing is known of it"
    )
    assert [row["revoked"] for row in json.loads(ended.out)] == [False, False, True]
    assert waiting.status() == "REVOKED"
    assert celery5("-A", "shop", "task", "revoke", cwd=desk.folder).code == 2


def test_a_dry_run_of_revoke_says_how_many_have_not_ended_and_revokes_none(desk: Desk) -> None:
    waiting = sys.modules["shop"].add.delay(1, 2)
    shown = desk("task", "revoke", waiting.id, "nobody", "--dry-run")
    assert shown == "nothing is done; this would be: 1 of 2 jobs revoked\n"
    assert waiting.status() == "SENT"
