"""Limit rules: when they hold, and what holds when operators have set another limit."""

from collections.abc import Mapping
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from celery5 import App, Misconfigured
from celery5.health import HealthCheck
from celery5.limits import TimeWindow
from celery5.processes import scheduler
from celery5.protocol.limit_rules import (
    Day,
    ImposedLimits,
    LimitRule,
    compare_rules,
    get_rules_of_task,
    merge_limits,
)
from celery5.protocol.limits import LimitOverride

MONDAY = "2026-11-23"


def at(day: str, time: str) -> datetime:
    return datetime.fromisoformat(f"{day}T{time}")


@pytest.mark.parametrize(
    ("window", "time", "is_inside"),
    [
        (("09:00", "17:00"), "08:59", False),
        (("09:00", "17:00"), "09:00", True),
        (("09:00", "17:00"), "16:59", True),
        (("09:00", "17:00"), "17:00", False),
        (("22:00", "06:00"), "23:30", True),
        (("22:00", "06:00"), "05:59", True),
        (("22:00", "06:00"), "06:00", False),
        (("22:00", "06:00"), "12:00", False),
        (("00:00", "00:00"), "12:00", True),
    ],
)
def test_a_window_holds_from_its_start_to_before_its_end(
    window: tuple[str, str], time: str, *, is_inside: bool
) -> None:
    assert TimeWindow(*window).contains(at(MONDAY, time)) is is_inside


@pytest.mark.parametrize(("days", "is_inside"), [(("sun",), True), (("mon",), False), (("sat", "sun"), True)])
def test_a_window_over_midnight_belongs_to_the_day_on_which_it_began(
    days: tuple[Day, ...], *, is_inside: bool
) -> None:
    assert TimeWindow("22:00", "06:00", days=days).contains(at(MONDAY, "03:00")) is is_inside


@pytest.mark.parametrize("window", [TimeWindow("9:00", "10:00"), TimeWindow("09:00", "24:00")])
def test_a_time_that_no_clock_shows_is_refused(window: TimeWindow) -> None:
    with pytest.raises(Misconfigured, match="no time of day"):
        window.validate("night")


def test_all_conditions_of_a_rule_must_hold() -> None:
    rule = LimitRule(
        name="r",
        task="t",
        override=LimitOverride(limit=1),
        during=TimeWindow("09:00", "10:00"),
        check="db",
        states=("down",),
    )
    inside, outside = at(MONDAY, "09:30"), at(MONDAY, "10:30")
    assert rule.holds(inside, "down")
    assert not rule.holds(outside, "down")
    assert not rule.holds(inside, "up")
    assert not rule.holds(inside, None), "nobody knows"


@pytest.mark.parametrize(
    ("by_operator", "by_rules", "limit", "rate", "by"),
    [
        (LimitOverride(limit=1), {"r": LimitOverride(limit=5)}, 5, "", "rule r"),
        (LimitOverride(limit=9, by="ann"), {"r": LimitOverride(limit=5)}, 5, "", "rule r"),
        (None, {"r": LimitOverride(limit=5), "q": LimitOverride(limit=2)}, 2, "", "rule q, rule r"),
        (None, {"r": LimitOverride(limit=0), "q": LimitOverride(limit=2)}, 0, "", "rule q, rule r"),
        (LimitOverride(rate="5/s", by="ann"), {"r": LimitOverride(limit=5)}, 5, "5/s", "rule r, ann"),
        (LimitOverride(rate="5/s"), {"r": LimitOverride(rate="9/s")}, None, "9/s", "rule r"),
        (None, {"r": LimitOverride(rate="9/s"), "q": LimitOverride(rate="60/m")}, None, "60/m", "rule q, rule r"),
        (LimitOverride(limit=4, by="ann"), {}, 4, "", "ann"),
    ],
)  # fmt: skip
def test_what_the_scheduler_imposes_beats_what_an_operator_set(
    by_operator: LimitOverride | None,
    by_rules: Mapping[str, LimitOverride],
    limit: int | None,
    rate: str,
    by: str,
) -> None:
    operators = {} if by_operator is None else {"t": by_operator}
    imposed = ImposedLimits("scheduler", {rule: {"t": override} for rule, override in by_rules.items()})
    merged = merge_limits(operators, imposed)["t"]
    assert (merged.limit, merged.rate, merged.by) == (limit, rate, by)
    assert get_rules_of_task("t", imposed) == tuple(sorted(by_rules))


def test_another_task_keeps_what_an_operator_set() -> None:
    operators = {"other": LimitOverride(limit=3)}
    merged = merge_limits(operators, ImposedLimits("s", {"r": {"t": LimitOverride(limit=1)}}))
    assert merged["other"].limit == 3


