"""Tracebacks without source: whoever may not read the code of an application sees where it failed, and why."""

import traceback

from celery5.protocol.job.error_text import remove_source_lines


def fail(depth: int) -> None:
    if depth:
        fail(depth - 1)
    raise ValueError("no money\n    for this order")


def format_failure() -> str:
    """A traceback with a group, a cause, a note, a repeated line and a statement of several lines."""
    text = ""
    try:
        try:
            fail(20)
        except ValueError as error:
            error.add_note("ask the bank")
            raise ExceptionGroup(
                "several",
                [error, KeyError("other")],
            ) from error
    except ExceptionGroup as group:
        text = "".join(traceback.format_exception(group))
    return text


def test_source_lines_are_removed_and_places_and_messages_stay() -> None:
    whole = format_failure()
    shown = remove_source_lines(whole)
    for source in ("fail(depth - 1)", "raise ValueError", "raise ExceptionGroup"):
        assert source in whole
        assert source not in shown
    kept = (
        "no money",
        "    for this order",
        "ask the bank",
        "KeyError: 'other'",
        "several (2 sub-exceptions)",
    )
    for part in (*kept, "in fail", "in format_failure", "Previous line repeated"):
        assert part in shown
    places = [line for line in whole.splitlines() if 'File "' in line]
    assert [line for line in shown.splitlines() if 'File "' in line] == places


def test_what_is_no_traceback_stays_as_it_is() -> None:
    for text in ("", "ValueError: 1", "no\n  traceback\n    at all", 'a File "name" in a message'):
        assert remove_source_lines(text) == text
