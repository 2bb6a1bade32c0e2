"""Backoff: waits stay within their limits, whatever the attempt."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5 import Misconfigured
from celery5.protocol.job.retry_policy import LONGEST, CustomBackoff, exponential, full_jitter, linear

SECONDS = st.floats(min_value=0, max_value=1e6, allow_nan=False)
CHANCE = st.floats(min_value=0, max_value=1, exclude_max=True)


def test_the_longest_wait_doubles_until_the_cap() -> None:
    assert [exponential(attempt, start=0.5, cap=3) for attempt in range(5)] == [0.5, 1, 2, 3, 3]


def test_full_jitter_spreads_the_wait_between_nothing_and_the_step() -> None:
    chance = iter([0.0, 0.5, 0.99]).__next__
    waits = [full_jitter(3, start=1, cap=60, random=chance) for _ in range(3)]
    assert waits == [0, 4, 7.92]


@given(attempt=st.integers(min_value=-5), start=SECONDS, cap=SECONDS, chance=CHANCE)
def test_no_wait_is_negative_or_above_the_cap_however_large_the_attempt(
    attempt: int, start: float, cap: float, chance: float
) -> None:
    assert 0 <= full_jitter(attempt, start=start, cap=cap, random=lambda: chance) <= cap


@given(attempt=st.integers(min_value=0, max_value=10**30), start=SECONDS, cap=SECONDS)
def test_the_longest_wait_never_shrinks(attempt: int, start: float, cap: float) -> None:
    assert exponential(attempt, start=start, cap=cap) <= exponential(attempt + 1, start=start, cap=cap)


def test_an_even_wait_grows_by_its_step_until_the_cap() -> None:
    assert [linear(attempt, start=1, step=5, cap=12) for attempt in range(-1, 4)] == [1, 1, 6, 11, 12]


def test_a_backoff_of_ones_own_is_called_with_the_number_of_the_retry() -> None:
    assert [CustomBackoff(lambda n: 10**n)(retry) for retry in (0, 1, 2)] == [1, 10, 100]
    assert CustomBackoff(lambda n: 1e300)(0) == LONGEST
    assert CustomBackoff(lambda n: True)(0) == 1


class Rude(Exception):
    """An error with no text."""

    def __str__(self) -> str:
        raise RuntimeError


def raising(error: Exception) -> Any:
    """A function that raises it."""

    def backoff(retry: int) -> float:
        raise error

    return backoff


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda n: -1, r"gave -1.0: not 0 seconds or more"),
        (lambda n: math.nan, r"gave nan: not 0 seconds or more"),
        (lambda n: math.inf, r"gave inf: not a number of seconds"),
        (lambda n: "soon", r"failed: ValueError: could not convert"),
        (lambda n: None, r"failed: TypeError: float\(\) argument"),
        (lambda: 1, r"failed: TypeError"),
        (raising(Rude()), r"failed: Rude: <no text>"),
        (raising(ValueError("two\nlines" * 100)), r"failed: ValueError: two linestwo lines"),
    ],
    ids=range(8),
)
def test_a_backoff_of_ones_own_that_makes_no_sense_says_so_in_a_line(function: Any, says: str) -> None:
    said = CustomBackoff(function)(0)
    assert isinstance(said, str)
    assert len(said.splitlines()) == 1
    assert len(said) < 400
    assert re.match(rf"retry_backoff .+\(0\) {says}", said)


def test_a_backoff_that_cannot_be_called_is_refused_when_it_is_declared() -> None:
    for wrong in (5, "shop.backoff", int):
        with pytest.raises(
            Misconfigured, match=r"^retry_backoff is .+: give a function of the retry's number"
        ):
            CustomBackoff(wrong)  # type: ignore[arg-type]