def test_the_next_scheduler_begins_no_rule_again() -> None:
    rules = {"r": {"t": LimitOverride(limit=1)}, "q": {"t": LimitOverride(limit=2)}}
    assert not compare_rules(ImposedLimits("one", rules), ImposedLimits("two", rules)).begun
    changes = compare_rules(
        ImposedLimits("one", rules), ImposedLimits("two", {"r": {"t": LimitOverride(limit=3)}})
    )
    assert (list(changes.begun), changes.ended) == (["r"], ("q",))


def declare() -> App:
    app = App("shop")

    @app.task(name="mail")
    async def mail() -> None: ...

    return app


def test_the_zone_of_a_window_is_its_own_or_that_of_the_application() -> None:
    app = declare()
    app.configure(timezone="Asia/Tokyo")
    app.limits.rule("a", task="mail", limit=1, during="09:00-10:00")
    app.limits.rule("b", task="mail", limit=1, during=TimeWindow("09:00", "10:00", timezone="Europe/Berlin"))
    declared = scheduler.resolve_rules(app)
    noon = datetime(2026, 11, 23, 0, 30, tzinfo=ZoneInfo("UTC")).timestamp()
    local = [declared.get_local_time(rule, noon) for rule in declared.rules]
    assert [time and time.hour for time in local] == [9, 1]
    assert [rule.holds(time, None) for rule, time in zip(declared.rules, local, strict=True)] == [True, False]


def takes_nothing() -> None: ...


def test_a_rule_that_makes_no_sense_is_refused() -> None:
    app = declare()
    own, shared = HealthCheck("own"), HealthCheck("shared", scope="global")
    with pytest.raises(Misconfigured, match=r"give limit=, rate="):
        app.limits.rule("a", task="mail")
    with pytest.raises(Misconfigured, match="own has no one state for all workers"):
        app.limits.rule("a", task="mail", limit=1, when=own)
    with pytest.raises(Misconfigured, match="vpn has no one state for all workers"):
        app.limits.rule("a", task="mail", limit=1, when=HealthCheck("vpn", scope="group"))
    with pytest.raises(Misconfigured, match="has no state 'soso'"):
        app.limits.rule("a", task="mail", limit=1, when=shared, states=["soso"])
    with pytest.raises(Misconfigured, match="give when="):
        app.limits.rule("a", task="mail", limit=1, states=["unhealthy"])
    with pytest.raises(Misconfigured, match="no time of day"):
        app.limits.rule("a", task="mail", limit=1, during="at night")
    with pytest.raises(Misconfigured, match="without spaces"):
        app.limits.rule("at night", task="mail", limit=1)
    with pytest.raises(Misconfigured, match="does not take one argument"):
        app.limit_rule(takes_nothing)
    with pytest.raises(Misconfigured, match="give seconds"):
        app.limit_rule(every=0)(lambda snapshot: {})
    assert not app.limit_rule.is_used
    app.limits.rule("a", task="mail", limit=1)
    with pytest.raises(Misconfigured, match="two limit rules"):
        app.limits.rule("a", task="mail", limit=1)
    assert scheduler.is_needed(app)


def test_a_scheduler_does_not_start_with_a_rule_about_what_is_not_there() -> None:
    app = declare()
    app.limits.rule("a", task="mial", limit=1)
    with pytest.raises(Misconfigured, match="'mial' is no task"):
        scheduler.check(app)
    app = declare()
    app.limits.rule("a", task="mail", limit=1, when=HealthCheck("shared", scope="global"))
    with pytest.raises(Misconfigured, match="no worker runs the health check 'shared'"):
        scheduler.check(app)
    with pytest.raises(Misconfigured, match="Mars/Base"):
        declare().limits.rule(
            "a", task="mail", limit=1, during=TimeWindow("09:00", "10:00", timezone="Mars/Base")
        )


def test_a_function_returns_limits_and_rates_by_task() -> None:
    app = declare()
    declared = scheduler.resolve_rules(app)
    limits = declared.parse_limits("r", {app.tasks["mail"]: 3})
    assert limits == {"mail": LimitOverride(limit=3)}
    assert declared.parse_limits("r", {"mail": "5/s"}) == {"mail": LimitOverride(rate="5/s")}
    assert declared.parse_limits("r", {"mail": None}) == declared.parse_limits("r", None) == {}
    for wrong, why in (
        ({"mial": 1}, "no task"),
        ({"mail": 1.5}, "give a number"),
        (3, "return limits by task"),
    ):
        with pytest.raises(Misconfigured, match=why):
            declared.parse_limits("r", wrong)
