"""Standing: whether a process works, is silent, is lost or has ended in order."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.process.standing import ReportFlow, judge_standing, read_lost

USUAL: dict[str, Any] = {"lease_left": 9.0, "lease": 10.0, "reported": 4.0, "interval": 15.0}


@pytest.mark.parametrize(
    ("state", "condition", "text"),
    [
        ({}, "working", "working"),
        ({"reported": None}, "working", "working"),  # it has just begun
        ({"reported": 20.0}, "working", "working"),
        ({"lease_left": 3.0, "reported": 12.0}, "silent", "silent for 7 s"),
        ({"lease_left": 3.0, "reported": None}, "silent", "silent for 7 s"),
        ({"lease_left": 3.0, "reported": 1.0}, "working", "working"),  # its lease is shorter than here
        ({"lease_left": 25.0, "reported": 12.0}, "working", "working"),  # its lease is longer than here
        ({"lease_left": 1.0, "lease": 2.0}, "working", "working"),
        ({"silent_for": 7.0}, "silent", "silent for 4 s: its event loop is blocked, or cut off"),
        (
            {"silent_for": 95.0, "reported": None},
            "silent",
            "silent for 2 min: its event loop is blocked, or cut off",
        ),
        (
            {"silent_for": 4094.0, "reported": None},
            "silent",
            "silent for more than 68 min: its event loop is blocked, or cut off",
        ),
        ({"silent_for": 7.0, "reported": 1.0}, "working", "working"),
        ({"reported": 90.0}, "silent", "no report for 2 min"),
        ({"reported": 90.0, "interval": 0.0}, "working", "working"),  # it makes none
        ({"lease_left": 0.0}, "lost", "lost just now"),
        ({"lease_left": -200.0}, "lost", "lost 3 min ago"),
        ({"lease_left": -200.0, "has_left": True}, "ended", "ended in order"),
    ],
)
def test_standing_follows_from_lease_reports_and_goodbye(
    state: dict[str, Any], condition: str, text: str
) -> None:
    standing = judge_standing(**{**USUAL, **state})
    assert (standing.condition, standing.text) == (condition, text)
    assert standing.needs_attention == (condition in ("silent", "lost"))


@pytest.mark.parametrize(
    ("times", "reported", "silence"),
    [
        ([70, 74, 85, 89, 100], 70, 30),  # others have reported
        ([70, 74], 70, 0),  # nobody has, since Redis was away
        ([10, 24], 10, 90),  # nobody has for long
        ([70, 74, 98], 70, 2),  # Redis was away until the first report after it
        ([40, 44, 68, 83, 98], 40, 32),  # it was away long ago
        ([70, 74, 98], 98, 2),
        ([], 70, 0),
    ],
)
def test_outage_in_which_nobody_reports_is_no_silence_of_a_process(
    times: list[float], reported: float, silence: float
) -> None:
    at_once = ReportFlow().add(times, 15.0)
    assert at_once.measure_silence(reported, 100.0, 15.0) == silence
    flow = ReportFlow()
    for time in times:  # as one who looks all the time reads them
        flow = flow.add([time], 15.0)
    assert flow == at_once


@given(
    lease=st.floats(0.5, 60),
    left=st.floats(-100, 60),
    reported=st.none() | st.floats(0, 1000),
    silent_for=st.none() | st.floats(0, 5000),
    has_left=st.booleans(),
)
def test_a_process_with_a_lease_is_never_lost_and_one_without_always_is(
    lease: float, left: float, reported: float | None, silent_for: float | None, has_left: bool
) -> None:
    standing = judge_standing(
        lease_left=left,
        lease=lease,
        reported=reported,
        interval=15.0,
        silent_for=silent_for,
        has_left=has_left,
    )
    assert (standing.condition == "ended") == has_left
    assert (standing.condition == "lost") == (left <= 0 and not has_left)


@pytest.mark.parametrize("packed", [b"", b"{", b"[]", b'{"jobs": 7}', b'{"jobs": [{"id": 3}]}'])
def test_what_is_noted_of_a_lost_worker_may_be_anything(packed: bytes) -> None:
    record = read_lost("mail", "w", 5.0, packed)
    assert (record.worker, record.at, record.put_back, record.jobs) == ("w", 5.0, 0, ())
