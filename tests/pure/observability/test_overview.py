"""The overview judges a queue by its flow, and says since when a task fails."""

from collections.abc import Sequence
from typing import Any

import pytest

from celery5.protocol.observability.overview import (
    TaskMinute,
    fails_now,
    find_onset,
    format_rate,
    group_starts,
    judge_queue,
    judge_worker,
)
from celery5.protocol.observability.queue_flow import QueueFlow
from celery5.protocol.process.standing import ProcessStanding

NOON = 1_800_000_000 // 3600 * 3600


def verdict(flow: QueueFlow | None = None, **state: Any) -> str:
    """What is said of a queue with 100 jobs and a worker."""
    usual: dict[str, Any] = {"backlog": 100, "upcoming": 0, "oldest": 5.0, "workers": 1, "is_paused": False}
    return judge_queue(**{**usual, **state}, flow=flow).text


@pytest.mark.parametrize("backlog", [0, 1])
def test_a_paused_queue_needs_a_person_while_jobs_wait(backlog: int) -> None:
    judged = judge_queue(backlog=backlog, upcoming=3, oldest=None, workers=1, is_paused=True, flow=None)
    assert (judged.text, judged.needs_attention) == ("paused", backlog > 0)


@pytest.mark.parametrize(
    ("flow", "state", "text"),
    [
        (QueueFlow(10, 35, -25), {"backlog": 6000}, "empties in 4 min"),
        (QueueFlow(52, 40, 12), {"backlog": 1000}, "grows by 12/s"),
        (QueueFlow(52, 40, 12), {"backlog": 300}, "steady"),  # fewer than end in ten seconds
        (QueueFlow(40, 40, 0.1), {}, "steady"),
        (QueueFlow(5, 5, 0), {"backlog": 0}, "steady"),
        (None, {"backlog": 0, "workers": 0}, "empty"),
        (None, {"workers": 0}, "nobody works on it"),
        (None, {"workers": 0, "backlog": 0, "upcoming": 3}, "nobody works on it"),
        (None, {"workers": 0, "is_paused": True}, "paused"),
        (QueueFlow(0, 0, 0), {"oldest": 600.0}, "nothing ends, 10 min"),
        # Whatever the window of the rates says, the last attempt has just ended.
        (QueueFlow(0, 0, 0), {"oldest": 600.0, "idle": 0.5}, "steady"),
        (None, {"oldest": 600.0, "idle": 0.5}, "not measured yet"),
        (QueueFlow(90, 100, -10), {"oldest": 600.0, "idle": 0.5, "backlog": 5000}, "empties in 8 min"),
        # And it has drained at speed until then.
        (QueueFlow(0, 3700, -3700), {"oldest": 600.0, "idle": 14.0, "backlog": 50_000}, "nothing ends, 14 s"),
        (QueueFlow(0, 3700, -3700), {"oldest": 600.0, "idle": 600.0}, "nothing ends, 10 min"),
        (None, {"oldest": 600.0, "idle": 1080.0}, "nothing ends, 10 min"),
        # Jobs of ten minutes each: one has ended lately, and none is missing.
        (QueueFlow(0, 1 / 60, 0), {"oldest": 600.0, "idle": 30.0}, "steady"),
        # Nothing has ended for long, since there was nothing to do.
        (QueueFlow(0, 0, 0), {"oldest": 5.0, "idle": 3600.0}, "steady"),
        (None, {}, "not measured yet"),
        (
            QueueFlow(4, 3, 1),
            {"backlog": 4000, "held_by": "rate 3/s of push"},
            "grows by 1.0/s: rate 3/s of push",
        ),
        (
            QueueFlow(0, 0, 0),
            {"oldest": 600.0, "held_by": "push is suspended"},
            "nothing ends, 10 min: push is suspended",
        ),
        (QueueFlow(3, 3, 0), {"backlog": 4000, "held_by": "rate 3/s of push"}, "steady: rate 3/s of push"),
    ],
)
def test_a_queue_is_judged_in_words(flow: QueueFlow | None, state: dict[str, Any], text: str) -> None:
    assert verdict(flow, **state) == text


