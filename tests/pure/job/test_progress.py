"""Progress: what is accepted as a report, and what is read of one."""

from decimal import Decimal
from typing import Any

import pytest

from celery5 import progress
from celery5.protocol.job.progress import MAX_NOTE, Progress, make_progress_report, parse_progress


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "progress: done is -1: give a number from 0 to 1e+18"),
        ((float("nan"), 3), "progress: done is nan: give a number from 0 to 1e+18"),
        ((1, float("inf")), "progress: total is inf: give a number from 0 to 1e+18"),
        ((1, -2.5), "progress: total is -2.5: give a number from 0 to 1e+18"),
        ((10**400,), None),
        (("3",), "progress: done is '3': give a number"),
        ((True,), "progress: done is True: give a number"),
        ((Decimal(3),), "progress: done is Decimal('3'): give a number"),
        ((3, 4, None), "progress: note is None: give a text"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line_also_outside_of_a_job(
    arguments: tuple[Any, ...], message: str | None
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        progress(*arguments)
    assert "\n" not in str(caught.value)
    assert message in (None, str(caught.value))


def test_outside_of_a_job_it_does_nothing_else() -> None:
    progress(1)
    progress(0.5, 1, "half")


def test_a_long_note_is_cut() -> None:
    note = make_progress_report(1, None, "x" * 1000).note
    assert len(note) == MAX_NOTE
    assert note == "x" * (MAX_NOTE - 1) + "…"


@pytest.mark.parametrize(
    ("done", "total", "fraction"), [(1, 4, 0.25), (5, 4, 1.0), (0, 0, 1.0), (3, None, None), (0.5, 1, 0.5)]
)
def test_the_fraction_is_from_0_to_1_and_none_without_a_total(
    done: float, total: float | None, fraction: float | None
) -> None:
    assert Progress(done, total, "", 0.0, 1, "w").fraction == fraction


def test_what_another_program_has_written_is_no_progress() -> None:
    fields = {
        b"done": b"3",
        b"total": b"",
        b"note": b"\xff",
        b"at": b"1500",
        b"attempt": b"2",
        b"worker": b"w",
    }
    assert parse_progress(fields) == Progress(3, None, "\ufffd", 1.5, 2, "w")
    assert parse_progress({}) is None
    assert parse_progress({**fields, b"done": b"much"}) is None
    assert parse_progress({**fields, b"at": b"now"}) is None
