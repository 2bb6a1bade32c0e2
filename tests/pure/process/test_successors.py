"""Successors: which live process has taken the place of a lost one."""

import pytest

from celery5.protocol.observability.overview import LostWorker, describe_replaced, select_unreplaced
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


def test_lost_processes_that_are_back_and_held_no_jobs_are_counted_only() -> None:
    def lost(**parts: object) -> LostWorker:
        return LostWorker(**{"worker": "w:1", "at": 0.0, "health": "lost", **parts})  # type: ignore[arg-type]

    replaced = [lost(is_back=True), lost(is_back=True)]
    others = [lost(), lost(is_back=True, put_back=1), lost(is_back=True, dead=1), lost(is_back=True, held=1)]
    assert select_unreplaced([*replaced, *others]) == tuple(others)
    assert describe_replaced([*others, *replaced]) == "2 processes were lost in the last hour and replaced"
    assert describe_replaced(replaced[:1]) == "1 process was lost in the last hour and replaced"
    assert describe_replaced(others) == ""
