"""Durations and ages: no unit is written with more than it holds, and ages have whole seconds."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.durations import format_age, format_duration

MOST = {"ms": 999, "s": 59.9, "min": 119, "h": 47}


@pytest.mark.parametrize(
    ("age", "shown"),
    [
        (0.0, "just now"),
        (0.4, "just now"),
        (-0.9, "just now"),
        (1.9, "1 s ago"),
        (-5.2, "in 5 s"),
        (59.97, "59 s ago"),
        (60.0, "1 min ago"),
        (7500.0, "2 h 5 min ago"),
        (-3 * 86400.0, "in 3 d 0 h"),
    ],
)
def test_an_age_is_shown_in_whole_seconds_and_never_as_0_ms(age: float, shown: str) -> None:
    assert format_age(1.75e9 - age, 1.75e9) == shown


@given(st.floats(min_value=0, max_value=1e9))
def test_a_duration_never_shows_more_of_a_unit_than_the_next_unit_is(seconds: float) -> None:
    first, unit = format_duration(seconds).split()[:2]
    assert unit == "d" or float(first) <= MOST[unit]


@pytest.mark.parametrize("seconds", [0.99960, 59.97, 7199.0])
def test_a_duration_that_rounds_up_to_the_next_unit_is_shown_in_it(seconds: float) -> None:
    assert re.fullmatch(r"1 s|1 min|2 h 0 min", format_duration(seconds))
