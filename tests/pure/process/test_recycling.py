"""Recycling: sizes as people write them, limits that differ from process to process, and why one is reached."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.process.recycling import RecyclingLimits, get_recycle_reason, jitter_limits


@given(
    jobs=st.integers(0, 10**9),
    memory=st.integers(0, 2**45),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_a_process_stays_within_its_limits_and_never_gets_one_that_nobody_has_set(
    jobs: int, memory: int, chance: float
) -> None:
    own = jitter_limits(RecyclingLimits(jobs, memory), lambda: chance)
    for said, got in zip(RecyclingLimits(jobs, memory), own, strict=True):
        assert 0.79 * said <= got <= said
        assert bool(got) is bool(said)


def _chance(value: float) -> Callable[[], float]:
    return lambda: value


@given(memory=st.integers(100, 2**45), chance=st.floats(0, 1, exclude_max=True))
def test_a_process_is_recycled_a_tenth_below_the_limit_of_its_memory_at_least(
    memory: int, chance: float
) -> None:
    own = jitter_limits(RecyclingLimits(0, memory), lambda: chance)
    assert 0.8 * memory <= own.memory <= 0.9 * memory + 1


def test_processes_that_began_together_have_limits_of_their_own() -> None:
    found = {jitter_limits(RecyclingLimits(1000, 0), _chance(number / 10)).jobs for number in range(10)}
    assert len(found) == 10


def test_a_limit_that_is_reached_is_named() -> None:
    limits = RecyclingLimits(jobs=100, memory=2**20)
    assert get_recycle_reason(limits, jobs=99, memory=2**20 - 1) == ""
    assert "100 jobs" in get_recycle_reason(limits, jobs=100, memory=0)
    assert "1.0 MiB" in get_recycle_reason(limits, jobs=1, memory=2**20)
    assert get_recycle_reason(RecyclingLimits(), jobs=10**9, memory=2**50) == ""


def test_memory_counts_from_the_first_job_on() -> None:
    assert get_recycle_reason(RecyclingLimits(memory=1), jobs=0, memory=100) == ""
