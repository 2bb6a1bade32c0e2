"""Breaker: when it refuses, when it lets one probe through, and how long it stays open.

Floor: tests. Reads: nothing. Writes: nothing.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.breaker import TRANSITIONS, Breaker, BreakerEvent, BreakerPolicy, BreakerState, Growth

FAST = BreakerPolicy(threshold=3, reset=10, growth="none", longest=100)


def opened(policy: BreakerPolicy = FAST, *, at: float = 0) -> Breaker:
    """A breaker that has just opened."""
    breaker = Breaker(policy=policy)
    for _ in range(policy.threshold):
        breaker = breaker.failed(at)
    return breaker


def test_the_table_answers_every_event_in_every_state() -> None:
    assert set(TRANSITIONS) == set(BreakerState)
    assert all(set(row) == set(BreakerEvent) for row in TRANSITIONS.values())


def test_it_opens_after_three_failures_in_a_row() -> None:
    breaker = Breaker(policy=FAST).failed(0).failed(0)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allows(0)
    breaker = breaker.failed(0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows(9.99)


def test_a_success_in_between_starts_the_count_again() -> None:
    breaker = Breaker(policy=FAST).failed(0).failed(0).succeeded().failed(0).failed(0)
    assert breaker.state is BreakerState.CLOSED


def test_one_probe_may_pass_when_the_open_period_is_over() -> None:
    breaker = opened()
    assert breaker.begin(5) is breaker
    assert breaker.allows(10)
    breaker = breaker.begin(10)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allows(10)
    assert not breaker.allows(1e9)


def test_a_probe_that_succeeds_closes_it_and_forgets_everything() -> None:
    assert opened().begin(10).succeeded() == Breaker(policy=FAST)


def test_a_probe_that_fails_opens_it_again() -> None:
    breaker = opened().begin(10).failed(11)
    assert breaker.state is BreakerState.OPEN
    assert (breaker.allows(20.9), breaker.allows(21)) == (False, True)


def test_a_probe_that_was_given_up_leaves_room_for_the_next_at_once() -> None:
    breaker = opened().begin(10).given_up(12)
    assert breaker.state is BreakerState.OPEN
    assert breaker.allows(12)
    assert Breaker(policy=FAST).given_up(12) == Breaker(policy=FAST)


def test_what_began_before_it_opened_changes_nothing_when_it_ends_late() -> None:
    breaker = opened(at=0)
    assert breaker.failed(9) is breaker
    assert breaker.succeeded() is breaker


@pytest.mark.parametrize(
    ("growth", "periods"),
    [("none", [10, 10, 10, 10, 10]), ("linear", [10, 20, 30, 40, 45]), ("exponential", [10, 20, 40, 45, 45])],
)
def test_the_open_period_grows_as_wished_and_no_longer_than_the_cap(
    growth: Growth, periods: list[float]
) -> None:
    breaker = opened(BreakerPolicy(threshold=1, reset=10, growth=growth, longest=45))
    seen: list[float] = [breaker.until]
    for _ in range(4):
        now = breaker.until
        breaker = breaker.begin(now).failed(now)
        seen.append(breaker.until - now)
    assert seen == periods


@pytest.mark.parametrize(
    "wrong",
    [{"threshold": 0}, {"reset": -1.0}, {"reset": 10.0, "longest": 5.0}],
    ids=lambda wrong: str(wrong),
)
def test_a_policy_without_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a breaker needs"):
        BreakerPolicy(**wrong)  # type: ignore[arg-type]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["succeeded", "failed", "begin", "given_up"]), st.floats(0, 20))
    ),
    growth=st.sampled_from(["none", "linear", "exponential"]),
)
def test_whatever_happens_it_lets_somebody_through_again(
    steps: list[tuple[str, float]], growth: Growth
) -> None:
    policy = BreakerPolicy(threshold=2, reset=5, growth=growth, longest=20)
    breaker, now = Breaker(policy=policy), 0.0
    for step, passed in steps:
        now += passed
        if step == "succeeded":
            breaker = breaker.succeeded()
        elif step == "begin":
            breaker = breaker.begin(now) if breaker.allows(now) else breaker
        elif step == "failed":
            breaker = breaker.failed(now)
        else:
            breaker = breaker.given_up(now)
        if breaker.state is BreakerState.OPEN:
            assert breaker.until <= now + policy.longest
    if breaker.state is BreakerState.HALF_OPEN:
        breaker = breaker.failed(now)
    assert breaker.allows(now + policy.longest)
