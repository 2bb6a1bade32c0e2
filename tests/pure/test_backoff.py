"""Backoff: waits stay within their limits, whatever the attempt.

Floor: tests. Reads: nothing. Writes: nothing.
"""

from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.backoff import exponential, full_jitter

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
