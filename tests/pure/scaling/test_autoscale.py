"""Autoscale: the rule by worked numbers, whole stories on a virtual clock, and what always holds."""

import math
import random
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from celery5.config.scaling import get_autoscale
from celery5.examples.own_scaling import bakery
from celery5.examples.own_scaling.hours import Hours
from celery5.protocol.scaling.autoscale import (
    Autoscale,
    AutoscaleState,
    Load,
    Scale,
    get_changes,
    get_cooldown_end,
    get_next_state,
    make_initial_state,
    prefetch_first,
)
from celery5.protocol.scaling.snapshot import ClusterSnapshot, ClusterWorker, TaskLoad
from tests.pure.scaling.scaling_model import LOOK, SLOTS, live, snapshot

POLICY = Autoscale(minimum=1, maximum=10)
HOUR = 3600.0


def load(jobs: int, now: Scale, *, there: int | None = None, minimum: int = 1) -> Load:
    """So many jobs, at a scale; workers have ten slots each."""
    seen = snapshot(jobs, now.workers if there is None else there)
    return Load(snapshot=seen, now=now, minimum=minimum, maximum=10, prefetch=4.0)


@pytest.mark.parametrize(
    ("jobs", "now", "wanted"),
    [
        # More jobs than slots: first twice the prefetch ...
        (11, Scale(1, 1.0), Scale(1, 2.0)),
        (900, Scale(1, 2.0), Scale(1, 4.0)),
        # ... then as many workers as are needed, and twice as many at most.
        (11, Scale(1, 4.0), Scale(2, 4.0)),
        (900, Scale(3, 4.0), Scale(6, 4.0)),
        (41, Scale(4, 4.0), Scale(5, 4.0)),
        # As many jobs as slots, or with less than a fifth of them free: nothing.
        (10, Scale(1, 4.0), Scale(1, 4.0)),
        (33, Scale(5, 4.0), Scale(5, 4.0)),
        # Fewer would do, with a fifth of their slots free: as many as are needed, and half at least.
        (32, Scale(5, 4.0), Scale(4, 4.0)),
        (24, Scale(4, 4.0), Scale(3, 4.0)),
        (5, Scale(9, 4.0), Scale(4, 4.0)),
        # Only the minimum is there: half the prefetch.
        (5, Scale(1, 4.0), Scale(1, 2.0)),
        (8, Scale(1, 2.0), Scale(1, 1.0)),
        (9, Scale(1, 2.0), Scale(1, 2.0)),
        (0, Scale(1, 1.0), Scale(1, 1.0)),
    ],
)
def test_prefetch_first_then_workers_and_back_the_same_way(jobs: int, now: Scale, wanted: Scale) -> None:
    assert prefetch_first(load(jobs, now)) == wanted


def test_from_no_worker_to_one_and_back() -> None:
    nobody = Scale(0, 1.0)
    assert prefetch_first(load(0, nobody, minimum=0)) == nobody
    assert prefetch_first(load(7, nobody, minimum=0)) == Scale(1, 1.0)
    assert prefetch_first(load(0, Scale(1, 1.0), minimum=0)) == nobody
    assert prefetch_first(load(1, Scale(1, 1.0), minimum=0)) == Scale(1, 1.0)


def test_while_those_that_were_asked_for_have_not_come_nothing_changes() -> None:
    assert prefetch_first(load(1, Scale(4, 1.0), there=0)) == Scale(4, 1.0)
    assert prefetch_first(load(900, Scale(4, 4.0), there=0)) == Scale(4, 4.0)


def seen(*lines: TaskLoad, **most: int) -> ClusterSnapshot:
    """These lines, and two workers with so many slots of each kind."""
    return ClusterSnapshot(
        task_loads=lines,
        workers=(ClusterWorker(name="a", max_slots=most), ClusterWorker(name="b", max_slots=most)),
    )


def needed(where: ClusterSnapshot) -> int:
    """How many workers are needed."""
    return Load(snapshot=where, now=Scale(2), minimum=1, maximum=10, prefetch=1.0).needed()


def test_each_kind_of_task_needs_slots_of_its_own() -> None:
    waits = TaskLoad(queue="q", task="io", kind="trio", waiting=250)
    works = TaskLoad(queue="q", task="cpu", kind="thread", waiting=9)
    assert needed(seen(waits, trio=100, thread=2)) == 3
    assert needed(seen(waits, works, trio=100, thread=2)) == 5
    assert needed(seen(replace(works, running=3), trio=100, thread=2)) == 6
    assert needed(seen(works, trio=100)) == 1  # nobody has slots for it