@pytest.mark.parametrize(
    ("failures", "since"),
    [
        ([0, 0, 0], None),
        ([0, 0, 9, 10], 2),
        ([9, 0, 9, 9], 0),
        ([9, 0, 0, 0, 9], 4),
        ([9, 0, 0, 0], None),
        ([0, 0, 4, 0], None),  # fewer than one of twenty
    ],
)
def test_a_task_fails_since_the_first_minute_of_failures_that_have_not_healed(
    failures: Sequence[int], since: int | None
) -> None:
    begin = NOON - 60 * len(failures)
    onset = find_onset(
        [TaskMinute(begin + 60 * number, 100, failed) for number, failed in enumerate(failures)]
    )
    found = onset.at if onset is not None and fails_now(onset, NOON) else None
    assert found == (None if since is None else begin + 60 * since)


def test_a_task_that_has_not_failed_lately_does_not_fail() -> None:
    assert not fails_now(find_onset([TaskMinute(NOON - 3600, 10, 10)]), NOON)
    onset = find_onset([TaskMinute(NOON - 300, 10, 10), TaskMinute(NOON - 60, 0, 0)])
    assert fails_now(onset, NOON)
    assert onset == (NOON - 300, NOON - 300, False)


def test_it_is_certain_since_when_a_task_fails_once_it_did_well_before() -> None:
    well = [TaskMinute(NOON - 600 + 60 * number, 10, 0) for number in range(3)]
    assert find_onset([*well, TaskMinute(NOON - 60, 10, 10)]) == (NOON - 60, NOON - 60, True)
    assert find_onset([*well[1:], TaskMinute(NOON - 60, 10, 10)]) == (NOON - 60, NOON - 60, False)
    hour = TaskMinute(NOON - 7200, 10, 0, 3600)
    assert find_onset([hour, TaskMinute(NOON - 60, 10, 10)]) == (NOON - 60, NOON - 60, True)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, "ok"),
        ({"has_reported": False}, "no report yet"),
        ({"standing": ProcessStanding("silent", "silent for 1 min 30 s", 90.0)}, "silent for 1 min 30 s"),
        ({"is_ready": False}, "not ready"),
        ({"breakers": ("shop.pay",)}, "breaker open: shop.pay"),
        ({"lag": 2.0}, "loop late by 2 s"),
    ],
)
def test_the_health_of_a_worker_is_one_sentence(state: dict[str, Any], text: str) -> None:
    usual: dict[str, Any] = {
        "standing": ProcessStanding("working", "working"),
        "is_ready": True,
        "lag": 0.0,
        "breakers": (),
    }
    assert judge_worker(**{**usual, **state}) == text


def test_processes_that_start_after_each_other_are_one_deployment() -> None:
    assert [
        (start.at, start.processes) for start in group_starts([("b", 500), ("a", 10), ("a", 20), ("a", 100)])
    ] == [(500, 1), (10, 3)]


@pytest.mark.parametrize(
    ("processes", "deployed"),
    [
        # One of three has crashed and started again.
        ([("a", 10), ("a", 20), ("a", 5000)], [(10, 2)]),
        # Other code has come since, and one of its processes has crashed.
        ([("a", 10), ("b", 2000), ("b", 2050), ("b", 9000)], [(2000, 2), (10, 1)]),
        # Workers and Routers of one deployment, and a Router that has crashed.
        ([("worker a", 10), ("router a", 60), ("router a", 7000)], [(10, 2)]),
        ([], []),
    ],
)
def test_a_process_that_starts_again_with_the_same_code_is_no_deployment(
    processes: list[tuple[str, float]], deployed: list[tuple[float, int]]
) -> None:
    assert [(start.at, start.processes) for start in group_starts(processes)] == deployed


def test_rates_are_short() -> None:
    assert [format_rate(rate) for rate in (1234, 12.4, 0.5, 0.05)] == ["1,234/s", "12/s", "0.5/s", "3/min"]
