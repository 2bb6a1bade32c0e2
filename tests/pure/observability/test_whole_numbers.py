"""Whole numbers in Redis: other programs write there, too, so a text may be no number, or be very long."""

import pytest

from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.workflows.status import make_status

NONE = ["", "x", "-1", "1.5", " 1", "1_0", "\u00b2", "\u0664", "9" * 19, "9" * 5000]
"""Texts that are no whole number here. Some are digits to `isdigit`, and `int` fails at the last one."""


@pytest.mark.parametrize("text", NONE)
def test_any_other_text_is_the_default(text: str) -> None:
    assert read_whole(text) == 0
    assert read_whole(text, -1) == -1
    if text.isascii():
        assert read_whole(text.encode(), -1) == -1


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), ("9" * 18, 10**18 - 1)])
def test_a_whole_number_is_read(text: str, number: int) -> None:
    assert read_whole(text) == read_whole(text.encode()) == number


def test_a_run_whose_time_is_no_number_has_a_status() -> None:
    status = make_status("run", "default", {"state": b"RUNNING", "created": b"9" * 400, "until": b"-5"})
    assert (status.created, status.deadline) == (0.0, -0.005)
