"""Stacks: what is read of a job that no worker runs, and how an answer is kept small."""

from pathlib import Path

import msgspec

from celery5.runners.running_job import RunningJob
from celery5.runners.stacks import (
    MAX_FRAMES,
    MAX_SIZE,
    MAX_SOURCE,
    ReadStack,
    StackPlace,
    format_stacks,
    read_job_stacks,
)


def test_the_stack_of_a_boxed_job_is_said_to_be_unreadable_in_one_line() -> None:
    (stack,) = read_job_stacks("1", "shrink", "boxed", RunningJob())
    (shown,) = format_stacks([stack]).stacks
    assert shown.lines == []
    assert shown.note == "it runs in its own process, a box: its stack cannot be read from here"


def test_a_job_whose_function_does_not_run_is_said_to_be_about_to() -> None:
    (stack,) = read_job_stacks("1", "shrink", "thread", RunningJob())
    assert "its function does not run at this moment" in stack.note


def test_the_outermost_frames_are_cut_first_then_whole_stacks() -> None:
    places = tuple(StackPlace("/srv/" + "x" * 300, number, f"step_{number}") for number in range(500))
    few = format_stacks([ReadStack("1", "t", "trio", places)])
    assert len(few.stacks[0].lines) == MAX_FRAMES
    assert few.stacks[0].lines[-1].endswith("in step_499")
    assert few.stacks[0].note == "the outermost 400 of 500 lines of the stack are left out"
    many = format_stacks([ReadStack(str(number), "t", "trio", places) for number in range(200)], left_out=7)
    assert MAX_SIZE / 2 < len(msgspec.json.encode(many)) <= MAX_SIZE
    assert many.note == f"{207 - len(many.stacks)} more stacks do not fit: ask for those of one job"
    assert many.stacks[0].lines == [f'File "{places[-1].file}", line 499, in step_499']


def test_a_function_that_calls_itself_is_shown_shortly() -> None:
    places = (StackPlace("a.py", 1, "first"), *(StackPlace("a.py", 2, "again") for _ in range(900)))
    (stack,) = format_stacks([ReadStack("1", "t", "thread", places)]).stacks
    assert stack.lines[-1] == "[Previous line repeated 897 more times]"
    assert stack.note == ""


def test_a_long_line_of_source_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    file.write_text("x = '" + "y" * 5000 + "'\n")
    (stack,) = format_stacks([ReadStack("1", "t", "thread", (StackPlace(str(file), 1, "f"),))]).stacks
    assert len(stack.lines[1].strip()) == MAX_SOURCE
