"""Breaker: when it trips, when it refuses, when it lets one probe through, how long it stays open, how loud it is."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.errors import Misconfigured
from celery5.protocol.health.breaker import (
    TRANSITIONS,
    Breaker,
    BreakerEvent,
    BreakerPolicy,
    BreakerState,
    PeriodGrowth,
)

FAST = BreakerPolicy(threshold=3, reset=10, growth="none", longest=100)


def opened(policy: BreakerPolicy = FAST, *, at: float = 0) -> Breaker:
    """A breaker that has just opened."""
    breaker = Breaker(policy=policy)
    for _ in range(policy.threshold or 0):
        breaker = breaker.after_failure(at)
    return breaker


def test_the_table_answers_every_event_in_every_state() -> None:
    assert set(TRANSITIONS) == set(BreakerState)
    assert all(set(row) == set(BreakerEvent) for row in TRANSITIONS.values())


def test_it_opens_after_three_failures_in_a_row() -> None:
    breaker = Breaker(policy=FAST).after_failure(0).after_failure(0)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.is_allowed(0)
    breaker = breaker.after_failure(0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.is_allowed(9.99)


def test_a_success_in_between_starts_the_count_again() -> None:
    breaker = (
        Breaker(policy=FAST)
        .after_failure(0)
        .after_failure(0)
        .after_success()
        .after_failure(0)
        .after_failure(0)
    )
    assert breaker.state is BreakerState.CLOSED


def test_one_probe_may_pass_when_the_open_period_is_over() -> None:
    breaker = opened()
    assert breaker.with_probe(5) is breaker
    assert breaker.is_allowed(10)
    breaker = breaker.with_probe(10)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.is_allowed(10)
    assert not breaker.is_allowed(1e9)


def test_a_probe_that_succeeds_closes_it_and_forgets_everything_but_the_trip() -> None:
    assert opened().with_probe(10).after_success() == Breaker(policy=FAST, trips=(0,))


def test_a_probe_that_fails_opens_it_again() -> None:
    breaker = opened().with_probe(10).after_failure(11)
    assert breaker.state is BreakerState.OPEN
    assert (breaker.is_allowed(20.9), breaker.is_allowed(21)) == (False, True)


def test_a_probe_that_was_given_up_leaves_room_for_the_next_at_once() -> None:
    breaker = opened().with_probe(10).after_cancelled_probe(12)
    assert breaker.state is BreakerState.OPEN
    assert breaker.is_allowed(12)
    assert Breaker(policy=FAST).after_cancelled_probe(12) == Breaker(policy=FAST)


def test_what_began_before_it_opened_changes_nothing_when_it_ends_late() -> None:
    breaker = opened(at=0)
    assert breaker.after_failure(9) is breaker
    assert breaker.after_success() is breaker


@pytest.mark.parametrize(
    ("growth", "periods"),
    [("none", [10, 10, 10, 10, 10]), ("linear", [10, 20, 30, 40, 45]), ("exponential", [10, 20, 40, 45, 45])],
)
def test_the_open_period_grows_as_wished_and_no_longer_than_the_cap(
    growth: PeriodGrowth, periods: list[float]
) -> None:
    breaker = opened(BreakerPolicy(threshold=1, reset=10, growth=growth, longest=45))
    seen: list[float] = [breaker.open_until]
    for _ in range(4):
        now = breaker.open_until
        breaker = breaker.with_probe(now).after_failure(now)
        seen.append(breaker.open_until - now)
    assert seen == periods


@pytest.mark.parametrize(
    "wrong",
    [
        {"threshold": 0},
        {"reset": -1.0},
        {"reset": 10.0, "longest": 5.0},
        {"window": 0.0},
        {"within": 0.0},
        {"allowed": {"bad": -1}},
        {"error_after": 0},
        {"growth": "fast"},
        {"mode": "block"},
    ],
    ids=lambda wrong: str(wrong),
)
def test_a_policy_without_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Misconfigured, match="a breaker needs"):
        BreakerPolicy(**wrong)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["succeeded", "failed", "begin", "given_up"]), st.floats(0, 20))
    ),
    growth=st.sampled_from(["none", "linear", "exponential"]),
)
def test_whatever_happens_it_lets_somebody_through_again(
    steps: list[tuple[str, float]], growth: PeriodGrowth
) -> None:
    policy = BreakerPolicy(threshold=2, reset=5, growth=growth, longest=20)
    breaker, now = Breaker(policy=policy), 0.0
    for step, passed in steps:
        now += passed
        if step == "succeeded":
            breaker = breaker.after_success()
        elif step == "begin":
            breaker = breaker.with_probe(now) if breaker.is_allowed(now) else breaker
        elif step == "failed":
            breaker = breaker.after_failure(now)
        else:
            breaker = breaker.after_cancelled_probe(now)
        if breaker.state is BreakerState.OPEN:
            assert breaker.open_until <= now + policy.longest
    if breaker.state is BreakerState.HALF_OPEN:
        breaker = breaker.after_failure(now)
    assert breaker.is_allowed(now + policy.longest)


def test_failures_within_a_window_trip_it_whatever_succeeds_in_between() -> None:
    policy = BreakerPolicy(threshold=3, window=10)
    breaker = Breaker(policy=policy).after_failure(0).after_success().after_failure(5).after_success()
    assert breaker.after_failure(10).state is BreakerState.CLOSED  # the first was 10 s ago
    assert breaker.after_failure(9.9).state is BreakerState.OPEN


def test_without_a_threshold_failures_do_not_trip_it_but_a_failed_probe_does() -> None:
    breaker = Breaker(policy=BreakerPolicy(threshold=None))
    assert breaker.after_failure(0) is breaker
    breaker = breaker.after_report("bad", 0, allowed=0, within=10)
    assert breaker.state is BreakerState.OPEN
    assert breaker.with_probe(30).after_failure(31).state is BreakerState.OPEN


def unhealthy(breaker: Breaker, now: float) -> Breaker:
    """One more, of 2 that are allowed in 10 s."""
    return breaker.after_report("unhealthy", now, allowed=2, within=10)


def degraded(breaker: Breaker, now: float) -> Breaker:
    """One more, of 10 that are allowed in 10 s."""
    return breaker.after_report("degraded", now, allowed=10, within=10)


def trip(breaker: Breaker, now: float) -> Breaker:
    """Three at once, when it lets calls through."""
    for _ in range(3):
        breaker = unhealthy(breaker, now)
    assert breaker.state is BreakerState.OPEN
    return breaker


def closed_again(breaker: Breaker) -> Breaker:
    """It waits its 30 s, and its probe succeeds."""
    assert not breaker.is_allowed(breaker.open_until - 0.001)
    assert breaker.is_allowed(breaker.open_until)
    return breaker.with_probe(breaker.open_until).after_success()


def test_the_example_of_the_proposal() -> None:
    # At most 2 Unhealthy and/or 10 Degraded within 10 s.
    breaker = Breaker()
    for at in range(10):
        breaker = degraded(breaker, at * 0.9)
    breaker = unhealthy(unhealthy(breaker, 8.2), 8.3)
    assert breaker.state is BreakerState.CLOSED
    assert degraded(breaker, 8.4).state is BreakerState.OPEN
    assert unhealthy(breaker, 8.4).state is BreakerState.OPEN
    # Later than that the first are out of the window: ten degraded states in any 10 s are borne.
    for at in range(10, 100):
        breaker = degraded(breaker, at * 1.0)
    assert breaker.state is BreakerState.CLOSED

    # Tripped, it is closed again after 30 s.
    breaker = trip(Breaker(), 100)
    assert (breaker.open_until, breaker.log_level(100)) == (130, "warning")
    breaker = trip(closed_again(breaker), 200)
    assert (breaker.open_until, breaker.log_level(200)) == (230, "warning")
    # The third trip within 5 minutes is an error, and so are all for 30 minutes.
    breaker = trip(closed_again(breaker), 399)
    assert breaker.log_level(399) == "error"
    breaker = trip(closed_again(breaker), 399 + 1799)
    assert breaker.log_level(399 + 1799) == "error"
    breaker = trip(closed_again(breaker), 399 + 1799 + 30)
    assert breaker.log_level(399 + 1799 + 30) == "warning"


def test_three_trips_in_more_than_five_minutes_stay_warnings() -> None:
    breaker = Breaker()
    for at in (0, 150, 300, 450, 600, 750):
        breaker = trip(breaker, at)
        assert breaker.log_level(at) == "warning"
        breaker = closed_again(breaker)


def test_open_breaker_ignores_reports_and_reopens_during_the_probe() -> None:
    breaker = trip(Breaker(), 0)
    assert unhealthy(breaker, 1) is breaker
    half = breaker.with_probe(30)
    assert trip(half, 31).open_until == 61


class History:
    """What the property test remembers, to know by itself what a breaker must do."""

    def __init__(self) -> None:
        self.row = 0
        self.reports: list[float] = []
        self.trips: list[float] = []
        self.loud_until = -1.0

    def trip(self, now: float, policy: BreakerPolicy) -> str:
        self.trips.append(now)
        lately = [at for at in self.trips if now - at < policy.error_within]
        if now >= self.loud_until and len(lately) >= policy.error_after:
            self.loud_until = now + policy.error_for
        self.row, self.reports = 0, []
        return "error" if now < self.loud_until else "warning"


@given(
    st.lists(
        st.tuples(st.sampled_from(["ok", "failed", "bad", "begin", "give up"]), st.floats(0, 12)), max_size=80
    )
)
def test_it_is_what_its_history_says(steps: list[tuple[str, float]]) -> None:
    policy = BreakerPolicy(threshold=3, reset=5, error_after=2, error_within=20, error_for=30)
    breaker, past, now = Breaker(policy=policy), History(), 0.0
    for step, passed in steps:
        now += passed
        before = breaker.state
        expected = before
        if step == "ok":
            breaker = breaker.after_success()
            expected = before if before is BreakerState.OPEN else BreakerState.CLOSED
            past.row = 0
            past.reports = past.reports if before is BreakerState.CLOSED else []
        elif step == "failed":
            breaker = breaker.after_failure(now)
            past.row += before is BreakerState.CLOSED
            if before is BreakerState.HALF_OPEN or past.row == 3:
                expected = BreakerState.OPEN
        elif step == "bad":
            breaker = breaker.after_report("bad", now, allowed=2, within=10)
            past.reports += [now] if before is not BreakerState.OPEN else []
            if len([at for at in past.reports if now - at < 10]) > 2:
                expected = BreakerState.OPEN
        elif step == "begin" and breaker.is_allowed(now):
            breaker = breaker.with_probe(now)
            expected = BreakerState.HALF_OPEN if before is BreakerState.OPEN else before
        elif step == "give up":
            breaker = breaker.after_cancelled_probe(now)
            expected = BreakerState.OPEN if before is BreakerState.HALF_OPEN else before
        assert breaker.state is expected
        if expected is BreakerState.OPEN and before is not expected and step != "give up":
            assert breaker.open_until == now + 5
            assert breaker.log_level(now) == past.trip(now, policy)
        assert len(breaker.bad_states) <= 3
        assert len(breaker.trips) <= policy.error_after
