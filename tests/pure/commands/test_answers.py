"""Answers: what workers say of themselves is a table for people, whatever version of celery5 they have."""

from typing import Any

import pytest

from celery5.cli.commands.worker import TABLES, format_answers, format_replies, get_replies
from celery5.commands.control import Reply
from celery5.operations.answers import OTHER_VERSION
from celery5.operations.processes import ProcessReply

JOB = {
    "id": "AX",
    "task": "shop.pay",
    "queue": "mail",
    "attempt": 2,
    "started": 1.0,
    "seconds": 2.4,
    "arguments": "order=7",
    "progress": {"done": 30, "total": 120, "note": "resizing"},
}
STATS = {
    "kind": "worker",
    "process": {"pid": 7, "host": "h"},
    "uptime": 90.0,
    "jobs": {"SUCCESS": 12, "DEAD": 1},
    "running": 3,
    "slots": {"trio": {"current": 100, "executing": 3}, "boxed": {"current": 0, "executing": 0}},
    "queues": {"mail": "read", "slow": "paused here"},
    "memory": 2**26,
    "loop_lag": 0.002,
}
HEALTH = {
    "checks": [{"check": "Disk", "state": "unhealthy", "is_stale": True, "why": "full"}],
    "breakers": [{"of": "shop.pay", "state": "open", "mode": "watch", "why": "OSError: no"}],
}


def stripped(text: str) -> list[list[str]]:
    """The cells of each line: columns are at least two spaces apart."""
    return [[cell.strip() for cell in line.split("  ") if cell] for line in text.splitlines()]


def test_what_runs_is_a_line_for_each_job() -> None:
    assert stripped(format_answers("active", [("w1", [JOB, JOB]), ("w2", [])])) == [
        ["worker", "job", "task", "arguments", "queue", "attempt", "for", "progress"],
        *[["w1", "AX", "shop.pay", "order=7", "mail", "2", "2.4 s", "30 of 120 (25 %): resizing"]] * 2,
    ]
    assert format_answers("active", [("w1", []), ("w2", [])]) == "no job runs"


def test_how_a_worker_does_is_a_line() -> None:
    head, row = stripped(format_answers("stats", [("w1", STATS)]))
    assert dict(zip(head, row, strict=True)) == {
        "worker": "w1",
        "kind": "worker",
        "pid": "7",
        "up": "2 min",
        "jobs": "12 SUCCESS, 1 DEAD",
        "running": "3",
        "slots": "trio 3 of 100",
        "queues": "mail, slow (paused here)",
        "memory": "64.0 MiB",
        "loop lag": "2 ms",
    }


def test_health_is_a_line_for_each_check_and_each_breaker() -> None:
    assert stripped(format_answers("health", [("w1", HEALTH)])) == [
        ["worker", "what", "name", "state", "why"],
        ["w1", "check", "Disk", "unhealthy (stale)", "full"],
        ["w1", "breaker", "shop.pay", "open (only watches)", "OSError: no"],
    ]


@pytest.mark.parametrize("command", TABLES)
@pytest.mark.parametrize(
    "answer", [None, {}, [], [None], "x", {"checks": 1, "queues": [], "slots": {"a": 1}}]
)
def test_whatever_a_worker_of_another_version_answers_is_shown(command: str, answer: Any) -> None:
    assert format_answers(command, [("w1", answer)])


def test_those_that_did_not_answer_stand_below_the_table() -> None:
    replies = [
        Reply(worker="w1", ok=True, answer=[JOB]),
        Reply(worker="w2", ok=False, reason="no-answer", why="it is down"),
    ]
    text = format_replies(replies, "active")
    assert text.splitlines()[2:] == ["", "w2  no-answer  it is down"]
    assert format_replies(replies[1:], "active") == "w2  no-answer  it is down"
    assert format_replies(replies[:1], "ping").startswith("w1  ok  [{")


def test_what_a_worker_of_another_version_answers_is_shown() -> None:
    other = ProcessReply(process="w1", ok=False, answer=[1], why="not ours", reason=OTHER_VERSION)
    refused = ProcessReply(process="w2", ok=False, why="no", reason="refused", concerned=False)
    assert get_replies([other, refused]) == [
        Reply(worker="w1", ok=True, answer=[1]),
        Reply(worker="w2", ok=False, why="no", reason="refused", concerned=False),
    ]
