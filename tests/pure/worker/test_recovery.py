"""Recovery: what a worker may conclude from the answers to its own heartbeats."""

import random

import pytest

from celery5.protocol.process.liveness import LONGEST_WAIT, OUTAGE_FRACTION, RECONNECT_TIME, Heartbeats

BEATS = 3
"""Heartbeats in a lease."""


def answered(beats: Heartbeats, *times: float) -> Heartbeats:
    """Return what is known after answers at these times, by both clocks."""
    for now in times:
        beats = beats.with_answer(now, at=now)
    return beats


def test_a_worker_that_begins_judges_nobody_before_others_can_have_been_heard() -> None:
    beats = Heartbeats(lease=3.0)
    assert not beats.may_judge(0.0)
    assert not answered(beats, 0.0).may_judge(0.0)
    assert not answered(beats, 0.0, 1.0, 2.0).may_judge(2.0)
    assert answered(beats, 0.0, 1.0, 2.0, 3.0).may_judge(3.0)


def test_while_no_answer_comes_nobody_is_judged() -> None:
    beats = answered(Heartbeats(lease=3.0), *range(10))
    assert beats.may_judge(9.0 + 3.0 * OUTAGE_FRACTION - 0.001)
    assert not beats.may_judge(9.0 + 3.0 * OUTAGE_FRACTION + 0.001)


def test_time_without_answers_is_no_time_in_which_others_were_heard() -> None:
    """Up for 2.6 s, frozen for 4 s, again and again: the wait of 3 s never comes to its end in a freeze."""
    beats = Heartbeats(lease=3.0)
    for thaw in (0.0, 6.6, 13.2):
        for now in (thaw, thaw + 1.0, thaw + 2.0, thaw + 2.5):
            beats = answered(beats, now)
            assert not beats.may_judge(now)
        assert not beats.may_judge(thaw + 3.0)
        assert not beats.may_judge(thaw + 6.5)


def test_a_jump_of_the_clock_of_redis_is_an_outage() -> None:
    beats = answered(Heartbeats(lease=3.0), *range(10))
    jumped = beats.with_answer(10.0, at=3610.0)
    assert not jumped.may_judge(10.0)
    for now in (11.0, 12.0, 13.0):
        jumped = jumped.with_answer(now, at=3600.0 + now)
    assert jumped.may_judge(13.0)
    back = jumped.with_answer(14.0, at=14.0)  # leases last for longer, so nobody lapses by that
    assert back.may_judge(14.0)


@pytest.mark.parametrize("lease", [0.2, 1.0, 3.0, 10.0, 600.0])
def test_recovery_waits_for_others_for_a_bounded_time(
    lease: float,
) -> None:
    assert RECONNECT_TIME <= Heartbeats(lease=lease).wait <= LONGEST_WAIT


@pytest.mark.parametrize("lease", [0.6, 3.0, 10.0])
def test_however_redis_flaps_no_healthy_worker_counts_as_dead(lease: float) -> None:
    """Redis is frozen at random. Each worker sends a heartbeat a third of a lease after the last answer; what was sent
    to a frozen server is answered when it goes on, in any order. Nobody dies, so nobody may be judged."""
    lapses = 0
    for seed in range(150):
        chance = random.Random(seed)
        due = [chance.uniform(0, lease / BEATS) for _ in range(4)]
        ends = [moment + lease for moment in due]
        known = [Heartbeats(lease=lease) for _ in due]
        frozen_at, thaw = chance.uniform(0, 2 * lease), 0.0
        for _ in range(200):
            now = max(min(due), thaw)
            if now >= frozen_at:
                thaw = frozen_at + chance.uniform(0, 2.2 * lease)
                frozen_at = thaw + chance.uniform(0, 2 * lease)
                continue
            who = chance.choice([n for n, moment in enumerate(due) if moment <= now])
            ends[who] = now + lease
            known[who] = known[who].with_answer(now, at=now)
            due[who] = now + lease / BEATS
            if min(ends) <= now:
                lapses += 1
                assert not known[who].may_judge(now), f"seed {seed}: a healthy worker was judged at {now}"
    assert lapses > 100, "leases did lapse, and nobody had died"


def test_a_worker_that_dies_is_judged_in_the_end_however_long_redis_was_away() -> None:
    beats = answered(Heartbeats(lease=10.0), 0.0, 3.3, 6.6, 1000.0, 1003.3, 1006.6)
    assert beats.may_judge(1006.6)
