"""Canary limit: how many more jobs a canary may take, by what it holds and what has failed, and until when."""

import math

import pytest

from celery5.protocol.cluster.canary_limit import (
    CANARY_VARIABLE,
    VERDICT_PAUSE,
    CanaryBounds,
    CanaryLimit,
    format_bounds,
    parse_bounds,
)

BOUNDS = CanaryBounds(10, 120.0)


class Canary:
    """A limit with a clock and a count of failures that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.failures = 0
        self.limit = CanaryLimit(BOUNDS, count_failures=lambda: self.failures, clock=lambda: self.now)


def test_jobs_that_are_held_and_attempts_that_failed_share_one_bound() -> None:
    canary = Canary()
    assert canary.limit.count_free(0) == 10
    assert canary.limit.count_free(7) == 3
    canary.failures = 2
    assert canary.limit.count_free(7) == 1
    assert canary.limit.count_free(9) == 0


def test_pause_of_a_canary_ends_and_failures_are_counted_again_from_there() -> None:
    canary = Canary()
    assert canary.limit.pause_left == math.inf
    canary.limit.count_free(0)
    canary.failures = 10
    assert canary.limit.count_free(0) == 0
    assert canary.limit.pause_left == VERDICT_PAUSE
    canary.now += VERDICT_PAUSE - 1
    assert (canary.limit.count_free(0), canary.limit.pause_left, canary.limit.next_change) == (0, 1, 1)
    canary.failures = 12
    canary.now += 1
    assert (canary.limit.pause_left, canary.limit.next_change) == (0, 0), (
        "until it is asked, which ends the pause"
    )
    assert (canary.limit.count_free(0), canary.limit.pause_left) == (10, math.inf)
    canary.failures = 13
    assert canary.limit.count_free(0) == 9


def test_limit_of_a_canary_ends_after_its_time_and_one_pause() -> None:
    canary = Canary()
    canary.limit.count_free(0)
    canary.now += BOUNDS.seconds + VERDICT_PAUSE - 1
    assert canary.limit.count_free(10) == 0
    assert (canary.limit.pause_left, canary.limit.next_change) == (math.inf, 1)
    canary.failures = 99
    canary.now += 1
    assert canary.limit.next_change == 0, "until it is asked, which ends the limit"
    assert canary.limit.count_free(10) == math.inf
    assert (canary.limit.pause_left, canary.limit.next_change) == (math.inf, math.inf)


@pytest.mark.parametrize("text", ["", "10", "10/", "/120", "many/120"])
def test_bounds_that_cannot_be_read_are_none(text: str) -> None:
    assert parse_bounds({CANARY_VARIABLE: text}) is None
    assert parse_bounds({}) is None


def test_bounds_are_read_from_the_environment_as_they_were_written() -> None:
    assert parse_bounds({CANARY_VARIABLE: format_bounds(BOUNDS)}) == BOUNDS