def test_suspended_and_limited_tasks_ask_for_no_worker_and_upcoming_ones_do() -> None:
    line = TaskLoad(queue="q", task="t", kind="trio", waiting=950, running=3)
    assert needed(seen(line, trio=10)) == 96
    assert needed(seen(replace(line, suspended=True), trio=10)) == 1
    assert needed(seen(replace(line, limit=25), trio=10)) == 3
    assert needed(seen(replace(line, limit=2), trio=10)) == 1  # three run, though they are over the limit
    assert needed(seen(replace(line, waiting=0, upcoming=38), trio=10)) == 5


def test_a_story_with_its_cool_downs() -> None:
    policy, course = (
        Autoscale(minimum=1, maximum=10, prefetch=2.0, cooldown=10.0, shrink_after=20.0),
        AutoscaleState(workers=1),
    )
    # Seconds, jobs: the workers and the prefetch after it.
    story = [
        (100.0, 35, (1, 2.0)),  # prefetch first; it cools down for 10 s
        (109.9, 95, (1, 2.0)),
        (110.0, 95, (2, 2.0)),  # twice as many; for 20 s
        (129.9, 95, (2, 2.0)),
        (130.0, 95, (4, 2.0)),  # for 40 s
        (169.0, 10, (4, 2.0)),  # fewer would do now ...
        (171.0, 10, (4, 2.0)),  # ... but not for 20 s yet
        (180.0, 33, (4, 2.0)),  # ... and not any more
        (200.0, 10, (4, 2.0)),
        (219.9, 10, (4, 2.0)),
        (220.0, 10, (2, 2.0)),  # for 60 s, which is the longest
        (279.9, 0, (2, 2.0)),
        (280.0, 0, (1, 2.0)),  # for 60 s
        (340.0, 0, (1, 1.0)),  # for 60 s
        (699.0, 11, (1, 1.0)),  # a quiet time has not passed since: 60 s and 300 s
    ]  # fmt: skip
    for now, jobs, scale in story[:-1]:
        course = get_next_state(course, policy, snapshot(jobs, course.workers), now)
        assert course.scale == Scale(*scale), now
    assert course.events == 6
    early = get_next_state(course, policy, snapshot(11, 1), 699.0)
    assert (early.scale, early.events) == (Scale(1, 2.0), 7)
    late = get_next_state(course, policy, snapshot(11, 1), 700.0)
    assert (late.scale, late.events) == (Scale(1, 2.0), 1)
    assert get_cooldown_end(late, policy) == 710.0


def test_only_workers_of_crowded_queues_read_further_ahead() -> None:
    lines = tuple(
        TaskLoad(queue=queue, task=queue, kind="trio", waiting=jobs)
        for queue, jobs in (("mail", 99), ("calm", 3), ("slow", 0))
    )
    members = tuple(
        ClusterWorker(name=queue, queues=(queue,), max_slots={"trio": 10})
        for queue in ("mail", "calm", "slow")
    )
    course = get_next_state(
        AutoscaleState(workers=3), POLICY, ClusterSnapshot(task_loads=lines, workers=members), 5.0
    )
    assert course.crowded == ("mail",)
    assert course.get_prefetch(("mail", "slow")) == 2.0
    assert course.get_prefetch(("calm",)) == 1.0


def test_slots_are_raised_before_workers_and_go_back_after_them() -> None:
    policy = Autoscale(
        minimum=1,
        maximum=10,
        prefetch=2.0,
        concurrency=4.0,
        cooldown=1.0,
        longest_cooldown=1.0,
        shrink_after=5.0,
    )
    course, steps = AutoscaleState(workers=1), list[Scale]()
    jobs_at = {**dict.fromkeys(range(40), 95), **dict.fromkeys(range(40, 140), 2)}
    for second, jobs in jobs_at.items():
        slots = math.ceil(SLOTS * course.concurrency)
        after = get_next_state(course, policy, snapshot(jobs, course.workers, slots=slots), 1000.0 + second)
        steps += [after.scale] if after.scale != course.scale else []
        course = after
    assert steps == [
        Scale(1, 2.0),
        Scale(1, 2.0, 2.0),
        Scale(1, 2.0, 4.0),
        Scale(2, 2.0, 4.0),
        Scale(3, 2.0, 4.0),
        Scale(1, 2.0, 4.0),
        Scale(1, 2.0, 2.0),
        Scale(1, 2.0, 1.0),
        Scale(1, 1.0, 1.0),
    ]


def test_slots_are_not_raised_for_jobs_that_need_a_processor() -> None:
    policy = Autoscale(minimum=1, maximum=10, prefetch=1.0, concurrency=4.0)
    waiting = TaskLoad(queue="q", task="t", kind="thread", waiting=95)
    worker = ClusterWorker(name="w", queues=("q",), max_slots={"thread": 10, "trio": 10})
    seen = ClusterSnapshot(task_loads=(waiting,), workers=(worker,))
    assert get_next_state(AutoscaleState(workers=1), policy, seen, 100.0).scale == Scale(2)


