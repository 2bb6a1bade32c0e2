"""Wake-ups: of many workers a few answer what all hear, of few workers all do."""

import random
from collections import Counter

import pytest

from celery5.protocol.process.wake_ups import (
    ANSWERING,
    MAX_SPREAD,
    does_answer,
    get_heartbeat_interval,
    get_next_tick,
    get_spread,
)


@pytest.mark.parametrize("workers", [0, 1, 2, ANSWERING])
def test_each_of_a_few_workers_answers(workers: int) -> None:
    assert all(does_answer(workers, draw / 1000) for draw in range(1000))


@pytest.mark.parametrize("workers", [20, 100, 1000, 10_000])
def test_a_few_of_many_workers_answer_and_almost_never_none(workers: int) -> None:
    generator = random.Random(workers)
    answers = [sum(does_answer(workers, generator.random()) for _ in range(workers)) for _ in range(200)]
    assert ANSWERING * 0.8 < sum(answers) / len(answers) < ANSWERING * 1.2
    assert max(answers) < 4 * ANSWERING
    assert answers.count(0) <= 1


def test_many_workers_spread_what_all_of_them_do_over_a_second_at_most() -> None:
    assert get_spread(1, 0.5) < 0.001
    assert get_spread(500, 0.5) == 0.25
    assert {get_spread(workers, 1.0) for workers in (1000, 100_000)} == {MAX_SPREAD}


@pytest.mark.parametrize("lease", [1.0, 10.0, 60.0, 600.0])
def test_idle_workers_of_a_queue_send_enough_heartbeats_together(lease: float) -> None:
    for workers in range(1, 10_000):
        interval = get_heartbeat_interval(workers, lease=lease, is_idle=True)
        assert workers / interval >= min(workers * 3, 30) / lease * 0.999, "a lapsed lease is noticed as soon"
        assert interval >= get_heartbeat_interval(workers, lease=lease, is_idle=False) == lease / 3


def test_a_thousand_idle_workers_send_each_a_heartbeat_in_a_minute() -> None:
    assert get_heartbeat_interval(1000, lease=10.0, is_idle=True) == 60.0
    assert get_heartbeat_interval(1000, lease=240.0, is_idle=True) == 80.0, "a long lease needs no more"


@pytest.mark.parametrize("interval", [0.05, 15.0, 15.1, 45.0])
def test_a_timer_fires_within_its_interval_and_then_at_each_multiple(interval: float) -> None:
    now = 123_456.789
    for _ in range(1000):
        tick = get_next_tick(now, interval)
        assert now < tick <= now + interval * 1.00001
        now = tick
    assert now == pytest.approx(get_next_tick(123_456.789, interval) + 999 * interval, abs=0.001)


def test_timers_fire_together_whose_intervals_are_multiples_of_each_other() -> None:
    now = 123_456.789
    ticks = {round(now := get_next_tick(now, 15.0), 6) for _ in range(100)}
    for interval in (30.0, 45.0, 60.0):
        assert round(get_next_tick(123_456.789, interval), 6) in ticks


def test_timers_of_processes_that_were_forked_fire_at_different_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = list[float]()
    for pid in range(4_000_000, 4_000_100):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        ticks.append(get_next_tick(123_456.789, 15.0))
    assert max(Counter(int(tick) for tick in ticks).values()) < 30
