"""Prefetch: many short jobs are read ahead, long ones never, and never more than there is room for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.scaling.prefetch import (
    BATCH,
    HORIZON,
    MAX_AHEAD,
    DurationEstimate,
    KindMix,
    KindSaturation,
    count_ahead,
    count_to_read,
    is_full,
)

slots = st.integers(1, 1000)
means = st.none() | st.floats(0, 100)
durations = st.lists(st.floats(0, 20), max_size=30)
kinds = st.sampled_from(["trio", "asyncio", "thread"])


@given(slots, st.integers(0, 3000), means)
def test_what_is_read_is_never_negative_and_never_over_the_limit(
    slots: int, held: int, mean: float | None
) -> None:
    count = count_to_read(slots=slots, held=held, mean=mean)
    assert 0 <= count <= BATCH
    assert count == 0 or held + count <= slots + MAX_AHEAD


@given(slots, st.integers(0, 3000), st.none() | st.floats(HORIZON, 1e6))
def test_of_long_or_unknown_jobs_nothing_is_held_ahead(slots: int, held: int, mean: float | None) -> None:
    assert count_ahead(slots, mean) == 0
    assert count_to_read(slots=slots, held=held, mean=mean) == max(0, min(slots - held, BATCH))


@given(slots, st.floats(1e-7, HORIZON, exclude_max=True))
def test_what_is_held_ahead_starts_within_the_horizon(slots: int, mean: float) -> None:
    assert count_ahead(slots, mean) * mean / slots <= HORIZON * 1.001


@given(slots, means)
def test_a_worker_with_nothing_in_hand_always_reads(slots: int, mean: float | None) -> None:
    assert count_to_read(slots=slots, held=0, mean=mean) > 0


@given(slots, means)
def test_reading_on_fills_every_slot(slots: int, mean: float | None) -> None:
    held = 0
    for _ in range(20):
        held += count_to_read(slots=slots, held=held, mean=mean)
    assert slots <= held <= slots + MAX_AHEAD


def test_short_jobs_are_read_in_large_batches() -> None:
    assert count_to_read(slots=100, held=0, mean=0.00001) == BATCH
    assert count_to_read(slots=100, held=100 + MAX_AHEAD, mean=0.00001) == 0


@given(durations, st.floats(HORIZON, 20, exclude_min=True))
def test_one_long_job_counts_at_once(before: list[float], long: float) -> None:
    pace = DurationEstimate()
    for record in before:
        pace.record(record)
    if pace.mean is None or pace.mean <= HORIZON:
        pace.record(long)
        assert pace.mean is not None
        assert count_ahead(100, pace.mean) == 0


@given(durations.filter(bool))
def test_a_pace_stays_between_the_shortest_and_the_longest_job(seen: list[float]) -> None:
    pace = DurationEstimate()
    for record in seen:
        pace.record(record)
    assert pace.mean is not None
    assert min(seen) - 1e-9 <= pace.mean <= max(seen) + 1e-9


@given(durations)
def test_a_slow_kind_is_held_ahead_again_only_after_short_jobs(seen: list[float]) -> None:
    pace = DurationEstimate()
    for record in seen:
        pace.record(record)
    pace.assume_slow()
    assert count_ahead(100, pace.mean) == 0
    for _ in range(500):
        pace.record(0.0001)
    assert count_ahead(100, pace.mean) > 0


@given(slots, st.floats(1e-7, 20), st.floats(1, 16))
def test_worker_holds_jobs_that_start_within_its_horizon(slots: int, mean: float, factor: float) -> None:
    pace = DurationEstimate(mean)
    pace.set_factor(factor)
    held = count_ahead(slots, mean, pace.horizon)
    assert held * mean / slots <= HORIZON * factor * 1.001
    assert count_ahead(slots, mean) <= held <= MAX_AHEAD
    assert (held == 0) == (mean >= pace.horizon or slots * pace.horizon < mean)
    assert count_to_read(slots=slots, held=0, mean=mean, horizon=pace.horizon) >= count_to_read(
        slots=slots, held=0, mean=mean
    )


def test_worked_numbers_of_a_wider_horizon() -> None:
    assert [count_ahead(4, 0.3, HORIZON * factor) for factor in (1, 2, 4, 8)] == [0, 0, 5, 10]
    assert [count_ahead(4, 0.05, HORIZON * factor) for factor in (1, 2, 4)] == [8, 16, 32]


@given(durations, st.floats(1, 16))
def test_a_slow_kind_is_not_held_ahead_however_far_a_worker_reaches(seen: list[float], factor: float) -> None:
    pace = DurationEstimate()
    pace.set_factor(factor)
    for record in seen:
        pace.record(record)
    pace.assume_slow()
    assert count_ahead(100, pace.mean, pace.horizon) == 0


rooms = st.dictionaries(kinds, st.integers(0, 800), min_size=1)


@given(st.lists(st.dictionaries(kinds, st.integers(0, 50), max_size=3), max_size=10), rooms)
def test_a_mix_never_asks_for_a_negative_number_nor_for_more_than_a_batch(
    reads: list[dict[str, int]], rooms: dict[str, int]
) -> None:
    mix = KindMix()
    for read in reads:
        mix.record(read)
    count = mix.get_read_limit(rooms)
    assert 0 <= count <= max(BATCH, *rooms.values())
    if any(sum(counts.values()) for counts in reads):
        assert count <= BATCH


@given(rooms)
def test_with_nothing_known_the_least_room_counts(rooms: dict[str, int]) -> None:
    assert KindMix().get_read_limit(rooms) == min(rooms.values())


@given(kinds, rooms.filter(lambda rooms: all(rooms.values())))
def test_with_one_kind_of_job_the_others_hardly_count(kind: str, rooms: dict[str, int]) -> None:
    mix = KindMix()
    for _ in range(30):
        mix.record({kind: 50})
    least = min(BATCH, rooms.get(kind, BATCH))
    assert mix.get_read_limit(rooms) >= min(least, *[500 * room for room in rooms.values()])


@given(st.lists(st.fixed_dictionaries({"trio": st.integers(0, 9), "thread": st.integers(1, 9)}), min_size=1))
def test_the_shares_of_a_mix_follow_what_was_read(reads: list[dict[str, int]]) -> None:
    mix = KindMix()
    for read in reads:
        mix.record(read)
    # Room for one thread job: at most about as many are read as usually bring one of those.
    count = mix.get_read_limit({"trio": 10**6, "thread": 1})
    rarest = min(counts["thread"] / sum(counts.values()) for counts in reads)
    assert 1 <= count <= min(BATCH, 1 / rarest + 1)


def test_a_kind_is_saturated_when_it_is_full_for_two_looks_and_another_has_slots() -> None:
    saturation = KindSaturation()
    assert not saturation.update(full=True, others=True, waiting=False)
    assert saturation.update(full=True, others=True, waiting=False)
    assert saturation.is_saturated
    # Nobody could run what is behind; still its jobs wait in order.
    assert not saturation.update(full=True, others=False, waiting=False)
    assert saturation.is_saturated


def test_a_kind_stays_saturated_until_no_job_of_it_waits_in_a_list() -> None:
    saturation = KindSaturation()
    for _ in range(2):
        saturation.update(full=True, others=True, waiting=False)
    assert not saturation.update(full=False, others=True, waiting=True)
    assert saturation.update(full=False, others=True, waiting=False)
    assert not saturation.is_saturated
    assert not saturation.update(full=True, others=True, waiting=False), "it begins again"


def test_a_kind_is_not_saturated_while_others_are_full_or_nothing_waits() -> None:
    saturation = KindSaturation()
    for _ in range(5):
        assert not saturation.update(full=True, others=False, waiting=False)
        assert not saturation.update(full=False, others=True, waiting=True)
    assert saturation.update(full=True, others=False, waiting=True), "its jobs come behind those that wait"


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans())))
def test_a_kind_with_free_slots_and_no_waiting_jobs_is_never_saturated(
    looks: list[tuple[bool, bool, bool]],
) -> None:
    saturation = KindSaturation()
    for full, others, waiting in looks:
        before = saturation.is_saturated
        changed = saturation.update(full=full, others=others, waiting=waiting)
        assert changed is (saturation.is_saturated != before)
        assert not saturation.is_saturated or full or waiting


@pytest.mark.parametrize(
    ("slots", "held", "mean", "ended", "expected"),
    [
        (10, 9, None, 0, False),
        (10, 10, None, 0, True),  # no job has ended yet
        (10, 10, 5.0, 10, True),
        (10, 34, 0.02, 10, False),  # 50 may be read ahead
        (10, 35, 0.02, 10, True),
        (10, 5000, 0.0019, 10, False),  # it runs them as fast as they could be moved
        (10, 5000, 0.0021, 499, True),
        (10, 5000, 0.0021, 500, False),  # it has just done that, though some take long
        (2, 1000, 0.05, 2000, False),
        (2, 2, None, 500, False),
        (100, 600, 0.02, 0, True),
        (100, 599, 0.02 / 100, 0, False),
    ],
)
def test_a_kind_is_full_when_its_slots_and_half_of_what_is_read_ahead_are_taken(
    slots: int, held: int, mean: float | None, ended: int, expected: bool
) -> None:
    assert is_full(slots=slots, held=held, mean=mean, ended=ended) is expected
