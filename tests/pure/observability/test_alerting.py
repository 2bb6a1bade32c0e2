"""Alerts become pending, fire and resolve: the decision alone, without a clock."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.errors import Misconfigured
from celery5.examples.webhooks.signature import key_of, verified
from celery5.protocol.observability.alert_messages import (
    check_webhook_url,
    make_alert_message,
    parse_webhook_secret,
    sign_webhook,
)
from celery5.protocol.observability.alert_rules import (
    AlertThresholds,
    CounterSample,
    MeasuredCluster,
    MeasuredQueue,
    StoppingRun,
    StoredAlerts,
    TaskCount,
    add_sample,
    check_names,
    check_rule,
    dead_letters,
    failures,
    loop_lag,
    make_builtin_rules,
    member_missing,
    not_undone,
    oldest,
    parse_rules,
    read_conditions,
    worker_deaths,
    worker_lost,
)
from celery5.protocol.observability.alerting import (
    KEPT_UNMEASURED,
    AlertInstance,
    AlertReading,
    AlertRule,
    AlertTransition,
    decide_alerts,
)
from celery5.protocol.observability.overview import LostWorker, judge_repair
from celery5.protocol.observability.queue_depth import QueueDepth
from celery5.protocol.observability.report import compress
from celery5.protocol.process.missing import (
    BY_HAND,
    GroupReport,
    MembersReport,
    MissingMember,
    list_missing,
)

RULE = AlertRule(name="late", condition=oldest(above=100), for_=60, keep_firing_for=30)


class History:
    """One alert over time: what has become of it."""

    def __init__(self, rule: AlertRule = RULE) -> None:
        self.rule = rule
        self.instances: tuple[AlertInstance, ...] = ()
        self.transitions: list[AlertTransition] = []
        self.notifications: list[AlertTransition] = []

    def measure(self, now: float, value: float | None, silenced: Mapping[str, float] | None = None) -> str:
        """Evaluate at a time; None: it could not be measured. Return the status."""
        readings = {} if value is None else {(self.rule.name, "queue mail"): AlertReading(value, "in words")}
        decision = decide_alerts({self.rule.name: self.rule}, self.instances, readings, silenced or {}, now)
        self.instances = decision.instances
        self.transitions += decision.transitions
        self.notifications += decision.notifications
        return self.instances[0].status if self.instances else "inactive"

    def changes(self) -> list[str]:
        """Return what somebody was notified of."""
        return [notification.change for notification in self.notifications]


def test_alert_fires_and_resolves_after_their_durations() -> None:
    history = History()
    statuses = [
        history.measure(now, value)
        for now, value in (
            (0, 100),
            (10, 101),
            (69, 200),
            (70, 300),
            (80, 90),
            (90, 80),
            (119, 70),
            (120, 60),
        )
    ]
    assert statuses == [
        *("inactive", "pending", "pending", "firing"),
        *("firing", "firing", "firing", "inactive"),
    ]
    assert history.changes() == ["fired", "resolved"]
    assert [notification.at for notification in history.notifications] == [70, 120]
    assert {notification.since for notification in history.notifications} == {10}


def test_a_firing_alert_whose_value_is_low_says_when_it_resolves() -> None:
    history = History()
    for now, value in ((0, 200), (60, 200)):
        history.measure(now, value)
    assert history.instances[0].description == "in words"
    assert history.measure(70, 0) == "firing"
    assert history.instances[0].description == (
        "in words; it fired at 3 min, and resolves when that has lasted 30 s"
    )
    assert history.measure(80, 200) == "firing"
    assert history.instances[0].description == "in words"
    history.measure(90, 0)
    assert history.measure(120, 0) == "inactive"
    assert history.transitions[-1].description == "in words"


def test_a_pending_alert_begins_anew_when_its_value_was_low_once() -> None:
    history = History()
    assert [history.measure(now, value) for now, value in ((0, 200), (50, 99), (60, 200), (119, 200))] == [
        *("pending", "inactive", "pending", "pending"),
    ]
    assert history.measure(120, 200) == "firing"


def test_a_value_between_the_two_thresholds_changes_nothing() -> None:
    history = History()
    for now, value in ((0, 101), (60, 101), (61, 99), (500, 81)):
        status = history.measure(now, value)
    assert status == "firing"
    assert history.changes() == ["fired"]


def test_a_silence_keeps_the_notification_back_until_it_is_over() -> None:
    history = History()
    silenced = {"late": 100.0}
    history.measure(0, 200, silenced)
    assert history.measure(60, 200, silenced) == "firing"
    assert history.changes() == []
    assert [transition.silenced for transition in history.transitions] == [True]
    history.measure(101, 200, silenced)
    assert history.changes() == ["fired"]


def test_nobody_is_notified_that_an_alert_resolves_that_nobody_was_notified_of() -> None:
    history = History()
    for now, value in ((0, 200), (60, 200), (70, 0), (100, 0)):
        history.measure(now, value, {"*": 1000.0})
    assert history.instances == ()
    assert history.changes() == []
    assert [transition.change for transition in history.transitions] == ["fired", "resolved"]


def test_silenced_alert_notifies_of_its_end_if_it_did_of_its_start() -> None:
    history = History()
    history.measure(0, 200)
    history.measure(60, 200)
    history.measure(70, 0, {"late": 1000.0})
    history.measure(100, 0, {"late": 1000.0})
    assert history.changes() == ["fired", "resolved"]


def test_an_alert_that_cannot_be_measured_keeps_its_status_for_a_while() -> None:
    history = History()
    history.measure(0, 200)
    history.measure(60, 200)
    assert history.measure(60 + KEPT_UNMEASURED, None) == "firing"
    assert history.measure(61 + KEPT_UNMEASURED, None) == "inactive"
    assert history.notifications[-1].description == "it is not measured any more"


steps = st.lists(
    st.tuples(
        st.floats(min_value=0, max_value=400),
        st.none() | st.floats(min_value=0, max_value=200),
        st.booleans(),
    ),
    max_size=60,
)


@given(steps, st.floats(min_value=0, max_value=100), st.floats(min_value=0, max_value=100))
def test_no_alert_fires_twice_without_a_resolution_between(
    taken: list[tuple[float, float | None, bool]], for_: float, keep: float
) -> None:
    history = History(AlertRule(name="late", condition=oldest(above=100), for_=for_, keep_firing_for=keep))
    now = 0.0
    for elapsed, value, is_silenced in taken:
        now += elapsed
        history.measure(now, value, {"late": now + 1} if is_silenced else None)
    expected = ["fired", "resolved"] * len(taken)
    assert history.changes() == expected[: len(history.changes())]
    assert len({change.id for change in history.transitions}) == len(history.transitions)
    for transition in history.transitions:
        if transition.change == "fired":
            assert transition.at - transition.since >= for_


@given(steps)
def test_what_is_decided_is_the_same_whoever_decides_it(
    taken: list[tuple[float, float | None, bool]],
) -> None:
    history, other = History(), History()
    now = 0.0
    for elapsed, value, _ in taken:
        now += elapsed
        history.measure(now, value)
        other.instances = StoredAlerts.unpack(StoredAlerts(other.instances).pack()).instances
        other.measure(now, value)
    assert history.transitions == other.transitions


def make_queue(**values: Any) -> MeasuredQueue:
    """Return what was measured of a queue; 0 where nothing is given."""
    depth = {"waiting": 0, "oldest": None, "dead": 0, "workers": 1, **values}
    return MeasuredQueue(depth=msgspec.convert(depth, QueueDepth))


def test_failures_are_counted_within_their_time_and_only_if_enough_have_ended() -> None:
    rule = AlertRule(name="fails", condition=failures(above=0.5, within=100, least=10))
    samples = (
        CounterSample(0, {"pay": TaskCount(500, 500)}, {}),
        CounterSample(90, {"pay": TaskCount(500, 1000)}, {}),
        CounterSample(150, {"pay": TaskCount(506, 1008)}, {}),
    )
    measured = MeasuredCluster(at=200, tasks={"pay": TaskCount(509, 1012), "new": TaskCount(9, 9)})
    readings = read_conditions([rule], measured, samples)
    assert readings["fails", "task pay"].value == 9 / 12
    assert readings["fails", "task pay"].description == "9 of 12 attempts of task pay failed (75%)"
    assert readings["fails", "task new"].value == 0


def test_dead_letters_count_by_how_many_were_added() -> None:
    rule = AlertRule(name="dead", condition=dead_letters(above=5, within=100))
    samples = (CounterSample(0, {}, {"mail": 7}), CounterSample(90, {}, {"mail": 9}))
    measured = MeasuredCluster(at=150, queues={"mail": make_queue(dead=20), "web": make_queue(dead=3)})
    readings = read_conditions([rule], measured, samples)
    assert {subject: reading.value for (_, subject), reading in readings.items()} == {
        "queue mail": 13,
        "queue web": 3,
    }


@pytest.mark.parametrize(
    ("samples", "deaths", "last", "value"),
    [
        ((), 1, 145.0, 1),  # nothing was sampled before: it counts all the same
        ((), 5, 145.0, 1),  # all but one may be old
        ((CounterSample(0, {}, {"mail": 0}, {}),), 1, 145.0, 1),
        ((CounterSample(0, {}, {"mail": 0}, {}),), 5, 145.0, 5),
        ((CounterSample(0, {}, {"mail": 0}),), 5, 145.0, 1),  # from before deaths were counted
        (
            (CounterSample(0, {}, {"web": 0}, {"pay": 2}),),
            5,
            145.0,
            1,
        ),  # the queue could not be measured then
        ((CounterSample(0, {}, {"mail": 0}, {"pay": 2}),), 5, 145.0, 3),
        ((CounterSample(0, {}, {"mail": 0}, {"pay": 7}),), 1, 145.0, 1),  # the totals have begun again
        ((CounterSample(0, {}, {"mail": 0}, {"pay": 1}),), 1, 20.0, 0),  # long ago
    ],
)
def test_workers_that_jobs_take_down_are_counted_from_the_first(
    samples: tuple[CounterSample, ...], deaths: int, last: float, value: float
) -> None:
    rule = AlertRule(name="kills", condition=worker_deaths(within=100))
    queue = make_queue(deaths={"pay": deaths}, last_deaths={"pay": last})
    measured = MeasuredCluster(at=150, queues={"mail": queue, "web": make_queue()})
    (reading,) = read_conditions([rule], measured, samples).values()
    assert reading.value == value
    assert reading.description.startswith(f"{deaths} worker")
    other = AlertRule(name="other", condition=worker_deaths("fetch", within=100))
    assert read_conditions([other], measured, samples) == {}


def make_lost(worker: str, at: float, **parts: Any) -> LostWorker:
    """A lost process."""
    return judge_repair(LostWorker(worker=worker, at=at, health="lost", **{"queues": ("mail",), **parts}))


def read_lost(at: float, *lost: LostWorker, queue: str = "") -> dict[str, AlertReading]:
    """What the rule on lost processes reads at a time."""
    rule = AlertRule(name="lost", condition=worker_lost(queue, within=100))
    readings = read_conditions([rule], MeasuredCluster(at=at, lost=lost), ())
    return {subject: reading for (_, subject), reading in readings.items()}


def test_each_lost_worker_has_an_alert_and_of_very_many_the_last_ones() -> None:
    lost = [make_lost(f"host:{number}:x", 100.0 + number) for number in range(23)]
    readings = {subject: reading.value for subject, reading in read_lost(150, *lost).items()}
    assert readings == {
        **{f"worker host:{number}": 1 for number in range(3, 23)},
        "further processes": 3,
    }
    assert read_lost(202, *lost)["further processes"].value == 1
    readings = {subject: reading.value for subject, reading in read_lost(230, lost[22]).items()}
    assert readings == {"worker host:22": 0}
    assert read_lost(150, *lost, queue="web") == {}


def test_alert_covers_lost_processes_of_every_kind() -> None:
    kinds = ("router", "scheduler", "controller", "publisher")
    others = [make_lost("vm:7:x", 140.0, kind=kind, queues=()) for kind in kinds]
    found = read_lost(150, make_lost("web1:a", 120.0), *others)
    assert {subject: reading.value for subject, reading in found.items()} == {
        "worker web1": 1,
        **{f"{kind} vm:7": 1 for kind in kinds},
    }
    assert found["scheduler vm:7"].description == "scheduler vm:7:x was lost 10 s ago"
    assert list(read_lost(150, make_lost("web1:a", 120.0), *others, queue="mail")) == ["worker web1"]


def test_worker_lost_alert_ends_at_once_when_the_loss_is_repaired() -> None:
    found = read_lost(150, make_lost("web1:a", 140.0, is_back=True), make_lost("web2:a", 140.0))
    assert {subject: reading.value for subject, reading in found.items()} == {
        "worker web1": 0,
        "worker web2": 1,
    }
    assert found["worker web1"].description == "worker web1:a was lost 10 s ago; repaired"
    thresholds = dict.fromkeys(AlertThresholds.__struct_fields__, 1.0)
    rules = {rule.name: rule for rule in make_builtin_rules(AlertThresholds(**thresholds))}
    assert (rules["worker-lost"].keep_firing_for, rules["worker-deaths"].keep_firing_for) == (0.0, 0.0)


def test_loss_that_is_open_counts_beside_a_later_one_that_is_repaired() -> None:
    lost = [make_lost("web1:a", 130.0, dead=1, dead_left=1), make_lost("web1:b", 140.0, is_back=True)]
    reading = read_lost(150, *lost)["worker web1"]
    assert (reading.value, reading.description) == (1, "worker web1:a was lost 20 s ago")


def test_alert_on_workers_that_jobs_take_down_ends_when_the_only_loss_is_repaired() -> None:
    rule = AlertRule(name="kills", condition=worker_deaths(within=100))
    queue = make_queue(deaths={"pay": 2}, last_deaths={"pay": 140.0})
    for lost, value in (
        ([make_lost("web1:a", 140.0, tasks=("pay",))], 1),
        ([make_lost("web1:a", 140.0, tasks=("pay",), is_back=True)], 0),
        ([make_lost(f"web{number}:a", 140.0, tasks=("pay",), is_back=True) for number in (1, 2)], 1),
    ):
        measured = MeasuredCluster(at=150, queues={"mail": queue}, lost=tuple(lost))
        (reading,) = read_conditions([rule], measured, ()).values()
        assert reading.value == value


def test_missing_members_have_an_alert_of_their_group_that_ends_when_they_work() -> None:
    rule = AlertRule(name="missing", condition=member_missing())
    groups = tuple(GroupReport(kind="worker", name=name, declared=2) for name in ("mail", "web"))
    gone = MissingMember(
        kind="worker", name="worker-mail-1", group="mail", condition="given up", since=90.0, why="it fell",
        remedy="celery5 controller restart worker-mail-1",
    )  # fmt: skip
    report = MembersReport(groups=(msgspec.structs.replace(groups[0], missing=2), groups[1]), missing=(gone,))
    found = _read(rule, MeasuredCluster(at=150, cluster=report, missing=report.missing))
    assert {subject: reading.value for subject, reading in found.items()} == {
        "group worker-mail": 2,
        "group worker-web": 0,
        "scheduler": 0,
    }
    assert found["group worker-mail"].description == (
        "worker-mail-1 is given up, and has been down for 1 min: it fell; "
        "celery5 controller restart worker-mail-1; and 1 more"
    )
    found = _read(rule, MeasuredCluster(at=160, cluster=MembersReport(groups=groups)))
    assert {reading.value for reading in found.values()} == {0}, "they work again, and the alert ends"
    only = AlertRule(name="missing", condition=member_missing("worker-web"))
    measured = MeasuredCluster(at=150, cluster=report, missing=report.missing)
    assert list(_read(only, measured)) == ["group worker-web"]


def test_schedules_without_any_scheduler_have_an_alert() -> None:
    rule = AlertRule(name="missing", condition=member_missing())
    missing = list_missing(BY_HAND, idle_schedules=2)
    (found,) = _read(rule, MeasuredCluster(at=150, missing=missing)).values()
    assert (found.value, found.description) == (
        1,
        "no Scheduler works: 2 schedules do not fire; celery5 scheduler start, with the code that declares them",
    )


def _read(rule: AlertRule, measured: MeasuredCluster) -> dict[str, AlertReading]:
    return {subject: reading for (_, subject), reading in read_conditions([rule], measured, ()).items()}


def test_runs_that_are_not_undone_have_an_alert_of_their_queue() -> None:
    def stopping(run: str, since: float, failed: int = 0) -> StoppingRun:
        return StoppingRun(id=run, since=since, failed=failed, description=f"run {run} is UNDOING")

    rule = AlertRule(name="undo", condition=not_undone(within=100))
    runs = (stopping("slow", 30.0), stopping("new", 100.0), stopping("dead", 120.0, 1))
    queues = {
        "mail": msgspec.structs.replace(make_queue(), stopping_runs=runs),
        "web": msgspec.structs.replace(make_queue(), stopping_runs=runs[1:2]),
    }
    measured = MeasuredCluster(at=150, queues=queues)
    found = {subject: reading for (_, subject), reading in read_conditions([rule], measured, ()).items()}
    assert {subject: reading.value for subject, reading in found.items()} == {"queue mail": 2, "queue web": 0}
    assert (
        found["queue mail"].description
        == "2 runs are not undone on queue mail: run dead is UNDOING, since 30 s"
    )
    only = AlertRule(name="undo", condition=not_undone("web", within=100))
    assert [key[1] for key in read_conditions([only], measured, ())] == ["queue web"]


def test_a_worker_whose_event_loop_is_blocked_has_an_alert_though_it_reports_no_lag() -> None:
    rule = AlertRule(name="lag", condition=loop_lag(above=1))
    queues = {
        name: make_queue(silent_workers={"web1:a": seconds})
        for name, seconds in (("mail", 94.0), ("web", 95.0))
    }
    found = read_conditions([rule], MeasuredCluster(at=150, queues=queues, loop_lag=0.004), ())
    assert {key[1]: (reading.value, reading.description) for key, reading in found.items()} == {
        "": (0.004, "the event loop of a process woke up 4 ms late"),
        "worker web1": (
            95.0,
            "worker web1:a has been silent for 2 min: its event loop is blocked, or cut off",
        ),
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_paused": True, "idle": 700.0}, "; paused"),
        ({"workers": 0}, "; nobody works on it"),
        ({"idle": 700.0}, "; nothing ends, 12 min"),
        ({}, ""),
    ],
)
def test_an_old_job_is_explained_as_the_verdict_of_its_queue_explains_it(
    changes: dict[str, Any], words: str
) -> None:
    rule = AlertRule(name="old", condition=oldest(above=300))
    is_paused = bool(changes.pop("is_paused", False))
    queue = make_queue(backlog=5, oldest=750.0 if words else 3.0, **changes)
    queue = msgspec.structs.replace(queue, is_paused=is_paused)
    (reading,) = read_conditions([rule], MeasuredCluster(at=150, queues={"mail": queue}), ()).values()
    age = "12 min" if words else "3 s"
    assert reading.description == f"the oldest job of queue mail has waited {age}{words}"


def test_of_a_worker_that_keeps_its_name_the_newest_loss_counts() -> None:
    found = read_lost(150, make_lost("web1:old", 10.0), make_lost("web1:new", 120.0))
    assert {subject: reading.value for subject, reading in found.items()} == {"worker web1": 1}
    assert "web1:new" in found["worker web1"].description


def test_samples_written_before_deaths_were_counted_are_read() -> None:
    packed = compress([[], [[1.0, {"pay": [1, 2]}, {"mail": 3}]]])
    assert StoredAlerts.unpack(packed).samples == (CounterSample(1.0, {"pay": TaskCount(1, 2)}, {"mail": 3}),)


def test_samples_are_bounded_and_reach_back_far_enough() -> None:
    rules = [
        AlertRule(name="short", condition=failures(above=0.5, within=60)),
        AlertRule(name="long", condition=dead_letters(above=5, within=3600)),
        AlertRule(name="kills", condition=worker_deaths(within=600)),
    ]
    samples: tuple[CounterSample, ...] = ()
    for at in range(0, 20_000, 5):
        samples = add_sample(samples, MeasuredCluster(at=at), rules)
        assert len(samples) <= 60
    assert samples[0].at <= at - 3600


def test_rules_are_written_in_settings_as_text() -> None:
    (rule,) = parse_rules(
        {"mail is late": "oldest queue=mail above=5m for=2m severity=critical keep_firing_for=30"}
    )
    condition = oldest("mail", above=300)
    assert rule == AlertRule(
        name="mail is late", condition=condition, for_=120, severity="critical", keep_firing_for=30
    )


@pytest.mark.parametrize(
    ("written", "error"),
    [
        ("oldes above=3", "alert 'x': nothing is measured as 'oldes'; did you mean 'oldest'?"),
        ("oldest", "alert 'x': it has no threshold: add above="),
        ("oldest above=soon", "alert 'x': above is 'soon': give a number, or a time such as 5m"),
        ("oldest abov=3", "alert 'x': 'abov=3' is no option=value; did you mean 'above'?"),
        ("oldest above=3 severity=bad", "alert 'x': severity is 'bad': give warning or critical"),
        ("oldest above=3 below=4", "alert 'x': below is 4, more than above"),
        ("failures above=20", "alert 'x': above is 20: give a share below 1, such as 0.2"),
        ("failures above=0.2 within=2h", "alert 'x': within is 7200: give up to 3600 seconds"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_in_one_line(written: str, error: str) -> None:
    with pytest.raises(Misconfigured, match=f"^{re.escape(error)}$"):
        parse_rules({"x": written})


def test_unknown_queues_and_tasks_are_refused_in_one_line() -> None:
    rule = AlertRule(name="late", condition=oldest("mial", above=3))
    with pytest.raises(
        Misconfigured, match=r"^alert 'late': there is no queue 'mial'; did you mean 'mail'\?$"
    ):
        check_names(rule, queues=["mail"], tasks=[])
    rule = AlertRule(name="fails", condition=failures("pay", above=0.3))
    with pytest.raises(Misconfigured, match=r"^alert 'fails': there is no task 'pay'; known: none$"):
        check_names(rule, queues=[], tasks=[])


@pytest.mark.parametrize("name", ["", "*", "two\nlines", " x", "x" * 101])
def test_a_name_is_one_line(name: str) -> None:
    with pytest.raises(Misconfigured):
        check_rule(AlertRule(name=name, condition=oldest(above=3)))


def test_a_threshold_of_0_switches_a_built_in_rule_off() -> None:
    off = AlertThresholds(oldest=0, failures=0, no_workers=0, dead=0, stream_lag=0, loop_lag=0)
    assert make_builtin_rules(off) == ()


def test_a_message_is_signed_as_standard_webhooks_verify_it() -> None:
    secret = "whsec_" + "bm90IGEgc2VjcmV0IGF0IGFsbCwgYnV0IGxvbmc="
    history = History()
    history.measure(0, 200)
    history.measure(60, 200)
    (fired,) = history.notifications
    body = make_alert_message("shop", fired)
    assert msgspec.json.decode(body)["type"] == "alert.fired"
    headers = {
        "webhook-id": fired.id,
        "webhook-timestamp": "1000",
        "webhook-signature": sign_webhook(parse_webhook_secret(secret), fired.id, "1000", body),
    }
    assert verified(headers, body, [key_of(secret)], now=1000) == fired.id


@pytest.mark.parametrize("url", ["ftp://host/", "https://", "host", "https://ho st/", "http://host:x/"])
def test_only_a_url_of_http_is_a_webhook(url: str) -> None:
    with pytest.raises(
        Misconfigured, match=r"^alert_webhook is no URL of a webhook: give https://host/path$"
    ):
        check_webhook_url(url)


def test_a_short_secret_is_refused_without_being_shown() -> None:
    with pytest.raises(Misconfigured, match=r"^alert_webhook_secret cannot be read") as raised:
        parse_webhook_secret("whsec_c2hvcnQ=")
    assert "c2hvcnQ" not in str(raised.value)
