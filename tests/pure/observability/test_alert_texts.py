"""The text of a firing alert whose value would not make it fire says why it fires still: a row for each measure."""

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import msgspec
import pytest

from celery5.protocol.health.server_memory import ServerMemory
from celery5.protocol.observability.alert_rules import (
    CounterSample,
    MeasuredCluster,
    MeasuredQueue,
    StoppingRun,
    TaskCount,
    dead_letters,
    failures,
    loop_lag,
    member_missing,
    memory_used,
    no_workers,
    not_undone,
    oldest,
    read_conditions,
    stream_lag,
    worker_deaths,
    worker_lost,
)
from celery5.protocol.observability.alerting import (
    KEPT_UNMEASURED,
    AlertCondition,
    AlertInstance,
    AlertRule,
    Measure,
    decide_alerts,
)
from celery5.protocol.observability.overview import LostWorker
from celery5.protocol.observability.queue_depth import QueueDepth
from celery5.protocol.process.missing import GroupReport, MembersReport, MissingMember

AT = 1000.0
BASE = CounterSample(
    AT - 50, {"pay": TaskCount(0, 0)}, {"mail": 20}, {"crash": 3}
)  # what was counted before all that is measured
Changes = Mapping[str, Any]
"""Fields of what is measured of a cluster."""


class Story(NamedTuple):
    """A measure: what makes its alert fire, then what does not any more, and the words for both."""

    condition: AlertCondition
    high: Changes
    low: Changes
    # What the text has while the value is high; and while it is low, besides.
    fires: str
    words: str
    # With which value it fired.
    fired: str


def queue(runs: tuple[StoppingRun, ...] = (), **depth: Any) -> Changes:
    """A queue that is measured."""
    depth = {"waiting": 0, "oldest": None, "dead": 20, **depth}
    return {"queues": {"mail": MeasuredQueue(depth=QueueDepth(**depth), stopping_runs=runs)}}


def memory(share: float) -> Changes:
    """A server of which this share is used."""
    return {"memory": (ServerMemory(broker="default", used=int(share * 1000), limit=1000),)}


def lost(**parts: Any) -> Changes:
    """A worker that was lost."""
    return {"lost": (LostWorker(worker="one:1", at=AT - 5, health="lost", queues=("mail",), **parts),)}


def missing(count: int) -> Changes:
    """A group of the cluster of which so many members are missing."""
    gone = MissingMember(
        kind="worker", name="worker-mail-1", group="mail", condition="given up", since=90.0, why="it fell",
        remedy="restart it",
    )  # fmt: skip
    groups = (GroupReport(kind="worker", name="mail", declared=2, missing=count),)
    members = (gone,) * count
    return {"cluster": MembersReport(groups=groups, missing=members), "missing": members}


RUN = StoppingRun(id="r", since=AT - 30, failed=1, description="run r stops")
STORIES: Mapping[Measure, Story] = {
    "oldest": Story(
        oldest(above=100),
        queue(waiting=1, backlog=1, oldest=300.0),
        queue(),
        "has waited 5 min",
        "no job waits on queue mail",
        "5 min",
    ),
    "failures": Story(
        failures(above=0.25),
        {"tasks": {"pay": TaskCount(12, 24)}},
        {"tasks": {"pay": TaskCount(3, 3)}},
        "12 of 24 attempts of task pay failed (50%)",
        "3 of 3 attempts of task pay failed: with fewer than 20 they do not count",
        "50 %",
    ),
    "no-workers": Story(
        no_workers(above=5),
        queue(backlog=12),
        queue(backlog=3, workers=1),
        "12 jobs wait on queue mail",
        "no job waits on queue mail without a worker",
        "12 jobs",
    ),
    "dead-letters": Story(
        dead_letters(above=10, within=600),
        queue(dead=32),
        queue(dead=20),
        "queue mail has 12 new dead letters in 10 min, and 32 in all",
        "queue mail has 0 new dead letters in 10 min, and 20 in all",
        "12 new dead letters",
    ),
    "worker-deaths": Story(
        worker_deaths(above=1),
        queue(deaths={"crash": 5}, last_deaths={"crash": AT - 5}),
        queue(deaths={"crash": 5}, last_deaths={"crash": AT - 900}),
        "2 of them in the last 10 min",
        "none in the last 10 min",
        "2 dead workers",
    ),
    "worker-lost": Story(
        worker_lost(),
        lost(),
        lost(is_back=True, is_repaired=True),
        "worker one:1 was lost 5 s ago",
        "worker one:1 was lost 5 s ago; repaired",
        "1 lost process",
    ),
    "member-missing": Story(
        member_missing(), missing(1), missing(0), "worker-mail-1", "all members of", "1 missing member"
    ),
    "not-undone": Story(
        not_undone(), queue((RUN,)), queue(), "1 run is not undone", "no run of queue", "1 run"
    ),
    "stream-lag": Story(
        stream_lag(above=60),
        {"lags": {("orders", "mail"): 120.0}},
        {"lags": {("orders", "mail"): 1.0}},
        "is 2 min behind",
        "is 1 s behind",
        "2 min",
    ),
    "loop-lag": Story(
        loop_lag(above=1),
        {"loop_lag": 2.0},
        {"loop_lag": 0.01},
        "woke up 2 s late",
        "woke up 10 ms late",
        "2 s",
    ),
    "memory": Story(memory_used(above=0.9), memory(0.95), memory(0.5), "(95%)", "(50%)", "95 %"),
}


