"""What the first page shows of alerts: one line for each trouble, the critical ones first."""

from typing import Any

import msgspec
import pytest

from celery5.dashboard.pages.overview import count_breakers, describe_healthy, find_own_alerts, name_firing
from celery5.observability.alerts import AlertState
from celery5.protocol.health.breaker import describe_held
from celery5.protocol.observability.overview import (
    Overview,
    OverviewTotals,
    QueueOverview,
    QueueVerdict,
    TaskOverview,
    WorkerOverview,
)


def make_overview(**parts: Any) -> Overview:
    counts = dict.fromkeys(OverviewTotals.__struct_fields__, 0)
    empty: dict[str, Any] = {"queues": (), "tasks": (), "workers": ()}
    return Overview(app="shop", at=100.0, since=0.0, totals=OverviewTotals(**counts), **{**empty, **parts})


def make_alert(name: str, subject: str, **words: Any) -> AlertState:
    known: dict[str, Any] = {"status": "firing", "severity": "warning", "above": 1.0}
    return AlertState(name=name, subject=subject, **{**known, **words})


def test_an_alert_on_what_has_a_line_of_its_own_is_not_told_twice() -> None:
    verdict = QueueVerdict("grows", "grows by 3/s", needs_attention=True)
    counts: dict[str, Any] = {
        "backlog": 1,
        "waiting": 1,
        "running": 0,
        "held": 0,
        "scheduled": 0,
        "dead": 0,
        "runs": 0,
        "workers": 1,
    }
    queue = QueueOverview(
        name="mail", held_by="", oldest=9.0, is_paused=False, flow=None, verdict=verdict, **counts
    )
    task = TaskOverview(
        name="pay", queues=("mail",), ended=9, failed=9, failed_share=1.0, ended_per_minute=1.0,
        failed_per_minute=1.0, run=None, wait=None, failing_since=60,
    )  # fmt: skip
    alerts = [
        make_alert("failure-rate", "task pay"),
        make_alert("oldest-job", "queue mail"),
        make_alert("dead-letters", "queue money"),
        make_alert("loop-lag", "", severity="critical"),
        make_alert("quiet", "queue other", status="silenced"),
    ]
    own = find_own_alerts(alerts, make_overview(queues=(queue,), tasks=(task,)))
    assert [alert.name for alert in own] == ["loop-lag", "dead-letters"]


def test_a_line_names_each_rule_that_fires_for_what_it_is_about() -> None:
    alerts = [
        make_alert("dead-letters", "queue mail"),
        make_alert("no-workers", "queue mail", severity="critical"),
        make_alert("failure-rate", "task pay"),
        make_alert("oldest-job", "queue mail", status="silenced"),
    ]
    assert name_firing(alerts) == {"queue mail": "no-workers, dead-letters", "task pay": "failure-rate"}


@pytest.mark.parametrize(
    ("since", "until", "window"),
    [(120, 180, "00:02 to 00:03 UTC"), (120, 158.4, "00:02:00 to 00:02:38 UTC")],
)
def test_the_window_of_rates_is_never_from_a_minute_to_itself(
    since: float, until: float, window: str
) -> None:
    assert make_overview(rates_since=since, rates_until=until).task_window == window


def test_breakers_are_counted_over_all_workers() -> None:
    workers = tuple(
        WorkerOverview(name=f"w{number}", queues=("mail",), running=0, health="ok", breakers=breakers)
        for number, breakers in enumerate([("pay",), ("pay", "mail"), ()])
    )
    held = "its jobs are held back"
    assert count_breakers(make_overview(workers=workers)) == [("pay", held, 2), ("mail", held, 1)]
    assert describe_held("webhook:alerts") == "notifications of alerts wait"
    assert describe_held("outlet:StatsD") == "it gets no metrics"
    assert describe_held("shop.pay:v2") == held  # a task


def test_headline_of_the_first_page_agrees_with_its_figures() -> None:
    def describe(**counts: float) -> str:
        overview = make_overview()
        totals = msgspec.structs.replace(overview.totals, **{"workers": 1, **counts})
        return describe_healthy(msgspec.structs.replace(overview, totals=totals))

    assert describe() == "Nothing: queues keep up, tasks succeed, workers do well."
    assert describe(dead=1) == "Nothing: queues keep up, workers do well."
    assert describe(failed_per_second=0.1) == "Nothing: queues keep up, workers do well."
    assert describe(workers=0) == "Nothing: queues keep up, tasks succeed."
