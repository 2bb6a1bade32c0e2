"""A queue's flow is the difference of two looks at its counters, over the true time between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.observability.overview import judge_queue
from celery5.protocol.observability.queue_flow import (
    LONGEST_WINDOW,
    MAX_LOOKS,
    FlowReading,
    QueueFlow,
    QueueLook,
    add_look,
    measure_flow,
    pack_looks,
    read_flow,
)

NOON = 1_800_000_000.0


def look(at: float, ended: int = 0, backlog: int = 0, running: int = 0) -> QueueLook:
    """A look at a queue, so many seconds after noon."""
    return QueueLook(NOON + at, ended, backlog, running)


def test_what_comes_in_is_what_ends_and_by_how_much_the_jobs_grow() -> None:
    assert measure_flow(look(60, 600, 120), [look(0)]) == QueueFlow(12.0, 10.0, 2.0, 60.0)
    # Jobs that workers have taken have come, too.
    assert measure_flow(look(10, 0, 0, 50), [look(0)]) == QueueFlow(5.0, 0.0, 0.0, 10.0)


def test_a_queue_that_is_purged_has_no_negative_inflow() -> None:
    assert measure_flow(look(30, 0, 0), [look(0, 0, 3000)]) == QueueFlow(0.0, 0.0, -100.0, 30.0)


def test_the_window_is_the_true_time_between_the_looks_however_odd() -> None:
    flow = measure_flow(look(100, 1000), [look(-500, 0), look(37, 370), look(99.9, 999)])
    assert flow == QueueFlow(10.0, 10.0, 0.0, 63.0)


@pytest.mark.parametrize(
    "before",
    [
        [],
        [look(-LONGEST_WINDOW - 1)],  # it says nothing of now
        [look(-0.2)],
        [look(5)],  # the clock was set back
        [look(-30, 2000)],  # the counter has begun again
    ],
)
def test_without_a_look_that_can_be_compared_there_is_no_flow(before: list[QueueLook]) -> None:
    assert measure_flow(look(0, 1000), before) is None


def test_the_time_since_which_attempts_are_counted_is_a_look() -> None:
    assert measure_flow(look(10, 40), [], NOON) == QueueFlow(4.0, 4.0, 0.0, 10.0)
    assert measure_flow(look(10, 40, 5), [look(8, 30, 3)], NOON) == QueueFlow(4.2, 4.0, 0.2, 10.0)
    assert measure_flow(look(0.1, 40), [], NOON) == QueueFlow(40.0, 40.0, 0.0, 1.0)
    assert measure_flow(look(3600, 40), [], NOON) is None


def test_where_nobody_counts_what_ends_no_rate_is_known() -> None:
    assert FlowReading(look(60), looks=(look(0),)).flow is None
    assert FlowReading(look(60), looks=(look(0),), counted_since=NOON - 900).flow is not None


def test_looks_are_kept_one_interval_apart_and_no_more_than_a_few() -> None:
    looks: tuple[QueueLook, ...] = ()
    for second in range(400):
        looks = add_look(FlowReading(look(second), looks=looks), 10.0) or looks
    assert [past.at - NOON for past in looks] == list(range(320, 400, 10))
    assert len(looks) == MAX_LOOKS


def test_a_look_survives_redis_and_what_cannot_be_read_counts_as_missing() -> None:
    looks = (look(0, 5, 6, 7),)
    reading = read_flow(1000, (12, 900, 100), pack_looks(looks), backlog=3, running=4)
    assert reading == FlowReading(QueueLook(1.0, 12, 3, 4), 0.9, looks, 0.1)
    for packed in (
        *(b"", b"{", b"[[1]]", b"7", b"\xff", b"[" * 5000, b"[[1e18,1,1,1]]", b"[[1e400,1,1,1]]"),
        *(b"[[0.5,1,1,%d]]" % number for number in (2**53, -(2**70), 10**400)),
        pack_looks(looks * 1000),
    ):
        assert read_flow(1000, (0, 0, 0), packed, backlog=3, running=4) == FlowReading(
            QueueLook(1.0, 0, 3, 4)
        )


PACES = st.lists(st.tuples(st.sampled_from([0, 0, 1, 50, 4000]), st.integers(1, 12)), min_size=1, max_size=8)
"""Attempts that end per second, and for how many looks."""


@given(PACES, st.sampled_from([1.0, 10.0, 15.0]))
def test_a_verdict_is_never_older_than_one_look_whatever_the_pace_was(
    paces: list[tuple[int, int]], interval: float
) -> None:
    at, ended, ended_at, looks = 0.0, 0, None, tuple[QueueLook, ...]()
    for pace, count in paces:
        for _ in range(count):
            at += interval
            ended += int(pace * interval)
            ended_at = NOON + at if pace else ended_at
            reading = FlowReading(look(at, ended, 1_000_000), ended_at, looks, NOON - 900)
            looks = add_look(reading, interval) or looks
            verdict = judge_queue(
                backlog=1_000_000, upcoming=0, oldest=at, workers=1, is_paused=False,
                flow=reading.flow, idle=reading.idle,
            )  # fmt: skip
            if pace:
                assert verdict.condition != "stalled"
            else:
                # What has drained at speed is not said to drain when it has stood still for longer than a look.
                idle = at if reading.idle is None else reading.idle
                fast = reading.flow is not None and reading.flow.outgoing > 1
                assert verdict.condition == "stalled" or not (idle > 60 or (fast and idle > 10))
