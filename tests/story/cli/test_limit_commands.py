"""Limit commands: what is imposed from the terminal, and how queues and jobs are told of then."""

import json
import re
import sys
import time
from collections.abc import Iterator

import pytest

from celery5 import JobState
from celery5.broker.call import Call
from celery5.broker.calls.limits import impose_limits
from celery5.protocol.limit_rules import ImposedLimits
from celery5.protocol.limits import LimitOverride
from tests.story.cli.commands import Serving, celery5, until
from tests.story.conftest import Desk


@pytest.fixture(autouse=True)
def nothing_stays(desk: Desk) -> Iterator[None]:
    """What is imposed outlives workers: it goes with the test."""
    yield
    keys = desk.app.keys
    desk.app.perform(Call(("DEL", keys.limits, keys.suspended, keys.imposed_limits), int))


def test_running_and_held_mean_the_same_wherever_queues_are_told_of(desk: Desk) -> None:
    shop = sys.modules["shop"]
    desk.app.limits.suspend(shop.add, why="the bank is down", by="ann")
    with Serving("-A", "shop", "worker", "start", cwd=desk.folder).ready():
        running, *held = shop.stuck.delay(), shop.add.delay(1, 2), shop.add.delay(3, 4)
        until(lambda: running.status() is JobState.EXECUTING)
        until(lambda: all(job.status() is JobState.HELD for job in held))
        shown = desk("task", "show", held[0].id)
        told = desk("info", "--json"), desk("info"), desk("queue", "list", "--json"), desk("queue", "list")
        assert running.revoke()
    queue = json.loads(told[0])["queues"]["default"]
    assert (queue["running"], queue["held"], queue["waiting"]) == (1, 2, 0)
    assert [worker["running"] for worker in queue["workers"]] == [1]
    assert "gated" not in told[0]
    row, *_ = json.loads(told[2])
    assert (row["running"], row["held"], row["waiting"]) == (1, 2, 0)
    resume = "celery5 -A shop task resume shop.add"
    why = rf"since [-\d]+ [:\d]+Z \((just now|.* ago)\) by ann: the bank is down; to go on: {resume}"
    assert re.search(rf"(?m)^suspended +its task is {why}$", shown)
    assert re.search(r"(?m)^waits at +the limit of shop.add; jobs ahead of it: 0", shown)
    for shown in (told[1], told[3]):
        assert re.search(r"(?m)^suspended +shop.add \(the bank is down\)$", shown)
        assert re.search(r"(?m)^queue +backlog .*running +at limits +(held by +)?scheduled", shown)
        assert re.search(r"(?m)^default +2 .* 1 +2 ", shown)


def test_limit_of_a_removed_task_may_be_removed(desk: Desk) -> None:
    desk.app.limits.suspend("shop.multiply")
    desk.app.limits.set("shop.multiply", 3)
    code = desk.folder / "shop.py"
    code.write_text(code.read_text().replace("def multiply", "def times"))
    assert "shop.multiply" in desk("task", "limits")
    assert "no task 'shop.multiply'" in refused(desk, "suspend", "shop.multiply", code=1)
    assert desk("task", "resume", "shop.multiply") == "shop.multiply: resumed\n"
    assert desk("task", "limit", "shop.multiply", "none") == "shop.multiply: its own limit again\n"
    assert desk("task", "limits") == "no task has a limit, and none is suspended\n"
    assert "no task 'shop.multiply'" in refused(desk, "resume", "shop.multiply", code=1)


def refused(desk: Desk, *words: str, code: int = 2) -> str:
    """The one line that the command gives for words that make no sense, or for a name that nothing has."""
    ended = celery5("-A", "shop", "task", *words, cwd=desk.folder)
    assert (ended.code, ended.out) == (code, "")
    return ended.error


def test_a_limit_that_makes_no_sense_is_refused_in_one_clear_line(desk: Desk) -> None:
    assert "give at most 50" in refused(desk, "limit", "shop.add", "9" * 5000)
    for words in ("-1", "\u0663", "\u00b2", "9" * 50, "many"):
        assert "give a number from 0, a rate such as 200/m, or none" in refused(
            desk, "limit", "shop.add", words
        )
    for words in ("-1/s", "\u0663/s"):
        assert "is not a rate: write 50/s, 100/m" in refused(desk, "limit", "shop.add", words)
    assert desk("task", "limit", "shop.add", "none") == "shop.add: nothing was imposed\n"
    assert desk("task", "limits") == "no task has a limit, and none is suspended\n"


def test_a_burst_that_waits_for_a_suspended_task_says_so_once(desk: Desk) -> None:
    shop = sys.modules["shop"]
    desk.app.limits.suspend(shop.add, why="the bank is down")
    desk.app.limits.suspend(shop.whose)
    sent = shop.add.delay(1, 2)
    with Serving("-A", "shop", "worker", "start", "--burst", cwd=desk.folder).ready() as worker:
        until(lambda: worker.logged("burst:blocked"))
        time.sleep(1.2)  # it looks again each second
        assert desk.app.limits.resume(shop.add)
        assert worker.ended().code == 0
    (warning,) = worker.logged("burst:blocked")
    assert (warning["level"], warning["task"]) == ("warning", "shop.add")
    assert warning["suspended"] == "the bank is down"
    assert "celery5 task resume" in warning["why"]
    assert sent.get(timeout=30) == 3


def test_limit_of_a_scheduler_is_shown_with_its_rule(desk: Desk) -> None:
    imposed = ImposedLimits("one", {"night": {"shop.add": LimitOverride(limit=2)}})
    desk.app.perform(impose_limits(desk.app.keys, "one", imposed))
    assert desk("task", "limit", "shop.add", "9") == (
        "shop.add: limit 9\nfor now the Scheduler's comes first: shop.add limit 2 by rule night\n"
    )
    (row,) = json.loads(desk("task", "limits", "--json"))
    assert (row["limit"], row["limited_by"], row["rules"], row["set_limit"]) == (
        2,
        "rule night",
        ["night"],
        9,
    )
    assert re.search(r"(?m)^shop.add +2 +.* rule night$", desk("task", "limits"))
    assert re.search(r"(?m)^limited +shop.add limit 2 by rule night$", desk("info"))


def test_a_rate_of_a_kind_is_imposed_listed_and_lifted(desk: Desk) -> None:
    assert desk("task", "limit", "thread", "100/s", "--kind") == "kind thread: rate 100/s\n"
    assert '"kind thread"' in desk("task", "limits", "--json")
    assert (
        desk("task", "limit", "thread", "none", "--kind") == "kind thread: no rate but that of the setting\n"
    )
    assert desk("task", "limit", "thread", "none", "--kind") == "kind thread: nothing was imposed\n"
