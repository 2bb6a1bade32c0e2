"""Retry policy: how often, how long, and which numbers make no sense.

Floor: tests. Reads: nothing. Writes: nothing.
"""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5 import Misconfigured, RetryPolicy
from celery5.protocol.retry import LONGEST

chances = st.floats(0, 1, exclude_max=True)


@given(st.integers(1, 10**6), st.floats(0, LONGEST), st.floats(0, LONGEST), chances, st.booleans())
def test_a_wait_is_never_negative_and_never_above_the_cap(
    attempt: int, backoff: float, cap: float, chance: float, jitter: bool
) -> None:
    policy = RetryPolicy(backoff=backoff, cap=cap, jitter=jitter).checked()
    wait = policy.delay(attempt, lambda: chance)
    assert 0 <= wait <= cap
    assert int(wait * 1000) >= 0  # the settlement takes it in ms


def test_without_jitter_the_wait_doubles_up_to_the_cap() -> None:
    policy = RetryPolicy(backoff=2, cap=15, jitter=False)
    assert [policy.delay(attempt, lambda: 0.1) for attempt in range(1, 6)] == [2, 4, 8, 15, 15]


def test_with_jitter_the_wait_is_spread_over_all_of_it() -> None:
    policy = RetryPolicy(backoff=2, cap=15)
    assert [policy.delay(3, iter([chance]).__next__) for chance in (0.0, 0.5, 0.75)] == [0, 4, 6]


def test_the_default_is_three_retries() -> None:
    assert [RetryPolicy().allows(attempt) for attempt in (1, 2, 3, 4)] == [True, True, True, False]


@pytest.mark.parametrize(
    "said",
    [
        {"max_retries": -1},
        {"max_retries": 1.5},
        {"max_retries": "3"},
        {"backoff": -0.1},
        {"backoff": math.nan},
        {"backoff": math.inf},
        {"backoff": "1"},
        {"cap": -1},
        {"cap": math.inf},
        {"cap": 1e300},
        {"jitter": "yes"},
    ],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_refused_by_name(said: dict[str, Any]) -> None:
    (name,) = said
    with pytest.raises(Misconfigured, match=f"^{name} is .+: Expected"):
        RetryPolicy(**said).checked()
