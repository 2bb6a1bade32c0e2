"""Replies of processes: a reason that several have is stated once."""

from celery5.cli.commands.worker import format_replies
from celery5.commands.control import Reply
from celery5.operations.replies import summarize_replies

FULL = f"Redis is full: {'it takes no writes, ' * 12}and what was refused was not stored"
REPLIES = [
    Reply(worker="one", ok=False, reason="failed", why=FULL),
    Reply(worker="three", ok=False, reason="refused", why="it stops"),
    Reply(worker="two", ok=False, reason="failed", why=FULL),
]


def test_a_reason_of_several_processes_is_stated_once_in_the_failure_of_a_change() -> None:
    assert summarize_replies("pause", REPLIES).failure == f"one, two: {FULL}; three: it stops"


def test_a_reason_of_several_processes_is_stated_once_below_their_lines() -> None:
    *lines, why = format_replies(REPLIES, "reload").splitlines()
    assert lines == ["one    failed  (1)", "three  refused  it stops", "two    failed  (1)"]
    assert why.startswith("(1) Redis is full: it takes")