def test_slots_are_never_raised_unless_that_was_set() -> None:
    policy = Autoscale(minimum=1, maximum=3, prefetch=1.0)
    course = AutoscaleState(workers=1)
    for second in range(100):
        course = get_next_state(course, policy, snapshot(95, course.workers), 1000.0 + second)
    assert course.scale == Scale(3)


def test_limits_that_have_changed_hold_at_once() -> None:
    course = AutoscaleState(workers=9, prefetch=4.0, events=6, at=100.0)
    policy = Autoscale(minimum=2, maximum=5, prefetch=2.0)
    assert get_next_state(course, policy, snapshot(50, 9), 101.0).scale == Scale(5, 2.0)
    assert get_changes(course, get_next_state(course, policy, snapshot(50, 9), 101.0)) == {
        "workers": (9, 5),
        "prefetch": (4.0, 2.0),
    }


def test_a_clock_that_was_put_back_lets_no_cool_down_last_for_ever() -> None:
    course = get_next_state(AutoscaleState(workers=1, events=3, at=1e9), POLICY, snapshot(99, 1), 50.0)
    assert course.scale == Scale(1, 1.0)
    assert get_next_state(course, POLICY, snapshot(99, 1), 54.0).scale == Scale(1, 2.0)


@pytest.mark.parametrize("scale", [(math.nan, 1.0), (1, math.inf), (1, math.nan)])
def test_a_strategy_that_gives_no_numbers_is_found_out(scale: Any) -> None:
    with pytest.raises(ValueError, match="give numbers"):
        get_next_state(
            AutoscaleState(workers=1), replace(POLICY, strategy=lambda _load: scale), snapshot(1, 1), 5.0
        )


# ---- whole stories


def test_a_square_wave_is_followed_without_thrashing() -> None:
    half = 600.0
    story = live(POLICY, lambda now: 95.0 if now % (2 * half) < half else 2.0, seconds=4 * 2 * half)
    for period in range(4):
        begins = period * 2 * half
        high, low = story.between(begins, begins + half), story.between(begins + half, begins + 2 * half)
        assert max(story.workers(begins, begins + half)) == POLICY.maximum
        assert min(story.workers(begins + half, begins + 2 * half)) == POLICY.minimum
        # Two steps of prefetch and four of workers, no more in one direction; what had piled up is done, so one step
        # may go back.
        assert len(high) <= 8
        assert len(low) <= 8
        assert story.turns(begins, begins + half) <= 1
        assert not any(sample.up for sample in low)


@pytest.mark.parametrize("half", [3.0, 10.0, 45.0, 120.0])
def test_a_wave_that_is_faster_than_the_cool_down_makes_few_steps(half: float) -> None:
    story = live(POLICY, lambda now: 95.0 if now % (2 * half) < half else 0.0, seconds=2 * HOUR)
    # Once all workers are there, at most one step in each of the longest cool-downs; far fewer, in truth.
    assert len(story.steps) <= 6 + 2 * HOUR / POLICY.longest_cooldown
    assert len(story.between(HOUR, 2 * HOUR)) <= HOUR / POLICY.longest_cooldown
    if half <= 15:  # less is never enough for as long as it would have to be
        assert story.between(HOUR, 2 * HOUR) == []


def test_a_ramp_is_climbed_and_descended_without_a_step_back() -> None:
    top = HOUR
    story = live(POLICY, lambda now: 95 * max(0.0, 1 - abs(now - top) / top), seconds=2.5 * HOUR)
    up, down = story.workers(0, top), story.workers(top + 300, 2.5 * HOUR)
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert max(up) == POLICY.maximum
    assert down[-1] == POLICY.minimum
    assert story.looks[-1][1].prefetch == 1.0
    assert max(jobs for at, _, jobs in story.looks if at > 120) < 30 * SLOTS


def test_one_spike_makes_one_step_and_its_undoing() -> None:
    story = live(POLICY, lambda _now: 2.0, seconds=HOUR, glitch=lambda now: 5000.0 if now == 600.0 else 0.0)
    assert [(step.before, step.after) for step in story.steps] == [
        (Scale(1), Scale(1, 2)),
        (Scale(1, 2), Scale(1)),
    ]
    assert story.steps[1].at <= 600 + POLICY.shrink_after + 3 * LOOK


