"""Supervision: what follows when a boot step or a service fails."""

from itertools import product

import pytest

from celery5 import Misconfigured, RetryPolicy
from celery5.boot_step import BootStep, check_boot_steps, service
from celery5.protocol.process.supervision import (
    STABLE_AFTER,
    STEP_DECISIONS,
    FailurePhase,
    RetryState,
    StepDecision,
)

TWICE = RetryPolicy(max_retries=2, backoff=1.0, jitter=False)


async def work() -> None:
    """A preparation."""


class StockPrices:
    """A service."""

    async def run(self) -> None: ...


def test_for_every_failure_there_is_a_ruling() -> None:
    assert set(STEP_DECISIONS) == set(product(FailurePhase, (True, False), (True, False)))


def test_nothing_that_is_optional_stops_a_worker() -> None:
    assert not [key for key, ruling in STEP_DECISIONS.items() if key[1] and ruling is StepDecision.STOP]


def test_a_mandatory_step_without_retries_stops_the_worker_at_once() -> None:
    assert BootStep("a", work).retry_state.record_failure()[1] is StepDecision.STOP


def test_mandatory_step_stops_the_worker_after_its_retries() -> None:
    course, rulings = BootStep("a", work, retry=TWICE).retry_state, []
    for _ in range(3):
        course, ruling = course.record_failure()
        rulings.append(ruling)
    assert rulings == [StepDecision.RETRY, StepDecision.RETRY, StepDecision.STOP]


def test_optional_step_is_given_up_after_some_tries() -> None:
    course, ruling = BootStep("a", work, optional=True, retry=TWICE).retry_state.record_failure()
    assert ruling is StepDecision.DEFER
    for _ in range(3):
        course, rulings = course.restarted(), []
        for _ in range(2):
            course, ruling = course.record_failure()
            rulings.append(ruling)
        assert rulings == [StepDecision.RETRY, StepDecision.GIVE_UP]


def test_an_optional_step_without_retries_is_given_up_but_tried_once_when_asked_for() -> None:
    course, ruling = BootStep(
        "a", work, optional=True, retry=RetryPolicy(max_retries=0)
    ).retry_state.record_failure()
    assert ruling is StepDecision.GIVE_UP
    assert course.max_tries == 1


def test_what_crashes_is_restarted_so_often_in_a_row() -> None:
    course, rulings = service(StockPrices, retry=TWICE).retry_state, []
    for up_for in (1.0, None, 0.0):  # the second restart did not even come up
        course, ruling = course.record_failure(uptime=up_for)
        rulings.append(ruling)
    assert rulings == [StepDecision.RETRY, StepDecision.RETRY, StepDecision.STOP]


def test_what_was_up_for_a_while_begins_with_a_clean_record() -> None:
    course = service(StockPrices, retry=TWICE).retry_state
    for _ in range(10):
        course, ruling = course.record_failure(uptime=STABLE_AFTER)
        assert ruling is StepDecision.RETRY
        assert course.get_delay(lambda: 0.5) == 1.0


def test_a_crash_because_redis_is_away_does_not_count_but_waits() -> None:
    course = service(StockPrices, retry=TWICE).retry_state
    for _ in range(10):
        course, ruling = course.record_failure(uptime=0.1, is_outage=True)
        assert ruling is StepDecision.RETRY
        assert course.get_delay(lambda: 0.5) == 1.0


def test_a_start_that_fails_because_redis_is_away_counts() -> None:
    assert BootStep("a", work).retry_state.record_failure(is_outage=True)[1] is StepDecision.STOP


def test_an_error_that_the_policy_does_not_try_again_for_is_final() -> None:
    assert (
        service(StockPrices, retry=TWICE).retry_state.record_failure(uptime=1.0, final=True)[1]
        is StepDecision.STOP
    )
    assert (
        service(StockPrices, optional=True).retry_state.record_failure(uptime=1.0, final=True)[1]
        is StepDecision.GIVE_UP
    )


def test_the_waits_grow() -> None:
    course, waits = (
        RetryState(optional=False, policy=RetryPolicy(max_retries=9, backoff=1.0, cap=5.0, jitter=False)),
        [],
    )
    for _ in range(4):
        course, _ = course.record_failure()
        waits.append(course.get_delay(lambda: 0.0))
    assert waits == [1.0, 2.0, 4.0, 5.0]


def test_a_service_is_named_after_its_class_or_function() -> None:
    steps = check_boot_steps([], [StockPrices, work, "shop.prices:HTTPPrices"])
    assert [step.name for step in steps] == ["stock-prices", "work", "httpprices"]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: BootStep("two words", work), "boot step name 'two words'"),
        (lambda: BootStep("a", 7), "run is 7"),
        (lambda: BootStep("a", work, start_limit=0), "start_limit is 0"),
        (lambda: BootStep("a", work, stop_limit=True), "stop_limit is True"),
        (lambda: BootStep("a", work, requires=(7,)), r"requires \(7,\)"),  # type: ignore[arg-type]
        (lambda: BootStep("a", work, retry={"tries": 3}), "boot step 'a': retry_policy has 'tries'"),
        (lambda: BootStep("a", work, undo=7), "undo is 7"),  # type: ignore[arg-type]
        (lambda: check_boot_steps([work], []), "bootsteps has <function work"),
        (lambda: check_boot_steps(work, []), "give a list"),  # type: ignore[arg-type]
        (
            lambda: check_boot_steps([], [work, StockPrices, BootStep("work", work)]),
            "two boot steps or services are named 'work'",
        ),
        (lambda: check_boot_steps([], [7]), "give a function or a class"),
    ],
)
def test_what_makes_no_sense_is_told_when_it_is_declared(make: object, why: str) -> None:
    with pytest.raises(Misconfigured, match=why):
        make()  # type: ignore[operator]
