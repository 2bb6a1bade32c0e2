"""Schedules: what is to be done about a schedule, with time as a number."""

import random
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from celery5.errors import Misconfigured
from celery5.protocol.scheduling import periodic
from celery5.protocol.scheduling.declaration import Periodic, resolve_parts
from celery5.protocol.scheduling.periodic import (
    MAX_FIRES_PER_STEP,
    RECHECK_MS,
    Misfire,
    OverlapPolicy,
    Schedule,
    ScheduleDefinition,
    ScheduleStep,
    decode_schedule,
    encode_schedule,
    make_fire_job_id,
    make_schedule,
    plan_fires,
)
from celery5.protocol.scheduling.triggers import AnyTrigger, Interval, OnceTrigger
from celery5.scheduling.fire_times import get_next_fire_time

NOW = 1_800_000_000_000
SECOND = Interval(every=1000)


def made(trigger: AnyTrigger = SECOND, *, now: int = NOW, **how: Any) -> Schedule:
    """A schedule that begins now."""
    of = ScheduleDefinition(task="t", queue="q", trigger=trigger, message="{}", **how)
    return make_schedule("s", of, now, get_next_fire_time, origin="code", stamp=(0, 1))


def done(schedule: Schedule, now: int, *, busy: bool = False) -> ScheduleStep:
    """What is due, which there must be."""
    found = plan_fires(schedule, now, is_busy=busy, find_next=get_next_fire_time)
    assert found is not None
    return found


