"""Prefetch: many short jobs are read ahead, long ones never, and never more than there is room for."""

from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.scaling.prefetch import (
    BATCH,
    FIRST_LOOKAHEAD,
    HORIZON,
    MAX_AHEAD,
    MAX_RETURNED_PER_SECOND,
    RETRY_DELAY,
    DurationEstimate,
    KindLookahead,
    KindMix,
    count_ahead,
    count_to_read,
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
    for each in before:
        pace.record(each)
    if pace.mean is None or pace.mean <= HORIZON:
        pace.record(long)
        assert pace.mean is not None
        assert count_ahead(100, pace.mean) == 0


@given(durations.filter(bool))
def test_a_pace_stays_between_the_shortest_and_the_longest_job(seen: list[float]) -> None:
    pace = DurationEstimate()
    for each in seen:
        pace.record(each)
    assert pace.mean is not None
    assert min(seen) - 1e-9 <= pace.mean <= max(seen) + 1e-9


@given(durations)
def test_a_slow_kind_is_held_ahead_again_only_after_short_jobs(seen: list[float]) -> None:
    pace = DurationEstimate()
    for each in seen:
        pace.record(each)
    pace.assume_slow()
    assert count_ahead(100, pace.mean) == 0
    for _ in range(500):
        pace.record(0.0001)
    assert count_ahead(100, pace.mean) > 0


@given(slots, st.floats(1e-7, 20), st.floats(1, 16))
def test_whoever_reaches_further_holds_what_starts_within_that_time(
    slots: int, mean: float, factor: float
) -> None:
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
    for each in seen:
        pace.record(each)
    pace.assume_slow()
    assert count_ahead(100, pace.mean, pace.horizon) == 0


rooms = st.dictionaries(kinds, st.integers(0, 800), min_size=1)


@given(st.lists(st.dictionaries(kinds, st.integers(0, 50), max_size=3), max_size=10), rooms)
def test_a_mix_never_asks_for_a_negative_number_nor_for_more_than_a_batch(
    reads: list[dict[str, int]], rooms: dict[str, int]
) -> None:
    mix = KindMix()
    for each in reads:
        mix.record(each)
    count = mix.get_read_limit(rooms)
    assert 0 <= count <= max(BATCH, *rooms.values())
    if any(sum(each.values()) for each in reads):
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
    for each in reads:
        mix.record(each)
    # Room for one thread job: at most about as many are read as usually bring one of those.
    count = mix.get_read_limit({"trio": 10**6, "thread": 1})
    rarest = min(each["thread"] / sum(each.values()) for each in reads)
    assert 1 <= count <= min(BATCH, 1 / rarest + 1)


def test_a_way_around_opens_when_a_kind_is_full_for_two_looks_and_another_has_room() -> None:
    detour = KindLookahead()
    assert not detour.update(full=True, others=True, now=0.0)
    assert detour.update(full=True, others=True, now=0.1)
    assert detour.extra == FIRST_LOOKAHEAD
    assert not detour.update(full=True, others=True, now=0.2)  # it is open already
    assert not detour.update(full=True, others=False, now=0.3)
    assert detour.extra == 0  # nobody could run what is behind
    assert detour.update(full=True, others=True, now=0.4)
    assert not detour.update(full=False, others=True, now=0.5)
    assert detour.extra == 0
    assert not detour.update(full=True, others=True, now=0.6)


def opened(detour: KindLookahead, now: float) -> KindLookahead:
    for _ in range(2):
        detour.update(full=True, others=True, now=now)
    return detour


def test_more_is_read_each_time_and_at_once_while_others_are_found() -> None:
    detour = opened(KindLookahead(), 0.0)
    rooms: list[int] = []
    for second in range(7):
        rooms.append(detour.extra)
        detour.record_read({"thread": detour.extra - 1, "trio": 1}, "thread")
        detour.record_release(detour.extra, now=second)
        assert detour.update(full=True, others=True, now=second)
    assert rooms == [16, 32, 64, 128, 256, 256, 256]


def test_while_nothing_else_is_behind_them_few_jobs_a_second_are_read_and_given_back() -> None:
    detour, now, moved = opened(KindLookahead(), 0.0), 0.0, 0
    while now < 60:
        if detour.extra:
            detour.record_read({"thread": detour.extra}, "thread")
            moved += detour.extra
            detour.record_release(detour.extra, now)
        now += HORIZON
        detour.update(full=True, others=True, now=now)
    assert 0 < moved <= 60 * MAX_RETURNED_PER_SECOND + BATCH
    detour.record_release(1, now)
    assert not detour.update(full=True, others=True, now=now + RETRY_DELAY - 0.01)
    assert detour.update(full=True, others=True, now=now + RETRY_DELAY)  # a single one is looked behind soon
