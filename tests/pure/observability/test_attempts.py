"""How many attempts of a task ended and failed is the same in the overview, the history, charts and alerts."""

import math

import pytest

from celery5.cli.top.details import count_of
from celery5.dashboard.pages.tasks import sum_task
from celery5.observability.metrics import HistoryPoint, TaskNumbers
from celery5.protocol.observability.alert_rules import TaskCount, count_tasks
from celery5.protocol.observability.job_tally import RETRY_REQUESTED, UNKNOWN_TASK
from celery5.protocol.observability.overview import LastError
from celery5.protocol.observability.recent import DeadCount, RecentHistory, RecentPoint, make_task_overviews
from celery5.protocol.observability.report import Measurements, make_series
from celery5.protocol.observability.rollup import MetricsGroup, count_attempts

BY_STATE = {"SUCCESS": 5, "RETRY": 3, "DEAD": 2, "EXPIRED": 4, "REVOKED": 1, "REJECTED": 6}
MINUTE = 600
SHARE = 0.5


def test_attempts_that_expire_or_are_revoked_have_ended_and_not_run_to_their_end() -> None:
    attempts = count_attempts(BY_STATE)
    assert (attempts.ended, attempts.finished, attempts.failed, attempts.failed_share) == (21, 10, 5, SHARE)
    assert count_attempts({"EXPIRED": 4}).failed_share is None
    assert count_attempts({"SUCCESS": 3, RETRY_REQUESTED: 3}) == (6, 3, 0)
    assert count_attempts({}) == (0, 0, 0)


def test_overview_history_charts_and_alerts_count_attempts_alike() -> None:
    numbers = TaskNumbers(task="pay", counts=BY_STATE, run=None, wait=None)
    point = HistoryPoint(at=MINUTE, seconds=60, tasks=[numbers])
    counts = {("pay", state): count for state, count in BY_STATE.items()}
    history = RecentHistory([RecentPoint(MINUTE, counts, None)], {})
    (shown,) = make_task_overviews({"mail": history}, {}, MINUTE + 60.0)
    (drawn,) = sum_task("pay", [[point]])
    assert numbers.failed_share == shown.failed_share == SHARE
    found = {
        "overview": (shown.ended, shown.failed),
        "its rates": (shown.ended_per_minute, shown.failed_per_minute),
        "chart": (drawn.ended, drawn.failed),
        "top": (count_of(point, "pay", "ended"), count_of(point, "pay", "failed")),
    }
    assert found == dict.fromkeys(found, (21, 5))
    assert count_for_alerts() == TaskCount(failed=5, ended=10)


@pytest.mark.parametrize(
    ("by_state", "dead", "fails"),
    [
        ({"DEAD": 3}, {"mail": 1}, True),
        ({"DEAD": 3}, {"mail": 0}, False),  # all were replayed or purged
        ({"DEAD": 3, "SUCCESS": 3}, {"mail": 0}, False),
        ({"DEAD": 3}, {}, True),  # its broker is unreachable, so nobody knows
        ({"DEAD": 3}, {"mail": 0, "post": 1}, False),
        ({"DEAD": 3, "RETRY": 1}, {"mail": 0}, True),  # retries leave no dead letter
        ({"RETRY": 4}, {"mail": 0}, True),
        ({"SUCCESS": 4}, {"mail": 1}, False),
        ({"SUCCESS": 3, RETRY_REQUESTED: 3}, {"mail": 0}, False),  # tasks that poll
    ],
)
def test_a_task_fails_only_while_something_is_left_to_be_done(
    by_state: dict[str, int], dead: dict[str, int], fails: bool
) -> None:
    counts = {(UNKNOWN_TASK, state): count for state, count in by_state.items()}
    history = RecentHistory([RecentPoint(MINUTE, counts, None)], {})
    errors = {
        "pay": make_error("OSError", 3.0),
        "shop.old": make_error("UnknownTask", 1.0),
        "shop.new": make_error("UnknownTask", 2.0),
    }
    (shown,) = make_task_overviews({"mail": history}, errors, MINUTE + 60.0, dead=count_dead(dead))
    assert (shown.failing_since is not None, shown.needs_attention) == (fails, fails)
    assert shown.last_error == errors["shop.new"], "it names the last task that nobody knows"


@pytest.mark.parametrize(
    ("first", "since"),
    [
        (MINUTE + 59.7, MINUTE + 59),
        (MINUTE - 20.0, MINUTE - 20),  # it was reported in the next minute
        (MINUTE - 61.0, MINUTE),  # an old cause, again
        (MINUTE + 60.0, MINUTE),  # of another cause before
        (None, MINUTE),
    ],
)
def test_a_task_fails_since_its_last_error_was_first_seen_where_that_began_it(
    first: float | None, since: int
) -> None:
    history = RecentHistory([RecentPoint(MINUTE, {("pay", "DEAD"): 3}, None)], {})
    errors = {"pay": make_error("OSError", MINUTE + 70.0, first)}
    (shown,) = make_task_overviews({"mail": history}, errors, MINUTE + 90.0, dead=count_dead({"mail": 3}))
    assert shown.failing_since == since


@pytest.mark.parametrize(
    ("dead", "oldest", "first", "since"),
    [
        ({"mail": 3}, 0.0, MINUTE + 55.0, MINUTE + 55),
        (
            {"mail": 9, "other": 0},
            0.0,
            MINUTE + 55.0,
            MINUTE + 55,
        ),  # with older ones, or those of other tasks
        ({"mail": 2}, 0.0, None, MINUTE),  # one was purged or replayed: it may have been of this cause
        ({"mail": 2, "other": 9}, 0.0, None, MINUTE),
        ({"mail": 9}, MINUTE + 59.0, MINUTE + 55.0, MINUTE + 55),
        ({"mail": 9}, MINUTE + 60.0, None, MINUTE),  # all were purged or replayed, and others came
        ({}, 0.0, MINUTE + 55.0, MINUTE + 55),  # its broker is unreachable
    ],
)
def test_nobody_knows_when_a_cause_began_whose_dead_jobs_may_have_left(
    dead: dict[str, int], oldest: float, first: float | None, since: int
) -> None:
    history = RecentHistory([RecentPoint(MINUTE, {("pay", "DEAD"): 3, ("pay", "SUCCESS"): 1}, None)], {})
    errors = {"pay": make_error("OSError", MINUTE + 70.0, MINUTE + 55.0)}
    (shown,) = make_task_overviews({"mail": history}, errors, MINUTE + 90.0, dead=count_dead(dead, oldest))
    assert shown.last_error is not None
    assert (shown.last_error.first, shown.failing_since) == (first, since)


def count_dead(counts: dict[str, int], oldest: float = 0.0) -> dict[str, DeadCount]:
    """The dead letters of some queues, of which the oldest came then."""
    return {queue: DeadCount(count, oldest if count else math.inf) for queue, count in counts.items()}


def make_error(kind: str, at: float, first: float | None = None) -> LastError:
    """The last error of a task."""
    return LastError(type=kind, message="of a test", at=at, queue="mail", job="1", first=first)


def count_for_alerts() -> TaskCount:
    """Return what alerts know of the attempts of the task."""
    counters = {
        make_series("celery5_jobs_total", {"task": "pay", "state": state}): float(count)
        for state, count in BY_STATE.items()
    }
    counts: dict[str, TaskCount] = {}
    assert list(count_tasks([MetricsGroup(before=Measurements(counters=counters))], counts)) == [None]
    return counts["pay"]