def evaluate(
    rule: AlertRule, before: tuple[AlertInstance, ...], measured: Changes, now: float
) -> tuple[AlertInstance, ...]:
    """Evaluate a rule once; return its alerts."""
    readings = read_conditions([rule], MeasuredCluster(at=AT, **measured), [BASE])
    return decide_alerts({rule.name: rule}, before, readings, {}, now).instances


def make_rule(story: Story) -> AlertRule:
    """A rule that fires at once, and stays for a minute."""
    return AlertRule(name="rule", condition=story.condition, for_=0.0, keep_firing_for=60.0)


@pytest.mark.parametrize("measure", get_args(Measure))
def test_a_firing_alert_whose_value_is_low_says_with_which_it_fired(measure: Measure) -> None:
    story = STORIES[measure]
    rule = make_rule(story)
    (fired,) = evaluate(rule, (), story.high, AT)
    assert (fired.status, fired.value > rule.condition.above) == ("firing", True)
    assert story.fires in fired.description
    assert "it fired at" not in fired.description
    (held,) = evaluate(rule, (fired,), story.low, AT + 15)
    assert (held.status, held.value <= rule.condition.above) == ("firing", True)
    said, _, why = held.description.partition("; it fired at ")
    assert story.words in said
    assert why == f"{story.fired}, and resolves when that has lasted 1 min"
    (again,) = evaluate(rule, (held,), story.high, AT + 30)
    assert (again.description, again.fired_value) == (fired.description, fired.value)


@pytest.mark.parametrize("measure", get_args(Measure))
def test_a_firing_alert_that_is_not_measured_says_so_once(measure: Measure) -> None:
    story = STORIES[measure]
    rule = make_rule(story)
    alerts = evaluate(rule, (), story.high, AT)
    for seconds in (15, 30):
        alerts = evaluate(rule, alerts, {}, AT + seconds)
        (alert,) = (alert for alert in alerts if alert.subject != "scheduler")
        assert alert.description.endswith("; not measured since, so it stays for up to 5 min")
        assert alert.description.count("not measured") == 1
    assert not evaluate(rule, alerts, {}, AT + KEPT_UNMEASURED + 1)


def test_an_alert_between_its_thresholds_says_at_what_it_resolves() -> None:
    rule = make_rule(STORIES["dead-letters"])
    alerts = evaluate(rule, (), queue(dead=32), AT)
    (alert,) = evaluate(rule, alerts, queue(dead=29), AT + 15)
    assert alert.description == (
        "queue mail has 9 new dead letters in 10 min, and 29 in all; "
        "it fired at 12 new dead letters, and resolves at 8 new dead letters or less"
    )


def test_a_count_that_is_held_is_never_said_to_be_one_that_resolves() -> None:
    rule = make_rule(STORIES["worker-deaths"])
    alerts = evaluate(rule, (), STORIES["worker-deaths"].high, AT)
    died = queue(deaths={"crash": 4}, last_deaths={"crash": AT - 5})
    (alert,) = evaluate(rule, alerts, died, AT + 15)
    assert alert.value == 1
    assert alert.description.endswith("resolves at 0 dead workers or less")


def test_an_alert_of_an_earlier_version_says_only_when_it_resolves() -> None:
    rule = make_rule(STORIES["dead-letters"])
    (alert,) = evaluate(rule, (), queue(dead=32), AT)
    stored = msgspec.convert(
        {name: value for name, value in msgspec.to_builtins(alert).items() if name != "fired_value"},
        AlertInstance,
    )
    (held,) = evaluate(rule, (stored,), queue(dead=20), AT + 15)
    assert held.description.endswith("and 20 in all; resolves when that has lasted 1 min")
