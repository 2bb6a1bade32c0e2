"""How many attempts of a task ended and failed is the same in the overview, the history, charts and alerts."""

from celery5.cli.top.details import count_of
from celery5.dashboard.pages.tasks import sum_task
from celery5.observability.metrics import HistoryPoint, TaskNumbers
from celery5.protocol.observability.alert_rules import TaskCount, count_tasks
from celery5.protocol.observability.recent import RecentHistory, RecentPoint, make_task_overviews
from celery5.protocol.observability.report import Measurements, make_series
from celery5.protocol.observability.rollup import MetricsGroup, count_attempts

BY_STATE = {"SUCCESS": 5, "RETRY": 3, "DEAD": 2, "EXPIRED": 4, "REVOKED": 1, "REJECTED": 6}
MINUTE = 600
SHARE = 0.5


def test_attempts_that_expire_or_are_revoked_have_ended_and_not_run_to_their_end() -> None:
    attempts = count_attempts(BY_STATE)
    assert (attempts.ended, attempts.finished, attempts.failed, attempts.failed_share) == (21, 10, 5, SHARE)
    assert count_attempts({"EXPIRED": 4}).failed_share is None
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


def count_for_alerts() -> TaskCount:
    """Return what alerts know of the attempts of the task."""
    counters = {
        make_series("celery5_jobs_total", {"task": "pay", "state": state}): float(count)
        for state, count in BY_STATE.items()
    }
    counts: dict[str, TaskCount] = {}
    assert list(count_tasks([MetricsGroup(before=Measurements(counters=counters))], counts)) == [None]
    return counts["pay"]