def seconds(found: ScheduleStep) -> list[int]:
    """The fire times that are published, in seconds from the beginning."""
    return [(fire.at - NOW) // 1000 for fire in found.fires]


def test_it_fires_at_its_time_and_not_before_and_then_at_the_next() -> None:
    schedule = made()
    assert schedule.next == NOW + 1000
    assert plan_fires(schedule, NOW + 999, is_busy=False, find_next=get_next_fire_time) is None
    found = done(schedule, NOW + 1000)
    assert seconds(found) == [1]
    assert (found.new_state.last, found.new_state.next, found.new_state.fired) == (NOW + 1000, NOW + 2000, 1)
    assert found.new_state.job == found.fires[0].job == make_fire_job_id("", "s", NOW + 1000)
    assert plan_fires(found.new_state, NOW + 1000, is_busy=False, find_next=get_next_fire_time) is None


def test_what_is_a_little_late_is_published_all_the_same_every_time() -> None:
    found = done(made(misfire=Misfire("skip", after=10)), NOW + 9500)
    assert seconds(found) == list(range(1, 10))
    assert found.missed == 0


@pytest.mark.parametrize(
    ("misfire", "published", "missed"),
    [
        (Misfire("skip", after=2.5), [98, 99, 100], 97),
        (Misfire("once", after=2.5), [98, 99, 100], 97),
        (Misfire("catch-up", after=2.5, most=5), [93, 94, 95, 96, 97, 98, 99, 100], 92),
        (Misfire("catch-up", after=2.5, limit=4), [96, 97, 98, 99, 100], 95),
        (Misfire("catch-up", after=2.5, limit=None, most=90), [*range(8, 101)], 7),
    ],
)
def test_after_a_while_without_schedulers_the_policy_decides(
    misfire: Misfire, published: list[int], missed: int
) -> None:
    found = done(made(misfire=misfire), NOW + 100_000)
    assert seconds(found) == published
    assert (found.missed, found.new_state.missed) == (missed, missed)
    assert found.new_state.next == NOW + 101_000


def test_a_rare_one_that_was_missed_runs_once_unless_it_is_too_old() -> None:
    daily = Interval(every=86_400_000, start=NOW)
    late = NOW + 86_400_000 + 3_600_000
    assert len(done(made(daily), late).fires) == 1
    assert done(made(daily, misfire=Misfire("once", limit=1800)), late).missed == 1
    skipped = done(made(daily, misfire=Misfire("skip")), late)
    assert (skipped.fires, skipped.missed, skipped.new_state.next) == ((), 1, NOW + 2 * 86_400_000)


def test_years_of_absence_take_no_time() -> None:
    found = done(made(Interval(every=10), misfire=Misfire("catch-up", limit=None, most=50)), NOW + 10**11)
    assert found.has_more_missed
    assert found.missed >= 1000
    assert len(found.fires) == 50 + MAX_FIRES_PER_STEP
    times = [fire.at for fire in found.fires]
    assert times == sorted(set(times))
    assert NOW + 10**11 - 60_000 < times[-1] <= NOW + 10**11


def test_more_than_fits_into_one_step_follows_in_the_next() -> None:
    schedule, found = made(Interval(every=1)), list[int]()
    for _ in range(10):
        step = plan_fires(schedule, NOW + 250, is_busy=False, find_next=get_next_fire_time)
        if step is None:
            break
        assert len(step.fires) <= MAX_FIRES_PER_STEP
        found += [fire.at - NOW for fire in step.fires]
        schedule = step.new_state
    assert found == list(range(1, 251))


def test_with_skip_nothing_starts_while_the_job_before_has_not_ended() -> None:
    found = done(made(overlap="skip"), NOW + 3000, busy=True)
    assert (found.fires, found.skipped, found.new_state.skipped) == ((), 3, 3)
    again = done(found.new_state, NOW + 5000)
    assert (seconds(again), again.skipped, again.new_state.skipped) == ([4], 1, 4)


def test_with_queue_one_waits_and_goes_when_the_job_before_has_ended() -> None:
    found = done(made(overlap="queue"), NOW + 3000, busy=True)
    assert (found.fires, found.new_state.waiting, found.skipped) == ((), NOW + 1000, 2)
    assert found.new_state.get_next_look(NOW + 3000) == NOW + 3000 + RECHECK_MS
    assert plan_fires(found.new_state, NOW + 3500, is_busy=True, find_next=get_next_fire_time) is None
    again = done(found.new_state, NOW + 3500)
    assert (seconds(again), again.new_state.waiting, again.skipped) == ([1], None, 0)
    both = done(found.new_state, NOW + 4000)
    assert (seconds(both), both.new_state.waiting, both.skipped) == ([1], NOW + 4000, 0)


def test_clock_jumps_fire_no_schedule_twice() -> None:
    schedule = done(made(misfire=Misfire("skip", after=10)), NOW + 5000).new_state
    for back in range(1, 3_600_000, 50_000):
        assert plan_fires(schedule, NOW + 5000 - back, is_busy=False, find_next=get_next_fire_time) is None
    assert seconds(done(schedule, NOW + 6000)) == [6]
    ahead = done(schedule, NOW + 600_000)
    assert seconds(ahead) == list(range(590, 601))
    assert ahead.missed == 600 - 5 - len(ahead.fires)


@pytest.mark.parametrize(
    "jitter",
    ["5", b"5", 1j, [], 10**400, -1, True, Decimal("sNaN"), datetime(2026, 1, 1, tzinfo=UTC)],
    ids=repr,
)
def test_a_jitter_that_is_no_duration_is_refused_in_one_line(jitter: Any) -> None:
    with pytest.raises(Misconfigured, match=r"jitter is .*: give 0 seconds to a day"):
        resolve_parts(Periodic(60, jitter=jitter))


def test_jitter_puts_off_and_everybody_says_the_same() -> None:
    schedule = made(Interval(every=60_000, start=NOW), jitter=30.0)
    looks = [replace(schedule, next=NOW + 60_000 * n).get_next_look(NOW) for n in range(1, 200)]
    put_off = [(look or 0) - NOW - 60_000 * n for n, look in enumerate(looks, 1)]
    assert all(0 <= delay <= 30_000 for delay in put_off)
    assert len(set(put_off)) > 150
    assert schedule.get_next_look(NOW) == schedule.get_next_look(NOW + 5)
    another = decode_schedule(encode_schedule(schedule))
    assert another is not None
    assert another.get_next_look(NOW) == schedule.get_next_look(NOW)
    at = schedule.get_next_look(NOW) or 0
    assert plan_fires(schedule, at - 1, is_busy=False, find_next=get_next_fire_time) is None
    assert done(schedule, at).fires[0].at == NOW + 60_000


def test_paused_it_does_nothing_and_goes_on_with_what_is_still_to_come() -> None:
    rests = periodic.pause_schedule(made())
    assert rests.get_next_look(NOW) is None
    assert plan_fires(rests, NOW + 10_000, is_busy=False, find_next=get_next_fire_time) is None
    update_block = periodic.resume_schedule(rests, NOW + 10_500, get_next_fire_time)
    assert (update_block.next, update_block.missed) == (NOW + 11_000, 0)
    assert periodic.pause_schedule(rests) is rests
    assert periodic.resume_schedule(update_block, NOW, get_next_fire_time) is update_block


def test_one_that_is_over_is_over() -> None:
    found = done(made(OnceTrigger(at=NOW + 5)), NOW + 6)
    assert len(found.fires) == 1
    assert (found.new_state.next, found.new_state.get_next_look(NOW + 6)) == (None, None)
    assert plan_fires(found.new_state, NOW + 10**9, is_busy=False, find_next=get_next_fire_time) is None


# ---- declared again, and retired


def test_a_changed_definition_replaces_the_old_one_and_what_was_fired_stays() -> None:
    old = done(made(), NOW + 1000).new_state
    newer = made(Interval(every=5000), now=NOW + 1500)
    after = periodic.merge_declaration(old, replace(newer, stamp=(0, 2)), NOW + 1500, get_next_fire_time)
    assert after is not None
    assert (after.fired, after.last, after.next) == (1, NOW + 1000, NOW + 5000)
    assert after.rev == old.rev + 1


def test_changed_trigger_does_not_fire_for_earlier_times() -> None:
    old = done(made(), NOW + 1000).new_state
    another = replace(made(Interval(every=100), now=NOW - 60_000), stamp=(0, 2))
    after = periodic.merge_declaration(old, another, NOW - 60_000, get_next_fire_time)
    assert after is not None
    assert (after.last, after.next) == (NOW + 1000, NOW + 1100)


def test_restart_with_the_same_trigger_keeps_its_next_fire_time() -> None:
    old, later = made(), NOW + 60_000
    changed = replace(made(now=later, overlap="skip"), stamp=(0, 2))
    after = periodic.merge_declaration(old, changed, later, get_next_fire_time)
    assert after is not None
    assert (after.next, after.of.overlap) == (old.next, "skip")


def test_older_code_neither_changes_nor_retires_what_newer_code_declares() -> None:
    newer, older = replace(made(), stamp=(2, 5)), replace(made(Interval(every=9000)), stamp=(1, 99))
    assert periodic.merge_declaration(newer, older, NOW, get_next_fire_time) is None
    assert periodic.retire_schedule(newer, NOW, stamp=(1, 99)) is None
    assert periodic.retire_schedule(newer, NOW, stamp=(2, 5)) is None
    gone = periodic.retire_schedule(newer, NOW, stamp=(2, 6))
    assert gone is not None
    assert gone.get_next_look(NOW) is None
    assert plan_fires(gone, NOW + 10**6, is_busy=False, find_next=get_next_fire_time) is None


def test_retired_schedule_declared_again_skips_what_it_missed() -> None:
    gone = periodic.retire_schedule(done(made(), NOW + 1000).new_state, NOW + 1500, stamp=(0, 9))
    assert gone is not None
    back = periodic.merge_declaration(gone, replace(made(), stamp=(0, 10)), NOW + 60_500, get_next_fire_time)
    assert back is not None
    assert (back.retired, back.fired, back.next) == (None, 1, NOW + 61_000)


def test_what_was_added_by_hand_stays_whatever_code_says() -> None:
    by_hand = replace(made(), origin="runtime")
    assert (
        periodic.merge_declaration(by_hand, replace(made(SECOND), stamp=(9, 9)), NOW, get_next_fire_time)
        is None
    )
    assert periodic.retire_schedule(by_hand, NOW, stamp=(9, 9)) is None


# ---- as it is kept


@given(
    st.sampled_from(["allow", "skip", "queue"]),
    st.sampled_from(["skip", "once", "catch-up"]),
    st.integers(1, 100_000),
    st.lists(st.tuples(st.integers(0, 200_000), st.booleans()), max_size=30),
)
def test_each_fire_time_is_settled_once_and_in_order_at_random(
    overlap: OverlapPolicy, policy: Any, every: int, looks: list[tuple[int, bool]]
) -> None:
    """Published, missed or skipped: one of them, and never a time that was settled before."""
    schedule = made(Interval(every=every), overlap=overlap, misfire=Misfire(policy, after=20, most=10))
    now, published = NOW, list[int]()
    for ahead, busy in looks:
        now += ahead
        found = plan_fires(schedule, now, is_busy=busy, find_next=get_next_fire_time)
        if found is None:
            continue
        assert decode_schedule(encode_schedule(found.new_state)) == found.new_state
        assert found.new_state.rev == schedule.rev + 1
        published += [fire.at for fire in found.fires]
        before = (schedule.next or 0) - every
        passed = ((found.new_state.next or 0) - every - before) // every
        held = (found.new_state.waiting is not None) - (schedule.waiting is not None)
        settled = len(found.fires) + found.missed + found.skipped + held
        assert settled == passed or (found.has_more_missed and settled <= passed)
        schedule = found.new_state
    assert published == sorted(set(published))
    assert all(time <= now for time in published)


def test_three_who_fire_at_their_own_pace_publish_each_time_once() -> None:
    """Each looks, falls asleep for a while, and then tries to put what it had worked out."""
    dice = random.Random(5)
    kept, now, published = encode_schedule(made(Interval(every=7))), NOW, list[int]()
    hands: list[tuple[bytes, ScheduleStep] | None] = [None, None, None]
    while len(published) < 5000:
        now += dice.choice((1, 1, 3, 9, 200))
        who = dice.randrange(3)
        held = hands[who]
        if held is None:
            schedule = decode_schedule(kept)
            assert schedule is not None
            found = plan_fires(schedule, now, is_busy=False, find_next=get_next_fire_time, by=str(who))
            hands[who] = None if found is None else (kept, found)
        elif dice.random() < 0.1:
            hands[who] = None  # killed; another begins in its place
        elif dice.random() < 0.5:
            hands[who] = None
            if held[0] == kept:
                kept = encode_schedule(held[1].new_state)
                published += [fire.at for fire in held[1].fires]
    assert published == [NOW + 7 * n - NOW % 7 for n in range(1, len(published) + 1)]


def test_a_record_of_a_newer_version_is_left_alone() -> None:
    assert (
        decode_schedule(b'{"name":"s","of":{"task":"t","queue":"q","trigger":{"when":"moon"},"message":""}}')
        is None
    )
    assert decode_schedule(b"nonsense") is None


def test_ids_of_jobs_are_their_own_and_never_look_like_an_option() -> None:
    ids = {make_fire_job_id("app", "s", at) for at in range(5000)}
    assert len(ids) == 5000
    assert all(len(job_id) == 22 and not job_id.startswith("-") for job_id in ids)
    assert (
        make_fire_job_id("app", "s", 1)
        != make_fire_job_id("app", "other", 1)
        != make_fire_job_id("app2", "other", 1)
    )


@pytest.mark.parametrize(
    "misfire",
    [Misfire("later"), Misfire(after=-1), Misfire(limit=-1), Misfire(most=0), Misfire(most=10**6)],  # type: ignore[arg-type]
)
def test_a_misfire_policy_that_makes_no_sense_is_refused(misfire: Misfire) -> None:
    with pytest.raises(Misconfigured):
        misfire.validate()