@pytest.mark.parametrize("level", [3.0, 18.0, 47.0, 85.0])
@pytest.mark.parametrize("seed", range(2))
def test_noise_does_not_move_it_once_it_has_found_its_place(level: float, seed: int) -> None:
    chance = random.Random(seed)
    story = live(
        POLICY,
        lambda _now: level,
        glitch=lambda _now: level * chance.uniform(-0.1, 0.1),
        seconds=1.5 * HOUR,
    )
    assert story.turns(HOUR / 2, 1.5 * HOUR) == 0
    assert len(story.between(HOUR / 2, 1.5 * HOUR)) <= 1
    assert max(jobs for at, _, jobs in story.looks if at > HOUR / 2) <= 2 * level + SLOTS


# ---- what always holds

policies = st.builds(
    lambda minimum, more, **fields: Autoscale(minimum=minimum, maximum=minimum + more, **fields),
    minimum=st.integers(0, 5),
    more=st.integers(0, 15),
    prefetch=st.floats(1, 16),
    cooldown=st.floats(0.1, 20),
    longest_cooldown=st.floats(0.1, 300),
    quiet=st.floats(0, 600),
    shrink_after=st.floats(0, 120),
)
jobs_seen = st.lists(st.integers(0, 2000), min_size=1, max_size=30)


@settings(deadline=None)
@given(policies, jobs_seen, st.floats(0.5, 30), st.randoms(use_true_random=False))
def test_never_beyond_the_limits_and_never_two_steps_within_a_cool_down(
    policy: Autoscale, loads: list[int], look: float, chance: random.Random
) -> None:
    wild = replace(policy, strategy=lambda _load: Scale(chance.randint(-9, 99), chance.uniform(-5, 50)))
    for tried in (policy, wild):
        course, now, stepped, until = make_initial_state(tried, snapshot(0, 3)), 1000.0, -math.inf, -math.inf
        for jobs in loads:
            before, course = course, get_next_state(course, tried, snapshot(jobs, course.workers), now)
            assert tried.minimum <= course.workers <= tried.maximum
            assert 1 <= course.prefetch <= max(1.0, tried.prefetch)
            if get_changes(before, course):
                assert now >= until
                assert now - stepped >= min(tried.cooldown, tried.longest_cooldown) - 1e-6
                stepped, until = now, get_cooldown_end(course, tried)
                assert until - now <= max(tried.longest_cooldown, 0) + 1e-6
            now += look


@given(policies, st.integers(0, 60), st.floats(1, 16), st.integers(0, 3000), st.integers(0, 3000))
def test_more_jobs_never_want_less(
    policy: Autoscale, workers: int, prefetch: float, one: int, other: int
) -> None:
    now = Scale(min(max(workers, policy.minimum), policy.maximum), min(prefetch, policy.prefetch))

    def wanted(jobs: int) -> Scale:
        return prefetch_first(
            Load(
                snapshot=snapshot(jobs, now.workers),
                now=now,
                minimum=policy.minimum,
                maximum=policy.maximum,
                prefetch=policy.prefetch,
            )
        )

    fewer, more = wanted(min(one, other)), wanted(max(one, other))
    assert fewer.workers <= more.workers
    assert fewer.prefetch <= more.prefetch


@settings(deadline=None)
@given(policies, st.integers(1, 100))
def test_a_load_that_stays_is_settled_for(policy: Autoscale, jobs: int) -> None:
    """Whatever the load, as long as it stays the steps come to an end, in one direction."""
    course, now, ups = make_initial_state(policy, snapshot(0, 1)), 0.0, list[bool]()
    pause = max(policy.longest_cooldown, policy.shrink_after, policy.cooldown) + 1
    for _ in range(40):
        before, course = course, get_next_state(course, policy, snapshot(jobs, course.workers), now)
        if get_changes(before, course):
            ups.append(course.scale > before.scale)
        now += pause
    assert len(ups) < 30
    assert len(set(ups)) <= 1
    last = get_next_state(course, policy, snapshot(jobs, course.workers), now)
    assert last.scale == course.scale


# ---- the example


def test_the_example_is_ready_before_the_shop_opens() -> None:
    hour = 2
    strategy = Hours(3, 6, clock=lambda: datetime(2030, 1, 1, hour, tzinfo=UTC))
    policy = Autoscale(minimum=1, maximum=8, strategy=strategy)
    course = get_next_state(AutoscaleState(workers=1), policy, snapshot(3, 1), 0.0)
    assert course.workers == 1
    hour = 3
    course = get_next_state(course, policy, snapshot(3, 1), 10.0)
    assert course.workers == 4
    course = get_next_state(course, policy, snapshot(45, 4), 20.0)
    assert course.workers == 6
    hour = 6
    for now in (30.0, 65.0):
        course = get_next_state(course, policy, snapshot(3, 6), now)
    assert course.workers == 1
    said = get_autoscale(bakery.app.settings)
    assert said is not None
    assert isinstance(said.strategy, Hours)
