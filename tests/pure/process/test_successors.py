"""Successors: which live process has taken the place of a lost one."""

from typing import Any

import pytest

from celery5.protocol.observability.overview import (
    LostWorker,
    are_deaths_open,
    describe_repaired,
    judge_repair,
    select_unrepaired,
)
from celery5.protocol.process.standing import has_successor


@pytest.mark.parametrize(
    ("name", "live", "expected"),
    [
        ("web-1", {"web-1"}, True),
        ("web-1", {"web-2"}, False),
        ("vm:24741", {"vm:30000"}, True),
        ("vm:24741", {"other:30000"}, False),
        ("vm:24741", {"vm:main"}, False),
        ("vm:24741", {"vm"}, False),
        ("vm:24741", set(), False),
    ],
)
def test_process_without_a_name_has_a_successor_on_its_host(
    name: str, live: set[str], expected: bool
) -> None:
    assert has_successor(name, live) is expected


def make_lost(**parts: Any) -> LostWorker:
    """A lost process."""
    return judge_repair(LostWorker(**{"worker": "w:1", "at": 0.0, "health": "lost", **parts}))


def test_loss_is_repaired_when_it_has_a_successor_and_no_job_is_held_or_dead() -> None:
    repaired = [make_lost(is_back=True), make_lost(is_back=True, put_back=3), make_lost(is_back=True, dead=1)]
    others = [
        make_lost(),
        make_lost(put_back=1),
        make_lost(is_back=True, dead=1, dead_left=1),
        make_lost(is_back=True, held=1),
    ]
    assert [process.is_repaired for process in (*repaired, *others)] == [True] * 3 + [False] * 4
    assert select_unrepaired([*repaired, *others]) == tuple(others)
    assert describe_repaired([*others, *repaired]) == "lost in the last hour: 3, repaired"
    assert describe_repaired(others) == ""


@pytest.mark.parametrize(
    ("lost", "is_open"),
    [
        ([make_lost(tasks=("pay",), is_back=True)], False),
        ([make_lost(tasks=("pay",))], True),
        ([make_lost(tasks=("pay",), is_back=True, held=1)], True),
        ([make_lost(tasks=("pay",), is_back=True), make_lost(tasks=("mail",))], False),
        ([make_lost(tasks=("pay",), is_back=True)] * 2, True),  # a pattern, however soon each is replaced
        ([make_lost(tasks=("pay",), is_back=True), make_lost(tasks=("pay",), is_back=True, at=-1)], False),
        ([], True),  # it is not known by name
    ],
)
def test_deaths_with_jobs_are_over_when_the_only_one_is_repaired(
    lost: list[LostWorker], is_open: bool
) -> None:
    assert are_deaths_open("pay", lost, 0.0) is is_open
